//! Statistics of an endpoint.

use crate::limits::RefusalStats;
use crate::quarantine::QuarantineStats;
use crate::session::stats::PeerStats;

/// Statistics of an endpoint: see [`Endpoint::stats`](crate::Endpoint::stats).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct EndpointStats {
    /// The CPUs on which the endpoint's threads may run, in order. Threads that work for a device
    /// run on those that are near it. Empty if the kernel does not report them.
    pub cpus: Vec<u32>,
    /// Memory that was released while a peer could still access it. It counts the whole process,
    /// not only this endpoint.
    pub quarantine: QuarantineStats,
    /// Peers with an open session.
    pub peers: usize,
    /// What all peers together have moved, also those that are gone.
    pub traffic: PeerStats,
    /// What the endpoint has refused to peers, by reason.
    pub refusals: RefusalStats,
}
