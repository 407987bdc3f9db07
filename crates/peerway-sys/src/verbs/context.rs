//! An open device.

use std::fmt;
use std::mem::offset_of;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{VerbsError, errno_of};
use super::event::{self, AsyncEvent};
use super::ffi::*;
use super::gid::{self, Gid, GidKind};
use super::table::Verbs;

/// An open device. Every object that is created on it keeps it open.
pub struct Context {
    raw: *mut ibv_context,
    name: String,
    sysfs_path: PathBuf,
    /// The process that opened the device.
    pid: u32,
    verbs: Arc<Verbs>,
}

// SAFETY: any thread may call verbs. The fields that this type reads do not change while the device
// is open.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    ///
    /// `verbs` opened `raw`, and no other code closes it.
    pub(super) unsafe fn from_raw(
        raw: *mut ibv_context,
        verbs: Arc<Verbs>,
        name: String,
        sysfs_path: PathBuf,
    ) -> Self {
        Self { raw, name, sysfs_path, pid: std::process::id(), verbs }
    }

    /// The kernel's name for the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's directory under `/sys/class/infiniband`.
    pub fn sysfs_path(&self) -> &Path {
        &self.sysfs_path
    }

    /// The library that opened the device.
    pub fn verbs(&self) -> &Arc<Verbs> {
        &self.verbs
    }

    /// The raw structure, for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_context {
        self.raw
    }

    /// The number of completion vectors (interrupts) to distribute completion queues over.
    pub fn completion_vectors(&self) -> i32 {
        // SAFETY: handle contract: the device is open.
        unsafe { (*self.raw).num_comp_vectors }
    }

    /// The capabilities of the device.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver.
    pub fn device_attr(&self) -> Result<ibv_device_attr, VerbsError> {
        let mut attr = ibv_device_attr::zeroed();
        // SAFETY: handle contract: the device is open. `attr` has the size that the library
        // expects.
        let returned = unsafe { (self.verbs.symbols.ibv_query_device)(self.raw, &mut attr) };
        self.check("ibv_query_device", returned)?;
        Ok(attr)
    }

    /// The capabilities of the device with later additions. Fields that the driver does not know
    /// are zero.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver.
    pub fn device_attr_ex(&self) -> Result<ibv_device_attr_ex, VerbsError> {
        let mut attr = ibv_device_attr_ex::zeroed();
        // SAFETY: `QueryDeviceEx` is the type of that field.
        let query: Option<QueryDeviceEx> =
            unsafe { self.extended_op(offset_of!(verbs_context, query_device_ex)) };
        if let Some(query) = query {
            let size = size_of::<ibv_device_attr_ex>();
            // SAFETY: handle contract: the device is open. The driver writes at most `size` bytes.
            let returned = unsafe { query(self.raw, std::ptr::null(), &mut attr, size) };
            match errno_of(returned) {
                None => return Ok(attr),
                // The driver has the call but does not support it. The C header falls back in the
                // same way.
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => attr = ibv_device_attr_ex::zeroed(),
                Some(errno) => return Err(self.failed("ibv_query_device_ex", errno)),
            }
        }
        attr.orig_attr = self.device_attr()?;
        Ok(attr)
    }

    /// The state of a port. Port numbers start at 1.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver; `EINVAL` if the port does not exist.
    pub fn port_attr(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        let mut attr = ibv_port_attr::zeroed();
        // SAFETY: `QueryPort` is the type of that field.
        let query: Option<QueryPort> =
            unsafe { self.extended_op(offset_of!(verbs_context, query_port)) };
        let returned = match query {
            // SAFETY: handle contract: the device is open. The driver writes at most the given
            // size.
            Some(query) => unsafe { query(self.raw, port, &mut attr, size_of_val(&attr)) },
            // SAFETY: handle contract: the device is open. The library writes a prefix of `attr`.
            None => unsafe { (self.verbs.symbols.ibv_query_port)(self.raw, port, &mut attr) },
        };
        match errno_of(returned) {
            None => Ok(attr),
            Some(errno) => {
                let on = format!("port {port} of {}", self.name);
                Err(VerbsError::new("ibv_query_port", on, errno))
            }
        }
    }

    /// An entry of a port's GID table.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `ENODATA` if the entry is empty.
    pub fn gid(&self, port: u8, index: u32) -> Result<Gid, VerbsError> {
        let failed = |call, errno| {
            let on = format!("GID {index} of port {port} of {}", self.name);
            VerbsError::new(call, on, errno)
        };
        if let Some(query) = self.verbs.symbols._ibv_query_gid_ex {
            let mut entry = ibv_gid_entry::zeroed();
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: handle contract: the device is open. The library writes at most `size` bytes.
            let returned = unsafe { query(self.raw, u32::from(port), index, &mut entry, 0, size) };
            match errno_of(returned) {
                None => {
                    return Ok(Gid {
                        // SAFETY: all fields of the union are integers, and `zeroed` initialised
                        // every byte.
                        raw: unsafe { entry.gid.raw },
                        kind: GidKind::from_verbs(entry.gid_type),
                        interface_index: entry.ndev_ifindex,
                    });
                }
                // Neither the kernel nor the library can report the kind. The old call can still
                // read the GID.
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => {}
                Some(errno) => return Err(failed("ibv_query_gid_ex", errno)),
            }
        }

        let entry = i32::try_from(index).map_err(|_| failed("ibv_query_gid", libc::EINVAL))?;
        let mut found = ibv_gid::zeroed();
        // SAFETY: handle contract: the device is open. The library writes one GID.
        let returned =
            unsafe { (self.verbs.symbols.ibv_query_gid)(self.raw, port, entry, &mut found) };
        if let Some(errno) = errno_of(returned) {
            return Err(failed("ibv_query_gid", errno));
        }
        // SAFETY: all fields of the union are integers, and `zeroed` initialised every byte.
        let raw = unsafe { found.raw };
        if raw == [0; 16] {
            return Err(failed("ibv_query_gid", libc::ENODATA));
        }
        let (kind, interface_index) = gid::from_sysfs(&self.sysfs_path, port, index);
        Ok(Gid { raw, kind, interface_index })
    }

    /// The file descriptor for events. It is readable when an [`async_event`](Self::async_event) is
    /// pending.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: handle contract: the library keeps the descriptor open while the device is open.
        unsafe { BorrowedFd::borrow_raw((*self.raw).async_fd) }
    }

    /// Makes [`async_event`](Self::async_event) return instead of blocking.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from `fcntl`.
    pub fn set_async_nonblocking(&self) -> Result<(), VerbsError> {
        // SAFETY: handle contract: the device is open.
        let fd = unsafe { (*self.raw).async_fd };
        set_nonblocking(fd).map_err(|errno| self.failed("fcntl", errno))
    }

    /// Takes the next asynchronous event of the device. Returns `None` if no event is pending and
    /// [`set_async_nonblocking`](Self::set_async_nonblocking) was called.
    ///
    /// This function acknowledges the event at once, so destroying the object of an event never
    /// waits for the caller.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EIO` or `ENODEV` after the device was removed.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut raw = ibv_async_event { element: ibv_async_element::zeroed(), event_type: 0 };
        // SAFETY: handle contract: the device is open. The library fills `raw`.
        let returned = unsafe { (self.verbs.symbols.ibv_get_async_event)(self.raw, &mut raw) };
        match errno_of(returned) {
            None => {}
            Some(libc::EAGAIN | libc::EINTR) => return Ok(None),
            Some(errno) => return Err(self.failed("ibv_get_async_event", errno)),
        }
        // SAFETY: the library filled the event, and it is not yet acknowledged, so its object still
        // exists.
        let event = unsafe { event::read(&raw) };
        // SAFETY: the event is acknowledged once.
        unsafe { (self.verbs.symbols.ibv_ack_async_event)(&mut raw) };
        Ok(Some(event))
    }

    /// Whether this process opened the device. A forked child did not, and must not touch the
    /// device.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    pub(crate) fn failed(&self, call: &'static str, errno: i32) -> VerbsError {
        VerbsError::new(call, self.name.clone(), errno)
    }

    pub(crate) fn check(&self, call: &'static str, returned: i32) -> Result<(), VerbsError> {
        errno_of(returned).map_or(Ok(()), |errno| Err(self.failed(call, errno)))
    }

    /// The entry at `offset` in the `verbs_context` around this context, like `verbs_get_ctx_op` in
    /// C. Returns `None` if there is no such table or it is too short.
    ///
    /// # Safety
    ///
    /// `offset` is the offset of a field of type `Option<F>` in [`verbs_context`], and `F` is a
    /// function pointer.
    pub(super) unsafe fn extended_op<F>(&self, offset: usize) -> Option<F> {
        // SAFETY: handle contract: the device is open.
        if unsafe { (*self.raw).abi_compat }.addr() != usize::MAX {
            return None;
        }
        let behind = offset_of!(verbs_context, context);
        let field = |offset: usize| self.raw.wrapping_byte_sub(behind - offset);
        // SAFETY: all ones in `abi_compat` mean that this context lies in a `verbs_context`. Its
        // `sz` is directly in front of the context in every version.
        let size = unsafe { field(offset_of!(verbs_context, sz)).cast::<usize>().read() };
        // Older libraries have a shorter table that lacks the front of this one.
        if size < size_of::<verbs_context>() - offset {
            return None;
        }
        // SAFETY: the size check proves that the field is in the table; the caller guarantees the
        // type.
        unsafe { field(offset).cast::<Option<F>>().read() }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: this library opened the device and `drop` closes it once. Every object on it
            // held this context, so all of them are gone. `drop` cannot report the result.
            let _ = unsafe { (self.verbs.symbols.ibv_close_device)(self.raw) };
        } else {
            // Closing the device could act on the parent's device. The descriptors belong to this
            // process.
            // SAFETY: the structure is in this process's copy of the memory, and nothing else in
            // this process uses its descriptors.
            unsafe {
                libc::close((*self.raw).cmd_fd);
                libc::close((*self.raw).async_fd);
            }
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Makes a file descriptor non-blocking.
///
/// # Errors
///
/// Returns the error number.
pub(super) fn set_nonblocking(fd: RawFd) -> Result<(), i32> {
    // SAFETY: `fcntl` accepts any number as a descriptor. These two commands only read and set
    // flags.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
    };
    if done { Ok(()) } else { Err(errno_of(-1).unwrap_or(libc::EIO)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_that_is_not_open_is_refused() {
        assert_eq!(set_nonblocking(-1), Err(libc::EBADF));
    }
}
