//! Reports ended transfers to an event loop, without a thread that waits for them.
//!
//! The thread that ends a transfer is usually a progress thread without access to Python. It pushes
//! the transfer's token into a queue and makes a file descriptor readable. The event loop then
//! takes the tokens from the queue.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use crossbeam_queue::SegQueue;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::transfer::Transfer;

/// Reports ended transfers to one event loop: a file descriptor becomes readable, and
/// ``take`` says which ended.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Wakeups {
    queue: Arc<Queue>,
}

struct Queue {
    tokens: SegQueue<u64>,
    /// The file descriptor is readable, and `take` has not run since.
    signalled: AtomicBool,
    wake_fd: Mutex<Option<OwnedFd>>,
}

impl Queue {
    fn push(&self, token: u64) {
        self.tokens.push(token);
        // Pairs with the swap in `take`. `take` pops a token that was pushed before its swap. A
        // token pushed after it makes the descriptor readable again.
        if !self.signalled.swap(true, Ordering::SeqCst)
            && let Some(wake_fd) = &*self.wake_fd.lock().unwrap()
        {
            let _ = rustix::io::write(wake_fd, &1u64.to_ne_bytes());
        }
    }
}

#[pymethods]
impl Wakeups {
    #[new]
    fn new() -> PyResult<Self> {
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| PyOSError::new_err(format!("eventfd: {error}")))?;
        let wake_fd = Mutex::new(Some(wake_fd));
        let queue = Queue { tokens: SegQueue::new(), signalled: AtomicBool::new(false), wake_fd };
        Ok(Self { queue: Arc::new(queue) })
    }

    /// The file descriptor.
    fn fileno(&self) -> i32 {
        self.queue.wake_fd.lock().unwrap().as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Reports ``token`` when the transfer ends. Returns False when the transfer has ended
    /// already.
    fn watch(&self, transfer: &Bound<'_, Transfer>, token: u64) -> bool {
        let Transfer { transfer, watchers } = transfer.get();
        watchers.waiting.lock().unwrap().push((self.queue.clone(), token));
        let pending = transfer.on_end(&Waker::from(watchers.clone()));
        if !pending {
            // Tokens are unique only within one event loop.
            let ours = |(queue, other): &(Arc<Queue>, u64)| {
                Arc::ptr_eq(queue, &self.queue) && *other == token
            };
            watchers.waiting.lock().unwrap().retain(|entry| !ours(entry));
        }
        pending
    }

    /// Returns the tokens reported since the last call.
    fn take(&self) -> Vec<u64> {
        if let Some(wake_fd) = &*self.queue.wake_fd.lock().unwrap() {
            let _ = rustix::io::read(wake_fd, &mut [0; 8]);
        }
        // Pairs with the swap in `push`.
        self.queue.signalled.swap(false, Ordering::SeqCst);
        std::iter::from_fn(|| self.queue.tokens.pop()).collect()
    }

    /// Closes the file descriptor. No more tokens are reported.
    fn close(&self) {
        self.queue.wake_fd.lock().unwrap().take();
    }
}

/// The queues to notify when a transfer ends. The engine wakes only one waker per transfer, so all
/// event loops share this one.
#[derive(Default)]
pub(crate) struct Watchers {
    waiting: Mutex<Vec<(Arc<Queue>, u64)>>,
}

impl Wake for Watchers {
    fn wake(self: Arc<Self>) {
        for (queue, token) in self.waiting.lock().unwrap().drain(..) {
            queue.push(token);
        }
    }
}
