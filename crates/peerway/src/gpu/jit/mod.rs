//! Kernels compiled at run time by NVRTC, and cached on disk.
//!
//! A [`Source`] contains everything that a program consists of: its text, its headers, its options.
//! [`compile`] makes an [`Image`] of it, for a GPU of this process or for an architecture; the
//! latter needs no GPU. [`Program::load`] loads the image onto a GPU, ready to launch.
//!
//! Compiling takes from a tenth of a second to many seconds. So images are kept in a directory
//! (`PEERWAY_KERNEL_CACHE`) that all processes of a user share. Only speed depends on it: if it is
//! unusable, that is logged once and every program is compiled.
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
//! Modules: `source` and `key` identify a program, `build` decides between the cache and the
//! compiler, `cache` is the directory at `place`, `entry` is a file in it, `compiler` is NVRTC, and
//! `program` is a program on a GPU.

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

/// The target of a compilation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Target {
    /// A GPU of this process, by its number. The image is code for exactly that GPU, or PTX, which
    /// the driver translates, if the compiler is older than the GPU.
    Gpu(u32),
    /// An architecture, such as `sm_90a`.
    Architecture(Architecture),
}

/// A compiled program in a form that the driver accepts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Image {
    bytes: Arc<[u8]>,
    architecture: Architecture,
    compiler: String,
    was_cached: bool,
}

impl Image {
    /// Code, or PTX with a NUL at its end, for `cuModuleLoadData`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The architecture that it was compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The compiler that made it.
    pub fn compiler(&self) -> &str {
        &self.compiler
    }

    /// Whether it came from the cache on disk.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }
}

/// The image of a program, from the cache or compiled now. Threads that request the same image at
/// the same time wait for the first of them. Without a compiler, an image in the cache is used
/// whichever compiler made it.
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

/// Suggests the path of a compiler, which is used if `PEERWAY_NVRTC_SO` is not set. It is for
/// callers that know of libraries outside the system's search path, such as in a Python
/// environment. It is tried before that search, and has no effect once a compiler was found.
pub fn suggest_compiler(path: impl Into<PathBuf>) {
    compiler::suggest(path.into());
}

/// The compiler, and the state of the cache.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Status {
    /// The compiler, or the reason why there is none.
    pub compiler: Result<String, String>,
    /// The cache directory, which may not exist yet. `None` if caching is off or no directory is
    /// known.
    pub directory: Option<PathBuf>,
    /// Number of images in it.
    pub images: usize,
    /// Their total size in bytes.
    pub bytes: u64,
    /// Why images cannot be cached.
    pub problem: Option<String>,
}

/// The compiler, and the state of the cache. Creates no files.
pub fn status() -> Status {
    JIT.status()
}

/// The instance of this process.
static JIT: LazyLock<Jit> = LazyLock::new(|| {
    let place = Place::of(|name| std::env::var_os(name));
    Jit::new(KernelCache::new(place, cache::LIMIT), compiler::find)
});
