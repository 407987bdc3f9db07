//! The state of one worker for one peer: pending commands, requests in progress, and `quiet`s to
//! answer.
//!
//! Accepted commands are numbered. A request knows the number of its first command. Everything
//! below the oldest request is *settled*. A `quiet` is answered when all commands that were
//! accepted before it are settled. Requests to other peers do not count.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_core::command::{Command, Op};
use peerway_core::region::Span;
use peerway_core::work::{Pair, Place, Shape};

use super::copiers::Copiers;
use super::fault::{Fault, Faults};
use super::proxy_memory::ProxyMemory;
use super::request::{self, Gates, List, ProxyRequest, PutOrigin, Raised};
use super::space::Space;
use super::target::{CopyMethod, PeerTarget};
use crate::batch::Batch;
use crate::error::PostError;
use crate::gpu::copy::{Gathered, Run};
use crate::hooks;
use crate::memory::RegionInner;
use crate::os::copy::{CopyKind, copy, kind_for, store_fence};
use crate::progress::copies::pool::QUANTUM;
use crate::transfer::{self, PostMode};
use crate::work::Work;
use peerway_core::abi::FaultCode;

/// The most commands that wait here for room. Further commands stay in the ring.
const BACKLOG: usize = 4096;
/// The most requests in progress to one peer. More would only queue elsewhere.
const MAX_REQUESTS: usize = 64;
/// The most bytes in progress to one peer, and the most in one request.
const WINDOW_BYTES: u64 = 256 << 20;
const REQUEST_BYTES: u64 = 64 << 20;
/// The most commands in one post.
const LIST: usize = 256;
/// Bytes that a worker copies in one stay inside a gate: about 100 µs. It turns to other work after
/// four times as many.
const COPY_BYTES: u64 = 1 << 20;

/// Local windows.
pub(crate) type Locals = Space<Arc<RegionInner>>;

/// See the module.
pub(crate) struct Outgoing {
    number: u16,
    pub(crate) target: Arc<PeerTarget>,
    locals: Arc<Locals>,
    /// The copy method from each local window to each window of the peer.
    ways: Vec<CopyMethod>,
    waiting: VecDeque<PendingPut>,
    /// The number of accepted commands, and how many of them no longer wait.
    accepted: u64,
    submitted: u64,
    requests: VecDeque<ProxyRequest>,
    bytes_under_way: u64,
    quiet_requests: VecDeque<QuietRequest>,
    /// Lists of counts and of ranges, kept for reuse.
    spare: Vec<Vec<u16>>,
    lists: Vec<List>,
    /// For each ring of the worker: the fault epoch in which a command from it last failed.
    failed: Vec<Option<u64>>,
    gone: bool,
    /// Another peer has this number now.
    replaced: bool,
    pub(crate) counts: Tally,
}

/// Statistics since they were last collected.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) puts: u64,
    pub(crate) bytes: u64,
    pub(crate) counts: u64,
    pub(crate) requests: u64,
}

/// A command that waits to be submitted.
#[derive(Clone, Copy, Debug)]
struct PendingPut {
    local: u32,
    remote: u32,
    src: u64,
    dst: u64,
    len: u64,
    counter: Option<u16>,
    origin: PutOrigin,
}

/// A `quiet` that waits for its answer.
#[derive(Clone, Copy, Debug)]
struct QuietRequest {
    ring: u32,
    /// The index of its ring among the worker's rings.
    slot: usize,
    position: u64,
    after: u64,
}

/// The origin of a command: its ring, the index of that ring among the worker's rings, its
/// position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandOrigin {
    pub(crate) ring: u32,
    pub(crate) slot: usize,
    pub(crate) position: u64,
}

/// Where workers report faults.
#[derive(Clone, Copy)]
pub(crate) struct FaultSink<'a> {
    pub(crate) memory: &'a ProxyMemory,
    pub(crate) faults: &'a Faults,
    /// The number of faults that the owner has taken.
    pub(crate) fault_epoch: &'a AtomicU64,
}

impl FaultSink<'_> {
    fn fault_epoch(&self) -> u64 {
        self.fault_epoch.load(Ordering::Acquire)
    }
}

impl Outgoing {
    pub(crate) fn new(
        number: u16,
        target: Arc<PeerTarget>,
        locals: Arc<Locals>,
        rings: usize,
    ) -> Self {
        let mut outgoing = Self {
            number,
            target,
            locals: Arc::default(),
            ways: Vec::new(),
            waiting: VecDeque::with_capacity(BACKLOG),
            accepted: 0,
            submitted: 0,
            requests: VecDeque::with_capacity(MAX_REQUESTS),
            bytes_under_way: 0,
            quiet_requests: VecDeque::with_capacity(rings * 64),
            spare: Vec::new(),
            lists: Vec::with_capacity(MAX_REQUESTS),
            failed: vec![None; rings],
            gone: false,
            replaced: false,
            counts: Tally::default(),
        };
        outgoing.set_locals(locals);
        outgoing
    }

    /// Sets the local windows. Windows are only added, never removed.
    pub(crate) fn set_locals(&mut self, locals: Arc<Locals>) {
        let ways = locals.iter().flat_map(|(_, local)| {
            (0..self.target.space.len()).map(|window| self.target.way(local, window))
        });
        self.ways = ways.collect();
        self.locals = locals;
    }

    /// Accepts a command. `Break` leaves it in its ring.
    #[inline]
    pub(crate) fn take(
        &mut self,
        command: Command,
        from: CommandOrigin,
        sink: FaultSink<'_>,
    ) -> ControlFlow<()> {
        let origin = PutOrigin { ring: from.ring, op: command.op as u8, position: from.position };
        if command.op == Op::Quiet {
            if self.is_idle() {
                self.reply(sink, from.ring, from.slot, from.position);
                return ControlFlow::Continue(());
            }
            if self.quiet_requests.len() >= BACKLOG {
                return ControlFlow::Break(());
            }
            let after = self.accepted;
            let (ring, slot, position) = (from.ring, from.slot, from.position);
            self.quiet_requests.push_back(QuietRequest { ring, slot, position, after });
            return ControlFlow::Continue(());
        }
        if self.waiting.len() >= BACKLOG {
            return ControlFlow::Break(());
        }
        match self.check(&command, origin) {
            Ok(put) => {
                self.waiting.push_back(put);
                self.accepted += 1;
            }
            Err(code) => {
                self.failed[from.slot] = Some(sink.fault_epoch());
                self.tell(sink, code, origin);
            }
        }
        ControlFlow::Continue(())
    }

    /// Checks that the windows and the counter of a command exist.
    #[inline]
    fn check(&self, command: &Command, origin: PutOrigin) -> Result<PendingPut, FaultCode> {
        if self.gone {
            return Err(FaultCode::PeerGone);
        }
        let counter = matches!(command.op, Op::PutCount | Op::Signal).then_some(command.counter);
        if counter.is_some_and(|counter| usize::from(counter) >= self.target.counters) {
            return Err(FaultCode::Counter);
        }
        if command.op == Op::Signal {
            return Ok(PendingPut { local: 0, remote: 0, src: 0, dst: 0, len: 0, counter, origin });
        }
        let (local, src) = self.locals.find(command.src, command.len).ok_or(FaultCode::Source)?;
        let (remote, dst) =
            self.target.space.find(command.dst, command.len).ok_or(FaultCode::Destination)?;
        let (local, remote, len) = (local as u32, remote as u32, command.len);
        Ok(PendingPut { local, remote, src, dst, len, counter, origin })
    }

    fn tell(&self, sink: FaultSink<'_>, code: FaultCode, origin: PutOrigin) {
        let PutOrigin { ring, op, position } = origin;
        let address = Some(self.target.session().addr);
        let fault = Fault { code, peer: self.number, address, ring, op, position };
        sink.faults.raise(sink.memory, fault);
    }

    /// Submits pending commands as far as there is room. Returns whether it submitted any.
    pub(crate) fn submit(&mut self, copiers: &mut Copiers, sink: FaultSink<'_>) -> bool {
        let before = self.submitted;
        let copied_before = self.counts.bytes;
        while let Some(put) = self.waiting.front().copied() {
            let full = self.requests.len() >= MAX_REQUESTS || self.bytes_under_way >= WINDOW_BYTES;
            let submitted = match self.way(&put) {
                _ if put.len == 0 && !full => self.count_only(put),
                _ if put.len == 0 => break,
                // Leaves time for the other peers.
                CopyMethod::Copy { .. } if self.counts.bytes - copied_before >= 4 * COPY_BYTES => {
                    break;
                }
                CopyMethod::Copy { src, dst } => {
                    let (src, dst) = (*src, *dst);
                    self.copy_run(src, dst)
                }
                _ if full => break,
                CopyMethod::Gpu { .. } => self.copy_by_gpu(put, copiers),
                CopyMethod::Post => self.post(put),
            };
            match submitted {
                Ok(true) => {}
                // No room in the copier or the endpoint: try again in the next round.
                Ok(false) => break,
                Err(code) => {
                    // The failure belongs to the first pending command.
                    if let Some(put) = self.waiting.pop_front() {
                        self.submitted += 1;
                        self.fail(sink, code, put.origin);
                    }
                }
            }
        }
        self.submitted > before
    }

    fn way(&self, put: &PendingPut) -> &CopyMethod {
        let at = put.local as usize * self.target.space.len() + put.remote as usize;
        // A signal has no windows, and the sides may have none.
        self.ways.get(at).unwrap_or(&CopyMethod::Post)
    }

    fn fail(&mut self, sink: FaultSink<'_>, code: FaultCode, origin: PutOrigin) {
        // A request holds commands of several rings.
        self.failed.fill(Some(sink.fault_epoch()));
        self.tell(sink, code, origin);
    }

    /// Submits a command without bytes.
    fn count_only(&mut self, put: PendingPut) -> Result<bool, FaultCode> {
        let Some(counter) = put.counter else {
            self.passed(1);
            return Ok(true);
        };
        match request::raise_once(&self.target, counter)? {
            Raised::NoRoom => return Ok(false),
            Raised::Done => {}
            Raised::Carried(transfer) => {
                let what = (self.submitted + 1, put.origin, 0);
                self.requests.push_back(ProxyRequest::posted(what, transfer, None));
            }
        }
        self.counts.counts += 1;
        self.passed(1);
        Ok(true)
    }

    /// Removes the first `count` pending commands, which are submitted now.
    fn passed(&mut self, count: usize) {
        self.waiting.drain(..count);
        self.submitted += count as u64;
    }

    /// Copies this command and the following ones between the same windows, up to the limit for one
    /// stay inside the owner's gate.
    fn copy_run(&mut self, src: *mut u8, dst: *mut u8) -> Result<bool, FaultCode> {
        let Some(first) = self.waiting.front().copied() else { return Ok(false) };
        let target = self.target.clone();
        let mut pass = Pass { gates: Gates::default(), target: &target, streamed: false };
        let (mut result, mut done, mut bytes, mut counts) = (Ok(true), 0, 0, 0);
        for put in &self.waiting {
            let same = (put.local, put.remote) == (first.local, first.remote);
            if !same || put.len == 0 || bytes >= COPY_BYTES {
                break;
            }
            // SAFETY: `check` checked both ranges against their windows. The local window keeps its
            // memory alive, and the peer's memory stays mapped while its gate is entered.
            let copied = unsafe {
                let (from, to) = (src.add(put.src as usize), dst.add(put.dst as usize));
                pass.copy(put.remote as usize, to, from, put.len)
            };
            let counted = match (copied, put.counter) {
                (Ok(()), None) => Ok(1),
                (Ok(()), Some(counter)) => {
                    pass.settle();
                    match request::raise_once(&target, counter) {
                        Ok(Raised::Done) => Ok(1),
                        Ok(Raised::NoRoom) => Ok(0),
                        Ok(Raised::Carried(transfer)) => {
                            let what = (self.submitted + done as u64 + 1, put.origin, 0);
                            self.requests.push_back(ProxyRequest::posted(what, transfer, None));
                            Ok(1)
                        }
                        Err(code) => Err(code),
                    }
                }
                (Err(code), _) => Err(code),
            };
            match counted {
                // No room for its count: the next round copies the bytes again and counts then.
                Ok(0) => {
                    result = Ok(false);
                    break;
                }
                Ok(_) => {}
                // Only this command failed. The ones before it are copied.
                Err(code) => {
                    result = Err(code);
                    break;
                }
            }
            counts += u64::from(put.counter.is_some());
            done += 1;
            bytes += put.len;
        }
        drop(pass);
        self.counts.puts += done as u64;
        self.counts.bytes += bytes;
        self.counts.counts += counts;
        self.passed(done);
        result
    }

    /// Has a GPU copy as many pending commands as it can access.
    fn copy_by_gpu(&mut self, first: PendingPut, copiers: &mut Copiers) -> Result<bool, FaultCode> {
        let CopyMethod::Gpu { device, .. } = self.way(&first) else { return Ok(false) };
        let (device, target) = (device.clone(), self.target.clone());
        let (mut gates, mut bytes, mut taken) = (Gates::default(), 0, 0);
        let mut counts = self.spare.pop().unwrap_or_default();
        let mut refused = None;
        // Ask the driver only once for every window of a list.
        let mut known = 0u64;
        let fill = |list: &mut Gathered, room: usize| {
            for put in &self.waiting {
                let CopyMethod::Gpu { device: other, src, dst, by_kernel } = self.way(put) else {
                    break;
                };
                let fits = list.runs.len() < room && bytes < REQUEST_BYTES && put.len > 0;
                if !fits || other.index() != device.index() {
                    break;
                }
                let bit = 1u64 << put.local;
                if known & bit == 0 && self.locals.get(put.local as usize).is_freed() {
                    // A copy from freed memory would destroy the CUDA context of the whole process.
                    refused = Some(FaultCode::Source);
                    break;
                }
                known |= bit;
                if !gates.enter(&target, put.remote as usize) {
                    refused = Some(FaultCode::Refused);
                    break;
                }
                list.runs.push(Run { src: src + put.src, dst: dst + put.dst, len: put.len });
                list.bytes += put.len;
                list.by_kernel &= by_kernel;
                bytes += put.len;
                counts.extend(put.counter);
                taken += 1;
            }
            hooks::about_to_copy();
        };
        // SAFETY: `check` checked all ranges against their windows, which keep the local memory
        // alive. The gates keep the peer's memory mapped until the request has ended.
        let submitted = unsafe { copiers.submit(&device, fill) };
        match submitted {
            Ok(Some(pending)) => {
                self.counts.puts += taken as u64;
                self.counts.bytes += bytes;
                self.counts.counts += counts.len() as u64;
                self.counts.requests += 1;
                self.bytes_under_way += bytes;
                let what = (self.submitted + 1, first.origin, bytes);
                self.requests.push_back(ProxyRequest::copying(what, pending, gates, counts));
                self.passed(taken);
                Ok(true)
            }
            Ok(None) => {
                gates.leave(&target);
                counts.clear();
                self.spare.push(counts);
                refused.map_or(Ok(false), Err)
            }
            Err(error) => {
                let peer = target.session().addr;
                tracing::error!(%error, %peer, "a GPU copier rejected the copies of a proxy");
                gates.leave(&target);
                Err(FaultCode::Failed)
            }
        }
    }

    /// Posts to the endpoint: one command with a count, or several without counts between the same
    /// windows.
    fn post(&mut self, first: PendingPut) -> Result<bool, FaultCode> {
        let local = self.locals.get(first.local as usize);
        let remote = self.target.space.get(first.remote as usize);
        let pair_of = |put: &PendingPut| Pair {
            local: Place { region: 0, offset: put.src, kind: local.kind() },
            remote: Place {
                region: 0,
                offset: remote.window.offset + put.dst,
                kind: remote.inner.kind,
            },
            len: put.len,
        };
        let one = pair_of(&first);
        let extent = Span { offset: 0, len: remote.inner.len };
        let goes_along = |put: &&PendingPut| {
            let same = (put.local, put.remote) == (first.local, first.remote);
            same && put.counter.is_none() && put.len > 0
        };
        let mut list = None;
        let (mut count, mut bytes) = (1, first.len);
        if first.counter.is_none() && self.waiting.get(1).as_ref().is_some_and(goes_along) {
            let mut pairs = self.lists.pop().unwrap_or_else(|| vec![one; LIST].into());
            // The list is unshared, because `poll` keeps only lists without other owners.
            if let Some(places) = Arc::get_mut(&mut pairs) {
                let others = self.waiting.iter().take_while(goes_along);
                (count, bytes) = (0, 0);
                for (place, put) in places.iter_mut().zip(others) {
                    if bytes >= REQUEST_BYTES {
                        break;
                    }
                    *place = pair_of(put);
                    bytes += put.len;
                    count += 1;
                }
                list = Some(pairs);
            }
        }
        let shape = match &list {
            None => Shape::range(one, local.extent(), extent),
            Some(pairs) => Shape::vector_of(pairs.clone(), count, |_| local.extent(), |_| extent),
        };
        let shape = shape.map_err(|_| FaultCode::Destination)?;
        let work = Work::between(shape, local.clone(), remote.inner.clone());
        let mut batch = Batch::write_of(work).map_err(|_| FaultCode::Refused)?;
        if let Some(counter) = first.counter {
            batch = batch.count(self.target.first_id + u32::from(counter));
        }
        let posted = transfer::post(
            self.target.endpoint(),
            self.target.session(),
            &batch,
            PostMode::Leaves,
            None,
        );
        let transfer = match posted {
            Ok(transfer) => transfer,
            Err(PostError::Busy { .. }) => {
                self.lists.extend(list);
                return Ok(false);
            }
            Err(PostError::PeerGone { .. }) => return Err(FaultCode::PeerGone),
            Err(error) => {
                let peer = self.target.session().addr;
                tracing::warn!(%error, %peer, "failed to post a put to the endpoint");
                return Err(FaultCode::Failed);
            }
        };
        self.counts.puts += count as u64;
        self.counts.bytes += bytes;
        self.counts.counts += u64::from(first.counter.is_some());
        self.counts.requests += 1;
        self.bytes_under_way += bytes;
        let what = (self.submitted + 1, first.origin, bytes);
        self.requests.push_back(ProxyRequest::posted(what, transfer, list));
        self.passed(count);
        Ok(true)
    }

    /// Polls the requests in progress and answers `quiet`s. Returns whether it made progress.
    pub(crate) fn poll(&mut self, copiers: &Copiers, sink: FaultSink<'_>) -> bool {
        let mut moved = false;
        let mut failed = None;
        for request in &mut self.requests {
            if let Some(Err(code)) = request.poll(&self.target, copiers) {
                failed = failed.or(Some((code, request.origin)));
            }
        }
        if let Some((code, origin)) = failed {
            self.fail(sink, code, origin);
        }
        while let Some(request) = self.requests.front_mut() {
            if !request.is_over() {
                request.help();
                break;
            }
            self.bytes_under_way -= request.bytes;
            let mut counts = request.take_counts();
            counts.clear();
            if counts.capacity() > 0 {
                self.spare.push(counts);
            }
            // A list with other owners is not kept: an abandoned transfer may still read it.
            self.lists.extend(request.take_list().filter(|list| Arc::strong_count(list) == 1));
            self.requests.pop_front();
            moved = true;
        }
        if !self.gone && !self.target.peer.is_alive() {
            self.lose(sink);
            moved = true;
        }
        moved | self.answer(sink)
    }

    /// Handles the loss of the peer: sets its fault for waiting kernels and fails the pending
    /// commands.
    fn lose(&mut self, sink: FaultSink<'_>) {
        if std::mem::replace(&mut self.gone, true) {
            return;
        }
        let code = FaultCode::PeerGone;
        if !self.replaced {
            let word = sink.memory.peer_fault(self.number.into());
            word.store(code as u32, Ordering::Release);
        }
        let first = self.waiting.front().map(|put| put.origin);
        let none = PutOrigin { ring: 0, op: Op::Nop as u8, position: 0 };
        self.fail(sink, code, first.unwrap_or(none));
        let waiting = self.waiting.len();
        self.passed(waiting);
    }

    /// Handles the reuse of the peer's number: pending commands fail and requests run to their end.
    /// Kernels that wait for the new peer see no fault of this one.
    pub(crate) fn replace(&mut self, sink: FaultSink<'_>) {
        self.replaced = true;
        self.lose(sink);
    }

    /// All commands up to this number have ended.
    fn settled(&self) -> u64 {
        self.requests.front().map_or(self.submitted, |oldest| oldest.first - 1)
    }

    fn answer(&mut self, sink: FaultSink<'_>) -> bool {
        let settled = self.settled();
        let mut any = false;
        while let Some(quiet_request) = self.quiet_requests.front().copied() {
            if quiet_request.after > settled {
                break;
            }
            self.reply(sink, quiet_request.ring, quiet_request.slot, quiet_request.position);
            self.quiet_requests.pop_front();
            any = true;
        }
        any
    }

    #[inline]
    fn reply(&self, sink: FaultSink<'_>, ring: u32, slot: usize, position: u64) {
        // A fault that the owner has taken no longer counts, except that a peer is gone.
        let later = |when: u64| when >= sink.fault_epoch();
        let failed = u64::from(self.gone || self.failed[slot].is_some_and(later));
        sink.memory.answer(ring as usize, self.number.into(), (position + 1) << 1 | failed);
    }

    /// Whether this peer has no work.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.requests.is_empty() && self.quiet_requests.is_empty()
    }
}

/// A stay inside a gate.
struct Pass<'a> {
    gates: Gates,
    target: &'a PeerTarget,
    /// Non-temporal stores are not ordered yet.
    streamed: bool,
}

impl Pass<'_> {
    /// Copies in quanta, and leaves the gate between them, so that a closed gate takes effect.
    ///
    /// # Safety
    ///
    /// Both ranges are valid. The destination is valid while its gate is entered.
    #[inline]
    unsafe fn copy(
        &mut self,
        window: usize,
        to: *mut u8,
        from: *const u8,
        len: u64,
    ) -> Result<(), FaultCode> {
        let mut at = 0;
        while at < len {
            if !self.gates.enter(self.target, window) {
                return Err(FaultCode::Refused);
            }
            hooks::about_to_copy();
            let part = (len - at).min(QUANTUM);
            let kind = kind_for(part);
            self.streamed |= kind == CopyKind::NonTemporal;
            // SAFETY: the caller's promise.
            unsafe { copy(kind, to.add(at as usize), from.add(at as usize), part as usize) };
            at += part;
            if at < len {
                self.settle();
                self.gates.leave(self.target);
            }
        }
        Ok(())
    }

    /// Orders the non-temporal stores before all later stores.
    fn settle(&mut self) {
        if std::mem::take(&mut self.streamed) {
            store_fence();
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.settle();
        self.gates.leave(self.target);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.requests.iter_mut().for_each(|request| request.give_up(&self.target));
    }
}
