//! A peer: one remote endpoint incarnation. `transfer` and `prepared` have what a program posts to
//! it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use peerway_core::descriptor::DESCRIPTOR_LEN;
use peerway_core::ids::Incarnation;
use peerway_core::region::Access;

use crate::connect::import;
use crate::error::{ImportError, RegisterError};
use crate::inbox::Notification;
use crate::path::Path;
use crate::progress::engine::Engine;
use crate::region::Region;
use crate::session::Session;
use crate::session::remote::RemoteRegion;
use crate::session::stats::PeerStats;

/// A connected peer. Cloning is cheap. A restarted peer is another peer.
#[derive(Clone)]
pub struct Peer {
    endpoint: Arc<Engine>,
    session: Arc<Session>,
}

impl Peer {
    pub(crate) fn new(endpoint: Arc<Engine>, session: Arc<Session>) -> Self {
        Self { endpoint, session }
    }

    pub(crate) fn endpoint(&self) -> &Arc<Engine> {
        &self.endpoint
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Turns a descriptor that the peer advertised into memory that can be read and written.
    ///
    /// The first import of an advertisement asks the peer once. Later imports cost nothing.
    pub fn import(&self, descriptor: &[u8]) -> Result<RemoteRegion, ImportError> {
        import::import(&self.endpoint, &self.session, descriptor)
    }

    /// Waits for a notification from this peer and takes the oldest.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.endpoint.wait_notification(Some(&self.session.incarnation), timeout)
    }

    /// The path to this peer, and why it was chosen.
    pub fn path(&self) -> &Path {
        &self.session.path
    }

    /// The identity of this incarnation of the peer.
    pub fn incarnation(&self) -> Incarnation {
        self.session.incarnation
    }

    /// The address that the session was opened with.
    pub fn address(&self) -> SocketAddr {
        self.session.addr
    }

    /// Whether this endpoint opened the session.
    pub fn is_initiator(&self) -> bool {
        self.session.initiator
    }

    /// Whether transfers can be posted.
    pub fn is_alive(&self) -> bool {
        self.session.is_alive()
    }

    /// Closes the session.
    pub fn remove(&self) {
        self.session.remove();
    }

    /// Statistics of this peer, including the sub-sessions of proxy threads.
    pub fn stats(&self) -> PeerStats {
        let mut sum = PeerStats::default();
        let open = self.endpoint.check_open().is_ok();
        let sub_sessions =
            if open { self.endpoint.peers.sub_sessions_of(&self.session) } else { Vec::new() };
        for session in sub_sessions.iter().chain([&self.session]) {
            sum += session.stats.sum();
        }
        sum
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({}, {}, {})", self.incarnation(), self.address(), self.path().kind)
    }
}

impl PartialEq for Peer {
    /// Whether both handles name the same session.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }
}

impl Eq for Peer {}

impl Hash for Peer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.session).hash(state);
    }
}

/// Advertisements that name a peer.
impl Region {
    /// Advertises the whole region to one peer. Other peers cannot use the descriptor.
    pub fn advertise_to(
        &self,
        peer: &Peer,
        access: Access,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_range(0..self.len(), access, Some(peer))
    }

    /// Advertises a part of the region, to one peer or to every holder of the descriptor.
    ///
    /// The same part, rights and peer give the same descriptor again.
    pub fn advertise_range(
        &self,
        range: Range<u64>,
        access: Access,
        to: Option<&Peer>,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_bound(range, access, to.map(Peer::incarnation))
    }
}
