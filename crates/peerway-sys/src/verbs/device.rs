//! The devices that the library lists.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use super::context::Context;
use super::error::VerbsError;
use super::ffi::ibv_device;
use super::table::Verbs;

/// A list of devices as it was at one moment.
#[derive(Debug)]
pub struct DeviceList {
    raw: *mut *mut ibv_device,
    len: usize,
    verbs: Arc<Verbs>,
}

// SAFETY: the list and the devices in it do not change while the list is held, and the library may be
// called from any thread.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl DeviceList {
    pub(super) fn read(verbs: &Arc<Verbs>) -> Result<Self, VerbsError> {
        let mut len = 0;
        // SAFETY: `len` is where the library writes how many there are.
        let raw = unsafe { (verbs.symbols.ibv_get_device_list)(&mut len) };
        if raw.is_null() {
            let error = VerbsError::last("ibv_get_device_list", "this machine");
            // In so many words: the number's own, "function not implemented", mislead.
            let none = "a kernel without RDMA modules";
            let on = if error.errno == libc::ENOSYS { none.into() } else { error.on };
            return Err(VerbsError { on, ..error });
        }
        Ok(Self { raw, len: usize::try_from(len).unwrap_or(0), verbs: Arc::clone(verbs) })
    }

    /// The devices, in the library's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Device<'_>> {
        (0..self.len).map(|index| Device {
            // SAFETY: the library said that the list has `len` entries, and it lives as long as `self`.
            raw: unsafe { *self.raw.add(index) },
            verbs: &self.verbs,
            list: PhantomData,
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library, is freed once, and no `Device` outlives it.
        unsafe { (self.verbs.symbols.ibv_free_device_list)(self.raw) };
    }
}

/// A device in a list, not yet opened.
#[derive(Clone, Copy, Debug)]
pub struct Device<'a> {
    raw: *mut ibv_device,
    verbs: &'a Arc<Verbs>,
    list: PhantomData<&'a DeviceList>,
}

impl Device<'_> {
    /// What the kernel calls it, such as `mlx5_0`.
    pub fn name(&self) -> String {
        // SAFETY: the device is in a list that is held.
        let name = unsafe { (self.verbs.symbols.ibv_get_device_name)(self.raw) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: a NUL-terminated string inside the device.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The node's GUID, in host byte order; 0 where there is none.
    pub fn guid(&self) -> u64 {
        // SAFETY: the device is in a list that is held.
        u64::from_be(unsafe { (self.verbs.symbols.ibv_get_device_guid)(self.raw) })
    }

    /// `IBV_NODE_*`.
    pub fn node_type(&self) -> i32 {
        // SAFETY: the device is in a list that is held, and is not written to.
        unsafe { (*self.raw).node_type }
    }

    /// `IBV_TRANSPORT_*`.
    pub fn transport_type(&self) -> i32 {
        // SAFETY: the device is in a list that is held, and is not written to.
        unsafe { (*self.raw).transport_type }
    }

    /// Its directory under `/sys/class/infiniband`.
    pub fn sysfs_path(&self) -> &Path {
        // SAFETY: the device is in a list that is held, and is not written to.
        path(unsafe { &(*self.raw).ibdev_path })
    }

    /// Opens it.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]: no permission, the device went away, its driver is missing.
    pub fn open(&self) -> Result<Context, VerbsError> {
        // SAFETY: the device is in a list that is held.
        let raw = unsafe { (self.verbs.symbols.ibv_open_device)(self.raw) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_open_device", self.name()));
        }
        let sysfs_path = self.sysfs_path().to_owned();
        // SAFETY: the library has just opened it, and nobody else has the pointer.
        Ok(unsafe { Context::from_raw(raw, Arc::clone(self.verbs), self.name(), sysfs_path) })
    }
}

/// A path in a fixed array, up to its NUL.
fn path(array: &[c_char]) -> &Path {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    // SAFETY: `c_char` and `u8` have the same size and alignment, and any byte is valid in both.
    let bytes = unsafe { std::slice::from_raw_parts(array.as_ptr().cast::<u8>(), array.len()) };
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Path::new(OsStr::from_bytes(&bytes[..end]))
}
