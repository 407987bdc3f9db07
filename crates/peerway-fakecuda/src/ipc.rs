//! Legacy IPC: `cuMemAlloc` memory for other processes.
//!
//! A handle names an allocation, whichever address inside it was given. Opening the handle returns
//! the address of the allocation's start. The opener maps the segment's file. A second file, the
//! ticket, exists only as long as the allocation. It shows whether a handle is still valid.

use std::ffi::{c_char, c_uint};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::arena::GRANULE;
use crate::calls::{call_in_context, call_to_give_back, put, valid};
use crate::lock;
use crate::memfd::{self, What};
use crate::physical::{Physical, next_id};
use crate::space::{Kind, Mapping};

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    call_in_context("cuIpcGetMemHandle", |machine, _| {
        if !machine.script.ipc {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        valid(!handle.is_null())?;
        let mut space = lock(&machine.space);
        let (start, _) = space.mapping_at(pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mapping = space.mappings.get_mut(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let Mapping { physical, kind: Kind::Plain { ticket, .. }, .. } = mapping else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        if ticket.is_none() {
            let name = Physical::name(What::Ticket, physical.name.device, 0, false)?;
            let file = memfd::create(name, 0).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            *ticket = Some((file, name.nonce));
        }
        let (file, nonce) = ticket.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
        let made = IpcHandle {
            process: std::process::id(),
            ticket: file.as_raw_fd(),
            ticket_nonce: *nonce,
            segment: physical.fd.as_raw_fd(),
            segment_nonce: physical.name.nonce,
            offset: mapping.offset,
            size: mapping.size,
        };
        let reserved = made.encode().map(|byte| byte as c_char);
        // SAFETY: by the pointers contract.
        unsafe { put(handle, CUipcMemHandle { reserved }) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuIpcOpenMemHandle_v2", |machine, device| {
        if !machine.script.ipc {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        valid(!pointer.is_null() && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)?;
        let wrong = CUDA_ERROR_INVALID_VALUE;
        let handle = IpcHandle::decode(&handle.reserved.map(|byte| byte as u8)).ok_or(wrong)?;
        let IpcHandle { process, ticket_nonce: ticket, offset, size, .. } = handle;
        valid(memfd::is_there(process, handle.ticket, ticket))?;
        if process == std::process::id() {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        let mut space = lock(&machine.space);
        for (start, mapping) in &mut space.mappings {
            if let Kind::Opened { ticket: known, count, .. } = &mut mapping.kind
                && *known == ticket
            {
                *count += 1;
                // SAFETY: by the pointers contract.
                return unsafe { put(pointer, *start) };
            }
        }
        let file = memfd::open(process, handle.segment, handle.segment_nonce);
        let (fd, name) = file.filter(|(_, name)| name.what == What::Segment).ok_or(wrong)?;
        let owner = machine.device(name.device.cast_signed())?.index;
        let physical = Arc::new(Physical::import(fd, name)?);
        let fits = offset.checked_add(size).is_some_and(|end| size > 0 && end <= physical.size);
        valid(fits && physical.size.is_multiple_of(GRANULE))?;
        let area = physical.size;
        let base = space.arena.reserve(area, GRANULE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let bits = 1 << owner | 1 << device.index;
        let kind = Kind::Opened { ticket, count: 1, by: device.index, area: (base, area) };
        let id = next_id();
        let mapping = Mapping { size, physical, offset, id, readers: bits, writers: bits, kind };
        space.mappings.insert(base + offset, mapping);
        // SAFETY: by the pointers contract.
        unsafe { put(pointer, base + offset) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> CUresult {
    call_to_give_back("cuIpcCloseMemHandle", |machine| {
        let mut space = lock(&machine.space);
        let mapping = space.mappings.get_mut(&pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let Kind::Opened { count, .. } = &mut mapping.kind else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        *count -= 1;
        if *count == 0 {
            space.remove(machine, pointer);
        }
        Ok(())
    })
}

/// The contents of the 64 bytes of a handle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct IpcHandle {
    process: u32,
    ticket: RawFd,
    segment: RawFd,
    ticket_nonce: u64,
    segment_nonce: u64,
    offset: u64,
    size: u64,
}

impl IpcHandle {
    const MAGIC: [u8; 8] = *b"fakecipc";

    fn encode(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&Self::MAGIC);
        bytes[8..12].copy_from_slice(&self.process.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.ticket.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.segment.to_le_bytes());
        let words = [self.ticket_nonce, self.segment_nonce, self.offset, self.size];
        for (into, word) in bytes[24..].chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; 64]) -> Option<Self> {
        if !bytes.starts_with(&Self::MAGIC) {
            return None;
        }
        let number = |at: usize| bytes[at..].first_chunk().map(|four| u32::from_le_bytes(*four));
        let word = |at: usize| bytes[at..].first_chunk().map(|eight| u64::from_le_bytes(*eight));
        Some(Self {
            process: number(8)?,
            ticket: number(12)?.cast_signed(),
            segment: number(16)?.cast_signed(),
            ticket_nonce: word(24)?,
            segment_nonce: word(32)?,
            offset: word(40)?,
            size: word(48)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_as_it_was_written() {
        let handle = IpcHandle {
            process: 77,
            ticket: 5,
            segment: 6,
            ticket_nonce: 1 << 60,
            segment_nonce: 3,
            offset: 512,
            size: 100,
        };
        assert_eq!(IpcHandle::decode(&handle.encode()), Some(handle));
        assert_eq!(IpcHandle::decode(&[0; 64]), None);
    }
}
