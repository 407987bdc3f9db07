//! A libcuda that needs no GPU: the driver API on memory and threads of this host.
//!
//! Built as `libpeerway_fakecuda.so` and named in `PEERWAY_CUDA_SO`, it lets an unchanged engine move
//! GPU memory in tests, in one process or several, with the refusals and failures that a script asks
//! for. It stands in for what cannot be had in CI, and takes the place of no test on GPUs.
//!
//! # Shape
//!
//! A device pointer lies in memory that nobody may touch (`arena.rs`); what it means is looked up in one
//! table (`space.rs`). The bytes are in memfds (`physical.rs`), which is also how they are shared with
//! other processes. Every stream has a thread that does what was put on it, in order and late
//! (`stream.rs`, `work.rs`). Handles are numbers that are looked up (`handle.rs`), so a wrong one is an
//! error and no crash. Every call comes through `calls.rs`, which counts it and lets the script fail it.
//!
//! # The script
//!
//! `PEERWAY_FAKE_CUDA` has items, separated by commas:
//!
//! | item | default | what |
//! |---|---|---|
//! | `seed=N` | 1 | what the dice start from |
//! | `devices=N` | 1 | `Fake GPU 0`, `Fake GPU 1`, ... |
//! | `memory=BYTES` | 4 GiB | of each device; what does not fit is out of memory |
//! | `latency=T` | 0us | how long every operation of a stream waits before it is done |
//! | `jitter=T` | 50us | and up to this much longer, as the dice say |
//! | `gbps=N` | | copies take their length at this many GB/s besides |
//! | `fabric=MODE` | `refused` | handles for other hosts: `ok`, `refused` or `unsupported` |
//! | `fd=MODE` | `ok` | handles that are file descriptors, likewise |
//! | `vmm=no` | | no virtual memory management |
//! | `rdma_vmm=no` | | such memory cannot be made for GPUDirect RDMA |
//! | `dmabuf=no` | | no dma-bufs |
//! | `ordered=no` | | what NICs write must be flushed before it is seen |
//! | `ipc=no` | | no legacy IPC handles |
//! | `version=N` | 13000 | what the driver says it speaks |
//! | `fail=CALL@N[:CODE]` | | the N-th call of that function answers with the code, or 2 |
//! | `no_init=CODE` | | `cuInit` answers with the code |
//!
//! What is refused is as on a machine without IMEX: the attribute says that the device can, and making
//! such memory is not permitted. What is unsupported is not there by the attribute either.
//!
//! The dice of a stream start from the seed and from how many streams the process made before. A script
//! that does not parse makes `cuInit` answer 999.
//!
//! # Where it differs from a GPU
//!
//! - The NULL stream, and the two other special ones, are one stream of the context that waits for no
//!   other. Copies that are synchronous for the host go through it, so they wait for no other stream
//!   either.
//! - Giving memory back waits for no stream. What comes to it afterwards fails as it would at an address
//!   that was never given out, which is the more useful answer in a test.
//! - An address that is not mapped, or not for this device, fails the stream with 700, and from then on
//!   every call in that device's context answers 700 for as long as the process lives. Calls that give
//!   something back answer so too, but do it, so that leaks can still be counted. Copies are kept
//!   inside one `cuMemAlloc` allocation, where a GPU would let them run into the next.
//! - What an exporter freed stays readable in processes that opened it, until they close it; where the
//!   allocation shared its segment, later allocations appear there.
//! - A dma-buf is the memfd, and where its range starts is the position of the descriptor. It does not end
//!   where the range does.
//! - A kernel copies by itself whatever grid it is given, in an order that the dice choose. The blocks of the one that
//!   stays take turns on one thread.
//! - A graph is one list in the order of capture: branches do not run beside each other. Copies with
//!   pageable memory cannot be captured; no other call is refused because a stream is capturing.
//! - Copies reach the `cuMemAlloc` memory of every device; kernels, and copies of mapped memory, only
//!   what their device was given access to. There is no managed memory, no pool, and no context but the
//!   primary ones.
#![allow(non_snake_case)]

mod arena;
mod calls;
mod capture;
mod context;
mod copies;
mod device;
mod errors;
mod event;
mod graph;
mod handle;
mod host;
mod image;
mod ipc;
mod kernel;
mod live;
mod machine;
mod memfd;
mod module;
mod physical;
mod plain;
mod pointer;
mod resident;
mod script;
mod share;
mod space;
mod stream;
mod values;
mod vmm;
mod work;

pub use self::calls::fakecuda_calls;
pub use self::context::*;
pub use self::copies::*;
pub use self::device::*;
pub use self::errors::{cuGetErrorName, cuGetErrorString};
pub use self::event::*;
pub use self::graph::*;
pub use self::host::*;
pub use self::ipc::*;
pub use self::live::fakecuda_live;
pub use self::machine::{cuDriverGetVersion, cuInit};
pub use self::module::*;
pub use self::plain::*;
pub use self::pointer::*;
pub use self::share::*;
pub use self::stream::*;
pub use self::values::*;
pub use self::vmm::*;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock. A panic while it was held is a bug here, and hanging the program would hide it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
