//! A shard: one driver with its event sources, its progress thread and its command queue.
//! [`Poller`] decides which thread polls the driver.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::wire::Control;
use rustix::event::epoll;

use super::copies::pull::PullOrigin;
use super::driver::{Driver, PORT, Seat};
use super::engine::Engine;
use super::poller::{Events, PollGuard, Poller};
use super::reopening::QueuesDone;
use super::request::{NewRequest, Request};
use super::sessions::NewSession;
use super::windows::KeysMade;
use crate::identity::lanes::LaneAttempt;
use crate::os::wake::{EventFd, futex_wait, futex_wake};
use crate::session::lanes::JoinLane;
use crate::session::{CloseCause, Session, SessionOwner};
use crate::threads;
use crate::transport::Wire;
use crate::transport::device::CompletionQueue;

/// A command for the driver.
pub(crate) enum DriverCommand {
    /// Start a transfer.
    Start(Request),
    /// Cancel the transfer in this slot.
    Cancel(SlotId),
    /// Send a control message.
    Control { session: Arc<Session>, message: Control },
    /// Adopt a session that has finished its handshake.
    Adopt(Box<NewSession>),
    /// Close a session, for this reason.
    Close { session: Arc<Session>, cause: CloseCause },
    /// Leave the gates of barred grants that frames to slow peers hold.
    LeaveBarredGates,
    /// A thread has created or connected queue pairs for a session.
    QueuesDone { session: Arc<Session>, done: Box<QueuesDone> },
    /// A thread has opened a connection in place of a lost lane, or says why it could not.
    LaneOpened {
        session: Arc<Session>,
        attempt: LaneAttempt,
        opened: Result<Box<dyn Wire>, String>,
    },
    /// The peer has opened a connection in place of a lost lane.
    JoinLane { session: Arc<Session>, attempt: LaneAttempt, join: JoinLane },
    /// A thread has made keys to our memory for a session's queue pairs.
    KeysMade { session: Arc<Session>, made: Box<KeysMade> },
    /// The copy pool has finished a pull.
    Pulled { session: Arc<Session>, origin: PullOrigin, result: Result<(), TransferError> },
}

/// A driver with its poller. See the module documentation.
pub(crate) struct Shard {
    /// Threads that wait for a transfer poll the driver by it.
    pub(crate) poller: Poller<Seat, EpollEvents>,
    /// Its place in the endpoint's table.
    pub(crate) index: usize,
    /// Completion queues, one for each RDMA device of the endpoint.
    ports: Vec<Arc<dyn CompletionQueue>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The event sources of a shard, and the primitives on which its threads block.
///
/// Threads block only in epoll and futex. `poll` fails in a process that has reached its limit of
/// open files.
pub(crate) struct EpollEvents {
    /// Sockets, completion channels and links. Every polling thread queries it.
    sources: OwnedFd,
    /// `sources` and `wake_fd`. Only the thread with the poller's role waits on it, so no other
    /// thread consumes its notifications.
    all: OwnedFd,
    wake_fd: EventFd,
    /// Changes with every `resume`.
    resumes: AtomicU32,
    /// `resumes` as the progress thread last saw it.
    seen_resumes: AtomicU32,
}

impl EpollEvents {
    fn new() -> std::io::Result<Self> {
        let epoll = || epoll::create(epoll::CreateFlags::CLOEXEC);
        let (sources, all, wake_fd) = (epoll()?, epoll()?, EventFd::new()?);
        let data = epoll::EventData::new_u64(0);
        epoll::add(&all, wake_fd.as_fd(), data, epoll::EventFlags::IN)?;
        epoll::add(&all, sources.as_fd(), data, epoll::EventFlags::IN)?;
        let (resumes, seen_resumes) = (AtomicU32::new(0), AtomicU32::new(0));
        Ok(Self { sources, all, wake_fd, resumes, seen_resumes })
    }
}

impl Events for EpollEvents {
    /// Consumes no event of the sources: the driver queries them when it polls.
    fn wait(&self, timeout: Option<Duration>) {
        let timeout = timeout.map(|time| rustix::event::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let mut events = [const { MaybeUninit::uninit() }; 2];
        if epoll::wait(&self.all, &mut events, timeout.as_ref())
            .is_ok_and(|(some, _)| !some.is_empty())
        {
            self.wake_fd.drain();
        }
    }

    fn notify(&self) {
        self.wake_fd.signal();
    }

    fn pause(&self, timeout: Duration) {
        let seen = self.seen_resumes.load(Ordering::Relaxed);
        // The futex compares the value again, so a `resume` in between ends the wait at once.
        let _ = futex_wait(&self.resumes, seen, Some(timeout));
        self.seen_resumes.store(self.resumes.load(Ordering::Acquire), Ordering::Relaxed);
    }

    fn resume(&self) {
        self.resumes.fetch_add(1, Ordering::Release);
        futex_wake(&self.resumes, 1);
    }
}

impl Shard {
    /// Creates a shard without a driver.
    pub(crate) fn new(
        index: usize,
        spin: Duration,
        ports: Vec<Arc<dyn CompletionQueue>>,
    ) -> std::io::Result<Arc<Self>> {
        let events = EpollEvents::new()?;
        for (at, port) in ports.iter().enumerate() {
            let data = epoll::EventData::new_u64(PORT | at as u64);
            epoll::add(&events.sources, port.fd(), data, epoll::EventFlags::IN)?;
        }
        let seat = Seat { driver: None, endpoint: Weak::new() };
        let poller = Poller::new(seat, events, spin);
        Ok(Arc::new(Self { poller, index, ports, thread: Mutex::new(None) }))
    }

    /// Installs the driver and starts the progress thread.
    pub(crate) fn start(
        self: &Arc<Self>,
        endpoint: &Arc<Engine>,
        driver: Driver,
    ) -> std::io::Result<()> {
        // No other thread has access to the shard yet, so the lock is free.
        if let Some(mut seat) = self.poller.try_lock() {
            *seat = Seat { driver: Some(driver), endpoint: Arc::downgrade(endpoint) };
        }
        let shard = self.clone();
        // Run the thread near the devices that it polls, if they are near to only some processors.
        let near = endpoint.rdma.as_ref().map(|rdma| rdma.cpus()).unwrap_or_default();
        let cpus = endpoint.cpus.near(near);
        let thread = threads::spawn("peerway-serve", &cpus, move || shard.poller.run())?;
        *self.thread.lock().unwrap() = Some(thread);
        Ok(())
    }

    /// Installs the driver without a progress thread. Only `poll_once` runs it.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn start_without_thread(&self, endpoint: &Arc<Engine>, driver: Driver) {
        let mut seat = self.poller.try_lock().expect("the shard is not shared yet");
        *seat = Seat { driver: Some(driver), endpoint: Arc::downgrade(endpoint) };
    }

    /// What the driver holds for peers.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn holdings(&self) -> super::holdings::Holdings {
        let seat = self.poller.try_lock().expect("no other thread polls the shard");
        seat.driver.as_ref().map(Driver::holdings).unwrap_or_default()
    }

    /// Ends the progress thread and drops the driver with its sockets.
    pub(crate) fn stop(&self) {
        self.poller.stop();
        if let Some(thread) = self.thread.lock().unwrap().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        // The acceptor's thread may need the lock. When it has ended, the queue has all sessions
        // that it passed on, whose peers are told of the end like the others.
        let acceptor = self.lock().driver.as_mut().and_then(Driver::take_acceptor);
        if let Some(acceptor) = acceptor {
            acceptor.stop();
        }
        let mut seat = self.lock();
        seat.execute_queued();
        let driver = seat.driver.take().map(|mut driver| {
            driver.end_all();
            driver
        });
        drop(seat);
        drop(driver);
    }

    /// Waits for the poller's lock, which other threads hold for short times.
    fn lock(&self) -> PollGuard<'_, Seat, EpollEvents> {
        loop {
            if let Some(seat) = self.poller.try_lock() {
                return seat;
            }
            std::thread::yield_now();
        }
    }

    /// Drops the driver in the child of a fork, which releases only descriptors and memory. The
    /// progress thread and the state of the driver belong to the parent.
    pub(crate) fn abandon(&self) {
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
        // SAFETY: no thread of this process holds the poller's lock: the child of a fork has only
        // the forking thread.
        let driver = unsafe { (*self.poller.inherited()).driver.take() };
        if let Some(acceptor) = driver.and_then(|mut driver| driver.take_acceptor()) {
            acceptor.abandon();
        }
    }

    /// The epoll descriptor of the event sources.
    pub(crate) fn epoll(&self) -> &OwnedFd {
        &self.poller.events.sources
    }

    /// The completion queues, one for each RDMA device.
    pub(crate) fn ports(&self) -> &[Arc<dyn CompletionQueue>] {
        &self.ports
    }

    /// Makes the driver execute a command: now, or when the thread that polls it takes the queue.
    pub(crate) fn submit(&self, command: DriverCommand) {
        self.poller.submit(command);
    }

    /// Makes the driver start a request: now, or when the thread that polls it takes the queue.
    #[inline]
    pub(crate) fn start_request(&self, new: NewRequest<'_>) {
        self.poller.submit_with(new, Seat::start, queued);
    }

    /// See [`Poller::notify_if_blocked`].
    pub(crate) fn notify_if_blocked(&self) {
        self.poller.notify_if_blocked();
    }
}

/// The command for a request that has to wait in the queue.
#[cold]
fn queued(new: NewRequest<'_>) -> DriverCommand {
    DriverCommand::Start(Request::new(new))
}

impl SessionOwner for Shard {
    fn close(&self, session: &Arc<Session>, cause: CloseCause) {
        self.submit(DriverCommand::Close { session: session.clone(), cause });
        self.notify_if_blocked();
    }

    fn send(&self, session: &Arc<Session>, message: Control) {
        self.submit(DriverCommand::Control { session: session.clone(), message });
        self.notify_if_blocked();
    }
}
