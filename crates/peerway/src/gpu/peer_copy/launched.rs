//! A kernel for every list: few small tasks are described in the launch itself, others in pinned memory.
//!
//! All launches are in one stream, so they end in their order, and each says so by writing its ticket into the same word of
//! pinned memory, which is seen some microseconds sooner than an event. A list's memory is used again when its launch is
//! done, which is why there are no more launches under way than there are lists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_sys::cuda::{CudaError, Grid, HostMemory, Plain, Stream};

use super::{CopierKind, Fault, PeerCopy, Ticket, Watch, bytes_of};
use crate::gpu::copy::{self, MANY, Run};
use crate::gpu::device::Device;

/// Launches under way.
const PLACES: u64 = 8;
/// What tasks are cut into: see `copy::list_runs`.
const ENTRIES: usize = 2 * MANY;
/// The word, with a line of its own behind the lists.
const LINE: usize = 128;

pub(super) struct Launched {
    device: Arc<Device>,
    stream: Stream,
    /// The lists, and behind them the word.
    memory: HostMemory,
    /// What the blocks of a launch count in.
    ended: Plain,
    submitted: Ticket,
    done: Ticket,
    fault: Fault,
    watch: Watch,
}

impl Launched {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let lists = PLACES as usize * ENTRIES * size_of::<Run>();
        let memory = device.host_memory(lists + LINE)?;
        // SAFETY: all of it, which nobody else knows yet.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        let ended = Plain::allocate(&device.gpu, LINE)?;
        // SAFETY: all of it.
        unsafe { device.fill_now(ended.address(), 0, LINE)? };
        Ok(Self {
            device: device.clone(),
            stream: Stream::urgent(&device.gpu)?,
            memory,
            ended,
            submitted: 0,
            done: 0,
            fault: Fault::default(),
            watch: Watch::default(),
        })
    }

    fn list(&self, ticket: Ticket) -> *mut Run {
        let place = (ticket % PLACES) as usize;
        self.memory.ptr().cast::<Run>().wrapping_add(place * ENTRIES)
    }

    /// The last ticket that is done, as far as it fits.
    fn word(&self) -> &AtomicU32 {
        let at = self.memory.ptr().wrapping_add(self.memory.len() - LINE);
        // SAFETY: inside the pinned memory, which is aligned to pages; the word is only used as an atomic.
        unsafe { &*at.cast::<AtomicU32>() }
    }

    /// # Safety
    ///
    /// As for [`PeerCopy::submit`]; the list of that ticket is free.
    unsafe fn launch(&self, ticket: Ticket, runs: &[Run], bytes: u64) -> Result<(), CudaError> {
        let Some(kernels) = self.device.kernels() else {
            return Err(self.device.gpu.refuse("cuModuleLoadData"));
        };
        let (mut word, mut value) = (self.word().as_ptr() as u64, ticket as u32);
        if copy::is_few(runs.len(), bytes) {
            // SAFETY: the caller's promise; the word is ours until the stream is done.
            return unsafe {
                copy::launch_few(kernels, self.stream.raw(), runs, bytes, word, value)
            };
        }
        let list = self.list(ticket);
        // SAFETY: a list has room for the parts of `MANY` tasks, and nobody reads it now.
        let mut entries = unsafe { copy::list_runs(runs, bytes, list) };
        let (mut list, mut ended) = (list as u64, self.ended.address());
        let arguments = &mut [
            (&raw mut list).cast(),
            (&raw mut entries).cast(),
            (&raw mut ended).cast(),
            (&raw mut word).cast(),
            (&raw mut value).cast(),
        ];
        let (blocks, threads) = (copy::grid(&self.device, entries), copy::THREADS);
        // SAFETY: the kernel's five parameters; the list stays until its ticket is done; the rest is the caller's
        // promise.
        unsafe {
            kernels.module.launch(
                kernels.list,
                Grid::row(blocks, threads),
                self.stream.raw(),
                arguments,
            )
        }
    }
}

impl PeerCopy for Launched {
    fn kind(&self) -> CopierKind {
        CopierKind::Launched
    }

    fn most(&self) -> usize {
        MANY
    }

    fn room(&self) -> usize {
        if self.submitted - self.done < PLACES { MANY } else { 0 }
    }

    fn last(&self) -> Ticket {
        self.submitted
    }

    unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, CudaError> {
        self.fault.check()?;
        if runs.len() > self.room() {
            return Ok(None);
        }
        let bytes = bytes_of(runs);
        if bytes > 0 {
            // SAFETY: the caller's promise; the launch that had the list is done, as there was room.
            let launched = unsafe { self.launch(self.submitted + 1, runs, bytes) };
            self.fault.keep(launched)?;
            self.submitted += 1;
        }
        Ok(Some(self.submitted))
    }

    fn poll(&mut self) -> Result<Ticket, CudaError> {
        self.fault.check()?;
        if self.done == self.submitted {
            return Ok(self.done);
        }
        // pairs with the kernel's fence before it writes the word
        let more = self.word().load(Ordering::Acquire).wrapping_sub(self.done as u32);
        if more == 0 {
            let looked = self.watch.look(&self.device, &self.stream);
            self.fault.keep(looked)?;
        } else {
            self.watch.reset();
            self.done += u64::from(more);
        }
        Ok(self.done)
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // The lists and the word are given back.
        let _ = self.stream.synchronize();
    }
}
