//! Transfers whose parts go when the caller says so.

use std::sync::Mutex;
use std::time::Duration;

use peerway_core::outcome::{Ended, Fence, Reason};

use crate::clock;
use crate::error::PostError;
use crate::peer::Prepared;
use crate::transfer::Transfer;

/// Parts of one transfer, checked and planned in advance: layer `i` goes while layer `i + 1` is
/// still being computed.
///
/// ```
/// # use peerway::{Access, Batch, Endpoint, Reason};
/// # use std::time::Duration;
/// # let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// # let peer = a.connect(&b.metadata())?;
/// # let (ours, theirs) = (a.allocate(4096)?, b.allocate(4096)?);
/// # let remote = peer.import(&theirs.advertise(Access::WRITE)?)?;
/// let layer = |i: u64| ours.slice(i * 1024..(i + 1) * 1024);
/// let place = |i: u64| remote.slice(i * 1024..(i + 1) * 1024);
/// let stages = (0..4)
///     .map(|i| Ok(Batch::write(&layer(i), &place(i))?.count(100 + i as u32)))
///     .collect::<Result<Vec<_>, peerway::PostError>>()?;
/// let staged = peer.stage(stages)?;
/// staged.release(0)?; // layer 0 is computed
/// assert_eq!(b.wait_counter(100, 1, Duration::from_secs(5)), 1);
/// for i in 1..4 {
///     staged.release(i)?;
/// }
/// assert_eq!(staged.join().reason, Reason::Done);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Staged {
    stages: Vec<Prepared>,
    released: Mutex<Vec<Option<Transfer>>>,
}

impl Staged {
    pub(crate) fn new(stages: Vec<Prepared>) -> Self {
        let released = Mutex::new(stages.iter().map(|_| None).collect());
        Self { stages, released }
    }

    /// How many stages there are.
    pub fn len(&self) -> usize {
        self.stages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Lets a stage go.
    pub fn release(&self, stage: usize) -> Result<(), PostError> {
        let stages = self.stages.len();
        let prepared = self.stages.get(stage).ok_or(PostError::NoSuchStage { stage, stages })?;
        let mut released = self.released.lock().unwrap();
        if released[stage].is_some() {
            return Err(PostError::AlreadyReleased(stage));
        }
        released[stage] = Some(prepared.post()?);
        Ok(())
    }

    /// How a stage ended, if it was released and has.
    pub fn poll(&self, stage: usize) -> Option<Ended> {
        self.released.lock().unwrap().get(stage)?.as_ref()?.poll()
    }

    /// Stops every stage that was released; those that were not never go.
    pub fn cancel(&self) {
        for transfer in self.released.lock().unwrap().iter().flatten() {
            transfer.cancel();
        }
    }

    /// Waits for every released stage. The first that did not end as done is the answer, and the
    /// fence is open if any stage's is.
    pub fn join(&self) -> Ended {
        loop {
            if let Some(ended) = self.wait(Duration::from_secs(1)) {
                return ended;
            }
        }
    }

    /// As [`Self::join`], for at most so long.
    pub fn wait(&self, timeout: Duration) -> Option<Ended> {
        let deadline = clock::after(clock::now(), timeout);
        let mut all = Ended::DONE;
        for transfer in self.released.lock().unwrap().iter().flatten() {
            let ended = transfer.wait(clock::until(deadline, clock::now()))?;
            if all.reason == Reason::Done {
                all.reason = ended.reason;
            }
            if ended.fence == Fence::Open {
                all.fence = Fence::Open;
            }
        }
        Some(all)
    }
}
