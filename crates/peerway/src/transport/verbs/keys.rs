//! Memory registrations with RDMA devices, for our own requests and for those of peers.
//!
//! Both kinds are made on first use.
//!
//! For our own requests, a region is registered once, for this process alone. Regions inside a
//! registered range share its registration. A device keeps the pages that it registered, so before
//! sharing, the cache checks that the addresses still have those pages. Memory that a living region
//! keeps allocated has them. Other memory is recognised by a tag on its mapping, where the kernel
//! supports tags.
//!
//! For requests of peers, each advertisement is registered with exactly its extent and rights.
//! Deregistering it revokes the advertisement: when the call returns, no device admits a peer. GPU
//! memory is never shared between regions: see [`gpu`](super::gpu).

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use peerway_core::config::KeyWindows;
use peerway_core::region::Access;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Mr, VerbsError};

use super::nic::Nic;
use super::window::Window;
use super::{Rdma, gpu};
use crate::gpu::Located;
use crate::os::maps::Maps;
use crate::os::vma::Tag;
use crate::threads::{self, Cpus};
use crate::transport::device::{Keeper, QueueKey, RemoteKeys};
use crate::transport::error::RdmaError;

/// Below this size, starting a second thread takes longer than a registration.
const PARALLEL_BYTES: usize = 1 << 20;

/// Memory registered on every device of an endpoint that still works.
pub(crate) struct Registration {
    /// By device. `None` for a lost device, which has no queue pairs either.
    mrs: Vec<Option<Mr>>,
    start: u64,
    len: u64,
    how: RegisteredAs,
}

/// How the memory was registered with devices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RegisteredAs {
    /// Host memory.
    Pages,
    /// GPU memory, as a dma-buf.
    DmaBuf,
    /// GPU memory, by its address.
    PeerMemory,
}

impl Registration {
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the registration is dropped.
    unsafe fn of_host(
        nics: &[Arc<Nic>],
        start: u64,
        len: usize,
        access: impl Fn(&Nic) -> c_uint + Sync,
    ) -> Result<Self, RdmaError> {
        let on = |nic: &Nic| {
            let access = access(nic) | IBV_ACCESS_RELAXED_ORDERING;
            let ptr = std::ptr::with_exposed_provenance_mut::<c_void>(start as usize);
            // SAFETY: the caller vouches for the memory.
            unsafe { Mr::register(&nic.pd, ptr, len, access) }
        };
        Self::make(nics, start, len, RegisteredAs::Pages, on)
    }

    /// Registers the memory on every device by calling `on`.
    pub(super) fn make(
        nics: &[Arc<Nic>],
        start: u64,
        len: usize,
        how: RegisteredAs,
        on: impl Fn(&Nic) -> Result<Mr, VerbsError> + Sync,
    ) -> Result<Self, RdmaError> {
        let on = |nic: &Arc<Nic>| on(nic);
        let mrs: Vec<Result<Mr, VerbsError>> = if nics.len() > 1 && len >= PARALLEL_BYTES {
            std::thread::scope(|scope| {
                let (cpus, name) = (Cpus::of_process(), "peerway-register");
                let start = |nic| (nic, threads::spawn_scoped(scope, name, &cpus, move || on(nic)));
                let others: Vec<_> = nics[1..].iter().map(start).collect();
                let first = on(&nics[0]);
                let others = others.into_iter().map(|(nic, other)| match other {
                    Ok(other) => {
                        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    }
                    // Without a thread the registration only takes longer.
                    Err(_) => on(nic),
                });
                std::iter::once(first).chain(others).collect()
            })
        } else {
            nics.iter().map(on).collect()
        };
        // A lost device does not affect the others.
        let gone = |error: &VerbsError| matches!(error.errno, libc::EIO | libc::ENODEV);
        let left = mrs.iter().any(Result::is_ok);
        let mrs = mrs.into_iter().map(|made| match made {
            Ok(mr) => Ok(Some(mr)),
            Err(error) if left && gone(&error) => Ok(None),
            Err(error) => Err(RdmaError::registering(error)),
        });
        Ok(Self { mrs: mrs.collect::<Result<_, _>>()?, start, len: len as u64, how })
    }

    /// How the memory was registered.
    pub(super) fn how(&self) -> RegisteredAs {
        self.how
    }

    /// Whether the CPU can read the memory too, and so put its bytes inline into requests.
    #[inline]
    pub(crate) fn is_of_host(&self) -> bool {
        self.how == RegisteredAs::Pages
    }

    /// The keys for our own requests, by device.
    pub(super) fn lkeys(&self) -> Box<[u32]> {
        self.mrs.iter().map(|mr| mr.as_ref().map_or(0, Mr::lkey)).collect()
    }

    /// Whether it was made on these devices.
    #[inline]
    pub(super) fn is_of(&self, nics: &[Arc<Nic>]) -> bool {
        let mut each = self.mrs.iter().zip(nics);
        each.any(|(mr, nic)| mr.as_ref().is_some_and(|mr| Arc::ptr_eq(mr.pd(), &nic.pd)))
    }
}

/// An advertisement on every device that still works.
///
/// On a device with windows, its registration gives peers no right. Each queue pair gets a window
/// of its own. Where no window can be had, a second registration gives the rights to every queue
/// pair.
pub(super) struct Advertised {
    nics: Vec<Arc<Nic>>,
    memory: Memory,
    /// What peers may do.
    access: c_uint,
    /// Dropped before the registrations.
    windows: Windows,
    /// By device. `None` for a lost device.
    mrs: Vec<Option<Arc<Mr>>>,
    /// Whether a device refuses to bind windows to this memory.
    refused: Arc<AtomicBool>,
    /// Registrations with rights for every queue pair, by device.
    open: Mutex<BTreeMap<usize, Mr>>,
}

/// The windows to an advertisement that are not known to be closed. Closes them when it is dropped.
#[derive(Default)]
struct Windows(Mutex<Vec<Arc<Window>>>);

impl Windows {
    /// Closes all of them. Returns false if a device refuses.
    fn close(&self) -> bool {
        let mut windows = self.0.lock().unwrap();
        windows.retain(|window| window.try_close().inspect_err(not_ended).is_err());
        windows.is_empty()
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.close();
    }
}

fn not_ended(error: &VerbsError) {
    tracing::error!(%error, "a device did not deregister revoked memory");
}

/// Memory of this process that is registered for peers.
struct Memory {
    address: u64,
    len: usize,
    gpu: Option<Located>,
}

impl Advertised {
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the value is dropped.
    unsafe fn new(nics: &[Arc<Nic>], memory: Memory, access: c_uint) -> Result<Self, RdmaError> {
        let local = access & IBV_ACCESS_LOCAL_WRITE;
        let of = |nic: &Nic| if nic.windows { local | IBV_ACCESS_MW_BIND } else { access };
        // SAFETY: the caller vouches for the memory.
        let made = unsafe { memory.register(nics, of) }?;
        Ok(Self {
            nics: nics.to_vec(),
            memory,
            access,
            windows: Windows::default(),
            mrs: made.mrs.into_iter().map(|mr| mr.map(Arc::new)).collect(),
            refused: Arc::default(),
            open: Mutex::default(),
        })
    }

    /// Makes a window on a device that has them.
    fn window(&self, device: usize) -> Result<Arc<Window>, RdmaError> {
        let (nic, mr) = self.on(device)?;
        let range = (self.memory.address, self.memory.len as u64);
        let access = self.access & !IBV_ACCESS_LOCAL_WRITE;
        let window = Arc::new(Window::new(&nic.pd, mr, range, access, &self.refused)?);
        let mut windows = self.windows.0.lock().unwrap();
        if windows.len() == windows.capacity() {
            // Sweep before the list grows, so that each window pays a constant cost.
            windows.retain(|window| window.is_open());
        }
        windows.push(window.clone());
        Ok(window)
    }

    /// The key of a registration with rights for every queue pair of the device.
    fn open_key(&self, device: usize) -> Result<u32, RdmaError> {
        let mut open = self.open.lock().unwrap();
        if let Some(mr) = open.get(&device) {
            return Ok(mr.rkey());
        }
        let (nic, _) = self.on(device)?;
        // SAFETY: the memory stays until this value is dropped, by the contract of `new`.
        let made = unsafe { self.memory.register(std::slice::from_ref(nic), |_| self.access) }?;
        let mr = made.mrs.into_iter().flatten().next();
        let mr = mr.ok_or(RdmaError::NoDevice { kind: "RDMA" })?;
        let key = mr.rkey();
        open.insert(device, mr);
        Ok(key)
    }

    fn on(&self, device: usize) -> Result<(&Arc<Nic>, &Arc<Mr>), RdmaError> {
        let mr = self.mrs.get(device).and_then(Option::as_ref);
        let on = self.nics.get(device).zip(mr);
        on.ok_or(RdmaError::NoDevice { kind: "RDMA" })
    }
}

impl Memory {
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the registration is dropped.
    unsafe fn register(
        &self,
        nics: &[Arc<Nic>],
        access: impl Fn(&Nic) -> c_uint + Sync,
    ) -> Result<Registration, RdmaError> {
        // SAFETY: the caller vouches for the memory.
        unsafe {
            match &self.gpu {
                Some(gpu) => Registration::of_gpu(nics, self.address, self.len, access, gpu),
                None => Registration::of_host(nics, self.address, self.len, access),
            }
        }
    }
}

impl RemoteKeys for Advertised {
    fn keys(&self) -> Vec<u32> {
        let of = |(nic, mr): (&Arc<Nic>, &Option<Arc<Mr>>)| match mr {
            Some(mr) if !nic.windows => mr.rkey(),
            _ => 0,
        };
        self.nics.iter().zip(&self.mrs).map(of).collect()
    }

    fn queue_key(&self, device: usize) -> Result<QueueKey, RdmaError> {
        let made = if self.refused.load(Ordering::Relaxed) {
            Err("the device does not bind windows to this memory".to_owned())
        } else {
            self.window(device).map_err(|error| error.to_string())
        };
        let why = match made {
            Ok(window) => return Ok(QueueKey::Window(window)),
            Err(why) => why,
        };
        let nic = self.on(device)?.0;
        if nic.config.windows == KeyWindows::Require {
            return Err(RdmaError::NoWindowLeft { device: nic.context.name().to_owned(), why });
        }
        tracing::debug!(why, device = nic.context.name(), "no memory window: a key for all peers");
        self.open_key(device).map(QueueKey::Open)
    }

    /// Closes the windows, and then deregisters the memory on all devices. Returns the
    /// registrations that a device refused to end.
    fn close(self: Box<Self>) -> Result<(), Box<dyn RemoteKeys>> {
        let Self { nics, memory, access, windows, mrs, refused, open } = *self;
        let mut done = windows.close();
        let mrs = mrs.into_iter().map(|mr| {
            // A window that is still open keeps its registration.
            let kept = match Arc::try_unwrap(mr?) {
                Ok(mr) => Arc::new(end(mr)?),
                Err(mr) => mr,
            };
            done = false;
            Some(kept)
        });
        let mrs = mrs.collect();
        let open = open.into_inner().unwrap().into_iter();
        let open: BTreeMap<usize, Mr> =
            open.filter_map(|(device, mr)| Some((device, end(mr)?))).collect();
        if done && open.is_empty() {
            return Ok(());
        }
        let open = Mutex::new(open);
        Err(Box::new(Self { nics, memory, access, windows, mrs, refused, open }))
    }
}

/// Deregisters memory on a device. Returns the registration if the device refuses.
fn end(mr: Mr) -> Option<Mr> {
    let (mr, error) = mr.close().err()?;
    not_ended(&error);
    Some(mr)
}

/// Registrations for our own requests, by start address. None lies inside another, so their ends
/// are in the order of their starts. Only the last one that starts at or before a range can cover
/// it.
pub(crate) struct RegistrationCache {
    by_start: Mutex<BTreeMap<u64, CachedRegistration>>,
    maps: Option<Maps>,
}

struct CachedRegistration {
    registration: Weak<Registration>,
    end: u64,
    pages: Same,
}

/// How the cache knows that a registration still has the pages at its addresses.
enum Same {
    While(Weak<()>),
    Tagged(Tag),
}

impl RegistrationCache {
    pub(crate) fn new() -> Self {
        Self { by_start: Mutex::default(), maps: Maps::open().ok() }
    }

    /// Finds a registration that covers the range and has its current pages.
    pub(crate) fn find(&self, start: u64, len: u64) -> Option<Arc<Registration>> {
        let mut by_start = self.by_start.lock().unwrap();
        loop {
            let (&at, CachedRegistration { registration, end, pages }) =
                by_start.range(..=start).next_back()?;
            if *end < start + len {
                return None;
            }
            let same = match pages {
                Same::While(kept) => kept.strong_count() > 0,
                Same::Tagged(tag) => {
                    self.maps.as_ref().is_some_and(|maps| tag.is_still_there(maps, start, len))
                }
            };
            if let (true, Some(found)) = (same, registration.upgrade()) {
                return Some(found);
            }
            // This entry can never cover anything again. An earlier one may.
            by_start.remove(&at);
        }
    }

    /// Must be called before the memory is registered, so that pages which change in between are
    /// noticed.
    fn mark(&self, start: u64, len: u64, keeper: Keeper<'_>) -> Option<Same> {
        match keeper {
            Keeper::Region(kept) => Some(Same::While(Arc::downgrade(kept))),
            Keeper::Caller => Tag::put(self.maps.as_ref()?, start, len).map(Same::Tagged),
        }
    }

    /// Adds a registration that no other covers. It replaces those that it covers.
    fn insert(&self, registration: &Arc<Registration>, pages: Same) {
        let mut by_start = self.by_start.lock().unwrap();
        let (start, end) = (registration.start, registration.start + registration.len);
        while let Some((&at, _)) = by_start.range(start..).next().filter(|(_, e)| e.end <= end) {
            by_start.remove(&at);
        }
        // Another thread may have inserted a larger one in the meantime.
        let before = by_start.range(..=start).next_back();
        if before.is_none_or(|(_, before)| before.end < end) {
            let registration = Arc::downgrade(registration);
            by_start.insert(start, CachedRegistration { registration, end, pages });
        }
    }
}

impl Rdma {
    /// Registers memory for our own requests. `gpu` says where it is, if it is GPU memory.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the registration is dropped.
    pub(super) unsafe fn register_own(
        &self,
        ptr: *mut u8,
        len: usize,
        keeper: Keeper<'_>,
        gpu: Option<&Located>,
    ) -> Result<Arc<Registration>, RdmaError> {
        if let Some(located) = gpu {
            gpu::check_local(located)?;
            let (address, access) = (ptr as u64, |_: &Nic| IBV_ACCESS_LOCAL_WRITE);
            // SAFETY: the caller vouches for the memory.
            return unsafe { Registration::of_gpu(&self.nics, address, len, access, located) }
                .map(Arc::new);
        }
        if let Some(found) = self.cache.find(ptr as u64, len as u64) {
            return Ok(found);
        }
        let pages = self.cache.mark(ptr as u64, len as u64, keeper);
        let (start, access) = (ptr.expose_provenance() as u64, |_: &Nic| IBV_ACCESS_LOCAL_WRITE);
        // SAFETY: the caller vouches for the memory.
        let made = unsafe { Registration::of_host(&self.nics, start, len, access) }?;
        let made = Arc::new(made);
        // Without a mark the cache could not recognise changed pages, so the registration is not
        // shared.
        if let Some(pages) = pages {
            self.cache.insert(&made, pages);
        }
        Ok(made)
    }

    /// Registers memory for requests of peers with exactly these rights. `gpu` says where it is, if
    /// it is GPU memory.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the registration is dropped.
    pub(super) unsafe fn register_for_peers(
        &self,
        ptr: *mut u8,
        len: usize,
        access: Access,
        gpu: Option<&Located>,
    ) -> Result<Advertised, RdmaError> {
        let mut flags = 0;
        if access.allows(Access::READ) {
            flags |= IBV_ACCESS_REMOTE_READ;
        }
        if access.allows(Access::WRITE) {
            // Verbs require local write access together with remote write access.
            flags |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
        }
        if let Some(located) = gpu {
            gpu::check_remote(located, access)?;
        }
        let memory = Memory { address: ptr.expose_provenance() as u64, len, gpu: gpu.cloned() };
        // SAFETY: the caller vouches for the memory.
        unsafe { Advertised::new(&self.nics, memory, flags) }
    }
}
