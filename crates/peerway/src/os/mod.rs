//! Wrappers for the operating system, one file per facility. Linux only.
//!
//! Each wrapper is thin and synchronous. It takes plain values, knows nothing of peers or
//! transfers, starts no thread, and returns [`std::io::Result`] where a system call can fail. Other
//! processes are untrusted: this module checks the file descriptors and ring positions that they
//! pass.

pub(crate) mod affinity;
pub(crate) mod cma;
pub mod copy;
pub(crate) mod crc;
pub(crate) mod gate;
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

/// A run of bytes given by its address, in this process or in another one.
///
/// It has the layout of an `iovec`, so the kernel takes a slice of pieces directly. It borrows
/// nothing: every function that dereferences the address is `unsafe` and states its requirements.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub(crate) struct Piece {
    /// First byte.
    pub(crate) addr: u64,
    /// Number of bytes; may be zero.
    pub(crate) len: u64,
}

impl Piece {
    /// The bytes of `slice`.
    pub(crate) fn of(slice: &[u8]) -> Self {
        Self { addr: slice.as_ptr() as u64, len: slice.len() as u64 }
    }

    /// The bytes of `slice`, for writing.
    pub(crate) fn of_mut(slice: &mut [u8]) -> Self {
        Self { addr: slice.as_mut_ptr() as u64, len: slice.len() as u64 }
    }
}

/// Returns random bytes.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without randomness, identities and tokens would be guessable, so the process cannot go on.
    getrandom::fill(&mut bytes).expect("the operating system must provide random bytes");
    bytes
}

// The kernel reads a slice of pieces as iovecs.
const _: () = {
    assert!(size_of::<Piece>() == size_of::<libc::iovec>());
    assert!(align_of::<Piece>() == align_of::<libc::iovec>());
    assert!(std::mem::offset_of!(Piece, addr) == std::mem::offset_of!(libc::iovec, iov_base));
    assert!(std::mem::offset_of!(Piece, len) == std::mem::offset_of!(libc::iovec, iov_len));
};
