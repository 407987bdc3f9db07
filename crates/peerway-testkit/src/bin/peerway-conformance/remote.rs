//! A peer that obeys orders. It runs in another process, or in a thread for the same-process path.
//! Both forms understand the same lines; see `servant`.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use peerway::Access;
use peerway_core::metadata::Metadata;
use peerway_testkit::child::Child;
use peerway_testkit::hex;

use crate::options::Options;
use crate::servant::Servant;
use crate::world::Transport;

/// Longest wait for an answer. No order of a scenario takes this long.
const PATIENCE: Duration = Duration::from_secs(40);

/// The source of a region's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Memory {
    /// The endpoint allocates it, so local peers can map it.
    Shareable,
    /// The heap.
    Private,
}

pub(crate) struct Remote {
    seat: Seat,
    /// The metadata of the peer's endpoint.
    pub(crate) metadata: Vec<u8>,
}

enum Seat {
    Process(Child),
    Thread { lines: Sender<String>, answers: Receiver<String> },
}

impl Remote {
    /// Starts a peer with an endpoint named `e`.
    pub(crate) fn start(transport: Transport, options: &Options) -> Result<Self> {
        let mut remote = Self::bare(transport)?;
        remote.endpoint(options)?;
        Ok(remote)
    }

    /// Starts a peer without an endpoint.
    pub(crate) fn bare(transport: Transport) -> Result<Self> {
        let seat = if transport == Transport::SameProcess {
            let (lines, inbox) = channel::<String>();
            let (outbox, answers) = channel();
            std::thread::spawn(move || {
                let mut servant = Servant::default();
                for line in inbox {
                    if outbox.send(servant.answer(&line)).is_err() {
                        return;
                    }
                }
            });
            Seat::Thread { lines, answers }
        } else {
            Seat::Process(Child::spawn(&["--serve"])?)
        };
        Ok(Self { seat, metadata: Vec::new() })
    }

    /// Starts a peer in new namespaces (`pid,mount`), without an endpoint. Fails where the kernel
    /// does not permit that.
    pub(crate) fn apart(kinds: &str) -> Result<Self> {
        let mut remote = Self {
            seat: Seat::Process(Child::spawn(&["--serve-apart", kinds])?),
            metadata: Vec::new(),
        };
        remote.answer()?;
        Ok(remote)
    }

    /// Creates the peer's endpoint `e` and replaces the previous one.
    pub(crate) fn endpoint(&mut self, options: &Options) -> Result<()> {
        self.metadata = hex::decode(&self.ask(&format!("endpoint e {}", options.to_words()))?)?;
        Ok(())
    }

    /// The address that the peer's endpoint listens on.
    pub(crate) fn addr(&self) -> Result<SocketAddr> {
        Ok(*Metadata::from_bytes(&self.metadata)?.addresses.first().context("no address")?)
    }

    /// The peer's process.
    pub(crate) fn child(&mut self) -> Result<&mut Child> {
        match &mut self.seat {
            Seat::Process(child) => Ok(child),
            Seat::Thread { .. } => bail!("the peer runs as a thread and has no process"),
        }
    }

    /// The process that the peer runs in.
    pub(crate) fn pid(&self) -> u32 {
        match &self.seat {
            Seat::Process(child) => child.pid(),
            Seat::Thread { .. } => std::process::id(),
        }
    }

    /// Sends a line without waiting for its answer.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        match &mut self.seat {
            Seat::Process(child) => child.tell(line),
            Seat::Thread { lines, .. } => {
                lines.send(line.to_owned()).context("the peer's thread is gone")
            }
        }
    }

    /// Waits for the next answer.
    pub(crate) fn answer(&mut self) -> Result<String> {
        let answer = match &mut self.seat {
            Seat::Process(child) => child.answer(PATIENCE)?,
            Seat::Thread { answers, .. } => {
                answers.recv_timeout(PATIENCE).context("the peer's thread does not answer")?
            }
        };
        match answer.split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            _ => bail!("peer: {answer}"),
        }
    }

    /// Sends a line and waits for its answer.
    pub(crate) fn ask(&mut self, line: &str) -> Result<String> {
        self.tell(line)?;
        self.answer().with_context(|| line.chars().take(60).collect::<String>())
    }

    /// Sends a line that the peer must refuse, and returns the refusal.
    pub(crate) fn refused(&mut self, line: &str) -> Result<String> {
        match self.ask(line) {
            Ok(answer) => bail!("'{line}' was not refused: {answer}"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    /// Sends a line and parses its answer as a number.
    pub(crate) fn number(&mut self, line: &str) -> Result<u64> {
        Ok(self.ask(line)?.parse()?)
    }

    /// Creates a region and returns its address.
    pub(crate) fn region(&mut self, name: &str, len: u64, memory: Memory) -> Result<u64> {
        let kind = if memory == Memory::Shareable { "alloc" } else { "vec" };
        self.number(&format!("region e {name} {len} {kind}"))
    }

    pub(crate) fn advertise(&mut self, name: &str, access: Access) -> Result<Vec<u8>> {
        let bytes = hex::decode(&self.ask(&format!("advertise {name} {}", access.bits()))?)?;
        ensure!(bytes.len() == peerway::DESCRIPTOR_LEN, "a descriptor of {} bytes", bytes.len());
        Ok(bytes)
    }

    /// Makes the peer import our descriptor as `name`, through its peer `p`.
    pub(crate) fn import(&mut self, name: &str, descriptor: &[u8]) -> Result<()> {
        self.ask(&format!("import p {name} {}", hex::encode(descriptor))).map(drop)
    }

    /// Makes the peer accept the session that we opened, as its peer `p`.
    pub(crate) fn accept(&mut self) -> Result<()> {
        self.ask("accept e p 10000").map(drop)
    }
}
