//! Completion queues and their channels.
//!
//! Invariants:
//! - Completions come out in the order in which they were put in. A late completion holds back all
//!   completions after it.
//! - An armed queue raises exactly one event, for the next completion of the kind that it was armed
//!   for. It is then no longer armed. Arming and putting happen under one lock, so no event is
//!   missed.
//! - A thread takes the lock of a queue inside the lock of its context, never the other way round.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use peerway_sys::verbs::ffi::*;

use crate::context::{FakeContext, fail};
use crate::device::MAX_CQE;
use crate::events::{Event, EventPipe};
use crate::lock;
use crate::nic::Nic;
use crate::stats::{COUNTERS, count};

/// A completion channel. It starts with the structure that the program sees.
#[repr(C)]
struct FakeChannel {
    raw: ibv_comp_channel,
    shared: Arc<Channel>,
}

#[derive(Debug)]
struct Channel {
    pipe: EventPipe,
    /// The existing queues, which events of this channel may name.
    queues: Mutex<HashMap<u64, Arc<CqShared>>>,
}

/// A completion queue. It starts with the structure that the program sees.
#[repr(C)]
pub(crate) struct FakeCq {
    raw: ibv_cq,
    pub(crate) shared: Arc<CqShared>,
    nic: Arc<Nic>,
}

/// The part of a queue that the device and the program share.
#[derive(Debug)]
pub(crate) struct CqShared {
    pub(crate) id: u64,
    /// The address of the [`FakeCq`], for events.
    place: usize,
    channel: Option<Arc<Channel>>,
    queue: Mutex<Queue>,
    unacknowledged: Mutex<u32>,
    acknowledged: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    ready: VecDeque<ibv_wc>,
    late: VecDeque<Late>,
    room: usize,
    armed: Armed,
    overrun: bool,
    /// Number of uses as the send or receive queue of a queue pair.
    users: u32,
}

#[derive(Debug)]
struct Late {
    at: Instant,
    wc: ibv_wc,
    solicited: bool,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Armed {
    #[default]
    No,
    Solicited,
    Next,
}

/// The result of putting a completion into a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Put {
    Done,
    /// The completion appears later; see [`CqShared::release`].
    Late,
    /// The queue overran, for the first time.
    Overrun,
}

impl CqShared {
    /// # Safety
    ///
    /// `raw` is a completion queue of this library.
    pub(crate) unsafe fn of(raw: *mut ibv_cq) -> Arc<Self> {
        // SAFETY: by this function's contract.
        unsafe { Arc::clone(&(*raw.cast::<FakeCq>()).shared) }
    }

    pub(crate) fn place(&self) -> *mut ibv_cq {
        ptr::with_exposed_provenance_mut(self.place)
    }

    pub(crate) fn put(&self, wc: ibv_wc, solicited: bool, late_until: Option<Instant>) -> Put {
        let mut queue = self.queue();
        if queue.ready.len() + queue.late.len() >= queue.room {
            return if std::mem::replace(&mut queue.overrun, true) {
                Put::Done
            } else {
                Put::Overrun
            };
        }
        let behind = queue.late.back().map(|late| late.at);
        if let Some(at) = late_until.or(behind) {
            let at = behind.map_or(at, |behind| behind.max(at));
            queue.late.push_back(Late { at, wc, solicited });
            return Put::Late;
        }
        self.show(&mut queue, wc, solicited);
        Put::Done
    }

    /// Shows the completions that are due, and returns when the next one is due.
    pub(crate) fn release(&self, now: Instant) -> Option<Instant> {
        let mut queue = self.queue();
        while let Some(late) = queue.late.front() {
            if late.at > now {
                return Some(late.at);
            }
            let Some(late) = queue.late.pop_front() else { break };
            self.show(&mut queue, late.wc, late.solicited);
        }
        None
    }

    fn show(&self, queue: &mut Queue, wc: ibv_wc, solicited: bool) {
        let failed = wc.status != IBV_WC_SUCCESS;
        queue.ready.push_back(wc);
        let due = match queue.armed {
            Armed::No => false,
            Armed::Solicited => solicited || failed,
            Armed::Next => true,
        };
        if let Some(channel) = self.channel.as_ref().filter(|_| due) {
            // A channel that the program does not read is full at some point. The queue then stays
            // armed.
            if channel.pipe.put(Event { kind: 0, port: 0, id: self.id }) {
                count(&COUNTERS.events, 1);
                queue.armed = Armed::No;
            }
        }
    }

    fn poll(&self, into: &mut [std::mem::MaybeUninit<ibv_wc>]) -> c_int {
        let mut queue = self.queue();
        let taken = queue.ready.len().min(into.len());
        for (place, wc) in into.iter_mut().zip(queue.ready.drain(..taken)) {
            place.write(wc);
        }
        if taken == 0 && queue.overrun {
            return -libc::EIO;
        }
        taken as c_int
    }

    /// Drops the completions of a destroyed queue pair.
    pub(crate) fn purge(&self, number: u32) {
        let mut queue = self.queue();
        queue.ready.retain(|wc| wc.qp_num != number);
        queue.late.retain(|late| late.wc.qp_num != number);
    }

    pub(crate) fn add_user(&self) {
        self.queue().users += 1;
    }

    pub(crate) fn remove_user(&self) {
        self.queue().users -= 1;
    }

    /// Counts an event of this queue that the program has received.
    pub(crate) fn event_taken(&self) {
        *lock(&self.unacknowledged) += 1;
    }

    pub(crate) fn events_acknowledged(&self, events: u32) {
        let mut open = lock(&self.unacknowledged);
        *open = open.saturating_sub(events);
        self.acknowledged.notify_all();
    }

    /// Waits until the program has acknowledged all events of this queue, as verbs demand before a
    /// queue is destroyed.
    fn wait_for_acknowledgements(&self) {
        let mut open = lock(&self.unacknowledged);
        while *open > 0 {
            open = self.acknowledged.wait(open).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    let Ok(pipe) = EventPipe::new() else {
        return fail(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE));
    };
    let raw = ibv_comp_channel { context, fd: pipe.fd(), refcnt: 0 };
    let shared = Arc::new(Channel { pipe, queues: Mutex::default() });
    Box::into_raw(Box::new(FakeChannel { raw, shared })).cast()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let channel = channel.cast::<FakeChannel>();
    // SAFETY: by the handles contract.
    let shared = unsafe { &(*channel).shared };
    if !lock(&shared.queues).is_empty() {
        return libc::EBUSY;
    }
    // SAFETY: by the destroy contract.
    drop(unsafe { Box::from_raw(channel) });
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: by the handles contract.
    let nic = unsafe { FakeContext::nic(context) };
    if nic.device.is_removed() {
        return fail(libc::EIO);
    }
    // SAFETY: by the handles contract.
    let vectors = unsafe { (*context).num_comp_vectors };
    if !(1..=MAX_CQE).contains(&entries) || !(0..vectors).contains(&vector) {
        return fail(libc::EINVAL);
    }
    let mut raw = ibv_cq::zeroed();
    raw.context = context;
    raw.channel = channel;
    raw.cq_context = cookie;
    raw.cqe = entries;
    let shared = (!channel.is_null()).then(|| {
        // SAFETY: by the handles contract.
        unsafe { Arc::clone(&(*channel.cast::<FakeChannel>()).shared) }
    });
    let mut place = Box::<FakeCq>::new_uninit();
    let id = nic.next_id();
    raw.handle = id as u32;
    let queue = Queue { room: entries as usize, ..Queue::default() };
    let cq = Arc::new(CqShared {
        id,
        place: place.as_mut_ptr().expose_provenance(),
        channel: shared.clone(),
        queue: Mutex::new(queue),
        unacknowledged: Mutex::new(0),
        acknowledged: Condvar::new(),
    });
    if let Some(channel) = shared {
        lock(&channel.queues).insert(id, Arc::clone(&cq));
    }
    lock(&nic.cqs).insert(id, Arc::clone(&cq));
    place.write(FakeCq { raw, shared: cq, nic });
    Box::into_raw(place).cast()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    // SAFETY: by the handles contract.
    let shared = unsafe { CqShared::of(cq) };
    let mut queue = shared.queue();
    let held = queue.ready.len() + queue.late.len();
    if !(1..=MAX_CQE).contains(&entries) || held > entries as usize {
        return libc::EINVAL;
    }
    queue.room = entries as usize;
    // SAFETY: by the handles contract; only this call writes the field.
    unsafe { (*cq).cqe = entries };
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let fake = cq.cast::<FakeCq>();
    // SAFETY: by the handles contract.
    let (shared, nic) = unsafe { (&(*fake).shared, &(*fake).nic) };
    if shared.queue().users > 0 {
        return libc::EBUSY;
    }
    lock(&nic.cqs).remove(&shared.id);
    if let Some(channel) = &shared.channel {
        lock(&channel.queues).remove(&shared.id);
    }
    shared.wait_for_acknowledgements();
    // SAFETY: by the handles and destroy contracts.
    drop(unsafe { Box::from_raw(fake) });
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    // SAFETY: by the handles contract.
    let shared = unsafe { &(*channel.cast::<FakeChannel>()).shared };
    loop {
        let event = match shared.pipe.take() {
            Ok(event) => event,
            Err(error) => {
                fail::<()>(error.raw_os_error().unwrap_or(libc::EIO));
                return -1;
            }
        };
        let queues = lock(&shared.queues);
        let Some(found) = queues.get(&event.id) else { continue };
        found.event_taken();
        // SAFETY: the output pointers are valid by the pointers contract. The queue exists, because
        // it is in the table. It stays until the program acknowledges the event that was just
        // counted.
        unsafe {
            *cq = found.place();
            *cookie = (*found.place()).cq_context;
        }
        return 0;
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // SAFETY: by the handles contract; the queue stays until its events are acknowledged.
    unsafe { CqShared::of(cq) }.events_acknowledged(events);
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) -> c_int {
    count(&COUNTERS.polls, 1);
    let room = usize::try_from(room).unwrap_or(0);
    if room == 0 {
        return 0;
    }
    // SAFETY: by the handles and pointers contracts, `into` has space for `room` completions.
    let (shared, into) = unsafe {
        (&(*cq.cast::<FakeCq>()).shared, std::slice::from_raw_parts_mut(into.cast(), room))
    };
    let taken = shared.poll(into);
    count(&COUNTERS.completions, u64::try_from(taken).unwrap_or(0));
    taken
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: by the handles contract.
    let FakeCq { shared, nic, .. } = unsafe { &*cq.cast::<FakeCq>() };
    if solicited_only != 0 && nic.device.is_efa() {
        return libc::EOPNOTSUPP;
    }
    let mut queue = shared.queue();
    // A weaker request does not cancel an earlier, stronger one.
    if solicited_only == 0 {
        queue.armed = Armed::Next;
    } else if queue.armed == Armed::No {
        queue.armed = Armed::Solicited;
    }
    0
}
