//! One path: an endpoint here, one there, a buffer on each side, and everything measured between them.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerway::{Access, Batch, Endpoint, Peer, Pin, Region, RemoteRegion};
use peerway_core::config::Config;

use super::clock::{Stopwatch, cpu_seconds};
use super::control::{Control, Request};
use super::copies::{Copies, Mate};
use super::device::Driver;
use super::kernel::{self, Kernel, Theirs};
use super::layout::{Layout, Side};
use super::limit::Against;
use super::measure::{Figures, Limit, Rounds, Times, timed};
use super::memory::{Memory, Place};
use super::perftest::port::Port;
use super::perftest::{Ask, DEPTH, PAIRS, Pairs, SPARE_PAIRS, child};
use super::plan::{BLOCK_LIST, Row};
use super::pong::{Ping, Seen};
use super::raw::Sockets;
use super::report::{Besides, Line, Spread};
use super::same::{HostPair, SamePath};
use super::watchdog::Watchdog;
use super::{Op, memory, pattern, serve, stream};

mod registration;

/// More pieces than this go as a block list: it is what block lists are for.
const MAX_VECTOR: u32 = 1024;

/// Connections made to time one; each is a new endpoint.
const CONNECTS: u32 = 11;
/// Posts made to time one: enough for a median and a maximum, while each moves hundreds of megabytes.
const POSTS: u32 = 9;
/// How long both sides are left alone before their idleness is looked at, and then looked at.
const IDLE: Duration = Duration::from_secs(1);

/// What every path is measured with.
pub(crate) struct Tools<'a> {
    pub(crate) control: Control,
    pub(crate) watch: Stopwatch,
    pub(crate) dog: &'a Watchdog,
    pub(crate) mate: Option<Mate>,
    /// Whether arrivals are counted on every path.
    pub(crate) counted: bool,
    /// The other buffer of the limits of host memory, as large as the largest row; empty where GPU memory is
    /// measured.
    pub(crate) scratch: Vec<u8>,
    pub(crate) seconds: f64,
    /// Where endpoints listen here.
    pub(crate) ip: IpAddr,
    /// The memory that rows are measured with, ours and the other side's.
    pub(crate) places: [Place; 2],
    /// RDMA devices, ours and the other side's; none is all of them.
    pub(crate) devices: [Option<String>; 2],
    /// Whether perftest is run beside paths of RDMA devices.
    pub(crate) perftest: bool,
}

/// A path that works, open on both sides.
pub(crate) struct Session {
    /// The path as rows name it.
    pub(crate) name: String,
    pin: Pin,
    metadata: Vec<u8>,
    endpoint: Endpoint,
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
    memory: [Memory; 2],
    /// What the memory of the two sides came to.
    pub(crate) told: [String; 2],
    /// The other buffer of the limit, where it has to be such memory as the other side's: that which can be mapped.
    mapped: Option<Region>,
    /// The driver's copies, which are the limit where a GPU copies.
    driver: Option<Driver>,
    /// Host memory, whose transfers are the limit where GPU memory goes by another path.
    host: Option<HostPair>,
    /// Whether the path wants memory that can be mapped.
    shared: bool,
    device: Option<String>,
    /// What perftest is told of our device.
    port: Option<Port>,
}

impl Session {
    /// Opens the path with buffers of `len` bytes, or says why it does not work.
    pub(crate) fn open(tools: &mut Tools<'_>, pin: Pin, len: u64) -> anyhow::Result<Self> {
        let mut port = None;
        let [mut ours, mut theirs] = tools.devices.clone();
        if tools.perftest && pin.is_rdma() {
            // perftest measures between two devices, so that is what we do.
            theirs = Some(tools.control.device(theirs)?);
            let chosen = Port::choose(ours.as_deref())?;
            ours = Some(chosen.device.clone());
            port = Some(chosen);
        }
        let open = Request::Open { pin: pin.to_string(), device: theirs };
        let metadata = tools.control.bytes(&open)?;
        let endpoint = serve::endpoint(pin, tools.ip, ours.clone())?;
        let peer = endpoint.connect(&metadata)?;
        let private = matches!(pin, Pin::LocalCma | Pin::LocalRing | Pin::Tcp) || pin.is_rdma();
        let shared = !private;
        let [here, there] = tools.places;
        let (descriptor, theirs) = tools.control.memory(there, len, shared, false)?;
        let remote = peer.import(&descriptor)?;
        // What this side reads from and writes to is an application's own memory on every path.
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
            port,
        };
        if session.memory != [Memory::Host; 2] {
            // The memory decides too, so that only a transfer tells.
            let first = Layout { size: len.min(256), iovs: 1, seed: 0 };
            session.name = session.took(session.batch(Op::Write, &first)?)?;
            // Where the first choice is no better than a path that can be named it is measured as that one, with
            // the memory and the limit that belong to it.
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

    /// Whether RDMA devices carry it.
    pub(crate) fn is_rdma(&self) -> bool {
        self.pin.is_rdma()
    }

    /// Closes it on both sides.
    pub(crate) fn close(self, tools: &mut Tools<'_>) -> anyhow::Result<()> {
        self.endpoint.close();
        tools.control.done(&Request::Close)
    }

    /// Measures one row, beside perftest where that is asked for, and compares the bytes.
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
                .context("with host memory, its limit")?;
        }
        let echo = match op {
            Op::Pingpong => {
                // What was written to see the path is no ping.
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
            // Whoever failed first knows why.
            tools.control.done(&Request::StopPong).context("on the other side")?;
        }
        let (figures, pairs) = measured?;
        self.compare(&mut tools.control, &layout, echo.as_ref())?;
        tools.dog.beat();
        let mut line = Line::new(&self.name, self.memory, op, &layout, &figures);
        if let Some(pairs) = pairs.as_ref().filter(|_| op != Op::Pingpong) {
            // Several were under way: bytes do not follow from the time of one.
            line.gbps = pairs.our_median();
        }
        Ok((line, pairs))
    }

    /// Times a row in turns with its limit.
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
            // SAFETY: the limit's other buffer has `total` bytes where both sides have host memory, which
            // `is_kernels` requires; nobody else knows of it and it outlives the value, a local of this
            // function; its rounds and those of the limit take turns.
            unsafe { Kernel::new(mate.as_ref(), theirs, to, total as usize) }
        });
        let mut limit: Option<Box<dyn Limit>> = match against {
            Against::Copies => {
                let from = self.local.addr() as usize;
                // SAFETY: the region and the limit's other buffer are separate, of the host by this kind of limit,
                // have at least `total` bytes and outlive the limit, a local of this function; while the limit
                // copies no transfer is under way, and the other buffer is the scratch buffer, which stays mutably
                // borrowed, or a region that nobody else knows. A region's address is exposed by
                // `Region::addr`.
                Some(Box::new(unsafe { Copies::new(mate.as_ref(), &layout, from, to) }))
            }
            Against::Sockets => {
                let address = control.raw(op, total)?;
                Some(Box::new(Sockets::new(address, op, scratch)?))
            }
            Against::Perftest => None,
            Against::Driver => {
                let driver = self.driver.as_ref().context("no GPU copies here")?;
                Some(Box::new(driver.limit(op, total)))
            }
            Against::HostMemory => {
                let HostPair { local, remote } =
                    self.host.as_ref().context("there is no host memory")?;
                let prepared = self.peer.prepare(batch(local, remote, op, &layout)?)?;
                Some(Box::new(SamePath::new(prepared, total)))
            }
        };
        let limit = limit.as_mut().map(|limit| &mut **limit as &mut dyn Limit);
        let share = if op == Op::Pingpong { 2 } else { 1 };
        let rounds = Rounds { watch, seconds: *seconds, bytes: total * share, share };
        let kernel = kernel.as_mut().map(|kernel| kernel as &mut dyn Limit);
        let cpu = || Ok(control.cpu_seconds()? + cpu_seconds());
        let beat = || dog.beat();
        match echo {
            Some(echo) => {
                let mut ping = self.ping(&layout, echo, seen)?;
                rounds.run(limit, kernel, || ping.once(), cpu, beat)
            }
            None => {
                let prepared = self.peer.prepare(self.batch(op, &layout)?)?;
                rounds.run(limit, kernel, || Ok(prepared.run()?.ok()?), cpu, beat)
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
                    return Err(error.context("perftest fails again and again"));
                }
                Err(_) => pairs.again += 1,
            }
        }
        let theirs = pairs.their_median();
        let figures = Figures {
            times: pairs.times.clone(),
            limit_gbps: Some(if pingpong { total as f64 / theirs / 1e3 } else { theirs }),
            kernel_gbps: None,
            cpu_s_per_gb: cpu / ((count * total) as f64 / 1e9),
        };
        Ok((figures, Some(pairs)))
    }

    /// What is measured once per path, beside the rows.
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

    /// Whether what bounds the row is the kernel's copy from one process to the other.
    fn is_kernels(&self, op: Op, layout: &Layout) -> bool {
        let large = layout.iovs == 1 && layout.size >= kernel::FROM;
        let host = self.memory == [Memory::Host; 2];
        self.name == "local-cma" && large && host && op != Op::Pingpong
    }

    /// The other side's buffer, where it can be read by the number that its process has for itself: in
    /// another PID namespace that is nobody's or somebody else's. A transfer has made both buffers equal.
    fn theirs(&self, control: &mut Control) -> anyhow::Result<Option<Theirs>> {
        let theirs = control.place()?;
        let (mut first, mut ours) = ([0; 4096], [0; 4096]);
        self.local.read_at(0, &mut ours)?;
        Ok(theirs.first(&mut first).is_ok_and(|()| first == ours).then_some(theirs))
    }

    /// Runs it once, and makes sure that it went the way that the row will be named after.
    fn ensure_path(&self, batch: Batch) -> anyhow::Result<()> {
        let took = self.took(batch)?;
        ensure!(took == self.name, "it went by {took}");
        Ok(())
    }

    /// Runs it once, and says which way it went.
    fn took(&self, batch: Batch) -> anyhow::Result<String> {
        let transfer = self.peer.post(&batch)?;
        transfer.join().ok()?;
        Ok(transfer.path().to_string())
    }

    /// Has the other side answer writes, into a new region of this side.
    /// How pings and pongs are seen.
    fn seen(&self, tools: &Tools<'_>, size: u64) -> Seen {
        Seen::on(&self.name, size, tools.counted)
    }

    fn ping(&self, layout: &Layout, echo: &Region, seen: Seen) -> anyhow::Result<Ping> {
        let what = (self.batch(Op::Pingpong, layout)?, &self.local, echo);
        Ping::new(&self.endpoint, &self.peer, what, layout.total(), seen)
    }

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
        ensure!(ours == theirs, "the bytes that arrived are not those that were sent");
        if let Some(echo) = echo {
            let back = pattern::checksum(echo, layout, Side::Client)?;
            ensure!(ours == back, "the bytes that came back are not those that were sent");
        }
        Ok(())
    }

    /// How long a connection takes, each from a new endpoint.
    fn connects(&self, tools: &mut Tools<'_>) -> anyhow::Result<Spread> {
        let mut times = Times::new();
        for _ in 0..CONNECTS {
            let endpoint = serve::endpoint(self.pin, tools.ip, self.device.clone())?;
            let start = Instant::now();
            endpoint.connect(&self.metadata)?;
            times.record(tools.watch.nanos(start, Instant::now()));
            endpoint.close();
            tools.dog.beat();
        }
        Ok(Spread::of(&times))
    }

    /// How long the posting call takes; `None` where the buffers are too small for it.
    fn posts(&self, tools: &mut Tools<'_>, layout: &Layout) -> anyhow::Result<Option<Spread>> {
        if layout.total() > self.local.len() {
            return Ok(None);
        }
        let mut times = Times::new();
        let prepared = self.peer.prepare(self.batch(Op::Write, layout)?)?;
        for _ in 0..POSTS {
            let start = Instant::now();
            let transfer = prepared.post()?;
            times.record(tools.watch.nanos(start, Instant::now()));
            transfer.join().ok()?;
            tools.dog.beat();
        }
        Ok(Some(Spread::of(&times)))
    }

    /// CPU seconds per second of both processes together, with the session open and nothing to do.
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

/// A row's transfer between two buffers.
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

/// Queue pairs that a transfer of that size is spread over, by the engine's rule.
fn queue_pairs(size: u64) -> anyhow::Result<u16> {
    let (config, _) = Config::from_env(|name| std::env::var(name).ok())?;
    Ok(if size > 64 << 10 { config.rdma.queue_pairs } else { 1 })
}
