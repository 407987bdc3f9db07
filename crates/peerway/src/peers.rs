//! The sessions of an endpoint.
//!
//! Two endpoints have one main session, whichever of them opened it. A second connect returns the
//! same session. Proxy threads that need their own lanes add *sub-sessions*, which are numbered and
//! end with the main session. The public list of peers shows only the main session.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::wire::SubSession;

use crate::clock;
use crate::session::stats::PeerStats;
use crate::session::{Session, Whom};

/// The most accepted peers that wait for a call to `accept`.
const MAX_UNASKED: usize = 65_536;

/// See the module.
pub(crate) struct Peers {
    /// The identity of this endpoint.
    me: Incarnation,
    table: Mutex<PeerTable>,
    changed: Condvar,
}

#[derive(Default)]
struct PeerTable {
    /// Live sessions.
    live: HashMap<Whom, Arc<Session>>,
    /// Sessions of an endpoint with itself. Both ends have the same identity.
    to_self: Vec<Arc<Session>>,
    accepted: VecDeque<Arc<Session>>,
    /// Live sessions that peers opened, by id, also those of an endpoint with itself.
    by_id: HashMap<[u8; 16], Arc<Session>>,
    /// The last session with each endpoint that has none now. An opener names it in its hello,
    /// which proves to the acceptor that the old session is over.
    last: HashMap<Whom, [u8; 16]>,
    /// Sessions that peers have opened, by id. An endpoint that connects to itself is its own peer.
    opened_by_peers: HashMap<[u8; 16], OpenedByPeer>,
    /// Main sessions, by id, whose peer may raise counters: see [`Peers::has_right`].
    rights: HashSet<[u8; 16]>,
    /// Sessions that a local thread is opening.
    opening: HashSet<Whom>,
    /// Sessions that the acceptor has agreed to, until they are live.
    accepting: HashSet<Whom>,
    /// What the sessions that are over have moved.
    past: PeerStats,
    /// The endpoint is closed.
    closed: bool,
}

impl PeerTable {
    /// What all sessions have moved, live ones and those that are over.
    fn sum(&self) -> PeerStats {
        let mut sum = self.past;
        for session in self.live.values().chain(&self.to_self) {
            sum += session.stats.sum();
        }
        sum
    }

    fn is_settled(&self, whom: &Whom) -> bool {
        self.current(whom).is_some() || self.accepting.contains(whom)
    }

    /// Keeps what a session has moved, which is over: with its main session if that is live.
    fn end(&mut self, session: &Session) {
        let main = self.live.get(&Whom::from(session.incarnation));
        let main = main.filter(|main| session.sub_session.is_some_and(|sub| sub.of == main.id));
        match main {
            Some(main) => main.stats.add_past(session.stats.sum()),
            None => self.past += session.stats.sum(),
        }
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
}

/// A session that a peer opened, as the limits count it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct OpenedByPeer {
    /// The peer's address, in its canonical form.
    pub(crate) ip: IpAddr,
    pub(crate) is_sub_session: bool,
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
    peers: Weak<Peers>,
    whom: Whom,
    opening: bool,
    /// The session, if it has a place among those that peers have opened. The claim gives the place
    /// back unless the session becomes live.
    place: Option<[u8; 16]>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(peers) = self.peers.upgrade() else { return };
        let mut table = peers.lock();
        let claims = if self.opening { &mut table.opening } else { &mut table.accepting };
        claims.remove(&self.whom);
        if let Some(session) = self.place {
            table.opened_by_peers.remove(&session);
        }
        drop(table);
        peers.changed.notify_all();
    }
}

impl Peers {
    pub(crate) fn new(me: Incarnation) -> Arc<Self> {
        Arc::new(Self { me, table: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, PeerTable> {
        self.table.lock().unwrap()
    }

    /// Forgets all sessions, because the endpoint is closed.
    pub(crate) fn close(&self) {
        let mut table = self.lock();
        let past = table.sum();
        table.past = past;
        table.live.clear();
        table.to_self.clear();
        table.accepted.clear();
        table.by_id.clear();
        table.rights.clear();
        table.opened_by_peers.clear();
        table.closed = true;
        drop(table);
        self.changed.notify_all();
    }

    /// The live session. A session whose process has just ended counts as over, even if its driver
    /// has not noticed.
    pub(crate) fn live_session(&self, whom: &Whom) -> Option<Arc<Session>> {
        let table = self.lock();
        table.current(whom).filter(|session| !session.is_process_dead()).cloned()
    }

    pub(crate) fn wait_for(&self, whom: &Whom, timeout: Duration) -> Option<Arc<Session>> {
        let deadline = clock::after(clock::now(), timeout);
        let mut table = self.lock();
        loop {
            if let Some(session) = table.current(whom) {
                return Some(session.clone());
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return None;
            }
            table = self.changed.wait_timeout(table, left).unwrap().0;
        }
    }

    /// The id of the last such session, which is over or about to be.
    pub(crate) fn last_session(&self, whom: &Whom) -> Option<[u8; 16]> {
        let table = self.lock();
        // Never a live session: the acceptor may have added it since the caller looked.
        let ending = table.live.get(whom).filter(|session| !session.is_alive());
        let ending = ending.map(|session| session.id);
        ending.or_else(|| table.last.get(whom).copied())
    }

    /// Waits for the next session that a peer opened.
    pub(crate) fn next_accepted(&self, timeout: Duration) -> Option<Arc<Session>> {
        let mut table = self.lock();
        // The check is under the lock that closing takes before it wakes waiting threads.
        if table.accepted.is_empty() && !table.closed {
            table = self.changed.wait_timeout(table, timeout).unwrap().0;
        }
        table.accepted.pop_front()
    }

    /// All live sessions, including sub-sessions.
    pub(crate) fn live_sessions(&self) -> Vec<Arc<Session>> {
        let table = self.lock();
        table.live.values().chain(&table.to_self).cloned().collect()
    }

    /// What all sessions have moved, and the number of peers now.
    pub(crate) fn stats(&self) -> (PeerStats, usize) {
        let table = self.lock();
        let is_peer = |session: &&Arc<Session>| session.sub_session.is_none();
        (table.sum(), table.live.values().filter(is_peer).count())
    }

    /// The live session with this id, if the peer opened it.
    pub(crate) fn accepted_session(&self, id: &[u8; 16]) -> Option<Arc<Session>> {
        self.lock().by_id.get(id).filter(|session| session.is_alive()).cloned()
    }

    /// The sub-sessions of a main session.
    pub(crate) fn sub_sessions_of(&self, session: &Session) -> Vec<Arc<Session>> {
        self.lock().sub_sessions_of(session)
    }

    /// Records that a connect has ended.
    pub(crate) fn end_opening(&self, whom: &Whom) {
        self.lock().opening.remove(whom);
        self.changed.notify_all();
    }

    /// Records that a connect is in progress. If another thread connects to the same peer, waits
    /// for its end until `deadline`.
    pub(crate) fn begin_opening(&self, whom: Whom, deadline: u64) -> Opening {
        let mut table = self.lock();
        if !table.accepting.contains(&whom) && table.opening.insert(whom) {
            return Opening::Begun;
        }
        while table.opening.contains(&whom) || table.accepting.contains(&whom) {
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return Opening::TimedOut;
            }
            table = self.changed.wait_timeout(table, left).unwrap().0;
        }
        Opening::ElsewhereEnded
    }

    /// Does `begin_opening` for a connect by address, which learns the identity only now. `None` if
    /// a session with that peer exists or is being opened. An endpoint may have many sessions with
    /// itself.
    pub(crate) fn learned(self: &Arc<Self>, who: Incarnation) -> Option<Claim> {
        let whom = Whom::from(who);
        let mut table = self.lock();
        let free = who == self.me || (!table.is_settled(&whom) && table.opening.insert(whom));
        free.then(|| self.claim(whom, true, None))
    }

    /// Agrees to a session that a peer opens, and gives it a place among those. `None` if there is
    /// another one.
    pub(crate) fn begin_accepting(
        self: &Arc<Self>,
        whom: Whom,
        session: [u8; 16],
        opened: OpenedByPeer,
    ) -> Option<Claim> {
        let mut table = self.lock();
        // The opener chooses the id. With the id of another session it would take no place.
        if table.opened_by_peers.contains_key(&session) {
            return None;
        }
        if whom.who != self.me {
            if self.is_taken(&table, &whom) {
                return None;
            }
            table.accepting.insert(whom);
        }
        table.opened_by_peers.insert(session, opened);
        Some(self.claim(whom, false, Some(session)))
    }

    /// Whether such a session is live, or a local attempt that has precedence is in progress.
    pub(crate) fn has_or_opens(&self, whom: &Whom) -> bool {
        whom.who != self.me && self.is_taken(&self.lock(), whom)
    }

    /// If two endpoints open at the same time, the attempt of the lower identity has precedence.
    fn is_taken(&self, table: &PeerTable, whom: &Whom) -> bool {
        table.is_settled(whom) || (table.opening.contains(whom) && self.me < whom.who)
    }

    fn claim(self: &Arc<Self>, whom: Whom, opening: bool, place: Option<[u8; 16]>) -> Claim {
        Claim { peers: Arc::downgrade(self), whom, opening, place }
    }

    /// Adds a session that this endpoint opened.
    pub(crate) fn opened(&self, session: &Arc<Session>) {
        let mut table = self.lock();
        if session.incarnation == self.me {
            table.to_self.push(session.clone());
        } else {
            table.live.insert(session.whom(), session.clone());
            table.last.remove(&session.whom());
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Adds a session that a peer opened. It keeps the place of its claim until it is over.
    pub(crate) fn accepted(&self, session: &Arc<Session>, claim: Option<Claim>) {
        let mut table = self.lock();
        table.by_id.insert(session.id, session.clone());
        if session.incarnation != self.me {
            table.live.insert(session.whom(), session.clone());
            if session.sub_session.is_none() && table.accepted.len() < MAX_UNASKED {
                table.accepted.push_back(session.clone());
            }
        }
        drop(table);
        if let Some(mut claim) = claim {
            claim.place = None;
        }
        self.changed.notify_all();
        self.end_if_orphan(session);
    }

    /// Closes a sub-session whose main session ended while the sub-session was being opened.
    pub(crate) fn end_if_orphan(&self, session: &Arc<Session>) {
        if !self.has_session_of(session.incarnation, session.sub_session) {
            session.remove();
        }
    }

    /// Whether the main session of a sub-session is live. True if `sub_session` is `None`.
    pub(crate) fn has_session_of(&self, who: Incarnation, sub_session: Option<SubSession>) -> bool {
        let first = || self.lock().live.get(&Whom::from(who)).cloned();
        sub_session.is_none_or(|sub_session| {
            first().is_some_and(|s| s.is_alive() && s.id == sub_session.of)
        })
    }

    /// Removes a session that is over. If this endpoint `removed` it, its sub-sessions are closed
    /// too. Otherwise the same cause ends them, or they detect it themselves.
    pub(crate) fn peer_gone(&self, session: &Arc<Session>, removed: bool) {
        let mut table = self.lock();
        let same = |s: &Arc<Session>| Arc::ptr_eq(s, session);
        let sub_sessions = table.sub_sessions_of(session);
        if table.live.get(&session.whom()).is_some_and(same) {
            table.live.remove(&session.whom());
            table.end(session);
            // The map is bounded. For a forgotten entry the other side must notice the end by
            // itself.
            if table.last.len() >= MAX_UNASKED {
                table.last.clear();
            }
            table.last.insert(session.whom(), session.id);
        }
        if let Some(at) = table.to_self.iter().position(same) {
            table.to_self.swap_remove(at);
            table.end(session);
        }
        table.rights.remove(&session.id);
        if !session.initiator {
            table.opened_by_peers.remove(&session.id);
            table.by_id.remove(&session.id);
        }
        table.accepted.retain(|s| !same(s));
        drop(table);
        self.changed.notify_all();
        sub_sessions.iter().filter(|_| removed).for_each(Session::remove);
    }

    /// The sessions that peers have opened and that are not over.
    pub(crate) fn opened_by_peers(&self) -> Vec<OpenedByPeer> {
        self.lock().opened_by_peers.values().copied().collect()
    }

    /// Whether the peer of a session may raise counters of this endpoint. A peer that only reaches
    /// the port may not. It has the right once one of these holds, until the session ends:
    ///
    /// - This endpoint opened the session: the program chose the peer.
    /// - The peer has imported memory of this endpoint, or has sent a request with a valid token.
    /// - This endpoint has imported memory of the peer.
    ///
    /// The right belongs to the main session. Its sub-sessions share it.
    pub(crate) fn has_right(&self, session: &Session) -> bool {
        session.has_right() || self.find_right(session)
    }

    #[cold]
    fn find_right(&self, session: &Session) -> bool {
        let has = self.lock().rights.contains(&session.main_id());
        if has {
            session.note_right();
        }
        has
    }

    /// Gives the peer of a session the right to raise counters.
    pub(crate) fn give_right(&self, session: &Session) {
        if !session.has_right() {
            self.give_right_by_id(session.main_id());
            session.note_right();
        }
    }

    /// Does the same for the main session with this id, whose two ends are in this process.
    #[cold]
    pub(crate) fn give_right_by_id(&self, id: [u8; 16]) {
        let mut table = self.lock();
        if !table.closed {
            table.rights.insert(id);
        }
    }

    /// The peer of the session with this id.
    pub(crate) fn counterpart(&self, id: &[u8; 16]) -> Option<Incarnation> {
        let table = self.lock();
        table.live.values().find(|s| s.id == *id).map(|s| s.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_session_has_its_place_before_it_is_live() {
        let peers = Peers::new(Incarnation([0; 16]));
        let opened = OpenedByPeer { ip: Ipv4Addr::LOCALHOST.into(), is_sub_session: false };
        let begin = |who: u8, session: u8| {
            peers.begin_accepting(Incarnation([who; 16]).into(), [session; 16], opened)
        };
        let one = begin(1, 1).expect("there is no other session");
        assert!(begin(2, 1).is_none(), "two sessions would have one place");
        let two = begin(2, 2).expect("another session");
        assert_eq!(peers.opened_by_peers().len(), 2);
        drop((one, two));
        assert_eq!(peers.opened_by_peers(), [], "sessions that never became live hold no place");
    }
}
