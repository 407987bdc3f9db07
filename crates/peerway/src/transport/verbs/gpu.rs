//! GPU memory for RDMA devices.
//!
//! The way that needs no module of the GPU's vendor in the kernel comes first: the pages that a range lies in are
//! exported as a dma-buf, of which each device registers just the range, under the addresses that it has on the
//! GPU. Where the GPU, the device or the kernel cannot, the range is registered by its address like any other, which
//! `nvidia_peermem` makes work. An attempt is the only way to know either.
//!
//! A registration is of one allocation, named by the driver's buffer id, and serves one region or advertisement: what
//! was freed and allocated anew at the same address never is reached by an old one that somebody else made.

use std::ffi::{c_uint, c_void};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use peerway_core::region::Access;
use peerway_sys::verbs::Mr;
use peerway_sys::verbs::ffi::IBV_ACCESS_RELAXED_ORDERING;

use super::RdmaError;
use super::keys::{RegisteredAs, Registration};
use super::nic::Nic;
use crate::gpu::Located;

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
        access: c_uint,
        located: &Located,
    ) -> Result<Self, RdmaError> {
        let gpu = located.device.index();
        let access = access | IBV_ACCESS_RELAXED_ORDERING;
        let made = dma_buf(located, address, len).and_then(|(fd, offset)| {
            let on = |nic: &Nic| {
                // SAFETY: the caller vouches for the memory, of which this is a dma-buf.
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
                    unsafe { Mr::register(&nic.pd, ptr, len, access) }
                };
                Self::make(nics, address, len, RegisteredAs::PeerMemory, on).map_err(|error| {
                    let by_address = error.to_string();
                    RdmaError::GpuMemory { gpu, dma_buf, by_address }
                })?
            }
        };
        // It was that allocation when the region was made, and ids do not come again: so it was when the
        // devices took hold of it.
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

/// A dma-buf of the pages that a range lies in, and where in it the range starts; or why there is none.
fn dma_buf(located: &Located, address: u64, len: usize) -> Result<(OwnedFd, u64), String> {
    let gpu = &located.device.gpu;
    // The GPU's no is believed; its yes is not.
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

/// Whether memory of a GPU may be registered for requests of ours, as far as the order of writes goes: a device
/// that reads for us writes there.
pub(super) fn check_local(located: &Located) -> Result<(), RdmaError> {
    let gpu = &located.device.gpu;
    if gpu.facts().rdma_ordered {
        return Ok(());
    }
    let index = located.device.index();
    gpu.flush_rdma_writes()
        .map_err(|error| RdmaError::GpuUnordered { gpu: index, why: error.to_string() })
}

/// Likewise for requests of peers, which make sure by reading some of the memory that what they wrote is there.
pub(super) fn check_remote(located: &Located, access: Access) -> Result<(), RdmaError> {
    let ordered = located.device.gpu.facts().rdma_ordered;
    if ordered || !access.allows(Access::WRITE) || access.allows(Access::READ) {
        return Ok(());
    }
    let why =
        "it is advertised for writing only; peers flush what they wrote by reading".to_owned();
    Err(RdmaError::GpuUnordered { gpu: located.device.index(), why })
}
