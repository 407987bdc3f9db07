//! `peerway-count` runs hot operations for callgrind to count, one figure per process.
//!
//! `cargo xtask instructions` runs this program under `valgrind --tool=callgrind`. Callgrind
//! collects only inside [`counted`], on the thread that calls it. A figure therefore holds the work
//! of one thread. For direct transfers that is the whole transfer. On lanes it is the post, which
//! builds the frame and sends it; the answer depends on another thread, so the program waits for it
//! outside the count.
//!
//! RDMA figures use the fake library of `peerway-fakeverbs`. `cargo xtask instructions` subtracts
//! that library's own instructions, because a real device has its own processor.

use std::hint::black_box;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use peerway::{Access, Batch, BuildError, Endpoint, Pin, PostError, Prepared, Region, Transfer};
use peerway_core::config::DataProtection;
use peerway_core::counter::{Counters, HighWater};
use peerway_core::credit::Window;
use peerway_core::descriptor::Descriptor;
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::region::{MemoryKind, Span};
use peerway_core::stripe;
use peerway_core::wire::{Control, Header, Hello, Kind, MAX_PAYLOAD, SEGMENT_LEN};
use peerway_core::work::{Blocks, Shape};
use zerocopy::{FromBytes, IntoBytes};

/// Operations per figure. With a thousand, one-time costs disappear behind the repeated ones.
const TIMES: u64 = 1000;
/// Runs before the count, which bind lazy symbols and let tables reach their size.
const WARM_UP: u64 = 20;
/// Bytes per transfer.
const SMALL: u64 = 256;
/// Length of the block list whose walk is counted.
const BLOCKS: u32 = 100_000;
/// Exit status when this machine does not support a path, as programs use it for a skipped test.
const NOT_HERE: u8 = 77;

fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        for figure in FIGURES {
            println!("{:<24} {}", figure.name, figure.about);
        }
        return ExitCode::SUCCESS;
    };
    let Some(figure) = FIGURES.iter().find(|figure| figure.name == name) else {
        eprintln!(
            "peerway-count: unknown figure '{name}'; run it without an argument to list all figures"
        );
        return ExitCode::from(2);
    };
    match (figure.run)() {
        Ok(operations) => {
            println!("{operations}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("peerway-count: {name}: {error:#}");
            if error.is::<NotHere>() { ExitCode::from(NOT_HERE) } else { ExitCode::FAILURE }
        }
    }
}

/// An operation to count. `run` returns how many operations it counted.
struct Figure {
    name: &'static str,
    about: &'static str,
    run: fn() -> anyhow::Result<u64>,
}

const FIGURES: &[Figure] = &[
    Figure {
        name: "same-process-write",
        about: "256 B to a peer in this process, to completion",
        run: || run_whole(Pin::Auto, Shapes::Write),
    },
    Figure {
        name: "local-map-write",
        about: "256 B into a mapping, to completion",
        run: || run_whole(Pin::LocalMap, Shapes::Write),
    },
    Figure {
        name: "local-map-read",
        about: "256 B out of a mapping, to completion",
        run: || run_whole(Pin::LocalMap, Shapes::Read),
    },
    Figure {
        name: "local-map-write-64",
        about: "64 blocks of 256 B into a mapping, to completion",
        run: || run_whole(Pin::LocalMap, Shapes::WriteBlocks),
    },
    Figure {
        name: "local-map-post",
        about: "the post of 5,000 pieces of 512 B, which it must not walk",
        run: || run_post(Pin::LocalMap, Shapes::LongVector),
    },
    Figure {
        name: "local-cma-read",
        about: "256 B by process_vm_readv, to completion",
        run: || run_whole(Pin::LocalCma, Shapes::Read),
    },
    Figure {
        name: "local-cma-write",
        about: "256 B by process_vm_writev, to completion",
        run: || run_whole(Pin::LocalCma, Shapes::Write),
    },
    Figure {
        name: "local-ring-post",
        about: "the post of a 256 B write, into the ring",
        run: || run_post(Pin::LocalRing, Shapes::Write),
    },
    Figure {
        name: "tcp-post",
        about: "the post of a 256 B write, into the socket",
        run: || run_post(Pin::Tcp, Shapes::Write),
    },
    Figure {
        name: "tcp-post-64",
        about: "the post of 64 blocks of 256 B, into the socket",
        run: || run_post(Pin::Tcp, Shapes::WriteBlocks),
    },
    Figure {
        name: "verbs-post",
        about: "the post of a 256 B write, to the device",
        run: || run_post(Pin::Ib, Shapes::Write),
    },
    Figure {
        name: "verbs-post-64",
        about: "the post of 64 blocks of 256 B, to the device",
        run: || run_post(Pin::Ib, Shapes::WriteBlocks),
    },
    Figure {
        name: "verbs-post-poll",
        about: "the post of a 256 B write to the device, and the poll that completes it",
        run: || run_post_and_poll(Pin::Ib),
    },
    Figure {
        name: "efa-post",
        about: "the post of a 256 B write, as a datagram",
        run: || run_post(Pin::Efa, Shapes::Write),
    },
    Figure { name: "frame", about: "a data header, built and checked", run: frame },
    Figure { name: "hello", about: "a hello, encoded and decoded", run: hello },
    Figure { name: "descriptor", about: "a descriptor, written and parsed", run: descriptor },
    Figure { name: "list-check", about: "a block of a list of 100,000, checked", run: list_check },
    Figure { name: "list-walk", about: "a block of that list, walked", run: list_walk },
    Figure { name: "stripe", about: "100 MiB over 4 lanes, cut into pieces", run: stripe_plan },
    Figure { name: "count", about: "an arrival: sequence, window, counter", run: count },
];

/// Runs `once` `times` times. Callgrind looks for this function by name: it must not be inlined,
/// and no other function of this program may have `counted` in its name.
#[inline(never)]
fn counted(times: u64, once: &mut dyn FnMut()) {
    for _ in 0..times {
        once();
    }
}

/// Counts an operation that is complete when it returns.
fn count_all(mut once: impl FnMut()) -> anyhow::Result<u64> {
    for _ in 0..WARM_UP {
        once();
    }
    counted(TIMES, &mut once);
    Ok(TIMES)
}

/// This machine does not support the path of the figure.
#[derive(Debug)]
struct NotHere(String);

impl std::fmt::Display for NotHere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotHere {}

#[derive(Clone, Copy)]
enum Shapes {
    Write,
    Read,
    WriteBlocks,
    LongVector,
}

/// Two endpoints of this process, connected over one path, and a prepared transfer between them.
struct World {
    prepared: Prepared,
    /// Objects that must outlive the transfer.
    _kept: (Endpoint, Endpoint, Region),
}

impl World {
    fn new(pin: Pin, shape: Shapes) -> anyhow::Result<Self> {
        // Valgrind is slow: this time is never reached, and no heartbeats occur during the count.
        let builder = || Endpoint::builder().transport(pin).detect(Duration::from_secs(600));
        let make = || match builder().build() {
            Err(error @ BuildError::NoRdma { .. }) => bail!(NotHere(error.to_string())),
            other => Ok(other?),
        };
        let (ours, theirs) = (make()?, make()?);
        let peer = match ours.connect(&theirs.metadata()) {
            // The kernel can forbid only this path.
            Err(error) if pin == Pin::LocalCma => bail!(NotHere(error.to_string())),
            other => other?,
        };
        let pieces = if matches!(shape, Shapes::LongVector) { 5000 } else { 64 };
        let len = 2 * pieces * SMALL;
        let owned = theirs.allocate(len as usize)?;
        let remote = peer.import(&owned.advertise(Access::READ_WRITE)?)?;
        let local = ours.allocate(len as usize)?;
        let every_second: Vec<u32> = (0..64).map(|i| 2 * i).collect();
        let blocks = (
            local.blocks(0, SMALL, SMALL, &every_second),
            remote.blocks(0, SMALL, SMALL, &every_second),
        );
        let batch = match shape {
            Shapes::Write => Batch::write(&local.slice(0..SMALL), &remote.slice(0..SMALL))?,
            Shapes::Read => Batch::read(&local.slice(0..SMALL), &remote.slice(0..SMALL))?,
            Shapes::WriteBlocks => Batch::write_blocks(blocks.0, blocks.1)?,
            Shapes::LongVector => {
                // Adjacent pieces swap places, so that the engine cannot merge them.
                let place = |i: u64| 2 * SMALL * i..2 * SMALL * (i + 1);
                let pair = |i| (local.slice(place(i)), remote.slice(place(i ^ 1)));
                Batch::write_vector(&(0..pieces).map(pair).collect::<Vec<_>>())?
            }
        };
        let transfer = peer.post(&batch)?;
        transfer.join().ok()?;
        let (took, wanted) = (transfer.path().to_string(), peer.path().kind.to_string());
        if took != wanted {
            bail!("the transfer took the path {took}, not {wanted}");
        }
        Ok(Self { prepared: peer.prepare(batch)?, _kept: (ours, theirs, owned) })
    }
}

/// Counts transfers from post to completion.
fn run_whole(pin: Pin, shape: Shapes) -> anyhow::Result<u64> {
    let world = World::new(pin, shape)?;
    let mut failed = None;
    let operations = count_all(|| match world.prepared.run() {
        Ok(ended) => failed = failed.take().or_else(|| ended.ok().err()),
        Err(error) => panic!("cannot post the transfer: {error}"),
    });
    failed.map_or(operations, |error| Err(error).context("a transfer failed"))
}

/// Counts posts that find the driver's lock free.
fn run_post(pin: Pin, shape: Shapes) -> anyhow::Result<u64> {
    let world = World::new(pin, shape)?;
    // Fewer posts of many bytes: valgrind also executes the copies that it does not count.
    let times = if matches!(shape, Shapes::LongVector) { TIMES / 20 } else { TIMES };
    // Copies into a mapping need no lock. A wait would only put the threads to sleep that help with
    // the copies.
    let asleep = pin != Pin::LocalMap;
    count_posts(times, asleep, || world.prepared.post())
}

/// Counts the post of a write together with the poll that completes it. The fake device has
/// finished the write when the post returns.
fn run_post_and_poll(pin: Pin) -> anyhow::Result<u64> {
    let world = World::new(pin, Shapes::Write)?;
    let mut late = 0;
    let times = count_posts(TIMES, true, || {
        let transfer = world.prepared.post()?;
        // If a progress thread polls at that moment, this poll finds no completion.
        late += u64::from(transfer.poll().is_none());
        Ok(transfer)
    })?;
    ensure!(late * 100 <= times, "{late} of {times} writes were not complete when polled");
    Ok(times)
}

/// Counts what posts a transfer, but not the wait for its completion. If `asleep` is set, each post
/// happens while the progress threads sleep.
fn count_posts(
    times: u64,
    asleep: bool,
    mut post: impl FnMut() -> Result<Transfer, PostError>,
) -> anyhow::Result<u64> {
    let progress = ProgressThreads::find()?;
    for round in 0..WARM_UP + times {
        let mut posted = None;
        let mut once = || posted = Some(post());
        if asleep {
            progress.wait_until_asleep();
        }
        if round < WARM_UP {
            once()
        } else {
            counted(1, &mut once)
        }
        posted.context("nothing was posted")??.join().ok()?;
    }
    Ok(times)
}

/// The engine's progress threads. A progress thread that polls holds the driver's lock, and a post
/// then only queues its command. Under valgrind, which runs one thread at a time, that happens
/// often.
struct ProgressThreads(Vec<PathBuf>);

impl ProgressThreads {
    fn find() -> anyhow::Result<Self> {
        let mut found = Vec::new();
        for task in std::fs::read_dir("/proc/self/task")? {
            let task = task?.path();
            if std::fs::read_to_string(task.join("comm"))?.trim() == "peerway-serve" {
                found.push(task.join("syscall"));
            }
        }
        ensure!(!found.is_empty(), "this process has no progress threads");
        Ok(Self(found))
    }

    /// Waits until each thread is blocked in its epoll system call. Where the kernel does not show
    /// the system call, the thread counts as asleep.
    fn wait_until_asleep(&self) {
        let sleeps = [libc::SYS_epoll_pwait2, libc::SYS_epoll_pwait, libc::SYS_epoll_wait];
        let sleeps = sleeps.map(|call| format!("{call} "));
        let is_asleep = |path: &PathBuf| {
            let call = std::fs::read_to_string(path);
            call.map_or(true, |call| sleeps.iter().any(|sleep| call.starts_with(sleep)))
        };
        while !self.0.iter().all(is_asleep) {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

fn frame() -> anyhow::Result<u64> {
    let mut sequence = 0;
    count_all(|| {
        sequence += 1;
        let mut header = Header::new(black_box(Kind::Write));
        header.sequence = sequence.into();
        header.set_body(8, 8 * SEGMENT_LEN, SMALL as usize);
        let bytes = black_box(header.as_bytes());
        let back = Header::read_from_bytes(bytes).map(|header| header.check());
        assert!(matches!(black_box(back), Ok(Ok(_))));
    })
}

fn hello() -> anyhow::Result<u64> {
    let hello = Control::Hello(Hello {
        incarnation: Incarnation([1; 16]),
        session: [3; 16],
        replaces: None,
        sub_session: None,
        lanes: 4,
        detect_ms: 2000,
        host: [6; 32],
        local: true,
        data: DataProtection::Off,
        rdma: Vec::new(),
    });
    count_all(|| {
        let bytes = black_box(&hello).to_bytes();
        assert!(Control::from_bytes(black_box(&bytes)).is_ok());
    })
}

fn descriptor() -> anyhow::Result<u64> {
    let grant = SlotId { index: 7, generation: 9 };
    let owner = Incarnation([1; 16]);
    let whole = Descriptor::new(&owner, grant, [2; 16], Access::READ_WRITE, 1 << 40, 1 << 30);
    count_all(|| {
        let bytes = black_box(&whole).to_bytes();
        assert!(Descriptor::from_bytes(black_box(&bytes)).is_ok());
    })
}

/// Two lists of every second block of memory twice as large, so that no blocks can be merged.
fn lists() -> (Blocks, Blocks, Span) {
    let blocks = Blocks {
        region: 0,
        base: 0,
        stride: 4096,
        len: 4096,
        indices: (0..BLOCKS).map(|i| 2 * i).collect(),
        kind: MemoryKind::Host,
    };
    (blocks.clone(), blocks, Span { offset: 0, len: 2 * 4096 * u64::from(BLOCKS) })
}

fn list_check() -> anyhow::Result<u64> {
    let (local, remote, extent) = lists();
    counted(1, &mut || {
        let shape = Shape::blocks(local.clone(), extent, remote.clone(), extent);
        assert!(black_box(shape).is_ok());
    });
    Ok(u64::from(BLOCKS))
}

fn list_walk() -> anyhow::Result<u64> {
    let (local, remote, extent) = lists();
    let shape = Shape::blocks(local, extent, remote, extent)?;
    let mut walked = 0;
    counted(1, &mut || {
        let mut at = shape.start();
        while let Some(pair) = shape.peek(&at, black_box(MAX_PAYLOAD)) {
            shape.advance(&mut at, black_box(pair).len);
            walked += 1;
        }
    });
    Ok(walked)
}

fn stripe_plan() -> anyhow::Result<u64> {
    count_all(|| {
        let whole = black_box(Span { offset: 100, len: 100 << 20 });
        let piece = stripe::piece_len(whole.len, 4, MAX_PAYLOAD);
        for span in stripe::pieces(whole, piece) {
            black_box(span);
        }
    })
}

fn count() -> anyhow::Result<u64> {
    let (mut high, mut window) = (HighWater::default(), Window::new(8 << 20, 256));
    let (mut counters, from) = (Counters::new(1024, 128), Incarnation([7; 16]));
    let mut sequence = 0;
    count_all(|| {
        sequence += 1;
        if black_box(&window).room() > 0 && high.take(black_box(sequence)) {
            window.take(SMALL);
            black_box(counters.arrive(black_box(5), black_box(&from)));
            window.put_back(SMALL);
        }
    })
}
