//! Who there are sessions with.
//!
//! Two endpoints have one session, whichever of them opened it: connecting again gives the same. Where threads of
//! proxies want lanes of their own there are more, its *sub-sessions*, which are numbered and end with it; whoever asks for
//! peers sees the first alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::wire::SubSession;

use crate::clock;
use crate::inner::Inner;
use crate::peer::Peer;
use crate::progress::driver::NewSession;
use crate::progress::shard::DriverCommand;
use crate::session::Session;

/// Peers that were accepted and not asked for yet.
const MAX_UNASKED: usize = 65_536;

/// Whom a session leads to: the endpoint, and which of the sessions with it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Whom {
    pub(crate) who: Incarnation,
    pub(crate) sub_session: u16,
}

impl From<Incarnation> for Whom {
    /// The session that is everybody's.
    fn from(who: Incarnation) -> Self {
        Self { who, sub_session: 0 }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Peers {
    /// Live sessions.
    live: HashMap<Whom, Arc<Session>>,
    /// Sessions of an endpoint with itself, which lead to the same name at both ends.
    to_self: Vec<Arc<Session>>,
    accepted: VecDeque<Arc<Session>>,
    /// The last session with endpoints that there is none with now: who opens anew names it, which
    /// proves to the other side that the old one is over.
    last: HashMap<Whom, [u8; 16]>,
    /// Endpoints that a connect is under way to.
    opening: HashSet<Whom>,
    /// Endpoints whose connect has been agreed to, until its session is among the live ones.
    accepting: HashSet<Whom>,
}

impl Peers {
    fn is_settled(&self, whom: &Whom) -> bool {
        self.current(whom).is_some() || self.accepting.contains(whom)
    }

    /// A session that lives, and for a sub-session belongs to the one that does.
    fn current(&self, whom: &Whom) -> Option<&Arc<Session>> {
        let session = self.live.get(whom).filter(|session| session.is_alive())?;
        let first = self.live.get(&Whom::from(whom.who));
        let belongs = session.sub_session.is_none_or(|sub_session| {
            first.is_some_and(|first| first.is_alive() && first.id == sub_session.of)
        });
        belongs.then_some(session)
    }

    /// The other sessions that belong to one that is everybody's.
    fn sub_sessions_of(&self, session: &Session) -> Vec<Arc<Session>> {
        let is_of = |s: &&Arc<Session>| {
            s.sub_session.is_some_and(|sub_session| sub_session.of == session.id)
        };
        self.live.values().filter(is_of).cloned().collect()
    }

    /// The endpoint is closed.
    pub(crate) fn clear(&mut self) {
        self.live.clear();
        self.to_self.clear();
        self.accepted.clear();
    }
}

/// What became of the wish to open a session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Opening {
    /// This thread opens it.
    Begun,
    /// Another thread's connect has come to an end: there may be a session now.
    ElsewhereEnded,
    /// Another thread's connect outlasted the time limit.
    TimedOut,
}

/// An endpoint's word that a session is being opened, or accepted, and no other of the kind is
/// begun meanwhile. Of two endpoints the lower name never gives both words at once, so that of two
/// attempts that cross one succeeds.
pub(crate) struct Claim {
    endpoint: Weak<Inner>,
    whom: Whom,
    opening: bool,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(endpoint) = self.endpoint.upgrade() else { return };
        let mut peers = endpoint.peers.lock().unwrap();
        let claims = if self.opening { &mut peers.opening } else { &mut peers.accepting };
        claims.remove(&self.whom);
        drop(peers);
        endpoint.peers_changed.notify_all();
    }
}

impl Inner {
    /// A session that lives. One whose process has just ended is as good as over, though its driver may
    /// not have noticed.
    pub(crate) fn live_session(&self, whom: &Whom) -> Option<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        peers.current(whom).filter(|session| !session.is_process_dead()).cloned()
    }

    pub(crate) fn wait_for(&self, whom: &Whom, timeout: Duration) -> Option<Arc<Session>> {
        let deadline = clock::after(clock::now(), timeout);
        let mut peers = self.peers.lock().unwrap();
        loop {
            if let Some(session) = peers.current(whom) {
                return Some(session.clone());
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return None;
            }
            peers = self.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
    }

    /// The session of the kind that is over, or about to be.
    pub(crate) fn last_session(&self, whom: &Whom) -> Option<[u8; 16]> {
        let peers = self.peers.lock().unwrap();
        // Never one that lives: it may have been accepted since we looked.
        let ending = peers.live.get(whom).filter(|session| !session.is_alive());
        let ending = ending.map(|session| session.id);
        ending.or_else(|| peers.last.get(whom).copied())
    }

    /// The next session that a peer opened, as soon as there is one.
    pub(crate) fn next_accepted(&self, timeout: Duration) -> Option<Arc<Session>> {
        let mut peers = self.peers.lock().unwrap();
        // Under the lock, which closing takes before it wakes whoever waits.
        if peers.accepted.is_empty() && self.check_open().is_ok() {
            peers = self.peers_changed.wait_timeout(peers, timeout).unwrap().0;
        }
        peers.accepted.pop_front()
    }

    /// Every session that lives, sub-sessions too.
    pub(crate) fn live_sessions(&self) -> Vec<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        peers.live.values().chain(&peers.to_self).cloned().collect()
    }

    /// The sub-sessions of a session.
    pub(crate) fn sub_sessions_of(&self, session: &Session) -> Vec<Arc<Session>> {
        self.peers.lock().unwrap().sub_sessions_of(session)
    }

    /// A connect has come to an end.
    pub(crate) fn end_opening(&self, whom: &Whom) {
        self.peers.lock().unwrap().opening.remove(whom);
        self.peers_changed.notify_all();
    }

    /// Notes that a connect is under way. When another thread's is, waits for its end until
    /// `deadline`.
    pub(crate) fn begin_opening(&self, whom: Whom, deadline: u64) -> Opening {
        let mut peers = self.peers.lock().unwrap();
        if !peers.accepting.contains(&whom) && peers.opening.insert(whom) {
            return Opening::Begun;
        }
        while peers.opening.contains(&whom) || peers.accepting.contains(&whom) {
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return Opening::TimedOut;
            }
            peers = self.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
        Opening::ElsewhereEnded
    }

    /// As `begin_opening`, for a connect by address, which has only now learned who is there. `None`
    /// when there is a session with them, or will be. With itself an endpoint may have many.
    pub(crate) fn learned(self: &Arc<Self>, who: Incarnation) -> Option<Claim> {
        let whom = Whom::from(who);
        let mut peers = self.peers.lock().unwrap();
        let free =
            who == self.incarnation || (!peers.is_settled(&whom) && peers.opening.insert(whom));
        free.then(|| self.claim(whom, true))
    }

    /// Agrees to a session that somebody has opened; `None` when there is another.
    pub(crate) fn begin_accepting(self: &Arc<Self>, whom: Whom) -> Option<Claim> {
        let mut peers = self.peers.lock().unwrap();
        let free = whom.who == self.incarnation || !self.is_taken(&peers, &whom);
        if free && whom.who != self.incarnation {
            peers.accepting.insert(whom);
        }
        free.then(|| self.claim(whom, false))
    }

    /// Whether such a session lives, or one that goes first is being opened.
    pub(crate) fn has_or_opens(&self, whom: &Whom) -> bool {
        whom.who != self.incarnation && self.is_taken(&self.peers.lock().unwrap(), whom)
    }

    /// Of two endpoints that open at the same time, the lower name's attempt goes first.
    fn is_taken(&self, peers: &Peers, whom: &Whom) -> bool {
        peers.is_settled(whom) || (peers.opening.contains(whom) && self.incarnation < whom.who)
    }

    fn claim(self: &Arc<Self>, whom: Whom, opening: bool) -> Claim {
        Claim { endpoint: Arc::downgrade(self), whom, opening }
    }

    /// A session we opened is complete.
    pub(crate) fn opened(self: &Arc<Self>, new: NewSession) -> Peer {
        let session = new.session.clone();
        let mut peers = self.peers.lock().unwrap();
        if session.incarnation == self.incarnation {
            peers.to_self.push(session.clone());
        } else {
            peers.live.insert(session.whom(), session.clone());
            peers.last.remove(&session.whom());
        }
        drop(peers);
        self.peers_changed.notify_all();
        session.shard.submit(DriverCommand::Adopt(Box::new(new)));
        session.shard.notify_if_blocked();
        // Adopted at once, or as soon as whoever drives looks: without an index nothing can be sent.
        while session.index.load(Ordering::Acquire) == usize::MAX
            && session.is_alive()
            && self.check_open().is_ok()
        {
            std::thread::yield_now();
        }
        self.end_if_orphan(&session);
        Peer::new(self.clone(), session)
    }

    /// A session that a peer opened is complete.
    pub(crate) fn accepted(&self, session: &Arc<Session>) {
        let mut peers = self.peers.lock().unwrap();
        if session.incarnation != self.incarnation {
            peers.live.insert(session.whom(), session.clone());
            if session.sub_session.is_none() && peers.accepted.len() < MAX_UNASKED {
                peers.accepted.push_back(session.clone());
            }
        }
        drop(peers);
        self.peers_changed.notify_all();
        self.end_if_orphan(session);
    }

    /// The session of a sub-session may have gone while it was opened: then nobody has ended the sub-session.
    fn end_if_orphan(&self, session: &Arc<Session>) {
        if !self.has_session_of(session.incarnation, session.sub_session) {
            session.remove();
        }
    }

    /// Whether the session that a sub-session belongs to lives; true for what is no sub-session.
    pub(crate) fn has_session_of(&self, who: Incarnation, sub_session: Option<SubSession>) -> bool {
        let first = || self.peers.lock().unwrap().live.get(&Whom::from(who)).cloned();
        sub_session.is_none_or(|sub_session| {
            first().is_some_and(|s| s.is_alive() && s.id == sub_session.of)
        })
    }

    /// A session is over. If we `removed` it, so are its sub-sessions; else they end by what ended it, or as they find that it has.
    pub(crate) fn peer_gone(&self, session: &Arc<Session>, removed: bool) {
        let mut peers = self.peers.lock().unwrap();
        let same = |s: &Arc<Session>| Arc::ptr_eq(s, session);
        let sub_sessions = peers.sub_sessions_of(session);
        if peers.live.get(&session.whom()).is_some_and(same) {
            peers.live.remove(&session.whom());
            // Bounded: who is forgotten waits until the other side notices by itself.
            if peers.last.len() >= MAX_UNASKED {
                peers.last.clear();
            }
            peers.last.insert(session.whom(), session.id);
        }
        peers.to_self.retain(|s| !same(s));
        peers.accepted.retain(|s| !same(s));
        drop(peers);
        self.peers_changed.notify_all();
        sub_sessions.iter().filter(|_| removed).for_each(Session::remove);
    }

    /// Who is at the other end of a session of ours with this id.
    pub(crate) fn counterpart(&self, id: &[u8; 16]) -> Option<Incarnation> {
        let peers = self.peers.lock().unwrap();
        peers.live.values().find(|s| s.id == *id).map(|s| s.incarnation)
    }
}
