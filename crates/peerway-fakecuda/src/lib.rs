//! A libcuda that needs no GPU: the driver API on memory and threads of this host.
//!
//! It is built as `libpeerway_fakecuda.so`. If `PEERWAY_CUDA_SO` names it, an unchanged engine
//! moves GPU memory in tests. The tests use one process or several, with the refusals and failures
//! that a script defines. It stands in for GPUs that CI does not have, and does not replace tests
//! on real GPUs.
//!
//! # Structure
//!
//! A device pointer lies in memory that the host cannot access (`arena.rs`). One table says what it
//! means (`space.rs`). The bytes are in memfds (`physical.rs`), which other processes can share.
//! Every stream has a thread that executes its work, in order and late (`stream.rs`, `work.rs`).
//! Handles are numbers in tables (`handle.rs`), so a wrong handle gives an error instead of a
//! crash. Every call goes through `calls.rs`, which counts it and lets the script fail it.
//!
//! # The script
//!
//! `PEERWAY_FAKE_CUDA` holds items separated by commas:
//!
//! | item | default | meaning |
//! |---|---|---|
//! | `seed=N` | 1 | seed of the random delays |
//! | `devices=N` | 1 | number of devices: `Fake GPU 0`, `Fake GPU 1`, ... |
//! | `memory=BYTES` | 4 GiB | memory of each device; allocations beyond it fail as out of memory |
//! | `latency=T` | 0us | delay before every operation of a stream |
//! | `jitter=T` | 50us | largest random delay in addition |
//! | `gbps=N` | | copies also take the time of this many GB/s |
//! | `fabric=MODE` | `refused` | handles for other hosts: `ok`, `refused` or `unsupported` |
//! | `fd=MODE` | `ok` | handles that are file descriptors, likewise |
//! | `vmm=no` | | no virtual memory management |
//! | `rdma_vmm=no` | | memory of the virtual memory management cannot be used for GPUDirect RDMA |
//! | `dmabuf=no` | | no dma-bufs |
//! | `ordered=no` | | writes of NICs must be flushed before they are visible |
//! | `ipc=no` | | no legacy IPC handles |
//! | `version=N` | 13000 | version that the driver reports |
//! | `fail=CALL@N[:CODE]` | | the N-th call of that function returns the code, or 2 |
//! | `no_init=CODE` | | `cuInit` returns the code |
//!
//! A refused kind of handle behaves as on a machine without IMEX: the attribute says that the
//! device supports it, but creating such memory is not permitted. An unsupported kind is not
//! supported by the attribute either.
//!
//! The random generator of a stream starts from the seed and from the number of streams that the
//! process created before. If a script does not parse, `cuInit` returns 999.
//!
//! # Differences from a GPU
//!
//! - The NULL stream and the two other special streams are one stream of the context, which waits
//!   for no other stream. Copies that are synchronous for the host go through it, so they wait for
//!   no other stream either.
//! - Freeing memory waits for no stream. Later work on that memory fails as on an address that was
//!   never allocated, which is more useful in a test.
//! - An address that is not mapped, or not for this device, fails the stream with 700. From then
//!   on, every call in that device's context returns 700 as long as the process lives. Calls that
//!   release something return 700 too, but take effect, so that tests can still count leaks. A copy
//!   must stay inside one `cuMemAlloc` allocation, where a GPU would let it run into the next.
//! - Memory that an exporter freed stays readable in processes that opened it, until they close it.
//!   If the allocation shared its segment, later allocations appear there.
//! - A dma-buf is the memfd. The position of the descriptor is the start of its range. It does not
//!   end where the range does.
//! - A kernel does all copies on one thread whatever its grid is, in a random order. The blocks of
//!   the resident kernel take turns on one thread.
//! - A graph is one list in capture order: branches do not run in parallel. Copies with pageable
//!   memory cannot be captured. No other call is refused because a stream is capturing.
//! - Copies can access the `cuMemAlloc` memory of every device. Kernels, and copies of mapped
//!   memory, can access only what their device was granted. There is no managed memory, no memory
//!   pool, and no context except the primary ones.
//!
//! # Safety contract
//!
//! SAFETY comments refer to this as the **pointers contract**. CUDA demands of the program that
//! every pointer to host memory is null or valid: for reads, or for writes where the call fills it,
//! and for the length that the call names. Handles and device addresses need no contract, because
//! the library looks them up and never dereferences them.
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

/// Takes a lock. A panic under a lock is a bug of this library. Ignoring the poison avoids a hang
/// that would hide it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
