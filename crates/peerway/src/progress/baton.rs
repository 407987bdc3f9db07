//! The baton: what only its holder touches, and how everybody else has something done with it.
//!
//! It is not locked but *taken*: one swap decides, losers leave their command in a queue and the holder
//! carries it out before it goes. Two may sleep meanwhile, the service thread and a thread that dozes in its
//! place. Three rules keep wake-ups from being lost: whoever lets go looks at the queue once more; whoever
//! has carried out something from it in passing rings for the service thread, which may have lain down since
//! it last looked; whoever lies down says so before it lets go. The loom tests below run this very code.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::SegQueue;

use crate::os::process;
use crate::os::wake::EventFd;

/// What can be held.
pub(crate) trait Held {
    type Command;

    fn carry_out(&mut self, command: Self::Command);

    /// Whether something has happened since the last time that a thread may doze for.
    fn take_news(&mut self) -> bool;

    /// Whether something since the last time has left what nobody else will ring for, so that the service
    /// thread must come.
    fn take_call(&mut self) -> bool;
}

/// See the module.
pub(crate) struct Baton<H: Held, M = Shared<<H as Held>::Command>> {
    held: UnsafeCell<H>,
    pub(super) means: M,
    /// In a child that inherited it nothing may be touched: it is the parent's.
    fork_generation: u32,
}

// SAFETY: `held` is only reached through `Taken`, of which there is at most one at a time because the flag is
// set by a swap and cleared when it is dropped.
unsafe impl<H: Held + Send, M: Sync> Sync for Baton<H, M> {}

impl<H: Held, M: Means<H::Command>> Baton<H, M> {
    pub(crate) fn new(held: H, means: M) -> Self {
        let fork_generation = process::fork_generation();
        Self { held: UnsafeCell::new(held), means, fork_generation }
    }

    /// Whether it is another process's.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        process::fork_generation() != self.fork_generation
    }

    /// Takes it if nobody has it.
    #[inline]
    pub(crate) fn try_take(&self) -> Option<Taken<'_, H, M>> {
        // A look first keeps the line shared while somebody else has it.
        if self.means.glance(Flag::Taken) || self.is_inherited() {
            return None;
        }
        if self.means.swap(Flag::Taken, true) {
            return None;
        }
        Some(Taken { baton: self })
    }

    /// Has a command carried out, now or as soon as the holder gets to it.
    pub(crate) fn submit(&self, command: H::Command) {
        self.submit_as(command, H::carry_out, |command| command);
    }

    /// As [`Self::submit`], for what becomes a command only where it has to wait: moving what is large costs.
    #[inline]
    pub(crate) fn submit_as<T>(
        &self,
        what: T,
        carry_out: impl FnOnce(&mut H, T),
        command: impl FnOnce(T) -> H::Command,
    ) {
        if self.is_inherited() {
            return;
        }
        if let Some(mut taken) = self.try_take() {
            let drained = taken.drain();
            carry_out(&mut taken, what);
            let call = taken.take_call() || drained;
            drop(taken);
            if call {
                self.kick();
            }
            return;
        }
        self.means.push(command(what));
        // pairs with the one in `Taken::drop`: the holder may have looked at the queue just before.
        self.means.fence();
        self.drain_if_free();
    }

    /// Wakes the service thread if it sleeps: there is work that no lender will see to.
    #[inline]
    pub(crate) fn kick(&self) {
        // pairs with the store in `lie_down`
        self.means.fence();
        if self.means.glance(Flag::Asleep) {
            self.means.ring(Sleeper::Service);
        }
    }

    #[inline]
    fn drain_if_free(&self) {
        while !self.means.is_empty() {
            let Some(mut taken) = self.try_take() else { return };
            taken.drain();
            // It is called in any case.
            taken.take_call();
            drop(taken);
            self.kick();
        }
    }

    /// The service thread lets go to sleep; whether it may, as far as anybody knows. It is up to it to look at
    /// what it holds first: `ready` says that there is something to do. To be followed by [`Self::get_up`].
    pub(crate) fn lie_down(&self, taken: Taken<'_, H, M>, ready: bool) -> bool {
        // pairs with the fence in `kick`
        self.means.set(Flag::Asleep, true);
        drop(taken);
        !ready && self.means.is_empty()
    }

    pub(crate) fn get_up(&self) {
        self.means.set(Flag::Asleep, false);
    }

    /// Whether the service thread sleeps or is about to.
    pub(crate) fn is_asleep(&self) -> bool {
        self.means.look(Flag::Asleep)
    }

    /// A thread dozes in place of the service thread, by `sleep`, unless what it waits for is `over`. False when
    /// another does so already.
    pub(crate) fn doze(&self, over: impl FnOnce() -> bool, sleep: impl FnOnce()) -> bool {
        if self.is_inherited() || self.means.swap(Flag::Dozing, true) {
            return false;
        }
        // pairs with the one in `Taken::drop`: either `over` sees the end or whoever brings it about sees
        // us and rings.
        self.means.fence();
        if !over() {
            sleep();
        }
        self.means.set(Flag::Dozing, false);
        true
    }

    /// Whether a thread dozes.
    pub(crate) fn is_dozing(&self) -> bool {
        self.means.look(Flag::Dozing)
    }

    /// What it is about, for a child whose parent may have had it in hand at the fork: no thread of the child has.
    pub(crate) fn inherited(&self) -> *mut H {
        self.held.get()
    }
}

/// The baton, in hand.
pub(crate) struct Taken<'a, H: Held, M: Means<H::Command> = Shared<<H as Held>::Command>> {
    baton: &'a Baton<H, M>,
}

impl<H: Held, M: Means<H::Command>> Taken<'_, H, M> {
    /// Carries out everything that was queued; whether there was anything.
    #[inline]
    pub(crate) fn drain(&mut self) -> bool {
        let mut any = false;
        // What comes after the look is seen to when the baton is let go of.
        while !self.baton.means.is_empty()
            && let Some(command) = self.baton.means.pop()
        {
            self.carry_out(command);
            any = true;
        }
        any
    }
}

impl<H: Held, M: Means<H::Command>> Deref for Taken<'_, H, M> {
    type Target = H;

    #[inline]
    fn deref(&self) -> &H {
        // SAFETY: `self` is the only `Taken` of this baton (see `try_take`).
        unsafe { &*self.baton.held.get() }
    }
}

impl<H: Held, M: Means<H::Command>> DerefMut for Taken<'_, H, M> {
    #[inline]
    fn deref_mut(&mut self) -> &mut H {
        // SAFETY: `self` is the only `Taken` of this baton (see `try_take`), borrowed mutably here.
        unsafe { &mut *self.baton.held.get() }
    }
}

impl<H: Held, M: Means<H::Command>> Drop for Taken<'_, H, M> {
    #[inline]
    fn drop(&mut self) {
        let news = self.take_news();
        let baton = self.baton;
        baton.means.let_go();
        // pairs with those in `submit` and `doze`
        baton.means.fence();
        if news && baton.means.glance(Flag::Dozing) {
            baton.means.ring(Sleeper::Dozer);
        }
        baton.drain_if_free();
    }
}

/// What is shared about a baton.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Flag {
    Taken,
    /// The service thread hears its bell.
    Asleep,
    /// A thread sleeps in its place.
    Dozing,
}

/// Who can be rung for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sleeper {
    Service,
    Dozer,
}

/// What the protocol needs of the machine, so that loom can stand in for it.
pub(crate) trait Means<C> {
    /// In the order of all that is done to flags.
    fn look(&self, flag: Flag) -> bool;
    /// Whatever was seen last.
    fn glance(&self, flag: Flag) -> bool;
    fn set(&self, flag: Flag, to: bool);
    fn swap(&self, flag: Flag, to: bool) -> bool;
    /// Nobody has it any more. A fence follows, so it need not have a place among what is done to flags.
    fn let_go(&self);
    fn fence(&self);
    fn ring(&self, sleeper: Sleeper);
    fn push(&self, command: C);
    fn pop(&self) -> Option<C>;
    fn is_empty(&self) -> bool;
}

/// Flags in memory, a queue, and event descriptors for bells.
pub(crate) struct Shared<C> {
    taken: AtomicBool,
    asleep: AtomicBool,
    dozing: AtomicBool,
    queue: SegQueue<C>,
    /// In epoll, where the service thread sleeps.
    pub(super) bell: EventFd,
    /// Rung for the thread that dozes when there is news, and drained by it alone: the driver must not swallow it.
    pub(super) dozer_bell: EventFd,
}

impl<C> Shared<C> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            taken: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            dozing: AtomicBool::new(false),
            queue: SegQueue::new(),
            bell: EventFd::new()?,
            dozer_bell: EventFd::new()?,
        })
    }

    #[inline]
    fn flag(&self, flag: Flag) -> &AtomicBool {
        match flag {
            Flag::Taken => &self.taken,
            Flag::Asleep => &self.asleep,
            Flag::Dozing => &self.dozing,
        }
    }
}

impl<C> Means<C> for Shared<C> {
    #[inline]
    fn look(&self, flag: Flag) -> bool {
        self.flag(flag).load(Ordering::SeqCst)
    }

    #[inline]
    fn glance(&self, flag: Flag) -> bool {
        self.flag(flag).load(Ordering::Relaxed)
    }

    #[inline]
    fn set(&self, flag: Flag, to: bool) {
        self.flag(flag).store(to, Ordering::SeqCst);
    }

    #[inline]
    fn swap(&self, flag: Flag, to: bool) -> bool {
        self.flag(flag).swap(to, Ordering::SeqCst)
    }

    #[inline]
    fn let_go(&self) {
        self.taken.store(false, Ordering::Release);
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn ring(&self, sleeper: Sleeper) {
        match sleeper {
            Sleeper::Service => self.bell.signal(),
            Sleeper::Dozer => self.dozer_bell.signal(),
        }
    }

    #[inline]
    fn push(&self, command: C) {
        self.queue.push(command);
    }

    #[inline]
    fn pop(&self) -> Option<C> {
        self.queue.pop()
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(all(test, loom))]
mod loom;
