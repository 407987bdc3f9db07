//! Timers: heartbeats, silent peers, deadlines, fences.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::outcome::Reason;
use peerway_core::protocol::{Effect, Expiry};
use peerway_core::wire::{Control, Header, Refusal};

use super::driver::Driver;
use super::ending::{LaneEnd, SessionEnd};
use super::sessions::SessionDriver;
use crate::bugs::{Bug, is_planted};
use crate::clock;
use crate::limits::{RefusalReason, message_time};
use crate::session::PROCESS_ENDED;

/// The minimum time before an overdue timer is checked again.
const AGAIN: Duration = Duration::from_millis(5);

/// The times of the next events. `u64::MAX` means none.
pub(super) struct Timers {
    /// Sessions by index. An entry is valid if its session's timer still has that time.
    sessions: BinaryHeap<Reverse<(u64, usize)>>,
    /// A lower bound of all deadlines and fence timeouts of requests.
    requests: u64,
    /// The next attempt to start the acceptor's thread.
    pub(super) acceptor: u64,
}

impl Default for Timers {
    fn default() -> Self {
        Self { sessions: BinaryHeap::new(), requests: u64::MAX, acceptor: u64::MAX }
    }
}

impl Timers {
    #[inline]
    pub(super) fn next(&self) -> u64 {
        let session = self.sessions.peek().map_or(u64::MAX, |Reverse((due, _))| *due);
        session.min(self.requests).min(self.acceptor)
    }

    /// Notes that a request has a deadline or a fence timeout at this time.
    #[inline]
    pub(super) fn end_by(&mut self, time: u64) {
        self.requests = self.requests.min(time);
    }
}

impl Driver {
    /// Handles all expired timers.
    pub(super) fn tick(&mut self, now: u64) {
        while let Some(&Reverse((due, index))) = self.timers.sessions.peek()
            && due <= now
        {
            self.timers.sessions.pop();
            self.with_session(index, |driver, s| {
                if s.timer == due {
                    s.timer = u64::MAX;
                    driver.session_tick(s, now);
                    driver.set_timer(s, s.due(now).max(clock::after(now, AGAIN)));
                }
            });
        }
        if now >= self.timers.requests {
            self.sweep_requests(now);
        }
        if now >= self.timers.acceptor {
            self.start_accepting(now);
        }
    }

    /// Makes sure that the session is checked by this time.
    pub(super) fn set_timer(&mut self, s: &mut SessionDriver, due: u64) {
        if due < s.timer {
            s.timer = due;
            self.timers.sessions.push(Reverse((due, s.index)));
        }
    }

    /// Ends requests whose deadline or fence timeout has passed.
    fn sweep_requests(&mut self, now: u64) {
        // Iterate backwards: ending a request moves the last one into its place.
        for at in (0..self.requests.slots().len()).rev() {
            let Some(&slot) = self.requests.slots().get(at) else { continue };
            let Some(request) = self.request(slot) else { continue };
            let index = request.session.index.load(Ordering::Relaxed);
            match request.state.expired(now, request.deadline) {
                Expiry::No => {}
                Expiry::Stop if is_planted(Bug::DeadlineIgnored) => {}
                Expiry::Stop => self.with_session(index, |driver, s| {
                    driver.stop(s, slot, Reason::TimedOut, now);
                }),
                Expiry::Sever => {
                    self.with_session(index, |driver, s| driver.sever(s, slot, now));
                }
                Expiry::End(ended) => self.end(slot, ended),
            }
        }
        let due =
            self.requests.iter().filter_map(|request| request.state.due(request.deadline)).min();
        self.timers.requests = due.map_or(u64::MAX, |due| due.max(clock::after(now, AGAIN)));
    }

    fn session_tick(&mut self, s: &mut SessionDriver, now: u64) {
        if let Some(until) = s.lingering {
            if s.session.is_process_dead() {
                self.release(s, true);
            } else if now >= until {
                self.release(s, false);
            }
            return;
        }
        if let Some(beat) = s.liveness.take_beat(now) {
            let totals = s.session.stats.one_sided();
            for lane in s.lanes.iter_mut().flatten() {
                // A lane with a full send buffer needs no further heartbeat.
                if lane.tx.out.len() < 64 << 10 {
                    lane.push(&Header::beat(beat, totals));
                }
            }
            s.dirty = true;
        }
        if self.is_orphan(s, now) {
            let cause = "the session that this sub-session belongs to is over";
            self.close_session(s, SessionEnd::Silent, cause);
            return;
        }
        if s.is_local() {
            self.local_silence(s, now);
            return;
        }
        self.queues_tick(s, now);
        self.replace_lanes(s, now);
        self.keys_tick(s);
        let message_time = message_time(self.endpoint.config.detect);
        let too_old =
            now.saturating_sub(u64::try_from(message_time.as_nanos()).unwrap_or(u64::MAX));
        for at in 0..s.lanes.len() {
            let lane = s.lanes[at].as_ref();
            if lane.is_some_and(|lane| s.liveness.is_overdue(lane.heard, now)) {
                self.lane_ended(s, at, LaneEnd::Silent);
            } else if s.lanes[at].as_ref().is_some_and(|lane| lane.has_message_since(too_old)) {
                self.refuse_slow_message(s, at);
            }
        }
    }

    /// Closes a lane on which a message takes too long, and tells the peer why.
    fn refuse_slow_message(&mut self, s: &mut SessionDriver, at: usize) {
        self.endpoint.refusals.note(RefusalReason::SlowMessage, &s.session.addr);
        self.lane_ended(s, at, LaneEnd::SlowMessage);
        if let Some(lane) = s.control_lane() {
            let limit = message_time(self.endpoint.config.detect);
            let why = format!("a notification took longer than {limit:?} to arrive");
            lane.push_control(&Control::Refuse(Refusal::Limit(why)));
            s.dirty = true;
        }
    }

    /// Whether the main session of a sub-session has been gone for longer than the detection time.
    /// The end of the main session normally ends the sub-session too, in its own time and with its
    /// own proof. Only a peer that keeps one without the other gets here.
    fn is_orphan(&self, s: &mut SessionDriver, now: u64) -> bool {
        if self.endpoint.peers.has_session_of(s.session.incarnation, s.session.sub_session) {
            s.alone_since = None;
            return false;
        }
        let since = *s.alone_since.get_or_insert(now);
        s.liveness.is_overdue(since, now)
    }

    /// Handles a silent local peer, which may only be stopped. Requests that need the peer's help
    /// fail, but direct access continues. The session stays, and works again when the peer resumes.
    fn local_silence(&mut self, s: &mut SessionDriver, now: u64) {
        if s.session.is_process_dead() {
            self.close_session(s, SessionEnd::Released, PROCESS_ENDED);
            return;
        }
        let heard = s.lanes.iter().flatten().map(|lane| lane.heard).max().unwrap_or(now);
        if !s.liveness.is_overdue(heard, now) {
            return;
        }
        for slot in self.requests.of(&s.session) {
            let Some(request) = self.request(slot) else { continue };
            let Effect::Finish(ended) = request.state.silenced() else { continue };
            s.session.note_event("every lane was silent for longer than the detection time");
            self.stop(s, slot, ended.reason, now);
            if self.request(slot).is_some_and(|request| !request.state.is_unfenced()) {
                self.end(slot, ended);
            }
        }
    }
}

impl SessionDriver {
    /// When the session's next timer expires.
    fn due(&self, now: u64) -> u64 {
        if let Some(until) = self.lingering {
            return until;
        }
        // A local peer counts as silent when all its lanes are silent, and its session stays.
        let heard = self.lanes.iter().flatten().map(|lane| lane.heard);
        let due = self.liveness.due(heard, self.is_local(), now);
        let until = self.until_queues(now).min(self.until_replacement(now));
        due.min(clock::after(now, until))
    }
}
