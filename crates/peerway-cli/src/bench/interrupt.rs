//! Ctrl-C and SIGTERM: a run ends early, and its finished rows are printed and saved.
//!
//! [`catch`] blocks both signals in this process and in the processes that it starts, and a thread
//! waits for them. So no system call of the engine is interrupted, and the second process lives
//! until the first one has closed its end. Code that takes long calls [`check`].

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// The exit code of a shell's command that SIGINT ended.
pub(crate) const EXIT_CODE: u8 = 130;

/// Signals within this time after the first one are the same request: `timeout` sends one to the
/// process and another one to its group.
const SAME: Duration = Duration::from_millis(500);

static ASKED: AtomicBool = AtomicBool::new(false);

/// The user ended the run.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Whether the user has ended the run.
pub(crate) fn is_asked() -> bool {
    // Nothing else is passed between the two threads.
    ASKED.load(Ordering::Relaxed)
}

/// Returns [`Interrupted`] if the user has ended the run.
pub(crate) fn check() -> anyhow::Result<()> {
    if is_asked() { Err(Interrupted.into()) } else { Ok(()) }
}

/// From now on, the first signal ends the run early, and a later one ends the process at once.
/// Must be called before another thread is started, because threads inherit the blocked signals.
pub(crate) fn catch() -> anyhow::Result<()> {
    let mut signals = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set, and the other calls get it initialised. All
    // pointers are to this local.
    let signals = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
        signals.assume_init()
    };
    // SAFETY: the set is initialised, and a null pointer means that the old set is not wanted.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut()) };
    ensure!(blocked == 0, "cannot block signals: {}", std::io::Error::from_raw_os_error(blocked));
    let wait = move || {
        let mut signal = 0;
        let mut first = None;
        // SAFETY: the set is initialised, and `signal` is a local of this thread.
        while unsafe { libc::sigwait(&signals, &mut signal) } == 0 {
            ASKED.store(true, Ordering::Relaxed);
            if first.get_or_insert_with(Instant::now).elapsed() > SAME {
                std::process::exit(EXIT_CODE.into());
            }
        }
    };
    let named = thread::Builder::new().name("bench-signals".to_owned());
    named.spawn(wait).map(drop).context("cannot start the thread that waits for Ctrl-C")
}
