//! A GPU with the resources for copies: streams, events, pinned words, kernels.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crossbeam_queue::ArrayQueue;
use peerway_sys::cuda::ffi::CUstream;
use peerway_sys::cuda::{
    Cuda, CudaError, Event, Function, Gpu, Grid, HostMemory, Module, Physical, Shared, Stream,
};

use super::DeviceMemoryKind;
use super::staging::Buffer;
use crate::os::affinity;

/// Streams that copies use in turn. A GPU has a few copy engines, and one copy saturates one of
/// them.
const STREAMS: usize = 4;
/// Number of events kept for reuse.
const EVENTS: usize = 64;
/// Number of words with which kernels report completion.
pub(crate) const FLAGS: usize = 4096;

/// A GPU in use; see the module.
pub(crate) struct Device {
    pub(crate) gpu: Arc<Gpu>,
    streams: Vec<Stream>,
    next: AtomicUsize,
    events: ArrayQueue<Event>,
    flags: Flags,
    kernels: OnceLock<Option<Kernels>>,
    /// Constant facts that cost a driver call to query.
    learned: Mutex<Learned>,
}

#[derive(Default)]
struct Learned {
    granularity: Vec<((Shared, bool), usize)>,
    refused: Vec<(DeviceMemoryKind, String)>,
}

/// Words in pinned memory.
struct Flags {
    memory: HostMemory,
    free: ArrayQueue<u32>,
    /// Words that a stream may still read.
    retired: Mutex<Vec<(Flag, Mark)>>,
}

/// The copy kernels, loaded.
pub(crate) struct Kernels {
    pub(crate) module: Module,
    pub(crate) runs: Function,
    pub(crate) blocks: Function,
    pub(crate) few: Function,
    pub(crate) list: Function,
    /// Its copier makes the first launch, because it needs rings.
    pub(crate) resident: Function,
}

impl Device {
    pub(crate) fn open(cuda: &Arc<Cuda>, index: u32) -> Result<Self, CudaError> {
        let gpu = Gpu::open(cuda, index)?;
        let streams = (0..STREAMS).map(|_| Stream::new(&gpu)).collect::<Result<_, _>>()?;
        // One cache line per word, so that a kernel's write does not disturb a thread that polls
        // another word. One extra word is for the test launches of `Kernels::load`.
        let memory = HostMemory::allocate(&gpu, (FLAGS + 1) * 64)?;
        // SAFETY: covers the new allocation, which no other code knows yet. Streams read eight
        // bytes per word, of which four are the word, so all bytes must be zero.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        let free = ArrayQueue::new(FLAGS);
        for flag in 0..FLAGS as u32 {
            let _ = free.push(flag);
        }
        Ok(Self {
            gpu,
            streams,
            next: AtomicUsize::new(0),
            events: ArrayQueue::new(EVENTS),
            flags: Flags { memory, free, retired: Mutex::default() },
            kernels: OnceLock::new(),
            learned: Mutex::default(),
        })
    }

    /// The allocation granularity of this kind of memory.
    pub(super) fn granularity(&self, shared: Shared, rdma: bool) -> Result<usize, CudaError> {
        let mut learned = self.learned.lock().unwrap();
        if let Some((_, unit)) = learned.granularity.iter().find(|(of, _)| *of == (shared, rdma)) {
            return Ok(*unit);
        }
        let unit = Physical::granularity(&self.gpu, shared, rdma)?;
        learned.granularity.push(((shared, rdma), unit));
        Ok(unit)
    }

    /// Why the driver permanently refuses this kind of memory, if it does.
    pub(super) fn refused(&self, kind: DeviceMemoryKind) -> Option<String> {
        let learned = self.learned.lock().unwrap();
        learned.refused.iter().find(|(of, _)| *of == kind).map(|(_, why)| why.clone())
    }

    /// Records that the driver permanently refuses this kind of memory.
    pub(super) fn refuse(&self, kind: DeviceMemoryKind, why: String) {
        self.learned.lock().unwrap().refused.push((kind, why));
    }

    /// Allocates pinned host memory, near the GPU if possible.
    pub(crate) fn host_memory(&self, len: usize) -> Result<HostMemory, CudaError> {
        let node = self.gpu.facts().numa.and_then(|node| u16::try_from(node).ok());
        affinity::near(node, || HostMemory::allocate(&self.gpu, len))
    }

    /// The GPU's number in this process.
    pub(crate) fn index(&self) -> u32 {
        self.gpu.ordinal()
    }

    /// The stream for the next copy.
    pub(crate) fn stream(&self) -> &Stream {
        &self.streams[self.next.fetch_add(1, Ordering::Relaxed) % STREAMS]
    }

    /// The copy kernels. `None` if the driver cannot load them, which is logged once.
    pub(crate) fn kernels(&self) -> Option<&Kernels> {
        let kernels = self.kernels.get_or_init(|| {
            let loaded = Kernels::load(self);
            loaded.inspect_err(|error| tracing::warn!(%error, "cannot load the copy kernels")).ok()
        });
        kernels.as_ref()
    }

    /// Prepares everything that transfers need from the driver. Loading code and allocating memory
    /// wait for all work of the process on the GPU. So neither may happen while a stream waits for
    /// the transfer.
    pub(crate) fn warm_up(self: &Arc<Self>) -> Result<(), CudaError> {
        self.kernels();
        Buffer::reserve(self)
    }

    /// Copies and waits for the copy.
    ///
    /// # Safety
    ///
    /// Both ranges are valid.
    pub(crate) unsafe fn copy_now(&self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        let stream = self.stream();
        // SAFETY: the caller guarantees the ranges, and this function waits for the stream.
        unsafe { self.gpu.copy(to, from, len, stream.raw())? };
        stream.synchronize()
    }

    /// Sets bytes of GPU memory and waits.
    ///
    /// # Safety
    ///
    /// The range is valid.
    pub(crate) unsafe fn fill_now(&self, at: u64, value: u8, len: usize) -> Result<(), CudaError> {
        let stream = self.stream();
        // SAFETY: the caller guarantees the range, and this function waits for the stream.
        unsafe { self.gpu.fill(at, value, len, stream.raw())? };
        stream.synchronize()
    }

    /// Marks the current end of a stream.
    ///
    /// # Safety
    ///
    /// The stream is alive and belongs to this GPU.
    pub(crate) unsafe fn mark(self: &Arc<Self>, stream: CUstream) -> Result<Mark, CudaError> {
        let event = match self.events.pop() {
            Some(event) => event,
            None => Event::new(&self.gpu)?,
        };
        // SAFETY: the caller upholds this function's contract.
        unsafe { event.record(stream)? };
        Ok(Mark { device: self.clone(), event: Some(event) })
    }

    /// A word for a kernel to write; `None` if all are in use.
    pub(crate) fn flag(self: &Arc<Self>, stream: CUstream) -> Option<Flag> {
        self.flags
            .retired
            .lock()
            .unwrap()
            .retain(|(_, passed)| !matches!(passed.is_done(), Ok(true)));
        let index = self.flags.free.pop()?;
        let flag = Flag { device: self.clone(), index, stream };
        flag.word().store(0, Ordering::Relaxed);
        Some(flag)
    }
}

impl Kernels {
    /// Loads the kernels and launches each once without work, because the driver loads code at the
    /// first launch.
    fn load(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: `COPY_PTX` is NUL-terminated PTX.
        let module = unsafe { Module::load(&device.gpu, COPY_PTX.as_bytes()) }?;
        let kernels = Self {
            runs: module.function(c"peerway_copy_runs")?,
            blocks: module.function(c"peerway_copy_blocks")?,
            few: module.function(c"peerway_copy_few")?,
            list: module.function(c"peerway_copy_list")?,
            resident: module.function(c"peerway_copy_resident")?,
            module,
        };
        let stream = device.stream();
        // Zeros for every parameter, of which `Few` is the largest: no pieces, and no flag to
        // write.
        let mut zeros = [0u64; 256];
        let word = device.flags.memory.ptr() as u64;
        let mut flag = word + (FLAGS as u64) * 64;
        let argument: *mut c_void = zeros.as_mut_ptr().cast();
        let grid = Grid::row(1, 32);
        // SAFETY: all counts are zero, so the kernels use no address except the flag's. That is the
        // extra word, which is reserved for this.
        unsafe {
            kernels.module.launch(kernels.runs, grid, stream.raw(), &mut [argument; 2])?;
            kernels.module.launch(kernels.blocks, grid, stream.raw(), &mut [argument; 8])?;
            let few = &mut [argument, (&raw mut flag).cast(), argument];
            kernels.module.launch(kernels.few, grid, stream.raw(), few)?;
            let list = &mut [argument, argument, argument, (&raw mut flag).cast(), argument];
            kernels.module.launch(kernels.list, grid, stream.raw(), list)?;
        }
        stream.synchronize()?;
        Ok(kernels)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

/// A point in a stream: all earlier work is done, or not yet.
pub(crate) struct Mark {
    device: Arc<Device>,
    event: Option<Event>,
}

impl Mark {
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        self.event.as_ref().map_or(Ok(true), Event::is_done)
    }

    /// Blocks until the stream has reached it.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.event.as_ref().map_or(Ok(()), Event::synchronize)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            // If the queue is full, the event is destroyed.
            let _ = self.device.events.push(event);
        }
    }
}

/// A word that a kernel writes when it is done.
pub(crate) struct Flag {
    device: Arc<Device>,
    index: u32,
    stream: CUstream,
}

// SAFETY: any thread may use a stream's handle. Only `as_mark` uses it, and only for streams of the
// device.
unsafe impl Send for Flag {}
// SAFETY: as for `Send`.
unsafe impl Sync for Flag {}

/// The value that a kernel writes into its word.
pub(crate) const RAISED: u32 = 1;

impl Flag {
    fn word(&self) -> &AtomicU32 {
        let at = self.device.flags.memory.ptr().wrapping_add(self.index as usize * 64);
        // SAFETY: the word lies inside the pinned memory, which the device keeps, and is only
        // accessed as an atomic.
        unsafe { &*at.cast::<AtomicU32>() }
    }

    /// The address that the kernel writes.
    pub(crate) fn address(&self) -> u64 {
        self.word().as_ptr() as u64
    }

    pub(crate) fn is_raised(&self) -> bool {
        // Pairs with the kernel's fence before it writes the word.
        self.word().load(Ordering::Acquire) == RAISED
    }

    /// Frees the word once the stream has reached a mark.
    pub(crate) fn retire(self, passed: Mark) {
        let device = self.device.clone();
        device.flags.retired.lock().unwrap().push((self, passed));
    }

    /// Lets waiting streams continue.
    pub(crate) fn raise(&self) {
        self.word().store(RAISED, Ordering::Release);
    }

    /// Makes later waits block until the next `raise`.
    pub(crate) fn lower(&self) {
        self.word().store(0, Ordering::Release);
    }

    /// A mark after the kernel in the stream, to block on it or to detect that the kernel failed.
    pub(crate) fn as_mark(&self) -> Result<Mark, CudaError> {
        // SAFETY: only flags for streams of the device (`copy::Done`) are converted to a mark.
        unsafe { self.device.mark(self.stream) }
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        // Reached only when the kernel is done or will never run: see `copy::Done`.
        let _ = self.device.flags.free.push(self.index);
    }
}

/// `kernels/copy.cu`, compiled by `cargo xtask kernels`.
const COPY_PTX: &str = concat!(include_str!("../../kernels/copy.ptx"), "\0");
