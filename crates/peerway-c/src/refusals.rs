//! What an endpoint has refused to peers.

use crate::arguments::{Fill, Versioned};
use crate::endpoint::peerway_endpoint;
use crate::entry::call;
use crate::handles::get;
use crate::status::peerway_status;

/// What an endpoint has refused to peers, by reason. The numbers only rise. The settings of the
/// limits are PEERWAY_MAX_HANDSHAKES, PEERWAY_MAX_SESSIONS, PEERWAY_MAX_SESSIONS_PER_ADDRESS,
/// PEERWAY_MAX_LANES, PEERWAY_MESSAGE_BYTES, PEERWAY_NOTIFY_BYTES and PEERWAY_FREE_DESCRIPTORS.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_refusal_stats {
    /// sizeof(struct peerway_refusal_stats).
    pub size: usize,
    /// Half-open connections that were dropped, because the endpoint or their address had too many
    /// handshakes in progress.
    pub handshakes: u64,
    /// Sessions, because the endpoint or their address had too many.
    pub sessions: u64,
    /// Lanes, because their session had too many.
    pub lanes: u64,
    /// Times at which the endpoint accepted no connection to keep file descriptors free.
    pub descriptors: u64,
    /// Connections of other users to the local socket.
    pub other_users: u64,
    /// Notifications, because too many bytes of messages were arriving.
    pub message_bytes: u64,
    /// Lanes that were closed, because a message on them did not arrive in time.
    pub slow_messages: u64,
    /// Notifications, because the queue or the peer's share of it was full.
    pub notifications: u64,
    /// Counts, because the counters or the peer's share of them were full.
    pub counters: u64,
    /// Counts by peers without a right to count.
    pub counts_without_right: u64,
    /// Lanes that were closed, because a record on them was not what the peer sent (PEERWAY_DATA).
    pub corrupt_records: u64,
    /// Keys to memory for one queue pair alone, because an RDMA device had no memory window left.
    /// The peer got a key that is valid for all peers, or none (PEERWAY_RDMA_WINDOWS).
    pub windows: u64,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_refusal_stats {
    const FIRST: usize = 88;
    const NAME: &'static str = "struct peerway_refusal_stats";
}

/// Fills in what an endpoint has refused to peers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_refusals(
    endpoint: *const peerway_endpoint,
    stats: *mut peerway_refusal_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(stats) }?;
        let refused = get(endpoint)?.stats().refusals;
        fill.set(peerway_refusal_stats {
            size: 0,
            handshakes: refused.handshakes,
            sessions: refused.sessions,
            lanes: refused.lanes,
            descriptors: refused.descriptors,
            other_users: refused.other_users,
            message_bytes: refused.message_bytes,
            slow_messages: refused.slow_messages,
            notifications: refused.notifications,
            counters: refused.counters,
            counts_without_right: refused.counts_without_right,
            corrupt_records: refused.corrupt_records,
            windows: refused.windows,
        });
        Ok(())
    })
}
