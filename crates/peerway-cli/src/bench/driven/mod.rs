//! `bench gpu-local` and `bench gpu-remote`: the GPU-driven engine.
//!
//! Kernels push the commands. With `--simulate`, CPU threads push them instead, and everything else
//! is the same.

mod kernels;
mod local;
mod producer;
mod remote;
mod report;
mod simulated;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use peerway::Pin;
use peerway::gpu::CopierKind;

pub(crate) use local::run as run_local;
pub(crate) use remote::run as run_remote;

/// What pushes the commands: kernels of a GPU, or CPU threads.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Who {
    /// Number of the GPU whose kernels push commands.
    #[arg(long, value_name = "N", default_value = "0")]
    gpu: u32,
    /// Push commands from CPU threads instead of kernels. Needs no GPU.
    #[arg(long, conflicts_with = "gpu")]
    simulate: bool,
}

impl Who {
    fn gpu(self) -> Option<u32> {
        (!self.simulate).then_some(self.gpu)
    }
}

/// What `bench gpu-local` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct LocalArgs {
    #[command(flatten)]
    who: Who,
    /// Threads of the proxy. Each value is one run.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4")]
    threads: Vec<usize>,
    /// Warps that push at the same time. Each value is one run.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "8,32,128,512")]
    warps: Vec<u32>,
    /// Slots per ring. Each value is one run.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "2048")]
    slots: Vec<u32>,
    /// Rings per proxy thread.
    #[arg(long, value_name = "N", default_value = "8")]
    rings: usize,
    /// Commands per run.
    #[arg(long, value_name = "N", default_value = "20000000")]
    commands: u64,
    /// Timed round trips, and timed single pushes.
    #[arg(long, value_name = "N", default_value = "20000")]
    rounds: u64,
    /// Write the rows to FILE as JSON. With `-`, the JSON goes to standard output and the table to
    /// standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What `bench gpu-remote` measures, and the rank of this process.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples, on two machines or in two shells of one machine:
  peerway bench gpu-remote --rank 1 --peer 192.0.2.1     start the receiver ...
  peerway bench gpu-remote --rank 0 --peer 192.0.2.2     ... and the sender, which prints the table
  peerway bench gpu-remote --simulate                    both on this machine, without a GPU

Two processes on one GPU alternate in time slices of milliseconds, unless CUDA MPS runs.")]
pub(crate) struct RemoteArgs {
    /// Rank of this process: 0 sends and prints, 1 receives. Without --rank, this process is rank 0
    /// and starts rank 1 on this machine.
    #[arg(long, value_name = "0|1", value_parser = clap::value_parser!(u8).range(0..=1), requires = "peer")]
    pub(crate) rank: Option<u8>,
    /// Address of the other rank.
    #[arg(long, value_name = "ADDR", requires = "rank")]
    pub(crate) peer: Option<String>,
    #[command(flatten)]
    pub(crate) measure: RemoteMeasure,
}

/// What is measured between two ranks.
#[derive(Clone, Debug, Args)]
pub(crate) struct RemoteMeasure {
    /// Port that rank 1 listens on.
    #[arg(long, value_name = "PORT", default_value = "7410")]
    port: u16,
    #[command(flatten)]
    who: Who,
    /// Path between the two ranks [default: the best path].
    #[arg(long, value_name = "PATH", value_parser = super::pin)]
    path: Option<Pin>,
    /// Sizes of a put.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = super::size::parse, default_value = "256,8K,64K")]
    sizes: Vec<u64>,
    /// Warps that push at the same time.
    #[arg(long, value_name = "N", default_value = "32")]
    warps: u32,
    /// Threads of each proxy.
    #[arg(long, value_name = "N", default_value = "4")]
    threads: usize,
    /// How the GPU copies between buffers that it can access: launched, resident or engines.
    #[arg(long, value_name = "KIND", default_value = "launched")]
    copier: CopierKind,
    /// Puts per run.
    #[arg(long, value_name = "N", default_value = "200000")]
    puts: u64,
    /// Timed round trips.
    #[arg(long, value_name = "N", default_value = "2000")]
    rounds: u64,
    /// Buffers to which the receiver forwards each arrival before it answers. 0 skips this test.
    #[arg(long, value_name = "N", default_value = "2")]
    forward: u32,
    /// Layers of a model that runs as a captured graph and sends each layer as soon as it is
    /// written. 0 skips this test.
    #[arg(long, value_name = "N", default_value = "80", value_parser = clap::value_parser!(u32).range(0..=200))]
    layers: u32,
    /// Bytes per layer.
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse, default_value = "64K")]
    layer_size: u64,
    /// Steps of the model.
    #[arg(long, value_name = "N", default_value = "1000")]
    steps: u64,
    /// Write the rows to FILE as JSON. With `-`, the JSON goes to standard output and the table to
    /// standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The time-out of every wait in a kernel. No operation of these benchmarks takes this long.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Sets `CUDA_DEVICE_MAX_CONNECTIONS`, so that waiting kernels do not block copies. Must be called
/// before CUDA is initialised.
fn have_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: both callers are subcommands that call this first, before they start a thread. No
        // other thread can read the environment.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}
