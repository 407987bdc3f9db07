//! Imports: ask a peer what a descriptor grants and how to access it directly.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use peerway_core::config::Pin;
use peerway_core::descriptor::Descriptor;
use peerway_core::outcome::TransferError;
use peerway_core::region::{Access, MemoryKind, Span};
use peerway_core::wire::{Control, Import, MappingOffer};

use crate::clock;
use crate::error::ImportError;
use crate::gpu::share::Offered;
use crate::os::gate::GateRef;
use crate::os::shm::{self, ShmMapping};
use crate::progress::engine::{self, Engine, Unusable};
use crate::session::Session;
use crate::session::imports::Answer;
use crate::session::remote::{Direct, RemoteInner, RemoteRegion};
use crate::transport::device::KeyTable;

/// How many connect time-outs an owner may take if it reports that it is working: five minutes by
/// default. Registering memory takes about 0.1 s a gigabyte.
const AT_WORK: u32 = 60;

/// Imports a descriptor as a region of the session's peer.
pub(crate) fn import(
    endpoint: &Arc<Engine>,
    session: &Arc<Session>,
    bytes: &[u8],
) -> Result<RemoteRegion, ImportError> {
    endpoint.check_open().map_err(|unusable| match unusable {
        Unusable::Closed => ImportError::EndpointClosed,
        Unusable::Forked => ImportError::Forked,
    })?;
    let descriptor = Descriptor::from_bytes(bytes)?;
    if descriptor.incarnation_check != session.incarnation.check() {
        return Err(ImportError::OtherIncarnation);
    }
    let key = (descriptor.grant, descriptor.token);
    let window = descriptor.window();
    let known = session.known.lock().unwrap().get(&key).and_then(|weak| weak.upgrade());
    if let Some(inner) = known {
        check_window(window, inner.len)?;
        return Ok(RemoteRegion { inner, window });
    }
    let keys = session.rdma.as_ref().map(|_| session.key_table(descriptor.grant));
    let (granted, direct, base, by_device, flush) = if session.reach.same_process {
        let (granted, direct) = same_process(session, &descriptor)?;
        endpoint.peers.give_right(session);
        (granted, direct, 0, false, false)
    } else {
        let (import, fd) = ask(endpoint, session, bytes, keys.clone())?;
        let granted = Granted { access: import.access, len: import.len, kind: import.kind };
        let direct = reach_directly(session, &import, fd)?;
        let by_device = keys.as_ref().is_some_and(|keys| take_keys(session, &import, keys));
        (granted, direct, import.base, by_device, import.flush)
    };
    // If the devices cannot access GPU memory, the same devices carry it in frames.
    let keyless = granted.len > 0 && !by_device && granted.kind == MemoryKind::Host;
    check_pin(endpoint.config.transport, &direct, keyless)?;
    check_window(window, granted.len)?;
    let inner = Arc::new(RemoteInner {
        session: session.clone(),
        grant: descriptor.grant,
        token: descriptor.token,
        descriptor: bytes.to_vec(),
        access: granted.access,
        len: granted.len,
        kind: granted.kind,
        direct,
        base,
        by_device,
        keys: keys.unwrap_or_else(KeyTable::none),
        flush,
    });
    let mut known = session.known.lock().unwrap();
    if known.len() == known.capacity() {
        // Sweep before the map grows, so that each import pays a constant cost.
        known.retain(|_, weak| weak.strong_count() > 0);
    }
    known.insert(key, Arc::downgrade(&inner));
    Ok(RemoteRegion { inner, window })
}

fn check_window(window: Span, len: u64) -> Result<(), ImportError> {
    let whole = Span { offset: 0, len };
    whole.contains(window).then_some(()).ok_or(ImportError::Refused(TransferError::OutOfBounds))
}

/// A pin to a direct path that this memory lacks is an error. Another path would break the pin.
fn check_pin(pin: Pin, direct: &Direct, keyless: bool) -> Result<(), ImportError> {
    let why = match pin {
        Pin::LocalMap if !matches!(direct, Direct::Mapped { .. } | Direct::Gpu(_)) => {
            "the peer's endpoint did not allocate this memory as shareable"
        }
        Pin::Ib | Pin::Efa if keyless => {
            "its owner could not register it with its RDMA devices (see the owner's log)"
        }
        _ => return Ok(()),
    };
    Err(ImportError::PathUnavailable { pin: pin.to_string(), why: why.to_owned() })
}

/// Takes the keys of an import. Returns false, and devices cannot access the memory, unless there
/// is a key for each known port and no address in the memory overflows.
fn take_keys(session: &Session, import: &Import, keys: &KeyTable) -> bool {
    let whole = Span { offset: import.base, len: import.len };
    let ports = session.rdma.as_ref().map_or(0, |rdma| rdma.ports.len());
    let fit = ports > 0 && ports == import.keys.len() && whole.end().is_some();
    fit && keys.set_all(&import.keys)
}

/// The owner's answer about an advertisement.
struct Granted {
    access: Access,
    len: u64,
    kind: MemoryKind,
}

fn same_process(
    session: &Session,
    descriptor: &Descriptor,
) -> Result<(Granted, Direct), ImportError> {
    let owner =
        engine::find(&session.incarnation).ok_or(ImportError::Refused(TransferError::PeerGone))?;
    // The grant is for the other end of the owner's session, which is this endpoint.
    let asker = session.incarnation;
    let grant = owner
        .grants
        .find_descriptor(descriptor, &owner.peers.counterpart(&session.id).unwrap_or(asker))
        .map_err(ImportError::Refused)?;
    owner.peers.give_right_by_id(session.main_id());
    // `Region::advertise` checked the span against the region.
    let ptr = grant.memory.ptr().wrapping_add(grant.span.offset as usize);
    let kind = grant.memory.kind();
    let granted = Granted { access: grant.access, len: grant.span.len, kind };
    let direct = Direct::SameProcess { ptr, gate: grant.gate(), grant };
    Ok((granted, direct))
}

fn ask(
    endpoint: &Engine,
    session: &Arc<Session>,
    descriptor: &[u8],
    keys: Option<Arc<KeyTable>>,
) -> Result<(Import, Option<OwnedFd>), ImportError> {
    let imports = &session.imports;
    let request = imports.begin(keys);
    session.send(Control::Import { request, descriptor: descriptor.to_vec() });
    let (now, patience) = (clock::now(), endpoint.config.connect_timeout);
    let (deadline, at_work_until) =
        (clock::after(now, patience), clock::after(now, patience * AT_WORK));
    let is_open = || endpoint.check_open().is_ok() && session.is_alive();
    match imports.wait(request, deadline, at_work_until, is_open) {
        Some(Answer { is_fd_lost: true, .. }) => Err(ImportError::Map(io::Error::other(
            "this process has no file descriptor left; raise its limit (`ulimit -n`)",
        ))),
        Some(Answer { result: Some(Ok(import)), fd, .. })
            if !import.has_descriptor() || fd.is_some() =>
        {
            Ok((import, fd))
        }
        Some(Answer { result: Some(Err(error)), .. }) => Err(ImportError::Refused(error)),
        _ if !session.is_alive() => Err(ImportError::Refused(TransferError::PeerGone)),
        _ => Err(ImportError::TimedOut),
    }
}

fn reach_directly(
    session: &Session,
    import: &Import,
    fd: Option<OwnedFd>,
) -> Result<Direct, ImportError> {
    let (Some(link), Some(gate)) = (&session.link, import.gate) else { return Ok(Direct::None) };
    let Some(gate) = link.peer_gate(gate) else {
        return Err(ImportError::Refused(TransferError::PeerMisbehaved));
    };
    let gate = GateRef::Shared(gate, import.pass);
    if import.kind != MemoryKind::Host {
        let offer = import.gpu.filter(|_| session.reach.map);
        let offered = offer.and_then(|offer| Offered::new(offer, fd, import.len, gate));
        return Ok(offered.map_or(Direct::None, |offered| Direct::Gpu(Box::new(offered))));
    }
    if let (Some(offer), Some(fd), true) = (import.mapping, fd, session.reach.map) {
        let mapping = map(session, &offer, import, &fd).map_err(ImportError::Map)?;
        let (pin, offset) = (Default::default(), offer.offset as usize);
        return Ok(Direct::Mapped { pin, mapping, offset, gate });
    }
    let whole = Span { offset: import.base, len: import.len };
    if let (Some(memory), true) = (link.memory(&session.reach), whole.end().is_some()) {
        let memory = memory.clone();
        return Ok(Direct::Cma { memory, base: import.base, gate });
    }
    Ok(Direct::None)
}

fn map(
    session: &Session,
    offer: &MappingOffer,
    import: &Import,
    fd: &OwnedFd,
) -> io::Result<Arc<ShmMapping>> {
    let whole = Span { offset: 0, len: offer.file_len };
    let fits = whole.contains(Span { offset: offer.offset, len: import.len });
    let file_len = usize::try_from(offer.file_len).ok().filter(|_| fits);
    let file_len = file_len.ok_or(std::io::ErrorKind::InvalidData)?;
    shm::check_memfd(fd.as_fd(), file_len)?;
    let stat = rustix::fs::fstat(fd)?;
    // The owner passes a descriptor that cannot write for memory that it grants for reading.
    let is_writable = import.access.allows(Access::WRITE);
    let file = (stat.st_dev, stat.st_ino, is_writable);
    let mut mapped = session.mapped.lock().unwrap();
    if let Some(mapping) = mapped.get(&file).and_then(Weak::upgrade)
        && mapping.len() >= file_len
    {
        return Ok(mapping);
    }
    let mapping = Arc::new(ShmMapping::of_fd(fd.as_fd(), file_len, is_writable)?);
    mapped.retain(|_, weak| weak.strong_count() > 0);
    mapped.insert(file, Arc::downgrade(&mapping));
    Ok(mapping)
}
