//! The first failed command, as the proxy's owner sees it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::proxy_memory::ProxyMemory;
use peerway_core::abi::{FaultCode, RawFault};

/// A command that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Fault {
    /// Why it failed.
    pub code: FaultCode,
    /// The number of the peer it was for.
    pub peer: u16,
    /// The address of that peer. `None` if the number names no peer, or if the fault concerns none.
    pub address: Option<SocketAddr>,
    /// The ring it came from.
    pub ring: u32,
    /// Its operation, as the number in the command.
    pub op: u8,
    /// Its position in the ring. For commands that were submitted together, the position of the
    /// first.
    pub position: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, peer, address, ring, op, position } = self;
        write!(f, "command {position} of ring {ring} (operation {op}, peer {peer}")?;
        if let Some(address) = address {
            write!(f, " at {address}")?;
        }
        write!(f, "): {code}")
    }
}

/// The faults of a proxy. The first is kept and shown to kernels. All are counted.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    first: Mutex<Option<Fault>>,
    count: AtomicU64,
}

impl Faults {
    pub(crate) fn raise(&self, memory: &ProxyMemory, fault: Fault) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let mut first = self.first.lock().unwrap();
        if first.is_some() {
            return;
        }
        *first = Some(fault);
        tracing::warn!(
            %fault,
            "a proxy command failed; later faults are only counted until the owner takes this one"
        );
        memory.write_fault(&RawFault {
            code: fault.code as u32,
            peer: fault.peer.into(),
            ring: fault.ring,
            op: fault.op.into(),
            position: fault.position,
            count,
        });
    }

    /// Takes the first fault, so that the next one can be recorded.
    pub(crate) fn take(&self, memory: &ProxyMemory) -> Option<Fault> {
        let mut first = self.first.lock().unwrap();
        let fault = first.take();
        if fault.is_some() {
            memory.write_fault(&RawFault::default());
        }
        fault
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
