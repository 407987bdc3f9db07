//! Imports: ask a peer what a descriptor grants and how to access it directly.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use peerway_core::config::Pin;
use peerway_core::descriptor::Descriptor;
use peerway_core::outcome::TransferError;
use peerway_core::region::{Access, MemoryKind, Span};
use peerway_core::wire::{Control, Import, MappingOffer};

use crate::clock;
use crate::error::ImportError;
use crate::gpu::share::{self, Offered};
use crate::inner::{self, Inner, Unusable};
use crate::memory::gate::GateRef;
use crate::memory::grants::{Export, Grant};
use crate::memory::{Backing, Direct, RemoteInner, RemoteRegion};
use crate::os::shm::{self, ShmMapping};
use crate::os::unix;
use crate::progress::shard::DriverCommand;
use crate::session::Session;
use crate::session::link::Link;
use crate::threads;

/// How many connect time-outs an owner may take if it reports that it is working: five minutes by
/// default.
const AT_WORK: u32 = 60;

/// Imports that wait for an answer.
#[derive(Default)]
pub(crate) struct Imports {
    waiting: Mutex<HashMap<u64, Answer>>,
    changed: Condvar,
    next: AtomicU64,
}

#[derive(Default)]
struct Answer {
    result: Option<Result<Import, TransferError>>,
    fd: Option<OwnedFd>,
    /// The file descriptor arrived, but this process could not open it.
    is_fd_lost: bool,
    /// The owner has received the import and is working on the answer.
    takes_time: bool,
}

impl Answer {
    fn is_complete(&self) -> bool {
        match &self.result {
            _ if self.is_fd_lost => true,
            Some(Ok(import)) => !import.has_descriptor() || self.fd.is_some(),
            Some(Err(_)) => true,
            None => false,
        }
    }
}

impl Imports {
    /// Stores the peer's answer.
    pub(crate) fn answered(&self, request: u64, result: Result<Import, TransferError>) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.result.get_or_insert(result);
            self.changed.notify_all();
        }
    }

    /// Records that the peer has begun to register the memory, which may take long.
    pub(crate) fn takes_time(&self, request: u64) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.takes_time = true;
            self.changed.notify_all();
        }
    }

    /// Stores a file descriptor that arrived on the local socket.
    pub(crate) fn descriptor_came(&self, request: u64, fd: OwnedFd) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.fd.get_or_insert(fd);
            self.changed.notify_all();
        }
    }

    /// Records that a file descriptor arrived on the local socket and this process could not open
    /// it.
    pub(crate) fn descriptor_lost(&self, request: u64) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.is_fd_lost = true;
            self.changed.notify_all();
        }
    }

    /// Fails all waiting imports, because the peer is gone.
    pub(crate) fn fail_all(&self) {
        for answer in self.waiting.lock().unwrap().values_mut() {
            answer.result = Some(Err(TransferError::PeerGone));
        }
        self.changed.notify_all();
    }
}

/// Imports a descriptor as a region of the session's peer.
pub(crate) fn import(
    endpoint: &Arc<Inner>,
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
    let (granted, direct, base, keys, flush) = if session.reach.same_process {
        let (granted, direct) = same_process(session, &descriptor)?;
        (granted, direct, 0, Vec::new(), false)
    } else {
        let (import, fd) = ask(endpoint, session, bytes)?;
        let granted = Granted { access: import.access, len: import.len, kind: import.kind };
        let direct = reach_directly(session, &import, fd)?;
        (granted, direct, import.base, usable_keys(session, &import), import.flush)
    };
    // If the devices cannot access GPU memory, the same devices carry it in frames.
    let keyless = granted.len > 0 && keys.is_empty() && granted.kind == MemoryKind::Host;
    check_pin(endpoint.config.transport, &direct, keyless)?;
    check_window(window, granted.len)?;
    let inner = Arc::new(RemoteInner {
        session: session.clone(),
        grant: descriptor.grant,
        token: descriptor.token,
        access: granted.access,
        len: granted.len,
        kind: granted.kind,
        direct,
        base,
        keys,
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

/// The keys of an import. Empty unless there is one for each known port and no address in the
/// memory overflows.
fn usable_keys(session: &Session, import: &Import) -> Vec<u32> {
    let whole = Span { offset: import.base, len: import.len };
    let fit = session.rdma.as_ref().is_some_and(|rdma| rdma.ports.len() == import.keys.len());
    if fit && whole.end().is_some() { import.keys.clone() } else { Vec::new() }
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
        inner::find(&session.incarnation).ok_or(ImportError::Refused(TransferError::PeerGone))?;
    // The grant is for the other end of the owner's session, which is this endpoint.
    let asker = session.incarnation;
    let grant = owner
        .grants
        .find_descriptor(descriptor, &owner.counterpart(&session.id).unwrap_or(asker))
        .map_err(ImportError::Refused)?;
    // `Region::advertise` checked the span against the region.
    let ptr = grant.memory.ptr().wrapping_add(grant.span.offset as usize);
    let kind = grant.memory.kind();
    let granted = Granted { access: grant.access, len: grant.span.len, kind };
    let direct = Direct::SameProcess { ptr, gate: grant.gate(), grant };
    Ok((granted, direct))
}

fn ask(
    endpoint: &Inner,
    session: &Arc<Session>,
    descriptor: &[u8],
) -> Result<(Import, Option<OwnedFd>), ImportError> {
    let imports = &session.imports;
    let request = imports.next.fetch_add(1, Ordering::Relaxed);
    imports.waiting.lock().unwrap().insert(request, Answer::default());
    let message = Control::Import { request, descriptor: descriptor.to_vec() };
    session.shard.submit(DriverCommand::Control { session: session.clone(), message });
    session.shard.notify_if_blocked();
    let deadline = clock::after(clock::now(), endpoint.config.connect_timeout);
    let patience = endpoint.config.connect_timeout * AT_WORK;
    let at_work_until = clock::after(clock::now(), patience);
    let mut waiting = imports.waiting.lock().unwrap();
    loop {
        let answer = waiting.get(&request);
        let complete = answer.is_none_or(Answer::is_complete);
        // Registering takes about 0.1 s a gigabyte, so a working owner gets more time, but not for
        // ever.
        let at_work = answer.is_some_and(|answer| answer.takes_time);
        let by = if at_work { at_work_until } else { deadline };
        let left = clock::until(by, clock::now());
        let open = endpoint.check_open().is_ok() && session.is_alive();
        if complete || left == Duration::ZERO || !open {
            break;
        }
        waiting = imports.changed.wait_timeout(waiting, left).unwrap().0;
    }
    match waiting.remove(&request) {
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
        let mapping = map(session, &offer, import.len, &fd).map_err(ImportError::Map)?;
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
    len: u64,
    fd: &OwnedFd,
) -> io::Result<Arc<ShmMapping>> {
    let whole = Span { offset: 0, len: offer.file_len };
    let fits = whole.contains(Span { offset: offer.offset, len });
    let file_len = usize::try_from(offer.file_len).ok().filter(|_| fits);
    let file_len = file_len.ok_or(std::io::ErrorKind::InvalidData)?;
    shm::check_memfd(fd.as_fd(), file_len)?;
    let stat = rustix::fs::fstat(fd)?;
    let file = (stat.st_dev, stat.st_ino);
    let mut mapped = session.mapped.lock().unwrap();
    if let Some(mapping) = mapped.get(&file).and_then(Weak::upgrade)
        && mapping.len() >= file_len
    {
        return Ok(mapping);
    }
    let mapping = Arc::new(ShmMapping::of_fd(fd.as_fd(), file_len, true)?);
    mapped.retain(|_, weak| weak.strong_count() > 0);
    mapped.insert(file, Arc::downgrade(&mapping));
    Ok(mapping)
}

/// The owner's side: answers the session's peer about a descriptor. Registering memory with devices
/// may take longer than the driver can be blocked. In that case a thread sends the answer later.
pub(crate) fn answer(
    endpoint: &Arc<Inner>,
    session: &Arc<Session>,
    request: u64,
    descriptor: &[u8],
) -> Control {
    let imported = |result: Result<Import, TransferError>| Control::Imported {
        request,
        result: result.map_err(|e| e as u8),
    };
    let (grant, mut import) = match look_up(endpoint, session, request, descriptor) {
        Ok(found) => found,
        Err(error) => return imported(Err(error)),
    };
    let (Some(_), Ok(rdma)) = (&session.rdma, &endpoint.rdma) else {
        return imported(Ok(import));
    };
    if grant.has_keys() {
        import.keys = grant.keys(rdma);
        return imported(Ok(import));
    }
    let (rdma, to) = (rdma.clone(), session.clone());
    let Some(turn) = Turn::take() else {
        tracing::warn!(
            peer = %session.addr,
            most = MOST_REGISTERING,
            "too many registrations in progress; this import gets no RDMA keys and goes by frames"
        );
        return imported(Ok(import));
    };
    let register = {
        let mut import = import.clone();
        move || {
            import.keys = grant.keys(&rdma);
            let message = Control::Imported { request, result: Ok(import) };
            to.shard.submit(DriverCommand::Control { session: to.clone(), message });
            to.shard.notify_if_blocked();
            drop(turn);
        }
    };
    let thread = threads::spawn("peerway-register", &endpoint.cpus, register);
    // Without a thread there are no keys, and frames carry the bytes.
    if thread.is_ok() { Control::Importing { request } } else { imported(Ok(import)) }
}

/// The number of threads in this process that register memory for peers.
static REGISTERING: AtomicUsize = AtomicUsize::new(0);
/// The most such threads. Further imports get no keys, so that peers cannot exhaust the threads.
const MOST_REGISTERING: usize = 256;

/// Permission to run one of these threads.
struct Turn;

impl Turn {
    fn take() -> Option<Self> {
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

fn look_up(
    endpoint: &Inner,
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
    grant.export(Export { session: session.clone(), gate })?;
    (import.gate, import.pass) = (Some(index), pass);
    if let Some((memory, offset)) = shared {
        let passed = unix::send(link.socket.as_fd(), &request.to_le_bytes(), &[memory.fd()]);
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
    grant.export(Export { session: session.clone(), gate })?;
    (import.gate, import.pass, import.gpu) = (Some(index), pass, Some(offer));
    Ok(())
}
