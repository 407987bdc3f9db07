//! Leases: a receiver applies nothing once its peer may have given it up.
//!
//! Each side sends its own clock in its heartbeats and echoes the last clock it heard. A receiver's
//! lease runs from the newest clock of its **own** that came back: bytes and heartbeats that waited
//! in a socket while the process was stopped cannot renew it, because what they echo is old.

use std::time::Duration;

/// One side's view of a peer's liveness. Times are a monotonic clock in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    length: u64,
    echoed: u64,
    heard: u64,
}

impl Lease {
    /// A lease of `detect` less a quarter: the sender gives up after `detect`, so the receiver has
    /// stopped by then even if the two clocks run at slightly different rates.
    pub fn new(detect: Duration, now: u64) -> Self {
        let length = detect.as_nanos().min(u128::from(u64::MAX / 4)) as u64;
        Self { length: length - length / 4, echoed: now, heard: now }
    }

    /// A heartbeat arrived that echoes our clock `echo`. An echo from the future is nonsense and
    /// ignored.
    pub fn beat(&mut self, echo: u64, now: u64) {
        self.heard = now;
        if echo <= now && echo > self.echoed {
            self.echoed = echo;
        }
    }

    /// Anything arrived.
    pub fn heard(&mut self, now: u64) {
        self.heard = now;
    }

    /// Whether bytes may still be applied.
    pub fn is_valid(&self, now: u64) -> bool {
        now.saturating_sub(self.echoed) <= self.length
    }

    /// How long the peer has been silent.
    pub fn silence(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.heard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn stale_beats_do_not_renew() {
        let mut lease = Lease::new(Duration::from_secs(2), 10 * S);
        assert!(lease.is_valid(11 * S));
        // The process was stopped at 11 s and goes on at 20 s; a beat waited in the socket.
        lease.beat(10 * S + S / 2, 20 * S);
        assert!(!lease.is_valid(20 * S));
        // A fresh round trip renews it.
        lease.beat(20 * S, 20 * S + 1);
        assert!(lease.is_valid(20 * S + 1));
    }

    #[test]
    fn a_lying_peer_cannot_extend_it() {
        let mut lease = Lease::new(Duration::from_secs(2), S);
        lease.beat(u64::MAX, 2 * S);
        assert!(!lease.is_valid(100 * S));
        assert_eq!(lease.silence(3 * S), Duration::from_secs(1));
    }
}
