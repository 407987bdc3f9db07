//! The detection time of a session: how long its peer may be silent, and how often both sides send
//! heartbeats.

use std::time::Duration;

/// A peer with a longer detection time than ours may raise ours by this factor. So a stranger cannot
/// keep a dead session for long.
const MOST_TIMES_OURS: u32 = 4;
/// A peer cannot raise our detection time above this.
const MOST: Duration = Duration::from_secs(60);
/// The shortest detection time of a peer that counts, which is the least value of PEERWAY_DETECT. A
/// stranger with a shorter one could make this side send heartbeats all the time.
const LEAST: Duration = Duration::from_millis(50);
/// Heartbeats for each detection time. The clock value that a heartbeat echoes may be one interval
/// old, and stays valid for another. With eight, half of a lease remains for pauses.
const BEATS: u32 = 8;
/// The longest interval of heartbeats. A peer of an earlier version may have agreed on less than
/// this side knows.
const MAX_BEAT: Duration = Duration::from_secs(10);

/// What one side of a session uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Detection {
    /// The silence after which the peer counts as dead.
    pub(super) detect: Duration,
    /// The interval of heartbeats.
    pub(super) beat: Duration,
}

/// The detection time of this side, as a hello or a welcome tells it.
pub(super) fn to_millis(detect: Duration) -> u32 {
    u32::try_from(detect.as_millis()).unwrap_or(u32::MAX)
}

impl Detection {
    /// Both sides use the longer detection time, as far as they allow it. Heartbeats are frequent
    /// enough for the side that allows less.
    pub(super) fn agree(ours: Duration, theirs_ms: u32) -> Self {
        let theirs = Duration::from_millis(theirs_ms.into()).max(LEAST.min(ours));
        let detect = allowed(ours, theirs);
        let beat = (detect.min(allowed(theirs, ours)) / BEATS).min(MAX_BEAT);
        Self { detect, beat }
    }
}

/// The detection time of an endpoint with the setting `own` for a peer with the setting `other`.
fn allowed(own: Duration, other: Duration) -> Duration {
    own.max(other.min(own.saturating_mul(MOST_TIMES_OURS)).min(MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_peer_raises_our_time_at_most_fourfold() {
        assert_eq!(Detection::agree(ms(2000), 5000).detect, ms(5000));
        assert_eq!(Detection::agree(ms(2000), 60_000).detect, ms(8000));
        assert_eq!(Detection::agree(ms(2000), u32::MAX).detect, ms(8000));
        assert_eq!(Detection::agree(ms(2000), 0).detect, ms(2000));
        assert_eq!(Detection::agree(ms(40_000), u32::MAX).detect, ms(60_000));
        assert_eq!(Detection::agree(ms(100_000), u32::MAX).detect, ms(100_000));
    }

    #[test]
    fn a_peer_cannot_ask_for_endless_heartbeats() {
        assert_eq!(Detection::agree(ms(2000), 0).beat, ms(200) / BEATS);
        assert_eq!(Detection::agree(ms(2000), 1), Detection::agree(ms(2000), 50));
        assert!(Detection::agree(Duration::MAX, u32::MAX).beat <= MAX_BEAT);
    }

    #[test]
    fn heartbeats_are_frequent_enough_for_both_sides() {
        for ours in [50, 100, 2000, 60_000, 3_600_000] {
            for theirs in [50, 100, 2000, 60_000, 3_600_000] {
                let here = Detection::agree(ms(ours), theirs as u32);
                let there = Detection::agree(ms(theirs), ours as u32);
                assert_eq!(here.beat, there.beat, "{ours} and {theirs}");
                assert!(here.beat * BEATS <= here.detect, "{ours} and {theirs}");
                assert!(here.beat > Duration::ZERO);
            }
        }
    }
}
