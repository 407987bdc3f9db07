//! Messages of a peer: notifications for the application, control messages, and the file
//! descriptors that a local peer sends by its link.

use std::os::fd::AsFd;

use peerway_core::outcome::TransferError;
use peerway_core::protocol::{Applied, Verdict};
use peerway_core::wire::{Control, FrameError, Kind, Refusal};
use rustix::event::epoll;

use super::driver::Driver;
use super::ending::{LaneEnd, SessionEnd};
use super::lane::Lane;
use super::receive::{AfterSkip, HEAD_READ, RecvState, Step, nonsense, refill};
use super::sessions::SessionDriver;
use crate::bugs::{Bug, is_planted};
use crate::limits::{MessageCharge, RefusalReason};
use crate::os::unix::{self, Received};

/// A notification that is arriving.
pub(crate) struct IncomingMessage {
    pub(crate) sequence: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) need: usize,
    /// When its header arrived.
    pub(crate) since: u64,
    /// Its bytes in the budgets, unless it arrived whole.
    pub(crate) _charge: Option<MessageCharge>,
}

impl Lane {
    /// Whether a message has been arriving since before `time`.
    pub(crate) fn has_message_since(&self, time: u64) -> bool {
        matches!(&self.rx.state, RecvState::Gather(message) if message.since < time)
    }
}

impl Driver {
    /// Makes room for a notification whose header has arrived.
    ///
    /// A message over budget is refused and its bytes are discarded as they come. The lane neither
    /// waits nor closes: a lane that waits would stop the heartbeats behind the message, and other
    /// peers may be the reason why the budget is used up. The sender can repeat the message.
    pub(super) fn begin_message(
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
                lane.refuse(sequence, TransferError::NotificationsFull);
                lane.rx.state = RecvState::Skip { left: need, then: AfterSkip::Count(sequence) };
                return;
            }
        }
        let bytes = Vec::with_capacity(need);
        let message = IncomingMessage { sequence, bytes, need, since: now, _charge: charge };
        lane.rx.state = RecvState::Gather(message);
    }

    pub(super) fn gather(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
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
        lane.finish(sequence, result);
        Ok(true)
    }

    /// Handles a control message once it is whole. It needs no memory but the scratch buffer.
    pub(super) fn control_message(
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
                self.import(s, lane, request, &descriptor);
            }
            Control::Importing { request } => s.session.imports.takes_time(request),
            Control::Imported { request, result } => {
                let result = result.map_err(TransferError::from_code);
                if result.is_ok() && s.session.imports.is_waiting(request) {
                    self.endpoint.peers.give_right(&s.session);
                }
                self.keys_answered(s, request, result.is_ok());
                let mut lanes = s.keyed_lanes();
                lanes.extend(lane.is_keyed().then_some(lane.index));
                s.session.imports.answered(request, result, lanes);
            }
            Control::Keys { keys } => self.keys_came(s, lane, &keys)?,
            Control::LaneLost { lane: lost, generation } => {
                if (lost, generation) == (lane.index, lane.generation) {
                    return Err(nonsense(FrameError::Order));
                }
                // `with_session` handles it after this call, when this lane is back in the table.
                if !s.lost_by_peer.contains(&(lost, generation)) {
                    s.lost_by_peer.push((lost, generation));
                }
            }
            Control::LaneFenced { lane: lost, generation, applied, refused, immediates } => {
                let answer = Applied { last: applied, refused, immediates };
                self.replan(s, lost, generation, &answer);
                self.replan_parts(s, lost, immediates);
                self.replace_soon(s);
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
    fn replan(&mut self, s: &mut SessionDriver, lane: u16, generation: u32, answer: &Applied) {
        for (frame, verdict) in s.lost.resolve(lane, generation, answer) {
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

    /// Takes the file descriptors that a local peer sends for imports. The end of its socket is the
    /// end of the session.
    pub(super) fn link_spoke(&mut self, s: &mut SessionDriver, now: u64) {
        let Some(link) = &s.session.link else { return };
        let request = |bytes: &[u8]| bytes.first_chunk().map(|b| u64::from_le_bytes(*b));
        let error = loop {
            match unix::recv(link.socket.as_fd()) {
                Ok(Received::Packet(mut packet)) => {
                    if let (Some(request), Some(fd)) = (request(&packet.bytes), packet.fds.pop()) {
                        s.session.imports.descriptor_came(request, fd);
                    }
                }
                Ok(Received::Cut(bytes)) => {
                    tracing::warn!(
                        peer = %s.session.addr,
                        "lost a file descriptor that this peer sent, because this process has too \
                         many open files; the import fails. Raise the limit (ulimit -n)"
                    );
                    if let Some(request) = request(&bytes) {
                        s.session.imports.descriptor_lost(request);
                    }
                }
                Ok(Received::WouldBlock) => return,
                Ok(Received::Closed) => break None,
                Err(error) => {
                    let _ = epoll::delete(self.shard.epoll(), link.socket.as_fd());
                    break Some(error);
                }
            }
        };
        match error {
            // An error in this process proves nothing about the peer.
            Some(error) => {
                let cause = format!("receiving on the local link failed: {error}");
                self.close_session(s, SessionEnd::Closed, &cause);
            }
            // The peer closes its end after its last access, so it applies nothing more. Its
            // goodbye may still be in a ring.
            None => {
                for at in 0..s.lanes.len() {
                    self.serve_lane(s, at, now);
                }
                let cause = "the peer's process closed its local link or ended";
                self.close_session(s, SessionEnd::Released, cause);
            }
        }
    }
}
