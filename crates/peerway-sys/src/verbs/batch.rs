//! Requests that are built by calls, posted together.

use std::ffi::{c_uint, c_void};
use std::marker::PhantomData;

use super::address::Ah;
use super::error::{VerbsError, errno_of};
use super::ffi::*;
use super::memory::Mw;
use super::queue_pair::Qp;

/// Requests for an extended queue pair that are posted together, or not at all.
///
/// For each request call one operation, such as [`write`](Self::write), then on queue pairs without a
/// connection [`to`](Self::to), then one of [`sge`](Self::sge), [`sge_list`](Self::sge_list) and
/// [`inline_data`](Self::inline_data). Drivers note a mistake and report it when the batch is
/// [completed](Self::complete). Dropping the batch posts nothing.
///
/// Drivers hold the send queue's lock from beginning to end: a batch stays on its thread, and is
/// finished before the thread begins another one on the same queue pair.
#[derive(Debug)]
pub struct Batch<'a> {
    raw: *mut ibv_qp_ex,
    qp: &'a Qp,
    open: bool,
    /// The lock is the thread's that took it.
    thread: PhantomData<*mut ()>,
}

/// Calls a function of the queue pair's table, or says that the queue pair was not made for it.
macro_rules! call {
    ($batch:ident.$op:ident($($arg:expr),*)) => {{
        // SAFETY: the queue pair is there while the batch borrows it.
        match unsafe { (*$batch.raw).$op } {
            Some(op) => {
                // SAFETY: between start and complete, as the driver wants it; what the arguments name
                // is covered by the contract of `start`.
                unsafe { op($batch.raw $(, $arg)*) };
                Ok(())
            }
            None => Err($batch.missing(stringify!($op))),
        }
    }};
}

impl<'a> Batch<'a> {
    /// Begins a batch.
    ///
    /// # Errors
    ///
    /// [`VerbsError`], `EOPNOTSUPP`: the queue pair is not an extended one.
    ///
    /// # Safety
    ///
    /// This thread has no other batch open on `qp`. For every request in the batch holds what
    /// [`Qp::post_send`] demands of its memory, keys and handles.
    #[inline]
    pub unsafe fn start(qp: &'a Qp) -> Result<Self, VerbsError> {
        let unsupported = || {
            let on = format!("queue pair {} of {}", qp.number(), qp.context().name());
            VerbsError::unsupported("ibv_wr_start", on)
        };
        let raw = qp.extended().ok_or_else(unsupported)?.as_ptr();
        // SAFETY: the queue pair is there while the batch borrows it.
        let (start, complete, abort) =
            unsafe { ((*raw).wr_start, (*raw).wr_complete, (*raw).wr_abort) };
        let (Some(start), Some(_), Some(_)) = (start, complete, abort) else {
            return Err(unsupported());
        };
        // SAFETY: the caller has no other batch open, so the lock is free or soon will be.
        unsafe { start(raw) };
        Ok(Self { raw, qp, open: true, thread: PhantomData })
    }

    /// Writes to `remote_addr`. `flags` are `IBV_SEND_*`.
    ///
    /// # Errors
    ///
    /// As for all operations, `EOPNOTSUPP` where the queue pair was not made for it.
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

    /// As [`write`](Self::write), and ends a receive of the far side with `immediate`.
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

    /// Takes back the key of a window.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub fn invalidate(&mut self, id: u64, flags: c_uint, rkey: u32) -> Result<(), VerbsError> {
        self.next(id, flags);
        call!(self.wr_local_inv(rkey))
    }

    /// Binds a window of type 2 to part of a region, under the key `rkey`.
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

    /// Where the last request goes, on queue pairs without a connection.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn to(&mut self, ah: &Ah, remote_qpn: u32, remote_qkey: u32) -> Result<(), VerbsError> {
        call!(self.wr_set_ud_addr(ah.as_ptr(), remote_qpn, remote_qkey))
    }

    /// The local memory of the last request.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn sge(&mut self, sge: ibv_sge) -> Result<(), VerbsError> {
        call!(self.wr_set_sge(sge.lkey, sge.addr, sge.length))
    }

    /// The local memory of the last request, in pieces.
    ///
    /// The driver of soft-RoCE before rdma-core 64 takes the length of the first piece for that of all of
    /// them; there, make them of one length or post a list of structures instead.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn sge_list(&mut self, sges: &[ibv_sge]) -> Result<(), VerbsError> {
        call!(self.wr_set_sge_list(sges.len(), sges.as_ptr()))
    }

    /// The bytes of the last request, copied now. The request is flagged `IBV_SEND_INLINE`: the driver of
    /// soft-RoCE needs to be told, and no other minds.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    #[inline]
    pub fn inline_data(&mut self, bytes: &[u8]) -> Result<(), VerbsError> {
        let address = bytes.as_ptr().cast_mut().cast::<c_void>();
        call!(self.wr_set_inline_data(address, bytes.len()))
    }

    /// Posts all of it, with one doorbell.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: a full queue (`ENOMEM`) or a request that was wrong; nothing was posted.
    #[inline]
    pub fn complete(mut self) -> Result<(), VerbsError> {
        self.open = false;
        // SAFETY: the queue pair is there while the batch borrows it.
        let returned = match unsafe { (*self.raw).wr_complete } {
            // SAFETY: begun by `start`, ended once.
            Some(complete) => unsafe { complete(self.raw) },
            None => libc::EOPNOTSUPP,
        };
        match errno_of(returned) {
            None => Ok(()),
            Some(errno) => Err(self.qp.context().failed("ibv_wr_complete", errno)),
        }
    }

    /// What the next operation carries.
    #[inline]
    fn next(&mut self, id: u64, flags: c_uint) {
        // SAFETY: the queue pair is there while the batch borrows it, and the driver's lock, which this
        // thread holds, guards the two.
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
        // SAFETY: the queue pair is there while the batch borrows it.
        if let Some(abort) = unsafe { (*self.raw).wr_abort } {
            // SAFETY: begun by `start`, ended once.
            unsafe { abort(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;

    #[test]
    fn a_batch_is_posted_whole_or_aborted() {
        let (_cq, _pd, qp) = fake::extended_queue_pair();
        fake::log();
        // SAFETY: the only batch, and the fake touches no memory.
        let mut batch = unsafe { Batch::start(&qp) }.expect("it is extended");
        batch.write(1, IBV_SEND_SIGNALED, 0x1000, 5).expect("it was made for writes");
        batch.sge(ibv_sge { addr: 0x10, length: 2, lkey: 3 }).expect("the fake has it");
        assert!(batch.read(2, 0, 0, 0).is_err_and(|error| error.is_unsupported()));
        batch.complete().expect("the fake takes it");
        assert_eq!(fake::log(), ["wr_start", "wr_rdma_write", "wr_set_sge", "wr_complete"]);

        // SAFETY: the only batch.
        drop(unsafe { Batch::start(&qp) });
        assert_eq!(fake::log(), ["wr_start", "wr_abort"]);

        fake::fail("wr_complete", libc::ENOMEM);
        // SAFETY: the only batch.
        let batch = unsafe { Batch::start(&qp) }.expect("it is extended");
        assert_eq!(batch.complete().map_err(|error| error.errno), Err(libc::ENOMEM));
        assert!(!fake::log().contains(&"wr_abort"));
    }

    #[test]
    fn a_plain_queue_pair_has_no_batches() {
        let (_cq, _pd, qp) = fake::queue_pair();
        // SAFETY: none is begun.
        let refused = unsafe { Batch::start(&qp) }.map(drop);
        assert!(refused.is_err_and(|error| error.is_unsupported()));
    }
}
