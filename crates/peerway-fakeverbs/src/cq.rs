//! Completion queues and their channels.
//!
//! Invariants: completions come out in the order in which they were put in; one that is late holds back
//! those after it. A queue that is armed makes exactly one event, for the next completion of the kind it
//! was armed for, and is then not armed; arming and putting are under one lock, so none is missed.
//! The lock of a queue is taken inside the lock of its context, never the other way round.

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

/// A completion channel. Begins with what the program sees of it.
#[repr(C)]
struct FakeChannel {
    raw: ibv_comp_channel,
    shared: Arc<Channel>,
}

#[derive(Debug)]
struct Channel {
    pipe: EventPipe,
    /// The queues that its events may name: those that are still there.
    queues: Mutex<HashMap<u64, Arc<CqShared>>>,
}

/// A completion queue. Begins with what the program sees of it.
#[repr(C)]
pub(crate) struct FakeCq {
    raw: ibv_cq,
    pub(crate) shared: Arc<CqShared>,
    nic: Arc<Nic>,
}

/// What the device and the program share of a queue.
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
    /// Queue pairs that put completions here.
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

/// What became of a completion.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Put {
    Done,
    /// It comes later: [`CqShared::release`].
    Late,
    /// The queue was full, for the first time.
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

    /// Shows completions whose time has come, and says when the next one's does.
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
            // A channel that nobody reads takes no more: then it stays armed.
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

    /// Forgets the completions of a queue pair that is gone.
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

    /// An event of this queue was given to the program.
    pub(crate) fn event_taken(&self) {
        *lock(&self.unacknowledged) += 1;
    }

    pub(crate) fn events_acknowledged(&self, events: u32) {
        let mut open = lock(&self.unacknowledged);
        *open = open.saturating_sub(events);
        self.acknowledged.notify_all();
    }

    /// As verbs have it: what an event was taken of is kept until that is acknowledged.
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
/// As libibverbs documents it.
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
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let channel = channel.cast::<FakeChannel>();
    // SAFETY: made above and not given back yet, as the caller vouches.
    let shared = unsafe { &(*channel).shared };
    if !lock(&shared.queues).is_empty() {
        return libc::EBUSY;
    }
    // SAFETY: as above, and not used again.
    drop(unsafe { Box::from_raw(channel) });
    0
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: the caller's context is one of this library.
    let nic = unsafe { FakeContext::nic(context) };
    if nic.device.is_removed() {
        return fail(libc::EIO);
    }
    // SAFETY: as above.
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
        // SAFETY: the caller's channel is one of this library.
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
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    // SAFETY: the caller's queue is one of this library.
    let shared = unsafe { CqShared::of(cq) };
    let mut queue = shared.queue();
    let held = queue.ready.len() + queue.late.len();
    if !(1..=MAX_CQE).contains(&entries) || held > entries as usize {
        return libc::EINVAL;
    }
    queue.room = entries as usize;
    // SAFETY: as above; only this call writes it.
    unsafe { (*cq).cqe = entries };
    0
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let fake = cq.cast::<FakeCq>();
    // SAFETY: the caller's queue is one of this library.
    let (shared, nic) = unsafe { (&(*fake).shared, &(*fake).nic) };
    if shared.queue().users > 0 {
        return libc::EBUSY;
    }
    lock(&nic.cqs).remove(&shared.id);
    if let Some(channel) = &shared.channel {
        lock(&channel.queues).remove(&shared.id);
    }
    shared.wait_for_acknowledgements();
    // SAFETY: as above, and not used again.
    drop(unsafe { Box::from_raw(fake) });
    0
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's channel is one of this library.
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
        // SAFETY: the places are the caller's; the queue is there, as it is in the table, and stays until
        // the event that was just counted is acknowledged.
        unsafe {
            *cq = found.place();
            *cookie = (*found.place()).cq_context;
        }
        return 0;
    }
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // SAFETY: the caller's queue is one of this library, kept until this.
    unsafe { CqShared::of(cq) }.events_acknowledged(events);
}

/// # Safety
///
/// As libibverbs documents it.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) -> c_int {
    count(&COUNTERS.polls, 1);
    let room = usize::try_from(room).unwrap_or(0);
    if room == 0 {
        return 0;
    }
    // SAFETY: the caller's queue is one of this library, and it has room for so many.
    let (shared, into) = unsafe {
        (&(*cq.cast::<FakeCq>()).shared, std::slice::from_raw_parts_mut(into.cast(), room))
    };
    let taken = shared.poll(into);
    count(&COUNTERS.completions, u64::try_from(taken).unwrap_or(0));
    taken
}

/// # Safety
///
/// As libibverbs documents it.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller's queue is one of this library.
    let FakeCq { shared, nic, .. } = unsafe { &*cq.cast::<FakeCq>() };
    if solicited_only != 0 && nic.device.is_efa() {
        return libc::EOPNOTSUPP;
    }
    let mut queue = shared.queue();
    // Asking for less does not take back what was asked for before.
    if solicited_only == 0 {
        queue.armed = Armed::Next;
    } else if queue.armed == Armed::No {
        queue.armed = Armed::Solicited;
    }
    0
}
