//! Compiled programs on a GPU.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use peerway_sys::cuda::{Function, Grid, Module};

use super::{Image, JitError};
use crate::gpu::{GpuError, gpus};

/// A compiled program on a GPU.
///
/// [`Program::load`] loads the program, and [`Program::kernel`] each kernel. If both are called
/// before a stream is captured, nothing is compiled or loaded during the capture. The program stays
/// loaded while it or one of its kernels is held: keep one of them until all launches are done.
#[derive(Clone)]
pub struct Program {
    module: Arc<Module>,
    gpu: u32,
}

/// A kernel of a program.
#[derive(Clone)]
pub struct Kernel {
    program: Program,
    function: Function,
    parameters: Option<Arc<[usize]>>,
}

impl Program {
    /// Loads an image onto a GPU, in its primary context. The driver translates PTX now.
    ///
    /// # Errors
    ///
    /// [`JitError::Gpu`]: no such GPU, or the driver refuses the image, because it is for another
    /// architecture or from a compiler newer than the driver.
    pub fn load(image: &Image, gpu: u32) -> Result<Self, JitError> {
        let device = gpus()?.device(gpu)?;
        // SAFETY: the image comes from a compiler, or from the cache, which checks that it is
        // complete and written by this user.
        let module = unsafe { Module::load(&device.gpu, image.bytes()) }.map_err(GpuError::from)?;
        Ok(Self { module: Arc::new(module), gpu })
    }

    /// The GPU that it is loaded on.
    pub fn gpu(&self) -> u32 {
        self.gpu
    }

    /// The kernel with that name, ready to launch.
    ///
    /// # Errors
    ///
    /// [`JitError::NoKernel`], or a driver call failed.
    pub fn kernel(&self, name: &str) -> Result<Kernel, JitError> {
        let none = |error: String| JitError::NoKernel { name: name.to_owned(), error };
        let c_name = CString::new(name).map_err(|error| none(error.to_string()))?;
        let function = self.module.function(&c_name).map_err(|error| none(error.to_string()))?;
        self.module.preload(function).map_err(GpuError::from)?;
        let parameters = self.module.parameters(function).map_err(GpuError::from)?;
        Ok(Kernel { program: self.clone(), function, parameters: parameters.map(Arc::from) })
    }
}

impl Kernel {
    /// The program of this kernel.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Size of each parameter in bytes; `None` if the driver does not report it (before CUDA 12.4).
    pub fn parameters(&self) -> Option<&[usize]> {
        self.parameters.as_deref()
    }

    /// Launches the kernel into a stream (null is the default stream). `grid` counts blocks,
    /// `block` counts threads per block, and `shared` is the shared memory per block in bytes, in
    /// addition to what the kernel declares. Each argument is a pointer to a value, which is copied
    /// before this returns.
    ///
    /// # Safety
    ///
    /// The arguments point to values of the kernel's parameter types, all of them and in order. The
    /// kernel's accesses through them are valid: the memory stays valid until the kernel has ended.
    /// The stream is null, or is alive and belongs to the program's GPU. The program is held until
    /// the launch is done.
    ///
    /// # Errors
    ///
    /// [`JitError::Arguments`] if the driver reports a different number of parameters.
    /// [`JitError::Gpu`] if a driver call failed.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        stream: *mut c_void,
        arguments: &mut [*mut c_void],
    ) -> Result<(), JitError> {
        if let Some(takes) = self.parameters().map(<[usize]>::len)
            && takes != arguments.len()
        {
            return Err(JitError::Arguments { takes, given: arguments.len() });
        }
        let grid = Grid { blocks: grid, threads: block, shared };
        let module = &self.program.module;
        // SAFETY: the caller upholds this function's contract.
        let launched = unsafe { module.launch(self.function, grid, stream.cast(), arguments) };
        Ok(launched.map_err(GpuError::from)?)
    }

    /// The driver's handle, a `CUfunction`, for `cuLaunchKernel`. It is valid while the kernel or
    /// its program is held.
    pub fn as_raw(&self) -> *mut c_void {
        self.function.raw().cast()
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("handle", &self.as_raw()).finish_non_exhaustive()
    }
}
