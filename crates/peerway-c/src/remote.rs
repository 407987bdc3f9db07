//! Memory of peers.

use peerway::{RemoteRegion, RemoteSlice};

use crate::arguments::{Fill, Versioned};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::peer::peerway_path;
use crate::status::{Answer, Failure, peerway_status};

/// Memory that a peer advertised.
pub struct peerway_remote {
    _private: (),
}

handle!(peerway_remote, RemoteRegion, "a remote region", 4);

/// Facts about a remote region.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_remote_facts {
    /// sizeof(struct peerway_remote_facts).
    pub size: usize,
    /// The length in bytes.
    pub len: u64,
    /// The granted access: a peerway_access.
    pub access: u32,
    /// Whether the owner has revoked it.
    pub revoked: u32,
    /// Whether this process can access the memory directly, without lanes.
    pub is_direct: u32,
    /// The path of direct access: a peerway_path. 0 without direct access.
    pub path: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_remote_facts {
    const FIRST: usize = 32;
    const NAME: &'static str = "struct peerway_remote_facts";
}

/// Fills in the facts about a remote region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_remote_describe(
    remote: *const peerway_remote,
    facts: *mut peerway_remote_facts,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(facts) }?;
        let remote = get(remote)?;
        let direct = remote.direct_path();
        fill.set(peerway_remote_facts {
            size: 0,
            len: remote.len(),
            access: remote.access().bits().into(),
            revoked: remote.is_revoked().into(),
            is_direct: direct.is_some().into(),
            path: direct.map_or(0, |kind| peerway_path::from(kind) as u32),
        });
        Ok(())
    })
}

/// Frees a remote region. Transfers that use it continue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_remote_free(remote: *mut peerway_remote) -> peerway_status {
    call(|| handles::free(remote).map(drop))
}

/// A part of a peer's memory.
pub(crate) fn part(remote: *const peerway_remote, offset: u64, len: u64) -> Answer<RemoteSlice> {
    let remote = get(remote)?;
    let all = remote.len();
    match offset.checked_add(len).filter(|end| *end <= all) {
        Some(end) => Ok(remote.slice(offset..end)),
        None => {
            let sentence = format!("range {offset}+{len} leaves the peer's region of {all} bytes");
            Err(Failure::new(peerway_status::Outside, sentence))
        }
    }
}
