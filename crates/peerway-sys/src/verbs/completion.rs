//! Completion queues, and channels to sleep on until there is something in them.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use super::context::{Context, set_nonblocking};
use super::error::{VerbsError, errno_of};
use super::ffi::*;
use super::owned::owned;

/// A descriptor that becomes readable when an armed completion queue gets a completion.
#[derive(Debug)]
pub struct CompChannel {
    raw: *mut ibv_comp_channel,
    context: Arc<Context>,
}

impl CompChannel {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] as the kernel says.
    pub fn create(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the device is open.
        let raw = unsafe { (context.verbs().symbols.ibv_create_comp_channel)(context.as_ptr()) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_create_comp_channel", context.name().to_owned()));
        }
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Readable when there is an [`event`](Self::event).
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps it open while the channel is there.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    /// Makes [`event`](Self::event) return instead of waiting.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] as `fcntl` says.
    pub fn set_nonblocking(&self) -> Result<(), VerbsError> {
        // SAFETY: the channel is there.
        let fd = unsafe { (*self.raw).fd };
        set_nonblocking(fd).map_err(|errno| self.context.failed("fcntl", errno))
    }

    /// Takes an event: the cookie of a queue that has a completion since it was armed; none where
    /// [`set_nonblocking`](Self::set_nonblocking) was called and nothing is there.
    ///
    /// It is acknowledged at once: giving back a queue waits for its events to be acknowledged, and
    /// would wait for ever for a caller that forgot. That costs a lock per wake-up, not per completion.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] as the kernel says.
    pub fn event(&self) -> Result<Option<usize>, VerbsError> {
        let symbols = &self.context.verbs().symbols;
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is there; the library fills both.
        let returned = unsafe { (symbols.ibv_get_cq_event)(self.raw, &mut cq, &mut cookie) };
        match errno_of(returned) {
            None => {}
            Some(libc::EAGAIN | libc::EINTR) => return Ok(None),
            Some(errno) => return Err(self.context.failed("ibv_get_cq_event", errno)),
        }
        // SAFETY: an event of this queue was taken, so the queue is kept until this.
        unsafe { (symbols.ibv_ack_cq_events)(cq, 1) };
        Ok(Some(cookie.addr()))
    }

    fn context(&self) -> &Context {
        &self.context
    }
}

owned!(CompChannel, "ibv_destroy_comp_channel", |this| {
    // SAFETY: made by this library, given back once; queues that use it held it and are gone.
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
    /// Makes a queue for at least `entries` completions. Events of it carry `cookie` and come through
    /// `channel`, by the interrupt `vector`.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EINVAL` for more entries than the device has, a vector it has not, or a channel
    /// of another device.
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
        // SAFETY: the device is open and the channel is one of it.
        let raw = unsafe { create(context.as_ptr(), entries, cookie, raw_channel, vector) };
        if raw.is_null() {
            return Err(failed(errno_of(-1).unwrap_or(libc::EIO)));
        }
        // SAFETY: just made, nobody else has it.
        let entries = AtomicI32::new(unsafe { (*raw).cqe });
        Ok(Self { raw, entries, channel: channel.cloned(), context: Arc::clone(context) })
    }

    /// Takes completions out, up to as many as `into` has room for, and says how many. Fewer than that
    /// means that the queue is empty now.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: the queue overran or the device is gone.
    #[inline]
    pub fn poll(&self, into: &mut [ibv_wc]) -> Result<usize, VerbsError> {
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is there while `self` lives, and so is its device.
        let poll = unsafe { (*(*self.raw).context).ops.poll_cq };
        let taken = match poll {
            // SAFETY: `into` has `room` entries.
            Some(poll) => unsafe { poll(self.raw, room, into.as_mut_ptr()) },
            None => -libc::EOPNOTSUPP,
        };
        usize::try_from(taken).map_err(|_| self.refused("ibv_poll_cq", taken))
    }

    /// Arms the queue: the next completion, or the next solicited or failed one, makes an event. What
    /// came before does not, so poll once more after arming and before sleeping.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] as the driver says.
    #[inline]
    pub fn request_notify(&self, solicited_only: bool) -> Result<(), VerbsError> {
        // SAFETY: the queue is there while `self` lives, and so is its device.
        let notify = unsafe { (*(*self.raw).context).ops.req_notify_cq };
        let returned = match notify {
            // SAFETY: as above.
            Some(notify) => unsafe { notify(self.raw, c_int::from(solicited_only)) },
            None => libc::EOPNOTSUPP,
        };
        if returned == 0 { Ok(()) } else { Err(self.refused("ibv_req_notify_cq", returned)) }
    }

    /// Makes room for at least `entries` completions and says how many it became.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` where the device cannot.
    pub fn resize(&self, entries: c_int) -> Result<c_int, VerbsError> {
        // SAFETY: the queue is there while `self` lives; verbs may resize one that is polled.
        let returned = unsafe { (self.context.verbs().symbols.ibv_resize_cq)(self.raw, entries) };
        self.context.check("ibv_resize_cq", returned)?;
        // Drivers that cannot tell leave the old number in place: then what was asked for is what is
        // known to be there.
        // SAFETY: as above; written only by the call that has just returned.
        let entries = unsafe { (*self.raw).cqe }.max(entries);
        self.entries.store(entries, Ordering::Relaxed);
        Ok(entries)
    }

    /// How many completions it has room for.
    pub fn entries(&self) -> c_int {
        self.entries.load(Ordering::Relaxed)
    }

    /// The channel that its events come through.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// The device it is on.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The structure itself, for calls that have no wrapper.
    pub fn as_ptr(&self) -> *mut ibv_cq {
        self.raw
    }

    /// Out of line, so that the hot calls stay small.
    #[cold]
    fn refused(&self, call: &'static str, returned: c_int) -> VerbsError {
        self.context.failed(call, errno_of(returned).unwrap_or(libc::EIO))
    }
}

owned!(Cq, "ibv_destroy_cq", |this| {
    // SAFETY: made by this library, given back once; queue pairs that use it held it and are gone. All
    // its events are acknowledged where they are taken.
    unsafe { (this.context.verbs().symbols.ibv_destroy_cq)(this.raw) }
});

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;

    #[test]
    fn a_queue_is_polled_armed_and_resized_through_its_device() {
        let context = Arc::new(fake::open());
        let channel = Arc::new(CompChannel::create(&context).expect("the fake gives one"));
        let cq = Cq::create(&context, 16, 0x77, Some(&channel), 0).expect("the fake gives one");
        assert_eq!((cq.entries(), cq.channel().is_some()), (16, true));
        assert_eq!((cq.resize(32), cq.entries()), (Ok(32), 32));

        let mut into = [ibv_wc::zeroed(); 4];
        assert_eq!(cq.poll(&mut into), Ok(0));
        fake::push_completions(&[3, 4, 5, 6, 7]);
        assert_eq!(cq.poll(&mut into), Ok(4));
        assert_eq!(into.map(|wc| wc.wr_id), [3, 4, 5, 6]);
        assert_eq!(cq.poll(&mut into), Ok(1));
        assert_eq!(cq.request_notify(false), Ok(()));

        assert_eq!(channel.event(), Ok(None));
        fake::push_cq_event(&cq);
        fake::log();
        assert_eq!(channel.event(), Ok(Some(0x77)));
        assert_eq!(fake::log(), ["ibv_get_cq_event", "ibv_ack_cq_events"]);

        drop((channel, context));
        drop(cq);
        assert_eq!(fake::log(), ["ibv_destroy_cq", "ibv_destroy_comp_channel", "ibv_close_device"]);
    }

    #[test]
    fn refusals_are_named() {
        let context = Arc::new(fake::open());
        let errno = |result: Result<(), VerbsError>| result.expect_err("told to fail").errno;
        fake::fail("ibv_create_comp_channel", libc::EMFILE);
        assert_eq!(errno(CompChannel::create(&context).map(drop)), libc::EMFILE);
        let channel = Arc::new(CompChannel::create(&context).expect("the fake gives one"));
        fake::fail("ibv_create_cq", libc::EINVAL);
        assert_eq!(errno(Cq::create(&context, 1, 0, None, 0).map(drop)), libc::EINVAL);
        let cq = Cq::create(&context, 1, 0, Some(&channel), 0).expect("the fake gives one");
        fake::fail("ibv_poll_cq", libc::EIO);
        assert_eq!(errno(cq.poll(&mut [ibv_wc::zeroed()]).map(drop)), libc::EIO);
        fake::fail("ibv_req_notify_cq", libc::EIO);
        assert_eq!(errno(cq.request_notify(true)), libc::EIO);
        fake::fail("ibv_resize_cq", libc::EOPNOTSUPP);
        assert!(cq.resize(9).is_err_and(|error| error.is_unsupported()));
        fake::fail("ibv_get_cq_event", libc::EIO);
        assert_eq!(errno(channel.event().map(drop)), libc::EIO);

        let other = Arc::new(fake::open());
        assert_eq!(errno(Cq::create(&other, 1, 0, Some(&channel), 0).map(drop)), libc::EINVAL);
    }
}
