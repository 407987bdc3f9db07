//! Compares two kinds of GPU memory: `cuMemCreate` memory, shared as a file descriptor, and plain
//! `cuMemAlloc` memory.
//!
//! Rounds of the two kinds alternate, so that a disturbance of the machine affects both. The result
//! shows whether shareable memory costs anything on a machine without a fabric.

use std::time::Duration;

use anyhow::ensure;
use peerway::{Batch, Pin, Prepared};

use super::control::Request;
use super::device::Driver;
use super::measure::{Times, timed};
use super::memory::{Memory, Place};
use super::report::kinds::{Row, What};
use super::session::Tools;
use super::{Op, serve, size};

/// The compared kinds. The second is the baseline.
pub(crate) const KINDS: [Memory; 2] = [Memory::GpuFd, Memory::GpuPlain];

/// Bytes to allocate and free: the granularity of such memory, and the size of a tensor.
const ALLOCATED: [u64; 2] = [2 << 20, 64 << 20];
/// Bytes to copy and transfer: large enough that only bandwidth counts.
const COPIED: [u64; 2] = [64 << 20, 256 << 20];

/// Rounds per figure, as for rows of transfers.
const ROUNDS: u32 = 5;

/// Measures all figures between these two GPUs.
pub(crate) fn measure(tools: &mut Tools<'_>, gpus: [u32; 2]) -> anyhow::Result<Vec<Row>> {
    let places = KINDS.map(|memory| gpus.map(|gpu| Place { memory, gpu }));
    let mut rows = Vec::new();
    for size in ALLOCATED {
        let figures = in_turns(tools, What::AllocFree, size, |kind| {
            places[kind][0].on_gpu(size, &[]).map(drop)
        })?;
        rows.extend(figures);
    }
    let largest = COPIED[1];
    {
        let drivers = [Driver::new(places[0], largest)?, Driver::new(places[1], largest)?];
        for size in COPIED {
            let once = |kind: usize| drivers[kind].copy(Op::Write, size);
            rows.extend(in_turns(tools, What::Copy, size, once)?);
        }
    }
    let open = Request::Open { pin: Pin::Auto.to_string(), device: None, cpus: None };
    let metadata = tools.control.bytes(&open)?;
    let endpoint = serve::endpoint(Pin::Auto, tools.ip, None, None)?;
    let peer = endpoint.connect(&metadata)?;
    let mut pairs = Vec::new();
    for [here, there] in places {
        let (descriptor, _) = tools.control.memory(there, largest, true, true)?;
        let (local, _) = here.region(&endpoint, largest, false)?;
        pairs.push((local, peer.import(&descriptor)?));
    }
    for what in [What::IpcWrite, What::IpcRead] {
        for size in COPIED {
            let mut prepared: Vec<Prepared> = Vec::new();
            for (local, remote) in &pairs {
                let (local, remote) = (local.slice(0..size), remote.slice(0..size));
                let batch = match what {
                    What::IpcRead => Batch::read(&local, &remote)?,
                    _ => Batch::write(&local, &remote)?,
                };
                let transfer = peer.post(&batch)?;
                transfer.join().ok()?;
                let took = transfer.path().to_string();
                ensure!(took == "gpu-ipc", "{} took the path {took}", what.name());
                prepared.push(peer.prepare(batch)?);
            }
            let once = |kind: usize| Ok(prepared[kind].run()?.ok()?);
            rows.extend(in_turns(tools, what, size, once)?);
        }
    }
    endpoint.close();
    tools.control.done(&Request::Close)?;
    Ok(rows)
}

/// Times one operation with each kind of memory, in alternating rounds.
fn in_turns(
    tools: &mut Tools<'_>,
    what: What,
    size: u64,
    mut once: impl FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Row>> {
    tools.dog.begin(format!("{} of {}", what.name(), size::show(size)));
    let budget = tools.seconds / f64::from(ROUNDS) / KINDS.len() as f64;
    let budget = Duration::from_secs_f64(budget);
    let mut times = KINDS.map(|_| Times::new());
    for _ in 0..ROUNDS {
        for (kind, times) in times.iter_mut().enumerate() {
            timed(budget, &tools.watch, 1, times, || once(kind))?;
            tools.dog.beat();
        }
    }
    Ok(KINDS.iter().zip(&times).map(|(kind, times)| Row::new(what, size, *kind, times)).collect())
}
