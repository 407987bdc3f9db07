//! The NIXL backend: `peerway nixl-install`, and what `peerway doctor` says of it.

mod find;
mod install;

pub(crate) use find::{Found, State, look};
pub(crate) use install::{InstallArgs, run};
