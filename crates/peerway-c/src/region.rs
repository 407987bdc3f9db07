//! Local memory.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use peerway::{Access, Fence, LocalSlice, OwnedMemory, Region};

use crate::arguments::{self, Fill, Out, Versioned};
use crate::endpoint::peerway_endpoint;
use crate::entry::call;
use crate::handles::{self, get, get_if_any, handle};
use crate::peer::peerway_peer;
use crate::status::{Answer, Failure, peerway_status};

/// The length of a descriptor in bytes.
pub const PEERWAY_DESCRIPTOR_LEN: usize = 64;

const _: () = assert!(PEERWAY_DESCRIPTOR_LEN == peerway::DESCRIPTOR_LEN);

/// Registered memory of this process, on the host or on a GPU.
pub struct peerway_region {
    _private: (),
}

handle!(peerway_region, Region, "a region", 3);

/// What a peer may do with advertised memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_access {
    /// Read it.
    Read = 1,
    /// Write it.
    Write = 2,
    /// Both.
    ReadWrite = 3,
}

/// Facts about a region.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_region_facts {
    /// sizeof(struct peerway_region_facts).
    pub size: usize,
    /// The address of the first byte. Only GPUs can use the address of GPU memory.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
    /// Whether it is GPU memory.
    pub on_gpu: u32,
    /// The number of the GPU in this process, for GPU memory.
    pub gpu: u32,
    /// Whether peers on this host can map it.
    pub shareable: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_region_facts {
    const FIRST: usize = 40;
    const NAME: &'static str = "struct peerway_region_facts";
}

/// Allocates zeroed memory that peers on this host can map. This allows the fastest path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_allocate(
    endpoint: *const peerway_endpoint,
    len: usize,
    region: *mut *mut peerway_region,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(region, "region") }?;
        out.set(handles::new(get(endpoint)?.allocate(len)?)?);
        Ok(())
    })
}

/// Allocates memory on a GPU that peers on this host can map.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_allocate_gpu(
    endpoint: *const peerway_endpoint,
    gpu: u32,
    len: u64,
    region: *mut *mut peerway_region,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(region, "region") }?;
        out.set(handles::new(get(endpoint)?.allocate_gpu(gpu, len)?)?);
        Ok(())
    })
}

/// Registers memory that the caller owns: host memory, or GPU memory if the process already uses a
/// GPU.
///
/// The memory must stay valid until the region is freed and every transfer that uses it has ended
/// with a held fence. Until then, peers may read and write it at any time.
/// peerway_region_register_owned reports that moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_register(
    endpoint: *const peerway_endpoint,
    memory: *mut c_void,
    len: usize,
    region: *mut *mut peerway_region,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(region, "region") }?;
        // SAFETY: the C contract, and the header requires that the memory stays valid.
        let registered = unsafe { get(endpoint)?.register_raw(memory.cast(), len) }?;
        out.set(handles::new(registered)?);
        Ok(())
    })
}

/// Registers GPU memory that the caller owns, as peerway_region_register does. The driver tells
/// which GPU it belongs to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_register_gpu(
    endpoint: *const peerway_endpoint,
    address: u64,
    len: usize,
    region: *mut *mut peerway_region,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(region, "region") }?;
        // SAFETY: the C contract, and the header requires that the memory stays valid.
        let registered = unsafe { get(endpoint)?.register_gpu_raw(address, len) }?;
        out.set(handles::new(registered)?);
        Ok(())
    })
}

/// Registers memory that the library releases with `release(context)`. The library calls it once
/// the region is freed and nothing can access the memory any more, not even a transfer with an open
/// fence.
///
/// Any thread may make the call, and makes it only once. `release` must not call the library and
/// must not throw. If this call fails, `release` is never called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_register_owned(
    endpoint: *const peerway_endpoint,
    memory: *mut c_void,
    len: usize,
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
    region: *mut *mut peerway_region,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(region, "region") }?;
        let release =
            release.ok_or_else(|| Failure::new(peerway_status::NullArgument, "release is null"))?;
        let endpoint = get(endpoint)?;
        if memory.is_null() && len > 0 || (memory as usize).checked_add(len).is_none() {
            let sentence = format!("{memory:p} + {len} bytes is not a range of memory");
            return Err(Failure::new(peerway_status::BadRange, sentence));
        }
        let armed = Arc::new(AtomicBool::new(false));
        let owned = Owned { memory: memory.cast(), len, release, context, armed: armed.clone() };
        let registered = endpoint.register(owned)?;
        let made = handles::new(registered)?;
        armed.store(true, Ordering::Release);
        out.set(made);
        Ok(())
    })
}

/// Memory of C with its release function.
struct Owned {
    memory: *mut u8,
    len: usize,
    release: unsafe extern "C" fn(*mut c_void),
    context: *mut c_void,
    /// Set once the registering call succeeds. `release` must not run if that call fails.
    armed: Arc<AtomicBool>,
}

// SAFETY: the header allows any thread to call `release`, and this type only passes the pointers
// on.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

// SAFETY: the header requires that the memory stays valid until `release`, and no Rust reference to
// it exists.
unsafe impl OwnedMemory for Owned {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.memory, self.len)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.armed.load(Ordering::Acquire) {
            // SAFETY: the caller of `peerway_region_register_owned` allows one such call.
            unsafe { (self.release)(self.context) };
        }
    }
}

/// Fills in the facts about a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_describe(
    region: *const peerway_region,
    facts: *mut peerway_region_facts,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(facts) }?;
        let region = get(region)?;
        let gpu = region.gpu();
        fill.set(peerway_region_facts {
            size: 0,
            address: region.addr(),
            len: region.len(),
            on_gpu: gpu.is_some().into(),
            gpu: gpu.unwrap_or(0),
            shareable: region.is_shareable().into(),
            reserved: 0,
        });
        Ok(())
    })
}

/// Copies bytes out of a region, also from GPU memory. Bytes that a peer changes during the call
/// may be torn.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_copy_out(
    region: *const peerway_region,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> peerway_status {
    call(|| {
        let region = get(region)?;
        // SAFETY: the C contract. The result is only checked and not read.
        unsafe { arguments::bytes(into, len, "into") }?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the pointer is not null. The C contract covers the rest.
        Ok(region.read_at(offset, unsafe { std::slice::from_raw_parts_mut(into.cast(), len) })?)
    })
}

/// Copies bytes into a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_copy_in(
    region: *const peerway_region,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> peerway_status {
    call(|| {
        let region = get(region)?;
        // SAFETY: the C contract.
        Ok(region.write_at(offset, unsafe { arguments::bytes(from, len, "from") }?)?)
    })
}

/// Sets bytes of a region to a value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_fill(
    region: *const peerway_region,
    offset: u64,
    len: u64,
    value: u8,
) -> peerway_status {
    call(|| Ok(get(region)?.fill(offset, len, value)?))
}

/// Advertises a part of a region, and fills in a descriptor of PEERWAY_DESCRIPTOR_LEN bytes. Only
/// `to` can use it; if `to` is null, any peer that has the bytes can use it.
///
/// The same part, rights and peer give the same descriptor again. `access` is a peerway_access. A
/// length of UINT64_MAX means the rest of the region from the offset on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_advertise(
    region: *const peerway_region,
    offset: u64,
    len: u64,
    access: u32,
    to: *const peerway_peer,
    descriptor: *mut u8,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract, and the header requires room for a descriptor.
        let out =
            unsafe { Out::new(descriptor.cast(), "descriptor", [0; PEERWAY_DESCRIPTOR_LEN]) }?;
        let (region, to) = (get(region)?, get_if_any(to)?);
        let rights = rights(access)?;
        let end = match len {
            u64::MAX => region.len(),
            len => offset.checked_add(len).ok_or_else(|| outside(offset, len))?,
        };
        out.set(region.advertise_range(offset..end, rights, to.as_deref())?);
        Ok(())
    })
}

fn rights(access: u32) -> Answer<Access> {
    const READ: u32 = peerway_access::Read as u32;
    const WRITE: u32 = peerway_access::Write as u32;
    const READ_WRITE: u32 = peerway_access::ReadWrite as u32;
    match access {
        READ => Ok(Access::READ),
        WRITE => Ok(Access::WRITE),
        READ_WRITE => Ok(Access::READ_WRITE),
        _ => Err(Failure::bad(format!("access: {access} is not a peerway_access"))),
    }
}

fn outside(offset: u64, len: u64) -> Failure {
    Failure::new(peerway_status::Outside, format!("range {offset}+{len} leaves the region"))
}

/// Revokes all advertisements of a region. Sets *open to whether a peer may still access it after
/// the fence's deadline. `open` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_revoke(
    region: *const peerway_region,
    open: *mut bool,
) -> peerway_status {
    call(|| {
        let fence = get(region)?.revoke();
        if !open.is_null() {
            // SAFETY: the C contract.
            unsafe { Out::new(open, "open", fence == Fence::Open) }?;
        }
        Ok(())
    })
}

/// Ends a registration and its advertisements. Transfers that use the memory continue. Memory that
/// the library allocated stays allocated until they end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_region_free(region: *mut peerway_region) -> peerway_status {
    call(|| handles::free(region).map(drop))
}

/// A part of local memory.
pub(crate) fn part(region: *const peerway_region, offset: u64, len: u64) -> Answer<LocalSlice> {
    let region = get(region)?;
    let all = region.len();
    match offset.checked_add(len).filter(|end| *end <= all) {
        Some(end) => Ok(region.slice(offset..end)),
        None => {
            let sentence = format!("range {offset}+{len} leaves the region of {all} bytes");
            Err(Failure::new(peerway_status::Outside, sentence))
        }
    }
}
