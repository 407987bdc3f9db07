//! Arrivals that are passed on: what a count announces is copied to further places of this process, a token to the experts on
//! several GPUs for instance, and only then are kernels here, or the sender, told.
//!
//! A rule belongs to a counter, and so to one place that is written before the counter rises. Counts carry no order and no payload: several
//! places that arrive in any order have a counter each. A place may be written again when the sender was answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use peerway_sys::cuda::CudaError;

use super::copiers::{Copiers, Pending};
use super::request::{self, outcome};
use super::target::PeerTarget;
use super::worker::ProxyShared;
use crate::gpu::copy::{Gathered, Run};
use crate::gpu::device::Device;
use crate::memory::{LocalSlice, RegionInner};
use crate::os::copy::{CopyKind, copy as copy_bytes, kind_for, store_fence};
use crate::transfer::Transfer;
use peerway_core::abi::FaultCode;

/// What is to happen when a counter rises: see [`crate::driven::Proxy::forward`].
#[derive(Clone, Debug)]
pub struct Forward {
    pub(crate) counter: u16,
    pub(crate) from: LocalSlice,
    pub(crate) to: Vec<LocalSlice>,
    pub(crate) then: Vec<u16>,
    pub(crate) answers: Vec<(u16, u16)>,
    /// Where the counter was when the rule was made.
    pub(crate) since: u64,
    /// It was taken away: nothing that arrives later is copied.
    pub(crate) stopped: Arc<AtomicBool>,
}

impl Forward {
    /// Whenever `counter` rises, the bytes of `from` have arrived.
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

    /// They are copied here too. Any number of places, of the host and of any GPUs of the process.
    pub fn to(mut self, place: LocalSlice) -> Self {
        self.to.push(place);
        self
    }

    /// After that a counter of ours goes up by one for each arrival.
    pub fn count(mut self, counter: u16) -> Self {
        self.then.push(counter);
        self
    }

    /// And one of a peer's, by the peer's number: how a sender learns that the bytes went all the way.
    pub fn answer(mut self, peer: u16, counter: u16) -> Self {
        self.answers.push((peer, counter));
        self
    }
}

/// A rule at work.
pub(crate) struct Forwarding {
    rule: Arc<Forward>,
    /// The GPU that copies, if one does.
    device: Option<Arc<Device>>,
    by_kernel: bool,
    /// Arrivals that were dealt with, and those that are being.
    handled: u64,
    copying: Option<(Pending, u64)>,
    answers: Vec<Transfer>,
    /// Answers that found no room yet: the peer, its counter, and how many.
    owed: Vec<(u16, u16, u64)>,
    /// It failed for good.
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

    /// Whether it was taken away and is through.
    pub(crate) fn is_over(&self) -> bool {
        self.rule.stopped.load(Ordering::Acquire) && !self.is_busy()
    }

    /// Whether something of it is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.copying.is_some() || !self.answers.is_empty() || !self.owed.is_empty()
    }

    /// Deals with what has arrived; whether anything moved. `Err` names the peer at fault, or none.
    pub(crate) fn step(
        &mut self,
        shared: &ProxyShared,
        copiers: &mut Copiers,
        target: impl Fn(u16) -> Option<Arc<PeerTarget>>,
    ) -> Result<bool, (u16, FaultCode)> {
        let mut failed = None;
        self.answers.retain(|answer| match answer.ended() {
            None => {
                answer.poll();
                true
            }
            Some(ended) => {
                failed = failed.or_else(|| outcome(ended).err());
                false
            }
        });
        if let Some(code) = failed {
            return Err((0, code));
        }
        if let Some((peer, counter, left)) = self.owed.pop() {
            let to = target(peer).ok_or((peer, FaultCode::Peer))?;
            let raised = request::raise(&to, counter, left, &mut self.answers);
            let raised = raised.map_err(|code| (peer, code))?;
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
                    return Err(failed_copy(&error));
                }
            }
            self.copying = None;
            self.tell(shared, arrivals, target)?;
            return Ok(true);
        }
        // pairs with the release of who raised it: the bytes are there
        let value = shared.counters.value(self.rule.counter.into());
        if value == self.handled || self.broken || self.rule.stopped.load(Ordering::Acquire) {
            return Ok(false);
        }
        // Who maps the counters could lower one.
        let Some(arrivals) = value.checked_sub(self.handled) else {
            self.broken = true;
            return Err((0, FaultCode::Counter));
        };
        match &self.device {
            None => self.copy_here(),
            Some(device) => {
                let mut places = std::iter::once(&self.rule.from).chain(&self.rule.to);
                if places.any(|place| place.region.handle.memory.is_freed()) {
                    self.broken = true;
                    return Err((0, FaultCode::Source));
                }
                let submitted = self.submit(device, copiers);
                let pending = submitted.map_err(|error| {
                    self.broken = true;
                    failed_copy(&error)
                })?;
                if let Some(pending) = pending {
                    self.handled = value;
                    self.copying = Some((pending, arrivals));
                    return Ok(true);
                }
                if !self.rule.to.is_empty() && self.rule.from.len > 0 {
                    // No room now.
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
            // SAFETY: both slices were checked against their regions when the rule was made, which keeps them.
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
            // All places at once or none.
            let fits = len > 0 && self.rule.to.len() <= room;
            for place in self.rule.to.iter().filter(|_| fits) {
                list.runs.push(Run { src, dst: address(place) as u64, len });
                list.bytes += len;
            }
            list.by_kernel &= self.by_kernel;
        };
        // SAFETY: the slices were checked against their regions when the rule was made, which keeps them.
        unsafe { copiers.submit(device, fill) }
    }

    /// Raises what is to rise, once for each arrival.
    fn tell(
        &mut self,
        shared: &ProxyShared,
        arrivals: u64,
        target: impl Fn(u16) -> Option<Arc<PeerTarget>>,
    ) -> Result<(), (u16, FaultCode)> {
        for counter in &self.rule.then {
            shared.counters.raise((*counter).into(), arrivals);
        }
        for (peer, counter) in &self.rule.answers {
            let target = target(*peer).ok_or((*peer, FaultCode::Peer))?;
            if usize::from(*counter) >= target.counters {
                return Err((*peer, FaultCode::Counter));
            }
            let raised = request::raise(&target, *counter, arrivals, &mut self.answers);
            let raised = raised.map_err(|code| (*peer, code))?;
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

fn failed_copy(error: &CudaError) -> (u16, FaultCode) {
    tracing::error!(%error, "an arrival was not forwarded");
    (0, FaultCode::Failed)
}

/// Whether a slice lies inside its region.
pub(crate) fn is_inside(slice: &LocalSlice) -> bool {
    let memory: &RegionInner = &slice.region.handle.memory;
    memory.extent().contains(peerway_core::region::Span { offset: slice.offset, len: slice.len })
}
