//! Tags on memory: a tag shows whether the pages at an address are still those that it was put on.
//!
//! A NIC keeps using the pages that it was given at registration. A cached registration must not be
//! used after its memory was unmapped and other memory was mapped in its place. A tag detects that.
//!
//! - *Private anonymous memory* gets a name (`PR_SET_VMA_ANON_NAME`), which disappears with the
//!   mapping. Memory that is mapped later has no name, even if it merges with a named neighbour.
//! - *Shared memory* (memfd, tmpfs, shared anonymous, huge pages) is identified by its file and
//!   offset. A new mapping of the same offset has the same pages.
//! - All other memory cannot be tagged: private mappings of files and devices; files on disks,
//!   whose inode numbers are reused; `brk` heap and stack, whose names the kernel does not show;
//!   and all anonymous memory if the kernel cannot name it (before 5.17, or built without
//!   `CONFIG_ANON_VMA_NAME`, as Debian's are).
//!
//! A name contains a number that is unique in the process. The last page of a named range has its
//! own name. The reason is `mremap` (as in `realloc`): a mapping that is shortened and grown again
//! grows with the name that its end has by then, which is not the last page's name. The name of
//! every other page contains the address of the last page, and is valid only while that page is
//! there.
//!
//! Tags may overlap: memory that has a valid name keeps it, and the new tag adopts that name.
//! Memory is named twice only if it was mapped twice. Names are never removed, because other tags
//! may need them. Each name splits a mapping, and a process has at most 65530 mappings, so the
//! number of named tags is limited to [`MAX_NAMED`].
//!
//! A check costs one query for each mapping of the range, and two for named memory. A query takes
//! 0.7 µs by `PROCMAP_QUERY`. By the text of `/proc/self/maps` it takes 25 µs in a program with 40
//! mappings, and longer with more.
//!
//! Tags do not detect these changes:
//!
//! - Pages that are replaced while the mapping stays: `MADV_DONTNEED` (which allocators use for
//!   freed memory), `MADV_FREE`, `MREMAP_DONTUNMAP`, a hole punched into a shared file, a file
//!   shortened and extended again.
//! - A hole *inside* the range that is filled by growing the part below it, or by moving another
//!   part of the same range there.
//!
//! Put a tag *before* the registration. Then a later check detects a change between the two.

use std::ffi::CString;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::maps::{Maps, MapsEntry};
use super::shm::page_size;

/// Maximum number of tags with their own names at one time. Each adds two mappings, so this uses
/// half of a process's mappings.
const MAX_NAMED: usize = 1 << 14;

/// The identity of a range of memory when the tag was put.
#[derive(Debug)]
pub(crate) struct Tag {
    /// In ascending order of address, without gaps.
    segments: Vec<Segment>,
    /// Whether this tag counts against [`MAX_NAMED`].
    named: bool,
}

static NAMED: AtomicUsize = AtomicUsize::new(0);

impl Tag {
    /// Tags the pages that contain the `len` bytes at `addr`. `None` if they cannot be tagged or
    /// are not all mapped.
    ///
    /// The memory is not accessed, and may be in use.
    pub(crate) fn put(maps: &Maps, addr: u64, len: u64) -> Option<Self> {
        let range = pages(addr, len)?;
        let mut parts: Vec<VmaPart> = Vec::new();
        let tagged = maps.walk(range.clone(), |mapping| {
            let range = mapping.start.max(range.start)..mapping.end.min(range.end);
            match parts_of(mapping, range) {
                Some(found) => parts.extend(found.into_iter().flatten()),
                None => return ControlFlow::Break(()),
            }
            ControlFlow::Continue(())
        });
        if !tagged.ok()? {
            return None;
        }
        let mut tag = Self { segments: Vec::new(), named: false };
        let mut untagged: Option<Range<u64>> = None;
        for part in parts {
            let Range { start, end } = part.range;
            match part.mark.filter(|mark| mark.counts(maps)) {
                Some(mark) => {
                    tag.name(untagged.take())?;
                    tag.push(Segment { start, end, mark });
                }
                None => untagged = Some(untagged.map_or(start, |before| before.start)..end),
            }
        }
        tag.name(untagged)?;
        // Check the new tag: the kernel may accept a name and not show it.
        tag.is_still_there(maps, addr, len).then_some(tag)
    }

    /// Whether the `len` bytes at `addr`, which lie in the tag's range, still have the same pages.
    /// Also false if that is unknown, as in a forked child.
    pub(crate) fn is_still_there(&self, maps: &Maps, addr: u64, len: u64) -> bool {
        let Some(range) = pages(addr, len) else { return false };
        let mut at = range.start;
        for segment in self.segments.iter().filter(|segment| segment.end > range.start) {
            if at >= range.end {
                break;
            }
            let end = segment.end.min(range.end);
            let mark = &segment.mark;
            // If the range contains the name's last page, the loop checks that page as a segment of
            // its own.
            let counts = mark.tail().is_some_and(|tail| tail < range.end) || mark.counts(maps);
            if segment.start > at || !mark.is_on(maps, at..end) || !counts {
                return false;
            }
            at = end;
        }
        at >= range.end
    }

    /// Gives a name to a range of anonymous memory.
    fn name(&mut self, range: Option<Range<u64>>) -> Option<()> {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let Some(Range { start, end }) = range else { return Some(()) };
        if !self.named {
            self.named = true;
            if NAMED.fetch_add(1, Ordering::Relaxed) >= MAX_NAMED {
                return None;
            }
        }
        // The number is unique, so only this call sets a name that contains it.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let tail = end - page_size() as u64;
        let body = Mark::Name(Name { id, tail, is_tail: false });
        let last = Mark::Name(Name { id, tail, is_tail: true });
        for (start, end, mark) in [(start, tail, body), (tail, end, last)] {
            if start < end {
                let Mark::Name(name) = &mark else { return None };
                name.put_on(start..end).ok()?;
                self.push(Segment { start, end, mark });
            }
        }
        Some(())
    }

    fn push(&mut self, segment: Segment) {
        match self.segments.last_mut() {
            Some(last) if last.mark == segment.mark => last.end = segment.end,
            _ => self.segments.push(segment),
        }
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        if self.named {
            NAMED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A range in which all pages have the same mark.
#[derive(Debug)]
struct Segment {
    start: u64,
    end: u64,
    mark: Mark,
}

/// A range that may be tagged, with its current mark.
struct VmaPart {
    range: Range<u64>,
    /// `None` if the memory is anonymous and has no valid name from a tag.
    mark: Option<Mark>,
}

/// The property that identifies memory.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Mark {
    Name(Name),
    File {
        device: (u32, u32),
        inode: u64,
        shared: bool,
        /// The address at which the file's first byte would be mapped.
        base: u64,
    },
}

impl Mark {
    /// Whether every page of a range has this mark.
    fn is_on(&self, maps: &Maps, range: Range<u64>) -> bool {
        let all = maps.walk(range, |mapping| match self.is_of(mapping) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        });
        all.unwrap_or(false)
    }

    fn is_of(&self, mapping: &MapsEntry<'_>) -> bool {
        match self {
            Self::Name(name) => Name::parse(mapping.name).as_ref() == Some(name),
            Self::File { .. } => file_of(mapping).as_ref() == Some(self),
        }
    }

    /// The last page of the named range.
    fn tail(&self) -> Option<u64> {
        match self {
            Self::Name(name) => Some(name.tail),
            Self::File { .. } => None,
        }
    }

    /// Whether the mark is still valid. A name is valid while the last page of its range is there.
    fn counts(&self, maps: &Maps) -> bool {
        let Self::Name(Name { id, tail, is_tail: false }) = *self else { return true };
        let last = Self::Name(Name { id, tail, is_tail: true });
        last.is_on(maps, tail..tail + page_size() as u64)
    }
}

/// A name that a tag gives to anonymous memory.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Name {
    id: u64,
    /// The last page of the named range.
    tail: u64,
    is_tail: bool,
}

impl Name {
    /// Parses a mapping's name as the kernel shows it, such as `[anon:peerway-2a-7f0012345000]`.
    fn parse(shown: &str) -> Option<Self> {
        let text = shown.strip_prefix("[anon:peerway-")?.strip_suffix(']')?;
        let (text, is_tail) = match text.strip_suffix("-end") {
            Some(text) => (text, true),
            None => (text, false),
        };
        let (id, tail) = text.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        Some(Self { id: hex(id)?, tail: hex(tail)?, is_tail })
    }

    fn put_on(&self, range: Range<u64>) -> io::Result<()> {
        let end = if self.is_tail { "-end" } else { "" };
        let name = CString::new(format!("peerway-{:x}-{:x}{end}", self.id, self.tail))?;
        let len = range.end - range.start;
        // SAFETY: `prctl` names mappings and accesses no memory of theirs. The kernel copies the
        // string.
        let returned = unsafe {
            libc::prctl(
                libc::PR_SET_VMA,
                libc::PR_SET_VMA_ANON_NAME as libc::c_ulong,
                range.start as libc::c_ulong,
                len as libc::c_ulong,
                name.as_ptr(),
            )
        };
        if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// The current marks of a part of a mapping: one part, or two if it begins with the last page of a
/// named range. `None` if the mapping cannot be tagged.
fn parts_of(mapping: &MapsEntry<'_>, range: Range<u64>) -> Option<[Option<VmaPart>; 2]> {
    if mapping.inode != 0 {
        return Some([Some(VmaPart { range, mark: Some(file_of(mapping)?) }), None]);
    }
    if !(mapping.name.is_empty() || mapping.name.starts_with("[anon:")) {
        return None;
    }
    let Some(name) = Name::parse(mapping.name) else {
        return Some([Some(VmaPart { range, mark: None }), None]);
    };
    if !name.is_tail {
        // Memory beyond the last page was moved here from another range, so its name is not valid.
        let mark = (range.end <= name.tail).then_some(Mark::Name(name));
        return Some([Some(VmaPart { range, mark }), None]);
    }
    // If a mapping that ended with the named range has grown, the added pages have the last page's
    // name too.
    let end = name.tail + page_size() as u64;
    if range.start != name.tail {
        return Some([Some(VmaPart { range, mark: None }), None]);
    }
    let grown = (end < range.end).then_some(VmaPart { range: end..range.end, mark: None });
    let last = VmaPart { range: range.start..end.min(range.end), mark: Some(Mark::Name(name)) };
    Some([Some(last), grown])
}

/// The file behind a mapping, if the file and offset alone identify its pages.
fn file_of(mapping: &MapsEntry<'_>) -> Option<Mark> {
    let MapsEntry { start, offset, device, inode, shared, name, .. } = *mapping;
    // For anonymous huge pages, the kernel makes a file for one mapping and never uses it again.
    let own_pages = name.starts_with("/anon_hugepage");
    // A private mapping's written pages are not in the file.
    if inode == 0 || !(shared || own_pages) {
        return None;
    }
    // Accept only file systems without a disk, which give every file a new inode number.
    if device.0 != 0 {
        return None;
    }
    // Mappings of a device differ by more than their offset. Below /dev, only these are memory.
    let memory = ["/dev/shm/", "/dev/zero", "/dev/hugepages"];
    if name.starts_with("/dev/") && !memory.iter().any(|dir| name.starts_with(dir)) {
        return None;
    }
    Some(Mark::File { device, inode, shared, base: start.wrapping_sub(offset) })
}

/// The pages that contain the `len` bytes at `addr`. `None` if `len` is zero or the addresses
/// overflow.
fn pages(addr: u64, len: u64) -> Option<Range<u64>> {
    let page = page_size() as u64;
    let end = addr.checked_add(len).filter(|_| len > 0)?.checked_next_multiple_of(page)?;
    Some(addr / page * page..end)
}

#[cfg(test)]
mod tests;
