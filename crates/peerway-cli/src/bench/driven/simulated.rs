//! CPU threads that push commands instead of kernels. A warp is a batch of 32 commands. All warps
//! share the CPU threads.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerway::Region;
use peerway::driven::{Command, HostProducer, Op, Proxy};

use super::producer::{Layers, Producer, Puts, Talk};
use crate::bench::measure::Times;

/// The most threads that push. More threads than CPUs would only wait.
const THREADS: u32 = 2;

/// See the module.
pub(super) struct Simulated<'a> {
    proxy: &'a Proxy,
}

impl<'a> Simulated<'a> {
    pub(super) fn new(proxy: &'a Proxy) -> Self {
        Self { proxy }
    }

    fn timed(
        &self,
        rounds: u64,
        mut once: impl FnMut(&HostProducer, u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<Times> {
        let producer = self.proxy.host_producer(0)?;
        let _armed = self.proxy.arm();
        let mut times = Times::new();
        for round in 0..rounds {
            let start = Instant::now();
            once(&producer, round)?;
            if round >= rounds / 20 {
                times.record((start.elapsed().as_nanos() as u64).max(1));
            }
        }
        Ok(times)
    }

    /// Pushes `batches` batches for each of `warps` warps. `batch` returns the commands of a batch.
    fn push_all(
        &self,
        warps: u32,
        batches: u64,
        batch: impl Fn(u32, u64) -> [[u64; 2]; 32] + Sync,
    ) -> anyhow::Result<()> {
        let threads = warps.clamp(1, THREADS);
        let batch = &batch;
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..threads)
                .map(|thread| {
                    scope.spawn(move || {
                        for warp in (thread..warps).step_by(threads as usize) {
                            let producer = self.proxy.host_producer(warp % self.proxy.rings())?;
                            for at in 0..batches {
                                producer.push_words(&batch(warp, at))?;
                            }
                        }
                        anyhow::Ok(())
                    })
                })
                .collect();
            let mut ends = started.into_iter().map(|thread| thread.join());
            ends.try_for_each(|end| {
                end.map_err(|_| anyhow::anyhow!("a pushing thread panicked"))?
            })
        })
    }
}

impl Producer for Simulated<'_> {
    fn push_one(&self, rounds: u64) -> anyhow::Result<Times> {
        self.timed(rounds, |producer, _| Ok(producer.push(Command::NOP).map(drop)?))
    }

    fn push_many(&self, rounds: u64) -> anyhow::Result<Times> {
        let batch = [Command::NOP.encode()?; 32];
        self.timed(rounds, |producer, _| Ok(producer.push_words(&batch).map(drop)?))
    }

    fn round_trip(&self, peer: u16, rounds: u64) -> anyhow::Result<Times> {
        self.timed(rounds, |producer, _| Ok(producer.quiet(peer)?))
    }

    fn flood(&self, warps: u32, commands: u64) -> anyhow::Result<u64> {
        let batches = commands.div_ceil(u64::from(warps) * 32);
        let nop = Command::NOP.encode()?;
        let _armed = self.proxy.arm();
        self.push_all(warps, batches, |_, _| [nop; 32])?;
        Ok(batches * u64::from(warps) * 32)
    }

    fn puts(&self, puts: &Puts) -> anyhow::Result<Duration> {
        let op = if puts.counter.is_some() { Op::PutCount } else { Op::Put };
        let whole = Command {
            op,
            peer: puts.peer,
            counter: puts.counter.unwrap_or(0),
            src: puts.src,
            dst: puts.dst,
            len: puts.len,
        };
        // Encode the command with the largest offsets first, so that a command that does not fit
        // fails here and not in a thread.
        let last = (puts.slots - 1) * puts.len;
        Command { src: whole.src + last, dst: whole.dst + last, ..whole }.encode()?;
        let each = u64::from(puts.warps) * 32;
        let batch = |warp: u32, at: u64| {
            std::array::from_fn(|lane| {
                let slot = (u64::from(warp) * 32 + lane as u64 + at * each) % puts.slots * puts.len;
                let command = Command { src: whole.src + slot, dst: whole.dst + slot, ..whole };
                command.encode().unwrap_or_default()
            })
        };
        let _armed = self.proxy.arm();
        let start = Instant::now();
        self.push_all(puts.warps, puts.batches, batch)?;
        for ring in 0..self.proxy.rings() {
            self.proxy.host_producer(ring)?.quiet(puts.peer)?;
        }
        Ok(start.elapsed())
    }

    fn fill(&self, region: &Region, seed: u32) -> anyhow::Result<()> {
        let words: Vec<u8> = pattern(region.len() / 4, seed);
        Ok(region.write_at(0, &words)?)
    }

    fn check(&self, region: &Region, len: u64, seed: u32) -> anyhow::Result<()> {
        let mut bytes = vec![0; len as usize / 4 * 4];
        region.read_at(0, &mut bytes)?;
        ensure!(
            bytes == pattern(len / 4, seed),
            "the received {len} bytes differ from the sent ones"
        );
        Ok(())
    }

    fn ping(&self, talk: &Talk<'_>) -> anyhow::Result<Times> {
        self.timed(talk.rounds, |producer, round| {
            let number = talk.first + round;
            talk.source.0.write_at(0, &pattern(talk.len / 4, number as u32))?;
            let (dst, src) = (talk.dst, talk.source.1);
            producer.put_with_count(talk.peer, dst, src, talk.len, talk.counter)?;
            producer.wait_counter(talk.counter, number + 1, Some(talk.peer))?;
            self.check(talk.landing, talk.len, !(number as u32)).context("wrong answer")
        })
    }

    fn pong(&self, talk: &Talk<'_>) -> anyhow::Result<()> {
        let answered = self.timed(talk.rounds, |producer, round| {
            let number = talk.first + round;
            talk.source.0.write_at(0, &pattern(talk.len / 4, !(number as u32)))?;
            producer.wait_counter(talk.counter, number + 1, Some(talk.peer))?;
            self.check(talk.landing, talk.len, number as u32).context("wrong message")?;
            let (dst, src) = (talk.dst, talk.source.1);
            producer.put_with_count(talk.peer, dst, src, talk.len, talk.counter)?;
            // The next round overwrites the source, so wait until the put has read it.
            Ok(producer.quiet(talk.peer)?)
        });
        answered.map(drop)
    }

    fn layers(&self, layers: &Layers<'_>) -> anyhow::Result<[Duration; 2]> {
        let producer = self.proxy.host_producer(0)?;
        let _armed = self.proxy.arm();
        let mut took = [Duration::ZERO; 2];
        for (sends, took) in [false, true].into_iter().zip(&mut took) {
            let start = Instant::now();
            for step in 0..layers.steps {
                for layer in 0..layers.layers {
                    let at = u64::from(layer) * layers.len;
                    let words = pattern(layers.len / 4, layer_seed(step, layer));
                    layers.memory.0.write_at(at, &words)?;
                    if sends {
                        let (dst, src) = (layers.dst + at, layers.memory.1 + at);
                        let counter = layers.counter + layer as u16;
                        producer.put_with_count(layers.peer, dst, src, layers.len, counter)?;
                    }
                }
                if sends {
                    producer.wait_counter(layers.taken, step + 1, Some(layers.peer))?;
                }
            }
            *took = start.elapsed();
        }
        Ok(took)
    }

    fn take_layers(&self, layers: &Layers<'_>) -> anyhow::Result<()> {
        let producer = self.proxy.host_producer(0)?;
        let _armed = self.proxy.arm();
        let mut bytes = vec![0; layers.len as usize];
        for step in 0..layers.steps {
            for layer in 0..layers.layers {
                let counter = layers.counter + layer as u16;
                producer.wait_counter(counter, step + 1, Some(layers.peer))?;
                layers.memory.0.read_at(u64::from(layer) * layers.len, &mut bytes)?;
                let right = bytes == pattern(layers.len / 4, layer_seed(step, layer));
                ensure!(right, "layer {layer} of step {step} differs from the sent bytes");
            }
            producer.signal(layers.peer, layers.taken)?;
        }
        Ok(producer.quiet(layers.peer)?)
    }

    fn relay(&self, talk: &Talk<'_>, answer: u16) -> anyhow::Result<Times> {
        self.timed(talk.rounds, |producer, round| {
            let (dst, src) = (talk.dst, talk.source.1);
            producer.put_with_count(talk.peer, dst, src, talk.len, talk.counter)?;
            Ok(producer.wait_counter(answer, talk.first + round + 1, Some(talk.peer))?)
        })
    }
}

/// The same pattern as in `driven.cu`.
fn pattern(words: u64, seed: u32) -> Vec<u8> {
    let word = |at: u64| (at as u32).wrapping_mul(2_654_435_761) ^ seed;
    (0..words).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// The seed of a layer's pattern in a step.
fn layer_seed(step: u64, layer: u32) -> u32 {
    (step * 1000 + u64::from(layer)) as u32
}
