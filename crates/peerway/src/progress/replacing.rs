//! How the driver replaces lost TCP lanes.
//!
//! The initiator of a session opens a new connection, in another thread, because that may block. It
//! begins when it has the peer's answer about the lost lane. The peer lets the connection join when
//! it has the initiator's answer too. So nothing of the lost lane is undecided when frames of the
//! new one arrive, and a late question or answer names another generation.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::protocol::Role;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::driver::Driver;
use super::ending::LaneEnd;
use super::lane::Lane;
use super::sessions::SessionDriver;
use crate::clock;
use crate::identity::lanes::LaneAttempt;
use crate::session::Session;
use crate::session::lanes::JoinLane;
use crate::transport::Wire;

/// The shortest and the longest pause before an attempt. The pause grows while attempts fail, and
/// while new lanes break before they carry anything. A lane that carried frames has worked, and one
/// that is lost again soon is replaced soon.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// The state of replacing lost TCP lanes, by lane. Only the initiator of a session opens any.
#[derive(Default)]
pub(crate) struct Replacing(Vec<Attempts>);

/// Attempts to replace one lane.
#[derive(Clone, Copy, Default)]
struct Attempts {
    /// The number of the last one.
    generation: u32,
    /// A thread carries it out.
    is_busy: bool,
    /// When the next one is due.
    at: u64,
    pause: Duration,
}

impl Attempts {
    fn back_off(&mut self, now: u64) {
        self.pause = (self.pause * 2).clamp(PAUSES.0, PAUSES.1);
        self.at = clock::after(now, self.pause);
    }
}

impl Replacing {
    fn of(&mut self, lane: u16) -> &mut Attempts {
        let at = usize::from(lane);
        if self.0.len() <= at {
            self.0.resize(at + 1, Attempts::default());
        }
        &mut self.0[at]
    }
}

impl SessionDriver {
    /// Lost lanes that this side may replace now, with the time of the next attempt.
    fn replaceable(&self) -> impl Iterator<Item = (u16, u64)> {
        let opens = self.session.replacements.opener().is_some();
        let lanes = self.lanes.iter().enumerate().filter(move |_| opens);
        lanes.filter(|(_, lane)| lane.is_none()).filter_map(|(at, _)| {
            let attempts = self.replacing.0.get(at).copied().unwrap_or_default();
            let is_free = !attempts.is_busy && !self.lost.is_awaiting(at as u16);
            is_free.then_some((at as u16, attempts.at))
        })
    }

    /// The time until the next attempt to replace a lane.
    pub(super) fn until_replacement(&self, now: u64) -> Duration {
        let next = self.replaceable().map(|(_, at)| clock::until(at, now)).min();
        next.unwrap_or(Duration::MAX)
    }
}

impl Driver {
    /// Begins the attempts that are due.
    pub(super) fn replace_lanes(&mut self, s: &mut SessionDriver, now: u64) {
        let due: Vec<u16> =
            s.replaceable().filter(|(_, at)| now >= *at).map(|(lane, _)| lane).collect();
        let session = s.session.clone();
        let Some(opener) = session.replacements.opener() else { return };
        for lane in due {
            let attempts = s.replacing.of(lane);
            // After so many attempts the lane stays lost: no number may be used twice.
            let Some(generation) = attempts.generation.checked_add(1) else { continue };
            attempts.generation = generation;
            match opener.begin(&session, LaneAttempt { lane, generation }) {
                Ok(()) => attempts.is_busy = true,
                Err(why) => {
                    tracing::debug!(why, lane, peer = %session.addr, "cannot replace a lane");
                    attempts.back_off(now);
                }
            }
        }
    }

    /// A lane is lost. Sets the time at which its replacement is due.
    pub(super) fn plan_replacement(&mut self, s: &mut SessionDriver, lane: &Lane) {
        if s.session.replacements.opener().is_none() {
            return;
        }
        let now = clock::now();
        let attempts = s.replacing.of(lane.index);
        if lane.has_carried() || now >= clock::after(lane.since, PAUSES.1) {
            attempts.pause = Duration::ZERO;
        }
        attempts.back_off(now);
    }

    /// The peer has answered about a lost lane, which may be replaced now.
    pub(super) fn replace_soon(&mut self, s: &mut SessionDriver) {
        let now = clock::now();
        let due = clock::after(now, s.until_replacement(now));
        self.set_timer(s, due);
    }

    /// An attempt has ended. If the session is over, dropping the connection closes it.
    pub(super) fn lane_opened(
        &mut self,
        session: &Arc<Session>,
        attempt: LaneAttempt,
        opened: Result<Box<dyn Wire>, String>,
    ) {
        self.with(session, |driver, s| {
            if !s.session.is_alive() {
                return;
            }
            let LaneAttempt { lane, generation } = attempt;
            s.replacing.of(lane).is_busy = false;
            let installed = opened.and_then(|wire| driver.install_lane(s, attempt, wire));
            if let Err(why) = installed {
                tracing::debug!(why, lane, generation, peer = %s.session.addr, "lane not replaced");
                s.replacing.of(lane).back_off(clock::now());
            }
            driver.replace_soon(s);
        });
    }

    /// The initiator has opened a connection in place of a lost lane, and has proven that it
    /// belongs to the session. A connection that may not join is closed, and the initiator tries
    /// again.
    pub(super) fn join_lane(
        &mut self,
        session: &Arc<Session>,
        attempt: LaneAttempt,
        join: JoinLane,
    ) {
        self.with(session, |driver, s| {
            let at = usize::from(attempt.lane);
            let generation = s.lanes.get(at).and_then(Option::as_ref).map(|lane| lane.generation);
            if !s.session.is_alive() || at >= s.lanes.len() {
                return;
            }
            // The initiator never had this lane, or has given it up. It asks for no lane that it
            // still has.
            if generation.is_some_and(|generation| generation < attempt.generation) {
                driver.lane_ended(s, at, LaneEnd::Closed);
                return;
            }
            if generation.is_some() || !s.lost.may_join(attempt.lane, attempt.generation) {
                return;
            }
            let joined = join().map_err(|error| error.to_string());
            if let Err(why) = joined.and_then(|wire| driver.install_lane(s, attempt, wire)) {
                let (lane, peer) = (attempt.lane, s.session.addr);
                tracing::debug!(why, lane, %peer, "lane not joined");
            }
        });
    }

    /// Installs a connection in place of a lost lane.
    fn install_lane(
        &mut self,
        s: &mut SessionDriver,
        attempt: LaneAttempt,
        wire: Box<dyn Wire>,
    ) -> Result<(), String> {
        let LaneAttempt { lane: index, generation } = attempt;
        let at = usize::from(index);
        if s.lanes.get(at).is_none_or(Option::is_some) || !s.lost.may_join(index, generation) {
            return Err(String::from("the peer has given the connection up"));
        }
        let now = clock::now();
        let role = if index == 0 { Role::Latency } else { Role::Bulk };
        let mut lane = Lane { generation, ..Lane::new(wire, index, role, now) };
        if let Some(frames) = self.endpoint.config.max_inflight_ops {
            lane.limit_frames(frames);
        }
        if let Some(fd) = lane.wire.socket() {
            let data = EventData::new_u64((s.index as u64) << 16 | u64::from(index));
            // SAFETY: the wire owns the descriptor, and `lane` owns the wire and outlives this
            // borrow.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let added = epoll::add(self.shard.epoll(), fd, data, EventFlags::IN);
            added.map_err(|error| format!("cannot add the connection to epoll: {error}"))?;
        }
        // A ring is armed when a thread next blocks; epoll watches a socket from now on.
        self.unarmed |= lane.wire.is_memory();
        s.lanes[at] = Some(Box::new(lane));
        s.lost.replaced(index);
        s.session.stats.lanes_reopened.fetch_add(1, Ordering::Relaxed);
        s.liveness.beat_at_once(now);
        self.set_timer(s, now);
        s.dirty = true;
        tracing::debug!(lane = index, generation, peer = %s.session.addr, "lane replaced");
        Ok(())
    }
}
