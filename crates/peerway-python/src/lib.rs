//! `peerway._native`: the engine for Python.
//!
//! Each file wraps one concept of the engine and adds no policy. Every call that can wait releases
//! the interpreter. It returns to the interpreter several times a second to handle Ctrl-C.

mod arguments;
mod buffer;
mod endpoint;
mod errors;
mod gpu;
mod host_producer;
mod kernels;
mod log;
mod memory;
mod parameters;
mod peer;
mod proxy;
mod region;
mod transfer;
mod waiting;
mod wakeups;

use pyo3::prelude::*;

/// The module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<endpoint::Notification>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<region::LocalSlice>()?;
    module.add_class::<region::RemoteRegion>()?;
    module.add_class::<region::RemoteSlice>()?;
    module.add_class::<region::BlockList>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<transfer::Prepared>()?;
    module.add_class::<transfer::Enqueued>()?;
    module.add_class::<transfer::Staged>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<gpu::Gpu>()?;
    module.add_class::<gpu::GpuMemory>()?;
    module.add_class::<proxy::Proxy>()?;
    module.add_class::<proxy::Window>()?;
    module.add_class::<proxy::Armed>()?;
    module.add_class::<proxy::Fault>()?;
    module.add_class::<host_producer::HostProducer>()?;
    module.add_class::<kernels::Module>()?;
    module.add_class::<kernels::Kernel>()?;
    module.add_class::<wakeups::Wakeups>()?;
    module.add_function(wrap_pyfunction!(region::quarantine, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpus, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_in_use, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::open_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_buffer_at, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_select, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_lines, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_stop, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_forget, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::device_headers, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::compile_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::synchronize, module)?)?;
    Ok(())
}
