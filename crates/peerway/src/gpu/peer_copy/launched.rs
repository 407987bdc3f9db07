//! A kernel launch for every list. The launch itself describes a few small tasks; other lists are
//! in pinned memory.
//!
//! All launches use one stream, so they end in order. Each writes its ticket into the same word of
//! pinned memory, which becomes visible some microseconds sooner than an event. A list's memory is
//! reused when its launch is done, so there are no more launches in progress than lists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_sys::cuda::{CudaError, Grid, HostMemory, Plain, Stream};

use super::{CopierKind, Fault, PeerCopy, Ticket, Watch, bytes_of};
use crate::gpu::copy::{self, MANY, Run};
use crate::gpu::device::Device;

/// Maximum number of launches in progress.
const PLACES: u64 = 8;
/// Entries per list, after tasks are cut into parts: see `copy::list_runs`.
const ENTRIES: usize = 2 * MANY;
/// Bytes for the word, which has its own cache line after the lists.
const LINE: usize = 128;

pub(super) struct Launched {
    device: Arc<Device>,
    stream: Stream,
    /// The lists, followed by the word.
    memory: HostMemory,
    /// A counter for the blocks of a launch.
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
        // SAFETY: covers the new allocation, which no other code knows yet.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        let ended = Plain::allocate(&device.gpu, LINE)?;
        // SAFETY: covers the new allocation.
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

    /// The low 32 bits of the last completed ticket.
    fn word(&self) -> &AtomicU32 {
        let at = self.memory.ptr().wrapping_add(self.memory.len() - LINE);
        // SAFETY: the word lies inside the pinned memory, which is page-aligned, and is only
        // accessed as an atomic.
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
            // SAFETY: the caller upholds this function's contract. `self` owns the word until the
            // stream is done.
            return unsafe {
                copy::launch_few(kernels, self.stream.raw(), runs, bytes, word, value)
            };
        }
        let list = self.list(ticket);
        // SAFETY: a list has space for the parts of `MANY` tasks, and nothing reads it now.
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
        // SAFETY: these are the kernel's five parameters. The list stays until its ticket is done.
        // The caller upholds this function's contract.
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
            // SAFETY: the caller upholds the contract of `submit`. There was room, so the launch
            // that used this list is done.
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
        // Pairs with the kernel's fence before it writes the word.
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
        // Wait for the kernels before the lists and the word are freed.
        let _ = self.stream.synchronize();
    }
}
