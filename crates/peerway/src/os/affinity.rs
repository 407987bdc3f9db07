//! CPU affinity of threads, and NUMA placement of memory.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::CpuSet;

/// CPU numbers in masks are below this.
pub(crate) const MOST: usize = CpuSet::MAX_CPU;

/// The CPU mask of the process's main thread when this code was loaded. All zeros if the mask could
/// not be read.
static LOADED_WITH: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Makes the dynamic loader call [`note_mask`] when it loads this program or library, before either
/// can pin a thread. The loader passes arguments, which a C function may ignore.
#[used]
#[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
static AT_LOAD: extern "C" fn() = note_mask;

/// Runs before `main`, so it only reads the mask and stores numbers. It must not allocate, lock or
/// panic.
extern "C" fn note_mask() {
    // The main thread's id is the process id. The thread that loads a library may already be
    // pinned, so do not use its own mask.
    let Ok(mask) = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())) else {
        return;
    };
    for cpu in (0..MOST).filter(|cpu| mask.is_set(*cpu)) {
        LOADED_WITH[cpu / 64].fetch_or(1 << (cpu % 64), Ordering::Relaxed);
    }
}

/// The CPUs that the process could use when this code was loaded, in ascending order. Falls back to
/// the main thread's current mask if the mask at load is unknown. Empty if the kernel does not
/// report a mask, as with more than 1024 CPUs.
pub(crate) fn at_load() -> Vec<usize> {
    // Reference the static, so that a linker that picks objects out of an archive includes this
    // one.
    // SAFETY: `AT_LOAD` is a static of this module and is never written.
    let _ = unsafe { (&raw const AT_LOAD).read_volatile() };
    if LOADED_WITH.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
        note_mask();
    }
    let is_set = |cpu: &usize| LOADED_WITH[cpu / 64].load(Ordering::Relaxed) >> (cpu % 64) & 1 == 1;
    (0..MOST).filter(is_set).collect()
}

/// The CPUs that the calling thread may run on, in ascending order.
pub(crate) fn of_this_thread() -> io::Result<Vec<usize>> {
    let mask = rustix::thread::sched_getaffinity(None)?;
    Ok((0..MOST).filter(|cpu| mask.is_set(*cpu)).collect())
}

/// Restricts the calling thread, and threads that it starts later, to `cpus`.
///
/// The kernel ignores CPUs that the process may not use (for example, because of a container's
/// limits).
///
/// # Errors
///
/// `InvalidInput` if the list is empty or contains a CPU number of 1024 or more. The kernel's
/// `EINVAL` if the process may use none of the CPUs.
pub(crate) fn pin_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpus.is_empty() || cpus.iter().any(|cpu| *cpu >= CpuSet::MAX_CPU) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The CPU that the calling thread runs on now.
pub(crate) fn current_cpu() -> usize {
    // SAFETY: `sched_getcpu` takes no arguments and changes no state.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Asks the kernel to take untouched pages of this range from a NUMA node while the node has free
/// pages. This is a preference: without NUMA support or permission, the kernel places the pages as
/// usual.
pub(crate) fn prefer_node(addr: u64, len: u64, node: u16) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(usize::from(node) / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: the kernel reads the mask, whose length in bits is passed, and records a policy for
    // the range. Pages that are already allocated stay where they are.
    unsafe {
        let bits = mask.len() * 64;
        libc::syscall(libc::SYS_mbind, addr, len, MPOL_PREFERRED, mask.as_ptr(), bits, 0);
    }
}

/// Runs `work` with a preference for pages from a NUMA node, then restores the thread's previous
/// policy. A preference only, as in [`prefer_node`].
pub(crate) fn near<T>(node: Option<u16>, work: impl FnOnce() -> T) -> T {
    let before = node.and_then(|node| {
        let before = Policy::of_this_thread()?;
        Policy::preferring(node)?.set().then_some(before)
    });
    let done = work();
    if let Some(before) = before {
        before.set();
    }
    done
}

/// A thread's NUMA memory policy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Policy {
    mode: libc::c_int,
    nodes: [u64; 16],
}

impl Policy {
    const PREFERRED: libc::c_int = 1;

    fn preferring(node: u16) -> Option<Self> {
        let mut nodes = [0u64; 16];
        *nodes.get_mut(usize::from(node) / 64)? = 1 << (node % 64);
        Some(Self { mode: Self::PREFERRED, nodes })
    }

    fn of_this_thread() -> Option<Self> {
        let mut policy = Self { mode: 0, nodes: [0; 16] };
        let bits = policy.nodes.len() * 64;
        // SAFETY: the kernel writes a mode and `bits` bits of `nodes`. The address is null, so the
        // kernel reports the thread's policy and reads no memory.
        let result = unsafe {
            let (mode, nodes) = (&raw mut policy.mode, policy.nodes.as_mut_ptr());
            libc::syscall(libc::SYS_get_mempolicy, mode, nodes, bits, std::ptr::null::<u8>(), 0)
        };
        (result == 0).then_some(policy)
    }

    fn set(&self) -> bool {
        let bits = self.nodes.len() * 64;
        // SAFETY: the kernel reads `bits` bits of `nodes` and sets a policy for the calling thread.
        let result =
            unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, self.nodes.as_ptr(), bits) };
        result == 0
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn a_thread_is_pinned_and_others_are_not() {
        let before = sched_getaffinity(None).unwrap();
        let allowed = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
        let pinned = thread::spawn(move || {
            pin_to(&[allowed, CpuSet::MAX_CPU - 1]).unwrap();
            sched_getaffinity(None).unwrap()
        });
        let pinned = pinned.join().unwrap();
        assert_eq!((pinned.count(), pinned.is_set(allowed)), (1, true));
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn empty_and_unusable_cpu_lists_are_refused() {
        for cpus in [&[][..], &[CpuSet::MAX_CPU], &[CpuSet::MAX_CPU - 1]] {
            assert!(pin_to(cpus).is_err(), "{cpus:?}");
        }
    }

    mod needs_memory_policies {
        use super::*;

        #[test]
        #[ignore = "probes whether this process may read its memory policy"]
        fn probe() {
            Policy::of_this_thread()
                .expect("the kernel does not report this thread's memory policy");
        }

        #[test]
        #[ignore = "needs a kernel that reports memory policies: cargo xtask test --only test"]
        fn a_wish_for_a_node_is_put_back() {
            let before = Policy::of_this_thread().unwrap();
            let meanwhile = near(Some(0), Policy::of_this_thread);
            assert!(
                meanwhile == Policy::preferring(0) || meanwhile == Some(before),
                "{meanwhile:?}"
            );
            assert_eq!(Policy::of_this_thread(), Some(before));
            assert_eq!(near(Some(u16::MAX), || 7), 7, "a node number beyond the mask");
            assert_eq!(near(None, || 8), 8);
        }
    }
}
