//! The agreement on queue pairs: which ones to open, the local ends and the peer's ends.
//!
//! The opener plans lanes, creates its ends and offers them. The acceptor creates its ends and
//! connects them at once. The opener connects its ends when it gets the answer. Both sides follow
//! the same steps when a session opens and when a lost queue pair is replaced. Everything from a
//! peer is checked: port and lane numbers are valid only if this side has them.
//!
//! Creating, connecting and destroying queue pairs may block: a port that does not answer takes the
//! kernel a second. So a driver and the acceptor do it in other threads (see [`in_thread`]).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use peerway_core::wire::{QueueEnd, QueueOffer, RdmaPort};

use super::device::{CompletionQueue, DeviceQueue};
use super::pairing;
use crate::clock;
use crate::threads::{self, Cpus};
use crate::worker::REAPER;

/// The most queue pairs that a peer may request at a time.
const MAX_QUEUES: usize = 64;

/// What a session knows about its queue pairs.
#[derive(Debug)]
pub(crate) struct QueueReach {
    /// The peer's ports.
    pub(crate) ports: Vec<RdmaPort>,
    /// The lanes that are queue pairs. Empty at the acceptor, because it opens none.
    pub(crate) plans: Vec<Plan>,
    /// How many lanes are queue pairs when none is lost.
    pub(crate) lanes: usize,
    /// Only queue pairs may carry bytes.
    pub(crate) pinned: bool,
}

/// A lane that is a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Plan {
    pub(crate) lane: u16,
    /// The local port.
    pub(crate) from: usize,
    /// The peer's port.
    pub(crate) to: usize,
    pub(crate) latency: bool,
}

/// A queue and the number of its lane.
pub(crate) type LaneQueue = (u16, Box<dyn DeviceQueue>);

/// Queue pairs that no lane uses yet. Whichever thread drops them, another one destroys them,
/// because that may block.
#[derive(Default)]
pub(crate) struct NewQueues(Vec<LaneQueue>);

impl NewQueues {
    pub(crate) fn new(queues: Vec<LaneQueue>) -> Self {
        Self(queues)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers of the lanes.
    pub(crate) fn lanes(&self) -> Vec<u16> {
        self.0.iter().map(|(lane, _)| *lane).collect()
    }

    /// Takes the queue pairs out.
    pub(crate) fn take(mut self) -> Vec<LaneQueue> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for NewQueues {
    fn drop(&mut self) {
        let queues = std::mem::take(&mut self.0);
        if !queues.is_empty() {
            REAPER.run(move || drop(queues));
        }
    }
}

/// The number of threads in this process that open queue pairs.
static OPENING: AtomicUsize = AtomicUsize::new(0);
/// The most such threads. A session has one at most, and one address has fewer sessions and
/// handshakes than this by default. So no peer keeps the others out.
const MOST_OPENING: usize = 256;

/// Permission to run one of these threads.
struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        let before = OPENING.fetch_add(1, Ordering::Relaxed);
        let turn = Self;
        (before < MOST_OPENING).then_some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        OPENING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work`, which creates or connects queue pairs, in a thread of its own. So a peer whose
/// ports do not answer delays no other peer. The text says why there is no thread.
pub(crate) fn in_thread(cpus: &Cpus, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let Some(turn) = Turn::take() else {
        return Err(format!("{MOST_OPENING} threads already open queue pairs"));
    };
    let started = threads::spawn("peerway-queues", cpus, move || {
        work();
        drop(turn);
    });
    started.map(drop).map_err(|error| format!("cannot start a thread for queue pairs: {error}"))
}

/// Plans the lanes between two endpoints: one for small transfers, and `each` lanes for large
/// transfers on every pair of ports.
pub(crate) fn plan(ours: &[RdmaPort], theirs: &[RdmaPort], each: u16) -> Vec<Plan> {
    let pairs = pairing::pair(ours, theirs);
    let Some(&(from, to)) = pairs.first() else { return Vec::new() };
    let mut plans = vec![Plan { lane: 1, from, to, latency: true }];
    let rounds = (0..each).flat_map(|_| pairs.iter());
    for (lane, &(from, to)) in (2..MAX_QUEUES as u16).zip(rounds) {
        plans.push(Plan { lane, from, to, latency: false });
    }
    plans
}

/// A lane, and the peer's end of its queue pair or the reason why there is none.
pub(crate) type Answer = (u16, Result<QueueEnd, String>);

type Offered = (Vec<LaneQueue>, Vec<QueueOffer>);

/// Creates the local ends. If none can be created, it returns the first reason.
pub(crate) fn offer(ports: &[Arc<dyn CompletionQueue>], plans: &[Plan]) -> Result<Offered, String> {
    let (mut queues, mut offers, mut failed) = (Vec::new(), Vec::new(), None);
    for &Plan { lane, from, to, latency } in plans {
        let made = ports.get(from).ok_or_else(|| "the local RDMA port does not exist".to_owned());
        let made = made.and_then(|port| port.clone().open(latency));
        match made {
            Ok(queue) => {
                offers.push(QueueOffer { lane, to_port: to as u8, latency, end: queue.end() });
                queues.push((lane, queue));
            }
            Err(why) => {
                failed.get_or_insert(why);
            }
        }
    }
    match failed {
        Some(why) if queues.is_empty() => Err(why),
        _ => Ok((queues, offers)),
    }
}

/// Creates and connects the ends for a peer's offers.
pub(crate) fn answer(
    ports: &[Arc<dyn CompletionQueue>],
    theirs: &[RdmaPort],
    offers: &[QueueOffer],
) -> (Vec<LaneQueue>, Vec<Answer>) {
    let (mut queues, mut answers): (Vec<LaneQueue>, Vec<Answer>) = Default::default();
    let mut failed: Vec<(u8, String)> = Vec::new();
    for offer in offers.iter().take(MAX_QUEUES) {
        let taken = queues.iter().any(|(lane, _)| *lane == offer.lane);
        let fits = !taken && (1..MAX_QUEUES as u16).contains(&offer.lane);
        let port = ports.get(usize::from(offer.to_port)).filter(|_| fits);
        let their = theirs.get(usize::from(offer.end.port));
        let (Some(port), Some(their)) = (port, their) else {
            answers.push((offer.lane, Err("no such port or lane".to_owned())));
            continue;
        };
        // An address that does not answer takes the kernel a second, so one attempt per port is
        // enough.
        if let Some((_, why)) = failed.iter().find(|(to, _)| *to == offer.to_port) {
            answers.push((offer.lane, Err(why.clone())));
            continue;
        }
        // A correct peer asks for one latency queue, which takes the most memory.
        let latency = offer.latency && queues.iter().all(|(_, queue)| !queue.is_for_latency());
        let made = port.clone().open(latency).and_then(|mut queue| {
            queue.connect(offer.end, their).map_err(|error| error.to_string())?;
            Ok(queue)
        });
        match made {
            Ok(queue) => {
                answers.push((offer.lane, Ok(queue.end())));
                queues.push((offer.lane, queue));
            }
            Err(why) => {
                failed.push((offer.to_port, why.clone()));
                answers.push((offer.lane, Err(why)));
            }
        }
    }
    (queues, answers)
}

/// Connects the local ends to the answered ones, until `deadline`. One connect may take the kernel
/// a second and cannot be interrupted.
pub(crate) fn connect(
    peer: SocketAddr,
    ours: Vec<LaneQueue>,
    answers: &[Answer],
    theirs: &[RdmaPort],
    deadline: u64,
) -> Vec<LaneQueue> {
    let (mut connected, mut failed) = (Vec::new(), Vec::new());
    for (lane, mut queue) in ours {
        if clock::now() >= deadline {
            break;
        }
        // One attempt per device is enough, as in `answer`.
        if failed.contains(&queue.device()) {
            continue;
        }
        let answer = answers.iter().find(|(of, _)| *of == lane).map(|(_, answer)| answer);
        let done = match answer {
            Some(Ok(end)) => match theirs.get(usize::from(end.port)) {
                // A late answer to an earlier offer belongs to an end that no longer exists.
                Some(_) if end.to != queue.end().number => {
                    Err("the peer answered an earlier offer".to_owned())
                }
                Some(their) => queue.connect(*end, their).map_err(|error| error.to_string()),
                None => Err("the peer's answer names a port that it does not have".to_owned()),
            },
            Some(Err(why)) => Err(why.clone()),
            None => Err("the peer's answer lacks this lane".to_owned()),
        };
        match done {
            Ok(()) => connected.push((lane, queue)),
            Err(why) => {
                tracing::warn!(%peer, lane, why, "cannot connect a queue pair");
                if matches!(answer, Some(Ok(_))) {
                    failed.push(queue.device());
                }
            }
        }
    }
    connected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_go_round_the_pairs_of_ports() {
        let port = |last: u8| {
            let mut gid = [0; 16];
            gid[15] = last;
            RdmaPort { gid, lid: 0, mtu: 5, ethernet: true, datagrams: false, windows: false }
        };
        let (ours, theirs) = ([port(1), port(0x81)], [port(2), port(0x82)]);
        let plans = plan(&ours, &theirs, 2);
        let shape: Vec<_> = plans.iter().map(|p| (p.lane, p.from, p.to, p.latency)).collect();
        let expected = [
            (1, 0, 0, true),
            (2, 0, 0, false),
            (3, 1, 1, false),
            (4, 0, 0, false),
            (5, 1, 1, false),
        ];
        assert_eq!(shape, expected);
        assert!(plan(&ours, &[], 2).is_empty());
        assert_eq!(plan(&ours, &theirs, 16).len(), 33);
    }
}
