//! Threads for what must not be done where it is asked for: streams may not call CUDA, and whoever drives lanes may not
//! wait for a GPU.

use std::sync::OnceLock;
use std::thread::Thread;

use crossbeam_queue::SegQueue;

/// A thread of its own, from the first task on.
pub(super) struct Worker {
    name: &'static str,
    tasks: SegQueue<Task>,
    /// `None` where it could not be started.
    thread: OnceLock<Option<Thread>>,
}

type Task = Box<dyn FnOnce() + Send>;

/// Posts what streams call for.
pub(super) static CALLER: Worker = Worker::new("peerway-stream");
/// Frees GPU memory, which waits for all work of the process on the GPU.
pub(super) static REAPER: Worker = Worker::new("peerway-free");

impl Worker {
    const fn new(name: &'static str) -> Self {
        Self { name, tasks: SegQueue::new(), thread: OnceLock::new() }
    }

    /// Has something done soon.
    pub(super) fn run(&'static self, task: impl FnOnce() + Send + 'static) {
        let thread = self.thread.get_or_init(|| {
            let started = std::thread::Builder::new().name(self.name.into()).spawn(|| self.work());
            let started =
                started.inspect_err(|error| tracing::error!(%error, self.name, "no thread"));
            started.ok().map(|handle| handle.thread().clone())
        });
        match thread {
            Some(thread) => {
                self.tasks.push(Box::new(task));
                thread.unpark();
            }
            // Better here than never.
            None => task(),
        }
    }

    fn work(&self) {
        loop {
            while let Some(task) = self.tasks.pop() {
                task();
            }
            std::thread::park();
        }
    }
}
