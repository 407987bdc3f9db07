//! GPU memory for RDMA devices.
//!
//! The first choice needs no kernel module of the GPU's vendor. The pages of the range are exported
//! as a dma-buf, and each device registers only the range, under its GPU addresses. Where the GPU,
//! the device or the kernel does not support that, the range is registered by its address like host
//! memory, which works with `nvidia_peermem`. Only an attempt tells whether either way works.
//!
//! A registration covers one allocation, named by the driver's buffer id, and serves one region or
//! advertisement. So memory that was freed and allocated again at the same address is never reached
//! through a registration of the old allocation.

use std::ffi::{c_uint, c_void};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use peerway_core::region::Access;
use peerway_sys::verbs::Mr;
use peerway_sys::verbs::ffi::IBV_ACCESS_RELAXED_ORDERING;

use super::keys::{RegisteredAs, Registration};
use super::nic::Nic;
use crate::gpu::Located;
use crate::transport::error::RdmaError;

impl Registration {
    /// Registers memory of a GPU.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until the registration is dropped.
    pub(super) unsafe fn of_gpu(
        nics: &[Arc<Nic>],
        address: u64,
        len: usize,
        access: impl Fn(&Nic) -> c_uint + Sync,
        located: &Located,
    ) -> Result<Self, RdmaError> {
        let gpu = located.device.index();
        let access = |nic: &Nic| access(nic) | IBV_ACCESS_RELAXED_ORDERING;
        let made = dma_buf(located, address, len).and_then(|(fd, offset)| {
            let on = |nic: &Nic| {
                let access = access(nic);
                // SAFETY: the caller vouches for the memory, and this is its dma-buf.
                unsafe { Mr::register_dmabuf(&nic.pd, fd.as_fd(), offset, len, address, access) }
            };
            Self::make(nics, address, len, RegisteredAs::DmaBuf, on)
                .map_err(|error| error.to_string())
        });
        let made = match made {
            Ok(made) => made,
            Err(dma_buf) => {
                tracing::debug!(gpu, why = dma_buf, "GPU memory has no dma-buf for devices");
                let on = |nic: &Nic| {
                    let ptr = std::ptr::without_provenance_mut::<c_void>(address as usize);
                    // SAFETY: the caller vouches for the memory.
                    unsafe { Mr::register(&nic.pd, ptr, len, access(nic)) }
                };
                Self::make(nics, address, len, RegisteredAs::PeerMemory, on).map_err(|error| {
                    let by_address = error.to_string();
                    RdmaError::GpuMemory { gpu, dma_buf, by_address }
                })?
            }
        };
        // The region was made from this allocation, and buffer ids are not reused. If the id is
        // still the same, the devices have registered this allocation.
        if !located.is_still_there(address) {
            return Err(RdmaError::GpuMemoryFreed { gpu, address });
        }
        let how = made.how();
        tracing::debug!(
            gpu,
            address = format_args!("{address:#x}"),
            len,
            ?how,
            "GPU memory registered"
        );
        Ok(made)
    }
}

/// Exports a dma-buf of the pages that contain a range. Returns it with the offset of the range, or
/// the reason why there is none.
fn dma_buf(located: &Located, address: u64, len: usize) -> Result<(OwnedFd, u64), String> {
    let gpu = &located.device.gpu;
    // Trust the GPU when it denies support, but not when it claims it: only the export tells.
    if !gpu.facts().dma_buf {
        return Err("the GPU says that it has none".to_owned());
    }
    let page = rustix::param::page_size() as u64;
    let start = address - address % page;
    let end = address.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
    let pages = end.and_then(|end| usize::try_from(end - start).ok());
    let pages = pages.ok_or("it would leave the address space")?;
    let fd = gpu.dma_buf(start, pages).map_err(|error| error.to_string())?;
    Ok((fd, address - start))
}

/// Checks whether GPU memory may be registered for our own requests. A device that reads for us
/// writes into this memory, so the GPU must order those writes or support a flush.
pub(super) fn check_local(located: &Located) -> Result<(), RdmaError> {
    let gpu = &located.device.gpu;
    if gpu.facts().rdma_ordered {
        return Ok(());
    }
    let index = located.device.index();
    gpu.flush_rdma_writes()
        .map_err(|error| RdmaError::GpuUnordered { gpu: index, why: error.to_string() })
}

/// Checks whether GPU memory may be registered for requests of peers. Peers flush their writes by
/// reading some of the memory, so write access alone is not enough on a GPU that does not order
/// them.
pub(super) fn check_remote(located: &Located, access: Access) -> Result<(), RdmaError> {
    let ordered = located.device.gpu.facts().rdma_ordered;
    if ordered || !access.allows(Access::WRITE) || access.allows(Access::READ) {
        return Ok(());
    }
    let why =
        "it is advertised for writing only; peers flush what they wrote by reading".to_owned();
    Err(RdmaError::GpuUnordered { gpu: located.device.index(), why })
}
