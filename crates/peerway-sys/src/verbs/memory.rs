//! Protection domains, registered memory and memory windows.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use super::context::Context;
use super::error::VerbsError;
use super::ffi::*;
use super::owned::owned;

/// A protection domain. Queue pairs reach only memory that is registered in their own domain.
#[derive(Debug)]
pub struct Pd {
    raw: *mut ibv_pd,
    context: Arc<Context>,
}

impl Pd {
    /// Creates a domain.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver.
    pub fn alloc(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: handle contract: the device is open.
        let raw = unsafe { (context.verbs().symbols.ibv_alloc_pd)(context.as_ptr()) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_alloc_pd", context.name().to_owned()));
        }
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// The device of the domain.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The raw structure, for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_pd {
        self.raw
    }
}

owned!(Pd, "ibv_dealloc_pd", |this| {
    // SAFETY: handle contract: `owned!` gives it back once, after all objects in it.
    unsafe { (this.context.verbs().symbols.ibv_dealloc_pd)(this.raw) }
});

/// Registered memory. The device may read or write it, and so may a peer with the key.
#[derive(Debug)]
pub struct Mr {
    raw: *mut ibv_mr,
    pd: Arc<Pd>,
}

impl Mr {
    /// Registers `length` bytes at `address`. `access` holds `IBV_ACCESS_*`.
    ///
    /// Flags of the optional range, such as relaxed ordering, have no effect if the library or the
    /// kernel does not know them. This function or the library drops them.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `ENOMEM` usually means that the limit on locked memory was reached.
    ///
    /// # Safety
    ///
    /// From now until the region is given back:
    /// - The range stays mapped. The device holds the pages that are mapped now. If the process
    ///   maps others in their place, the device accesses memory that is no longer this range.
    /// - While `access` allows the device or a peer to write, no Rust reference to the range
    ///   exists. While it allows them to read, no mutable Rust reference to the range exists.
    pub unsafe fn register(
        pd: &Arc<Pd>,
        address: *mut c_void,
        length: usize,
        access: c_uint,
    ) -> Result<Self, VerbsError> {
        let symbols = &pd.context.verbs().symbols;
        let raw = match symbols.ibv_reg_mr_iova2 {
            Some(register) if access & IBV_ACCESS_OPTIONAL_RANGE != 0 => {
                // SAFETY: handle contract: the domain exists. The caller guarantees the memory.
                unsafe { register(pd.raw, address, length, address.addr() as u64, access) }
            }
            _ => {
                let access = (access & !IBV_ACCESS_OPTIONAL_RANGE).cast_signed();
                // SAFETY: handle contract: the domain exists. The caller guarantees the memory.
                unsafe { (symbols.ibv_reg_mr)(pd.raw, address, length, access) }
            }
        };
        Self::made(raw, pd, "ibv_reg_mr", || format!("{length} bytes at {address:p}"))
    }

    /// As [`register`](Self::register), but peers address the memory by `iova` instead of its
    /// address.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if the library has no `ibv_reg_mr_iova2`.
    ///
    /// # Safety
    ///
    /// As for [`register`](Self::register).
    pub unsafe fn register_at(
        pd: &Arc<Pd>,
        address: *mut c_void,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_reg_mr_iova2";
        let Some(register) = pd.context.verbs().symbols.ibv_reg_mr_iova2 else {
            return Err(VerbsError::unsupported(CALL, pd.context.name().to_owned()));
        };
        // SAFETY: handle contract: the domain exists. The caller guarantees the memory.
        let raw = unsafe { register(pd.raw, address, length, iova, access) };
        Self::made(raw, pd, CALL, || format!("{length} bytes at {address:p} as {iova:#x}"))
    }

    /// Registers `length` bytes of a dma-buf, such as exported GPU memory, from `offset` in it.
    /// Peers address it by `iova`. The caller may close the descriptor afterwards.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if the library or the kernel lacks the call.
    ///
    /// # Safety
    ///
    /// As for [`register`](Self::register), for the memory behind the dma-buf.
    pub unsafe fn register_dmabuf(
        pd: &Arc<Pd>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let Some(register) = pd.context.verbs().symbols.ibv_reg_dmabuf_mr else {
            return Err(VerbsError::unsupported(CALL, pd.context.name().to_owned()));
        };
        let (fd, flags) = (dmabuf.as_raw_fd(), access.cast_signed());
        // SAFETY: handle contract: the domain exists. The descriptor is open, and the caller
        // guarantees the memory.
        let raw = unsafe { register(pd.raw, offset, length, iova, fd, flags) };
        Self::made(raw, pd, CALL, || format!("{length} bytes at {offset:#x} of fd {fd}"))
    }

    /// The key for the local device.
    pub fn lkey(&self) -> u32 {
        // SAFETY: handle contract: the region is registered. Its keys do not change.
        unsafe { (*self.raw).lkey }
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: handle contract: the region is registered. Its keys do not change.
        unsafe { (*self.raw).rkey }
    }

    /// The protection domain of the region.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The raw structure, for window binds and for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_mr {
        self.raw
    }

    fn context(&self) -> &Context {
        &self.pd.context
    }

    fn made(
        raw: *mut ibv_mr,
        pd: &Arc<Pd>,
        call: &'static str,
        what: impl FnOnce() -> String,
    ) -> Result<Self, VerbsError> {
        if raw.is_null() {
            let error = VerbsError::last(call, "");
            let on = format!("{} ({})", pd.context.name(), what());
            return Err(VerbsError { on: on.into(), ..error });
        }
        Ok(Self { raw, pd: Arc::clone(pd) })
    }
}

owned!(Mr, "ibv_dereg_mr", |this| {
    // SAFETY: handle contract: `owned!` gives it back once. If a window is still bound to the
    // region, the kernel refuses.
    unsafe { (this.context().verbs().symbols.ibv_dereg_mr)(this.raw) }
});

/// A type 2 memory window: a key to part of a region that work requests grant and revoke.
///
/// [`ibv_send_wr::bind_window`] binds it and [`ibv_send_wr::invalidate`] invalidates it. While it
/// is bound, its region cannot be given back.
#[derive(Debug)]
pub struct Mw {
    raw: *mut ibv_mw,
    pd: Arc<Pd>,
}

impl Mw {
    /// Creates an unbound window.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if the device has no type 2 windows.
    pub fn alloc(pd: &Arc<Pd>) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_alloc_mw";
        // SAFETY: handle contract: the device is open.
        let ops = unsafe { &(*pd.context.as_ptr()).ops };
        let on = || pd.context.name().to_owned();
        let (Some(alloc), Some(_)) = (ops.alloc_mw, ops.dealloc_mw) else {
            return Err(VerbsError::unsupported(CALL, on()));
        };
        // SAFETY: handle contract: the domain exists.
        let raw = unsafe { alloc(pd.raw, IBV_MW_TYPE_2) };
        if raw.is_null() {
            return Err(VerbsError::last(CALL, on()));
        }
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    /// The key from its creation. A bind takes a key that differs in the lowest byte
    /// ([`next_rkey`]), and peers then use that key.
    pub fn rkey(&self) -> u32 {
        // SAFETY: handle contract: the window exists. A bind does not modify a type 2 window's
        // structure.
        unsafe { (*self.raw).rkey }
    }

    /// The raw structure, for binds.
    pub fn as_ptr(&self) -> *mut ibv_mw {
        self.raw
    }

    fn context(&self) -> &Context {
        &self.pd.context
    }
}

owned!(Mw, "ibv_dealloc_mw", |this| {
    // SAFETY: handle contract: the device is open.
    match unsafe { (*this.context().as_ptr()).ops.dealloc_mw } {
        // SAFETY: handle contract: `owned!` gives it back once.
        Some(dealloc) => unsafe { dealloc(this.raw) },
        None => libc::EOPNOTSUPP as c_int,
    }
});

/// The key for the next bind of a window. Its lowest byte belongs to the consumer and wraps around.
pub fn next_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_keys_count_in_their_lowest_byte() {
        assert_eq!(next_rkey(0x1234_5600), 0x1234_5601);
        assert_eq!(next_rkey(0x1234_56ff), 0x1234_5600);
        assert_eq!(next_rkey(u32::MAX), 0xffff_ff00);
    }
}
