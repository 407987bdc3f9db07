//! Bugs that tests plant, to prove that the simulation finds them.
//!
//! Outside unit tests, `is_planted` is false at compile time.

use peerway_core::outcome::{Ended, Fence};
use peerway_core::protocol::{AppliedFrames, Effect, RequestState};
use peerway_core::wire::{HEADER_LEN, Header};

/// A promise broken on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Bug {
    /// Re-planning takes every frame of a lost lane for applied.
    ReplanLoses,
    /// Re-planning repeats frames that the peer has applied.
    ReplanRepeats,
    /// A receiver applies bytes whatever its lease says.
    LeaseIgnored,
    /// A signal is sent before the bytes of its transfer are acknowledged.
    SignalEarly,
    /// A fence is held as soon as a transfer is stopped.
    HeldAtOnce,
    /// A frame may name a few bytes behind its grant.
    BoundsIgnored,
    /// A frame needs no right to the grant that it names.
    AccessIgnored,
    /// A frame may have any number.
    SequenceIgnored,
    /// A frame that is arriving when its grant is revoked goes on.
    GateIgnored,
    /// A peer may leave any number of answers unread.
    OwedIgnored,
    /// A flood gets another entry for each turn that it fills.
    AgainTwice,
    /// A peer without a right may count.
    RightIgnored,
    /// A message is delivered twice.
    MessageTwice,
    /// The budget of a message is not given back.
    BudgetLost,
    /// A deadline is not looked at.
    DeadlineIgnored,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug in this thread, or takes it away.
#[cfg(test)]
pub(crate) fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// What follows from an event, as the planted bug has it.
#[inline(always)]
pub(crate) fn distort(effect: Effect, request: &RequestState) -> Effect {
    match request.end_reason() {
        Some(reason) if effect == Effect::Wait && is_planted(Bug::HeldAtOnce) => {
            Effect::Finish(Ended { reason, fence: Fence::Held })
        }
        None if effect == Effect::Wait && !request.has_more() && is_planted(Bug::SignalEarly) => {
            if request.is_signalled() {
                Effect::Wait
            } else {
                Effect::Signal
            }
        }
        _ => effect,
    }
}

#[inline(always)]
pub(crate) fn is_planted(bug: Bug) -> bool {
    #[cfg(test)]
    return PLANTED.get() == Some(bug);
    #[cfg(not(test))]
    {
        let _ = bug;
        false
    }
}

/// The header of a frame with the number that is due: the planted bug ignores the frame's own.
pub(crate) fn in_order(header: &[u8; HEADER_LEN], applied: &AppliedFrames) -> [u8; HEADER_LEN] {
    let mut header: Header = zerocopy::transmute!(*header);
    header.sequence = applied.next().into();
    zerocopy::transmute!(header)
}
