//! Processes: the identity and host of this one, fork detection, and detection of another process's
//! death.
//!
//! Peers exchange [`HostFacts`] in the handshake, as hints: an equal boot id suggests that a local
//! transport may work, and a probe decides. Nothing here takes a lock. A lock that another thread
//! holds during a fork stays locked in the child forever.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

/// A file descriptor of a process. It stays bound to the process when the pid is reused, and is
/// readable once the process is dead.
#[derive(Debug)]
pub(crate) struct Pidfd(OwnedFd);

impl Pidfd {
    /// Opens the process that has this pid now, in this process's PID namespace.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self(rustix::process::pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Whether every thread of the process has ended. A zombie counts as dead.
    pub(crate) fn is_dead(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1))
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sets the calling thread to never preempt a running thread: it runs on an idle core. A thread
/// that wakes it pays one system call and keeps its time slice.
pub(crate) fn yield_to_others() {
    // SAFETY: a system call that changes the calling thread only; `priority` outlives it.
    unsafe {
        let priority: libc::sched_param = std::mem::zeroed();
        // A refusal (for example, by seccomp) only costs speed.
        libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const priority);
    }
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// A number that differs between a process and its forked children, once [`watch_forks`] has been
/// called.
#[inline]
pub(crate) fn fork_generation() -> u32 {
    // Relaxed: the value changes only in a forked child that has a single thread, before `fork`
    // returns there.
    FORKS.load(Ordering::Relaxed)
}

/// Starts counting forks in [`fork_generation`]. Cheap if counting has already started.
///
/// Children created without the C library's `fork` (by a raw `clone`) are not counted.
pub(crate) fn watch_forks() {
    static WATCHING: AtomicBool = AtomicBool::new(false);

    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }

    // Two threads may both reach this point and register the handler twice. A fork then adds two,
    // which is still a change. A `Once` would instead hang in a child that was forked while another
    // thread was inside it.
    if WATCHING.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: `in_child` is a static function whose only effect is an atomic add. That is allowed
    // in the child of a multi-threaded process.
    let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if rc == 0 {
        // Pairs with the Acquire load above: a thread that reads true knows that the handler is
        // registered.
        WATCHING.store(true, Ordering::Release);
    } else {
        tracing::warn!(
            error = %io::Error::from_raw_os_error(rc),
            "cannot register a fork handler: forked children will not be detected"
        );
    }
}

/// Facts that show whether two endpoints share a host, a user and namespaces.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize, PartialEq, Eq)]
pub(crate) struct HostFacts {
    /// The kernel's random id of this boot; zero if unreadable.
    pub(crate) boot_id: [u8; 16],
    /// Effective user id.
    pub(crate) uid: u32,
    /// The pid in the PID namespace `pid_ns`.
    pub(crate) pid: u32,
    /// Random per process and renewed after a fork. It identifies a process without relying on
    /// pids.
    pub(crate) process: [u8; 16],
    /// Inode numbers of the namespaces; zero if unreadable.
    pub(crate) pid_ns: u64,
    pub(crate) net_ns: u64,
    pub(crate) mnt_ns: u64,
}

impl HostFacts {
    /// The facts of this process.
    pub(crate) fn here() -> Self {
        Self {
            boot_id: boot_id().unwrap_or_default(),
            uid: rustix::process::geteuid().as_raw(),
            pid: std::process::id(),
            process: process_id(),
            pid_ns: namespace("pid"),
            net_ns: namespace("net"),
            mnt_ns: namespace("mnt"),
        }
    }
}

fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    parse_uuid(text.trim())
}

/// Parses a UUID in its usual spelling.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    // `from_str_radix` would accept a sign.
    if digits.len() != 32 || digits.contains('+') {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

fn namespace(kind: &str) -> u64 {
    rustix::fs::stat(format!("/proc/self/ns/{kind}")).map_or(0, |stat| stat.st_ino)
}

/// The random id of this process. A forked child gets its own.
fn process_id() -> [u8; 16] {
    static IDENTITY: PerProcess<[u8; 16]> = PerProcess::new();
    *IDENTITY.get(|| {
        let mut id = [0; 16];
        if getrandom::fill(&mut id).is_err() {
            // Without entropy, the time and the pid still distinguish this process from others on
            // the host.
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            id[..8].copy_from_slice(&((now.tv_sec << 30) ^ now.tv_nsec).to_ne_bytes());
            id[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
        }
        id
    })
}

/// A static value of one process. A forked child makes its own value and never touches the
/// parent's. Threads that do not exist in the child may have held locks inside the parent's value.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<Made<T>>);

struct Made<T> {
    generation: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process. `make` creates it on the first call. If two threads create one at
    /// the same time, one value is dropped.
    pub(crate) fn get(&'static self, make: impl FnOnce() -> T) -> &'static T {
        watch_forks();
        let generation = fork_generation();
        // Pairs with the exchange below: the value is written before its address becomes visible.
        let old = self.0.load(Ordering::Acquire);
        // SAFETY: every pointer stored in `self.0` comes from a leaked box, which is never freed
        // and only shared.
        if let Some(made) = unsafe { old.as_ref() }
            && made.generation == generation
        {
            return &made.value;
        }
        // Leaked on purpose, once per process: readers hold references to it, and no lock may guard
        // it.
        let new = Box::into_raw(Box::new(Made { generation, value: make() }));
        match self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `new` is a box leaked just now. From here on it is only shared.
            Ok(_) => unsafe { &(*new).value },
            // SAFETY: `new` was never shared, so this thread still owns it. `winner` is not null
            // and points to a leaked box, because only pointers to leaked boxes are ever stored.
            Err(winner) => unsafe {
                drop(Box::from_raw(new));
                &(*winner).value
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_pidfd_tells_the_living_from_the_dead() {
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let pidfd = Pidfd::open(child.id()).unwrap();
        assert!(!pidfd.is_dead());
        child.kill().unwrap();
        // The descriptor is readable as soon as the process is a zombie, before a `wait`.
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        let watchdog = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&watchdog)), Ok(1));
        assert!(pidfd.is_dead());
        child.wait().unwrap();
        assert!(pidfd.is_dead());
    }

    #[test]
    fn there_is_no_such_process() {
        assert!(Pidfd::open(0).is_err());
        assert!(Pidfd::open(u32::MAX).is_err());
        // Above the largest possible pid (2^22).
        assert!(Pidfd::open(5_000_000).is_err());
    }

    #[test]
    fn facts_are_stable_within_a_process() {
        let facts = HostFacts::here();
        assert_eq!(facts, HostFacts::here());
        assert_eq!(facts.pid, std::process::id());
        assert_ne!(facts.process, [0; 16]);
    }

    #[test]
    fn a_forked_child_is_another_process() {
        let before = (fork_generation(), process_id());
        let (read, write) = rustix::pipe::pipe().unwrap();
        // SAFETY: the child only makes calls that are sound after a fork of a multi-threaded
        // process (glibc's malloc is). It leaves by `_exit`, so it runs none of the parent's
        // destructors.
        match unsafe { libc::fork() } {
            0 => {
                let mut report = [0; 20];
                report[..4].copy_from_slice(&fork_generation().to_ne_bytes());
                report[4..].copy_from_slice(&process_id());
                let sent = rustix::io::write(&write, &report);
                // SAFETY: `_exit` ends the child at once.
                unsafe { libc::_exit(i32::from(sent != Ok(20))) }
            }
            child => {
                assert!(child > 0);
                drop(write);
                let mut report = [0; 20];
                assert_eq!(rustix::io::read(&read, &mut report), Ok(20));
                // SAFETY: reaps the child made above and asks for no status.
                unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
                assert_ne!(report[..4], before.0.to_ne_bytes());
                assert_ne!(report[4..], before.1);
            }
        }
        assert_eq!(before, (fork_generation(), process_id()));
    }

    #[test]
    fn only_whole_uuids_are_parsed() {
        let id = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!(id[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(id[15], 0xff);
        for bad in ["", "00112233", "+0112233-4455-6677-8899-aabbccddeeff", "not-a-boot-id"] {
            assert_eq!(parse_uuid(bad), None);
        }
    }
}
