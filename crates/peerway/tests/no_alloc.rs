//! Hot paths do not allocate. The test counts allocations of whole round trips, with both ends in
//! this process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use peerway::driven::Proxy;
use peerway::{Access, Batch, Endpoint, Pin};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes every call on to the system allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
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

/// One test only, so that no other test allocates meanwhile.
#[test]
fn nothing_allocates_on_any_path() {
    prepared_transfers();
    commands_of_proxies();
}

fn prepared_transfers() {
    for (pin, data) in [
        (Pin::Auto, "off"),
        (Pin::LocalMap, "off"),
        (Pin::LocalCma, "off"),
        (Pin::LocalRing, "off"),
        (Pin::Tcp, "off"),
        (Pin::Tcp, "integrity"),
        (Pin::Tcp, "encrypt"),
    ] {
        let builder = || Endpoint::builder().transport(pin).setting("PEERWAY_DATA", data);
        let make = || builder().build().unwrap();
        let (a, b) = (make(), make());
        let peer = a.connect(&b.metadata()).unwrap();
        let theirs = b.allocate(1 << 20).unwrap();
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let ours = a.allocate(1 << 20).unwrap();
        let blocks: Vec<u32> = (0..64).map(|i| i * 2).collect();
        let batches = [
            Batch::write(&ours.slice(0..256), &remote.slice(0..256)).unwrap(),
            Batch::read(&ours.slice(0..256), &remote.slice(0..256)).unwrap(),
            Batch::write_blocks(
                ours.blocks(0, 256, 256, &blocks),
                remote.blocks(0, 256, 256, &blocks),
            )
            .unwrap(),
            Batch::write(&ours.slice(0..256), &remote.slice(0..256)).unwrap().count(5),
        ];
        for (n, batch) in batches.into_iter().enumerate() {
            let count = batch.clone();
            let prepared = peer.prepare(count).unwrap();
            for _ in 0..200 {
                prepared.run().unwrap().ok().unwrap();
            }
            let rounds = 2000;
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for _ in 0..rounds {
                prepared.run().unwrap().ok().unwrap();
            }
            let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
            // Heartbeats and timers may allocate now and then. More than one in twenty would be the
            // hot path. A direct transfer with a counter has its own job: one allocation each.
            let with_job = n == 3 && !matches!(pin, Pin::LocalCma | Pin::LocalRing | Pin::Tcp);
            let allowed = rounds / 20 + if with_job { rounds } else { 0 };
            assert!(allocations <= allowed, "{pin} {data}, batch {n}: {allocations} in {rounds}");
        }
    }
}

/// Single and batched puts, with and without a count, and counts without bytes, on lanes.
fn commands_of_proxies() {
    for pin in [Pin::LocalRing, Pin::Tcp] {
        let make = || Endpoint::builder().transport(pin).build().unwrap();
        let (a, b) = (make(), make());
        let peer = a.connect(&b.metadata()).unwrap();
        let [near, far] = [&a, &b].map(|endpoint| {
            Proxy::builder(endpoint).threads(2).rings(2).slots(256).counters(16).build().unwrap()
        });
        let (ours, theirs) = (a.allocate(1 << 20).unwrap(), b.allocate(1 << 20).unwrap());
        let from = near.window(&ours).unwrap().base;
        let to = far.window(&theirs).unwrap().base;
        near.add_peer(0, &peer, &far.peer_info().unwrap()).unwrap();
        let _armed = near.arm();
        let producers = [0, 1].map(|ring| near.host_producer(ring).unwrap());
        let round = || {
            for producer in &producers {
                for at in 0..40 {
                    producer.put(0, to + at * 256, from + at * 256, 256).unwrap();
                }
                producer.put_with_count(0, to, from, 256, 3).unwrap();
                producer.signal(0, 4).unwrap();
            }
            producers.iter().for_each(|producer| producer.quiet(0).unwrap());
        };
        (0..50).for_each(|_| round());
        let rounds = 100;
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..rounds).for_each(|_| round());
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        let commands = rounds * 84;
        assert!(allocations <= commands / 100, "{pin}: {allocations} for {commands} commands");
    }
}
