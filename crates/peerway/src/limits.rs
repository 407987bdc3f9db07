//! Limits against strangers: refusals by reason, and the budgets of half-received messages.
//!
//! A refusal is an answer to a peer, not an event for the user. So the endpoint counts every
//! refusal and logs at most one a second, whatever peers do.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock;

/// One session may have one in this many of the bytes of half-received messages.
const SESSIONS_SHARE: u64 = 16;
/// A message must arrive within this many of the endpoint's detection times. A peer that sends
/// single bytes is never silent, but must not hold memory for ever. By default it is 32 s, which is
/// enough for the longest message at 33 KB/s.
const MESSAGE_DETECTS: u32 = 16;
/// The shortest time between two refusals in the log.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The time within which a message must arrive at an endpoint with this detection time.
pub(crate) fn message_time(detect: Duration) -> Duration {
    detect.saturating_mul(MESSAGE_DETECTS)
}

/// What an endpoint has refused to peers, by reason: see
/// [`EndpointStats`](crate::EndpointStats). The numbers only rise.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct RefusalStats {
    /// Half-open connections that were dropped, because the endpoint or their address had more
    /// handshakes in progress than `PEERWAY_MAX_HANDSHAKES` allows.
    pub handshakes: u64,
    /// Sessions, because the endpoint or their address had as many as `PEERWAY_MAX_SESSIONS` and
    /// `PEERWAY_MAX_SESSIONS_PER_ADDRESS` allow.
    pub sessions: u64,
    /// Lanes, because their session had as many as `PEERWAY_MAX_LANES` allows.
    pub lanes: u64,
    /// Times at which the endpoint accepted no connection to keep `PEERWAY_FREE_DESCRIPTORS` file
    /// descriptors free, or because none was left.
    pub descriptors: u64,
    /// Connections of other users to the local socket.
    pub other_users: u64,
    /// Notifications, because the messages that were arriving took `PEERWAY_MESSAGE_BYTES`, or
    /// their session its share.
    pub message_bytes: u64,
    /// Lanes that were closed, because a message on them did not arrive in time.
    pub slow_messages: u64,
    /// Notifications, because the queue or the peer's share of it was full.
    pub notifications: u64,
    /// Counts, because the counters or the peer's share of them were full.
    pub counters: u64,
    /// Counts by peers without a right to count.
    pub counts_without_right: u64,
    /// Lanes that were closed, because a record on them was not what the peer sent
    /// (`PEERWAY_DATA`). Their transfers go on over other lanes.
    pub corrupt_records: u64,
    /// Keys to memory for one queue pair alone, because an RDMA device had no memory window left.
    /// The peer got a key that is valid for all peers, or none (`PEERWAY_RDMA_WINDOWS`).
    pub windows: u64,
}

/// Why an endpoint refuses something to a peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RefusalReason {
    Handshakes,
    Sessions,
    Lanes,
    Descriptors,
    OtherUser,
    MessageBytes,
    SlowMessage,
    Notifications,
    Counters,
    CountWithoutRight,
    CorruptRecord,
    NoWindow,
}

impl RefusalReason {
    const COUNT: usize = Self::NoWindow as usize + 1;

    /// The sentence for the log.
    fn sentence(self) -> &'static str {
        match self {
            Self::Handshakes => {
                "dropped a half-open connection: too many handshakes are in progress \
                 (PEERWAY_MAX_HANDSHAKES)"
            }
            Self::Sessions => {
                "refused a session: the endpoint or the address has too many \
                 (PEERWAY_MAX_SESSIONS, PEERWAY_MAX_SESSIONS_PER_ADDRESS)"
            }
            Self::Lanes => "refused a lane: the session has too many (PEERWAY_MAX_LANES)",
            Self::Descriptors => {
                "accepted no connection, to keep file descriptors free (PEERWAY_FREE_DESCRIPTORS, \
                 `ulimit -n`)"
            }
            Self::OtherUser => "refused a local connection of another user",
            Self::MessageBytes => {
                "refused a notification: too many bytes of unfinished messages \
                 (PEERWAY_MESSAGE_BYTES)"
            }
            Self::SlowMessage => "closed a lane: a message did not arrive in time",
            Self::Notifications => {
                "refused a notification: the queue or the peer's share of it is full \
                 (PEERWAY_NOTIFY_BYTES)"
            }
            Self::Counters => "refused a count: the peer or all peers use too many counter ids",
            Self::CountWithoutRight => {
                "refused a count: the peer has imported no memory of this endpoint"
            }
            Self::CorruptRecord => {
                "closed a lane: a record on it is not what the peer sent (PEERWAY_DATA); check the \
                 network and the memory of both hosts"
            }
            Self::NoWindow => {
                "no memory window for a key to advertised memory: the key is valid for all peers, \
                 or frames carry the bytes (PEERWAY_RDMA_WINDOWS)"
            }
        }
    }
}

/// Counts refusals and logs some of them.
pub(crate) struct Refusals {
    counts: [AtomicU64; RefusalReason::COUNT],
    /// The time before which no refusal is logged.
    quiet_until: AtomicU64,
    /// Refusals since the last one in the log.
    unlogged: AtomicU64,
}

impl Default for Refusals {
    fn default() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; RefusalReason::COUNT],
            quiet_until: AtomicU64::new(0),
            unlogged: AtomicU64::new(0),
        }
    }
}

impl Refusals {
    /// Counts a refusal that the caller logs.
    pub(crate) fn count(&self, reason: RefusalReason) {
        self.counts[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a refusal to `peer`, and logs it unless another one was logged just before.
    #[cold]
    pub(crate) fn note(&self, reason: RefusalReason, peer: &dyn fmt::Display) {
        self.count(reason);
        if self.is_log_due(clock::now()) {
            let others = self.unlogged.swap(0, Ordering::Relaxed);
            tracing::warn!(%peer, others, "{}; `others` counts refusals since the last such line",
                reason.sentence());
        } else {
            self.unlogged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a refusal may be logged now. Of several threads that ask at once, one gets true.
    fn is_log_due(&self, now: u64) -> bool {
        let quiet_until = self.quiet_until.load(Ordering::Relaxed);
        let next = clock::after(now, LOG_EVERY);
        now >= quiet_until
            && self
                .quiet_until
                .compare_exchange(quiet_until, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    pub(crate) fn stats(&self) -> RefusalStats {
        let count = |reason: RefusalReason| self.counts[reason as usize].load(Ordering::Relaxed);
        RefusalStats {
            handshakes: count(RefusalReason::Handshakes),
            sessions: count(RefusalReason::Sessions),
            lanes: count(RefusalReason::Lanes),
            descriptors: count(RefusalReason::Descriptors),
            other_users: count(RefusalReason::OtherUser),
            message_bytes: count(RefusalReason::MessageBytes),
            slow_messages: count(RefusalReason::SlowMessage),
            notifications: count(RefusalReason::Notifications),
            counters: count(RefusalReason::Counters),
            counts_without_right: count(RefusalReason::CountWithoutRight),
            corrupt_records: count(RefusalReason::CorruptRecord),
            windows: count(RefusalReason::NoWindow),
        }
    }
}

/// Bytes that may be in use at a time.
#[derive(Debug)]
pub(crate) struct Budget {
    left: AtomicU64,
}

impl Budget {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { left: AtomicU64::new(bytes) })
    }

    /// Takes bytes, or returns `None` if fewer are left.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let take = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(Charge { budget: self.clone(), bytes })
    }
}

/// The budgets of half-received messages of an endpoint.
#[derive(Debug)]
pub(crate) struct MessageBudgets {
    all: Arc<Budget>,
    strangers: Arc<Budget>,
    of_session: u64,
}

impl MessageBudgets {
    /// All peers without a right (see `Peers::has_right`) have half of the budget, so that they
    /// cannot keep known peers from sending.
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            all: Budget::new(bytes),
            strangers: Budget::new(bytes / 2),
            of_session: bytes / SESSIONS_SHARE,
        }
    }

    /// The budget of a new session.
    pub(crate) fn of_session(&self) -> Arc<Budget> {
        Budget::new(self.of_session)
    }

    /// Takes bytes for a message of a session, or returns `None` if a budget has fewer left.
    pub(crate) fn charge(
        &self,
        session: &Arc<Budget>,
        is_stranger: bool,
        bytes: u64,
    ) -> Option<MessageCharge> {
        let session = session.charge(bytes)?;
        let stranger = if is_stranger { Some(self.strangers.charge(bytes)?) } else { None };
        let all = self.all.charge(bytes)?;
        Some(MessageCharge { _session: session, _stranger: stranger, _all: all })
    }
}

/// The bytes of one message. Dropping it gives them back to all budgets.
#[derive(Debug)]
pub(crate) struct MessageCharge {
    _session: Charge,
    _stranger: Option<Charge>,
    _all: Charge,
}

/// Bytes of a budget. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_exceeded_and_comes_back() {
        let budget = Budget::new(100);
        let first = budget.charge(60).unwrap();
        assert!(budget.charge(41).is_none());
        let second = budget.charge(40).unwrap();
        assert!(budget.charge(1).is_none());
        drop(first);
        assert!(budget.charge(60).is_some());
        drop(second);
        assert!(budget.charge(100).is_some());
    }

    #[test]
    fn a_refused_message_takes_nothing_from_any_budget() {
        let budgets = MessageBudgets::new(32);
        let (one, other) = (budgets.of_session(), budgets.of_session());
        assert!(budgets.charge(&one, true, 3).is_none(), "a session has a sixteenth");
        let others: Vec<_> = (0..8).map(|_| budgets.of_session()).collect();
        let held: Vec<_> =
            others.iter().map(|session| budgets.charge(session, true, 2).unwrap()).collect();
        assert!(budgets.charge(&one, true, 1).is_none(), "strangers have half");
        assert!(budgets.charge(&other, false, 2).is_some(), "known peers have the rest");
        drop(held);
        let left = |budget: &Budget| budget.left.load(Ordering::Relaxed);
        assert_eq!([&budgets.all, &budgets.strangers, &one].map(|b| left(b)), [32, 16, 2]);
    }

    #[test]
    fn refusals_are_counted_by_reason_and_logged_once_a_second() {
        let refusals = Refusals::default();
        for _ in 0..3 {
            refusals.note(RefusalReason::Lanes, &"peer");
        }
        refusals.note(RefusalReason::CountWithoutRight, &"peer");
        let stats = refusals.stats();
        let expected = RefusalStats { lanes: 3, counts_without_right: 1, ..Default::default() };
        assert_eq!(stats, expected);
        let now = clock::now();
        let refusals = Refusals::default();
        assert!(refusals.is_log_due(now));
        assert!(!refusals.is_log_due(now + 999_999_999));
        assert!(refusals.is_log_due(now + 1_000_000_000));
    }
}
