//! Peers in their own namespaces: the engine takes another path to them, or says why it cannot.

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, ConnectError, Pin};
use peerway_testkit::memory;

use crate::options::Options;
use crate::remote::{Memory, Remote};
use crate::world::{Transport, Verdict, World, fine_with};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut notes = Vec::new();
    for kinds in ["mount", "ipc", "pid", "pid,mount,ipc", "net"] {
        world.step(kinds);
        let mut b = match Remote::apart(kinds) {
            Ok(b) => b,
            Err(error) => return Ok(Verdict::Skip(format!("{error:#}"))),
        };
        for pin in [world.transport.pin(), Pin::Auto] {
            let options = Options { pin, ..world.options() };
            b.endpoint(&options)?;
            let note =
                one(world, &options, &mut b, kinds).with_context(|| format!("{kinds}, {pin}"))?;
            notes.push(format!("{kinds}/{pin}: {note}"));
        }
    }
    fine_with(notes.join("; "))
}

fn one(world: &World, options: &Options, b: &mut Remote, kinds: &str) -> Result<String> {
    let a = options.build()?;
    let peer = match a.connect(&b.metadata) {
        Ok(peer) => peer,
        // Each network namespace has its own loopback, so the peer is unreachable.
        Err(ConnectError::Unreachable { .. } | ConnectError::TimedOut { .. }) if kinds == "net" => {
            return Ok("unreachable".into());
        }
        Err(ConnectError::PathUnavailable { why, .. }) if options.pin != Pin::Auto => {
            // Only CMA needs the process number of the peer, and another PID namespace hides it.
            ensure!(world.transport == Transport::LocalCma && kinds.contains("pid"), "{why}");
            ensure!(!why.is_empty(), "the error gives no reason");
            return Ok("refused with a reason".into());
        }
        Err(other) => bail!("{other:?}"),
    };
    ensure!(kinds != "net", "connected to the loopback of another network namespace");
    ensure!(!peer.path().why.is_empty(), "the path {} gives no reason", peer.path());
    let kinds_of_memory: &[Memory] = match options.pin {
        Pin::LocalMap => &[Memory::Shareable],
        _ => &[Memory::Shareable, Memory::Private],
    };
    for &kind in kinds_of_memory {
        let len = 3 << 20;
        b.region("r", len, kind)?;
        let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
        let ours = match kind {
            Memory::Shareable => a.allocate(len as usize)?,
            Memory::Private => a.register(vec![0u8; len as usize])?,
        };
        memory::fill_all(&ours, 8)?;
        peer.write(&ours.all(), &remote.all()).context("write")?;
        b.ask(&format!("check r 8 0 0 {len}"))?;
        ours.fill(0, len, 0)?;
        peer.read(&ours.all(), &remote.all()).context("read")?;
        memory::check(&ours, 8, 0, 0, len)?;
    }
    peer.notify(b"hello")?.join().ok()?;
    Ok(peer.path().kind.to_string())
}
