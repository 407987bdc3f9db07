//! The requests and receives on the queues of a queue pair.

use peerway_sys::verbs::ffi::*;

use super::Peer;
use crate::window::Bound;
use crate::wire;

/// A posted request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    /// `IBV_WR_*`.
    pub(crate) opcode: u32,
    pub(crate) signalled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) immediate: u32,
    pub(crate) address: u64,
    pub(crate) key: u32,
    pub(crate) local: Local,
    pub(crate) length: u64,
    /// For a window: its new key, and what it is bound to.
    pub(crate) bind: Option<(u32, Bound)>,
    /// The destination and its queue key, without a connection.
    pub(crate) to: Option<(Peer, u32)>,
    /// The status of an error that is known before the request begins.
    pub(crate) error: Option<u32>,
    /// The sequence number of its first packet.
    pub(crate) first: u64,
    pub(crate) begun: bool,
    /// For reads, once begun: the packets that have arrived.
    pub(crate) read: Option<Arrived>,
}

/// The local side of a request's bytes.
#[derive(Debug)]
pub(crate) enum Local {
    Memory(Vec<ibv_sge>),
    Inline(Vec<u8>),
}

/// The packets of a message that have arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    packets: Vec<bool>,
    pub(crate) missing: usize,
}

impl Arrived {
    pub(crate) fn new(length: u64) -> Self {
        let count = wire::packets(length) as usize;
        Self { packets: vec![false; count], missing: count }
    }

    /// Records the packet at an offset. Returns false if it has already arrived or the offset is
    /// invalid.
    pub(crate) fn note(&mut self, offset: u64) -> bool {
        let index = (offset / wire::PAYLOAD as u64) as usize;
        match self.packets.get_mut(index) {
            Some(there) if !*there && offset.is_multiple_of(wire::PAYLOAD as u64) => {
                *there = true;
                self.missing -= 1;
                true
            }
            _ => false,
        }
    }

    /// Whether the packet at an offset has arrived.
    pub(crate) fn has(&self, offset: u64) -> bool {
        let index = (offset / wire::PAYLOAD as u64) as usize;
        self.packets.get(index).copied().unwrap_or(false)
    }

    /// The first run of missing packets: its start and its length.
    pub(crate) fn gap(&self) -> (usize, usize) {
        let first = self.packets.iter().position(|there| !there).unwrap_or(0);
        let run = self.packets[first..].iter().take_while(|there| !**there).count();
        (first, run)
    }
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) pieces: Vec<ibv_sge>,
}

impl Receive {
    pub(crate) fn room(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.length)).sum()
    }
}

impl Request {
    pub(crate) fn packets(&self) -> u64 {
        match self.opcode {
            IBV_WR_BIND_MW | IBV_WR_LOCAL_INV => 0,
            IBV_WR_RDMA_READ => 1,
            _ => wire::packets(self.length),
        }
    }

    /// Whether the device executes it locally, without a packet.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.opcode, IBV_WR_BIND_MW | IBV_WR_LOCAL_INV)
    }

    /// The sequence number after its last packet.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.packets()
    }

    pub(crate) fn is_read(&self) -> bool {
        self.opcode == IBV_WR_RDMA_READ
    }
}
