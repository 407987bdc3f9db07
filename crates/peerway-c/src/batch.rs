//! What is to be transferred.

use std::ffi::c_void;

use peerway::{Batch, Class, PostError};

use crate::arguments::{self, Out, Versioned};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::region::{self, peerway_region};
use crate::remote::{self, peerway_remote};
use crate::status::{Answer, Failure, peerway_status};

/// Work to be posted: checked once, posted any number of times, by any thread.
pub struct peerway_batch {
    _private: (),
}

handle!(peerway_batch, Batch, "a batch", 5);

/// Which way bytes go.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_direction {
    /// From our memory into the peer's.
    Write = 0,
    /// From the peer's memory into ours.
    Read = 1,
}

/// Which lane a transfer takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_class {
    /// By size: small ones take the latency lane.
    Auto = 0,
    /// Ahead of bulk.
    Latency = 1,
    /// Never in the way of latency.
    Bulk = 2,
}

/// What else there is to say about a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_batch_options {
    /// sizeof(struct peerway_batch_options).
    pub size: usize,
    /// Ends the transfer, whatever its state, so long after it was posted; zero for the endpoint's.
    pub deadline_ns: u64,
    /// A message that the peer sees after the bytes, once; null for none. It is copied.
    pub notify: *const c_void,
    /// Its bytes.
    pub notify_len: usize,
    /// Not zero: a counter of the peer goes up by one after the bytes, once.
    pub counts: u32,
    /// And which.
    pub counter: u32,
    /// A peerway_class.
    pub lane_class: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: repr(C), its size first, and numbers and pointers only.
unsafe impl Versioned for peerway_batch_options {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_batch_options";
}

/// One range of a vector. This struct stays as it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_pair {
    /// Our memory.
    pub local: *const peerway_region,
    /// The first byte in it.
    pub local_offset: u64,
    /// The peer's memory.
    pub remote: *const peerway_remote,
    /// The first byte in it.
    pub remote_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Equal blocks of a region: block `i` starts at base + indices[i] * stride.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_blocks {
    /// sizeof(struct peerway_blocks).
    pub size: usize,
    /// Where block 0 starts.
    pub base: u64,
    /// From one block to the next.
    pub stride: u64,
    /// Bytes of a block.
    pub len: u64,
    /// Which blocks, in which order. They are copied.
    pub indices: *const u32,
    /// How many.
    pub count: usize,
}

// SAFETY: repr(C), its size first, and numbers and pointers only.
unsafe impl Versioned for peerway_blocks {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_blocks";
}

fn is_write(direction: u32) -> Answer<bool> {
    // A number of C's need not be one of the enum's, so it is not taken as one.
    const WRITE: u32 = peerway_direction::Write as u32;
    const READ: u32 = peerway_direction::Read as u32;
    match direction {
        WRITE => Ok(true),
        READ => Ok(false),
        _ => Err(Failure::bad(format!("direction: {direction} is no peerway_direction"))),
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
        _ => Err(Failure::bad(format!("lane_class: {given} is no peerway_class"))),
    }
}

/// Hands a batch out, with what its options say.
///
/// # Safety
///
/// `options` is null or as its size says.
unsafe fn finish(
    batch: Result<Batch, PostError>,
    options: *const peerway_batch_options,
    out: Out<*mut peerway_batch>,
) -> Answer {
    let mut batch = batch?;
    // SAFETY: the caller's promise.
    if let Some(options) = unsafe { arguments::read_if_any(options) }? {
        if options.reserved != 0 {
            return Err(Failure::bad("reserved must be zero"));
        }
        batch = batch.class(class(options.lane_class)?);
        if let Some(deadline) = arguments::time(options.deadline_ns) {
            batch = batch.deadline(deadline);
        }
        if !options.notify.is_null() {
            // SAFETY: the caller's promise.
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

/// One range. `direction` is a peerway_direction; options may be null.
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
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(batch, "batch") }?;
        let write = is_write(direction)?;
        let local = region::part(local, local_offset, len)?;
        let remote = remote::part(remote, remote_offset, len)?;
        let batch =
            if write { Batch::write(&local, &remote) } else { Batch::read(&local, &remote) };
        // SAFETY: the caller's promise.
        unsafe { finish(batch, options, out) }
    })
}

/// Many ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_vector(
    direction: u32,
    pairs: *const peerway_pair,
    count: usize,
    options: *const peerway_batch_options,
    batch: *mut *mut peerway_batch,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { finish(batch, options, out) }
    })
}

/// Blocks of one region from or into blocks of another: as many on both sides, and of the same length.
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
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(batch, "batch") }?;
        let write = is_write(direction)?;
        let (local, remote) = (get(local)?, get(remote)?);
        // SAFETY: the caller's promise.
        let (ours, theirs) =
            unsafe { (arguments::read(local_blocks)?, arguments::read(remote_blocks)?) };
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { finish(batch, options, out) }
    })
}

/// Bytes of a batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_total(
    batch: *const peerway_batch,
    bytes: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(bytes, "bytes", 0) }?;
        out.set(get(batch)?.total());
        Ok(())
    })
}

/// Frees a batch. What was posted or prepared of it goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_batch_free(batch: *mut peerway_batch) -> peerway_status {
    call(|| handles::free(batch).map(drop))
}
