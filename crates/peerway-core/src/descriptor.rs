//! The 64 bytes by which memory is named to a peer.
//!
//! A descriptor is a bearer capability: whoever holds its token may use what it grants. `addr` and
//! `size` lie where `uccl` puts them and its clients rewrite them to point inside the region; they
//! are hints that the owner checks against the grant, never proof of anything.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{Incarnation, SlotId};
use crate::region::{Access, Span};

/// Bytes in a descriptor.
pub const DESCRIPTOR_LEN: usize = 64;

const VERSION: u8 = 1;
/// In `size`: the length does not fit, look at `length`.
const SIZE_IN_LENGTH: u32 = u32::MAX;

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct Layout {
    addr: U64,
    size: U32,
    version: u8,
    access: u8,
    reserved: U16,
    grant: U32,
    generation: U32,
    incarnation: U32,
    reserved2: U32,
    token: [u8; 16],
    length: U64,
    base: U64,
}

const _: () = assert!(size_of::<Layout>() == DESCRIPTOR_LEN);

/// What a peer advertised: see the module.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Descriptor {
    /// Address the holder wants to start at, in the owner's address space.
    pub addr: u64,
    /// Bytes the holder wants from there.
    pub len: u64,
    /// What the owner allows.
    pub access: Access,
    /// The owner's entry for this advertisement.
    pub grant: SlotId,
    /// Distinguishes the owner's lives; the handshake compares the whole incarnation.
    pub incarnation_check: u32,
    /// The secret.
    pub token: [u8; 16],
    /// First advertised address.
    pub base: u64,
    /// Advertised bytes from `base`.
    pub advertised: u64,
}

impl Descriptor {
    /// The descriptor of a whole advertisement.
    pub fn new(
        owner: &Incarnation,
        grant: SlotId,
        token: [u8; 16],
        access: Access,
        base: u64,
        len: u64,
    ) -> Self {
        let incarnation_check = owner.check();
        Self { addr: base, len, access, grant, incarnation_check, token, base, advertised: len }
    }

    /// The bytes to hand to a peer.
    pub fn to_bytes(&self) -> [u8; DESCRIPTOR_LEN] {
        // `size` is what a client may rewrite; when it can hold the length it does, and `length`
        // always says how much was advertised.
        let size = u32::try_from(self.len).unwrap_or(SIZE_IN_LENGTH);
        let layout = Layout {
            addr: self.addr.into(),
            size: size.into(),
            version: VERSION,
            access: self.access.bits(),
            reserved: 0.into(),
            grant: self.grant.index.into(),
            generation: self.grant.generation.into(),
            incarnation: self.incarnation_check.into(),
            reserved2: 0.into(),
            token: self.token,
            length: self.advertised.into(),
            base: self.base.into(),
        };
        zerocopy::transmute!(layout)
    }

    /// Parses what somebody handed over.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let layout =
            Layout::read_from_bytes(bytes).map_err(|_| DescriptorError::Length(bytes.len()))?;
        if layout.version != VERSION {
            return Err(DescriptorError::Version(layout.version));
        }
        let access =
            Access::from_bits(layout.access).ok_or(DescriptorError::Access(layout.access))?;
        let (base, advertised) = (layout.base.get(), layout.length.get());
        let addr = layout.addr.get();
        let whole = Span { offset: base, len: advertised };
        let len = match layout.size.get() {
            // Everything from addr to the end: what could not be said in 32 bits.
            SIZE_IN_LENGTH => {
                let end = whole.end().ok_or(DescriptorError::Outside)?;
                end.checked_sub(addr).ok_or(DescriptorError::Outside)?
            }
            size => u64::from(size),
        };
        if !whole.contains(Span { offset: addr, len }) {
            return Err(DescriptorError::Outside);
        }
        Ok(Self {
            addr,
            len,
            access,
            grant: SlotId { index: layout.grant.get(), generation: layout.generation.get() },
            incarnation_check: layout.incarnation.get(),
            token: layout.token,
            base,
            advertised,
        })
    }

    /// What `addr` and `len` name, relative to the start of the advertisement.
    pub fn window(&self) -> Span {
        Span { offset: self.addr - self.base, len: self.len }
    }
}

impl fmt::Debug for Descriptor {
    /// Leaves the token out: debug output ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descriptor")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .field("access", &self.access)
            .field("grant", &self.grant)
            .finish_non_exhaustive()
    }
}

/// Bytes that are no descriptor.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// Not 64 bytes.
    #[error("a descriptor is {DESCRIPTOR_LEN} bytes, not {0}")]
    Length(usize),
    /// Made by another version, or not a descriptor at all.
    #[error(
        "descriptor version {0} is not known here (this is version {VERSION}); are these bytes a descriptor?"
    )]
    Version(u8),
    /// Rights that do not exist.
    #[error("descriptor names access rights {0:#x}, which do not exist")]
    Access(u8),
    /// Rewritten to point outside what was advertised.
    #[error("descriptor points outside what its owner advertised")]
    Outside,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(base: u64, len: u64) -> Descriptor {
        let grant = SlotId { index: 3, generation: 9 };
        Descriptor::new(&Incarnation([7; 16]), grant, [5; 16], Access::READ, base, len)
    }

    #[test]
    fn layout_is_what_clients_rewrite() {
        let mut bytes = sample(0x1000, 64).to_bytes();
        assert_eq!(bytes[..8], 0x1000u64.to_le_bytes());
        assert_eq!(bytes[8..12], 64u32.to_le_bytes());
        bytes[..8].copy_from_slice(&0x1010u64.to_le_bytes());
        bytes[8..12].copy_from_slice(&16u32.to_le_bytes());
        let moved = Descriptor::from_bytes(&bytes).unwrap();
        assert_eq!(moved.window(), Span { offset: 0x10, len: 16 });
        bytes[8..12].copy_from_slice(&60u32.to_le_bytes());
        assert_eq!(Descriptor::from_bytes(&bytes), Err(DescriptorError::Outside));
    }

    #[test]
    fn more_than_four_gib() {
        let long = sample(0x1000, 5 << 30);
        let mut bytes = long.to_bytes();
        assert_eq!(Descriptor::from_bytes(&bytes), Ok(long));
        bytes[..8].copy_from_slice(&(0x1000u64 + (1 << 30)).to_le_bytes());
        assert_eq!(Descriptor::from_bytes(&bytes).unwrap().len, 4 << 30);
    }

    #[test]
    fn debug_hides_the_token() {
        assert!(!format!("{:?}", sample(0, 1)).contains("5, 5"));
    }

    proptest! {
        #[test]
        fn round_trip(base in any::<u32>(), len in 0u64..1 << 40) {
            let d = sample(u64::from(base), len);
            prop_assert_eq!(Descriptor::from_bytes(&d.to_bytes()), Ok(d));
        }
    }
}
