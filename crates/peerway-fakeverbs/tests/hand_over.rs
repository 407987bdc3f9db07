//! Work that no thread polls for, posted just after a thread has polled.
//!
//! While other threads poll, the progress thread leaves the polling to them, and it comes back by
//! itself. An engine that loses a wake-up waits for the next heartbeat, for 5 s on average. Each
//! test repeats until no round has waited for a heartbeat several times in a row. A busy machine
//! may spoil any number of rounds within the watchdog.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Peer, Pin, Prepared, Reason, Region};

use support::{WATCHDOG, scripted};

/// How long a thread polls before each measurement. The progress thread has then left the polling
/// to it.
const POLLED: Duration = Duration::from_millis(2);
/// A thousand times what the progress thread needs to come back, and a tenth of the time between
/// two heartbeats. With every wake-up lost, one round in ten is this short by chance.
const SOON: Duration = Duration::from_secs(1);
/// How often in a row a measurement must hold.
const TIMES: u32 = 8;

/// Tests run one after the other, because they would share the processors.
static ALONE: Mutex<()> = Mutex::new(());

fn scripted_alone(test: &str, script: &str) -> bool {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    scripted(test, script)
}

/// Repeats a measurement until it was below [`SOON`] for [`TIMES`] times in a row.
fn is_soon(what: &str, world: &World, mut once: impl FnMut() -> Duration) {
    let begun = Instant::now();
    let (mut in_a_row, mut tries) = (0, 0);
    while in_a_row < TIMES {
        let polling = Instant::now();
        while polling.elapsed() < POLLED {
            world.write_and_poll();
        }
        tries += 1;
        let took = once();
        in_a_row = if took < SOON { in_a_row + 1 } else { 0 };
        assert!(begun.elapsed() < WATCHDOG, "{what}: not soon in {tries} tries, lastly {took:?}");
    }
}

/// Two endpoints that write to each other.
struct World {
    a: Endpoint,
    b: Endpoint,
    there: Prepared,
    back: (Peer, Batch),
    _kept: [Region; 2],
}

impl World {
    fn new() -> Self {
        // As few heartbeats as possible: one in 10 s.
        let make =
            || Endpoint::builder().transport(Pin::Ib).detect(Duration::from_secs(600)).build();
        let (a, b) = (make().expect("the fake has devices"), make().expect("the fake has devices"));
        let memory = |of: &Endpoint| of.allocate(64 << 10).expect("memory");
        let (ours, theirs) = (memory(&a), memory(&b));
        let write = |from: &Endpoint, to: &Endpoint, (local, owned): (&Region, &Region)| {
            let peer = from.connect(&to.metadata()).expect("devices reach each other");
            let remote =
                peer.import(&owned.advertise(Access::WRITE).expect("the region can be advertised"));
            let remote = remote.expect("the region can be imported");
            let batch = Batch::write(&local.slice(0..256), &remote.slice(0..256));
            (peer, batch.expect("the batch is valid"))
        };
        let (peer, batch) = write(&a, &b, (&ours, &theirs));
        let there = peer.prepare(batch).expect("the batch can be prepared");
        let back = write(&b, &a, (&theirs, &ours));
        Self { a, b, there, back, _kept: [ours, theirs] }
    }

    /// Writes once, and polls `a` until the write has ended.
    fn write_and_poll(&self) {
        let begun = Instant::now();
        let transfer = self.there.begin().expect("the transfer is posted");
        let ended = loop {
            if let Some(ended) = transfer.poll() {
                break ended;
            }
            assert!(begun.elapsed() < WATCHDOG, "the write never ends");
        };
        assert_eq!(ended.reason, Reason::Done);
    }

    /// How long it takes until a thread that sleeps for the end of a write wakes up.
    fn begin_and_sleep(&self) -> Duration {
        let transfer = self.there.begin().expect("the transfer is posted");
        let begun = Instant::now();
        let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
        if transfer.on_end(&Waker::from(unpark.clone())) {
            while !unpark.1.load(Ordering::Acquire) {
                assert!(begun.elapsed() < WATCHDOG, "the thread was not woken");
                thread::park_timeout(WATCHDOG);
            }
        }
        assert_eq!(transfer.ended().expect("the write has ended").reason, Reason::Done);
        begun.elapsed()
    }
}

#[test]
fn an_arrival_is_served_after_a_thread_has_polled() {
    if !scripted_alone("an_arrival_is_served_after_a_thread_has_polled", "") {
        return;
    }
    let world = World::new();
    let (peer, batch) = &world.back;
    let back = peer.prepare(batch.clone().count(7)).expect("the batch can be prepared");
    let mut arrived = 0;
    is_soon("arrivals are served", &world, || {
        assert_eq!(back.run().expect("the transfer is posted").reason, Reason::Done);
        arrived += 1;
        let begun = Instant::now();
        // This loop only reads the counter: it does not poll the engine.
        while world.a.counter(7) < arrived {
            assert!(begun.elapsed() < WATCHDOG, "the count never came");
            thread::yield_now();
        }
        begun.elapsed()
    });
}

#[test]
fn a_notification_follows_bytes_that_no_thread_waits_for() {
    if !scripted_alone("a_notification_follows_bytes_that_no_thread_waits_for", "latency=20us") {
        return;
    }
    let world = World::new();
    is_soon("a notification comes", &world, || {
        let begun = Instant::now();
        // The engine sends it once it knows that the bytes have arrived.
        let transfer = world.there.post_notifying(b"there").expect("the transfer is posted");
        let message = world.b.notification(WATCHDOG);
        let told = begun.elapsed();
        assert_eq!(message.expect("the notification arrives").message, b"there");
        assert_eq!(transfer.join().reason, Reason::Done);
        told
    });
}

#[test]
fn a_thread_that_awaits_a_transfer_is_woken() {
    if !scripted_alone("a_thread_that_awaits_a_transfer_is_woken", "latency=20us") {
        return;
    }
    let world = World::new();
    is_soon("the thread is woken", &world, || world.begin_and_sleep());
}

/// Wakes a parked thread.
struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}
