//! How the opener of a session opens its lanes: at first, and in place of lost ones.
//!
//! A lane begins with a message that proves that it belongs to its session. While the handshake
//! lasts, the proof comes from its TLS connection; later from a secret that both sides kept of it.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use peerway_core::config::DataProtection;
use peerway_core::metadata::Metadata;
use peerway_core::wire::{Control, FrameError, Refusal};

use super::hello::{HelloError, receive, send};
use super::opener::TimeLimit;
use super::secure::{Purpose, SecureStream};
use crate::address::Rail;
use crate::clock;
use crate::identity::Side;
use crate::identity::lanes::{LaneAttempt, LaneKeys};
use crate::os::net;
use crate::progress::engine::Engine;
use crate::progress::shard::{DriverCommand, Shard};
use crate::session::Session;
use crate::session::lanes::{LaneOpener, secrets};
use crate::threads::{self, Cpus};
use crate::transport::Wire;
use crate::transport::tcp;

/// How long an attempt to replace a lane may take. A longer one would tell less than the next.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most threads of this process that replace lanes.
const MOST_REPLACING: usize = 256;
/// The number of these threads.
static REPLACING: AtomicUsize = AtomicUsize::new(0);

/// Where a lane goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    /// The address of the rail. `None` leaves the choice to the kernel.
    pub(super) from: Option<IpAddr>,
    pub(super) to: SocketAddr,
}

impl Route {
    /// Connects, asks for a lane and receives the answer, before `deadline`.
    fn ask(self, request: &Control, deadline: u64) -> Result<(TcpStream, Control), HelloError> {
        let timeout = clock::until(deadline, clock::now());
        let mut stream = net::connect(self.to, self.from, timeout).map_err(HelloError::Io)?;
        send(&mut stream, request, deadline).map_err(HelloError::Io)?;
        let answer = receive(&mut stream, deadline)?;
        Ok((stream, answer))
    }
}

/// The routes of bulk lanes. A lane goes to the peer's address on the network of its rail, because
/// the source address alone does not decide which link packets take.
pub(super) fn rails(endpoint: &Engine, to: SocketAddr, metadata: &[u8]) -> Vec<Route> {
    if to.ip().is_loopback() {
        return Vec::new();
    }
    let theirs = Metadata::from_bytes(metadata).map(|m| m.addresses).unwrap_or_default();
    let there = |rail: &Rail| {
        let near = |addr: &SocketAddr| rail.reaches(addr.ip());
        if near(&to) { to } else { theirs.iter().copied().find(near).unwrap_or(to) }
    };
    let same_family = endpoint.rails.iter().filter(|rail| rail.addr.is_ipv4() == to.is_ipv4());
    same_family.map(|rail| Route { from: Some(rail.addr), to: there(rail) }).collect()
}

/// Opens a lane on the rail whose turn it is. It removes a rail that fails and adds that to `why`.
/// `None` if no rail is left.
pub(super) fn by_rail(
    rails: &mut Vec<Route>,
    lane: &NewLane<'_>,
    limit: TimeLimit,
    why: &mut String,
) -> Option<(TcpStream, Route)> {
    while !rails.is_empty() {
        let at = usize::from(lane.index - 1) % rails.len();
        let rail = rails[at];
        // A rail without a link is silent and must leave time for the others.
        let deadline = clock::after(clock::now(), limit.left() / 4);
        match lane.open(rail, deadline) {
            Ok(Some(stream)) => return Some((stream, rail)),
            // The peer allows no more lanes on any rail.
            Err(HelloError::Limited(_)) => return None,
            failed => {
                let (from, to) = (rail.from.unwrap_or_else(|| rail.to.ip()), rail.to);
                tracing::warn!(
                    peer = %to,
                    %from,
                    ?failed,
                    "cannot open a lane on this rail; the session does without the rail"
                );
                why.push_str(&format!("; no lane from {from} to {}", to.ip()));
                rails.remove(at);
            }
        }
    }
    None
}

/// A bulk lane to open for a session that is being opened.
pub(super) struct NewLane<'a> {
    pub(super) session: [u8; 16],
    pub(super) index: u16,
    /// The connection of the session.
    pub(super) of: &'a SecureStream,
}

impl NewLane<'_> {
    /// Connects the lane before `deadline`. `None` if the other side refuses it, or does not prove
    /// that it is the peer.
    pub(super) fn open(
        &self,
        route: Route,
        deadline: u64,
    ) -> Result<Option<TcpStream>, HelloError> {
        let (session, lane, purpose) = (self.session, self.index, Purpose::Lane(self.index));
        let proof = self.of.proof(&session, purpose)?;
        let request = Control::OpenLane { session, lane, proof };
        let (stream, answer) = route.ask(&request, deadline)?;
        let proven = match answer {
            Control::LaneOpened { proof } => self.of.is_proven(&proof, &session, purpose),
            Control::Refuse(Refusal::Limit(why)) => return Err(HelloError::Limited(why)),
            _ => false,
        };
        Ok(proven.then_some(stream))
    }
}

/// Replaces lost lanes of an open session, each on its own route.
pub(super) struct Replacer {
    shard: Arc<Shard>,
    cpus: Cpus,
    keys: LaneKeys,
    data: DataProtection,
    routes: Vec<Route>,
}

impl Replacer {
    /// `routes` has one entry for each lane.
    pub(super) fn new(
        endpoint: &Engine,
        shard: &Arc<Shard>,
        keys: LaneKeys,
        data: DataProtection,
        routes: Vec<Route>,
    ) -> Self {
        Self { shard: shard.clone(), cpus: endpoint.cpus.clone(), keys, data, routes }
    }
}

impl LaneOpener for Replacer {
    fn begin(&self, session: &Arc<Session>, attempt: LaneAttempt) -> Result<(), String> {
        let route = self.routes.get(usize::from(attempt.lane)).copied();
        let route = route.ok_or("the session has no such lane")?;
        let turn = Turn::take().ok_or("too many threads replace lanes")?;
        let (shard, session) = (self.shard.clone(), session.clone());
        let (keys, data) = (self.keys.clone(), self.data);
        let started = threads::spawn("peerway-lanes", &self.cpus, move || {
            let opened = replace(session.id, attempt, route, &keys, data);
            let opened = opened.map_err(|error| format!("{error:?}"));
            drop(turn);
            shard.submit(DriverCommand::LaneOpened { session, attempt, opened });
            shard.notify_if_blocked();
        });
        started.map(drop).map_err(|error| format!("cannot start a thread: {error}"))
    }
}

/// Opens a lane in place of a lost one.
fn replace(
    session: [u8; 16],
    attempt: LaneAttempt,
    route: Route,
    keys: &LaneKeys,
    data: DataProtection,
) -> Result<Box<dyn Wire>, HelloError> {
    let LaneAttempt { lane, generation } = attempt;
    let no_proof = || HelloError::Frame(FrameError::Order);
    let proof = keys.proof(Side::Opener, attempt).ok_or_else(no_proof)?;
    let secrets = secrets(keys, Side::Opener, attempt).ok_or_else(no_proof)?;
    let deadline = clock::after(clock::now(), PATIENCE);
    let request = Control::ReplaceLane { session, lane, generation, proof };
    let (stream, answer) = route.ask(&request, deadline)?;
    match answer {
        Control::LaneOpened { proof } if keys.is_proven(&proof, Side::Acceptor, attempt) => {
            tcp::wire(stream, data, &secrets).map_err(HelloError::Io)
        }
        _ => Err(HelloError::Frame(FrameError::Control)),
    }
}

/// Permission to run a thread that replaces a lane.
struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        let before = REPLACING.fetch_add(1, Ordering::Relaxed);
        let turn = Self;
        (before < MOST_REPLACING).then_some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        REPLACING.fetch_sub(1, Ordering::Relaxed);
    }
}
