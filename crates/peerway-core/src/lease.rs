//! Leases: a receiver stops applying bytes before its peer may have given up on it.
//!
//! Each side sends its own clock in its heartbeats and echoes the last clock that it received. A
//! receiver's lease starts at the newest value of its **own** clock that the peer echoed. Bytes and
//! heartbeats that waited in a socket while the process was stopped carry an old echo. They cannot
//! renew the lease.

use std::time::Duration;

/// One side's view of a peer's liveness. Times are a monotonic clock in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    length: u64,
    echoed: u64,
    heard: u64,
}

impl Lease {
    /// Creates a lease of three quarters of `detect`. The sender gives up after `detect`. The
    /// receiver has stopped by then, even if the two clocks run at slightly different rates.
    pub fn new(detect: Duration, now: u64) -> Self {
        let length = detect.as_nanos().min(u128::from(u64::MAX / 4)) as u64;
        Self { length: length - length / 4, echoed: now, heard: now }
    }

    /// Records a heartbeat that echoes the local clock value `echo`. Ignores an echo from the
    /// future, because no correct peer sends one.
    pub fn beat(&mut self, echo: u64, now: u64) {
        self.heard = now;
        if echo <= now && echo > self.echoed {
            self.echoed = echo;
        }
    }

    /// Records the arrival of any bytes.
    pub fn heard(&mut self, now: u64) {
        self.heard = now;
    }

    /// Whether the receiver may still apply bytes.
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
        // The process is stopped at 11 s and continues at 20 s. A heartbeat waited in the socket.
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
