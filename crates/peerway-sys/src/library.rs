//! The vendor libraries: names, where they are looked for, how they are recognised.

use std::ffi::{CStr, OsString};
use std::fmt;

/// A library that belongs to someone else and is used where it is found.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Library {
    /// libibverbs: RDMA devices.
    Ibverbs,
    /// libefa: what AWS EFA devices need beyond verbs.
    Efa,
    /// libfabric: HPE Slingshot and others.
    Fabric,
    /// libcuda: the NVIDIA driver.
    Cuda,
    /// libnvrtc: the compiler for CUDA kernels.
    Nvrtc,
    /// libnccl: NVIDIA's collectives.
    Nccl,
}

impl Library {
    /// All of them, in the order in which they are reported.
    pub const ALL: [Self; 6] =
        [Self::Ibverbs, Self::Efa, Self::Fabric, Self::Cuda, Self::Nvrtc, Self::Nccl];

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ibverbs => "libibverbs",
            Self::Efa => "libefa",
            Self::Fabric => "libfabric",
            Self::Cuda => "libcuda",
            Self::Nvrtc => "libnvrtc",
            Self::Nccl => "libnccl",
        }
    }

    /// What it is needed for.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Ibverbs => "RDMA (InfiniBand, RoCE)",
            Self::Efa => "AWS EFA",
            Self::Fabric => "HPE Slingshot (cxi)",
            Self::Cuda => "NVIDIA GPU memory",
            Self::Nvrtc => "GPU kernels",
            Self::Nccl => "the nccl transport",
        }
    }

    /// The environment variables that may name it, the first that is set wins.
    pub fn override_variables(self) -> &'static [&'static str] {
        match self {
            Self::Ibverbs => &["PEERWAY_IBV_SO", "UCCL_IBV_SO"],
            Self::Efa => &["PEERWAY_EFA_SO", "UCCL_EFA_SO"],
            Self::Fabric => &["PEERWAY_LIBFABRIC_SO", "UCCL_LIBFABRIC_SO"],
            Self::Cuda => &["PEERWAY_CUDA_SO"],
            Self::Nvrtc => &["PEERWAY_NVRTC_SO"],
            Self::Nccl => &["PEERWAY_NCCL_SO", "UCCL_NCCL_SO"],
        }
    }

    /// The file that the environment names for it.
    pub fn named(self) -> Option<OsString> {
        let mut names = self.override_variables().iter();
        names.find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// The sonames it is looked for under. Versioned ones only: a bare `.so` belongs to a development
    /// package and may be of any version.
    pub fn sonames(self) -> &'static [&'static str] {
        match self {
            Self::Ibverbs => &["libibverbs.so.1"],
            Self::Efa => &["libefa.so.1"],
            Self::Fabric => &["libfabric.so.1"],
            Self::Cuda => &["libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::Nccl => &["libnccl.so.2"],
        }
    }

    /// A symbol that no other library has, by which it is recognised.
    pub(crate) fn landmark(self) -> &'static CStr {
        match self {
            Self::Ibverbs => c"ibv_get_device_list",
            Self::Efa => c"efadv_create_qp_ex",
            Self::Fabric => c"fi_getinfo",
            Self::Cuda => c"cuInit",
            Self::Nvrtc => c"nvrtcCompileProgram",
            Self::Nccl => c"ncclGetVersion",
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_named_and_listed_once() {
        for library in Library::ALL {
            assert_eq!(Library::ALL.iter().filter(|other| **other == library).count(), 1);
            assert!(library.sonames().iter().all(|soname| soname.starts_with(library.name())));
            assert!(library.override_variables()[0].starts_with("PEERWAY_"));
        }
    }
}
