//! Pinned buffers. GPU memory passes through them on its way to and from wires, and kernels read
//! lists from them.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use peerway_sys::cuda::{CudaError, HostMemory};

use super::copy::{self, Done, Gathered, Run};
use super::device::Device;
use crate::os::Piece;
use crate::os::pages::Pages;

/// Maximum number of buffers per GPU in this process: 64 MiB of pinned memory. Lanes have 8 MiB in
/// flight.
const MOST: usize = 64;

/// A pinned buffer. Drop returns it to the pool.
pub(crate) struct Buffer {
    memory: BufferMemory,
    gpu: u32,
}

enum BufferMemory {
    Pinned(HostMemory),
    /// Used if all pinned buffers are in use. The driver copies it in its own steps, at a fifth of
    /// the speed.
    Heap(Pages),
    Gone,
}

#[derive(Default)]
struct Pool {
    free: Vec<HostMemory>,
    made: usize,
}

static POOLS: LazyLock<Mutex<HashMap<u32, Pool>>> = LazyLock::new(Mutex::default);

impl Buffer {
    /// Length in bytes: the maximum payload of a frame.
    pub(crate) const LEN: usize = peerway_core::wire::MAX_PAYLOAD as usize;

    /// Takes a pinned buffer; `None` if all are in use.
    pub(crate) fn take(device: &Arc<Device>) -> Result<Option<Self>, CudaError> {
        let gpu = device.index();
        let mut pools = POOLS.lock().unwrap();
        let pool = pools.entry(gpu).or_default();
        if let Some(memory) = pool.free.pop() {
            return Ok(Some(Self { memory: BufferMemory::Pinned(memory), gpu }));
        }
        if pool.made >= MOST {
            return Ok(None);
        }
        match device.host_memory(Self::LEN) {
            Ok(memory) => {
                pool.made += 1;
                Ok(Some(Self { memory: BufferMemory::Pinned(memory), gpu }))
            }
            // No more pinned memory is available, as if all buffers were in use.
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Allocates all buffers in advance.
    pub(super) fn reserve(device: &Arc<Device>) -> Result<(), CudaError> {
        let mut held = Vec::new();
        while held.len() < MOST
            && let Some(buffer) = Self::take(device)?
        {
            held.push(buffer);
        }
        Ok(())
    }

    /// Takes a buffer, pinned if one is available.
    pub(crate) fn any(device: &Arc<Device>) -> Result<Self, CudaError> {
        if let Some(buffer) = Self::take(device)? {
            return Ok(buffer);
        }
        let memory = BufferMemory::Heap(Pages::new(Self::LEN, None));
        Ok(Self { memory, gpu: device.index() })
    }

    /// Whether kernels can access it.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.memory, BufferMemory::Pinned(_))
    }

    /// First byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        match &self.memory {
            BufferMemory::Pinned(memory) => memory.ptr(),
            BufferMemory::Heap(memory) => memory.ptr(),
            BufferMemory::Gone => std::ptr::null_mut(),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let BufferMemory::Pinned(memory) =
            std::mem::replace(&mut self.memory, BufferMemory::Gone)
        {
            let mut pools = POOLS.lock().unwrap();
            pools.entry(self.gpu).or_default().free.push(memory);
        }
    }
}

/// A copy between GPU memory and a staging buffer, in progress or done.
pub(crate) struct StagedCopy {
    /// Dropped first: its drop waits for the copy.
    done: Option<Done>,
    buffer: Buffer,
}

impl StagedCopy {
    /// Starts to copy pieces of memory into a buffer, one after the other. They must fit.
    ///
    /// # Safety
    ///
    /// The pieces stay valid until the copy is done. With `by_kernel`, the GPU's threads can access
    /// all of them.
    pub(crate) unsafe fn fetch(
        device: &Arc<Device>,
        pieces: impl Iterator<Item = Piece>,
        by_kernel: bool,
    ) -> Result<Self, CudaError> {
        let run = |piece: Piece, dst| Run { src: piece.addr, dst, len: piece.len };
        // SAFETY: the caller upholds this function's contract.
        unsafe { Self::start(device, Buffer::any(device)?, pieces, by_kernel, run) }
    }

    /// Starts to copy a buffer's bytes to pieces of memory.
    ///
    /// # Safety
    ///
    /// As for [`Self::fetch`].
    pub(crate) unsafe fn put(
        device: &Arc<Device>,
        buffer: Buffer,
        pieces: impl Iterator<Item = Piece>,
        by_kernel: bool,
    ) -> Result<Self, CudaError> {
        let run = |piece: Piece, src| Run { src, dst: piece.addr, len: piece.len };
        // SAFETY: the caller upholds this function's contract.
        unsafe { Self::start(device, buffer, pieces, by_kernel, run) }
    }

    /// Copies between the pieces and consecutive parts of the buffer.
    ///
    /// # Safety
    ///
    /// As for [`Self::fetch`].
    unsafe fn start(
        device: &Arc<Device>,
        buffer: Buffer,
        pieces: impl Iterator<Item = Piece>,
        by_kernel: bool,
        run: impl Fn(Piece, u64) -> Run,
    ) -> Result<Self, CudaError> {
        let fill = |list: &mut Gathered| {
            list.by_kernel = by_kernel && buffer.is_pinned();
            for piece in pieces {
                list.runs.push(run(piece, buffer.ptr() as u64 + list.bytes));
                list.bytes += piece.len;
                debug_assert!(list.bytes <= Buffer::LEN as u64);
            }
            Ok::<(), CudaError>(())
        };
        // SAFETY: the caller upholds the contract for the pieces. `Self` owns the buffer, and drops
        // it after `done`.
        let done = unsafe { copy::submit(device, None, fill)? };
        Ok(Self { done, buffer })
    }

    pub(crate) fn is_done(&mut self) -> Result<bool, CudaError> {
        self.done.as_ref().map_or(Ok(true), Done::is_done)
    }

    /// Needed because a failed kernel raises no flag: see [`Done::look_closer`].
    pub(crate) fn look_closer(&mut self) -> Result<(), CudaError> {
        self.done.as_mut().map_or(Ok(()), Done::look_closer)
    }

    /// Blocks until the copy is done.
    pub(crate) fn wait(&mut self) -> Result<(), CudaError> {
        self.done.as_mut().map_or(Ok(()), Done::wait)
    }

    /// Waits for the copy and returns the buffer.
    pub(crate) fn into_buffer(mut self) -> Buffer {
        drop(self.done.take());
        self.buffer
    }
}
