//! A GPU with what copies need: streams, events, pinned words, kernels.

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

/// Streams that copies go round: a GPU has a few copy engines, and one copy fills one of them.
const STREAMS: usize = 4;
/// Events kept for the next copy.
const EVENTS: usize = 64;
/// Words by which kernels say that they are done.
pub(super) const FLAGS: usize = 4096;

/// See the module.
pub(crate) struct Device {
    pub(crate) gpu: Arc<Gpu>,
    streams: Vec<Stream>,
    next: AtomicUsize,
    events: ArrayQueue<Event>,
    flags: Flags,
    kernels: OnceLock<Option<Kernels>>,
    /// What does not change and costs a call to ask.
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
    /// Those that a stream may still look at.
    retired: Mutex<Vec<(Flag, Mark)>>,
}

/// The copy kernels, loaded.
pub(crate) struct Kernels {
    pub(crate) module: Module,
    pub(crate) runs: Function,
    pub(crate) blocks: Function,
    pub(crate) few: Function,
    pub(crate) list: Function,
    /// Run by its copier first: it wants rings.
    pub(crate) resident: Function,
}

impl Device {
    pub(crate) fn open(cuda: &Arc<Cuda>, index: u32) -> Result<Self, CudaError> {
        let gpu = Gpu::open(cuda, index)?;
        let streams = (0..STREAMS).map(|_| Stream::new(&gpu)).collect::<Result<_, _>>()?;
        // A cache line each, so that no kernel's answer disturbs who looks for another's.
        // One more than there are, for kernels that are tried out.
        let memory = HostMemory::allocate(&gpu, (FLAGS + 1) * 64)?;
        // SAFETY: all of it, which nobody else knows yet. Streams look at eight bytes, of which four are the word.
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

    /// The unit that memory of this kind comes in.
    pub(super) fn granularity(&self, shared: Shared, rdma: bool) -> Result<usize, CudaError> {
        let mut learned = self.learned.lock().unwrap();
        if let Some((_, unit)) = learned.granularity.iter().find(|(of, _)| *of == (shared, rdma)) {
            return Ok(*unit);
        }
        let unit = Physical::granularity(&self.gpu, shared, rdma)?;
        learned.granularity.push(((shared, rdma), unit));
        Ok(unit)
    }

    /// Why memory of this kind was refused, if it was for good.
    pub(super) fn refused(&self, kind: DeviceMemoryKind) -> Option<String> {
        let learned = self.learned.lock().unwrap();
        learned.refused.iter().find(|(of, _)| *of == kind).map(|(_, why)| why.clone())
    }

    /// Memory of this kind need not be asked for again.
    pub(super) fn refuse(&self, kind: DeviceMemoryKind, why: String) {
        self.learned.lock().unwrap().refused.push((kind, why));
    }

    /// Pinned memory of the host, near the GPU if that can be had.
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

    /// The copy kernels; `None` where the driver cannot load them, which is logged once.
    pub(crate) fn kernels(&self) -> Option<&Kernels> {
        let kernels = self.kernels.get_or_init(|| {
            let loaded = Kernels::load(self);
            loaded.inspect_err(|error| tracing::warn!(%error, "copies go one by one")).ok()
        });
        kernels.as_ref()
    }

    /// Has everything ready that transfers will want of the driver. What loads code or allocates waits for all work of
    /// the process on the GPU, so it cannot be done while a stream waits for the transfer.
    pub(crate) fn warm_up(self: &Arc<Self>) -> Result<(), CudaError> {
        self.kernels();
        Buffer::reserve(self)
    }

    /// Copies and waits.
    ///
    /// # Safety
    ///
    /// Both ranges are valid.
    pub(crate) unsafe fn copy_now(&self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        let stream = self.stream();
        // SAFETY: the caller's promise, until the stream has been waited for.
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
        // SAFETY: the caller's promise, until the stream has been waited for.
        unsafe { self.gpu.fill(at, value, len, stream.raw())? };
        stream.synchronize()
    }

    /// Marks what a stream holds now.
    ///
    /// # Safety
    ///
    /// The stream is alive and of this GPU.
    pub(crate) unsafe fn mark(self: &Arc<Self>, stream: CUstream) -> Result<Mark, CudaError> {
        let event = match self.events.pop() {
            Some(event) => event,
            None => Event::new(&self.gpu)?,
        };
        // SAFETY: the caller's promise.
        unsafe { event.record(stream)? };
        Ok(Mark { device: self.clone(), event: Some(event) })
    }

    /// A word for a kernel to write to; `None` when all are taken.
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
    /// Loads them, and runs each once on nothing: the driver loads code when it is first launched.
    fn load(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: PTX.
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
        // Zeros for every parameter, of which `Few` is the largest: no pieces, and no flag to write.
        let mut zeros = [0u64; 256];
        let word = device.flags.memory.ptr() as u64;
        let mut flag = word + (FLAGS as u64) * 64;
        let argument: *mut c_void = zeros.as_mut_ptr().cast();
        let grid = Grid::row(1, 32);
        // SAFETY: counts of zero, so no address is used but the flag's, which is a word that nobody has.
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

/// A place in a stream: what is before it is done, or not yet.
pub(crate) struct Mark {
    device: Arc<Device>,
    event: Option<Event>,
}

impl Mark {
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        self.event.as_ref().map_or(Ok(true), Event::is_done)
    }

    /// Sleeps until it is.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.event.as_ref().map_or(Ok(()), Event::synchronize)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            // One that does not fit any more is given back.
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

// SAFETY: the stream is the device's own, and streams may be used by any thread.
unsafe impl Send for Flag {}
// SAFETY: as above.
unsafe impl Sync for Flag {}

/// What a kernel writes into its word.
pub(crate) const RAISED: u32 = 1;

impl Flag {
    fn word(&self) -> &AtomicU32 {
        let at = self.device.flags.memory.ptr().wrapping_add(self.index as usize * 64);
        // SAFETY: inside the pinned memory, which the device keeps; the word is only used as an atomic.
        unsafe { &*at.cast::<AtomicU32>() }
    }

    /// Where the kernel writes.
    pub(crate) fn address(&self) -> u64 {
        self.word().as_ptr() as u64
    }

    pub(crate) fn is_raised(&self) -> bool {
        // pairs with the kernel's fence before it writes the word
        self.word().load(Ordering::Acquire) == RAISED
    }

    /// Gives it back when a stream has come to a mark.
    pub(super) fn retire(self, passed: Mark) {
        let device = self.device.clone();
        device.flags.retired.lock().unwrap().push((self, passed));
    }

    /// Lets whoever waits for it go on.
    pub(crate) fn raise(&self) {
        self.word().store(RAISED, Ordering::Release);
    }

    /// Has whoever waits for it from now on wait for the next time.
    pub(crate) fn lower(&self) {
        self.word().store(0, Ordering::Release);
    }

    /// The same as a place in the stream, for who wants to sleep, or to learn that the kernel failed.
    pub(crate) fn as_mark(&self) -> Result<Mark, CudaError> {
        // SAFETY: a stream of the device's own.
        unsafe { self.device.mark(self.stream) }
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        // Only when the kernel is done, or will never be: see `copy::Done`.
        let _ = self.device.flags.free.push(self.index);
    }
}

/// `kernels/copy.cu`, compiled by `cargo xtask kernels`.
const COPY_PTX: &str = concat!(include_str!("../../kernels/copy.ptx"), "\0");
