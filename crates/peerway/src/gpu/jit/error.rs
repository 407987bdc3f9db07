//! Errors of compiling and loading kernels.

use peerway_sys::nvrtc::Architecture;

use crate::gpu::GpuError;

/// A program could not be compiled or loaded.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JitError {
    /// There is no compiler, and no image in the cache.
    #[error(
        "{name} is not in the cache of kernels and there is no compiler: {reasons}. Install a CUDA \
         toolkit, or the Python package nvidia-cuda-nvrtc, and set PEERWAY_NVRTC_SO to its \
         libnvrtc.so"
    )]
    NoCompiler {
        /// Name of the program.
        name: String,
        /// Where a compiler was searched, and why each place failed.
        reasons: String,
    },
    /// The program does not compile.
    #[error("{name} does not compile for {architecture} with {compiler}: {log}")]
    Compile {
        /// Name of the program.
        name: String,
        /// The target architecture.
        architecture: Architecture,
        /// The compiler.
        compiler: String,
        /// The compiler's messages.
        log: String,
    },
    /// The compiler does not support the architecture.
    #[error(
        "{compiler} does not compile for {architecture}, only for {known}; set PEERWAY_NVRTC_SO to \
         another libnvrtc.so"
    )]
    ArchitectureUnknown {
        /// The requested architecture.
        architecture: Architecture,
        /// The compiler.
        compiler: String,
        /// The architectures that it supports, separated by commas.
        known: String,
    },
    /// A text contains a NUL, where the compiler would end it.
    #[error("the source, a header or an option of {name} contains a NUL byte")]
    Nul {
        /// Name of the program.
        name: String,
    },
    /// The options contain the architecture.
    #[error("the option {option} says what to compile for: give that as the target instead")]
    ArchitectureOption {
        /// The option.
        option: String,
    },
    /// The program has no kernel with that name.
    #[error(
        "there is no kernel `{name}` in the program ({error}); declare it extern \"C\", so that \
         the compiler keeps its name"
    )]
    NoKernel {
        /// The name given.
        name: String,
        /// The driver's error.
        error: String,
    },
    /// A launch has more or fewer arguments than the kernel has parameters.
    #[error("the kernel takes {takes} arguments and was given {given}")]
    Arguments {
        /// Number of parameters.
        takes: usize,
        /// Number of arguments.
        given: usize,
    },
    /// The GPU cannot be used, or does not accept the program.
    #[error("{0}")]
    Gpu(#[from] GpuError),
}
