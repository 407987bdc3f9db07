//! Time-outs for a peer that does not answer: when to retransmit, and when to give up.
//!
//! Packets are retransmitted sooner than on real devices, so that a lost packet costs only a few
//! milliseconds. A retry is what a real device counts: a time-out. A peer that exists but is slow,
//! on a busy machine, gets the script's patience for each retry. A packet that is known to be lost
//! or refused counts as soon as the time-out is over.

use std::time::{Duration, Instant};

use crate::script::Script;

/// The first and the longest wait for an answer before packets are retransmitted.
const FIRST: Duration = Duration::from_millis(4);
const MOST: Duration = Duration::from_millis(64);

/// The silence of a peer that owes an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// When the last retry was counted, or the silence began.
    since: Instant,
    pub(crate) resend: Instant,
    wait: Duration,
    retries: u8,
}

/// The action that is due now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Due {
    Nothing,
    /// Retransmit the unanswered packets.
    Again,
    /// Give the peer up.
    End,
}

impl Silence {
    /// Starts a silence. Without a time-out it lasts for ever.
    pub(crate) fn new(now: Instant, timeout: Option<Duration>, script: &Script) -> Self {
        let most = timeout.unwrap_or(FIRST).max(Duration::from_millis(1));
        let wait = FIRST.min(most) + 2 * script.latency + script.delay;
        Self { since: now, resend: now + wait, wait, retries: 0 }
    }

    /// Checks the time. `lost` says whether a packet is known to be lost, and is cleared when a
    /// retry counts it.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        lost: &mut bool,
        timeout: Option<Duration>,
        retries: u8,
        script: &Script,
    ) -> Due {
        if let Some(timeout) = timeout {
            let patience = if *lost { timeout } else { timeout.max(script.patience) };
            if now.saturating_duration_since(self.since) >= patience {
                self.since = now;
                self.retries += 1;
                *lost = false;
                if self.retries > retries {
                    return Due::End;
                }
            }
        }
        if now < self.resend {
            return Due::Nothing;
        }
        self.wait = (self.wait * 2).min(MOST.max(self.wait));
        self.resend = now + self.wait;
        Due::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many times packets are retransmitted, and how long it takes to give up.
    fn run(lost: bool, timeout: u64, retries: u8) -> (u32, Duration) {
        let script = Script::default();
        let timeout = Some(Duration::from_millis(timeout));
        let begun = Instant::now();
        let mut silence = Silence::new(begun, timeout, &script);
        let (mut now, mut again) = (begun, 0);
        loop {
            match silence.check(now, &mut lost.clone(), timeout, retries, &script) {
                Due::Nothing => {}
                Due::Again => again += 1,
                Due::End => return (again, now - begun),
            }
            now += Duration::from_millis(1);
        }
    }

    #[test]
    fn a_lost_peer_is_given_up_in_its_time_and_a_slow_one_in_the_scripts() {
        let (again, taken) = run(true, 67, 7);
        assert_eq!(taken.as_millis(), 8 * 67);
        assert!(again >= 8, "{again}");
        assert_eq!(run(false, 67, 7).1.as_secs(), 8);
        assert_eq!(run(true, 1, 0).1.as_millis(), 1);
    }
}
