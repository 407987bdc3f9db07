//! The copiers of one worker: the copies that its GPUs do for it, and their progress.
//!
//! Lists that kernels can access go to a copier of the GPU. Small lists go to the resident kernel
//! if there is one. Memory that only the driver can access (host memory that is not pinned, and
//! memory of other GPUs) goes by the driver's copies. The threads that add windows and peers create
//! the copiers, not the worker: the driver may wait for kernels while it creates them, and those
//! kernels may wait for this worker.

use std::sync::Arc;

use peerway_sys::cuda::CudaError;

use crate::gpu::GpuError;
use crate::gpu::copy::{self, Done, Gathered, MOST_RUNS};
use crate::gpu::device::Device;
use crate::gpu::peer_copy::{CopierKind, CopierOptions, PeerCopy, Ticket, copier};

/// Up to this many tasks and bytes the resident kernel is faster: measured with `bench peer-copy`.
const QUICK_TASKS: usize = 8;
const QUICK_BYTES: u64 = 64 << 10;
/// Blocks of the resident kernel. Such small lists keep no more blocks busy.
const QUICK_BLOCKS: u32 = 2;

/// The copiers of one GPU.
pub(crate) struct Set {
    gpu: u32,
    main: CopierSlot,
    /// The copier for small lists.
    quick: Option<CopierSlot>,
}

/// A copier and its progress. A copier that fails is dropped at once. The drop waits until the GPU
/// has finished the submitted lists, because only then may their memory be released.
struct CopierSlot {
    copier: Option<Box<dyn PeerCopy>>,
    done: Result<Ticket, CudaError>,
}

impl CopierSlot {
    fn room(&self) -> usize {
        self.copier.as_ref().map_or(usize::MAX, |copier| copier.room())
    }

    /// # Safety
    ///
    /// As for [`PeerCopy::submit`].
    unsafe fn submit(&mut self, list: &Gathered) -> Result<Option<Ticket>, CudaError> {
        let Some(copier) = &mut self.copier else {
            return self.done.clone().map(|_| None);
        };
        // SAFETY: the caller's promise.
        let submitted = unsafe { copier.submit(&list.runs) };
        submitted.inspect_err(|error| self.failed(error))
    }

    fn poll(&mut self) {
        let Some(copier) = &mut self.copier else { return };
        if self.done.as_ref().is_ok_and(|done| *done < copier.last()) {
            match copier.poll() {
                Ok(done) => self.done = Ok(done),
                Err(error) => self.failed(&error),
            }
        }
    }

    fn failed(&mut self, error: &CudaError) {
        self.copier = None;
        self.done = Err(error.clone());
    }
}

/// A list in progress.
pub(crate) enum Pending {
    Listed { set: usize, quick: bool, ticket: Ticket },
    Driver(Done),
}

/// See the module.
#[derive(Default)]
pub(crate) struct Copiers {
    sets: Vec<Set>,
    /// The list that is being gathered. Its allocation is reused.
    list: Gathered,
}

impl Set {
    /// Creates the copiers of a GPU for one worker.
    pub(crate) fn new(device: &Arc<Device>, kind: CopierKind) -> Result<Self, GpuError> {
        let options = CopierOptions { blocks: QUICK_BLOCKS, ..CopierOptions::default() };
        let slot = |kind| {
            let copier = Some(copier(device, kind, &options)?);
            Ok::<_, GpuError>(CopierSlot { copier, done: Ok(0) })
        };
        let (main, quick) = match kind {
            CopierKind::Resident => (CopierKind::Launched, Some(CopierKind::Resident)),
            kind => (kind, None),
        };
        Ok(Self { gpu: device.index(), main: slot(main)?, quick: quick.map(slot).transpose()? })
    }
}

impl Copiers {
    pub(crate) fn add(&mut self, set: Set) {
        self.sets.push(set);
    }

    /// Gathers a list with `fill` and submits it. `fill` gets the number of tasks that the list may
    /// have. Returns `None` if the list is empty or there is no room now.
    ///
    /// # Safety
    ///
    /// All runs stay valid, and `device` can access them, until the list is done. If the list says
    /// `by_kernel`, the device's kernels can access them too.
    pub(crate) unsafe fn submit(
        &mut self,
        device: &Arc<Device>,
        fill: impl FnOnce(&mut Gathered, usize),
    ) -> Result<Option<Pending>, CudaError> {
        let at = self.sets.iter().position(|set| set.gpu == device.index());
        let room = at.map_or(MOST_RUNS, |at| self.sets[at].main.room());
        let mut list = std::mem::take(&mut self.list);
        list.runs.clear();
        (list.bytes, list.by_kernel) = (0, true);
        fill(&mut list, room);
        let submitted = match at {
            _ if list.runs.is_empty() => Ok(None),
            // SAFETY: the caller's promise.
            Some(at) if list.by_kernel => unsafe { self.list(at, &list) },
            // SAFETY: the caller's promise.
            _ => unsafe { by_driver(device, &list) },
        };
        self.list = list;
        submitted
    }

    /// # Safety
    ///
    /// As for [`Self::submit`].
    unsafe fn list(&mut self, at: usize, list: &Gathered) -> Result<Option<Pending>, CudaError> {
        let set = &mut self.sets[at];
        let few = list.runs.len() <= QUICK_TASKS && list.bytes <= QUICK_BYTES;
        let (slot, quick) = match &mut set.quick {
            Some(quick) if few && quick.copier.is_some() => (quick, true),
            _ => (&mut set.main, false),
        };
        // SAFETY: the caller's promise.
        let ticket = unsafe { slot.submit(list) }?;
        Ok(ticket.map(|ticket| Pending::Listed { set: at, quick, ticket }))
    }

    /// Updates the progress of every copier that has work.
    pub(crate) fn poll(&mut self) {
        for set in &mut self.sets {
            for slot in std::iter::once(&mut set.main).chain(&mut set.quick) {
                slot.poll();
            }
        }
    }

    /// Whether a list is done, as of the last `poll`.
    pub(crate) fn is_done(&self, pending: &Pending) -> Result<bool, CudaError> {
        match pending {
            Pending::Driver(done) => done.is_done(),
            Pending::Listed { set, quick, ticket } => {
                let set = &self.sets[*set];
                let slot = if *quick { set.quick.as_ref() } else { Some(&set.main) };
                let Some(slot) = slot else { return Ok(true) };
                slot.done.clone().map(|done| done >= *ticket)
            }
        }
    }
}

/// # Safety
///
/// As for [`Copiers::submit`].
unsafe fn by_driver(device: &Arc<Device>, list: &Gathered) -> Result<Option<Pending>, CudaError> {
    // SAFETY: the caller's promise.
    let done = unsafe {
        copy::submit(device, None, |gathered| {
            gathered.runs.extend_from_slice(&list.runs);
            (gathered.bytes, gathered.by_kernel) = (list.bytes, list.by_kernel);
            Ok::<(), CudaError>(())
        })
    };
    let Some(mut done) = done? else { return Ok(None) };
    // A failed kernel raises no flag, so completion is read from an event instead.
    done.look_closer()?;
    Ok(Some(Pending::Driver(done)))
}
