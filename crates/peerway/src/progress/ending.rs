//! How lanes and sessions end, and what can be said of what they had sent.
//!
//! A closed connection is no fence: bytes that wait in a stopped receiver's socket are applied when
//! it goes on, whatever became of the connection. What proves that a peer applies nothing more is
//! its goodbye, the end of its process, or the end of its half of a local link.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::wire::{Control, FrameError};
use rustix::event::epoll;

use super::driver::{Applied, Driver, SessionDriver};
use super::request::Route;
use crate::clock;
use crate::os::Piece;
use crate::progress::copy_pool::Job;
use crate::session::Session;

/// Why a lane cannot go on.
#[derive(Debug)]
pub(super) enum LaneEnd {
    /// The peer, or something between, closed it.
    Closed,
    /// It broke.
    Broken(std::io::Error),
    /// The peer sent nonsense.
    Misbehaved(FrameError),
    /// The peer says goodbye.
    Bye,
    /// The lease ran out while the process did not run: nothing more may be applied.
    LeaseOver,
    /// Nothing was heard on it.
    Silent,
}

impl LaneEnd {
    /// What happened to the lane with this number, for people.
    fn describe(&self, lane: u16) -> String {
        match self {
            Self::Closed => format!("lane {lane} was closed by the peer or the network"),
            Self::Broken(error) => format!("lane {lane} broke: {error}"),
            Self::Misbehaved(why) => format!("the peer broke the protocol on lane {lane}: {why}"),
            Self::Bye => "the peer closed the session".to_owned(),
            Self::LeaseOver => {
                "the lease ran out: this process or the peer did not run for too long".to_owned()
            }
            Self::Silent => {
                format!("lane {lane} was silent for longer than the detection time")
            }
        }
    }
}

/// Why a session is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SessionEnd {
    /// The peer said goodbye.
    Goodbye,
    /// The peer applies nothing more, for certain.
    Released,
    /// Its connections are closed; most likely its process ended.
    Closed,
    /// It does not answer.
    Silent,
    /// It cannot be believed.
    Misbehaved,
    /// We closed it.
    Removed,
}

impl Driver {
    /// A lane is over: its work moves to others, or the session is over with it.
    pub(super) fn lane_ended(&mut self, s: &mut SessionDriver, at: usize, end: LaneEnd) {
        let Some(mut lane) = s.lanes.get_mut(at).and_then(Option::take) else { return };
        let cause = end.describe(lane.index);
        tracing::debug!(peer = %s.session.addr, cause, "lane ended");
        self.unwatch(&lane);
        let gone = match end {
            LaneEnd::Bye => SessionEnd::Goodbye,
            LaneEnd::Closed | LaneEnd::Broken(_) => SessionEnd::Closed,
            LaneEnd::Silent | LaneEnd::LeaseOver => SessionEnd::Silent,
            LaneEnd::Misbehaved(_) => SessionEnd::Misbehaved,
        };
        let whole = matches!(end, LaneEnd::Bye | LaneEnd::LeaseOver | LaneEnd::Misbehaved(_))
            // A ring breaks only by corruption, and a local session's one socket by its end.
            || s.is_local()
            // Queue pairs are opened and answered for over the connection, and go with it.
            || (at == 0 && s.session.rdma.is_some())
            || s.lanes.iter().all(Option::is_none);
        if whole {
            s.lanes[at] = Some(lane);
            self.close_session(s, gone, &cause);
            return;
        }
        // The end of a queue pair that is being drained is the result of an earlier event.
        if lane.draining.is_none() {
            s.session.note_event(&cause);
        }
        if self.drain_first(s, &mut lane) {
            s.lanes[at] = Some(lane);
            return;
        }
        s.session.stats.lanes_lost.fetch_add(1, Ordering::Relaxed);
        self.finish_puts(s, &mut lane);
        let refused = lane.refused.iter().copied().collect();
        let immediates = lane.wire.queue().map_or(0, |queue| queue.immediates);
        let applied = Applied { applied: lane.applied.last(), refused, immediates };
        s.last_applied.insert(lane.index, applied);
        let unanswered = lane.outstanding.iter().copied().collect();
        s.lost.insert(lane.index, (lane.first_outstanding(), unanswered));
        self.queue_ended(s, lane);
        // All of them: an earlier question or answer may have been on the lane that is lost now.
        let lost: Vec<u16> = s.lost.keys().copied().collect();
        let gone = s.asked.iter().filter(|lane| s.last_applied.contains_key(lane));
        let answers: Vec<Control> = gone.map(|lane| s.fenced(*lane)).collect();
        if let Some(other) = s.control_lane() {
            for lane in lost {
                other.push_control(&Control::LaneLost { lane });
            }
            for answer in &answers {
                other.push_control_answer(answer);
            }
            s.dirty = true;
        }
    }

    /// The peer has lost a lane and asks what we applied from it; nothing more is.
    pub(super) fn lost_by_peer(&mut self, s: &mut SessionDriver, lost: u16) {
        self.lane_ended(s, usize::from(lost), LaneEnd::Closed);
        // No pull of that lane is under way: only rings carry pulls, and a session does not outlive
        // its rings. A queue pair that is being drained is answered for when it is gone.
        if s.lanes.get(usize::from(lost)).is_none_or(Option::is_none) {
            let answer = s.fenced(lost);
            if let Some(other) = s.control_lane() {
                other.push_control_answer(&answer);
                s.dirty = true;
            }
        }
        // Only lanes that there have been: a peer can name any number.
        if usize::from(lost) < s.lanes.len() && !s.asked.contains(&lost) {
            s.asked.push(lost);
        }
    }

    /// A session is over. Its transfers end; what may still be applied keeps its memory.
    pub(super) fn close_session(&mut self, s: &mut SessionDriver, end: SessionEnd, cause: &str) {
        let was_told = end == SessionEnd::Goodbye;
        let end = match end {
            // A local peer's copy pool may still be copying when it says goodbye; its link tells.
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
        self.endpoint.peer_gone(&s.session, end == SessionEnd::Removed);
        for pull in self.pulls.iter().filter(|p| Arc::ptr_eq(&p.session, &s.session)) {
            pull.cancel();
        }
        for at in 0..s.lanes.len() {
            let Some(mut lane) = s.lanes[at].take() else { continue };
            self.finish_puts(s, &mut lane);
            s.lanes[at] = Some(lane);
        }
        // Queue pairs first: who hears the goodbye takes it for proof that nothing lands any more.
        for at in 0..s.lanes.len() {
            if let Some(mut lane) = s.lanes[at].take_if(|lane| lane.wire.queue().is_some()) {
                self.forget_queue(&mut lane);
            }
        }
        if end != SessionEnd::Released && end != SessionEnd::Closed {
            say_goodbye(s);
        }
        for lane in s.lanes.iter_mut().filter_map(Option::take) {
            self.unwatch(&lane);
        }
        s.reopening = Default::default();
        s.session.close_link_if_idle();

        let now = clock::now();
        let proven = end == SessionEnd::Released || s.session.is_process_dead();
        // A process that was killed is dead some moments after its sockets are.
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
        let mut waiting = false;
        let mut transfers = 0;
        for slot in self.active.clone() {
            let Some(request) = self.request(slot) else { continue };
            if !Arc::ptr_eq(&request.session, &s.session) {
                continue;
            }
            transfers += usize::from(!request.unfenced);
            // The lanes are end, and with them whatever devices of ours were reading.
            let reads = request.route == Route::Read;
            let held = proven || reads || request.is_bare() || request.unanswered == 0;
            // Memory that was refused as its owner died was not withdrawn.
            let died = error == TransferError::PeerGone && refused.contains(&slot);
            let reason = request.ending.filter(|_| !died);
            let reason = reason.map_or(Reason::Failed(error), |(reason, _)| reason);
            if request.unfenced && held {
                self.endpoint.slots.fenced(slot);
                self.forget(slot);
            } else if held {
                self.end(slot, Ended { reason, fence: Fence::Held });
            } else if proof_may_come && !request.unfenced {
                request.ending.get_or_insert((reason, fence_until));
                self.timers.end_by(fence_until);
                waiting = true;
            } else {
                if !request.unfenced {
                    self.end(slot, Ended { reason, fence: Fence::Open });
                }
                waiting = true;
            }
        }
        let expected = end == SessionEnd::Removed || (was_told && transfers == 0);
        report_end(&s.session, cause, transfers, expected);
        if let Some(link) = &s.session.link {
            let _ = epoll::delete(self.shard.epoll(), link.wake_fd.as_fd());
        }
        if waiting {
            // A far peer's lease is over by then; a local one is watched for as long as it lives.
            let lease = s.detect + s.detect / 4;
            let forever = s.is_local();
            s.lingering = Some(if forever { u64::MAX } else { clock::after(now, lease) });
            self.set_timer(s, now);
        }
    }

    /// A session that is over needs no more watching: because the peer has let go, or because it
    /// has been long enough.
    pub(super) fn release(&mut self, s: &mut SessionDriver, proven: bool) {
        s.lingering = None;
        for slot in self.active.clone() {
            let Some(request) = self.request(slot) else { continue };
            if !Arc::ptr_eq(&request.session, &s.session) {
                continue;
            }
            let fence = if proven { Fence::Held } else { Fence::Open };
            match (request.ending, request.unfenced) {
                (Some((reason, _)), false) if proven => self.end(slot, Ended { reason, fence }),
                (Some((reason, _)), false) => {
                    self.end(slot, Ended { reason, fence });
                    self.endpoint.slots.unfenced_for_good(slot);
                    self.forget(slot);
                }
                _ => {
                    if proven {
                        self.endpoint.slots.fenced(slot);
                    } else {
                        self.endpoint.slots.unfenced_for_good(slot);
                    }
                    self.forget(slot);
                }
            }
        }
    }
}

/// Logs the end of a session in one line. A user need not act on one that a side closed while
/// nothing was under way.
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
            "lost the session with a peer; its transfers end, and a new connect is needed"
        );
    }
}

/// Best effort: a lane that is full does not hear it, and finds the socket closed.
fn say_goodbye(s: &mut SessionDriver) {
    for lane in s.lanes.iter_mut().flatten() {
        if lane.frame.is_none() {
            lane.push_control(&Control::Bye);
            let piece = [Piece::of(&lane.out[lane.out_done..])];
            // SAFETY: the piece is the lane's own buffer.
            let _ = unsafe { lane.wire.send(&piece) };
        }
    }
}
