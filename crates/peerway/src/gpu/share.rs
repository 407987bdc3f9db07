//! GPU memory between processes: what an owner offers with an advertisement, and the mappings of
//! offers from peers.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use peerway_core::region::Span;
use peerway_core::wire::{GpuHandle, GpuOffer};
use peerway_sys::cuda::ffi::{CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
use peerway_sys::cuda::{CudaError, Exported, Mapped, Opened, Physical, Shared};

use super::device::Device;
use super::{Allocation, Located, in_use};
use crate::os::gate::GateRef;
use crate::worker::REAPER;

/// Number of a peer's allocations that stay mapped for the next import, most recently used first.
const KEPT: usize = 16;

/// The offer that lets a peer on this host map local GPU memory, with its file descriptor. `None`
/// if the memory cannot be shared.
pub(crate) fn offer(
    located: &Located,
    first: u64,
    span: Span,
) -> Option<(GpuOffer, Option<OwnedFd>)> {
    let buffer = located.allocation.buffer;
    let address = first + span.offset;
    let (base, len) = located.device.gpu.mapping_of(address).ok()?;
    let inside = Span { offset: base, len }.contains(Span { offset: address, len: span.len });
    // A range that consists of several mapped allocations has no handle of its own.
    if !inside || !located.is_still_there(address) {
        return None;
    }
    let (handle, fd) = export(&located.device, &located.allocation, base, len)
        .inspect_err(|error| tracing::debug!(%error, "cannot export GPU memory to a peer"))
        .ok()?;
    let uuid = located.device.gpu.facts().uuid;
    Some((GpuOffer { uuid, handle, len, offset: address - base, buffer }, fd))
}

fn export(
    device: &Arc<Device>,
    allocation: &Allocation,
    base: u64,
    len: u64,
) -> Result<(GpuHandle, Option<OwnedFd>), CudaError> {
    let Allocation { handles, legacy_ipc, .. } = *allocation;
    if legacy_ipc {
        let handle = device.gpu.ipc_handle(base)?;
        return Ok((GpuHandle::Ipc(halves(handle)), None));
    }
    let physical = Physical::of_address(&device.gpu, base, len as usize)?;
    let fd = handles & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0;
    let fabric = handles & CU_MEM_HANDLE_TYPE_FABRIC != 0;
    let shared = if fabric && !fd { Shared::Fabric } else { Shared::PosixFd };
    Ok(match physical.export(shared)? {
        Exported::Fabric(handle) => (GpuHandle::Fabric(halves(handle)), None),
        Exported::PosixFd(fd) => (GpuHandle::PosixFd, Some(fd)),
    })
}

fn halves(bytes: [u8; 64]) -> [[u8; 32]; 2] {
    let mut halves = [[0; 32]; 2];
    halves[0].copy_from_slice(&bytes[..32]);
    halves[1].copy_from_slice(&bytes[32..]);
    halves
}

fn whole(halves: [[u8; 32]; 2]) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..32].copy_from_slice(&halves[0]);
    bytes[32..].copy_from_slice(&halves[1]);
    bytes
}

/// A peer's offer of GPU memory. The first transfer that needs the memory maps it, if this process
/// uses a GPU by then. An offer alone does not make the process use a GPU.
pub(crate) struct Offered {
    offer: GpuOffer,
    fd: Option<OwnedFd>,
    pub(crate) gate: GateRef,
    opened: OnceLock<Option<Arc<Imported>>>,
}

/// A peer's allocation that is mapped here.
pub(crate) struct Imported {
    pub(crate) device: Arc<Device>,
    pub(super) base: u64,
    /// Number of bytes that are really mapped from `base`, regardless of the peer's claim.
    len: u64,
    buffer: u64,
    handle: GpuHandle,
    _mapping: GpuMapping,
}

enum GpuMapping {
    Opened { _memory: Opened },
    Mapped { _memory: Mapped },
}

/// A peer's allocations that are mapped here, so that the next import of one needs no driver call.
#[derive(Default)]
pub(crate) struct Opens(Mutex<VecDeque<(Arc<Imported>, GateRef)>>);

impl Offered {
    /// Accepts an offer; `None` if it is inconsistent.
    pub(crate) fn new(
        offer: GpuOffer,
        fd: Option<OwnedFd>,
        len: u64,
        gate: GateRef,
    ) -> Option<Self> {
        is_whole(&offer, fd.as_ref(), len).then(|| Self {
            offer,
            fd,
            gate,
            opened: OnceLock::new(),
        })
    }

    /// Maps the memory, if that is possible and was not tried before.
    pub(crate) fn open(&self, opens: &Opens, peer: SocketAddr) -> Option<&Arc<Imported>> {
        if let Some(opened) = self.opened.get() {
            return opened.as_ref();
        }
        let device = in_use()?.near(&self.offer.uuid)?;
        let opened = self.opened.get_or_init(|| {
            opens
                .open(&device, &self.offer, self.fd.as_ref(), &self.gate)
                .inspect_err(|error| {
                    tracing::warn!(%error, %peer, "cannot map a peer's GPU memory");
                })
                .ok()
        });
        opened.as_ref()
    }

    /// Its first byte here and the GPU that accesses it, once it is mapped.
    pub(crate) fn mapped(&self) -> Option<(u64, &Arc<Device>)> {
        let imported = self.opened.get()?.as_ref()?;
        Some((imported.base + self.offer.offset, &imported.device))
    }
}

impl Opens {
    fn open(
        &self,
        device: &Arc<Device>,
        offer: &GpuOffer,
        fd: Option<&OwnedFd>,
        gate: &GateRef,
    ) -> Result<Arc<Imported>, CudaError> {
        let mut opens = self.0.lock().unwrap();
        // The owner may free withdrawn memory at any time, so it must not stay mapped as a cache.
        opens.retain(|(_, gate)| gate.is_open());
        let same = |imported: &Imported| {
            imported.buffer == offer.buffer
                && imported.handle == offer.handle
                && imported.device.index() == device.index()
                && offer.len <= imported.len
        };
        if let Some(at) = opens.iter().position(|(imported, _)| same(imported)) {
            let found = opens.remove(at).map(|(imported, _)| imported);
            if let Some(imported) = found {
                opens.push_front((imported.clone(), gate.clone()));
                return Ok(imported);
            }
        }
        let imported = Arc::new(import(device, offer, fd)?);
        opens.push_front((imported.clone(), gate.clone()));
        opens.truncate(KEPT);
        Ok(imported)
    }

    /// Drops all mappings, because the peer is gone or closing.
    pub(crate) fn forget(&self) {
        let opens = std::mem::take(&mut *self.0.lock().unwrap());
        if !opens.is_empty() {
            // Unmapping may wait for the GPU, and the progress thread must not.
            REAPER.run(move || drop(opens));
        }
    }
}

/// Whether `len` bytes lie in the offered allocation, and the file descriptor is present if the
/// handle needs one.
pub(super) fn is_whole(offer: &GpuOffer, fd: Option<&OwnedFd>, len: u64) -> bool {
    let allocation = Span { offset: 0, len: offer.len };
    let fits = allocation.contains(Span { offset: offer.offset, len });
    fits && (offer.handle != GpuHandle::PosixFd || fd.is_some())
}

/// Maps an offered allocation. The offer has passed [`is_whole`].
pub(super) fn import(
    device: &Arc<Device>,
    offer: &GpuOffer,
    fd: Option<&OwnedFd>,
) -> Result<Imported, CudaError> {
    let (gpu, len) = (&device.gpu, offer.len as usize);
    let map = |physical: Physical| {
        let mapped = physical.map(&[])?;
        Ok::<_, CudaError>((mapped.address(), GpuMapping::Mapped { _memory: mapped }))
    };
    let (base, mapping) = match (offer.handle, fd) {
        (GpuHandle::Ipc(handle), _) => {
            let opened = Opened::open(gpu, &whole(handle))?;
            (opened.address(), GpuMapping::Opened { _memory: opened })
        }
        (GpuHandle::Fabric(handle), _) => map(Physical::import_fabric(gpu, &whole(handle), len)?)?,
        (GpuHandle::PosixFd, Some(fd)) => map(Physical::import_fd(gpu, fd.as_fd(), len)?)?,
        // `Offered::new` and `ImportedMemory::open` refuse such an offer.
        (GpuHandle::PosixFd, None) => unreachable!("an offer without its file descriptor"),
    };
    let (start, mapped) = gpu.mapping_of(base)?;
    let len = start.saturating_add(mapped).saturating_sub(base);
    let (buffer, handle) = (offer.buffer, offer.handle);
    if len < offer.len {
        // Returning unmaps it: the offer claims more bytes than there are.
        return Err(gpu.refuse("cuMemGetAddressRange"));
    }
    Ok(Imported { device: device.clone(), base, len, buffer, handle, _mapping: mapping })
}
