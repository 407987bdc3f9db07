//! Peers.

use std::ffi::{CStr, c_char, c_void};

use peerway::{DataProtection, PathKind, Peer, Prepared};

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
use crate::transfer::{Transfer, finish, peerway_end, peerway_transfer};

/// A connected peer: one incarnation of a remote endpoint.
pub struct peerway_peer {
    _private: (),
}

handle!(peerway_peer, Peer, "a peer", 6);

/// A path to a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_path {
    /// Both endpoints live in this process.
    SameProcess = 0,
    /// This process maps the peer's memory.
    LocalMap = 1,
    /// The kernel copies between the two processes.
    LocalCma = 2,
    /// A ring in shared memory.
    LocalRing = 3,
    /// TCP connections.
    Tcp = 4,
    /// RDMA devices with reliable connections (InfiniBand, RoCE).
    Verbs = 5,
    /// RDMA devices with reliable datagrams (AWS EFA).
    Efa = 6,
    /// A GPU copies.
    GpuIpc = 7,
    /// A path that this header does not know.
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

/// The name of a peerway_path ("local-map"). "?" if the number is not a path.
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
    /// The identity of its incarnation.
    pub incarnation: peerway_incarnation,
    /// The best path to the peer: a peerway_path. Memory that is not shareable takes the next best
    /// path.
    pub path: u32,
    /// Whether an owner's limits on its memory bind only peers that follow the protocol, on that
    /// path.
    pub trusted: u32,
    /// Whether transfers can be posted.
    pub alive: u32,
    /// Whether this endpoint opened the connection. Zero if the peer did.
    pub initiator: u32,
    /// How the TCP connections to the peer protect what they carry (PEERWAY_DATA): 0 off,
    /// 1 integrity, 2 encrypt. The path says what that covers.
    pub data: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_peer_facts {
    const FIRST: usize = 40;
    const NAME: &'static str = "struct peerway_peer_facts";
}

/// Statistics of a peer, on every path. The peer tells what it moved without this side's processor:
/// with each notification and count, and otherwise within an eighth of the detection time.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_peer_stats {
    /// sizeof(struct peerway_peer_stats).
    pub size: usize,
    /// Posted transfers.
    pub transfers: u64,
    /// Bytes that this endpoint wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that this endpoint read from the peer.
    pub bytes_read: u64,
    /// Bytes that the peer read from this endpoint.
    pub bytes_served: u64,
    /// Bytes that the peer wrote to this endpoint.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
    /// Lanes that were closed, because a record on them was not what the peer sent (PEERWAY_DATA).
    pub corrupt_records: u64,
    /// TCP lanes that took the place of broken ones.
    pub lanes_reopened: u64,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_peer_stats {
    const FIRST: usize = 56;
    const NAME: &'static str = "struct peerway_peer_stats";
}

/// Fills in the facts about a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_describe(
    peer: *const peerway_peer,
    facts: *mut peerway_peer_facts,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(facts) }?;
        let peer = get(peer)?;
        fill.set(peerway_peer_facts {
            size: 0,
            incarnation: peer.incarnation().into(),
            path: peerway_path::from(peer.path().kind) as u32,
            trusted: peer.path().is_trusted().into(),
            alive: peer.is_alive().into(),
            initiator: peer.is_initiator().into(),
            data: match peer.path().data {
                DataProtection::Off => 0,
                DataProtection::Integrity => 1,
                _ => 2,
            },
            reserved: 0,
        });
        Ok(())
    })
}

/// The path to a peer and the reason for its choice, as text with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_path(
    peer: *const peerway_peer,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let path = get(peer)?.path().to_string();
        // SAFETY: the C contract.
        unsafe { arguments::give_text(&path, buffer, room, len) }
    })
}

/// The address of the peer in this session, as text with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_address(
    peer: *const peerway_peer,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let address = get(peer)?.address().to_string();
        // SAFETY: the C contract.
        unsafe { arguments::give_text(&address, buffer, room, len) }
    })
}

/// Fills in the statistics of a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_statistics(
    peer: *const peerway_peer,
    stats: *mut peerway_peer_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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
            corrupt_records: stats.corrupt_records,
            lanes_reopened: stats.lanes_reopened,
        });
        Ok(())
    })
}

/// Closes the session with a peer. Its transfers end, and a new connect opens a new session. The
/// handle stays valid until it is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_remove(peer: *const peerway_peer) -> peerway_status {
    call(|| {
        get(peer)?.remove();
        Ok(())
    })
}

/// Frees a handle to a peer. The session stays open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_free(peer: *mut peerway_peer) -> peerway_status {
    call(|| handles::free(peer).map(drop))
}

/// Turns a descriptor of the peer into remote memory that transfers can use. The first import of a
/// descriptor sends a request to the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_import(
    peer: *const peerway_peer,
    descriptor: *const c_void,
    len: usize,
    remote: *mut *mut peerway_remote,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, descriptor) = unsafe {
            (arguments::handle(remote, "remote")?, arguments::bytes(descriptor, len, "descriptor")?)
        };
        out.set(handles::new(get(peer)?.import(descriptor)?)?);
        Ok(())
    })
}

/// Writes one range of local memory to the peer's memory, and waits for the end.
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
        finish(&peer.begin(&peerway::Batch::write(&local, &remote)?)?, None)
    })
}

/// Reads one range of the peer's memory into local memory, and waits for the end.
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
        finish(&peer.begin(&peerway::Batch::read(&local, &remote)?)?, None)
    })
}

/// Posts a batch. Returns within microseconds for any size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_post(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        let posted = get(peer)?.post(&*get(batch)?)?;
        out.set(handles::new(Transfer::new(posted))?);
        Ok(())
    })
}

/// Posts a batch, waits for the transfer's end and returns its status. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_run(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        finish(&get(peer)?.begin(&*get(batch)?)?, fill)
    })
}

/// Prepares a batch that is posted many times: checks it, and does all work that a post can reuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_prepare(
    peer: *const peerway_peer,
    batch: *const peerway_batch,
    prepared: *mut *mut peerway_prepared,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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
        // SAFETY: the C contract.
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
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        out.set(handles::new(Transfer::new(get(peer)?.count(id)?))?);
        Ok(())
    })
}

/// Returns the oldest notification of this peer. Waits at most timeout_ns; PENDING if there is
/// none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_notification(
    peer: *const peerway_peer,
    timeout_ns: u64,
    notification: *mut *mut peerway_notification,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(notification, "notification") }?;
        let peer = get(peer)?;
        let found = until(timeout_ns, |left| {
            let over = !peer.is_alive();
            let found = peer.notification(left).map(Ok);
            // `over` was read first, so this poll includes everything that the peer sent before it
            // went.
            found.or_else(|| over.then(|| Err(gone())))
        })?;
        out.set(handles::new(found)?);
        Ok(())
    })
}

fn gone() -> Failure {
    let sentence = "the peer is gone, and no notification of it is left";
    Failure::new(peerway_status::PeerGone, sentence)
}
