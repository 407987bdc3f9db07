//! The death of a process, as its peers see it on a device. A kernel stops the threads of a
//! process. It may then release the registrations before the queue pairs and sockets. For a while,
//! all memory accesses are refused and no process is left to explain why.

use std::cell::Cell;
use std::ffi::c_int;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How long memory accesses are refused before the process is gone.
const AGONY: Duration = Duration::from_millis(2500);

/// How many more times peers may access memory before the process dies.
#[derive(Debug, Default)]
pub(crate) struct Death(Cell<Option<u64>>);

impl Death {
    pub(crate) fn after(touches: Option<u64>) -> Self {
        Self(Cell::new(touches))
    }

    /// Counts a memory access. Returns true if it is refused because the process is dying. The
    /// device's thread calls this with its lock held, so no stopped thread holds that lock.
    pub(crate) fn refuses(&self) -> bool {
        match self.0.get() {
            None => false,
            Some(0) => true,
            Some(left) => {
                self.0.set(Some(left - 1));
                if left == 1 {
                    die_soon();
                    stop_the_others();
                }
                left == 1
            }
        }
    }
}

/// Makes the kernel end the process after [`AGONY`], whatever its threads do.
fn die_soon() {
    let after = libc::timeval {
        tv_sec: AGONY.as_secs() as libc::time_t,
        tv_usec: AGONY.subsec_micros() as libc::suseconds_t,
    };
    let once = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: once, it_value: after };
    // SAFETY: the default action of SIGALRM ends the process. `timer` is valid and only read.
    unsafe {
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
    }
}

static STOPPED: AtomicUsize = AtomicUsize::new(0);

/// Stops all threads except the calling one, for good.
fn stop_the_others() {
    // SAFETY: both calls only return numbers.
    let (process, ours) = unsafe { (libc::getpid(), libc::gettid()) };
    // SAFETY: the handler calls only `pause` and touches one atomic, which is async-signal-safe.
    unsafe { libc::signal(libc::SIGUSR2, stop as *const () as libc::sighandler_t) };
    let listed = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = listed.filter_map(|task| task.file_name().to_str()?.parse::<i32>().ok());
    let signal = |thread: &i32| {
        // SAFETY: tgkill takes no pointers. If the thread has ended, the call fails and has no
        // effect.
        *thread != ours
            && unsafe { libc::syscall(libc::SYS_tgkill, process, *thread, libc::SIGUSR2) } == 0
    };
    let signalled = threads.filter(signal).count();
    while STOPPED.load(Ordering::SeqCst) < signalled {
        std::thread::yield_now();
    }
}

extern "C" fn stop(_signal: c_int) {
    STOPPED.fetch_add(1, Ordering::SeqCst);
    loop {
        // SAFETY: pause takes no arguments and only waits for signals.
        unsafe { libc::pause() };
    }
}
