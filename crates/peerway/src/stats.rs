//! What an endpoint tells about itself.

use crate::memory::quarantine::QuarantineStats;

/// How an endpoint runs: see [`Endpoint::stats`](crate::Endpoint::stats).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct EndpointStats {
    /// Processors that the endpoint's threads may run on, in order. Threads that work for a device run on those
    /// among them that are near it. Empty where the kernel does not tell.
    pub cpus: Vec<u32>,
    /// Memory that was released while a peer may still reach it: of the process, not of this endpoint alone.
    pub quarantine: QuarantineStats,
}
