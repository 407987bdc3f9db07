//! A hand-made peer: it sends frames that are built outside the engine, valid or not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use peerway_core::ids::Incarnation;
use peerway_core::metadata::Metadata;
use peerway_core::wire::{Control, HEADER_LEN, Header, Hello, Kind, Ready, Welcome};
use zerocopy::{FromBytes, IntoBytes};

use crate::random::Random;

/// Longest wait for an answer from an endpoint that may not answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection to an endpoint's listener.
pub struct Raw {
    /// The TCP stream.
    pub stream: TcpStream,
    /// The session identifier of the hello.
    pub session: [u8; 16],
    /// The identity that the hello claims.
    pub incarnation: Incarnation,
    /// The number of the last sequenced frame that was sent. The test that sends frames sets it.
    pub sequence: u64,
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
        let mut session = [0; 16];
        session.copy_from_slice(&random.bytes(16));
        let mut incarnation = [0; 16];
        incarnation.copy_from_slice(&random.bytes(16));
        Ok(Self { stream, session, incarnation: Incarnation(incarnation), sequence: 0 })
    }

    /// A valid hello, which every endpoint should answer.
    pub fn hello(&self) -> Control {
        let addresses = vec![SocketAddr::from(([127, 0, 0, 1], 9))];
        let metadata = Metadata { incarnation: self.incarnation, addresses }.to_bytes();
        Control::Hello(Hello {
            incarnation: self.incarnation,
            expects: None,
            replaces: None,
            sub_session: None,
            session: self.session,
            lanes: 1,
            detect_ms: 1000,
            metadata,
            host: vec![0; 80],
            local: String::from("peerway-nobody"),
            rdma: Vec::new(),
        })
    }

    /// Sends a hello and returns the welcome.
    pub fn greet(&mut self) -> Result<Welcome> {
        let hello = self.hello();
        self.send(&control(&hello))?;
        match self.control()? {
            Control::Welcome(welcome) => Ok(welcome),
            other => bail!("the endpoint answered a valid hello with {other:?}"),
        }
    }

    /// Opens a complete session over TCP.
    pub fn open(&mut self) -> Result<Welcome> {
        let welcome = self.greet()?;
        let why = String::from("made by hand");
        let ready =
            Ready { same_process: false, linked: false, opener_pulls: false, queues: false, why };
        self.send(&control(&Control::Ready(ready)))?;
        match self.control()? {
            Control::Ready(_) => Ok(welcome),
            other => bail!("the endpoint answered a valid ready with {other:?}"),
        }
    }

    /// Sends bytes. A connection that the endpoint has closed is not an error.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
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
        self.stream.read_exact(&mut head).context("no answer")?;
        let head = Header::read_from_bytes(&head).ok().context("a header")?;
        let checked = head.check()?;
        let mut body = vec![0; checked.table + checked.payload];
        self.stream.read_exact(&mut body)?;
        Ok(Control::from_bytes(&body)?)
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
