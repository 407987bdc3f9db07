//! Transfers by RDMA devices. Soft-RoCE is enough. So is the stand-in library of
//! `peerway-fakeverbs` (`PEERWAY_IBV_SO`), with which that crate runs these tests in every run.
//! `PEERWAY_TEST_PIN=efa` makes them use reliable datagrams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerway::driven::Proxy;
use peerway::{Access, Batch, Endpoint, Fence, PathKind, Pin, Reason, Region, TransferError};

const WATCHDOG: Duration = Duration::from_secs(60);

/// The kind of devices to test.
fn pin() -> Pin {
    let pin = std::env::var("PEERWAY_TEST_PIN").unwrap_or_else(|_| "ib".to_owned());
    pin.parse().expect("PEERWAY_TEST_PIN is `ib` or `efa`")
}

/// The path that these devices give.
fn kind() -> PathKind {
    if pin() == Pin::Efa { PathKind::Efa } else { PathKind::Verbs }
}

/// Two endpoints that only RDMA devices connect.
fn pair() -> (Endpoint, Endpoint) {
    if std::env::var_os("PEERWAY_TEST_LOG").is_some() {
        let _ = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).try_init();
    }
    // Devices of the two endpoints, such as `rxe0,rxe2/rxe1,rxe3`. All devices if unset.
    let devices = std::env::var("PEERWAY_TEST_DEVICES").unwrap_or_default();
    let (ours, theirs) = devices.split_once('/').unwrap_or((&devices, &devices));
    let endpoint = |devices: &str| {
        let builder = Endpoint::builder().transport(pin());
        let named = !devices.is_empty();
        let built = if named { builder.rdma_devices(devices).build() } else { builder.build() };
        built.expect("this test needs RDMA devices")
    };
    (endpoint(ours), endpoint(theirs))
}

fn filled(endpoint: &Endpoint, len: usize, seed: u8) -> Region {
    let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    endpoint.register(bytes).expect("cannot register memory")
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).expect("the range lies inside the region");
    bytes
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn writes_and_reads_of_every_shape_arrive() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    assert_eq!(peer.path().kind, kind(), "{}", peer.path());
    for len in [1usize, 64, 129, 4096, 70_001, 1 << 20, (3 << 20) + 17] {
        let (ours, theirs) = (filled(&a, len, 3), filled(&b, len, 9));
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let ended = peer.run(&Batch::write(&ours.all(), &remote.all()).unwrap()).unwrap();
        assert_eq!((ended.reason, ended.fence), (Reason::Done, Fence::Held), "{len}");
        assert!(bytes(&theirs) == bytes(&ours), "a write of {len}");
        let back = filled(&a, len, 77);
        let transfer = peer.post(&Batch::read(&back.all(), &remote.all()).unwrap()).unwrap();
        assert_eq!(transfer.join().reason, Reason::Done, "{len}");
        assert_eq!(transfer.path(), kind());
        assert!(bytes(&back) == bytes(&ours), "a read of {len}");
    }
    // Blocks, scattered on both sides.
    let (ours, theirs) = (filled(&a, 1 << 20, 5), filled(&b, 1 << 20, 0));
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let indices: Vec<u32> = (0..200).map(|i| (i * 37) % 251).collect();
    let reversed: Vec<u32> = indices.iter().rev().copied().collect();
    let local = ours.blocks(0, 4096, 1000, &indices);
    let blocks = remote.blocks(16, 4096, 1000, &reversed);
    assert_eq!(
        peer.run(&Batch::write_blocks(local, blocks).unwrap()).unwrap().reason,
        Reason::Done
    );
    let (ours, theirs) = (bytes(&ours), bytes(&theirs));
    for (from, to) in indices.iter().zip(&reversed) {
        let (from, to) = (*from as usize * 4096, 16 + *to as usize * 4096);
        assert!(ours[from..from + 1000] == theirs[to..to + 1000]);
    }
    assert!(peer.stats().bytes_written > 4 << 20);
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn commands_of_kernels_are_carried_out_whatever_order_completions_come_in() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    const LEN: usize = 1 << 20;
    let (ours, theirs) = (filled(&a, LEN, 1), filled(&b, LEN, 0));
    let proxy = Proxy::builder(&a).threads(1).rings(2).slots(64).timeout(WATCHDOG).build().unwrap();
    let far = Proxy::builder(&b).threads(1).rings(1).build().unwrap();
    let from = proxy.window(&ours).unwrap();
    far.window(&theirs).unwrap();
    let to = proxy.add_peer(0, &peer, &far.peer_info().unwrap()).unwrap()[0];
    let _armed = proxy.arm();
    let producers = [0, 1].map(|ring| proxy.host_producer(ring).unwrap());
    for round in 1..=4u64 {
        let bytes_now: Vec<u8> =
            (0..LEN).map(|i| (i as u8).wrapping_mul(7 + round as u8)).collect();
        ours.write_at(0, &bytes_now).unwrap();
        let (mut at, mut counted) = (0, 0);
        while at < LEN as u64 {
            let len = (4096 + at % 3 * 20_000).min(LEN as u64 - at) / 4 * 4;
            let producer = &producers[at as usize / 4096 % 2];
            if at % 5 == 0 {
                producer.put(0, to.base + at, from.base + at, len).unwrap();
            } else {
                producer.put_with_count(0, to.base + at, from.base + at, len, 3).unwrap();
                counted += 1;
            }
            at += len;
        }
        producers.iter().for_each(|producer| producer.quiet(0).unwrap());
        assert!(bytes(&theirs) == bytes_now, "round {round}: the bytes after quiet");
        // The bytes have arrived. The peer polls for counts that devices delivered, and gets
        // exactly as many as were sent.
        assert_eq!(
            far.wait_counter(3, counted * round, WATCHDOG),
            counted * round,
            "round {round}"
        );
        // A single put with a count: the bytes are there when the count is.
        ours.write_at(0, &[round as u8; 8192]).unwrap();
        producers[0].put_with_count(0, to.base, from.base, 8192, 4).unwrap();
        assert_eq!(far.wait_counter(4, round, WATCHDOG), round);
        assert!(
            bytes(&theirs)[..8192] == [round as u8; 8192],
            "round {round}: a count came before its bytes"
        );
        producers[0].quiet(0).unwrap();
    }
    assert_eq!(proxy.stats().faults, 0, "{:?}", proxy.take_fault());
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn counts_and_notifications_come_after_the_bytes_and_once() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let theirs = filled(&b, 3 << 20, 0);
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    for round in 1..=40u64 {
        // Small writes fit one queue pair. Large writes use all of them.
        let len = if round % 4 == 0 { 3 << 20 } else { 3000 };
        let ours = filled(&a, len, round as u8);
        let batch = Batch::write(&ours.all(), &remote.slice(0..len as u64)).unwrap();
        let transfer = peer.post(&batch.count(7)).unwrap();
        assert_eq!(b.wait_counter(7, round, WATCHDOG), round);
        let mut landed = vec![0; len];
        theirs.read_at(0, &mut landed).unwrap();
        assert!(landed == bytes(&ours), "round {round}: a count came before its bytes");
        assert_eq!(transfer.join().reason, Reason::Done);
        assert_eq!(b.counter(7), round);
    }
    for round in 0..40u8 {
        let len = if round % 4 == 0 { 3 << 20 } else { 3000 };
        let ours = filled(&a, len, round.wrapping_mul(3));
        let batch = Batch::write(&ours.all(), &remote.slice(0..len as u64)).unwrap();
        let batch = batch.notify(&[round; 5000]).unwrap();
        let transfer = peer.post(&batch).unwrap();
        let message = b.notification(WATCHDOG).expect("the notification arrives");
        assert_eq!(message.message, [round; 5000]);
        let mut landed = vec![0; len];
        theirs.read_at(0, &mut landed).unwrap();
        assert!(landed == bytes(&ours), "round {round}: a notification came before its bytes");
        assert_eq!(transfer.join().reason, Reason::Done);
    }
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn a_revoked_region_is_quiet_at_once_and_others_go_on() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let ours = filled(&a, 1 << 20, 1);
    let other = filled(&b, 1 << 20, 0);
    let other_remote = peer.import(&other.advertise(Access::READ_WRITE).unwrap()).unwrap();
    for round in 0..3 {
        let theirs = filled(&b, 1 << 20, 0);
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
        assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
        assert_eq!(theirs.revoke(), Fence::Held, "a revoke deregisters the memory");
        theirs.fill(0, 1 << 20, 0xEE).unwrap();
        let started = Instant::now();
        let ended = peer.run(&batch).unwrap();
        assert_eq!(ended.reason, Reason::Failed(TransferError::Revoked), "round {round}");
        assert!(bytes(&theirs).iter().all(|b| *b == 0xEE), "round {round}");
        let batch = Batch::write(&ours.all(), &other_remote.all()).unwrap();
        assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done, "round {round}");
        assert!(bytes(&other) == bytes(&ours));
        eprintln!("refused and back after {:?}", started.elapsed());
    }
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn many_threads_and_transfers_share_the_queue_pairs() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let theirs = filled(&b, 8 << 16, 0);
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (a, peer, remote, done) = (&a, &peer, &remote, &done);
            scope.spawn(move || {
                for round in 0..50u64 {
                    let len = 1 + (round * 1237) % 60_000;
                    let ours = filled(a, len as usize, (thread * 50 + round) as u8);
                    let place = remote.slice(thread << 16..(thread << 16) + len);
                    let write = Batch::write(&ours.all(), &place).unwrap();
                    assert_eq!(peer.run(&write).unwrap().reason, Reason::Done);
                    let back = filled(a, len as usize, 0);
                    let read = Batch::read(&back.all(), &place).unwrap();
                    assert_eq!(peer.run(&read).unwrap().reason, Reason::Done);
                    assert!(bytes(&ours) == bytes(&back));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.load(Ordering::Relaxed), 200);
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn large_reads_and_writes_arrive_whole() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let len = (16 << 20) + 1;
    let theirs = filled(&b, len, 9);
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let expected = bytes(&theirs);
    for round in 0..6 {
        let back = a.allocate(len).expect("memory");
        assert_eq!(
            peer.run(&Batch::read(&back.all(), &remote.all()).unwrap()).unwrap().reason,
            Reason::Done
        );
        let read = bytes(&back);
        let wrong: Vec<usize> =
            (0..len).step_by(4096).filter(|at| read[*at] != expected[*at]).collect();
        assert!(
            read == expected,
            "round {round}: {} pages of a read are wrong, from {:?} to {:?}, {} lanes lost",
            wrong.len(),
            wrong.first(),
            wrong.last(),
            peer.stats().lanes_lost
        );
        let ours = filled(&a, len, round);
        assert_eq!(
            peer.run(&Batch::write(&ours.all(), &remote.all()).unwrap()).unwrap().reason,
            Reason::Done
        );
        assert!(bytes(&theirs) == bytes(&ours), "round {round}: a write");
        theirs.write_at(0, &expected).unwrap();
    }
}

/// Anonymous memory at an address that the kernel chooses, or in place of an existing mapping.
fn map(at: Option<*mut u8>, len: usize) -> *mut u8 {
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: a new mapping, or one over memory that only this test uses.
    let ptr = unsafe {
        libc::mmap(
            at.map_or(std::ptr::null_mut(), <*mut u8>::cast),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
    };
    assert_ne!(ptr, libc::MAP_FAILED);
    ptr.cast()
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn memory_mapped_anew_under_a_registration_is_noticed() {
    let (a, b) = pair();
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let len = 1 << 20;
    let theirs = filled(&b, len, 9);
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let ptr = map(None, len);
    // SAFETY: the address stays mapped until the end of the test. The test replaces the pages on
    // purpose and only reads their bytes.
    let first = unsafe { a.register_raw(ptr, len) }.unwrap();
    assert_eq!(
        peer.run(&Batch::read(&first.all(), &remote.all()).unwrap()).unwrap().reason,
        Reason::Done
    );
    assert!(bytes(&first) == bytes(&theirs));
    // Freed and mapped again, as allocators do, while the old region still exists.
    map(Some(ptr), len);
    // SAFETY: the same argument as for `first`.
    let second = unsafe { a.register_raw(ptr, len) }.unwrap();
    // SAFETY: the same argument as for `first`.
    let inside = unsafe { a.register_raw(ptr.wrapping_add(4096), 8192) }.unwrap();
    let part = Batch::read(&inside.all(), &remote.slice(4096..12_288)).unwrap();
    assert_eq!(peer.run(&part).unwrap().reason, Reason::Done);
    assert!(
        bytes(&inside) == bytes(&theirs)[4096..12_288],
        "the read went to pages that are no longer mapped"
    );
    assert_eq!(
        peer.run(&Batch::read(&second.all(), &remote.all()).unwrap()).unwrap().reason,
        Reason::Done
    );
    assert!(bytes(&second) == bytes(&theirs), "the read went to pages that are no longer mapped");
}
