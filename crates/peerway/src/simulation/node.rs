//! A node: an endpoint without sockets and threads, whose driver runs when the schedule says so.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use peerway_core::config::Config;
use peerway_core::config::DataProtection;
use peerway_core::descriptor::Descriptor;
use peerway_core::ids::Incarnation;
use peerway_core::protocol::Role;
use peerway_core::region::{MemoryKind, Span};

use super::wire::SimulatedLane;
use crate::batch::Batch;
use crate::clock;
use crate::identity::Identity;
use crate::identity::lanes::LaneAttempt;
use crate::memory::{Backing, RegionInner};
use crate::path::{Path, PathKind};
use crate::progress::driver::{Driver, NewSession};
use crate::progress::engine::Engine;
use crate::progress::holdings::Holdings;
use crate::progress::lane::Lane;
use crate::progress::request::{NewRequest, route_of};
use crate::progress::shard::{DriverCommand, Shard};
use crate::session::lanes::{JoinLane, LaneOpener, Replacements};
use crate::session::remote::{Direct, RemoteInner, RemoteRegion};
use crate::session::{Parts, Reach, Session};
use crate::threads::Cpus;
use crate::transfer::Transfer;
use crate::transport::Wire;
use crate::transport::device::KeyTable;
use crate::transport::error::RdmaError;
use crate::{Access, Direction, Operation, Region};

/// How long a node may be silent.
pub(super) const DETECT: Duration = Duration::from_secs(2);
/// How long a fence may take.
pub(super) const FENCE: Duration = Duration::from_secs(1);

/// The name of a node that is alone, and that of the peer that its caller plays.
pub(super) const ALONE: Incarnation = Incarnation([1; 16]);
pub(super) const HOSTILE: Incarnation = Incarnation([2; 16]);

/// See the module.
pub(super) struct Node {
    pub(super) inner: Arc<Engine>,
    shard: Arc<Shard>,
    session: Arc<Session>,
    /// Attempts to replace lost lanes that the driver has begun.
    attempts: Attempts,
}

/// Keeps the attempts that a driver begins. The schedule carries them out.
#[derive(Clone, Default)]
struct Attempts(Arc<Mutex<Vec<LaneAttempt>>>);

impl LaneOpener for Attempts {
    fn begin(&self, _session: &Arc<Session>, attempt: LaneAttempt) -> Result<(), String> {
        self.0.lock().unwrap().push(attempt);
        Ok(())
    }
}

impl Node {
    /// The two ends of a session over these lanes. `frames` bounds the unacknowledged frames of a
    /// lane.
    #[cfg(test)]
    pub(super) fn pair(lanes: &[SimulatedLane], frames: u32) -> [Self; 2] {
        let names = [Incarnation([1; 16]), Incarnation([2; 16])];
        [0, 1].map(|node| Self::new(names[node], names[1 - node], node, lanes, frames, node == 0))
    }

    /// The first node alone. The caller plays the second one on the lanes. `initiator` says whether
    /// this node opened the session.
    pub(super) fn alone(lanes: &[SimulatedLane], frames: u32, initiator: bool) -> Self {
        Self::new(ALONE, HOSTILE, 0, lanes, frames, initiator)
    }

    fn new(
        name: Incarnation,
        peer: Incarnation,
        node: usize,
        lanes: &[SimulatedLane],
        frames: u32,
        initiator: bool,
    ) -> Self {
        let mut config = Config::default();
        (config.shards, config.slots, config.copy_threads) = (1, 32, 0);
        (config.detect, config.fence) = (DETECT, FENCE);
        (config.spin, config.max_inflight_ops) = (Duration::ZERO, Some(frames));
        let rdma = Err(RdmaError::NoDevice { kind: "simulated" });
        let cpus = Cpus::choose(None).unwrap();
        let inner = Engine::new(
            Identity::named(name),
            config,
            cpus,
            String::new(),
            Vec::new(),
            Vec::new(),
            rdma,
        );
        inner.make_shards().unwrap();
        let shard = inner.shards.get(0).clone();
        shard.start_without_thread(&inner, Driver::new(inner.clone(), shard.clone(), None));
        let attempts = Attempts::default();
        let opener = Replacements::Opens(Box::new(attempts.clone()));
        let parts = Parts {
            id: [7; 16],
            incarnation: peer,
            sub_session: None,
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1 + node as u16)),
            path: Path { kind: PathKind::Tcp, why: "simulated".into(), data: DataProtection::Off },
            reach: Reach::default(),
            link: None,
            rdma: None,
            replacements: if initiator { opener } else { Replacements::None },
            initiator,
            pid: None,
        };
        let session = Session::new(parts, shard.index, shard.clone());
        let lane = |(at, lane): (usize, &SimulatedLane)| {
            let role = if at == 0 { Role::Latency } else { Role::Bulk };
            Some(Lane::new(Box::new(lane.wire(node)), at as u16, role, clock::now()))
        };
        let lanes = lanes.iter().enumerate().map(lane).collect();
        let new = NewSession {
            session: session.clone(),
            lanes,
            detect: DETECT,
            beat: DETECT / 8,
            claim: None,
        };
        shard.submit(DriverCommand::Adopt(Box::new(new)));
        assert_ne!(session.index.load(Ordering::Relaxed), usize::MAX, "the driver adopted it");
        Self { inner, shard, session, attempts }
    }

    /// Takes the attempts that the driver has begun since the last call.
    #[cfg(test)]
    pub(super) fn take_attempts(&self) -> Vec<LaneAttempt> {
        std::mem::take(&mut *self.attempts.0.lock().unwrap())
    }

    /// Offers a connection in place of a lost lane. Returns whether the driver took it.
    #[cfg(test)]
    pub(super) fn join(&self, attempt: LaneAttempt, lane: &SimulatedLane) -> bool {
        let joined = Arc::new(AtomicBool::new(false));
        let (theirs, wire) = (joined.clone(), lane.wire(1));
        let join: JoinLane = Box::new(move || {
            theirs.store(true, Ordering::Relaxed);
            Ok(Box::new(wire))
        });
        let session = self.session.clone();
        self.shard.submit(DriverCommand::JoinLane { session, attempt, join });
        joined.load(Ordering::Relaxed)
    }

    /// Ends an attempt: `lane` is the connection, if there is one.
    #[cfg(test)]
    pub(super) fn end_attempt(&self, attempt: LaneAttempt, lane: Option<&SimulatedLane>) {
        let opened: Result<Box<dyn Wire>, String> = match lane {
            Some(lane) => Ok(Box::new(lane.wire(0))),
            None => Err(String::from("simulated")),
        };
        let session = self.session.clone();
        self.shard.submit(DriverCommand::LaneOpened { session, attempt, opened });
    }

    /// Lanes that replaced lost ones.
    #[cfg(test)]
    pub(super) fn lanes_reopened(&self) -> u64 {
        self.session.stats.lanes_reopened.load(Ordering::Relaxed)
    }

    /// Registers memory that the caller keeps until the node has stopped.
    pub(super) fn register(&self, bytes: &mut [u8]) -> Region {
        let memory = RegionInner::new(bytes.as_mut_ptr(), bytes.len(), Backing::Raw, None);
        Region::new(&self.inner, memory)
    }

    /// Imports a descriptor as a liar would: with these rights and this length, unasked.
    pub(super) fn import(&self, descriptor: &[u8], access: Access, len: u64) -> RemoteRegion {
        let descriptor = Descriptor::from_bytes(descriptor).unwrap();
        let inner = RemoteInner {
            session: self.session.clone(),
            grant: descriptor.grant,
            token: descriptor.token,
            descriptor: Vec::new(),
            access,
            len,
            kind: MemoryKind::Host,
            direct: Direct::None,
            base: 0,
            by_device: false,
            keys: KeyTable::none(),
            flush: false,
        };
        RemoteRegion { inner: Arc::new(inner), window: Span { offset: 0, len } }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.session.is_alive()
    }

    /// Closes the session.
    pub(super) fn disconnect(&self) {
        self.session.remove();
    }

    /// Posts a batch in pieces of this length.
    pub(super) fn post(
        &self,
        batch: Batch,
        piece: u64,
        bulk: bool,
        deadline: u64,
    ) -> Option<Transfer> {
        let Batch { direction, work, signal, .. } = batch;
        let (inner, session) = (&self.inner, &self.session);
        let slot = inner.slots.take(work.shape.total(), PathKind::Tcp, clock::now())?;
        let route = route_of(direction, false);
        self.shard.start_request(NewRequest {
            route,
            piece,
            bulk,
            ..NewRequest::of_signal(slot, session, Some(&work), &signal, deadline)
        });
        let operation = match direction {
            Direction::Read => Operation::Read,
            Direction::Write => Operation::Write,
        };
        Some(Transfer::running(inner, session, slot, operation, None, false))
    }

    /// The driver takes one turn.
    pub(super) fn poll(&self) {
        self.shard.poller.poll_once(clock::now());
    }

    /// What the driver holds for its peer.
    pub(super) fn holdings(&self) -> Holdings {
        self.shard.holdings()
    }

    /// Ends everything.
    pub(super) fn stop(&self) {
        self.shard.stop();
    }
}

/// The rights that a transfer of this direction needs.
#[cfg(test)]
pub(super) fn needed(direction: Direction) -> Access {
    match direction {
        Direction::Read => Access::READ,
        Direction::Write => Access::WRITE,
    }
}
