//! Tags on memory: is what lies at an address still what lay there when the tag was put?
//!
//! A NIC goes on using the pages that it was given at registration, so a registration that is kept for
//! later must not be used after its memory was unmapped and other memory mapped in its place. A tag tells.
//!
//! - *Private anonymous memory* is given a name (`PR_SET_VMA_ANON_NAME`), which goes away with the mapping.
//!   Memory that is mapped later has no name, even where it joins a named neighbour.
//! - *Shared memory* (memfd, tmpfs, shared anonymous, huge pages) is known by its file and offset: mapped
//!   anew from there, it is the same pages.
//! - Everything else has no tag: private mappings of files and devices; files on disks, whose inode numbers
//!   are used again; `brk` heap and stack, whose names the kernel does not show; any anonymous memory where
//!   the kernel cannot name it (before 5.17, or built without `CONFIG_ANON_VMA_NAME`, as Debian's are).
//!
//! A name holds a number that is given once per process. Its last page has a name of its own: a mapping
//! that is cut short and grown again (`mremap`, as `realloc` does) grows with the name that its end then
//! has, and so not with that one. Every other page's name says where the last page is, and counts only
//! while that is there.
//!
//! Tags overlap without harm: memory that has a name which counts keeps it, and the new tag takes it over.
//! Nothing is named twice unless it was mapped twice. Names are never taken away, as other tags may need
//! them; each splits a mapping, and a process has 65530 at most, so there are no more than [`MAX_NAMED`].
//!
//! A check costs one look at each mapping of the range, two for named memory: 0.7 µs each by
//! `PROCMAP_QUERY`, 25 µs by the text of `/proc/self/maps` in a program with 40 mappings, and more with more.
//!
//! Not noticed: pages that are replaced while the mapping stays (`MADV_DONTNEED`, which allocators use for
//! memory that was freed, `MADV_FREE`, `MREMAP_DONTUNMAP`, a hole punched into a shared file, a file made
//! shorter and longer again); a hole *inside* the range that is filled by growing the part below it, or by
//! moving another part of the same range there. Put a tag *before* the registration: what changes between
//! the two is noticed then, and would not be otherwise.

use std::ffi::CString;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::maps::{Maps, MapsEntry};
use super::shm::page_size;

/// Tags with names of their own at one time: at two more mappings each, half of what a process has.
const MAX_NAMED: usize = 1 << 14;

/// What a range of memory was when the tag was put.
#[derive(Debug)]
pub(crate) struct Tag {
    /// In order of address and without gaps.
    segments: Vec<Segment>,
    /// Whether it counts against [`MAX_NAMED`].
    named: bool,
}

static NAMED: AtomicUsize = AtomicUsize::new(0);

impl Tag {
    /// Tags the pages that hold the `len` bytes at `addr`. None where they cannot be tagged, or not all
    /// of them are mapped.
    ///
    /// The memory is not touched, and may be in use.
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
        // Asks for what was just put: the kernel may have taken a name and not show it.
        tag.is_still_there(maps, addr, len).then_some(tag)
    }

    /// Whether the `len` bytes at `addr`, in the range of the tag, are still what they were. False also
    /// where that cannot be told, as in a forked child.
    pub(crate) fn is_still_there(&self, maps: &Maps, addr: u64, len: u64) -> bool {
        let Some(range) = pages(addr, len) else { return false };
        let mut at = range.start;
        for segment in self.segments.iter().filter(|segment| segment.end > range.start) {
            if at >= range.end {
                break;
            }
            let end = segment.end.min(range.end);
            let mark = &segment.mark;
            // Where the last page of a name is asked for as well, its turn comes.
            let counts = mark.tail().is_some_and(|tail| tail < range.end) || mark.counts(maps);
            if segment.start > at || !mark.is_on(maps, at..end) || !counts {
                return false;
            }
            at = end;
        }
        at >= range.end
    }

    /// Gives a range of anonymous memory a name.
    fn name(&mut self, range: Option<Range<u64>>) -> Option<()> {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let Some(Range { start, end }) = range else { return Some(()) };
        if !self.named {
            self.named = true;
            if NAMED.fetch_add(1, Ordering::Relaxed) >= MAX_NAMED {
                return None;
            }
        }
        // Given once: a name that is seen was put there by whoever drew the number.
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

/// A range that may be tagged, and what is there already.
struct VmaPart {
    range: Range<u64>,
    /// None where it is anonymous and has no name of ours.
    mark: Option<Mark>,
}

/// By what memory is known again.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Mark {
    Name(Name),
    File {
        device: (u32, u32),
        inode: u64,
        shared: bool,
        /// The address at which the file's first byte would lie.
        base: u64,
    },
}

impl Mark {
    /// Whether every page of a range has it.
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

    /// The last page of the range that was named.
    fn tail(&self) -> Option<u64> {
        match self {
            Self::Name(name) => Some(name.tail),
            Self::File { .. } => None,
        }
    }

    /// Whether it still says anything: a name does while the last page of its range is there.
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
    /// The last page of the range that was named.
    tail: u64,
    is_tail: bool,
}

impl Name {
    /// From a mapping's name as the kernel shows it, such as `[anon:peerway-2a-7f0012345000]`.
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
        // SAFETY: gives mappings a name and touches no memory; the kernel copies the string.
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

/// What a part of a mapping is known by already: one part, or two where it begins with the last page of a
/// named range. None where it cannot be tagged.
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
        // Beyond the last page it is what was moved here from elsewhere.
        let mark = (range.end <= name.tail).then_some(Mark::Name(name));
        return Some([Some(VmaPart { range, mark }), None]);
    }
    // What a mapping that ended with the range has grown by since has the last page's name as well.
    let end = name.tail + page_size() as u64;
    if range.start != name.tail {
        return Some([Some(VmaPart { range, mark: None }), None]);
    }
    let grown = (end < range.end).then_some(VmaPart { range: end..range.end, mark: None });
    let last = VmaPart { range: range.start..end.min(range.end), mark: Some(Mark::Name(name)) };
    Some([Some(last), grown])
}

/// The file behind a mapping, where that alone tells what its pages are.
fn file_of(mapping: &MapsEntry<'_>) -> Option<Mark> {
    let MapsEntry { start, offset, device, inode, shared, name, .. } = *mapping;
    // Anonymous huge pages are a file that the kernel makes for one mapping and never again.
    let own_pages = name.starts_with("/anon_hugepage");
    // What a private mapping wrote is not in the file.
    if inode == 0 || !(shared || own_pages) {
        return None;
    }
    // Only file systems without a disk, which give every file a new number.
    if device.0 != 0 {
        return None;
    }
    // Mappings of a device differ by more than their offset; below /dev, only these are memory.
    let memory = ["/dev/shm/", "/dev/zero", "/dev/hugepages"];
    if name.starts_with("/dev/") && !memory.iter().any(|dir| name.starts_with(dir)) {
        return None;
    }
    Some(Mark::File { device, inode, shared, base: start.wrapping_sub(offset) })
}

/// The pages that hold some bytes; none where there are no bytes or no such addresses.
fn pages(addr: u64, len: u64) -> Option<Range<u64>> {
    let page = page_size() as u64;
    let end = addr.checked_add(len).filter(|_| len > 0)?.checked_next_multiple_of(page)?;
    Some(addr / page * page..end)
}

#[cfg(test)]
mod tests;
