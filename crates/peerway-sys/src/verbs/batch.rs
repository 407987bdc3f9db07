//! Batches: work requests that calls build and one doorbell posts.

use std::ffi::{c_uint, c_void};
use std::marker::PhantomData;

use super::address::Ah;
use super::error::{VerbsError, errno_of};
use super::ffi::*;
use super::memory::Mw;
use super::queue_pair::Qp;

/// Work requests for an extended queue pair that are posted together or not at all.
///
/// For each request, call one operation such as [`write`](Self::write). On queue pairs without a
/// connection, call [`to`](Self::to) next. Then call one of [`sge`](Self::sge),
/// [`sge_list`](Self::sge_list) and [`inline_data`](Self::inline_data). Drivers record a mistake
/// and report it when the batch is [completed](Self::complete). Dropping the batch posts nothing.
///
/// The driver holds the lock of the send queue from start to completion. A batch therefore stays on
/// its thread, and the thread must finish it before it starts another batch on the same queue pair.
///
/// SAFETY comments below refer to this rule as the *batch contract*: the batch borrows its queue
/// pair, so the queue pair exists. The driver's lock is held from `start` until `complete` or
/// `drop`.
#[derive(Debug)]
pub struct Batch<'a> {
    raw: *mut ibv_qp_ex,
    qp: &'a Qp,
    open: bool,
    /// Keeps the batch on the thread that took the lock.
    thread: PhantomData<*mut ()>,
}

/// Calls a function of the queue pair's table. Returns an error if the queue pair was not created
/// for that operation.
macro_rules! call {
    ($batch:ident.$op:ident($($arg:expr),*)) => {{
        // SAFETY: batch contract.
        match unsafe { (*$batch.raw).$op } {
            Some(op) => {
                // SAFETY: batch contract: the call is between start and complete, as the driver
                // requires. The caller of `start` guarantees that the arguments are valid.
                unsafe { op($batch.raw $(, $arg)*) };
                Ok(())
            }
            None => Err($batch.missing(stringify!($op))),
        }
    }};
}

impl<'a> Batch<'a> {
    /// Starts a batch.
    ///
    /// # Errors
    ///
    /// [`VerbsError`], `EOPNOTSUPP`: the queue pair is not an extended one.
    ///
    /// # Safety
    ///
    /// This thread has no other open batch on `qp`. Every request in the batch meets the
    /// requirements of [`Qp::post_send`] for its memory, keys and handles.
    #[inline]
    pub unsafe fn start(qp: &'a Qp) -> Result<Self, VerbsError> {
        let unsupported = || {
            let on = format!("queue pair {} of {}", qp.number(), qp.context().name());
            VerbsError::unsupported("ibv_wr_start", on)
        };
        let raw = qp.extended().ok_or_else(unsupported)?.as_ptr();
        // SAFETY: `qp` is borrowed, so the queue pair exists.
        let (start, complete, abort) =
            unsafe { ((*raw).wr_start, (*raw).wr_complete, (*raw).wr_abort) };
        let (Some(start), Some(_), Some(_)) = (start, complete, abort) else {
            return Err(unsupported());
        };
        // SAFETY: the caller has no other open batch on this thread, so taking the lock cannot
        // deadlock.
        unsafe { start(raw) };
        Ok(Self { raw, qp, open: true, thread: PhantomData })
    }

    /// Writes to `remote_addr`. `flags` are `IBV_SEND_*`.
    ///
    /// # Errors
    ///
    /// As for all operations, `EOPNOTSUPP` if the queue pair was not created for it.
    #[inline]
    pub fn write(
        &mut self,
        id: u64,
        flags: c_uint,
        remote_addr: u64,
        rkey: u32,
    ) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_rdma_write(rkey, remote_addr))
    }

    /// As [`write`](Self::write), and completes a receive of the remote side with `immediate`.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn write_with_immediate(
        &mut self,
        id: u64,
        flags: c_uint,
        remote_addr: u64,
        rkey: u32,
        immediate: u32,
    ) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_rdma_write_imm(rkey, remote_addr, immediate.to_be()))
    }

    /// Reads from `remote_addr`.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn read(
        &mut self,
        id: u64,
        flags: c_uint,
        remote_addr: u64,
        rkey: u32,
    ) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_rdma_read(rkey, remote_addr))
    }

    /// Sends a message.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn send(&mut self, id: u64, flags: c_uint) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_send())
    }

    /// Sends a message with `immediate`.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn send_with_immediate(
        &mut self,
        id: u64,
        flags: c_uint,
        immediate: u32,
    ) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_send_imm(immediate.to_be()))
    }

    /// Invalidates the key of a memory window.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub fn invalidate(&mut self, id: u64, flags: c_uint, rkey: u32) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_local_inv(rkey))
    }

    /// Binds a type 2 memory window to part of a region, under the key `rkey`.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub fn bind_window(
        &mut self,
        id: u64,
        flags: c_uint,
        mw: &Mw,
        rkey: u32,
        bind_info: &ibv_mw_bind_info,
    ) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_bind_mw(mw.as_ptr(), rkey, bind_info))
    }

    /// Sets the destination of the last request, on queue pairs without a connection.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn to(&mut self, ah: &Ah, remote_qpn: u32, remote_qkey: u32) -> Result<(), VerbsError> {
        call!(self.wr_set_ud_addr(ah.as_ptr(), remote_qpn, remote_qkey))
    }

    /// Sets the local memory of the last request.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn sge(&mut self, sge: ibv_sge) -> Result<(), VerbsError> {
        call!(self.wr_set_sge(sge.lkey, sge.addr, sge.length))
    }

    /// Sets the local memory of the last request, in pieces.
    ///
    /// The soft-RoCE driver before rdma-core 64 uses the length of the first piece for all pieces.
    /// On it, use pieces of equal length or post a list of structures instead.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn sge_list(&mut self, sges: &[ibv_sge]) -> Result<(), VerbsError> {
        call!(self.wr_set_sge_list(sges.len(), sges.as_ptr()))
    }

    /// Sets the bytes of the last request. The call copies them. The caller must flag the request
    /// `IBV_SEND_INLINE`: the soft-RoCE driver requires the flag, and other drivers accept it.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn inline_data(&mut self, bytes: &[u8]) -> Result<(), VerbsError> {
        let address = bytes.as_ptr().cast_mut().cast::<c_void>();
        call!(self.wr_set_inline_data(address, bytes.len()))
    }

    /// Posts all requests with one doorbell.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: the queue is full (`ENOMEM`) or a request is invalid. Nothing was posted.
    #[inline]
    pub fn complete(mut self) -> Result<(), VerbsError> {
        self.open = false;
        // SAFETY: batch contract.
        let returned = match unsafe { (*self.raw).wr_complete } {
            // SAFETY: batch contract: `start` opened the batch, and `open` is now false, so it ends
            // once.
            Some(complete) => unsafe { complete(self.raw) },
            None => libc::EOPNOTSUPP,
        };
        match errno_of(returned) {
            None => Ok(()),
            Some(errno) => Err(self.qp.context().failed("ibv_wr_complete", errno)),
        }
    }

    /// Sets the id and the flags of the next operation.
    #[inline]
    fn next(&mut self, id: u64, flags: c_uint) {
        // SAFETY: batch contract: the driver's lock guards both fields.
        unsafe {
            (*self.raw).wr_id = id;
            (*self.raw).wr_flags = flags;
        }
    }

    #[cold]
    fn missing(&self, op: &'static str) -> VerbsError {
        let on = format!("queue pair {} of {}", self.qp.number(), self.qp.context().name());
        VerbsError::unsupported(op, on)
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        // SAFETY: batch contract.
        if let Some(abort) = unsafe { (*self.raw).wr_abort } {
            // SAFETY: batch contract: `start` opened the batch, and `complete` did not end it.
            unsafe { abort(self.raw) };
        }
    }
}
