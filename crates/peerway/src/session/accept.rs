//! The acceptor's side of the handshake: never blocks, bounded in number and time.
//!
//! Connections knock, say one message, and become a session, a lane of one, or nothing. Whatever
//! they send, the endpoint goes on serving others.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use peerway_core::wire::{Control, Hello, Ready, Refusal, Welcome};
use rustix::event::epoll::{self, EventData, EventFlags};

use super::choose::{Found, choose, may_pull, offers_local};
use super::connect::{add_queues, agreed_detect, decode_host, encode_host, visible_pid};
use super::hello::{Assembly, Attach, Attached, HelloError, Probe, frame};
use super::link::{Half, Link};
use super::{Parts, Session, queues};
use crate::clock;
use crate::inner::{Inner, random};
use crate::os::process::HostFacts;
use crate::os::unix::{self, Received};
use crate::os::wake::EventFd;
use crate::peers::Whom;
use crate::progress::driver::{DOOR, NewSession};
use crate::progress::shard::Shard;
use crate::shards::MAX_STRANDS;
use crate::transport::lane::{Lane, Role};
use crate::transport::tcp::TcpWire;
use crate::transport::verbs::queue::Queue;

/// Connections that may be in the handshake at a time.
const MAX_PENDING: usize = 1024;
/// Bulk lanes a session may have.
pub(super) const MAX_LANES: u16 = 64;

const LISTENER: u64 = 0;
const LOCAL_LISTENER: u64 = 1;
const CONNECTION: u64 = 2;
const LOCAL_CONNECTION: u64 = 3;

/// Listeners and everything in the handshake.
pub(crate) struct Door {
    listeners: Vec<TcpListener>,
    local: Option<OwnedFd>,
    pending: HashMap<u64, Pending>,
    local_pending: HashMap<u64, (OwnedFd, u64)>,
    half_open: HashMap<[u8; 16], HalfOpen>,
    /// Listeners that are not watched until the next sweep.
    resting: Vec<usize>,
    next: u64,
}

/// A connection that has not become anything yet.
struct Pending {
    stream: TcpStream,
    addr: SocketAddr,
    assembly: Assembly,
    deadline: u64,
    /// It opened this session and has not said that it is ready.
    session: Option<[u8; 16]>,
}

/// A session whose opener has not said that it is ready.
struct HalfOpen {
    hello: Hello,
    lanes: Vec<(u16, TcpStream)>,
    queues: Vec<(u16, Queue)>,
    /// Who will drive the session.
    shard: Arc<Shard>,
    link: Option<(Link, bool)>,
    /// The bytes that the opener reads to prove that it can.
    secret: Box<[u8; 16]>,
    deadline: u64,
}

impl Door {
    pub(crate) fn new(
        shard: &Shard,
        listeners: Vec<TcpListener>,
        local: Option<OwnedFd>,
    ) -> io::Result<Self> {
        for (at, listener) in listeners.iter().enumerate() {
            watch(shard, listener.as_fd(), LISTENER, at as u64)?;
        }
        if let Some(local) = &local {
            watch(shard, local.as_fd(), LOCAL_LISTENER, 0)?;
        }
        Ok(Self {
            listeners,
            local,
            pending: HashMap::new(),
            local_pending: HashMap::new(),
            half_open: HashMap::new(),
            resting: Vec::new(),
            next: 0,
        })
    }

    /// Something happened at the door; returns sessions that are complete.
    pub(crate) fn knocked(
        &mut self,
        endpoint: &Arc<Inner>,
        shard: &Shard,
        word: u64,
        now: u64,
    ) -> Vec<NewSession> {
        self.sweep(now);
        let at = word & 0xFFFF_FFFF;
        match (word & !DOOR) >> 32 {
            LISTENER => self.accept(endpoint, shard, at as usize, now),
            LOCAL_LISTENER => self.accept_local(endpoint, shard, now),
            LOCAL_CONNECTION => self.local_spoke(endpoint, shard, at),
            _ => return self.spoke(endpoint, shard, at, now).into_iter().collect(),
        }
        Vec::new()
    }

    /// Whether anything is in the handshake.
    pub(crate) fn is_busy(&self) -> bool {
        let idle = self.pending.is_empty() && self.local_pending.is_empty();
        !(idle && self.half_open.is_empty() && self.resting.is_empty())
    }

    /// Watches listeners again that were out of descriptors.
    pub(crate) fn wake_listeners(&mut self, shard: &Shard) {
        for at in std::mem::take(&mut self.resting) {
            if let Some(listener) = self.listeners.get(at) {
                let _ = watch(shard, listener.as_fd(), LISTENER, at as u64);
            }
        }
    }

    /// Drops what took too long.
    pub(crate) fn sweep(&mut self, now: u64) {
        self.pending.retain(|_, p| p.deadline > now);
        self.local_pending.retain(|_, p| p.1 > now);
        self.half_open.retain(|_, half| half.deadline > now);
    }

    fn accept(&mut self, endpoint: &Inner, shard: &Shard, at: usize, now: u64) {
        while let Some(listener) = self.listeners.get(at) {
            let (stream, addr) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, most likely: the connection waits in the backlog, and the
                    // listener is left alone until the next sweep so that it does not keep us busy.
                    tracing::warn!(%error, "cannot accept a connection");
                    let _ = epoll::delete(&shard.epoll, listener);
                    self.resting.push(at);
                    return;
                }
            };
            if self.pending.len() >= MAX_PENDING || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            if watch(shard, stream.as_fd(), CONNECTION, id).is_ok() {
                let assembly = Assembly::default();
                let pending = Pending { stream, addr, assembly, deadline, session: None };
                self.pending.insert(id, pending);
            }
        }
    }

    fn accept_local(&mut self, endpoint: &Inner, shard: &Shard, now: u64) {
        while let Some(local) = &self.local
            && let Ok(Some(socket)) = unix::accept(local.as_fd())
        {
            if self.local_pending.len() >= MAX_PENDING {
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            if watch(shard, socket.as_fd(), LOCAL_CONNECTION, id).is_ok() {
                self.local_pending.insert(id, (socket, deadline));
            }
        }
    }

    fn id(&mut self) -> u64 {
        self.next = (self.next + 1) & 0xFFFF_FFFF;
        self.next
    }

    /// A connection in the handshake has something to say.
    fn spoke(
        &mut self,
        endpoint: &Arc<Inner>,
        shard: &Shard,
        id: u64,
        now: u64,
    ) -> Option<NewSession> {
        let mut pending = self.pending.remove(&id)?;
        loop {
            match pending.assembly.read(&mut pending.stream) {
                Ok(Some(message)) => {
                    return self.said(endpoint, shard, id, pending, message, now);
                }
                Ok(None) => {}
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.pending.insert(id, pending);
                    return None;
                }
                Err(error) => {
                    tracing::debug!(from = %pending.addr, ?error, "a connection was dropped");
                    return None;
                }
            }
        }
    }

    fn said(
        &mut self,
        endpoint: &Arc<Inner>,
        shard: &Shard,
        id: u64,
        mut pending: Pending,
        message: Control,
        now: u64,
    ) -> Option<NewSession> {
        match (message, pending.session) {
            (Control::Hello(hello), None) => {
                match self.greet(endpoint, &hello, now) {
                    Ok(welcome) => {
                        reply(&mut pending.stream, &Control::Welcome(welcome))?;
                        pending.session = Some(hello.session);
                        let half = HalfOpen {
                            lanes: Vec::new(),
                            queues: Vec::new(),
                            shard: endpoint.shards.of(hello.strand),
                            link: None,
                            secret: Box::new(random()),
                            deadline: pending.deadline,
                            hello,
                        };
                        self.half_open.insert(half.hello.session, half);
                        self.pending.insert(id, pending);
                    }
                    Err(refusal) => {
                        reply(&mut pending.stream, &Control::Refuse(refusal));
                    }
                }
                None
            }
            (Control::OpenLane { session, lane }, None) => {
                let half = self.half_open.get_mut(&session);
                let fits = half.filter(|half| {
                    (1..=half.hello.lanes.min(MAX_LANES)).contains(&lane)
                        && half.lanes.iter().all(|(index, _)| *index != lane)
                });
                let Some(half) = fits else {
                    reply(&mut pending.stream, &Control::Refuse(Refusal::UnknownSession));
                    return None;
                };
                reply(&mut pending.stream, &Control::LaneOpened)?;
                let _ = epoll::delete(&shard.epoll, &pending.stream);
                half.lanes.push((lane, pending.stream));
                None
            }
            (Control::OpenQueues { queues: offers }, Some(session)) => {
                let half = self.half_open.get_mut(&session)?;
                if !half.queues.is_empty() {
                    return None;
                }
                let ports = half.shard.ports();
                let (made, answers) = queues::answer(ports, &half.hello.rdma, &offers);
                half.queues = made;
                reply(&mut pending.stream, &Control::QueuesOpened { queues: answers })?;
                self.pending.insert(id, pending);
                None
            }
            (Control::Ready(ready), Some(session)) => {
                let half = self.half_open.remove(&session)?;
                let _ = epoll::delete(&shard.epoll, &pending.stream);
                complete(endpoint, half, pending, ready, now)
            }
            _ => None,
        }
    }

    fn greet(
        &mut self,
        endpoint: &Arc<Inner>,
        hello: &Hello,
        now: u64,
    ) -> Result<Welcome, Refusal> {
        self.sweep(now);
        if hello.expects.is_some_and(|who| who != endpoint.incarnation) {
            return Err(Refusal::OtherIncarnation);
        }
        if self.half_open.len() >= MAX_PENDING || self.half_open.contains_key(&hello.session) {
            return Err(Refusal::Full);
        }
        let whom = whom(hello).ok_or(Refusal::UnknownSession)?;
        if !endpoint.has_session_of(whom.who, hello.strand) {
            return Err(Refusal::UnknownSession);
        }
        if let Some(old) = endpoint.live_session(&whom)
            && hello.replaces == Some(old.id)
        {
            old.remove();
        }
        if endpoint.has_or_opens(&whom) {
            return Err(Refusal::Exists(endpoint.incarnation));
        }
        let pin = endpoint.config.transport;
        let (mut local, mut local_why) = (String::new(), String::new());
        match offers_local(pin, endpoint.config.disable_ipc) {
            Ok(()) => {
                local.clone_from(&endpoint.local_name);
                if !super::choose::may_share_process(pin) {
                    local_why = format!("pinned to {pin}");
                }
            }
            Err(why) => local_why = why,
        }
        if pin.is_local() && hello.local.is_empty() {
            return Err(Refusal::Pinned(format!(
                "it is pinned to {pin}, and the opener offers no local path (it is pinned to tcp)"
            )));
        }
        let (rdma, rdma_why) = match &endpoint.rdma {
            Ok(rdma) => (rdma.ports(), String::new()),
            Err(error) => (Vec::new(), error.to_string()),
        };
        if pin.is_rdma() && hello.rdma.is_empty() {
            return Err(Refusal::Pinned(format!(
                "it is pinned to {pin}, and the opener has no RDMA device or is pinned to another path"
            )));
        }
        Ok(Welcome {
            incarnation: endpoint.incarnation,
            detect_ms: endpoint.config.detect.as_millis() as u32,
            metadata: endpoint.metadata(),
            host: encode_host(&HostFacts::here()),
            local,
            local_why,
            rdma,
            rdma_why,
        })
    }

    /// A local connection passes the segment of a session that is being opened.
    fn local_spoke(&mut self, endpoint: &Inner, shard: &Shard, id: u64) {
        let Some((socket, deadline)) = self.local_pending.remove(&id) else { return };
        match unix::recv(socket.as_fd()) {
            Ok(Received::Packet(packet)) => {
                let _ = epoll::delete(&shard.epoll, &socket);
                if self.attach(endpoint, socket, packet).is_none() {
                    tracing::debug!("a local connection was dropped");
                }
            }
            Ok(Received::WouldBlock) => {
                self.local_pending.insert(id, (socket, deadline));
            }
            Ok(Received::Cut(_)) => {
                tracing::warn!(
                    "a local peer's descriptors were lost: this process can open no more files \
                     (ulimit -n); the peer connects by TCP"
                );
            }
            Ok(Received::Closed) | Err(_) => {}
        }
    }

    fn attach(&mut self, endpoint: &Inner, socket: OwnedFd, packet: unix::Packet) -> Option<()> {
        let attach = Attach::from_bytes(&packet.bytes)?;
        let half = self.half_open.get_mut(&attach.session)?;
        let peer = unix::credentials(socket.as_fd()).ok()?;
        // Shared memory binds honest code only, so it goes to the same user alone.
        if peer.uid != rustix::process::getuid().as_raw() || half.link.is_some() {
            return None;
        }
        let [segment, own, theirs]: [OwnedFd; 3] = packet.fds.try_into().ok()?;
        let segment = Link::adopt_segment(&segment).ok()?;
        let (own, theirs) = (EventFd::from_owned(own).ok()?, EventFd::from_owned(theirs).ok()?);
        let memory = match may_pull(endpoint.config.transport) {
            true => attach.probe.open(peer.pid),
            false => None,
        };
        let pulls = memory.is_some();
        let answer = Attached { pulls, probe: Probe::of(&half.secret) };
        unix::send(socket.as_fd(), &answer.to_bytes(), &[]).ok()?;
        let link = Link::new(segment, Half::Second, socket, memory, own, theirs);
        half.link = Some((link, pulls));
        Some(())
    }
}

/// Both sides are ready: the session, or a refusal if our pin cannot be met.
fn complete(
    endpoint: &Arc<Inner>,
    half: HalfOpen,
    mut pending: Pending,
    ready: Ready,
    now: u64,
) -> Option<NewSession> {
    let same_process = ready.same_process
        && decode_host(&half.hello.host).is_some_and(|h| h.process == HostFacts::here().process);
    let (link, we_pull) = match half.link {
        Some((link, pulls)) if ready.linked => (Some(link), pulls),
        _ => (None, false),
    };
    let with_queues = ready.queues && !half.queues.is_empty();
    let kind = endpoint.rdma.as_ref().ok().map(|rdma| rdma.kind());
    let found = Found {
        same_process,
        linked: link.is_some(),
        we_pull,
        peer_pulls: ready.opener_pulls,
        queues: kind.filter(|_| with_queues),
    };
    if ready.linked != found.linked || ready.same_process != found.same_process {
        return None;
    }
    let (path, reach) = match choose(endpoint.config.transport, found, &ready.why) {
        Ok(chosen) => chosen,
        Err(why) => {
            reply(&mut pending.stream, &Control::Refuse(Refusal::Pinned(why)));
            return None;
        }
    };
    let Some(claim) = whom(&half.hello).and_then(|whom| endpoint.begin_accepting(whom)) else {
        let refusal = Refusal::Exists(endpoint.incarnation);
        reply(&mut pending.stream, &Control::Refuse(refusal));
        return None;
    };
    reply(&mut pending.stream, &Control::Ready(ready))?;
    let control = if found.linked || with_queues { Role::Control } else { Role::Latency };
    let mut streams = half.lanes;
    streams.sort_by_key(|(index, _)| *index);
    let mut lanes = vec![Some(lane(pending.stream, 0, control, now)?)];
    for (index, stream) in streams {
        if usize::from(index) != lanes.len() {
            return None;
        }
        lanes.push(Some(lane(stream, index, Role::Bulk, now)?));
    }
    let mut rdma = None;
    if with_queues {
        if lanes.len() > 1 {
            return None;
        }
        let count = half.queues.len();
        add_queues(&mut lanes, half.queues, now);
        let (ports, pinned) = (half.hello.rdma, endpoint.config.transport.is_rdma());
        rdma = Some(Arc::new(queues::Reach { ports, plans: Vec::new(), lanes: count, pinned }));
    }
    let parts = Parts {
        id: half.hello.session,
        incarnation: half.hello.incarnation,
        strand: half.hello.strand,
        addr: pending.addr,
        path,
        reach,
        pid: visible_pid(&HostFacts::here(), decode_host(&half.hello.host)),
        link,
        rdma,
        initiator: false,
    };
    let detect = agreed_detect(endpoint.config.detect, half.hello.detect_ms);
    let session = Session::new(parts, half.shard);
    Some(NewSession { session, lanes, detect, claim: Some(claim) })
}

/// Which session a hello is about; `None` for a strand that there cannot be.
fn whom(hello: &Hello) -> Option<Whom> {
    let strand = match hello.strand {
        Some(strand) if (1..=MAX_STRANDS).contains(&strand.number) => strand.number,
        Some(_) => return None,
        None => 0,
    };
    Some(Whom { who: hello.incarnation, strand })
}

fn lane(stream: TcpStream, index: u16, role: Role, now: u64) -> Option<Lane> {
    let wire = TcpWire::new(stream).ok()?;
    Some(Lane::new(Box::new(wire), index, role, now))
}

/// Answers on a fresh connection, whose buffer has room for so little; `None` when it is gone.
fn reply(stream: &mut TcpStream, message: &Control) -> Option<()> {
    stream.write_all(&frame(message)).ok()
}

fn watch(shard: &Shard, fd: BorrowedFd<'_>, kind: u64, at: u64) -> io::Result<()> {
    let data = EventData::new_u64(DOOR | kind << 32 | at);
    Ok(epoll::add(&shard.epoll, fd, data, EventFlags::IN)?)
}
