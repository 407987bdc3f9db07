//! Many peers write to one endpoint at once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::Access;
use peerway_testkit::{hex, memory};

use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// Peers in one process.
const EACH: u32 = 16;
/// More than the initiator pushes itself over CMA.
const PART: u64 = (1 << 20) + 4096;
/// The shortest detection time on RDMA transports.
const PATIENT: Duration = Duration::from_secs(5);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut options = world.calm();
    if world.transport.is_device() {
        // Threads emulate the devices of every peer. On two cores, hundreds of them can delay a
        // heartbeat beyond the usual detection time, and this scenario does not test detection.
        options.detect = options.detect.max(PATIENT);
    }
    let a = options.build()?;
    let peers = world.profile.peers;
    let whole = PART * u64::from(peers);
    let region = world.region(&a, whole)?;
    let descriptor = hex::encode(&region.advertise(Access::WRITE)?);
    let metadata = hex::encode(&a.metadata());
    let processes = peers.div_ceil(EACH);
    let mut hosts: Vec<Remote> =
        (0..processes).map(|_| Remote::bare(world.transport)).collect::<Result<_>>()?;
    world.step("connecting");
    let each = |peer: u32| (peer / EACH) as usize;
    for peer in 0..peers {
        let host = &mut hosts[each(peer)];
        host.ask(&format!("endpoint e{peer} {}", options.to_words()))?;
        host.ask(&format!("connect e{peer} p{peer} {metadata}")).context("connecting")?;
        host.ask(&format!("import p{peer} x{peer} {descriptor}"))?;
        let kind = if world.transport.writes_alone() { "alloc" } else { "vec" };
        host.ask(&format!("region e{peer} r{peer} {PART} {kind}"))?;
        host.ask(&format!("fill r{peer} {peer}"))?;
    }
    // The accepting side registers the session a moment after the opener does.
    let until = Instant::now() + world.profile.slack;
    while a.peers().len() < peers as usize {
        ensure!(Instant::now() < until, "{} peers of {peers}", a.peers().len());
        std::thread::sleep(Duration::from_millis(1));
    }
    world.step("all write at once");
    let start = Instant::now();
    let rounds = 3u64;
    for round in 0..rounds {
        region.fill(0, whole, 0)?;
        for peer in 0..peers {
            let at = PART * u64::from(peer);
            let order = format!("post t p{peer} write r{peer} 0 x{peer} {at} {PART} count=1")
                .replace("post t", &format!("post t{round}-{peer}"));
            hosts[each(peer)].tell(&order)?;
        }
        for peer in 0..peers {
            hosts[each(peer)].answer().context("posting")?;
        }
        let arrivals = u64::from(peers) * (round + 1);
        let counted = a.wait_counter(1, arrivals, world.profile.limit / 2);
        if counted != arrivals {
            let mut ends = BTreeMap::new();
            for peer in 0..peers {
                let ended = hosts[each(peer)].ask(&format!("wait t{round}-{peer} 0"));
                *ends.entry(ended.unwrap_or_else(|e| e.to_string())).or_insert(0) += 1;
            }
            let left = a.peers().len();
            bail!("{counted} of {arrivals} arrived, {left} peers are left, ends: {ends:?}");
        }
        for peer in 0..peers {
            let ended = hosts[each(peer)].ask(&format!("wait t{round}-{peer} 10000"))?;
            ensure!(ended == "Done Held", "peer {peer}: {ended}");
            memory::check(&region, u64::from(peer), 0, PART * u64::from(peer), PART)
                .with_context(|| format!("peer {peer}"))?;
        }
    }
    let took = start.elapsed();
    world.step("all peers leave");
    drop(hosts);
    let until = Instant::now() + world.profile.detect + world.profile.slack;
    // In the same process, the peers' endpoints close a moment later, with their thread.
    while !a.peers().is_empty() {
        ensure!(Instant::now() < until, "{} peers are left", a.peers().len());
        std::thread::sleep(Duration::from_millis(10));
    }
    fine_with(format!("{peers} peers, {} ms", took.as_millis()))
}
