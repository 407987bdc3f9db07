//! Transfer outcomes, in values small enough for a slot.

use std::fmt;

/// The outcome of a transfer: its reason, and whether its memory is quiet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ended {
    /// Why it ended.
    pub reason: Reason,
    /// Whether bytes of the transfer may still change memory.
    pub fence: Fence,
}

impl Ended {
    /// Completed, with nothing in flight.
    pub const DONE: Self = Self { reason: Reason::Done, fence: Fence::Held };

    /// `Ok` if the transfer completed, otherwise the outcome as an error.
    pub fn ok(self) -> Result<(), EndedError> {
        match self.reason {
            Reason::Done => Ok(()),
            _ => Err(EndedError(self)),
        }
    }

    /// Packs the outcome into one word.
    pub fn to_bits(self) -> u64 {
        let (tag, error) = match self.reason {
            Reason::Done => (0, 0),
            Reason::Cancelled => (1, 0),
            Reason::TimedOut => (2, 0),
            Reason::Failed(error) => (3, error as u8),
        };
        u64::from(self.fence == Fence::Open) << 16 | u64::from(error) << 8 | tag
    }

    /// The inverse of [`Self::to_bits`].
    pub fn from_bits(bits: u64) -> Self {
        let reason = match bits as u8 {
            0 => Reason::Done,
            1 => Reason::Cancelled,
            2 => Reason::TimedOut,
            _ => Reason::Failed(TransferError::from_code((bits >> 8) as u8)),
        };
        Self { reason, fence: if bits >> 16 & 1 == 1 { Fence::Open } else { Fence::Held } }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Reason::Done => f.write_str("done")?,
            Reason::Cancelled => f.write_str("cancelled")?,
            Reason::TimedOut => f.write_str("the deadline passed")?,
            Reason::Failed(why) => write!(f, "{why}")?,
        }
        if self.fence == Fence::Open {
            f.write_str(" (fence open: the peer may still touch this transfer's memory)")?;
        }
        Ok(())
    }
}

/// Why a transfer ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// All bytes are at their destination.
    Done,
    /// The transfer failed.
    Failed(TransferError),
    /// The caller cancelled it.
    Cancelled,
    /// Its deadline passed.
    TimedOut,
}

/// Whether bytes of an ended transfer may still change memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fence {
    /// No byte of the transfer changes memory any more.
    Held,
    /// The engine could not guarantee that within the fence deadline. The endpoint keeps the
    /// affected memory alive until the peer drains or dies.
    Open,
}

/// The outcome of a transfer that did not complete.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct EndedError(pub Ended);

/// Why a transfer failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum TransferError {
    /// The peer closed, its process was killed, or its last lane broke.
    #[error("the peer is gone: its process ended or every lane to it broke")]
    PeerGone = 1,
    /// The peer sent nothing for longer than the detection time.
    #[error("the peer has been silent for longer than the detection time")]
    PeerSilent = 2,
    /// The owner refused access: unknown region, wrong token, wrong direction, or bound to another
    /// peer. Or it refused a count, because this endpoint has imported none of its memory.
    #[error(
        "the peer refused access: unknown region, wrong token, wrong direction, granted to another \
         peer, or a count before any import"
    )]
    RemoteAccess = 3,
    /// The owner refused access: the range is outside the advertised range.
    #[error("the range lies outside the memory that the peer advertised")]
    OutOfBounds = 4,
    /// The owner revoked the region.
    #[error("the peer revoked the region")]
    Revoked = 5,
    /// The peer's notification queue is full.
    #[error("the peer's notification queue is full; it must be drained before more are sent")]
    NotificationsFull = 6,
    /// The peer has no room for another arrival counter.
    #[error("the peer has no room for another arrival counter id")]
    CountersFull = 7,
    /// Registered memory could not be read or written because the process unmapped it.
    #[error("registered memory could not be accessed: it was unmapped while registered")]
    Fault = 8,
    /// The peer sent bytes that do not follow the protocol.
    #[error("the peer sent bytes that do not follow the protocol")]
    PeerMisbehaved = 9,
    /// The local endpoint was closed.
    #[error("the local endpoint was closed")]
    EndpointClosed = 10,
    /// A lane broke after the peer may have received the operation. A retry could deliver its
    /// notification twice.
    #[error("a lane broke and it is not known whether the notification was delivered")]
    DeliveryUnknown = 11,
    /// An RDMA device rejected a work request, or a GPU copy failed.
    #[error(
        "an RDMA device or a GPU rejected or failed the request; see the log for the device's error \
         and check that the memory was not freed"
    )]
    Device = 12,
}

impl TransferError {
    /// The error with this code. Unknown codes, such as those of a later version, become
    /// [`Self::PeerMisbehaved`].
    pub fn from_code(code: u8) -> Self {
        use TransferError::*;
        [
            PeerGone,
            PeerSilent,
            RemoteAccess,
            OutOfBounds,
            Revoked,
            NotificationsFull,
            CountersFull,
            Fault,
            PeerMisbehaved,
            EndpointClosed,
            DeliveryUnknown,
            Device,
        ]
        .into_iter()
        .find(|e| *e as u8 == code)
        .unwrap_or(PeerMisbehaved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_survives_packing() {
        let mut reasons = vec![Reason::Done, Reason::Cancelled, Reason::TimedOut];
        reasons.extend((1..=12).map(|c| Reason::Failed(TransferError::from_code(c))));
        for reason in reasons {
            for fence in [Fence::Held, Fence::Open] {
                let ended = Ended { reason, fence };
                assert_eq!(Ended::from_bits(ended.to_bits()), ended);
            }
        }
    }

    #[test]
    fn codes_are_their_own() {
        for code in 1..=12 {
            assert_eq!(TransferError::from_code(code) as u8, code);
        }
        assert_eq!(TransferError::from_code(200), TransferError::PeerMisbehaved);
    }
}
