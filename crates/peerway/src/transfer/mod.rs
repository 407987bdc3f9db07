//! Posts batches, and waits for posted transfers. [`handle`] has what else the handle to a
//! transfer does.

mod handle;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::protocol::Route;
use peerway_core::stripe;
use peerway_core::wire::MAX_PAYLOAD;

use self::handle::{Over, RefusedCopy};
use crate::batch::{Batch, Class, check_notification};
use crate::clock;
use crate::error::{Error, PostError};
use crate::failure::Operation;
use crate::gpu::GpuError;
use crate::os::copy::CopyKind;
use crate::path::PathKind;
use crate::peer::Peer;
use crate::progress::copies::direct::{DirectJob, copy_all};
use crate::progress::copies::gpu::{GpuJob, UserStream};
use crate::progress::copies::pool::{Haste, Job};
use crate::progress::driver::INLINE_SEND;
use crate::progress::engine::Engine;
use crate::progress::request::{NewRequest, route_of};
use crate::region::LocalSlice;
use crate::session::Session;
use crate::session::remote::{Direct, RemoteSlice};
use crate::work::{Direction, Signal, Work, one_sided};

/// The posting call performs a direct copy up to this size. That takes 2 µs by a mapping and 6 µs
/// by CMA, less than passing it to another thread.
const INLINE_COPY: u64 = 64 << 10;
/// The most pieces of an inline copy, so that posting stays fast.
const INLINE_ITEMS: usize = 64;
/// This process pushes writes up to this size, in up to [`PUSH_PIECES`] pieces, into the peer's
/// memory. A push need not wake the peer. The kernel copies each pushed piece twice, with one call
/// a piece (see `os/cma.rs`), so the peer pulls larger or more scattered writes. Measured with
/// `bench`, pushed against pulled by a peer that is awake: 4.3 and 5.9 µs for 16 KiB, 7.5 and 8.4
/// for 32, 14.0 and 12.2 for 64; 6.6 and 6.7 for 4 pieces of 4 KiB, 12.3 and 9.2 for 8.
const PUSH_BYTES: u64 = 64 << 10;
const PUSH_PIECES: usize = 4;
/// Writes up to this size go through the ring even if the peer could pull them. Measured with
/// `bench`, ring against pull: 1.4 to 2.2 µs against 2.3 to 3.3 at 256 B, 2.5 against 3.5 at 4 KiB,
/// 4.7 against 4.2 at 16 KiB.
const RING_BYTES: u64 = 8 << 10;
/// Transfers of [`Class::Auto`] up to this size use the latency lane.
const LATENCY_BYTES: u64 = 64 << 10;
/// From this size on, the copy pool helps a waiting caller. Waking another core costs some
/// microseconds.
const POOL_BYTES: u64 = 1 << 20;

/// A lane carries a transfer of GPU memory in at least [`STAGED_PIECES`] pieces, so that copies and
/// the wire overlap. This rule makes no piece smaller than [`STAGED_PIECE`], because each piece
/// costs some 10 µs. Measured at 4 MiB, as a share of the rate of host memory: 65 % in pieces of
/// 512 KiB, 55 % in pieces of 256.
const STAGED_PIECES: u64 = 8;
const STAGED_PIECE: u64 = 256 << 10;

/// A waiting caller polls for transfers up to this size before it blocks: for at most 262 µs beyond
/// the spin budget.
const PATIENT_BYTES: u64 = 1 << 20;

/// What a program posts to a peer.
impl Peer {
    /// Writes and waits for the end.
    pub fn write(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::write(local, remote)?)
    }

    /// Reads and waits for the end.
    pub fn read(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::read(local, remote)?)
    }

    fn finish(&self, batch: &Batch) -> Result<(), Error> {
        let transfer = self.begin(batch)?;
        if transfer.join().reason == Reason::Done {
            return Ok(());
        }
        transfer.failure().map_or(Ok(()), |failure| Err(Box::new(failure).into()))
    }

    /// Posts a batch. It returns within microseconds, whatever the size of the batch.
    pub fn post(&self, batch: &Batch) -> Result<Transfer, PostError> {
        post(self.endpoint(), self.session(), batch, PostMode::Leaves, None)
    }

    /// Posts a batch and waits for its end. The calling thread does the work.
    ///
    /// To learn more of a failure than its reason and fence, use [`Self::begin`],
    /// [`Transfer::join`] and [`Transfer::failure`].
    pub fn run(&self, batch: &Batch) -> Result<Ended, PostError> {
        Ok(self.begin(batch)?.join())
    }

    /// Posts a batch that the calling thread waits for next. The engine's threads do not work on
    /// it. A handle that the caller keeps without waiting for it or polling it may make no
    /// progress. The engine's threads continue the transfer after the caller drops the handle,
    /// awaits it, or asks for a wake-up ([`Transfer::on_end`]).
    pub fn begin(&self, batch: &Batch) -> Result<Transfer, PostError> {
        post(self.endpoint(), self.session(), batch, PostMode::Waits, None)
    }

    /// Sends a message to the peer's notification queue.
    pub fn notify(&self, message: &[u8]) -> Result<Transfer, PostError> {
        check_notification(message)?;
        let signal = Signal { notify: Some(message.into()), count: None };
        post_signal(self.endpoint(), self.session(), signal)
    }

    /// Adds one to a counter of the peer.
    ///
    /// The peer must know this endpoint: it opened the session, or one of the two has imported
    /// memory of the other. Otherwise the count fails with
    /// [`TransferError::RemoteAccess`](crate::TransferError::RemoteAccess), so that an endpoint
    /// which merely reaches the port raises nothing.
    pub fn count(&self, id: u32) -> Result<Transfer, PostError> {
        let signal = Signal { notify: None, count: Some(id) };
        post_signal(self.endpoint(), self.session(), signal)
    }
}

/// A posted transfer. After the handle is dropped, the transfer continues, and its memory is kept
/// until it has ended.
///
/// The handle is also a [`Future`] that resolves to the end of the transfer.
///
/// ```
/// # use peerway::{Access, Batch, Endpoint, Reason};
/// # use std::time::Duration;
/// # let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// # let peer = a.connect(&b.metadata())?;
/// # let (ours, theirs) = (a.allocate(4096)?, b.allocate(4096)?);
/// # let remote = peer.import(&theirs.advertise(Access::READ)?)?;
/// let transfer = peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
/// match transfer.wait(Duration::from_secs(1)) {
///     Some(ended) => assert_eq!(ended.reason, Reason::Done),
///     None => transfer.cancel(),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a dropped transfer continues, but its result is lost"]
pub struct Transfer {
    state: TransferState,
}

enum TransferState {
    /// The posting call completed it.
    Finished { path: PathKind, bytes: u64 },
    /// The copy in the posting call failed. Boxed, to keep the handle small for transfers that
    /// succeed.
    Refused(Box<RefusedCopy>),
    Running {
        endpoint: Arc<Engine>,
        session: Arc<Session>,
        slot: SlotId,
        operation: Operation,
        /// A direct copy or a GPU copy that the waiting thread advances.
        job: Option<Arc<dyn Job>>,
        /// The caller promised to wait or poll, so no other thread was asked to make progress.
        left_to_caller: AtomicBool,
        /// Set when a thread has seen the end. The slot is free from then on, even while the handle
        /// exists.
        over: OnceLock<Over>,
    },
}

impl Transfer {
    pub(crate) fn running(
        endpoint: &Arc<Engine>,
        session: &Arc<Session>,
        slot: SlotId,
        operation: Operation,
        job: Option<Arc<dyn Job>>,
        left_to_caller: bool,
    ) -> Self {
        let (endpoint, session) = (endpoint.clone(), session.clone());
        let (left_to_caller, over) = (AtomicBool::new(left_to_caller), OnceLock::new());
        Self {
            state: TransferState::Running {
                endpoint,
                session,
                slot,
                operation,
                job,
                left_to_caller,
                over,
            },
        }
    }

    /// How the transfer ended, or `None` while it runs. Makes no progress.
    pub fn ended(&self) -> Option<Ended> {
        match &self.state {
            TransferState::Finished { .. } => Some(Ended::DONE),
            TransferState::Refused(copy) => Some(copy.ended()),
            TransferState::Running { endpoint, slot, over, .. } => {
                if let Some(over) = over.get() {
                    return Some(over.ended);
                }
                let ended = endpoint.slots.ended(*slot)?;
                if ended.fence == Fence::Open {
                    // The fence may turn to held later, so the handle keeps the slot.
                    return over.get().map_or(Some(ended), |over| Some(over.ended));
                }
                let record = endpoint.slots.record(*slot);
                let path = endpoint.slots.path(*slot);
                // If another thread set `over` first, the values read here may belong to the next
                // transfer in the slot. The values of that thread are right.
                match over.set(Over { ended, path, record }) {
                    Ok(()) => endpoint.slots.detach(*slot),
                    Err(_) => return over.get().map(|over| over.ended),
                }
                Some(ended)
            }
        }
    }

    /// Waits for the end, for at most `timeout`. The calling thread makes progress meanwhile.
    pub fn wait(&self, timeout: Duration) -> Option<Ended> {
        let TransferState::Running { endpoint, session, slot, job, .. } = &self.state else {
            return self.ended();
        };
        let ended = || self.ended();
        if let Err(unusable) = endpoint.check_open() {
            return Some(self.last_word(unusable));
        }
        if let Some(job) = job {
            let mut deadline = None;
            while ended().is_none() && job.step() {
                // Read the clock only if the copy takes longer than one quantum.
                let now = clock::now();
                if now >= *deadline.get_or_insert_with(|| clock::after(now, timeout)) {
                    return ended();
                }
            }
        }
        let mut now = clock::now();
        let deadline = clock::after(now, timeout);
        let patience = patience(endpoint.slots.record(*slot).total);
        let poller = &endpoint.shard_of(session).poller;
        loop {
            if poller.poll_until(|| ended().is_some(), now, deadline, patience) {
                return ended();
            }
            if let Err(unusable) = endpoint.check_open() {
                return Some(self.last_word(unusable));
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return ended();
            }
            // The copy pool ends a job, and it signals no event source.
            if job.is_none() && poller.lead_until(slot.to_bits(), || ended().is_some(), deadline) {
                return ended();
            }
            poller.hand_over();
            endpoint.slots.sleep(*slot, left);
            now = clock::now();
        }
    }

    /// Waits for the end. Every transfer has a deadline, so this call returns.
    #[inline]
    pub fn join(&self) -> Ended {
        if let TransferState::Finished { .. } = self.state {
            return Ended::DONE;
        }
        loop {
            if let Some(ended) = self.wait(Duration::from_secs(1)) {
                return ended;
            }
        }
    }
}

/// Passes a job to the copy pool. Without a copy pool, the calling thread completes it.
fn see_to(endpoint: &Engine, job: &Arc<dyn Job>) {
    if !endpoint.copy_pool.offer(job, Haste::Soon) {
        // A slow call is better than a transfer that never ends.
        while job.step() {}
    }
}

/// How much longer than the spin budget a waiting thread polls before it blocks. It is about the
/// time that the peer needs for the bytes at 4 GB/s, which is less than blocking and waking costs.
/// For larger transfers the thread blocks after the spin budget, and leaves the core to the threads
/// that copy.
fn patience(bytes: u64) -> Duration {
    if bytes <= PATIENT_BYTES { Duration::from_nanos(bytes / 4) } else { Duration::ZERO }
}

/// How a batch reaches its peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TransferMethod {
    /// This process copies the bytes.
    Direct(PathKind),
    /// Frames on lanes carry the bytes.
    Lanes(Route, PathKind),
    /// RDMA devices carry the bytes.
    Devices(Route, PathKind),
    /// A GPU copies the bytes.
    Gpu(PathKind),
}

/// Chooses the best method that every remote region of the work supports. Inline, because a call
/// costs a twentieth of a small copy.
#[inline(always)]
fn choose_method(
    endpoint: &Engine,
    session: &Session,
    direction: Direction,
    work: &Work,
) -> TransferMethod {
    let remotes = work.remotes.as_slice();
    let touches_gpu = work.touches_gpu();
    if touches_gpu && work.by_gpu().is_some() {
        let kinds = remotes.iter().filter_map(|r| r.direct.kind());
        // Shared host memory counts as GPU IPC too: a GPU copies it, not a CPU mapping.
        let shared = kinds.into_iter().any(|kind| kind != PathKind::SameProcess);
        let kind = if shared { PathKind::GpuIpc } else { PathKind::SameProcess };
        return TransferMethod::Gpu(kind);
    }
    let is_pushed = || work.shape.total() <= PUSH_BYTES && work.shape.items() <= PUSH_PIECES;
    let by_cma = direction == Direction::Read || is_pushed();
    let direct = remotes.iter().all(|remote| match &remote.direct {
        Direct::SameProcess { .. } | Direct::Mapped { .. } => true,
        Direct::Cma { .. } => by_cma,
        Direct::Gpu(_) | Direct::None => false,
    });
    if direct && !touches_gpu {
        // A batch that mixes mapped memory and CMA reports the slower path.
        let kinds = remotes.iter().filter_map(|r| r.direct.kind());
        let kind = kinds.max_by_key(|kind| *kind as u8);
        return TransferMethod::Direct(kind.unwrap_or(session.path.kind));
    }
    if let (Some(_), Ok(rdma)) = (&session.rdma, &endpoint.rdma) {
        let route = route_of(direction, false);
        let kind = session.path.kind;
        let fits = work.fits_devices(&**rdma);
        return if fits {
            TransferMethod::Devices(route, kind)
        } else {
            TransferMethod::Lanes(route, kind)
        };
    }
    let local = session.link.is_some();
    // A few bytes arrive sooner through the ring than by a system call. Mapping is off only where
    // the settings pin CMA, and then CMA carries writes of every size.
    let worth_a_call = (work.shape.total() > RING_BYTES || !session.reach.map) && !touches_gpu;
    if direction == Direction::Write && local && session.reach.peer_pulls && worth_a_call {
        return TransferMethod::Lanes(route_of(direction, true), PathKind::LocalCma);
    }
    let kind = if local { PathKind::LocalRing } else { PathKind::Tcp };
    TransferMethod::Lanes(route_of(direction, false), kind)
}

/// Which thread makes progress on a transfer after it is posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PostMode {
    /// The caller, which waits at once.
    Waits,
    /// The engine's threads, because the caller need not wait.
    Leaves,
}

/// Posts a batch. A `known` method comes from [`lasting_method`], and the call then skips
/// [`check`].
pub(crate) fn post(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    batch: &Batch,
    then: PostMode,
    known: Option<TransferMethod>,
) -> Result<Transfer, PostError> {
    check_peer(endpoint, session)?;
    let method = match known {
        Some(method) => method,
        None => {
            check(session, batch)?;
            choose_method(endpoint, session, batch.direction, &batch.work)
        }
    };
    post_by(endpoint, session, batch, then, method, None)
}

/// The transfer method of a batch, if it is the same for each post. That holds for RDMA devices:
/// regions never lose their keys, and the path of a session does not change. This call registers
/// the batch's memory with the local devices.
pub(crate) fn lasting_method(
    endpoint: &Engine,
    session: &Session,
    batch: &Batch,
) -> Option<TransferMethod> {
    let method = choose_method(endpoint, session, batch.direction, &batch.work);
    (matches!(method, TransferMethod::Devices(..)) && !batch.work.touches_gpu()).then_some(method)
}

/// Posts a batch into a stream, if a GPU can copy it by itself. Otherwise posts nothing and returns
/// `None`.
///
/// # Safety
///
/// The stream is alive and belongs to the GPU of the batch's memory.
pub(crate) unsafe fn post_in(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    batch: &Batch,
    stream: UserStream,
) -> Result<Option<Transfer>, PostError> {
    check_peer(endpoint, session)?;
    check(session, batch)?;
    let method = choose_method(endpoint, session, batch.direction, &batch.work);
    if !matches!(method, TransferMethod::Gpu(..)) {
        return Ok(None);
    }
    post_by(endpoint, session, batch, PostMode::Leaves, method, Some(stream)).map(Some)
}

/// Checks that the endpoint is open and the session is alive.
#[inline]
fn check_peer(endpoint: &Engine, session: &Session) -> Result<(), PostError> {
    endpoint.check_open().map_err(PostError::from)?;
    if session.is_alive() { Ok(()) } else { Err(peer_gone(session)) }
}

#[cold]
fn peer_gone(session: &Session) -> PostError {
    PostError::PeerGone { peer: session.addr, incarnation: session.incarnation }
}

/// Checks that a batch is for this peer, and that its GPU memory is usable.
#[inline]
fn check(session: &Arc<Session>, batch: &Batch) -> Result<(), PostError> {
    if let Some(remote) = batch.work.remotes.as_slice().first()
        && !Arc::ptr_eq(&remote.session, session)
    {
        return Err(PostError::OtherPeer);
    }
    Ok(batch.work.check_gpu()?)
}

fn operation_of(direction: Direction) -> Operation {
    match direction {
        Direction::Read => Operation::Read,
        Direction::Write => Operation::Write,
    }
}

#[cold]
fn refused(
    session: &Arc<Session>,
    operation: Operation,
    path: PathKind,
    bytes: u64,
    error: TransferError,
) -> TransferState {
    let session = session.clone();
    TransferState::Refused(Box::new(RefusedCopy { session, operation, path, bytes, error }))
}

#[inline]
fn post_by(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    batch: &Batch,
    then: PostMode,
    method: TransferMethod,
    on: Option<UserStream>,
) -> Result<Transfer, PostError> {
    let Batch { direction, work, class, deadline, signal } = batch;
    let total = work.shape.total();
    session.stats.transfers.fetch_add(1, Ordering::Relaxed);
    let small = total <= INLINE_COPY && work.shape.items() <= INLINE_ITEMS;
    if let (TransferMethod::Direct(path), true, true) = (method, small, signal.is_empty()) {
        let state = match copy_all(work, *direction, work.shape.start(), CopyKind::Plain) {
            Ok(()) => {
                one_sided(session, *direction).fetch_add(total, Ordering::Relaxed);
                TransferState::Finished { path, bytes: total }
            }
            Err(error) => refused(session, operation_of(*direction), path, total, error),
        };
        return Ok(Transfer { state });
    }
    let now = clock::now();
    let deadline = clock::after(now, deadline.unwrap_or(endpoint.config.deadline));
    let path = match method {
        TransferMethod::Direct(path)
        | TransferMethod::Lanes(_, path)
        | TransferMethod::Devices(_, path)
        | TransferMethod::Gpu(path) => path,
    };
    let slots = endpoint.slots.len();
    let slot = endpoint.slots.take(total, path, now).ok_or(PostError::Busy { slots })?;
    let operation = operation_of(*direction);
    let running = |job, left| Transfer::running(endpoint, session, slot, operation, job, left);
    let by_device = matches!(method, TransferMethod::Devices(..));
    match method {
        TransferMethod::Direct(_) if small => {
            match copy_all(work, *direction, work.shape.start(), CopyKind::Plain) {
                // The bytes are in place. A lane carries the signal, and its acknowledgement ends
                // the transfer.
                Ok(()) => {
                    one_sided(session, *direction).fetch_add(total, Ordering::Relaxed);
                    endpoint.slots.slot(slot).done.fetch_add(total, Ordering::Relaxed);
                    endpoint.send_signal(slot, session, work, signal, deadline);
                }
                Err(error) => {
                    let reason = Reason::Failed(error);
                    endpoint.slots.end(slot, Ended { reason, fence: Fence::Held });
                }
            }
            Ok(running(None, false))
        }
        TransferMethod::Direct(_) => {
            let (work, signal) = (work.clone(), signal.clone());
            let job: Arc<dyn Job> =
                DirectJob::new(endpoint.clone(), slot, *direction, work, deadline, signal);
            let helped = match then {
                PostMode::Leaves => {
                    see_to(endpoint, &job);
                    true
                }
                PostMode::Waits => {
                    total >= POOL_BYTES && endpoint.copy_pool.offer(&job, Haste::Now)
                }
            };
            if total == 0 {
                job.step();
            }
            Ok(running(Some(job), !helped))
        }
        TransferMethod::Gpu(_) => {
            // `choose_method` found a GPU a moment ago.
            let device = work.by_gpu().ok_or(GpuError::NotForAStream)?;
            let (work, signal) = (work.clone(), signal.clone());
            let job: Arc<dyn Job> =
                GpuJob::new(endpoint.clone(), slot, *direction, work, device, deadline, signal, on);
            // The GPU starts at once. A thread must poll for its end.
            let more = job.step();
            if more && then == PostMode::Leaves {
                see_to(endpoint, &job);
            }
            Ok(running(Some(job), then == PostMode::Waits))
        }
        TransferMethod::Lanes(route, _) | TransferMethod::Devices(route, _) => {
            let lanes = match &session.rdma {
                Some(rdma) => rdma.lanes,
                None => 1 + usize::from(endpoint.config.lanes.unwrap_or(1)),
            };
            let bulk = match class {
                Class::Auto => total > LATENCY_BYTES,
                Class::Latency => false,
                Class::Bulk => true,
            };
            let staged = work.staged_by();
            let most = match &staged {
                Some(_) => (total / STAGED_PIECES).next_multiple_of(stripe::ALIGN),
                None => MAX_PAYLOAD,
            };
            // No event source reports the end of a GPU copy.
            let unseen = total > INLINE_SEND || staged.is_some();
            let piece = stripe::piece_len(total, lanes - 1, most.clamp(STAGED_PIECE, MAX_PAYLOAD));
            // Device writes to such memory are visible only after a flush.
            let flush = || work.remotes.as_slice().iter().any(|remote| remote.flush);
            let is_unordered = by_device && route == Route::Write && flush();
            endpoint.shard_of(session).start_request(NewRequest {
                slot,
                session,
                route,
                work: Some(work),
                signal,
                staged_by: staged,
                piece,
                by_device,
                bulk,
                is_unordered,
                posted: now,
                deadline,
            });
            if then == PostMode::Leaves && unseen {
                endpoint.shard_of(session).notify_if_blocked();
            }
            Ok(running(None, then == PostMode::Waits && unseen))
        }
    }
}

/// Posts a notification or a count without bytes.
pub(crate) fn post_signal(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    signal: Signal,
) -> Result<Transfer, PostError> {
    check_peer(endpoint, session)?;
    let now = clock::now();
    let path = match session.path.kind {
        kind @ (PathKind::Tcp | PathKind::Verbs | PathKind::Efa) => kind,
        _ if session.link.is_some() => PathKind::LocalRing,
        _ => PathKind::Tcp,
    };
    let slots = endpoint.slots.len();
    let slot = endpoint.slots.take(0, path, now).ok_or(PostError::Busy { slots })?;
    let deadline = clock::after(now, endpoint.config.deadline);
    let operation = if signal.notify.is_some() { Operation::Notify } else { Operation::Count };
    let new = NewRequest::of_signal(slot, session, None, &signal, deadline);
    endpoint.shard_of(session).start_request(new);
    Ok(Transfer::running(endpoint, session, slot, operation, None, false))
}
