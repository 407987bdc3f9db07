//! The poller of a shard: which thread polls the driver, and which thread blocks.
//!
//! A thread polls the driver under a try-lock. A thread that does not get the lock puts its command
//! into a queue, and the holder executes it.
//!
//! At most one thread holds the *role*: the right to arm the event sources and to block in epoll.
//! The *progress thread* holds it by default. A *waiter* polls for its spin budget. Then it takes
//! the role if it is free, and blocks in epoll until its own request ends (leader); one event
//! wakes it, and no second thread. If another thread has the role, the waiter blocks on the slot of
//! its transfer (follower), and the thread with the role ends the transfer and wakes it.
//!
//! ```text
//!                 others poll, or a waiter has the role
//!            +---------------------------------------------+
//!            |                                             v
//!  progress thread: polls  --- idle, takes the role --->  blocked in epoll
//!            ^                                             |
//!            +----- pauses for WATCH or WATCH_LED <--------+ an event, a timer, `notify`
//!
//!  waiter: polls -- spin budget over --> role free? -- yes --> blocked in epoll (leader)
//!                                            |                     | own request ended:
//!                                            no                    v releases the role
//!                                            v
//!                                    blocked on its slot (follower)
//! ```
//!
//! Five rules keep wake-ups from being lost. The loom tests run this code, and one of them fails
//! when any rule is removed.
//!
//! 1. *Arm, look, publish, under the lock.* Only the thread with the role arms event sources. It
//!    looks at them once more after arming, and sets `blocked` before it releases the lock.
//! 2. *Release, fence, look at the queue.* Commands may have come while the lock was held.
//! 3. *Leave no work behind.* A thread that releases the lock while there is work that no armed
//!    event source announces notifies the blocked thread.
//! 4. *A waiter hands over before it blocks on its slot.* It sets `waiter_blocks` and then wakes
//!    the progress thread if that pauses and no thread has the role. The progress thread looks for
//!    such waiters before it pauses, and a leader looks for them after it has released the role.
//! 5. *A leader learns of its end.* A thread that ends the leader's request while the leader is
//!    blocked notifies it.
//!
//! Why rule 3 needs no fence: `blocked` and work change under the lock. A thread that sees no
//! blocked thread after its release knows that the next one takes the lock before it blocks.
//!
//! A leader does not wake the progress thread when it releases the role and no waiter blocks. The
//! progress thread looks again after its pause. This bounds how late it sees an event that comes
//! just after the last waiter has gone.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::sync::{AtomicBool, AtomicU32, AtomicU64, CommandQueue, fence, now_ns};
use crate::clock;
use crate::os::process;

/// How long the progress thread pauses while other threads poll. Waking it for every post costs the
/// posting thread 16 to 40 µs where processors are virtual; this bounds how late it sees an event
/// that no polling thread sees.
const WATCH: Duration = Duration::from_micros(250);
/// How long it pauses while a waiter has the role.
const WATCH_LED: Duration = Duration::from_millis(1);
/// After so many pauses without a polling thread, the progress thread blocks.
const WATCHES: u32 = if cfg!(loom) { 1 } else { 4 };
/// Polls of other threads after which the progress thread leaves work that goes on to them.
const OFTEN: u32 = 8;
/// While nothing happens the clock is read at every so many polls: `perf` showed it as the
/// costliest part of a poll that finds nothing.
const POLLS_PER_CLOCK: u32 = 8;
/// A waiter that has found nothing for this long offers its processor to others between polls: the
/// peer may need it.
const WAITER_YIELDS_AFTER_NS: u64 = 10_000;
/// The progress thread does so sooner. On one processor with its peer, 10 µs cost a write of 4 KiB
/// by local-ring 25 µs instead of 15; on two, 0 cost it 1.51 µs instead of 1.41.
const PROGRESS_YIELDS_AFTER_NS: u64 = 1_000;

/// What is polled under the lock: a shard's driver.
pub(crate) trait Polled {
    type Command;

    fn execute(&mut self, command: Self::Command);

    /// Looks at every event source once; whether anything happened.
    fn poll(&mut self, now: u64) -> bool;

    /// Whether the next poll has work that no armed event source announces.
    fn has_work(&self) -> bool;

    /// Whether since the last call an event source was used up that only the blocked thread arms
    /// again, or a timer was set that is due before that thread wakes.
    fn take_unarmed(&mut self) -> bool;

    /// Arms every event source for a thread that blocks until `until`. True when there is something
    /// to do already.
    fn arm(&mut self, until: u64) -> bool;

    /// Disarms what `arm` has armed, if anything. The next poll looks at sockets, too: one of them
    /// may have ended the wait.
    fn end_block(&mut self);

    /// When the next timer is due.
    fn next_timer(&self) -> u64;

    /// How often work must be polled that no event can announce, such as copies by a GPU.
    fn poll_every(&self) -> Option<Duration>;

    /// Whether the request of this number has ended.
    fn has_ended(&self, request: u64) -> bool;
}

/// How threads block. A notification stays until the thread that it is for has seen it.
pub(crate) trait Events {
    /// The thread with the role waits for an armed event source, a notification or the time.
    fn wait(&self, timeout: Option<Duration>);

    /// Ends a `wait`, or the next one.
    fn notify(&self);

    /// The progress thread waits for `resume` or the time.
    fn pause(&self, timeout: Duration);

    /// Ends a `pause`, or the next one.
    fn resume(&self);
}

/// No waiter has the role.
const NO_REQUEST: u64 = u64::MAX;

/// See the module.
pub(crate) struct Poller<P: Polled, E> {
    polled: UnsafeCell<P>,
    locked: AtomicBool,
    commands: CommandQueue<P::Command>,
    /// A thread has the role.
    role: AtomicBool,
    /// The thread with the role is in epoll, with every event source armed.
    blocked: AtomicBool,
    /// The request that the waiter with the role waits for.
    led: AtomicU64,
    /// The progress thread pauses.
    watching: AtomicBool,
    /// Changes whenever another thread polls.
    polls: AtomicU32,
    /// A waiter has blocked on its slot, or is about to, since the progress thread last took the
    /// role.
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
            role: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            led: AtomicU64::new(NO_REQUEST),
            watching: AtomicBool::new(false),
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

    /// Wakes the thread that is blocked in epoll, if any: there is work in the driver that no event
    /// announces, and this thread does not poll. For a thread that has just submitted that work.
    #[inline]
    pub(crate) fn notify_if_blocked(&self) {
        if self.blocked.load(Ordering::Relaxed) && !self.breaks(Rule::LeaveNoWork) {
            self.events.notify();
        }
    }

    /// This thread is about to block on the slot of a request. The progress thread, or the leader,
    /// polls from here on.
    pub(crate) fn hand_over(&self) {
        self.waiter_blocks.store(true, Ordering::Release);
        if !self.breaks(Rule::HandOver) {
            // Rule 4. pairs with the fences in `watch` and `lead_until`
            fence(Ordering::SeqCst);
        }
        if self.watching.load(Ordering::Relaxed) && !self.role.load(Ordering::Relaxed) {
            self.resume();
        }
    }

    fn resume(&self) {
        if !self.is_inherited() {
            self.events.resume();
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
                    rest(idle, WAITER_YIELDS_AFTER_NS);
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
            rest(idle, WAITER_YIELDS_AFTER_NS);
            now = now_ns();
        }
        true
    }

    /// The waiter for a request blocks in epoll until `over` holds, or the deadline. True when
    /// `over` holds. False at once when another thread has the role or polls: that thread serves
    /// this waiter, which blocks on its slot.
    pub(crate) fn lead_until(&self, request: u64, over: impl Fn() -> bool, deadline: u64) -> bool {
        // pairs with the store below
        if self.is_inherited() || self.role.swap(true, Ordering::AcqRel) {
            return over();
        }
        self.led.store(request, Ordering::Relaxed);
        let mut was_blocked = false;
        while let Some(mut guard) = self.try_lock() {
            if was_blocked {
                guard.end_block();
            }
            guard.leaves_work = true;
            let mut now = now_ns();
            loop {
                guard.execute_queued();
                if !guard.poll(now) || over() || now >= deadline || self.is_stopped() {
                    break;
                }
                now = now_ns();
            }
            // A GPU's copies announce no end: the progress thread looks for it in time.
            if over() || now >= deadline || self.is_stopped() || guard.poll_every().is_some() {
                break;
            }
            self.block(guard, now, deadline, false);
            was_blocked = true;
        }
        self.led.store(NO_REQUEST, Ordering::Relaxed);
        self.role.store(false, Ordering::Release);
        // Rule 4. pairs with the fences in `hand_over` and `watch`: that waiter sees that the role
        // is free, or this thread sees that it blocks; this thread sees that the progress thread
        // pauses, or that one sees that the role is free.
        fence(Ordering::SeqCst);
        if self.waiter_blocks.load(Ordering::Relaxed)
            && self.watching.load(Ordering::Relaxed)
            && !self.breaks(Rule::ReleaseThenResume)
        {
            self.resume();
        }
        over()
    }

    /// The progress thread.
    pub(crate) fn run(&self) {
        let (mut polls, mut watches, mut has_role) = (0, 0, false);
        while !self.is_stopped() {
            if !has_role && self.role.load(Ordering::Relaxed) {
                self.watch(None, WATCH_LED);
                continue;
            }
            // pairs with the store in `hand_over`
            let handed_over = self.waiter_blocks.load(Ordering::Acquire);
            if handed_over {
                // It polled before; now it relies on this thread.
                (polls, watches) = (self.polls.load(Ordering::Relaxed), 0);
            }
            let guard = self.try_lock();
            let Some(mut guard) = guard else {
                self.release_role(&mut has_role);
                self.watch(None, WATCH);
                continue;
            };
            if has_role {
                guard.end_block();
            }
            // A waiter that blocks has just polled for the spin budget in vain.
            let spin = if watches > 0 || handed_over { Duration::ZERO } else { self.spin };
            let now = self.poll_while_busy(&mut guard, polls, spin);
            let seen = std::mem::replace(&mut polls, self.polls.load(Ordering::Relaxed));
            watches = if seen == polls { u32::saturating_sub(watches, 1) } else { WATCHES };
            let pause = match guard.poll_every() {
                None if watches == 0 => {
                    if has_role || !self.role.swap(true, Ordering::AcqRel) {
                        has_role = true;
                        self.block(guard, now, u64::MAX, true);
                        continue;
                    }
                    WATCH_LED
                }
                None => WATCH,
                Some(every) => every,
            };
            self.release_role(&mut has_role);
            self.watch(Some(guard), pause);
        }
    }

    /// The progress thread gives the role up, if it has it, before it pauses.
    fn release_role(&self, has_role: &mut bool) {
        if std::mem::take(has_role) {
            self.role.store(false, Ordering::Release);
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
            rest(idle, PROGRESS_YIELDS_AFTER_NS);
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(POLLS_PER_CLOCK) {
                now = now_ns();
            }
        }
    }

    /// The progress thread leaves the polling to other threads for a while.
    fn watch(&self, guard: Option<PollGuard<'_, P, E>>, time: Duration) {
        self.watching.store(true, Ordering::SeqCst);
        drop(guard);
        // Rule 4. pairs with the fences in `hand_over` and `lead_until`: either those threads see
        // that this one pauses, or this one sees what they stored.
        fence(Ordering::SeqCst);
        let is_needed = self.waiter_blocks.load(Ordering::Relaxed)
            && !self.role.load(Ordering::Relaxed)
            && !self.locked.load(Ordering::Relaxed);
        if !is_needed {
            self.events.pause(time);
        }
        self.watching.store(false, Ordering::SeqCst);
    }

    /// The thread with the role blocks until `until` at the latest, unless there is work to do.
    fn block(&self, mut guard: PollGuard<'_, P, E>, now: u64, until: u64, is_progress: bool) {
        let until = guard.next_timer().min(until);
        if guard.arm(until) && !self.breaks(Rule::ArmThenLook) {
            return;
        }
        if is_progress {
            // The progress thread serves waiters that have blocked on their slots from here on.
            self.waiter_blocks.store(false, Ordering::Relaxed);
        }
        // Rule 1: the release of the lock publishes it.
        self.blocked.store(true, Ordering::SeqCst);
        // Executes what was queued meanwhile, and notifies this thread itself if that leaves work.
        drop(guard);
        let timeout = (until != u64::MAX).then(|| clock::until(until, now));
        self.events.wait(timeout);
        self.blocked.store(false, Ordering::SeqCst);
    }

    /// Ends [`Self::run`].
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.events.notify();
        self.events.resume();
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
    ReleaseThenResume,
    TellLeader,
}

/// The right to poll.
pub(crate) struct PollGuard<'a, P: Polled, E: Events> {
    poller: &'a Poller<P, E>,
    /// This thread has polled, or executed what others had queued: rule 3 is its duty.
    leaves_work: bool,
}

impl<P: Polled, E: Events> PollGuard<'_, P, E> {
    /// Executes every queued command; whether there was any.
    #[inline(always)]
    pub(crate) fn execute_queued(&mut self) -> bool {
        let mut any = false;
        while !self.poller.commands.is_empty() && self.execute_next() {
            any = true;
        }
        self.leaves_work |= any;
        any
    }

    fn execute_next(&mut self) -> bool {
        let Some(command) = self.poller.commands.pop() else { return false };
        self.execute(command);
        true
    }

    /// Whether the request has ended that a blocked leader waits for.
    #[inline]
    fn has_ended_leader(&self) -> bool {
        // Relaxed: the leader stored both before it released the lock that this thread holds.
        let poller = self.poller;
        poller.blocked.load(Ordering::Relaxed)
            && !poller.breaks(Rule::TellLeader)
            && Some(poller.led.load(Ordering::Relaxed))
                .is_some_and(|request| request != NO_REQUEST && self.has_ended(request))
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
        let ended = self.has_ended_leader();
        poller.locked.store(false, Ordering::Release);
        if leaves_work {
            // Rule 3.
            poller.notify_if_blocked();
        } else if ended {
            // Rule 5.
            poller.events.notify();
        }
        if !poller.breaks(Rule::ReleaseThenLook) {
            // Rule 2. pairs with the fence in `submit_with`
            fence(Ordering::SeqCst);
            poller.execute_if_free();
        }
    }
}

/// Between two polls.
fn rest(idle_ns: u64, yields_after_ns: u64) {
    if idle_ns < yields_after_ns {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

#[cfg(all(test, loom))]
mod loom;
