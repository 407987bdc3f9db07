//! `peerway bench peer-copy`: compares the copiers inside one GPU's memory.
//!
//! A row submits a list of tasks to a copier and polls the copier until the list is done. It
//! reports the latency of the whole list and the resulting bytes per second. For each list, the
//! copiers are measured one after the other. After a row, the first and the last bytes of the copy
//! are compared.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use peerway::gpu::{Copier, CopierKind, CopierOptions, DeviceMemory, DeviceMemoryOptions, Run};
use peerway::{Endpoint, Region};
use serde::Serialize;

use super::clock::Stopwatch;
use super::measure::{Times, timed};
use super::memory::{Memory, Place, once};
use super::outputs::Outputs;
use super::report::{figure, table, write_table};
use super::text::paragraph;
use super::watchdog::{self, Verdict, Watchdog};
use super::{seconds, size};
use crate::output;

/// The most bytes of a list. Longer lists show nothing new, and the GPU must have room for them.
const MOST: u64 = 1 << 30;
/// The most tasks of a list. Every copier accepts this many.
const MOST_TASKS: u32 = 2000;
/// Bytes to compare at either end.
const END: u64 = 4096;

/// What to measure and where to write the result.
#[derive(Clone, Debug, Args)]
pub(crate) struct PeerCopy {
    /// Number of the GPU that copies.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
    /// Write the rows to FILE as JSON. With `-`, the JSON goes to standard output and the table to
    /// standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Copiers to measure: launched (a kernel per list), resident (a kernel that keeps running),
    /// engines (the driver's copies).
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "KIND,...",
        default_value = "launched,resident,engines"
    )]
    kinds: Vec<CopierKind>,
    /// Bytes per task.
    #[arg(
        long, value_delimiter = ',', value_name = "SIZE,...", value_parser = size::parse,
        default_value = "256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
    )]
    sizes: Vec<u64>,
    /// Tasks per list. Lists of more than 1G are left out.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = tasks, default_value = "1,32,1024")]
    tasks: Vec<u32>,
    /// Thread blocks of the resident kernel.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = blocks, default_value = "2,8,16")]
    blocks: Vec<u32>,
    /// Seconds per row.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "0.2")]
    seconds: f64,
}

fn tasks(text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=MOST_TASKS).contains(count));
    count.ok_or_else(|| format!("expected a number from 1 to {MOST_TASKS}"))
}

fn blocks(text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=128).contains(count));
    count.ok_or_else(|| "expected a number from 1 to 128".to_owned())
}

/// The figures of one list with one copier.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    copier: String,
    /// Thread blocks of the resident kernel. `None` for other copiers.
    blocks: Option<u32>,
    /// Bytes per task.
    size: u64,
    tasks: u32,
    p50_us: f64,
    p99_us: f64,
    /// Bytes of the list divided by its median time.
    gbps: f64,
}

struct Report {
    gpu: u32,
    name: String,
    seconds: f64,
    rows: Vec<Row>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (version, Self { gpu, name, seconds, .. }) = (env!("CARGO_PKG_VERSION"), self);
        let head =
            format!("peerway {version} bench peer-copy: GPU {gpu} ({name}), {seconds} s a row");
        paragraph(f, &head)?;
        paragraph(
            f,
            "time from the submission of a list to its completion; GB/s at the median; GB = 10^9 \
             bytes, K = 1024",
        )?;
        writeln!(f)?;
        let mut table = table(&["copier", "size", "tasks", "p50 us", "p99 us", "GB/s"]);
        for row in &self.rows {
            let blocks = row.blocks.map_or(String::new(), |blocks| format!(" x{blocks}"));
            table.add_row([
                format!("{}{blocks}", row.copier),
                size::show(row.size),
                row.tasks.to_string(),
                figure(row.p50_us),
                figure(row.p99_us),
                figure(row.gbps),
            ]);
        }
        write_table(f, &mut table, 1)?;
        writeln!(f, "\nresident xN: a kernel of N blocks that keeps running")
    }
}

/// Measures all rows.
pub(crate) fn run(asked: &PeerCopy) -> anyhow::Result<()> {
    Place { memory: Memory::Gpu, gpu: asked.gpu }.check()?;
    let devices = peerway::gpu::devices().map_err(once)?;
    let name = devices.get(asked.gpu as usize).map_or(String::new(), |facts| facts.name.clone());
    let lists: Vec<(u64, u32)> = asked
        .sizes
        .iter()
        .flat_map(|size| asked.tasks.iter().map(move |tasks| (*size, *tasks)))
        .filter(|(size, tasks)| size.saturating_mul(u64::from(*tasks)) <= MOST)
        .collect();
    let largest = lists.iter().map(|(size, tasks)| size * u64::from(*tasks)).max();
    let largest = largest.context("every list is larger than 1G")?;
    let outputs = Outputs::open(asked.json.as_deref(), None)?;
    let patience = watchdog::PATIENCE + std::time::Duration::from_secs_f64(asked.seconds);
    let dog = Watchdog::start(
        patience,
        || None,
        |Verdict(why)| {
            output::report_line(format_args!("peerway: {why}"));
            // A thread that hangs cannot be stopped, so the process exits.
            std::process::exit(1);
        },
    );
    dog.begin("buffers".to_owned());
    let ends = Ends::new(asked.gpu, largest)?;
    let mut copiers = Vec::new();
    for kind in &asked.kinds {
        let widths: &[u32] = if *kind == CopierKind::Resident { &asked.blocks } else { &[0] };
        for blocks in widths {
            let mut options = CopierOptions::default();
            if *blocks > 0 {
                options.blocks = *blocks;
            }
            dog.begin(format!("{kind} with {blocks} blocks"));
            let copier = Copier::new(asked.gpu, *kind, &options).map_err(once)?;
            copiers.push((copier, Some(*blocks).filter(|blocks| *blocks > 0)));
        }
    }
    let watch = Stopwatch::new();
    let mut rows = Vec::new();
    for (size, tasks) in lists {
        let list: Vec<Run> = (0..u64::from(tasks)).map(|n| ends.run(n * size, size)).collect();
        let total = size * u64::from(tasks);
        for (copier, blocks) in &mut copiers {
            dog.begin(format!("{tasks} of {} by {}", size::show(size), copier.kind()));
            ends.clear(total)?;
            let mut times = Times::new();
            let budget = std::time::Duration::from_secs_f64(asked.seconds);
            timed(budget, &watch, 1, &mut times, || {
                // SAFETY: `ends` owns both buffers and outlives the copiers, which are dropped
                // below. Nothing else uses the buffers until the list is done.
                let ticket = unsafe { copier.submit(&list) }.map_err(once)?;
                let ticket = ticket.context("an idle copier has no room for the list")?;
                while copier.poll().map_err(once)? < ticket {
                    std::hint::spin_loop();
                }
                Ok(())
            })?;
            ends.compare(total).with_context(|| format!("{} of {size} by {copier:?}", tasks))?;
            let p50 = times.p50();
            rows.push(Row {
                copier: copier.kind().to_string(),
                blocks: *blocks,
                size,
                tasks,
                p50_us: p50 / 1e3,
                p99_us: times.p99() / 1e3,
                gbps: total as f64 / p50,
            });
        }
    }
    // Dropping a copier waits for its copies in the buffers.
    drop(copiers);
    drop(dog);
    let report = Report { gpu: asked.gpu, name, seconds: asked.seconds, rows };
    outputs.rows(&report.to_string(), &report.rows)
}

/// The source and the destination of the copies, each with its address.
struct Ends {
    from: (u64, Region),
    to: (u64, Region),
    _endpoint: Endpoint,
}

impl Ends {
    fn new(gpu: u32, len: u64) -> anyhow::Result<Self> {
        let endpoint = Endpoint::builder().build()?;
        let buffer = || {
            let options = DeviceMemoryOptions::default().zeroed();
            let memory = DeviceMemory::allocate(gpu, len, &options).map_err(once)?;
            let address = memory.address();
            anyhow::Ok((address, endpoint.register_gpu(memory)?))
        };
        let (from, to) = (buffer()?, buffer()?);
        Ok(Self { from, to, _endpoint: endpoint })
    }

    fn run(&self, at: u64, len: u64) -> Run {
        Run { src: self.from.0 + at, dst: self.to.0 + at, len }
    }

    /// The offsets and lengths of the first and the last bytes out of `total`.
    fn ends(total: u64) -> [(u64, usize); 2] {
        let len = total.min(END);
        [(0, len as usize), (total - len, len as usize)]
    }

    /// Writes different bytes to both ends of the source and of the destination.
    fn clear(&self, total: u64) -> anyhow::Result<()> {
        for (at, len) in Self::ends(total) {
            let bytes: Vec<u8> = (0..len).map(|n| (n as u8) ^ (at >> 12) as u8).collect();
            self.from.1.write_at(at, &bytes)?;
            self.to.1.write_at(at, &vec![0x5a; len])?;
        }
        Ok(())
    }

    fn compare(&self, total: u64) -> anyhow::Result<()> {
        for (at, len) in Self::ends(total) {
            let (mut put, mut came) = (vec![0; len], vec![0; len]);
            self.from.1.read_at(at, &mut put)?;
            self.to.1.read_at(at, &mut came)?;
            ensure!(
                put == came,
                "the destination differs from the source at offset {at} ({len} bytes compared)"
            );
        }
        Ok(())
    }
}
