//! The liveness of a session: when to send heartbeats, whether bytes may still be applied, and when
//! a lane or a peer counts as silent. Times are a monotonic clock in nanoseconds.

use std::time::Duration;

use crate::lease::Lease;

/// See the module.
#[derive(Debug)]
pub struct Liveness {
    /// The detection time of both sides.
    detect: Duration,
    /// The interval of heartbeats.
    interval: Duration,
    lease: Lease,
    /// The newest clock value of the peer.
    peer_clock: u64,
    next_beat: u64,
}

/// A heartbeat.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Beat {
    /// The sender's clock.
    pub clock: u64,
    /// The newest clock value of the receiver that the sender knows.
    pub echo: u64,
}

impl Liveness {
    /// A session that begins now, with the first heartbeat due at once.
    pub fn new(detect: Duration, interval: Duration, now: u64) -> Self {
        Self { detect, interval, lease: Lease::new(detect, now), peer_clock: 0, next_beat: now }
    }

    /// The detection time of both sides.
    pub fn detect(&self) -> Duration {
        self.detect
    }

    /// The heartbeat to send now on every lane, if one is due.
    pub fn take_beat(&mut self, now: u64) -> Option<Beat> {
        if now < self.next_beat {
            return None;
        }
        self.next_beat = after(now, self.interval);
        Some(Beat { clock: now, echo: self.peer_clock })
    }

    /// Makes a heartbeat due now, because a lane is new.
    pub fn beat_at_once(&mut self, now: u64) {
        self.next_beat = now;
    }

    /// A heartbeat arrived.
    pub fn heard(&mut self, beat: Beat, now: u64) {
        self.lease.beat(beat.echo, now);
        self.peer_clock = self.peer_clock.max(beat.clock);
    }

    /// Whether this side may still apply bytes.
    pub fn may_apply(&self, now: u64) -> bool {
        self.lease.is_valid(now)
    }

    /// Whether something that was last heard or seen at `since` has been silent for too long.
    pub fn is_overdue(&self, since: u64, now: u64) -> bool {
        now > self.overdue_at(since)
    }

    /// The last moment at which something that was last heard at `since` is not overdue.
    fn overdue_at(&self, since: u64) -> u64 {
        after(since, self.detect)
    }

    /// How long a peer that gave no sign may still apply bytes: its lease, by its own clock.
    pub fn lease_of_peer(&self) -> Duration {
        self.detect + self.detect / 4
    }

    /// When there is next something to do. `heard` has the time at which each lane was last heard.
    /// If `any_lane` counts, the peer is silent only when all lanes are.
    pub fn due(&self, heard: impl Iterator<Item = u64>, any_lane: bool, now: u64) -> u64 {
        let ends = heard.map(|since| self.overdue_at(since));
        let silent = if any_lane { ends.max().filter(|end| *end > now) } else { ends.min() };
        self.next_beat.min(silent.map_or(u64::MAX, |end| end.saturating_add(1)))
    }
}

fn after(time: u64, span: Duration) -> u64 {
    time.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn beats_are_due_once_in_an_interval() {
        let mut live = Liveness::new(Duration::from_secs(8), Duration::from_secs(1), 5 * S);
        assert_eq!(live.take_beat(5 * S), Some(Beat { clock: 5 * S, echo: 0 }));
        assert_eq!(live.take_beat(6 * S - 1), None);
        live.heard(Beat { clock: 99, echo: 5 * S }, 6 * S);
        live.heard(Beat { clock: 98, echo: 5 * S }, 6 * S);
        assert_eq!(live.take_beat(6 * S), Some(Beat { clock: 6 * S, echo: 99 }));
        live.beat_at_once(6 * S);
        assert!(live.take_beat(6 * S).is_some());
    }

    #[test]
    fn bytes_are_applied_only_while_the_peer_echoes_our_clock() {
        let mut live = Liveness::new(Duration::from_secs(8), Duration::from_secs(1), 0);
        assert!(live.may_apply(6 * S) && !live.may_apply(6 * S + 1));
        live.heard(Beat { clock: 1, echo: 4 * S }, 7 * S);
        assert!(live.may_apply(10 * S) && !live.may_apply(10 * S + 1));
        assert!(live.lease_of_peer() > live.detect());
    }

    #[test]
    fn one_silent_lane_is_lost_and_one_silent_peer_needs_all() {
        let second = Duration::from_secs(1);
        let live = Liveness { next_beat: u64::MAX, ..Liveness::new(2 * second, second, 0) };
        assert!(!live.is_overdue(S, 3 * S) && live.is_overdue(S, 3 * S + 1));
        let heard = [S, 2 * S];
        assert_eq!(live.due(heard.into_iter(), false, 2 * S), 3 * S + 1);
        assert_eq!(live.due(heard.into_iter(), true, 2 * S), 4 * S + 1);
        assert_eq!(live.due(heard.into_iter(), true, 9 * S), u64::MAX, "it is silent already");
        assert_eq!(live.due(std::iter::empty(), false, 0), u64::MAX);
    }
}
