//! Tests for tags on memory that is unmapped, moved, cut, grown and mapped again. Tests that need a
//! kernel that can name anonymous memory are ignored elsewhere.
//!
//! **Test pages.** The pages of an [`Area`] belong to one test. No Rust
//! reference points into them, so the test may map, move and unmap them.

use std::ffi::c_void;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::time::Instant;

use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::*;
use crate::os::shm;

/// Pages for the tests to map and unmap. Drop unmaps all of them.
struct Area {
    base: u64,
    pages: u64,
}

impl Area {
    fn new(pages: u64) -> Self {
        let area = Self { base: 0, pages };
        // SAFETY: maps anonymous memory at addresses that the kernel picks.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), area.len() as usize, RW, MapFlags::PRIVATE)
        };
        Self { base: base.unwrap() as u64, ..area }
    }

    fn len(&self) -> u64 {
        self.pages * page()
    }

    fn at(&self, number: u64) -> *mut c_void {
        (self.base + number * page()) as *mut c_void
    }

    fn unmap(&self, first: u64, count: u64) {
        // SAFETY: "Test pages" (see the head of this file).
        unsafe { rustix::mm::munmap(self.at(first), (count * page()) as usize) }.unwrap();
    }

    fn map(&self, first: u64, count: u64) {
        let (addr, len) = (self.at(first), (count * page()) as usize);
        // SAFETY: "Test pages".
        unsafe { rustix::mm::mmap_anonymous(addr, len, RW, MapFlags::PRIVATE | MapFlags::FIXED) }
            .unwrap();
    }

    fn map_file(&self, fd: &OwnedFd, first: u64, count: u64, flags: MapFlags, offset: u64) {
        let (addr, len) = (self.at(first), (count * page()) as usize);
        // SAFETY: "Test pages".
        unsafe { rustix::mm::mmap(addr, len, RW, flags | MapFlags::FIXED, fd, offset) }.unwrap();
    }

    /// Changes the length of a mapping in place.
    fn resize(&self, first: u64, from: u64, to: u64) {
        let (from, to) = ((from * page()) as usize, (to * page()) as usize);
        // SAFETY: "Test pages".
        unsafe { rustix::mm::mremap(self.at(first), from, to, MremapFlags::empty()) }.unwrap();
    }

    fn tag(&self, maps: &Maps, first: u64, count: u64) -> Option<Tag> {
        Tag::put(maps, self.at(first) as u64, count * page())
    }

    fn has(&self, tag: &Tag, maps: &Maps, first: u64, count: u64) -> bool {
        tag.is_still_there(maps, self.at(first) as u64, count * page())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        self.unmap(0, self.pages);
    }
}

const RW: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn page() -> u64 {
    page_size() as u64
}

/// Runs a test with both methods of `maps`, each in its own process. Tests leave holes, into which
/// another thread's memory could be mapped and then overwritten.
fn both_ways(test: impl Fn(&Maps)) {
    in_a_child(|| test(&Maps::open().unwrap()));
    in_a_child(|| test(&Maps::open().unwrap().by_text()));
}

fn in_a_child(test: impl Fn()) {
    // SAFETY: glibc's allocator and threads work in the child of a multi-threaded process. The
    // child takes none of this crate's locks and leaves by `_exit`. If a panic hangs on a lock, the
    // alarm ends the child.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: requests a signal that ends the child.
            unsafe { libc::alarm(60) };
            let passed = panic::catch_unwind(AssertUnwindSafe(test)).is_ok();
            // SAFETY: `_exit` ends the child at once.
            unsafe { libc::_exit(i32::from(!passed)) }
        }
        child => assert_eq!(status_of(child), 0),
    }
}

fn status_of(child: libc::pid_t) -> i32 {
    let mut status = -1;
    // SAFETY: reaps a child of this test.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status
}

#[test]
fn heap_stack_and_private_files_have_no_tag() {
    both_ways(|maps| {
        let on_stack = [0_u8; 64];
        assert!(Tag::put(maps, on_stack.as_ptr() as u64, 0).is_none());
        assert!(Tag::put(maps, heap_and_stack_of_the_first_thread().1, 16).is_none());
        if let Some(heap) = heap_and_stack_of_the_first_thread().0 {
            assert!(Tag::put(maps, heap, 16).is_none());
        }
        let code = heap_stack_and_private_files_have_no_tag as *const () as u64;
        assert!(Tag::put(maps, code, 16).is_none());
        assert!(Tag::put(maps, 4096, 16).is_none(), "nothing is mapped there");
        assert!(Tag::put(maps, u64::MAX - 5, 16).is_none());

        let area = Area::new(4);
        let fd = shm::create_memfd("peerway-test", 4 * page_size()).unwrap();
        area.map_file(&fd, 0, 4, MapFlags::PRIVATE, 0);
        assert!(area.tag(maps, 0, 4).is_none());
        area.unmap(1, 1);
        assert!(area.tag(maps, 0, 4).is_none(), "a hole");
        area.map(1, 1);
    });
}

fn heap_and_stack_of_the_first_thread() -> (Option<u64>, u64) {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = |name: &str| {
        let line = text.lines().find(|line| line.ends_with(name))?;
        u64::from_str_radix(line.split('-').next()?, 16).ok()
    };
    (start("[heap]"), start("[stack]").unwrap())
}

#[test]
fn shared_memory_is_known_by_its_file() {
    both_ways(|maps| {
        let make = || shm::create_memfd("peerway-test", 8 * page_size()).unwrap();
        let (one, other) = (make(), make());
        let area = Area::new(8);
        area.map_file(&one, 0, 8, MapFlags::SHARED, 0);
        let tag = area.tag(maps, 0, 8).unwrap();
        assert!(area.has(&tag, maps, 0, 8) && area.has(&tag, maps, 5, 1));
        area.unmap(2, 3);
        assert!(!area.has(&tag, maps, 0, 8));
        assert!(area.has(&tag, maps, 5, 3));
        area.map_file(&one, 2, 3, MapFlags::SHARED, 2 * page());
        assert!(area.has(&tag, maps, 0, 8), "the same pages");
        area.map_file(&one, 2, 3, MapFlags::SHARED, 0);
        assert!(!area.has(&tag, maps, 0, 8), "other pages of the file");
        area.map_file(&other, 0, 8, MapFlags::SHARED, 0);
        assert!(!area.has(&tag, maps, 0, 8), "another file");
        area.map_file(&one, 0, 8, MapFlags::PRIVATE, 0);
        assert!(!area.has(&tag, maps, 0, 8), "copies of its pages");
        area.map(0, 8);
        assert!(!area.has(&tag, maps, 0, 8), "no file");
    });
}

#[test]
fn shared_anonymous_memory_is_a_file_of_its_own() {
    both_ways(|maps| {
        let area = Area::new(4);
        let map = || {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: "Test pages".
            unsafe { rustix::mm::mmap_anonymous(area.at(0), area.len() as usize, RW, flags) }
                .unwrap();
        };
        map();
        let tag = area.tag(maps, 0, 4).unwrap();
        assert!(area.has(&tag, maps, 0, 4));
        map();
        assert!(!area.has(&tag, maps, 0, 4));
    });
}

#[test]
fn a_forked_child_cannot_tell() {
    let maps = Maps::open().unwrap();
    let fd = shm::create_memfd("peerway-test", page_size()).unwrap();
    let shared = shm::ShmMapping::of_fd(fd.as_fd(), page_size(), true).unwrap();
    let tag = Tag::put(&maps, shared.ptr() as u64, 1).unwrap();
    // SAFETY: the child queries its mappings, which takes no lock, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let there = tag.is_still_there(&maps, shared.ptr() as u64, 1);
            // SAFETY: `_exit` ends the child at once.
            unsafe { libc::_exit(i32::from(there)) }
        }
        child => assert_eq!(status_of(child), 0),
    }
    assert!(tag.is_still_there(&maps, shared.ptr() as u64, 1));
}

#[test]
fn names_are_parsed_or_refused() {
    let name = Name { id: 0x2a, tail: 0x7f00_1234_5000, is_tail: false };
    assert_eq!(Name::parse("[anon:peerway-2a-7f0012345000]"), Some(name.clone()));
    let last = Name { is_tail: true, ..name };
    assert_eq!(Name::parse("[anon:peerway-2a-7f0012345000-end]"), Some(last));
    for other in ["", "[heap]", "[anon:glibc: malloc]", "[anon:peerway-]", "[anon:peerway-1-x]"] {
        assert_eq!(Name::parse(other), None, "{other}");
    }
}

/// `cargo test -p peerway --release -- --ignored --nocapture cost_of`
#[test]
#[ignore = "prints times"]
fn cost_of_a_check() {
    let maps = Maps::open().unwrap();
    let queries = maps.queries();
    let area = Area::new(256);
    let fd = shm::create_memfd("peerway-test", 256 * page_size()).unwrap();
    let measure = |what: &str, maps: &Maps| {
        let Some(tag) = area.tag(maps, 0, 256) else { return println!("{what}: no tag") };
        let rounds = 20_000_u32;
        let start = Instant::now();
        assert!((0..rounds).all(|_| area.has(&tag, maps, 0, 256)));
        println!("{what}: {} ns", start.elapsed().as_nanos() / u128::from(rounds));
    };
    let text = Maps::open().unwrap().by_text();
    for what in ["anonymous", "shared"] {
        if queries {
            measure(&format!("{what}, PROCMAP_QUERY"), &maps);
        }
        measure(&format!("{what}, text"), &text);
        area.map_file(&fd, 0, 256, MapFlags::SHARED, 0);
    }
    let lines = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    println!("{lines} mappings");
}

mod needs_names_of_memory {
    use super::*;

    #[test]
    #[ignore = "probes whether this kernel can name anonymous memory"]
    fn probe() {
        let tag = Area::new(1).tag(&Maps::open().unwrap(), 0, 1);
        assert!(tag.is_some(), "this kernel cannot name anonymous memory");
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn memory_that_stays_keeps_its_tag() {
        both_ways(|maps| {
            let area = Area::new(16);
            let tag = Tag::put(maps, area.base + 100, 8 * page()).unwrap();
            assert!(tag.is_still_there(maps, area.base + 100, 8 * page()));
            assert!(
                area.has(&tag, maps, 0, 9)
                    && area.has(&tag, maps, 3, 2)
                    && area.has(&tag, maps, 8, 1)
            );
            // These pages are mapped but outside the tag's range.
            assert!(!area.has(&tag, maps, 9, 1) && !area.has(&tag, maps, 0, 10));
            assert!(!tag.is_still_there(maps, area.base, 0));
            assert!(!tag.is_still_there(maps, u64::MAX, 2));

            // SAFETY: "Test pages"; the write precedes the change of protection.
            unsafe {
                area.at(2).cast::<u8>().write_bytes(7, 100);
                rustix::mm::mprotect(area.at(1), page_size(), MprotectFlags::READ).unwrap();
                rustix::mm::mprotect(area.at(4), page_size(), MprotectFlags::empty()).unwrap();
            }
            assert!(area.has(&tag, maps, 0, 9), "a change of protection keeps the pages");
            area.unmap(10, 2);
            area.map(10, 2);
            assert!(area.has(&tag, maps, 0, 9), "changes to neighbouring pages do not matter");
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn memory_mapped_again_is_noticed_whole_and_in_part() {
        both_ways(|maps| {
            let whole = [(0, 8), (0, 1), (3, 2), (7, 1), (0, 7)];
            for (first, count) in whole {
                let area = Area::new(8);
                let tag = area.tag(maps, 0, 8).unwrap();
                area.unmap(first, count);
                assert!(!area.has(&tag, maps, 0, 8), "unmapped {first} {count}");
                area.map(first, count);
                assert!(!area.has(&tag, maps, 0, 8), "mapped again {first} {count}");
                let again = area.tag(maps, 0, 8).unwrap();
                assert!(area.has(&again, maps, 0, 8));
                assert!(!area.has(&tag, maps, 0, 8), "an older tag stays invalid");
            }
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn memory_cut_short_and_grown_again_is_noticed() {
        both_ways(|maps| {
            let area = Area::new(8);
            area.unmap(6, 2);
            let tag = area.tag(maps, 0, 6).unwrap();
            let inner = area.tag(maps, 1, 4).unwrap();
            area.resize(0, 6, 3);
            area.resize(0, 3, 6);
            assert!(!area.has(&tag, maps, 0, 6));
            assert!(!area.has(&inner, maps, 1, 4), "the inner tag had adopted the name");
            let again = area.tag(maps, 1, 4).unwrap();
            assert!(area.has(&again, maps, 1, 4) && !area.has(&inner, maps, 1, 4));
            area.map(6, 2);
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn memory_that_grows_keeps_its_tag_and_the_rest_gets_its_own() {
        both_ways(|maps| {
            let area = Area::new(8);
            area.unmap(4, 4);
            let tag = area.tag(maps, 0, 4).unwrap();
            // The kernel grows a single mapping, and the tag has split the range into two.
            area.resize(3, 1, 5);
            assert!(area.has(&tag, maps, 0, 4));
            let more = area.tag(maps, 0, 8).unwrap();
            assert!(area.has(&tag, maps, 0, 4) && area.has(&more, maps, 0, 8));
            area.unmap(5, 1);
            assert!(area.has(&tag, maps, 0, 4) && !area.has(&more, maps, 0, 8));
            area.map(4, 4);
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn memory_that_was_moved_here_is_noticed() {
        both_ways(|maps| {
            let (one, other) = (Area::new(4), Area::new(4));
            let (one_tag, other_tag) =
                (one.tag(maps, 0, 4).unwrap(), other.tag(maps, 0, 4).unwrap());
            for (first, count) in [(0, 3), (3, 1)] {
                let len = (count * page()) as usize;
                let (from, to) = (other.at(first), one.at(first));
                // SAFETY: "Test pages".
                unsafe { rustix::mm::mremap_fixed(from, len, len, MremapFlags::MAYMOVE, to) }
                    .unwrap();
            }
            other.map(0, 4);
            assert!(!one.has(&one_tag, maps, 0, 4));
            assert!(!other.has(&other_tag, maps, 0, 4));
            // The names that moved with the pages are not valid here.
            let again = one.tag(maps, 0, 4).unwrap();
            assert!(one.has(&again, maps, 0, 4));
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn tags_overlap_without_harm() {
        both_ways(|maps| {
            let area = Area::new(12);
            let first = area.tag(maps, 2, 4).unwrap();
            let inner = area.tag(maps, 3, 2).unwrap();
            let across = area.tag(maps, 4, 6).unwrap();
            let around = area.tag(maps, 0, 12).unwrap();
            let tags = [(&first, 2, 4), (&inner, 3, 2), (&across, 4, 6), (&around, 0, 12)];
            assert!(tags.iter().all(|(tag, at, count)| area.has(tag, maps, *at, *count)));
            area.unmap(8, 1);
            area.map(8, 1);
            let there = tags.map(|(tag, at, count)| area.has(tag, maps, at, count));
            assert_eq!(there, [true, true, false, false]);
            assert!(area.has(&around, maps, 0, 8), "the part before the hole");
        });
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn freed_and_allocated_again_is_no_change() {
        let maps = Maps::open().unwrap();
        // Only the main thread allocates from the `brk` heap.
        let allocating = std::thread::spawn(move || {
            // `above` stays allocated, so the allocator does not return the freed pages to the
            // kernel.
            let (block, above) = (vec![1_u8; 96 << 10], vec![1_u8; 96 << 10]);
            let (addr, len) = (block.as_ptr() as u64, block.len() as u64);
            let tag = Tag::put(&maps, addr, len).expect("this memory can be named");
            drop(block);
            assert!(tag.is_still_there(&maps, addr, len));
            let again = vec![2_u8; 96 << 10];
            assert!(tag.is_still_there(&maps, addr, len));
            drop((again, above));
        });
        allocating.join().unwrap();
    }

    #[test]
    #[ignore = "needs a kernel that names memory: cargo xtask test --only test"]
    fn a_range_of_both_kinds_is_tagged_by_both() {
        both_ways(|maps| {
            let area = Area::new(6);
            let fd = shm::create_memfd("peerway-test", 2 * page_size()).unwrap();
            area.map_file(&fd, 2, 2, MapFlags::SHARED, 0);
            let tag = area.tag(maps, 0, 6).unwrap();
            assert!(area.has(&tag, maps, 0, 6));
            area.unmap(5, 1);
            area.map(5, 1);
            assert!(!area.has(&tag, maps, 0, 6) && area.has(&tag, maps, 0, 4));
        });
    }
}

mod needs_huge_pages {
    use super::*;

    #[test]
    #[ignore = "probes whether huge pages are available"]
    fn probe() {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB;
        // SAFETY: maps at an address that the kernel picks; nothing uses it.
        let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), 2 << 20, RW, flags) };
        mapped.expect("no huge page is available (vm.nr_hugepages)");
    }

    #[test]
    #[ignore = "needs huge pages (vm.nr_hugepages): cargo xtask test --only test"]
    fn huge_pages_are_a_file_of_their_own() {
        const HUGE: usize = 2 << 20;
        in_a_child(|| {
            let maps = Maps::open().unwrap();
            let map = |at, flags| {
                let flags = flags | MapFlags::PRIVATE | MapFlags::HUGETLB;
                // SAFETY: maps at an address that the kernel picks, or over the memory that this
                // closure mapped there.
                unsafe { rustix::mm::mmap_anonymous(at, HUGE, RW, flags) }
            };
            let base = map(ptr::null_mut(), MapFlags::empty()).unwrap();
            let tag = Tag::put(&maps, base as u64 + 5000, 100_000).unwrap();
            assert!(tag.is_still_there(&maps, base as u64 + 5000, 100_000));
            map(base, MapFlags::FIXED).unwrap();
            assert!(!tag.is_still_there(&maps, base as u64 + 5000, 100_000));
        });
    }
}
