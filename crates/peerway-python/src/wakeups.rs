//! Ends of transfers for an event loop, without a thread that waits for them.
//!
//! Whoever ends a transfer, most often a thread of the engine's that knows no Python, puts the transfer's
//! token into a queue and makes a descriptor readable; the loop takes the tokens out.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use crossbeam_queue::SegQueue;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::transfer::Transfer;

/// Ends of transfers for one event loop: a descriptor that turns readable, and which ones ended.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Wakeups {
    queue: Arc<Queue>,
}

struct Queue {
    tokens: SegQueue<u64>,
    /// The descriptor is readable and nobody has looked yet.
    signalled: AtomicBool,
    wake_fd: Mutex<Option<OwnedFd>>,
}

impl Queue {
    fn push(&self, token: u64) {
        self.tokens.push(token);
        // pairs with the swap in `take`: a token pushed before it is taken out there, one pushed after it
        // rings again.
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

    /// The descriptor.
    fn fileno(&self) -> i32 {
        self.queue.wake_fd.lock().unwrap().as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Has ``token`` reported when the transfer ends; False when it has ended already.
    fn watch(&self, transfer: &Bound<'_, Transfer>, token: u64) -> bool {
        let Transfer { transfer, watchers } = transfer.get();
        watchers.waiting.lock().unwrap().push((self.queue.clone(), token));
        let pending = transfer.on_end(&Waker::from(watchers.clone()));
        if !pending {
            // Tokens are each loop's own.
            let ours = |(queue, other): &(Arc<Queue>, u64)| {
                Arc::ptr_eq(queue, &self.queue) && *other == token
            };
            watchers.waiting.lock().unwrap().retain(|entry| !ours(entry));
        }
        pending
    }

    /// Tokens reported since the last call.
    fn take(&self) -> Vec<u64> {
        if let Some(wake_fd) = &*self.queue.wake_fd.lock().unwrap() {
            let _ = rustix::io::read(wake_fd, &mut [0; 8]);
        }
        // pairs with the swap in `push`
        self.queue.signalled.swap(false, Ordering::SeqCst);
        std::iter::from_fn(|| self.queue.tokens.pop()).collect()
    }

    /// Closes the descriptor; nothing is reported any more.
    fn close(&self) {
        self.queue.wake_fd.lock().unwrap().take();
    }
}

/// Who is told of a transfer's end: an engine's transfer wakes one waker, and this is it.
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
