//! The thread of the acceptor.
//!
//! Handshakes take a fraction of a millisecond of a processor each, and any host may begin many. So
//! they run in a thread of their own, which blocks in the acceptor's epoll. The thread starts with
//! the first connection: until then the driver of the first shard watches that epoll. A session
//! that has finished its handshake goes to its shard by a command, and so does a connection that
//! replaces a lost lane.

use std::io;
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::epoll;

use super::acceptor::{Acceptor, WAKE};
use crate::clock;
use crate::os::wake::EventFd;
use crate::progress::driver::Listening;
use crate::progress::engine::Engine;
use crate::threads;

/// The minimum time before an overdue timer is checked again.
const AGAIN: Duration = Duration::from_millis(5);

/// The acceptor and its thread.
pub(crate) struct Accepting {
    /// Listeners, connections in the handshake, and `wake`.
    epoll: Arc<OwnedFd>,
    /// Wakes the thread for its end.
    wake: EventFd,
    ends: AtomicBool,
    /// Only the thread uses it. `None` after the end.
    acceptor: Mutex<Option<Acceptor>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Accepting {
    /// Listens, without a thread.
    pub(crate) fn new(listeners: Vec<TcpListener>, local: Option<OwnedFd>) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let wake = EventFd::new()?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, wake.as_fd(), data, epoll::EventFlags::IN)?;
        let acceptor = Mutex::new(Some(Acceptor::new(epoll.clone(), listeners, local)?));
        Ok(Self { epoll, wake, ends: AtomicBool::new(false), acceptor, thread: Mutex::new(None) })
    }

    /// Accepts until the end.
    fn run(&self, endpoint: &Arc<Engine>) {
        let mut buffer = [const { MaybeUninit::uninit() }; 64];
        let mut due = None;
        while !self.ends.load(Ordering::Acquire) {
            let timeout = due.map(|due: Duration| rustix::event::Timespec {
                tv_sec: due.as_secs() as i64,
                tv_nsec: i64::from(due.subsec_nanos()),
            });
            // A signal ends the wait without events.
            let events = epoll::wait(&self.epoll, &mut buffer, timeout.as_ref());
            let events = events.map_or(&[][..], |(events, _)| events);
            let now = clock::now();
            let mut new = Vec::new();
            {
                let mut acceptor = self.acceptor.lock().unwrap();
                let Some(acceptor) = &mut *acceptor else { return };
                for word in events.iter().map(|event| event.data.u64()) {
                    new.extend(acceptor.handle_event(endpoint, word, now));
                }
                acceptor.tick(now);
                due = acceptor.until_next(now).map(|due| due.max(AGAIN));
            }
            for new in new {
                let (session, command) = new.into_command();
                let shard = endpoint.shard_of(&session);
                shard.submit(command);
                shard.notify_if_blocked();
            }
        }
    }
}

impl Listening for Arc<Accepting> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn start(&self, endpoint: &Arc<Engine>) -> io::Result<()> {
        let (this, engine) = (self.clone(), endpoint.clone());
        let thread = threads::spawn("peerway-accept", &endpoint.cpus, move || this.run(&engine))?;
        *self.thread.lock().unwrap() = Some(thread);
        Ok(())
    }

    fn stop(&self) {
        self.ends.store(true, Ordering::Release);
        self.wake.signal();
        if let Some(thread) = self.thread.lock().unwrap().take() {
            let _ = thread.join();
        }
        drop(self.acceptor.lock().unwrap().take());
    }

    fn abandon(&self) {
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
        // If the parent's thread was at work in the moment of the fork, its descriptors stay.
        if let Ok(mut acceptor) = self.acceptor.try_lock() {
            drop(acceptor.take());
        }
    }
}
