//! The rest of the handle to a transfer: how it ended, its failure, cancellation, wake-ups.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};

use super::{Transfer, TransferState, see_to};
use crate::clock;
use crate::failure::{Failure, Operation};
use crate::path::PathKind;
use crate::progress::engine::Unusable;
use crate::progress::shard::DriverCommand;
use crate::session::Session;
use crate::slots::{SlotRecord, TransferStats};

/// A copy that failed in the posting call. No part of it is pending.
pub(super) struct RefusedCopy {
    pub(super) session: Arc<Session>,
    pub(super) operation: Operation,
    pub(super) path: PathKind,
    pub(super) bytes: u64,
    pub(super) error: TransferError,
}

impl RefusedCopy {
    pub(super) fn ended(&self) -> Ended {
        Ended { reason: Reason::Failed(self.error), fence: Fence::Held }
    }

    fn stats(&self) -> TransferStats {
        TransferStats { bytes_total: self.bytes, ..Default::default() }
    }
}

/// The record of a transfer that has ended with a held fence.
pub(super) struct Over {
    pub(super) ended: Ended,
    pub(super) path: PathKind,
    pub(super) record: SlotRecord,
}

impl Transfer {
    /// How the transfer ended, or `None` while it runs. Makes some progress if it still runs.
    pub fn poll(&self) -> Option<Ended> {
        let ended = self.ended();
        let TransferState::Running { endpoint, session, job, .. } = &self.state else {
            return ended;
        };
        if ended.is_some() {
            return ended;
        }
        if let Err(unusable) = endpoint.check_open() {
            return Some(self.last_word(unusable));
        }
        match job {
            Some(job) => drop(job.step()),
            None => drop(endpoint.shard_of(session).poller.poll_once(clock::now())),
        }
        self.ended()
    }

    /// Whether the transfer has ended with an open fence that may still turn to held.
    ///
    /// While this is true, the endpoint keeps the transfer's memory and waits for the peer to drain
    /// or die. [`Self::ended`] reports [`Fence::Held`] after that. False with an open fence means
    /// that no proof can arrive any more: the session is over, or the endpoint is closed.
    pub fn is_fence_pending(&self) -> bool {
        match &self.state {
            TransferState::Finished { .. } | TransferState::Refused(_) => false,
            TransferState::Running { endpoint, slot, over, .. } => {
                let unfenced = endpoint.slots.is_unfenced(*slot);
                // `over` is set before the slot is released. While it is unset, the bit belongs to
                // this transfer.
                unfenced && over.get().is_none() && endpoint.check_open().is_ok()
            }
        }
    }

    /// Details of a transfer that failed or was cancelled: the peer, the path, the bytes, the
    /// fence, and the last event of its lanes. `None` while it runs, and after success.
    ///
    /// The fence and the last event are current as of this call.
    ///
    /// ```
    /// # use peerway::{Access, Batch, Endpoint, Operation};
    /// # let (a, b) = (Endpoint::new()?, Endpoint::new()?);
    /// # let peer = a.connect(&b.metadata())?;
    /// # let (ours, theirs) = (a.allocate(4096)?, b.allocate(4096)?);
    /// # let remote = peer.import(&theirs.advertise(Access::READ)?)?;
    /// theirs.revoke();
    /// let transfer = peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    /// transfer.join();
    /// let failure = transfer.failure().expect("the memory was revoked");
    /// assert_eq!((failure.operation, failure.bytes_total), (Operation::Read, 4096));
    /// eprintln!("{failure}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn failure(&self) -> Option<Failure> {
        match &self.state {
            TransferState::Finished { .. } => None,
            TransferState::Refused(copy) => {
                Some(self.describe(&copy.session, copy.operation, copy.ended(), true))
            }
            TransferState::Running { endpoint, session, operation, .. } => {
                let unusable = endpoint.check_open().err();
                // After a fork, a lock that another thread of the parent held is never released.
                let with_event = !matches!(unusable, Some(Unusable::Forked));
                let ended = match unusable {
                    Some(unusable) => self.last_word(unusable),
                    None => self.ended()?,
                };
                if ended.reason == Reason::Done {
                    return None;
                }
                Some(self.describe(session, *operation, ended, with_event))
            }
        }
    }

    #[cold]
    fn describe(
        &self,
        session: &Session,
        operation: Operation,
        ended: Ended,
        with_event: bool,
    ) -> Failure {
        let TransferStats { bytes_done, bytes_total, .. } = self.stats();
        Failure {
            peer: session.addr,
            incarnation: session.incarnation,
            path: self.path(),
            operation,
            bytes_done,
            bytes_total,
            ended,
            last_event: if with_event { session.last_event() } else { None },
        }
    }

    /// How a transfer ends on an endpoint that is closed or belongs to the parent process. No other
    /// thread reports its end there.
    pub(super) fn last_word(&self, unusable: Unusable) -> Ended {
        // After a fork, a lock that another thread of the parent held is never released.
        if let (Unusable::Closed, TransferState::Running { job: Some(job), .. }) =
            (unusable, &self.state)
        {
            job.halt();
        }
        let closed = Reason::Failed(TransferError::EndpointClosed);
        self.ended().unwrap_or(Ended { reason: closed, fence: Fence::Open })
    }

    /// Requests cancellation. The transfer ends within the fence deadline. Its fence then says
    /// whether it can still change memory.
    pub fn cancel(&self) {
        let TransferState::Running { endpoint, session, slot, job, .. } = &self.state else {
            return;
        };
        if self.ended().is_some() || endpoint.check_open().is_err() {
            return;
        }
        if let Some(job) = job {
            job.cancel();
        }
        endpoint.shard_of(session).submit(DriverCommand::Cancel(*slot));
        endpoint.shard_of(session).notify_if_blocked();
    }

    /// Registers `waker` to be woken at the end, in place of an earlier waker. Returns false when
    /// the transfer has ended already.
    ///
    /// The caller need not poll after this call: other threads make progress from then on.
    pub fn on_end(&self, waker: &Waker) -> bool {
        match &self.state {
            TransferState::Finished { .. } | TransferState::Refused(_) => false,
            TransferState::Running { endpoint, session, slot, .. } => {
                let sleeps = self.ended().is_none() && endpoint.slots.wake_later(*slot, waker);
                if sleeps {
                    endpoint.shard_of(session).poller.hand_over();
                    self.leave_to_engine();
                }
                sleeps
            }
        }
    }

    /// Passes a transfer that was left to the caller to the engine's threads, because the caller
    /// blocks instead.
    fn leave_to_engine(&self) {
        let TransferState::Running { endpoint, session, job, left_to_caller, .. } = &self.state
        else {
            return;
        };
        // The load makes every poll after the first cheap. Relaxed is enough: the flag publishes no
        // data, and the thread that clears it does the hand-over, which synchronizes by itself.
        if !left_to_caller.load(Ordering::Relaxed)
            || !left_to_caller.swap(false, Ordering::Relaxed)
            || endpoint.check_open().is_err()
        {
            return;
        }
        match job {
            Some(job) => see_to(endpoint, job),
            None => endpoint.shard_of(session).notify_if_blocked(),
        }
    }

    /// The path of the transfer.
    pub fn path(&self) -> PathKind {
        match &self.state {
            TransferState::Finished { path, .. } => *path,
            TransferState::Refused(copy) => copy.path,
            TransferState::Running { endpoint, slot, over, .. } => {
                let path = endpoint.slots.path(*slot);
                over.get().map_or(path, |over| over.path)
            }
        }
    }

    /// Bytes and times so far.
    pub fn stats(&self) -> TransferStats {
        match &self.state {
            TransferState::Finished { bytes, .. } => {
                TransferStats { bytes_done: *bytes, bytes_total: *bytes, ..Default::default() }
            }
            TransferState::Refused(copy) => copy.stats(),
            TransferState::Running { endpoint, slot, over, .. } => {
                let record = endpoint.slots.record(*slot);
                over.get().map_or(record, |over| over.record).stats()
            }
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let TransferState::Running { endpoint, session, slot, job, over, .. } = &self.state else {
            return;
        };
        if self.ended().is_none() && endpoint.check_open().is_ok() {
            // The transfer continues without a waiting caller, so another thread must advance it.
            match job {
                Some(job) => see_to(endpoint, job),
                None => endpoint.shard_of(session).notify_if_blocked(),
            }
        }
        if over.get().is_none() {
            endpoint.slots.detach(*slot);
        }
    }
}

impl Future for Transfer {
    type Output = Ended;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        if let TransferState::Running { endpoint, .. } = &self.state
            && let Err(unusable) = endpoint.check_open()
        {
            // No thread is left that would call the waker.
            return Poll::Ready(self.last_word(unusable));
        }
        if self.on_end(cx.waker()) {
            return Poll::Pending;
        }
        self.ended().map_or(Poll::Pending, Poll::Ready)
    }
}
