//! The owner's side of an import: what an advertisement grants, and how the peer reaches it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use peerway_core::descriptor::Descriptor;
use peerway_core::outcome::TransferError;
use peerway_core::region::Access;
use peerway_core::wire::{Control, Import, MappingOffer};

use super::engine::Engine;
use super::shard::{DriverCommand, Shard};
use super::windows::{KeyLane, KeysMade, NewKeys};
use crate::gpu::share;
use crate::limits::RefusalReason;
use crate::memory::Backing;
use crate::memory::grants::{Export, Grant};
use crate::os::{shm, unix};
use crate::session::Session;
use crate::session::link::Link;
use crate::threads;

/// Answers the session's peer about a grant. Registering memory with devices, and making keys for
/// the queue pairs of `lanes`, may take longer than the driver can be blocked. In that case a
/// thread does it, and the answer follows later.
pub(super) fn answer(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    shard: &Arc<Shard>,
    request: u64,
    grant: Arc<Grant>,
    mut import: Import,
    lanes: Vec<KeyLane>,
) -> Control {
    let imported = |import| Control::Imported { request, result: Ok(import) };
    let (Some(_), Ok(rdma)) = (&session.rdma, &endpoint.rdma) else {
        return imported(import);
    };
    if grant.has_keys() && lanes.is_empty() {
        import.keys = grant.keys(&**rdma);
        return imported(import);
    }
    let Some(turn) = Turn::take() else {
        tracing::warn!(
            peer = %session.addr,
            most = MOST_REGISTERING,
            "too many registrations in progress; this import gets no RDMA keys and goes by frames"
        );
        return imported(import);
    };
    let register = {
        let (engine, rdma, to) = (endpoint.clone(), rdma.clone(), session.clone());
        let (shard, mut import) = (shard.clone(), import.clone());
        move || {
            import.keys = grant.keys(&*rdma);
            let keys = NewKeys::make(grant, &lanes);
            if let Some(why) = keys.failure() {
                let peer = to.addr;
                engine.refusals.note(RefusalReason::NoWindow, &peer);
                tracing::debug!(why, %peer, "an import gets no RDMA keys and goes by frames");
                import.keys.clear();
                drop(keys);
                to.send(Control::Imported { request, result: Ok(import) });
            } else if import.keys.is_empty() {
                to.send(Control::Imported { request, result: Ok(import) });
            } else if keys.is_revoked(lanes.len()) {
                let result = Err(TransferError::Revoked as u8);
                to.send(Control::Imported { request, result });
            } else {
                let made = Box::new(KeysMade::Import(keys, request, Box::new(import)));
                shard.submit(DriverCommand::KeysMade { session: to, made });
                shard.notify_if_blocked();
            }
            drop(turn);
        }
    };
    let thread = threads::spawn("peerway-register", &endpoint.cpus, register);
    // Without a thread there are no keys, and frames carry the bytes.
    if thread.is_ok() { Control::Importing { request } } else { imported(import) }
}

/// The number of threads in this process that register memory for peers.
static REGISTERING: AtomicUsize = AtomicUsize::new(0);
/// The most such threads. Further imports get no keys, so that peers cannot exhaust the threads.
const MOST_REGISTERING: usize = 256;

/// Permission to run one of these threads.
pub(super) struct Turn;

impl Turn {
    pub(super) fn take() -> Option<Self> {
        let before = REGISTERING.fetch_add(1, Ordering::Relaxed);
        let turn = Self;
        (before < MOST_REGISTERING).then_some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        REGISTERING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a descriptor grants the session's peer.
pub(super) fn look_up(
    endpoint: &Engine,
    session: &Arc<Session>,
    request: u64,
    descriptor: &[u8],
) -> Result<(Arc<Grant>, Import), TransferError> {
    let descriptor = Descriptor::from_bytes(descriptor).map_err(|_| TransferError::RemoteAccess)?;
    let grant = endpoint.grants.find_descriptor(&descriptor, &session.incarnation)?;
    let mut import = Import {
        access: grant.access,
        len: grant.span.len,
        base: grant.memory.ptr() as u64 + grant.span.offset,
        gate: None,
        pass: 0,
        mapping: None,
        keys: Vec::new(),
        flush: grant.memory.device().is_some_and(|device| !device.gpu.facts().rdma_ordered),
        kind: grant.memory.kind(),
        gpu: None,
    };
    offer_direct(session, request, &grant, &mut import)?;
    endpoint.peers.give_right(session);
    Ok((grant, import))
}

/// Offers a gate and, for shareable memory, its file descriptor. It offers nothing if the peer can
/// use neither.
fn offer_direct(
    session: &Arc<Session>,
    request: u64,
    grant: &Arc<Grant>,
    import: &mut Import,
) -> Result<(), TransferError> {
    let Some(link) = &session.link else { return Ok(()) };
    if grant.memory.gpu.is_some() {
        return offer_gpu(session, link, request, grant, import);
    }
    let shared = match &grant.memory.backing {
        Backing::Shared { memory, offset } if session.reach.map => Some((memory, *offset)),
        _ => None,
    };
    if shared.is_none() && !session.reach.peer_pulls {
        return Ok(());
    }
    let Some((index, pass, gate)) = link.own_gate(grant.id) else { return Ok(()) };
    grant.export(Export { to: session.clone(), gate })?;
    (import.gate, import.pass) = (Some(index), pass);
    if let Some((memory, offset)) = shared {
        let narrow = match grant.access.allows(Access::WRITE) {
            true => None,
            false => Some(shm::read_only(memory.fd())),
        };
        let fd = match &narrow {
            None => memory.fd(),
            Some(Ok(fd)) => fd.as_fd(),
            Some(Err(error)) => {
                let peer = session.addr;
                tracing::debug!(%peer, %error, "cannot open memory again for reading only");
                return Ok(());
            }
        };
        let passed = unix::send(link.socket.as_fd(), &request.to_le_bytes(), &[fd]);
        if passed.unwrap_or(false) {
            let (file_len, offset) = (memory.mapped_len(), offset + grant.span.offset);
            import.mapping = Some(MappingOffer { file_len, offset });
        }
    }
    Ok(())
}

/// Offers GPU memory to a peer that may map it.
fn offer_gpu(
    session: &Arc<Session>,
    link: &Link,
    request: u64,
    grant: &Arc<Grant>,
    import: &mut Import,
) -> Result<(), TransferError> {
    let located = grant.memory.gpu.as_ref().filter(|_| session.reach.map);
    let offer =
        located.and_then(|located| share::offer(located, grant.memory.ptr() as u64, grant.span));
    let Some((offer, fd)) = offer else { return Ok(()) };
    if let Some(fd) = &fd {
        let passed = unix::send(link.socket.as_fd(), &request.to_le_bytes(), &[fd.as_fd()]);
        if !passed.unwrap_or(false) {
            return Ok(());
        }
    }
    let Some((index, pass, gate)) = link.own_gate(grant.id) else { return Ok(()) };
    grant.export(Export { to: session.clone(), gate })?;
    (import.gate, import.pass, import.gpu) = (Some(index), pass, Some(offer));
    Ok(())
}
