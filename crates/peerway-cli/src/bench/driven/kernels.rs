//! Kernels that push commands: the engine's `driven.cu`.

use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use peerway::Region;
use peerway::driven::{KERNELS, Proxy};
use peerway::gpu::{DeviceMemory, DeviceMemoryOptions};
use peerway_sys::Library;
use peerway_sys::cuda::{Cuda, CudaError, Function, Gpu, Graph, Grid, Module, Stream};

use super::producer::{Layers, Producer, Puts, Talk};
use crate::bench::measure::Times;
use crate::bench::memory::once;

/// See the module.
pub(super) struct Kernels<'a> {
    proxy: &'a Proxy,
    gpu: Arc<Gpu>,
    module: Module,
    stream: Stream,
    /// Memory that kernels write: two clocks, a status, a count of wrong words, a step, times.
    scratch: DeviceMemory,
}

// Offsets in the scratch memory. The clocks are at offset 0.
const STATUS: u64 = 16;
const BAD: u64 = 32;
/// The current step of a graph.
const STEP: u64 = 48;
const TIMES: u64 = 64;
/// How many times fit into the scratch memory.
const MOST: u64 = 1 << 20;

impl<'a> Kernels<'a> {
    pub(super) fn new(proxy: &'a Proxy, ordinal: u32) -> anyhow::Result<Self> {
        let cuda = Cuda::load(Library::Cuda.named())?;
        let gpu = Gpu::open(&cuda, ordinal)?;
        // SAFETY: `KERNELS` is valid PTX, which is part of the engine.
        let module = unsafe { Module::load(&gpu, KERNELS.to_bytes_with_nul()) }?;
        let stream = Stream::new(&gpu)?;
        let options = DeviceMemoryOptions::default();
        let scratch = DeviceMemory::allocate(ordinal, TIMES + 8 * MOST, &options).map_err(once)?;
        Ok(Self { proxy, gpu, module, stream, scratch })
    }

    fn at(&self, offset: u64) -> u64 {
        self.scratch.address() + offset
    }

    /// Launches a kernel and waits for it. Returns the time from the launch to the end.
    ///
    /// A status other than zero is an error.
    fn run(
        &self,
        name: &CStr,
        blocks: u32,
        threads: u32,
        arguments: &[u64],
    ) -> anyhow::Result<Duration> {
        let function = self.module.function(name)?;
        self.timed_work(name, || Ok(self.launch(function, blocks, threads, arguments)?))
    }

    fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        arguments: &[u64],
    ) -> Result<(), CudaError> {
        // A kernel reads the first four bytes of a four-byte argument. These are the low ones,
        // because GPU and CPU are little-endian.
        let mut arguments: Vec<*mut c_void> =
            arguments.iter().map(|argument| (&raw const *argument).cast_mut().cast()).collect();
        let stream = self.stream.raw();
        let grid = Grid::row(blocks, threads);
        // SAFETY: every caller passes the arguments of this kernel. The callers' regions and
        // `scratch` outlive the kernel, because every caller waits for the stream and `Drop` waits
        // again.
        unsafe { self.module.launch(function, grid, stream, &mut arguments) }
    }

    /// Enqueues work on the stream with `work` and waits for it. Returns the time from start to
    /// end.
    fn timed_work(
        &self,
        name: &CStr,
        work: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        // SAFETY: `scratch` has more than `TIMES` bytes and belongs to this value.
        unsafe { self.gpu.fill(self.at(0), 0, TIMES as usize, self.stream.raw())? };
        self.stream.synchronize()?;
        let _armed = self.proxy.arm();
        let start = Instant::now();
        work()?;
        self.stream.synchronize()?;
        let took = start.elapsed();
        let [status, bad] = [self.word(STATUS)?, self.word(BAD)?];
        let fault =
            || self.proxy.take_fault().map_or_else(String::new, |fault| format!("; {fault}"));
        ensure!(status == 0, "{name:?}: a peerway call returned status {status}{}", fault());
        ensure!(bad == 0, "{name:?}: {bad} received words differ from the sent ones");
        Ok(took)
    }

    fn word(&self, offset: u64) -> anyhow::Result<u32> {
        let mut word = 0u32;
        self.read(offset, (&raw mut word).cast(), 4)?;
        Ok(word)
    }

    fn read(&self, offset: u64, to: *mut u8, len: usize) -> anyhow::Result<()> {
        // SAFETY: `scratch` has `len` bytes at `offset`. The caller's buffer has `len` bytes and
        // outlives the wait below.
        unsafe { self.gpu.copy(to as u64, self.at(offset), len, self.stream.raw())? };
        Ok(self.stream.synchronize()?)
    }

    /// The times that the last kernel wrote, in nanoseconds. The kernel measures in cycles, and
    /// also writes its total in cycles and in nanoseconds.
    fn times(&self, rounds: u64) -> anyhow::Result<Times> {
        let mut clocks = [0u64; 2];
        self.read(0, clocks.as_mut_ptr().cast(), 16)?;
        let mut cycles = vec![0u64; rounds as usize];
        self.read(TIMES, cycles.as_mut_ptr().cast(), cycles.len() * 8)?;
        let per_cycle = clocks[1] as f64 / clocks[0].max(1) as f64;
        let mut times = Times::new();
        // Skip the first times, which include cold caches.
        cycles.iter().skip(cycles.len() / 20).for_each(|cycles| {
            times.record(((*cycles as f64 * per_cycle) as u64).max(1));
        });
        Ok(times)
    }

    fn timed(&self, name: &CStr, threads: u32, rounds: u64) -> anyhow::Result<Times> {
        let rounds = rounds.min(MOST);
        let (proxy, times, clocks, status) =
            (self.proxy.handle(), self.at(TIMES), self.at(0), self.at(STATUS));
        let arguments = [proxy, rounds, times, clocks, status];
        self.run(name, 1, threads, &arguments)?;
        self.times(rounds)
    }
}

impl Producer for Kernels<'_> {
    fn push_one(&self, rounds: u64) -> anyhow::Result<Times> {
        self.timed(c"driven_push_one", 1, rounds)
    }

    fn push_many(&self, rounds: u64) -> anyhow::Result<Times> {
        self.timed(c"driven_push_warp", 32, rounds)
    }

    fn round_trip(&self, peer: u16, rounds: u64) -> anyhow::Result<Times> {
        let rounds = rounds.min(MOST);
        let (proxy, times, clocks, status) =
            (self.proxy.handle(), self.at(TIMES), self.at(0), self.at(STATUS));
        let arguments = [proxy, u64::from(peer), rounds, times, clocks, status];
        self.run(c"driven_round_trip", 1, 1, &arguments)?;
        self.times(rounds)
    }

    fn flood(&self, warps: u32, commands: u64) -> anyhow::Result<u64> {
        let batches = commands.div_ceil(u64::from(warps) * 32);
        let arguments = [self.proxy.handle(), batches, self.at(STATUS)];
        let (blocks, threads) = grid(warps);
        self.run(c"driven_flood", blocks, threads, &arguments)?;
        Ok(batches * u64::from(blocks * threads))
    }

    fn puts(&self, puts: &Puts) -> anyhow::Result<Duration> {
        let (blocks, threads) = grid(puts.warps);
        let counter = puts.counter.map_or(0xffff_ffff, u64::from);
        let arguments = [
            self.proxy.handle(),
            u64::from(puts.peer),
            puts.dst,
            puts.src,
            puts.len,
            puts.len,
            puts.slots,
            puts.batches,
            counter,
            self.at(STATUS),
        ];
        self.run(c"driven_puts", blocks, threads, &arguments)
    }

    fn fill(&self, region: &Region, seed: u32) -> anyhow::Result<()> {
        let arguments = [region.addr(), region.len() / 4, seed.into()];
        self.run(c"driven_fill", 256, 256, &arguments).map(drop)
    }

    fn check(&self, region: &Region, len: u64, seed: u32) -> anyhow::Result<()> {
        let arguments = [region.addr(), len / 4, seed.into(), self.at(BAD)];
        self.run(c"driven_check", 256, 256, &arguments).map(drop)
    }

    fn ping(&self, talk: &Talk<'_>) -> anyhow::Result<Times> {
        let rounds = talk.rounds.min(MOST);
        let arguments = [
            self.proxy.handle(),
            u64::from(talk.peer),
            talk.dst,
            talk.source.1,
            talk.source.0.addr(),
            talk.landing.addr(),
            talk.len,
            u64::from(talk.counter),
            talk.first,
            rounds,
            self.at(TIMES),
            self.at(0),
            self.at(BAD),
            self.at(STATUS),
        ];
        self.run(c"driven_ping", 1, 256, &arguments)?;
        self.times(rounds)
    }

    fn pong(&self, talk: &Talk<'_>) -> anyhow::Result<()> {
        let arguments = [
            self.proxy.handle(),
            u64::from(talk.peer),
            talk.dst,
            talk.source.1,
            talk.source.0.addr(),
            talk.landing.addr(),
            talk.len,
            u64::from(talk.counter),
            talk.first,
            talk.rounds.min(MOST),
            self.at(BAD),
            self.at(STATUS),
        ];
        self.run(c"driven_pong", 1, 256, &arguments).map(drop)
    }

    fn layers(&self, layers: &Layers<'_>) -> anyhow::Result<[Duration; 2]> {
        let [layer, alone, next] = [c"driven_layer", c"driven_layer_alone", c"driven_next_step"]
            .map(|name| self.module.function(name));
        let (layer, alone, next) = (layer?, alone?, next?);
        let (step, status, peer) = (self.at(STEP), self.at(STATUS), u64::from(layers.peer));
        let step_through = |proxy: u64| {
            for number in 0..u64::from(layers.layers) {
                let at = number * layers.len;
                let memory = layers.memory.0.addr() + at;
                if proxy == 0 {
                    self.launch(alone, 1, 256, &[memory, layers.len, step, number])?;
                    continue;
                }
                let (dst, src) = (layers.dst + at, layers.memory.1 + at);
                let counter = u64::from(layers.counter) + number;
                let arguments =
                    [proxy, peer, dst, src, memory, layers.len, counter, step, number, status];
                self.launch(layer, 1, 256, &arguments)?;
            }
            self.launch(next, 1, 1, &[proxy, peer, layers.taken.into(), step, status])
        };
        let mut took = [Duration::ZERO; 2];
        for (proxy, took) in [0, self.proxy.handle()].into_iter().zip(&mut took) {
            let graph = Graph::capture(&self.stream, || step_through(proxy))?;
            *took = self.timed_work(c"driven_layer", || {
                for _ in 0..layers.steps {
                    graph.launch(&self.stream)?;
                }
                Ok(())
            })?;
        }
        Ok(took)
    }

    fn take_layers(&self, layers: &Layers<'_>) -> anyhow::Result<()> {
        let arguments = [
            self.proxy.handle(),
            layers.peer.into(),
            layers.memory.0.addr(),
            layers.len,
            layers.layers.into(),
            layers.counter.into(),
            layers.taken.into(),
            layers.steps,
            self.at(BAD),
            self.at(STATUS),
        ];
        self.run(c"driven_consume", 1, 1024, &arguments).map(drop)
    }

    fn relay(&self, talk: &Talk<'_>, answer: u16) -> anyhow::Result<Times> {
        let rounds = talk.rounds.min(MOST);
        let arguments = [
            self.proxy.handle(),
            u64::from(talk.peer),
            talk.dst,
            talk.source.1,
            talk.len,
            u64::from(talk.counter),
            u64::from(answer),
            talk.first,
            rounds,
            self.at(TIMES),
            self.at(0),
            self.at(STATUS),
        ];
        self.run(c"driven_relay", 1, 1, &arguments)?;
        self.times(rounds)
    }
}

impl Drop for Kernels<'_> {
    fn drop(&mut self) {
        // After a failed wait a kernel may still run. Wait for it before the memory is freed.
        let _ = self.stream.synchronize();
    }
}

/// Blocks and threads per block for `warps` warps, at most four per block.
fn grid(warps: u32) -> (u32, u32) {
    let each = warps.clamp(1, 4);
    (warps.div_ceil(each), each * 32)
}
