//! Batches: the work of a transfer.

use std::ffi::c_void;

use peerway::{Batch, Class, PostError};

use crate::arguments::{self, Out, Versioned};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::region::{self, peerway_region};
use crate::remote::{self, peerway_remote};
use crate::status::{Answer, Failure, peerway_status};

/// The work of a transfer. It is checked once, and any thread may post it any number of times.
pub struct peerway_batch {
    _private: (),
}

handle!(peerway_batch, Batch, "a batch", 5);

/// The direction of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_direction {
    /// From local memory to the peer's memory.
    Write = 0,
    /// From the peer's memory to local memory.
    Read = 1,
}

/// The lane of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_class {
    /// By size: small transfers take the latency lane.
    Auto = 0,
    /// The latency lane, which goes ahead of bulk transfers.
    Latency = 1,
    /// A bulk lane, which does not delay latency transfers.
    Bulk = 2,
}

/// Options of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_batch_options {
    /// sizeof(struct peerway_batch_options).
    pub size: usize,
    /// The transfer ends this long after its post, whatever its state. Zero means the endpoint's
    /// deadline.
    pub deadline_ns: u64,
    /// A notification that the peer receives once, after the bytes. Null for none. The library
    /// copies it.
    pub notify: *const c_void,
    /// The length of the notification in bytes.
    pub notify_len: usize,
    /// If not zero, a counter of the peer rises by one, once, after the bytes.
    pub counts: u32,
    /// The id of that counter.
    pub counter: u32,
    /// A peerway_class.
    pub lane_class: u32,
    /// Must be zero.
    pub reserved: u32,
}

// SAFETY: repr(C), the size first, and only integers and pointers.
unsafe impl Versioned for peerway_batch_options {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_batch_options";
}

/// One range of a vector. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_pair {
    /// Local memory.
    pub local: *const peerway_region,
    /// The offset of the first byte in it.
    pub local_offset: u64,
    /// The peer's memory.
    pub remote: *const peerway_remote,
    /// The offset of the first byte in it.
    pub remote_offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// Blocks of equal length in a region. Entry `i` starts at base + indices[i] * stride.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_blocks {
    /// sizeof(struct peerway_blocks).
    pub size: usize,
    /// The offset of block 0.
    pub base: u64,
    /// The distance from one block to the next, in bytes.
    pub stride: u64,
    /// The length of a block in bytes.
    pub len: u64,
    /// The blocks, in the order of the transfer. The library copies the list.
    pub indices: *const u32,
    /// The number of indices.
    pub count: usize,
}

// SAFETY: repr(C), the size first, and only integers and pointers.
unsafe impl Versioned for peerway_blocks {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_blocks";
}

fn is_write(direction: u32) -> Answer<bool> {
    // C can pass any number, so the argument is an integer and not an enum.
    const WRITE: u32 = peerway_direction::Write as u32;
    const READ: u32 = peerway_direction::Read as u32;
    match direction {
        WRITE => Ok(true),
        READ => Ok(false),
        _ => Err(Failure::bad(format!("direction: {direction} is not a peerway_direction"))),
    }
}

fn class(given: u32) -> Answer<Class> {
    const AUTO: u32 = peerway_class::Auto as u32;
    const LATENCY: u32 = peerway_class::Latency as u32;
    const BULK: u32 = peerway_class::Bulk as u32;
    match given {
        AUTO => Ok(Class::Auto),
        LATENCY => Ok(Class::Latency),
        BULK => Ok(Class::Bulk),
        _ => Err(Failure::bad(format!("lane_class: {given} is not a peerway_class"))),
    }
}

/// Applies the options to a batch and returns a handle to it.
///
/// # Safety
///
/// `options` follows the C contract.
unsafe fn finish(
    batch: Result<Batch, PostError>,
    options: *const peerway_batch_options,
    out: Out<*mut peerway_batch>,
) -> Answer {
    let mut batch = batch?;
    // SAFETY: required of the caller.
    if let Some(options) = unsafe { arguments::read_if_any(options) }? {
        if options.reserved != 0 {
            return Err(Failure::bad("reserved must be zero"));
        }
        batch = batch.class(class(options.lane_class)?);
        if let Some(deadline) = arguments::time(options.deadline_ns) {
            batch = batch.deadline(deadline);
        }
        if !options.notify.is_null() {
            // SAFETY: required of the caller.
            let message = unsafe { arguments::bytes(options.notify, options.notify_len, "notify") };
            batch = batch.notify(message?)?;
        } else if options.notify_len != 0 {
            return Err(Failure::new(peerway_status::NullArgument, "notify is null"));
        }
        if options.counts != 0 {
            batch = batch.count(options.counter);
        }
    }
    out.set(handles::new(batch)?);
    Ok(())
}

/// Creates a batch of one range. `direction` is a peerway_direction. `options` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_range(
    direction: u32,
    local: *const peerway_region,
    local_offset: u64,
    remote: *const peerway_remote,
    remote_offset: u64,
    len: u64,
    options: *const peerway_batch_options,
    batch: *mut *mut peerway_batch,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(batch, "batch") }?;
        let write = is_write(direction)?;
        let local = region::part(local, local_offset, len)?;
        let remote = remote::part(remote, remote_offset, len)?;
        let batch =
            if write { Batch::write(&local, &remote) } else { Batch::read(&local, &remote) };
        // SAFETY: the C contract.
        unsafe { finish(batch, options, out) }
    })
}

/// Creates a batch of many ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_vector(
    direction: u32,
    pairs: *const peerway_pair,
    count: usize,
    options: *const peerway_batch_options,
    batch: *mut *mut peerway_batch,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, given) = unsafe {
            (arguments::handle(batch, "batch")?, arguments::list(pairs, count, "pairs")?)
        };
        let write = is_write(direction)?;
        let slices = given.iter().enumerate().map(|(at, pair)| {
            let named = |mut failure: Failure| {
                failure.sentence =
                    failure.sentence.map(|sentence| format!("pairs[{at}]: {sentence}"));
                failure
            };
            let local = region::part(pair.local, pair.local_offset, pair.len).map_err(named)?;
            Ok((local, remote::part(pair.remote, pair.remote_offset, pair.len).map_err(named)?))
        });
        let slices: Vec<_> = slices.collect::<Answer<_>>()?;
        let batch = if write { Batch::write_vector(&slices) } else { Batch::read_vector(&slices) };
        // SAFETY: the C contract.
        unsafe { finish(batch, options, out) }
    })
}

/// Creates a batch that copies blocks of one region from or to blocks of another. Both sides have
/// the same number of blocks, of the same length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_blocks(
    direction: u32,
    local: *const peerway_region,
    local_blocks: *const peerway_blocks,
    remote: *const peerway_remote,
    remote_blocks: *const peerway_blocks,
    options: *const peerway_batch_options,
    batch: *mut *mut peerway_batch,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(batch, "batch") }?;
        let write = is_write(direction)?;
        let (local, remote) = (get(local)?, get(remote)?);
        // SAFETY: the C contract.
        let (ours, theirs) =
            unsafe { (arguments::read(local_blocks)?, arguments::read(remote_blocks)?) };
        // SAFETY: the C contract.
        let indices = |blocks: &peerway_blocks| unsafe {
            arguments::list(blocks.indices, blocks.count, "indices")
        };
        let local = local.blocks(ours.base, ours.stride, ours.len, indices(&ours)?);
        let remote = remote.blocks(theirs.base, theirs.stride, theirs.len, indices(&theirs)?);
        let batch = if write {
            Batch::write_blocks(local, remote)
        } else {
            Batch::read_blocks(local, remote)
        };
        // SAFETY: the C contract.
        unsafe { finish(batch, options, out) }
    })
}

/// Sets *bytes to the total bytes of a batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_total(
    batch: *const peerway_batch,
    bytes: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(bytes, "bytes", 0) }?;
        out.set(get(batch)?.total());
        Ok(())
    })
}

/// Frees a batch. Its posted transfers continue, and its prepared transfers stay usable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_free(batch: *mut peerway_batch) -> peerway_status {
    call(|| handles::free(batch).map(drop))
}
