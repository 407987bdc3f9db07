//! The quarantine: memory that a peer may still access although its owner has released it.
//!
//! An entry is added when a region is revoked or dropped, or an endpoint closes, while a peer is
//! inside its gate or may still copy from it. It is removed when there is proof that no access is
//! left: the last copy left the gate, the peer closed its link, or its process ended.
//!
//! The quarantine belongs to the process. It outlives regions and endpoints, because the memory
//! must not be reused before the proof. A separate thread looks for proofs and releases entries; it
//! exists while there are entries. Destructors of memory and log calls run without a lock.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::memory::RegionInner;
use crate::memory::grants::Grant;
use crate::os::process::PerProcess;
use crate::session::Session;
use crate::threads::{self, Cpus};
use crate::work::Work;

/// Delay of the first check after a new entry: most peers leave within microseconds.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// Maximum delay between checks while nothing changes.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Statistics of memory that was released while a peer may still access it.
///
/// It stays allocated until the peer leaves it, closes its link or dies.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct QuarantineStats {
    /// Regions in quarantine now.
    pub regions: u64,
    /// Their total length in bytes.
    pub bytes: u64,
    /// Entries since the process started, including released ones.
    pub entries_ever: u64,
}

/// The quarantine of this process, over all of its present and former endpoints.
pub fn quarantine() -> QuarantineStats {
    shared().stats()
}

/// Keeps a barred grant and its memory until no peer is inside. A grant is kept only once.
pub(crate) fn keep_grant(grant: Arc<Grant>, fence: Duration) {
    shared().keep(QuarantineEntry::new(Kept::Grant(grant), fence));
}

/// Keeps the source of a write that the peer copies by itself, until the peer can no longer copy.
pub(crate) fn keep_source(session: Arc<Session>, work: Work, fence: Duration) {
    shared().keep(QuarantineEntry::new(Kept::Source { session, work }, fence));
}

fn shared() -> &'static Quarantine {
    static QUARANTINE: PerProcess<Quarantine> = PerProcess::new();
    QUARANTINE.get(Quarantine::default)
}

#[derive(Default)]
struct Quarantine {
    state: Mutex<QuarantineState>,
    /// Signalled when an entry is added.
    added: Condvar,
}

#[derive(Default)]
struct QuarantineState {
    entries: Vec<QuarantineEntry>,
    entries_ever: u64,
    /// Whether the sweeping thread exists.
    is_swept: bool,
}

struct QuarantineEntry {
    kept: Kept,
    since: Instant,
    /// A peer that stays longer than this is reported.
    fence: Duration,
    is_reported: bool,
}

enum Kept {
    /// Peers may be inside the grant's gates.
    Grant(Arc<Grant>),
    /// The peer may copy from the work's local memory.
    Source { session: Arc<Session>, work: Work },
}

impl Quarantine {
    fn keep(&'static self, entry: QuarantineEntry) {
        let mut state = self.state.lock().unwrap();
        if state.entries.iter().any(|other| other.kept.is_same(&entry.kept)) {
            drop(state);
            return;
        }
        state.entries.push(entry);
        state.entries_ever += 1;
        let must_start = !std::mem::replace(&mut state.is_swept, true);
        drop(state);
        self.added.notify_one();
        if must_start {
            let cpus = Cpus::of_process();
            let started = threads::spawn("peerway-fences", &cpus, move || self.sweep_until_empty());
            if let Err(error) = started {
                // The memory stays allocated. The next entry tries to start the thread again.
                tracing::error!(%error, "cannot start the thread that releases quarantined memory");
                self.state.lock().unwrap().is_swept = false;
            }
        }
    }

    fn stats(&self) -> QuarantineStats {
        let state = self.state.lock().unwrap();
        let mut regions: Vec<&Arc<RegionInner>> =
            state.entries.iter().flat_map(|entry| entry.kept.regions()).collect();
        regions.sort_by_key(|region| Arc::as_ptr(region));
        regions.dedup_by_key(|region| Arc::as_ptr(region));
        QuarantineStats {
            regions: regions.len() as u64,
            bytes: regions.iter().map(|region| region.extent().len).sum(),
            entries_ever: state.entries_ever,
        }
    }

    fn sweep_until_empty(&self) {
        let mut pause = FIRST_LOOK;
        loop {
            let mut state = self.state.lock().unwrap();
            if state.entries.is_empty() {
                state.is_swept = false;
                return;
            }
            let count = state.entries.len();
            let (state, _) = self.added.wait_timeout(state, pause).unwrap();
            let grew = state.entries.len() > count;
            drop(state);
            let released = self.sweep();
            pause = if grew || released { FIRST_LOOK } else { (pause * 2).min(LAST_LOOK) };
        }
    }

    /// Releases entries that no peer can access any more. Returns whether there were any.
    fn sweep(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        let released: Vec<QuarantineEntry> =
            state.entries.extract_if(.., |entry| entry.kept.is_quiet()).collect();
        let is_late =
            |entry: &QuarantineEntry| !entry.is_reported && entry.since.elapsed() >= entry.fence;
        let late: Vec<String> = state
            .entries
            .iter_mut()
            .filter(|entry| is_late(entry))
            .map(|entry| {
                entry.is_reported = true;
                entry.kept.to_string()
            })
            .collect();
        drop(state);
        for text in late {
            tracing::warn!(
                "quarantined: {text}; the memory stays allocated until the peer leaves it or dies"
            );
        }
        for entry in &released {
            if entry.is_reported {
                let after = entry.since.elapsed();
                tracing::info!("released from quarantine after {after:?}: {}", entry.kept);
            }
            entry.kept.release();
        }
        !released.is_empty()
    }
}

impl QuarantineEntry {
    fn new(kept: Kept, fence: Duration) -> Self {
        Self { kept, since: Instant::now(), fence, is_reported: false }
    }
}

impl Kept {
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Grant(a), Self::Grant(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    fn is_quiet(&self) -> bool {
        match self {
            Self::Grant(grant) => grant.is_quiet(),
            Self::Source { session, .. } => session.can_pull_no_more(),
        }
    }

    /// Releases everything of the entry except the memory.
    fn release(&self) {
        if let Self::Grant(grant) = self {
            grant.release_if_quiet();
        }
    }

    fn regions(&self) -> &[Arc<RegionInner>] {
        match self {
            Self::Grant(grant) => std::slice::from_ref(&grant.memory),
            Self::Source { work, .. } => work.locals(),
        }
    }
}

impl std::fmt::Display for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Grant(grant) => {
                let (at, len) = (grant.memory.ptr() as u64 + grant.span.offset, grant.span.len);
                let inside = grant.inside();
                let peers = if inside.is_empty() { "a copy by this process" } else { &inside };
                write!(f, "{len} bytes at {at:#x}, which are still in use by {peers}")
            }
            Self::Source { session, work } => {
                let (len, addr) = (work.shape.total(), session.addr);
                write!(f, "the source of a write of {len} bytes, which peer {addr} may still read")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Backing;
    use crate::memory::grants::Grants;
    use peerway_core::region::{Access, Span};

    #[test]
    fn a_grant_is_kept_once_and_released_when_its_gate_is_empty() {
        static QUARANTINE: PerProcess<Quarantine> = PerProcess::new();
        let quarantine = QUARANTINE.get(Quarantine::default);
        let grants = Grants::default();
        let memory = RegionInner::new(std::ptr::null_mut(), 64, Backing::Raw, None);
        let span = Span { offset: 0, len: 64 };
        let add = || grants.add(memory.clone(), span, Access::WRITE, None).unwrap();
        let (first, second) = (add(), add());
        let gate = first.gate();
        assert!(gate.enter() && second.gate().enter());
        for grant in [&first, &second, &first] {
            grant.bar();
            quarantine.keep(QuarantineEntry::new(Kept::Grant(grant.clone()), Duration::ZERO));
        }
        let stats = quarantine.stats();
        assert_eq!((stats.regions, stats.bytes, stats.entries_ever), (1, 64, 2));
        gate.leave();
        second.gate().leave();
        let watchdog = Instant::now() + Duration::from_secs(30);
        while quarantine.stats().regions > 0 {
            assert!(Instant::now() < watchdog, "the entries were not released");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(quarantine.stats().entries_ever, 2);
    }
}
