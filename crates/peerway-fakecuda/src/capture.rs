//! A stream capture in progress: work for its streams goes into a list instead.
//!
//! The list is in call order, which respects every possible dependency. The capture also records
//! how much each stream knows of the others, so that a branch that was not joined is an error, as
//! in CUDA.

use std::collections::BTreeMap;
use std::sync::Mutex;

use peerway_sys::cuda::ffi::*;

use crate::calls::Answer;
use crate::errors::{CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNMATCHED};
use crate::lock;
use crate::work::Work;

/// How much work of each stream came before a point.
pub(crate) type Clock = BTreeMap<u64, u64>;

#[derive(Debug)]
pub(crate) struct Capture {
    /// The stream on which the capture began.
    origin: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    work: Vec<Work>,
    /// How much work each stream of the capture knows of, by stream.
    clocks: BTreeMap<u64, Clock>,
    broken: bool,
    ended: bool,
}

impl Capture {
    pub(crate) fn new(origin: u64) -> Self {
        let clocks = BTreeMap::from([(origin, Clock::new())]);
        Self { origin, state: Mutex::new(State { clocks, ..State::default() }) }
    }

    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).ended
    }

    /// Invalidates the capture.
    pub(crate) fn break_off(&self) {
        lock(&self.state).broken = true;
    }

    /// Adds work of one of its streams.
    pub(crate) fn push(&self, stream: u64, work: Work) -> Answer {
        let mut state = lock(&self.state);
        if state.broken {
            return Err(CAPTURE_INVALIDATED);
        }
        state.work.push(work);
        *state.clocks.entry(stream).or_default().entry(stream).or_default() += 1;
        Ok(())
    }

    /// The clock of a stream, for an event that is recorded on it now.
    pub(crate) fn clock(&self, stream: u64) -> Clock {
        lock(&self.state).clocks.get(&stream).cloned().unwrap_or_default()
    }

    /// Makes a stream wait for such an event. The stream belongs to the capture from then on.
    pub(crate) fn join(&self, stream: u64, seen: &Clock) {
        let mut state = lock(&self.state);
        let clock = state.clocks.entry(stream).or_default();
        for (other, count) in seen {
            let known = clock.entry(*other).or_default();
            *known = (*known).max(*count);
        }
    }

    /// Ends the capture and returns the captured work.
    pub(crate) fn end(&self, stream: u64) -> Result<Vec<Work>, CUresult> {
        if stream != self.origin {
            return Err(CAPTURE_UNMATCHED);
        }
        let mut state = lock(&self.state);
        state.ended = true;
        if state.broken {
            return Err(CAPTURE_INVALIDATED);
        }
        let knows = |stream: &u64| state.clocks.get(&self.origin)?.get(stream).copied();
        let joined = |(stream, clock): (&u64, &Clock)| {
            clock.get(stream).is_none_or(|count| knows(stream).is_some_and(|known| known >= *count))
        };
        if !state.clocks.iter().all(joined) {
            return Err(CAPTURE_UNJOINED);
        }
        Ok(std::mem::take(&mut state.work))
    }
}
