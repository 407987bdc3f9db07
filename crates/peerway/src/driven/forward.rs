//! Forwarding rules. When a counter rises, the proxy copies the arrived bytes to further places of
//! this process, for example a token to the experts on several GPUs. Only then does it raise
//! counters for local kernels or for the sender.
//!
//! A rule belongs to one counter, and so to one place that is written before the counter rises.
//! Counts carry no order and no payload, so places that arrive in any order need one counter each.
//! The sender may write a place again after it got the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use peerway_sys::cuda::CudaError;

use super::copiers::{Copiers, Pending};
use super::request::{self, outcome};
use super::target::PeerTarget;
use super::worker::ProxyShared;
use crate::gpu::copy::{Gathered, Run};
use crate::gpu::device::Device;
use crate::memory::RegionInner;
use crate::os::copy::{CopyKind, copy as copy_bytes, kind_for, store_fence};
use crate::region::LocalSlice;
use crate::transfer::Transfer;
use peerway_core::abi::FaultCode;

/// What the proxy does when a counter rises: see [`crate::driven::Proxy::forward`].
#[derive(Clone, Debug)]
pub struct Forward {
    pub(crate) counter: u16,
    pub(crate) from: LocalSlice,
    pub(crate) to: Vec<LocalSlice>,
    pub(crate) then: Vec<u16>,
    pub(crate) answers: Vec<(u16, u16)>,
    /// The counter's value when the rule was added.
    pub(crate) since: u64,
    /// The rule was removed. Later arrivals are not copied.
    pub(crate) stopped: Arc<AtomicBool>,
}

impl Forward {
    /// A rise of `counter` means that the bytes of `from` have arrived.
    pub fn new(counter: u16, from: LocalSlice) -> Self {
        Self {
            counter,
            from,
            to: Vec::new(),
            then: Vec::new(),
            answers: Vec::new(),
            since: 0,
            stopped: Arc::default(),
        }
    }

    /// Copies the bytes to `place` too. A rule can have any number of places, in host memory and on
    /// any GPUs of the process.
    pub fn to(mut self, place: LocalSlice) -> Self {
        self.to.push(place);
        self
    }

    /// Raises a counter of this proxy by one for each arrival, after the copies.
    pub fn count(mut self, counter: u16) -> Self {
        self.then.push(counter);
        self
    }

    /// Raises a counter of the numbered peer after the copies, so that a sender learns that its
    /// bytes reached all places.
    pub fn answer(mut self, peer: u16, counter: u16) -> Self {
        self.answers.push((peer, counter));
        self
    }
}

/// A rule in execution.
pub(crate) struct Forwarding {
    rule: Arc<Forward>,
    /// The GPU that copies, if a GPU does.
    device: Option<Arc<Device>>,
    by_kernel: bool,
    /// The counter value up to which arrivals are handled or being copied.
    handled: u64,
    copying: Option<(Pending, u64)>,
    answers: Vec<Transfer>,
    /// Answers that the endpoint had no room for: the peer, its counter, and the number of counts.
    owed: Vec<(u16, u16, u64)>,
    /// The rule failed and handles no more arrivals.
    broken: bool,
}

impl Forwarding {
    pub(crate) fn new(rule: Arc<Forward>) -> Self {
        let regions =
            || std::iter::once(&rule.from).chain(&rule.to).map(|slice| &slice.region.handle.memory);
        let device = regions().find_map(|memory| memory.device().cloned());
        let by_kernel = device
            .as_ref()
            .is_some_and(|device| regions().all(|memory| memory.is_reached_by(device)));
        let handled = rule.since;
        Self {
            device,
            by_kernel,
            rule,
            handled,
            copying: None,
            answers: Vec::new(),
            owed: Vec::new(),
            broken: false,
        }
    }

    pub(crate) fn is_for(&self, rule: &Arc<Forward>) -> bool {
        Arc::ptr_eq(&self.rule, rule)
    }

    /// Whether the rule was removed and its work is finished.
    pub(crate) fn is_over(&self) -> bool {
        self.rule.stopped.load(Ordering::Acquire) && !self.is_busy()
    }

    /// Whether the rule has work in progress.
    pub(crate) fn is_busy(&self) -> bool {
        self.copying.is_some() || !self.answers.is_empty() || !self.owed.is_empty()
    }

    /// Handles arrivals and returns whether it made progress. `Err` names the faulty peer, if a
    /// peer is at fault.
    pub(crate) fn step(
        &mut self,
        shared: &ProxyShared,
        copiers: &mut Copiers,
        target: impl Fn(u16) -> Option<Arc<PeerTarget>>,
    ) -> Result<bool, (Option<u16>, FaultCode)> {
        let mut failed = None;
        self.answers.retain(|answer| match answer.ended() {
            None => {
                answer.poll();
                true
            }
            Some(ended) => {
                if let (None, Err(code)) = (failed, outcome(ended)) {
                    failed = Some((answer.failure().map(|failure| failure.incarnation), code));
                }
                false
            }
        });
        if let Some((incarnation, code)) = failed {
            let is_faulty = |peer: &u16| {
                target(*peer).is_some_and(|to| Some(to.session().incarnation) == incarnation)
            };
            return Err((self.rule.answers.iter().map(|(peer, _)| *peer).find(is_faulty), code));
        }
        if let Some((peer, counter, left)) = self.owed.pop() {
            let to = target(peer).ok_or((Some(peer), FaultCode::Peer))?;
            let raised = request::raise(&to, counter, left, &mut self.answers);
            let raised = raised.map_err(|code| (Some(peer), code))?;
            if raised < left {
                self.owed.push((peer, counter, left - raised));
            }
            return Ok(raised > 0);
        }
        if let Some((pending, arrivals)) = &self.copying {
            let arrivals = *arrivals;
            match copiers.is_done(pending) {
                Ok(false) => return Ok(false),
                Ok(true) => {}
                Err(error) => {
                    self.copying = None;
                    self.broken = true;
                    return Err(failed_copy(self.rule.counter, &error));
                }
            }
            self.copying = None;
            self.tell(shared, arrivals, target)?;
            return Ok(true);
        }
        // Pairs with the release of the thread that raised the counter: the bytes are in memory.
        let value = shared.counters.value(self.rule.counter.into());
        if value == self.handled || self.broken || self.rule.stopped.load(Ordering::Acquire) {
            return Ok(false);
        }
        // A peer that maps the counters could lower one.
        let Some(arrivals) = value.checked_sub(self.handled) else {
            self.broken = true;
            return Err((None, FaultCode::Counter));
        };
        match &self.device {
            None => self.copy_here(),
            Some(device) => {
                let mut places = std::iter::once(&self.rule.from).chain(&self.rule.to);
                if places.any(|place| place.region.handle.memory.is_freed()) {
                    self.broken = true;
                    return Err((None, FaultCode::Source));
                }
                let submitted = self.submit(device, copiers);
                let pending = submitted.map_err(|error| {
                    self.broken = true;
                    failed_copy(self.rule.counter, &error)
                })?;
                if let Some(pending) = pending {
                    self.handled = value;
                    self.copying = Some((pending, arrivals));
                    return Ok(true);
                }
                if !self.rule.to.is_empty() && self.rule.from.len > 0 {
                    // The copier has no room now.
                    return Ok(false);
                }
            }
        }
        self.handled = value;
        self.tell(shared, arrivals, target)?;
        Ok(true)
    }

    fn copy_here(&self) {
        let (from, len) = (address(&self.rule.from), self.rule.from.len as usize);
        let kind = kind_for(len as u64);
        for place in &self.rule.to {
            // SAFETY: `Proxy::forward` checked both slices against their regions, and the rule
            // keeps the regions.
            unsafe { copy_bytes(kind, address(place), from, len) };
        }
        if kind == CopyKind::NonTemporal {
            store_fence();
        }
    }

    fn submit(
        &self,
        device: &Arc<Device>,
        copiers: &mut Copiers,
    ) -> Result<Option<Pending>, CudaError> {
        let fill = |list: &mut Gathered, room: usize| {
            let (src, len) = (address(&self.rule.from) as u64, self.rule.from.len);
            // Submits all places or none.
            let fits = len > 0 && self.rule.to.len() <= room;
            for place in self.rule.to.iter().filter(|_| fits) {
                list.runs.push(Run { src, dst: address(place) as u64, len });
                list.bytes += len;
            }
            list.by_kernel &= self.by_kernel;
        };
        // SAFETY: `Proxy::forward` checked the slices against their regions, and the rule keeps the
        // regions.
        unsafe { copiers.submit(device, fill) }
    }

    /// Raises the counters of the rule, once for each arrival.
    fn tell(
        &mut self,
        shared: &ProxyShared,
        arrivals: u64,
        target: impl Fn(u16) -> Option<Arc<PeerTarget>>,
    ) -> Result<(), (Option<u16>, FaultCode)> {
        for counter in &self.rule.then {
            shared.counters.raise((*counter).into(), arrivals);
        }
        for (peer, counter) in &self.rule.answers {
            let target = target(*peer).ok_or((Some(*peer), FaultCode::Peer))?;
            if usize::from(*counter) >= target.counters {
                return Err((Some(*peer), FaultCode::Counter));
            }
            let raised = request::raise(&target, *counter, arrivals, &mut self.answers);
            let raised = raised.map_err(|code| (Some(*peer), code))?;
            if raised < arrivals {
                self.owed.push((*peer, *counter, arrivals - raised));
            }
        }
        Ok(())
    }
}

fn address(slice: &LocalSlice) -> *mut u8 {
    slice.region.handle.memory.ptr().wrapping_add(slice.offset as usize)
}

/// A rule names no peer that its bytes come from, so the counter identifies it.
fn failed_copy(counter: u16, error: &CudaError) -> (Option<u16>, FaultCode) {
    tracing::error!(%error, counter, "a GPU failed to forward an arrival; the rule stops");
    (None, FaultCode::Failed)
}

/// Whether a slice lies inside its region.
pub(crate) fn is_inside(slice: &LocalSlice) -> bool {
    let memory: &RegionInner = &slice.region.handle.memory;
    memory.extent().contains(peerway_core::region::Span { offset: slice.offset, len: slice.len })
}
