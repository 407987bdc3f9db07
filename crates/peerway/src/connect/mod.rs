//! How sessions come about: the two sides of the handshake, the choice of the path, and imports.

pub(crate) mod accepting;
mod acceptor;
mod admission;
pub(crate) mod choose;
mod crowd;
mod detection;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod hello;
pub(crate) mod import;
mod lanes;
pub(crate) mod opener;
mod secure;
