//! A libibverbs and libefa that need no device: the fabric consists of Unix sockets of this host.
//!
//! It is built as `libpeerway_fakeverbs.so`. If `PEERWAY_IBV_SO` (and `PEERWAY_EFA_SO`) name it, an
//! unchanged engine runs its RDMA transports in tests. The tests use one process or several, with
//! the faults that a script defines. It stands in for devices that CI does not have, and does not
//! replace tests on real devices.
//!
//! # Structure
//!
//! Every open device has a thread that emulates the NIC (`nic.rs`). It blocks in epoll until a
//! packet, a posted request or a timer wakes it. Every queue pair has a socket (`wire.rs`). Memory
//! is checked and copied under the context's lock (`memory.rs`).
//!
//! # The script
//!
//! `PEERWAY_FAKE_VERBS` holds items separated by commas:
//!
//! | item | default | meaning |
//! |---|---|---|
//! | `seed=N` | 1 | seed of the random faults |
//! | `devices=N` | 2 | number of devices: `fake0`, `fake1`, ... |
//! | `efa` | | the devices are EFA devices: SRD and UD, no RC |
//! | `drop=P%` | 0% | chance that a packet is lost |
//! | `reorder=P%` | 0% | chance that a packet is delayed by `delay`, so that others overtake it |
//! | `latency=T` | 0us | travel time of every packet |
//! | `rnr=P%` | 0% | chance of a "receiver not ready" refusal although a receive is posted |
//! | `late=P%` | 0% | chance that a completion appears `delay` after its effect |
//! | `delay=T` | 1ms | the delay of `reorder` and `late` |
//! | `flush_after=N` | | a queue pair fails when it begins its N-th request |
//! | `memlock=BYTES` | | registering more than this on a device fails, as beyond `ulimit -l` |
//! | `windows=N` | 1048576 | memory windows that a process may have on a device; 0: it has none |
//! | `dmabuf=no` | | registering a dma-buf fails with EOPNOTSUPP, as before Linux 5.12 |
//! | `posted` | | writes to a dma-buf land only when a peer reads some dma-buf |
//! | `prompt` | | a post returns only when its queue pair is idle |
//! | `remove=DEV@N` | | the device disappears with its N-th request in a process |
//! | `die=N` | | the process dies at the N-th memory access by peers |
//! | `linkdown=DEV@MS..MS` | | the device loses all packets between these times after loading |
//! | `modify_qp=T@N` | | the N-th connection of a queue pair in the process takes time T |
//! | `patience=T` | 1s | how long to wait per retry for a peer that exists but is silent |
//!
//! `posted` behaves like a GPU that does not order writes. `prompt` behaves as if the posting
//! processor were the device. `die` ends the process as a kernel does: registrations go first,
//! connections later.
//!
//! The random generator of a context starts from the seed and from the number of contexts that the
//! process opened before. A process that does the same in the same order therefore meets the same
//! faults, apart from the timing of threads and other processes. `delay`, `latency` and the other
//! packet faults apply to packets that this process sends.
//!
//! `PEERWAY_FAKE_VERBS_FABRIC` names the fabric. Processes with the same fabric name reach each
//! other. By default the name is derived from the user.
//!
//! # Differences from a device
//!
//! - A thread of the peer's process receives the packets, so a stopped process does not answer,
//!   where a NIC would. The requester waits for such a peer, by the script's patience, as long as
//!   its process exists.
//! - Packets are retransmitted sooner than the time-out says. Time-outs only decide when to give
//!   up.
//! - A region must stay mapped: a device pins the pages, but a thread cannot access unmapped
//!   memory.
//! - A dma-buf is a mappable file, such as a memfd. It starts at the position of the descriptor.
//! - There are no atomics, shared receive queues, SQD, type 1 windows, multicast, or events of
//!   queue pairs.
//!
//! # Safety contracts
//!
//! Verbs put these duties on the program that calls the library. SAFETY comments refer to them by
//! name:
//!
//! - **handles**: every device, context, domain, region, window, queue, channel, queue pair and
//!   address handle comes from this library and is not destroyed. Each fake structure is `repr(C)`
//!   and starts with the structure that the program sees, so the handle points to the whole.
//! - **pointers**: structures, lists and buffers that the program passes have the length that the
//!   call names. They are readable, or writable where the call fills them.
//! - **destroy**: the program never uses a handle again after it has passed it to a destroy
//!   function, which therefore may free it.

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

/// Takes a lock. A panic under a lock is a bug of this library. Ignoring the poison avoids a hang
/// that would hide it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
