//! A wire in memory whose bytes arrive when the schedule says so.
//!
//! A lane is two pipes. A sender puts bytes into a pipe while it has room; the schedule lets them
//! arrive, a few at a time. A broken lane fails at one side at once. The other side still receives
//! what had arrived, and perhaps some of what was on its way, before it sees the end: that is how a
//! TCP connection dies.
//!
//! The wires of every second lane accept more than the pipe has room for, as a wire that seals
//! records does, and keep it until the next call.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use crate::os::Piece;
use crate::transport::Wire;

/// One direction of a lane.
#[derive(Default)]
pub(super) struct Pipe {
    bytes: VecDeque<u8>,
    /// How many of `bytes` have arrived.
    arrived: usize,
    room: usize,
    /// The most that one receive call takes.
    most: usize,
    sender: Side,
    receiver: Side,
}

/// How a side of a pipe sees it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Side {
    #[default]
    Good,
    /// Calls fail.
    Broken,
    /// The other side is broken: bytes that are sent are lost, and the end comes after the last
    /// byte that is still on its way.
    Ending,
}

impl Pipe {
    /// Bytes on their way.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.bytes.len() - self.arrived
    }

    /// Lets some bytes arrive.
    #[cfg(test)]
    pub(super) fn deliver(&mut self, most: usize) {
        self.arrived += self.in_flight().min(most);
    }

    /// Puts bytes into the pipe that have arrived at once, whatever room it has. Bytes for a broken
    /// receiver are lost.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        if self.receiver == Side::Good {
            self.bytes.extend(bytes);
            self.arrived = self.bytes.len();
        }
    }

    /// Bytes that the receiver can take.
    pub(super) fn arrived(&self) -> usize {
        self.arrived
    }

    /// Takes up to `most` bytes out of the pipe, on their way or not.
    pub(super) fn take(&mut self, most: usize) -> Vec<u8> {
        let taken = self.bytes.drain(..most.min(self.bytes.len())).collect();
        self.arrived = self.arrived.min(self.bytes.len());
        taken
    }
}

/// The two directions of a lane, from the first node to the second and back.
#[derive(Clone)]
pub(super) struct SimulatedLane {
    pub(super) pipes: [Arc<Mutex<Pipe>>; 2],
    /// Bytes that a wire accepts beyond the room of its pipe.
    keeps: usize,
}

impl SimulatedLane {
    pub(super) fn new(room: usize, most: usize, keeps: usize) -> Self {
        let pipe = || Arc::new(Mutex::new(Pipe { room, most, ..Pipe::default() }));
        Self { pipes: [pipe(), pipe()], keeps }
    }

    /// A new lane with the same properties.
    #[cfg(test)]
    pub(super) fn renewed(&self) -> Self {
        let pipe = self.pipes[0].lock().unwrap();
        Self::new(pipe.room, pipe.most, self.keeps)
    }

    /// The wire of one node.
    pub(super) fn wire(&self, node: usize) -> SimulatedWire {
        let [first, second] = self.pipes.clone();
        let (outgoing, incoming) = if node == 0 { (first, second) } else { (second, first) };
        SimulatedWire { outgoing, incoming, unsent: VecDeque::new(), keeps: self.keeps }
    }

    /// Breaks the lane at one node. The other still gets `more` of the bytes on their way to it.
    pub(super) fn break_at(&self, node: usize, more: usize) {
        let mut outgoing = self.pipes[node].lock().unwrap();
        let kept = (outgoing.arrived + more).min(outgoing.bytes.len());
        outgoing.bytes.truncate(kept);
        (outgoing.sender, outgoing.receiver) = (Side::Broken, Side::Ending);
        drop(outgoing);
        let mut incoming = self.pipes[1 - node].lock().unwrap();
        incoming.bytes.clear();
        incoming.arrived = 0;
        (incoming.receiver, incoming.sender) = (Side::Broken, Side::Ending);
    }
}

/// See the module.
pub(super) struct SimulatedWire {
    outgoing: Arc<Mutex<Pipe>>,
    incoming: Arc<Mutex<Pipe>>,
    /// Accepted bytes that are not in the pipe yet.
    unsent: VecDeque<u8>,
    keeps: usize,
}

impl Wire for SimulatedWire {
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize> {
        let mut pipe = self.outgoing.lock().unwrap();
        match pipe.sender {
            Side::Broken => return Err(io::ErrorKind::ConnectionReset.into()),
            Side::Ending => {
                self.unsent.clear();
                return Ok(pieces.iter().map(|piece| piece.len as usize).sum());
            }
            Side::Good => {}
        }
        let flushed = self.unsent.len().min(pipe.room - pipe.bytes.len());
        pipe.bytes.extend(self.unsent.drain(..flushed));
        if !self.unsent.is_empty() {
            return Ok(0);
        }
        let mut sent = 0;
        for piece in pieces {
            let room = pipe.room - pipe.bytes.len();
            let len = (room + self.keeps - self.unsent.len()).min(piece.len as usize);
            // SAFETY: the caller vouches for the piece, of which this is the start.
            let bytes = unsafe { std::slice::from_raw_parts(piece.addr as *const u8, len) };
            let (now, later) = bytes.split_at(room.min(len));
            pipe.bytes.extend(now);
            self.unsent.extend(later);
            sent += len;
            if len < piece.len as usize {
                break;
            }
        }
        Ok(sent)
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        let mut pipe = self.incoming.lock().unwrap();
        if pipe.receiver == Side::Broken {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if pipe.arrived == 0 {
            let is_over = pipe.receiver == Side::Ending && pipe.bytes.is_empty();
            return Ok(is_over.then_some(0));
        }
        let mut received = 0;
        for piece in pieces {
            let left = pipe.most - received;
            let len = left.min(pipe.arrived).min(piece.len as usize);
            for (at, byte) in pipe.bytes.drain(..len).enumerate() {
                // SAFETY: the caller vouches for the piece, and `at` is less than its length.
                unsafe { (piece.addr as *mut u8).add(at).write(byte) };
            }
            pipe.arrived -= len;
            received += len;
            if len < piece.len as usize {
                break;
            }
        }
        Ok(Some(received))
    }

    fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    fn socket(&self) -> Option<RawFd> {
        None
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn has_input(&mut self) -> io::Result<bool> {
        let pipe = self.incoming.lock().unwrap();
        Ok(pipe.arrived > 0 || pipe.receiver != Side::Good)
    }

    fn arm(&mut self, _blocked: bool) -> io::Result<bool> {
        Ok(false)
    }

    fn disarm(&mut self) {}
}
