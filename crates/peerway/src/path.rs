//! Paths: how bytes reach a peer, and why that path was chosen.

use std::fmt;

use peerway_core::config::DataProtection;

/// A kind of path to a peer.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
#[repr(u8)]
pub enum PathKind {
    /// Both endpoints are in this process.
    SameProcess = 0,
    /// The peer's memory is mapped into this process.
    LocalMap = 1,
    /// The kernel copies between the two processes. The process that posts copies for reads, and
    /// for writes of up to 64 KiB in few pieces. For larger writes the process that owns the
    /// destination copies.
    LocalCma = 2,
    /// A ring in shared memory.
    LocalRing = 3,
    /// TCP connections.
    Tcp = 4,
    /// RDMA devices, by reliable connections (InfiniBand, RoCE).
    Verbs = 5,
    /// RDMA devices, by reliable datagrams (AWS EFA).
    Efa = 6,
    /// A GPU copies from or to GPU memory that the peer shares with this process.
    GpuIpc = 7,
}

impl PathKind {
    pub(crate) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::SameProcess,
            1 => Self::LocalMap,
            2 => Self::LocalCma,
            3 => Self::LocalRing,
            5 => Self::Verbs,
            6 => Self::Efa,
            7 => Self::GpuIpc,
            _ => Self::Tcp,
        }
    }

    /// Whether the owner's limits bind only peers that follow the protocol. Memory that another
    /// process maps or can read through the kernel cannot be protected from it. Such paths are only
    /// used between processes of the same user.
    pub fn is_trusted(self) -> bool {
        matches!(self, Self::SameProcess | Self::LocalMap | Self::LocalCma | Self::GpuIpc)
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameProcess => "same-process",
            Self::LocalMap => "local-map",
            Self::LocalCma => "local-cma",
            Self::LocalRing => "local-ring",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
            Self::Efa => "efa",
            Self::GpuIpc => "gpu-ipc",
        })
    }
}

/// The path chosen for a peer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Path {
    /// The best path that both sides support. Memory that is not shareable takes the next best one.
    pub kind: PathKind,
    /// Why this path was chosen and not a better one, and which bytes are protected if either
    /// endpoint asks for that.
    pub why: String,
    /// How the TCP connections to this peer protect what they carry: the stricter `PEERWAY_DATA` of
    /// the two endpoints. Local paths and RDMA devices move data on no TCP connection; `why` says
    /// so.
    pub data: DataProtection,
}

impl Path {
    /// See [`PathKind::is_trusted`].
    pub fn is_trusted(&self) -> bool {
        self.kind.is_trusted()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trust = if self.is_trusted() { ", trusted" } else { "" };
        write!(f, "{} ({}{trust})", self.kind, self.why)
    }
}
