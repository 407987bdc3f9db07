//! A kernel that stays on the GPU and takes tasks from rings in pinned memory: no launch, no event,
//! two crossings of the bus. The GPU side is `peerway_copy_resident` in `kernels/copy.cu`.
//!
//! Every block of the kernel has a ring of slots that only the host writes, and a line of words
//! that only the block writes. The line holds the number of tasks of its ring that the block has
//! done in total, and the last launch that the block has left. The host deals tasks to the blocks
//! in turn, large ones in parts. A ticket is done when every block has done the tasks that were
//! dealt to it by then.
//!
//! The host reuses a slot when the block has reported its task as done. Each word of a slot has a
//! phase bit that flips with every lap of the ring. So the block never takes a word of the previous
//! lap for a new one, in whatever order words arrive. The block acquires the word with the length:
//! everything visible to the host thread before it wrote the task is visible to the block when it
//! copies.
//!
//! # Why no task is lost when the kernel leaves
//!
//! The kernel must leave if no tasks come, and after some time in any case: callers that wait for
//! all work on the GPU wait for it too. Launches follow each other in one stream, each with a
//! number.
//!
//! 1. A block leaves only when it has done and reported every task that it took. It then writes the
//!    launch's number, and takes no more tasks.
//! 2. A launch begins at the positions that the blocks reported, after the previous launch has
//!    ended for all of them. So no task is taken twice, and none is skipped.
//! 3. Every block of a launch looks at its ring at least once.
//! 4. If a block has tasks and has left the newest launch, [`Resident::poll`] launches again. If a
//!    task was written while its block was leaving, either the block's last look found it, or
//!    `poll` finds the block gone. By 3, the new launch takes it.
//!
//! A block that leaves first tells the others through a word in device memory. They leave when they
//! have no task. So no block waits long for the next launch because one busy block delays it. That
//! block leaves when its time is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerway_sys::cuda::{CudaError, Grid, HostMemory, Plain, Stream};

use super::{CopierKind, CopierOptions, Fault, PeerCopy, Ticket, Watch, bytes_of, pause};
use crate::gpu::copy::Run;
use crate::gpu::device::Device;

/// Threads per block: the maximum that the kernel was compiled for.
const THREADS: u32 = 512;
/// Slots per ring: a power of two, and more than the 32 that a warp reads at once.
const SLOTS: u64 = 1024;
/// Bytes of a slot and of a block's line. A line spans two cache lines of the CPU, because the CPU
/// prefetches neighbours.
const SLOT: usize = 32;
const LINE: usize = 128;
/// The bit of the phase in a word.
const PHASE: u32 = 63;
/// A flag in the word with the length: asks the launch to end.
const LEAVE: u64 = 1 << 62;
/// Minimum length of a part of a task. A block copies it in about the time that it takes to receive
/// it.
const PART: u64 = 16 << 10;
/// Extra parts of a list per block, beyond its tasks. More than one, so that a block that finishes
/// early gets more work.
const PARTS: u64 = 4;
/// Maximum number of lists in progress.
const TICKETS: u64 = 256;
/// Bytes for the words that coordinate the blocks.
const TOGETHER: usize = 128;

pub(super) struct Resident {
    device: Arc<Device>,
    stream: Stream,
    /// The lines of all blocks, followed by their rings.
    memory: HostMemory,
    together: Plain,
    idle: u64,
    stay: u64,
    /// The number of the newest launch.
    launch: u32,
    /// Tasks of each ring that were written, and that are known to be done.
    written: Box<[u64]>,
    done: Box<[u64]>,
    /// For each ticket in progress, the number of tasks written to every ring by then.
    targets: Box<[u64]>,
    /// The next block in turn.
    turn: usize,
    submitted: Ticket,
    finished: Ticket,
    fault: Fault,
    watch: Watch,
}

impl Resident {
    pub(super) fn new(device: &Arc<Device>, options: &CopierOptions) -> Result<Self, CudaError> {
        let blocks = options.blocks.clamp(1, 128) as usize;
        let memory = device.host_memory(blocks * (LINE + SLOTS as usize * SLOT))?;
        // SAFETY: covers the new allocation, which no other code knows yet. The first lap has phase
        // 1, so zeros are no tasks.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        let together = Plain::allocate(&device.gpu, TOGETHER)?;
        // SAFETY: covers the new allocation.
        unsafe { device.fill_now(together.address(), 0, TOGETHER)? };
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut copier = Self {
            device: device.clone(),
            stream: Stream::urgent(&device.gpu)?,
            memory,
            together,
            idle: nanos(options.idle),
            stay: nanos(options.stay),
            launch: 0,
            written: vec![0; blocks].into(),
            done: vec![0; blocks].into(),
            targets: vec![0; TICKETS as usize * blocks].into(),
            turn: 0,
            submitted: 0,
            finished: 0,
            fault: Fault::default(),
            watch: Watch::default(),
        };
        // The driver loads code at the first launch, which takes milliseconds and waits for the
        // whole GPU. So make the first launch here, with a task that makes it leave at once.
        copier.write(0, [1, 0, LEAVE]);
        copier.start()?;
        copier.stream.synchronize()?;
        if !(copier.look(0) && (0..blocks).all(|block| copier.is_gone(block))) {
            return Err(device.gpu.refuse("peerway_copy_resident"));
        }
        Ok(copier)
    }

    fn blocks(&self) -> usize {
        self.written.len()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= self.memory.len());
        // SAFETY: the word lies inside the pinned memory, which is page-aligned, at a multiple of
        // eight. Words are only accessed as atomics, here and by the kernel.
        unsafe { &*self.memory.ptr().wrapping_add(at).cast::<AtomicU64>() }
    }

    /// Writes a task into the ring of a block that has room.
    fn write(&mut self, block: usize, task: [u64; 3]) {
        let at = self.written[block];
        let phase = ((at / SLOTS) & 1) ^ 1;
        let ring = self.blocks() * LINE + block * SLOTS as usize * SLOT;
        let slot = ring + (at % SLOTS) as usize * SLOT;
        for (word, value) in task.into_iter().enumerate() {
            // Pairs with the kernel's acquiring load of the last word.
            self.word(slot + word * 8).store(value | phase << PHASE, Ordering::Release);
        }
        self.written[block] += 1;
    }

    /// The next block in turn that has room.
    fn deal(&mut self) -> usize {
        loop {
            let block = self.turn;
            self.turn = (block + 1) % self.blocks();
            if self.written[block] - self.done[block] < SLOTS {
                return block;
            }
        }
    }

    /// Launches the kernel again, after the work in the stream.
    fn start(&mut self) -> Result<(), CudaError> {
        let Some(kernels) = self.device.kernels() else {
            return Err(self.device.gpu.refuse("cuModuleLoadData"));
        };
        let launch = self.launch.wrapping_add(1);
        let (mut base, mut together) = (self.memory.ptr() as u64, self.together.address());
        let (mut slots, mut number) = (SLOTS as u32, launch);
        let (mut idle, mut stay) = (self.idle, self.stay);
        let arguments = &mut [
            (&raw mut base).cast(),
            (&raw mut together).cast(),
            (&raw mut slots).cast(),
            (&raw mut number).cast(),
            (&raw mut idle).cast(),
            (&raw mut stay).cast(),
        ];
        let (blocks, stream) = (self.blocks() as u32, self.stream.raw());
        // SAFETY: these are the kernel's six parameters. The lines, the rings and the coordination
        // words stay until the stream is done. The callers of `submit` guarantee the tasks.
        unsafe {
            kernels.module.launch(
                kernels.resident,
                Grid::row(blocks, THREADS),
                stream,
                arguments,
            )?
        };
        self.launch = launch;
        Ok(())
    }

    /// Launches again if a block has left and still has tasks.
    fn start_where_gone(&mut self) -> Result<(), CudaError> {
        for block in 0..self.blocks() {
            if self.written[block] == self.done[block] {
                continue;
            }
            // In this order: a block reports its tasks as done before it reports that it has left.
            if self.is_gone(block) && !self.look(block) {
                return self.start();
            }
        }
        Ok(())
    }

    /// Whether a block has left the newest launch.
    fn is_gone(&self, block: usize) -> bool {
        // Pairs with the block's fence before it writes the word.
        self.word(block * LINE + 8).load(Ordering::Acquire) == u64::from(self.launch)
    }

    /// Reads a block's progress. Returns whether it has done all of its tasks.
    fn look(&mut self, block: usize) -> bool {
        // Pairs with the block's fence before it writes the word.
        self.done[block] = self.word(block * LINE).load(Ordering::Acquire);
        self.done[block] == self.written[block]
    }
}

impl PeerCopy for Resident {
    fn kind(&self) -> CopierKind {
        CopierKind::Resident
    }

    fn most(&self) -> usize {
        self.blocks() * (SLOTS - PARTS) as usize
    }

    fn room(&self) -> usize {
        if self.submitted - self.finished == TICKETS {
            return 0;
        }
        let taken: u64 = self.written.iter().zip(&self.done).map(|(all, done)| all - done).sum();
        self.most().saturating_sub(taken as usize)
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
        // No address or length of a process needs these bits; the kernel uses them.
        if bytes >= LEAVE || runs.iter().any(|run| (run.src | run.dst) >> PHASE != 0) {
            return Err(self.device.gpu.refuse("peerway_copy_resident"));
        }
        if bytes == 0 {
            return Ok(Some(self.submitted));
        }
        // `most` reserves space for these parts: each whole part is a share of the list's bytes.
        let shares = self.blocks() as u64 * PARTS;
        let part = bytes.div_ceil(shares).next_multiple_of(4096).max(PART);
        for run in runs {
            let mut at = 0;
            while at < run.len {
                let len = part.min(run.len - at);
                let block = self.deal();
                self.write(block, [run.src + at, run.dst + at, len]);
                at += len;
            }
        }
        self.submitted += 1;
        let row = (self.submitted % TICKETS) as usize * self.blocks();
        self.targets[row..row + self.written.len()].copy_from_slice(&self.written);
        let started = self.start_where_gone();
        self.fault.keep(started)?;
        Ok(Some(self.submitted))
    }

    fn poll(&mut self) -> Result<Ticket, CudaError> {
        self.fault.check()?;
        if self.finished == self.submitted {
            return Ok(self.finished);
        }
        let mut moved = false;
        for block in 0..self.blocks() {
            let before = self.done[block];
            if before != self.written[block] {
                self.look(block);
                moved |= self.done[block] != before;
            }
        }
        while self.finished < self.submitted {
            let row = ((self.finished + 1) % TICKETS) as usize * self.blocks();
            let targets = &self.targets[row..row + self.done.len()];
            if targets.iter().zip(&self.done).any(|(target, done)| done < target) {
                break;
            }
            self.finished += 1;
        }
        if moved {
            self.watch.reset();
        } else {
            let looked = self.start_where_gone();
            let looked = looked.and_then(|()| self.watch.look(&self.device, &self.stream));
            self.fault.keep(looked)?;
        }
        Ok(self.finished)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // A forked child has neither the kernel nor the rings.
        if !self.device.gpu.cuda().is_ours() {
            return;
        }
        let begun = Instant::now();
        while self.finished < self.submitted && self.poll().is_ok() {
            pause(begun);
        }
        if self.fault.check().is_ok() {
            // There are no more launches. Either the newest launch takes this task, or it has
            // already left.
            self.write(0, [u64::from(self.launch), 0, LEAVE]);
        }
        // Free the rings only after the kernel has left.
        let _ = self.stream.synchronize();
    }
}
