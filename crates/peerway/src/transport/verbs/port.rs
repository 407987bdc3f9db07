//! A shard's completion queue on one device.
//!
//! Every queue pair of the shard on that device completes into it, so a poll costs the same for one
//! peer and for a thousand. Each queue pair has a *key*, an index with a generation, which the ids
//! of its work requests carry. A completion of a destroyed queue pair has a key that is no longer
//! valid.

use std::sync::{Arc, Mutex};

use peerway_sys::verbs::ffi::ibv_wc;
use peerway_sys::verbs::{CompChannel, Cq, VerbsError};

use super::nic::Nic;

/// Initial entries of the completion queue. It grows when queue pairs are added.
const FIRST_ENTRIES: i32 = 1024;
/// Entries on EFA, whose completion queues cannot grow: enough for about fifty peers.
const FIXED_ENTRIES: i32 = 32 << 10;

/// The number of early completions at which those of destroyed queue pairs are removed.
const MANY_EARLY: usize = 1024;

/// The part of a port that connecting threads and the driver share.
pub(crate) struct PortCq {
    pub(crate) nic: Arc<Nic>,
    pub(crate) cq: Arc<Cq>,
    pub(crate) channel: Arc<CompChannel>,
    state: Mutex<PortState>,
}

#[derive(Default)]
struct PortState {
    /// Limit of completions that all queue pairs together can produce at a time.
    reserved: i32,
    entries: i32,
    generations: Vec<u16>,
    free: Vec<u16>,
}

/// A queue pair's name in the ids of its work requests, and its reserved entries in the completion
/// queue.
pub(crate) struct Key {
    port: Arc<PortCq>,
    value: u32,
    room: i32,
}

impl PortCq {
    pub(crate) fn new(nic: &Arc<Nic>) -> Result<Arc<Self>, VerbsError> {
        let channel = Arc::new(CompChannel::create(&nic.context)?);
        channel.set_nonblocking()?;
        let wanted = if nic.efa.is_some() { FIXED_ENTRIES } else { FIRST_ENTRIES };
        let entries = wanted.min(nic.limits.max_cqe.max(1));
        let cq = Arc::new(Cq::create(&nic.context, entries, 0, Some(&channel), 0)?);
        let entries = cq.entries();
        let state = Mutex::new(PortState { entries, ..PortState::default() });
        Ok(Arc::new(Self { nic: nic.clone(), cq, channel, state }))
    }

    /// Reserves entries for a queue pair with `room` work requests and receives.
    pub(crate) fn reserve(self: &Arc<Self>, room: u32) -> Result<Key, VerbsError> {
        let room = room as i32;
        let mut state = self.state.lock().unwrap();
        let needed = state.reserved + room;
        if needed > state.entries {
            let most = self.nic.limits.max_cqe;
            let asked = needed.max(state.entries.saturating_mul(2)).min(most.max(needed));
            state.entries = self.cq.resize(asked)?;
        }
        state.reserved = needed;
        let index = state.free.pop().unwrap_or_else(|| {
            state.generations.push(0);
            (state.generations.len() - 1) as u16
        });
        let generation = state.generations[usize::from(index)];
        let value = u32::from(generation) << 16 | u32::from(index);
        Ok(Key { port: self.clone(), value, room })
    }

    fn is_live(&self, key: u32) -> bool {
        let state = self.state.lock().unwrap();
        state.generations.get((key & 0xFFFF) as usize) == Some(&((key >> 16) as u16))
    }
}

impl Key {
    /// The upper half of a work request's id.
    pub(crate) fn value(&self) -> u32 {
        self.value
    }

    pub(crate) fn port(&self) -> &Arc<PortCq> {
        &self.port
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        let mut state = self.port.state.lock().unwrap();
        let index = (self.value & 0xFFFF) as u16;
        state.reserved -= self.room;
        state.generations[usize::from(index)] =
            state.generations[usize::from(index)].wrapping_add(1);
        state.free.push(index);
    }
}

/// The driver's view: the session and lane of each queue pair.
pub(crate) struct Port {
    pub(crate) shared: Arc<PortCq>,
    /// By index: key, session, lane.
    owners: Vec<Option<(u32, usize, u16)>>,
    /// Completions of queue pairs that no session has adopted yet.
    early: Vec<ibv_wc>,
    /// The number of adopted queue pairs.
    pub(crate) adopted: usize,
    /// The next completion generates an event.
    pub(crate) armed: bool,
    /// The device no longer responds.
    pub(crate) gone: bool,
}

impl Port {
    pub(crate) fn new(shared: Arc<PortCq>) -> Self {
        Self {
            shared,
            owners: Vec::new(),
            early: Vec::new(),
            adopted: 0,
            armed: false,
            gone: false,
        }
    }

    /// Assigns a queue pair to a session's lane. Returns the completions that arrived before.
    pub(crate) fn adopt(&mut self, key: u32, session: usize, lane: u16) -> Vec<ibv_wc> {
        let index = (key & 0xFFFF) as usize;
        if self.owners.len() <= index {
            self.owners.resize(index + 1, None);
        }
        self.owners[index] = Some((key, session, lane));
        self.adopted += 1;
        let (its, others): (Vec<_>, Vec<_>) =
            self.early.drain(..).partition(|wc| key_of(wc) == key);
        self.early = others;
        its
    }

    /// Removes a queue pair that is gone.
    pub(crate) fn forget(&mut self, key: u32) {
        let entry = self.owners.get_mut((key & 0xFFFF) as usize);
        if let Some(entry) = entry.filter(|e| e.is_some_and(|(of, ..)| of == key)) {
            *entry = None;
            self.adopted -= 1;
        }
    }

    /// The session and lane of a completion. A completion of a queue pair that is not yet adopted
    /// is kept for `adopt`.
    #[inline]
    pub(crate) fn owner(&mut self, wc: &ibv_wc) -> Option<(usize, u16)> {
        let key = key_of(wc);
        match self.owners.get((key & 0xFFFF) as usize) {
            Some(Some((of, session, lane))) if *of == key => Some((*session, *lane)),
            _ => {
                if self.shared.is_live(key) {
                    // Drop the completions of queue pairs that never got a session.
                    if self.early.len() >= MANY_EARLY {
                        let Self { shared, early, .. } = self;
                        early.retain(|wc| shared.is_live(key_of(wc)));
                    }
                    self.early.push(*wc);
                }
                None
            }
        }
    }
}

fn key_of(wc: &ibv_wc) -> u32 {
    (wc.wr_id >> 32) as u32
}
