//! Compiled programs on a GPU.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use peerway_sys::cuda::{Function, Grid, Module};

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
    parameters: Option<Arc<[usize]>>,
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
        let parameters = self.module.parameters(function).map_err(GpuError::from)?;
        Ok(Kernel { program: self.clone(), function, parameters: parameters.map(Arc::from) })
    }
}

impl Kernel {
    /// The program it is of.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Bytes of each of its parameters; `None` where the driver does not tell, before CUDA 12.4.
    pub fn parameters(&self) -> Option<&[usize]> {
        self.parameters.as_deref()
    }

    /// Puts it into a stream (null is the default one): so many blocks of so many threads, each block with `shared` bytes
    /// besides what the kernel declares. Each argument is a pointer to a value, which is copied before this returns.
    ///
    /// # Safety
    ///
    /// The arguments point to what the kernel's parameters are, as many and in that order, and the kernel does with them
    /// what may be done: memory that it is led to stays until it has ended. The stream is null, or lives and is of the
    /// program's GPU. The program is held until the launch is done.
    ///
    /// # Errors
    ///
    /// [`JitError::Arguments`] where the driver tells that they are not as many as the kernel has, [`JitError::Gpu`] with
    /// what else it says.
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
        // SAFETY: the caller's promise.
        let launched = unsafe { module.launch(self.function, grid, stream.cast(), arguments) };
        Ok(launched.map_err(GpuError::from)?)
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
