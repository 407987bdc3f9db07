//! The NIXL backend: `peerway nixl-install`, and the search for NIXL that `peerway doctor` uses.

mod find;
mod install;

pub(crate) use find::{Found, State, look};
pub(crate) use install::{InstallArgs, run};
