//! `bench gpu-local` and `bench gpu-remote`: the GPU-driven engine. Commands are pushed by kernels, or with `--simulate` by processors
//! in their place; everything else is the same.

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

/// Who pushes.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Who {
    /// GPU whose kernels push, by number.
    #[arg(long, value_name = "N", default_value = "0")]
    gpu: u32,
    /// Let processors push in the place of kernels: needs no GPU.
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
    /// Threads of the proxy, one run for each.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4")]
    threads: Vec<usize>,
    /// Warps that push at once, one run for each.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "8,32,128,512")]
    warps: Vec<u32>,
    /// Slots of a ring, one run for each.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "2048")]
    slots: Vec<u32>,
    /// Rings for each thread.
    #[arg(long, value_name = "N", default_value = "8")]
    rings: usize,
    /// Commands of a run.
    #[arg(long, value_name = "N", default_value = "20000000")]
    commands: u64,
    /// Round trips, and pushes that are timed one by one.
    #[arg(long, value_name = "N", default_value = "20000")]
    rounds: u64,
    /// Write the rows to FILE as JSON; `-` is standard output, and the table goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What `bench gpu-remote` measures, and with whom.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples, on two machines or in two shells of one:
  peerway bench gpu-remote --rank 1 --peer 192.0.2.1     the receiver ...
  peerway bench gpu-remote --rank 0 --peer 192.0.2.2     ... and the sender, which prints the table
  peerway bench gpu-remote --simulate                    both, in processes of this machine, without a GPU

Two processes on one GPU are served in turns of milliseconds unless CUDA's MPS runs.")]
pub(crate) struct RemoteArgs {
    /// 0 sends and prints, 1 receives. Without it a second process is started here for rank 1.
    #[arg(long, value_name = "0|1", value_parser = clap::value_parser!(u8).range(0..=1), requires = "peer")]
    pub(crate) rank: Option<u8>,
    /// The other rank's address.
    #[arg(long, value_name = "ADDR", requires = "rank")]
    pub(crate) peer: Option<String>,
    #[command(flatten)]
    pub(crate) measure: RemoteMeasure,
}

/// What is measured between two ranks.
#[derive(Clone, Debug, Args)]
pub(crate) struct RemoteMeasure {
    /// The port that rank 1 listens on.
    #[arg(long, value_name = "PORT", default_value = "7410")]
    port: u16,
    #[command(flatten)]
    who: Who,
    /// The path between the two, in place of the best.
    #[arg(long, value_name = "PATH", value_parser = super::pin)]
    path: Option<Pin>,
    /// Sizes of a put.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = super::size::parse, default_value = "256,8K,64K")]
    sizes: Vec<u64>,
    /// Warps that push at once.
    #[arg(long, value_name = "N", default_value = "32")]
    warps: u32,
    /// Threads of each proxy.
    #[arg(long, value_name = "N", default_value = "4")]
    threads: usize,
    /// How the GPU copies between memories that it reaches: launched, resident or engines.
    #[arg(long, value_name = "KIND", default_value = "launched")]
    copier: CopierKind,
    /// Puts of a run.
    #[arg(long, value_name = "N", default_value = "200000")]
    puts: u64,
    /// Round trips that are timed.
    #[arg(long, value_name = "N", default_value = "2000")]
    rounds: u64,
    /// Places that the receiver copies each arrival to before it answers; 0 leaves that out.
    #[arg(long, value_name = "N", default_value = "2")]
    forward: u32,
    /// Layers of a model that is stepped through as a captured graph, each sent as soon as it is written; 0 leaves that out.
    #[arg(long, value_name = "N", default_value = "80", value_parser = clap::value_parser!(u32).range(0..=200))]
    layers: u32,
    /// Bytes of a layer.
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse, default_value = "64K")]
    layer_size: u64,
    /// Steps of the model.
    #[arg(long, value_name = "N", default_value = "1000")]
    steps: u64,
    /// Write the rows to FILE as JSON; `-` is standard output, and the table goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A kernel waits so long at most: longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Has CUDA keep kernels that wait out of the way of copies. To be called before it is used.
fn have_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: the command has only just begun, and no other thread runs that could read the environment.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}
