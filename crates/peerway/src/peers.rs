//! The sessions of an endpoint.
//!
//! Two endpoints have one main session, whichever of them opened it. A second connect returns the
//! same session. Proxy threads that need their own lanes add *sub-sessions*, which are numbered and
//! end with the main session. The public list of peers shows only the main session.

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

/// The most accepted peers that wait for a call to `accept`.
const MAX_UNASKED: usize = 65_536;

/// Identifies a session: the peer's identity and the sub-session number, 0 for the main session.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Whom {
    pub(crate) who: Incarnation,
    pub(crate) sub_session: u16,
}

impl From<Incarnation> for Whom {
    /// The main session.
    fn from(who: Incarnation) -> Self {
        Self { who, sub_session: 0 }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Peers {
    /// Live sessions.
    live: HashMap<Whom, Arc<Session>>,
    /// Sessions of an endpoint with itself. Both ends have the same identity.
    to_self: Vec<Arc<Session>>,
    accepted: VecDeque<Arc<Session>>,
    /// The last session with each endpoint that has none now. An opener names it in its hello,
    /// which proves to the acceptor that the old session is over.
    last: HashMap<Whom, [u8; 16]>,
    /// Sessions that a local thread is opening.
    opening: HashSet<Whom>,
    /// Sessions that the acceptor has agreed to, until they are live.
    accepting: HashSet<Whom>,
}

impl Peers {
    fn is_settled(&self, whom: &Whom) -> bool {
        self.current(whom).is_some() || self.accepting.contains(whom)
    }

    /// The live session. A sub-session counts only if the main session that it belongs to is live.
    fn current(&self, whom: &Whom) -> Option<&Arc<Session>> {
        let session = self.live.get(whom).filter(|session| session.is_alive())?;
        let first = self.live.get(&Whom::from(whom.who));
        let belongs = session.sub_session.is_none_or(|sub_session| {
            first.is_some_and(|first| first.is_alive() && first.id == sub_session.of)
        });
        belongs.then_some(session)
    }

    /// The sub-sessions of a main session.
    fn sub_sessions_of(&self, session: &Session) -> Vec<Arc<Session>> {
        let is_of = |s: &&Arc<Session>| {
            s.sub_session.is_some_and(|sub_session| sub_session.of == session.id)
        };
        self.live.values().filter(is_of).cloned().collect()
    }

    /// Forgets all sessions, because the endpoint is closed.
    pub(crate) fn clear(&mut self) {
        self.live.clear();
        self.to_self.clear();
        self.accepted.clear();
    }
}

/// The result of `begin_opening`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Opening {
    /// This thread opens the session.
    Begun,
    /// Another thread's connect has ended: there may be a session now.
    ElsewhereEnded,
    /// Another thread's connect took longer than the time limit.
    TimedOut,
}

/// A claim that this endpoint opens or accepts a session. It starts no second attempt of the same
/// kind meanwhile. When two attempts cross, the endpoint with the lower identity never holds both
/// kinds of claim at once, so exactly one attempt succeeds.
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
    /// The live session. A session whose process has just ended counts as over, even if its driver
    /// has not noticed.
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

    /// The id of the last such session, which is over or about to be.
    pub(crate) fn last_session(&self, whom: &Whom) -> Option<[u8; 16]> {
        let peers = self.peers.lock().unwrap();
        // Never a live session: the acceptor may have added it since the caller looked.
        let ending = peers.live.get(whom).filter(|session| !session.is_alive());
        let ending = ending.map(|session| session.id);
        ending.or_else(|| peers.last.get(whom).copied())
    }

    /// Waits for the next session that a peer opened.
    pub(crate) fn next_accepted(&self, timeout: Duration) -> Option<Arc<Session>> {
        let mut peers = self.peers.lock().unwrap();
        // The check is under the lock that closing takes before it wakes waiting threads.
        if peers.accepted.is_empty() && self.check_open().is_ok() {
            peers = self.peers_changed.wait_timeout(peers, timeout).unwrap().0;
        }
        peers.accepted.pop_front()
    }

    /// All live sessions, including sub-sessions.
    pub(crate) fn live_sessions(&self) -> Vec<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        peers.live.values().chain(&peers.to_self).cloned().collect()
    }

    /// The sub-sessions of a main session.
    pub(crate) fn sub_sessions_of(&self, session: &Session) -> Vec<Arc<Session>> {
        self.peers.lock().unwrap().sub_sessions_of(session)
    }

    /// Records that a connect has ended.
    pub(crate) fn end_opening(&self, whom: &Whom) {
        self.peers.lock().unwrap().opening.remove(whom);
        self.peers_changed.notify_all();
    }

    /// Records that a connect is in progress. If another thread connects to the same peer, waits
    /// for its end until `deadline`.
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

    /// Does `begin_opening` for a connect by address, which learns the identity only now. `None` if
    /// a session with that peer exists or is being opened. An endpoint may have many sessions with
    /// itself.
    pub(crate) fn learned(self: &Arc<Self>, who: Incarnation) -> Option<Claim> {
        let whom = Whom::from(who);
        let mut peers = self.peers.lock().unwrap();
        let free =
            who == self.incarnation || (!peers.is_settled(&whom) && peers.opening.insert(whom));
        free.then(|| self.claim(whom, true))
    }

    /// Agrees to a session that a peer opens. `None` if there is another one.
    pub(crate) fn begin_accepting(self: &Arc<Self>, whom: Whom) -> Option<Claim> {
        let mut peers = self.peers.lock().unwrap();
        let free = whom.who == self.incarnation || !self.is_taken(&peers, &whom);
        if free && whom.who != self.incarnation {
            peers.accepting.insert(whom);
        }
        free.then(|| self.claim(whom, false))
    }

    /// Whether such a session is live, or a local attempt that has precedence is in progress.
    pub(crate) fn has_or_opens(&self, whom: &Whom) -> bool {
        whom.who != self.incarnation && self.is_taken(&self.peers.lock().unwrap(), whom)
    }

    /// If two endpoints open at the same time, the attempt of the lower identity has precedence.
    fn is_taken(&self, peers: &Peers, whom: &Whom) -> bool {
        peers.is_settled(whom) || (peers.opening.contains(whom) && self.incarnation < whom.who)
    }

    fn claim(self: &Arc<Self>, whom: Whom, opening: bool) -> Claim {
        Claim { endpoint: Arc::downgrade(self), whom, opening }
    }

    /// Adds a session that this endpoint opened.
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
        // The driver sets the index when it adopts the session. Without an index nothing can be
        // sent.
        while session.index.load(Ordering::Acquire) == usize::MAX
            && session.is_alive()
            && self.check_open().is_ok()
        {
            std::thread::yield_now();
        }
        self.end_if_orphan(&session);
        Peer::new(self.clone(), session)
    }

    /// Adds a session that a peer opened.
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

    /// Closes a sub-session whose main session ended while the sub-session was being opened.
    fn end_if_orphan(&self, session: &Arc<Session>) {
        if !self.has_session_of(session.incarnation, session.sub_session) {
            session.remove();
        }
    }

    /// Whether the main session of a sub-session is live. True if `sub_session` is `None`.
    pub(crate) fn has_session_of(&self, who: Incarnation, sub_session: Option<SubSession>) -> bool {
        let first = || self.peers.lock().unwrap().live.get(&Whom::from(who)).cloned();
        sub_session.is_none_or(|sub_session| {
            first().is_some_and(|s| s.is_alive() && s.id == sub_session.of)
        })
    }

    /// Removes a session that is over. If this endpoint `removed` it, its sub-sessions are closed
    /// too. Otherwise the same cause ends them, or they detect it themselves.
    pub(crate) fn peer_gone(&self, session: &Arc<Session>, removed: bool) {
        let mut peers = self.peers.lock().unwrap();
        let same = |s: &Arc<Session>| Arc::ptr_eq(s, session);
        let sub_sessions = peers.sub_sessions_of(session);
        if peers.live.get(&session.whom()).is_some_and(same) {
            peers.live.remove(&session.whom());
            // The map is bounded. For a forgotten entry the other side must notice the end by
            // itself.
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

    /// The peer of the session with this id.
    pub(crate) fn counterpart(&self, id: &[u8; 16]) -> Option<Incarnation> {
        let peers = self.peers.lock().unwrap();
        peers.live.values().find(|s| s.id == *id).map(|s| s.incarnation)
    }
}
