//! The kinds of baseline that paths are compared with.

use super::memory::Memory;

/// The kind of a path's baseline.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Against {
    /// Plain copies inside one process.
    Copies,
    /// A socket loop, the better of one that blocks and one that spins.
    Sockets,
    /// perftest, if `--perftest` is given and perftest has such a row.
    Perftest,
    /// A copy by the CUDA driver inside one process.
    Driver,
    /// The same path with host memory.
    HostMemory,
}

impl Against {
    /// The name in tables and JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Copies => "copy",
            Self::Sockets => "socket",
            Self::Perftest => "perftest",
            Self::Driver => "driver",
            Self::HostMemory => "host",
        }
    }

    /// The kind for a path, by its name in rows and the memory of both sides.
    pub(crate) fn of(path: &str, memory: [Memory; 2]) -> Self {
        let gpu = memory.iter().any(|memory| memory.is_gpu());
        match path {
            "gpu-ipc" => Self::Driver,
            _ if gpu => Self::HostMemory,
            "tcp" => Self::Sockets,
            "verbs" | "efa" => Self::Perftest,
            _ => Self::Copies,
        }
    }
}
