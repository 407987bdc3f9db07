//! `bench gpu-local`: one GPU and its proxy. Measures the cost of a push, the round trip of a
//! command, and the commands per second that the proxy drains and posts.

use std::time::{Duration, Instant};

use anyhow::ensure;
use peerway::Endpoint;
use peerway::driven::Proxy;

use super::producer::{self, Puts};
use super::report::{Report, Row};
use super::{LocalArgs, TIMEOUT};
use crate::bench::outputs::Outputs;
use crate::output;

/// Bytes of a put to the second endpoint of this process.
const SMALL: u64 = 64;
/// Places in the buffers that the puts use in rotation.
const PLACES: u64 = 1024;

const NOTES: &str = "\
push: a command without effect, by one thread and by all 32 lanes of a warp (time per command)
round trip: until the kernel sees the answer to its command
drained: commands without effect, from the launch until the proxy has taken the last one
posted: puts of 64 bytes to another endpoint of this process, until the last one completes; the \
proxy's threads check, group and copy them in host memory";

/// Runs the benchmark.
pub(crate) fn run(args: &LocalArgs) -> anyhow::Result<()> {
    super::have_queues();
    let outputs = Outputs::open(args.json.as_deref(), None)?;
    let mut rows = Vec::new();
    for slots in &args.slots {
        for (at, threads) in args.threads.iter().enumerate() {
            measure(args, *threads, *slots, at == 0, &mut rows)?;
        }
    }
    let who = args.who.gpu().map_or_else(
        || "CPU threads (simulated kernels)".to_owned(),
        |gpu| format!("kernels of GPU {gpu}"),
    );
    let title = format!("commands pushed by {who}, rings of {:?} slots", args.slots);
    let report = Report { title, rows, notes: NOTES };
    outputs.rows(&report.to_string(), &report.rows)
}

fn measure(
    args: &LocalArgs,
    threads: usize,
    slots: u32,
    latency: bool,
    rows: &mut Vec<Row>,
) -> anyhow::Result<()> {
    let rings = threads * args.rings;
    let (here, there) = (Endpoint::new()?, Endpoint::new()?);
    let peer = here.connect(&there.metadata())?;
    let mut builder = Proxy::builder(&here).threads(threads).rings(rings).slots(slots);
    if let Some(gpu) = args.who.gpu() {
        builder = builder.gpu(gpu);
    }
    let proxy = builder.timeout(TIMEOUT).build()?;
    let far = Proxy::builder(&there).threads(1).rings(1).build()?;
    let (ours, theirs) =
        (here.allocate((SMALL * PLACES) as usize)?, there.allocate((SMALL * PLACES) as usize)?);
    let from = proxy.window(&ours)?;
    far.window(&theirs)?;
    let to = proxy.add_peer(0, &peer, &far.peer_info()?)?[0];
    let producer = producer::of(&proxy)?;
    let row = |what, warps| Row { what, threads, rings, slots, warps, ..Row::default() };
    if latency {
        let rounds = args.rounds;
        output::report_line(format_args!("push and round trip, {rounds} times each"));
        rows.push(row("push, one thread", 1).times(&producer.push_one(rounds)?, 1.0));
        rows.push(row("push, 32 at once", 1).times(&producer.push_many(rounds)?, 32.0));
        rows.push(row("round trip", 1).times(&producer.round_trip(0, rounds)?, 1.0));
    }
    for &warps in &args.warps {
        output::report_line(format_args!("{threads} threads, {warps} warps"));
        let before = proxy.stats().commands;
        let start = Instant::now();
        let pushed = producer.flood(warps, args.commands)?;
        while proxy.stats().commands - before < pushed {
            ensure!(
                start.elapsed() < Duration::from_secs(60),
                "the proxy did not drain {pushed} commands within 60 s"
            );
            std::hint::spin_loop();
        }
        rows.push(row("drained", warps).rate(pushed, start.elapsed().as_secs_f64()));
        let batches = (args.commands / 4).div_ceil(u64::from(warps) * 32);
        let puts = Puts {
            peer: 0,
            dst: to.base,
            src: from.base,
            len: SMALL,
            slots: PLACES,
            warps,
            batches,
            counter: None,
        };
        let took = producer.puts(&puts)?;
        let count = batches * u64::from(warps) * 32;
        let posted = Row { size: Some(SMALL), ..row("posted", warps) };
        rows.push(posted.rate(count, took.as_secs_f64()));
    }
    ensure!(proxy.stats().faults == 0, "the proxy reported a fault: {:?}", proxy.take_fault());
    Ok(())
}
