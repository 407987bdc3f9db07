//! A shard: one driver, taken by whoever comes first (see [`Baton`]).
//!
//! A thread that waits for a transfer lends itself; when nobody does, the shard's service thread sleeps
//! in epoll and serves. Whoever leaves the driver arms the rings where somebody sleeps or is about to.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::wire::Control;
use rustix::event::epoll;

use super::baton::{self, Baton, Held, Means as _, Sleeper, Taken};
use crate::clock;
use crate::inner::Inner;
use crate::progress::driver::{Driver, NewSession};
use crate::progress::flight::Flight;
use crate::session::Session;
use crate::threads;
use crate::transport::pull::Origin;
use crate::transport::verbs::port::{Hears, PortCq};

/// Something for the driver to do.
pub(crate) enum Command {
    /// Carry out a transfer.
    Start(Flight),
    /// Stop carrying it out.
    Cancel(SlotId),
    /// Send a control message.
    Control { session: Arc<Session>, message: Control },
    /// Take over a session.
    Adopt(Box<NewSession>),
    /// Close a session.
    Remove { session: Arc<Session> },
    /// Bury a session whose peer is gone.
    Gone { session: Arc<Session> },
    /// Leave the gates of barred grants that are held for slow readers.
    LeaveBarredGates,
    /// A pull by the crew is over.
    Pulled { session: Arc<Session>, origin: Origin, result: Result<(), TransferError> },
}

/// While nothing happens the clock is read at every so many looks: `perf` showed it as the costliest part of
/// one, and whoever looks less often sees later.
pub(super) const LOOKS_PER_CLOCK: u32 = 8;
/// Idle spinning for longer than this offers the core to others at every turn.
const YIELD_AFTER_NS: u64 = 10_000;
/// Looks at a driver that somebody has before a thread dozes all the same: some microseconds, longer than a post.
const PATIENT_LOOKS: u32 = 1000;

/// See the module.
pub(crate) struct Shard {
    pub(super) baton: Baton<Seat>,
    pub(crate) epoll: OwnedFd,
    /// Threads that wait for a transfer and would rather drive.
    pub(super) lenders: AtomicU32,
    /// Raised whenever somebody lends itself, so that the service thread can tell.
    pub(super) lent: AtomicU32,
    /// Raised whenever somebody posts what it says it will drive.
    begun: AtomicU32,
    /// Somebody sleeps for an end since the service thread last asked, so `begun` says nothing.
    heeded: AtomicBool,
    /// The service thread sleeps lightly, or is about to.
    pub(super) light: AtomicBool,
    /// epoll woke somebody who has not driven since.
    rang: AtomicBool,
    pub(super) stop: AtomicBool,
    pub(super) spin: Duration,
    /// When the service thread looks at the clock next, if nothing wakes it.
    pub(super) looks_at: AtomicU64,
    /// Completion queues, one for each RDMA device of the endpoint.
    ports: Vec<Arc<PortCq>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the baton is about.
pub(super) struct Seat {
    /// None before the shard is started and after it is stopped.
    pub(super) driver: Option<Driver>,
    endpoint: Weak<Inner>,
}

impl Held for Seat {
    type Command = Command;

    #[inline]
    fn carry_out(&mut self, command: Command) {
        match &mut self.driver {
            Some(driver) => driver.handle(command),
            None => {
                if let Command::Start(flight) = command {
                    self.refuse(flight.slot);
                }
            }
        }
    }

    #[inline]
    fn take_news(&mut self) -> bool {
        self.driver.as_mut().is_some_and(|driver| std::mem::take(&mut driver.news))
    }

    #[inline]
    fn take_call(&mut self) -> bool {
        self.driver.as_mut().is_some_and(|driver| std::mem::take(&mut driver.calls))
    }
}

impl Seat {
    /// A transfer that came after the end.
    #[cold]
    fn refuse(&self, slot: SlotId) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            let reason = Reason::Failed(TransferError::EndpointClosed);
            endpoint.slots.end(slot, Ended { reason, fence: Fence::Held });
        }
    }
}

impl Shard {
    /// A shard without a driver yet.
    pub(crate) fn new(spin: Duration, ports: Vec<Arc<PortCq>>) -> std::io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let shared = baton::Shared::new()?;
        let data = epoll::EventData::new_u64(super::driver::BELL);
        epoll::add(&epoll, shared.bell.as_fd(), data, epoll::EventFlags::IN)?;
        let data = epoll::EventData::new_u64(super::driver::DOZER_BELL);
        epoll::add(&epoll, shared.dozer_bell.as_fd(), data, epoll::EventFlags::IN)?;
        for (at, port) in ports.iter().enumerate() {
            let data = epoll::EventData::new_u64(super::driver::PORT | at as u64);
            epoll::add(&epoll, port.channel.fd(), data, epoll::EventFlags::IN)?;
        }
        Ok(Arc::new(Self {
            baton: Baton::new(Seat { driver: None, endpoint: Weak::new() }, shared),
            epoll,
            lenders: AtomicU32::new(0),
            lent: AtomicU32::new(0),
            begun: AtomicU32::new(0),
            heeded: AtomicBool::new(false),
            light: AtomicBool::new(false),
            rang: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            spin,
            looks_at: AtomicU64::new(0),
            ports,
            thread: Mutex::new(None),
        }))
    }

    /// Puts the driver in and starts the service thread.
    pub(crate) fn start(
        self: &Arc<Self>,
        endpoint: &Arc<Inner>,
        driver: Driver,
    ) -> std::io::Result<()> {
        // Nobody else knows of it yet.
        if let Some(mut seat) = self.baton.try_take() {
            *seat = Seat { driver: Some(driver), endpoint: Arc::downgrade(endpoint) };
        }
        let shard = self.clone();
        // Near the devices that it polls, where they are near to only some processors.
        let near = endpoint.rdma.as_ref().map(|rdma| rdma.cpus.as_slice()).unwrap_or_default();
        let cpus = endpoint.cpus.near(near);
        let thread = threads::spawn("peerway-serve", &cpus, move || shard.serve())?;
        *self.thread.lock().unwrap() = Some(thread);
        Ok(())
    }

    /// Ends the service thread and drops the driver with its sockets.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.baton.means.ring(Sleeper::Service);
        if let Some(thread) = self.thread.lock().unwrap().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        loop {
            if let Some(mut seat) = self.baton.try_take() {
                seat.drain();
                let driver = seat.driver.take().map(|mut driver| {
                    driver.end_all();
                    driver
                });
                drop(seat);
                drop(driver);
                break;
            }
            std::thread::yield_now();
        }
    }

    /// After a fork: the thread is the parent's and so is the driver's state; only descriptors and
    /// memory are let go of.
    pub(crate) fn abandon(&self) {
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
        // SAFETY: no other thread of this process exists that could hold it: threads do not survive a fork.
        drop(unsafe { (*self.baton.inherited()).driver.take() });
    }

    /// Its completion queues, one for each RDMA device.
    pub(crate) fn ports(&self) -> &[Arc<PortCq>] {
        &self.ports
    }

    /// Has the driver carry out a command, now or as soon as its holder gets to it.
    pub(crate) fn submit(&self, command: Command) {
        self.baton.submit(command);
    }

    /// Has the driver start a flight, now or as soon as its holder gets to it.
    #[inline]
    pub(crate) fn take_off(
        &self,
        slot: SlotId,
        session: &Arc<Session>,
        flight: impl FnOnce() -> Flight,
    ) {
        let now = |seat: &mut Seat, flight| match &mut seat.driver {
            Some(driver) => driver.take_off(slot, session, flight),
            None => seat.refuse(slot),
        };
        self.baton.submit_as(flight, now, |flight| Command::Start(flight()));
    }

    /// Wakes the service thread if it sleeps: there is work that no lender will see to.
    pub(crate) fn kick(&self) {
        self.baton.kick();
    }

    /// Wakes the service thread if it would sleep beyond this time: something is due then that nobody may be waiting for.
    pub(crate) fn kick_before(&self, deadline: u64) {
        // Set by the service thread while it had the driver, so what was submitted since sees it.
        if deadline < self.looks_at.load(Ordering::Relaxed) {
            self.kick();
        }
    }

    /// Whether the service thread sleeps lightly, or is about to.
    pub(crate) fn is_light(&self) -> bool {
        self.light.load(Ordering::Relaxed)
    }

    /// Somebody sleeps for the end of a transfer, whom only the service thread can wake: it must not sleep lightly.
    pub(crate) fn heed(&self) {
        self.heeded.store(true, Ordering::Relaxed);
        // pairs with the one in `sleep_lightly`: either it sees the sleeper or we see it.
        fence(Ordering::SeqCst);
        if self.is_light() && !self.baton.is_inherited() {
            self.baton.means.ring(Sleeper::Service);
        }
    }

    /// Whether the service thread sleeps in epoll, where it hears sockets.
    pub(crate) fn hears_sockets(&self) -> bool {
        self.baton.is_asleep()
    }

    /// What who sleeps in epoll is to be woken for. A service thread that is awake looks again within its pause, and arms before it sleeps:
    /// whoever comes and goes should not do so each time.
    fn listens_for(&self) -> Hears {
        if self.baton.is_dozing() {
            return Hears::All;
        }
        match (self.baton.is_asleep(), self.is_light()) {
            (true, true) => Hears::Arrivals,
            (true, false) => Hears::All,
            (false, _) => Hears::Nothing,
        }
    }

    /// Tells the service thread that somebody drives.
    #[inline]
    fn note_lent(&self) {
        raise(&self.lent);
    }

    /// Tells it that somebody will drive what it has posted to devices, and looks when it likes: until then it needs no service thread.
    #[inline]
    pub(crate) fn note_begun(&self) {
        raise(&self.begun);
    }

    /// Whether somebody drives since the last time, or has said that it will and does not sleep instead.
    pub(super) fn is_lent(&self, seen: &mut (u32, u32)) -> bool {
        let now = (self.lent.load(Ordering::Relaxed), self.begun.load(Ordering::Relaxed));
        let (lent, begun) = (now.0 != seen.0, now.1 != seen.1);
        *seen = now;
        lent || (begun && !self.heeded.swap(false, Ordering::Relaxed))
    }

    /// One turn, if nobody else drives; whether anything happened.
    pub(crate) fn look(&self, now: u64) -> bool {
        self.note_lent();
        let Some(mut seat) = self.baton.try_take() else { return false };
        let mut progress = seat.drain();
        let Some(driver) = &mut seat.driver else { return progress };
        self.wake_up(driver);
        progress |= driver.turn(now);
        // After the turn, which may have taken the bell of a light sleeper.
        let hears = self.listens_for();
        let ready = driver.rest(hears) || driver.has_copies();
        self.leave(seat, hears, ready);
        progress
    }

    /// Lets go of the driver, which was left for who `hears` so much, and calls the service thread where that is not enough.
    fn leave(&self, mut seat: Taken<'_, Seat>, hears: Hears, ready: bool) {
        let called = seat.take_call() && self.is_light();
        drop(seat);
        // A dozer that lay down meanwhile could not take the driver to have everything ring for it.
        let unheard = hears == Hears::Arrivals && self.baton.is_dozing();
        // Ready: something came as we were leaving, and the rings stay silent about it.
        if ready || called || unheard {
            self.kick();
        }
    }

    /// Drives until `over` says so or nothing has happened for the spin budget and `patience`, from `now` on. True
    /// when over.
    pub(crate) fn lend(
        &self,
        over: impl Fn() -> bool,
        mut now: u64,
        deadline: u64,
        patience: Duration,
    ) -> bool {
        if self.baton.is_inherited() {
            return over();
        }
        self.lenders.fetch_add(1, Ordering::SeqCst);
        // Also where there is nothing left to do: else a service thread that is always first would never leave it to the lender.
        self.note_lent();
        let mut idle_since = now;
        let spin = (self.spin + patience).as_nanos() as u64;
        let result = loop {
            if over() {
                break true;
            }
            if let Some(mut seat) = self.baton.try_take() {
                let Some(driver) = &mut seat.driver else { break over() };
                self.wake_up(driver);
                let mut turns = 0u32;
                let (ended, hears, ready) = loop {
                    seat.drain();
                    let Some(driver) = &mut seat.driver else {
                        break (over(), Hears::Nothing, false);
                    };
                    let progress = driver.turn(now);
                    if progress {
                        idle_since = now;
                    }
                    let ended = over();
                    let stopped = self.stop.load(Ordering::Relaxed);
                    if ended || stopped || now.saturating_sub(idle_since) > spin || now >= deadline
                    {
                        let hears = if ended { self.listens_for() } else { Hears::All };
                        break (ended, hears, driver.rest(hears) || driver.has_copies());
                    }
                    pause(now.saturating_sub(idle_since));
                    turns = turns.wrapping_add(1);
                    if progress || turns.is_multiple_of(LOOKS_PER_CLOCK) {
                        now = clock::now();
                    }
                };
                self.leave(seat, hears, ready);
                if ended {
                    break true;
                }
            }
            if now.saturating_sub(idle_since) > spin || now >= deadline {
                break over();
            }
            pause(now.saturating_sub(idle_since));
            now = clock::now();
        };
        self.lenders.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Sleeps until something happens on the shard's lanes, in place of the service thread: one
    /// switch of threads less than being woken by it. False when somebody else does so already.
    pub(crate) fn doze(&self, over: impl Fn() -> bool, timeout: Duration) -> bool {
        let over = || over() || self.arm();
        self.baton.doze(over, || {
            self.wait_for_events(timeout);
            // As long as it is ours: the next ring may be for another.
            self.baton.means.dozer_bell.drain();
        })
    }

    /// Has everything ring for a thread that dozes: whoever had the driver since that one lent itself has left it unarmed, and who has it
    /// now sees to it when it leaves, unless it only submits something, which is waited for. True when there is something to do.
    fn arm(&self) -> bool {
        let mut seat = self.take_within(PATIENT_LOOKS, std::hint::spin_loop);
        let driver = seat.as_mut().and_then(|seat| seat.driver.as_mut());
        driver.is_some_and(|driver| driver.rest(Hears::All))
    }

    /// Takes the driver when whoever has it leaves it within so many looks.
    pub(super) fn take_within(&self, looks: u32, pause: fn()) -> Option<Taken<'_, Seat>> {
        for _ in 0..looks {
            if let Some(seat) = self.baton.try_take() {
                return Some(seat);
            }
            pause();
        }
        None
    }

    /// Sleeps in epoll; whether anything happened. What woke us is looked at by the driver, under its own eyes.
    pub(super) fn wait_for_events(&self, sleep: Duration) -> bool {
        let timeout = rustix::event::Timespec {
            tv_sec: sleep.as_secs() as i64,
            tv_nsec: i64::from(sleep.subsec_nanos()),
        };
        let mut one = [const { MaybeUninit::uninit() }; 1];
        let rang = epoll::wait(&self.epoll, &mut one, Some(&timeout))
            .is_ok_and(|(events, _)| !events.is_empty());
        if rang {
            self.rang.store(true, Ordering::Relaxed);
        }
        rang
    }

    /// Somebody drives: rings need not ring, and what epoll woke somebody for is looked at.
    pub(super) fn wake_up(&self, driver: &mut Driver) {
        driver.wake_up();
        if self.rang.load(Ordering::Relaxed) {
            self.rang.store(false, Ordering::Relaxed);
            driver.rang();
        }
    }

    /// The service thread's bell has been heard.
    pub(crate) fn drain_bell(&self) {
        self.baton.means.bell.drain();
        // If it was for a light sleeper, who does not hear it any more, then whoever leaves next has it listen to everything.
        self.light.store(false, Ordering::SeqCst);
        if self.stop.load(Ordering::SeqCst) {
            // It was for the service thread, which may not have heard it yet.
            self.baton.means.ring(Sleeper::Service);
        }
    }

    /// The dozer's bell is its own, unless it has gone: then it must not keep others awake.
    pub(crate) fn drain_dozer_bell(&self) {
        if !self.baton.is_dozing() {
            self.baton.means.dozer_bell.drain();
            if self.baton.is_dozing() {
                // Somebody came meanwhile, and the bell may have been for it.
                self.baton.means.ring(Sleeper::Dozer);
            }
        }
    }
}

/// Only that it changes is of interest, so who comes at the same time may write the same.
#[inline]
fn raise(count: &AtomicU32) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// Between two looks. Whoever spins on the core that its peer needs waits for itself, so after some
/// microseconds the core is offered to others; nobody wanting it costs a system call.
pub(super) fn pause(idle_ns: u64) {
    if idle_ns < YIELD_AFTER_NS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
