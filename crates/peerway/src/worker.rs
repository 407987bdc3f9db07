//! Threads for work that must not run in the thread that requests it.
//!
//! A CUDA stream callback must not call CUDA. The thread that holds the driver must not wait for a
//! GPU or a file. It also must not run the destructor of a caller's memory, which could call back
//! into the engine.

use std::sync::OnceLock;
use std::thread::Thread;

use crossbeam_queue::SegQueue;

use crate::os::process::PerProcess;
use crate::threads::{self, Cpus};

/// A thread that starts with its first task and runs tasks in order.
pub(crate) struct Worker {
    name: &'static str,
    state: PerProcess<WorkerState>,
}

#[derive(Default)]
struct WorkerState {
    tasks: SegQueue<Task>,
    /// `None` if the thread could not be started.
    thread: OnceLock<Option<Thread>>,
}

type Task = Box<dyn FnOnce() + Send>;

/// Posts the transfers that CUDA streams release.
pub(crate) static CALLER: Worker = Worker::new("peerway-stream");
/// Frees GPU memory, which waits for all work of the process on that GPU, and memory of callers.
pub(crate) static REAPER: Worker = Worker::new("peerway-free");
/// Looks whether files with certificates have changed.
pub(crate) static FILES: Worker = Worker::new("peerway-files");

impl Worker {
    const fn new(name: &'static str) -> Self {
        Self { name, state: PerProcess::new() }
    }

    /// Runs `task` soon, in the worker's thread.
    pub(crate) fn run(&'static self, task: impl FnOnce() + Send + 'static) {
        let state = self.state.get(WorkerState::default);
        let thread = state.thread.get_or_init(|| {
            let started = threads::spawn(self.name, &Cpus::of_process(), move || state.work())
                .inspect_err(|error| tracing::error!(%error, self.name, "cannot start a thread"));
            started.ok().map(|handle| handle.thread().clone())
        });
        match thread {
            Some(thread) => {
                state.tasks.push(Box::new(task));
                thread.unpark();
            }
            // Without the thread the task runs here, because it must run.
            None => task(),
        }
    }
}

impl WorkerState {
    fn work(&self) {
        loop {
            while let Some(task) = self.tasks.pop() {
                task();
            }
            std::thread::park();
        }
    }
}
