//! Parts that both sides of the handshake share: frames on a connection that is not a lane yet, and
//! the packets that attach a local link.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use peerway_core::wire::{Control, FrameError, HEADER_LEN, Header, Kind, MAX_CONTROL, Proof};
use zerocopy::{FromBytes, IntoBytes};

use crate::clock;
use crate::os::cma;

/// Encodes a control message as a frame.
pub(crate) fn frame(message: &Control) -> Vec<u8> {
    let body = message.to_bytes();
    let mut head = Header::new(Kind::Control);
    head.set_body(0, 0, body.len());
    let mut bytes = head.as_bytes().to_vec();
    bytes.extend_from_slice(&body);
    bytes
}

/// Sends a control message on a fresh, blocking connection, before `deadline`.
pub(crate) fn send(stream: &mut TcpStream, message: &Control, deadline: u64) -> io::Result<()> {
    send_all(stream, &frame(message), deadline)
}

/// Sends bytes on a blocking connection, before `deadline`.
pub(super) fn send_all(stream: &mut TcpStream, mut rest: &[u8], deadline: u64) -> io::Result<()> {
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => rest = &rest[n..],
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time until `deadline`. The socket's own time-out starts again with every call, so each call
/// gets only the time that is left. A peer that sends single bytes cannot prolong the handshake.
pub(super) fn left(deadline: u64) -> io::Result<Duration> {
    match clock::until(deadline, clock::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

/// Whether to repeat a call. The kernel counts time-outs in its own ticks and may return a little
/// early, so the clock decides when the time is over.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// The reason why no control message arrived.
#[derive(Debug)]
pub(crate) enum HelloError {
    /// The connection failed or timed out.
    Io(io::Error),
    /// The bytes are not a frame of this protocol.
    Frame(FrameError),
    /// The peer refuses because of a limit. The text says which.
    Limited(String),
    /// TLS failed: the peer did not prove its identity, or the bytes are not what it sent.
    Tls(rustls::Error),
    /// The peer sent more bytes than a handshake has.
    TooMuch,
}

/// Receives exactly one control message from a blocking connection before `deadline`. It reads no
/// byte more, because the following bytes belong to the lane.
pub(crate) fn receive(stream: &mut TcpStream, deadline: u64) -> Result<Control, HelloError> {
    let mut assembly = Assembly::new(MAX_CONTROL);
    loop {
        let left = left(deadline).map_err(HelloError::Io)?;
        stream.set_read_timeout(Some(left)).map_err(HelloError::Io)?;
        match assembly.read(stream) {
            Ok(Some(message)) => return Ok(message),
            Ok(None) => {}
            Err(HelloError::Io(error)) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Assembles a control message from a connection, blocking or not.
pub(crate) struct Assembly {
    bytes: Vec<u8>,
    /// The longest body.
    max: usize,
}

impl Assembly {
    pub(crate) fn new(max: usize) -> Self {
        Self { bytes: Vec::new(), max }
    }

    /// Reads missing bytes. `None` means that the message is not complete yet.
    pub(crate) fn read(&mut self, stream: &mut impl Read) -> Result<Option<Control>, HelloError> {
        let body = match self.bytes.first_chunk::<HEADER_LEN>() {
            None => None,
            Some(head) => Some(self.body_len(head)?),
        };
        let need = HEADER_LEN + body.unwrap_or(0);
        if let (Some(_), true) = (body, self.bytes.len() == need) {
            let message = Control::from_bytes(&self.bytes[HEADER_LEN..]);
            self.bytes.clear();
            return message.map(Some).map_err(HelloError::Frame);
        }
        let have = self.bytes.len();
        self.bytes.resize(need, 0);
        let read = stream.read(&mut self.bytes[have..]);
        self.bytes.truncate(have + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(HelloError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {
                // Check the header at once: bytes of another protocol fail early, however few
                // follow.
                if let Some(head) = self.bytes.first_chunk::<HEADER_LEN>() {
                    let body = self.body_len(head)?;
                    if self.bytes.len() == HEADER_LEN + body {
                        return self.read(stream);
                    }
                }
                Ok(None)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(HelloError::Io(error)),
        }
    }

    fn body_len(&self, head: &[u8; HEADER_LEN]) -> Result<usize, HelloError> {
        let header = Header::read_from_bytes(head).map_err(|_| FrameError::Control);
        let checked = header.and_then(|header| header.check()).map_err(HelloError::Frame)?;
        if checked.kind != Kind::Control {
            return Err(HelloError::Frame(FrameError::Control));
        }
        if checked.payload > self.max { Err(HelloError::TooMuch) } else { Ok(checked.payload) }
    }
}

/// The first packet on the local socket: the session, the opener's proof that it belongs to it, and
/// the opener's probe.
pub(crate) struct Attach {
    pub(crate) session: [u8; 16],
    pub(crate) proof: Proof,
    pub(crate) probe: Probe,
}

/// Sixteen random bytes at an address. A process that can read them can read this process's memory.
#[derive(Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) addr: u64,
    pub(crate) secret: [u8; 16],
}

impl Probe {
    /// A probe of the bytes at `secret`. They must not move until the probe is used.
    pub(crate) fn of(secret: &[u8; 16]) -> Self {
        Self { addr: secret.as_ptr() as u64, secret: *secret }
    }

    fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..].copy_from_slice(&self.secret);
        bytes
    }

    fn from_bytes(bytes: &[u8; 24]) -> Option<Self> {
        let addr = u64::from_le_bytes(*bytes.first_chunk()?);
        Some(Self { addr, secret: *bytes.last_chunk()? })
    }

    /// Opens the memory of process `pid` if it has the secret at that address. Then CMA works, and
    /// that process is the peer.
    pub(crate) fn open(&self, pid: u32) -> Option<cma::ProcessMemory> {
        if pid == 0 {
            return None;
        }
        cma::ProcessMemory::open(pid, self.addr, &self.secret)
            .inspect_err(|error| tracing::debug!(pid, %error, "cannot use CMA with this peer"))
            .ok()
    }
}

impl Attach {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        [&self.session[..], &self.proof, &self.probe.to_bytes()].concat()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 72] = bytes.try_into().ok()?;
        Some(Self {
            session: *bytes.first_chunk()?,
            proof: *bytes[16..].first_chunk()?,
            probe: Probe::from_bytes(bytes.last_chunk()?)?,
        })
    }
}

/// The acceptor's answer: whether it can pull, its own proof, and its own probe.
pub(crate) struct Attached {
    pub(crate) pulls: bool,
    pub(crate) proof: Proof,
    pub(crate) probe: Probe,
}

impl Attached {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.pulls)][..], &self.proof, &self.probe.to_bytes()].concat()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 57] = bytes.try_into().ok()?;
        Some(Self {
            pulls: bytes[0] == 1,
            proof: *bytes[1..].first_chunk()?,
            probe: Probe::from_bytes(bytes.last_chunk()?)?,
        })
    }
}
