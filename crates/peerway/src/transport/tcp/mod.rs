//! TCP connections as wires.
//!
//! With `PEERWAY_DATA=off` a wire is the [`plain`] socket: bytes go from memory to the kernel and
//! back without a copy in this process. Otherwise it is a [`sealed`] one: bytes travel in the
//! records of `peerway_core::record`, which [`guard`] seals and opens. Frames know nothing of
//! records.

mod guard;
mod plain;
mod sealed;

use std::io;
use std::net::TcpStream;

use peerway_core::config::DataProtection;

use super::Wire;
use guard::Guard;
use plain::TcpWire;
use sealed::SealedWire;

/// The secrets of one lane, one for each direction. Only the two ends of the session's TLS
/// connection can compute them.
pub(crate) struct LaneSecrets {
    pub(crate) send: [u8; 32],
    pub(crate) receive: [u8; 32],
}

/// Takes over a connected socket as a wire.
pub(crate) fn wire(
    stream: TcpStream,
    mode: DataProtection,
    secrets: &LaneSecrets,
) -> io::Result<Box<dyn Wire>> {
    let (send, receive) = match mode {
        DataProtection::Off => return Ok(Box::new(TcpWire::new(stream)?)),
        DataProtection::Integrity => {
            (Guard::integrity(&secrets.send), Guard::integrity(&secrets.receive))
        }
        // Encryption is the strictest mode, so an unknown one gets it too.
        _ => (Guard::encrypt(&secrets.send)?, Guard::encrypt(&secrets.receive)?),
    };
    Ok(Box::new(SealedWire::new(TcpWire::new(stream)?, send, receive)))
}
