//! The control protocol between the two processes: one JSON object per line, one reply per request.
//!
//! The client writes a [`Request`] and reads a [`Reply`]. The serving process blocks in its read
//! between requests. No timed transfer uses this connection.

use std::error::Error;
use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::net::SocketAddr;

use anyhow::bail;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Op;
use super::kernel::Theirs;
use super::layout::Layout;
use super::memory::Place;
use super::perftest::Ask;
use super::pong::Seen;

/// The longest accepted line. The longest request carries a descriptor and a list of addresses.
const MAX_LINE: u64 = 64 << 10;

/// A request to the serving process, which has at most one endpoint and one buffer to check rows
/// in.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Request {
    /// The first request. Both sides must have the same version.
    Hello { version: String },
    /// Open a new endpoint that accepts only this path, with its threads on these CPUs if they are
    /// given. The reply has its metadata.
    Open { pin: String, device: Option<String>, cpus: Option<String> },
    /// Choose the RDMA device for perftest. The reply has its name.
    Device { named: Option<String> },
    /// Start a perftest server on that device. The reply has its address.
    Perftest { ask: Ask },
    /// Stop the perftest server.
    StopPerftest,
    /// Allocate a buffer and touch its pages. `shared` selects shareable or private host memory.
    /// The reply has the descriptor. Unless `more` is set, the earlier buffers are freed.
    Memory { len: u64, shared: bool, place: Place, more: bool },
    /// Fill the buffer with the pattern of `seed`.
    Fill { len: u64, seed: u64 },
    /// Fill the buffer with blank bytes.
    Blank { len: u64 },
    /// Compute the checksum of the row's pieces.
    Checksum { layout: Layout },
    /// Return the process id and the buffer's address, for a process on the same machine.
    Place,
    /// Return the CPU seconds of the process so far.
    Cpu,
    /// Open a plain socket as the other end of a row's baseline. The reply has its address.
    Raw { op: Op, len: u64 },
    /// Start an application thread that answers each arrival with a write back.
    Pong { metadata: Vec<u8>, descriptor: Vec<u8>, size: u64, seen: Seen },
    /// Stop that thread.
    StopPong,
    /// Free the buffers and close the endpoint.
    Close,
}

/// The reply to a request.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Reply {
    Done,
    Bytes(Vec<u8>),
    /// A buffer's descriptor, and a description of its memory.
    Memory {
        descriptor: Vec<u8>,
        told: String,
    },
    Name(String),
    Sum(u64),
    Seconds(f64),
    Address(SocketAddr),
    Place {
        pid: u32,
        addr: u64,
    },
    /// The request failed, with the reason.
    Failed(String),
}

/// The connection to the other process is lost. No further row can be measured.
#[derive(Debug)]
pub(crate) struct Lost(String);

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lost the connection to the other side of the benchmark: {}", self.0)
    }
}

impl Error for Lost {}

/// The client's end of the control connection.
pub(crate) struct Control {
    reader: Box<dyn BufRead + Send>,
    writer: Box<dyn Write + Send>,
}

impl Control {
    /// Uses these two streams, and checks that the other side has the same version.
    pub(crate) fn new(
        reader: impl BufRead + Send + 'static,
        writer: impl Write + Send + 'static,
    ) -> anyhow::Result<Self> {
        let mut control = Self { reader: Box::new(reader), writer: Box::new(writer) };
        control.done(&Request::Hello { version: env!("CARGO_PKG_VERSION").to_owned() })?;
        Ok(control)
    }

    /// Sends a request whose reply has no content.
    pub(crate) fn done(&mut self, request: &Request) -> anyhow::Result<()> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a request whose reply is metadata or a descriptor.
    pub(crate) fn bytes(&mut self, request: &Request) -> anyhow::Result<Vec<u8>> {
        match self.ask(request)? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Memory`].
    pub(crate) fn memory(
        &mut self,
        place: Place,
        len: u64,
        shared: bool,
        more: bool,
    ) -> anyhow::Result<(Vec<u8>, String)> {
        match self.ask(&Request::Memory { len, shared, place, more })? {
            Reply::Memory { descriptor, told } => Ok((descriptor, told)),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Checksum`].
    pub(crate) fn checksum(&mut self, layout: Layout) -> anyhow::Result<u64> {
        match self.ask(&Request::Checksum { layout })? {
            Reply::Sum(sum) => Ok(sum),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Place`].
    pub(crate) fn place(&mut self) -> anyhow::Result<Theirs> {
        match self.ask(&Request::Place)? {
            Reply::Place { pid, addr } => Ok(Theirs { pid, addr }),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Cpu`].
    pub(crate) fn cpu_seconds(&mut self) -> anyhow::Result<f64> {
        match self.ask(&Request::Cpu)? {
            Reply::Seconds(seconds) => Ok(seconds),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Device`].
    pub(crate) fn device(&mut self, named: Option<String>) -> anyhow::Result<String> {
        match self.ask(&Request::Device { named })? {
            Reply::Name(name) => Ok(name),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Perftest`].
    pub(crate) fn perftest(&mut self, ask: Ask) -> anyhow::Result<SocketAddr> {
        match self.ask(&Request::Perftest { ask })? {
            Reply::Address(address) => Ok(address),
            other => Err(unexpected(&other)),
        }
    }

    /// See [`Request::Raw`].
    pub(crate) fn raw(&mut self, op: Op, len: u64) -> anyhow::Result<SocketAddr> {
        match self.ask(&Request::Raw { op, len })? {
            Reply::Address(address) => Ok(address),
            other => Err(unexpected(&other)),
        }
    }

    fn ask(&mut self, request: &Request) -> anyhow::Result<Reply> {
        send(&mut self.writer, request).map_err(|error| Lost(error.to_string()))?;
        match receive(&mut self.reader) {
            Ok(Some(Reply::Failed(why))) => bail!(why),
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(Lost("it closed the connection".to_owned()).into()),
            Err(error) => Err(Lost(error.to_string()).into()),
        }
    }
}

fn unexpected(reply: &Reply) -> anyhow::Error {
    Lost(format!("unexpected reply {reply:?}")).into()
}

/// Writes one line.
pub(crate) fn send(writer: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer.write_all(&line)?;
    writer.flush()
}

/// Reads one line. `None` at the end of the stream.
pub(crate) fn receive<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "a line is truncated or too long"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_way() {
        let mut wire = Vec::new();
        let layout = Layout { size: u64::MAX, iovs: 3, seed: u64::MAX - 1 };
        send(&mut wire, &Request::Checksum { layout }).unwrap();
        send(&mut wire, &Request::Raw { op: Op::Read, len: 7 }).unwrap();
        let mut reader = wire.as_slice();
        let Ok(Some(Request::Checksum { layout: back })) = receive(&mut reader) else {
            panic!("expected a checksum request");
        };
        assert_eq!(back, layout);
        assert!(matches!(receive(&mut reader), Ok(Some(Request::Raw { op: Op::Read, len: 7 }))));
        assert!(matches!(receive::<Request>(&mut reader), Ok(None)));
    }

    #[test]
    fn garbage_is_an_error() {
        for garbage in
            [&b"GET / HTTP/1.1\r\n"[..], b"\"Cpu\"", b"{\"Memory\":{\"len\":-1}}\n", b"\xFF\n"]
        {
            assert!(receive::<Request>(&mut &*garbage).is_err());
        }
        let endless = vec![b' '; 2 * MAX_LINE as usize];
        assert!(receive::<Request>(&mut endless.as_slice()).is_err());
    }

    #[test]
    fn failures_and_silence_are_told_apart() {
        let mut replies = Vec::new();
        send(&mut replies, &Reply::Done).unwrap();
        send(&mut replies, &Reply::Failed("no memory".to_owned())).unwrap();
        let mut control = Control::new(io::Cursor::new(replies), io::sink()).unwrap();
        let failed = control.done(&Request::Close).unwrap_err();
        assert!(failed.downcast_ref::<Lost>().is_none());
        assert_eq!(failed.to_string(), "no memory");
        let lost = control.done(&Request::Close).unwrap_err();
        assert!(lost.downcast_ref::<Lost>().is_some());
    }
}
