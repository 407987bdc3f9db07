//! Kernels that are compiled at run time, by NVRTC, and kept on disk.
//!
//! A [`Source`] is all that a program is made of: its text, what it includes, its options. [`compile`] makes an
//! [`Image`] of it, for a GPU of this process or for an architecture, in which case no GPU is needed;
//! [`Program::load`] puts that onto a GPU, ready to be launched.
//!
//! Compiling takes a tenth of a second to many seconds, so what was compiled is kept in a directory
//! (`PEERWAY_KERNEL_CACHE`) that all processes of a user share. Nothing but time depends on it: where it cannot be used,
//! that is logged once and everything is compiled.
//!
//! ```no_run
//! use peerway::gpu::jit::{self, Program, Source, Target};
//!
//! let text = r#"extern "C" __global__ void twice(int *x) { *x *= FACTOR; }"#;
//! let source = Source::new("twice.cu", text).option("--define-macro=FACTOR=2");
//! let image = jit::compile(&source, Target::Gpu(0))?;
//! let kernel = Program::load(&image, 0)?.kernel("twice")?;
//! # let _ = kernel;
//! # Ok::<(), jit::JitError>(())
//! ```
//!
//! Inside: `source` and `key` say what is wanted, `build` decides between keeping and compiling, `cache` is the directory, at
//! `place`, `entry` a file in it, `compiler` is NVRTC, `program` what is on a GPU.

mod build;
mod cache;
mod compiler;
mod entry;
mod error;
mod key;
mod place;
mod program;
mod source;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

pub use peerway_sys::nvrtc::{Architecture, NotAnArchitecture};

pub use self::error::JitError;
pub use self::program::{Kernel, Program};
pub use self::source::Source;

use self::build::{Jit, Wanted};
use self::cache::KernelCache;
use self::place::Place;

/// What a program is compiled for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Target {
    /// A GPU of this process, by its number: code for exactly that GPU, or, where the compiler is older than the GPU,
    /// PTX, which the driver translates.
    Gpu(u32),
    /// An architecture, such as `sm_90a`.
    Architecture(Architecture),
}

/// A compiled program, as the driver takes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Image {
    bytes: Arc<[u8]>,
    architecture: Architecture,
    compiler: String,
    was_cached: bool,
}

impl Image {
    /// Code, or PTX with a NUL at its end: what `cuModuleLoadData` takes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What it was compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Which compiler made it.
    pub fn compiler(&self) -> &str {
        &self.compiler
    }

    /// Whether it was found on disk.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }
}

/// The image of a program: from the cache, or compiled now. Threads that ask for the same one at the same time wait for
/// the first of them. Without a compiler, what the cache has is used whichever compiler made it.
///
/// # Errors
///
/// [`JitError`].
pub fn compile(source: &Source, target: Target) -> Result<Image, JitError> {
    let wanted = match target {
        Target::Architecture(architecture) => Wanted::Architecture(architecture),
        Target::Gpu(index) => {
            let (major, minor) = super::gpus()?.facts(index)?.capability;
            Wanted::Gpu(major * 10 + minor)
        }
    };
    JIT.image(source, wanted)
}

/// Says where a compiler is, for want of one that `PEERWAY_NVRTC_SO` names: for those who know of libraries that the
/// system's search does not find, such as a Python environment's. It is tried before that search; without effect once a
/// compiler was found.
pub fn suggest_compiler(path: impl Into<PathBuf>) {
    compiler::suggest(path.into());
}

/// What there is to compile with, and what is kept.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Status {
    /// The compiler, or why there is none.
    pub compiler: Result<String, String>,
    /// The directory, which may not be there yet; `None` where nothing is kept.
    pub directory: Option<PathBuf>,
    /// How many images it has.
    pub images: usize,
    /// Their size.
    pub bytes: u64,
    /// Why nothing can be kept.
    pub problem: Option<String>,
}

/// What there is to compile with, and what is kept. Makes nothing.
pub fn status() -> Status {
    JIT.status()
}

/// The process's own.
static JIT: LazyLock<Jit> = LazyLock::new(|| {
    let place = Place::of(|name| std::env::var_os(name));
    Jit::new(KernelCache::new(place, cache::LIMIT), compiler::find)
});
