//! The engine's log for Python's `logging`.
//!
//! A thread of the engine must not wait for the interpreter. It leaves its lines in a queue, and
//! the thread of `peerway._logging` takes them out. RUST_LOG or PEERWAY_LOG_LEVEL select the lines
//! where one of them is set, and otherwise the level of the logger `peerway`.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;
use peerway_core::config::{Config, SETTINGS};
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, reload};

/// Lines that wait for the interpreter. More are dropped and counted.
const WAITING: usize = 4096;

/// The lines of this process that wait. A forked child begins with none, because threads of the
/// parent may have been in the middle of a line.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(ptr::null_mut());

struct Queue {
    lines: ArrayQueue<Line>,
    dropped: AtomicU64,
    /// Counts up with each line.
    wake_fd: OwnedFd,
    stopped: AtomicBool,
}

/// Level, seconds since 1970, file, line number, message, and fields with their values.
type Line = (u32, f64, &'static str, u32, String, Vec<(&'static str, String)>);

/// Changes which lines the engine makes. Set when the first endpoint is made.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

fn queue() -> Option<&'static Queue> {
    // SAFETY: a queue is leaked before its address is stored here, so it is never freed.
    unsafe { QUEUE.load(Ordering::Acquire).as_ref() }
}

/// Makes `peerway._logging` follow the logger. Each new endpoint and each connect calls it.
pub(crate) fn follow(py: Python<'_>) -> PyResult<()> {
    py.import("peerway._logging")?.call_method0("follow")?;
    Ok(())
}

/// Prepares the queue, and selects lines of this level of ``logging`` and above. Returns the
/// level that the environment sets instead, if it does.
#[pyfunction]
pub(crate) fn log_select(level: u32) -> PyResult<Option<u32>> {
    if queue().is_none() {
        let queue = Box::new(Queue {
            lines: ArrayQueue::new(WAITING),
            dropped: AtomicU64::new(0),
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(std::io::Error::from)?,
            stopped: AtomicBool::new(false),
        });
        QUEUE.store(Box::leak(queue), Ordering::Release);
    }
    let environment = of_environment();
    let filter = environment.unwrap_or_else(|| of_number(level));
    match FILTER.get() {
        Some(handle) if environment.is_none() => {
            let is_new = |now: &EnvFilter| now.max_level_hint() != Some(filter);
            if handle.with_current(is_new).unwrap_or(false) {
                let _ = handle.reload(EnvFilter::default().add_directive(filter.into()));
            }
        }
        Some(_) => {}
        None => {
            let chosen = EnvFilter::builder().with_default_directive(filter.into());
            let (layer, handle) = reload::Layer::new(chosen.from_env_lossy());
            let subscriber = tracing_subscriber::registry().with(layer).with(ToQueue);
            if FILTER.set(handle).is_ok() {
                let _ = subscriber.try_init();
            }
        }
    }
    // RUST_LOG may select more than one level.
    Ok(match (std::env::var_os("RUST_LOG"), environment) {
        (Some(_), _) => Some(number_of(Level::TRACE)),
        (None, set) => set.map(|filter| filter.into_level().map_or(50, number_of)),
    })
}

/// The level that PEERWAY_LOG_LEVEL or one of its other names sets. `OFF` if RUST_LOG is set:
/// lines that it does not name are then not wanted.
fn of_environment() -> Option<LevelFilter> {
    let variable = |name: &str| std::env::var(name).ok();
    if std::env::var_os("RUST_LOG").is_some() {
        return Some(LevelFilter::OFF);
    }
    let mut settings = SETTINGS.iter().filter(|setting| setting.name == "PEERWAY_LOG_LEVEL");
    settings.find(|setting| setting.find(variable).is_some())?;
    // The endpoint under construction reports an invalid configuration, so this ignores it.
    let (config, _) = Config::from_env(variable).ok()?;
    // The engine and `tracing` use the same level names.
    config.log_level.to_string().parse().ok()
}

/// The lines of at least this number of `logging`.
fn of_number(level: u32) -> LevelFilter {
    match level {
        0..=5 => LevelFilter::TRACE,
        6..=10 => LevelFilter::DEBUG,
        11..=20 => LevelFilter::INFO,
        21..=30 => LevelFilter::WARN,
        31..=40 => LevelFilter::ERROR,
        _ => LevelFilter::OFF,
    }
}

fn number_of(level: Level) -> u32 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// Waits for lines and returns them, with the number of lines that were dropped before them.
/// None after ``log_stop``.
#[pyfunction]
pub(crate) fn log_lines(py: Python<'_>) -> PyResult<Option<(Vec<Line>, u64)>> {
    let Some(queue) = queue() else { return Ok(None) };
    loop {
        let mut counted = [0; 8];
        // Read the count before the lines: a line that comes later wakes the next call.
        let _ = rustix::io::read(&queue.wake_fd, &mut counted);
        let stopped = queue.stopped.load(Ordering::Acquire);
        let lines: Vec<Line> = std::iter::from_fn(|| queue.lines.pop()).collect();
        if !lines.is_empty() {
            return Ok(Some((lines, queue.dropped.swap(0, Ordering::Relaxed))));
        }
        if stopped {
            return Ok(None);
        }
        py.detach(|| {
            let _ = poll(&mut [PollFd::new(&queue.wake_fd, PollFlags::IN)], None);
        });
        py.check_signals()?;
    }
}

/// Makes ``log_lines`` return None when no lines are left.
#[pyfunction]
pub(crate) fn log_stop() {
    if let Some(queue) = queue() {
        queue.stopped.store(true, Ordering::Release);
        queue.wake();
    }
}

/// Forgets the parent's lines in a forked child.
#[pyfunction]
pub(crate) fn log_forget() {
    QUEUE.store(ptr::null_mut(), Ordering::Release);
}

impl Queue {
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }
}

/// Puts lines into the queue.
struct ToQueue;

impl<S: Subscriber> Layer<S> for ToQueue {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(queue) = queue() else { return };
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (file, number) = (metadata.file().unwrap_or(""), metadata.line().unwrap_or(0));
        let level = number_of(*metadata.level());
        let line = (level, now.as_secs_f64(), file, number, text.message, text.fields);
        if queue.lines.push(line).is_err() {
            queue.dropped.fetch_add(1, Ordering::Relaxed);
        }
        queue.wake();
    }
}

/// The message of an event, and its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.fields.push((name, format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            name => self.fields.push((name, value.to_owned())),
        }
    }
}
