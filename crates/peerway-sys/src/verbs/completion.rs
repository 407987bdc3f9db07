//! Completion queues, and channels that a thread can block on until a completion arrives.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use super::context::{Context, set_nonblocking};
use super::error::{VerbsError, errno_of};
use super::ffi::*;
use super::owned::owned;

/// A file descriptor that becomes readable when an armed completion queue receives a completion.
#[derive(Debug)]
pub struct CompChannel {
    raw: *mut ibv_comp_channel,
    context: Arc<Context>,
}

impl CompChannel {
    /// Creates a channel.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the kernel.
    pub fn create(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: handle contract: the device is open.
        let raw = unsafe { (context.verbs().symbols.ibv_create_comp_channel)(context.as_ptr()) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_create_comp_channel", context.name().to_owned()));
        }
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// The file descriptor. It is readable when an [`event`](Self::event) is pending.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: handle contract: the library keeps the descriptor open while the channel exists.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    /// Makes [`event`](Self::event) return instead of blocking.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from `fcntl`.
    pub fn set_nonblocking(&self) -> Result<(), VerbsError> {
        // SAFETY: handle contract: the channel exists.
        let fd = unsafe { (*self.raw).fd };
        set_nonblocking(fd).map_err(|errno| self.context.failed("fcntl", errno))
    }

    /// Takes an event: the cookie of a queue that received a completion after it was armed. Returns
    /// `None` if no event is pending and [`set_nonblocking`](Self::set_nonblocking) was called.
    ///
    /// This function acknowledges the event at once. Destroying a queue waits for the
    /// acknowledgement of its events, and would block forever for a caller that forgot it. This
    /// costs a lock per wake-up, not per completion.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the kernel.
    pub fn event(&self) -> Result<Option<usize>, VerbsError> {
        let symbols = &self.context.verbs().symbols;
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: handle contract: the channel exists. The library fills both pointers.
        let returned = unsafe { (symbols.ibv_get_cq_event)(self.raw, &mut cq, &mut cookie) };
        match errno_of(returned) {
            None => {}
            Some(libc::EAGAIN | libc::EINTR) => return Ok(None),
            Some(errno) => return Err(self.context.failed("ibv_get_cq_event", errno)),
        }
        // SAFETY: the event is not yet acknowledged, so the library keeps the queue.
        unsafe { (symbols.ibv_ack_cq_events)(cq, 1) };
        Ok(Some(cookie.addr()))
    }

    fn context(&self) -> &Context {
        &self.context
    }
}

owned!(CompChannel, "ibv_destroy_comp_channel", |this| {
    // SAFETY: handle contract: `owned!` gives it back once, after all queues that held it.
    unsafe { (this.context.verbs().symbols.ibv_destroy_comp_channel)(this.raw) }
});

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    raw: *mut ibv_cq,
    entries: AtomicI32,
    channel: Option<Arc<CompChannel>>,
    context: Arc<Context>,
}

impl Cq {
    /// Creates a queue for at least `entries` completions. Its events carry `cookie` and arrive
    /// through `channel`, on the interrupt `vector`.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EINVAL` if the device does not support so many entries or that vector, or
    /// if the channel belongs to another device.
    pub fn create(
        context: &Arc<Context>,
        entries: c_int,
        cookie: usize,
        channel: Option<&Arc<CompChannel>>,
        vector: c_int,
    ) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_create_cq";
        let failed =
            |errno| VerbsError::new(CALL, format!("{} ({entries} entries)", context.name()), errno);
        if channel.is_some_and(|channel| !Arc::ptr_eq(&channel.context, context)) {
            return Err(failed(libc::EINVAL));
        }
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.raw);
        let cookie = ptr::without_provenance_mut::<c_void>(cookie);
        let create = context.verbs().symbols.ibv_create_cq;
        // SAFETY: handle contract: the device is open. The check above proves that the channel
        // belongs to it.
        let raw = unsafe { create(context.as_ptr(), entries, cookie, raw_channel, vector) };
        if raw.is_null() {
            return Err(failed(errno_of(-1).unwrap_or(libc::EIO)));
        }
        // SAFETY: the library has just created it, and no other thread knows it.
        let entries = AtomicI32::new(unsafe { (*raw).cqe });
        Ok(Self { raw, entries, channel: channel.cloned(), context: Arc::clone(context) })
    }

    /// Takes up to `into.len()` completions out of the queue and returns them. A smaller number
    /// means that the queue is now empty.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: the queue overran or the device no longer exists.
    #[inline]
    pub fn take<'a>(
        &self,
        into: &'a mut [MaybeUninit<ibv_wc>],
    ) -> Result<&'a [ibv_wc], VerbsError> {
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: handle contract: the queue exists and its device is open.
        let poll = unsafe { (*(*self.raw).context).ops.poll_cq };
        let taken = match poll {
            // SAFETY: as above; `into` has `room` entries.
            Some(poll) => unsafe { poll(self.raw, room, into.as_mut_ptr().cast()) },
            None => -libc::EOPNOTSUPP,
        };
        let taken = usize::try_from(taken).map_err(|_| self.refused("ibv_poll_cq", taken))?;
        // SAFETY: the driver has written the first `taken` entries.
        Ok(unsafe { into[..taken].assume_init_ref() })
    }

    /// As [`Self::take`], into initialised places. Returns the number of completions.
    ///
    /// # Errors
    ///
    /// As for [`Self::take`].
    pub fn poll(&self, into: &mut [ibv_wc]) -> Result<usize, VerbsError> {
        let (places, len) = (into.as_mut_ptr().cast::<MaybeUninit<ibv_wc>>(), into.len());
        // SAFETY: the two types have the same layout, and `take` writes only whole entries.
        self.take(unsafe { std::slice::from_raw_parts_mut(places, len) }).map(<[_]>::len)
    }

    /// Arms the queue: the next completion, or the next solicited or failed one, creates an event.
    /// Completions that arrived before do not, so poll once more after arming and before blocking.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver.
    #[inline]
    pub fn request_notify(&self, solicited_only: bool) -> Result<(), VerbsError> {
        // SAFETY: handle contract: the queue exists and its device is open.
        let notify = unsafe { (*(*self.raw).context).ops.req_notify_cq };
        let returned = match notify {
            // SAFETY: as above.
            Some(notify) => unsafe { notify(self.raw, c_int::from(solicited_only)) },
            None => libc::EOPNOTSUPP,
        };
        if returned == 0 { Ok(()) } else { Err(self.refused("ibv_req_notify_cq", returned)) }
    }

    /// Resizes the queue to at least `entries` completions and returns the new size.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if the device cannot resize.
    pub fn resize(&self, entries: c_int) -> Result<c_int, VerbsError> {
        // SAFETY: handle contract: the queue exists. Verbs allow resizing a queue that is being
        // polled.
        let returned = unsafe { (self.context.verbs().symbols.ibv_resize_cq)(self.raw, entries) };
        self.context.check("ibv_resize_cq", returned)?;
        // Drivers that do not report the new size leave the old number in place. The requested size
        // is then the known minimum.
        // SAFETY: as above. Only the call that has just returned writes the field.
        let entries = unsafe { (*self.raw).cqe }.max(entries);
        self.entries.store(entries, Ordering::Relaxed);
        Ok(entries)
    }

    /// The number of completions that the queue can hold.
    pub fn entries(&self) -> c_int {
        self.entries.load(Ordering::Relaxed)
    }

    /// The channel for its events.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// The device of the queue.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The raw structure, for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_cq {
        self.raw
    }

    /// A separate function, so that the hot calls stay small.
    #[cold]
    fn refused(&self, call: &'static str, returned: c_int) -> VerbsError {
        self.context.failed(call, errno_of(returned).unwrap_or(libc::EIO))
    }
}

owned!(Cq, "ibv_destroy_cq", |this| {
    // SAFETY: handle contract: `owned!` gives it back once, after all queue pairs that held it.
    // `CompChannel::event` acknowledges every event, so the call does not block.
    unsafe { (this.context.verbs().symbols.ibv_destroy_cq)(this.raw) }
});
