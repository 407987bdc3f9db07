//! The acceptor's side of the handshake. It never blocks, and it bounds the number of connections
//! and their time. `accepting` has its thread.
//!
//! A connection becomes a session, a lane of a session, or nothing. A session begins with TLS,
//! which proves the opener's identity before its first message. A lane begins with a message that
//! proves that it belongs to its session (see `secure`), one that replaces a lost lane too (see
//! `identity::lanes`). Whatever a connection sends, the endpoint goes on serving the other peers.
//!
//! When there are too many half-open connections, or too few file descriptors for another one, the
//! acceptor drops the oldest connection of the busiest source (see `crowd`). If that does not help,
//! it takes the listener out of epoll for a moment. Connections that are not accepted yet wait in
//! the kernel's backlog, so no thread spins. `admission` has the limits.
//!
//! A thread of its own opens the queue pairs of each session, because that may block.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::SegQueue;
use peerway_core::config::DataProtection;
use peerway_core::protocol::Role;
use peerway_core::wire::{
    Admission as Shown, Control, FrameError, Hello, Proof, Ready, Refusal, Welcome,
};
use rustix::event::epoll::{self, EventData, EventFlags};

use super::admission::{self, MostHandshakes};
use super::choose::{Found, choose, may_pull, offers_local};
use super::crowd::{Occupant, oldest_of_busiest};
use super::detection::{self, Detection};
use super::hello::{Assembly, Attach, Attached, HelloError, Probe, frame};
use super::opener::{add_queues, decode_host, encode_host, visible_pid};
use super::secure::{Beginning, Purpose, Secure};
use crate::clock;
use crate::identity::admission::Admission;
use crate::identity::lanes::LaneAttempt;
use crate::identity::{Identity, Side};
use crate::limits::RefusalReason;
use crate::os::process::HostFacts;
use crate::os::random;
use crate::os::unix::{self, Received};
use crate::os::wake::EventFd;
use crate::peers::OpenedByPeer;
use crate::progress::driver::NewSession;
use crate::progress::engine::Engine;
use crate::progress::lane::Lane;
use crate::progress::shard::{DriverCommand, Shard};
use crate::progress::shards::MAX_SUB_SESSIONS;
use crate::session::lanes::{JoinLane, LaneAcceptor, Replacements};
use crate::session::link::{Half, Link};
use crate::session::{Parts, Session, Whom};
use crate::transport::queues::{self, NewQueues};
use crate::transport::tcp::{self, LaneSecrets};

/// The time after which a half-open connection may be dropped when its source has too many. A
/// normal handshake rarely takes longer, and new connections can wait this long.
const GRACE: Duration = Duration::from_millis(250);
/// The same for a connection that has sent nothing. An opener sends its hello at once.
const SILENT_GRACE: Duration = Duration::from_millis(100);
/// The same when no source has too many, or when file descriptors are short. Many peers may connect
/// at once, or the program itself may have used up the descriptors, so slow handshakes get more
/// time.
const SHORTAGE_GRACE: Duration = Duration::from_secs(1);
/// How long a listener rests when it cannot accept. About ten failing attempts a second cost
/// nothing.
const REST: Duration = Duration::from_millis(100);
/// How long a listener rests when too many connections are half open. Normal handshakes end soon.
const FULL_REST: Duration = Duration::from_millis(20);
/// Connections that a listener accepts before the acceptor serves other events.
const ACCEPTS: usize = 64;
/// Interval between two checks for half-open connections that took too long.
const LOOK: Duration = Duration::from_secs(1);
/// The shortest interval between two equal warnings in the log.
const WARN_EVERY: Duration = Duration::from_secs(10);
/// The longest body of the message that opens a lane.
const MAX_OPEN_LANE: usize = 256;
/// The most bulk lanes of a session, whatever the settings of both sides.
pub(super) const MAX_LANES: u16 = 64;

const LISTENER: u64 = 0;
const LOCAL_LISTENER: u64 = 1;
const CONNECTION: u64 = 2;
const LOCAL_CONNECTION: u64 = 3;
const OPENED_QUEUES: u64 = 4;
/// The word of the event that only wakes the acceptor's thread.
pub(super) const WAKE: u64 = u64::MAX;

/// The listeners and all connections in the handshake.
pub(super) struct Acceptor {
    epoll: Arc<OwnedFd>,
    listeners: Vec<TcpListener>,
    local: Option<OwnedFd>,
    pending: HashMap<u64, Pending>,
    local_pending: HashMap<u64, LocalPending>,
    /// Each entry belongs to a connection in `pending` and ends with it, so there are never more
    /// entries than connections.
    half_open: HashMap<[u8; 16], HalfOpen>,
    /// Queue pairs that threads have opened for half-open sessions.
    opened: Arc<Opened>,
    /// Listeners that are out of epoll for a while.
    resting: Vec<Resting>,
    /// The log says that no connection can be accepted, and has not said the contrary since.
    short: bool,
    short_warnings: Warnings,
    next: u64,
}

/// A listener that goes back into epoll at `until`.
struct Resting {
    /// [`LISTENER`] or [`LOCAL_LISTENER`].
    kind: u64,
    at: u64,
    until: u64,
}

/// The time of the last warning.
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

/// A TCP connection in the handshake.
struct Pending {
    stream: TcpStream,
    addr: SocketAddr,
    speech: Speech,
    since: u64,
    deadline: u64,
    /// The opener has shown that it may take part.
    is_admitted: bool,
    /// The session that it opened, before its `Ready`.
    session: Option<[u8; 16]>,
}

/// What a connection says.
enum Speech {
    /// Nothing yet.
    Nothing,
    /// It opens a session. The box keeps the table of connections small.
    Session(Box<Secure>),
    /// It opens a lane.
    Lane(Assembly),
}

impl Pending {
    /// Reads what has arrived. `None` means that there was progress, and no complete message.
    fn read(&mut self, identity: &Identity) -> Result<Option<Control>, HelloError> {
        match &mut self.speech {
            Speech::Nothing => {
                self.speech = match Beginning::of(&self.stream)? {
                    Beginning::Tls => Speech::Session(Box::new(Secure::accept(identity)?)),
                    Beginning::Frame => Speech::Lane(Assembly::new(MAX_OPEN_LANE)),
                };
                Ok(None)
            }
            Speech::Session(secure) => {
                let read = secure.read(&mut self.stream);
                let output = secure.take_output();
                let sent = self.stream.write_all(&output);
                let read = read?;
                sent.map_err(|error| HelloError::Io(io::Error::other(error)))?;
                Ok(read)
            }
            Speech::Lane(assembly) => {
                let read = assembly.read(&mut self.stream);
                if let Err(HelloError::Frame(FrameError::Version(_))) = read {
                    // An opener of another version sends frames without TLS. The header of any
                    // answer tells it this version.
                    self.reply(&Control::Refuse(Refusal::Full));
                }
                read
            }
        }
    }

    /// Answers. The send buffer of a fresh connection has room for so few bytes. `None` if the
    /// connection is gone.
    fn reply(&mut self, message: &Control) -> Option<()> {
        let bytes = match &mut self.speech {
            Speech::Session(secure) => secure.encrypt(message).ok()?,
            _ => frame(message),
        };
        self.stream.write_all(&bytes).ok()
    }

    /// Checks what the opener shows to be admitted. Returns what this side shows.
    fn admit(&mut self, admission: &Admission, shown: &Shown) -> Result<Shown, String> {
        let Speech::Session(secure) = &mut self.speech else {
            return Err(String::from("it is not asked for"));
        };
        secure.check(admission, Side::Opener, shown)?;
        let own = secure.show(admission, Side::Acceptor)?;
        secure.admit();
        self.is_admitted = true;
        Ok(own)
    }

    /// Tells the opener why it may not take part.
    fn refuse(&mut self, why: String) {
        tracing::debug!(from = %self.addr, %why, "did not admit an opener");
        self.reply(&Control::Refuse(Refusal::NotAdmitted(why)));
    }

    fn secure(&self) -> Option<&Secure> {
        match &self.speech {
            Speech::Session(secure) => Some(secure),
            _ => None,
        }
    }
}

/// A connection on the local socket that is not attached to a session yet.
struct LocalPending {
    socket: OwnedFd,
    /// The process that connected. 0 if it is not visible here.
    pid: u32,
    since: u64,
    deadline: u64,
}

/// A session whose opener has not sent `Ready` yet.
struct HalfOpen {
    hello: Hello,
    /// The connection that opened it, in [`Acceptor::pending`].
    connection: u64,
    lanes: Vec<(u16, TcpStream)>,
    queues: NewQueues,
    offer: Offer,
    /// The shard that will drive the session.
    shard: Arc<Shard>,
    link: Option<(Link, bool)>,
    /// Random bytes. The opener reads them through CMA to show that it can.
    secret: Box<[u8; 16]>,
    deadline: u64,
}

/// How far the opener's offer of queue pairs is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Offer {
    /// There is none.
    Missing,
    /// A thread opens our ends.
    Opening,
    /// The opener has the answer.
    Answered,
}

/// The results of threads that open queue pairs.
struct Opened {
    results: SegQueue<OpenedQueues>,
    /// Signalled after each result.
    event: EventFd,
}

/// The queue pairs of a session, and the answers to the opener's offers.
struct OpenedQueues {
    session: [u8; 16],
    /// The connection that offered them.
    connection: u64,
    queues: NewQueues,
    answers: Vec<queues::Answer>,
}

/// What a connection has become.
pub(super) enum Completed {
    Session(Box<NewSession>),
    Lane(JoiningLane),
}

impl Completed {
    /// The session, and the command that gives its driver what is new.
    pub(super) fn into_command(self) -> (Arc<Session>, DriverCommand) {
        match self {
            Self::Session(new) => (new.session.clone(), DriverCommand::Adopt(new)),
            Self::Lane(JoiningLane { session, attempt, join }) => {
                (session.clone(), DriverCommand::JoinLane { session, attempt, join })
            }
        }
    }
}

/// A connection that replaces a lost lane, if the driver of its session lets it join.
pub(super) struct JoiningLane {
    session: Arc<Session>,
    attempt: LaneAttempt,
    join: JoinLane,
}

/// What an acceptor holds for openers.
#[cfg(any(test, fuzzing))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Occupancy {
    /// Connections in the handshake.
    pub(super) pending: usize,
    /// Sessions before their `Ready`.
    pub(super) half_open: usize,
    /// Those whose connection is gone.
    pub(super) without_connection: usize,
    /// Lanes of half-open sessions.
    pub(super) lanes: usize,
}

impl Acceptor {
    /// Handles an event of epoll. Returns the sessions and lanes that it completed.
    pub(super) fn handle_event(
        &mut self,
        endpoint: &Arc<Engine>,
        word: u64,
        now: u64,
    ) -> Vec<Completed> {
        self.sweep(now);
        let at = word & 0xFFFF_FFFF;
        match word >> 32 {
            LISTENER => self.accept(endpoint, at as usize, now),
            LOCAL_LISTENER => self.accept_local(endpoint, now),
            LOCAL_CONNECTION => self.local_spoke(endpoint, at),
            OPENED_QUEUES => self.take_opened_queues(),
            CONNECTION => return self.spoke(endpoint, at, now).into_iter().collect(),
            _ => {}
        }
        Vec::new()
    }

    /// The time until something is due.
    pub(super) fn until_next(&self, now: u64) -> Option<Duration> {
        let idle = self.pending.is_empty() && self.local_pending.is_empty();
        let look = (!idle).then_some(LOOK);
        let wake = self.resting.iter().map(|resting| clock::until(resting.until, now)).min();
        look.into_iter().chain(wake).min()
    }

    /// Drops connections that timed out, and watches paused listeners again.
    pub(super) fn tick(&mut self, now: u64) {
        self.sweep(now);
        self.wake_listeners(now);
    }

    /// Watches the listeners with this epoll.
    pub(super) fn new(
        epoll: Arc<OwnedFd>,
        listeners: Vec<TcpListener>,
        local: Option<OwnedFd>,
    ) -> io::Result<Self> {
        for (at, listener) in listeners.iter().enumerate() {
            watch(&epoll, listener.as_fd(), LISTENER, at as u64)?;
        }
        if let Some(local) = &local {
            watch(&epoll, local.as_fd(), LOCAL_LISTENER, 0)?;
        }
        let opened = Opened { results: SegQueue::new(), event: EventFd::new()? };
        watch(&epoll, opened.event.as_fd(), OPENED_QUEUES, 0)?;
        Ok(Self {
            epoll,
            listeners,
            local,
            opened: Arc::new(opened),
            pending: HashMap::new(),
            local_pending: HashMap::new(),
            half_open: HashMap::new(),
            resting: Vec::new(),
            short: false,
            short_warnings: Warnings::default(),
            next: 0,
        })
    }

    /// What the acceptor holds now.
    #[cfg(any(test, fuzzing))]
    pub(super) fn occupancy(&self) -> Occupancy {
        let without = |half: &&HalfOpen| !self.pending.contains_key(&half.connection);
        Occupancy {
            pending: self.pending.len(),
            half_open: self.half_open.len(),
            without_connection: self.half_open.values().filter(without).count(),
            lanes: self.half_open.values().map(|half| half.lanes.len()).sum(),
        }
    }

    /// Puts listeners that have rested back into epoll.
    fn wake_listeners(&mut self, now: u64) {
        for mut resting in std::mem::take(&mut self.resting) {
            let Some(listener) = self.listener(resting.kind, resting.at) else { continue };
            if now >= resting.until {
                if watch(&self.epoll, listener, resting.kind, resting.at).is_ok() {
                    continue;
                }
                // Watching needs memory, which may be short as well.
                resting.until = clock::after(now, REST);
            }
            self.resting.push(resting);
        }
    }

    /// Drops connections that took too long.
    fn sweep(&mut self, now: u64) {
        self.pending.retain(|_, p| p.deadline > now);
        self.local_pending.retain(|_, p| p.deadline > now);
        self.half_open.retain(|_, half| half.deadline > now);
    }

    fn accept(&mut self, endpoint: &Engine, at: usize, now: u64) {
        let most = MostHandshakes::now(&endpoint.config.limits);
        if !self.has_descriptors(endpoint, LISTENER, at as u64, now) {
            return self.rest(LISTENER, at as u64, clock::after(now, REST));
        }
        let first_kept_free = admission::first_kept_free(&endpoint.config.limits);
        let mut made_room = false;
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get(at) else { return };
            let (stream, addr) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.caught_up(),
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    if !made_room && self.make_any_room(endpoint, most, now) {
                        made_room = true;
                        continue;
                    }
                    self.warn_of_shortage(endpoint, &error, now);
                    return self.rest(LISTENER, at as u64, clock::after(now, REST));
                }
            };
            made_room = false;
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            let is_last = stream.as_raw_fd() as u64 >= first_kept_free;
            if watch(&self.epoll, stream.as_fd(), CONNECTION, id).is_ok() {
                let pending = Pending {
                    stream,
                    addr,
                    speech: Speech::Nothing,
                    since: now,
                    deadline,
                    is_admitted: !endpoint.identity.admission.is_required(),
                    session: None,
                };
                self.pending.insert(id, pending);
            }
            self.trim(endpoint, addr.ip().to_canonical(), most, now);
            while self.pending.len() > most.all {
                if !self.make_room(endpoint, most, now, GRACE) {
                    return self.rest(LISTENER, at as u64, clock::after(now, FULL_REST));
                }
            }
            if is_last {
                return self.rest(LISTENER, at as u64, clock::after(now, REST));
            }
        }
    }

    fn accept_local(&mut self, endpoint: &Engine, now: u64) {
        let most = MostHandshakes::now(&endpoint.config.limits);
        if !self.has_descriptors(endpoint, LOCAL_LISTENER, 0, now) {
            return self.rest(LOCAL_LISTENER, 0, clock::after(now, REST));
        }
        let first_kept_free = admission::first_kept_free(&endpoint.config.limits);
        let mut made_room = false;
        for _ in 0..ACCEPTS {
            let Some(local) = &self.local else { return };
            let socket = match unix::accept(local.as_fd()) {
                Ok(Some(socket)) => socket,
                Ok(None) => return self.caught_up(),
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    if !made_room && self.make_any_room(endpoint, most, now) {
                        made_room = true;
                        continue;
                    }
                    self.warn_of_shortage(endpoint, &error, now);
                    return self.rest(LOCAL_LISTENER, 0, clock::after(now, REST));
                }
            };
            made_room = false;
            let Ok(peer) = unix::credentials(socket.as_fd()) else { continue };
            // A connection of another user could not attach: see `attach`.
            if peer.uid != rustix::process::getuid().as_raw() {
                endpoint
                    .refusals
                    .note(RefusalReason::OtherUser, &format_args!("user {}", peer.uid));
                continue;
            }
            let deadline = clock::after(now, endpoint.config.connect_timeout);
            let id = self.id();
            let is_last = socket.as_raw_fd() as u64 >= first_kept_free;
            if watch(&self.epoll, socket.as_fd(), LOCAL_CONNECTION, id).is_ok() {
                let pending = LocalPending { socket, pid: peer.pid, since: now, deadline };
                self.local_pending.insert(id, pending);
            }
            while self.local_pending.len() > most.all {
                if !self.make_local_room(endpoint, most, now, GRACE) {
                    return self.rest(LOCAL_LISTENER, 0, clock::after(now, FULL_REST));
                }
            }
            if is_last {
                return self.rest(LOCAL_LISTENER, 0, clock::after(now, REST));
            }
        }
    }

    /// Whether a connection can be accepted while descriptors stay free for the rest of the
    /// process. Drops old half-open connections until it can.
    fn has_descriptors(&mut self, endpoint: &Engine, kind: u64, at: u64, now: u64) -> bool {
        let limits = &endpoint.config.limits;
        loop {
            let Some(listener) = self.listener(kind, at) else { return false };
            if admission::has_descriptor_below(admission::first_kept_free(limits), listener) {
                return true;
            }
            if !self.make_any_room(endpoint, MostHandshakes::now(limits), now) {
                let error = io::Error::from_raw_os_error(libc::EMFILE);
                self.warn_of_shortage(endpoint, &error, now);
                return false;
            }
        }
    }

    /// All waiting connections are accepted.
    fn caught_up(&mut self) {
        if std::mem::take(&mut self.short) {
            tracing::info!("connections are accepted again");
        }
    }

    /// Warns that there is no file descriptor or no memory for a connection.
    fn warn_of_shortage(&mut self, endpoint: &Engine, error: &io::Error, now: u64) {
        endpoint.refusals.count(RefusalReason::Descriptors);
        if !self.short && self.short_warnings.is_due(now) {
            self.short = true;
            tracing::warn!(
                %error,
                "no connection can be accepted; new peers wait until this process has file \
                 descriptors and memory again (`ulimit -n` shows the limit of descriptors)"
            );
        }
    }

    /// Takes a listener out of epoll for a while. Otherwise its waiting connections would wake the
    /// thread again at once.
    fn rest(&mut self, kind: u64, at: u64, until: u64) {
        if let Some(listener) = self.listener(kind, at) {
            let _ = epoll::delete(&self.epoll, listener);
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

    /// Drops a half-open connection of either kind to free its file descriptor.
    fn make_any_room(&mut self, endpoint: &Engine, most: MostHandshakes, now: u64) -> bool {
        self.make_room(endpoint, most, now, SHORTAGE_GRACE)
            || self.make_local_room(endpoint, most, now, SHORTAGE_GRACE)
    }

    /// Drops connections of an address that has more than its share, the oldest first, unless they
    /// are young. Other connections do not have to wait for that.
    fn trim(&mut self, endpoint: &Engine, source: IpAddr, most: MostHandshakes, now: u64) {
        let is_of = |pending: &Pending| pending.addr.ip().to_canonical() == source;
        let mut held = self.pending.values().filter(|pending| is_of(pending)).count();
        while held > most.of_source {
            let may_go = |pending: &Pending| {
                let grace = if pending.session.is_some() { GRACE } else { SILENT_GRACE };
                is_of(pending) && now >= clock::after(pending.since, grace)
            };
            let of_source = self.pending.iter().filter(|(_, pending)| may_go(pending));
            let first = of_source
                .min_by_key(|(id, pending)| (pending.session.is_some(), pending.since, **id));
            let Some((&id, _)) = first else { return };
            self.drop_pending(endpoint, id);
            held -= 1;
        }
    }

    /// Drops a half-open connection.
    fn drop_pending(&mut self, endpoint: &Engine, id: u64) {
        if let Some(pending) = self.pending.remove(&id) {
            self.forget(pending.session);
            endpoint.refusals.note(RefusalReason::Handshakes, &pending.addr);
        }
    }

    /// Drops the oldest connection of the busiest address, unless it is younger than `grace`.
    fn make_room(
        &mut self,
        endpoint: &Engine,
        most: MostHandshakes,
        now: u64,
        grace: Duration,
    ) -> bool {
        let occupants = self.pending.iter().map(|(&id, pending)| {
            let half = pending.session.and_then(|session| self.half_open.get(&session));
            let weight = 1 + half.map_or(0, |half| half.lanes.len());
            let source = pending.addr.ip().to_canonical();
            let has_spoken = pending.session.is_some();
            Occupant { id, source, since: pending.since, has_spoken, weight }
        });
        let occupants: Vec<_> = occupants.collect();
        let may_go = |held, one: &Occupant<_>| {
            now >= clock::after(one.since, grace_of(held, one, most, grace))
        };
        let Some(oldest) = oldest_of_busiest(&occupants, may_go) else { return false };
        self.drop_pending(endpoint, oldest.id);
        true
    }

    /// Does the same for the local socket. The source is the process.
    fn make_local_room(
        &mut self,
        endpoint: &Engine,
        most: MostHandshakes,
        now: u64,
        grace: Duration,
    ) -> bool {
        let occupants = self.local_pending.iter().map(|(&id, pending)| {
            let (source, since) = (pending.pid, pending.since);
            // A local connection speaks once, and is then no longer pending.
            Occupant { id, source, since, has_spoken: true, weight: 1 }
        });
        let occupants: Vec<_> = occupants.collect();
        let may_go = |held, one: &Occupant<_>| {
            now >= clock::after(one.since, grace_of(held, one, most, grace))
        };
        let Some(oldest) = oldest_of_busiest(&occupants, may_go) else { return false };
        self.local_pending.remove(&oldest.id);
        let source = format_args!("process {}", oldest.source);
        endpoint.refusals.note(RefusalReason::Handshakes, &source);
        true
    }

    /// Forgets a half-open session after its connection is gone: nothing can complete it.
    fn forget(&mut self, session: Option<[u8; 16]>) {
        if let Some(session) = session {
            self.half_open.remove(&session);
        }
    }

    fn id(&mut self) -> u64 {
        self.next = (self.next + 1) & 0xFFFF_FFFF;
        self.next
    }

    /// Handles input on a connection in the handshake.
    fn spoke(&mut self, endpoint: &Arc<Engine>, id: u64, now: u64) -> Option<Completed> {
        let session = self.pending.get(&id)?.session;
        let new = self.hear(endpoint, id, now);
        if !self.pending.contains_key(&id) {
            self.forget(session);
        }
        new
    }

    fn hear(&mut self, endpoint: &Arc<Engine>, id: u64, now: u64) -> Option<Completed> {
        let mut pending = self.pending.remove(&id)?;
        loop {
            match pending.read(&endpoint.identity) {
                Ok(Some(message)) => {
                    return self.said(endpoint, id, pending, message, now);
                }
                Ok(None) => {}
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.pending.insert(id, pending);
                    return None;
                }
                Err(error) => {
                    tracing::debug!(from = %pending.addr, ?error, "dropped a half-open connection");
                    return None;
                }
            }
        }
    }

    fn said(
        &mut self,
        endpoint: &Arc<Engine>,
        id: u64,
        mut pending: Pending,
        message: Control,
        now: u64,
    ) -> Option<Completed> {
        // A connection without TLS can only add a lane, and is told nothing else.
        let is_lane = matches!(message, Control::OpenLane { .. } | Control::ReplaceLane { .. });
        if pending.secure().is_none() != is_lane {
            return None;
        }
        match (message, pending.session) {
            (Control::Admit(shown), None) => {
                match pending.admit(&endpoint.identity.admission, &shown) {
                    Ok(own) => {
                        pending.reply(&Control::Admit(own))?;
                        self.pending.insert(id, pending);
                    }
                    Err(why) => pending.refuse(why),
                }
                None
            }
            (Control::Hello(_), None) if !pending.is_admitted => {
                pending.refuse(endpoint.identity.admission.requirement().to_owned());
                None
            }
            (Control::Hello(hello), None) => {
                match self.greet(endpoint, pending.secure()?, &hello, pending.addr.ip(), now) {
                    Ok(welcome) => {
                        pending.reply(&Control::Welcome(welcome))?;
                        pending.session = Some(hello.session);
                        if let Speech::Session(secure) = &mut pending.speech {
                            secure.admit();
                        }
                        let half = HalfOpen {
                            connection: id,
                            lanes: Vec::new(),
                            queues: NewQueues::default(),
                            offer: Offer::Missing,
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
                        pending.reply(&Control::Refuse(refusal));
                    }
                }
                None
            }
            (Control::OpenLane { session, lane, proof }, None) => {
                let opened = self.prove(&session, Purpose::Lane(lane), &proof);
                let half = self.half_open.get_mut(&session);
                // Only a connection that proves the session learns of its limits.
                if half.is_some()
                    && opened.is_some()
                    && let Err(refusal) = admission::check_lane(&endpoint.config.limits, lane)
                {
                    endpoint.refusals.note(RefusalReason::Lanes, &pending.addr);
                    pending.reply(&Control::Refuse(refusal));
                    return None;
                }
                let fits = half.filter(|half| {
                    (1..=half.hello.lanes.min(MAX_LANES)).contains(&lane)
                        && half.lanes.iter().all(|(index, _)| *index != lane)
                });
                let (Some(half), Some(proof)) = (fits, opened) else {
                    pending.reply(&Control::Refuse(Refusal::UnknownSession));
                    return None;
                };
                pending.reply(&Control::LaneOpened { proof })?;
                let _ = epoll::delete(&self.epoll, &pending.stream);
                half.lanes.push((lane, pending.stream));
                None
            }
            (Control::ReplaceLane { session, lane, generation, proof }, None) => {
                let attempt = LaneAttempt { lane, generation };
                let session = endpoint.peers.accepted_session(&session);
                let joins = session.and_then(|session| joins(session, attempt, &proof));
                let Some((session, answer, data, secrets)) = joins else {
                    pending.reply(&Control::Refuse(Refusal::UnknownSession));
                    return None;
                };
                let _ = epoll::delete(&self.epoll, &pending.stream);
                let mut stream = pending.stream;
                // The driver knows whether the lane is free. It neither waits nor reads here: the
                // send buffer of a fresh connection has room for the answer.
                let join = Box::new(move || {
                    stream.write_all(&frame(&Control::LaneOpened { proof: answer }))?;
                    tcp::wire(stream, data, &secrets)
                });
                Some(Completed::Lane(JoiningLane { session, attempt, join }))
            }
            (Control::OpenQueues { queues: offers }, Some(session)) => {
                let half = self.half_open.get_mut(&session)?;
                if half.offer != Offer::Missing {
                    return None;
                }
                half.offer = Offer::Opening;
                let lanes: Vec<u16> = offers.iter().map(|offer| offer.lane).collect();
                let (shard, theirs) = (half.shard.clone(), half.hello.rdma.clone());
                let opened = self.opened.clone();
                let started = queues::in_thread(&endpoint.cpus, move || {
                    let (queues, answers) = queues::answer(shard.ports(), &theirs, &offers);
                    let queues = NewQueues::new(queues);
                    opened.results.push(OpenedQueues { session, connection: id, queues, answers });
                    opened.event.signal();
                });
                if let Err(why) = started {
                    half.offer = Offer::Answered;
                    let refused = lanes.into_iter().map(|lane| (lane, Err(why.clone())));
                    pending.reply(&Control::QueuesOpened { queues: refused.collect() })?;
                }
                self.pending.insert(id, pending);
                None
            }
            (Control::Ready(ready), Some(session)) => {
                let half = self.half_open.remove(&session)?;
                if half.offer == Offer::Opening {
                    return None;
                }
                let _ = epoll::delete(&self.epoll, &pending.stream);
                let new = complete(endpoint, half, pending, ready, now)?;
                Some(Completed::Session(Box::new(new)))
            }
            _ => None,
        }
    }

    /// Answers the openers whose queue pairs are open. The session may be gone; dropping its queue
    /// pairs has them destroyed.
    fn take_opened_queues(&mut self) {
        self.opened.event.drain();
        while let Some(OpenedQueues { session, connection, queues, answers }) =
            self.opened.results.pop()
        {
            let half = self.half_open.get_mut(&session);
            let Some(half) = half.filter(|half| half.connection == connection) else { continue };
            let Some(pending) = self.pending.get_mut(&connection) else { continue };
            (half.queues, half.offer) = (queues, Offer::Answered);
            if pending.reply(&Control::QueuesOpened { queues: answers }).is_none() {
                self.pending.remove(&connection);
                self.forget(Some(session));
            }
        }
    }

    /// Checks the opener's proof that a connection belongs to a half-open session. Returns the
    /// acceptor's own.
    fn prove(&self, session: &[u8; 16], purpose: Purpose, proof: &Proof) -> Option<Proof> {
        let half = self.half_open.get(session)?;
        let secure = self.pending.get(&half.connection)?.secure()?;
        if !secure.is_proven(proof, Side::Opener, session, purpose) {
            return None;
        }
        secure.proof(Side::Acceptor, session, purpose)
    }

    fn greet(
        &mut self,
        endpoint: &Arc<Engine>,
        secure: &Secure,
        hello: &Hello,
        from: IpAddr,
        now: u64,
    ) -> Result<Welcome, Refusal> {
        self.sweep(now);
        let proven = secure.peer().ok_or(Refusal::UnknownSession)?;
        if hello.incarnation != proven {
            return Err(Refusal::Identity(format!(
                "the hello claims to come from {}, but its key is that of {proven}",
                hello.incarnation
            )));
        }
        if self.half_open.contains_key(&hello.session) {
            return Err(Refusal::Full);
        }
        let whom = whom(hello).ok_or(Refusal::UnknownSession)?;
        if !endpoint.peers.has_session_of(whom.who, hello.sub_session) {
            return Err(Refusal::UnknownSession);
        }
        if let Some(old) = endpoint.peers.live_session(&whom)
            && hello.replaces == Some(old.id)
        {
            old.remove();
        }
        if endpoint.peers.has_or_opens(&whom) {
            return Err(Refusal::Exists);
        }
        admit(endpoint, hello, from)?;
        let pin = endpoint.config.transport;
        let here = HostFacts::here();
        let of_host = Purpose::Host(here.boot_id);
        let same_host = here.boot_id != [0; 16]
            && secure.is_proven(&hello.host, Side::Opener, &hello.session, of_host);
        let (mut local, mut local_why) = (String::new(), String::new());
        match offers_local(pin, endpoint.config.disable_ipc) {
            Ok(()) if !same_host => local_why = String::from("it is on another host"),
            Ok(()) => {
                local.clone_from(&endpoint.local_name);
                if !super::choose::may_share_process(pin) {
                    local_why = format!("pinned to {pin}");
                }
            }
            Err(why) => local_why = why,
        }
        if pin.is_local() && !hello.local {
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
                "it is pinned to {pin}, and the opener has no RDMA device or is pinned to another \
                 path"
            )));
        }
        Ok(Welcome {
            detect_ms: detection::to_millis(endpoint.config.detect),
            data: endpoint.config.data,
            metadata: endpoint.metadata(),
            // Only processes of this host can use the description, so no other process gets it.
            host: if same_host { encode_host(&here) } else { Vec::new() },
            local,
            local_why,
            rdma,
            rdma_why,
        })
    }

    /// Handles input on a local connection, which attaches the segment to a half-open session.
    fn local_spoke(&mut self, endpoint: &Engine, id: u64) {
        let Some(pending) = self.local_pending.remove(&id) else { return };
        match unix::recv(pending.socket.as_fd()) {
            Ok(Received::Packet(packet)) => {
                let _ = epoll::delete(&self.epoll, &pending.socket);
                if self.attach(endpoint, pending.socket, packet).is_none() {
                    tracing::debug!("dropped a half-open local connection");
                }
            }
            Ok(Received::WouldBlock) => {
                self.local_pending.insert(id, pending);
            }
            Ok(Received::Cut(_)) => {
                tracing::warn!(
                    process = pending.pid,
                    "lost the file descriptors of a local peer, because this process has reached \
                     its limit (`ulimit -n`); the peer connects by TCP"
                );
            }
            Ok(Received::Closed) | Err(_) => {}
        }
    }

    fn attach(&mut self, endpoint: &Engine, socket: OwnedFd, packet: unix::Packet) -> Option<()> {
        let attach = Attach::from_bytes(&packet.bytes)?;
        let proof = self.prove(&attach.session, Purpose::Link, &attach.proof)?;
        let half = self.half_open.get_mut(&attach.session)?;
        let peer = unix::credentials(socket.as_fd()).ok()?;
        // Shared memory protects nothing from a hostile process, so only processes of the same user
        // get it.
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
        let answer = Attached { pulls, proof, probe: Probe::of(&half.secret) };
        unix::send(socket.as_fd(), &answer.to_bytes(), &[]).ok()?;
        let link = Link::new(segment, Half::Second, socket, memory, own, theirs);
        half.link = Some((link, pulls));
        Some(())
    }
}

/// Checks that a connection replaces a lane of this session. Returns the session with the answer,
/// the mode and the secrets of the lane.
fn joins(
    session: Arc<Session>,
    attempt: LaneAttempt,
    proof: &Proof,
) -> Option<(Arc<Session>, Proof, DataProtection, LaneSecrets)> {
    let acceptor = session.replacements.acceptor()?;
    let (answer, secrets) = acceptor.admit(proof, attempt)?;
    let data = acceptor.data;
    Some((session, answer, data, secrets))
}

/// Completes the session after both sides are ready, or refuses it if this side's pin cannot be
/// met.
fn complete(
    endpoint: &Arc<Engine>,
    half: HalfOpen,
    mut pending: Pending,
    ready: Ready,
    now: u64,
) -> Option<NewSession> {
    // Other sessions may have been completed since the hello.
    if let Err(refusal) = admit(endpoint, &half.hello, pending.addr.ip()) {
        pending.reply(&Control::Refuse(refusal));
        return None;
    }
    let here = HostFacts::here();
    let opener = decode_host(&ready.host);
    let same_process =
        ready.same_process && opener.as_ref().is_some_and(|host| host.process == here.process);
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
        windows: endpoint.rdma.as_ref().is_ok_and(|rdma| rdma.has_windows()),
    };
    if ready.linked != found.linked || ready.same_process != found.same_process {
        return None;
    }
    let data = endpoint.config.data.max(half.hello.data);
    let (path, reach) = match choose(endpoint.config.transport, found, &ready.why, data) {
        Ok(chosen) => chosen,
        Err(why) => {
            pending.reply(&Control::Refuse(Refusal::Pinned(why)));
            return None;
        }
    };
    // Other handshakes may have ended since the hello.
    let opened = match admit(endpoint, &half.hello, pending.addr.ip()) {
        Ok(opened) => opened,
        Err(refusal) => {
            pending.reply(&Control::Refuse(refusal));
            return None;
        }
    };
    let accept = |whom| endpoint.peers.begin_accepting(whom, half.hello.session, opened);
    let Some(claim) = whom(&half.hello).and_then(accept) else {
        pending.reply(&Control::Refuse(Refusal::Exists));
        return None;
    };
    // This is the last message inside TLS. The next byte in both directions belongs to the lane.
    pending.reply(&Control::Ready(Ready { host: Vec::new(), ..ready }))?;
    let control = if found.linked || with_queues { Role::Control } else { Role::Latency };
    let mut streams = half.lanes;
    streams.sort_by_key(|(index, _)| *index);
    let Speech::Session(secure) = pending.speech else { return None };
    let lane = |stream, index, role| -> Option<Lane> {
        let secrets = secure.secrets(Side::Acceptor, &half.hello.session, index)?;
        Some(Lane::new(tcp::wire(stream, data, &secrets).ok()?, index, role, now))
    };
    let mut lanes = vec![Some(lane(pending.stream, 0, control)?)];
    for (index, stream) in streams {
        if usize::from(index) != lanes.len() {
            return None;
        }
        lanes.push(Some(lane(stream, index, Role::Bulk)?));
    }
    let replacements = match found.linked || found.same_process || with_queues {
        true => Replacements::None,
        false => {
            let keys = secure.lane_keys(&half.hello.session)?;
            Replacements::Accepts(LaneAcceptor::new(keys, data, lanes.len()))
        }
    };
    let mut rdma = None;
    if with_queues {
        if lanes.len() > 1 {
            return None;
        }
        let queues = half.queues.take();
        let count = queues.len();
        add_queues(&mut lanes, queues, now);
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
        pid: visible_pid(&here, opener),
        link,
        rdma,
        replacements,
        initiator: false,
    };
    let Detection { detect, beat } = Detection::agree(endpoint.config.detect, half.hello.detect_ms);
    let session = Session::new(parts, half.shard.index, half.shard);
    Some(NewSession { session, lanes, detect, beat, claim: Some(claim) })
}

/// Refuses a session if there are too many. Half-open sessions do not count: they are bounded as
/// handshakes, and must not keep out a peer that is ready.
fn admit(endpoint: &Engine, hello: &Hello, from: IpAddr) -> Result<OpenedByPeer, Refusal> {
    let new = admission::opened_from(from, hello.sub_session.is_some());
    let others = endpoint.peers.opened_by_peers().into_iter();
    admission::check_session(&endpoint.config.limits, new, others)
        .inspect_err(|_| endpoint.refusals.note(RefusalReason::Sessions, &from))
        .map(|()| new)
}

/// The session that a hello names. `None` if the sub-session number is out of range.
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

/// The time that a half-open connection has at least, where others have `grace`. `held` is the
/// number of connections of its source. If no source has more than its share, many peers connect at
/// once.
fn grace_of<S>(
    held: usize,
    occupant: &Occupant<S>,
    most: MostHandshakes,
    grace: Duration,
) -> Duration {
    if held <= most.of_source {
        return grace.max(SHORTAGE_GRACE);
    }
    if occupant.has_spoken { grace } else { grace.min(SILENT_GRACE) }
}

/// Whether accepting failed for one connection only, as accept(2) says. The next one may succeed at
/// once.
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

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, kind: u64, at: u64) -> io::Result<()> {
    let data = EventData::new_u64(kind << 32 | at);
    Ok(epoll::add(epoll, fd, data, EventFlags::IN)?)
}
