//! Identifiers: transfer slots, grants and endpoint incarnations.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A slot in a table, together with the use count of that slot.
///
/// A handle whose generation differs from the slot's current generation names something that has
/// ended. Such a handle can never reach the slot's next user.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct SlotId {
    /// Position in the table.
    pub index: u32,
    /// The number of times that the slot had been taken when this id was created.
    pub generation: u32,
}

impl SlotId {
    /// Both halves as one word, as on the wire.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The inverse of [`Self::to_bits`]. Any word is a valid id; only the table knows whether the
    /// id is live.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// The name of one lifetime of an endpoint: the first half of the SHA-256 hash of its public key.
///
/// An endpoint makes its key pair when it starts, so a restarted endpoint has a new incarnation.
/// The handshake proves it, so no other endpoint can take the name.
#[derive(Clone, Copy, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Incarnation(pub [u8; 16]);

impl Incarnation {
    /// Four bytes that tell incarnations apart in a descriptor, which has no room for more. They
    /// are neither secret nor unique; the handshake compares the whole incarnation.
    pub fn check(&self) -> u32 {
        u32::from_le_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_id_survives_the_wire() {
        for id in [
            SlotId { index: 0, generation: 0 },
            SlotId { index: u32::MAX, generation: 1 },
            SlotId { index: 7, generation: u32::MAX },
        ] {
            assert_eq!(SlotId::from_bits(id.to_bits()), id);
        }
    }
}
