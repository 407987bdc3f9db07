//! The acceptor's side of the handshake: never blocks, bounded in number and time.
//!
//! Connections knock, say one message, and become a session, a lane of one, or nothing. Whatever
//! they send, the endpoint goes on serving others.
//!
//! When there are too many half-open connections, or no descriptor for another, the oldest one of
//! the busiest source makes room (see `crowd`). Where that does not help, the listener leaves epoll
//! for a moment. What it has not accepted waits in the kernel's backlog, and nothing spins.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use peerway_core::wire::{Control, Hello, Ready, Refusal, Welcome};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::process::{Resource, getrlimit};

use super::choose::{Found, choose, may_pull, offers_local};
use super::connect::{add_queues, agreed_detect, decode_host, encode_host, visible_pid};
use super::crowd::{Occupant, oldest_of_busiest};
use super::hello::{Assembly, Attach, Attached, HelloError, Probe, frame};
use super::link::{Half, Link};
use super::{Parts, Session, queues};
use crate::clock;
use crate::inner::{Inner, random};
use crate::os::process::HostFacts;
use crate::os::unix::{self, Received};
use crate::os::wake::EventFd;
use crate::peers::Whom;
use crate::progress::driver::{ACCEPTOR, NewSession};
use crate::progress::shard::Shard;
use crate::shards::MAX_SUB_SESSIONS;
use crate::transport::lane::{Lane, Role};
use crate::transport::tcp::TcpWire;
use crate::transport::verbs::queue::Queue;

/// Connections that may be in the handshake at a time, by TCP and on the local socket each.
const MAX_PENDING: usize = 1024;
/// As many may always be, however few descriptors this process is allowed.
const MIN_PENDING: usize = 16;
/// They may hold one of so many descriptors that this process is allowed.
const DESCRIPTOR_SHARE: u64 = 4;
/// How long a connection may be half open before it has to make room where there are too many. An
/// honest handshake rarely takes longer, and new connections can wait this long.
const GRACE: Duration = Duration::from_millis(250);
/// The same where descriptors are short. That may be the program's own doing, so honest handshakes
/// that are slow get more time.
const SHORTAGE_GRACE: Duration = Duration::from_secs(1);
/// How long a listener rests when it cannot accept: some ten futile attempts a second cost nothing.
const REST: Duration = Duration::from_millis(100);
/// How long it rests when too many connections are half open: honest handshakes end soon.
const FULL_REST: Duration = Duration::from_millis(20);
/// Connections that a listener accepts before others are served.
const ACCEPTS: usize = 64;
/// Half-open connections are looked at this often, to drop those that took too long.
const LOOK: Duration = Duration::from_secs(1);
/// The same warning is logged no more often than this.
const WARN_EVERY: Duration = Duration::from_secs(10);
/// Bulk lanes a session may have.
pub(super) const MAX_LANES: u16 = 64;

const LISTENER: u64 = 0;
const LOCAL_LISTENER: u64 = 1;
const CONNECTION: u64 = 2;
const LOCAL_CONNECTION: u64 = 3;

/// Listeners and everything in the handshake.
pub(crate) struct Acceptor {
    listeners: Vec<TcpListener>,
    local: Option<OwnedFd>,
    pending: HashMap<u64, Pending>,
    local_pending: HashMap<u64, LocalPending>,
    /// Each belongs to a connection in `pending` and ends with it, so there are never more of them.
    half_open: HashMap<[u8; 16], HalfOpen>,
    /// Listeners that are not in epoll for a while.
    resting: Vec<Resting>,
    /// The log says that no connection can be accepted, and nothing to the contrary yet.
    short: bool,
    short_warnings: Warnings,
    /// Half-open connections that made room since the log last said so.
    dropped: u64,
    dropped_warnings: Warnings,
    next: u64,
}

/// A listener that is watched again at some time.
struct Resting {
    /// [`LISTENER`] or [`LOCAL_LISTENER`].
    kind: u64,
    at: u64,
    until: u64,
}

/// When a warning was last logged.
#[derive(Default)]
struct Warnings(Option<u64>);

impl Warnings {
    /// Whether the warning is due.
    fn is_due(&mut self, now: u64) -> bool {
        let due = self.0.is_none_or(|last| now >= clock::after(last, WARN_EVERY));
        if due {
            self.0 = Some(now);
        }
        due
    }
}

/// A connection that has not become anything yet.
struct Pending {
    stream: TcpStream,
    addr: SocketAddr,
    assembly: Assembly,
    since: u64,
    deadline: u64,
    /// It opened this session and has not said that it is ready.
    session: Option<[u8; 16]>,
}

/// A connection on the local socket that has not attached to anything yet.
struct LocalPending {
    socket: OwnedFd,
    /// The process that connected; 0 when it is not visible here.
    pid: u32,
    since: u64,
    deadline: u64,
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

impl Acceptor {
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
            short: false,
            short_warnings: Warnings::default(),
            dropped: 0,
            dropped_warnings: Warnings::default(),
            next: 0,
        })
    }

    /// Something happened at the acceptor; returns sessions that are complete.
    pub(crate) fn handle_event(
        &mut self,
        endpoint: &Arc<Inner>,
        shard: &Shard,
        word: u64,
        now: u64,
    ) -> Vec<NewSession> {
        self.sweep(now);
        let at = word & 0xFFFF_FFFF;
        match (word & !ACCEPTOR) >> 32 {
            LISTENER => self.accept(endpoint, shard, at as usize, now),
            LOCAL_LISTENER => self.accept_local(endpoint, shard, now),
            LOCAL_CONNECTION => self.local_spoke(endpoint, shard, at),
            _ => return self.spoke(endpoint, shard, at, now).into_iter().collect(),
        }
        Vec::new()
    }

    /// When something here depends on the clock; `None` when nothing does.
    pub(crate) fn until_next(&self, now: u64) -> Option<Duration> {
        let idle = self.pending.is_empty() && self.local_pending.is_empty();
        let look = (!idle).then_some(LOOK);
        let wake = self.resting.iter().map(|resting| clock::until(resting.until, now)).min();
        look.into_iter().chain(wake).min()
    }

    /// Watches listeners again that have rested.
    pub(crate) fn wake_listeners(&mut self, shard: &Shard, now: u64) {
        for mut resting in std::mem::take(&mut self.resting) {
            let Some(listener) = self.listener(resting.kind, resting.at) else { continue };
            if now >= resting.until {
                if watch(shard, listener, resting.kind, resting.at).is_ok() {
                    continue;
                }
                // Watching takes memory, which may be short, too.
                resting.until = clock::after(now, REST);
            }
            self.resting.push(resting);
        }
    }

    /// Drops what took too long.
    pub(crate) fn sweep(&mut self, now: u64) {
        self.pending.retain(|_, p| p.deadline > now);
        self.local_pending.retain(|_, p| p.deadline > now);
        self.half_open.retain(|_, half| half.deadline > now);
    }

    fn accept(&mut self, endpoint: &Inner, shard: &Shard, at: usize, now: u64) {
        let most = most_pending();
        let mut made_room = false;
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get(at) else { return };
            let (stream, addr) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.caught_up(),
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    if !made_room && self.make_any_room(now) {
                        made_room = true;
                        continue;
                    }
                    self.warn_of_shortage(&error, now);
                    return self.rest(shard, LISTENER, at as u64, clock::after(now, REST));
                }
            };
            made_room = false;
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            if watch(shard, stream.as_fd(), CONNECTION, id).is_ok() {
                let assembly = Assembly::default();
                let pending =
                    Pending { stream, addr, assembly, since: now, deadline, session: None };
                self.pending.insert(id, pending);
            }
            while self.pending.len() > most {
                if !self.make_room(now, GRACE) {
                    return self.rest(shard, LISTENER, at as u64, clock::after(now, FULL_REST));
                }
            }
        }
    }

    fn accept_local(&mut self, endpoint: &Inner, shard: &Shard, now: u64) {
        let most = most_pending();
        let mut made_room = false;
        for _ in 0..ACCEPTS {
            let Some(local) = &self.local else { return };
            let socket = match unix::accept(local.as_fd()) {
                Ok(Some(socket)) => socket,
                Ok(None) => return self.caught_up(),
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    if !made_room && self.make_any_room(now) {
                        made_room = true;
                        continue;
                    }
                    self.warn_of_shortage(&error, now);
                    return self.rest(shard, LOCAL_LISTENER, 0, clock::after(now, REST));
                }
            };
            made_room = false;
            let Ok(peer) = unix::credentials(socket.as_fd()) else { continue };
            // It could attach to nothing, see `attach`.
            if peer.uid != rustix::process::getuid().as_raw() {
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            if watch(shard, socket.as_fd(), LOCAL_CONNECTION, id).is_ok() {
                let pending = LocalPending { socket, pid: peer.pid, since: now, deadline };
                self.local_pending.insert(id, pending);
            }
            while self.local_pending.len() > most {
                if !self.make_local_room(now, GRACE) {
                    return self.rest(shard, LOCAL_LISTENER, 0, clock::after(now, FULL_REST));
                }
            }
        }
    }

    /// Every connection that waited has been accepted.
    fn caught_up(&mut self) {
        if std::mem::take(&mut self.short) {
            tracing::info!("connections are accepted again");
        }
    }

    /// There is no descriptor or no memory for a connection.
    fn warn_of_shortage(&mut self, error: &io::Error, now: u64) {
        if !self.short && self.short_warnings.is_due(now) {
            self.short = true;
            tracing::warn!(
                %error,
                "no connection can be accepted; new peers wait until this process has descriptors \
                 and memory again (`ulimit -n` shows the limit of descriptors)"
            );
        }
    }

    /// Takes a listener out of epoll for a while: what waits there would wake us again at once.
    fn rest(&mut self, shard: &Shard, kind: u64, at: u64, until: u64) {
        if let Some(listener) = self.listener(kind, at) {
            let _ = epoll::delete(shard.epoll(), listener);
            self.resting.push(Resting { kind, at, until });
        }
    }

    fn listener(&self, kind: u64, at: u64) -> Option<BorrowedFd<'_>> {
        if kind == LISTENER {
            self.listeners.get(at as usize).map(AsFd::as_fd)
        } else {
            self.local.as_ref().map(AsFd::as_fd)
        }
    }

    /// Has a half-open connection of either kind give its descriptor back.
    fn make_any_room(&mut self, now: u64) -> bool {
        self.make_room(now, SHORTAGE_GRACE) || self.make_local_room(now, SHORTAGE_GRACE)
    }

    /// Drops the oldest connection of the busiest address, unless it is younger than `grace`.
    fn make_room(&mut self, now: u64, grace: Duration) -> bool {
        let occupants = self.pending.iter().map(|(&id, pending)| {
            let half = pending.session.and_then(|session| self.half_open.get(&session));
            let weight = 1 + half.map_or(0, |half| half.lanes.len());
            let source = pending.addr.ip().to_canonical();
            Occupant { id, source, since: pending.since, weight }
        });
        let Some(oldest) = oldest_of_busiest(occupants) else { return false };
        if now < clock::after(oldest.since, grace) {
            return false;
        }
        if let Some(pending) = self.pending.remove(&oldest.id) {
            self.forget(pending.session);
        }
        self.note_dropped(&oldest.source, now);
        true
    }

    /// The same for the local socket, by process.
    fn make_local_room(&mut self, now: u64, grace: Duration) -> bool {
        let occupants = self.local_pending.iter().map(|(&id, pending)| {
            let (source, since) = (pending.pid, pending.since);
            Occupant { id, source, since, weight: 1 }
        });
        let Some(oldest) = oldest_of_busiest(occupants) else { return false };
        if now < clock::after(oldest.since, grace) {
            return false;
        }
        self.local_pending.remove(&oldest.id);
        self.note_dropped(&format_args!("process {}", oldest.source), now);
        true
    }

    fn note_dropped(&mut self, from: &dyn fmt::Display, now: u64) {
        self.dropped += 1;
        if self.dropped_warnings.is_due(now) {
            let dropped = std::mem::take(&mut self.dropped);
            tracing::warn!(%from, dropped, "half-open connections made room for new ones");
        }
    }

    /// The connection that opened a session is gone: nobody can complete the session.
    fn forget(&mut self, session: Option<[u8; 16]>) {
        if let Some(session) = session {
            self.half_open.remove(&session);
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
        let session = self.pending.get(&id)?.session;
        let new = self.hear(endpoint, shard, id, now);
        if !self.pending.contains_key(&id) {
            self.forget(session);
        }
        new
    }

    fn hear(
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
                            shard: endpoint.shards.of(hello.sub_session),
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
                let _ = epoll::delete(shard.epoll(), &pending.stream);
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
                let _ = epoll::delete(shard.epoll(), &pending.stream);
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
        if self.half_open.contains_key(&hello.session) {
            return Err(Refusal::Full);
        }
        let whom = whom(hello).ok_or(Refusal::UnknownSession)?;
        if !endpoint.has_session_of(whom.who, hello.sub_session) {
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
        let Some(pending) = self.local_pending.remove(&id) else { return };
        match unix::recv(pending.socket.as_fd()) {
            Ok(Received::Packet(packet)) => {
                let _ = epoll::delete(shard.epoll(), &pending.socket);
                if self.attach(endpoint, pending.socket, packet).is_none() {
                    tracing::debug!("a local connection was dropped");
                }
            }
            Ok(Received::WouldBlock) => {
                self.local_pending.insert(id, pending);
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
        rdma =
            Some(Arc::new(queues::QueueReach { ports, plans: Vec::new(), lanes: count, pinned }));
    }
    let parts = Parts {
        id: half.hello.session,
        incarnation: half.hello.incarnation,
        sub_session: half.hello.sub_session,
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

/// Which session a hello is about; `None` for a sub-session that there cannot be.
fn whom(hello: &Hello) -> Option<Whom> {
    let sub_session = match hello.sub_session {
        Some(sub_session) if (1..=MAX_SUB_SESSIONS).contains(&sub_session.number) => {
            sub_session.number
        }
        Some(_) => return None,
        None => 0,
    };
    Some(Whom { who: hello.incarnation, sub_session })
}

fn lane(stream: TcpStream, index: u16, role: Role, now: u64) -> Option<Lane> {
    let wire = TcpWire::new(stream).ok()?;
    Some(Lane::new(Box::new(wire), index, role, now))
}

/// Answers on a fresh connection, whose buffer has room for so little; `None` when it is gone.
fn reply(stream: &mut TcpStream, message: &Control) -> Option<()> {
    stream.write_all(&frame(message)).ok()
}

/// How many connections may be in the handshake, given the descriptors that this process may have.
fn most_pending() -> usize {
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(allowed / DESCRIPTOR_SHARE)
        .unwrap_or(usize::MAX)
        .clamp(MIN_PENDING, MAX_PENDING)
}

/// Whether accepting failed for one connection alone, as accept(2) says: the next may be had at once.
fn is_of_connection(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EINTR
                | libc::ECONNABORTED
                | libc::EPROTO
                | libc::ENETDOWN
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENONET
                | libc::ENOPROTOOPT
        )
    )
}

fn watch(shard: &Shard, fd: BorrowedFd<'_>, kind: u64, at: u64) -> io::Result<()> {
    let data = EventData::new_u64(ACCEPTOR | kind << 32 | at);
    Ok(epoll::add(shard.epoll(), fd, data, EventFlags::IN)?)
}
