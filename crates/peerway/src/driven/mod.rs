//! The GPU-driven engine: kernels write commands into rings, and host threads execute them.
//!
//! A [`Proxy`] belongs to an endpoint and, usually, to a GPU. It has rings that kernels push
//! commands into (`include/peerway_device.cuh`) and threads that drain the rings. It has *windows*,
//! which are registered memory that commands name by offset, and *counters*, which peers raise and
//! kernels wait for. Two proxies exchange their [`Proxy::peer_info`], and each gives the other a
//! peer number.
//!
//! - `ring`: the command ring.
//! - `proxy_memory`: the memory of rings and answers, in the layout of `peerway_core::abi`.
//! - `counters`: the arrival counters.
//! - `space`: windows, and the lookup from an offset to a window.
//! - `peer_info`, `target`: the bytes that peers exchange, and a peer as commands name it.
//! - `worker`, `outgoing`, `request`: the proxy threads, the commands for one peer, and submitted
//!   work.
//! - `copiers`: the GPU copiers of a worker.
//! - `forward`: the rules that copy arrived bytes to further places.
//! - `host_producer`: a CPU thread that pushes commands in place of a kernel.
//! - `fault`: the first failed command of a proxy, and the count of failed commands.
//! - `proxy`: the public handle and its builder.

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

/// Kernels that measure and test the engine: PTX of `kernels/driven.cu`.
#[doc(hidden)]
pub const KERNELS: &std::ffi::CStr = {
    const BYTES: &str = concat!(include_str!("../../kernels/driven.ptx"), "\0");
    match std::ffi::CStr::from_bytes_with_nul(BYTES.as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("driven.ptx has a NUL byte"),
    }
};
