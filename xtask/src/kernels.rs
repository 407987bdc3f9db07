//! Compiles device code: the PTX files that the engine loads, and all device code with every
//! supported compiler and for every supported GPU.
//!
//! Device code is every `.cu` file of the engine's kernels and the header for users' kernels, if it
//! exists. No GPU is needed.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use peerway_sys::nvrtc::{Architecture, Nvrtc, Program};

use crate::python::step;
use crate::setup::{self, Tool};
use crate::wheels::{self, Wheels};

/// Sources whose PTX is committed beside them and loaded: copies, and the tests and measurements of
/// the GPU-driven engine.
const LOADED: &[&str] = &["copy.cu", "driven.cu"];
/// The oldest supported GPUs, which the PTX targets.
const OLDEST: Architecture = Architecture::ptx(80);
/// GPUs that all device code must compile for, down to machine code.
const GPUS: &[Architecture] =
    &[Architecture::code(80), Architecture::code(90), Architecture::code(100)];
/// The target of nvcc.
pub(crate) const NVCC_GPU: &str = "-arch=sm_90";
pub(crate) const STANDARD: &str = "-std=c++17";
/// The header for users' kernels.
const DEVICE_HEADER: &str = "peerway_device.cuh";

const HOST_COMPILER: Tool =
    Tool { program: "g++", package: "g++", why: "nvcc, and headers that hosts compile too" };

/// Compiles all device code. Writes the PTX files, or only compares them.
pub(crate) fn run(workspace: &Path, target: &Path, check: bool) -> anyhow::Result<()> {
    let code = DeviceCode::read(workspace)?;
    let old = Compiler::load(&Wheels::have(workspace, target, &wheels::OLD)?.nvrtc())?;
    for name in LOADED {
        let unit = code.sources.iter().find(|unit| unit.name == *name);
        let unit = unit.with_context(|| format!("{KERNELS} has no {name}"))?;
        let mut ptx = old.compile(unit, &code.headers, OLDEST)?;
        ptx.retain(|byte| *byte != 0);
        if ptx.last() != Some(&b'\n') {
            ptx.push(b'\n');
        }
        let file = workspace.join(KERNELS).join(name).with_extension("ptx");
        if !check {
            fs::write(&file, ptx).with_context(|| format!("cannot write {file:?}"))?;
        } else if fs::read(&file).with_context(|| format!("cannot read {file:?}"))? != ptx {
            bail!("{file:?} differs from the compiled {name}: run `cargo xtask kernels`");
        }
    }

    let thirteen = Wheels::have(workspace, target, &wheels::CUDA_13)?;
    let twelve = Wheels::have(workspace, target, &wheels::CUDA_12)?;
    for library in [twelve.nvrtc(), thirteen.nvrtc()] {
        let compiler = Compiler::load(&library)?;
        for unit in &code.sources {
            for gpu in GPUS {
                compiler.compile(unit, &code.headers, *gpu)?;
            }
        }
    }
    code.compile_as_files(workspace, target, &thirteen.nvcc())
}

/// The directory of the engine's kernels.
const KERNELS: &str = "crates/peerway/kernels";
/// The directory of the headers for users.
const INCLUDE: &str = "include";

/// A source file, or a generated file that includes a header.
struct Unit {
    name: String,
    text: String,
}

struct DeviceCode {
    sources: Vec<Unit>,
    headers: Vec<Unit>,
}

impl DeviceCode {
    fn read(workspace: &Path) -> anyhow::Result<Self> {
        let mut sources = read(&workspace.join(KERNELS), &["cu"])?;
        let headers = read(&workspace.join(INCLUDE), &["h", "cuh"])?;
        if headers.iter().any(|header| header.name == DEVICE_HEADER) {
            sources.push(includes(DEVICE_HEADER, "cu"));
        }
        Ok(Self { sources, headers })
    }

    /// Compiles the sources with nvcc, and headers for hosts with the host's compiler.
    fn compile_as_files(&self, workspace: &Path, target: &Path, nvcc: &Path) -> anyhow::Result<()> {
        setup::have(&HOST_COMPILER)?;
        let directory = target.join("kernels");
        fs::create_dir_all(&directory).context("cannot make target/kernels")?;
        let include = workspace.join(INCLUDE).display().to_string();
        let write = |unit: &Unit| {
            let file = directory.join(&unit.name);
            fs::write(&file, &unit.text).with_context(|| format!("cannot write {file:?}"))?;
            Ok::<_, anyhow::Error>(file.display().to_string())
        };
        for unit in &self.sources {
            let file = write(unit)?;
            let object = format!("{file}.o");
            let strict = ["-Werror", "all-warnings", "--device-c", "-o", &object, &file];
            let options = [STANDARD, NVCC_GPU, "-I", &include];
            step(nvcc, workspace, &[&options[..], &strict].concat())?;
        }
        for header in self.headers.iter().filter(|header| is_for_hosts(header)) {
            let file = write(&includes(&header.name, "cpp"))?;
            let strict = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", &include, &file];
            step(Path::new("g++"), workspace, &[&[STANDARD], &strict[..]].concat())?;
        }
        Ok(())
    }
}

/// Whether the host's compiler must accept the header: plain headers, and headers that test
/// `__CUDACC__`.
fn is_for_hosts(header: &Unit) -> bool {
    header.name.ends_with(".h") || header.text.contains("__CUDACC__")
}

/// A file that only includes a header.
fn includes(header: &str, extension: &str) -> Unit {
    let name = format!("includes_{}.{extension}", header.replace('.', "_"));
    Unit { name, text: format!("#include \"{header}\"\n") }
}

/// The files of a directory with these extensions, sorted by name. Empty if the directory does not
/// exist.
fn read(directory: &Path, endings: &[&str]) -> anyhow::Result<Vec<Unit>> {
    if !directory.is_dir() {
        return Ok(Vec::new());
    }
    let mut files: Vec<PathBuf> = fs::read_dir(directory)?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()
        .with_context(|| format!("cannot read {directory:?}"))?;
    files.sort();
    let ends = |file: &PathBuf| endings.iter().any(|e| file.extension().is_some_and(|x| x == *e));
    let units = files.iter().filter(|file| ends(file)).map(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {file:?}"))?;
        Ok(Unit { name, text })
    });
    units.collect()
}

/// An NVRTC library.
struct Compiler {
    nvrtc: Nvrtc,
    version: String,
    knows: Vec<u32>,
}

impl Compiler {
    fn load(library: &Path) -> anyhow::Result<Self> {
        let nvrtc = Nvrtc::load(Some(library.into()))?;
        ensure!(nvrtc.found().passed_over.is_empty(), "{library:?} cannot be loaded as NVRTC");
        let (major, minor) = nvrtc.version()?;
        let knows = nvrtc.architectures().context("NVRTC does not report the supported GPUs")?;
        Ok(Self { nvrtc, version: format!("{major}.{minor}"), knows })
    }

    /// Compiles if the compiler supports the GPU, and prints the result.
    fn compile(
        &self,
        unit: &Unit,
        headers: &[Unit],
        architecture: Architecture,
    ) -> anyhow::Result<Vec<u8>> {
        let (name, version) = (&unit.name, &self.version);
        if !self.knows.contains(&architecture.number()) {
            println!("{name} for {architecture}: NVRTC {version} does not support it");
            return Ok(Vec::new());
        }
        let texts: Vec<(CString, CString)> = headers
            .iter()
            .map(|header| Ok((CString::new(&*header.name)?, CString::new(&*header.text)?)))
            .collect::<anyhow::Result<_>>()?;
        let headers: Vec<(&CStr, &CStr)> = texts.iter().map(|(n, t)| (&**n, &**t)).collect();
        let program = Program {
            source: &CString::new(&*unit.text)?,
            name: &CString::new(&**name)?,
            headers: &headers,
            options: &[&CString::new(STANDARD)?],
        };
        let image = self.nvrtc.compile(&program, architecture)?;
        println!("{name} for {architecture}: NVRTC {version}, {} bytes", image.len());
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_are_found_and_missing_directories_are_empty() {
        let kernels = read(&crate::workspace().join(KERNELS), &["cu"]).unwrap();
        assert!(kernels.iter().any(|unit| unit.name == "copy.cu"));
        assert!(kernels.iter().all(|unit| unit.name.ends_with(".cu")));
        assert!(read(Path::new("/nonexistent"), &["cu"]).unwrap().is_empty());
    }

    #[test]
    fn headers_say_whether_hosts_compile_them() {
        let header = |name: &str, text: &str| Unit { name: name.into(), text: text.into() };
        assert!(is_for_hosts(&header("a.h", "")));
        assert!(is_for_hosts(&header("a.cuh", "#ifdef __CUDACC__\n#endif\n")));
        assert!(!is_for_hosts(&header("a.cuh", "__device__ int a();\n")));
    }

    #[test]
    fn a_header_is_compiled_by_a_file_that_includes_it() {
        assert_eq!(includes("a.cuh", "cu").name, "includes_a_cuh.cu");
        assert_eq!(includes("a.cuh", "cu").text, "#include \"a.cuh\"\n");
    }
}
