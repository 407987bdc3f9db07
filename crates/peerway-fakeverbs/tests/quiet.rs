//! Service threads while other threads drive: they sleep, and still hear what is for them.
//!
//! A service thread that sleeps lightly looks by itself after eight milliseconds; whoever is to be heard sooner is measured
//! by the median of many tries, so that a busy machine disturbs no test.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Peer, Pin, Prepared, Reason, Region, Transfer};

use support::{WATCHDOG, scripted};

/// How long somebody drives until the service thread leaves it to them: several times what it takes.
const BUSY: Duration = Duration::from_millis(120);
/// Less than half a light sleep, more than the look a millisecond later that somebody who was rung for may take.
const SOON: Duration = Duration::from_millis(3);
const TRIES: usize = 25;
/// How long it is counted how often a service thread wakes.
const ROUND: Duration = Duration::from_millis(400);
/// Some fifty light sleeps fit in, and looks a millisecond apart would be 200 to 400.
const FEW: u64 = 150;

/// Each measures time: one after the other, where several would share the processors.
static ALONE: Mutex<()> = Mutex::new(());

fn scripted_alone(test: &str, script: &str) -> bool {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    scripted(test, script)
}

/// Two endpoints that write to each other.
struct World {
    a: Endpoint,
    b: Endpoint,
    there: Prepared,
    /// As `there`, of more blocks than go out with one doorbell.
    list: Prepared,
    back: (Peer, Batch),
    _kept: [Region; 2],
}

impl World {
    fn new() -> Self {
        // No heartbeats meanwhile.
        let make =
            || Endpoint::builder().transport(Pin::Ib).detect(Duration::from_secs(600)).build();
        let (a, b) = (make().expect("the fake has devices"), make().expect("and more"));
        let memory = |of: &Endpoint| of.allocate(64 << 10).expect("memory");
        let (ours, theirs) = (memory(&a), memory(&b));
        let write = |from: &Endpoint, to: &Endpoint, (local, owned): (&Region, &Region)| {
            let peer = from.connect(&to.metadata()).expect("devices reach each other");
            let remote = peer.import(&owned.advertise(Access::WRITE).expect("it is advertised"));
            let remote = remote.expect("it is imported");
            let batch = Batch::write(&local.slice(0..256), &remote.slice(0..256));
            (peer, remote, batch.expect("it makes sense"))
        };
        let (peer, remote, batch) = write(&a, &b, (&ours, &theirs));
        let there = peer.prepare(batch).expect("it is prepared");
        let every_second: Vec<u32> = (0..64).map(|block| 2 * block).collect();
        let from = ours.blocks(0, 256, 256, &every_second);
        let list = Batch::write_blocks(from, remote.blocks(0, 256, 256, &every_second));
        let list = peer.prepare(list.expect("it makes sense")).expect("it is prepared");
        let (peer, _, batch) = write(&b, &a, (&theirs, &ours));
        Self { a, b, there, list, back: (peer, batch), _kept: [ours, theirs] }
    }

    /// Drives `a` for so long, and never sleeps meanwhile.
    fn drive(&self, time: Duration) {
        self.drive_by(&self.there, time);
    }

    fn drive_by(&self, write: &Prepared, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            let transfer = write.begin().expect("it is posted");
            let ended = loop {
                if let Some(ended) = transfer.poll() {
                    break ended;
                }
                assert!(begun.elapsed() < WATCHDOG, "it never ends");
            };
            assert_eq!(ended.reason, Reason::Done);
        }
    }

    /// How long it takes until who sleeps for the end of a write that it has begun is woken.
    fn begin_and_sleep(&self) -> Duration {
        let transfer = self.there.begin().expect("it is posted");
        let begun = Instant::now();
        let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
        if transfer.on_end(&Waker::from(unpark.clone())) {
            while !unpark.1.load(Ordering::Acquire) {
                assert!(begun.elapsed() < WATCHDOG, "nobody was woken");
                thread::park_timeout(WATCHDOG);
            }
        }
        assert_eq!(transfer.ended().expect("it has ended").reason, Reason::Done);
        begun.elapsed()
    }

    /// As [`Self::drive`], but looks at what was posted only after many posts.
    fn drive_rarely(&self, time: Duration) {
        let begun = Instant::now();
        let post = |_| {
            let posted = Instant::now();
            let transfer = self.there.begin().expect("it is posted");
            while posted.elapsed() < Duration::from_micros(500) {
                std::hint::spin_loop();
            }
            transfer
        };
        while begun.elapsed() < time {
            let transfers: Vec<Transfer> = (0..32).map(post).collect();
            for transfer in transfers {
                assert_eq!(transfer.join().reason, Reason::Done);
            }
        }
    }
}

/// The median of what `once` measures, each time after somebody has driven.
fn median(world: &World, mut once: impl FnMut(usize) -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..TRIES)
        .map(|turn| {
            // At another point of its sleep each time.
            world.drive(BUSY + Duration::from_millis(turn as u64));
            once(turn)
        })
        .collect();
    times.sort();
    times[TRIES / 2]
}

/// How often each service thread of this process has gone to sleep.
fn sleeps() -> Vec<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a process has threads");
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let serves = field("Name:")?.trim() == "peerway-serve";
        serves.then(|| field("voluntary_ctxt_switches:")?.trim().parse().ok())?
    };
    tasks.filter_map(of).collect()
}

/// How often the busiest service thread wakes while `drive` drives for the time that it is given.
fn woken(drive: impl Fn(Duration)) -> u64 {
    drive(BUSY);
    // Whoever finds the driver taken looks again a millisecond later: the least of some rounds is the machine's doing least.
    let rounds = (0..3).map(|_| {
        let before = sleeps();
        assert!(!before.is_empty(), "no service thread was found");
        drive(ROUND);
        let after = sleeps();
        assert_eq!(before.len(), after.len(), "a service thread came or went");
        before.iter().zip(&after).map(|(before, after)| after - before).max().unwrap_or(0)
    });
    rounds.min().unwrap_or(0)
}

#[test]
fn service_threads_sleep_while_others_drive() {
    if !scripted_alone("service_threads_sleep_while_others_drive", "") {
        return;
    }
    let world = World::new();
    for write in [&world.there, &world.list] {
        let woken = woken(|time| world.drive_by(write, time));
        assert!(woken < FEW, "a service thread woke {woken} times");
    }
}

#[test]
fn service_threads_sleep_while_others_post_and_look_later() {
    if !scripted_alone("service_threads_sleep_while_others_post_and_look_later", "") {
        return;
    }
    let world = World::new();
    let woken = woken(|time| world.drive_rarely(time));
    assert!(woken < FEW, "a service thread woke {woken} times");
}

#[test]
fn who_begins_and_sleeps_is_no_lender() {
    if !scripted_alone("who_begins_and_sleeps_is_no_lender", "latency=20us") {
        return;
    }
    let world = World::new();
    let mut times: Vec<Duration> = (0..200).map(|_| world.begin_and_sleep()).collect();
    times.sort();
    let told = times[times.len() / 2];
    // A service thread that left it to others would look a millisecond later.
    assert!(told < Duration::from_micros(700), "an end is told after {told:?}");
}

#[test]
fn a_light_sleeper_hears_arrivals() {
    if !scripted_alone("a_light_sleeper_hears_arrivals", "") {
        return;
    }
    let world = World::new();
    let (peer, batch) = &world.back;
    let back = peer.prepare(batch.clone().count(7)).expect("it is prepared");
    let heard = median(&world, |turn| {
        assert_eq!(back.run().expect("it is posted").reason, Reason::Done);
        let begun = Instant::now();
        // Only looks: nobody drives.
        while world.a.counter(7) < turn as u64 + 1 {
            assert!(begun.elapsed() < WATCHDOG, "the count never came");
            thread::yield_now();
        }
        begun.elapsed()
    });
    assert!(heard < SOON, "arrivals are seen after {heard:?}");
}

#[test]
fn what_needs_a_hand_is_not_left_to_a_light_sleeper() {
    if !scripted_alone("what_needs_a_hand_is_not_left_to_a_light_sleeper", "latency=20us") {
        return;
    }
    let world = World::new();
    let told = median(&world, |_| {
        let begun = Instant::now();
        // It goes out when the bytes are known to be there, which nobody waits for.
        let transfer = world.there.post_notifying(b"there").expect("it is posted");
        let message = world.b.notification(WATCHDOG);
        let told = begun.elapsed();
        assert_eq!(message.expect("it comes").message, b"there");
        assert_eq!(transfer.join().reason, Reason::Done);
        told
    });
    assert!(told < SOON, "a notification comes after {told:?}");
}

#[test]
fn a_light_sleeper_wakes_who_awaits_a_transfer() {
    if !scripted_alone("a_light_sleeper_wakes_who_awaits_a_transfer", "latency=20us") {
        return;
    }
    let world = World::new();
    let woken = median(&world, |_| world.begin_and_sleep());
    assert!(woken < SOON, "who awaits a transfer is woken after {woken:?}");
}

/// Wakes a thread that is parked.
struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}
