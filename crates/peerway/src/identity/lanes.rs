//! Keys for the lanes that replace lost ones.
//!
//! The TLS connection of a session ends with its handshake. Both sides keep one secret that it
//! exported. HKDF derives from it a proof for each side, lane and attempt, and the secrets that
//! protect the records of that lane. A new attempt has a new generation, so no proof can be used
//! twice and no key seals two records under one number.

use peerway_core::wire::Proof;
use ring::hkdf;
use subtle::ConstantTimeEq;

use super::Side;

/// See the module.
#[derive(Clone)]
pub(crate) struct LaneKeys(hkdf::Prk);

/// A lane of a session, and which attempt to open it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct LaneAttempt {
    pub(crate) lane: u16,
    /// From 1, and higher for each attempt.
    pub(crate) generation: u32,
}

/// The length of a proof, as HKDF asks for it.
struct ProofLen;

impl hkdf::KeyType for ProofLen {
    fn len(&self) -> usize {
        size_of::<Proof>()
    }
}

impl LaneKeys {
    /// `secret` is exported from the session's TLS connection.
    pub(crate) fn new(secret: &Proof) -> Self {
        Self(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret))
    }

    /// The proof by `side` that a connection is this attempt.
    pub(crate) fn proof(&self, side: Side, attempt: LaneAttempt) -> Option<Proof> {
        self.derive(b"peerway lane proof", side, attempt)
    }

    /// Whether `proof` is the one that `side` would make. The time does not depend on the bytes.
    pub(crate) fn is_proven(&self, proof: &Proof, side: Side, attempt: LaneAttempt) -> bool {
        self.proof(side, attempt).is_some_and(|right| right.ct_eq(proof).into())
    }

    /// The secret of the records that `side` sends.
    pub(crate) fn secret(&self, side: Side, attempt: LaneAttempt) -> Option<Proof> {
        self.derive(b"peerway lane data", side, attempt)
    }

    fn derive(&self, purpose: &[u8], side: Side, attempt: LaneAttempt) -> Option<Proof> {
        let LaneAttempt { lane, generation } = attempt;
        let (side, lane, generation) = ([side as u8], lane.to_le_bytes(), generation.to_le_bytes());
        let mut bytes = Proof::default();
        self.0
            .expand(&[purpose, &side, &lane, &generation], ProofLen)
            .ok()?
            .fill(&mut bytes)
            .ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_session_side_lane_attempt_and_purpose_has_its_own() {
        let mut seen = HashSet::new();
        for secret in [[1; 32], [2; 32]] {
            let (keys, again) = (LaneKeys::new(&secret), LaneKeys::new(&secret));
            for side in [Side::Opener, Side::Acceptor] {
                for (lane, generation) in [(0, 1), (1, 1), (1, 2), (256, 1)] {
                    let attempt = LaneAttempt { lane, generation };
                    let proof = keys.proof(side, attempt).unwrap();
                    assert!(again.is_proven(&proof, side, attempt));
                    assert!(seen.insert(proof));
                    assert!(seen.insert(keys.secret(side, attempt).unwrap()));
                }
            }
        }
    }
}
