//! What happens by the clock: heartbeats, silence, deadlines, fences.

use std::sync::Arc;
use std::time::Duration;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::wire::{Header, Kind};

use super::driver::{Driver, SessionDriver};
use super::ending::{Gone, LaneEnd};
use super::flight::Route;
use crate::clock;

/// Deadlines are looked at this often while transfers are under way.
pub(super) const TICK: Duration = Duration::from_millis(5);
/// Heartbeats are never rarer than this.
const MAX_BEAT: Duration = Duration::from_secs(10);
/// With no peer at all nothing is due; this only bounds how long a lost wake-up could last.
const IDLE: Duration = Duration::from_secs(60);

impl Driver {
    /// Looks at everything that depends on the clock.
    pub(super) fn tick(&mut self, now: u64) {
        for index in 0..self.sessions.len() {
            self.with_session(index, |driver, s| driver.session_tick(s, now));
        }
        // Backwards, because ending one moves the last into its place.
        for at in (0..self.active.len()).rev() {
            let Some(&slot) = self.active.get(at) else { continue };
            let Some(flight) = self.flight(slot) else { continue };
            let index = flight.session.index.load(std::sync::atomic::Ordering::Relaxed);
            if flight.unfenced {
                continue;
            }
            match flight.ending {
                Some(_) if flight.route == Route::Read && flight.parts > 0 => {
                    // What our own devices do can be stopped, and then the fence is held.
                    let until = flight.ending.map_or(now, |(_, until)| until);
                    if now >= until {
                        self.with_session(index, |driver, s| driver.sever(s, slot, now));
                    }
                }
                Some((reason, until)) if now >= until => {
                    let fence = if flight.is_bare() { Fence::Held } else { Fence::Open };
                    self.end(slot, Ended { reason, fence });
                }
                None if now >= flight.deadline => {
                    self.with_session(index, |driver, s| {
                        driver.stop(s, slot, Reason::TimedOut, now);
                    });
                }
                _ => {}
            }
        }
        if let Some(door) = &mut self.door {
            door.sweep(now);
            door.wake_listeners(&self.shard, now);
        }
        self.next_tick = clock::after(now, self.until_next(now));
    }

    fn session_tick(&mut self, s: &mut SessionDriver, now: u64) {
        if let Some(until) = s.lingering {
            if s.session.is_process_dead() {
                self.let_go(s, true);
            } else if now >= until {
                self.let_go(s, false);
            }
            return;
        }
        if now >= s.next_beat {
            // A peer may have agreed on less than we have, see `agreed_detect`. What a beat echoes may be a
            // whole interval old and is believed for another, so at an eighth half of a lease remains for
            // pauses.
            s.next_beat = clock::after(now, (s.detect / 8).min(MAX_BEAT));
            for lane in s.lanes.iter_mut().flatten() {
                // A lane that cannot send what it has needs no more to say.
                if lane.out.len() < 64 << 10 {
                    let mut beat = Header::new(Kind::Beat);
                    beat.sequence = now.into();
                    beat.transfer = s.peer_clock.into();
                    lane.push(&beat);
                }
            }
            s.dirty = true;
        }
        if self.is_orphan(s, now) {
            self.bury(s, Gone::Silent);
            return;
        }
        if s.is_local() {
            self.local_silence(s, now);
            return;
        }
        self.queues_tick(s, now);
        for at in 0..s.lanes.len() {
            let silent = s.lanes[at].as_ref().is_some_and(|lane| {
                Duration::from_nanos(now.saturating_sub(lane.heard)) > s.detect
            });
            if silent {
                self.lane_ended(s, at, LaneEnd::Silent);
            }
        }
    }

    /// Whether a strand's session has been over for as long as silence may last. What ended that one ends the strand too, in its own
    /// time and with its own proof; only a peer that keeps one up without the other comes to this.
    fn is_orphan(&self, s: &mut SessionDriver, now: u64) -> bool {
        if self.endpoint.has_session_of(s.session.incarnation, s.session.strand) {
            s.alone_since = None;
            return false;
        }
        let since = *s.alone_since.get_or_insert(now);
        Duration::from_nanos(now.saturating_sub(since)) > s.detect
    }

    /// A local peer that is silent may only be stopped: what needs its help fails, direct access
    /// goes on, and it is a peer again when it goes on.
    fn local_silence(&mut self, s: &mut SessionDriver, now: u64) {
        if s.session.is_process_dead() {
            self.bury(s, Gone::LetGo);
            return;
        }
        let heard = s.lanes.iter().flatten().map(|lane| lane.heard).max().unwrap_or(now);
        if Duration::from_nanos(now.saturating_sub(heard)) <= s.detect {
            return;
        }
        for slot in self.active.clone() {
            let Some(flight) = self.flight(slot) else { continue };
            if !Arc::ptr_eq(&flight.session, &s.session) || flight.unfenced {
                continue;
            }
            let error = Reason::Failed(TransferError::PeerSilent);
            let reason = flight.ending.map_or(error, |(reason, _)| reason);
            // A notification that its receiver never takes changes no memory.
            let held = flight.is_quiet() || flight.is_bare();
            self.stop(s, slot, reason, now);
            let fence = if held { Fence::Held } else { Fence::Open };
            if self.flight(slot).is_some_and(|f| !f.unfenced) {
                self.end(slot, Ended { reason, fence });
            }
        }
    }

    /// How long nothing is due.
    fn until_next(&self, now: u64) -> Duration {
        if self
            .active
            .iter()
            .any(|slot| self.flights[slot.index as usize].as_ref().is_some_and(|f| !f.unfenced))
        {
            return TICK;
        }
        let beats = self.sessions.iter().flatten().map(|s| match s.lingering {
            // Its process is asked about.
            Some(until) => clock::until(until, now).min(Duration::from_millis(100)),
            None => clock::until(s.next_beat, now).min(s.until_queues(now)),
        });
        let door = self.door.as_ref().and_then(|door| door.until_next(now));
        let idle = door.map_or(IDLE, |due| due.max(TICK));
        beats.min().unwrap_or(idle).clamp(TICK, idle)
    }

    /// How long the service thread may sleep.
    pub(crate) fn sleep_for(&self, now: u64) -> Duration {
        clock::until(self.next_tick, now).min(self.until_next(now))
    }
}
