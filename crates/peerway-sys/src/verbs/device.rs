//! The devices that the library reports.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use super::context::Context;
use super::error::VerbsError;
use super::ffi::ibv_device;
use super::table::Verbs;

/// A snapshot of the list of devices. It must outlive the devices in it; `Device` borrows it.
#[derive(Debug)]
pub struct DeviceList {
    raw: *mut *mut ibv_device,
    len: usize,
    verbs: Arc<Verbs>,
}

// SAFETY: the list and its devices do not change while the list exists, and any thread may call the
// library.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl DeviceList {
    pub(super) fn read(verbs: &Arc<Verbs>) -> Result<Self, VerbsError> {
        let mut len = 0;
        // SAFETY: the library writes the number of devices to `len`.
        let raw = unsafe { (verbs.symbols.ibv_get_device_list)(&mut len) };
        if raw.is_null() {
            let error = VerbsError::last("ibv_get_device_list", "this machine");
            // The text of ENOSYS, "function not implemented", is misleading here.
            let none = "a kernel without RDMA modules";
            let on = if error.errno == libc::ENOSYS { none.into() } else { error.on };
            return Err(VerbsError { on, ..error });
        }
        Ok(Self { raw, len: usize::try_from(len).unwrap_or(0), verbs: Arc::clone(verbs) })
    }

    /// The devices, in the order of the library.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Device<'_>> {
        (0..self.len).map(|index| Device {
            // SAFETY: the library reported `len` entries, and the list lives as long as `self`.
            raw: unsafe { *self.raw.add(index) },
            verbs: &self.verbs,
            list: PhantomData,
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the library allocated the list, `drop` frees it once, and no `Device` outlives
        // it.
        unsafe { (self.verbs.symbols.ibv_free_device_list)(self.raw) };
    }
}

/// A device in a list, not yet open.
#[derive(Clone, Copy, Debug)]
pub struct Device<'a> {
    raw: *mut ibv_device,
    verbs: &'a Arc<Verbs>,
    list: PhantomData<&'a DeviceList>,
}

impl Device<'_> {
    /// The kernel's name for the device, such as `mlx5_0`.
    pub fn name(&self) -> String {
        // SAFETY: `self` borrows the list, which keeps the device.
        let name = unsafe { (self.verbs.symbols.ibv_get_device_name)(self.raw) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: the name is a NUL-terminated string inside the device structure.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The GUID of the node in host byte order. 0 if there is none.
    pub fn guid(&self) -> u64 {
        // SAFETY: `self` borrows the list, which keeps the device.
        u64::from_be(unsafe { (self.verbs.symbols.ibv_get_device_guid)(self.raw) })
    }

    /// `IBV_NODE_*`.
    pub fn node_type(&self) -> i32 {
        // SAFETY: `self` borrows the list, which keeps the device. The structure is not modified.
        unsafe { (*self.raw).node_type }
    }

    /// `IBV_TRANSPORT_*`.
    pub fn transport_type(&self) -> i32 {
        // SAFETY: `self` borrows the list, which keeps the device. The structure is not modified.
        unsafe { (*self.raw).transport_type }
    }

    /// The device's directory under `/sys/class/infiniband`.
    pub fn sysfs_path(&self) -> &Path {
        // SAFETY: `self` borrows the list, which keeps the device. The structure is not modified.
        path(unsafe { &(*self.raw).ibdev_path })
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: no permission, the device was removed, or its driver is missing.
    pub fn open(&self) -> Result<Context, VerbsError> {
        // SAFETY: `self` borrows the list, which keeps the device.
        let raw = unsafe { (self.verbs.symbols.ibv_open_device)(self.raw) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_open_device", self.name()));
        }
        let sysfs_path = self.sysfs_path().to_owned();
        // SAFETY: the library has just opened it, and no other code has the pointer.
        Ok(unsafe { Context::from_raw(raw, Arc::clone(self.verbs), self.name(), sysfs_path) })
    }
}

/// The path in a fixed array, up to its NUL.
fn path(array: &[c_char]) -> &Path {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    // SAFETY: `c_char` and `u8` have the same size and alignment, and any byte is valid in both.
    let bytes = unsafe { std::slice::from_raw_parts(array.as_ptr().cast::<u8>(), array.len()) };
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Path::new(OsStr::from_bytes(&bytes[..end]))
}
