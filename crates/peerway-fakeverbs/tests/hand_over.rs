//! Service threads while other threads drive: they sleep, and still hear what is for them.
//!
//! A light sleep of a service thread takes eight milliseconds unless something wakes it. Each test repeats a short
//! measurement until it has held several times. A busy machine spoils single measurements, so the tests allow
//! for any number of those within the watchdog; an engine without the property spoils all of them.

mod support;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Peer, Pin, Prepared, Reason, Region, Transfer};

use support::{WATCHDOG, scripted};

/// How long a round of driving takes at least: five light sleeps.
const ROUND: Duration = Duration::from_millis(40);
/// Half a light sleep. Looks that are a millisecond apart, or one for each completion, are far more frequent.
const SLEEP: Duration = Duration::from_millis(4);
/// A light sleep that nothing disturbed takes at least this long.
const UNDISTURBED: Duration = Duration::from_millis(6);
/// Half a light sleep. A thread that had to wait for the end of one would need eight milliseconds.
const SOON: Duration = Duration::from_millis(4);
/// How often in a row a measurement must hold.
const TIMES: u32 = 4;
/// How long a measurement may fail to hold: a machine that is busy with other things takes seconds.
const PATIENCE: Duration = WATCHDOG;

/// Each measures time: one after the other, where several would share the processors.
static ALONE: Mutex<()> = Mutex::new(());

fn scripted_alone(test: &str, script: &str) -> bool {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    scripted(test, script)
}

/// Repeats a measurement until it has held [`TIMES`] times in a row. `once` returns what it found where it did not hold.
fn eventually(what: &str, mut once: impl FnMut() -> Result<(), String>) {
    let begun = Instant::now();
    let (mut in_a_row, mut tries) = (0, 0);
    while in_a_row < TIMES {
        tries += 1;
        match once() {
            Ok(()) => in_a_row += 1,
            Err(found) => {
                in_a_row = 0;
                assert!(begun.elapsed() < PATIENCE, "{what}: not in {tries} tries, lastly {found}");
            }
        }
    }
}

/// Two endpoints that write to each other.
struct World {
    a: Endpoint,
    /// The service threads of `a`.
    service: Vec<ServiceThread>,
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
        let a = make().expect("the fake has devices");
        let service = ServiceThread::all();
        let b = make().expect("and more");
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
        Self { a, service, b, there, list, back: (peer, batch), _kept: [ours, theirs] }
    }

    /// Writes once, and drives `a` until the write has ended.
    fn write_by(&self, write: &Prepared) {
        let begun = Instant::now();
        let transfer = write.begin().expect("it is posted");
        let ended = loop {
            if let Some(ended) = transfer.poll() {
                break ended;
            }
            assert!(begun.elapsed() < WATCHDOG, "it never ends");
        };
        assert_eq!(ended.reason, Reason::Done);
    }

    /// How often the service threads of `a` have gone to sleep.
    fn sleeps(&self) -> u64 {
        self.service.iter().map(ServiceThread::sleeps).sum()
    }

    /// Drives `a` until its service thread has begun a light sleep, which it is in the middle of afterwards.
    fn drive_into_light_sleep(&self) {
        let begun = Instant::now();
        let mut last = (self.sleeps(), begun);
        loop {
            self.write_by(&self.there);
            let (sleeps, now) = (self.sleeps(), Instant::now());
            if sleeps != last.0 {
                // The sleep before this one was light, so this one is too.
                if sleeps == last.0 + 1 && now - last.1 >= UNDISTURBED {
                    return;
                }
                last = (sleeps, now);
            }
            assert!(begun.elapsed() < PATIENCE, "the service thread never sleeps lightly");
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

    /// Posts many writes, and looks at them only afterwards.
    fn write_and_look_later(&self) {
        let post = |_| {
            let transfer = self.there.begin().expect("it is posted");
            compute();
            transfer
        };
        let transfers: Vec<Transfer> = (0..32).map(post).collect();
        for transfer in transfers {
            assert_eq!(transfer.join().reason, Reason::Done);
        }
    }

    /// Whether the service threads sleep for [`SLEEP`] or longer on average while `drive` drives.
    fn sleeps_while(&self, drive: impl Fn()) -> Result<(), String> {
        let (before, begun) = (self.sleeps(), Instant::now());
        let mut driven = 0;
        while begun.elapsed() < ROUND {
            drive();
            driven += 1;
        }
        let (sleeps, spent) = (self.sleeps() - before, begun.elapsed());
        // One more, because the round may begin just before the end of a sleep.
        if SLEEP * (sleeps.saturating_sub(1) as u32) <= spent {
            return Ok(());
        }
        Err(format!("a service thread slept {sleeps} times in {spent:?}, beside {driven} drives"))
    }

    /// Whether what `once` measures is [`SOON`], begun while the service thread of `a` sleeps lightly.
    fn is_soon(&self, once: impl FnOnce() -> Duration) -> Result<(), String> {
        self.drive_into_light_sleep();
        let took = once();
        if took < SOON { Ok(()) } else { Err(format!("{took:?}")) }
    }
}

/// What a thread does between transfers. Without it two processors would be busy with transfers alone, and service
/// threads could not wake often even if they wanted to.
fn compute() {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_micros(500) {
        std::hint::spin_loop();
    }
}

/// A service thread of this process, by its directory in `/proc`.
struct ServiceThread(PathBuf);

impl ServiceThread {
    /// Those that there are. An endpoint has one at least, and it names itself when it begins to run.
    fn all() -> Vec<Self> {
        let begun = Instant::now();
        loop {
            let tasks = std::fs::read_dir("/proc/self/task").expect("a process has threads");
            let paths = tasks.filter_map(|task| Some(task.ok()?.path()));
            let serves = |path: &PathBuf| {
                let name = std::fs::read_to_string(path.join("comm"));
                name.is_ok_and(|name| name.trim() == "peerway-serve")
            };
            let found: Vec<Self> = paths.filter(serves).map(Self).collect();
            if !found.is_empty() {
                return found;
            }
            assert!(begun.elapsed() < WATCHDOG, "no service thread was found");
            thread::yield_now();
        }
    }

    /// How often it has gone to sleep.
    fn sleeps(&self) -> u64 {
        let status = std::fs::read_to_string(self.0.join("status")).expect("it runs");
        let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok();
        status.lines().find_map(count).expect("the kernel counts")
    }
}

#[test]
fn service_threads_sleep_while_others_drive() {
    if !scripted_alone("service_threads_sleep_while_others_drive", "") {
        return;
    }
    let world = World::new();
    for write in [&world.there, &world.list] {
        let drive = || {
            world.write_by(write);
            compute();
        };
        eventually("service threads sleep", || world.sleeps_while(drive));
    }
}

#[test]
fn service_threads_sleep_while_others_post_and_look_later() {
    if !scripted_alone("service_threads_sleep_while_others_post_and_look_later", "") {
        return;
    }
    let world = World::new();
    let drive = || world.write_and_look_later();
    eventually("service threads sleep", || world.sleeps_while(drive));
}

#[test]
fn who_begins_and_sleeps_is_no_lender() {
    if !scripted_alone("who_begins_and_sleeps_is_no_lender", "latency=20us") {
        return;
    }
    let world = World::new();
    eventually("an end is told at once", || {
        let mut times: Vec<Duration> = (0..20).map(|_| world.begin_and_sleep()).collect();
        times.sort();
        let told = times[times.len() / 2];
        // A service thread that left it to others would look a millisecond later.
        if told < Duration::from_micros(700) { Ok(()) } else { Err(format!("after {told:?}")) }
    });
}

#[test]
fn a_light_sleeper_hears_arrivals() {
    if !scripted_alone("a_light_sleeper_hears_arrivals", "") {
        return;
    }
    let world = World::new();
    let (peer, batch) = &world.back;
    let back = peer.prepare(batch.clone().count(7)).expect("it is prepared");
    let mut arrived = 0;
    eventually("arrivals are seen", || {
        world.is_soon(|| {
            assert_eq!(back.run().expect("it is posted").reason, Reason::Done);
            arrived += 1;
            let begun = Instant::now();
            // Only looks: nobody drives.
            while world.a.counter(7) < arrived {
                assert!(begun.elapsed() < WATCHDOG, "the count never came");
                thread::yield_now();
            }
            begun.elapsed()
        })
    });
}

#[test]
fn what_needs_a_hand_is_not_left_to_a_light_sleeper() {
    if !scripted_alone("what_needs_a_hand_is_not_left_to_a_light_sleeper", "latency=20us") {
        return;
    }
    let world = World::new();
    eventually("a notification comes", || {
        world.is_soon(|| {
            let begun = Instant::now();
            // It goes out when the bytes are known to be there, which nobody waits for.
            let transfer = world.there.post_notifying(b"there").expect("it is posted");
            let message = world.b.notification(WATCHDOG);
            let told = begun.elapsed();
            assert_eq!(message.expect("it comes").message, b"there");
            assert_eq!(transfer.join().reason, Reason::Done);
            told
        })
    });
}

#[test]
fn a_light_sleeper_wakes_who_awaits_a_transfer() {
    if !scripted_alone("a_light_sleeper_wakes_who_awaits_a_transfer", "latency=20us") {
        return;
    }
    let world = World::new();
    eventually("who awaits a transfer is woken", || world.is_soon(|| world.begin_and_sleep()));
}

/// Wakes a thread that is parked.
struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}
