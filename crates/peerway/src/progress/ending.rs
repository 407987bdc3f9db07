//! The end of lanes and sessions, and the fences of the transfers that they carried.
//!
//! A closed connection is no fence. A stopped peer still applies the bytes in its socket when it
//! continues, even if the connection has closed since. Three events prove that a peer applies
//! nothing more: its goodbye, the end of its process, or the end of its half of a local link.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerway_core::outcome::TransferError;
use peerway_core::protocol::Loss;
use peerway_core::record::RecordError;
use peerway_core::wire::{Control, FrameError, Header};
use rustix::event::epoll;

use super::driver::Driver;
use super::sessions::{SessionDriver, fenced};
use crate::clock;
use crate::limits::RefusalReason;
use crate::os::Piece;
use crate::progress::copies::pool::Job;
use crate::session::{PROCESS_ENDED, Session};

/// Why a lane ended.
#[derive(Debug)]
pub(super) enum LaneEnd {
    /// The peer or the network closed it.
    Closed,
    /// Sending or receiving on it failed.
    Broken(std::io::Error),
    /// The peer sent an invalid frame.
    Misbehaved(FrameError),
    /// The peer said goodbye.
    Bye,
    /// The lease expired while a process did not run. This side must apply nothing more.
    LeaseOver,
    /// The peer sent nothing on it for longer than the detection time.
    Silent,
    /// A message on it did not arrive in time.
    SlowMessage,
}

impl LaneEnd {
    /// Whether a record on it was not what the peer sent (`PEERWAY_DATA`).
    fn is_corrupt(&self) -> bool {
        let Self::Broken(error) = self else { return false };
        error.get_ref().is_some_and(|error| error.is::<RecordError>())
    }

    /// The cause, for error reports and logs. `lane` is the number of the lane.
    fn describe(&self, lane: u16) -> String {
        match self {
            Self::Closed => format!("lane {lane} was closed by the peer or the network"),
            Self::Broken(error) => format!("lane {lane} failed: {error}"),
            Self::Misbehaved(why) => format!("the peer broke the protocol on lane {lane}: {why}"),
            Self::Bye => "the peer closed the session".to_owned(),
            Self::LeaseOver => {
                "the lease expired: this process or the peer did not run for too long".to_owned()
            }
            Self::Silent => {
                format!("lane {lane} was silent for longer than the detection time")
            }
            Self::SlowMessage => format!("a message on lane {lane} did not arrive in time"),
        }
    }
}

/// Why a session is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SessionEnd {
    /// The peer said goodbye.
    Goodbye,
    /// It is proven that the peer applies nothing more.
    Released,
    /// The connections to the peer are closed. Most likely its process ended.
    Closed,
    /// The peer does not answer.
    Silent,
    /// The peer broke the protocol.
    Misbehaved,
    /// This endpoint closed it.
    Removed,
}

impl Driver {
    /// Ends a lane. Its work moves to other lanes, or the session ends with it.
    pub(super) fn lane_ended(&mut self, s: &mut SessionDriver, at: usize, end: LaneEnd) {
        let Some(mut lane) = s.lanes.get_mut(at).and_then(Option::take) else { return };
        let cause = end.describe(lane.index);
        tracing::debug!(peer = %s.session.addr, cause, "lane ended");
        if end.is_corrupt() {
            s.session.stats.corrupt_records.fetch_add(1, Ordering::Relaxed);
            self.endpoint.refusals.note(RefusalReason::CorruptRecord, &s.session.addr);
        }
        self.unwatch(&lane);
        let gone = match end {
            LaneEnd::Bye => SessionEnd::Goodbye,
            LaneEnd::Closed | LaneEnd::Broken(_) => SessionEnd::Closed,
            LaneEnd::Silent | LaneEnd::SlowMessage | LaneEnd::LeaseOver => SessionEnd::Silent,
            LaneEnd::Misbehaved(_) => SessionEnd::Misbehaved,
        };
        let whole = matches!(end, LaneEnd::Bye | LaneEnd::LeaseOver | LaneEnd::Misbehaved(_))
            // A ring fails only by corruption, and the one socket of a local session only when the
            // session ends.
            || s.is_local()
            // Queue pairs need the connection for their setup and acknowledgements.
            || (at == 0 && s.session.rdma.is_some())
            || s.lanes.iter().all(Option::is_none);
        if whole {
            s.lanes[at] = Some(lane);
            self.close_session(s, gone, &cause);
            return;
        }
        // A draining queue pair ends because of an earlier event, which is recorded already.
        if lane.draining.is_none() {
            s.session.note_event(&cause);
        }
        if self.drain_first(s, &mut lane) {
            s.lanes[at] = Some(lane);
            return;
        }
        s.session.stats.lanes_lost.fetch_add(1, Ordering::Relaxed);
        self.finish_puts(s, &mut lane);
        let immediates = lane.wire.queue().map_or(0, |queue| queue.immediates());
        s.lost.add(lane.index, lane.generation, &lane.sent, &lane.applied, immediates);
        self.plan_replacement(s, &lane);
        self.queue_ended(s, lane);
        // Repeat all questions and answers: the lane that is lost now may have carried earlier
        // ones.
        let lost: Vec<(u16, u32)> = s.lost.questions().collect();
        let answers: Vec<Control> = s
            .lost
            .answers()
            .filter(|(lane, ..)| !s.reopening.is_connecting(*lane))
            .map(|(lane, generation, applied)| fenced(lane, generation, applied))
            .collect();
        if let Some(other) = s.control_lane() {
            for (lane, generation) in lost {
                other.push_control(&Control::LaneLost { lane, generation });
            }
            for answer in &answers {
                other.push_control_answer(answer);
            }
            s.dirty = true;
        }
    }

    /// Closes the session of a peer on this host whose process has ended. Its memory is gone, and
    /// it can no longer access the memory of this process.
    pub(super) fn process_died(&mut self, s: &mut SessionDriver, now: u64) {
        if let Some(process) = s.session.process() {
            let _ = epoll::delete(self.shard.epoll(), process.as_fd());
        }
        // The peer may have sent something before it died.
        for at in 0..s.lanes.len() {
            self.serve_lane(s, at, now);
        }
        self.close_session(s, SessionEnd::Released, PROCESS_ENDED);
    }

    /// Answers a peer that has lost a lane and asks which of its frames this side applied. Ends the
    /// lane first, so that this side applies no more of them.
    pub(super) fn lost_by_peer(&mut self, s: &mut SessionDriver, lost: u16, generation: u32) {
        let live = |s: &SessionDriver| {
            s.lanes.get(usize::from(lost)).and_then(Option::as_ref).map(|lane| lane.generation)
        };
        // The lane was replaced since, so the peer has the answer to this question.
        if live(s).is_some_and(|live| live > generation) {
            return;
        }
        if live(s) == Some(generation) {
            self.lane_ended(s, usize::from(lost), LaneEnd::Closed);
        }
        let Some(applied) = s.lost.applied(lost, generation) else { return };
        // The peer can send any number. Record only lanes of this session.
        let is_of_session = usize::from(lost) < s.lanes.len();
        // The lane has no pending pull: only rings carry pulls, and a session ends with its rings.
        // For a draining queue pair, `lane_ended` sends the answer after the drain.
        if live(s) != Some(generation) {
            if is_of_session {
                s.lost.note_unknown(lost, generation);
            }
            if let Some(other) = s.control_lane() {
                other.push_control_answer(&fenced(lost, generation, applied));
                // The questions come on one lane and the answers leave on another, which the peer
                // may not read.
                let (at, too_much) = (usize::from(other.index), other.owes_too_much());
                s.dirty = true;
                if too_much {
                    self.lane_ended(s, at, LaneEnd::Misbehaved(FrameError::Order));
                }
            }
        }
        if is_of_session {
            s.lost.note_question(lost);
        }
    }

    /// Ends a session and its transfers. A transfer that the peer may still apply keeps its memory.
    pub(super) fn close_session(&mut self, s: &mut SessionDriver, end: SessionEnd, cause: &str) {
        let was_told = end == SessionEnd::Goodbye;
        let end = match end {
            // The copy pool of a local peer may still copy after the goodbye. The end of the link
            // proves that it has finished.
            SessionEnd::Goodbye if s.is_local() => SessionEnd::Closed,
            SessionEnd::Goodbye => SessionEnd::Released,
            end => end,
        };
        if s.lingering.is_some() {
            if end == SessionEnd::Released {
                self.release(s, true);
            }
            return;
        }
        if !s.session.mark_closed(cause) {
            for mut lane in s.lanes.iter_mut().filter_map(Option::take) {
                self.unwatch(&lane);
                self.forget_queue(&mut lane);
            }
            return;
        }
        self.endpoint.peers.peer_gone(&s.session, end == SessionEnd::Removed);
        for pull in self.pulls.iter().filter(|p| Arc::ptr_eq(&p.session, &s.session)) {
            pull.cancel();
        }
        for at in 0..s.lanes.len() {
            let Some(mut lane) = s.lanes[at].take() else { continue };
            self.finish_puts(s, &mut lane);
            s.lanes[at] = Some(lane);
        }
        // Destroy the queue pairs before the goodbye: the peer takes the goodbye as proof that no
        // more bytes arrive.
        for at in 0..s.lanes.len() {
            if let Some(mut lane) = s.lanes[at].take_if(|lane| lane.wire.queue().is_some()) {
                self.forget_queue(&mut lane);
            }
        }
        // The same goes for queue pairs that a thread connects now. They cannot be destroyed yet,
        // so the peer gets no goodbye.
        let may_land = s.reopening.connects_any();
        if end != SessionEnd::Released && end != SessionEnd::Closed && !may_land {
            say_goodbye(s);
        }
        for lane in s.lanes.iter_mut().filter_map(Option::take) {
            self.unwatch(&lane);
        }
        s.reopening = Default::default();
        s.session.close_link_if_idle();

        let now = clock::now();
        let proven = end == SessionEnd::Released || s.session.is_process_dead();
        // The kernel closes the sockets of a killed process shortly before it reports the death.
        let proof_may_come = end == SessionEnd::Closed && s.session.is_watched();
        let error = match end {
            SessionEnd::Goodbye | SessionEnd::Released | SessionEnd::Closed => {
                TransferError::PeerGone
            }
            SessionEnd::Silent => TransferError::PeerSilent,
            SessionEnd::Misbehaved => TransferError::PeerMisbehaved,
            SessionEnd::Removed => TransferError::EndpointClosed,
        };
        let fence_until = clock::after(now, self.endpoint.config.fence);
        let refused = s.refused_reads();
        let proof_until = proof_may_come.then_some(fence_until);
        let loss = Loss { error, is_proven: proven, proof_until };
        let mut waiting = false;
        let mut transfers = 0;
        for slot in self.requests.of(&s.session) {
            let Some(request) = self.request(slot) else { continue };
            transfers += usize::from(!request.state.is_unfenced());
            let effect = request.state.session_lost(&loss, refused.contains(&slot));
            self.apply(s, slot, effect);
            waiting |= self.request(slot).is_some();
        }
        if waiting && proof_may_come {
            self.timers.end_by(fence_until);
        }
        let expected = end == SessionEnd::Removed || (was_told && transfers == 0);
        report_end(&s.session, cause, transfers, expected);
        if let Some(link) = &s.session.link {
            let _ = epoll::delete(self.shard.epoll(), link.wake_fd.as_fd());
        }
        if waiting {
            // A remote peer's lease has expired by then. A local peer is watched until it ends.
            let lease = s.liveness.lease_of_peer();
            let forever = s.is_local();
            s.lingering = Some(if forever { u64::MAX } else { clock::after(now, lease) });
            self.set_timer(s, now);
        }
    }

    /// Stops watching a session that is over. `proven` says that the peer applies nothing more;
    /// otherwise the time to wait for the proof has passed.
    pub(super) fn release(&mut self, s: &mut SessionDriver, proven: bool) {
        s.lingering = None;
        for slot in self.requests.of(&s.session) {
            let Some(request) = self.request(slot) else { continue };
            let effect = request.state.proof_over(proven);
            self.apply(s, slot, effect);
        }
    }
}

/// Logs the end of a session in one line. An `expected` end needs no action by the user: this
/// endpoint closed the session, or the peer closed it while no transfer ran.
fn report_end(session: &Session, cause: &str, transfers: usize, expected: bool) {
    let Session { addr, incarnation, path, .. } = session;
    let path = path.kind;
    let sub_session = session.sub_session.map(|sub_session| sub_session.number);
    if expected {
        tracing::info!(peer = %addr, %incarnation, %path, sub_session, cause, "a session closed");
    } else {
        tracing::warn!(
            peer = %addr,
            %incarnation,
            %path,
            sub_session,
            cause,
            transfers,
            "lost the session with a peer; its transfers end. Connect again to continue"
        );
    }
}

/// Sends the last totals and a goodbye on every lane, as a best effort. On a full lane, the peer
/// finds the socket closed instead.
fn say_goodbye(s: &mut SessionDriver) {
    let now = clock::now();
    s.liveness.beat_at_once(now);
    let last =
        s.liveness.take_beat(now).map(|beat| Header::beat(beat, s.session.stats.one_sided()));
    for lane in s.lanes.iter_mut().flatten() {
        if lane.tx.frame.is_none() {
            last.iter().for_each(|beat| lane.push(beat));
            lane.push_control(&Control::Bye);
            let piece = [Piece::of(&lane.tx.out[lane.tx.out_done..])];
            // SAFETY: the piece is the lane's own buffer, which lives through this call.
            let _ = unsafe { lane.wire.send(&piece) };
        }
    }
}
