//! One path: an endpoint and a buffer on each side, and all measurements between them.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerway::{Access, Batch, Endpoint, Peer, Pin, Region, RemoteRegion};
use peerway_core::config::Config;

use super::baseline::Against;
use super::clock::{Stopwatch, cpu_seconds};
use super::control::{Control, Request};
use super::copies::{Copies, Mate};
use super::device::Driver;
use super::document::Why;
use super::kernel::{self, Kernel, Theirs};
use super::layout::{Layout, Side};
use super::measure::{Baseline, Beside, Figures, Rounds, Times, timed};
use super::memory::{Memory, Place};
use super::perftest::port::Port;
use super::perftest::{Ask, DEPTH, PAIRS, Pairs, SPARE_PAIRS, child};
use super::placement::Placed;
use super::plan::{BLOCK_LIST, Row};
use super::pong::{Ping, Seen};
use super::raw::Sockets;
use super::report::{Besides, Line, Spread};
use super::same::{HostPair, SamePath};
use super::watchdog::Watchdog;
use super::{Op, interrupt, memory, pattern, serve, stream};

mod registration;

/// Transfers with more pieces than this are posted as a block list.
const MAX_VECTOR: u32 = 1024;

/// Timed connections. Each uses a new endpoint.
const CONNECTS: u32 = 11;
/// Timed posts. They are enough for a median and a maximum, and each moves up to hundreds of
/// megabytes.
const POSTS: u32 = 9;
/// How long both sides rest before their idle CPU time is measured, and how long it is measured.
const IDLE: Duration = Duration::from_secs(1);

/// The tools that all paths share.
pub(crate) struct Tools<'a> {
    pub(crate) control: Control,
    pub(crate) watch: Stopwatch,
    pub(crate) dog: &'a Watchdog,
    pub(crate) mate: Option<Mate>,
    /// Whether arrivals are detected by counters on every path.
    pub(crate) counted: bool,
    /// The second buffer for baselines of host memory, as large as the largest row. Empty if a side
    /// uses GPU memory.
    pub(crate) scratch: Vec<u8>,
    pub(crate) seconds: f64,
    /// The address that local endpoints listen on.
    pub(crate) ip: IpAddr,
    /// The memory of this side and of the other side.
    pub(crate) places: [Place; 2],
    /// The RDMA device of this side and of the other side. `None` means all devices.
    pub(crate) devices: [Option<String>; 2],
    /// Whether paths of RDMA devices are compared with perftest.
    pub(crate) perftest: bool,
    /// The CPUs of this side and of the other side for rows of TCP. See `placement`.
    pub(crate) halves: Option<[String; 2]>,
}

/// A working path that is open on both sides.
pub(crate) struct Session {
    /// The name of the path in rows.
    pub(crate) name: String,
    pin: Pin,
    metadata: Vec<u8>,
    endpoint: Endpoint,
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
    memory: [Memory; 2],
    /// A description of the memory of the two sides.
    pub(crate) told: [String; 2],
    /// The second buffer of the baseline, if the other side's memory is mappable. The baseline then
    /// uses mappable memory too.
    mapped: Option<Region>,
    /// The driver's copies. They are the baseline if a GPU copies.
    driver: Option<Driver>,
    /// Host buffers. Their transfers are the baseline if GPU memory takes a path without a GPU
    /// copy.
    host: Option<HostPair>,
    /// Whether the path uses mappable memory.
    shared: bool,
    device: Option<String>,
    /// The CPUs of this side, and the guard that keeps the measuring thread there.
    cpus: Option<String>,
    _placed: Option<Placed>,
    /// The parameters of the local device for perftest.
    port: Option<Port>,
}

impl Session {
    /// Opens the path with buffers of `len` bytes. Returns the reason if the path does not work.
    pub(crate) fn open(tools: &mut Tools<'_>, pin: Pin, len: u64) -> anyhow::Result<Self> {
        let mut port = None;
        let [mut ours, mut theirs] = tools.devices.clone();
        if tools.perftest && pin.is_rdma() {
            // perftest measures between two devices, so this row must use the same two.
            theirs = Some(tools.control.device(theirs)?);
            let chosen = Port::choose(ours.as_deref())?;
            ours = Some(chosen.device.clone());
            port = Some(chosen);
        }
        let halves = tools.halves.clone().filter(|_| pin == Pin::Tcp);
        let [cpus, their_cpus] = halves.map_or([None, None], |halves| halves.map(Some));
        let open = Request::Open { pin: pin.to_string(), device: theirs, cpus: their_cpus };
        let metadata = tools.control.bytes(&open)?;
        let placed = cpus.as_deref().and_then(Placed::on);
        let endpoint = serve::endpoint(pin, tools.ip, ours.clone(), cpus.as_deref())?;
        let peer = endpoint.connect(&metadata)?;
        let private = matches!(pin, Pin::LocalCma | Pin::LocalRing | Pin::Tcp) || pin.is_rdma();
        let shared = !private;
        let [here, there] = tools.places;
        let (descriptor, theirs) = tools.control.memory(there, len, shared, false)?;
        let remote = peer.import(&descriptor)?;
        // The local buffer is private memory on every path, like an application's own memory.
        let (local, told) = here.region(&endpoint, len, false)?;
        let mut session = Self {
            name: peer.path().kind.to_string(),
            pin,
            metadata,
            endpoint,
            peer,
            local,
            remote,
            memory: [here.memory, there.memory],
            told: [told, theirs],
            mapped: None,
            driver: None,
            host: None,
            shared,
            device: ours,
            cpus,
            _placed: placed,
            port,
        };
        if session.memory != [Memory::Host; 2] {
            // The path also depends on the memory, so only a transfer shows which path is taken.
            let first = Layout { size: len.min(256), iovs: 1, seed: 0 };
            session.name = session.took(session.batch(Op::Write, &first)?)?;
            // If `auto` selects a path that has a pin, measure it under that pin, with its memory
            // and its baseline.
            if pin == Pin::Auto
                && session.name != "gpu-ipc"
                && let Ok(named) = session.name.parse()
                && named != pin
            {
                session.close(tools)?;
                return Self::open(tools, named, len);
            }
        }
        match Against::of(&session.name, session.memory) {
            Against::Driver => session.driver = Some(Driver::new(tools.places, len)?),
            Against::HostMemory => {
                let host = Place::default();
                let (descriptor, _) = tools.control.memory(host, len, shared, true)?;
                let remote = session.peer.import(&descriptor)?;
                let (local, _) = host.region(&session.endpoint, len, false)?;
                session.host = Some(HostPair { local, remote });
            }
            Against::Copies if shared => {
                session.mapped = Some(memory::region(&session.endpoint, len, true)?);
            }
            Against::Copies | Against::Sockets | Against::Perftest => {}
        }
        Ok(session)
    }

    /// Why the peer has this path and not a better one.
    pub(crate) fn why(&self) -> String {
        self.peer.path().why.clone()
    }

    /// Whether the path uses RDMA devices.
    pub(crate) fn is_rdma(&self) -> bool {
        self.pin.is_rdma()
    }

    /// Closes the path on both sides.
    pub(crate) fn close(self, tools: &mut Tools<'_>) -> anyhow::Result<()> {
        self.endpoint.close();
        tools.control.done(&Request::Close)
    }

    /// Measures one row, with perftest if `--perftest` is given, and compares the bytes.
    pub(crate) fn row(
        &self,
        tools: &mut Tools<'_>,
        row: &Row,
    ) -> anyhow::Result<(Line, Option<Pairs>)> {
        let Row { op, layout } = *row;
        let (total, seed) = (layout.total(), layout.seed);
        match op {
            Op::Write | Op::Pingpong => {
                pattern::fill(&self.local, total, seed)?;
                tools.control.done(&Request::Blank { len: total })?;
            }
            Op::Read => {
                pattern::blank(&self.local, total)?;
                tools.control.done(&Request::Fill { len: total, seed })?;
            }
        }
        tools.dog.beat();
        self.ensure_path(self.batch(op, &layout)?)?;
        if let Some(host) = &self.host {
            self.ensure_path(batch(&host.local, &host.remote, op, &layout)?)
                .context("the baseline with host memory")?;
        }
        let echo = match op {
            Op::Pingpong => {
                // `ensure_path` wrote to the buffer. Erase that write, so that it is not taken for
                // a ping.
                tools.control.done(&Request::Blank { len: total })?;
                Some(self.start_pong(tools, total)?)
            }
            _ => None,
        };
        let measured = match &self.port {
            Some(port) if Ask::has(op, &layout) => self.beside(tools, row, port, echo.as_ref()),
            _ => self.alone(tools, row, echo.as_ref()).map(|figures| (figures, None)),
        };
        if op == Op::Pingpong {
            // If both sides failed, the other side's error is the cause.
            tools.control.done(&Request::StopPong).context("the other side failed")?;
        }
        let (figures, pairs) = measured?;
        self.compare(&mut tools.control, &layout, echo.as_ref())?;
        tools.dog.beat();
        let mut line = Line::new(&self.name, self.memory, op, &layout, &figures);
        if let Some(pairs) = pairs.as_ref().filter(|_| op != Op::Pingpong) {
            // Several transfers were in flight, so the rate does not follow from the time of one.
            line.gbps = pairs.our_median();
        }
        Ok((line, pairs))
    }

    /// Times a row in turns with its baseline.
    fn alone(
        &self,
        tools: &mut Tools<'_>,
        row: &Row,
        echo: Option<&Region>,
    ) -> anyhow::Result<Figures> {
        let Row { op, layout } = *row;
        let total = layout.total();
        let seen = self.seen(tools, total);
        let Tools { control, watch, dog, mate, scratch, seconds, .. } = tools;
        let against = Against::of(&self.name, self.memory);
        let of_host = !matches!(against, Against::Driver | Against::HostMemory);
        let scratch = &mut scratch[..if of_host { total as usize } else { 0 }];
        let to = match &self.mapped {
            Some(region) => region.addr() as usize,
            None => scratch.as_mut_ptr().expose_provenance(),
        };
        let theirs = if self.is_kernels(op, &layout) { self.theirs(control)? } else { None };
        let mut kernel = theirs.map(|theirs| {
            // SAFETY: `is_kernels` requires host memory on both sides, so the baseline's second
            // buffer has `total` bytes. It outlives `kernel`, a local of this function. Only the
            // baseline uses it too, and their rounds alternate.
            unsafe { Kernel::new(mate.as_ref(), theirs, to, total as usize) }
        });
        let mut baseline: Option<Box<dyn Baseline>> = match against {
            Against::Copies => {
                let from = self.local.addr() as usize;
                // SAFETY: `Against::Copies` means host memory on both sides. The region and the
                // baseline's second buffer are separate, have at least `total` bytes and outlive
                // the baseline, a local of this function. No transfer is in flight during a round
                // of the baseline. The second buffer is the exclusively borrowed scratch buffer, or
                // `mapped`, which no other code uses. `Region::addr` exposes a region's address.
                Some(Box::new(unsafe { Copies::new(mate.as_ref(), &layout, from, to) }))
            }
            Against::Sockets => {
                let address = control.raw(op, total)?;
                Some(Box::new(Sockets::new(address, op, scratch)?))
            }
            Against::Perftest => None,
            Against::Driver => {
                let driver = self.driver.as_ref().context("no GPU copies on this path")?;
                Some(Box::new(driver.baseline(op, total)))
            }
            Against::HostMemory => {
                let HostPair { local, remote } =
                    self.host.as_ref().context("no host buffers are allocated")?;
                let prepared = self.peer.prepare(batch(local, remote, op, &layout)?)?;
                Some(Box::new(SamePath::new(prepared, total)))
            }
        };
        let baseline = baseline.as_mut().map(|baseline| &mut **baseline as &mut dyn Baseline);
        let share = if op == Op::Pingpong { 2 } else { 1 };
        let rounds = Rounds { watch, seconds: *seconds, bytes: total * share, share };
        let kernel = kernel.as_mut().map(|kernel| kernel as &mut dyn Baseline);
        let cpu = || Ok(control.cpu_seconds()? + cpu_seconds());
        let beat = || dog.beat();
        match echo {
            Some(echo) => {
                let mut ping = self.ping(&layout, echo, seen)?;
                rounds.run(baseline, kernel, || ping.once(), cpu, beat)
            }
            None => {
                let prepared = self.peer.prepare(self.batch(op, &layout)?)?;
                rounds.run(baseline, kernel, || Ok(prepared.run()?.ok()?), cpu, beat)
            }
        }
    }

    /// Times a row in turns with perftest.
    fn beside(
        &self,
        tools: &mut Tools<'_>,
        row: &Row,
        port: &Port,
        echo: Option<&Region>,
    ) -> anyhow::Result<(Figures, Option<Pairs>)> {
        let Row { op, layout } = *row;
        let (total, pingpong) = (layout.total(), op == Op::Pingpong);
        let depth = if pingpong { 1 } else { DEPTH };
        let queue_pairs = if pingpong { 1 } else { queue_pairs(total)? };
        let mut ask = Ask { op, size: total, iterations: 0, depth, queue_pairs };
        let (ours, theirs, times) = (Vec::new(), Vec::new(), Times::new());
        let mut pairs = Pairs { depth, queue_pairs, ours, theirs, times, again: 0 };
        let seen = self.seen(tools, total);
        let mut ping = echo.map(|echo| self.ping(&layout, echo, seen)).transpose()?;
        let prepared = self.peer.prepare(self.batch(op, &layout)?)?;
        let seconds = tools.seconds / (2 * PAIRS) as f64;
        let budget = Duration::from_secs_f64(seconds);
        let (mut count, mut cpu) = (0, 0.0);
        while pairs.ours.len() < PAIRS {
            let mut times = Times::new();
            let before = tools.control.cpu_seconds()? + cpu_seconds();
            let (turns, value, nanos_each) = match &mut ping {
                Some(ping) => {
                    let turns = timed(budget, &tools.watch, 2, &mut times, || ping.once())?;
                    (2 * turns, times.p50() / 1e3, 2.0 * times.p50())
                }
                None => {
                    let (turns, nanos) =
                        stream::run(&prepared, depth, budget, &tools.watch, &mut times)?;
                    let each = nanos as f64 / turns as f64;
                    (turns, total as f64 / each, each)
                }
            };
            let after = tools.control.cpu_seconds()? + cpu_seconds();
            tools.dog.beat();
            ask.last(seconds, nanos_each);
            let server = tools.control.perftest(ask);
            let found = server.and_then(|server| child::client(&ask, port, server));
            tools.control.done(&Request::StopPerftest)?;
            tools.dog.beat();
            match found {
                Ok(found) => {
                    pairs.theirs.push(found);
                    pairs.ours.push(value);
                    pairs.times.add(&times);
                    (count, cpu) = (count + turns, cpu + after - before);
                }
                Err(error) if pairs.again == SPARE_PAIRS => {
                    return Err(error.context("perftest fails repeatedly"));
                }
                Err(_) => pairs.again += 1,
            }
        }
        let theirs = pairs.their_median();
        let gbps = if pingpong { total as f64 / theirs / 1e3 } else { theirs };
        let figures = Figures {
            times: pairs.times.clone(),
            baseline: Some(Beside { gbps, ratio: pairs.ratio(op) }),
            kernel: None,
            cpu_s_per_gb: cpu / ((count * total) as f64 / 1e9),
        };
        Ok((figures, Some(pairs)))
    }

    /// Measures the figures that a path has once, besides its rows.
    pub(crate) fn besides(&self, tools: &mut Tools<'_>) -> anyhow::Result<Besides> {
        let range = Layout { size: 100 << 20, iovs: 1, seed: 0 };
        let list = Layout { size: BLOCK_LIST.0, iovs: BLOCK_LIST.1, seed: 0 };
        Ok(Besides {
            path: self.name.clone(),
            connect: self.connects(tools)?,
            post_range: self.posts(tools, &range)?,
            post_list: self.posts(tools, &list)?,
            idle: self.idle(tools)?,
        })
    }

    fn batch(&self, op: Op, layout: &Layout) -> anyhow::Result<Batch> {
        batch(&self.local, &self.remote, op, layout)
    }

    /// Whether the kernel's copy between the two processes bounds the row.
    fn is_kernels(&self, op: Op, layout: &Layout) -> bool {
        let large = layout.iovs == 1 && layout.size >= kernel::FROM;
        let host = self.memory == [Memory::Host; 2];
        self.name == "local-cma" && large && host && op != Op::Pingpong
    }

    /// The other side's buffer, if this process can read it by the other side's process id. In
    /// another PID namespace that id belongs to no process or to a different one, so the bytes are
    /// compared. A transfer has made both buffers equal before.
    fn theirs(&self, control: &mut Control) -> anyhow::Result<Option<Theirs>> {
        let theirs = control.place()?;
        let (mut first, mut ours) = ([0; 4096], [0; 4096]);
        self.local.read_at(0, &mut ours)?;
        Ok(theirs.first(&mut first).is_ok_and(|()| first == ours).then_some(theirs))
    }

    /// Runs the batch once, and checks that it takes the path that the row is named after.
    fn ensure_path(&self, batch: Batch) -> anyhow::Result<()> {
        let took = self.took(batch)?;
        ensure!(took == self.name, "the transfer took the path {took} instead of {}", self.name);
        Ok(())
    }

    /// Runs the batch once, and returns the path that it took.
    fn took(&self, batch: Batch) -> anyhow::Result<String> {
        let transfer = self.peer.post(&batch)?;
        transfer.join().ok()?;
        Ok(transfer.path().to_string())
    }

    /// How arrivals of a ping-pong are detected.
    fn seen(&self, tools: &Tools<'_>, size: u64) -> Seen {
        Seen::on(&self.name, size, tools.counted)
    }

    fn ping(&self, layout: &Layout, echo: &Region, seen: Seen) -> anyhow::Result<Ping> {
        let what = (self.batch(Op::Pingpong, layout)?, &self.local, echo);
        Ping::new(&self.endpoint, &self.peer, what, layout.total(), seen)
    }

    /// Tells the other side to answer writes. The answers go to a new region of this side.
    fn start_pong(&self, tools: &mut Tools<'_>, size: u64) -> anyhow::Result<Region> {
        let echo = memory::region(&self.endpoint, size, self.shared)?;
        pattern::blank(&echo, size)?;
        let descriptor = echo.advertise(Access::WRITE)?.to_vec();
        let metadata = self.endpoint.metadata();
        let seen = self.seen(tools, size);
        tools.control.done(&Request::Pong { metadata, descriptor, size, seen })?;
        Ok(echo)
    }

    fn compare(
        &self,
        control: &mut Control,
        layout: &Layout,
        echo: Option<&Region>,
    ) -> anyhow::Result<()> {
        let ours = pattern::checksum(&self.local, layout, Side::Client)?;
        let theirs = control.checksum(*layout)?;
        ensure!(ours == theirs, "the received bytes differ from the sent ones");
        if let Some(echo) = echo {
            let back = pattern::checksum(echo, layout, Side::Client)?;
            ensure!(ours == back, "the bytes of the answer differ from the sent ones");
        }
        Ok(())
    }

    /// Times connections, each from a new endpoint.
    fn connects(&self, tools: &mut Tools<'_>) -> anyhow::Result<Spread> {
        let mut times = Times::new();
        for _ in 0..CONNECTS {
            interrupt::check()?;
            let cpus = self.cpus.as_deref();
            let endpoint = serve::endpoint(self.pin, tools.ip, self.device.clone(), cpus)?;
            let start = Instant::now();
            endpoint.connect(&self.metadata)?;
            times.record(tools.watch.nanos(start, Instant::now()));
            endpoint.close();
            tools.dog.beat();
        }
        Ok(Spread::of(&times))
    }

    /// Times the posting call. `None` if the buffers are too small for the layout.
    fn posts(&self, tools: &mut Tools<'_>, layout: &Layout) -> anyhow::Result<Option<Spread>> {
        if layout.total() > self.local.len() {
            return Ok(None);
        }
        let mut times = Times::new();
        let prepared = self.peer.prepare(self.batch(Op::Write, layout)?)?;
        for _ in 0..POSTS {
            interrupt::check()?;
            let start = Instant::now();
            let transfer = prepared.post()?;
            times.record(tools.watch.nanos(start, Instant::now()));
            transfer.join().ok()?;
            tools.dog.beat();
        }
        Ok(Some(Spread::of(&times)))
    }

    /// CPU seconds per second of both processes together, while the session is open and idle.
    fn idle(&self, tools: &mut Tools<'_>) -> anyhow::Result<f64> {
        thread::sleep(IDLE);
        let theirs = tools.control.cpu_seconds()?;
        let (ours, start) = (cpu_seconds(), Instant::now());
        thread::sleep(IDLE);
        let used = cpu_seconds() - ours + tools.control.cpu_seconds()? - theirs;
        tools.dog.beat();
        Ok(used / start.elapsed().as_secs_f64())
    }
}

/// The path of a program that pins none, and why. `None` if such a program cannot connect.
pub(crate) fn why_auto(tools: &mut Tools<'_>) -> anyhow::Result<Option<Why>> {
    let open = Request::Open { pin: Pin::Auto.to_string(), device: None, cpus: None };
    let metadata = tools.control.bytes(&open)?;
    let endpoint = serve::endpoint(Pin::Auto, tools.ip, None, None)?;
    let why = endpoint.connect(&metadata).ok().map(|peer| {
        let path = peer.path();
        Why { path: Pin::Auto.to_string(), why: format!("{}: {}", path.kind, path.why) }
    });
    endpoint.close();
    tools.control.done(&Request::Close)?;
    Ok(why)
}

/// The transfer of a row between two buffers.
fn batch(local: &Region, remote: &RemoteRegion, op: Op, layout: &Layout) -> anyhow::Result<Batch> {
    let Layout { size, iovs, .. } = *layout;
    let indices = (layout.indices(Side::Client), layout.indices(Side::Server));
    if iovs > MAX_VECTOR {
        let ours = local.blocks(0, size, size, &indices.0);
        let theirs = remote.blocks(0, size, size, &indices.1);
        return Ok(match op {
            Op::Read => Batch::read_blocks(ours, theirs)?,
            Op::Write | Op::Pingpong => Batch::write_blocks(ours, theirs)?,
        });
    }
    let block = |index: u32| u64::from(index) * size..(u64::from(index) + 1) * size;
    let pairs: Vec<_> = indices
        .0
        .into_iter()
        .zip(indices.1)
        .map(|(ours, theirs)| (local.slice(block(ours)), remote.slice(block(theirs))))
        .collect();
    Ok(match (op, &pairs[..]) {
        (Op::Read, [(ours, theirs)]) => Batch::read(ours, theirs)?,
        (Op::Read, pairs) => Batch::read_vector(pairs)?,
        (_, [(ours, theirs)]) => Batch::write(ours, theirs)?,
        (_, pairs) => Batch::write_vector(pairs)?,
    })
}

/// The number of queue pairs that the engine uses for a transfer of this size.
fn queue_pairs(size: u64) -> anyhow::Result<u16> {
    let (config, _) = Config::from_env(|name| std::env::var(name).ok())?;
    Ok(if size > 64 << 10 { config.rdma.queue_pairs } else { 1 })
}
