//! What is known of a transfer that did not end as done.
//!
//! Nothing is collected while transfers run. `Transfer::failure` builds one on request,
//! from the slot of the transfer and from the session, which keeps its last lane event.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::outcome::{Ended, Fence, Reason};

use crate::path::PathKind;

/// Describes a transfer that did not end as done: see [`crate::Transfer::failure`].
///
/// Its [`Display`](fmt::Display) is the whole story in one or two sentences.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub struct Failure {
    /// The address that the session with the peer was opened with.
    pub peer: SocketAddr,
    /// The incarnation of the peer.
    pub incarnation: Incarnation,
    /// The path that the transfer took.
    pub path: PathKind,
    /// What the transfer did.
    pub operation: Operation,
    /// Bytes known to have arrived.
    pub bytes_done: u64,
    /// Bytes asked for. Zero for a notification or a count alone.
    pub bytes_total: u64,
    /// The reason and the fence.
    pub ended: Ended,
    /// The last event of the peer's lanes, if there was one. It need not be the cause: compare its
    /// age.
    pub last_event: Option<LaneEvent>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, incarnation, path, operation, .. } = self;
        let what = match operation {
            Operation::Read => "read from",
            Operation::Write => "write to",
            Operation::Notify => "notification to",
            Operation::Count => "count to",
        };
        write!(f, "{what} {peer} (incarnation {incarnation}) by {path} ")?;
        f.write_str(match self.ended.reason {
            Reason::Done => "is done",
            Reason::Failed(_) | Reason::TimedOut => "failed",
            Reason::Cancelled => "was cancelled",
        })?;
        if matches!(operation, Operation::Read | Operation::Write) {
            write!(f, " after {} of {} bytes", self.bytes_done, self.bytes_total)?;
        }
        match self.ended.reason {
            Reason::Failed(why) => write!(f, ": {why}")?,
            Reason::TimedOut => f.write_str(": the deadline passed")?,
            Reason::Done | Reason::Cancelled => {}
        }
        f.write_str(match self.ended.fence {
            Fence::Held => "; the fence is held",
            Fence::Open => "; the fence is open: the peer may still touch the transfer's memory",
        })?;
        match &self.last_event {
            Some(event) => write!(f, ". Last lane event: {event}"),
            None => Ok(()),
        }
    }
}

/// What a transfer does.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Operation {
    /// Reads memory of the peer.
    Read,
    /// Writes memory of the peer. A notification or a count may follow the bytes.
    Write,
    /// Sends a notification alone.
    Notify,
    /// Adds one to a counter of the peer, and does nothing else.
    Count,
}

impl Operation {
    /// The name: `read`, `write`, `notify` or `count`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Notify => "notify",
            Self::Count => "count",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The end of a lane or of a session.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct LaneEvent {
    /// What happened, with the operating system's reason where there is one, such as "lane 2
    /// failed: Connection reset by peer (os error 104)".
    pub what: String,
    /// The time from the event to the call that asked for it.
    pub age: Duration,
}

impl fmt::Display for LaneEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:.1} s ago)", self.what, self.age.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use peerway_core::outcome::TransferError;

    use super::*;

    fn failure() -> Failure {
        Failure {
            peer: "10.0.0.2:4711".parse().unwrap(),
            incarnation: Incarnation([0x3f; 16]),
            path: PathKind::Tcp,
            operation: Operation::Write,
            bytes_done: 524_288,
            bytes_total: 1_048_576,
            ended: Ended { reason: Reason::Failed(TransferError::PeerSilent), fence: Fence::Open },
            last_event: Some(LaneEvent {
                what: "lane 2 failed: Connection reset by peer (os error 104)".into(),
                age: Duration::from_millis(1234),
            }),
        }
    }

    #[test]
    fn the_sentence_names_everything() {
        assert_eq!(
            failure().to_string(),
            "write to 10.0.0.2:4711 (incarnation 3f3f3f3f3f3f3f3f) by tcp failed after 524288 of \
             1048576 bytes: the peer has been silent for longer than the detection time; the fence \
             is open: the peer may still touch the transfer's memory. Last lane event: lane 2 \
             failed: Connection reset by peer (os error 104) (1.2 s ago)"
        );
    }

    #[test]
    fn a_count_without_bytes_says_nothing_of_bytes() {
        let ended = Ended { reason: Reason::TimedOut, fence: Fence::Held };
        let (operation, last_event) = (Operation::Count, None);
        assert_eq!(
            Failure { operation, ended, last_event, ..failure() }.to_string(),
            "count to 10.0.0.2:4711 (incarnation 3f3f3f3f3f3f3f3f) by tcp failed: the deadline \
             passed; the fence is held"
        );
    }
}
