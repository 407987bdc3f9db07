//! Copies between memories that a GPU reaches: lists of tasks, done by one of three engines behind one trait.
//!
//! - `launched`: a kernel for every list.
//! - `resident`: a kernel that waits for tasks in a ring.
//! - `engines`: the driver's copies, which take no multiprocessor.
//!
//! A copier belongs to one thread at a time: it hands lists over with [`PeerCopy::submit`] and looks for their end with
//! [`PeerCopy::poll`]. Nothing is allocated for that. Tasks of a list, and of lists that are under way together, are done in
//! any order. A copier that failed stays so: what was under way may or may not have been copied.

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

/// The number of a submission to a copier. They only rise, and 0 has been done from the start.
pub type Ticket = u64;

/// Who copies lists.
pub(crate) trait PeerCopy: Send {
    fn kind(&self) -> CopierKind;

    /// Tasks that one submission may have.
    fn most(&self) -> usize;

    /// Tasks that fit now, whatever they are. Grows when [`Self::poll`] finds something done.
    fn room(&self) -> usize;

    /// Takes all tasks, or none of them where they do not fit.
    ///
    /// # Safety
    ///
    /// The GPU reaches all of the memory, which stays valid until the ticket is done or the copier is dropped, and nobody
    /// writes what is read, or touches what is written, before that.
    unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, CudaError>;

    /// The newest ticket.
    fn last(&self) -> Ticket;

    /// Up to which ticket all are done: their bytes are there for kernels, the host and other GPUs.
    fn poll(&mut self) -> Result<Ticket, CudaError>;
}

/// Who copies lists of tasks: see [`Copier`].
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum CopierKind {
    /// A kernel is launched for every list.
    Launched,
    /// A kernel stays on the GPU and waits for tasks; it leaves when none come for a while.
    Resident,
    /// The driver copies, by copy engines where it can: no multiprocessor is taken.
    Engines,
}

impl CopierKind {
    /// All of them.
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

/// A name that no [`CopierKind`] has.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is no copier: launched, resident or engines")]
pub struct NoSuchCopier(String);

/// How a [`CopierKind::Resident`] copier behaves; others have no choice.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopierOptions {
    /// Blocks of threads, from 1 to 128: each takes half a multiprocessor while the kernel is there.
    pub blocks: u32,
    /// How long the kernel stays without a task. The next one after that pays for a launch.
    pub idle: Duration,
    /// How long it stays at most before it makes room for a moment, however much there is to do: whoever waits for all
    /// work on the GPU, as some calls of the driver do, waits that long.
    pub stay: Duration,
}

impl Default for CopierOptions {
    fn default() -> Self {
        let (idle, stay) = (Duration::from_micros(200), Duration::from_millis(10));
        Self { blocks: 8, idle, stay }
    }
}

/// A copier of that kind.
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

/// How long a word in host memory is looked at in vain before the driver is asked whether something failed, and again after
/// that. Asking costs microseconds.
const PATIENCE: Duration = Duration::from_micros(200);

/// Finds out that kernels failed, which then write no word.
#[derive(Default)]
struct Watch {
    since: Option<Instant>,
    mark: Option<Mark>,
}

impl Watch {
    /// There was progress.
    fn reset(&mut self) {
        self.since = None;
    }

    /// There was none.
    fn look(&mut self, device: &Arc<Device>, stream: &Stream) -> Result<(), CudaError> {
        let now = Instant::now();
        if now - *self.since.get_or_insert(now) < PATIENCE {
            return Ok(());
        }
        self.since = Some(now);
        match &self.mark {
            Some(mark) if !mark.is_done()? => {}
            Some(_) => self.mark = None,
            // SAFETY: a stream of the copier's own.
            None => self.mark = Some(unsafe { device.mark(stream.raw()) }?),
        }
        Ok(())
    }
}

/// The error that a copier has failed with, from then on.
#[derive(Default)]
struct Fault(Option<CudaError>);

impl Fault {
    fn check(&self) -> Result<(), CudaError> {
        self.0.clone().map_or(Ok(()), Err)
    }

    /// Remembers what failed.
    fn keep<T>(&mut self, result: Result<T, CudaError>) -> Result<T, CudaError> {
        result.inspect_err(|error| {
            self.0.get_or_insert_with(|| error.clone());
        })
    }
}

/// Waits a moment for a copier: copies take microseconds, and what takes longer may nap.
fn pause(since: Instant) {
    const SPIN: Duration = Duration::from_micros(100);
    const NAP: Duration = Duration::from_micros(10);
    if since.elapsed() < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}

/// Bytes of a list.
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
        assert_eq!(error.to_string(), "`pigeon` is no copier: launched, resident or engines");
    }
}
