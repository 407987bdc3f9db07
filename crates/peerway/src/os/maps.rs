//! The mappings of this process, as the kernel reports them.
//!
//! There are two methods with the same result. The `PROCMAP_QUERY` ioctl on `/proc/self/maps`
//! (Linux 6.11) costs one system call per mapping of the range. Reading the text of that file costs
//! more the more mappings lie below the range. A result holds only for the moment of each system
//! call, because mappings may change at any time.
//!
//! The kernel ties an open `/proc/self/maps` to the process that opened it. A forked child that
//! inherits a [`Maps`] would see its parent's memory, so it gets an error instead. Used by `vma`.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd as _;

use super::process::{fork_generation, watch_forks};

/// A view of this process's mappings.
#[derive(Debug)]
pub(crate) struct Maps {
    file: File,
    /// Whether the kernel has `PROCMAP_QUERY`.
    queries: bool,
    generation: u32,
}

impl Maps {
    /// Opens the mappings of this process.
    pub(crate) fn open() -> io::Result<Self> {
        watch_forks();
        let file = File::open("/proc/self/maps")?;
        let mut maps = Self { file, queries: true, generation: fork_generation() };
        // A variable's address is certainly mapped. A kernel without the ioctl returns ENOTTY.
        let here = &raw const maps as u64;
        maps.queries = maps.query(here, &mut [0; SHORT_NAME]).is_ok();
        Ok(maps)
    }

    /// The same view, read from the text of the file.
    #[cfg(test)]
    pub(crate) fn by_text(mut self) -> Self {
        self.queries = false;
        self
    }

    /// Whether this value uses `PROCMAP_QUERY`.
    #[cfg(test)]
    pub(crate) fn queries(&self) -> bool {
        self.queries
    }

    /// Calls `each` for every mapping that overlaps `range`, in ascending order of address, until
    /// `each` breaks. Returns false if `each` broke, or if part of the range is not mapped.
    ///
    /// # Errors
    ///
    /// An I/O error if the kernel refuses the query, or if this process is a forked child of the
    /// process that opened `self`.
    pub(crate) fn walk(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(&MapsEntry<'_>) -> ControlFlow<()>,
    ) -> io::Result<bool> {
        if self.generation != fork_generation() {
            return Err(io::Error::other(
                "this view of /proc/self/maps belongs to the parent of this forked process",
            ));
        }
        let mut at = range.start;
        if !self.queries {
            return read_text(&range, |mapping| {
                if mapping.end <= at {
                    return ControlFlow::Continue(());
                }
                if mapping.start > at || each(mapping).is_break() {
                    return ControlFlow::Break(false);
                }
                at = mapping.end;
                if at < range.end { ControlFlow::Continue(()) } else { ControlFlow::Break(true) }
            });
        }
        let mut name = [0; SHORT_NAME];
        let mut long_name = Vec::new();
        while at < range.end {
            let answer = match self.query(at, &mut name) {
                Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                    long_name.resize(libc::PATH_MAX as usize, 0);
                    self.query(at, &mut long_name)
                }
                answer => answer,
            };
            match answer {
                Ok(mapping) if each(&mapping).is_break() => return Ok(false),
                Ok(mapping) => at = mapping.end,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The mapping that contains `address`. The kernel's `ENOENT` if there is none.
    fn query<'a>(&self, address: u64, name: &'a mut [u8]) -> io::Result<MapsEntry<'a>> {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_addr: address,
            vma_name_size: name.len() as u32,
            vma_name_addr: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: `Query` has the size and layout that the ioctl expects. The kernel writes only to
        // `query` and to `vma_name_size` bytes of `name`, and both outlive the call.
        let returned = unsafe { libc::ioctl(self.file.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if returned != 0 {
            return Err(io::Error::last_os_error());
        }
        // The kernel's count includes the NUL; it is zero for a mapping without a name.
        let len = (query.vma_name_size as usize).saturating_sub(1).min(name.len());
        Ok(MapsEntry {
            start: query.vma_start,
            end: query.vma_end,
            shared: query.vma_flags & VMA_SHARED != 0,
            offset: query.vma_offset,
            device: (query.dev_major, query.dev_minor),
            inode: query.inode,
            name: std::str::from_utf8(&name[..len]).unwrap_or("?"),
        })
    }
}

/// One mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct MapsEntry<'a> {
    pub(crate) start: u64,
    /// The first address after the mapping.
    pub(crate) end: u64,
    pub(crate) shared: bool,
    /// Offset of the mapping in its file, in bytes.
    pub(crate) offset: u64,
    /// Major and minor device number of the file.
    pub(crate) device: (u32, u32),
    /// Zero if the mapping has no file.
    pub(crate) inode: u64,
    /// A path, a word in brackets, or empty.
    pub(crate) name: &'a str,
}

impl<'a> MapsEntry<'a> {
    /// Parses a line such as `7f00-7f10 rw-p 00000000 00:01 1025    /memfd:x (deleted)`.
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let shared = words.next()?.as_bytes().get(3) == Some(&b's');
        let offset = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            shared,
            offset,
            device: (hex(major)?.try_into().ok()?, hex(minor)?.try_into().ok()?),
            inode: words.next()?.parse().ok()?,
            name: words.next().unwrap_or_default().trim_start(),
        })
    }
}

/// Large enough for the names that `vma` sets and for names in brackets. A path may be longer.
const SHORT_NAME: usize = 96;

/// Calls `each` for every mapping in the text of the file, in ascending order of address, until
/// `each` breaks with a result. Returns false if the mappings end first, because then part of the
/// range is not mapped.
fn read_text(
    range: &Range<u64>,
    mut each: impl FnMut(&MapsEntry<'_>) -> ControlFlow<bool>,
) -> io::Result<bool> {
    if range.is_empty() {
        return Ok(true);
    }
    // Each call opens the file again: threads that share one file offset would read parts of each
    // other's lines.
    let mut file = File::open("/proc/self/maps")?;
    let mut text = vec![0; 1 << 14];
    let mut filled = 0;
    loop {
        let count = file.read(&mut text[filled..])?;
        if count == 0 {
            return Ok(false);
        }
        filled += count;
        let whole = text[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            // A file name need not be UTF-8.
            let line = String::from_utf8_lossy(line);
            let mapping = MapsEntry::parse(&line);
            let mapping = mapping.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            if let ControlFlow::Break(answer) = each(&mapping) {
                return Ok(answer);
            }
        }
        text.copy_within(whole..filled, 0);
        filled -= whole;
        if filled == text.len() {
            text.resize(2 * filled, 0);
        }
    }
}

/// `struct procmap_query` of `<linux/fs.h>`.
#[derive(Default)]
#[repr(C)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `PROCMAP_QUERY_VMA_SHARED`.
const VMA_SHARED: u64 = 8;

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl = libc::_IOWR::<Query>(b'f' as u32, 17);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::os::shm::{self, ShmMapping as Shared};

    /// The result of both methods for a range.
    fn both(maps: &Maps, range: Range<u64>) -> [Option<Vec<String>>; 2] {
        let text = Maps::open().unwrap().by_text();
        [maps, &text].map(|maps| {
            let mut seen = Vec::new();
            let all = maps.walk(range.clone(), |mapping| {
                seen.push(format!("{mapping:?}"));
                ControlFlow::Continue(())
            });
            all.unwrap().then_some(seen)
        })
    }

    /// Walks mappings of this process by `maps` and by the text.
    fn check(maps: &Maps) {
        // Longer than `SHORT_NAME`.
        let name = "x".repeat(200);
        let memfd = shm::create_memfd(&name, 1 << 16).unwrap();
        let mapped = Shared::of_fd(memfd.as_fd(), 1 << 16, true);
        let mapped = mapped.unwrap();
        let start = mapped.ptr() as u64;
        for range in [start..start + 4096, start + 4096..start + (1 << 16)] {
            let [asked, read] = both(maps, range);
            assert_eq!(asked, read);
            let seen = asked.unwrap();
            assert_eq!(seen.len(), 1);
            assert!(seen[0].contains("shared: true") && seen[0].contains(&name), "{seen:?}");
        }
        // The program's code, its data and the mappings after them are adjacent.
        let code = check as *const () as u64 & !4095;
        let [asked, read] = both(maps, code..code + 4096);
        assert_eq!(asked, read);
        assert!(asked.is_some());
        for nowhere in [0..4096, (1 << 46)..(1 << 46) + 1] {
            assert_eq!(both(maps, nowhere), [None, None]);
        }
        assert_eq!(both(maps, 5..5), [Some(vec![]), Some(vec![])]);
    }

    #[test]
    fn the_text_tells_mappings_apart() {
        check(&Maps::open().unwrap().by_text());
    }

    mod needs_procmap_query {
        use super::*;

        #[test]
        #[ignore = "probes whether this kernel has PROCMAP_QUERY"]
        fn probe() {
            assert!(Maps::open().unwrap().queries(), "this kernel has no PROCMAP_QUERY");
        }

        #[test]
        #[ignore = "needs a kernel with PROCMAP_QUERY: cargo xtask test --only test"]
        fn queries_and_the_text_agree() {
            let maps = Maps::open().unwrap();
            assert!(maps.queries());
            check(&maps);
        }
    }

    #[test]
    fn lines_are_parsed_or_refused() {
        let line = "7f12a000-7f12c000 rw-s 00001000 00:1a 123   /dev/shm/a b (deleted)";
        let mapping = MapsEntry::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f12_a000, 0x7f12_c000));
        assert_eq!((mapping.offset, mapping.device, mapping.inode), (0x1000, (0, 26), 123));
        assert_eq!((mapping.shared, mapping.name), (true, "/dev/shm/a b (deleted)"));
        let plain = MapsEntry::parse("7f12a000-7f12c000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((plain.shared, plain.name), (false, ""));
        for bad in ["", "7f", "1-2", "1-2 rw-p", "x-2 rw-p 0 00:00 0", "1-2 rw-p 0 0000 0"] {
            assert_eq!(MapsEntry::parse(bad), None, "{bad}");
        }
    }
}
