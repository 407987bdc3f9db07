//! Copiers of every kind, on any CUDA driver: that of a GPU, or the stand-in `peerway-fakecuda`.
//!
//! The tests check every byte, including the bytes around the copied ranges.

mod on_gpu;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use peerway::gpu::{
    Copier, CopierKind, CopierOptions, DeviceMemory, DeviceMemoryOptions, PinnedMemory, Run,
};
use peerway::{Endpoint, Region};

use on_gpu::require_gpu;

struct Counting;

thread_local! {
    /// Allocations of this thread only. Other threads are not on the hot path.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes every call on to the system allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds `GlobalAlloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the same argument as for `alloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn options() -> CopierOptions {
    let mut options = CopierOptions::default();
    // With few blocks a ring fills sooner, and a block gets several tasks.
    options.blocks = 3;
    options
}

fn new(kind: CopierKind) -> Copier {
    Copier::new(0, kind, &options()).unwrap()
}

/// GPU memory. The driver's own copies fill and read it.
struct Memory {
    region: Region,
    address: u64,
}

impl Memory {
    fn new(endpoint: &Endpoint, bytes: &[u8]) -> Self {
        let options = DeviceMemoryOptions::default();
        let memory = DeviceMemory::allocate(0, bytes.len() as u64, &options).unwrap();
        let address = memory.address();
        let region = endpoint.register_gpu(memory).unwrap();
        region.write_at(0, bytes).unwrap();
        Self { region, address }
    }

    fn write(&self, bytes: &[u8]) {
        self.region.write_at(0, bytes).unwrap();
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len() as usize];
        self.region.read_at(0, &mut bytes).unwrap();
        bytes
    }
}

/// Numbers that are the same in every run of the test.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % bound
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

/// Submits a list. If there is no room, it polls until some work is done.
fn submit(copier: &mut Copier, runs: &[Run]) -> u64 {
    let begun = Instant::now();
    loop {
        // SAFETY: the tests keep their memory until they have waited for the copies.
        if let Some(ticket) = unsafe { copier.submit(runs) }.unwrap() {
            return ticket;
        }
        copier.poll().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(60), "the copier has had no room for 60 s");
    }
}

fn copy_now(copier: &mut Copier, runs: &[Run]) {
    let ticket = submit(copier, runs);
    copier.wait(ticket).unwrap();
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn every_length_arrives_at_every_alignment_and_nothing_beside_it() {
    require_gpu();
    const LENGTHS: usize = 300;
    const STRIDE: usize = LENGTHS + 64;
    let endpoint = Endpoint::builder().build().unwrap();
    let mut numbers = Numbers(7);
    let source = numbers.bytes(LENGTHS + 16);
    let canary = numbers.bytes(LENGTHS * STRIDE);
    let (from, to) = (Memory::new(&endpoint, &source), Memory::new(&endpoint, &canary));
    for kind in CopierKind::ALL {
        let mut copier = new(kind);
        for pair in 0..256 {
            let (src, dst) = (pair / 16, pair % 16);
            let mut expected = canary.clone();
            let mut runs = Vec::new();
            for len in 0..LENGTHS {
                let at = len * STRIDE + 16 + dst;
                expected[at..at + len].copy_from_slice(&source[src..src + len]);
                let (src, dst) = (from.address + src as u64, to.address + at as u64);
                runs.push(Run { src, dst, len: len as u64 });
            }
            to.write(&canary);
            // Once as one list, once as many lists.
            for list in runs.chunks(if pair % 2 == 0 { LENGTHS } else { 37 }) {
                submit(&mut copier, list);
            }
            copier.wait(u64::MAX).unwrap();
            assert!(to.read() == expected, "{kind}, from {src} to {dst} of 16");
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn ten_thousand_tasks_of_mixed_lengths_arrive() {
    require_gpu();
    const SOURCE: usize = 4 << 20;
    let endpoint = Endpoint::builder().build().unwrap();
    for kind in CopierKind::ALL {
        let mut numbers = Numbers(11 + kind as u64);
        let source = numbers.bytes(SOURCE);
        let lengths: Vec<usize> = (0..10_000)
            .map(|task| match task % 1000 {
                // Some have odd lengths and are cut into parts.
                7 => 1_000_003 + numbers.below(1_000_000),
                task if task % 10 == 3 => numbers.below(40_000),
                _ => numbers.below(600),
            })
            .collect();
        let total: usize = lengths.iter().map(|len| len + 3).sum();
        let mut expected = vec![0xa5; total];
        // Sources in GPU memory and in host memory.
        let from = Memory::new(&endpoint, &source);
        let host = PinnedMemory::allocate(SOURCE).unwrap();
        // SAFETY: the range is the whole allocation, and no copy is in progress.
        unsafe { host.ptr().copy_from(source.as_ptr(), SOURCE) };
        let to = Memory::new(&endpoint, &expected);
        let mut runs = Vec::new();
        let mut at = 0;
        for len in lengths {
            let start = numbers.below(SOURCE - len);
            let base = if numbers.below(4) == 0 { host.ptr() as u64 } else { from.address };
            expected[at..at + len].copy_from_slice(&source[start..start + len]);
            let (src, dst) = (base + start as u64, to.address + at as u64);
            runs.push(Run { src, dst, len: len as u64 });
            at += len + 3;
        }
        let mut copier = new(kind);
        let mut rest = &runs[..];
        let mut last = 0;
        while !rest.is_empty() {
            let count = (1 + numbers.below(900)).min(rest.len());
            let (list, after) = rest.split_at(count);
            let ticket = submit(&mut copier, list);
            assert!(ticket >= last, "tickets must rise");
            (rest, last) = (after, ticket);
        }
        copier.wait(last).unwrap();
        assert_eq!(copier.poll().unwrap(), last);
        assert!(to.read() == expected, "{kind}");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn one_source_goes_to_five_places() {
    require_gpu();
    let endpoint = Endpoint::builder().build().unwrap();
    let mut numbers = Numbers(3);
    let tokens = numbers.bytes(64 * 7168);
    let from = Memory::new(&endpoint, &tokens);
    let targets: Vec<Memory> =
        (0..5).map(|_| Memory::new(&endpoint, &vec![0; tokens.len()])).collect();
    for kind in CopierKind::ALL {
        targets.iter().for_each(|target| target.write(&vec![0; tokens.len()]));
        let runs: Vec<Run> = (0..64u64)
            .flat_map(|token| {
                let at = token * 7168;
                let src = from.address + at;
                targets.iter().map(move |to| Run { src, dst: to.address + at, len: 7168 })
            })
            .collect();
        copy_now(&mut new(kind), &runs);
        assert!(targets.iter().all(|target| target.read() == tokens), "{kind}");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_list_that_does_not_fit_is_refused_whole_and_fits_later() {
    require_gpu();
    let endpoint = Endpoint::builder().build().unwrap();
    let bytes = Numbers(5).bytes(1 << 20);
    let from = Memory::new(&endpoint, &bytes);
    for kind in CopierKind::ALL {
        let mut copier = new(kind);
        let to = Memory::new(&endpoint, &vec![0; 1 << 20]);
        let run = |n: u64| {
            let at = n % 4096 * 256;
            Run { src: from.address + at, dst: to.address + at, len: 256 }
        };
        let (most, room) = (copier.most(), copier.room());
        assert!(most >= 1024 && room == most, "{kind}: {room} of {most}");
        let too_many: Vec<Run> = (0..=most as u64).map(run).collect();
        // SAFETY: the same argument as in `submit`.
        assert_eq!(unsafe { copier.submit(&too_many) }.unwrap(), None);
        assert_eq!((copier.poll().unwrap(), copier.room()), (0, most));
        // More lists than can be in progress at a time.
        let (mut refused, mut last) = (0, 0);
        let list: Vec<Run> = (0..100).map(run).collect();
        for _ in 0..600 {
            let before = copier.room();
            // SAFETY: the same argument as in `submit`.
            match unsafe { copier.submit(&list) }.unwrap() {
                Some(ticket) => last = ticket,
                None => {
                    assert!(before < list.len(), "{kind}: 100 refused, room {before}");
                    refused += 1;
                    last = submit(&mut copier, &list);
                }
            }
        }
        copier.wait(last).unwrap();
        eprintln!("{kind}: {refused} of 600 lists had to wait");
        // As many tasks as fit at once.
        copy_now(&mut copier, &too_many[1..]);
        assert_eq!(copier.room(), most, "{kind}");
        let all: Vec<Run> = (0..4096).map(run).collect();
        all.chunks(most).for_each(|list| copy_now(&mut copier, list));
        assert!(to.read() == bytes, "{kind}");
        // An empty list, or a list without bytes, is done at once.
        let last = copier.poll().unwrap();
        let nothing = [Run { len: 0, ..run(0) }; 3];
        // SAFETY: the same argument as in `submit`.
        unsafe {
            assert_eq!(copier.submit(&[]).unwrap(), Some(last));
            assert_eq!(copier.submit(&nothing).unwrap(), Some(last));
        }
    }
}

/// The resident kernel exits in each pause and starts again for the next task.
#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_thousand_pauses_lose_nothing() {
    require_gpu();
    let from = PinnedMemory::allocate(4096).unwrap();
    let to = PinnedMemory::allocate(4096).unwrap();
    let idle = Duration::from_micros(20);
    let mut options = options();
    (options.idle, options.blocks) = (idle, 2);
    for kind in CopierKind::ALL {
        let mut copier = Copier::new(0, kind, &options).unwrap();
        let mut numbers = Numbers(13);
        for round in 0..1000u64 {
            let count = 1 + numbers.below(5) as u64;
            let mut runs = Vec::new();
            for n in 0..count {
                let at = n * 512;
                let (src, dst) = (from.ptr() as u64 + at, to.ptr() as u64 + at);
                // SAFETY: the address lies inside the memory, and no copy is in progress.
                unsafe { (src as *mut u64).write_volatile(round << 8 | n) };
                runs.push(Run { src, dst, len: 8 });
            }
            copy_now(&mut copier, &runs);
            for run in &runs {
                // SAFETY: the same argument.
                let (put, came) = unsafe {
                    (
                        (run.src as *const u64).read_volatile(),
                        (run.dst as *const u64).read_volatile(),
                    )
                };
                assert_eq!(put, came, "{kind}, round {round}");
            }
            // About as long as the kernel stays when idle: sometimes shorter, sometimes longer.
            let begun = Instant::now();
            let pause = idle * numbers.below(8) as u32;
            while begun.elapsed() < pause {
                std::hint::spin_loop();
            }
        }
    }
}

/// The kernel exits after its longest stay even with work left, and starts again.
#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_resident_kernel_that_may_not_stay_goes_on_where_it_was() {
    require_gpu();
    let endpoint = Endpoint::builder().build().unwrap();
    let bytes = Numbers(17).bytes(1 << 20);
    let (from, to) = (Memory::new(&endpoint, &bytes), Memory::new(&endpoint, &vec![0; 1 << 20]));
    let mut options = options();
    options.stay = Duration::from_micros(50);
    let mut copier = Copier::new(0, CopierKind::Resident, &options).unwrap();
    for piece in [64usize, 4096, 65536] {
        to.write(&vec![0; 1 << 20]);
        let runs: Vec<Run> = (0..bytes.len() / piece)
            .map(|n| (n * piece) as u64)
            .map(|at| Run { src: from.address + at, dst: to.address + at, len: piece as u64 })
            .collect();
        for list in runs.chunks(100) {
            submit(&mut copier, list);
        }
        copier.wait(u64::MAX).unwrap();
        assert!(to.read() == bytes, "pieces of {piece}");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn two_copiers_work_at_once() {
    require_gpu();
    let kinds = CopierKind::ALL;
    let pairs = kinds.iter().flat_map(|one| kinds.iter().map(move |other| [*one, *other]));
    for pair in pairs {
        std::thread::scope(|scope| {
            for (thread, kind) in pair.into_iter().enumerate() {
                scope.spawn(move || {
                    let endpoint = Endpoint::builder().build().unwrap();
                    let bytes = Numbers(19 + thread as u64).bytes(100_000);
                    let from = Memory::new(&endpoint, &bytes);
                    let to = Memory::new(&endpoint, &vec![0; bytes.len()]);
                    let mut copier = new(kind);
                    for round in 1..20u64 {
                        to.write(&vec![0; bytes.len()]);
                        let len = 1000 * round;
                        let starts = (0..bytes.len() as u64).step_by(len as usize);
                        let runs: Vec<Run> = starts
                            .map(|at| Run {
                                src: from.address + at,
                                dst: to.address + at,
                                len: len.min(bytes.len() as u64 - at),
                            })
                            .collect();
                        copy_now(&mut copier, &runs);
                        assert!(to.read() == bytes, "{kind} beside another, round {round}");
                    }
                });
            }
        });
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_copier_that_is_dropped_has_copied_what_it_was_given() {
    require_gpu();
    const LEN: usize = 8 << 20;
    let endpoint = Endpoint::builder().build().unwrap();
    let bytes = Numbers(23).bytes(LEN);
    let (from, to) = (Memory::new(&endpoint, &bytes), Memory::new(&endpoint, &vec![0; LEN]));
    for kind in CopierKind::ALL {
        to.write(&vec![0; LEN]);
        let mut copier = new(kind);
        for list in 0..4 {
            let at = list * LEN as u64 / 4;
            let run = |n: u64| {
                let at = at + n * LEN as u64 / 64;
                Run { src: from.address + at, dst: to.address + at, len: LEN as u64 / 64 }
            };
            submit(&mut copier, &(0..16).map(run).collect::<Vec<_>>());
        }
        drop(copier);
        assert!(to.read() == bytes, "{kind}");
        // Also with no copy in progress, and without any submission.
        copy_now(&mut new(kind), &[Run { src: from.address, dst: to.address, len: 100 }]);
        drop(new(kind));
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn nothing_is_allocated_for_copies() {
    require_gpu();
    let endpoint = Endpoint::builder().build().unwrap();
    let from = Memory::new(&endpoint, &[1; 65536]);
    let to = Memory::new(&endpoint, &[0; 65536]);
    let run = |n: u64| Run { src: from.address + n * 64, dst: to.address + n * 64, len: 64 };
    let runs: Vec<Run> = (0..200).map(run).collect();
    for kind in CopierKind::ALL {
        let mut copier = new(kind);
        let mut some = |rounds: usize| {
            for round in 0..rounds {
                copy_now(&mut copier, &runs[..[1, 10, 200][round % 3]]);
            }
        };
        some(30);
        let before = ALLOCATIONS.get();
        some(100);
        assert_eq!(ALLOCATIONS.get() - before, 0, "{kind}");
    }
}
