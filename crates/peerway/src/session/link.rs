//! The local link: what two processes on one host share besides sockets.
//!
//! One memfd segment per session holds four rings (latency and bulk, each way) and two tables of
//! gates, one per owner. A Unix socket carries the file descriptors of regions to map. The protocol
//! version fixes the layout. The other process can write any position or word in the segment, so
//! this side checks each one where it uses it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use peerway_core::ids::SlotId;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::os::cma;
use crate::os::gate::{GATE_LEN, SharedGate};
use crate::os::process::Pidfd;
use crate::os::ring::{self, RingConsumer, RingProducer};
use crate::os::shm::{self, ShmMapping};
use crate::os::wake::EventFd;
use crate::session::Reach;
use crate::transport::ring::RingWire;

/// Capacity of a latency ring, which holds only small frames.
const LATENCY_RING: usize = 256 << 10;
/// Capacity of a bulk ring: four chunks of 256 KiB in flight. Both rings of a direction fit in L2.
const BULK_RING: usize = 1 << 20;
/// The most regions of one owner that one peer can access directly at a time.
const GATES: usize = 4096;

const RINGS: [usize; 4] = [LATENCY_RING, LATENCY_RING, BULK_RING, BULK_RING];

/// Which half of the segment belongs to this side. The opener of the session has `First`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Half {
    First,
    Second,
}

/// The length of a segment in bytes.
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
    /// Passes file descriptors. The driver also watches it for the peer's end.
    pub(crate) socket: OwnedFd,
    /// The peer's memory, if the kernel lets this process copy from and to it.
    memory: Option<Arc<cma::ProcessMemory>>,
    /// The peer signals it when this side blocks.
    pub(crate) wake_fd: EventFd,
    pub(crate) peer_wake_fd: Arc<EventFd>,
    gates: Mutex<GateTable>,
}

#[derive(Default)]
struct GateTable {
    /// Gates in use: the grant, the gate's index and its pass.
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

    /// Creates a segment. Returns its file descriptor for the peer, and a mapping.
    pub(crate) fn create_segment() -> io::Result<(OwnedFd, ShmMapping)> {
        let fd = shm::create_memfd("peerway-session", segment_len())?;
        let mapping = ShmMapping::of_fd(fd.as_fd(), segment_len(), true)?;
        Ok((fd, mapping))
    }

    /// Maps a segment that a peer passed.
    pub(crate) fn adopt_segment(fd: &OwnedFd) -> io::Result<ShmMapping> {
        shm::check_memfd(fd.as_fd(), segment_len())?;
        ShmMapping::of_fd(fd.as_fd(), segment_len(), true)
    }

    /// Creates the latency wire and the bulk wire. Called once per link, because a ring has one
    /// producer and one consumer.
    pub(crate) fn wires(&self) -> [RingWire; 2] {
        [0, 2].map(|first| {
            let (out, inc) = match self.half {
                Half::First => (first, first + 1),
                Half::Second => (first + 1, first),
            };
            let base = |ring: usize| {
                // SAFETY: all offsets of the layout lie inside the segment. Its length is
                // `segment_len`: `create_segment` sets it and `adopt_segment` checks it.
                unsafe { self.segment.ptr().add(ring_offset(ring)) }
            };
            // SAFETY: each ring of the layout lies inside the segment and is aligned to its
            // header's cache lines. It stays mapped while the wire holds the segment. This side is
            // the only producer of one ring and the only consumer of the other, because the driver
            // calls `wires` once.
            let (producer, consumer) = unsafe {
                (RingProducer::new(base(out), RINGS[out]), RingConsumer::new(base(inc), RINGS[inc]))
            };
            RingWire::new(producer, consumer, self.peer_wake_fd.clone(), self.segment.clone())
        })
    }

    /// Opens a gate of this side for `grant`, or returns the one it has. `None` if the table is
    /// full.
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

    /// Frees the gate of a grant that is gone.
    pub(crate) fn forget_gate(&self, grant: SlotId) {
        let mut table = self.gates.lock().unwrap();
        if let Some(at) = table.taken.iter().position(|(id, ..)| *id == grant) {
            let (_, index, _) = table.taken.swap_remove(at);
            table.free.push(index);
        }
    }

    /// Closes every gate of this side, because the session is over.
    pub(crate) fn bar_all(&self) {
        let table = self.gates.lock().unwrap();
        for (_, index, _) in &table.taken {
            if let Some(gate) = self.gate(self.half, *index) {
                gate.gate().close();
            }
        }
    }

    /// The peer's gate at an index that the peer named. `None` if the index is out of range.
    pub(crate) fn peer_gate(&self, index: u32) -> Option<SharedGate> {
        let owner = if self.half == Half::First { Half::Second } else { Half::First };
        self.gate(owner, index)
    }

    fn gate(&self, owner: Half, index: u32) -> Option<SharedGate> {
        let within = (index as usize) < GATES;
        let offset = gates_offset(owner) + index as usize * GATE_LEN;
        if within { SharedGate::new(self.segment.clone(), offset) } else { None }
    }

    /// The peer's memory, if this process may copy from and to it.
    pub(crate) fn memory(&self, reach: &Reach) -> Option<&Arc<cma::ProcessMemory>> {
        self.memory.as_ref().filter(|_| reach.we_pull)
    }

    /// The peer's process, if its memory could be opened.
    pub(super) fn process(&self) -> Option<&Arc<Pidfd>> {
        self.memory.as_ref().map(|memory| memory.process())
    }

    /// Whether the peer has closed its half of the socket. It then uses nothing of the session any
    /// more.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut fds, Some(&now));
        polled.is_ok() && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
    }

    /// Tells the peer that this side uses nothing of the session any more. It shuts down the write
    /// half only, because the peer reports its own end on the other half.
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
