//! What others publish as wheels for Python and tests need of it: NVIDIA's compilers and headers, so that no toolkit need be installed,
//! and NIXL.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::Context;

use crate::python::{PIP_INSTALL, output, step};

/// Wheels that are unpacked into one directory.
pub(crate) struct Set {
    directory: &'static str,
    packages: &'static [&'static str],
}

/// The compiler that `copy.ptx` is made with, an old one, because a driver reads the PTX of its own age and older; and
/// `cuda.h`, which the layouts of the driver's structures are compared with.
pub(crate) const OLD: Set = Set {
    directory: "cuda",
    packages: &["nvidia-cuda-nvrtc-cu12==12.1.105", "nvidia-cuda-runtime-cu12==12.9.79"],
};

/// The last compiler of CUDA 12.
pub(crate) const CUDA_12: Set =
    Set { directory: "cuda-12", packages: &["nvidia-cuda-nvrtc-cu12==12.9.86"] };

/// CUDA 13: the compiler for run time and nvcc, with what nvcc calls and includes.
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

/// NIXL, from the oldest version that the backend is for to the newest.
pub(crate) const NIXL: &[Set] = &[
    Set { directory: "nixl-1.3", packages: &["nixl-cu12==1.3.0"] },
    Set { directory: "nixl-1.4", packages: &["nixl-cu12==1.4.1"] },
    Set { directory: "nixl-1.5", packages: &["nixl-cu12==1.5.1"] },
];

/// A set that is there.
pub(crate) struct Wheels(PathBuf);

/// Names the packages that were unpacked, so that others are fetched when the list changes and none otherwise.
const STAMP: &str = "packages.txt";

/// Held by whoever fetches: what one thread has begun another waits for.
static FETCHING: Mutex<()> = Mutex::new(());

impl Wheels {
    /// Fetches the set where it is not there yet.
    pub(crate) fn have(workspace: &Path, target: &Path, set: &Set) -> anyhow::Result<Self> {
        let wheels = Self(target.join(set.directory));
        let packages = set.packages.join("\n");
        let stamp = wheels.0.join(STAMP);
        let is_there = || fs::read_to_string(&stamp).is_ok_and(|there| there == packages);
        if is_there() {
            return Ok(wheels);
        }
        let _fetching = FETCHING.lock();
        if is_there() {
            return Ok(wheels);
        }
        if wheels.0.exists() {
            fs::remove_dir_all(&wheels.0)
                .with_context(|| format!("cannot remove {:?}", wheels.0))?;
        }
        // A machine's own Python may have no pip.
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

    /// Where the packages are.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Where the headers of CUDA 12 are, `cuda.h` among them.
    pub(crate) fn include(&self) -> PathBuf {
        self.0.join("nvidia/cuda_runtime/include")
    }

    /// The compiler for run time.
    pub(crate) fn nvrtc(&self) -> PathBuf {
        let twelve = self.0.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        if twelve.is_file() { twelve } else { self.0.join("nvidia/cu13/lib/libnvrtc.so.13") }
    }

    /// The compiler for files, which CUDA 13 has.
    pub(crate) fn nvcc(&self) -> PathBuf {
        self.0.join("nvidia/cu13/bin/nvcc")
    }
}
