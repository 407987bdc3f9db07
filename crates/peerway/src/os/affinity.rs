//! Which processors a thread runs on.

use std::io;

use rustix::thread::CpuSet;

/// Has the calling thread, and threads that it starts from now on, run on `cpus` only.
///
/// Processors that the process may not use (a container's limits) are passed over by the kernel.
///
/// # Errors
///
/// As the kernel says: `EINVAL` where none of them may be used; `InvalidInput` where the list is empty or
/// names a processor beyond those that the call can name (1024).
#[cfg_attr(not(test), expect(dead_code, reason = "used by the verbs transport"))]
pub(crate) fn pin_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpus.is_empty() || cpus.iter().any(|cpu| *cpu >= CpuSet::MAX_CPU) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
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
}
