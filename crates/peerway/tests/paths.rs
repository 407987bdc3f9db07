//! Reads and writes of every shape, on every path, between two endpoints of this process.

use std::time::Duration;

use peerway::{Access, Batch, Endpoint, PathKind, Peer, Pin, Reason, Region};

struct Pair {
    a: Endpoint,
    b: Endpoint,
    peer: Peer,
}

fn pair(pin: Pin) -> Pair {
    // RUST_LOG=peerway=debug shows the log of the engine.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    let make = || Endpoint::builder().transport(pin).build().unwrap();
    let (a, b) = (make(), make());
    let peer = a.connect(&b.metadata()).unwrap();
    Pair { a, b, peer }
}

const PINS: [(Pin, PathKind); 5] = [
    (Pin::Auto, PathKind::SameProcess),
    (Pin::LocalMap, PathKind::LocalMap),
    (Pin::LocalCma, PathKind::LocalCma),
    (Pin::LocalRing, PathKind::LocalRing),
    (Pin::Tcp, PathKind::Tcp),
];

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn ranges_of_every_size_arrive_by_every_path() {
    for (pin, kind) in PINS {
        let Pair { a, b, peer } = pair(pin);
        assert_eq!(peer.path().kind, kind, "{}", peer.path());
        for len in [0usize, 1, 63, 256, 4096, 65_537, 1 << 20, 5 << 20, (16 << 20) + 13] {
            let theirs = b.allocate(len).unwrap();
            let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
            let data = pattern(len as u64, len);
            let ours = a.register(data.clone()).unwrap();
            peer.write(&ours.all(), &remote.all()).unwrap();
            assert!(contents(&theirs) == data, "{pin} write of {len}");
            let back = a.allocate(len).unwrap();
            let batch = Batch::read(&back.all(), &remote.all()).unwrap();
            let transfer = peer.post(&batch).unwrap();
            assert_eq!(transfer.join().reason, Reason::Done);
            assert!(contents(&back) == data, "{pin} read of {len}");
        }
    }
}

#[test]
fn private_memory_is_reached_where_no_mapping_is_pinned() {
    for (pin, _) in PINS {
        if pin == Pin::LocalMap {
            continue;
        }
        let Pair { a, b, peer } = pair(pin);
        let len = 3 << 20;
        let theirs = b.register(vec![0u8; len]).unwrap();
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let data = pattern(7, len);
        let ours = a.register(data.clone()).unwrap();
        peer.write(&ours.all(), &remote.all()).unwrap();
        assert!(contents(&theirs) == data, "{pin}");
        let back = a.register(vec![0u8; len]).unwrap();
        peer.read(&back.all(), &remote.all()).unwrap();
        assert!(contents(&back) == data, "{pin}");
    }
}

#[test]
fn vectors_and_block_lists_arrive_by_every_path() {
    for (pin, _) in PINS {
        let Pair { a, b, peer } = pair(pin);
        let (block, count) = (4096u64, 3000u32);
        let len = block * u64::from(count);
        let theirs = b.allocate(len as usize).unwrap();
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let data = pattern(11, len as usize);
        let ours = a.register(data.clone()).unwrap();
        // A permutation: multiplying by a number coprime to the count.
        let there: Vec<u32> = (0..count).map(|i| (i * 1237) % count).collect();
        let here: Vec<u32> = (0..count).collect();
        let batch = Batch::write_blocks(
            ours.blocks(0, block, block, &here),
            remote.blocks(0, block, block, &there),
        )
        .unwrap();
        peer.run(&batch).unwrap().ok().unwrap();
        let landed = contents(&theirs);
        for (i, at) in there.iter().enumerate() {
            let (from, to) = (i * 4096, *at as usize * 4096);
            assert!(landed[to..to + 4096] == data[from..from + 4096], "{pin} block {i}");
        }
        let back = a.allocate(len as usize).unwrap();
        let pairs: Vec<_> = there
            .iter()
            .zip(&here)
            .map(|(from, to)| {
                let range = |i: u32| u64::from(i) * block..u64::from(i + 1) * block;
                (back.slice(range(*to)), remote.slice(range(*from)))
            })
            .collect();
        let prepared = peer.prepare(Batch::read_vector(&pairs).unwrap()).unwrap();
        for _ in 0..2 {
            prepared.post().unwrap().join().ok().unwrap();
        }
        assert!(contents(&back) == data, "{pin} gathered");
    }
}

#[test]
fn notifications_and_counters_follow_the_bytes() {
    for (pin, _) in PINS {
        let Pair { a, b, peer } = pair(pin);
        let len = 2 << 20;
        let theirs = b.allocate(len).unwrap();
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        for round in 1..=20u64 {
            let data = pattern(round, len);
            let ours = a.register(data.clone()).unwrap();
            let batch = Batch::write(&ours.all(), &remote.all())
                .unwrap()
                .notify(&round.to_le_bytes())
                .unwrap()
                .count(9);
            let transfer = peer.post(&batch).unwrap();
            let note = b.notification(Duration::from_secs(10)).expect("a notification");
            assert_eq!(note.message, round.to_le_bytes());
            assert_eq!(note.from, a.incarnation());
            assert!(contents(&theirs) == data, "{pin} round {round}: came before its bytes");
            assert_eq!(transfer.join().reason, Reason::Done);
            assert_eq!(b.wait_counter(9, round, Duration::from_secs(10)), round);
        }
        let big = pattern(1, peerway::MAX_NOTIFICATION);
        peer.notify(&big).unwrap().join().ok().unwrap();
        assert!(b.notification(Duration::from_secs(5)).unwrap().message == big);
        assert_eq!(b.try_notification(), None, "each notification arrives once");
    }
}

#[test]
fn both_sides_may_initiate_and_a_second_connect_is_the_same_peer() {
    for (pin, _) in PINS {
        let Pair { a, b, peer } = pair(pin);
        assert!(a.connect(&b.metadata()).unwrap() == peer);
        let back = b.accept(Duration::from_secs(5)).unwrap();
        assert_eq!(back.incarnation(), a.incarnation());
        assert!(b.connect(&a.metadata()).unwrap() == back);
        let ours = a.allocate(100_000).unwrap();
        let remote = back.import(&ours.advertise(Access::WRITE).unwrap()).unwrap();
        let data = pattern(3, 100_000);
        let theirs = b.register(data.clone()).unwrap();
        back.write(&theirs.all(), &remote.all()).unwrap();
        assert!(contents(&ours) == data, "{pin}");
    }
}
