//! Which processors a thread runs on, and which memory is near them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::CpuSet;

/// Processors are numbered below this in masks.
pub(crate) const MOST: usize = CpuSet::MAX_CPU;

/// The mask of the process's main thread when this code was loaded; zero where that was not learned.
static LOADED_WITH: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Has the loader call [`note_mask`] with the program or library that this is part of, before either can pin a
/// thread. The loader passes arguments, which a C function may leave alone.
#[used]
#[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
static AT_LOAD: extern "C" fn() = note_mask;

/// Runs before `main`, so it only asks the kernel and stores numbers: no allocation, no lock, no panic.
extern "C" fn note_mask() {
    // The main thread: its number is the process's. A library may be loaded by another thread that is pinned.
    let Ok(mask) = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())) else {
        return;
    };
    for cpu in (0..MOST).filter(|cpu| mask.is_set(*cpu)) {
        LOADED_WITH[cpu / 64].fetch_or(1 << (cpu % 64), Ordering::Relaxed);
    }
}

/// The processors that the process had when this code was loaded, in order; those that the main thread has now where
/// that was not learned. None where the kernel does not tell, as beyond 1024 processors.
pub(crate) fn at_load() -> Vec<usize> {
    // A use of the static: a linker that takes objects out of an archive takes this one then.
    // SAFETY: a static of this module, which is never written.
    let _ = unsafe { (&raw const AT_LOAD).read_volatile() };
    if LOADED_WITH.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
        note_mask();
    }
    let is_set = |cpu: &usize| LOADED_WITH[cpu / 64].load(Ordering::Relaxed) >> (cpu % 64) & 1 == 1;
    (0..MOST).filter(is_set).collect()
}

/// The processors that the calling thread may run on, in order.
pub(crate) fn of_this_thread() -> io::Result<Vec<usize>> {
    let mask = rustix::thread::sched_getaffinity(None)?;
    Ok((0..MOST).filter(|cpu| mask.is_set(*cpu)).collect())
}

/// Has the calling thread, and threads that it starts from now on, run on `cpus` only.
///
/// Processors that the process may not use (a container's limits) are passed over by the kernel.
///
/// # Errors
///
/// As the kernel says: `EINVAL` where none of them may be used; `InvalidInput` where the list is empty or
/// names a processor beyond those that the call can name (1024).
pub(crate) fn pin_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpus.is_empty() || cpus.iter().any(|cpu| *cpu >= CpuSet::MAX_CPU) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The processor that the calling thread runs on now.
pub(crate) fn current_cpu() -> usize {
    // SAFETY: asks and changes nothing.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Has pages of this range, not touched yet, come from a NUMA node if it has any left. A wish: where the
/// kernel knows no nodes, or does not let us choose, pages come from where they come.
pub(crate) fn prefer_node(addr: u64, len: u64, node: u16) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(usize::from(node) / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: the kernel reads the mask, whose bits are counted, and notes a policy for the range; pages that
    // are there stay.
    unsafe {
        let bits = mask.len() * 64;
        libc::syscall(libc::SYS_mbind, addr, len, MPOL_PREFERRED, mask.as_ptr(), bits, 0);
    }
}

/// Has pages that `work` causes to be allocated come from a NUMA node if it has any left, and puts back what the thread wished before. A wish, like
/// [`prefer_node`].
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

/// Where a thread wishes its pages to come from.
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
        // SAFETY: writes a mode and so many bits; no address is asked about.
        let result = unsafe {
            let (mode, nodes) = (&raw mut policy.mode, policy.nodes.as_mut_ptr());
            libc::syscall(libc::SYS_get_mempolicy, mode, nodes, bits, std::ptr::null::<u8>(), 0)
        };
        (result == 0).then_some(policy)
    }

    fn set(&self) -> bool {
        let bits = self.nodes.len() * 64;
        // SAFETY: reads so many bits, and notes a policy for the calling thread.
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
    fn what_cannot_be_is_refused() {
        for cpus in [&[][..], &[CpuSet::MAX_CPU], &[CpuSet::MAX_CPU - 1]] {
            assert!(pin_to(cpus).is_err(), "{cpus:?}");
        }
    }

    mod needs_memory_policies {
        use super::*;

        #[test]
        #[ignore = "tells whether this process may ask where pages come from"]
        fn probe() {
            Policy::of_this_thread().expect("the kernel does not tell where pages come from");
        }

        #[test]
        #[ignore = "needs a kernel that tells where pages come from: cargo xtask test --only test"]
        fn a_wish_for_a_node_is_put_back() {
            let before = Policy::of_this_thread().unwrap();
            let meanwhile = near(Some(0), Policy::of_this_thread);
            assert!(
                meanwhile == Policy::preferring(0) || meanwhile == Some(before),
                "{meanwhile:?}"
            );
            assert_eq!(Policy::of_this_thread(), Some(before));
            assert_eq!(near(Some(u16::MAX), || 7), 7, "a node that cannot be named");
            assert_eq!(near(None, || 8), 8);
        }
    }
}
