//! Copies by a GPU: what is put into its streams, and when it is done.
//!
//! Few small pieces go by one kernel whose launch describes them and that says by a word in host memory that it is
//! done, some microseconds sooner than an event. Many go by one kernel that reads their list out of pinned
//! memory. Large ones, and those whose host end is not pinned, go by the driver's copies.

use std::cell::RefCell;
use std::sync::Arc;

use peerway_core::work::{Blocks, Cursor, Shape};
use peerway_sys::cuda::ffi::CUstream;
use peerway_sys::cuda::{CudaError, Grid};

use super::device::{Device, Flag, Kernels, Mark, RAISED};
use super::staging::Buffer;

/// Pieces that fit into a launch's parameters.
const FEW: usize = 64;
/// Bytes that one block of threads copies about as fast as the whole GPU would be started.
const FEW_BYTES: u64 = 128 << 10;
/// Several pieces go by a kernel if they are shorter than this: 128 copies of 1 MiB by the driver, one by one, took 590 to 770
/// µs, by the kernel 101.
const SHORT: u64 = 16 << 20;
/// Pieces that keep every multiprocessor busy; fewer are cut into parts, no shorter than this.
pub(super) const MANY: usize = 8192;
const PART: u64 = 4096;
/// Threads of a block of the list kernels, and how many blocks a multiprocessor gets.
pub(super) const THREADS: u32 = 256;
const BLOCKS_EACH: u32 = 8;
/// Entries that a warp takes at a time: `GROUP` in `copy.cu`.
const GROUP: u32 = 4;

/// A piece of memory to copy, as kernels read it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Run {
    /// Address of its first byte.
    pub src: u64,
    /// Where that goes.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

/// `Few` in `copy.cu`.
#[repr(C)]
struct Few {
    count: u32,
    reserved: u32,
    runs: [Run; FEW],
}

/// A copy that was submitted.
pub(crate) struct Done {
    how: DoneSignal,
    /// What the kernel reads meanwhile.
    _list: Option<Buffer>,
}

enum DoneSignal {
    Flag(Flag),
    /// With the flag that its kernel will still raise, if it has one: nobody else may have it before that.
    Mark(Mark, Option<Flag>),
}

impl Done {
    fn mark(
        device: &Arc<Device>,
        stream: CUstream,
        list: Option<Buffer>,
    ) -> Result<Self, CudaError> {
        // SAFETY: the stream that the copy was put into.
        let mark = unsafe { device.mark(stream) }.inspect_err(|_| settle(device, stream))?;
        Ok(Self { how: DoneSignal::Mark(mark, None), _list: list })
    }

    /// Whether the bytes are there, for every kernel that is launched from now on.
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        match &self.how {
            DoneSignal::Flag(flag) => Ok(flag.is_raised()),
            DoneSignal::Mark(mark, _) => mark.is_done(),
        }
    }

    /// A kernel that failed raises no flag: who has looked for one in vain for a while has this look at the stream.
    pub(crate) fn look_closer(&mut self) -> Result<(), CudaError> {
        let DoneSignal::Flag(flag) = &self.how else { return Ok(()) };
        let mark = flag.as_mark()?;
        if let DoneSignal::Flag(flag) =
            std::mem::replace(&mut self.how, DoneSignal::Mark(mark, None))
            && let DoneSignal::Mark(_, kept) = &mut self.how
        {
            *kept = Some(flag);
        }
        Ok(())
    }

    /// Sleeps until the bytes are there, or never will be.
    pub(crate) fn wait(&mut self) -> Result<(), CudaError> {
        self.look_closer()?;
        match &self.how {
            DoneSignal::Mark(mark, _) => mark.wait(),
            DoneSignal::Flag(_) => Ok(()),
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        // The list, the flag and the memory are reused: not before the GPU is through with them.
        if !matches!(self.is_done(), Ok(true)) {
            let _ = self.wait();
        }
    }
}

/// Addresses of the two sides of a copy, and what reaches them.
#[derive(Clone, Copy)]
pub(crate) struct Sides {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    /// Kernels reach both: GPU memory or pinned.
    pub(crate) by_kernel: bool,
}

/// A list of pieces that is being gathered.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) runs: Vec<Run>,
    pub(crate) bytes: u64,
    pub(crate) by_kernel: bool,
}

thread_local! {
    /// This thread's last list, so that the next one need not allocate.
    static LIST: RefCell<Gathered> = RefCell::default();
}

/// Pieces of one submission: what a list buffer holds.
pub(crate) const MOST_RUNS: usize = Buffer::LEN / size_of::<Run>();

/// Gathers pieces with `fill` and submits them, to the stream that is given or to one of our own.
///
/// # Safety
///
/// Every piece that `fill` gives is memory that stays valid until the copy is done; the stream is of that GPU.
pub(crate) unsafe fn submit<E: From<CudaError>>(
    device: &Arc<Device>,
    on: Option<CUstream>,
    fill: impl FnOnce(&mut Gathered) -> Result<(), E>,
) -> Result<Option<Done>, E> {
    let mut list = LIST.take();
    list.runs.clear();
    (list.bytes, list.by_kernel) = (0, true);
    let filled = fill(&mut list);
    let done = filled.and_then(|()| {
        if list.runs.is_empty() {
            return Ok(None);
        }
        // SAFETY: the caller's promise.
        unsafe { start(device, on, &list) }.map(Some).map_err(E::from)
    });
    LIST.set(list);
    done
}

/// # Safety
///
/// As for [`submit`].
unsafe fn start(
    device: &Arc<Device>,
    on: Option<CUstream>,
    list: &Gathered,
) -> Result<Done, CudaError> {
    let stream = on.unwrap_or_else(|| device.stream().raw());
    let count = list.runs.len();
    let short = list.bytes / (count as u64) < SHORT;
    let kernels = if list.by_kernel && short { device.kernels() } else { None };
    if let Some(kernels) = kernels {
        // A stream of somebody else's may be gone when a flag that does not come is asked about.
        if is_few(count, list.bytes) && on.is_none() {
            let flag = device.flag(stream);
            if let Some(flag) = flag {
                // SAFETY: the caller's promise.
                unsafe {
                    let (word, bytes) = (flag.address(), list.bytes);
                    launch_few(kernels, stream, &list.runs, bytes, word, RAISED)?;
                }
                return Ok(Done { how: DoneSignal::Flag(flag), _list: None });
            }
        }
        if count > 1
            && let Some(buffer) = Buffer::take(device)?
        {
            // SAFETY: a list buffer has room for all parts, and this one is nobody else's.
            let mut entries = unsafe { list_runs(&list.runs, list.bytes, buffer.ptr().cast()) };
            let mut runs = buffer.ptr() as u64;
            let arguments = &mut [(&raw mut runs).cast(), (&raw mut entries).cast()];
            let blocks = grid(device, entries);
            // SAFETY: the kernel's two parameters; the list stays with `Done`; the rest is the caller's
            // promise.
            unsafe {
                kernels.module.launch(
                    kernels.runs,
                    Grid::row(blocks, THREADS),
                    stream,
                    arguments,
                )?;
            }
            return Done::mark(device, stream, Some(buffer));
        }
    }
    for run in &list.runs {
        // SAFETY: the caller's promise.
        let put = unsafe { device.gpu.copy(run.dst, run.src, run.len as usize, stream) };
        put.inspect_err(|_| settle(device, stream))?;
    }
    Done::mark(device, stream, None)
}

/// Whether pieces go by the launch that describes them itself.
pub(super) fn is_few(count: usize, bytes: u64) -> bool {
    count <= FEW && bytes <= FEW_BYTES
}

/// Writes the pieces down for the kernel, long ones in parts: a warp copies one after the other, and there should be
/// something to do for all of them. Returns how many there are.
///
/// # Safety
///
/// There is room for twice as many as [`MANY`], or for all of the pieces where they are more, and nobody reads it.
pub(super) unsafe fn list_runs(runs: &[Run], bytes: u64, into: *mut Run) -> u32 {
    let part = match runs.len() {
        ..MANY => (bytes / MANY as u64).next_multiple_of(PART).max(PART),
        _ => u64::MAX,
    };
    let mut entries = 0;
    for run in runs {
        let mut done = 0;
        while done < run.len {
            let len = part.min(run.len - done);
            let entry = Run { src: run.src + done, dst: run.dst + done, len };
            // SAFETY: fewer than `MANY` pieces make fewer than twice as many parts, and more stay whole.
            unsafe { into.add(entries).write(entry) };
            entries += 1;
            done += len;
        }
    }
    entries as u32
}

const _: () = assert!(2 * MANY <= MOST_RUNS);

/// Launches the kernel for a few pieces, which writes a value into a word of pinned memory at its end.
///
/// # Safety
///
/// As for [`submit`], and there are at most [`FEW`] runs; the word is nobody else's until then.
pub(super) unsafe fn launch_few(
    kernels: &Kernels,
    stream: CUstream,
    runs: &[Run],
    bytes: u64,
    mut word: u64,
    mut value: u32,
) -> Result<(), CudaError> {
    let mut few = Few { count: runs.len() as u32, reserved: 0, runs: [Run::default(); FEW] };
    few.runs[..runs.len()].copy_from_slice(runs);
    let arguments = &mut [(&raw mut few).cast(), (&raw mut word).cast(), (&raw mut value).cast()];
    // One piece wants all threads; several a warp each.
    let threads = (bytes / 64).clamp(32, 1024).next_multiple_of(32) as u32;
    let threads = threads.max(32 * (runs.len() as u32).min(32));
    // SAFETY: the kernel's three parameters, which the driver copies; the rest is the caller's promise.
    unsafe { kernels.module.launch(kernels.few, Grid::row(1, threads), stream, arguments) }
}

/// Blocks of one length, both sides by kernel: indices go to the GPU as they are. `None` where that cannot be, and
/// pieces must be gathered.
///
/// # Safety
///
/// As for [`submit`]; `sides` are the addresses of the two regions.
pub(crate) unsafe fn submit_blocks(
    device: &Arc<Device>,
    on: Option<CUstream>,
    shape: &Shape,
    at: &Cursor,
    sides: Sides,
    writes: bool,
) -> Result<Option<Done>, CudaError> {
    let Some((local, remote, items)) = shape.whole_blocks(at) else { return Ok(None) };
    let few = items.len() <= FEW && at.left() <= FEW_BYTES;
    // Too few for the kernel that takes blocks whole.
    let large = items.len() < MANY && local.len > 4 * PART;
    if few || large || !sides.by_kernel || items.len() > MOST_BLOCKS || local.len >= SHORT {
        return Ok(None);
    }
    let (Some(kernels), Some(buffer)) = (device.kernels(), Buffer::take(device)?) else {
        return Ok(None);
    };
    let (from, to) = if writes { (local, remote) } else { (remote, local) };
    let put = |blocks: &Blocks, at: usize| {
        let indices = &blocks.indices[items.clone()];
        let into = buffer.ptr().wrapping_add(at);
        // SAFETY: two lists of at most `MOST_BLOCKS` fit; the buffer is nobody else's.
        unsafe {
            let bytes = size_of_val(indices);
            std::ptr::copy_nonoverlapping(indices.as_ptr().cast::<u8>(), into, bytes);
        }
        into as u64
    };
    let mut count = items.len() as u32;
    let mut from_index = put(from, 0);
    let mut to_index = put(to, Buffer::LEN / 2);
    let (mut src, mut src_stride) = (sides.src + from.base, from.stride);
    let (mut dst, mut dst_stride) = (sides.dst + to.base, to.stride);
    let mut len = from.len;
    let arguments = &mut [
        (&raw mut src).cast(),
        (&raw mut src_stride).cast(),
        (&raw mut from_index).cast(),
        (&raw mut dst).cast(),
        (&raw mut dst_stride).cast(),
        (&raw mut to_index).cast(),
        (&raw mut len).cast(),
        (&raw mut count).cast(),
    ];
    let stream = on.unwrap_or_else(|| device.stream().raw());
    let blocks = grid(device, count);
    // SAFETY: the kernel's eight parameters; the indices stay with `Done`; blocks lie in their regions, which the
    // shape was checked for; the rest is the caller's promise.
    unsafe {
        kernels.module.launch(kernels.blocks, Grid::row(blocks, THREADS), stream, arguments)?
    };
    Done::mark(device, stream, Some(buffer)).map(Some)
}

/// What was submitted runs without a mark: it must not outlive the memory.
fn settle(device: &Device, stream: CUstream) {
    // SAFETY: the stream that the copy was put into.
    let _ = unsafe { device.gpu.synchronize(stream) };
}

/// Blocks of one submission.
pub(crate) const MOST_BLOCKS: usize = Buffer::LEN / 2 / size_of::<u32>();

pub(super) fn grid(device: &Device, entries: u32) -> u32 {
    let warps = entries.div_ceil(GROUP);
    let most = device.gpu.facts().multiprocessors.max(1) * BLOCKS_EACH;
    warps.div_ceil(THREADS / 32).clamp(1, most)
}
