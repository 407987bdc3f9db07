//! A kernel that stays on the GPU and takes tasks out of rings in pinned memory: no launch, no event, two crossings of the
//! bus. Its half is `peerway_copy_resident` in `kernels/copy.cu`.
//!
//! Every block of the kernel has a ring of slots that only the host writes, and a line of words that only the block writes:
//! how many tasks of its ring it has done in all, and in which launch it was gone. Tasks are dealt to the blocks in turns, large
//! ones in parts. A ticket is done when every block has done what had been dealt to it by then.
//!
//! A slot is used again when the block has said that it is done with it. Each of its words has a phase that turns with every
//! lap, so a word of the lap before is never taken for a new one, in whatever order words arrive. The word of the length is the
//! one that is acquired: what this thread knew before it wrote the task, the block knows when it copies.
//!
//! # Why no task is lost when the kernel leaves
//!
//! The kernel must leave when nothing comes, and after some time in any case: whoever waits for all work on the GPU waits for it
//! too. There is one launch after the other in one stream, each with a number.
//!
//! 1. A block leaves only when all that it took is done and said to be. It then says the launch's number, and takes nothing more.
//! 2. A launch begins where the blocks said they were, after the one before has ended for all of them. So nothing is
//!    taken twice, and nothing is passed over.
//! 3. Every block of a launch looks at its ring at least once.
//! 4. Where the newest launch is gone for a block that has tasks, [`Resident::poll`] launches again. A task that was written
//!    while its block was leaving was either seen by its last look, or is found by this one; by 3 it is taken.
//!
//! A block that leaves first tells the others, over a word in device memory, and they leave when they find nothing to
//! do: none waits long behind a launch that a single busy block holds up. That block leaves when its time is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerway_sys::cuda::{CudaError, Grid, HostMemory, Plain, Stream};

use super::{CopierKind, CopierOptions, Fault, PeerCopy, Ticket, Watch, bytes_of, pause};
use crate::gpu::copy::Run;
use crate::gpu::device::Device;

/// Threads of a block: the most that the kernel was compiled for.
const THREADS: u32 = 512;
/// Slots of a ring: a power of two, and more than the 32 that a warp reads at once.
const SLOTS: u64 = 1024;
/// Bytes of a slot, and of a block's line: two of the processor's, as it fetches neighbours.
const SLOT: usize = 32;
const LINE: usize = 128;
/// Where words have their phase.
const PHASE: u32 = 63;
/// In the word of the length: a wish that the launch ends.
const LEAVE: u64 = 1 << 62;
/// A part of a task is no shorter: a block copies it in about the time that it takes to hear of it.
const PART: u64 = 16 << 10;
/// Parts of a list for every block, besides its tasks: more than one, so that who is done first gets more.
const PARTS: u64 = 4;
/// Lists under way.
const TICKETS: u64 = 256;
/// The words that blocks agree by.
const TOGETHER: usize = 128;

pub(super) struct Resident {
    device: Arc<Device>,
    stream: Stream,
    /// The lines, and behind them the rings.
    memory: HostMemory,
    together: Plain,
    idle: u64,
    stay: u64,
    /// The number of the newest launch.
    launch: u32,
    /// Tasks of each ring that were written, and that are known to be done.
    written: Box<[u64]>,
    done: Box<[u64]>,
    /// For each ticket under way, what had been written to every ring by then.
    targets: Box<[u64]>,
    /// The block whose turn is next.
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
        // SAFETY: all of it, which nobody else knows yet. The first lap has the phase 1.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        let together = Plain::allocate(&device.gpu, TOGETHER)?;
        // SAFETY: all of it.
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
        // The driver loads code when it is first launched, which takes milliseconds and waits for the whole GPU. So the
        // first launch is for nothing, and leaves at once.
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
        // SAFETY: inside the pinned memory, which is aligned to pages, at a multiple of eight; words are only used as
        // atomics, here and by the kernel.
        unsafe { &*self.memory.ptr().wrapping_add(at).cast::<AtomicU64>() }
    }

    /// Writes a task into the ring of a block, which has room.
    fn write(&mut self, block: usize, task: [u64; 3]) {
        let at = self.written[block];
        let phase = ((at / SLOTS) & 1) ^ 1;
        let ring = self.blocks() * LINE + block * SLOTS as usize * SLOT;
        let slot = ring + (at % SLOTS) as usize * SLOT;
        for (word, value) in task.into_iter().enumerate() {
            // pairs with the kernel's acquiring load of the last of them
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

    /// Launches the kernel once more, behind what is in the stream.
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
        // SAFETY: the kernel's six parameters; lines and rings for so many blocks, and the words, stay until the stream
        // is done; tasks are what the callers of `submit` promised.
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

    /// Launches again where the kernel has left and there is something to do.
    fn start_where_gone(&mut self) -> Result<(), CudaError> {
        for block in 0..self.blocks() {
            if self.written[block] == self.done[block] {
                continue;
            }
            // In this order: what it has done was said before it was gone.
            if self.is_gone(block) && !self.look(block) {
                return self.start();
            }
        }
        Ok(())
    }

    /// Whether the newest launch has ended for a block.
    fn is_gone(&self, block: usize) -> bool {
        // pairs with the block's fence before it says so
        self.word(block * LINE + 8).load(Ordering::Acquire) == u64::from(self.launch)
    }

    /// Asks how far a block is; whether it has done all that it was given.
    fn look(&mut self, block: usize) -> bool {
        // pairs with the block's fence before it says so
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
        // No address of a process is so high, and no memory so large: the bits are the kernel's.
        if bytes >= LEAVE || runs.iter().any(|run| (run.src | run.dst) >> PHASE != 0) {
            return Err(self.device.gpu.refuse("peerway_copy_resident"));
        }
        if bytes == 0 {
            return Ok(Some(self.submitted));
        }
        // No more parts than there was room kept for: every whole part is a share of the list's bytes.
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
        // A child that was forked has neither the kernel nor the rings.
        if !self.device.gpu.cuda().is_ours() {
            return;
        }
        let begun = Instant::now();
        while self.finished < self.submitted && self.poll().is_ok() {
            pause(begun);
        }
        if self.fault.check().is_ok() {
            // Nobody launches any more: the newest launch takes it, or is gone.
            self.write(0, [u64::from(self.launch), 0, LEAVE]);
        }
        // The rings are given back, not before the kernel is gone.
        let _ = self.stream.synchronize();
    }
}
