//! The vendor libraries: their names, their search order, and how to recognise them.

use std::ffi::{CStr, OsString};
use std::fmt;

/// A vendor library that Peerway uses if the machine has it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Library {
    /// libibverbs: RDMA devices.
    Ibverbs,
    /// libefa: the extensions that AWS EFA devices need beyond verbs.
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
    /// All libraries, in reporting order.
    pub const ALL: [Self; 6] =
        [Self::Ibverbs, Self::Efa, Self::Fabric, Self::Cuda, Self::Nvrtc, Self::Nccl];

    /// The usual name of the library.
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

    /// The feature that needs the library.
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

    /// The environment variables that may name a file for it. The first set variable takes
    /// precedence.
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

    /// The file that the environment names for the library.
    pub fn named(self) -> Option<OsString> {
        let mut names = self.override_variables().iter();
        names.find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// The sonames to try. All of them have a version: a bare `.so` belongs to a development
    /// package and may have any version.
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

    /// A symbol that only this library has. The probe recognises the library by it.
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
