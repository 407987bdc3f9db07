//! Device code: `copy.ptx` out of `copy.cu`, and whether it compiles for the GPUs that are met.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use peerway_sys::nvrtc::Nvrtc;

use crate::python::step;

/// The compiler that `copy.ptx` is made with. An old one, because a driver reads the PTX of its own age and older.
const NVRTC: &str = "nvidia-cuda-nvrtc-cu12==12.1.105";
/// `cuda.h`, which the layouts of the driver's structures are compared with.
const HEADERS: &str = "nvidia-cuda-runtime-cu12==12.9.79";
/// The oldest GPUs that the kernels are for.
const OLDEST: &str = "compute_80";
/// Others that they must compile for.
const OTHERS: &[&str] = &["compute_86", "compute_90"];

/// NVIDIA's wheels, unpacked under the target directory.
pub(crate) struct Wheels(PathBuf);

impl Wheels {
    /// Fetches them where they are not there yet.
    pub(crate) fn have(workspace: &Path, target: &Path) -> anyhow::Result<Self> {
        let wheels = Self(target.join("cuda"));
        if !wheels.library().is_file() || !wheels.include().join("cuda.h").is_file() {
            let shown = wheels.0.display().to_string();
            let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
            let what = ["--no-deps", "--upgrade", "--target", &shown, NVRTC, HEADERS];
            let python = target.join("cuda-pip");
            let environment = python.display().to_string();
            // A machine's own Python may have no pip.
            step(Path::new("python3"), workspace, &["-m", "venv", "--clear", &environment])?;
            step(&python.join("bin/python"), workspace, &[&pip[..], &what].concat())?;
        }
        Ok(wheels)
    }

    /// Where `cuda.h` is.
    pub(crate) fn include(&self) -> PathBuf {
        self.0.join("nvidia/cuda_runtime/include")
    }

    fn library(&self) -> PathBuf {
        self.0.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    }
}

/// Compiles the kernels for every architecture; writes `copy.ptx`, or only compares it.
pub(crate) fn run(workspace: &Path, target: &Path, check: bool) -> anyhow::Result<()> {
    let wheels = Wheels::have(workspace, target)?;
    let nvrtc = Nvrtc::load(Some(wheels.library().into_os_string()))?;
    ensure!(nvrtc.found().passed_over.is_empty(), "{:?} is not usable", wheels.library());
    let kernels = workspace.join("crates/peerway/kernels");
    let source = CString::new(fs::read(kernels.join("copy.cu")).context("cannot read copy.cu")?)?;
    let compile = |architecture: &str| {
        let option = CString::new(format!("--gpu-architecture={architecture}"))?;
        let ptx = nvrtc.compile(&source, c"copy.cu", &[&option, c"--std=c++17"])?;
        println!("copy.cu for {architecture}: {} bytes", ptx.as_bytes().len());
        Ok::<_, anyhow::Error>(ptx)
    };
    for architecture in OTHERS {
        compile(architecture)?;
    }
    let mut ptx = compile(OLDEST)?.into_bytes();
    if ptx.last() != Some(&b'\n') {
        ptx.push(b'\n');
    }
    let file = kernels.join("copy.ptx");
    if !check {
        return fs::write(&file, ptx).context("cannot write copy.ptx");
    }
    if fs::read(&file).context("cannot read copy.ptx")? != ptx {
        bail!("copy.ptx is not what copy.cu compiles to: run `cargo xtask kernels`");
    }
    Ok(())
}
