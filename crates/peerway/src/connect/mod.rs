//! How sessions come about: the two sides of the handshake, the choice of the path, and imports.

pub(crate) mod acceptor;
pub(crate) mod choose;
mod crowd;
pub(crate) mod hello;
pub(crate) mod import;
pub(crate) mod opener;
mod secure;
