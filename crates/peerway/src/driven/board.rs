//! The memory of rings and answers: slots, credit, answers to `quiet`, faults, and the table by which a kernel finds them.
//!
//! All but claims and the table lies in host memory that the GPU reaches; those lie in the GPU's own, or, where a
//! processor stands in for it, in host memory too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use peerway_sys::cuda::{HostMemory as Pinned, Plain};

use super::ring::{HostMemory, Memory};
use crate::gpu::GpuError;
use crate::gpu::device::Device;
use peerway_core::abi::{LINE, LINES, MAGIC, RawFault, RawProxy, RawRing, VERSION};

/// Bytes between the words of two rings that producers use: GPUs keep 128 bytes together.
const NEAR_LINE: usize = 128;

/// What a board is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rings: usize,
    pub(crate) log2_slots: u32,
    pub(crate) peers: usize,
    pub(crate) counters: usize,
    pub(crate) timeout_ns: u64,
}

/// See the module.
pub(crate) struct Board {
    shape: Shape,
    layout: Layout,
    host: Host,
    near: Near,
}

/// Offsets in the host's part.
#[derive(Clone, Copy, Debug)]
struct Layout {
    credit: usize,
    completed: usize,
    peer_faults: usize,
    fault: usize,
    len: usize,
}

/// Memory that producers and the proxy share.
enum Host {
    Pinned(Pinned),
    /// In lines, so that it is aligned to them.
    Plain(Box<[Line]>),
}

/// Memory of the producers.
enum Near {
    Gpu(Plain),
    Host(Box<[Line]>),
}

#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct Line([u8; 128]);

impl Board {
    /// A board all of whose words are zero, and its table.
    pub(crate) fn new(
        shape: Shape,
        device: Option<&Arc<Device>>,
        counter_words: u64,
    ) -> Result<Self, GpuError> {
        let layout = Layout::of(&shape);
        let near_len = shape.rings * 2 * NEAR_LINE
            + shape.rings * size_of::<RawRing>()
            + size_of::<RawProxy>();
        let lines = |len: usize| vec![Line([0; 128]); len.div_ceil(128)].into_boxed_slice();
        let (host, near) = match device {
            Some(device) => {
                let host = device.host_memory(layout.len)?;
                // SAFETY: all of what was just allocated.
                unsafe { host.ptr().write_bytes(0, layout.len) };
                let near = Plain::allocate(&device.gpu, near_len)?;
                // SAFETY: all of what was just allocated.
                unsafe { device.fill_now(near.address(), 0, near_len) }?;
                (Host::Pinned(host), Near::Gpu(near))
            }
            None => (Host::Plain(lines(layout.len)), Near::Host(lines(near_len))),
        };
        let board = Self { shape, layout, host, near };
        let table = board.table(counter_words);
        let at = board.near() + (shape.rings * 2 * NEAR_LINE) as u64;
        match device {
            // SAFETY: inside the producers' memory, behind the claims.
            Some(device) => unsafe { device.copy_now(at, table.as_ptr() as u64, table.len()) }?,
            // SAFETY: as above; nobody has the address yet.
            None => unsafe {
                std::ptr::copy_nonoverlapping(table.as_ptr(), at as *mut u8, table.len());
            },
        }
        Ok(board)
    }

    /// The rings' structures, and the proxy's behind them.
    fn table(&self, counter_words: u64) -> Vec<u8> {
        let host = self.base() as u64;
        let rings = self.shape.rings;
        let mut bytes = Vec::new();
        for ring in 0..rings {
            let near = self.near() + (ring * 2 * NEAR_LINE) as u64;
            let raw = RawRing {
                slots: host + self.slots_at(ring) as u64,
                credit: host + self.credit_at(ring) as u64,
                completed: host + self.completed_at(ring, 0) as u64,
                claim: near,
                cached: near + NEAR_LINE as u64,
                log2_slots: self.shape.log2_slots,
                reserved: 0,
            };
            bytes.extend_from_slice(plain_bytes(&raw));
        }
        let raw = RawProxy {
            magic: MAGIC,
            version: VERSION,
            rings: rings as u32,
            peers: self.shape.peers as u32,
            counters: self.shape.counters as u32,
            reserved: 0,
            ring_table: self.near() + (rings * 2 * NEAR_LINE) as u64,
            counter_words,
            peer_faults: host + self.layout.peer_faults as u64,
            fault: host + self.layout.fault as u64,
            timeout_ns: self.shape.timeout_ns,
        };
        bytes.extend_from_slice(plain_bytes(&raw));
        bytes
    }

    /// What a kernel is given: the address of a `peerway_proxy`, in its memory.
    pub(crate) fn handle(&self) -> u64 {
        let rings = self.shape.rings;
        self.near() + (rings * 2 * NEAR_LINE + rings * size_of::<RawRing>()) as u64
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The consumer's words of a ring.
    pub(crate) fn ring(&self, ring: usize) -> Memory {
        assert!(ring < self.shape.rings, "a ring of the board");
        let at = |offset: usize| self.base().wrapping_add(offset).cast();
        Memory { slots: at(self.slots_at(ring)), credit: at(self.credit_at(ring)) }
    }

    /// All words of a ring, where its producers are processors.
    pub(crate) fn host_ring(&self, ring: usize) -> Option<HostMemory> {
        let Near::Host(_) = self.near else { return None };
        let near = (self.near() as *mut u8).wrapping_add(ring * 2 * NEAR_LINE);
        let cached = near.wrapping_add(NEAR_LINE).cast();
        Some(HostMemory { ring: self.ring(ring), claim: near.cast(), cached })
    }

    /// Answers a `quiet`: `answer` rises from one to the next.
    pub(crate) fn answer(&self, ring: usize, peer: usize, answer: u64) {
        for line in 0..LINES {
            // pairs with the loads of `peerway__await` and `Self::answered`; a maximum, because what is left of a peer that was
            // replaced may answer late
            let word = self.word(self.completed_at(ring, peer) + line * LINE);
            word.fetch_max(answer, Ordering::Release);
        }
    }

    /// The last answer.
    pub(crate) fn answered(&self, ring: usize, peer: usize) -> u64 {
        self.word(self.completed_at(ring, peer)).load(Ordering::Acquire)
    }

    /// Why a peer is of no more use; zero while it is.
    pub(crate) fn peer_fault(&self, peer: usize) -> &AtomicU32 {
        assert!(peer < self.shape.peers, "a peer of the board");
        self.word32(self.layout.peer_faults + 4 * peer)
    }

    /// The first fault; the caller is the only one to write it.
    pub(crate) fn write_fault(&self, fault: &RawFault) {
        let at = self.layout.fault;
        let put = |offset: usize, value: u32| {
            self.word32(at + offset).store(value, Ordering::Relaxed);
        };
        put(std::mem::offset_of!(RawFault, peer), fault.peer);
        put(std::mem::offset_of!(RawFault, ring), fault.ring);
        put(std::mem::offset_of!(RawFault, op), fault.op);
        let position = self.word(at + std::mem::offset_of!(RawFault, position));
        position.store(fault.position, Ordering::Relaxed);
        let count = self.word(at + std::mem::offset_of!(RawFault, count));
        count.store(fault.count, Ordering::Relaxed);
        // Last: who sees it sees the rest.
        self.word32(at).store(fault.code, Ordering::Release);
    }

    fn slots_at(&self, ring: usize) -> usize {
        ring * (16 << self.shape.log2_slots)
    }

    fn credit_at(&self, ring: usize) -> usize {
        self.layout.credit + ring * LINE
    }

    fn completed_at(&self, ring: usize, peer: usize) -> usize {
        self.layout.completed + (ring * self.shape.peers + peer) * LINES * LINE
    }

    fn base(&self) -> *mut u8 {
        match &self.host {
            Host::Pinned(memory) => memory.ptr(),
            Host::Plain(lines) => lines.as_ptr().cast_mut().cast(),
        }
    }

    fn near(&self) -> u64 {
        match &self.near {
            Near::Gpu(memory) => memory.address(),
            Near::Host(lines) => lines.as_ptr() as u64,
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= self.layout.len);
        // SAFETY: inside the host's part, aligned by the layout, and only ever used through atomics.
        unsafe { AtomicU64::from_ptr(self.base().add(at).cast()) }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at + 4 <= self.layout.len);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base().add(at).cast()) }
    }
}

// SAFETY: shared memory that is only used through atomics; addresses of a GPU's memory are only numbers here.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Layout {
    fn of(shape: &Shape) -> Self {
        let credit = shape.rings * (16 << shape.log2_slots);
        let completed = (credit + shape.rings * LINE).next_multiple_of(LINE);
        let peer_faults = completed + shape.rings * shape.peers * LINES * LINE;
        let fault = (peer_faults + 4 * shape.peers).next_multiple_of(LINE);
        Self { credit, completed, peer_faults, fault, len: fault + LINE }
    }
}

/// The bytes of a structure of the ABI, none of which has padding.
fn plain_bytes<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: plain integers without padding: see `abi`.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}
