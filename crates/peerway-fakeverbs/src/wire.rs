//! Packets and their transport: each packet is one datagram on an abstract Unix socket.
//!
//! Every queue pair has a socket whose name consists of fabric, device and number. Any process that
//! knows a GID and a number can therefore send to it. The script's packet faults apply here, to
//! outgoing packets. All peers share a host, so numbers use its byte order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::device::{Device, MAX_MESSAGE};
use crate::stats::{COUNTERS, count};
use peerway_fakescript::Dice;

/// Largest payload of a packet. It is large enough that system calls do not dominate large
/// messages, and small enough that a message of a few hundred kilobytes has many packets.
pub(crate) const PAYLOAD: usize = 32 << 10;

/// How long to wait when the peer's socket queue is full. The kernel reports new room only to
/// connected senders.
pub(crate) const BLOCKED: Duration = Duration::from_micros(50);

/// Packet kinds.
pub(crate) mod kind {
    /// Part of a write or send.
    pub(crate) const DATA: u8 = 1;
    /// Requests bytes.
    pub(crate) const READ: u8 = 2;
    /// Requested bytes.
    pub(crate) const RESPONSE: u8 = 3;
    /// The responder has executed everything before `seq`.
    pub(crate) const ACK: u8 = 4;
    /// The request of `seq` failed with `status`. Everything before it was executed.
    pub(crate) const NAK: u8 = 5;
    /// No receive is posted for `seq`: retransmit after the time that `status` encodes.
    pub(crate) const RNR: u8 = 6;
    /// This queue pair does not accept packets. Real responders are silent. The notice only lets
    /// the requester tell an absent peer from a slow one.
    pub(crate) const NOTICE: u8 = 7;
    /// An unreliable datagram.
    pub(crate) const DATAGRAM: u8 = 8;
}

pub(crate) mod flag {
    pub(crate) const LAST: u8 = 1;
    pub(crate) const SOLICITED: u8 = 2;
    /// In an acknowledgement: packets after a missing one have arrived.
    pub(crate) const GAP: u8 = 4;
}

/// The header of every packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
pub(crate) struct Header {
    /// The packet's number on a connection, or the message's number without one.
    pub(crate) seq: u64,
    /// The address of the whole message in the responder's memory.
    pub(crate) address: u64,
    /// The length of the whole message.
    pub(crate) length: u64,
    /// The offset of the payload in the message.
    pub(crate) offset: u64,
    /// The life of the sending queue pair, which changes at every reset.
    pub(crate) life: u64,
    /// Without a connection: the sender has completed all messages before this one.
    pub(crate) floor: u64,
    pub(crate) source: u32,
    /// The device of the sender.
    pub(crate) device: u32,
    pub(crate) key: u32,
    pub(crate) immediate: u32,
    pub(crate) qkey: u32,
    /// How many packets of the message a read requests, starting at `offset`.
    pub(crate) packets: u32,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    /// `IBV_WR_*`.
    pub(crate) opcode: u8,
    pub(crate) status: u8,
    pub(crate) magic: u32,
}

impl Header {
    pub(crate) const SIZE: usize = size_of::<Self>();
    const MAGIC: u32 = u32::from_be_bytes(*b"pwfv");

    pub(crate) fn new(kind: u8, source: u32, device: u32, life: u64) -> Self {
        Self { kind, source, device, life, magic: Self::MAGIC, ..Self::default() }
    }

    /// Header and payload of a datagram; `None` if it is not a packet of this library.
    pub(crate) fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (header, payload) = Self::read_from_prefix(packet).ok()?;
        let ours = header.magic == Self::MAGIC && header.length <= MAX_MESSAGE;
        ours.then_some((header, payload))
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// The number of packets of a message of `length` bytes.
pub(crate) fn packets(length: u64) -> u64 {
    length.div_ceil(PAYLOAD as u64).max(1)
}

/// The socket address of a queue pair.
pub(crate) fn address(fabric: &str, device: u32, number: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("peerway-fakeverbs/{fabric}/{device}/{number:06x}"))
}

/// Connects a socket to its peer. By default the kernel queues ten packets on a datagram socket. If
/// the socket is connected to the sender, it queues as many as the sender's buffer holds. A failure
/// is harmless: the peer does not exist, or the transfer is slower.
pub(crate) fn connect(socket: &UnixDatagram, peer: &SocketAddr) {
    let _ = socket.connect_addr(peer);
}

/// Undoes [`connect`].
pub(crate) fn disconnect(socket: &UnixDatagram) {
    let none = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: the socket is open, and the address has the given size.
    unsafe {
        libc::connect(socket.as_raw_fd(), &none, size_of::<libc::sockaddr>() as libc::socklen_t);
    }
}

/// The result of sending a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sent {
    /// The packet is on its way.
    Away,
    /// The peer's queue is full: try again later.
    Blocked,
    /// The packet is lost: by the script, by the link, or because there is no receiver.
    Lost,
}

/// The outgoing side of a context.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) device: &'static Device,
    pub(crate) dice: Dice,
    held: BinaryHeap<Reverse<Held>>,
    order: u64,
    /// The packet that is being built.
    pub(crate) scratch: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(device: &'static Device, seed: u64) -> Self {
        let scratch = Vec::with_capacity(Header::SIZE + PAYLOAD);
        Self { device, dice: Dice::new(seed), held: BinaryHeap::new(), order: 0, scratch }
    }

    /// Sends a packet without payload.
    pub(crate) fn send_header(
        &mut self,
        from: &Arc<UnixDatagram>,
        to: &SocketAddr,
        header: &Header,
        now: Instant,
    ) -> Sent {
        self.scratch.clear();
        self.scratch.extend_from_slice(header.as_bytes());
        self.send_scratch(from, to, now)
    }

    /// Sends the packet in `scratch`.
    pub(crate) fn send_scratch(
        &mut self,
        from: &Arc<UnixDatagram>,
        to: &SocketAddr,
        now: Instant,
    ) -> Sent {
        let script = &self.device.fabric.script;
        count(&COUNTERS.packets, 1);
        if self.device.link_down(now) || self.dice.hit(script.drop) {
            return Sent::Lost;
        }
        let mut wait = script.latency;
        if self.dice.hit(script.reorder) {
            wait += script.delay;
        }
        if !wait.is_zero() {
            self.hold(from, to, self.scratch.clone(), now + wait);
            return Sent::Away;
        }
        put(from, to, &self.scratch)
    }

    /// Tells a requester that its packets are not accepted. The script's faults do not apply,
    /// because no real device sends this.
    pub(crate) fn notice(&mut self, from: &UnixDatagram, to: &SocketAddr, header: &Header) {
        // If the notice is lost, the requester waits a little longer.
        let _ = put(from, to, header.as_bytes());
    }

    /// Drops the delayed packets of a socket.
    pub(crate) fn forget(&mut self, from: &Arc<UnixDatagram>) {
        self.held.retain(|Reverse(held)| !Arc::ptr_eq(&held.from, from));
    }

    fn hold(&mut self, from: &Arc<UnixDatagram>, to: &SocketAddr, bytes: Vec<u8>, at: Instant) {
        self.order += 1;
        let order = self.order;
        self.held.push(Reverse(Held { at, order, from: Arc::clone(from), to: to.clone(), bytes }));
    }

    /// Sends the delayed packets that are due, and returns when the next one is due.
    pub(crate) fn release(&mut self, now: Instant) -> Option<Instant> {
        while let Some(Reverse(first)) = self.held.peek() {
            if first.at > now {
                return Some(first.at);
            }
            let Some(Reverse(mut held)) = self.held.pop() else { break };
            if put(&held.from, &held.to, &held.bytes) == Sent::Blocked {
                held.at = now + BLOCKED;
                self.held.push(Reverse(held));
            }
        }
        None
    }
}

fn put(from: &UnixDatagram, to: &SocketAddr, bytes: &[u8]) -> Sent {
    loop {
        match from.send_to_addr(bytes, to) {
            Ok(_) => return Sent::Away,
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => return Sent::Blocked,
                _ => return Sent::Lost,
            },
        }
    }
}

/// A delayed packet.
#[derive(Debug)]
struct Held {
    at: Instant,
    order: u64,
    from: Arc<UnixDatagram>,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
