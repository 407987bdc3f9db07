//! Copies that this process does by itself: within one process, through mapped memory, reads by
//! CMA, and small writes by CMA.
//!
//! Each quantum enters the owner's gate, so that a revoke bars the next quantum and waits for those
//! in progress. The peer's CPU is not involved.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::work::Cursor;

use super::pool::{self, Job, QUANTUM};
use crate::clock;
use crate::hooks;
use crate::os::Piece;
use crate::os::copy::{CopyKind, copy, kind_for, store_fence};
use crate::os::gate::GateRef;
use crate::progress::copies::pull::cma_failed;
use crate::progress::copies::stores::Choice;
use crate::progress::engine::Engine;
use crate::session::remote::{Direct, RemoteInner};
use crate::work::{Direction, Signal, Work};

/// iovecs per call. More bring no gain (measured), and 1024 is the kernel's limit.
const CMA_PIECES: usize = 500;

/// No cache holds this many bytes, so copies of this size do not consult the record of costs.
const NO_CACHE: u64 = 256 << 20;

/// The limit of pieces up to which the job walks a vector to find its middle. A caller waits for
/// the post to return meanwhile.
const WALKED: usize = 4096;

/// Copies everything from the cursor to its end. Every remote region of the work must have a direct
/// path.
///
/// `Err` says why the copy stopped. Bytes before that point have been copied.
pub(crate) fn copy_all(
    work: &Work,
    direction: Direction,
    mut at: Cursor,
    kind: CopyKind,
) -> Result<(), TransferError> {
    let mut pass = Pass::default();
    let result = loop {
        let Some(pair) = work.shape.peek(&at, QUANTUM) else { break Ok(()) };
        let remote = work.remote(&pair.remote);
        if let Some((base, gate)) = remote.direct.mapped() {
            if !pass.enter(remote, gate) {
                break Err(TransferError::Revoked);
            }
            hooks::about_to_copy();
            let here = work.local_addr(&pair.local);
            // SAFETY: the shape was checked against both regions' extents. `work` keeps the local
            // region alive. The remote region is mapped (or our own) while this thread is inside
            // the gate.
            unsafe {
                let there = base.add(pair.remote.offset as usize);
                match direction {
                    Direction::Write => copy(kind, there, here, pair.len as usize),
                    Direction::Read => copy(kind, here, there, pair.len as usize),
                }
            }
            work.shape.advance(&mut at, pair.len);
        } else if let Err(error) = cma_run(work, direction, &mut at, &mut pass) {
            break Err(error);
        }
    };
    // The bytes must be visible before the gate says that the copy is over, and before any
    // notification about them.
    if kind == CopyKind::NonTemporal {
        store_fence();
    }
    drop(pass);
    result
}

thread_local! {
    /// Piece lists of this thread's last copy, kept so that the next copy need not allocate.
    static PIECES: RefCell<(Vec<Piece>, Vec<Piece>)> = const {
        RefCell::new((Vec::new(), Vec::new()))
    };
}

/// Copies one run of pieces in the same remote region by CMA.
fn cma_run<'a>(
    work: &'a Work,
    direction: Direction,
    at: &mut Cursor,
    pass: &mut Pass<'a>,
) -> Result<(), TransferError> {
    let (mut ours, mut theirs) = PIECES.take();
    ours.clear();
    theirs.clear();
    let mut bytes = 0;
    let mut source: Option<&'a Arc<RemoteInner>> = None;
    while ours.len() < CMA_PIECES
        && let Some(pair) = work.shape.peek(at, QUANTUM - bytes)
    {
        let remote = work.remote(&pair.remote);
        if source.is_some_and(|s| !Arc::ptr_eq(s, remote)) {
            break;
        }
        let Direct::Cma { base, .. } = &remote.direct else { break };
        source = Some(remote);
        ours.push(Piece { addr: work.local_addr(&pair.local) as u64, len: pair.len });
        theirs.push(Piece { addr: base + pair.remote.offset, len: pair.len });
        bytes += pair.len;
        work.shape.advance(at, pair.len);
    }
    let Some(remote) = source else { return Err(TransferError::RemoteAccess) };
    let Direct::Cma { memory, gate, .. } = &remote.direct else {
        return Err(TransferError::RemoteAccess);
    };
    if !pass.enter(remote, gate) {
        return Err(TransferError::Revoked);
    }
    hooks::about_to_copy();
    // SAFETY: `work` keeps the regions of the local pieces alive. The remote pieces are addresses
    // in another process, which the kernel checks. The shape keeps them inside the advertised
    // memory, and the entered gate permits the access.
    let result = unsafe {
        match direction {
            Direction::Read => memory.read(&ours, &theirs),
            Direction::Write => memory.write(&ours, &theirs),
        }
    };
    PIECES.set((ours, theirs));
    result.map_err(|error| cma_failed(&remote.session, &error))
}

/// The gate that a run of pieces holds. Its drop leaves the gate.
#[derive(Default)]
struct Pass<'a>(Option<(&'a RemoteInner, &'a GateRef)>);

impl<'a> Pass<'a> {
    #[inline]
    fn enter(&mut self, remote: &'a RemoteInner, gate: &'a GateRef) -> bool {
        if let Some((inside, _)) = self.0
            && std::ptr::eq(inside, remote)
        {
            return true;
        }
        self.leave();
        let admitted = gate.enter();
        if admitted {
            self.0 = Some((remote, gate));
        }
        admitted
    }

    #[inline]
    fn leave(&mut self) {
        if let Some((_, gate)) = self.0.take() {
            gate.leave();
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A direct copy large enough to be cut into quanta.
pub(crate) struct DirectJob {
    endpoint: Arc<Engine>,
    slot: SlotId,
    direction: Direction,
    work: Work,
    kind: CopyKind,
    /// Set where the record of costs chose the kind. The job then reports its time to that record.
    choice: Option<Choice>,
    deadline: u64,
    signal: Signal,
    state: Mutex<DirectJobState>,
}

struct DirectJobState {
    /// The rest of the half that the waiter begins with, and of the copy pool's half. Each side
    /// stays in its own half while bytes are left there, so that a core finds its earlier data in
    /// its caches. The first half has all the bytes where no choice is made, or where the vector is
    /// too long to find its middle.
    halves: [Cursor; 2],
    running: u32,
    /// Nanoseconds that the quanta have taken so far.
    took: u64,
    /// The reason why no more quanta are claimed, once there is one.
    stop: Option<Reason>,
    finished: bool,
}

impl DirectJobState {
    fn left(&self) -> u64 {
        self.halves[0].left() + self.halves[1].left()
    }
}

impl DirectJob {
    pub(crate) fn new(
        endpoint: Arc<Engine>,
        slot: SlotId,
        direction: Direction,
        work: Work,
        deadline: u64,
        signal: Signal,
    ) -> Arc<Self> {
        let kind = kind_for(work.shape.total());
        let at = work.shape.start();
        let (total, pieces) = (work.shape.total(), work.shape.items());
        let is_mapped = |remote: &Arc<RemoteInner>| remote.direct.mapped().is_some();
        let asks = kind == CopyKind::NonTemporal
            && total < NO_CACHE
            && work.remotes.as_slice().iter().all(is_mapped);
        let choice = asks.then(|| endpoint.experience.choose(total, pieces));
        let kind = choice.map_or(kind, |choice| choice.kind);
        let splits = asks && (pieces <= WALKED || work.shape.whole_blocks(&at).is_some());
        let mut halves = [at, at.limited(0)];
        if splits {
            let half = (total / 2).next_multiple_of(QUANTUM);
            halves = [at.limited(half), at];
            work.shape.advance(&mut halves[1], half);
        }
        let state =
            Mutex::new(DirectJobState { halves, running: 0, took: 0, stop: None, finished: false });
        Arc::new(Self { endpoint, slot, direction, work, kind, choice, deadline, signal, state })
    }

    fn stop(&self, reason: Reason) {
        let mut state = self.state.lock().unwrap();
        if state.stop.is_none() {
            state.stop = Some(reason);
        }
        self.finish_if_over(state);
    }

    /// Claims the next part of the work. Returns it with the current time, or `None` when nothing
    /// is left.
    fn claim(&self) -> Option<(Cursor, u64)> {
        let now = clock::now();
        let mut state = self.state.lock().unwrap();
        if state.stop.is_none() && state.left() > 0 {
            if now >= self.deadline {
                state.stop = Some(Reason::TimedOut);
            } else if !self.work.remotes.as_slice()[0].session.is_alive() {
                let why = match self.endpoint.check_open() {
                    Ok(()) => TransferError::PeerGone,
                    Err(_) => TransferError::EndpointClosed,
                };
                state.stop = Some(Reason::Failed(why));
            }
        }
        if state.stop.is_some() || state.left() == 0 {
            self.finish_if_over(state);
            return None;
        }
        let mine = usize::from(pool::is_helper());
        let half = if state.halves[mine].left() > 0 {
            &mut state.halves[mine]
        } else {
            &mut state.halves[1 - mine]
        };
        let part = half.limited(QUANTUM);
        self.work.shape.advance(half, part.left());
        state.running += 1;
        self.endpoint.slots.slot(self.slot).sent_at.store(now, Ordering::Relaxed);
        Some((part, now))
    }

    fn finish_if_over(&self, mut state: std::sync::MutexGuard<'_, DirectJobState>) {
        let over = state.running == 0 && (state.stop.is_some() || state.left() == 0);
        if !over || state.finished {
            return;
        }
        state.finished = true;
        let reason = state.stop.unwrap_or(Reason::Done);
        let took = state.took;
        drop(state);
        if let (Some(choice), Reason::Done) = (self.choice, reason) {
            let shape = &self.work.shape;
            self.endpoint.experience.took(choice, shape.total(), shape.items(), took);
        }
        if reason == Reason::Done && !self.signal.is_empty() {
            // The bytes are in place. The signal tells the peer, and the peer's answer ends the
            // transfer.
            let session = &self.work.remotes.as_slice()[0].session;
            let (work, signal) = (&self.work, &self.signal);
            self.endpoint.send_signal(self.slot, session, work, signal, self.deadline);
        } else {
            self.endpoint.slots.end(self.slot, Ended { reason, fence: Fence::Held });
        }
    }
}

impl Job for DirectJob {
    fn step(&self) -> bool {
        let Some((part, began)) = self.claim() else { return false };
        let result = copy_all(&self.work, self.direction, part, self.kind);
        let took = self.choice.map_or(0, |_| clock::now() - began);
        let mut state = self.state.lock().unwrap();
        state.running -= 1;
        match result {
            Ok(()) => {
                state.took += took;
                self.work.count_moved(self.direction, part.left());
                self.endpoint.slots.slot(self.slot).done.fetch_add(part.left(), Ordering::Relaxed);
            }
            Err(error) if state.stop.is_none() => state.stop = Some(Reason::Failed(error)),
            Err(_) => {}
        }
        self.finish_if_over(state);
        true
    }

    fn cancel(&self) {
        self.stop(Reason::Cancelled);
    }

    fn halt(&self) {
        self.stop(Reason::Failed(TransferError::EndpointClosed));
    }
}
