//! Descriptors: 64 bytes that name memory to a peer.
//!
//! A descriptor is a bearer capability: any holder of its token may use the grant. `addr` and
//! `size` are at the offsets that `uccl` uses. Its clients rewrite them to point inside the region.
//! They are hints that the owner checks against the grant, never proof.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{Incarnation, SlotId};
use crate::region::{Access, Span};

/// The length of a descriptor in bytes.
pub const DESCRIPTOR_LEN: usize = 64;

const VERSION: u8 = 1;
/// The value of `size` if the length does not fit in 32 bits. The range then extends from `addr` to
/// the end of the advertisement.
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

/// An advertisement of memory: see the module documentation.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Descriptor {
    /// The address at which the holder wants to start, in the owner's address space.
    pub addr: u64,
    /// The number of bytes that the holder wants from there.
    pub len: u64,
    /// The rights that the owner grants.
    pub access: Access,
    /// The owner's entry for this advertisement.
    pub grant: SlotId,
    /// Distinguishes the incarnations of the owner. The handshake compares the whole incarnation.
    pub incarnation_check: u32,
    /// The secret token.
    pub token: [u8; 16],
    /// The first advertised address.
    pub base: u64,
    /// The number of advertised bytes from `base`.
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

    /// Encodes the descriptor for a peer.
    pub fn to_bytes(&self) -> [u8; DESCRIPTOR_LEN] {
        // A client may rewrite `size`. It holds the length if the length fits in 32 bits; `length`
        // always holds the number of advertised bytes.
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

    /// Parses the bytes of a descriptor.
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
            // The range extends from addr to the end, because its length did not fit in 32 bits.
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

    /// The range that `addr` and `len` select, relative to the start of the advertisement.
    pub fn window(&self) -> Span {
        Span { offset: self.addr - self.base, len: self.len }
    }
}

impl fmt::Debug for Descriptor {
    /// Omits the token, because debug output ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descriptor")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .field("access", &self.access)
            .field("grant", &self.grant)
            .finish_non_exhaustive()
    }
}

/// Why bytes are not a valid descriptor.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The input does not have 64 bytes.
    #[error("a descriptor has {DESCRIPTOR_LEN} bytes, not {0}")]
    Length(usize),
    /// Another version of Peerway encoded the descriptor, or the bytes are not a descriptor.
    #[error(
        "descriptor version {0} is not supported (this build reads version {VERSION}), or the bytes are not a descriptor"
    )]
    Version(u8),
    /// The access bits are invalid.
    #[error("the descriptor has invalid access rights {0:#x}")]
    Access(u8),
    /// The range is outside the advertised memory.
    #[error("the descriptor points outside the memory that its owner advertised")]
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
