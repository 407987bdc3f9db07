//! RDMA verbs, through a libibverbs that is opened at run time.
//!
//! There are three layers. Each is usable without the next:
//!
//! - [`ffi`]: structures and constants as in `<infiniband/verbs.h>`.
//! - [`Verbs`]: the functions that the library exports ([`Symbols`]), filled by `dlopen` or by
//!   hand. Posting, polling, arming and memory windows are inline functions in C and not symbols.
//!   They go through the tables of the open device; see [`ffi::context`].
//! - Owned handles, which cost nothing over the raw pointer: [`Context`], [`Pd`], [`Mr`], [`Mw`],
//!   [`CompChannel`], [`Cq`], [`Qp`], [`Ah`].
//!
//! Any thread may call verbs and use these handles. After a fork, the child must leave the devices
//! alone, because the kernel would act on the parent's objects. A handle that is dropped in a child
//! closes its file descriptors and does nothing else.
//!
//! # The handle contract
//!
//! SAFETY comments in this module refer to these rules as the *handle contract*:
//!
//! - The raw pointer of a handle comes from the library. It stays valid until the handle is closed
//!   or dropped.
//! - A handle holds every handle that it was created from. The device therefore stays open, and
//!   domains, channels and queues outlive their users.
//! - The `owned!` macro gives each object back exactly once: on drop, or by `close`, which reports
//!   whether the device agreed.
//! - The library and its drivers take their own locks, so any thread may call them.

mod address;
mod batch;
mod completion;
mod context;
mod device;
mod error;
mod event;
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
