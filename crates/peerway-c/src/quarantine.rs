//! Memory that was released while a peer may still access it.

use crate::arguments::{Fill, Versioned};
use crate::entry::call;
use crate::status::peerway_status;

/// Memory of this process that was released while a peer may still access it. It stays allocated,
/// or its release function is not called, until the peer stops using it, closes its link or dies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_quarantine_stats {
    /// sizeof(struct peerway_quarantine_stats).
    pub size: usize,
    /// Regions in quarantine now.
    pub regions: u64,
    /// Bytes of those regions.
    pub bytes: u64,
    /// Entries since the process started, including those that have been released.
    pub entries_ever: u64,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_quarantine_stats {
    const FIRST: usize = 32;
    const NAME: &'static str = "struct peerway_quarantine_stats";
}

/// Fills in what this process has in quarantine, for all its current and former endpoints.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_quarantine(
    stats: *mut peerway_quarantine_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(stats) }?;
        let now = peerway::quarantine();
        fill.set(peerway_quarantine_stats {
            size: 0,
            regions: now.regions,
            bytes: now.bytes,
            entries_ever: now.entries_ever,
        });
        Ok(())
    })
}
