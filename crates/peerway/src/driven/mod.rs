//! The GPU-driven engine: kernels write commands into rings, threads of the host carry them out.
//!
//! A [`Proxy`] belongs to an endpoint and, usually, to a GPU. It has rings that kernels push commands into
//! (`include/peerway_device.cuh`), threads that drain them, *windows* (registered memory that commands name by offset) and
//! *counters* that peers raise and kernels wait for. ProxyPeers exchange [`Proxy::peer_info`]s and are numbered.
//!
//! - `ring`: the command ring.
//! - `memory`: the memory of rings and answers, in the layout of `peerway_core::abi`.
//! - `counters`: arrivals.
//! - `space`: windows, and finding the memory that a command means.
//! - `peer info`, `target`: what peers tell each other, and a peer as commands name it.
//! - `worker`, `outgoing`, `request`: the threads; what goes to one peer; what is under way.
//! - `copiers`: what GPUs copy for a worker.
//! - `forward`: arrivals that are passed on.
//! - `producer`: a processor in a kernel's place.

mod copiers;
mod counters;
mod fault;
mod forward;
mod host_producer;
mod outgoing;
mod peer_info;
mod proxy;
mod proxy_memory;
mod request;
mod ring;
mod space;
mod target;
mod worker;

pub use peerway_core::abi::FaultCode;
pub use peerway_core::command::{Command, CommandError, Op};

pub use self::fault::Fault;
pub use self::forward::Forward;
pub use self::host_producer::{HostProducer, HostProducerError};
pub use self::proxy::{Armed, Proxy, ProxyBuilder, ProxyError, ProxyStats};
pub use self::ring::PushError;
pub use self::space::Window;

pub(crate) use self::counters::{Counters, FIRST_ID};

/// Kernels that measure and test the engine: PTX of `kernels/driven.cu`.
#[doc(hidden)]
pub const KERNELS: &std::ffi::CStr = {
    const BYTES: &str = concat!(include_str!("../../kernels/driven.ptx"), "\0");
    match std::ffi::CStr::from_bytes_with_nul(BYTES.as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("driven.ptx has a NUL byte"),
    }
};
