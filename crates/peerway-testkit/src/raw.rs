//! A hand-made peer: it sends frames that are built outside the engine, valid or not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hmac::{Hmac, KeyInit, Mac};
use peerway_core::config::DataProtection;
use peerway_core::ids::Incarnation;
use peerway_core::wire::{Control, HEADER_LEN, Header, Hello, Kind, Proof, Ready, Welcome};
use sha2::Sha256;
use zerocopy::{FromBytes, IntoBytes};

use crate::procfs;
use crate::random::Random;
use crate::tls::{Key, Side, Tls};

/// Longest wait for an answer from an endpoint that may not answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection to an endpoint's listener.
pub struct Raw {
    /// The TCP stream.
    pub stream: TcpStream,
    /// The session identifier of the hello.
    pub session: [u8; 16],
    /// The identity that the hello claims. It is that of `key` unless a test changes it.
    pub incarnation: Incarnation,
    /// The number of the last sequenced frame that was sent. The test that sends frames sets it.
    pub sequence: u64,
    /// The key that TLS proves.
    pub key: Key,
    /// Set after the TLS handshake.
    pub tls: Option<Tls>,
    /// Whether messages travel inside TLS: from the TLS handshake until both sides are ready.
    pub is_secure: bool,
}

impl Raw {
    /// Connects and sends nothing.
    pub fn connect(addr: SocketAddr, random: &mut Random) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE).context("connecting raw")?;
        Self::over(stream, random)
    }

    /// Uses an existing connection.
    pub fn over(stream: TcpStream, random: &mut Random) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut session = [0; 16];
        session.copy_from_slice(&random.bytes(16));
        let key = Key::new(random)?;
        Ok(Self {
            stream,
            session,
            incarnation: key.incarnation,
            key,
            tls: None,
            is_secure: false,
            sequence: 0,
        })
    }

    /// The first bytes of the opener's TLS.
    pub fn client_hello(&self) -> Result<Vec<u8>> {
        Tls::opener(&self.key)?.output()
    }

    /// Makes the TLS handshake as the opener. Returns the identity of the endpoint.
    pub fn secure(&mut self) -> Result<Incarnation> {
        self.shake_hands(Tls::opener(&self.key)?)
    }

    /// Makes the TLS handshake as the acceptor. Returns the identity of the opener.
    pub fn secure_as_acceptor(&mut self) -> Result<Incarnation> {
        self.shake_hands(Tls::acceptor(&self.key)?)
    }

    fn shake_hands(&mut self, mut tls: Tls) -> Result<Incarnation> {
        let who = tls.shake_hands(&mut self.stream)?;
        (self.tls, self.is_secure) = (Some(tls), true);
        Ok(who)
    }

    /// Leaves TLS, as both sides do after `Ready`.
    pub fn leave_tls(&mut self) {
        self.is_secure = false;
    }

    /// A proof of this connection's session. Zeros before the TLS handshake.
    pub fn proof(&self, side: Side, purpose: &str, object: &[u8]) -> Result<Proof> {
        self.tls.as_ref().map_or(Ok([0; 32]), |tls| tls.proof(side, &self.session, purpose, object))
    }

    /// The proof that a connection replaces a lane of this session: HKDF-Expand (RFC 5869) of one
    /// block, from a secret that TLS exports.
    pub fn replacement_proof(&self, side: Side, lane: u16, generation: u32) -> Result<Proof> {
        let secret = self.proof(Side::Opener, "lanes", &[])?;
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret)?;
        mac.update(b"peerway lane proof");
        mac.update(&[side as u8]);
        mac.update(&lane.to_le_bytes());
        mac.update(&generation.to_le_bytes());
        mac.update(&[1]);
        Ok(mac.finalize().into_bytes().into())
    }

    /// A valid hello, which every endpoint should answer.
    pub fn hello(&self) -> Control {
        Control::Hello(Hello {
            incarnation: self.incarnation,
            replaces: None,
            sub_session: None,
            session: self.session,
            lanes: 1,
            detect_ms: 1000,
            host: self.proof(Side::Opener, "host", &procfs::boot_id()).unwrap_or_default(),
            local: true,
            data: DataProtection::Off,
            rdma: Vec::new(),
        })
    }

    /// Makes TLS, if it is not made yet, and sends a hello. Returns the answer.
    pub fn ask(&mut self, change: impl FnOnce(&mut Hello)) -> Result<Control> {
        if self.tls.is_none() {
            self.secure()?;
        }
        let mut message = self.hello();
        if let Control::Hello(hello) = &mut message {
            change(hello);
        }
        self.send(&control(&message))?;
        self.control()
    }

    /// Sends a valid hello, which the endpoint must welcome.
    pub fn greet(&mut self) -> Result<Welcome> {
        match self.ask(|_| ())? {
            Control::Welcome(welcome) => Ok(welcome),
            other => bail!("the endpoint answered a valid hello with {other:?}"),
        }
    }

    /// Asks for a lane of this session on another connection. Returns the answer.
    pub fn ask_for_lane(&self, on: &mut Self, lane: u16) -> Result<Control> {
        let proof = self.proof(Side::Opener, "lane", &lane.to_le_bytes())?;
        on.send(&control(&Control::OpenLane { session: self.session, lane, proof }))?;
        on.control()
    }

    /// Says that this side is ready. The session is open then.
    pub fn finish(&mut self) -> Result<()> {
        self.send(&control(&Control::Ready(ready())))?;
        match self.control()? {
            Control::Ready(_) => {
                self.leave_tls();
                Ok(())
            }
            other => bail!("the endpoint answered a valid ready with {other:?}"),
        }
    }

    /// Opens a session.
    pub fn open(&mut self) -> Result<Welcome> {
        let welcome = self.greet()?;
        self.finish()?;
        Ok(welcome)
    }

    /// Sends bytes, inside TLS if the connection is secure. A connection that the endpoint has
    /// closed is not an error.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.tls {
            Some(tls) if self.is_secure => {
                let bytes = tls.encrypt(bytes)?;
                self.send_plain(&bytes)
            }
            _ => self.send_plain(bytes),
        }
    }

    /// Sends bytes as they are.
    pub fn send_plain(&mut self, bytes: &[u8]) -> Result<()> {
        match self.stream.write_all(bytes) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                bail!("the endpoint neither reads nor closes the connection")
            }
            Err(_) => Ok(()),
        }
    }

    /// Reads the next control message.
    pub fn control(&mut self) -> Result<Control> {
        let mut head = [0; HEADER_LEN];
        self.read_exact(&mut head).context("no answer")?;
        let head = Header::read_from_bytes(&head).ok().context("a header")?;
        let checked = head.check()?;
        let mut body = vec![0; checked.table + checked.payload];
        self.read_exact(&mut body)?;
        Ok(Control::from_bytes(&body)?)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<()> {
        match &mut self.tls {
            Some(tls) if self.is_secure => tls.read_exact(&mut self.stream, buffer),
            _ => Ok(self.stream.read_exact(buffer)?),
        }
    }

    /// Reads the next control message on a lane and skips other frames.
    pub fn next_control(&mut self) -> Result<Control> {
        loop {
            let mut head = [0; HEADER_LEN];
            self.read_exact(&mut head).context("no control message")?;
            let head = Header::read_from_bytes(&head).ok().context("a header")?;
            let checked = head.check()?;
            let mut body = vec![0; checked.table + checked.payload];
            self.read_exact(&mut body)?;
            if checked.kind == Kind::Control {
                return Ok(Control::from_bytes(&body)?);
            }
        }
    }

    /// Reads the status of the next refusal and skips other frames.
    pub fn nack(&mut self) -> Result<u16> {
        loop {
            let mut head = [0; HEADER_LEN];
            self.stream.read_exact(&mut head).context("no refusal")?;
            let head = Header::read_from_bytes(&head).ok().context("a header")?;
            let checked = head.check()?;
            if checked.kind == Kind::Nack {
                return Ok(head.status.get());
            }
            let mut body = vec![0; checked.table + checked.payload];
            self.stream.read_exact(&mut body)?;
        }
    }

    /// Whether the endpoint closes the connection within `time`, whatever it sends before.
    pub fn is_hung_up(&mut self, time: Duration) -> bool {
        let until = std::time::Instant::now() + time;
        let mut buffer = [0; 4096];
        while std::time::Instant::now() < until {
            let left = until.saturating_duration_since(std::time::Instant::now());
            let _ = self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))));
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// A `Ready` for a session over TCP.
pub fn ready() -> Ready {
    let why = String::from("made by hand");
    let host = Vec::new();
    Ready { same_process: false, linked: false, opener_pulls: false, queues: false, host, why }
}

/// A control message as a frame.
pub fn control(message: &Control) -> Vec<u8> {
    frame(Kind::Control, |_| {}, &[], &message.to_bytes())
}

/// A frame of `kind` with a table of `(offset, len)` segments, 12 bytes each, and a payload.
pub fn frame(
    kind: Kind,
    set: impl FnOnce(&mut Header),
    table: &[(u64, u32)],
    payload: &[u8],
) -> Vec<u8> {
    let mut head = Header::new(kind);
    let mut entries = Vec::new();
    for (offset, len) in table {
        entries.extend_from_slice(&offset.to_le_bytes());
        entries.extend_from_slice(&len.to_le_bytes());
    }
    head.set_body(table.len(), entries.len(), payload.len());
    set(&mut head);
    [head.as_bytes(), &entries, payload].concat()
}
