//! What the engine asks of the operating system, one file per facility. Linux only.
//!
//! Everything here is a thin, synchronous wrapper: it takes plain values, does not know what a peer or a
//! transfer is, starts no thread, and returns [`std::io::Result`] where a system call can fail. Other
//! processes are untrusted throughout: what they pass us (descriptors, ring positions) is checked here.

pub(crate) mod affinity;
pub(crate) mod cma;
pub mod copy;
pub(crate) mod maps;
pub(crate) mod net;
pub(crate) mod pages;
pub(crate) mod process;
pub(crate) mod ring;
pub(crate) mod shm;
pub mod topology;
pub(crate) mod unix;
pub(crate) mod vma;
pub(crate) mod wake;

/// A run of bytes by address, in this process or in another one.
///
/// It is laid out as an `iovec`, so a slice of pieces goes to the kernel as it is. It borrows nothing:
/// every function that follows the address is `unsafe` and says what must hold.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub(crate) struct Piece {
    /// First byte.
    pub(crate) addr: u64,
    /// How many bytes; may be zero.
    pub(crate) len: u64,
}

impl Piece {
    /// The bytes of `slice`.
    pub(crate) fn of(slice: &[u8]) -> Self {
        Self { addr: slice.as_ptr() as u64, len: slice.len() as u64 }
    }

    /// The bytes of `slice`, to be written.
    pub(crate) fn of_mut(slice: &mut [u8]) -> Self {
        Self { addr: slice.as_mut_ptr() as u64, len: slice.len() as u64 }
    }
}

// A slice of pieces is passed where the kernel wants iovecs.
const _: () = {
    assert!(size_of::<Piece>() == size_of::<libc::iovec>());
    assert!(align_of::<Piece>() == align_of::<libc::iovec>());
    assert!(std::mem::offset_of!(Piece, addr) == std::mem::offset_of!(libc::iovec, iov_base));
    assert!(std::mem::offset_of!(Piece, len) == std::mem::offset_of!(libc::iovec, iov_len));
};
