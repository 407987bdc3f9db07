//! Gates: an owner uses a gate to bar direct access to its memory and to detect when the last
//! access is over.
//!
//! A gate is a pass word and a count. A copier increments the count, checks that the word is still
//! the pass it was given, copies, and decrements the count. The owner changes the word and waits
//! for the count to reach zero. Both sides use sequentially consistent operations, so either the
//! copier sees the new word or the owner sees the count. A copy cannot start after a revoke.
//!
//! A grant's gate lives in the owner's heap. A gate for another process lives in the shared segment
//! of its session. Whatever the other process writes there, it can only falsify the owner's result
//! about that process (an open fence), never an address.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::os::shm::ShmMapping;

/// The two words, on their own cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Gate {
    pass: AtomicU32,
    inside: AtomicU32,
}

/// Size of a gate in a table.
pub(crate) const GATE_LEN: usize = size_of::<Gate>();

impl Gate {
    /// Opens the gate for holders of `pass`. The count does not change: it is zero in a new gate,
    /// and a used gate is opened again only when no copy is inside.
    pub(crate) fn open(&self, pass: u32) {
        self.pass.store(pass, Ordering::SeqCst);
    }

    /// Admits no more copies. Copies in progress continue: see [`Self::is_empty`].
    pub(crate) fn close(&self) {
        // Pairs with the increment in `enter`.
        self.pass.store(0, Ordering::SeqCst);
    }

    /// Whether no copy is in progress.
    pub(crate) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }

    /// Enters with `pass`; false if the gate is closed. Every success must be paired with a
    /// `leave`.
    #[inline]
    pub(crate) fn enter(&self, pass: u32) -> bool {
        self.inside.fetch_add(1, Ordering::SeqCst);
        // Pairs with the store in `close`.
        if self.pass.load(Ordering::SeqCst) == pass {
            return true;
        }
        self.leave();
        false
    }

    /// Ends a copy.
    #[inline]
    pub(crate) fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A gate and the pass for it.
#[derive(Clone, Debug)]
pub(crate) enum GateRef {
    /// A gate in this process.
    Here(Arc<Gate>, u32),
    /// A gate in a shared segment, which the `Arc` keeps mapped.
    Shared(SharedGate, u32),
}

impl GateRef {
    /// See [`Gate::enter`].
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        match self {
            Self::Here(gate, pass) => gate.enter(*pass),
            Self::Shared(gate, pass) => gate.gate().enter(*pass),
        }
    }

    /// Whether it would admit a copy now.
    pub(crate) fn is_open(&self) -> bool {
        let admitted = self.enter();
        if admitted {
            self.leave();
        }
        admitted
    }

    /// Whether both refer to the same gate with the same pass.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Here(gate, pass), Self::Here(of, with)) => Arc::ptr_eq(gate, of) && pass == with,
            (Self::Shared(gate, pass), Self::Shared(of, with)) => {
                Arc::ptr_eq(&gate.segment, &of.segment) && gate.offset == of.offset && pass == with
            }
            _ => false,
        }
    }

    /// See [`Gate::leave`].
    #[inline]
    pub(crate) fn leave(&self) {
        match self {
            Self::Here(gate, _) => gate.leave(),
            Self::Shared(gate, _) => gate.gate().leave(),
        }
    }
}

/// One gate of a table in a shared segment.
#[derive(Clone)]
pub(crate) struct SharedGate {
    segment: Arc<ShmMapping>,
    offset: usize,
}

impl SharedGate {
    /// The gate at byte `offset` of the segment; `None` if it is misaligned or exceeds the segment.
    pub(crate) fn new(segment: Arc<ShmMapping>, offset: usize) -> Option<Self> {
        let fits = offset.checked_add(GATE_LEN)? <= segment.len();
        (fits && offset.is_multiple_of(GATE_LEN)).then_some(Self { segment, offset })
    }

    /// The gate's words.
    #[inline]
    pub(crate) fn gate(&self) -> &Gate {
        // SAFETY: `new` checked that the gate lies in the segment and is aligned (mappings are
        // page-aligned). The segment stays mapped while `self` lives. Both fields are atomics, so
        // the other process's stores are no data race.
        unsafe { &*self.segment.ptr().add(self.offset).cast::<Gate>() }
    }
}

impl std::fmt::Debug for SharedGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedGate({:#x})", self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_admits_no_copy_and_reports_when_it_is_empty() {
        let gate = Gate::default();
        assert!(!gate.enter(1), "the gate was never opened");
        gate.open(7);
        assert!(gate.enter(7) && !gate.enter(8));
        gate.close();
        assert!(!gate.enter(7) && !gate.is_empty());
        gate.leave();
        assert!(gate.is_empty());
    }
}
