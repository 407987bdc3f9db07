//! Copies between memories that a GPU can access: lists of tasks, done by one of three engines
//! behind one trait.
//!
//! - `launched`: launches a kernel for every list.
//! - `resident`: a kernel that waits for tasks in a ring.
//! - `engines`: the driver's copies, which use no multiprocessor.
//!
//! One thread at a time owns a copier. It submits lists with [`PeerCopy::submit`] and checks for
//! their end with [`PeerCopy::poll`]. Neither allocates. Tasks are done in any order, within a list
//! and across lists in progress. A copier that failed stays failed: copies in progress may or may
//! not have happened.

mod copier;
mod engines;
mod launched;
mod resident;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerway_sys::cuda::{CudaError, Stream};

use super::GpuError;
use super::copy::Run;
use super::device::{Device, Mark};

pub use self::copier::Copier;

/// The number of a submission to a copier. Numbers only rise. Ticket 0 is done from the start.
pub type Ticket = u64;

/// An engine that copies lists.
pub(crate) trait PeerCopy: Send {
    fn kind(&self) -> CopierKind;

    /// Maximum number of tasks per submission.
    fn most(&self) -> usize;

    /// Number of tasks of any kind that fit now. It grows when [`Self::poll`] finds tasks done.
    fn room(&self) -> usize;

    /// Accepts all tasks, or none if they do not fit.
    ///
    /// # Safety
    ///
    /// The GPU can access all of the memory. Until the ticket is done or the copier is dropped, the
    /// memory stays valid, nothing writes the sources, and nothing accesses the destinations.
    unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, CudaError>;

    /// The newest ticket.
    fn last(&self) -> Ticket;

    /// The newest ticket up to which all are done. Their bytes are visible to kernels, the host and
    /// other GPUs.
    fn poll(&mut self) -> Result<Ticket, CudaError>;
}

/// The engine of a [`Copier`].
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum CopierKind {
    /// Launches a kernel for every list.
    Launched,
    /// A kernel stays on the GPU and waits for tasks. It leaves if none come for a while.
    Resident,
    /// The driver copies, by copy engines if possible, without a multiprocessor.
    Engines,
}

impl CopierKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Launched, Self::Resident, Self::Engines];

    fn name(self) -> &'static str {
        match self {
            Self::Launched => "launched",
            Self::Resident => "resident",
            Self::Engines => "engines",
        }
    }
}

impl fmt::Display for CopierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CopierKind {
    type Err = NoSuchCopier;

    fn from_str(text: &str) -> Result<Self, NoSuchCopier> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| NoSuchCopier(text.to_owned()))
    }
}

/// The name matches no [`CopierKind`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is not a copier: use launched, resident or engines")]
pub struct NoSuchCopier(String);

/// Options of a [`CopierKind::Resident`] copier. Other kinds ignore them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopierOptions {
    /// Number of thread blocks, from 1 to 128. Each occupies half a multiprocessor while the kernel
    /// runs.
    pub blocks: u32,
    /// How long the kernel stays without a task. The next task then pays for a launch.
    pub idle: Duration,
    /// Maximum time that the kernel stays, even with tasks left, before it leaves for a moment.
    /// Callers that wait for all work on the GPU, as some driver calls do, wait up to this long.
    pub stay: Duration,
}

impl Default for CopierOptions {
    fn default() -> Self {
        let (idle, stay) = (Duration::from_micros(200), Duration::from_millis(10));
        Self { blocks: 8, idle, stay }
    }
}

/// Creates a copier of that kind.
pub(crate) fn copier(
    device: &Arc<Device>,
    kind: CopierKind,
    options: &CopierOptions,
) -> Result<Box<dyn PeerCopy>, GpuError> {
    if kind != CopierKind::Engines && device.kernels().is_none() {
        return Err(GpuError::NoKernels { gpu: device.index() });
    }
    Ok(match kind {
        CopierKind::Launched => Box::new(launched::Launched::new(device)?),
        CopierKind::Resident => Box::new(resident::Resident::new(device, options)?),
        CopierKind::Engines => Box::new(engines::Engines::new(device)?),
    })
}

/// How long a copier polls a word in host memory without progress before it asks the driver whether
/// work failed. It asks again after the same time. Each query costs microseconds.
const PATIENCE: Duration = Duration::from_micros(200);

/// Detects failed kernels, which write no word.
#[derive(Default)]
struct Watch {
    since: Option<Instant>,
    mark: Option<Mark>,
}

impl Watch {
    /// Call after progress.
    fn reset(&mut self) {
        self.since = None;
    }

    /// Call without progress.
    fn look(&mut self, device: &Arc<Device>, stream: &Stream) -> Result<(), CudaError> {
        let now = Instant::now();
        if now - *self.since.get_or_insert(now) < PATIENCE {
            return Ok(());
        }
        self.since = Some(now);
        match &self.mark {
            Some(mark) if !mark.is_done()? => {}
            Some(_) => self.mark = None,
            // SAFETY: the copier owns the stream.
            None => self.mark = Some(unsafe { device.mark(stream.raw()) }?),
        }
        Ok(())
    }
}

/// The error of a failed copier; every later call returns it.
#[derive(Default)]
struct Fault(Option<CudaError>);

impl Fault {
    fn check(&self) -> Result<(), CudaError> {
        self.0.clone().map_or(Ok(()), Err)
    }

    /// Records the first error.
    fn keep<T>(&mut self, result: Result<T, CudaError>) -> Result<T, CudaError> {
        result.inspect_err(|error| {
            self.0.get_or_insert_with(|| error.clone());
        })
    }
}

/// Waits a moment for a copier. Copies take microseconds, so it first spins; a longer wait sleeps.
fn pause(since: Instant) {
    const SPIN: Duration = Duration::from_micros(100);
    const NAP: Duration = Duration::from_micros(10);
    if since.elapsed() < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}

/// Total length of a list in bytes.
fn bytes_of(runs: &[Run]) -> u64 {
    runs.iter().fold(0, |sum: u64, run| sum.saturating_add(run.len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_shown() {
        for kind in CopierKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "pigeon".parse::<CopierKind>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`pigeon` is not a copier: use launched, resident or engines"
        );
    }
}
