//! GPU memory by RDMA devices, or in frames if the devices cannot access it.
//!
//! `peerway-fakeverbs` runs these tests on stand-ins for both libraries. `PEERWAY_TEST_PIN=efa`
//! makes them use reliable datagrams.

use std::time::Duration;

use peerway::gpu::{DeviceMemory, DeviceMemoryKind, DeviceMemoryOptions};
use peerway::{Access, Batch, Endpoint, Fence, PathKind, Peer, Pin, Reason, Region, TransferError};

const WATCHDOG: Duration = Duration::from_secs(30);

fn pin() -> Pin {
    let pin = std::env::var("PEERWAY_TEST_PIN").unwrap_or_else(|_| "ib".to_owned());
    pin.parse().expect("PEERWAY_TEST_PIN is `ib` or `efa`")
}

fn kind() -> PathKind {
    if pin() == Pin::Efa { PathKind::Efa } else { PathKind::Verbs }
}

/// Two endpoints that only RDMA devices connect. The second is the peer of the first.
fn pair() -> (Endpoint, Endpoint, Peer) {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    let gpus = peerway::gpu::devices().expect("this test needs a CUDA driver");
    assert!(!gpus.is_empty(), "this test needs a GPU, and the driver sees none");
    let endpoint =
        || Endpoint::builder().transport(pin()).build().expect("this test needs RDMA devices");
    let (a, b) = (endpoint(), endpoint());
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    assert_eq!(peer.path().kind, kind(), "{}", peer.path());
    (a, b, peer)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    (0..len).map(next).collect()
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).expect("the range lies inside the region");
    bytes
}

/// The kind of a test's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Memory that can be shared.
    Gpu,
    /// Memory of `cuMemAlloc`. Small allocations share pages with others.
    Plain,
    Host,
}

fn plain(len: usize) -> DeviceMemory {
    let options = DeviceMemoryOptions::default().from(DeviceMemoryKind::Plain);
    DeviceMemory::allocate(0, len as u64, &options).expect("cannot allocate GPU memory")
}

fn memory(endpoint: &Endpoint, kind: Kind, bytes: &[u8]) -> Region {
    let region = match kind {
        Kind::Gpu => endpoint.allocate_gpu(0, bytes.len() as u64).expect("GPU memory"),
        Kind::Plain => endpoint.register_gpu(plain(bytes.len())).expect("it is GPU memory"),
        Kind::Host => return endpoint.register(bytes.to_vec()).expect("memory registers"),
    };
    region.write_at(0, bytes).expect("the range lies inside the region");
    region
}

const MIXES: [(Kind, Kind); 5] = [
    (Kind::Gpu, Kind::Gpu),
    (Kind::Plain, Kind::Plain),
    (Kind::Gpu, Kind::Host),
    (Kind::Host, Kind::Gpu),
    (Kind::Host, Kind::Plain),
];

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn every_shape_arrives_between_gpu_and_host() {
    let (a, b, peer) = pair();
    for (local, remote) in MIXES {
        for len in [1usize, 100, 4096, 70_001, (2 << 20) + 17] {
            let (ours, theirs) = (pattern(1, len), pattern(2, len));
            let (here, there) = (memory(&a, local, &ours), memory(&b, remote, &theirs));
            let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
            let write = peer.post(&Batch::write(&here.all(), &imported.all()).unwrap()).unwrap();
            assert_eq!(write.join().reason, Reason::Done);
            assert_eq!(write.path(), kind(), "{local:?} to {remote:?}, {len} bytes");
            assert!(contents(&there) == ours, "{local:?} to {remote:?}: a write of {len}");
            there.write_at(0, &theirs).unwrap();
            let read = Batch::read(&here.all(), &imported.all()).unwrap();
            assert_eq!(peer.run(&read).unwrap().reason, Reason::Done);
            assert!(contents(&here) == theirs, "{local:?} from {remote:?}: a read of {len}");
        }
        // Blocks, as of a paged cache, in a different order on each side.
        let (block, count) = (1000usize, 300u32);
        let bytes = pattern(3, block * count as usize);
        let here = memory(&a, local, &bytes);
        let there = memory(&b, remote, &vec![0; bytes.len()]);
        let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let order = |step: u32| (0..count).map(|i| i * step % count).collect::<Vec<u32>>();
        let (from, to) = (order(7), order(11));
        let blocks = Batch::write_blocks(
            here.blocks(0, 1000, 1000, &from),
            imported.blocks(0, 1000, 1000, &to),
        );
        assert_eq!(peer.run(&blocks.unwrap()).unwrap().reason, Reason::Done);
        let mut expected = vec![0; bytes.len()];
        for (from, to) in from.iter().zip(&to) {
            let (from, to) = (*from as usize * block, *to as usize * block);
            expected[to..to + block].copy_from_slice(&bytes[from..from + block]);
        }
        assert!(contents(&there) == expected, "{local:?} to {remote:?}: blocks");
    }
}

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn only_the_part_that_is_advertised_is_reached() {
    let (a, b, peer) = pair();
    let there = memory(&b, Kind::Plain, &[9; 40_000]);
    let descriptor = there.advertise_range(5001..25_002, Access::READ_WRITE, None).unwrap();
    let imported = peer.import(&descriptor).unwrap();
    let ours = pattern(4, 20_001);
    let here = memory(&a, Kind::Gpu, &ours);
    let write = Batch::write(&here.all(), &imported.all()).unwrap();
    assert_eq!(peer.run(&write).unwrap().reason, Reason::Done);
    let landed = contents(&there);
    assert!(landed[5001..25_002] == ours);
    assert!(landed[..5001].iter().chain(&landed[25_002..]).all(|byte| *byte == 9));
}

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn a_vector_may_mix_memories() {
    let (a, b, peer) = pair();
    let ours = [(Kind::Host, 1), (Kind::Gpu, 2), (Kind::Plain, 3)];
    let ours = ours.map(|(kind, seed)| memory(&a, kind, &pattern(seed, 30_000)));
    let theirs = [Kind::Gpu, Kind::Host, Kind::Plain].map(|kind| memory(&b, kind, &[0; 30_000]));
    let pairs: Vec<_> = ours
        .iter()
        .zip(&theirs)
        .map(|(here, there)| {
            let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
            (here.slice(7..29_000), imported.slice(107..29_100))
        })
        .collect();
    let batch = Batch::write_vector(&pairs).unwrap().count(5);
    assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
    assert_eq!(b.counter(5), 1);
    for (here, there) in ours.iter().zip(&theirs) {
        assert!(contents(there)[107..29_100] == contents(here)[7..29_000]);
    }
}

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn counts_and_notifications_come_after_the_bytes() {
    let (a, b, peer) = pair();
    for access in [Access::READ_WRITE, Access::WRITE] {
        let there = memory(&b, Kind::Gpu, &vec![0; 2 << 20]);
        let imported = peer.import(&there.advertise(access).unwrap()).unwrap();
        let before = b.counter(7);
        for round in 1..=12u64 {
            // Small writes fit one queue pair. Large writes use all of them.
            let len = if round % 4 == 0 { 2 << 20 } else { 3000 };
            let bytes = pattern(round, len);
            let here = memory(&a, Kind::Gpu, &bytes);
            let batch = Batch::write(&here.all(), &imported.slice(0..len as u64)).unwrap().count(7);
            let batch = if round % 2 == 0 { batch.notify(&[round as u8]).unwrap() } else { batch };
            let transfer = peer.post(&batch).unwrap();
            assert_eq!(b.wait_counter(7, before + round, WATCHDOG), before + round);
            assert!(contents(&there)[..len] == bytes, "round {round}: count before its bytes");
            if round % 2 == 0 {
                let note = b.notification(WATCHDOG).expect("the notification arrives");
                assert_eq!(note.message, [round as u8]);
            }
            assert_eq!(transfer.join().reason, Reason::Done);
        }
    }
}

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn a_revoked_region_is_quiet() {
    let (a, b, peer) = pair();
    let here = memory(&a, Kind::Gpu, &[1; 1 << 20]);
    let there = memory(&b, Kind::Gpu, &[0; 1 << 20]);
    let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let batch = Batch::write(&here.all(), &imported.all()).unwrap();
    assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
    assert_eq!(there.revoke(), Fence::Held);
    there.fill(0, 1 << 20, 0xEE).unwrap();
    let ended = peer.run(&batch).unwrap();
    assert_eq!(ended.reason, Reason::Failed(TransferError::Revoked));
    assert!(contents(&there).iter().all(|byte| *byte == 0xEE));
    // The memory can be advertised again.
    let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let batch = Batch::write(&here.all(), &imported.all()).unwrap();
    assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
    assert!(contents(&there).iter().all(|byte| *byte == 1));
}

#[test]
#[ignore = "needs RDMA devices and a GPU; run on stand-ins by peerway-fakeverbs"]
fn memory_allocated_anew_at_an_address_is_noticed() {
    let (a, b, peer) = pair();
    const LEN: usize = 3 << 20;
    let theirs = pattern(8, LEN);
    let there = memory(&b, Kind::Host, &theirs);
    let imported = peer.import(&there.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let old = plain(LEN);
    let address = old.address();
    // SAFETY: the test replaces the memory on purpose and only reads bytes of the new memory.
    let register = |endpoint: &Endpoint| unsafe { endpoint.register_raw(address as *mut u8, LEN) };
    let first = register(&a).unwrap();
    // Registered with the endpoint, but not yet with the devices.
    let (unused, owned) = (register(&a).unwrap(), register(&b).unwrap());
    let read = |into: &Region| {
        let batch = Batch::read(&into.all(), &imported.all()).unwrap();
        assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
    };
    read(&first);
    assert!(contents(&first) == theirs);
    drop(old);
    // A driver may choose other addresses first. Memory at those stays allocated, so that they are
    // not chosen again.
    let mut others = Vec::new();
    let _new = loop {
        let new = plain(LEN);
        if new.address() == address {
            break new;
        }
        others.push(new);
        assert!(others.len() < 64, "the driver does not allocate at {address:#x} again");
    };
    let second = register(&a).unwrap();
    second.fill(0, LEN as u64, 0).unwrap();
    read(&second);
    assert!(contents(&second) == theirs, "the read went to freed memory");
    // Regions of freed memory are refused, here and by their owner: that address now belongs to
    // other memory.
    let before = contents(&second);
    let stale = Batch::read(&unused.all(), &imported.all()).unwrap();
    let error = peer.run(&stale).unwrap_err().to_string();
    assert!(error.contains("was freed while it was registered"), "{error}");
    let stale = peer.import(&owned.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let here = memory(&a, Kind::Host, &pattern(9, LEN));
    let write = Batch::write(&here.all(), &stale.all()).unwrap();
    assert_eq!(peer.run(&write).unwrap().reason, Reason::Failed(TransferError::Fault));
    assert!(contents(&second) == before, "a region of freed memory changed the new memory");
}
