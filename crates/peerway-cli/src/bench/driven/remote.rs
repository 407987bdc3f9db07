//! `bench gpu-remote`: two ranks, each with memory, rings and a proxy. The sender's kernels put
//! into the receiver's memory. The receiver's kernels wait, answer, and compare every byte.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use peerway::driven::{Forward, Proxy, Window};
use peerway::{Endpoint, Peer, Region};

use super::producer::{self, Layers, Producer, Puts, Talk};
use super::report::{Report, Row};
use super::{RemoteArgs, RemoteMeasure, TIMEOUT};
use crate::bench::outputs::Outputs;

/// Counters for round trips, streams of puts, forwarded puts, and the answers to forwarded puts.
const TALK: u16 = 0;
const STREAM: u16 = 1;
const RELAY: u16 = 2;
const ANSWER: u16 = 3;
/// The counter that the receiver raises after it has taken all layers of a step.
const TAKEN: u16 = 4;
/// The counter of the first layer. The other layers have the following counters.
const LAYER: u16 = 16;

/// Bytes of the window that streams of puts use in rotation.
const STREAM_BYTES: u64 = 64 << 20;
/// How long to wait for the other rank.
const SOON: Duration = Duration::from_secs(60);

const NOTES: &str = "\
one way: half of a round trip of put with count, wait by the other kernel, and the same back; the \
kernels compare every payload
puts: from the launch of the sender's kernel until its quiet is answered; the receiver compares \
all bytes afterwards
forwarded: a whole round trip of put with count; the receiver copies the bytes on and then answers
step: one step of a captured graph that writes all layers of a model, without sending
step + sent: the same, with each layer sent as soon as it is written; the receiver compares each \
layer, and the next step waits until the receiver has taken all layers";

/// One rank, with its peer.
struct Rank {
    number: u8,
    proxy: Proxy,
    peer: Peer,
    /// The buffers for outgoing messages, for incoming messages, and for streams of puts.
    source: Region,
    landing: Region,
    stream: Region,
    endpoint: Endpoint,
    from: [Window; 2],
    to: [Window; 2],
}

/// Runs one rank, or both.
pub(crate) fn run(args: &RemoteArgs) -> anyhow::Result<()> {
    super::have_queues();
    let (rank, peer, args) = (args.rank, &args.peer, &args.measure);
    match (rank, peer) {
        (Some(rank), Some(peer)) => {
            ensure!(rank < 2, "invalid rank {rank}: expected 0 (sends) or 1 (receives)");
            let address = (peer.as_str(), args.port)
                .to_socket_addrs()
                .with_context(|| format!("cannot resolve the peer's address {peer}"))?
                .next()
                .with_context(|| format!("the peer {peer} has no address"))?;
            one(args, rank, address)
        }
        _ => both(args),
    }
}

/// Starts rank 1 as a second process on this machine, and runs as rank 0.
fn both(args: &RemoteMeasure) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut second = Command::new(program);
    second.args(["bench", "gpu-remote", "--rank", "1", "--peer", "127.0.0.1"]);
    second.args(["--port", &args.port.to_string(), "--threads", &args.threads.to_string()]);
    second.args(["--rounds", &args.rounds.to_string(), "--forward", &args.forward.to_string()]);
    second.args(["--layers", &args.layers.to_string(), "--steps", &args.steps.to_string()]);
    second.args(["--layer-size", &args.layer_size.to_string()]);
    let sizes: Vec<String> = args.sizes.iter().map(u64::to_string).collect();
    second.args(["--sizes", &sizes.join(","), "--copier", &args.copier.to_string()]);
    match args.who.gpu() {
        Some(gpu) => second.args(["--gpu", &gpu.to_string()]),
        None => second.arg("--simulate"),
    };
    if let Some(path) = args.path {
        second.args(["--path", &path.to_string()]);
    }
    let second = second.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let mut second = Second(second.context("cannot start rank 1 as a second process")?);
    one(args, 0, SocketAddr::new(IpAddr::from([127, 0, 0, 1]), args.port))?;
    let status = second.0.wait()?;
    ensure!(status.success(), "rank 1 ended with {status}");
    Ok(())
}

/// The second process. Dropping the value kills it.
struct Second(Child);

impl Drop for Second {
    fn drop(&mut self) {
        // After a successful run the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn one(args: &RemoteMeasure, number: u8, address: SocketAddr) -> anyhow::Result<()> {
    let outputs = Outputs::open(args.json.as_deref(), None)?;
    let rank = Rank::new(args, number, address)?;
    let producer = producer::of(&rank.proxy)?;
    let mut rows = Vec::new();
    let mut said = 0;
    for &size in &args.sizes {
        ensure!(size.is_multiple_of(4), "size {size} is not a multiple of 4 bytes");
        rank.latency(args, &*producer, size, &mut said, &mut rows)?;
        rank.stream(args, &*producer, size, &mut rows)?;
        if args.forward > 0 {
            rank.relay(args, &*producer, size, &mut rows)?;
        }
    }
    if args.layers > 0 {
        rank.layers(args, &*producer, &mut rows)?;
    }
    rank.meet()?;
    if number == 1 {
        return Ok(());
    }
    let path = rank.peer.path().to_string();
    let title = format!(
        "two ranks, {path}, puts by {}",
        match args.who.gpu() {
            Some(gpu) => format!("kernels of GPU {gpu}, copier {}", args.copier),
            None => "CPU threads (simulated kernels)".to_owned(),
        }
    );
    let report = Report { title, rows, notes: NOTES };
    outputs.rows(&report.to_string(), &report.rows)
}

impl Rank {
    fn new(args: &RemoteMeasure, number: u8, address: SocketAddr) -> anyhow::Result<Self> {
        let mut builder = Endpoint::builder();
        if number == 1 {
            let any: IpAddr = if address.is_ipv6() { [0u16; 8].into() } else { [0u8; 4].into() };
            builder = builder.bind(SocketAddr::new(any, args.port));
        }
        if let Some(path) = args.path {
            builder = builder.transport(path);
        }
        let endpoint = builder.build()?;
        let peer = meet(&endpoint, number, address)?;
        let longest = args.sizes.iter().copied().max().unwrap_or(4);
        let region = |len: u64| match args.who.gpu() {
            Some(gpu) => endpoint.allocate_gpu(gpu, len),
            None => endpoint.allocate(len as usize),
        };
        // Messages arrive in two halves of the buffer in turn.
        let (source, landing) = (region(longest)?, region(2 * longest)?);
        let stream = region(STREAM_BYTES.max(longest))?;
        let builder = Proxy::builder(&endpoint).threads(args.threads).timeout(TIMEOUT);
        let mut builder = builder.copier(args.copier);
        if let Some(gpu) = args.who.gpu() {
            builder = builder.gpu(gpu);
        }
        let proxy = builder.build()?;
        // Both ranks register the same windows in the same order. The peer does not need the window
        // of `source`, but it costs nothing.
        let from = [proxy.window(&source)?, proxy.window(&stream)?];
        proxy.window(&landing)?;
        peer.notify(&proxy.peer_info()?)?.join().ok()?;
        let info = peer.notification(SOON).context("the other rank sent no peer info")?;
        let theirs = proxy.add_peer(0, &peer, &info.message)?;
        let [_, stream_there, landing_there] = theirs[..] else {
            bail!(
                "the other rank advertises {} windows instead of 3: run the same version on both sides",
                theirs.len()
            );
        };
        let to = [landing_there, stream_there];
        Ok(Self { number, proxy, peer, source, landing, stream, endpoint, from, to })
    }

    /// A barrier: waits until the other rank calls it too.
    fn meet(&self) -> anyhow::Result<()> {
        self.peer.notify(b"here")?.join().ok()?;
        self.peer.notification(SOON).context("the other rank does not answer")?;
        Ok(())
    }

    fn row(&self, args: &RemoteMeasure, what: &'static str, size: u64) -> Row {
        let (threads, rings) = (args.threads, self.proxy.rings() as usize);
        Row { what, threads, rings, size: Some(size), warps: 1, ..Row::default() }
    }

    fn latency(
        &self,
        args: &RemoteMeasure,
        producer: &dyn Producer,
        size: u64,
        said: &mut u64,
        rows: &mut Vec<Row>,
    ) -> anyhow::Result<()> {
        self.meet()?;
        let talk = Talk {
            peer: 0,
            dst: self.to[0].base,
            source: (&self.source, self.from[0].base),
            landing: &self.landing,
            len: size,
            counter: TALK,
            first: *said,
            rounds: args.rounds,
        };
        *said += args.rounds;
        if self.number == 1 {
            return producer.pong(&talk);
        }
        let times = producer.ping(&talk)?;
        rows.push(self.row(args, "one way", size).times(&times, 2.0));
        Ok(())
    }

    fn stream(
        &self,
        args: &RemoteMeasure,
        producer: &dyn Producer,
        size: u64,
        rows: &mut Vec<Row>,
    ) -> anyhow::Result<()> {
        let slots = (STREAM_BYTES / size).max(1);
        for counter in [None, Some(STREAM)] {
            let seed = size as u32 ^ u32::from(counter.unwrap_or(9));
            // Only these bytes of the stream buffer are sent, so only these are compared.
            let whole = slots * size;
            let seed_of = |rank: u8| if rank == 0 { seed } else { !seed };
            producer.fill(&self.stream, seed_of(self.number))?;
            self.meet()?;
            if self.number == 0 {
                let each = u64::from(args.warps) * 32;
                let batches = args.puts.max(slots).div_ceil(each);
                let (dst, src) = (self.to[1].base, self.from[1].base);
                let warps = args.warps;
                let puts = Puts { peer: 0, dst, src, len: size, slots, warps, batches, counter };
                let took = producer.puts(&puts)?;
                let what = if counter.is_some() { "puts with counts" } else { "puts" };
                let row = Row { warps, ..self.row(args, what, size) };
                rows.push(row.rate(batches * each, took.as_secs_f64()));
            }
            self.meet()?;
            if self.number == 1 {
                producer.check(&self.stream, whole, seed).context("wrong bytes after the quiet")?;
            }
        }
        Ok(())
    }

    fn layers(
        &self,
        args: &RemoteMeasure,
        producer: &dyn Producer,
        rows: &mut Vec<Row>,
    ) -> anyhow::Result<()> {
        let all = u64::from(args.layers) * args.layer_size;
        ensure!(
            all <= self.stream.len(),
            "{} layers of {} bytes do not fit into the stream buffer: lower --layers or --layer-size",
            args.layers,
            args.layer_size
        );
        ensure!(
            args.layer_size.is_multiple_of(4),
            "layer size {} is not a multiple of 4 bytes",
            args.layer_size
        );
        self.meet()?;
        let layers = Layers {
            peer: 0,
            dst: self.to[1].base,
            memory: (&self.stream, self.from[1].base),
            layers: args.layers,
            len: args.layer_size,
            counter: LAYER,
            taken: TAKEN,
            steps: args.steps,
        };
        if self.number == 1 {
            return producer.take_layers(&layers);
        }
        let whats = ["step", "step + sent"];
        for (what, took) in whats.into_iter().zip(producer.layers(&layers)?) {
            let each = took.as_secs_f64() / args.steps as f64 * 1e6;
            let row = self.row(args, what, args.layer_size);
            rows.push(Row { avg_us: Some(each), warps: args.layers, ..row });
        }
        Ok(())
    }

    fn relay(
        &self,
        args: &RemoteMeasure,
        producer: &dyn Producer,
        size: u64,
        rows: &mut Vec<Row>,
    ) -> anyhow::Result<()> {
        let armed = self.proxy.arm();
        if self.number == 1 {
            let arrived = self.landing.slice(0..size);
            let mut rule = Forward::new(RELAY, arrived).answer(0, ANSWER);
            for _ in 0..args.forward {
                let place = match args.who.gpu() {
                    Some(gpu) => self.endpoint.allocate_gpu(gpu, size)?,
                    None => self.endpoint.allocate(size as usize)?,
                };
                rule = rule.to(place.all());
            }
            self.proxy.forward(rule)?;
        }
        self.meet()?;
        if self.number == 0 {
            let talk = Talk {
                peer: 0,
                dst: self.to[0].base,
                source: (&self.source, self.from[0].base),
                landing: &self.landing,
                len: size,
                counter: RELAY,
                first: self.proxy.counter(ANSWER),
                rounds: args.rounds,
            };
            let times = producer.relay(&talk, ANSWER)?;
            rows.push(self.row(args, "forwarded", size).times(&times, 1.0));
        }
        self.meet()?;
        self.proxy.stop_forwarding(RELAY);
        drop(armed);
        Ok(())
    }
}

/// Rank 0 tries to connect until rank 1 listens. Rank 1 accepts.
fn meet(endpoint: &Endpoint, number: u8, address: SocketAddr) -> anyhow::Result<Peer> {
    if number == 1 {
        return endpoint.accept(SOON).context("rank 0 did not connect");
    }
    let start = Instant::now();
    loop {
        match endpoint.connect_addr(address) {
            Ok(peer) => return Ok(peer),
            Err(error) if start.elapsed() > SOON => {
                return Err(error).with_context(|| format!("cannot reach rank 1 at {address}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}
