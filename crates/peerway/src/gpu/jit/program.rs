//! Compiled programs on a GPU.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use peerway_sys::cuda::{Function, Module};

use super::{Image, JitError};
use crate::gpu::{GpuError, gpus};

/// A compiled program on a GPU.
///
/// It is there from [`Program::load`] on and each kernel from [`Program::kernel`] on. So with both called before a stream
/// is captured, nothing is compiled or loaded while it is. It stays while it or a kernel of it is held: hold on to one of
/// them until all launches are done.
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
}

impl Program {
    /// Puts an image onto a GPU, in its primary context. PTX is translated by the driver now.
    ///
    /// # Errors
    ///
    /// [`JitError::Gpu`]: no such GPU, or the driver does not take the image, being of another architecture or made by
    /// a compiler that is newer than the driver.
    pub fn load(image: &Image, gpu: u32) -> Result<Self, JitError> {
        let device = gpus()?.device(gpu)?;
        // SAFETY: images come from a compiler, or from the cache, which checks that they are whole and ours.
        let module = unsafe { Module::load(&device.gpu, image.bytes()) }.map_err(GpuError::from)?;
        Ok(Self { module: Arc::new(module), gpu })
    }

    /// The GPU it is on.
    pub fn gpu(&self) -> u32 {
        self.gpu
    }

    /// The kernel of that name, ready to be launched.
    ///
    /// # Errors
    ///
    /// [`JitError::NoKernel`], or what the driver says.
    pub fn kernel(&self, name: &str) -> Result<Kernel, JitError> {
        let none = |error: String| JitError::NoKernel { name: name.to_owned(), error };
        let c_name = CString::new(name).map_err(|error| none(error.to_string()))?;
        let function = self.module.function(&c_name).map_err(|error| none(error.to_string()))?;
        self.module.preload(function).map_err(GpuError::from)?;
        Ok(Kernel { program: self.clone(), function })
    }
}

impl Kernel {
    /// The program it is of.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The driver's handle, a `CUfunction`, for `cuLaunchKernel`; valid while the kernel or its program is held.
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
