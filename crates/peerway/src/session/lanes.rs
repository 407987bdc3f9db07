//! How lost TCP lanes of a session are replaced. The side that opened the session opens the new
//! connection, and the other side lets it join.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_core::config::DataProtection;
use peerway_core::wire::Proof;

use super::Session;
use crate::identity::Side;
use crate::identity::lanes::{LaneAttempt, LaneKeys};
use crate::transport::Wire;
use crate::transport::tcp::LaneSecrets;

/// See the module.
pub(crate) enum Replacements {
    /// The session has no TCP lanes besides its first, or ends with any of them.
    None,
    /// This side opens them.
    Opens(Box<dyn LaneOpener>),
    /// The peer opens them.
    Accepts(LaneAcceptor),
}

impl Replacements {
    pub(crate) fn opener(&self) -> Option<&dyn LaneOpener> {
        match self {
            Self::Opens(opener) => Some(&**opener),
            _ => None,
        }
    }

    pub(crate) fn acceptor(&self) -> Option<&LaneAcceptor> {
        match self {
            Self::Accepts(acceptor) => Some(acceptor),
            _ => None,
        }
    }
}

/// Opens connections in place of lost ones.
pub(crate) trait LaneOpener: Send + Sync {
    /// Begins an attempt, which another thread carries out. The driver of the session gets the
    /// result by a command. The text says why there is no thread.
    fn begin(&self, session: &Arc<Session>, attempt: LaneAttempt) -> Result<(), String>;
}

/// Takes over the connection of a replacement, and tells the peer so.
pub(crate) type JoinLane = Box<dyn FnOnce() -> io::Result<Box<dyn Wire>> + Send>;

/// Checks connections that the peer opens in place of lost ones.
pub(crate) struct LaneAcceptor {
    keys: LaneKeys,
    pub(crate) data: DataProtection,
    /// The newest attempt of each lane. An older one is a replay.
    newest: Box<[AtomicU32]>,
}

impl LaneAcceptor {
    /// For a session of this many TCP lanes.
    pub(crate) fn new(keys: LaneKeys, data: DataProtection, lanes: usize) -> Self {
        Self { keys, data, newest: (0..lanes).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Checks the opener's proof for an attempt, once. Returns the acceptor's own proof and the
    /// secrets of the lane.
    pub(crate) fn admit(
        &self,
        proof: &Proof,
        attempt: LaneAttempt,
    ) -> Option<(Proof, LaneSecrets)> {
        let newest = self.newest.get(usize::from(attempt.lane))?;
        if !self.keys.is_proven(proof, Side::Opener, attempt)
            || newest.fetch_max(attempt.generation, Ordering::Relaxed) >= attempt.generation
        {
            return None;
        }
        let own = self.keys.proof(Side::Acceptor, attempt)?;
        Some((own, secrets(&self.keys, Side::Acceptor, attempt)?))
    }
}

/// The secrets that protect a replacement, as `side` uses them.
pub(crate) fn secrets(keys: &LaneKeys, side: Side, attempt: LaneAttempt) -> Option<LaneSecrets> {
    let other = match side {
        Side::Opener => Side::Acceptor,
        Side::Acceptor => Side::Opener,
    };
    let secret = |from| keys.secret(from, attempt);
    Some(LaneSecrets { send: secret(side)?, receive: secret(other)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_admitted_once_and_only_for_a_lane_of_the_session() {
        let keys = LaneKeys::new(&[7; 32]);
        let acceptor = LaneAcceptor::new(keys.clone(), DataProtection::Off, 2);
        let ask = |keys: &LaneKeys, side, lane, generation| {
            let attempt = LaneAttempt { lane, generation };
            let proof = keys.proof(side, attempt).unwrap();
            acceptor.admit(&proof, attempt).is_some()
        };
        assert!(!ask(&LaneKeys::new(&[8; 32]), Side::Opener, 1, 1), "the proof of another session");
        assert!(!ask(&keys, Side::Acceptor, 1, 1), "the acceptor's own proof");
        assert!(!ask(&keys, Side::Opener, 2, 1), "the session has two lanes");
        assert!(!ask(&keys, Side::Opener, 1, 0), "generation 0 is the first connection");
        assert!(ask(&keys, Side::Opener, 1, 2));
        assert!(!ask(&keys, Side::Opener, 1, 2), "a replay");
        assert!(!ask(&keys, Side::Opener, 1, 1), "a replay of an older attempt");
        assert!(ask(&keys, Side::Opener, 1, 3) && ask(&keys, Side::Opener, 0, 1));
        let attempt = LaneAttempt { lane: 0, generation: 2 };
        assert!(acceptor.admit(&[0; 32], attempt).is_none(), "no proof");
        let near = secrets(&keys, Side::Opener, attempt).unwrap();
        let far = secrets(&keys, Side::Acceptor, attempt).unwrap();
        assert!(near.send == far.receive && near.receive == far.send && near.send != near.receive);
    }
}
