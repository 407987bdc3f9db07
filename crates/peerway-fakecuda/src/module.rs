//! Modules: images from which the library only reads the names of the kernels that it knows.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::calls::{call_in_context, call_to_give_back, put, valid};
use crate::context;
use crate::errors::INVALID_PTX;
use crate::kernel::{Kernel, Which};
use crate::work::Work;

#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) device: u32,
    kernels: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) device: u32,
    /// The handle of its module.
    module: usize,
    which: Which,
}

/// # Safety
///
/// The caller keeps the contract of CUDA. The image is a zero-terminated string or a complete ELF
/// file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    call_in_context("cuModuleLoadData", |machine, device| {
        valid(!module.is_null() && !image.is_null())?;
        // SAFETY: by this function's contract.
        let kernels = unsafe { crate::image::kernels(image) }.ok_or(INVALID_PTX)?;
        crate::context::drain(machine, device)?;
        let made = machine.modules.add(Arc::new(Module { device: device.index, kernels }));
        // SAFETY: by the pointers contract.
        unsafe { put(module, made) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    call_to_give_back("cuModuleUnload", |machine| {
        machine.modules.remove(module)?;
        machine.functions.take(|function| function.module == module.addr());
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    call_in_context("cuModuleGetFunction", |machine, _| {
        valid(!function.is_null() && !name.is_null())?;
        let found = machine.modules.get(module)?;
        // SAFETY: by the pointers contract, `name` is a zero-terminated string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().ok();
        let name = name.filter(|name| found.kernels.iter().any(|kernel| kernel == name));
        let which = name.and_then(Which::by_name);
        let which = which.ok_or(CUDA_ERROR_NOT_FOUND)?;
        let made = Function { device: found.device, module: module.addr(), which };
        // SAFETY: by the pointers contract.
        unsafe { put(function, machine.functions.add(Arc::new(made))) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncLoad(function: CUfunction) -> CUresult {
    call_in_context("cuFuncLoad", |machine, _| machine.functions.get(function).map(drop))
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    function: CUfunction,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> CUresult {
    call_in_context("cuFuncGetParamInfo", |machine, _| {
        valid(!offset.is_null())?;
        let sizes = machine.functions.get(function)?.which.parameters();
        let asked = *sizes.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Each parameter follows the previous ones, aligned to its size but at most to 8 bytes.
        let aligned = |at: usize, size: usize| at.next_multiple_of(size.min(8));
        let before = sizes[..index].iter().fold(0, |at, size| aligned(at, *size) + size);
        // SAFETY: by the pointers contract; `size` may be null.
        unsafe {
            put(offset, aligned(before, asked))?;
            if size.is_null() { Ok(()) } else { put(size, asked) }
        }
    })
}

/// Most threads of one block.
const MAX_THREADS: u64 = 1024;

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: CUstream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    call_in_context("cuLaunchKernel", |machine, device| {
        let function = machine.functions.get(function)?;
        context::same(device, function.device)?;
        let stream = machine.stream(device, stream)?;
        valid([grid_x, grid_y, grid_z, block_x, block_y, block_z].iter().all(|size| *size > 0))?;
        let sizes = [block_x, block_y, block_z].map(u64::from);
        let threads = sizes.into_iter().fold(1, u64::saturating_mul);
        valid(threads <= MAX_THREADS)?;
        if !extra.is_null() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        // SAFETY: by the pointers contract, `params` holds the arguments of this kernel.
        let kernel = unsafe { Kernel::new(function.which, grid_x, params) }?;
        stream.submit(Work::Launch(Arc::new(kernel))).map(drop)
    })
}
