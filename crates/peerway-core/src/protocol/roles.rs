//! Which lane carries what.

/// The traffic that a lane carries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// Control and liveness only. The session has better lanes for data.
    Control,
    /// Control and small transfers.
    Latency,
    /// Large transfers.
    Bulk,
}

/// The queues of requests that a lane serves.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Serves {
    /// Small transfers.
    pub latency: bool,
    /// Large transfers.
    pub bulk: bool,
}

impl Role {
    /// The queues that a lane of this role serves. When every lane of a role is gone, other lanes
    /// take over its work; `lives` says whether a role has a lane. With `devices_only`, a
    /// connection for control carries no bytes, and requests wait for new device queues.
    #[inline]
    pub fn serves(self, lives: impl Fn(Self) -> bool, devices_only: bool) -> Serves {
        match self {
            Self::Latency => Serves { latency: true, bulk: !lives(Self::Bulk) },
            Self::Bulk => Serves { latency: !lives(Self::Latency), bulk: true },
            Self::Control if devices_only => Serves::default(),
            Self::Control => {
                let latency = !lives(Self::Latency);
                Serves { latency, bulk: latency && !lives(Self::Bulk) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_is_served_by_some_lane_whatever_is_lost() {
        use Role::{Bulk, Control, Latency};
        for lost in 0..8 {
            let all = [Control, Latency, Bulk];
            let left: Vec<Role> =
                (0..3).filter(|at| lost >> at & 1 == 0).map(|at| all[at]).collect();
            let served = left.iter().map(|role| role.serves(|role| left.contains(&role), false));
            let both = served.fold(Serves::default(), |sum, one| Serves {
                latency: sum.latency | one.latency,
                bulk: sum.bulk | one.bulk,
            });
            let expected = !left.is_empty();
            assert_eq!(both, Serves { latency: expected, bulk: expected }, "{left:?}");
        }
    }

    #[test]
    fn bulk_work_stays_off_the_latency_lane_and_bytes_off_control() {
        assert!(!Role::Latency.serves(|_| true, false).bulk);
        assert!(!Role::Bulk.serves(|_| true, false).latency);
        assert_eq!(Role::Control.serves(|_| true, false), Serves::default());
        assert_eq!(Role::Control.serves(|_| false, true), Serves::default());
    }
}
