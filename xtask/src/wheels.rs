//! Python wheels that tests need: NVIDIA's compilers and headers, so that no toolkit must be
//! installed, and NIXL.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::lock;
use crate::python::{PIP_INSTALL, output, step};

/// Wheels that share one directory.
pub(crate) struct Set {
    directory: &'static str,
    packages: &'static [&'static str],
}

/// The compiler for `copy.ptx`, and `cuda.h` for the comparison of structure layouts. The compiler
/// is old, because a driver reads only PTX that is not newer than itself.
pub(crate) const OLD: Set = Set {
    directory: "cuda",
    packages: &["nvidia-cuda-nvrtc-cu12==12.1.105", "nvidia-cuda-runtime-cu12==12.9.79"],
};

/// The last compiler of CUDA 12.
pub(crate) const CUDA_12: Set =
    Set { directory: "cuda-12", packages: &["nvidia-cuda-nvrtc-cu12==12.9.86"] };

/// CUDA 13: NVRTC and nvcc, with the programs and headers that nvcc uses.
pub(crate) const CUDA_13: Set = Set {
    directory: "cuda-13",
    packages: &[
        "nvidia-cuda-nvrtc==13.4.92",
        "nvidia-cuda-nvcc==13.4.92",
        "nvidia-cuda-crt==13.4.92",
        "nvidia-nvvm==13.4.92",
        "nvidia-cuda-runtime==13.4.92",
    ],
};

/// NIXL, from the oldest supported version to the newest.
pub(crate) const NIXL: &[Set] = &[
    Set { directory: "nixl-1.3", packages: &["nixl-cu12==1.3.0"] },
    Set { directory: "nixl-1.4", packages: &["nixl-cu12==1.4.1"] },
    Set { directory: "nixl-1.5", packages: &["nixl-cu12==1.5.1"] },
];

/// A downloaded set.
pub(crate) struct Wheels(PathBuf);

/// A file with the names of the unpacked packages. A changed list triggers a download.
const STAMP: &str = "packages.txt";

/// The lock for downloads: a second process waits for the first.
const FETCHING: &str = "wheels";

impl Wheels {
    /// Downloads the set if it is missing.
    pub(crate) fn have(workspace: &Path, target: &Path, set: &Set) -> anyhow::Result<Self> {
        let wheels = Self(target.join(set.directory));
        let packages = set.packages.join("\n");
        let stamp = wheels.0.join(STAMP);
        let is_there = || fs::read_to_string(&stamp).is_ok_and(|there| there == packages);
        if is_there() {
            return Ok(wheels);
        }
        let _fetching = lock::hold(FETCHING)?;
        if is_there() {
            return Ok(wheels);
        }
        if wheels.0.exists() {
            fs::remove_dir_all(&wheels.0)
                .with_context(|| format!("cannot remove {:?}", wheels.0))?;
        }
        // The system's Python may have no pip.
        let environment = target.join("cuda-pip");
        let python = environment.join("bin/python");
        if output(Command::new(&python).args(["-m", "pip", "--version"])).is_err() {
            let shown = environment.display().to_string();
            step(Path::new("python3"), workspace, &["-m", "venv", "--clear", &shown])?;
        }
        let shown = wheels.0.display().to_string();
        let what = ["--no-deps", "--target", &shown];
        step(&python, workspace, &[&PIP_INSTALL[..], &what, set.packages].concat())?;
        fs::write(&stamp, packages).with_context(|| format!("cannot write {stamp:?}"))?;
        Ok(wheels)
    }

    /// The directory of the packages.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The directory of the CUDA 12 headers, including `cuda.h`.
    pub(crate) fn include(&self) -> PathBuf {
        self.0.join("nvidia/cuda_runtime/include")
    }

    /// The NVRTC library.
    pub(crate) fn nvrtc(&self) -> PathBuf {
        let twelve = self.0.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        if twelve.is_file() { twelve } else { self.0.join("nvidia/cu13/lib/libnvrtc.so.13") }
    }

    /// nvcc, which only the CUDA 13 set has.
    pub(crate) fn nvcc(&self) -> PathBuf {
        self.0.join("nvidia/cu13/bin/nvcc")
    }
}
