//! The state that the parts of an endpoint share: its tables, its peers, its shards, and how it
//! closes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use peerway_core::config::Config;
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::metadata::{Metadata, NetworkId};

use super::copies::pool::CopyPool;
use super::copies::stores::Experience;
use super::request::NewRequest;
use super::shard::{DriverCommand, Shard};
use super::shards::Shards;
use crate::address::{self, Rail};
use crate::clock;
use crate::error::{AcceptError, ConnectError, PostError, RegisterError};
use crate::identity::Identity;
use crate::inbox::{Inbox, Notification};
use crate::limits::{MessageBudgets, Refusals};
use crate::memory::grants::Grants;
use crate::os::process;
use crate::peers::Peers;
use crate::session::Session;
use crate::slots::Slots;
use crate::threads::Cpus;
use crate::transport::device::Devices;
use crate::transport::error::RdmaError;
use crate::work::{Signal, Work};

/// The state that the parts of an endpoint share.
pub(crate) struct Engine {
    pub(crate) incarnation: Incarnation,
    pub(crate) identity: Identity,
    pub(crate) config: Config,
    /// The CPUs on which its threads run.
    pub(crate) cpus: Cpus,
    pub(crate) slots: Slots,
    pub(crate) grants: Grants,
    pub(crate) inbox: Inbox,
    pub(crate) refusals: Refusals,
    pub(crate) messages: MessageBudgets,
    pub(crate) copy_pool: CopyPool,
    pub(crate) experience: Experience,
    pub(crate) local_name: String,
    /// Local addresses that bulk lanes alternate between.
    pub(crate) rails: Vec<Rail>,
    pub(crate) addresses: Vec<SocketAddr>,
    /// The RDMA devices, or why there are none.
    pub(crate) rdma: Result<Arc<dyn Devices>, RdmaError>,
    pub(crate) shards: Shards,
    pub(crate) peers: Arc<Peers>,
    closed: AtomicBool,
    fork_generation: u32,
}

/// The endpoints of this process, so that two of them can find each other's memory.
static HERE: LazyLock<Mutex<HashMap<Incarnation, Weak<Engine>>>> = LazyLock::new(Mutex::default);

/// Finds the endpoint of this process with that identity.
pub(crate) fn find(who: &Incarnation) -> Option<Arc<Engine>> {
    HERE.lock().unwrap().get(who)?.upgrade()
}

/// Why an endpoint cannot be used.
pub(crate) enum Unusable {
    Closed,
    Forked,
}

macro_rules! unusable_as {
    ($($error:ty),*) => {$(
        impl From<Unusable> for $error {
            fn from(unusable: Unusable) -> Self {
                match unusable {
                    Unusable::Closed => Self::EndpointClosed,
                    Unusable::Forked => Self::Forked,
                }
            }
        }
    )*};
}
unusable_as!(ConnectError, AcceptError, RegisterError, PostError);

impl Engine {
    pub(crate) fn new(
        identity: Identity,
        config: Config,
        cpus: Cpus,
        local_name: String,
        rails: Vec<Rail>,
        addresses: Vec<SocketAddr>,
        rdma: Result<Arc<dyn Devices>, RdmaError>,
    ) -> Arc<Self> {
        let incarnation = identity.incarnation;
        Arc::new(Self {
            incarnation,
            identity,
            slots: Slots::new(config.slots as usize),
            grants: Grants::default(),
            inbox: Inbox::new(config.notify_bytes),
            refusals: Refusals::default(),
            messages: MessageBudgets::new(config.limits.message_bytes),
            copy_pool: CopyPool::new(usize::from(config.copy_threads), cpus.clone()),
            experience: Experience::default(),
            local_name,
            rails,
            addresses,
            rdma,
            shards: Shards::new(usize::from(config.shards)),
            peers: Peers::new(incarnation),
            closed: AtomicBool::new(false),
            fork_generation: process::fork_generation(),
            config,
            cpus,
        })
    }

    /// Lets other endpoints of this process find this one.
    pub(crate) fn announce(self: &Arc<Self>) {
        HERE.lock().unwrap().insert(self.incarnation, Arc::downgrade(self));
    }

    pub(crate) fn metadata(&self) -> Vec<u8> {
        // An address that the user gave may lead here from anywhere, by a tunnel for example.
        let network = match self.config.advertise {
            Some(_) => NetworkId::default(),
            None => address::network_of(&self.incarnation),
        };
        let addresses = self.addresses.clone();
        Metadata { incarnation: self.incarnation, network, addresses }.to_bytes()
    }

    /// Fails if the endpoint cannot be used.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<(), Unusable> {
        if process::fork_generation() != self.fork_generation {
            return Err(Unusable::Forked);
        }
        if self.closed.load(Ordering::Relaxed) { Err(Unusable::Closed) } else { Ok(()) }
    }

    /// Makes every driver leave the gates of barred grants that it holds for slow readers.
    pub(crate) fn leave_barred_gates(&self) {
        for shard in self.shards.all() {
            shard.submit(DriverCommand::LeaveBarredGates);
        }
    }

    /// The shard whose driver has the session.
    #[inline]
    pub(crate) fn shard_of(&self, session: &Session) -> &Arc<Shard> {
        self.shards.get(session.shard)
    }

    /// Sends the signal of a transfer that was copied directly, on a lane.
    pub(crate) fn send_signal(
        &self,
        slot: SlotId,
        session: &Arc<Session>,
        work: &Work,
        signal: &Signal,
        deadline: u64,
    ) {
        let shard = self.shard_of(session);
        shard.start_request(NewRequest::of_signal(slot, session, Some(work), signal, deadline));
        shard.notify_if_blocked();
    }

    pub(crate) fn wait_notification(
        &self,
        from: Option<&Incarnation>,
        timeout: Duration,
    ) -> Option<Notification> {
        let deadline = clock::after(clock::now(), timeout);
        loop {
            if let Some(message) = self.inbox.take(from) {
                return Some(message);
            }
            if clock::now() >= deadline || self.check_open().is_err() {
                return None;
            }
            self.wait_until(
                deadline,
                || self.inbox.has_message(from),
                |left| self.inbox.sleep_unless(left, |a| a.has_message(from)),
            );
        }
    }

    /// Polls while there is progress, then blocks with `sleep`, until `over` holds or the deadline
    /// passes.
    pub(crate) fn wait_until(
        &self,
        deadline: u64,
        over: impl Fn() -> bool,
        sleep: impl Fn(Duration),
    ) {
        while !over() && self.check_open().is_ok() {
            for shard in self.shards.shared() {
                if shard.poller.poll_until(&over, clock::now(), deadline, Duration::ZERO) {
                    return;
                }
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return;
            }
            self.shards.shared().for_each(|shard| shard.poller.hand_over());
            sleep(left);
        }
    }

    pub(crate) fn shut_down(&self) {
        if process::fork_generation() != self.fork_generation {
            // The threads and the peers belong to the parent process. The child only closes its
            // descriptors.
            self.copy_pool.abandon();
            for shard in self.shards.all() {
                shard.abandon();
            }
            return;
        }
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        for session in self.peers.live_sessions() {
            session.remove();
        }
        self.end_making();
        for shard in self.shards.all() {
            shard.stop();
        }
        self.copy_pool.stop();
        self.slots.close();
        self.inbox.close();
        self.grants.bar_all();
        self.peers.close();
        HERE.lock().unwrap().remove(&self.incarnation);
    }
}
