//! The kernels that this library knows, executed by the CPU.
//!
//! They are references for the kernels compiled for GPUs: they take the same arguments and copy one
//! run after the other. The random generator chooses the order of the runs, because a GPU
//! guarantees none. They do all the work once, whatever the grid is.

use std::ffi::c_void;
use std::time::Duration;

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, valid};
use crate::resident::Resident;
use crate::work::Engine;
use peerway_fakescript::Dice;

/// The kernels.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Which {
    Runs,
    Blocks,
    Few,
    List,
    Resident,
}

impl Which {
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        match name {
            "peerway_copy_runs" => Some(Self::Runs),
            "peerway_copy_blocks" => Some(Self::Blocks),
            "peerway_copy_few" => Some(Self::Few),
            "peerway_copy_list" => Some(Self::List),
            "peerway_copy_resident" => Some(Self::Resident),
            _ => None,
        }
    }

    /// Bytes of each parameter.
    pub(crate) fn parameters(self) -> &'static [usize] {
        match self {
            Self::Runs => &[8, 4],
            Self::Blocks => &[8, 8, 8, 8, 8, 8, 8, 4],
            Self::Few => &[size_of::<Few>(), 8, 4],
            Self::List => &[8, 4, 8, 8, 4],
            Self::Resident => &[8, 8, 4, 4, 8, 8],
        }
    }
}

/// A kernel with its arguments.
#[derive(Debug)]
pub(crate) enum Kernel {
    /// `peerway_copy_runs(const Run *runs, u32 count)`
    Runs {
        runs: u64,
        count: u32,
    },
    /// `peerway_copy_blocks(u64 src, u64 src_stride, const u32 *src_index, u64 dst, u64 dst_stride,
    /// const u32 *dst_index, u64 len, u32 count)`
    Blocks {
        from: Blocks,
        to: Blocks,
        len: u64,
        count: u32,
    },
    /// `peerway_copy_few(Few few, u32 *flag, u32 value)`
    Few {
        few: Box<Few>,
        flag: u64,
        value: u32,
    },
    /// `peerway_copy_list(const Run *runs, u32 count, u32 *ended, u32 *flag, u32 value)`
    List {
        runs: u64,
        count: u32,
        ended: Option<u64>,
        flag: u64,
        value: u32,
    },
    Resident(Resident),
}

/// Blocks at multiples of a stride, selected by a table of indices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    start: u64,
    stride: u64,
    index: u64,
}

/// One copy, with the layout that it has in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    src: u64,
    dst: u64,
    len: u64,
}

const RUN: usize = size_of::<Run>();

/// Copies that are passed by value, as an argument.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Few {
    count: u32,
    reserved: u32,
    runs: [Run; 64],
}

impl Kernel {
    /// Copies the arguments, which the caller may free after the call.
    ///
    /// # Safety
    ///
    /// `params` is null, or an array of pointers to the arguments of this kernel.
    pub(crate) unsafe fn new(
        which: Which,
        blocks: u32,
        params: *mut *mut c_void,
    ) -> Result<Self, CUresult> {
        // SAFETY: by this function's contract, for all arguments.
        unsafe {
            Ok(match which {
                Which::Runs => {
                    Self::Runs { runs: argument(params, 0)?, count: argument(params, 1)? }
                }
                Which::Blocks => {
                    let blocks = |first: usize| -> Result<Blocks, CUresult> {
                        let start = argument(params, first)?;
                        let stride = argument(params, first + 1)?;
                        Ok(Blocks { start, stride, index: argument(params, first + 2)? })
                    };
                    let (from, to) = (blocks(0)?, blocks(3)?);
                    let (len, count) = (argument(params, 6)?, argument(params, 7)?);
                    Self::Blocks { from, to, len, count }
                }
                Which::Few => {
                    let few = Box::new(argument(params, 0)?);
                    Self::Few { few, flag: argument(params, 1)?, value: argument(params, 2)? }
                }
                Which::List => {
                    let (runs, count) = (argument(params, 0)?, argument(params, 1)?);
                    let ended: u64 = argument(params, 2)?;
                    // A single block does not use the counter.
                    let ended = (blocks > 1).then_some(ended);
                    let (flag, value) = (argument(params, 3)?, argument(params, 4)?);
                    Self::List { runs, count, ended, flag, value }
                }
                Which::Resident => Self::Resident(Resident {
                    base: argument(params, 0)?,
                    together: argument(params, 1)?,
                    slots: argument(params, 2)?,
                    launch: argument(params, 3)?,
                    idle: Duration::from_nanos(argument(params, 4)?),
                    stay: Duration::from_nanos(argument(params, 5)?),
                    blocks,
                }),
            })
        }
    }

    pub(crate) fn perform(&self, engine: &Engine<'_>, dice: &mut Dice) -> Answer {
        match self {
            Self::Runs { runs, count } => copy_all(engine, dice, &listed(engine, *runs, *count)?),
            Self::List { runs, count, ended, flag, value } => {
                copy_all(engine, dice, &listed(engine, *runs, *count)?)?;
                // The counter must start at zero; otherwise no block would see that it is the last
                // one.
                if let Some(ended) = ended
                    && engine.read(*ended, 4)? != [0; 4]
                {
                    return Err(CUDA_ERROR_UNKNOWN);
                }
                engine.store(*flag, *value)
            }
            Self::Resident(resident) => resident.perform(engine, dice),
            Self::Blocks { from, to, len, count } => {
                let (sources, targets) = (from.all(engine, *count)?, to.all(engine, *count)?);
                let runs: Vec<Run> = sources
                    .into_iter()
                    .zip(targets)
                    .map(|(src, dst)| Run { src, dst, len: *len })
                    .collect();
                copy_all(engine, dice, &runs)
            }
            Self::Few { few, flag, value } => {
                // With a larger count, a GPU would read beyond its arguments.
                let runs = few.runs.get(..few.count as usize).ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)?;
                copy_all(engine, dice, runs)?;
                engine.store(*flag, *value)
            }
        }
    }
}

impl Blocks {
    /// The addresses of the first `count` blocks of the table.
    fn all(&self, engine: &Engine<'_>, count: u32) -> Result<Vec<u64>, CUresult> {
        let table = engine.read(self.index, u64::from(count) * 4)?;
        let numbers = table.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
        let address =
            |number: u32| self.start.wrapping_add(u64::from(number).wrapping_mul(self.stride));
        Ok(numbers.map(address).collect())
    }
}

impl Run {
    fn read(bytes: &[u8]) -> Option<Self> {
        let [src, dst, len] = *bytes.as_chunks::<8>().0 else { return None };
        let [src, dst, len] = [src, dst, len].map(u64::from_ne_bytes);
        Some(Self { src, dst, len })
    }
}

fn listed(engine: &Engine<'_>, runs: u64, count: u32) -> Result<Vec<Run>, CUresult> {
    let table = engine.read(runs, u64::from(count) * RUN as u64)?;
    Ok(table.chunks_exact(RUN).filter_map(Run::read).collect())
}

fn copy_all(engine: &Engine<'_>, dice: &mut Dice, runs: &[Run]) -> Answer {
    engine.pace(runs.iter().fold(0, |sum, run| sum.saturating_add(run.len)));
    let (later, first) = runs.split_at(dice.below(runs.len() as u64) as usize);
    first.iter().chain(later).try_for_each(|run| engine.copy(run.dst, run.src, run.len))
}

/// One argument of a kernel.
///
/// # Safety
///
/// `params` is null, or its entry `at` is null or points to a `T`.
unsafe fn argument<T: Copy>(params: *mut *mut c_void, at: usize) -> Result<T, CUresult> {
    valid(!params.is_null())?;
    // SAFETY: by this function's contract.
    let place = unsafe { params.add(at).read() };
    valid(!place.is_null())?;
    // SAFETY: by this function's contract. The argument may be unaligned.
    Ok(unsafe { place.cast::<T>().read_unaligned() })
}
