//! GPU memory, on any CUDA driver: that of a GPU, or the stand-in `peerway-fakecuda`.
//!
//! The tests check every byte right after the transfer ends. An engine that forgets to wait for a
//! copy returns old bytes.

mod on_gpu;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use peerway::gpu::jit::{self, JitError, Program, Source, Target};
use peerway::gpu::{DeviceMemory, DeviceMemoryKind, DeviceMemoryOptions, PinnedMemory};
use peerway::{
    Access, Batch, Endpoint, Fence, LocalSlice, PathKind, Peer, Pin, Reason, Region, RegisterError,
    RemoteRegion, RemoteSlice, TransferError,
};

use on_gpu::require_gpu;

fn endpoint(pin: Pin) -> Endpoint {
    Endpoint::builder().transport(pin).build().unwrap()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// The kind of a test's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Gpu,
    Host,
    Shared,
}

fn memory(endpoint: &Endpoint, kind: Kind, bytes: &[u8]) -> Region {
    match kind {
        Kind::Host => endpoint.register(bytes.to_vec()).unwrap(),
        Kind::Shared | Kind::Gpu => {
            let region = match kind {
                Kind::Gpu => endpoint.allocate_gpu(0, bytes.len() as u64).unwrap(),
                _ => endpoint.allocate(bytes.len()).unwrap(),
            };
            region.write_at(0, bytes).unwrap();
            region
        }
    }
}

const MIXES: [(Kind, Kind); 5] = [
    (Kind::Gpu, Kind::Gpu),
    (Kind::Gpu, Kind::Host),
    (Kind::Gpu, Kind::Shared),
    (Kind::Host, Kind::Gpu),
    (Kind::Shared, Kind::Gpu),
];

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn memory_is_allocated_the_best_way_there_is_and_says_which() {
    require_gpu();
    let best = DeviceMemory::allocate(0, 5_000_000, &DeviceMemoryOptions::default()).unwrap();
    eprintln!("{best:?}: {:?}", best.why_not_better());
    assert_eq!((best.len(), best.gpu()), (5_000_000, 0));
    assert_eq!(best.why_not_better().is_none(), best.kind() == DeviceMemoryKind::Fabric);
    let options = DeviceMemoryOptions::default().from(DeviceMemoryKind::Plain).zeroed();
    let plain = DeviceMemory::allocate(0, 1000, &options).unwrap();
    assert_eq!((plain.kind(), plain.why_not_better()), (DeviceMemoryKind::Plain, None));
    let endpoint = endpoint(Pin::Auto);
    let region = endpoint.register_gpu(plain).unwrap();
    assert_eq!((region.gpu(), contents(&region)), (Some(0), vec![0; 1000]));
    let region = endpoint.register_gpu(best).unwrap();
    let bytes = pattern(1, 4_999_999);
    region.write_at(1, &bytes).unwrap();
    assert_eq!(contents(&region)[1..], bytes);
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn memory_that_is_not_gpu_memory_is_refused_in_a_sentence() {
    require_gpu();
    let endpoint = endpoint(Pin::Auto);
    let said = |result: Result<Region, RegisterError>| result.unwrap_err().to_string();
    let count = peerway::gpu::devices().unwrap().len() as u32;
    let error = said(endpoint.allocate_gpu(count, 4096));
    assert!(error.contains(&format!("no GPU {count}")), "{error}");
    let host = vec![0u8; 4096];
    // SAFETY: the call refuses the address, so nothing uses it.
    let error = said(unsafe { endpoint.register_gpu_raw(host.as_ptr() as u64, 4096) });
    assert!(error.contains("not memory of a GPU"), "{error}");
    let memory = DeviceMemory::allocate(0, 4096, &DeviceMemoryOptions::default()).unwrap();
    let address = memory.address();
    // SAFETY: it lives as long as `memory`, and only this region uses it.
    let found = unsafe { endpoint.register_raw(address as *mut u8, 4096) }.unwrap();
    assert_eq!(found.gpu(), Some(0), "GPU memory is recognised by its address");
    let options = DeviceMemoryOptions::default().from(DeviceMemoryKind::Plain);
    let plain = DeviceMemory::allocate(0, 4096, &options).unwrap();
    // SAFETY: the call refuses the range, so nothing uses it.
    let error = said(unsafe { endpoint.register_gpu_raw(plain.address(), 1 << 40) });
    assert!(error.contains("leaves the allocation"), "{error}");
    drop((found, memory));
    // SAFETY: the call refuses the address, so nothing uses it.
    let error = said(unsafe { endpoint.register_gpu_raw(address, 4096) });
    assert!(error.contains("not memory of a GPU"), "{error}");
    let total = peerway::gpu::devices().unwrap()[0].memory;
    let error = said(endpoint.allocate_gpu(0, total * 2));
    assert!(error.contains("cannot allocate") && error.contains("cuMemAlloc"), "{error}");
    // The process continues to work.
    let region = endpoint.allocate_gpu(0, 4096).unwrap();
    region.fill(0, 4096, 7).unwrap();
    assert_eq!(contents(&region), vec![7; 4096]);
}

/// Transfers of every shape, both ways, between these kinds of memory.
fn shapes(peer: &Peer, a: &Endpoint, b: &Endpoint, mix: (Kind, Kind), path: PathKind) {
    let (local, remote) = mix;
    for len in [1usize, 63, 4096, 65_537, (1 << 20) + 5, (5 << 20) + 3] {
        let (ours, theirs) = (pattern(1, len), pattern(2, len));
        let here = memory(a, local, &ours);
        let there = memory(b, remote, &theirs);
        let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let write = Batch::write(&here.all(), &imported.all()).unwrap();
        let transfer = peer.post(&write).unwrap();
        transfer.join().ok().unwrap();
        assert_eq!(transfer.path(), path, "{mix:?}, {len} bytes");
        assert_eq!(transfer.stats().bytes_done, len as u64);
        assert!(contents(&there) == ours, "{mix:?} write of {len}");
        there.write_at(0, &theirs).unwrap();
        peer.run(&Batch::read(&here.all(), &imported.all()).unwrap()).unwrap().ok().unwrap();
        assert!(contents(&here) == theirs, "{mix:?} read of {len}");
    }
    // Blocks, as of a paged cache, in a different order on each side.
    let (block, count) = (1000u64, 300usize);
    let bytes = pattern(3, block as usize * count);
    let here = memory(a, local, &bytes);
    let there = memory(b, remote, &vec![0; bytes.len()]);
    let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let ours: Vec<u32> = (0..count as u32).map(|i| i * 7 % count as u32).collect();
    let theirs: Vec<u32> = (0..count as u32).map(|i| i * 11 % count as u32).collect();
    let blocks = Batch::write_blocks(
        here.blocks(0, block, block, &ours),
        imported.blocks(0, block, block, &theirs),
    );
    peer.run(&blocks.unwrap()).unwrap().ok().unwrap();
    let mut expected = vec![0; bytes.len()];
    for (from, to) in ours.iter().zip(&theirs) {
        let (from, to) = (*from as usize * 1000, *to as usize * 1000);
        expected[to..to + 1000].copy_from_slice(&bytes[from..from + 1000]);
    }
    assert!(contents(&there) == expected, "{mix:?} blocks");
    // A vector of ranges of every length and alignment.
    let target = memory(a, local, &vec![0; bytes.len()]);
    let mut pairs: Vec<(LocalSlice, RemoteSlice)> = Vec::new();
    let mut want = vec![0; bytes.len()];
    let mut at = 0u64;
    for i in 0..150u64 {
        let len = i * i % 977 + 1;
        pairs.push((target.slice(at..at + len), imported.slice(at + 13..at + 13 + len)));
        let (from, to) = (at as usize + 13, at as usize);
        want[to..to + len as usize].copy_from_slice(&expected[from..from + len as usize]);
        at += len + i % 5;
    }
    peer.run(&Batch::read_vector(&pairs).unwrap()).unwrap().ok().unwrap();
    assert!(contents(&target) == want, "{mix:?} vector");
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn every_shape_arrives_between_gpu_and_host_in_one_process() {
    require_gpu();
    let (a, b) = (endpoint(Pin::Auto), endpoint(Pin::Auto));
    let peer = a.connect(&b.metadata()).unwrap();
    for mix in MIXES {
        shapes(&peer, &a, &b, mix, PathKind::SameProcess);
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn every_shape_arrives_on_wires_that_do_not_reach_gpus() {
    require_gpu();
    for (pin, path) in [(Pin::Tcp, PathKind::Tcp), (Pin::LocalRing, PathKind::LocalRing)] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        for mix in MIXES {
            shapes(&peer, &a, &b, mix, path);
        }
    }
}

/// A GPU signals no event when a copy is done, so a progress thread must poll for it. This holds
/// for small copies too, when no thread waits for the transfer and the next heartbeat is far away.
#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_small_write_without_a_waiting_thread_arrives_at_once() {
    require_gpu();
    for pin in [Pin::Tcp, Pin::LocalRing] {
        let calm = || Endpoint::builder().transport(pin).detect(Duration::from_secs(600));
        let (a, b) = (calm().build().unwrap(), calm().build().unwrap());
        let peer = a.connect(&b.metadata()).unwrap();
        let bytes = pattern(4, 4096);
        let ours = memory(&a, Kind::Gpu, &bytes);
        let theirs = memory(&b, Kind::Host, &[0; 4096]);
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        // Wait until all threads are blocked.
        std::thread::sleep(Duration::from_millis(50));
        let _left_alone = peer.post(&Batch::write(&ours.all(), &remote.all()).unwrap()).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while contents(&theirs) != bytes {
            assert!(Instant::now() < until, "{pin}: the write does not arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn memory_that_was_freed_while_registered_is_refused_and_the_process_lives_on() {
    require_gpu();
    for pin in [Pin::Auto, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let plain = DeviceMemoryOptions::default().from(DeviceMemoryKind::Plain);
        let raw = |endpoint: &Endpoint| {
            let memory = DeviceMemory::allocate(0, 100_000, &plain).unwrap();
            // SAFETY: the test frees the memory below on purpose and checks that the engine
            // notices.
            let region = unsafe { endpoint.register_gpu_raw(memory.address(), 100_000) };
            (memory, region.unwrap())
        };
        let (host, there) =
            (a.register(vec![1; 100_000]).unwrap(), memory(&b, Kind::Gpu, &[0; 100_000]));
        let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let (held, here) = raw(&a);
        let batch = Batch::write(&here.all(), &imported.all()).unwrap();
        peer.run(&batch).unwrap().ok().unwrap();
        drop(held);
        let error = peer.run(&batch).unwrap_err().to_string();
        assert!(error.contains("was freed while it was registered"), "{pin:?}: {error}");
        if pin == Pin::Tcp {
            // Freed memory of the owner, which only the owner can detect.
            let (held, theirs) = raw(&b);
            let freed = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
            drop(held);
            for batch in [
                Batch::write(&host.all(), &freed.all()).unwrap(),
                Batch::read(&host.all(), &freed.all()).unwrap(),
            ] {
                let ended = peer.run(&batch).unwrap();
                assert_eq!(ended.reason, Reason::Failed(TransferError::Fault));
            }
        }
        peer.run(&Batch::write(&host.all(), &imported.all()).unwrap()).unwrap().ok().unwrap();
        assert_eq!(contents(&there), vec![1; 100_000]);
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn memory_is_freed_after_what_its_stream_holds() {
    require_gpu();
    let mine = streams::Mine::new();
    let kept = endpoint(Pin::Auto).allocate_gpu(0, 1 << 20).unwrap();
    for kind in [DeviceMemoryKind::Plain, DeviceMemoryKind::Fabric] {
        let options = DeviceMemoryOptions::default().from(kind);
        let memory = DeviceMemory::allocate(0, 1 << 20, &options).unwrap();
        mine.fill(memory.address(), 5, 1 << 20);
        mine.copy(kept.addr(), memory.address(), 1 << 20);
        // SAFETY: the stream is alive, and no other stream uses the memory.
        unsafe { memory.free_after(mine.raw()).unwrap() };
        mine.stream.synchronize().unwrap();
        assert!(contents(&kept).iter().all(|byte| *byte == 5), "{kind}");
    }
}

#[test]
#[ignore = "needs two GPUs: cargo xtask gpu-test, then gpu/run.sh tests"]
fn memories_of_two_gpus_are_told_apart() {
    require_gpu();
    assert!(peerway::gpu::devices().unwrap().len() >= 2, "this test needs two GPUs");
    const LEN: usize = 50_000;
    for pin in [Pin::Auto, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let on = |endpoint: &Endpoint, gpu: u32, bytes: &[u8]| {
            let region = endpoint.allocate_gpu(gpu, LEN as u64).unwrap();
            region.write_at(0, bytes).unwrap();
            region
        };
        let (first, second) = (pattern(1, LEN), pattern(2, LEN));
        let here = [on(&a, 0, &first), on(&a, 1, &second)];
        let there = [on(&b, 1, &second), on(&b, 0, &first)];
        let remote = there
            .each_ref()
            .map(|region| peer.import(&region.advertise(Access::READ_WRITE).unwrap()).unwrap());
        // From one GPU to the other, whether or not they can access each other's memory.
        for i in 0..2 {
            peer.run(&Batch::write(&here[i].all(), &remote[i].all()).unwrap())
                .unwrap()
                .ok()
                .unwrap();
        }
        assert!(contents(&there[0]) == first && contents(&there[1]) == second, "{pin:?}");
        // Both GPUs in one vector at the far side.
        let host = a.register(vec![0; 2 * LEN]).unwrap();
        let halves = [host.slice(0..LEN as u64), host.slice(LEN as u64..2 * LEN as u64)];
        let pairs: Vec<_> = halves.into_iter().zip(remote.iter().map(RemoteRegion::all)).collect();
        peer.run(&Batch::read_vector(&pairs).unwrap()).unwrap().ok().unwrap();
        assert!(contents(&host) == [first, second].concat(), "{pin:?}");
        // Both GPUs in one vector on this side is an error.
        let mixed = [(here[0].all(), remote[0].all()), (here[1].all(), remote[1].all())];
        let error = Batch::write_vector(&mixed).err().unwrap().to_string();
        assert!(error.contains("GPU 0 and of GPU 1"), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn counts_and_notifications_are_seen_after_the_bytes() {
    require_gpu();
    for pin in [Pin::Auto, Pin::Tcp, Pin::LocalRing] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let there = memory(&b, Kind::Gpu, &vec![0; 300_000]);
        let imported = peer.import(&there.advertise(Access::WRITE).unwrap()).unwrap();
        for round in 1..=20u64 {
            let bytes = pattern(round, 300_000);
            let here = memory(&a, Kind::Gpu, &bytes);
            let batch = Batch::write(&here.all(), &imported.all()).unwrap().count(3);
            let batch = batch.notify(&round.to_le_bytes()).unwrap();
            let transfer = peer.post(&batch).unwrap();
            assert!(b.wait_counter(3, round, Duration::from_secs(10)) >= round, "{pin:?}");
            assert!(contents(&there) == bytes, "{pin:?} round {round}");
            let note = b.notification(Duration::from_secs(10)).expect("a notification");
            assert_eq!(note.message, round.to_le_bytes());
            transfer.join().ok().unwrap();
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_cancelled_or_revoked_transfer_writes_nothing_more() {
    require_gpu();
    const LEN: usize = 64 << 20;
    for pin in [Pin::Auto, Pin::Tcp, Pin::LocalRing] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let here = a.allocate_gpu(0, LEN as u64).unwrap();
        here.fill(0, LEN as u64, 1).unwrap();
        let there = b.allocate_gpu(0, LEN as u64).unwrap();
        there.fill(0, LEN as u64, 2).unwrap();
        let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
        for batch in [
            Batch::write(&here.all(), &imported.all()).unwrap(),
            Batch::read(&here.all(), &imported.all()).unwrap(),
        ] {
            let transfer = peer.post(&batch).unwrap();
            transfer.cancel();
            let ended = transfer.join();
            assert!(matches!(ended.reason, Reason::Cancelled | Reason::Done), "{pin:?}: {ended:?}");
            assert_eq!(ended.fence, Fence::Held, "{pin:?}");
            // No byte of it arrives any more: bytes that are written now stay.
            here.fill(0, LEN as u64, 3).unwrap();
            there.fill(0, LEN as u64, 4).unwrap();
            std::thread::sleep(Duration::from_millis(30));
            assert!(contents(&here).iter().all(|byte| *byte == 3), "{pin:?}");
            assert!(contents(&there).iter().all(|byte| *byte == 4), "{pin:?}");
        }
        let transfer = peer.post(&Batch::write(&here.all(), &imported.all()).unwrap()).unwrap();
        assert_eq!(there.revoke(), Fence::Held, "{pin:?}");
        there.fill(0, LEN as u64, 5).unwrap();
        let ended = transfer.join();
        let revoked = Reason::Failed(TransferError::Revoked);
        assert!(ended.reason == revoked || ended.reason == Reason::Done, "{pin:?}: {ended:?}");
        std::thread::sleep(Duration::from_millis(30));
        assert!(contents(&there).iter().all(|byte| *byte == 5), "{pin:?}");
    }
}

/// A process that owns memory and executes commands: one line in, one line out.
struct Owner {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Owner {
    fn start(pin: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name("owner"), "--ignored", "--nocapture", "--quiet"])
            .env("PEERWAY_TEST_OWNER", pin)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    /// The next line with an answer. Test programs print other lines too.
    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "the owner ended");
            if let Some(at) = line.find("answer ") {
                return line[at + 7..].trim().to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.answer()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The full name of a test, wherever this file is included.
fn name(test: &str) -> String {
    match module_path!().split_once("::") {
        Some((_, module)) => format!("{module}::{test}"),
        None => test.to_owned(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// Not a test: the program that `Owner` starts.
#[test]
#[ignore = "run by tests that need a second process"]
fn owner() {
    let pin = std::env::var("PEERWAY_TEST_OWNER").expect("set by the first process");
    require_gpu();
    let endpoint = endpoint(pin.parse().unwrap());
    println!("answer {}", hex(&endpoint.metadata()));
    let mut region = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            // Arguments: kind, length, offset in the allocation, seed.
            "make" => {
                let (len, offset) = (number(2), number(3));
                let bytes = pattern(number(4), len as usize);
                let made = match words[1] {
                    "host" => endpoint.register(bytes).unwrap(),
                    "shared" => memory(&endpoint, Kind::Shared, &bytes),
                    kind => {
                        let from = if kind == "plain" {
                            DeviceMemoryKind::Plain
                        } else {
                            DeviceMemoryKind::Fabric
                        };
                        let options = DeviceMemoryOptions::default().from(from);
                        let held = DeviceMemory::allocate(0, len + offset, &options).unwrap();
                        let address = held.address() + offset;
                        std::mem::forget(held);
                        // SAFETY: the memory is never freed.
                        let made = unsafe { endpoint.register_gpu_raw(address, len as usize) };
                        let made = made.unwrap();
                        made.write_at(0, &bytes).unwrap();
                        made
                    }
                };
                println!("answer {}", hex(&made.advertise(Access::READ_WRITE).unwrap()));
                region = Some(made);
            }
            "is" => {
                let region = region.as_ref().unwrap();
                let same = contents(region) == pattern(number(1), region.len() as usize);
                println!("answer {same}");
            }
            "revoke" => println!("answer {:?}", region.as_ref().unwrap().revoke()),
            "stop" => std::process::abort(),
            other => panic!("{other}"),
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn another_process_is_reached_at_any_offset_of_any_kind_of_memory() {
    require_gpu();
    let a = endpoint(Pin::Auto);
    // A process maps GPU memory of its peers only if it uses a GPU itself.
    let warm = a.allocate_gpu(0, 4096).unwrap();
    for kind in ["plain", "best", "host", "shared"] {
        let mut owner = Owner::start("auto");
        let peer = a.connect(&unhex(&owner.answer())).unwrap();
        for (len, offset) in
            [(100usize, 0u64), (4096, 3 << 20), (3_000_001, (1 << 20) + 512), (70 << 20, 256)]
        {
            let descriptor = unhex(&owner.ask(&format!("make {kind} {len} {offset} 5")));
            let imported = peer.import(&descriptor).unwrap();
            let here = memory(&a, Kind::Gpu, &pattern(6, len));
            let write = peer.post(&Batch::write(&here.all(), &imported.all()).unwrap()).unwrap();
            write.join().ok().unwrap();
            let expected = match kind {
                "host" => PathKind::LocalRing,
                _ => PathKind::GpuIpc,
            };
            assert_eq!(write.path(), expected, "{kind} {len}+{offset}");
            assert_eq!(owner.ask("is 6"), "true", "{kind} {len}+{offset}");
            let target = memory(&a, Kind::Gpu, &vec![0; len]);
            let read = peer.post(&Batch::read(&target.all(), &imported.all()).unwrap()).unwrap();
            read.join().ok().unwrap();
            assert!(contents(&target) == pattern(6, len), "{kind} {len}+{offset}");
            // Also from local host memory.
            let host = a.register(pattern(7, len)).unwrap();
            peer.run(&Batch::write(&host.all(), &imported.all()).unwrap()).unwrap().ok().unwrap();
            assert_eq!(owner.ask("is 7"), "true", "{kind} {len}+{offset}");
        }
        assert_eq!(owner.ask("revoke"), "Held");
    }
    drop(warm);
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn an_owner_that_dies_ends_transfers_and_nothing_else() {
    require_gpu();
    let a = endpoint(Pin::Auto);
    let here = memory(&a, Kind::Gpu, &pattern(1, 8 << 20));
    for kind in ["plain", "best"] {
        let mut owner = Owner::start("auto");
        let peer = a.connect(&unhex(&owner.answer())).unwrap();
        let descriptor = unhex(&owner.ask(&format!("make {kind} {} 0 5", 8 << 20)));
        let imported: RemoteRegion = peer.import(&descriptor).unwrap();
        peer.run(&Batch::write(&here.all(), &imported.all()).unwrap()).unwrap().ok().unwrap();
        writeln!(owner.child.stdin.as_mut().unwrap(), "stop").unwrap();
        owner.child.wait().unwrap();
        let mut failed = None;
        for _ in 0..3000 {
            match peer.run(&Batch::write(&here.all(), &imported.all()).unwrap()) {
                Ok(ended) if ended.reason == Reason::Done => {}
                Ok(ended) => failed = Some(ended.reason == Reason::Failed(TransferError::PeerGone)),
                Err(_) => failed = Some(true),
            }
            if failed.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(failed, Some(true), "{kind}");
        assert!(contents(&here) == pattern(1, 8 << 20));
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_thousand_allocations_and_transfers_leave_nothing_behind() {
    require_gpu();
    let (a, b) = (endpoint(Pin::Auto), endpoint(Pin::Auto));
    let peer = a.connect(&b.metadata()).unwrap();
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = |i: usize| {
        let len = 4096 + i as u64 % 9 * 100_000;
        let (here, there) = (a.allocate_gpu(0, len).unwrap(), b.allocate_gpu(0, len).unwrap());
        let imported = peer.import(&there.advertise(Access::WRITE).unwrap()).unwrap();
        peer.run(&Batch::write(&here.all(), &imported.all()).unwrap()).unwrap().ok().unwrap();
    };
    (0..20).for_each(round);
    let before = fds();
    (0..1000).for_each(round);
    // Another thread frees the memory soon.
    let begun = std::time::Instant::now();
    while fds() > before + 2 && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(fds() <= before + 2, "{before} file descriptors became {}", fds());
}

/// A stream of the driver, made through the same library that the engine uses.
mod streams {
    use std::ffi::c_void;
    use std::sync::Arc;

    use peerway_sys::Library;
    use peerway_sys::cuda::{Cuda, Gpu, Stream};

    pub(super) struct Mine {
        pub(super) gpu: Arc<Gpu>,
        pub(super) stream: Stream,
    }

    impl Mine {
        pub(super) fn new() -> Self {
            let cuda = Cuda::load(Library::Cuda.named()).unwrap();
            let gpu = Gpu::open(&cuda, 0).unwrap();
            let stream = Stream::new(&gpu).unwrap();
            Self { gpu, stream }
        }

        pub(super) fn raw(&self) -> *mut c_void {
            self.stream.raw()
        }

        /// Sets bytes when the stream reaches this point.
        pub(super) fn fill(&self, address: u64, value: u8, len: usize) {
            // SAFETY: the tests keep the memory until the stream has finished.
            unsafe { self.gpu.fill(address, value, len, self.raw()).unwrap() };
        }

        pub(super) fn copy(&self, to: u64, from: u64, len: usize) {
            // SAFETY: the same argument as for `fill`.
            unsafe { self.gpu.copy(to, from, len, self.raw()).unwrap() };
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_transfer_in_a_stream_comes_after_what_is_before_it_and_before_what_is_after() {
    require_gpu();
    const LEN: usize = 3 << 20;
    let mine = streams::Mine::new();
    for pin in [Pin::Auto, Pin::Tcp, Pin::LocalRing] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let here = a.allocate_gpu(0, LEN as u64).unwrap();
        let there = b.allocate_gpu(0, LEN as u64).unwrap();
        let seen = a.allocate_gpu(0, LEN as u64).unwrap();
        let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let write = peer.prepare(Batch::write(&here.all(), &imported.all()).unwrap()).unwrap();
        let mut handles = Vec::new();
        for round in 1..=10u8 {
            mine.fill(here.addr(), round, LEN);
            // SAFETY: the stream is alive and belongs to the GPU.
            handles.push(unsafe { write.enqueue(mine.raw()).unwrap() });
            mine.copy(seen.addr() + u64::from(round), there.addr(), 1);
            // The source is free again, so the next round overwrites it.
            mine.fill(here.addr(), 0, LEN);
        }
        mine.stream.synchronize().unwrap();
        for handle in &handles {
            let ended = handle.wait(Duration::from_secs(10)).expect("the stream has finished");
            assert_eq!(ended.reason, Reason::Done, "{pin:?}");
            assert_eq!(handle.runs(), 1);
        }
        let bytes = contents(&seen);
        assert_eq!(bytes[1..=10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "{pin:?}");
        assert!(contents(&there).iter().all(|byte| *byte == 10), "{pin:?}");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_captured_transfer_happens_each_time_its_graph_is_launched() {
    require_gpu();
    const LEN: usize = 100_000;
    let mine = streams::Mine::new();
    for pin in [Pin::Auto, Pin::Tcp, Pin::LocalRing] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let here = a.allocate_gpu(0, LEN as u64).unwrap();
        let source = a.allocate_gpu(0, LEN as u64).unwrap();
        let there = b.allocate_gpu(0, LEN as u64).unwrap();
        let imported = peer.import(&there.advertise(Access::WRITE).unwrap()).unwrap();
        let batch = Batch::write(&here.all(), &imported.all()).unwrap().count(9);
        let write = peer.prepare(batch).unwrap();
        let mut enqueued = None;
        let graph = peerway_sys::cuda::Graph::capture(&mine.stream, || {
            mine.copy(here.addr(), source.addr(), LEN);
            // SAFETY: the stream is alive and belongs to the GPU.
            enqueued = Some(unsafe { write.enqueue(mine.raw()).unwrap() });
            mine.fill(here.addr(), 0, LEN);
            Ok::<(), peerway_sys::cuda::CudaError>(())
        })
        .unwrap();
        let enqueued = enqueued.unwrap();
        assert_eq!(enqueued.runs(), 0, "a capture is not a launch");
        for round in 1..=5u8 {
            source.fill(0, LEN as u64, round).unwrap();
            graph.launch(&mine.stream).unwrap();
            mine.stream.synchronize().unwrap();
            assert_eq!(enqueued.runs(), u64::from(round), "{pin:?}");
            let ended = enqueued.wait(Duration::from_secs(10)).unwrap();
            assert_eq!(ended.reason, Reason::Done, "{pin:?}");
            assert!(contents(&there).iter().all(|byte| *byte == round), "{pin:?} {round}");
            assert_eq!(
                b.wait_counter(9, u64::from(round), Duration::from_secs(10)),
                u64::from(round)
            );
        }
        // A transfer that fails does not stop the stream.
        there.revoke();
        graph.launch(&mine.stream).unwrap();
        mine.stream.synchronize().unwrap();
        let ended = enqueued.wait(Duration::from_secs(10)).unwrap();
        assert_eq!(ended.reason, Reason::Failed(TransferError::Revoked), "{pin:?}");
        drop(graph);
        // SAFETY: the graph is destroyed.
        unsafe { enqueued.release() };
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn stages_go_when_a_stream_or_an_event_says_so() {
    require_gpu();
    const LAYER: u64 = 200_000;
    let mine = streams::Mine::new();
    for pin in [Pin::Auto, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let here = a.allocate_gpu(0, LAYER * 8).unwrap();
        let there = b.allocate_gpu(0, LAYER * 8).unwrap();
        let imported = peer.import(&there.advertise(Access::WRITE).unwrap()).unwrap();
        let stages = (0..8u64).map(|i| {
            let range = i * LAYER..(i + 1) * LAYER;
            Batch::write(&here.slice(range.clone()), &imported.slice(range)).unwrap().count(50)
        });
        let staged = peer.stage(stages.collect()).unwrap();
        let events: Vec<_> =
            (0..8).map(|_| peerway_sys::cuda::Event::new(&mine.gpu).unwrap()).collect();
        for i in 0..8u64 {
            mine.fill(here.addr() + i * LAYER, i as u8 + 1, LAYER as usize);
            // SAFETY: the stream and the events live until the end of this round.
            unsafe {
                if i % 2 == 0 {
                    staged.release_in(i as usize, mine.raw()).unwrap();
                } else {
                    events[i as usize].record(mine.raw()).unwrap();
                    staged.release_when(i as usize, events[i as usize].raw()).unwrap();
                }
            }
        }
        assert_eq!(staged.join().reason, Reason::Done);
        assert_eq!(b.wait_counter(50, 8, Duration::from_secs(10)), 8, "{pin:?}");
        let bytes = contents(&there);
        for i in 0..8usize {
            let layer = &bytes[i * LAYER as usize..(i + 1) * LAYER as usize];
            assert!(layer.iter().all(|byte| *byte == i as u8 + 1), "{pin:?} layer {i}");
        }
    }
}

/// Whether the script of `peerway-fakecuda` makes calls of this function fail.
fn fails_by_script(function: &str) -> bool {
    std::env::var("PEERWAY_FAKE_CUDA").is_ok_and(|script| script.contains(&format!("={function}@")))
}

#[test]
#[ignore = "needs a GPU and NVRTC: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_kernel_that_is_compiled_now_runs() {
    require_gpu();
    let copy = Source::new("copy.cu", include_str!("../kernels/copy.cu")).option("--std=c++17");
    let image = jit::compile(&copy, Target::Gpu(0)).unwrap();
    peerway::gpu::warm_up(0).unwrap();
    let program = Program::load(&image, 0).unwrap();
    let none = program.kernel("no_such_kernel").unwrap_err();
    assert!(matches!(none, JitError::NoKernel { .. }), "{none}");
    let kernel = match program.kernel("peerway_copy_runs") {
        // The script of the fake makes this call fail. The test that set the script reads the
        // error.
        Err(JitError::Gpu(error)) if fails_by_script("cuFuncLoad") => {
            return eprintln!("{error}");
        }
        kernel => kernel.unwrap(),
    };
    // A kernel keeps its program alive.
    drop(program);

    const LEN: usize = 10_000;
    let memory = PinnedMemory::allocate(64 + 2 * LEN).unwrap();
    let start = memory.ptr() as u64;
    let bytes = pattern(7, LEN);
    let run = [start + 64, start + 64 + LEN as u64, LEN as u64];
    // SAFETY: the range lies inside the memory, and only this test uses it.
    unsafe {
        memory.ptr().cast::<[u64; 3]>().write(run);
        memory.ptr().add(64).copy_from(bytes.as_ptr(), LEN);
        memory.ptr().add(64 + LEN).write_bytes(0, LEN);
    }
    let mine = streams::Mine::new();
    let (mut runs, mut count) = (start, 1u32);
    let mut arguments = [(&raw mut runs).cast(), (&raw mut count).cast()];
    if let Some(sizes) = kernel.parameters() {
        assert_eq!(sizes, [8, 4]);
        // SAFETY: the call refuses the launch.
        let few = unsafe {
            kernel.launch([1; 3], [1; 3], 0, mine.raw().cast(), &mut arguments[..1]).unwrap_err()
        };
        assert_eq!(few, JitError::Arguments { takes: 2, given: 1 });
    }
    // SAFETY: the arguments match the kernel, and their memory lives until the test waited for the
    // stream.
    unsafe {
        kernel.launch([1; 3], [256, 1, 1], 0, mine.raw().cast(), &mut arguments).unwrap();
        peerway::gpu::wait_for_stream(0, mine.raw().cast()).unwrap();
        assert_eq!(std::slice::from_raw_parts(memory.ptr().add(64 + LEN), LEN), bytes);
    }
}
