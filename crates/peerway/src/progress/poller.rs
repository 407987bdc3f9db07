//! The poller of a shard: which thread polls the driver, and which thread blocks.
//!
//! A thread polls the driver under a try-lock. A thread that does not get the lock puts its command
//! into a queue, and the holder executes it. The *progress thread* polls when no other thread does.
//! It is in one of three modes:
//!
//! | mode | what the progress thread does | what ends it |
//! |---|---|---|
//! | `Awake` | polls, or is about to | nothing to do for the spin budget |
//! | `Watching` | sleeps for [`WATCH`], because other threads poll | the time, `notify` |
//! | `Blocked` | waits in epoll with every event source armed | an event, a timer, `notify` |
//!
//! A *waiter* polls for its spin budget and then blocks on the slot of its transfer. It never arms
//! an event source and never waits in epoll.
//!
//! Four rules keep wake-ups from being lost. The loom tests run this code, and one of them fails
//! when any rule is removed.
//!
//! 1. *Arm, look, publish, under the lock.* Only the progress thread arms event sources. It looks
//!    at them once more after arming, and stores `Blocked` before it releases the lock.
//! 2. *Release, fence, look at the queue.* Commands may have come while the lock was held.
//! 3. *Leave no work behind.* A thread that releases the lock while there is work that no armed
//!    event source announces notifies the progress thread if that is `Blocked`.
//! 4. *A waiter hands over before it blocks.* It says so and then notifies the progress thread if
//!    that is `Watching`. The progress thread looks for such waiters after it has stored
//!    `Watching`.
//!
//! Why rule 3 needs no fence: mode and work change under the lock. A thread that sees `Awake` after
//! its release knows that the progress thread takes the lock once more before it blocks.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::sync::{AtomicBool, AtomicU8, AtomicU32, CommandQueue, fence, now_ns};
use crate::clock;
use crate::os::process;

/// How long the progress thread sleeps while other threads poll. Waking it for every post costs the
/// posting thread 16 to 40 µs where processors are virtual; this bounds how late it sees an event
/// that no polling thread sees.
const WATCH: Duration = Duration::from_micros(250);
/// After so many of them without a polling thread, the progress thread blocks.
const WATCHES: u32 = if cfg!(loom) { 1 } else { 4 };
/// Polls of other threads after which the progress thread leaves work that goes on to them.
const OFTEN: u32 = 8;
/// While nothing happens the clock is read at every so many polls: `perf` showed it as the
/// costliest part of a poll that finds nothing.
const POLLS_PER_CLOCK: u32 = 8;
/// A thread that has found nothing for this long offers its processor to others between polls: the
/// peer may need it.
const YIELD_AFTER_NS: u64 = 10_000;

/// What is polled under the lock: a shard's driver.
pub(crate) trait Polled {
    type Command;

    fn execute(&mut self, command: Self::Command);

    /// Looks at every event source once; whether anything happened.
    fn poll(&mut self, now: u64) -> bool;

    /// Whether the next poll has work that no armed event source announces.
    fn has_work(&self) -> bool;

    /// Whether since the last call an event source was used up that only the progress thread arms
    /// again, or a timer was set that is due before the progress thread wakes.
    fn take_unarmed(&mut self) -> bool;

    /// Arms every event source for a thread that blocks until `until`. True when there is something
    /// to do already.
    fn arm(&mut self, until: u64) -> bool;

    /// Takes that back. The next poll looks at sockets, too: one of them may have ended the wait.
    fn end_block(&mut self);

    /// When the next timer is due.
    fn next_timer(&self) -> u64;

    /// How often work must be polled that no event can announce, such as copies by a GPU.
    fn poll_every(&self) -> Option<Duration>;
}

/// How the progress thread waits. A notification stays until the progress thread has seen it.
pub(crate) trait Events {
    /// Waits for an armed event source, a notification or the time.
    fn wait(&self, timeout: Option<Duration>);

    /// Waits for a notification or the time.
    fn pause(&self, timeout: Duration);

    fn notify(&self);
}

const AWAKE: u8 = 0;
const WATCHING: u8 = 1;
const BLOCKED: u8 = 2;

/// See the module.
pub(crate) struct Poller<P: Polled, E> {
    polled: UnsafeCell<P>,
    locked: AtomicBool,
    commands: CommandQueue<P::Command>,
    /// The mode of the progress thread.
    mode: AtomicU8,
    /// Changes whenever another thread polls.
    polls: AtomicU32,
    /// A waiter has blocked, or is about to, since the progress thread last looked.
    waiter_blocks: AtomicBool,
    stop: AtomicBool,
    pub(super) events: E,
    /// How long a thread polls without finding anything before it blocks.
    spin: Duration,
    /// A child that inherited the poller must not touch it: it belongs to the parent.
    fork_generation: u32,
    #[cfg(loom)]
    pub(super) broken: Option<Rule>,
}

// SAFETY: `polled` is only reached through a `PollGuard`, of which there is at most one at a time:
// `try_lock` makes one only where its swap set `locked`, and its drop clears `locked`.
unsafe impl<P: Polled + Send, E: Sync> Sync for Poller<P, E> where P::Command: Send {}

impl<P: Polled, E: Events> Poller<P, E> {
    pub(crate) fn new(polled: P, events: E, spin: Duration) -> Self {
        Self {
            polled: UnsafeCell::new(polled),
            locked: AtomicBool::new(false),
            commands: CommandQueue::new(),
            mode: AtomicU8::new(AWAKE),
            polls: AtomicU32::new(0),
            waiter_blocks: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            events,
            spin,
            fork_generation: process::fork_generation(),
            #[cfg(loom)]
            broken: None,
        }
    }

    /// Whether this process is a child of the one that made the poller.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        process::fork_generation() != self.fork_generation
    }

    /// What is polled, for a child after a fork. The parent may have held the lock then; no thread
    /// of the child does.
    pub(crate) fn inherited(&self) -> *mut P {
        self.polled.get()
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<PollGuard<'_, P, E>> {
        // The load keeps the cache line shared while another thread has the lock. loom could see an
        // old value for ever.
        #[cfg(not(loom))]
        if self.locked.load(Ordering::Relaxed) {
            return None;
        }
        if self.is_inherited() || self.locked.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(PollGuard { poller: self, leaves_work: false })
    }

    /// Executes a command, now or as soon as the holder of the lock gets to it.
    pub(crate) fn submit(&self, command: P::Command) {
        self.submit_with(command, P::execute, |command| command);
    }

    /// As [`Self::submit`], for a command that is made only where it has to wait in the queue:
    /// moving a large one costs.
    #[inline]
    pub(crate) fn submit_with<T>(
        &self,
        what: T,
        execute: impl FnOnce(&mut P, T),
        command: impl FnOnce(T) -> P::Command,
    ) {
        if let Some(mut guard) = self.try_lock() {
            guard.execute_queued();
            execute(&mut guard, what);
            return;
        }
        if self.is_inherited() {
            return;
        }
        self.commands.push(command(what));
        // Rule 2. pairs with the fence in the guard's drop: either the holder sees the command, or
        // this thread sees that the lock is free.
        fence(Ordering::SeqCst);
        self.execute_if_free();
    }

    /// Wakes the progress thread if it is blocked: there is work in the driver that no event
    /// announces, and this thread does not poll. For a thread that has just submitted that work.
    #[inline]
    pub(crate) fn notify_if_blocked(&self) {
        if self.mode.load(Ordering::Relaxed) == BLOCKED && !self.breaks(Rule::LeaveNoWork) {
            self.events.notify();
        }
    }

    /// This thread is about to block until a request of its own ends. The progress thread polls
    /// from here on.
    pub(crate) fn hand_over(&self) {
        // pairs with the swap in `run`, which reads `polls` afterwards
        self.waiter_blocks.store(true, Ordering::Release);
        if !self.breaks(Rule::HandOver) {
            // Rule 4. pairs with the fence in `watch`
            fence(Ordering::SeqCst);
        }
        if self.mode.load(Ordering::Relaxed) == WATCHING && !self.is_inherited() {
            self.events.notify();
        }
    }

    /// Polls once, if no other thread does; whether anything happened.
    pub(crate) fn poll_once(&self, now: u64) -> bool {
        self.note_poll();
        let Some(mut guard) = self.try_lock() else { return false };
        let executed = guard.execute_queued();
        guard.leaves_work = true;
        guard.poll(now) || executed
    }

    /// Polls until `over` holds, the deadline, or for as long as something happened within the spin
    /// budget and `patience`. True when `over` holds.
    pub(crate) fn poll_until(
        &self,
        over: impl Fn() -> bool,
        mut now: u64,
        deadline: u64,
        patience: Duration,
    ) -> bool {
        // Also where nothing is left to do: else the progress thread, always first, would keep
        // polling.
        self.note_poll();
        let spin = (self.spin + patience).as_nanos() as u64;
        let mut idle_since = now;
        while !over() {
            if self.is_stopped() || self.is_inherited() {
                return over();
            }
            if let Some(mut guard) = self.try_lock() {
                guard.leaves_work = true;
                let mut polls = 0u32;
                loop {
                    guard.execute_queued();
                    let progress = guard.poll(now);
                    if progress {
                        idle_since = now;
                    }
                    if over() {
                        return true;
                    }
                    let idle = now.saturating_sub(idle_since);
                    if idle > spin || now >= deadline || self.is_stopped() {
                        break;
                    }
                    rest(idle);
                    polls = polls.wrapping_add(1);
                    if progress || polls.is_multiple_of(POLLS_PER_CLOCK) {
                        now = now_ns();
                    }
                }
            }
            let idle = now.saturating_sub(idle_since);
            if idle > spin || now >= deadline {
                return over();
            }
            rest(idle);
            now = now_ns();
        }
        true
    }

    /// The progress thread.
    pub(crate) fn run(&self) {
        let (mut polls, mut watches, mut was_blocked) = (0, 0, false);
        while !self.is_stopped() {
            // pairs with the store in `hand_over`
            let handed_over = self.waiter_blocks.swap(false, Ordering::Acquire);
            if handed_over {
                // It polled before; now it relies on this thread.
                (polls, watches) = (self.polls.load(Ordering::Relaxed), 0);
            }
            let Some(mut guard) = self.try_lock() else {
                self.watch(None, WATCH);
                continue;
            };
            if std::mem::take(&mut was_blocked) {
                guard.end_block();
            }
            // A waiter that blocks has just polled for the spin budget in vain.
            let spin = if watches > 0 || handed_over { Duration::ZERO } else { self.spin };
            let now = self.poll_while_busy(&mut guard, polls, spin);
            let seen = std::mem::replace(&mut polls, self.polls.load(Ordering::Relaxed));
            watches = if seen == polls { u32::saturating_sub(watches, 1) } else { WATCHES };
            match guard.poll_every() {
                Some(every) => self.watch(Some(guard), every),
                None if watches > 0 => self.watch(Some(guard), WATCH),
                None => {
                    self.block(guard, now);
                    was_blocked = true;
                }
            }
        }
    }

    /// Polls until nothing has happened for the spin budget, or other threads poll. Returns the
    /// time.
    ///
    /// A thread that polls now and then does not take over work that goes on; one that polls again
    /// and again does, because its next command would wait in the queue.
    fn poll_while_busy(&self, guard: &mut PollGuard<'_, P, E>, polls: u32, spin: Duration) -> u64 {
        let mut now = now_ns();
        let mut idle_since = now;
        let mut turns = 0u32;
        loop {
            guard.execute_queued();
            let progress = guard.poll(now);
            let others = self.polls.load(Ordering::Relaxed).wrapping_sub(polls);
            if progress && others < OFTEN && !self.is_stopped() {
                now = now_ns();
                idle_since = now;
                continue;
            }
            let idle = now.saturating_sub(idle_since);
            if others > 0 || idle >= spin.as_nanos() as u64 || self.is_stopped() {
                return now;
            }
            rest(idle);
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(POLLS_PER_CLOCK) {
                now = now_ns();
            }
        }
    }

    /// The progress thread leaves the polling to other threads for a while.
    fn watch(&self, guard: Option<PollGuard<'_, P, E>>, time: Duration) {
        self.mode.store(WATCHING, Ordering::SeqCst);
        drop(guard);
        // Rule 4. pairs with the fence in `hand_over`: either that thread sees the mode, or this
        // one sees that it blocks.
        fence(Ordering::SeqCst);
        if !self.waiter_blocks.load(Ordering::Relaxed) {
            self.events.pause(time);
        }
        self.mode.store(AWAKE, Ordering::SeqCst);
    }

    /// The progress thread blocks, unless there is something to do.
    fn block(&self, mut guard: PollGuard<'_, P, E>, now: u64) {
        let timer = guard.next_timer();
        if guard.arm(timer) && !self.breaks(Rule::ArmThenLook) {
            return;
        }
        // Rule 1: the release of the lock publishes it.
        self.mode.store(BLOCKED, Ordering::SeqCst);
        // Executes what was queued meanwhile, and notifies this thread itself if that leaves work.
        drop(guard);
        let timeout = (timer != u64::MAX).then(|| clock::until(timer, now));
        self.events.wait(timeout);
        self.mode.store(AWAKE, Ordering::SeqCst);
    }

    /// Ends [`Self::run`].
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.events.notify();
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Only that it changes matters, so threads that come at the same time may store the same
    /// value.
    #[inline]
    fn note_poll(&self) {
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    #[inline]
    fn execute_if_free(&self) {
        while !self.commands.is_empty() {
            let Some(mut guard) = self.try_lock() else { return };
            guard.execute_queued();
        }
    }

    /// Whether a loom test leaves this rule out.
    #[inline]
    fn breaks(&self, rule: Rule) -> bool {
        #[cfg(loom)]
        return self.broken == Some(rule);
        #[cfg(not(loom))]
        {
            let _ = rule;
            false
        }
    }
}

/// The rules of the module's documentation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rule {
    ArmThenLook,
    ReleaseThenLook,
    LeaveNoWork,
    HandOver,
}

/// The right to poll.
pub(crate) struct PollGuard<'a, P: Polled, E: Events> {
    poller: &'a Poller<P, E>,
    /// This thread has polled, or executed what others had queued: rule 3 is its duty.
    leaves_work: bool,
}

impl<P: Polled, E: Events> PollGuard<'_, P, E> {
    /// Executes every queued command; whether there was any.
    #[inline]
    pub(crate) fn execute_queued(&mut self) -> bool {
        let mut any = false;
        while !self.poller.commands.is_empty()
            && let Some(command) = self.poller.commands.pop()
        {
            self.execute(command);
            any = true;
        }
        self.leaves_work |= any;
        any
    }
}

impl<P: Polled, E: Events> Deref for PollGuard<'_, P, E> {
    type Target = P;

    #[inline]
    fn deref(&self) -> &P {
        // SAFETY: this is the only guard (see `Poller`'s `Sync`).
        unsafe { &*self.poller.polled.get() }
    }
}

impl<P: Polled, E: Events> DerefMut for PollGuard<'_, P, E> {
    #[inline]
    fn deref_mut(&mut self) -> &mut P {
        // SAFETY: this is the only guard (see `Poller`'s `Sync`), and it is borrowed mutably.
        unsafe { &mut *self.poller.polled.get() }
    }
}

impl<P: Polled, E: Events> Drop for PollGuard<'_, P, E> {
    #[inline]
    fn drop(&mut self) {
        let poller = self.poller;
        let leaves_work = self.take_unarmed() | (self.leaves_work && self.has_work());
        poller.locked.store(false, Ordering::Release);
        if leaves_work {
            // Rule 3.
            poller.notify_if_blocked();
        }
        if !poller.breaks(Rule::ReleaseThenLook) {
            // Rule 2. pairs with the fence in `submit_with`
            fence(Ordering::SeqCst);
            poller.execute_if_free();
        }
    }
}

/// Between two polls.
fn rest(idle_ns: u64) {
    if idle_ns < YIELD_AFTER_NS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

#[cfg(all(test, loom))]
mod loom;
