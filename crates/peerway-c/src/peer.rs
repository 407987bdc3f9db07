//! Peers.

use std::ffi::{CStr, c_char, c_void};

use peerway::{PathKind, Peer, Prepared};

use crate::arguments::{self, Fill, Versioned, until};
use crate::batch::peerway_batch;
use crate::endpoint::peerway_incarnation;
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::notification::peerway_notification;
use crate::region::{self, peerway_region};
use crate::remote::{self, peerway_remote};
use crate::status::{Failure, peerway_status};
use crate::stream::peerway_prepared;
use crate::transfer::{Transfer, end, peerway_end, peerway_transfer};

/// A connected peer: one life of one remote endpoint.
pub struct peerway_peer {
    _private: (),
}

handle!(peerway_peer, Peer, "a peer", 6);

/// A way to a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_path {
    /// Both endpoints live in this process.
    SameProcess = 0,
    /// The peer's memory is mapped here.
    LocalMap = 1,
    /// The kernel copies between the two processes.
    LocalCma = 2,
    /// A ring in shared memory.
    LocalRing = 3,
    /// TCP connections.
    Tcp = 4,
    /// RDMA devices, by reliable connections (InfiniBand, RoCE).
    Verbs = 5,
    /// RDMA devices, by reliable datagrams (AWS EFA).
    Efa = 6,
    /// A GPU copies.
    GpuIpc = 7,
    /// One that this library's header does not know.
    Other = 127,
}

impl From<PathKind> for peerway_path {
    fn from(kind: PathKind) -> Self {
        match kind {
            PathKind::SameProcess => Self::SameProcess,
            PathKind::LocalMap => Self::LocalMap,
            PathKind::LocalCma => Self::LocalCma,
            PathKind::LocalRing => Self::LocalRing,
            PathKind::Tcp => Self::Tcp,
            PathKind::Verbs => Self::Verbs,
            PathKind::Efa => Self::Efa,
            PathKind::GpuIpc => Self::GpuIpc,
            _ => Self::Other,
        }
    }
}

/// The name of a peerway_path ("local-map"); "?" for a number that is none.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_path_name(path: u32) -> *const c_char {
    const NAMES: [&CStr; 8] = [
        c"same-process",
        c"local-map",
        c"local-cma",
        c"local-ring",
        c"tcp",
        c"verbs",
        c"efa",
        c"gpu-ipc",
    ];
    NAMES.get(path as usize).unwrap_or(&c"?").as_ptr()
}

/// Facts about a peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_peer_facts {
    /// sizeof(struct peerway_peer_facts).
    pub size: usize,
    /// The name of this life of it.
    pub incarnation: peerway_incarnation,
    /// The best way to it: a peerway_path. Memory that is not shareable takes the next one.
    pub path: u32,
    /// Whether limits that the owner of memory sets bind honest peers only on that path.
    pub trusted: u32,
    /// Whether transfers can be posted.
    pub alive: u32,
    /// Whether we connected to it, and not it to us.
    pub initiator: u32,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_peer_facts {
    const FIRST: usize = 40;
    const NAME: &'static str = "struct peerway_peer_facts";
}

/// What went to and from a peer. Bytes that this process copied by itself count under `transfers` alone.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_peer_stats {
    /// sizeof(struct peerway_peer_stats).
    pub size: usize,
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes that lanes wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that lanes read from it.
    pub bytes_read: u64,
    /// Bytes that it read from us by lanes.
    pub bytes_served: u64,
    /// Bytes that it wrote to us by lanes.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_peer_stats {
    const FIRST: usize = 56;
    const NAME: &'static str = "struct peerway_peer_stats";
}

/// Who a peer is and how it is reached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_describe(
    peer: *const peerway_peer,
    facts: *mut peerway_peer_facts,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::new(facts) }?;
        let peer = get(peer)?;
        fill.set(peerway_peer_facts {
            size: 0,
            incarnation: peer.incarnation().into(),
            path: peerway_path::from(peer.path().kind) as u32,
            trusted: peer.path().is_trusted().into(),
            alive: peer.is_alive().into(),
            initiator: peer.is_initiator().into(),
        });
        Ok(())
    })
}

/// The way to a peer and why it is this one, as a sentence with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_path(
    peer: *const peerway_peer,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let path = get(peer)?.path().to_string();
        // SAFETY: the caller's promise.
        unsafe { arguments::give_text(&path, buffer, room, len) }
    })
}

/// The address that the session was made with, as text with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_address(
    peer: *const peerway_peer,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let address = get(peer)?.address().to_string();
        // SAFETY: the caller's promise.
        unsafe { arguments::give_text(&address, buffer, room, len) }
    })
}

/// What went to and fro.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_statistics(
    peer: *const peerway_peer,
    stats: *mut peerway_peer_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::new(stats) }?;
        let stats = get(peer)?.stats();
        fill.set(peerway_peer_stats {
            size: 0,
            transfers: stats.transfers,
            bytes_written: stats.bytes_written,
            bytes_read: stats.bytes_read,
            bytes_served: stats.bytes_served,
            bytes_landed: stats.bytes_landed,
            lanes_lost: stats.lanes_lost,
        });
        Ok(())
    })
}

/// Closes the session with a peer: its transfers end, and connecting again makes a new one. The handle stays until it is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_remove(peer: *const peerway_peer) -> peerway_status {
    call(|| {
        get(peer)?.remove();
        Ok(())
    })
}

/// Frees a handle to a peer. The session stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_free(peer: *mut peerway_peer) -> peerway_status {
    call(|| handles::free(peer).map(drop))
}

/// Turns a descriptor that the peer advertised into memory that can be read and written. The first import of one asks the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_import(
    peer: *const peerway_peer,
    descriptor: *const c_void,
    len: usize,
    remote: *mut *mut peerway_remote,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, descriptor) = unsafe {
            (arguments::handle(remote, "remote")?, arguments::bytes(descriptor, len, "descriptor")?)
        };
        out.set(handles::new(get(peer)?.import(descriptor)?)?);
        Ok(())
    })
}

/// Writes one range of our memory into the peer's and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_write(
    peer: *const peerway_peer,
    local: *const peerway_region,
    local_offset: u64,
    remote: *const peerway_remote,
    remote_offset: u64,
    len: u64,
) -> peerway_status {
    call(|| {
        let peer = get(peer)?;
        let local = region::part(local, local_offset, len)?;
        let remote = remote::part(remote, remote_offset, len)?;
        end(peer.run(&peerway::Batch::write(&local, &remote)?)?, None)
    })
}

/// Reads one range of the peer's memory into ours and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_read(
    peer: *const peerway_peer,
    local: *const peerway_region,
    local_offset: u64,
    remote: *const peerway_remote,
    remote_offset: u64,
    len: u64,
) -> peerway_status {
    call(|| {
        let peer = get(peer)?;
        let local = region::part(local, local_offset, len)?;
        let remote = remote::part(remote, remote_offset, len)?;
        end(peer.run(&peerway::Batch::read(&local, &remote)?)?, None)
    })
}

/// Posts a batch; returns within microseconds whatever its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_post(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        let posted = get(peer)?.post(&*get(batch)?)?;
        out.set(handles::new(Transfer::new(posted))?);
        Ok(())
    })
}

/// Posts a batch and waits for its end, which the status is of. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_run(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        end(get(peer)?.run(&*get(batch)?)?, fill)
    })
}

/// Keeps a checked batch to be posted many times, with everything made ready that can be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_prepare(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    prepared: *mut *mut peerway_prepared,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(prepared, "prepared") }?;
        let made: Prepared = get(peer)?.prepare((*get(batch)?).clone())?;
        out.set(handles::new(made)?);
        Ok(())
    })
}

/// Sends a message of up to PEERWAY_MAX_NOTIFICATION bytes to the peer's queue of notifications.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_notify(
    peer: *const peerway_peer,
    message: *const c_void,
    len: usize,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, message) = unsafe {
            (arguments::handle(transfer, "transfer")?, arguments::bytes(message, len, "message")?)
        };
        out.set(handles::new(Transfer::new(get(peer)?.notify(message)?))?);
        Ok(())
    })
}

/// Adds one to a counter of the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_count(
    peer: *const peerway_peer,
    id: u32,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        out.set(handles::new(Transfer::new(get(peer)?.count(id)?))?);
        Ok(())
    })
}

/// The oldest notification of this peer, waiting for one for so long: PENDING where there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_notification(
    peer: *const peerway_peer,
    timeout_ns: u64,
    notification: *mut *mut peerway_notification,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(notification, "notification") }?;
        let peer = get(peer)?;
        let found = until(timeout_ns, |left| {
            let over = !peer.is_alive();
            let found = peer.notification(left).map(Ok);
            // What it sent before it went was looked for after it had gone.
            found.or_else(|| over.then(|| Err(gone())))
        })?;
        out.set(handles::new(found)?);
        Ok(())
    })
}

fn gone() -> Failure {
    let sentence = "the peer is gone, and nothing of it is left to be read";
    Failure::new(peerway_status::PeerGone, sentence)
}
