//! What a driver holds for its peers, as the simulation checks it. A peer must not be able to make
//! any of it grow without bound.

use super::driver::Driver;
use super::transmit::Body;

/// The sizes of a driver's queues and buffers. A size of lanes is that of the largest lane.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Holdings {
    /// Sessions in the table, also those that are over and wait for a proof.
    pub(crate) sessions: usize,
    pub(crate) lanes: usize,
    /// Transfers that have not ended, or whose memory a peer may still touch.
    pub(crate) requests: usize,
    /// Entries for lanes that had more to receive than a turn allows.
    pub(crate) again: usize,
    /// Bytes of small frames that wait for a lane.
    pub(crate) waiting: usize,
    /// Reads of the peer that wait for their answers.
    pub(crate) replies: usize,
    /// Bytes of the private copy of a half-sent frame.
    pub(crate) copied: usize,
}

impl Driver {
    /// What the driver holds now.
    pub(crate) fn holdings(&self) -> Holdings {
        let sessions = self.sessions.iter().flatten();
        let lanes = || sessions.clone().flat_map(|session| session.lanes.iter().flatten());
        let copied = |body: &Body| match body {
            Body::Bytes { bytes, .. } => bytes.len(),
            _ => 0,
        };
        let frames = lanes().filter_map(|lane| lane.tx.frame.as_ref());
        Holdings {
            sessions: sessions.clone().count(),
            lanes: lanes().count(),
            requests: self.requests.slots().len(),
            again: self.again.len(),
            waiting: lanes().map(|lane| lane.tx.out.len()).max().unwrap_or(0),
            replies: lanes().map(|lane| lane.tx.replies.len()).max().unwrap_or(0),
            copied: frames.map(|frame| copied(&frame.body)).max().unwrap_or(0),
        }
    }
}
