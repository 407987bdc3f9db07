//! Receives frames on a lane.
//!
//! A state machine over an ordered stream: header, table, payload. After the checks, payload goes
//! straight to its destination. The driver trusts nothing that a peer sends: it limits every length
//! before use and takes every address from its own tables.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::protocol::{Applied, Beat, Verdict};
use peerway_core::region::{Access, Span};
use peerway_core::wire::{
    Control, FrameError, HEADER_LEN, Header, Kind, MAX_PAYLOAD, MAX_PULL, PULL_SEGMENT_LEN,
    PullSegment, Refusal, SEGMENT_LEN, Segment,
};
use peerway_core::work::Cursor;
use zerocopy::FromBytes;

use super::driver::{Driver, SessionDriver, TURN_BYTES, answer_pull};
use super::ending::LaneEnd;
use super::imports;
use super::request::release_source;
use crate::bugs::{Bug, is_planted};
use crate::clock;
use crate::hooks;
use crate::limits::RefusalReason;
use crate::memory::grants::Grant;
use crate::os::Piece;
use crate::os::copy::{CopyKind, copy};
use crate::progress::copies::pool::{Haste, Job};
use crate::progress::copies::pull::{self, PullJob, PullOrigin};
use crate::progress::lane::{
    AfterSkip, IncomingMessage, IncomingWrite, Lane, RecvState, Reply, TableRun, WINDOW_FRAMES,
};

/// Bytes to receive when a header is expected. That covers a few small frames but little of a large
/// one, whose payload should not pass through the scratch buffer.
const HEAD_READ: usize = 4096;
/// The cost of a step in the turn's budget besides its payload bytes, so that a flood of empty
/// frames ends a turn too.
const STEP_BYTES: u64 = 4096;
/// Destination pieces per receive call.
const LAND_PIECES: usize = 64;
/// Payload bytes after which an acknowledgement is due even though more is coming.
const ACK_EVERY: u64 = 1 << 20;
/// The driver does a pull up to this size at once. It takes about 100 µs, no more than waking a
/// helper and waiting for it.
const INLINE_PULL: u64 = 1 << 20;

type Step<T> = Result<T, LaneEnd>;

impl Driver {
    /// Receives until no input is left or the turn's budget is used up.
    ///
    /// Returns true when the budget ended the turn. The caller must then call again without waiting
    /// for an event.
    pub(super) fn receive(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        now: u64,
    ) -> Step<bool> {
        let mut budget = TURN_BYTES;
        let mut again = false;
        loop {
            let placed = lane.rx.placed;
            let more = match &mut lane.rx.state {
                RecvState::Head => self.head(s, lane, now)?,
                RecvState::Table { .. } => self.table(s, lane)?,
                RecvState::Land(_) => self.land(s, lane)?,
                RecvState::Fill { .. } => self.fill_read(s, lane)?,
                RecvState::Skip { .. } => skip(lane)?,
                RecvState::Control { need } => {
                    let need = *need;
                    self.control_message(s, lane, need)?
                }
                RecvState::Gather(_) => self.gather(s, lane)?,
            };
            if !more {
                break;
            }
            let cost = STEP_BYTES + (lane.rx.placed - placed);
            if lane.applied.unacknowledged_bytes() >= ACK_EVERY {
                lane.push_ack();
            }
            budget = budget.saturating_sub(cost);
            if budget == 0 {
                again = true;
                break;
            }
        }
        lane.heard = now.max(lane.heard);
        lane.push_ack();
        Ok(again)
    }

    fn head(&mut self, s: &mut SessionDriver, lane: &mut Lane, now: u64) -> Step<bool> {
        if lane.owes_too_much() {
            return Err(nonsense(FrameError::Order));
        }
        if lane.unread() < HEADER_LEN {
            // For a memory wire, checking for input is cheaper than a receive call that finds none.
            let silent =
                lane.wire.is_memory() && !lane.wire.has_input().map_err(LaneEnd::Broken)?;
            return if silent { Ok(false) } else { refill(lane, HEAD_READ) };
        }
        let bytes = &lane.rx.scratch[lane.rx.start..lane.rx.start + HEADER_LEN];
        let head = Header::read_from_bytes(bytes).map_err(|_| nonsense(FrameError::Control))?;
        let checked = head.check().map_err(nonsense)?;
        lane.rx.start += HEADER_LEN;
        let sequence = head.sequence.get();
        if checked.kind.is_sequenced()
            && !lane.applied.is_next(sequence)
            && !is_planted(Bug::SequenceIgnored)
        {
            return Err(nonsense(FrameError::Order));
        }
        match checked.kind {
            Kind::Write if checked.segments == 0 => {
                let len = checked.payload as u64;
                let whole = [TableRun { offset: head.offset.get(), len, source: 0 }];
                self.begin_write(s, lane, &head, checked.payload, &whole);
            }
            Kind::Write | Kind::Read | Kind::Pull => {
                lane.rx.state = RecvState::Table { head, checked }
            }
            Kind::ReadData => self.begin_read_data(s, lane, &head, checked.payload)?,
            Kind::Control => lane.rx.state = RecvState::Control { need: checked.payload },
            Kind::Notify => self.begin_message(s, lane, sequence, checked.payload, now),
            Kind::Count => {
                let result = self.count_alone(s, head.immediate.get());
                finish(lane, sequence, result);
            }
            Kind::Ack => self.acked(s, lane, sequence)?,
            Kind::Nack => {
                let error = TransferError::from_code(head.status.get() as u8);
                if lane.is_being_put(sequence) {
                    return Err(nonsense(FrameError::Order));
                }
                let entry = lane.sent.answer(sequence);
                let entry = entry.ok_or_else(|| nonsense(FrameError::Order))?;
                // The peer may refuse a frame at its header, while the frame is still being sent.
                if let Some(work) = self.request(entry.slot).and_then(|f| f.work.as_ref()) {
                    release_source(lane, entry.slot, work);
                }
                self.answered(s, entry, Err(error));
            }
            Kind::Pulled => {
                let pull = lane.sent.waiting(sequence).is_some_and(|e| e.kind == Kind::Pull);
                let entry = lane.sent.answer(sequence).filter(|_| pull);
                let entry = entry.ok_or_else(|| nonsense(FrameError::Order))?;
                s.session.stats.bytes_written.fetch_add(entry.part.left(), Ordering::Relaxed);
                self.answered(s, entry, Ok(()));
            }
            Kind::Beat => {
                s.liveness.heard(Beat { clock: sequence, echo: head.transfer.get() }, now);
            }
            Kind::Cancel => {
                let transfer = head.transfer.get();
                for pull in &self.pulls {
                    let same = Arc::ptr_eq(&pull.session, &s.session);
                    if same && pull.origin.transfer == transfer {
                        pull.cancel();
                    }
                }
                finish(lane, sequence, Ok(()));
            }
        }
        Ok(true)
    }

    /// Handles an acknowledgement: the peer has applied all frames up to `sequence`.
    fn acked(&mut self, s: &mut SessionDriver, lane: &mut Lane, sequence: u64) -> Step<()> {
        let sending = lane.tx.frame.as_ref().map_or(0, |frame| frame.sequence);
        let covered = lane.sent.acknowledge(sequence, sending);
        for sequence in covered.ok_or_else(|| nonsense(FrameError::Order))? {
            let Some(entry) = lane.sent.waiting(sequence) else { continue };
            // Reads and pulls have separate answers.
            if matches!(entry.kind, Kind::Read | Kind::Pull) {
                continue;
            }
            if let Some(entry) = lane.sent.answer(sequence) {
                if entry.kind == Kind::Write {
                    let written = &s.session.stats.bytes_written;
                    written.fetch_add(entry.part.left(), Ordering::Relaxed);
                }
                self.answered(s, entry, Ok(()));
            }
        }
        Ok(())
    }

    fn table(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Table { head, checked } = lane.rx.state else { return Ok(true) };
        if lane.unread() < checked.table {
            return refill(lane, checked.table.max(HEAD_READ));
        }
        let mut runs = std::mem::take(&mut lane.rx.runs);
        let table = &lane.rx.scratch[lane.rx.start..lane.rx.start + checked.table];
        let total = read_table(checked.kind, table, &mut runs);
        lane.rx.start += checked.table;
        let begun = match checked.kind {
            Kind::Write if total != checked.payload as u64 => Err(nonsense(FrameError::Order)),
            Kind::Write => {
                self.begin_write(s, lane, &head, checked.payload, &runs);
                Ok(())
            }
            Kind::Read => self.begin_read(s, lane, &head, &runs, total),
            _ => self.begin_pull(s, lane, &head, &runs, total),
        };
        lane.rx.runs = runs;
        begun.map(|()| true)
    }

    /// Finds the grant that a request names and the pieces of our memory for its runs. Checks every
    /// run.
    fn find(
        &self,
        s: &SessionDriver,
        lane: &mut Lane,
        head: &Header,
        access: Access,
        runs: &[TableRun],
    ) -> Result<(Arc<Grant>, Vec<Piece>), TransferError> {
        let id = SlotId { index: head.grant.get(), generation: head.generation.get() };
        let who = &s.session.incarnation;
        let grant = self.endpoint.grants.find(id, &head.token, access, who)?;
        self.endpoint.peers.give_right(&s.session);
        if grant.memory.is_freed() {
            return Err(TransferError::Fault);
        }
        let beyond = if is_planted(Bug::BoundsIgnored) { 32 } else { 0 };
        let granted = Span { offset: 0, len: grant.span.len + beyond };
        let base = grant.memory.ptr() as u64 + grant.span.offset;
        let mut pieces = lane.spare.pop().unwrap_or_default();
        pieces.clear();
        for &TableRun { offset, len, .. } in runs {
            if !granted.contains(Span { offset, len }) {
                return Err(TransferError::OutOfBounds);
            }
            // An empty piece would look like a receive call that finds nothing.
            if len == 0 {
                continue;
            }
            pieces.push(Piece { addr: base + offset, len });
        }
        Ok((grant, pieces))
    }

    fn begin_write(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        head: &Header,
        payload: usize,
        runs: &[TableRun],
    ) {
        let sequence = head.sequence.get();
        let found = self.find(s, lane, head, Access::WRITE, runs);
        match found {
            Ok((grant, pieces)) => {
                let gate = grant.gate();
                let (left, counts) = (payload as u64, head.counts());
                let (next, within, staged) = (0, 0, None);
                let mut incoming = IncomingWrite {
                    sequence,
                    grant,
                    gate,
                    pieces,
                    next,
                    within,
                    left,
                    counts,
                    staged,
                };
                match self.land_in_buffer(s, lane, &mut incoming) {
                    Ok(()) => lane.rx.state = RecvState::Land(incoming),
                    Err(error) => {
                        lane.push_nack(sequence, error as u8);
                        lane.rx.state =
                            RecvState::Skip { left: payload, then: AfterSkip::Count(sequence) };
                    }
                }
            }
            Err(error) => {
                lane.push_nack(sequence, error as u8);
                lane.rx.state = RecvState::Skip { left: payload, then: AfterSkip::Count(sequence) };
            }
        }
    }

    /// Receives payload into its destination.
    fn land(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Land(incoming) = &mut lane.rx.state else { return Ok(true) };
        if incoming.left > 0 {
            // Check the lease before every call: the process may have been stopped in between.
            if !s.is_local()
                && !s.liveness.may_apply(clock::now())
                && !is_planted(Bug::LeaseIgnored)
            {
                return Err(LaneEnd::LeaseOver);
            }
            let is_inside = incoming.gate.enter();
            if !is_inside && !is_planted(Bug::GateIgnored) {
                let (left, sequence) = (incoming.left as usize, incoming.sequence);
                lane.push_nack(sequence, TransferError::Revoked as u8);
                lane.rx.state = RecvState::Skip { left, then: AfterSkip::Count(sequence) };
                return Ok(true);
            }
            hooks::about_to_copy();
            let mut pieces = std::mem::take(&mut lane.pieces);
            rest_of(incoming, &mut pieces);
            // SAFETY: `find` checked the pieces against the grant, which keeps their memory alive.
            // This function is inside the grant's gate.
            let moved = unsafe {
                from_scratch_or_wire(
                    &mut *lane.wire,
                    &mut lane.rx.scratch,
                    (&mut lane.rx.start, &mut lane.rx.end),
                    &mut pieces,
                )
            };
            if is_inside {
                incoming.gate.leave();
            }
            lane.pieces = pieces;
            let moved = moved?;
            if moved == 0 {
                return Ok(false);
            }
            advance(incoming, moved);
            lane.rx.placed += moved;
            lane.applied.add_bytes(moved);
            s.session.stats.bytes_landed.fetch_add(moved, Ordering::Relaxed);
        }
        if incoming.left == 0 {
            let RecvState::Land(mut incoming) =
                std::mem::replace(&mut lane.rx.state, RecvState::Head)
            else {
                return Ok(true);
            };
            lane.keep(std::mem::take(&mut incoming.pieces));
            if let Some((buffer, target)) = incoming.staged.take() {
                self.put_incoming(s, lane, incoming, buffer, target);
            } else {
                finish(lane, incoming.sequence, self.count(s, incoming.counts));
            }
        }
        Ok(true)
    }

    fn begin_read(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        head: &Header,
        runs: &[TableRun],
        total: u64,
    ) -> Step<()> {
        lane.rx.state = RecvState::Head;
        let sequence = head.sequence.get();
        if total > MAX_PAYLOAD || lane.tx.replies.len() >= WINDOW_FRAMES as usize {
            return Err(nonsense(FrameError::Order));
        }
        let found = self.find(s, lane, head, Access::READ, runs);
        match found {
            Ok((grant, pieces)) => {
                let transfer = head.transfer.get();
                let (next, within, gate, staged, begun) = (0, 0, None, None, 0);
                lane.tx.replies.push_back(Reply {
                    sequence,
                    transfer,
                    grant,
                    pieces,
                    next,
                    within,
                    total,
                    gate,
                    staged,
                    begun,
                });
                finish(lane, sequence, Ok(()));
            }
            Err(error) => finish(lane, sequence, Err(error)),
        }
        Ok(())
    }

    fn begin_pull(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        head: &Header,
        runs: &[TableRun],
        total: u64,
    ) -> Step<()> {
        lane.rx.state = RecvState::Head;
        let sequence = head.sequence.get();
        if total > MAX_PULL || s.session.pulls() > WINDOW_FRAMES as usize {
            return Err(nonsense(FrameError::Order));
        }
        let found = self.find(s, lane, head, Access::WRITE, runs);
        let link = s.session.link.as_ref();
        let memory = link.and_then(|link| link.memory(&s.session.reach)).cloned();
        let (grant, here, memory) = match (found, memory) {
            (Ok((grant, here)), Some(memory)) if grant.memory.gpu.is_none() => {
                (grant, here, memory)
            }
            (Ok(_), _) => return refuse_pull(lane, sequence, TransferError::RemoteAccess),
            (Err(error), _) => return refuse_pull(lane, sequence, error),
        };
        let mut there = lane.spare.pop().unwrap_or_default();
        there.clear();
        let filled = runs.iter().filter(|run| run.len > 0);
        there.extend(filled.map(|run| Piece { addr: run.source, len: run.len }));
        lane.applied.apply(sequence);
        s.session.stats.bytes_landed.fetch_add(total, Ordering::Relaxed);
        if total <= INLINE_PULL {
            let result = pull::copy(&s.session, &grant, &memory, &here, &there);
            let result = result.and_then(|()| self.count(s, head.counts()));
            // The answer replaces the acknowledgement of this frame, but not of the frames before
            // it.
            lane.applied.note_answered(sequence);
            answer_pull(lane, sequence, result);
            lane.keep(here);
            lane.keep(there);
            return Ok(());
        }
        s.session.pull_began();
        let job = Arc::new(PullJob {
            shard: self.shard.clone(),
            session: s.session.clone(),
            origin: PullOrigin {
                lane: lane.index,
                sequence,
                transfer: head.transfer.get(),
                counts: head.counts(),
            },
            grant,
            memory,
            here,
            there,
            state: Default::default(),
        });
        let shared: Arc<dyn Job> = job.clone();
        self.endpoint.copy_pool.offer(&shared, Haste::Now);
        self.pulls.push_back(job);
        Ok(())
    }

    /// Increments the counter of a frame, if it names one. The frame's bytes are in place, so the
    /// peer has shown a grant.
    pub(super) fn count(
        &mut self,
        s: &SessionDriver,
        counts: Option<u32>,
    ) -> Result<(), TransferError> {
        let Some(id) = counts else { return Ok(()) };
        self.endpoint.inbox.count(id, &s.session.incarnation).inspect_err(|error| {
            if *error == TransferError::CountersFull {
                self.endpoint.refusals.note(RefusalReason::Counters, &s.session.addr);
            }
        })
    }

    /// Increments a counter for a frame or an immediate that names no grant. The peer needs a
    /// right. Otherwise any stranger could raise what kernels and programs wait for.
    pub(super) fn count_alone(&mut self, s: &SessionDriver, id: u32) -> Result<(), TransferError> {
        if !self.endpoint.peers.has_right(&s.session) && !is_planted(Bug::RightIgnored) {
            self.endpoint.refusals.note(RefusalReason::CountWithoutRight, &s.session.addr);
            return Err(TransferError::RemoteAccess);
        }
        self.count(s, Some(id))
    }

    fn begin_read_data(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        head: &Header,
        payload: usize,
    ) -> Step<()> {
        let sequence = head.sequence.get();
        let Some(entry) = lane.sent.waiting(sequence).filter(|e| e.kind == Kind::Read).copied()
        else {
            return Err(nonsense(FrameError::Order));
        };
        if entry.part.left() != payload as u64 || lane.is_being_put(sequence) {
            return Err(nonsense(FrameError::Order));
        }
        match self.fill_buffer(entry.slot) {
            Ok(buffer) => {
                lane.rx.fill = buffer;
                lane.rx.state = RecvState::Fill { sequence, slot: entry.slot, part: entry.part };
            }
            Err(error) => {
                lane.sent.answer(sequence);
                self.answered(s, entry, Err(error));
                lane.rx.state = RecvState::Skip { left: payload, then: AfterSkip::Nothing };
            }
        }
        Ok(())
    }

    /// Receives the answer to a read into our memory.
    fn fill_read(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Fill { sequence, slot, mut part } = lane.rx.state else { return Ok(true) };
        if part.left() > 0 {
            let request =
                self.request(slot).filter(|f| !f.state.is_ending() && !f.state.is_unfenced());
            let Some(work) = request.and_then(|f| f.work.as_ref()) else {
                // The request was cancelled, so its memory must not be touched any more.
                lane.rx.fill = None;
                lane.sent.answer(sequence);
                lane.rx.state =
                    RecvState::Skip { left: part.left() as usize, then: AfterSkip::Nothing };
                return Ok(true);
            };
            hooks::about_to_copy();
            let mut pieces = std::mem::take(&mut lane.pieces);
            pieces.clear();
            let mut at = part;
            if let Some(buffer) = &lane.rx.fill {
                let whole = lane.sent.waiting(sequence).map_or(part, |entry| entry.part);
                let filled = whole.left() - part.left();
                pieces.push(Piece { addr: buffer.ptr() as u64 + filled, len: part.left() });
                at = Cursor::default();
            }
            while pieces.len() < LAND_PIECES
                && let Some(pair) = work.next(&mut at, u64::MAX)
            {
                pieces.push(Piece { addr: work.local_addr(&pair.local) as u64, len: pair.len });
            }
            // SAFETY: the request's work keeps the local regions of the pieces alive.
            let moved = unsafe {
                from_scratch_or_wire(
                    &mut *lane.wire,
                    &mut lane.rx.scratch,
                    (&mut lane.rx.start, &mut lane.rx.end),
                    &mut pieces,
                )
            };
            lane.pieces = pieces;
            let moved = moved?;
            if moved == 0 {
                return Ok(false);
            }
            let mut left = moved;
            while left > 0
                && let Some(pair) = work.next(&mut part, left)
            {
                left -= pair.len;
            }
            lane.rx.placed += moved;
            s.session.stats.bytes_read.fetch_add(moved, Ordering::Relaxed);
        }
        lane.rx.state = RecvState::Fill { sequence, slot, part };
        if part.left() == 0 {
            lane.rx.state = RecvState::Head;
            if let Some(buffer) = lane.rx.fill.take() {
                self.put_read(s, lane, sequence, buffer);
            } else if let Some(entry) = lane.sent.answer(sequence) {
                self.answered(s, entry, Ok(()));
            }
        }
        Ok(true)
    }

    /// Makes room for a notification whose header has arrived.
    ///
    /// A message over budget is refused and its bytes are discarded as they come. The lane neither
    /// waits nor closes: a lane that waits would stop the heartbeats behind the message, and other
    /// peers may be the reason why the budget is used up. The sender can repeat the message.
    fn begin_message(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        sequence: u64,
        need: usize,
        now: u64,
    ) {
        let mut charge = None;
        if lane.unread() < need {
            let is_stranger = !self.endpoint.peers.has_right(&s.session);
            charge = self.endpoint.messages.charge(&s.messages, is_stranger, need as u64);
            if is_planted(Bug::BudgetLost) {
                std::mem::forget(charge.take());
                charge = self.endpoint.messages.charge(&s.messages, is_stranger, 0);
            }
            if charge.is_none() {
                self.endpoint.refusals.note(RefusalReason::MessageBytes, &s.session.addr);
                lane.push_nack(sequence, TransferError::NotificationsFull as u8);
                lane.rx.state = RecvState::Skip { left: need, then: AfterSkip::Count(sequence) };
                return;
            }
        }
        let bytes = Vec::with_capacity(need);
        let message = IncomingMessage { sequence, bytes, need, since: now, _charge: charge };
        lane.rx.state = RecvState::Gather(message);
    }

    fn gather(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Gather(message) = &mut lane.rx.state else { return Ok(true) };
        if message.bytes.len() < message.need {
            if lane.rx.start == lane.rx.end {
                return refill(lane, HEAD_READ * 2);
            }
            let take = (message.need - message.bytes.len()).min(lane.rx.end - lane.rx.start);
            message.bytes.extend_from_slice(&lane.rx.scratch[lane.rx.start..lane.rx.start + take]);
            lane.rx.start += take;
            if message.bytes.len() < message.need {
                return Ok(true);
            }
        }
        let (sequence, bytes) = (message.sequence, std::mem::take(&mut message.bytes));
        lane.rx.state = RecvState::Head;
        let is_stranger = !self.endpoint.peers.has_right(&s.session);
        if is_planted(Bug::MessageTwice) {
            let _ = self.endpoint.inbox.deliver(s.session.incarnation, is_stranger, bytes.clone());
        }
        let result = self.endpoint.inbox.deliver(s.session.incarnation, is_stranger, bytes);
        if result.is_err() {
            self.endpoint.refusals.note(RefusalReason::Notifications, &s.session.addr);
        }
        finish(lane, sequence, result);
        Ok(true)
    }

    /// Handles a control message once it is whole. It needs no memory but the scratch buffer.
    fn control_message(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        need: usize,
    ) -> Step<bool> {
        if lane.unread() < need {
            return refill(lane, need.max(HEAD_READ));
        }
        let message = Control::from_bytes(&lane.rx.scratch[lane.rx.start..lane.rx.start + need]);
        lane.rx.start += need;
        lane.rx.state = RecvState::Head;
        self.control(s, lane, message.map_err(nonsense)?)?;
        Ok(true)
    }

    fn control(&mut self, s: &mut SessionDriver, lane: &mut Lane, message: Control) -> Step<()> {
        match message {
            Control::Import { request, descriptor } => {
                let answer = imports::answer(&self.endpoint, &s.session, request, &descriptor);
                lane.push_control_answer(&answer);
            }
            Control::Importing { request } => s.session.imports.takes_time(request),
            Control::Imported { request, result } => {
                let result = result.map_err(TransferError::from_code);
                if result.is_ok() && s.session.imports.is_waiting(request) {
                    self.endpoint.peers.give_right(&s.session);
                }
                s.session.imports.answered(request, result);
            }
            Control::LaneLost { lane: lost } => {
                if lost == lane.index {
                    return Err(nonsense(FrameError::Order));
                }
                // `with_session` handles it after this call, when this lane is back in the table.
                if !s.lost_by_peer.contains(&lost) {
                    s.lost_by_peer.push(lost);
                }
            }
            Control::LaneFenced { lane: lost, applied, refused, immediates } => {
                self.replan(s, lost, &Applied { last: applied, refused, immediates });
                self.replan_parts(s, lost, immediates);
            }
            Control::OpenQueues { queues } if !s.session.initiator => s.reopening.offered(queues),
            Control::QueuesOpened { queues } => s.reopening.answered(queues),
            Control::Refuse(Refusal::Limit(why)) => {
                s.session.note_event(&format!("the peer refuses: {why}"));
            }
            Control::Bye => return Err(LaneEnd::Bye),
            _ => return Err(nonsense(FrameError::Control)),
        }
        Ok(())
    }

    /// The peer reports which frames of a lost lane it applied. The others go out again on other
    /// lanes.
    fn replan(&mut self, s: &mut SessionDriver, lane: u16, answer: &Applied) {
        for (frame, verdict) in s.lost.resolve(lane, answer) {
            let verdict = match (verdict, frame.kind) {
                (_, Kind::Write) if is_planted(Bug::ReplanLoses) => Verdict::Done,
                (Verdict::Done, Kind::Write) if is_planted(Bug::ReplanRepeats) => Verdict::Repeat,
                (verdict, _) => verdict,
            };
            match verdict {
                Verdict::Done => self.answered(s, frame, Ok(())),
                Verdict::Refused(code) => {
                    self.answered(s, frame, Err(TransferError::from_code(code)));
                }
                Verdict::Repeat => self.repeat(s, frame.slot, frame.part),
                Verdict::RepeatSignal => {
                    let Some(request) = self.request(frame.slot) else { continue };
                    request.state.repeat_signal();
                    self.settle(s, frame.slot);
                }
                Verdict::Drop => {}
            }
        }
    }

    /// Queues a part of a request to be sent again.
    pub(super) fn repeat(&mut self, s: &mut SessionDriver, slot: SlotId, part: Cursor) {
        let Some(request) = self.request(slot) else { return };
        if request.state.repeat(part) {
            if !request.queued {
                request.queued = true;
                self.enqueue(s, slot);
            }
            s.dirty = true;
        }
        self.settle(s, slot);
    }

    /// Adds a request to the send queue that fits it.
    pub(super) fn enqueue(&mut self, s: &mut SessionDriver, slot: SlotId) {
        // If the transport is pinned to RDMA, the request waits for a queue pair.
        let rdma = s.session.rdma.as_ref();
        let queues = rdma.is_some_and(|rdma| rdma.pinned) || (rdma.is_some() && s.has_queues());
        let Some(request) = self.request(slot) else { return };
        let queue = match (request.by_device && queues, request.bulk) {
            (true, true) => &mut s.parts_bulk,
            (true, false) => &mut s.parts_latency,
            (false, true) => &mut s.bulk,
            (false, false) => &mut s.latency,
        };
        queue.push_back(slot);
    }
}

/// Completes a sequenced frame: counts it as applied, and refuses it on an error.
pub(super) fn finish(lane: &mut Lane, sequence: u64, result: Result<(), TransferError>) {
    if let Err(error) = result {
        lane.push_nack(sequence, error as u8);
    }
    lane.applied.apply(sequence);
}

fn refuse_pull(lane: &mut Lane, sequence: u64, error: TransferError) -> Step<()> {
    finish(lane, sequence, Err(error));
    Ok(())
}

/// Reads a table into runs and returns their total. It cannot overflow: there are at most 256 runs
/// of 32-bit lengths.
fn read_table(kind: Kind, table: &[u8], runs: &mut Vec<TableRun>) -> u64 {
    runs.clear();
    if kind == Kind::Pull {
        let entries = table.chunks_exact(PULL_SEGMENT_LEN).flat_map(PullSegment::read_from_bytes);
        runs.extend(entries.map(|e| TableRun {
            offset: e.offset.get(),
            len: e.len.get().into(),
            source: e.source.get(),
        }));
    } else {
        let entries = table.chunks_exact(SEGMENT_LEN).flat_map(Segment::read_from_bytes);
        runs.extend(entries.map(|e| TableRun {
            offset: e.offset.get(),
            len: e.len.get().into(),
            source: 0,
        }));
    }
    runs.iter().map(|run| run.len).sum()
}

fn nonsense(error: FrameError) -> LaneEnd {
    LaneEnd::Misbehaved(error)
}

/// Receives more bytes into the scratch buffer. Returns false when there are none.
fn refill(lane: &mut Lane, want: usize) -> Step<bool> {
    if lane.rx.start == lane.rx.end {
        (lane.rx.start, lane.rx.end) = (0, 0);
    } else if lane.rx.start > 0 {
        lane.rx.scratch.copy_within(lane.rx.start..lane.rx.end, 0);
        (lane.rx.start, lane.rx.end) = (0, lane.rx.end - lane.rx.start);
    }
    let room = (lane.rx.scratch.len() - lane.rx.end).min(want);
    let piece = [Piece::of_mut(&mut lane.rx.scratch[lane.rx.end..lane.rx.end + room])];
    // SAFETY: the piece is the lane's own buffer.
    match unsafe { lane.wire.receive(&piece) }.map_err(LaneEnd::Broken)? {
        None => Ok(false),
        Some(0) => Err(LaneEnd::Closed),
        Some(n) => {
            lane.rx.end += n;
            Ok(true)
        }
    }
}

fn skip(lane: &mut Lane) -> Step<bool> {
    let RecvState::Skip { left, then } = &mut lane.rx.state else { return Ok(true) };
    if *left > 0 {
        if lane.rx.start == lane.rx.end {
            let want = lane.rx.scratch.len();
            return refill(lane, want);
        }
        let passed = (*left).min(lane.rx.end - lane.rx.start);
        *left -= passed;
        lane.rx.start += passed;
    }
    if *left == 0 {
        if let AfterSkip::Count(sequence) = *then {
            lane.applied.apply(sequence);
        }
        lane.rx.state = RecvState::Head;
    }
    Ok(true)
}

/// Collects the next pieces of an incoming write that are still to be filled.
fn rest_of(incoming: &IncomingWrite, into: &mut Vec<Piece>) {
    into.clear();
    let mut within = incoming.within;
    for piece in incoming.pieces[incoming.next..].iter().take(LAND_PIECES) {
        into.push(Piece { addr: piece.addr + within, len: piece.len - within });
        within = 0;
    }
}

fn advance(incoming: &mut IncomingWrite, mut bytes: u64) {
    incoming.left -= bytes;
    while let Some(piece) = incoming.pieces.get(incoming.next) {
        let room = piece.len - incoming.within;
        if bytes < room {
            incoming.within += bytes;
            return;
        }
        bytes -= room;
        (incoming.next, incoming.within) = (incoming.next + 1, 0);
    }
}

/// Truncates the pieces to their first `most` bytes.
fn cut(pieces: &mut Vec<Piece>, mut most: u64) {
    if most == u64::MAX {
        return;
    }
    for piece in &mut *pieces {
        piece.len = piece.len.min(most);
        most -= piece.len;
    }
    pieces.retain(|piece| piece.len > 0);
}

/// Moves bytes into the pieces, from the scratch buffer if it has any, or else from the wire. A
/// receive from the wire also takes the bytes that follow, into the scratch buffer. Returns how
/// many bytes went into the pieces; 0 means that none are available.
///
/// A call may take only part of a frame: callers check before every call whether the bytes are
/// still wanted.
///
/// # Safety
///
/// The pieces are writable memory.
unsafe fn from_scratch_or_wire(
    wire: &mut dyn crate::transport::Wire,
    scratch: &mut [u8],
    (start, end): (&mut usize, &mut usize),
    pieces: &mut Vec<Piece>,
) -> Step<u64> {
    cut(pieces, hooks::most_to_land());
    if *start < *end {
        let mut moved = 0;
        for piece in &*pieces {
            let len = (piece.len as usize).min(*end - *start);
            let from = scratch[*start..*start + len].as_ptr();
            // SAFETY: `from` has `len` bytes by the slice. The caller vouches for the piece.
            unsafe { copy(CopyKind::Plain, piece.addr as *mut u8, from, len) };
            *start += len;
            moved += len as u64;
            if *start == *end {
                break;
            }
        }
        return Ok(moved);
    }
    (*start, *end) = (0, 0);
    let wanted: u64 = pieces.iter().map(|p| p.len).sum();
    pieces.push(Piece::of_mut(&mut scratch[..HEAD_READ]));
    // SAFETY: the caller vouches for the pieces. The last one is the scratch buffer.
    match unsafe { wire.receive(pieces) }.map_err(LaneEnd::Broken)? {
        None => Ok(0),
        Some(0) => Err(LaneEnd::Closed),
        Some(n) => {
            let n = n as u64;
            *end = n.saturating_sub(wanted) as usize;
            Ok(n.min(wanted))
        }
    }
}
