//! A libibverbs and libefa that need no device: the fabric is this host's Unix sockets.
//!
//! Built as `libpeerway_fakeverbs.so` and named in `PEERWAY_IBV_SO` (and `PEERWAY_EFA_SO`), it lets an
//! unchanged engine run its RDMA transports in tests, in one process or several, with the faults that a
//! script asks for. It stands in for what cannot be had in CI, and takes the place of no test on
//! devices.
//!
//! # Shape
//!
//! Every open device has a thread that plays the NIC (`nic.rs`). It sleeps in epoll until a packet, a
//! posted request or a timer wakes it. Every queue pair has a socket (`wire.rs`). Memory is checked and
//! copied under the context's lock (`memory.rs`).
//!
//! # The script
//!
//! `PEERWAY_FAKE_VERBS` has items, separated by commas:
//!
//! | item | default | what |
//! |---|---|---|
//! | `seed=N` | 1 | what the dice start from |
//! | `devices=N` | 2 | `fake0`, `fake1`, ... |
//! | `efa` | | the devices are EFA: SRD and UD, no RC |
//! | `drop=P%` | 0% | a packet is lost |
//! | `reorder=P%` | 0% | a packet is held back by `delay`, and overtaken |
//! | `latency=T` | 0us | how long every packet travels |
//! | `rnr=P%` | 0% | a message that takes a receive is refused although there is one |
//! | `late=P%` | 0% | a completion appears `delay` after its effect |
//! | `delay=T` | 1ms | for `reorder` and `late` |
//! | `flush_after=N` | | a queue pair fails when it comes to its N-th request |
//! | `memlock=BYTES` | | registering more than this on a device fails, as beyond `ulimit -l` |
//! | `dmabuf=no` | | dma-bufs cannot be registered: EOPNOTSUPP, as before Linux 5.12 |
//! | `posted` | | what peers write into a dma-buf is in it once some is read, as with GPUs that do not order writes |
//! | `prompt` | | a post returns when its queue pair has nothing left to do, as where the processor that posts is the device |
//! | `remove=DEV@N` | | the device goes away with its N-th request in a process |
//! | `die=N` | | when peers touch memory for the N-th time the process dies, as kernels end one: registrations go first, connections a while later |
//! | `linkdown=DEV@MS..MS` | | its packets are lost from one time after loading to another |
//! | `patience=T` | 1s | how long a peer that is there but silent is waited for, per retry |
//!
//! The dice of a context start from the seed and from how many contexts the process opened before, so a
//! process that does the same in the same order meets the same faults; threads and other processes come
//! in between as they like. `delay`, `latency` and the rest apply to what this process sends.
//!
//! `PEERWAY_FAKE_VERBS_FABRIC` names the fabric; processes of one name reach each other. It is the
//! user's by default.
//!
//! # Where it differs from a device
//!
//! - Packets are taken by a thread of the peer's process: a stopped process answers nobody, where a NIC
//!   would. Such a peer is waited for, by the script's patience, as long as its process is there.
//! - What is sent again is sent again sooner than the time-out says; time-outs only decide when to give up.
//! - A region must stay mapped: a device keeps the pages, a thread finds none.
//! - A dma-buf is a file that can be mapped, such as a memfd. It starts at the position of the descriptor.
//! - No atomics, shared receive queues, SQD, type 1 windows, multicast, or events of queue pairs.

mod address;
mod batch;
mod context;
mod cq;
mod death;
mod device;
mod efa;
mod events;
mod lists;
mod memory;
mod nic;
mod pd;
mod post;
mod qp;
mod rc;
mod script;
mod silence;
mod srd;
mod stats;
mod ud;
mod window;
mod wire;

pub use self::address::*;
pub use self::batch::ibv_qp_to_qp_ex;
pub use self::context::*;
pub use self::cq::*;
pub use self::efa::*;
pub use self::lists::*;
pub use self::pd::*;
pub use self::qp::*;
pub use self::stats::{Stats, peerway_fakeverbs_stats};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock. A panic while it was held is a bug here, and hanging the program would hide it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
