//! Hot paths do not allocate: counted, for whole round trips with both ends in this process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use peerway::{Access, Batch, Endpoint, Pin};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes everything on to the system allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds `GlobalAlloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn prepared_transfers_do_not_allocate_on_any_path() {
    for pin in [Pin::Auto, Pin::LocalMap, Pin::LocalCma, Pin::LocalRing, Pin::Tcp] {
        let make = || Endpoint::builder().transport(pin).build().unwrap();
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
            // Heartbeats and timers may allocate now and then; one in twenty would be the hot path.
            // A direct transfer with a counter has a job of its own: one allocation each.
            let with_job = n == 3 && !matches!(pin, Pin::LocalCma | Pin::LocalRing | Pin::Tcp);
            let allowed = rounds / 20 + if with_job { rounds } else { 0 };
            assert!(allocations <= allowed, "{pin}, batch {n}: {allocations} in {rounds}");
        }
    }
}
