//! A connection in the handshake, inside TLS.
//!
//! Everything that two endpoints tell each other before they are ready travels in TLS, and the keys
//! of both sides are proven before the first message. After `Ready` both sides leave TLS: the next
//! byte on the connection is the first byte of a lane. So this module reads one TLS record at a
//! time and never a byte more. If the two sides agreed to protect data, the lane is in records
//! whose secrets come from this TLS connection as well.
//!
//! Other connections of the session carry proofs instead. A proof is keying material that TLS
//! exports (RFC 8446, section 7.5) for one purpose, one side and one object. Only the two ends of
//! the TLS connection can compute it.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use peerway_core::ids::Incarnation;
use peerway_core::wire::{
    Admission as Shown, Control, FrameError, MAGIC, MAX_CONTROL, Proof, Refusal, VERSION,
};
use rustls::Connection;
use subtle::ConstantTimeEq;

use super::hello::{Assembly, HelloError, frame, is_passing, left, send_all};
use crate::identity::admission::Admission;
use crate::identity::lanes::LaneKeys;
use crate::identity::{Identity, Side, incarnation_of};
use crate::transport::tcp::LaneSecrets;

/// Bytes that an acceptor reads from an opener before it knows and admits it. A handshake with raw
/// public keys and a hello take less than 1 KiB, and 40 bytes more for each RDMA port.
const BEFORE_ADMISSION: usize = 4 << 10;
/// The same where the opener shows a chain of certificates.
const BEFORE_ADMISSION_BY_CERTIFICATE: usize = 20 << 10;
/// Bytes that either side reads from the other in the rest of the handshake: a few control
/// messages.
const AFTER_ADMISSION: usize = 128 << 10;
/// The first byte of a TLS connection: the type of a handshake record.
const TLS_HANDSHAKE: u8 = 22;
/// Type, version and length of a record.
const RECORD_HEADER: usize = 5;
/// The longest record (RFC 8446, section 5.2).
const MAX_RECORD: usize = (1 << 14) + 256;

/// The way in which a new connection begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Beginning {
    /// A session, in TLS.
    Tls,
    /// A frame: a lane, or an opener of an older version.
    Frame,
}

impl Beginning {
    /// Looks at the first byte of a connection and leaves it there.
    pub(super) fn of(stream: &TcpStream) -> Result<Self, HelloError> {
        let mut first = [0];
        match stream.peek(&mut first) {
            Ok(0) => Err(HelloError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) if first[0] == TLS_HANDSHAKE => Ok(Self::Tls),
            Ok(_) if first[0] == MAGIC.to_le_bytes()[0] => Ok(Self::Frame),
            Ok(_) => Err(HelloError::Frame(FrameError::NotPeerway)),
            Err(error) => Err(HelloError::Io(error)),
        }
    }
}

/// The purpose of a proof and the object that it is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// A lane of the session, by its number.
    Lane(u16),
    /// The local link of the session.
    Link,
    /// The running boot of a host, by its id.
    Host([u8; 16]),
    /// The right to take part. It comes before any session, whose id is then zero.
    Admission,
    /// The records of a lane of the session in the direction from the side that makes the "proof".
    /// It is a secret, and is never sent.
    Data(u16),
    /// The lanes that replace lost ones. It is a secret, and is never sent.
    Lanes,
}

/// The session id in proofs for [`Purpose::Admission`].
const NO_SESSION: [u8; 16] = [0; 16];

/// TLS of one connection, without its socket.
pub(super) struct Secure {
    tls: Connection,
    /// The record that is being received.
    record: Vec<u8>,
    /// The message that is being received.
    assembly: Assembly,
    /// Bytes that the peer may still send.
    budget: usize,
}

impl Secure {
    /// The acceptor's side of a new connection.
    pub(super) fn accept(identity: &Identity) -> Result<Self, HelloError> {
        let tls = identity.accept().map_err(HelloError::Tls)?;
        let budget = match identity.admission {
            Admission::Mtls(_) => BEFORE_ADMISSION_BY_CERTIFICATE,
            _ => BEFORE_ADMISSION,
        };
        Ok(Self::new(tls.into(), budget))
    }

    fn new(mut tls: Connection, budget: usize) -> Self {
        // Nothing is kept unsent: each message is taken out at once.
        tls.set_buffer_limit(None);
        Self { tls, record: Vec::new(), assembly: Assembly::new(MAX_CONTROL), budget }
    }

    /// Called when the acceptor admits the opener.
    pub(super) fn admit(&mut self) {
        self.budget = AFTER_ADMISSION;
    }

    /// The identity that the peer has proven. `None` before the handshake is complete.
    pub(super) fn peer(&self) -> Option<Incarnation> {
        if self.tls.is_handshaking() {
            return None;
        }
        self.tls.peer_certificates()?.first().map(|key| incarnation_of(key))
    }

    /// A proof by `side` for this session. `None` before the handshake is complete.
    pub(super) fn proof(&self, side: Side, session: &[u8; 16], purpose: Purpose) -> Option<Proof> {
        let (label, object): (&[u8], &[u8]) = match &purpose {
            Purpose::Lane(lane) => (b"EXPORTER-peerway-lane", &lane.to_le_bytes()),
            Purpose::Link => (b"EXPORTER-peerway-link", &[]),
            Purpose::Host(boot) => (b"EXPORTER-peerway-host", boot),
            Purpose::Admission => (b"EXPORTER-peerway-admission", &[]),
            Purpose::Data(lane) => (b"EXPORTER-peerway-data", &lane.to_le_bytes()),
            Purpose::Lanes => (b"EXPORTER-peerway-lanes", &[]),
        };
        let context = [&[side as u8], &session[..], object].concat();
        self.tls.export_keying_material(Proof::default(), label, Some(&context)).ok()
    }

    /// Whether `proof` is the one that `side` would make. The time does not depend on the bytes.
    pub(super) fn is_proven(
        &self,
        proof: &Proof,
        side: Side,
        session: &[u8; 16],
        purpose: Purpose,
    ) -> bool {
        let right = self.proof(side, session, purpose);
        right.is_some_and(|right| right.ct_eq(proof).into())
    }

    /// The secrets that protect a lane of the session, as `side` uses them.
    pub(super) fn secrets(&self, side: Side, session: &[u8; 16], lane: u16) -> Option<LaneSecrets> {
        let other = match side {
            Side::Opener => Side::Acceptor,
            Side::Acceptor => Side::Opener,
        };
        let secret = |from| self.proof(from, session, Purpose::Data(lane));
        Some(LaneSecrets { send: secret(side)?, receive: secret(other)? })
    }

    /// The keys of lanes that replace lost ones. They are the same on both sides.
    pub(super) fn lane_keys(&self, session: &[u8; 16]) -> Option<LaneKeys> {
        let secret = self.proof(Side::Opener, session, Purpose::Lanes)?;
        Some(LaneKeys::new(&secret))
    }

    /// What this side shows to be admitted.
    pub(super) fn show(&self, admission: &Admission, side: Side) -> Result<Shown, String> {
        let exported = self.proof(side, &NO_SESSION, Purpose::Admission);
        admission.show(side, &exported.ok_or("the TLS handshake is not complete")?)
    }

    /// Checks what the other side shows.
    pub(super) fn check(
        &self,
        admission: &Admission,
        side: Side,
        shown: &Shown,
    ) -> Result<(), String> {
        let exported = self.proof(side, &NO_SESSION, Purpose::Admission);
        admission.check(side, &exported.ok_or("the TLS handshake is not complete")?, shown)
    }

    /// Encrypts a message.
    pub(super) fn encrypt(&mut self, message: &Control) -> io::Result<Vec<u8>> {
        self.tls.writer().write_all(&frame(message))?;
        Ok(self.take_output())
    }

    /// Takes the bytes that TLS wants to send.
    pub(super) fn take_output(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.tls.wants_write() {
            // Writing to memory cannot fail.
            if self.tls.write_tls(&mut bytes).is_err() {
                break;
            }
        }
        bytes
    }

    /// Reads missing bytes of a record. Returns the next message if it is complete, and `None` if
    /// there was progress. The caller then sends [`Self::take_output`], also after an error.
    pub(super) fn read(&mut self, stream: &mut TcpStream) -> Result<Option<Control>, HelloError> {
        if let Some(message) = self.next_message()? {
            return Ok(Some(message));
        }
        if self.read_record(stream)? {
            self.tls.read_tls(&mut self.record.as_slice()).map_err(HelloError::Io)?;
            self.record.clear();
            self.tls.process_new_packets().map_err(HelloError::Tls)?;
        }
        self.next_message()
    }

    /// Reads bytes of the record. Returns whether it is complete.
    fn read_record(&mut self, stream: &mut TcpStream) -> Result<bool, HelloError> {
        let need = match self.record.first_chunk() {
            None => RECORD_HEADER,
            Some(head) => RECORD_HEADER + record_len(head)?,
        };
        let have = self.record.len();
        if need - have > self.budget {
            return Err(HelloError::TooMuch);
        }
        self.record.resize(need, 0);
        let read = stream.read(&mut self.record[have..]);
        let count = *read.as_ref().unwrap_or(&0);
        self.record.truncate(have + count);
        self.budget -= count;
        match read {
            Ok(0) => return Err(HelloError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(HelloError::Io(error)),
        }
        // Check the header at once: bytes of another protocol fail early, however few follow.
        let Some(head) = self.record.first_chunk() else { return Ok(false) };
        Ok(self.record.len() == RECORD_HEADER + record_len(head)?)
    }

    fn next_message(&mut self) -> Result<Option<Control>, HelloError> {
        loop {
            match self.assembly.read(&mut self.tls.reader()) {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The length of a record's body. A header that is none of TLS may be a frame of another version.
fn record_len(head: &[u8; RECORD_HEADER]) -> Result<usize, HelloError> {
    let [kind, major, minor, len @ ..] = *head;
    let len = usize::from(u16::from_be_bytes(len));
    if [kind, major] == MAGIC.to_le_bytes() && minor != VERSION {
        return Err(HelloError::Frame(FrameError::Version(minor)));
    }
    // Change cipher spec, alert, handshake, application data.
    if !(20..=23).contains(&kind) || major != 3 {
        return Err(HelloError::Frame(FrameError::NotPeerway));
    }
    if len > MAX_RECORD { Err(HelloError::TooMuch) } else { Ok(len) }
}

/// The opener's side: TLS over a blocking connection, under one deadline.
pub(super) struct SecureStream {
    stream: TcpStream,
    secure: Secure,
    deadline: u64,
}

impl SecureStream {
    /// Makes the TLS handshake. It fails unless the acceptor proves the incarnation that the opener
    /// `expects`.
    pub(super) fn open(
        stream: TcpStream,
        identity: &Identity,
        expects: Option<Incarnation>,
        deadline: u64,
    ) -> Result<Self, HelloError> {
        let tls = identity.open(expects).map_err(HelloError::Tls)?;
        let mut this = Self { stream, secure: Secure::new(tls.into(), AFTER_ADMISSION), deadline };
        while this.secure.peer().is_none() {
            let output = this.secure.take_output();
            this.send_bytes(&output)?;
            if this.read()?.is_some() {
                return Err(HelloError::Frame(FrameError::Control));
            }
        }
        Ok(this)
    }

    /// The identity that the acceptor has proven.
    pub(super) fn peer(&self) -> Result<Incarnation, HelloError> {
        self.secure.peer().ok_or(HelloError::Frame(FrameError::Order))
    }

    /// The opener's proof for this session.
    pub(super) fn proof(&self, session: &[u8; 16], purpose: Purpose) -> Result<Proof, HelloError> {
        let proof = self.secure.proof(Side::Opener, session, purpose);
        proof.ok_or(HelloError::Frame(FrameError::Order))
    }

    /// Whether `proof` is the acceptor's.
    pub(super) fn is_proven(&self, proof: &Proof, session: &[u8; 16], purpose: Purpose) -> bool {
        self.secure.is_proven(proof, Side::Acceptor, session, purpose)
    }

    /// The secrets that protect a lane of the session.
    pub(super) fn secrets(&self, session: &[u8; 16], lane: u16) -> Result<LaneSecrets, HelloError> {
        let secrets = self.secure.secrets(Side::Opener, session, lane);
        secrets.ok_or(HelloError::Frame(FrameError::Order))
    }

    /// The keys of lanes that replace lost ones.
    pub(super) fn lane_keys(&self, session: &[u8; 16]) -> Result<LaneKeys, HelloError> {
        self.secure.lane_keys(session).ok_or(HelloError::Frame(FrameError::Order))
    }

    /// Shows that this endpoint may take part, and checks that the acceptor may. The outer error is
    /// one of the connection, the inner one says why one side does not admit the other.
    pub(super) fn be_admitted(
        &mut self,
        admission: &Admission,
    ) -> Result<Result<(), String>, HelloError> {
        if !admission.is_required() {
            return Ok(Ok(()));
        }
        let shown = match self.secure.show(admission, Side::Opener) {
            Ok(shown) => shown,
            Err(why) => return Ok(Err(format!("this endpoint cannot show that it may: {why}"))),
        };
        self.send(&Control::Admit(shown))?;
        Ok(match self.receive()? {
            Control::Admit(shown) => {
                let checked = self.secure.check(admission, Side::Acceptor, &shown);
                checked.map_err(|why| format!("this endpoint does not admit it: {why}"))
            }
            Control::Refuse(Refusal::NotAdmitted(why)) => {
                Err(format!("it does not admit this endpoint: {why}"))
            }
            _ => return Err(HelloError::Frame(FrameError::Control)),
        })
    }

    /// Sends a message.
    pub(super) fn send(&mut self, message: &Control) -> Result<(), HelloError> {
        let bytes = self.secure.encrypt(message).map_err(HelloError::Io)?;
        self.send_bytes(&bytes)
    }

    /// Receives a message.
    pub(super) fn receive(&mut self) -> Result<Control, HelloError> {
        loop {
            if let Some(message) = self.read()? {
                return Ok(message);
            }
        }
    }

    /// Leaves TLS. The next byte in both directions belongs to the lane.
    pub(super) fn into_stream(self) -> TcpStream {
        self.stream
    }

    fn read(&mut self) -> Result<Option<Control>, HelloError> {
        let left = left(self.deadline).map_err(HelloError::Io)?;
        self.stream.set_read_timeout(Some(left)).map_err(HelloError::Io)?;
        match self.secure.read(&mut self.stream) {
            Err(HelloError::Io(error)) if is_passing(&error) => Ok(None),
            Err(error) => {
                // Tell the peer why, if TLS has a word for it. The connection ends either way.
                let alert = self.secure.take_output();
                let _ = self.send_bytes(&alert);
                Err(error)
            }
            read => read,
        }
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), HelloError> {
        send_all(&mut self.stream, bytes, self.deadline).map_err(HelloError::Io)
    }
}
