//! Commands that were submitted together.

use std::sync::Arc;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};

use super::copiers::{Copiers, Pending};
use super::target::PeerTarget;
use crate::error::PostError;
use crate::transfer::{self, Transfer};
use crate::work::Signal;
use peerway_core::abi::FaultCode;
use peerway_core::work::Pair;

/// See the module.
pub(crate) struct ProxyRequest {
    /// Sequence number of the first command in it, among the commands for its peer.
    pub(crate) first: u64,
    /// The origin of that first command.
    pub(crate) origin: PutOrigin,
    pub(crate) bytes: u64,
    state: ProxyRequestState,
    /// Counters to raise after the bytes, one entry for each count.
    counts: Vec<u16>,
    /// The list of posted ranges, kept for reuse.
    list: Option<List>,
}

/// The ranges of a post.
pub(crate) type List = Arc<[Pair]>;

/// Identifies a command: its ring, operation and position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PutOrigin {
    pub(crate) ring: u32,
    pub(crate) op: u8,
    pub(crate) position: u64,
}

enum ProxyRequestState {
    /// A GPU copies. The gates of the peer's windows stay entered until it is done.
    Copying {
        pending: Pending,
        gates: Gates,
    },
    /// The endpoint transfers the bytes.
    Posted(Transfer),
    /// The bytes have arrived, and the counts are in progress.
    Counting(Vec<Transfer>),
    Over,
}

/// A bit set of the windows of a target whose gates are entered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gates(u64);

const _: () = assert!(super::peer_info::MAX_WINDOWS <= 64);

impl Gates {
    /// Enters the gate of a window if it is not entered yet. Returns false if the gate is closed.
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

    /// Whether it has ended, as of the last `poll`.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, ProxyRequestState::Over)
    }

    /// Checks whether it has ended, and how. It returns the outcome once.
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
                    let peer = target.session().addr;
                    tracing::error!(%error, %peer, "a GPU copy of a proxy failed");
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

    /// Raises the counters after the bytes have arrived, or has the endpoint raise them.
    fn count(&mut self, target: &PeerTarget) -> Option<Result<(), FaultCode>> {
        let mut transfers = match std::mem::replace(&mut self.state, ProxyRequestState::Over) {
            ProxyRequestState::Counting(transfers) => transfers,
            _ => Vec::new(),
        };
        // Puts of one batch mostly use one counter.
        while let Some(counter) = self.counts.last().copied() {
            let same = self.counts.iter().rev().take_while(|other| **other == counter).count();
            match raise(target, counter, same as u64, &mut transfers) {
                Ok(raised) => self.counts.truncate(self.counts.len() - raised as usize),
                Err(code) => return Some(Err(code)),
            }
            if self.counts.last() == Some(&counter) {
                // The endpoint has no room for the rest now.
                break;
            }
        }
        if transfers.is_empty() && self.counts.is_empty() {
            return Some(Ok(()));
        }
        self.state = ProxyRequestState::Counting(transfers);
        None
    }

    /// Polls the endpoint if the request waits for it.
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

    /// Takes the list of counts for reuse.
    pub(crate) fn take_counts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.counts)
    }

    /// Takes the list of posted ranges for reuse.
    pub(crate) fn take_list(&mut self) -> Option<List> {
        self.list.take()
    }

    /// Abandons the request when its owner is dropped. The copiers have finished with it by then.
    pub(crate) fn give_up(&mut self, target: &PeerTarget) {
        let state = std::mem::replace(&mut self.state, ProxyRequestState::Over);
        if let ProxyRequestState::Copying { pending, mut gates } = state {
            // The drop waits for a copy of the driver.
            drop(pending);
            gates.leave(target);
        }
    }
}

/// The result of raising a counter.
pub(crate) enum Raised {
    /// The counter was raised.
    Done,
    /// The endpoint carries the count.
    Carried(Transfer),
    /// The endpoint has no room now.
    NoRoom,
}

/// Adds one to a counter of the peer, directly if it is mapped.
#[inline]
pub(crate) fn raise_once(target: &PeerTarget, counter: u16) -> Result<Raised, FaultCode> {
    match target.raise(counter, 1) {
        Some(raised) => raised.map(|()| Raised::Done),
        None => carry(target, counter),
    }
}

/// Posts a count of one to the endpoint.
fn carry(target: &PeerTarget, counter: u16) -> Result<Raised, FaultCode> {
    let signal = Signal { notify: None, count: Some(target.first_id + u32::from(counter)) };
    match transfer::post_signal(target.endpoint(), target.session(), signal) {
        Ok(transfer) => Ok(Raised::Carried(transfer)),
        Err(PostError::Busy { .. }) => Ok(Raised::NoRoom),
        Err(PostError::PeerGone { .. }) => Err(FaultCode::PeerGone),
        Err(error) => {
            let peer = target.session().addr;
            tracing::warn!(%error, %peer, "failed to post a count to a peer's proxy");
            Err(FaultCode::Failed)
        }
    }
}

/// Adds `by` to a counter of the peer, directly if it is mapped. Otherwise it posts one transfer
/// for each count and adds them to `carried`, which holds at most [`CARRIED`]. Returns how many
/// counts found room.
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

/// Counts of one request that are in progress at a time. All users of the endpoint share its slots.
const CARRIED: usize = 64;

/// Maps the end of a transfer to the fault code that kernels see.
pub(crate) fn outcome(ended: Ended) -> Result<(), FaultCode> {
    match ended.reason {
        Reason::Done => Ok(()),
        _ if ended.fence == Fence::Open => Err(FaultCode::Unfenced),
        // A silent peer is not gone: it may only be stopped.
        Reason::TimedOut | Reason::Failed(TransferError::PeerSilent) => Err(FaultCode::TimedOut),
        Reason::Failed(TransferError::PeerGone) => Err(FaultCode::PeerGone),
        Reason::Failed(
            TransferError::Revoked | TransferError::RemoteAccess | TransferError::OutOfBounds,
        ) => Err(FaultCode::Refused),
        _ => Err(FaultCode::Failed),
    }
}
