//! `peerway bench`: what is measured, and the flags that choose it.
//!
//! One process asks, the other owns the memory that is read and written. Alone, the second process is
//! started here (`second`) and told what to do over its standard input; with two machines it is
//! `bench serve`, told the same over a TCP connection (`control`, `serve`). A path is opened by
//! `session`, its rows are timed by `measure` beside their limit (`copies`, `raw`; `kernel` for what bounds CMA; `perftest` for
//! RDMA devices; `device` and `same` for GPU memory), and the result is
//! printed by `report` and drawn by `plot`. `kinds` compares the kinds of GPU memory, `peer_copy` those who copy inside a GPU.

mod clock;
mod control;
mod copies;
mod device;
pub(crate) mod driven;
mod kernel;
mod kinds;
mod layout;
mod limit;
mod measure;
mod memory;
mod pattern;
mod peer_copy;
mod perftest;
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
mod watchdog;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use peerway::Pin;
use serde::{Deserialize, Serialize};

use memory::{Memory, Place};

/// What to measure and where to put the result.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  peerway bench                                     everything that works on this machine
  peerway bench --paths tcp --sizes 256,1M,100M     one path, three sizes
  peerway bench --sizes 4K --iovs 100000            a block list, scattered on both sides
  peerway bench --mode pingpong --sizes 256         half a round trip
  peerway bench --paths verbs --perftest --rdma-dev mlx5_0,mlx5_1   beside ib_write_bw
  peerway bench --memory gpu                        GPU memory on both sides
  peerway bench --memory pinned,gpu --op read       out of a GPU into pinned host memory
  peerway bench --memory-kinds                      what GPU memory that can be shared costs
  peerway bench peer-copy --sizes 4K                who copies lists inside a GPU best
  peerway bench serve                               one machine of two ...
  peerway bench connect 192.0.2.7:7400 --op read    ... and the other

Every row is timed in turns with its limit, the best that this machine does without an engine, and its
bytes are compared at the end; the definitions stand under the table. Large rows of local-cma are also
timed in turns with what bounds that path, the kernel's process_vm_readv by one and by two threads:
kernel_gbps in the JSON, null in other rows.

With GPU memory the limit of gpu-ipc is one copy of the same bytes by the driver inside one process;
on other paths it is the same path with host memory, so that the last column is the percentage of that.

Rows of RDMA devices have a limit only with --perftest: seven turns or more of ours and of perftest,
between the same two devices and with as many requests under way, of which the medians are compared."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
    #[command(flatten)]
    pub(crate) measure: Measure,
}

/// The side to take when the peer is on another machine, or another thing to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Wait for `peerway bench connect` from another machine.
    Serve {
        /// Where to listen. Further ports of the same address are opened for each run.
        #[arg(value_name = "ADDR", default_value = serve::DEFAULT_ADDRESS)]
        address: String,
    },
    /// Measure against `peerway bench serve` on another machine.
    Connect {
        /// Where the other side listens; port 7400 unless it is named.
        #[arg(value_name = "ADDR")]
        address: String,
        #[command(flatten)]
        measure: Box<Measure>,
    },
    /// Measure who copies lists of pieces inside a GPU best: a kernel for each list, a kernel that stays, the driver.
    PeerCopy(peer_copy::PeerCopy),
    /// The GPU-driven engine on one GPU: what a push costs, round trips, commands in a second.
    GpuLocal(Box<driven::LocalArgs>),
    /// The GPU-driven engine between two ranks: latency, puts in a second, arrivals that are forwarded.
    GpuRemote(Box<driven::RemoteArgs>),
    /// The second process of a run on one machine, told what to do over standard input.
    #[command(hide = true)]
    Second,
}

/// What is measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct Measure {
    /// Write the rows to FILE as JSON; `-` is standard output, and the table goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the rows to FILE as SVG.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Paths to measure [default: local-map,local-cma,local-ring,tcp, and verbs where there
    /// are RDMA devices; with GPU memory auto,local-ring,tcp; to another machine auto,tcp].
    #[arg(long, value_delimiter = ',', value_name = "PATH,...", value_parser = pin)]
    pub(crate) paths: Vec<Pin>,
    /// Sizes of one piece, such as 4K [default: 256,1K,4K,16K,64K,256K,1M,10M,16M,100M; with GPU
    /// memory 256,4K,64K,1M,16M,64M,256M].
    #[arg(long, value_delimiter = ',', value_name = "SIZE,...", value_parser = size::parse)]
    pub(crate) sizes: Vec<u64>,
    /// Pieces that a transfer is made of [default: 1,128, and 100000 of 4K]. More than 1024 go as a
    /// block list.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = pieces)]
    pub(crate) iovs: Vec<u32>,
    /// Operations to measure.
    #[arg(long, value_enum, default_value_t = Ops::Both)]
    pub(crate) op: Ops,
    /// Seconds for each row, three fifths of them for the transfers and the rest for the limit; the
    /// kernel's bound takes two fifths more where it is measured.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "0.6")]
    pub(crate) seconds: f64,
    /// Memory of this process and, after a comma, of the other one if it differs: host; gpu, in the
    /// best way that works; gpu-fd, shared as a file descriptor; gpu-plain, by cuMemAlloc; pinned, of
    /// the host for GPUs.
    #[arg(long, value_name = "LOCAL[,REMOTE]", value_parser = memories, default_value = "host")]
    pub(crate) memory: [Memory; 2],
    /// GPU of this process and, after a comma, of the other one if it differs, by number.
    #[arg(long, value_name = "N[,M]", value_parser = gpus, default_value = "0")]
    pub(crate) gpu: [u32; 2],
    /// Measure kinds of GPU memory instead, shared as a file descriptor and plain, in turns: allocating
    /// and freeing, copies inside a process, transfers to the other one.
    #[arg(long, conflicts_with_all = ["plot", "paths", "sizes", "iovs", "op", "memory", "mode"])]
    pub(crate) memory_kinds: bool,
    /// RDMA device of this process and, after a comma, of the other one, such as mlx5_0,mlx5_1
    /// [default: all that PEERWAY_RDMA_DEV leaves].
    #[arg(long, value_delimiter = ',', value_name = "DEV,DEV", num_args = 1)]
    pub(crate) rdma_dev: Vec<String>,
    /// Run perftest beside rows of RDMA devices: ib_write_bw and ib_read_bw from 64K on, and
    /// ib_write_lat with --mode pingpong. It must be installed on both sides.
    #[arg(long)]
    pub(crate) perftest: bool,
    /// Also measure what registering memory with RDMA devices costs, per GB and per lookup of memory
    /// that is registered.
    #[arg(long)]
    pub(crate) registration: bool,
    /// What to look at.
    #[arg(long, value_enum, default_value_t = Mode::Bandwidth)]
    pub(crate) mode: Mode,
    /// With --mode pingpong, wait for counters on every path; else, where RDMA devices write in order, for the
    /// last byte to change, as ib_write_lat does.
    #[arg(long)]
    pub(crate) counted: bool,
}

impl Measure {
    /// RDMA devices, ours and the other side's.
    pub(crate) fn devices(&self) -> [Option<String>; 2] {
        [self.rdma_dev.first().cloned(), self.rdma_dev.get(1).cloned()]
    }

    /// The memory of this side and of the other one.
    pub(crate) fn places(&self) -> [Place; 2] {
        [0, 1].map(|side| Place { memory: self.memory[side], gpu: self.gpu[side] })
    }

    /// Whether a side's memory is a GPU's.
    pub(crate) fn has_gpu(&self) -> bool {
        self.memory.iter().any(|memory| memory.is_gpu())
    }
}

/// Which operations are measured.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Ops {
    /// Into the peer's memory.
    Write,
    /// Out of the peer's memory.
    Read,
    /// One after the other.
    Both,
}

/// What a run looks at.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// The time of one transfer, and the bytes per second that follow from it.
    Bandwidth,
    /// A write that the other side answers with a write: half the time until the answer is there.
    Pingpong,
}

/// What a row measures.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Into the peer's memory.
    Write,
    /// Out of the peer's memory.
    Read,
    /// A write there and a write back.
    Pingpong,
}

impl Op {
    /// As it is printed.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Pingpong => "pingpong",
        }
    }
}

/// Runs the benchmark, or the side of it that was asked for.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    match args.role {
        None => run::alone(&args.measure),
        Some(Role::Serve { address }) => serve::listen(&address),
        Some(Role::Connect { address, measure }) => run::across(&address, &measure),
        Some(Role::PeerCopy(asked)) => peer_copy::run(&asked),
        Some(Role::GpuLocal(args)) => driven::run_local(&args),
        Some(Role::GpuRemote(args)) => driven::run_remote(&args),
        Some(Role::Second) => second::main(),
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
        text.parse().map_err(|_| "expected a GPU's number for both sides, or two".to_owned())
    };
    let [local, remote] = sides(text);
    Ok([number(local)?, number(remote)?])
}

/// One value is for both sides.
fn sides(text: &str) -> [&str; 2] {
    text.split_once(',').map_or([text, text], |(local, remote)| [local, remote])
}

/// A block list of four million entries is 16 MiB on each side: more says nothing new.
const MAX_PIECES: u32 = 1 << 22;

fn pieces(text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=MAX_PIECES).contains(count));
    count.ok_or_else(|| format!("expected a number from 1 to {MAX_PIECES}"))
}

fn seconds(text: &str) -> Result<f64, String> {
    // An hour for one row is surely a slip.
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
    }
}
