//! GPU memory, host memory for GPUs, and pointer attributes.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::error::CudaError;
use super::ffi::*;
use super::gpu::Gpu;
use super::table::Cuda;

/// The driver's view of an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Pointer {
    /// Unknown to the driver: host memory that GPUs reach only through copies by the driver.
    Pageable,
    /// Host memory that is pinned or registered for GPUs.
    Pinned {
        /// Kernels reach it at the same address.
        mapped: bool,
    },
    /// Memory that migrates between host and GPU.
    Managed,
    /// Memory of a GPU.
    Device {
        /// The GPU's index in this process.
        ordinal: u32,
        /// The start of the allocation.
        base: u64,
        /// The length of the allocation.
        len: u64,
        /// The id of the allocation. The driver never reuses it.
        buffer: u64,
        /// The handle types for export (`CU_MEM_HANDLE_TYPE_*`). 0 for plain memory.
        handles: u32,
        /// `cuIpcGetMemHandle` accepts it.
        legacy_ipc: bool,
    },
}

impl Pointer {
    /// Reads the attributes of an address from the driver.
    ///
    /// # Errors
    ///
    /// The driver's error. An address that the driver does not know is not an error.
    pub fn of(cuda: &Cuda, address: u64) -> Result<Self, CudaError> {
        let (mut kind, mut managed, mut ordinal): (c_uint, c_int, c_int) = (0, 0, 0);
        let (mut base, mut len, mut buffer, mut handles): (u64, u64, u64, u64) = (0, 0, 0, 0);
        let (mut legacy_ipc, mut device_pointer): (c_int, u64) = (0, 0);
        let mut which = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_BUFFER_ID,
            CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        ];
        let mut into: [*mut c_void; 9] = [
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut base).cast(),
            (&raw mut len).cast(),
            (&raw mut buffer).cast(),
            (&raw mut handles).cast(),
            (&raw mut legacy_ipc).cast(),
            (&raw mut device_pointer).cast(),
        ];
        // SAFETY: driver contract: nine attributes, and a place of the right size for each.
        let result = unsafe {
            (cuda.symbols.cuPointerGetAttributes)(9, which.as_mut_ptr(), into.as_mut_ptr(), address)
        };
        cuda.check("cuPointerGetAttributes", None, result)?;
        Ok(match kind {
            _ if managed != 0 => Self::Managed,
            CU_MEMORYTYPE_HOST => Self::Pinned { mapped: device_pointer == address },
            CU_MEMORYTYPE_DEVICE => Self::Device {
                ordinal: ordinal as u32,
                base,
                len,
                buffer,
                handles: handles as u32,
                legacy_ipc: legacy_ipc != 0,
            },
            _ => Self::Pageable,
        })
    }
}

/// Memory from `cuMemAlloc`.
pub struct Plain {
    gpu: Arc<Gpu>,
    address: u64,
}

impl Plain {
    /// Allocates `len` bytes.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn allocate(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: writes one address.
            let result = unsafe { (current.symbols().cuMemAlloc_v2)(&mut address, len) };
            current.check("cuMemAlloc", result)
        })?;
        Ok(Self { gpu: gpu.clone(), address })
    }

    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: allocated once, and all use has ended.
            let result = unsafe { (current.symbols().cuMemFree_v2)(self.address) };
            current.check("cuMemFree", result)
        });
    }
}

/// GPU memory without an address (`cuMemCreate`).
pub struct Physical {
    gpu: Arc<Gpu>,
    handle: CUmemGenericAllocationHandle,
    len: usize,
}

/// How memory can be shared with another process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Shared {
    /// Within an NVLink fabric, also with other hosts.
    Fabric,
    /// As a file descriptor.
    PosixFd,
}

impl Shared {
    fn code(self) -> c_uint {
        match self {
            Self::Fabric => CU_MEM_HANDLE_TYPE_FABRIC,
            Self::PosixFd => CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        }
    }
}

/// A handle that another process can import.
#[derive(Debug)]
pub enum Exported {
    /// A fabric handle.
    Fabric([u8; 64]),
    /// A file descriptor.
    PosixFd(OwnedFd),
}

impl Physical {
    /// The allocation granularity for such memory.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn granularity(gpu: &Gpu, shared: Shared, rdma: bool) -> Result<usize, CudaError> {
        let properties = properties(gpu, shared, rdma);
        let mut granularity = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: writes one size.
            let result = unsafe {
                (current.symbols().cuMemGetAllocationGranularity)(
                    &mut granularity,
                    &properties,
                    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                )
            };
            current.check("cuMemGetAllocationGranularity", result)
        })?;
        Ok(granularity.max(1))
    }

    /// Allocates `len` bytes, which must be a multiple of the granularity.
    ///
    /// # Errors
    ///
    /// The driver's error. Error 800 means that the fabric daemon is not running, whatever the
    /// attribute reports.
    pub fn create(
        gpu: &Arc<Gpu>,
        len: usize,
        shared: Shared,
        rdma: bool,
    ) -> Result<Self, CudaError> {
        let properties = properties(gpu, shared, rdma);
        let mut handle = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: writes one handle.
            let result =
                unsafe { (current.symbols().cuMemCreate)(&mut handle, len, &properties, 0) };
            current.check("cuMemCreate", result)
        })?;
        Ok(Self { gpu: gpu.clone(), handle, len })
    }

    /// The allocation behind `address`, if `cuMemCreate` allocated it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn of_address(gpu: &Arc<Gpu>, address: u64, len: usize) -> Result<Self, CudaError> {
        let mut handle = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: writes one handle, which `drop` releases.
            let result = unsafe {
                (current.symbols().cuMemRetainAllocationHandle)(&mut handle, address as *mut c_void)
            };
            current.check("cuMemRetainAllocationHandle", result)
        })?;
        Ok(Self { gpu: gpu.clone(), handle, len })
    }

    /// Imports memory that another process exported as a file descriptor. `len` comes from that
    /// process; the driver refuses to map more than the allocation has.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn import_fd(gpu: &Arc<Gpu>, fd: BorrowedFd<'_>, len: usize) -> Result<Self, CudaError> {
        let os_handle = fd.as_raw_fd() as usize as *mut c_void;
        Self::import(gpu, os_handle, Shared::PosixFd, len)
    }

    /// Imports memory that another process exported to a fabric.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn import_fabric(gpu: &Arc<Gpu>, handle: &[u8; 64], len: usize) -> Result<Self, CudaError> {
        let mut handle = CUmemFabricHandle { data: *handle };
        Self::import(gpu, (&raw mut handle).cast(), Shared::Fabric, len)
    }

    fn import(
        gpu: &Arc<Gpu>,
        os_handle: *mut c_void,
        shared: Shared,
        len: usize,
    ) -> Result<Self, CudaError> {
        let mut handle = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: the handle has the named type and outlives the call.
            let result = unsafe {
                (current.symbols().cuMemImportFromShareableHandle)(
                    &mut handle,
                    os_handle,
                    shared.code(),
                )
            };
            current.check("cuMemImportFromShareableHandle", result)
        })?;
        Ok(Self { gpu: gpu.clone(), handle, len })
    }

    /// Exports a handle for another process.
    ///
    /// # Errors
    ///
    /// The driver's error. The driver refuses memory that was not created for this kind of export.
    pub fn export(&self, shared: Shared) -> Result<Exported, CudaError> {
        let mut fabric = [0u8; 64];
        let mut fd: c_int = -1;
        let into: *mut c_void = match shared {
            Shared::Fabric => fabric.as_mut_ptr().cast(),
            Shared::PosixFd => (&raw mut fd).cast(),
        };
        self.gpu.with(|current| {
            // SAFETY: driver contract: `into` has room for a handle of this type.
            let result = unsafe {
                (current.symbols().cuMemExportToShareableHandle)(
                    into,
                    self.handle,
                    shared.code(),
                    0,
                )
            };
            current.check("cuMemExportToShareableHandle", result)
        })?;
        Ok(match shared {
            Shared::Fabric => Exported::Fabric(fabric),
            // SAFETY: the call created the descriptor and transferred its ownership.
            Shared::PosixFd => Exported::PosixFd(unsafe { OwnedFd::from_raw_fd(fd) }),
        })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps the memory at an address that its own GPU and the GPUs in `peers` can use.
    ///
    /// # Errors
    ///
    /// The driver's error. Nothing stays mapped or reserved.
    pub fn map(self, peers: &[u32]) -> Result<Mapped, CudaError> {
        let gpu = self.gpu.clone();
        let len = self.len;
        let mut reserved = Reserved { gpu: gpu.clone(), address: 0, len: 0 };
        gpu.with(|current| {
            let symbols = current.symbols();
            let mut address = 0;
            // SAFETY: driver contract: writes one address.
            let result = unsafe { (symbols.cuMemAddressReserve)(&mut address, len, 0, 0, 0) };
            current.check("cuMemAddressReserve", result)?;
            (reserved.address, reserved.len) = (address, len);
            // SAFETY: driver contract: the range was just reserved, and the memory has that length.
            let result = unsafe { (symbols.cuMemMap)(address, len, 0, self.handle, 0) };
            current.check("cuMemMap", result)
        })?;
        let mapped = Mapped { reserved, _physical: self };
        let access: Vec<CUmemAccessDesc> = std::iter::once(gpu.ordinal())
            .chain(peers.iter().copied().filter(|peer| *peer != gpu.ordinal()))
            .map(|ordinal| CUmemAccessDesc {
                location: location(ordinal),
                flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        gpu.with(|current| {
            // SAFETY: driver contract: the range is mapped, and the descriptions outlive the call.
            let result = unsafe {
                (current.symbols().cuMemSetAccess)(
                    mapped.address(),
                    len,
                    access.as_ptr(),
                    access.len(),
                )
            };
            current.check("cuMemSetAccess", result)
        })?;
        Ok(mapped)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: created or retained once. A mapping keeps the memory by
            // itself.
            let result = unsafe { (current.symbols().cuMemRelease)(self.handle) };
            current.check("cuMemRelease", result)
        });
    }
}

/// Mapped GPU memory. `drop` unmaps it, so all use must have ended by then.
pub struct Mapped {
    /// Dropped first: the range is unmapped before the memory is released.
    reserved: Reserved,
    _physical: Physical,
}

struct Reserved {
    gpu: Arc<Gpu>,
    address: u64,
    len: usize,
}

impl Mapped {
    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.reserved.address
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.reserved.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.reserved.len == 0
    }

    /// See [`Physical::export`].
    ///
    /// # Errors
    ///
    /// As for [`Physical::export`].
    pub fn export(&self, shared: Shared) -> Result<Exported, CudaError> {
        self._physical.export(shared)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        let _ = self.gpu.with(|current| {
            let symbols = current.symbols();
            // SAFETY: driver contract: reserved once. Unmapping a range that was never mapped fails
            // without effect.
            let result = unsafe {
                (symbols.cuMemUnmap)(self.address, self.len);
                (symbols.cuMemAddressFree)(self.address, self.len)
            };
            current.check("cuMemAddressFree", result)
        });
    }
}

/// Memory of another process, opened with a handle from its `cuIpcGetMemHandle`.
pub struct Opened {
    gpu: Arc<Gpu>,
    address: u64,
}

impl Opened {
    /// Opens a handle. The driver refuses handles of this process itself.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn open(gpu: &Arc<Gpu>, handle: &[u8; 64]) -> Result<Self, CudaError> {
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let mut address = 0;
        gpu.with(|current| {
            // SAFETY: driver contract: writes one address, which `drop` closes.
            let result = unsafe {
                (current.symbols().cuIpcOpenMemHandle_v2)(
                    &mut address,
                    handle,
                    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
                )
            };
            current.check("cuIpcOpenMemHandle", result)
        })?;
        Ok(Self { gpu: gpu.clone(), address })
    }

    /// The address of the first byte of the allocation behind the handle.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: opened once, and all use has ended.
            let result = unsafe { (current.symbols().cuIpcCloseMemHandle)(self.address) };
            current.check("cuIpcCloseMemHandle", result)
        });
    }
}

impl Gpu {
    /// A handle with which another process on this host opens the allocation that contains
    /// `address`.
    ///
    /// # Errors
    ///
    /// The driver's error. The driver refuses memory from `cuMemCreate`.
    pub fn ipc_handle(&self, address: u64) -> Result<[u8; 64], CudaError> {
        let mut handle = CUipcMemHandle::zeroed();
        self.with(|current| {
            // SAFETY: driver contract: writes 64 bytes. The driver refuses an address that is not
            // the GPU's.
            let result = unsafe { (current.symbols().cuIpcGetMemHandle)(&mut handle, address) };
            current.check("cuIpcGetMemHandle", result)
        })?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// The start and the length of the allocation or mapping that contains an address. If several
    /// allocations are mapped to one address range, it is shorter than the range in the pointer
    /// attributes.
    ///
    /// # Errors
    ///
    /// The driver's error. The driver refuses an address that is not the GPU's.
    pub fn mapping_of(&self, address: u64) -> Result<(u64, u64), CudaError> {
        let (mut base, mut len) = (0, 0);
        self.with(|current| {
            // SAFETY: driver contract: writes an address and a size.
            let result = unsafe {
                (current.symbols().cuMemGetAddressRange_v2)(&mut base, &mut len, address)
            };
            current.check("cuMemGetAddressRange", result)
        })?;
        Ok((base, len as u64))
    }

    /// Exports GPU memory as a dma-buf, which NICs can register.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn dma_buf(&self, address: u64, len: usize) -> Result<OwnedFd, CudaError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let Some(export) = self.cuda.symbols.cuMemGetHandleForAddressRange else {
            return Err(CudaError::missing(CALL, Some(self.ordinal())));
        };
        let mut fd: c_int = -1;
        self.with(|current| {
            // SAFETY: driver contract: writes one descriptor.
            let result = unsafe {
                export((&raw mut fd).cast(), address, len, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0)
            };
            current.check(CALL, result)
        })?;
        // SAFETY: the call created the descriptor and transferred its ownership.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Pinned host memory, which GPUs reach at full speed.
pub struct HostMemory {
    gpu: Arc<Gpu>,
    ptr: *mut u8,
    len: usize,
}

// SAFETY: it is plain memory that code reaches only through raw pointers.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates pinned memory that every GPU of the process may use.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn allocate(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        let mut ptr = std::ptr::null_mut();
        gpu.with(|current| {
            let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: driver contract: writes one pointer.
            let result = unsafe { (current.symbols().cuMemHostAlloc)(&mut ptr, len, flags) };
            current.check("cuMemHostAlloc", result)
        })?;
        Ok(Self { gpu: gpu.clone(), ptr: ptr.cast(), len })
    }

    /// The address of the first byte, for the processor and for GPUs.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: allocated once, and all use has ended.
            let result = unsafe { (current.symbols().cuMemFreeHost)(self.ptr.cast()) };
            current.check("cuMemFreeHost", result)
        });
    }
}

/// Host memory of another owner that is pinned for GPUs.
pub struct PinnedRange {
    gpu: Arc<Gpu>,
    ptr: *mut u8,
}

// SAFETY: the value only names memory and never touches it.
unsafe impl Send for PinnedRange {}
// SAFETY: as above.
unsafe impl Sync for PinnedRange {}

impl PinnedRange {
    /// Pins memory that is mapped in this process.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until this is dropped.
    ///
    /// # Errors
    ///
    /// The driver's error, for example for memory that is already pinned.
    pub unsafe fn pin(gpu: &Arc<Gpu>, ptr: *mut u8, len: usize) -> Result<Self, CudaError> {
        gpu.with(|current| {
            let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
            let register = |flags| {
                // SAFETY: driver contract; the caller guarantees that the memory stays mapped.
                let result =
                    unsafe { (current.symbols().cuMemHostRegister_v2)(ptr.cast(), len, flags) };
                current.check("cuMemHostRegister", result)
            };
            // A mapping that this process cannot write needs the flag for it. The driver has no
            // query for that, and the flag would bar copies into other memory.
            let written = register(flags);
            written
                .or_else(|error| register(flags | CU_MEMHOSTREGISTER_READ_ONLY).map_err(|_| error))
        })?;
        Ok(Self { gpu: gpu.clone(), ptr })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: `pin` registered it once.
            let result = unsafe { (current.symbols().cuMemHostUnregister)(self.ptr.cast()) };
            current.check("cuMemHostUnregister", result)
        });
    }
}

fn location(ordinal: u32) -> CUmemLocation {
    CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as c_int }
}

fn properties(gpu: &Gpu, shared: Shared, rdma: bool) -> CUmemAllocationProp {
    let mut properties = CUmemAllocationProp::zeroed();
    properties.type_ = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = shared.code();
    properties.location = location(gpu.ordinal());
    properties.allocFlags.gpuDirectRDMACapable = u8::from(rdma);
    properties
}
