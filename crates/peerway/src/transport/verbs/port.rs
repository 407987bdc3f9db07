//! A shard's completion queue on one device.
//!
//! Every queue pair of the shard on that device completes into it, so a poll costs the same for one
//! peer and for a thousand. Each queue pair has a *key*, an index with a generation, which the ids
//! of its work requests carry. A completion of a destroyed queue pair has a key that is no longer
//! valid.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use peerway_sys::verbs::ffi::IBV_WC_RECV_RDMA_WITH_IMM;
use peerway_sys::verbs::{CompChannel, Cq, VerbsError};

use super::nic::Nic;
use super::queue::Queue;
use crate::transport::device::{Completion, CompletionQueue, Completions, DeviceQueue, POLL};
use crate::transport::error::RdmaError;

/// Initial entries of the completion queue. It grows when queue pairs are added.
const FIRST_ENTRIES: i32 = 1024;
/// Entries on EFA, whose completion queues cannot grow: enough for about fifty peers.
const FIXED_ENTRIES: i32 = 32 << 10;

/// See the module.
pub(super) struct PortCq {
    pub(super) nic: Arc<Nic>,
    pub(super) cq: Arc<Cq>,
    channel: Arc<CompChannel>,
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
pub(super) struct Key {
    port: Arc<PortCq>,
    value: u32,
    room: i32,
}

impl PortCq {
    pub(super) fn new(nic: &Arc<Nic>) -> Result<Arc<Self>, VerbsError> {
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
    pub(super) fn reserve(self: &Arc<Self>, room: u32) -> Result<Key, VerbsError> {
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
}

impl CompletionQueue for PortCq {
    fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    #[inline]
    fn poll<'a>(&self, into: &'a mut Completions) -> io::Result<&'a [Completion]> {
        let mut completions = [const { MaybeUninit::uninit() }; POLL];
        let taken = self.cq.take(&mut completions).map_err(io::Error::other)?;
        for (wc, into) in taken.iter().zip(&mut *into) {
            let carries_immediate = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
            into.write(Completion {
                queue: (wc.wr_id >> 32) as u32,
                work: wc.wr_id as u32,
                status: wc.status,
                len: wc.byte_len,
                immediate: carries_immediate.then(|| u32::from_be(wc.imm_data)),
            });
        }
        // SAFETY: the loop has written the first `taken.len()` places. There are that many: `take`
        // had as many places as `into` has.
        Ok(unsafe { into[..taken.len()].assume_init_ref() })
    }

    fn arm(&self) -> bool {
        self.cq.request_notify(false).is_ok()
    }

    fn take_events(&self) -> bool {
        let mut any = false;
        while let Ok(Some(_)) = self.channel.event() {
            any = true;
        }
        any
    }

    fn has_queue(&self, key: u32) -> bool {
        let state = self.state.lock().unwrap();
        state.generations.get((key & 0xFFFF) as usize) == Some(&((key >> 16) as u16))
    }

    fn open(self: Arc<Self>, latency: bool) -> Result<Box<dyn DeviceQueue>, String> {
        if !self.nic.has_link() {
            return Err(format!("the link of RDMA device {} is down", self.nic.context.name()));
        }
        // Creating a queue locks memory for its buffers. If memory is short, the error names the
        // limit.
        let queue = Queue::new(&self, latency);
        let queue = queue.map_err(|error| RdmaError::registering(error).to_string())?;
        Ok(Box::new(queue))
    }
}

impl Key {
    /// The upper half of a work request's id.
    pub(super) fn value(&self) -> u32 {
        self.value
    }

    pub(super) fn port(&self) -> &Arc<PortCq> {
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
