//! What two endpoints have moved between them.

use std::ops::AddAssign;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_core::protocol::OneSided;

/// The counters of a session, updated in the hot path.
#[derive(Debug, Default)]
pub(crate) struct PeerCounters {
    pub(crate) transfers: AtomicU64,
    /// Bytes that this process, a GPU or a device moved without the peer's processor. Heartbeats
    /// and signals tell the peer.
    pub(crate) one_sided_written: AtomicU64,
    pub(crate) one_sided_read: AtomicU64,
    /// Bytes on lanes, which both sides count by themselves.
    pub(crate) bytes_written: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_served: AtomicU64,
    pub(crate) bytes_landed: AtomicU64,
    /// What the peer told of its own one-sided bytes.
    told_read: AtomicU64,
    told_written: AtomicU64,
    pub(crate) lanes_lost: AtomicU64,
    pub(crate) lanes_reopened: AtomicU64,
    pub(crate) corrupt_records: AtomicU64,
    /// What sub-sessions that are over have moved.
    past: Mutex<PeerStats>,
}

impl PeerCounters {
    /// What to tell the peer.
    pub(crate) fn one_sided(&self) -> OneSided {
        let (written, read) = (&self.one_sided_written, &self.one_sided_read);
        OneSided { written: written.load(Ordering::Relaxed), read: read.load(Ordering::Relaxed) }
    }

    /// The peer told its totals. Those of a frame that was sent earlier may arrive later.
    pub(crate) fn told(&self, totals: OneSided) {
        self.told_written.fetch_max(totals.written, Ordering::Relaxed);
        self.told_read.fetch_max(totals.read, Ordering::Relaxed);
    }

    /// The counters as a program sees them.
    pub(crate) fn sum(&self) -> PeerStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let both = |lanes: &AtomicU64, other: &AtomicU64| load(lanes).saturating_add(load(other));
        let mut sum = *self.past.lock().unwrap();
        sum += PeerStats {
            transfers: load(&self.transfers),
            bytes_written: both(&self.bytes_written, &self.one_sided_written),
            bytes_read: both(&self.bytes_read, &self.one_sided_read),
            bytes_served: both(&self.bytes_served, &self.told_read),
            bytes_landed: both(&self.bytes_landed, &self.told_written),
            lanes_lost: load(&self.lanes_lost),
            lanes_reopened: load(&self.lanes_reopened),
            corrupt_records: load(&self.corrupt_records),
        };
        sum
    }

    /// Adds what a sub-session has moved, which is over.
    pub(crate) fn add_past(&self, past: PeerStats) {
        *self.past.lock().unwrap() += past;
    }
}

/// Statistics of one peer, or of all peers of an endpoint.
///
/// Bytes count when they have been moved, on every path. The processor of this side takes no part
/// when the peer uses a mapping, CMA, a GPU or a device. The peer then tells how many bytes it
/// moved: with each notification and count, and otherwise within an eighth of the detection time.
/// A peer that dies has perhaps not told the last of them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes that this endpoint wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that this endpoint read from the peer.
    pub bytes_read: u64,
    /// Bytes that the peer read from this endpoint.
    pub bytes_served: u64,
    /// Bytes that the peer wrote to this endpoint.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
    /// TCP lanes that took the place of broken ones.
    pub lanes_reopened: u64,
    /// Lanes that were closed, because a record on them was not what the peer sent
    /// (`PEERWAY_DATA`). The last lane of a session counts here and not under `lanes_lost`.
    pub corrupt_records: u64,
}

impl AddAssign for PeerStats {
    fn add_assign(&mut self, other: Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.transfers, other.transfers);
        add(&mut self.bytes_written, other.bytes_written);
        add(&mut self.bytes_read, other.bytes_read);
        add(&mut self.bytes_served, other.bytes_served);
        add(&mut self.bytes_landed, other.bytes_landed);
        add(&mut self.lanes_lost, other.lanes_lost);
        add(&mut self.lanes_reopened, other.lanes_reopened);
        add(&mut self.corrupt_records, other.corrupt_records);
    }
}
