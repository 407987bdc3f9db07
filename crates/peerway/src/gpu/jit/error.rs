//! Why there is no image, or no kernel.

use peerway_sys::nvrtc::Architecture;

use crate::gpu::GpuError;

/// A program could not be compiled or loaded.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JitError {
    /// There is nothing to compile with, and no image of an earlier time.
    #[error(
        "{name} is not in the cache of kernels and there is no compiler: {reasons}. Install a CUDA toolkit, or the \
         Python package nvidia-cuda-nvrtc and name its libnvrtc.so in PEERWAY_NVRTC_SO"
    )]
    NoCompiler {
        /// What was to be compiled.
        name: String,
        /// Where a compiler was looked for, and what was wrong there.
        reasons: String,
    },
    /// The program does not compile.
    #[error("{name} does not compile for {architecture} with {compiler}: {log}")]
    Compile {
        /// What was to be compiled.
        name: String,
        /// For what.
        architecture: Architecture,
        /// By what.
        compiler: String,
        /// What the compiler said.
        log: String,
    },
    /// The compiler does not know the architecture.
    #[error(
        "{compiler} does not compile for {architecture}, only for {known}; name another libnvrtc.so in PEERWAY_NVRTC_SO"
    )]
    ArchitectureUnknown {
        /// What was asked for.
        architecture: Architecture,
        /// The compiler.
        compiler: String,
        /// What it knows, separated by commas.
        known: String,
    },
    /// A text has a NUL inside, where the compiler would take it to end.
    #[error("a text of {name} has a NUL byte")]
    Nul {
        /// What was to be compiled.
        name: String,
    },
    /// The architecture was given among the options.
    #[error(
        "the option {option} says what to compile for, which is not said by options but by the target"
    )]
    ArchitectureOption {
        /// That option.
        option: String,
    },
    /// The program has no kernel of that name.
    #[error(
        "there is no kernel `{name}` in the program ({error}); those declared extern \"C\" have the name that is written"
    )]
    NoKernel {
        /// As it was given.
        name: String,
        /// What the driver says.
        error: String,
    },
    /// A launch has more or fewer arguments than the kernel has parameters.
    #[error("the kernel takes {takes} arguments and was given {given}")]
    Arguments {
        /// Parameters of the kernel.
        takes: usize,
        /// Arguments.
        given: usize,
    },
    /// The GPU cannot be used, or does not take the program.
    #[error("{0}")]
    Gpu(#[from] GpuError),
}
