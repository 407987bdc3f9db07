//! The opener's side of the handshake. It runs in the calling thread and blocks, under one
//! deadline.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::metadata::Metadata;
use peerway_core::protocol::Role;
use peerway_core::wire::{Control, Hello, Ready, Refusal, SubSession, Welcome};
use rustix::event::{PollFd, PollFlags};

use super::acceptor::MAX_LANES;
use super::choose::{Found, choose, may_pull, may_share_process, offers_local};
use super::detection::{self, Detection};
use super::hello::{Attach, Attached, HelloError, Probe};
use super::lanes::{NewLane, Replacer, Route, by_rail, rails};
use super::secure::{Purpose, SecureStream};
use crate::address;
use crate::clock;
use crate::error::{AddressTried, ConnectError};
use crate::identity::is_other_identity;
use crate::os::net;
use crate::os::process::HostFacts;
use crate::os::random;
use crate::os::unix::{self, Received};
use crate::os::wake::EventFd;
use crate::peers::Opening;
use crate::progress::driver::NewSession;
use crate::progress::engine::Engine;
use crate::progress::lane::Lane;
use crate::progress::shard::{DriverCommand, Shard};
use crate::session::lanes::Replacements;
use crate::session::link::{Half, Link};
use crate::session::{Parts, Session, Whom};
use crate::transport::queues::{self, LaneQueue, QueueReach};
use crate::transport::tcp::{self, LaneSecrets};

/// The time limit of a whole connect: all addresses and all steps of the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimit {
    timeout: Duration,
    deadline: u64,
}

impl TimeLimit {
    /// Creates a limit that ends `timeout` from now.
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { timeout, deadline: clock::after(clock::now(), timeout) }
    }

    pub(super) fn left(&self) -> Duration {
        clock::until(self.deadline, clock::now())
    }

    fn is_over(&self) -> bool {
        self.left() == Duration::ZERO
    }

    /// Fails if the limit is over. The error names the stage that has just ended.
    fn check(&self, addr: SocketAddr, stage: &'static str) -> Result<(), ConnectError> {
        if self.is_over() { Err(self.timed_out(addr, stage)) } else { Ok(()) }
    }

    fn timed_out(&self, addr: SocketAddr, stage: &'static str) -> ConnectError {
        let millis = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        ConnectError::TimedOut { addr, millis, stage, others: Vec::new() }
    }
}

/// The stages of a connect, as errors name them.
mod stage {
    pub(super) const ELSEWHERE: &str = "waiting for another connect to the same peer";
    pub(super) const TCP: &str = "opening the TCP connection";
    pub(super) const TLS: &str = "waiting for the peer to prove its identity (TLS)";
    pub(super) const ADMIT: &str = "waiting for the peer to admit this endpoint";
    pub(super) const HELLO: &str = "waiting for the answer to the hello";
    pub(super) const LINK: &str = "attaching the local link";
    pub(super) const QUEUES: &str = "exchanging RDMA queue pairs";
    pub(super) const LANES: &str = "opening lanes";
    pub(super) const READY: &str = "waiting for the peer to become ready";
    pub(super) const THEIRS: &str = "waiting for the session that the peer opens";
}

/// The result of an attempt.
enum Outcome {
    /// A session to adopt.
    Opened(Box<NewSession>),
    /// The peer reports that a session between the two already exists or is being opened.
    Exists(Incarnation),
}

/// The main session that a sub-session belongs to, for the hello. `None` if `whom` names the
/// main session.
fn sub_session(endpoint: &Engine, whom: &Whom) -> io::Result<Option<SubSession>> {
    if whom.sub_session == 0 {
        return Ok(None);
    }
    let first = endpoint.peers.live_session(&whom.who.into()).ok_or(io::ErrorKind::NotConnected)?;
    Ok(Some(SubSession { number: whom.sub_session, of: first.id }))
}

/// Opens the main session or a sub-session, or finds it.
pub(crate) fn connect_to(
    endpoint: &Arc<Engine>,
    whom: Whom,
    metadata: &Metadata,
    limit: TimeLimit,
) -> Result<Arc<Session>, ConnectError> {
    endpoint.check_open().map_err(ConnectError::from)?;
    let elsewhere = metadata.network.is_elsewhere(address::network_of(&metadata.incarnation));
    let (loopback, addresses): (Vec<SocketAddr>, Vec<SocketAddr>) =
        metadata.addresses.iter().partition(|addr| elsewhere && addr.ip().is_loopback());
    let mut failed = Failed::default();
    for (at, &addr) in addresses.iter().enumerate() {
        // An address behind a dead link is silent, so each address gets its share of the time.
        let share = (addresses.len() - at) as u32;
        let (patience, begun) = (limit.left() / share, clock::now());
        match connect_at(endpoint, addr, Some(whom), patience, limit) {
            Ok(session) => return Ok(session),
            // Only an address without an answer is a reason to try the next one.
            Err(error @ (ConnectError::Unreachable { .. } | ConnectError::TimedOut { .. })) => {
                failed.add(error, clock::until(clock::now(), begun));
                if limit.is_over() {
                    break;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Err(failed.into_error(&loopback))
}

/// The addresses of a peer that did not answer.
#[derive(Default)]
struct Failed {
    /// The error of the first address, which is the best.
    first: Option<ConnectError>,
    others: Vec<AddressTried>,
}

impl Failed {
    fn add(&mut self, error: ConnectError, took: Duration) {
        let (addr, why) = match &error {
            ConnectError::Unreachable { addr, source, .. } => (*addr, source.to_string()),
            ConnectError::TimedOut { addr, stage, .. } => {
                (*addr, format!("no answer while {stage}"))
            }
            _ => return,
        };
        match self.first {
            None => self.first = Some(error),
            Some(_) => self.others.push(AddressTried { addr, took, why }),
        }
    }

    /// `loopback` are the addresses that were left out, because they lead to this host.
    fn into_error(mut self, loopback: &[SocketAddr]) -> ConnectError {
        let why = "not tried: loopback of another host or network namespace";
        let left_out = |addr: &SocketAddr| AddressTried {
            addr: *addr,
            took: Duration::ZERO,
            why: why.to_owned(),
        };
        self.others.extend(loopback.iter().map(left_out));
        match (self.first, loopback) {
            (Some(ConnectError::Unreachable { addr, source, .. }), _) => {
                ConnectError::Unreachable { addr, source, others: self.others }
            }
            (Some(ConnectError::TimedOut { addr, millis, stage, .. }), _) => {
                ConnectError::TimedOut { addr, millis, stage, others: self.others }
            }
            (_, [addr, ..]) => {
                let why = "it listens on loopback only, on another host or in another network \
                           namespace; set PEERWAY_BIND or PEERWAY_INTERFACES there";
                let source = io::Error::new(io::ErrorKind::AddrNotAvailable, why);
                ConnectError::Unreachable { addr: *addr, source, others: Vec::new() }
            }
            (_, []) => ConnectError::EndpointClosed,
        }
    }
}

/// Opens a session with the endpoint that listens at `addr`, or finds it.
pub(crate) fn connect_at(
    endpoint: &Arc<Engine>,
    addr: SocketAddr,
    expects: Option<Whom>,
    patience: Duration,
    limit: TimeLimit,
) -> Result<Arc<Session>, ConnectError> {
    loop {
        if let Some(whom) = expects {
            if let Some(session) = endpoint.peers.live_session(&whom) {
                return Ok(session);
            }
            match endpoint.peers.begin_opening(whom, limit.deadline) {
                Opening::Begun => {}
                Opening::ElsewhereEnded => continue,
                Opening::TimedOut => return Err(limit.timed_out(addr, stage::ELSEWHERE)),
            }
        }
        // Register the session before the attempt ends. In between the peer could open another
        // one.
        let outcome = open(endpoint, addr, expects, patience, limit).map(|opened| match opened {
            Outcome::Opened(new) => Ok(adopt(endpoint, *new)),
            Outcome::Exists(who) => Err(who),
        });
        if let Some(whom) = expects {
            endpoint.peers.end_opening(&whom);
        }
        let who = match outcome? {
            Ok(session) => return Ok(session),
            Err(who) => who,
        };
        // Either the peer opens a session now, or it has not noticed that the last session is
        // over. One of them resolves within moments.
        let whom = expects.unwrap_or_else(|| who.into());
        if let Some(session) = endpoint.peers.wait_for(&whom, Duration::from_millis(20)) {
            return Ok(session);
        }
        limit.check(addr, stage::THEIRS)?;
    }
}

/// Makes the driver adopt a session that this endpoint opened, and waits until it has.
fn adopt(endpoint: &Engine, new: NewSession) -> Arc<Session> {
    let session = new.session.clone();
    endpoint.peers.opened(&session);
    let shard = endpoint.shard_of(&session);
    shard.submit(DriverCommand::Adopt(Box::new(new)));
    shard.notify_if_blocked();
    // The driver sets the index when it adopts the session. Without an index nothing can be sent.
    while session.index.load(Ordering::Acquire) == usize::MAX
        && session.is_alive()
        && endpoint.check_open().is_ok()
    {
        std::thread::yield_now();
    }
    endpoint.peers.end_if_orphan(&session);
    session
}

/// Tries to open a session with the endpoint that listens at `addr`. It must accept the TCP
/// connection within `patience`.
fn open(
    endpoint: &Arc<Engine>,
    addr: SocketAddr,
    expects: Option<Whom>,
    patience: Duration,
    limit: TimeLimit,
) -> Result<Outcome, ConnectError> {
    let sub_session = expects.map(|whom| sub_session(endpoint, &whom)).transpose();
    let sub_session = sub_session.map_err(|source| unreachable(addr, source))?.flatten();
    let deadline = limit.deadline;
    let fail = |stage| move |error: HelloError| hello_failed(limit, addr, stage, error);
    let config = &endpoint.config;
    let stream = net::connect(addr, None, limit.left().min(patience))
        .map_err(|error| fail(stage::TCP)(HelloError::Io(error)))?;

    let session: [u8; 16] = random();
    let offer = offers_local(config.transport, config.disable_ipc);
    // One lane saturates a loopback. A network needs several, because one flow is the work of one
    // core.
    let here = stream.local_addr().is_ok_and(|local| local.ip() == addr.ip());
    let several = 4.max(endpoint.rails.len().min(usize::from(MAX_LANES)) as u16);
    let bulk = config.lanes.unwrap_or(if here { 1 } else { several });
    let shard = endpoint.shards.of(sub_session);
    let host = HostFacts::here();
    let expected = expects.map(|whom| whom.who);
    let mut stream = SecureStream::open(stream, &endpoint.identity, expected, deadline)
        .map_err(|error| tls_failed(limit, addr, expected, error))?;
    let who = stream.peer().map_err(fail(stage::TLS))?;
    let admitted = stream.be_admitted(&endpoint.identity.admission).map_err(fail(stage::ADMIT))?;
    admitted.map_err(|why| ConnectError::NotAdmitted { addr, why })?;
    let of_host = Purpose::Host(host.boot_id);
    let hello = Hello {
        incarnation: endpoint.incarnation,
        session,
        replaces: expects.and_then(|whom| endpoint.peers.last_session(&whom)),
        sub_session,
        lanes: bulk,
        detect_ms: detection::to_millis(config.detect),
        host: stream.proof(&session, of_host).map_err(fail(stage::TLS))?,
        local: offer.is_ok(),
        data: config.data,
        rdma: endpoint.rdma.as_ref().map(|rdma| rdma.ports()).unwrap_or_default(),
    };
    stream.send(&Control::Hello(hello)).map_err(fail(stage::HELLO))?;
    let welcome = match stream.receive().map_err(fail(stage::HELLO))? {
        Control::Welcome(welcome) => welcome,
        Control::Refuse(Refusal::Exists) => return Ok(Outcome::Exists(who)),
        Control::Refuse(refusal) => return Err(refused(addr, refusal)),
        _ => return Err(ConnectError::PeerMisbehaved { addr, why: "wrong answer to the hello" }),
    };

    let claim = match expects {
        Some(_) => None,
        None => match endpoint.peers.learned(who) {
            Some(claim) => Some(claim),
            None => return Ok(Outcome::Exists(who)),
        },
    };
    let peer_host = decode_host(&welcome.host)
        .filter(|peer| peer.boot_id == host.boot_id && host.boot_id != [0; 16]);
    let may_local = offer.is_ok();
    let (mut found, link, mut why) = match offer {
        Ok(()) => {
            let near = (&host, peer_host.as_ref());
            go_local(endpoint, near, &welcome, session, &stream, deadline)
        }
        Err(why) => (NOT_LOCAL, None, why),
    };
    limit.check(addr, stage::LINK)?;
    let is_near = found.linked || found.same_process;
    // Set if a better path was tried and failed, not if there is none.
    let mut fell_back = !is_near && peer_host.is_some() && !welcome.local.is_empty() && may_local;
    let mut queues = Vec::new();
    let mut rdma = None;
    if !is_near {
        match go_rdma(endpoint, &shard, addr, &welcome, &mut stream, deadline) {
            Ok((made, reach)) => {
                found.queues = endpoint.rdma.as_ref().ok().map(|rdma| rdma.kind());
                found.windows = endpoint.rdma.as_ref().is_ok_and(|rdma| rdma.has_windows());
                (queues, rdma) = (made, Some(Arc::new(reach)));
            }
            Err(not) if config.transport.is_rdma() => why = not,
            Err(not) => {
                fell_back |= endpoint.rdma.is_ok() && !welcome.rdma.is_empty();
                // A pin excludes both with the same words.
                if why != not {
                    why = format!("{why}; no RDMA: {not}");
                }
            }
        }
        limit.check(addr, stage::QUEUES)?;
    }
    // Report a pin that cannot be met before the peer considers the session open.
    let data = config.data.max(welcome.data);
    let (mut path, reach) = choose(config.transport, found, &why, data).map_err(|why| {
        ConnectError::PathUnavailable { pin: config.transport.to_string(), addr, why }
    })?;

    let by_tcp = !is_near && rdma.is_none();
    let mut bulk_streams = Vec::new();
    let mut routes = vec![Route { from: None, to: addr }];
    if by_tcp {
        let mut rails = rails(endpoint, addr, &welcome.metadata);
        for index in 1..=bulk {
            let lane = NewLane { session, index, of: &stream };
            let by_rail = by_rail(&mut rails, &lane, limit, &mut path.why);
            let (stream, route) = match by_rail {
                Some((stream, rail)) => (Some(stream), rail),
                None => match lane.open(routes[0], deadline) {
                    Err(HelloError::Limited(limit)) => {
                        path.why.push_str(&format!("; the peer refused lane {index}: {limit}"));
                        break;
                    }
                    opened => (opened.map_err(fail(stage::LANES))?, routes[0]),
                },
            };
            let refused = ConnectError::PeerMisbehaved { addr, why: "it refused a lane" };
            bulk_streams.push(stream.ok_or(refused)?);
            routes.push(route);
        }
    }
    let ready = Ready {
        same_process: found.same_process,
        linked: found.linked,
        opener_pulls: found.we_pull,
        queues: rdma.is_some(),
        host: if peer_host.is_some() { encode_host(&host) } else { Vec::new() },
        why: why.clone(),
    };
    stream.send(&Control::Ready(ready)).map_err(fail(stage::READY))?;
    match stream.receive().map_err(fail(stage::READY))? {
        Control::Ready(_) => {}
        Control::Refuse(Refusal::Exists) => return Ok(Outcome::Exists(who)),
        Control::Refuse(refusal) => return Err(refused(addr, refusal)),
        _ => return Err(ConnectError::PeerMisbehaved { addr, why: "wrong answer to `Ready`" }),
    }

    // Silence counts from now on: the connect may have taken longer than the detection time.
    let now = clock::now();
    let lane = |stream, secrets: &LaneSecrets, index, role| -> Result<Lane, ConnectError> {
        let wire = tcp::wire(stream, data, secrets);
        Ok(Lane::new(wire.map_err(|e| os("cannot prepare a connection", e))?, index, role, now))
    };
    let control = if found.linked || rdma.is_some() { Role::Control } else { Role::Latency };
    let mut secrets = Vec::with_capacity(1 + bulk_streams.len());
    for index in 0..=bulk_streams.len() as u16 {
        secrets.push(stream.secrets(&session, index).map_err(fail(stage::READY))?);
    }
    let replacements = match by_tcp {
        true => {
            let keys = stream.lane_keys(&session).map_err(fail(stage::READY))?;
            Replacements::Opens(Box::new(Replacer::new(endpoint, &shard, keys, data, routes)))
        }
        false => Replacements::None,
    };
    let mut lanes = vec![Some(lane(stream.into_stream(), &secrets[0], 0, control)?)];
    for (index, stream) in (1..).zip(bulk_streams) {
        let secrets = &secrets[usize::from(index)];
        lanes.push(Some(lane(stream, secrets, index, Role::Bulk)?));
    }
    add_queues(&mut lanes, queues, now);
    let parts = Parts {
        id: session,
        incarnation: who,
        sub_session,
        addr,
        path,
        reach,
        pid: visible_pid(&host, peer_host),
        link,
        rdma,
        replacements,
        initiator: true,
    };
    if fell_back {
        let (path, why) = (parts.path.kind, &parts.path.why);
        tracing::warn!(peer = %addr, incarnation = %who, %path, %why, "a faster path failed");
    } else if found.linked && !(found.we_pull && found.peer_pulls) && may_pull(config.transport) {
        warn_of_refused_cma(addr);
    }
    let Detection { detect, beat } = Detection::agree(config.detect, welcome.detect_ms);
    let session = Session::new(parts, shard.index, shard);
    Ok(Outcome::Opened(Box::new(NewSession { session, lanes, detect, beat, claim })))
}

/// Warns that memory which is not shareable takes a slower path, once: the cause is the same for
/// all peers.
fn warn_of_refused_cma(peer: SocketAddr) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            %peer,
            "the kernel refuses copies between processes (Yama, seccomp or a missing CAP_SYS_PTRACE), \
             so memory that is not shareable goes by the ring; `peerway doctor` says more"
        );
    });
}

const NOT_LOCAL: Found = Found {
    same_process: false,
    linked: false,
    we_pull: false,
    peer_pulls: false,
    queues: None,
    windows: false,
};

/// Opens queue pairs between the devices of the two endpoints, or returns why there are none.
fn go_rdma(
    endpoint: &Engine,
    shard: &Shard,
    addr: SocketAddr,
    welcome: &Welcome,
    stream: &mut SecureStream,
    deadline: u64,
) -> Result<(Vec<LaneQueue>, QueueReach), String> {
    let rdma = endpoint.rdma.as_ref().map_err(|error| error.to_string())?;
    if welcome.rdma.is_empty() {
        return Err(format!("the peer has none: {}", welcome.rdma_why));
    }
    let plans = queues::plan(&rdma.ports(), &welcome.rdma, endpoint.config.rdma.queue_pairs);
    if plans.is_empty() {
        return Err("no common RDMA link type: our ports and the peer's ports differ".to_owned());
    }
    let (ours, offers) = queues::offer(shard.ports(), &plans)?;
    let lost = |error: HelloError| format!("the peer did not answer the offer ({error:?})");
    stream.send(&Control::OpenQueues { queues: offers }).map_err(lost)?;
    let Control::QueuesOpened { queues: answers } = stream.receive().map_err(lost)? else {
        return Err("the peer did not answer the offer".to_owned());
    };
    let connected = queues::connect(addr, ours, &answers, &welcome.rdma, deadline);
    if connected.is_empty() {
        let refusal = answers.into_iter().find_map(|(_, answer)| answer.err());
        return Err(refusal.unwrap_or_else(|| "no queue pair could be connected".to_owned()));
    }
    let pinned = endpoint.config.transport.is_rdma();
    let lanes = plans.len();
    Ok((connected, QueueReach { ports: welcome.rdma.clone(), plans, lanes, pinned }))
}

/// Adds queue pairs to the lanes, at their indexes.
pub(super) fn add_queues(lanes: &mut Vec<Option<Lane>>, queues: Vec<LaneQueue>, now: u64) {
    for (index, queue) in queues {
        let at = usize::from(index);
        if lanes.len() <= at {
            lanes.resize_with(at + 1, || None);
        }
        lanes[at] = Some(Lane::of_queue(index, queue, now));
    }
}

/// Tries the local paths. The text says why there is none. `near` is this host and the peer's, if
/// that is the same.
fn go_local(
    endpoint: &Engine,
    (host, peer): (&HostFacts, Option<&HostFacts>),
    welcome: &Welcome,
    session: [u8; 16],
    stream: &SecureStream,
    deadline: u64,
) -> (Found, Option<Link>, String) {
    let far = |why: String| (NOT_LOCAL, None, why);
    if welcome.local.is_empty() {
        return far(format!("the peer offers no local path: {}", welcome.local_why));
    }
    let Some(peer) = peer else { return far("the peer is on another host".into()) };
    let pin = endpoint.config.transport;
    if peer.process == host.process && may_share_process(pin) && welcome.local_why.is_empty() {
        return (Found { same_process: true, ..NOT_LOCAL }, None, String::new());
    }
    match attach(welcome, session, stream, may_pull(pin), deadline) {
        Ok((found, link)) => (found, Some(link), String::new()),
        Err(why) => {
            let apart = if peer.net_ns != host.net_ns {
                " (the peer is in another network namespace)"
            } else {
                ""
            };
            far(format!("{why}{apart}"))
        }
    }
}

fn attach(
    welcome: &Welcome,
    session: [u8; 16],
    stream: &SecureStream,
    may_pull: bool,
    deadline: u64,
) -> Result<(Found, Link), String> {
    let text = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let left = clock::until(deadline, clock::now());
    let socket = unix::connect(&welcome.local, left)
        .map_err(text("cannot connect to the peer's local socket"))?;
    let peer =
        unix::credentials(socket.as_fd()).map_err(text("cannot read the peer's credentials"))?;
    let uid = rustix::process::getuid().as_raw();
    if peer.uid != uid {
        return Err(format!("the peer runs as user {}, this process as user {uid}", peer.uid));
    }
    let (fd, segment) = Link::create_segment().map_err(text("cannot create the shared segment"))?;
    let wake_fds = (EventFd::new(), EventFd::new());
    let (own, theirs) = (
        wake_fds.0.map_err(text("cannot create an eventfd"))?,
        wake_fds.1.map_err(text("cannot create an eventfd"))?,
    );
    let secret: Box<[u8; 16]> = Box::new(random());
    let proof = stream.proof(&session, Purpose::Link).map_err(|error| format!("{error:?}"))?;
    let request = Attach { session, proof, probe: Probe::of(&secret) };
    let fds = [fd.as_fd(), theirs.as_fd(), own.as_fd()];
    unix::send(socket.as_fd(), &request.to_bytes(), &fds)
        .map_err(text("cannot send the shared segment to the peer"))?;
    let answer = wait_packet(&socket, deadline)
        .map_err(text("the peer did not attach the shared segment"))?;
    let answer =
        Attached::from_bytes(&answer).ok_or("the peer's answer to the attach cannot be decoded")?;
    if !stream.is_proven(&answer.proof, &session, Purpose::Link) {
        return Err("another process than the peer answers on the peer's local socket".into());
    }
    let memory = if may_pull { answer.probe.open(peer.pid) } else { None };
    let we_pull = memory.is_some();
    let found = Found { linked: true, we_pull, peer_pulls: answer.pulls, ..NOT_LOCAL };
    Ok((found, Link::new(segment, Half::First, socket, memory, own, theirs)))
}

fn wait_packet(socket: &OwnedFd, deadline: u64) -> io::Result<Vec<u8>> {
    loop {
        match unix::recv(socket.as_fd())? {
            Received::Packet(packet) => return Ok(packet.bytes),
            Received::Closed => return Err(io::ErrorKind::ConnectionReset.into()),
            Received::Cut(_) => {
                return Err(io::Error::other("no file descriptors left (ulimit -n)"));
            }
            Received::WouldBlock => {}
        }
        let left = clock::until(deadline, clock::now());
        if left == Duration::ZERO {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let timeout = rustix::event::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }
}

/// The peer's process id, if it means the same process here: same boot and same PID namespace.
pub(crate) fn visible_pid(here: &HostFacts, peer: Option<HostFacts>) -> Option<u32> {
    let peer = peer?;
    let near = peer.boot_id == here.boot_id && here.boot_id != [0; 16];
    (near && peer.pid_ns == here.pid_ns && here.pid_ns != 0).then_some(peer.pid)
}

/// Encodes a host description for the wire.
pub(crate) fn encode_host(host: &HostFacts) -> Vec<u8> {
    postcard::to_allocvec(host).unwrap_or_default()
}

pub(crate) fn decode_host(bytes: &[u8]) -> Option<HostFacts> {
    postcard::from_bytes(bytes).ok()
}

fn os(what: &'static str, source: io::Error) -> ConnectError {
    ConnectError::Os { what, source }
}

fn refused(addr: SocketAddr, refusal: Refusal) -> ConnectError {
    match refusal {
        Refusal::Identity(why) => ConnectError::PeerRefuses { addr, why },
        Refusal::NotAdmitted(why) => {
            let why = format!("it does not admit this endpoint: {why}");
            ConnectError::NotAdmitted { addr, why }
        }
        Refusal::Full => {
            let why = "it has a half-open session with the same id".to_owned();
            ConnectError::PeerFull { addr, why }
        }
        Refusal::Limit(why) => ConnectError::PeerFull { addr, why },
        Refusal::Pinned(why) => ConnectError::PeerRefuses { addr, why },
        _ => ConnectError::PeerMisbehaved { addr, why: "it does not know the session" },
    }
}

/// The error of a failed TLS handshake.
fn tls_failed(
    limit: TimeLimit,
    addr: SocketAddr,
    expected: Option<Incarnation>,
    error: HelloError,
) -> ConnectError {
    match (error, expected) {
        (HelloError::Tls(error), Some(expected)) if is_other_identity(&error) => {
            ConnectError::OtherIncarnation { addr, expected }
        }
        (HelloError::Io(error), _) if is_hang_up(&error) => {
            let why = "it closed the connection during the TLS handshake; it may run an older \
                       version of Peerway, or be another program";
            let source = io::Error::new(error.kind(), why);
            unreachable(addr, source)
        }
        (error, _) => hello_failed(limit, addr, stage::TLS, error),
    }
}

fn unreachable(addr: SocketAddr, source: io::Error) -> ConnectError {
    ConnectError::Unreachable { addr, source, others: Vec::new() }
}

fn is_hang_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn hello_failed(
    limit: TimeLimit,
    addr: SocketAddr,
    stage: &'static str,
    error: HelloError,
) -> ConnectError {
    match error {
        HelloError::Frame(why) => ConnectError::PeerIncompatible { addr, why },
        HelloError::Limited(why) => ConnectError::PeerFull { addr, why },
        HelloError::Tls(why) => ConnectError::NotSecure { addr, why: why.to_string() },
        HelloError::TooMuch => {
            ConnectError::PeerMisbehaved { addr, why: "it sends too much in the handshake" }
        }
        HelloError::Io(source) => match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => limit.timed_out(addr, stage),
            _ => unreachable(addr, source),
        },
    }
}
