//! The copy pool: threads that help with large copies.
//!
//! A large copy is a [`Job`] cut into quanta. The thread that waits for it works on it, and the
//! copy pool helps, so that two cores copy. The first large job starts the threads. Without a job
//! they block on a futex, at first with short timeouts: waking a blocked thread costs the waker 16
//! to 40 µs where cores are virtual, as much as a post may take.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use crate::clock;
use crate::os::process;
use crate::os::wake::{futex_wait, futex_wake};
use crate::threads::{self, Cpus};

/// Bytes of one quantum. It is small enough that a heartbeat or a cancel waits less than 100 µs for
/// it. It is large enough that claiming it costs nothing (512 KiB measured as good as 4 MiB).
pub(crate) const QUANTUM: u64 = 512 << 10;

/// How long a thread that has just helped polls for more work before it naps.
const LINGER: Duration = Duration::from_micros(50);
/// How long a thread without work naps before it checks again, and the number of naps before it
/// blocks without a timeout. The kernel adds 50 µs to a nap.
const NAP: Duration = Duration::from_micros(50);
const NAPS: u32 = 20;

/// How soon a job needs its helpers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Haste {
    /// Now: a thread waits for the job.
    Now,
    /// Within a nap, if that saves the caller a wake-up.
    Soon,
}

thread_local! {
    static HELPS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the current thread belongs to a copy pool.
pub(crate) fn is_helper() -> bool {
    HELPS.get()
}

/// A copy that several threads can work on.
pub(crate) trait Job: Send + Sync {
    /// Copies one quantum. Returns false when none is left to claim.
    fn step(&self) -> bool;

    /// Stops claiming quanta. The job ends once the quanta in progress are done.
    fn cancel(&self);

    /// The endpoint closes: stops claiming quanta and ends the job.
    fn halt(&self);
}

/// See the module.
pub(crate) struct CopyPool {
    shared: Arc<PoolShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    size: usize,
    cpus: Cpus,
}

struct PoolShared {
    jobs: ArrayQueue<Arc<dyn Job>>,
    /// Incremented for every new job. The threads block on it.
    wakeups: AtomicU32,
    asleep: AtomicU32,
    napping: AtomicU32,
    stop: AtomicBool,
}

impl CopyPool {
    /// Creates a copy pool of `size` threads on these CPUs. No thread is started yet.
    pub(crate) fn new(size: usize, cpus: Cpus) -> Self {
        let shared = PoolShared {
            // One entry for each helper that a job requests. Jobs beyond this limit run on their
            // waiters alone, which is no loss on a machine that busy.
            jobs: ArrayQueue::new(1024),
            wakeups: AtomicU32::new(0),
            asleep: AtomicU32::new(0),
            napping: AtomicU32::new(0),
            stop: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), threads: Mutex::default(), size, cpus }
    }

    /// Requests a helper for the job. Returns false when no helper is available: the caller must
    /// then complete the job itself.
    ///
    /// Only one helper: a second one would be woken on the core of the caller.
    pub(crate) fn offer(&self, job: &Arc<dyn Job>, haste: Haste) -> bool {
        if !self.is_started() && !self.start() {
            return false;
        }
        let taken = self.shared.jobs.push(job.clone()).is_ok();
        // Pairs with the load of `wakeups` in `run`: either the thread sees the new value, or this
        // thread sees that it is blocked.
        self.shared.wakeups.fetch_add(1, Ordering::SeqCst);
        let napping = self.shared.napping.load(Ordering::SeqCst) as usize;
        let asleep = self.shared.asleep.load(Ordering::SeqCst) > 0;
        let wake = match haste {
            Haste::Now => napping > 0 || asleep,
            // Each napping thread takes one job.
            Haste::Soon => asleep && self.shared.jobs.len() > napping,
        };
        if wake {
            futex_wake(&self.shared.wakeups, 1);
        }
        taken
    }

    fn is_started(&self) -> bool {
        !self.threads.lock().unwrap().is_empty()
    }

    /// Starts the threads, so that the first large copy need not. Returns false when no thread
    /// could be started.
    pub(crate) fn start(&self) -> bool {
        let mut started = self.threads.lock().unwrap();
        while started.len() < self.size {
            let shared = self.shared.clone();
            match threads::spawn("peerway-copy", &self.cpus, move || {
                // A poster must not lose its core to the helper that it wakes: measured, that costs
                // 1.8 ms.
                process::yield_to_others();
                shared.run();
            }) {
                Ok(handle) => started.push(handle),
                Err(error) => {
                    tracing::warn!(%error, "cannot start a copy thread: large copies use one core");
                    break;
                }
            }
        }
        !started.is_empty()
    }

    /// Ends the threads once their current quanta are done.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wakeups.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.wakeups, u32::MAX);
        for thread in self.threads.lock().unwrap().drain(..) {
            let _ = thread.join();
        }
        while let Some(job) = self.shared.jobs.pop() {
            job.halt();
        }
    }

    /// Forgets the threads without joining them: after a fork they exist only in the parent.
    pub(crate) fn abandon(&self) {
        // The thread that held the lock at the fork does not exist in the child. The handles are
        // then leaked.
        if let Ok(mut threads) = self.threads.try_lock() {
            threads.drain(..).for_each(std::mem::forget);
        }
    }
}

impl PoolShared {
    /// Polls for the next job for a short time after the last one. Copies of a megabyte come in
    /// sequence, and each is over before a blocked thread would be awake.
    fn is_offered_soon(&self) -> bool {
        let until = clock::after(clock::now(), LINGER);
        while self.jobs.is_empty() && !self.stop.load(Ordering::Relaxed) {
            if clock::now() >= until {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    fn run(&self) {
        HELPS.set(true);
        let mut naps = 0;
        loop {
            // Load this before `stop`: `CopyPool::stop` sets `stop` before it increments `wakeups`.
            let wakeups = self.wakeups.load(Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            if let Some(job) = self.jobs.pop() {
                naps = 0;
                let mut more = true;
                while more && !self.stop.load(Ordering::Relaxed) {
                    more = job.step();
                }
                if more {
                    job.halt();
                }
                continue;
            }
            if naps == 0 && self.is_offered_soon() {
                continue;
            }
            let (resting, nap) = match naps {
                NAPS.. => (&self.asleep, None),
                _ => (&self.napping, Some(NAP)),
            };
            naps += 1;
            resting.fetch_add(1, Ordering::SeqCst);
            futex_wait(&self.wakeups, wakeups, nap);
            resting.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
