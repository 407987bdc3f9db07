//! Sessions: two endpoints share one session, whichever side opens it, over either address family.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use peerway::{AcceptError, Endpoint};
use peerway_testkit::hex;

use crate::options::Options;
use crate::world::{Verdict, World, fine_with};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    world.step("a second connect returns the same peer");
    let mut pair = world.pair()?;
    ensure!(
        pair.a.connect(&pair.b.metadata)? == pair.peer,
        "a second connect by metadata returned another peer"
    );
    ensure!(
        pair.a.connect_addr(pair.b.addr()?)? == pair.peer,
        "a connect by address returned another peer"
    );
    pair.b.accept()?;
    pair.b.ask(&format!("connect e q {}", hex::encode(&pair.a.metadata())))?;
    ensure!(pair.a.peers().len() == 1, "{} sessions between two endpoints", pair.a.peers().len());
    let nobody = pair.a.accept(std::time::Duration::from_millis(20));
    ensure!(matches!(nobody, Err(AcceptError::TimedOut)), "accepted {nobody:?}");

    world.step("an endpoint connects to itself");
    let me = pair.a.connect(&pair.a.metadata()).context("an endpoint that connects to itself")?;
    me.notify(b"me")?.join().ok()?;
    let note = pair
        .a
        .notification(std::time::Duration::from_secs(5))
        .context("no notification from this endpoint to itself")?;
    ensure!(note.message == b"me" && note.from == pair.a.incarnation(), "{note:?}");

    world.step("both sides connect at the same time");
    let rounds = (world.profile.tries / 10).max(10);
    let mut remote = world.remote(&world.options())?;
    for round in 0..rounds {
        let a = world.options().build()?;
        remote.endpoint(&world.options())?;
        remote.tell(&format!("connect e p {}", hex::encode(&a.metadata())))?;
        let peer = a.connect(&remote.metadata).with_context(|| format!("round {round}"))?;
        remote.answer().with_context(|| format!("round {round}"))?;
        ensure!(a.peers().len() == 1, "{} sessions in round {round}", a.peers().len());
        peer.notify(b"from a")?.join().ok().with_context(|| format!("round {round}"))?;
        let there = remote.ask("notify p 01")?;
        ensure!(there == "Done Held", "round {round}: {there}");
        ensure!(remote.ask("notification e 5000")? == hex::encode(b"from a"), "round {round}");
    }

    world.step("IPv6");
    let bind = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 0));
    let note = match (Options { bind, ..world.options() }).build() {
        Err(error) => format!("IPv6 is not available: {error:#}"),
        Ok(six) => {
            let metadata = six.metadata();
            let other: Endpoint = world.options().build()?;
            let peer = other.connect(&metadata).context("connecting over IPv6")?;
            ensure!(
                peer.address().is_ipv6(),
                "connected over {}, which is not IPv6",
                peer.address()
            );
            peer.notify(b"six")?.join().ok()?;
            String::new()
        }
    };
    fine_with(note)
}
