//! RDMA verbs over a libibverbs that is opened at run time.
//!
//! Three layers, each usable without the next:
//!
//! - [`ffi`]: structures and constants as in `<infiniband/verbs.h>`.
//! - [`Verbs`]: the functions that the library exports ([`Symbols`]), filled by `dlopen` or by hand.
//!   Calls that C has as inline functions (posting, polling, arming, memory windows) are no symbols
//!   and go through the tables of the open device; see [`ffi::context`].
//! - Owned handles, which cost nothing over the raw pointer: [`Context`], [`Pd`], [`Mr`], [`Mw`],
//!   [`CompChannel`], [`Cq`], [`Qp`], [`Ah`]. Each keeps what it was made from alive, so that teardown
//!   happens in the order that verbs demand, and gives itself back on drop, or by `close`, which says
//!   whether the device agreed.
//!
//! Verbs may be called from any thread, and so may these handles. After a fork the child must leave
//! the devices alone, because the kernel would act on the parent's objects: handles dropped in a
//! child close their file descriptors and nothing else.

mod address;
mod batch;
mod completion;
mod context;
mod device;
mod error;
mod event;
#[cfg(test)]
pub(crate) mod fake;
pub mod ffi;
mod gid;
mod memory;
mod owned;
mod queue_pair;
mod status;
mod table;
mod work;

pub use address::Ah;
pub use batch::Batch;
pub use completion::{CompChannel, Cq};
pub use context::Context;
pub use device::{Device, DeviceList};
pub use error::{PostError, VerbsError};
pub use event::{AsyncEvent, Subject};
pub use gid::{Gid, GidKind, choose_gid};
pub use memory::{Mr, Mw, Pd, next_rkey};
pub use queue_pair::{Qp, QpConfig, masks};
pub use status::WcStatus;
pub use table::{Symbols, Verbs};
