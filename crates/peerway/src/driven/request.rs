//! Commands that are under way together.

use std::sync::Arc;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};

use super::copiers::{Copiers, Pending};
use super::target::PeerTarget;
use crate::batch::Signal;
use crate::error::PostError;
use crate::transfer::{self, Transfer};
use peerway_core::abi::FaultCode;
use peerway_core::work::Pair;

/// See the module.
pub(crate) struct ProxyRequest {
    /// Sequence number of the first command of it, at its peer.
    pub(crate) first: u64,
    /// Where that one came from.
    pub(crate) origin: PutOrigin,
    pub(crate) bytes: u64,
    state: ProxyRequestState,
    /// Counters that go up after the bytes, one for each time they are named.
    counts: Vec<u16>,
    /// The list of what was posted, to be used again.
    list: Option<List>,
}

/// Ranges of a post.
pub(crate) type List = Arc<[Pair]>;

/// Which command it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PutOrigin {
    pub(crate) ring: u32,
    pub(crate) op: u8,
    pub(crate) position: u64,
}

enum ProxyRequestState {
    /// A GPU copies; the windows of the peer whose gates are held meanwhile.
    Copying {
        pending: Pending,
        gates: Gates,
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

const _: () = assert!(super::peer_info::MAX_WINDOWS <= 64);

impl Gates {
    /// Enters the gate of a window unless that was done; false where it is closed.
    #[inline]
    pub(crate) fn enter(&mut self, target: &PeerTarget, window: usize) -> bool {
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

    pub(crate) fn leave(&mut self, target: &PeerTarget) {
        while self.0 != 0 {
            let window = self.0.trailing_zeros() as usize;
            self.0 &= self.0 - 1;
            if let Some(gate) = target.remote(window).gate() {
                gate.leave();
            }
        }
    }
}

impl ProxyRequest {
    pub(crate) fn copying(
        (first, origin, bytes): (u64, PutOrigin, u64),
        pending: Pending,
        gates: Gates,
        counts: Vec<u16>,
    ) -> Self {
        let state = ProxyRequestState::Copying { pending, gates };
        Self { first, origin, bytes, state, counts, list: None }
    }

    pub(crate) fn posted(
        (first, origin, bytes): (u64, PutOrigin, u64),
        transfer: Transfer,
        list: Option<List>,
    ) -> Self {
        Self {
            first,
            origin,
            bytes,
            state: ProxyRequestState::Posted(transfer),
            counts: Vec::new(),
            list,
        }
    }

    /// Whether it has ended, as far as it was looked at.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, ProxyRequestState::Over)
    }

    /// Looks whether it has ended now, and how; the end is told once.
    pub(crate) fn poll(
        &mut self,
        target: &PeerTarget,
        copiers: &Copiers,
    ) -> Option<Result<(), FaultCode>> {
        match &mut self.state {
            ProxyRequestState::Copying { pending, gates } => match copiers.is_done(pending) {
                Ok(false) => None,
                Ok(true) => {
                    gates.leave(target);
                    self.state = ProxyRequestState::Over;
                    self.count(target)
                }
                Err(error) => {
                    gates.leave(target);
                    tracing::error!(%error, "a copy by a GPU failed");
                    self.state = ProxyRequestState::Over;
                    Some(Err(FaultCode::Failed))
                }
            },
            ProxyRequestState::Posted(transfer) => {
                let ended = transfer.ended()?;
                self.state = ProxyRequestState::Over;
                Some(outcome(ended))
            }
            ProxyRequestState::Counting(transfers) => {
                let mut failed = None;
                transfers.retain(|transfer| match transfer.ended() {
                    None => true,
                    Some(ended) => {
                        failed = failed.or_else(|| outcome(ended).err());
                        false
                    }
                });
                if let Some(code) = failed {
                    self.state = ProxyRequestState::Over;
                    return Some(Err(code));
                }
                if !self.counts.is_empty() {
                    return self.count(target);
                }
                if !transfers.is_empty() {
                    return None;
                }
                self.state = ProxyRequestState::Over;
                Some(Ok(()))
            }
            ProxyRequestState::Over => None,
        }
    }

    /// The bytes are there: raises the counters, or has the endpoint do it.
    fn count(&mut self, target: &PeerTarget) -> Option<Result<(), FaultCode>> {
        let mut transfers = match std::mem::replace(&mut self.state, ProxyRequestState::Over) {
            ProxyRequestState::Counting(transfers) => transfers,
            _ => Vec::new(),
        };
        // Puts of one batch mostly count on one counter.
        while let Some(counter) = self.counts.last().copied() {
            let same = self.counts.iter().rev().take_while(|other| **other == counter).count();
            match raise(target, counter, same as u64, &mut transfers) {
                Ok(raised) => self.counts.truncate(self.counts.len() - raised as usize),
                Err(code) => return Some(Err(code)),
            }
            if self.counts.last() == Some(&counter) {
                // No room for the rest now.
                break;
            }
        }
        if transfers.is_empty() && self.counts.is_empty() {
            return Some(Ok(()));
        }
        self.state = ProxyRequestState::Counting(transfers);
        None
    }

    /// Moves the endpoint along where that is what it waits for.
    pub(crate) fn help(&self) {
        match &self.state {
            ProxyRequestState::Posted(transfer) => drop(transfer.poll()),
            ProxyRequestState::Counting(transfers) => {
                if let Some(transfer) = transfers.first() {
                    transfer.poll();
                }
            }
            ProxyRequestState::Copying { .. } | ProxyRequestState::Over => {}
        }
    }

    /// The list of counts, to be used again.
    pub(crate) fn take_counts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.counts)
    }

    /// The list of what was posted, to be used again.
    pub(crate) fn take_list(&mut self) -> Option<List> {
        self.list.take()
    }

    /// Nobody will look any more, and copiers are through with it.
    pub(crate) fn give_up(&mut self, target: &PeerTarget) {
        let state = std::mem::replace(&mut self.state, ProxyRequestState::Over);
        if let ProxyRequestState::Copying { pending, mut gates } = state {
            // The driver's copy is waited for.
            drop(pending);
            gates.leave(target);
        }
    }
}

/// What became of a count.
pub(crate) enum Raised {
    /// The counter has gone up.
    Done,
    /// The endpoint carries it there.
    Carried(Transfer),
    /// The endpoint has no room now.
    NoRoom,
}

/// Adds one to a counter of the peer's, at once where it is mapped.
#[inline]
pub(crate) fn raise_once(target: &PeerTarget, counter: u16) -> Result<Raised, FaultCode> {
    match target.raise(counter, 1) {
        Some(raised) => raised.map(|()| Raised::Done),
        None => carry(target, counter),
    }
}

/// Has the endpoint add one to a counter.
fn carry(target: &PeerTarget, counter: u16) -> Result<Raised, FaultCode> {
    let signal = Signal { notify: None, count: Some(target.first_id + u32::from(counter)) };
    match transfer::post_signal(target.endpoint(), target.session(), signal) {
        Ok(transfer) => Ok(Raised::Carried(transfer)),
        Err(PostError::Busy { .. }) => Ok(Raised::NoRoom),
        Err(PostError::PeerGone) => Err(FaultCode::PeerGone),
        Err(error) => {
            tracing::warn!(%error, "a count was not sent");
            Err(FaultCode::Failed)
        }
    }
}

/// Adds to a counter of the peer's, at once where it is mapped; else what carries it there, one by one, is put to the others, which are no
/// more than [`CARRIED`]. How many of them found room.
pub(crate) fn raise(
    target: &PeerTarget,
    counter: u16,
    by: u64,
    carried: &mut Vec<Transfer>,
) -> Result<u64, FaultCode> {
    if let Some(raised) = target.raise(counter, by) {
        return raised.map(|()| by);
    }
    for done in 0..by {
        if carried.len() >= CARRIED {
            return Ok(done);
        }
        match carry(target, counter)? {
            Raised::Carried(transfer) => carried.push(transfer),
            Raised::Done => {}
            Raised::NoRoom => return Ok(done),
        }
    }
    Ok(by)
}

/// Counts of one request that are on their way at a time: the endpoint's slots are everybody's.
const CARRIED: usize = 64;

/// How a transfer ended, as a kernel is told.
pub(crate) fn outcome(ended: Ended) -> Result<(), FaultCode> {
    match ended.reason {
        Reason::Done => Ok(()),
        _ if ended.fence == Fence::Open => Err(FaultCode::Unfenced),
        // Silent is not gone: it may only have stopped.
        Reason::TimedOut | Reason::Failed(TransferError::PeerSilent) => Err(FaultCode::TimedOut),
        Reason::Failed(TransferError::PeerGone) => Err(FaultCode::PeerGone),
        Reason::Failed(
            TransferError::Revoked | TransferError::RemoteAccess | TransferError::OutOfBounds,
        ) => Err(FaultCode::Refused),
        _ => Err(FaultCode::Failed),
    }
}
