//! Gates: how an owner bars direct access to its memory and learns when the last one is over.
//!
//! A gate is a word and a count. Whoever copies raises the count, looks whether the word is still
//! the one it was given, copies, and lowers the count. The owner changes the word and waits for the
//! count. Both sides use sequentially consistent operations, so either the copier sees the new word
//! or the owner sees the count: a copy that starts after a revoke is impossible.
//!
//! A grant's gate lives in the owner's heap; a gate for another process lives in the shared segment
//! of its session. What the other process writes there can only spoil the owner's answer about that
//! process (an open fence), never an address.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::os::shm::ShmMapping;

/// The two words, alone on their cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Gate {
    pass: AtomicU32,
    inside: AtomicU32,
}

/// Bytes of a gate in a table.
pub(crate) const GATE_LEN: usize = size_of::<Gate>();

impl Gate {
    /// Opens the gate to holders of `pass`. The count is left alone: it is zero in a fresh gate, and
    /// a used one is opened anew only when nobody is inside.
    pub(crate) fn open(&self, pass: u32) {
        self.pass.store(pass, Ordering::SeqCst);
    }

    /// Lets nobody in any more. Copies under way go on: see [`Self::is_empty`].
    pub(crate) fn close(&self) {
        // pairs with the count raised in `enter`
        self.pass.store(0, Ordering::SeqCst);
    }

    /// Whether no copy is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }

    /// Enters with `pass`, or says that it has been closed. Every success is paired with a leave.
    #[inline]
    pub(crate) fn enter(&self, pass: u32) -> bool {
        self.inside.fetch_add(1, Ordering::SeqCst);
        // pairs with the store in `close`
        if self.pass.load(Ordering::SeqCst) == pass {
            return true;
        }
        self.leave();
        false
    }

    /// The copy is over.
    #[inline]
    pub(crate) fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A gate somewhere, and the pass to it.
#[derive(Clone, Debug)]
pub(crate) enum GateRef {
    /// In this process.
    Here(Arc<Gate>, u32),
    /// In a shared segment that the `Arc` keeps mapped.
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

    /// Whether it would let us in now.
    pub(crate) fn is_open(&self) -> bool {
        let admitted = self.enter();
        if admitted {
            self.leave();
        }
        admitted
    }

    /// Whether both are the same gate, with the same pass.
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
    /// The gate at byte `offset` of the segment; `None` when it does not lie in it.
    pub(crate) fn new(segment: Arc<ShmMapping>, offset: usize) -> Option<Self> {
        let fits = offset.checked_add(GATE_LEN)? <= segment.len();
        (fits && offset.is_multiple_of(GATE_LEN)).then_some(Self { segment, offset })
    }

    /// The words.
    #[inline]
    pub(crate) fn gate(&self) -> &Gate {
        // SAFETY: `new` checked that the gate lies in the segment and on its alignment (mappings
        // are page-aligned); the segment stays mapped while `self` lives; both fields are atomics,
        // so the other process's stores are no data race.
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
    fn a_closed_gate_lets_nobody_in_and_says_when_it_is_empty() {
        let gate = Gate::default();
        assert!(!gate.enter(1), "a gate that was never opened");
        gate.open(7);
        assert!(gate.enter(7) && !gate.enter(8));
        gate.close();
        assert!(!gate.enter(7) && !gate.is_empty());
        gate.leave();
        assert!(gate.is_empty());
    }
}
