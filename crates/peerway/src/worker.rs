//! Threads for work that must not run where it is asked for.
//!
//! A CUDA stream callback may not call CUDA. The thread that holds the driver may not wait for a
//! GPU, and may not run the destructor of a caller's memory, which could call back into the engine.

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
    /// `None` where the thread could not be started.
    thread: OnceLock<Option<Thread>>,
}

type Task = Box<dyn FnOnce() + Send>;

/// Posts the transfers that CUDA streams call for.
pub(crate) static CALLER: Worker = Worker::new("peerway-stream");
/// Frees memory: of a GPU, which waits for all work of the process on it, and of callers.
pub(crate) static REAPER: Worker = Worker::new("peerway-free");

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
            // Without the thread the task runs here rather than never.
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
