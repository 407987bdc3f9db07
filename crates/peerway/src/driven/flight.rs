//! Commands that are under way together.

use std::time::Duration;

use peerway_core::outcome::{Ended, Reason, TransferError};

use super::target::Target;
use crate::batch::Tail;
use crate::clock;
use crate::gpu::copy::Done;
use crate::transfer::{self, Transfer};
use peerway_core::abi::FaultCode;

/// A kernel's flag that has not come by then is asked about.
const FLAG_PATIENCE: Duration = Duration::from_micros(500);

/// See the module.
pub(crate) struct Flight {
    /// Sequence number of the first command of it, at its peer.
    pub(crate) first: u64,
    /// Where that one came from.
    pub(crate) origin: Origin,
    pub(crate) bytes: u64,
    state: State,
    /// Counters that go up after the bytes, one for each time they are named.
    counts: Vec<u16>,
}

/// Which command it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) ring: u32,
    pub(crate) op: u8,
    pub(crate) position: u64,
}

enum State {
    /// A GPU copies; the windows of the peer whose gates are held meanwhile.
    Copying {
        done: Done,
        gates: Gates,
        since: u64,
    },
    /// The endpoint carries it.
    Posted(Transfer),
    /// The bytes are there, the counts are on their way.
    Counting(Vec<Transfer>),
    Over,
}

/// Windows of a target whose gates were entered, by their bits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gates(u64);

const _: () = assert!(super::card::MAX_WINDOWS <= 64);

impl Gates {
    /// Enters the gate of a window unless that was done; false where it is closed.
    #[inline]
    pub(crate) fn enter(&mut self, target: &Target, window: usize) -> bool {
        let bit = 1u64 << window;
        if self.0 & bit != 0 {
            return true;
        }
        let admitted = target.remote(window).gate().is_some_and(|gate| gate.enter());
        if admitted {
            self.0 |= bit;
        }
        admitted
    }

    pub(crate) fn leave(&mut self, target: &Target) {
        while self.0 != 0 {
            let window = self.0.trailing_zeros() as usize;
            self.0 &= self.0 - 1;
            if let Some(gate) = target.remote(window).gate() {
                gate.leave();
            }
        }
    }
}

impl Flight {
    pub(crate) fn copying(
        (first, origin, bytes): (u64, Origin, u64),
        done: Done,
        gates: Gates,
        counts: Vec<u16>,
    ) -> Self {
        let state = State::Copying { done, gates, since: clock::now() };
        Self { first, origin, bytes, state, counts }
    }

    pub(crate) fn posted((first, origin, bytes): (u64, Origin, u64), transfer: Transfer) -> Self {
        Self { first, origin, bytes, state: State::Posted(transfer), counts: Vec::new() }
    }

    /// Whether it has ended, as far as it was looked at.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Looks whether it has ended now, and how; the end is told once.
    pub(crate) fn poll(&mut self, target: &Target) -> Option<Result<(), FaultCode>> {
        match &mut self.state {
            State::Copying { done, gates, since } => {
                let waited = Duration::from_nanos(clock::now().saturating_sub(*since));
                let closer = if waited > FLAG_PATIENCE { done.look_closer() } else { Ok(()) };
                match closer.and_then(|()| done.is_done()) {
                    Ok(false) => None,
                    Ok(true) => {
                        gates.leave(target);
                        self.state = State::Over;
                        self.count(target)
                    }
                    Err(error) => {
                        gates.leave(target);
                        tracing::error!(%error, "a copy by a GPU failed");
                        self.state = State::Over;
                        Some(Err(FaultCode::Failed))
                    }
                }
            }
            State::Posted(transfer) => {
                let ended = transfer.ended()?;
                self.state = State::Over;
                Some(outcome(ended))
            }
            State::Counting(transfers) => {
                let mut failed = None;
                transfers.retain(|transfer| match transfer.ended() {
                    None => true,
                    Some(ended) => {
                        failed = failed.or_else(|| outcome(ended).err());
                        false
                    }
                });
                if let Some(code) = failed {
                    self.state = State::Over;
                    return Some(Err(code));
                }
                if !transfers.is_empty() {
                    return None;
                }
                self.state = State::Over;
                Some(Ok(()))
            }
            State::Over => None,
        }
    }

    /// The bytes are there: raises the counters, or has the endpoint do it.
    fn count(&mut self, target: &Target) -> Option<Result<(), FaultCode>> {
        let mut transfers = Vec::new();
        for counter in &self.counts {
            match raise(target, *counter) {
                Ok(None) => {}
                Ok(Some(transfer)) => transfers.push(transfer),
                Err(code) => return Some(Err(code)),
            }
        }
        if transfers.is_empty() {
            return Some(Ok(()));
        }
        self.state = State::Counting(transfers);
        None
    }

    /// Moves the endpoint along where that is what it waits for.
    pub(crate) fn help(&self) {
        match &self.state {
            State::Posted(transfer) => drop(transfer.poll()),
            State::Counting(transfers) => {
                if let Some(transfer) = transfers.first() {
                    transfer.poll();
                }
            }
            State::Copying { .. } | State::Over => {}
        }
    }

    /// The list of counts, to be used again.
    pub(crate) fn take_counts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.counts)
    }

    /// Nobody will look any more: what is under way ends first.
    pub(crate) fn give_up(&mut self, target: &Target) {
        if let State::Copying { done, gates, .. } = &mut self.state {
            let _ = done.wait();
            gates.leave(target);
        }
        self.state = State::Over;
    }
}

/// Adds one to a counter of the peer's, at once where it is mapped; else what carries it there.
pub(crate) fn raise(target: &Target, counter: u16) -> Result<Option<Transfer>, FaultCode> {
    if let Some(raised) = target.raise(counter) {
        return raised.map(|()| None);
    }
    let tail = Tail { notify: None, count: Some(target.first_id + u32::from(counter)) };
    let posted = transfer::post_tail(target.endpoint(), target.session(), tail);
    posted.map(Some).map_err(|_| FaultCode::PeerGone)
}

/// How a transfer ended, as a kernel is told.
pub(crate) fn outcome(ended: Ended) -> Result<(), FaultCode> {
    match ended.reason {
        Reason::Done => Ok(()),
        Reason::TimedOut => Err(FaultCode::TimedOut),
        Reason::Failed(TransferError::PeerGone | TransferError::PeerSilent) => {
            Err(FaultCode::PeerGone)
        }
        Reason::Failed(
            TransferError::Revoked | TransferError::RemoteAccess | TransferError::OutOfBounds,
        ) => Err(FaultCode::Refused),
        _ => Err(FaultCode::Failed),
    }
}
