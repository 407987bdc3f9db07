//! The machine that a process sees. `cuInit` creates it from the script.
//!
//! A forked child has the memory of its parent's driver but none of its threads, so it has no
//! driver. Every call in it returns as before `cuInit`, before it takes a lock that the parent may
//! have held.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use peerway_sys::cuda::ffi::*;

use crate::calls::{call_before_init, full_name, put, valid};
use crate::device::Device;
use crate::event::Event;
use crate::graph::Graph;
use crate::handle::Handles;
use crate::module::{Function, Module};
use crate::script::Script;
use crate::space::Space;
use crate::stream::Stream;

/// The devices and all objects of the process.
pub(crate) struct Machine {
    pub(crate) script: Script,
    pub(crate) devices: Vec<Device>,
    /// The meaning of addresses. Threads hold this lock only for look-ups: they neither copy nor
    /// wait under it.
    pub(crate) space: Mutex<Space>,
    pub(crate) streams: Handles<Stream>,
    pub(crate) events: Handles<Event>,
    pub(crate) modules: Handles<Module>,
    pub(crate) functions: Handles<Function>,
    pub(crate) graphs: Handles<Graph>,
    /// Instantiated graphs, which can be launched.
    pub(crate) executables: Handles<Graph>,
}

impl Machine {
    fn new(script: Script) -> Self {
        let devices: Vec<_> = (0..script.devices).map(Device::new).collect();
        Self {
            devices,
            script,
            space: Mutex::default(),
            streams: Handles::default(),
            events: Handles::default(),
            modules: Handles::default(),
            functions: Handles::default(),
            graphs: Handles::default(),
            executables: Handles::default(),
        }
    }

    pub(crate) fn device(&self, ordinal: CUdevice) -> Result<&Device, CUresult> {
        let index = usize::try_from(ordinal).map_err(|_| CUDA_ERROR_INVALID_DEVICE)?;
        self.devices.get(index).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }
}

/// The process that called `cuInit` successfully; zero before.
static OWNER: AtomicU32 = AtomicU32::new(0);
static MACHINE: OnceLock<Machine> = OnceLock::new();

/// The machine, if this process has initialized it.
pub(crate) fn machine() -> Result<&'static Machine, CUresult> {
    // Pairs with the store in `cuInit`. `OnceLock` synchronizes the machine itself.
    if OWNER.load(Ordering::Acquire) != std::process::id() {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    MACHINE.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

/// The machine, in any process. It is needed to release objects when their last use ends.
pub(crate) fn machine_if_any() -> Option<&'static Machine> {
    MACHINE.get()
}

/// The script of this process, which is read once.
pub(crate) fn script() -> &'static Result<Script, String> {
    static SCRIPT: OnceLock<Result<Script, String>> = OnceLock::new();
    SCRIPT.get_or_init(|| {
        let text = std::env::var("PEERWAY_FAKE_CUDA").unwrap_or_default();
        let script = Script::parse(&text, full_name);
        if let Err(why) = &script {
            eprintln!("PEERWAY_FAKE_CUDA: {why}");
        }
        script
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> CUresult {
    call_before_init("cuInit", || {
        valid(flags == 0)?;
        let script = script().as_ref().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        if let Some(code) = script.no_init {
            return Err(code);
        }
        if script.devices == 0 {
            return Err(CUDA_ERROR_NO_DEVICE);
        }
        let owner = OWNER.load(Ordering::Acquire);
        if owner != 0 && owner != std::process::id() {
            return Err(CUDA_ERROR_NOT_INITIALIZED);
        }
        MACHINE.get_or_init(|| Machine::new(script.clone()));
        // Pairs with the load in `machine`.
        OWNER.store(std::process::id(), Ordering::Release);
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    call_before_init("cuDriverGetVersion", || {
        let says = script().as_ref().map_or(13_000, |script| script.version);
        // SAFETY: by the pointers contract.
        unsafe { put(version, says) }
    })
}
