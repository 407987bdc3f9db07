//! `peerway bench`: the flags, and an overview of the modules.
//!
//! Two processes take part. The asking process (the client) posts the transfers. The serving
//! process owns the memory that they read and write. On one machine the client starts the serving
//! process (`second`) and sends requests over its standard input. With two machines the serving
//! process is `bench serve`, and the requests go over a TCP connection (`control`, `serve`).
//!
//! `session` opens a path. `measure` times its rows in turns with their `baseline`:
//!
//! - `copies` for local paths, `raw` for TCP, with the CPUs of `placement`;
//! - `perftest` for RDMA devices;
//! - `device` and `same` for GPU memory;
//! - `kernel` for the additional bound of CMA.
//!
//! `run` prints each row as it is done, by `report`. `interrupt` ends a run early. `outputs` writes
//! the JSON (`document`) and the picture (`plot`). `kinds` compares the kinds of GPU memory.
//! `peer_copy` compares the copiers inside a GPU. `data` compares the protections of TCP.

mod baseline;
mod clock;
mod control;
mod copies;
mod data;
mod device;
mod document;
pub(crate) mod driven;
pub(crate) mod interrupt;
mod kernel;
mod kinds;
mod layout;
mod measure;
mod memory;
mod outputs;
mod pattern;
mod peer_copy;
mod perftest;
mod placement;
mod plan;
mod plot;
mod pong;
mod raw;
mod report;
mod run;
mod same;
mod second;
mod serve;
mod session;
mod size;
mod stream;
pub(crate) mod text;
mod watchdog;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use peerway::Pin;
use serde::{Deserialize, Serialize};

use memory::{Memory, Place};

use crate::log;

/// What to measure and where to write the result.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  peerway bench                                 half a minute: a first look
  peerway bench --full                          five minutes: every size
  peerway bench --paths tcp --sizes 256,1M      one path, two sizes
  peerway bench --sizes 4K --iovs 100000        a block list, scattered
  peerway bench --mode pingpong --sizes 256     latency: half a round trip
  peerway bench --json rows.json --plot x.svg   rows for a program, a picture
  peerway bench --paths verbs --perftest        compare with ib_write_bw
  peerway bench --memory gpu                    GPU memory on both sides
  peerway bench --memory pinned,gpu --op read   GPU into pinned host memory
  peerway bench --memory-kinds                  cost of shareable GPU memory
  peerway bench peer-copy --sizes 4K            copiers inside a GPU
  peerway bench serve                           on one machine ...
  peerway bench connect 192.0.2.7 --op read     ... and on the other

Every row is timed in turns with its baseline: what this machine reaches
without an engine. The ratio to it has its lowest and highest value beside it.
The bytes are compared at the end of the row. The baselines are defined below
the table.

Large rows of local-cma are also timed in turns with the bound of that path:
process_vm_readv by one and by two threads (`kernel` in the JSON).

With GPU memory, the baseline of gpu-ipc is one copy of the same bytes by the
CUDA driver inside one process. On other paths it is the same path with host
memory.

Rows of RDMA devices have a baseline only with --perftest: at least seven turns
of Peerway and of perftest, on the same two devices and with the same number of
requests in flight.

Ctrl-C ends a run early: the rows that are done are kept, with `complete` false
in the JSON. A run that fails ends with one line that says why.
PEERWAY_LOG_LEVEL=warn also shows the engine's warnings, of both processes."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
    #[command(flatten)]
    pub(crate) measure: Measure,
}

/// The role of this process when the peer is on another machine, or another benchmark.
#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Wait for `peerway bench connect` from another machine.
    Serve {
        /// Address to listen on. Each run opens further ports of the same address.
        #[arg(value_name = "ADDR", default_value = serve::DEFAULT_ADDRESS)]
        address: String,
    },
    /// Measure against `peerway bench serve` on another machine.
    Connect {
        /// Address of `peerway bench serve`. The default port is 7400.
        #[arg(value_name = "ADDR")]
        address: String,
        #[command(flatten)]
        measure: Box<Measure>,
    },
    /// Compare the copiers inside a GPU: a kernel per list, a resident kernel, the driver's copies.
    PeerCopy(peer_copy::PeerCopy),
    /// Measure the GPU-driven engine on one GPU: push cost, round trips, commands per second.
    GpuLocal(Box<driven::LocalArgs>),
    /// Measure the GPU-driven engine between two ranks: latency, puts per second, forwarding.
    GpuRemote(Box<driven::RemoteArgs>),
    /// Measure what the protection of TCP connections costs (PEERWAY_DATA): off, integrity and
    /// encrypt in turns, beside openssl.
    Data(data::DataArgs),
    /// The second process of a run on one machine. It reads requests from standard input.
    #[command(hide = true)]
    Second,
}

/// What is measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct Measure {
    /// Measure every size, scattered pieces and a block list, and for each path the time to connect
    /// and to post, and the CPU time at rest.
    #[arg(long)]
    pub(crate) full: bool,
    /// Write the rows to FILE as JSON, with host, versions, date and settings. With `-`, the JSON
    /// goes to standard output and the table to standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the rows into FILE as SVG.
    #[arg(long, value_name = "FILE.svg", value_parser = svg_file)]
    pub(crate) plot: Option<PathBuf>,
    /// Paths to measure [default: local-map,local-cma,local-ring,tcp, and verbs if there are RDMA
    /// devices; with GPU memory auto,local-ring,tcp; to another machine auto,tcp].
    #[arg(long, value_delimiter = ',', value_name = "PATH,...", value_parser = pin)]
    pub(crate) paths: Vec<Pin>,
    /// Sizes of a piece, such as 4K [default: 256,4K,64K,1M,100M; with --full
    /// 256,1K,4K,16K,64K,256K,1M,10M,16M,100M, or for GPU memory 256,4K,64K,1M,16M,64M,256M].
    #[arg(long, value_delimiter = ',', value_name = "SIZE,...", value_parser = size::parse)]
    pub(crate) sizes: Vec<u64>,
    /// Pieces per transfer [default: 1; with --full 1,128, and 100000 of 4K]. More than 1024 pieces
    /// are sent as a block list.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = pieces)]
    pub(crate) iovs: Vec<u32>,
    /// Operations to measure.
    #[arg(long, value_enum, default_value_t = Ops::Both)]
    pub(crate) op: Ops,
    /// Seconds per row: three fifths for the transfers, two fifths for the baseline. The bound of
    /// local-cma takes another two fifths.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "0.5")]
    pub(crate) seconds: f64,
    /// Memory of this process and, after a comma, of the other process if it differs. One of host;
    /// gpu (the best kind that works); gpu-fd (shared as a file descriptor); gpu-plain
    /// (cuMemAlloc); pinned (host memory pinned for GPUs).
    #[arg(long, value_name = "LOCAL[,REMOTE]", value_parser = memories, default_value = "host")]
    pub(crate) memory: [Memory; 2],
    /// GPU number of this process and, after a comma, of the other process if it differs.
    #[arg(long, value_name = "N[,M]", value_parser = gpus, default_value = "0")]
    pub(crate) gpu: [u32; 2],
    /// Compare the kinds of GPU memory instead (gpu-fd and gpu-plain): allocation, copies inside
    /// one process, transfers to the other process.
    #[arg(long, conflicts_with_all = ["full", "plot", "paths", "sizes", "iovs", "op", "memory", "mode"])]
    pub(crate) memory_kinds: bool,
    /// RDMA device of this process and, after a comma, of the other process, such as mlx5_0,mlx5_1
    /// [default: all devices that PEERWAY_RDMA_DEV allows].
    #[arg(long, value_delimiter = ',', value_name = "DEV,DEV", num_args = 1)]
    pub(crate) rdma_dev: Vec<String>,
    /// Compare rows of RDMA devices with perftest: ib_write_bw and ib_read_bw from 64K on, and
    /// ib_write_lat with --mode pingpong. perftest must be installed on both sides.
    #[arg(long)]
    pub(crate) perftest: bool,
    /// Also measure the cost of registering memory with RDMA devices: per GB, and per lookup of
    /// registered memory.
    #[arg(long)]
    pub(crate) registration: bool,
    /// What to measure.
    #[arg(long, value_enum, default_value_t = Mode::Bandwidth)]
    pub(crate) mode: Mode,
    /// With --mode pingpong, detect arrivals by counters on every path. By default, small writes on
    /// verbs are detected by their last byte, as in ib_write_lat.
    #[arg(long)]
    pub(crate) counted: bool,
}

impl Measure {
    /// The RDMA devices of this side and of the other side.
    pub(crate) fn devices(&self) -> [Option<String>; 2] {
        [self.rdma_dev.first().cloned(), self.rdma_dev.get(1).cloned()]
    }

    /// The memory of this side and of the other side.
    pub(crate) fn places(&self) -> [Place; 2] {
        [0, 1].map(|side| Place { memory: self.memory[side], gpu: self.gpu[side] })
    }

    /// Whether at least one side uses GPU memory.
    pub(crate) fn has_gpu(&self) -> bool {
        self.memory.iter().any(|memory| memory.is_gpu())
    }
}

/// The operations to measure.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Ops {
    /// Write to the peer's memory.
    Write,
    /// Read the peer's memory.
    Read,
    /// Write, then read.
    Both,
}

/// What a run measures.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// The time of one transfer, and the resulting bytes per second.
    Bandwidth,
    /// Half the time of a round trip: a write, and a write back by the other side.
    Pingpong,
}

/// The operation of a row.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Write to the peer's memory.
    Write,
    /// Read the peer's memory.
    Read,
    /// A write, and a write back by the other side.
    Pingpong,
}

impl Op {
    /// The name in tables and messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Pingpong => "pingpong",
        }
    }
}

/// Runs the benchmark, or the role that the command line names.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    // The first process reports for both.
    if !matches!(args.role, Some(Role::Second)) {
        log::report_settings();
    }
    match args.role {
        None => run::alone(&args.measure),
        Some(Role::Serve { address }) => serve::listen(&address),
        Some(Role::Connect { address, measure }) => run::across(&address, &measure),
        Some(Role::PeerCopy(asked)) => peer_copy::run(&asked),
        Some(Role::GpuLocal(args)) => driven::run_local(&args),
        Some(Role::GpuRemote(args)) => driven::run_remote(&args),
        Some(Role::Data(args)) => data::run(&args),
        Some(Role::Second) => second::main(),
    }
}

/// A file whose name says that it is SVG, the only kind of picture that a plot can be.
fn svg_file(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(path.to_owned()),
        _ => Err(format!(
            "a plot is an SVG picture: name the file {}, and convert it afterwards if need be",
            path.with_extension("svg").display()
        )),
    }
}

fn pin(text: &str) -> Result<Pin, String> {
    text.parse().map_err(|_| format!("expected {}", Pin::ALLOWED))
}

fn memories(text: &str) -> Result<[Memory; 2], String> {
    let [local, remote] = sides(text);
    Ok([local.parse()?, remote.parse()?])
}

fn gpus(text: &str) -> Result<[u32; 2], String> {
    let number = |text: &str| {
        text.parse().map_err(|_| "expected one GPU number for both sides, or two".to_owned())
    };
    let [local, remote] = sides(text);
    Ok([number(local)?, number(remote)?])
}

/// Splits a value at the comma. A single value applies to both sides.
fn sides(text: &str) -> [&str; 2] {
    text.split_once(',').map_or([text, text], |(local, remote)| [local, remote])
}

/// A block list with this many entries takes 16 MiB on each side. Longer lists show nothing new.
const MAX_PIECES: u32 = 1 << 22;

fn pieces(text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=MAX_PIECES).contains(count));
    count.ok_or_else(|| format!("expected a number from 1 to {MAX_PIECES}"))
}

fn seconds(text: &str) -> Result<f64, String> {
    // More than an hour for one row is a typing error.
    let seconds = text.parse().ok().filter(|seconds| (0.001..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected seconds from 0.001 to 3600".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn parse(line: &str) -> Result<BenchArgs, clap::Error> {
        Line::try_parse_from(format!("bench {line}").split_whitespace()).map(|line| line.bench)
    }

    #[test]
    fn flags_choose_what_is_measured() {
        let args = parse("--paths tcp,local-cma --sizes 4K,1M --iovs 1,128 --op read").unwrap();
        assert_eq!(args.measure.paths, [Pin::Tcp, Pin::LocalCma]);
        assert_eq!(args.measure.sizes, [4096, 1 << 20]);
        assert_eq!(args.measure.iovs, [1, 128]);
        assert_eq!(args.measure.op, Ops::Read);
        assert_eq!(args.measure.memory, [Memory::Host; 2]);
        let args = parse("--memory gpu-plain,pinned --gpu 3").unwrap();
        assert_eq!(args.measure.memory, [Memory::GpuPlain, Memory::Pinned]);
        assert_eq!(args.measure.gpu, [3, 3]);
        assert!(args.measure.has_gpu());
        let args = parse("--memory gpu --gpu 1,0").unwrap();
        let place = |gpu| Place { memory: Memory::Gpu, gpu };
        assert_eq!(args.measure.places(), [place(1), place(0)]);
        let Some(Role::Connect { address, measure }) =
            parse("connect host --seconds 2").unwrap().role
        else {
            panic!("not a connect");
        };
        assert_eq!((address.as_str(), measure.seconds), ("host", 2.0));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for line in [
            "--paths pigeon",
            "--sizes 0",
            "--sizes 4X",
            "--iovs 0",
            "--iovs 5000000",
            "--seconds 0",
            "--seconds nan",
            "--plot x.png",
            "--plot x",
            "--memory-kinds --full",
            "--op copy",
            "--memory vram",
            "--memory gpu,host,gpu",
            "--memory ,gpu",
            "--gpu -1",
            "--memory-kinds --sizes 4K",
            "--gpu 0,1,2",
            "connect",
            "peer-copy --kinds pigeon",
            "peer-copy --tasks 0",
            "peer-copy --blocks 1000",
        ] {
            let error = parse(line).err().unwrap_or_else(|| panic!("{line} was accepted"));
            assert_eq!(error.exit_code(), 2, "{line}");
        }
        let error = parse("--plot some/x.png").err().unwrap().to_string();
        assert!(error.contains("an SVG picture") && error.contains("some/x.svg"), "{error}");
    }
}
