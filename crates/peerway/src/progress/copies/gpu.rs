//! Copies that a GPU does: at least one side is GPU memory, and this process can reach both sides.
//!
//! The job submits the work in chunks, a few at a time, and polls them until they are done. A
//! submitted chunk cannot be recalled, so a cancel waits for it: tens of microseconds between GPUs,
//! a millisecond to the host.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::work::Cursor;
use peerway_sys::cuda::CudaError;
use peerway_sys::cuda::ffi::CUstream;

use crate::clock;
use crate::gpu::copy::{self, Done, Gathered, MOST_BLOCKS, MOST_RUNS, Run, Sides};
use crate::gpu::device::Device;
use crate::hooks;
use crate::os::gate::GateRef;
use crate::progress::copies::pool::Job;
use crate::progress::engine::Engine;
use crate::work::{Direction, Signal, Work};

/// Bytes per submission where both sides are GPU memory: about 30 µs.
const CHUNK: u64 = 64 << 20;
/// Bytes per submission where one side is host memory: 300 µs at the speed of PCIe.
const HOST_CHUNK: u64 = 16 << 20;
/// Host memory of at least this size is pinned when it is used again.
const WORTH_PINNING: u64 = 1 << 20;
/// Limit of submissions in progress. The GPU has the next one ready while the job checks the last
/// one.
const WINDOW: usize = 4;
/// A waiter polls without a pause for this long, plus the time that bytes between GPUs take at 1
/// TB/s.
const SPIN: Duration = Duration::from_micros(50);
/// The pause between two polls after that.
const NAP: Duration = Duration::from_micros(20);
/// If a completion flag has not been raised by then, the job queries the CUDA driver: kernels that
/// fail raise no flag.
const FLAG_PATIENCE: Duration = Duration::from_micros(500);

/// See the module.
pub(crate) struct GpuJob {
    endpoint: Arc<Engine>,
    slot: SlotId,
    direction: Direction,
    work: Work,
    device: Arc<Device>,
    deadline: u64,
    signal: Signal,
    chunk: u64,
    /// The user's stream. All copies are submitted to it at once.
    on: Option<UserStream>,
    state: Mutex<GpuJobState>,
}

/// A stream that its owner keeps until the post has returned. The job submits nothing to it later.
#[derive(Clone, Copy)]
pub(crate) struct UserStream(pub(crate) CUstream);

// SAFETY: CUDA allows any thread to use a stream.
unsafe impl Send for UserStream {}
// SAFETY: as above.
unsafe impl Sync for UserStream {}

struct GpuJobState {
    at: Cursor,
    running: VecDeque<Chunk>,
    stop: Option<Reason>,
    finished: bool,
    /// A copy failed.
    failed: bool,
    /// The transfer has ended with an open fence, because submitted copies did not finish in time.
    open: bool,
    /// When the job last submitted a chunk or found one done.
    moved: u64,
}

/// A submission in progress.
struct Chunk {
    done: Done,
    bytes: u64,
    submitted: u64,
    _gates: Gates,
}

/// The gates that a submission holds.
#[derive(Default)]
struct Gates(Vec<GateRef>);

impl Drop for Gates {
    fn drop(&mut self) {
        for gate in &self.0 {
            gate.leave();
        }
    }
}

impl GpuJob {
    #[allow(clippy::too_many_arguments, reason = "one caller; a struct would only rename them")]
    pub(crate) fn new(
        endpoint: Arc<Engine>,
        slot: SlotId,
        direction: Direction,
        work: Work,
        device: Arc<Device>,
        deadline: u64,
        signal: Signal,
        on: Option<UserStream>,
    ) -> Arc<Self> {
        let chunk = if work.is_on_gpus() { CHUNK } else { HOST_CHUNK };
        if chunk == HOST_CHUNK && work.shape.total() >= WORTH_PINNING {
            work.pin_for(&device);
        }
        let state = GpuJobState {
            at: work.shape.start(),
            running: VecDeque::with_capacity(WINDOW),
            stop: None,
            finished: false,
            failed: false,
            open: false,
            moved: clock::now(),
        };
        let state = Mutex::new(state);
        Arc::new(Self {
            endpoint,
            slot,
            direction,
            work,
            device,
            deadline,
            signal,
            chunk,
            on,
            state,
        })
    }

    /// Polls the chunks in progress and submits more. Returns true when anything changed.
    fn advance(&self, state: &mut GpuJobState, now: u64) -> bool {
        let mut moved = false;
        while let Some(chunk) = state.running.front_mut() {
            let waited = Duration::from_nanos(now.saturating_sub(chunk.submitted));
            let closer = if waited > FLAG_PATIENCE { chunk.done.look_closer() } else { Ok(()) };
            match closer.and_then(|()| chunk.done.is_done()) {
                Ok(false) => break,
                Ok(true) => {
                    let done = &self.endpoint.slots.slot(self.slot).done;
                    done.fetch_add(chunk.bytes, Ordering::Relaxed);
                    self.work.count_moved(self.direction, chunk.bytes);
                }
                Err(error) => self.failed(state, &error),
            }
            state.running.pop_front();
            moved = true;
        }
        self.check(state, now);
        let window = if self.on.is_some() { usize::MAX } else { WINDOW };
        while state.stop.is_none() && state.at.left() > 0 && state.running.len() < window {
            match self.submit(&mut state.at, now) {
                Ok(Some(chunk)) => state.running.push_back(chunk),
                Ok(None) => {}
                Err(Refused::Error(error)) => state.stop = Some(Reason::Failed(error)),
                Err(Refused::Driver(error)) => self.failed(state, &error),
            }
            moved = true;
        }
        if moved {
            state.moved = now;
        }
        moved
    }

    fn failed(&self, state: &mut GpuJobState, error: &CudaError) {
        let peer = self.work.remotes.as_slice()[0].session.addr;
        tracing::error!(%error, %peer, "a GPU copy failed");
        state.failed = true;
        state.stop.get_or_insert(Reason::Failed(TransferError::Device));
    }

    /// Ends the transfer with an open fence when submitted copies have made no progress for the
    /// fence timeout: other work occupies the GPU.
    fn give_up(&self, state: &mut GpuJobState, now: u64) {
        let Some(reason) = state.stop.filter(|_| !state.finished) else { return };
        let idle = Duration::from_nanos(now.saturating_sub(state.moved));
        if !state.running.is_empty() && idle >= self.endpoint.config.fence {
            (state.finished, state.open) = (true, true);
            self.endpoint.slots.end(self.slot, Ended { reason, fence: Fence::Open });
        }
    }

    /// Stops further submissions when the deadline has passed or the session has ended.
    fn check(&self, state: &mut GpuJobState, now: u64) {
        if state.stop.is_some() || (state.at.left() == 0 && state.running.is_empty()) {
            return;
        }
        if now >= self.deadline {
            state.stop = Some(Reason::TimedOut);
        } else if state.at.left() > 0 && !self.work.remotes.as_slice()[0].session.is_alive() {
            let why = match self.endpoint.check_open() {
                Ok(()) => TransferError::PeerGone,
                Err(_) => TransferError::EndpointClosed,
            };
            state.stop = Some(Reason::Failed(why));
        }
    }

    /// Submits the next chunk of the work.
    fn submit(&self, at: &mut Cursor, now: u64) -> Result<Option<Chunk>, Refused> {
        let work = &self.work;
        let mut gates = Gates::default();
        let start = *at;
        let writes = self.direction == Direction::Write;
        let on = self.on.map(|UserStream(stream)| stream);
        self.endpoint.slots.slot(self.slot).sent_at.store(now, Ordering::Relaxed);
        if let Some((local, remote, items)) = work.shape.whole_blocks(at) {
            let most = (self.chunk / local.len.max(1)).clamp(1, MOST_BLOCKS as u64);
            let part = at.limited(most.min(items.len() as u64) * local.len);
            let mut sides = self.sides(local.region, remote.region)?;
            if !writes {
                std::mem::swap(&mut sides.src, &mut sides.dst);
            }
            self.enter(&mut gates, remote.region)?;
            hooks::about_to_copy();
            // SAFETY: the work keeps both regions alive, and the held gates keep the remote one
            // valid.
            let done = unsafe {
                copy::submit_blocks(&self.device, on, &work.shape, &part, sides, writes)?
            };
            if let Some(done) = done {
                work.shape.advance(at, part.left());
                let bytes = part.left();
                return Ok(Some(Chunk { done, bytes, submitted: now, _gates: gates }));
            }
        }
        let fill = |list: &mut Gathered| {
            while list.runs.len() < MOST_RUNS
                && let Some(pair) = work.shape.peek(at, self.chunk - list.bytes)
            {
                let sides = self.sides(pair.local.region, pair.remote.region)?;
                self.enter(&mut gates, pair.remote.region)?;
                let (here, there) = (sides.src + pair.local.offset, sides.dst + pair.remote.offset);
                let (src, dst) = if writes { (here, there) } else { (there, here) };
                list.runs.push(Run { src, dst, len: pair.len });
                list.bytes += pair.len;
                list.by_kernel &= sides.by_kernel;
                work.shape.advance(at, pair.len);
            }
            hooks::about_to_copy();
            Ok::<(), Refused>(())
        };
        // SAFETY: as above.
        let done = unsafe { copy::submit(&self.device, on, fill)? };
        let bytes = start.left() - at.left();
        Ok(done.map(|done| Chunk { done, bytes, submitted: now, _gates: gates }))
    }

    /// Addresses of two regions in this process: `src` of the local one, `dst` of the remote one.
    fn sides(&self, local: u32, remote: u32) -> Result<Sides, Refused> {
        let here = self.work.local(local);
        let there = &self.work.remotes.as_slice()[remote as usize];
        let (dst, reached) = there.by_gpu(&self.device).ok_or(TransferError::RemoteAccess)?;
        let by_kernel = reached && here.is_reached_by(&self.device);
        Ok(Sides { src: here.ptr() as u64, dst, by_kernel })
    }

    fn enter(&self, gates: &mut Gates, remote: u32) -> Result<(), Refused> {
        let there = &self.work.remotes.as_slice()[remote as usize];
        let gate = there.gate().ok_or(TransferError::RemoteAccess)?;
        // Most work names one region, or each region in one run, so comparing with the last gate is
        // enough.
        if gates.0.last().is_some_and(|held| held.is_same(gate)) {
            return Ok(());
        }
        if !gate.enter() {
            return Err(TransferError::Revoked.into());
        }
        gates.0.push(gate.clone());
        Ok(())
    }

    fn finish_if_over(&self, mut state: MutexGuard<'_, GpuJobState>) -> bool {
        let over = state.running.is_empty() && (state.stop.is_some() || state.at.left() == 0);
        if over && std::mem::take(&mut state.open) {
            drop(state);
            self.endpoint.slots.fenced(self.slot);
            return true;
        }
        if !over || state.finished {
            return over;
        }
        state.finished = true;
        // All bytes are in place, so the transfer is done even if it was cancelled in the meantime.
        let whole = state.at.left() == 0 && !state.failed;
        let reason = state.stop.filter(|_| !whole).unwrap_or(Reason::Done);
        drop(state);
        if reason == Reason::Done && !self.signal.is_empty() {
            let session = &self.work.remotes.as_slice()[0].session;
            let (work, signal) = (&self.work, &self.signal);
            self.endpoint.send_signal(self.slot, session, work, signal, self.deadline);
        } else {
            self.endpoint.slots.end(self.slot, Ended { reason, fence: Fence::Held });
        }
        true
    }

    fn stop(&self, reason: Reason) {
        let mut state = self.state.lock().unwrap();
        state.stop.get_or_insert(reason);
        self.finish_if_over(state);
    }
}

impl Job for GpuJob {
    fn step(&self) -> bool {
        let now = clock::now();
        let mut state = self.state.lock().unwrap();
        let moved = self.advance(&mut state, now);
        self.give_up(&mut state, now);
        let idle = Duration::from_nanos(now.saturating_sub(state.moved));
        let under_way: u64 = state.running.iter().map(|chunk| chunk.bytes).sum();
        if self.finish_if_over(state) {
            return false;
        }
        if !moved {
            let per_byte = if self.chunk == CHUNK { under_way / 1000 } else { 0 };
            if idle > SPIN + Duration::from_nanos(per_byte) {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
        true
    }

    fn cancel(&self) {
        self.stop(Reason::Cancelled);
    }

    fn halt(&self) {
        self.stop(Reason::Failed(TransferError::EndpointClosed));
        // No thread polls this job any more. `clear` waits for the chunks in progress before the
        // memory is released.
        let mut state = self.state.lock().unwrap();
        state.running.clear();
        self.finish_if_over(state);
    }
}

impl Drop for GpuJob {
    fn drop(&mut self) {
        // As in `halt`: the chunks in progress finish before the memory is released.
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.running.clear();
        if state.open {
            self.endpoint.slots.fenced(self.slot);
        }
    }
}

/// Why a chunk was not submitted.
enum Refused {
    Error(TransferError),
    Driver(CudaError),
}

impl From<TransferError> for Refused {
    fn from(error: TransferError) -> Self {
        Self::Error(error)
    }
}

impl From<CudaError> for Refused {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}
