//! The local link: what two processes on one host share besides sockets.
//!
//! One memfd segment per session holds four rings (latency and bulk, each way) and two tables of
//! gates, one per owner. A Unix socket carries file descriptors of regions to map. The layout is
//! fixed by protocol version; positions and words in it are the other process's word and checked
//! wherever they are used.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use peerway_core::ids::SlotId;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::memory::gate::{GATE_LEN, SharedGate};
use crate::os::cma;
use crate::os::process::Pidfd;
use crate::os::ring::{self, RingConsumer, RingProducer};
use crate::os::shm::{self, ShmMapping};
use crate::os::wake::EventFd;
use crate::session::Reach;
use crate::transport::ring::RingWire;

/// Latency rings hold small frames only.
const LATENCY_RING: usize = 256 << 10;
/// Bulk rings: four chunks of 256 KiB inrequest, and both rings of a direction fit in L2.
const BULK_RING: usize = 1 << 20;
/// Regions of one owner that one peer can access directly at a time.
const GATES: usize = 4096;

const RINGS: [usize; 4] = [LATENCY_RING, LATENCY_RING, BULK_RING, BULK_RING];

/// Which half of the segment is ours: the session's opener is `First`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Half {
    First,
    Second,
}

/// Bytes of a segment.
pub(crate) fn segment_len() -> usize {
    gates_offset(Half::Second) + GATES * GATE_LEN
}

fn ring_offset(ring: usize) -> usize {
    RINGS[..ring].iter().map(|capacity| ring::HEADER + capacity).sum()
}

fn gates_offset(owner: Half) -> usize {
    let table = if owner == Half::First { 0 } else { GATES * GATE_LEN };
    ring_offset(RINGS.len()) + table
}

/// See the module.
pub(crate) struct Link {
    segment: Arc<ShmMapping>,
    half: Half,
    /// Passes file descriptors; also watched for the peer's end.
    pub(crate) socket: OwnedFd,
    /// The peer's memory, where the kernel lets us copy from and to it.
    memory: Option<Arc<cma::ProcessMemory>>,
    /// Rung by the peer when we sleep.
    pub(crate) wake_fd: EventFd,
    pub(crate) peer_wake_fd: Arc<EventFd>,
    gates: Mutex<GateTable>,
}

#[derive(Default)]
struct GateTable {
    /// Gates in use, by the grant they guard.
    taken: Vec<(SlotId, u32, u32)>,
    free: Vec<u32>,
    next: u32,
    pass: u32,
}

impl Link {
    pub(crate) fn new(
        segment: ShmMapping,
        half: Half,
        socket: OwnedFd,
        memory: Option<cma::ProcessMemory>,
        wake_fd: EventFd,
        peer_wake_fd: EventFd,
    ) -> Self {
        Self {
            segment: Arc::new(segment),
            half,
            socket,
            memory: memory.map(Arc::new),
            wake_fd,
            peer_wake_fd: Arc::new(peer_wake_fd),
            gates: Mutex::default(),
        }
    }

    /// A new segment: its descriptor to pass on, and our mapping.
    pub(crate) fn create_segment() -> io::Result<(OwnedFd, ShmMapping)> {
        let fd = shm::create_memfd("peerway-session", segment_len())?;
        let mapping = ShmMapping::of_fd(fd.as_fd(), segment_len(), true)?;
        Ok((fd, mapping))
    }

    /// A segment that a peer passed.
    pub(crate) fn adopt_segment(fd: &OwnedFd) -> io::Result<ShmMapping> {
        shm::check_memfd(fd.as_fd(), segment_len())?;
        ShmMapping::of_fd(fd.as_fd(), segment_len(), true)
    }

    /// The latency and the bulk wire. Called once per link: a ring has one producer and one
    /// consumer.
    pub(crate) fn wires(&self) -> [RingWire; 2] {
        [0, 2].map(|first| {
            let (out, inc) = match self.half {
                Half::First => (first, first + 1),
                Half::Second => (first + 1, first),
            };
            let base = |ring: usize| {
                // SAFETY: all offsets of the layout lie inside the segment, whose length was fixed
                // (created) or checked (adopted) to be `segment_len`.
                unsafe { self.segment.ptr().add(ring_offset(ring)) }
            };
            // SAFETY: each ring of the layout lies inside the segment, is aligned to its header's
            // cache lines and stays mapped while the wire holds the segment; this side is the only
            // producer of one and the only consumer of the other because the driver makes the
            // wires once.
            let (producer, consumer) = unsafe {
                (RingProducer::new(base(out), RINGS[out]), RingConsumer::new(base(inc), RINGS[inc]))
            };
            RingWire::new(producer, consumer, self.peer_wake_fd.clone(), self.segment.clone())
        })
    }

    /// A gate of ours for `grant`, opened; `None` when the table is full. The same grant has one.
    pub(crate) fn own_gate(&self, grant: SlotId) -> Option<(u32, u32, SharedGate)> {
        let mut table = self.gates.lock().unwrap();
        if let Some(&(_, index, pass)) = table.taken.iter().find(|(id, ..)| *id == grant) {
            return Some((index, pass, self.gate(self.half, index)?));
        }
        let index = match table.free.pop() {
            Some(index) => index,
            None if (table.next as usize) < GATES => {
                table.next += 1;
                table.next - 1
            }
            None => return None,
        };
        // 0 is the pass of a closed gate.
        table.pass = table.pass.wrapping_add(1).max(1);
        let pass = table.pass;
        table.taken.push((grant, index, pass));
        let gate = self.gate(self.half, index)?;
        gate.gate().open(pass);
        Some((index, pass, gate))
    }

    /// Gives back the gates of grants that are gone.
    pub(crate) fn forget_gate(&self, grant: SlotId) {
        let mut table = self.gates.lock().unwrap();
        if let Some(at) = table.taken.iter().position(|(id, ..)| *id == grant) {
            let (_, index, _) = table.taken.swap_remove(at);
            table.free.push(index);
        }
    }

    /// Closes every gate of ours: the session is over.
    pub(crate) fn bar_all(&self) {
        let table = self.gates.lock().unwrap();
        for (_, index, _) in &table.taken {
            if let Some(gate) = self.gate(self.half, *index) {
                gate.gate().close();
            }
        }
    }

    /// A gate of the peer by the index it named; `None` when there is no such gate.
    pub(crate) fn peer_gate(&self, index: u32) -> Option<SharedGate> {
        let owner = if self.half == Half::First { Half::Second } else { Half::First };
        self.gate(owner, index)
    }

    fn gate(&self, owner: Half, index: u32) -> Option<SharedGate> {
        let within = (index as usize) < GATES;
        let offset = gates_offset(owner) + index as usize * GATE_LEN;
        if within { SharedGate::new(self.segment.clone(), offset) } else { None }
    }

    /// The peer's memory, where we may copy from and to it by ourselves.
    pub(crate) fn memory(&self, reach: &Reach) -> Option<&Arc<cma::ProcessMemory>> {
        self.memory.as_ref().filter(|_| reach.we_pull)
    }

    /// The peer's process, where its memory could be opened.
    pub(super) fn process(&self) -> Option<&Arc<Pidfd>> {
        self.memory.as_ref().map(|memory| memory.process())
    }

    /// Whether the peer has closed its half: nothing of the session is left there.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut fds, Some(&now));
        polled.is_ok() && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
    }

    /// Tells the peer that nothing of the session is left here. Only our half: what we hear on the
    /// other is the peer's word.
    pub(crate) fn close(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_keeps_everything_apart_and_aligned() {
        for (ring, capacity) in RINGS.iter().enumerate() {
            assert!(ring_offset(ring).is_multiple_of(64));
            assert!(capacity.is_power_of_two());
        }
        assert!(gates_offset(Half::First).is_multiple_of(GATE_LEN));
        assert_eq!(gates_offset(Half::Second) - gates_offset(Half::First), GATES * GATE_LEN);
    }
}
