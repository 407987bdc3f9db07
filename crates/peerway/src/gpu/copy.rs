//! Copies by a GPU: submission to its streams, and detection of their completion.
//!
//! A few small pieces use one kernel launch that describes them. The kernel reports completion by a
//! word in host memory, some microseconds sooner than an event. Many pieces use one kernel that
//! reads their list from pinned memory. Large pieces, and pieces whose host side is not pinned, use
//! the driver's copies.

use std::cell::RefCell;
use std::sync::Arc;

use peerway_core::work::{Blocks, Cursor, Shape};
use peerway_sys::cuda::ffi::CUstream;
use peerway_sys::cuda::{CudaError, Grid};

use super::device::{Device, Flag, Kernels, Mark, RAISED};
use super::staging::Buffer;

/// Number of pieces that fit into a launch's parameters.
const FEW: usize = 64;
/// Up to this many bytes, one block of threads copies about as fast as it takes to start the whole
/// GPU.
const FEW_BYTES: u64 = 128 << 10;
/// Several pieces use a kernel if they are shorter than this on average. 128 copies of 1 MiB took
/// 590 to 770 µs by the driver, one by one, and 101 µs by the kernel.
const SHORT: u64 = 16 << 20;
/// This many pieces keep every multiprocessor busy. Fewer are cut into parts, which are no shorter
/// than `PART`.
pub(super) const MANY: usize = 8192;
const PART: u64 = 4096;
/// Threads per block of the list kernels, and blocks per multiprocessor.
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
    /// Address of the destination.
    pub dst: u64,
    /// Length in bytes.
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
    /// The list that the kernel reads until it is done.
    _list: Option<Buffer>,
}

enum DoneSignal {
    Flag(Flag),
    /// With the flag that the kernel will still raise, if it has one. The flag must not be reused
    /// before that.
    Mark(Mark, Option<Flag>),
}

impl Done {
    fn mark(
        device: &Arc<Device>,
        stream: CUstream,
        list: Option<Buffer>,
    ) -> Result<Self, CudaError> {
        // SAFETY: `stream` is the stream that the copy was submitted to, which the caller of
        // `submit` keeps alive.
        let mark = unsafe { device.mark(stream) }.inspect_err(|_| settle(device, stream))?;
        Ok(Self { how: DoneSignal::Mark(mark, None), _list: list })
    }

    /// Whether the bytes are visible to every kernel launched from now on.
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        match &self.how {
            DoneSignal::Flag(flag) => Ok(flag.is_raised()),
            DoneSignal::Mark(mark, _) => mark.is_done(),
        }
    }

    /// Switches from the flag to a mark in the stream. A failed kernel raises no flag, so a thread
    /// that has polled the flag for a while calls this.
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

    /// Blocks until the copy is done or has failed.
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
        // The list, the flag and the memory are reused, but not before the GPU has finished with
        // them.
        if !matches!(self.is_done(), Ok(true)) {
            let _ = self.wait();
        }
    }
}

/// Addresses of the two sides of a copy, and whether kernels can access them.
#[derive(Clone, Copy)]
pub(crate) struct Sides {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    /// Kernels can access both sides: GPU memory or pinned memory.
    pub(crate) by_kernel: bool,
}

/// A list of pieces that is being built.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) runs: Vec<Run>,
    pub(crate) bytes: u64,
    pub(crate) by_kernel: bool,
}

thread_local! {
    /// This thread's last list, kept to avoid an allocation for the next one.
    static LIST: RefCell<Gathered> = RefCell::default();
}

/// Maximum number of pieces per submission: what fits into a list buffer.
pub(crate) const MOST_RUNS: usize = Buffer::LEN / size_of::<Run>();

/// Builds a list of pieces with `fill` and submits it, to the given stream or to one of the
/// device's own.
///
/// # Safety
///
/// Every piece that `fill` adds is memory that stays valid until the copy is done. A given stream
/// is alive and belongs to that GPU.
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
        // SAFETY: the caller upholds the contract of `submit`.
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
        // A caller's stream may be gone when a missing flag requires a look at the stream.
        if is_few(count, list.bytes) && on.is_none() {
            let flag = device.flag(stream);
            if let Some(flag) = flag {
                // SAFETY: the caller upholds the contract of `submit`; the flag belongs to this
                // copy.
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
            // SAFETY: a list buffer has space for all parts, and this function owns the buffer.
            let mut entries = unsafe { list_runs(&list.runs, list.bytes, buffer.ptr().cast()) };
            let mut runs = buffer.ptr() as u64;
            let arguments = &mut [(&raw mut runs).cast(), (&raw mut entries).cast()];
            let blocks = grid(device, entries);
            // SAFETY: these are the kernel's two parameters. `Done` keeps the list. The caller
            // upholds the contract of `submit`.
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
        // SAFETY: the caller upholds the contract of `submit`.
        let put = unsafe { device.gpu.copy(run.dst, run.src, run.len as usize, stream) };
        put.inspect_err(|_| settle(device, stream))?;
    }
    Done::mark(device, stream, None)
}

/// Whether the pieces fit a launch that describes them itself.
pub(super) fn is_few(count: usize, bytes: u64) -> bool {
    count <= FEW && bytes <= FEW_BYTES
}

/// Writes the list for the kernel, with long pieces cut into parts. A warp copies one entry after
/// the other, and all warps should have work. Returns the number of entries.
///
/// # Safety
///
/// `into` has space for twice [`MANY`] entries, or for all pieces if there are more, and nothing
/// reads it during the call.
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
            // SAFETY: fewer than `MANY` pieces become fewer than twice as many parts; more pieces
            // stay whole.
            unsafe { into.add(entries).write(entry) };
            entries += 1;
            done += len;
        }
    }
    entries as u32
}

const _: () = assert!(2 * MANY <= MOST_RUNS);

/// Launches the kernel for a few pieces. At its end, it writes a value into a word of pinned
/// memory.
///
/// # Safety
///
/// As for [`submit`]. Also, there are at most [`FEW`] runs, and nothing else uses the word until
/// the kernel has written it.
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
    // A single piece needs all threads; several need a warp each.
    let threads = (bytes / 64).clamp(32, 1024).next_multiple_of(32) as u32;
    let threads = threads.max(32 * (runs.len() as u32).min(32));
    // SAFETY: these are the kernel's three parameters, which the driver copies. The caller upholds
    // this function's contract.
    unsafe { kernels.module.launch(kernels.few, Grid::row(1, threads), stream, arguments) }
}

/// Submits blocks of one length that kernels can access on both sides: the GPU reads the indices
/// directly. `None` if that is not possible; then the caller must build a list of pieces.
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
    // There are too few blocks for the kernel that copies each block whole.
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
        // SAFETY: two lists of at most `MOST_BLOCKS` indices fit, and this function owns the
        // buffer.
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
    // SAFETY: these are the kernel's eight parameters. `Done` keeps the indices. The shape was
    // checked, so all blocks lie in their regions. The caller upholds this function's contract.
    unsafe {
        kernels.module.launch(kernels.blocks, Grid::row(blocks, THREADS), stream, arguments)?
    };
    Done::mark(device, stream, Some(buffer)).map(Some)
}

/// Waits for submitted work that has no mark: it must not outlive the memory.
fn settle(device: &Device, stream: CUstream) {
    // SAFETY: `stream` is the stream that the copy was submitted to, which the caller of `submit`
    // keeps alive.
    let _ = unsafe { device.gpu.synchronize(stream) };
}

/// Maximum number of blocks per submission.
pub(crate) const MOST_BLOCKS: usize = Buffer::LEN / 2 / size_of::<u32>();

pub(super) fn grid(device: &Device, entries: u32) -> u32 {
    let warps = entries.div_ceil(GROUP);
    let most = device.gpu.facts().multiprocessors.max(1) * BLOCKS_EACH;
    warps.div_ceil(THREADS / 32).clamp(1, most)
}
