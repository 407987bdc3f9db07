//! Where the two ends of a TCP row run: on separate halves of the CPUs.
//!
//! Whether the kernel runs both ends on one CPU or on two changes the time of a round trip many
//! times over, and it decides anew for every connection. With fixed halves, the engine's threads
//! and the loops of the baseline always have the same placement.

use peerway_core::config::SETTINGS;
use peerway_core::topology::{parse_cpus, show_cpus};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The setting that names the CPUs of an endpoint's threads.
pub(crate) const SETTING: &str = "PEERWAY_CPUS";

/// The CPUs of this process and of the second one, in the form that [`SETTING`] has. `None` if
/// there is one CPU only, or if the setting is set.
pub(crate) fn halves() -> Option<[String; 2]> {
    let is_set = |name: &str| std::env::var(name).ok();
    if SETTINGS.iter().any(|setting| setting.name == SETTING && setting.find(is_set).is_some()) {
        return None;
    }
    let cpus = allowed()?;
    let (ours, theirs) = cpus.split_at(cpus.len() / 2);
    (!ours.is_empty()).then(|| [show_cpus(ours), show_cpus(theirs)])
}

fn allowed() -> Option<Vec<usize>> {
    let mask = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| mask.is_set(*cpu)).collect())
}

/// Keeps the calling thread on some CPUs until the value is dropped.
#[derive(Debug)]
pub(crate) struct Placed {
    before: CpuSet,
}

impl Placed {
    /// Moves the calling thread to these CPUs. `None` if the kernel refuses.
    pub(crate) fn on(cpus: &str) -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        let mut mask = CpuSet::new();
        for cpu in parse_cpus(cpus)?.into_iter().filter(|cpu| *cpu < CpuSet::MAX_CPU) {
            mask.set(cpu);
        }
        sched_setaffinity(None, &mask).ok()?;
        Some(Self { before })
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        // The thread had this mask before.
        let _ = sched_setaffinity(None, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_separate_and_whole() {
        let Some(halves) = halves() else { return };
        let [ours, theirs] = halves.map(|half| parse_cpus(&half).unwrap());
        assert!(ours.iter().all(|cpu| !theirs.contains(cpu)));
        assert_eq!([ours, theirs].concat(), allowed().unwrap());
    }

    #[test]
    fn a_thread_returns_to_its_cpus() {
        let before = allowed().unwrap();
        let last = before[before.len() - 1];
        let placed = Placed::on(&last.to_string()).unwrap();
        assert_eq!(allowed().unwrap(), [last]);
        drop(placed);
        assert_eq!(allowed().unwrap(), before);
        assert!(Placed::on("x").is_none() && Placed::on("").is_none());
    }
}
