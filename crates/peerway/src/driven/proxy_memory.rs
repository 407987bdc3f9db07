//! The memory of rings and answers: slots, credit, answers to `quiet`, faults, and the table
//! through which a kernel finds them.
//!
//! Claims, cached credits and the table lie in GPU memory, or in host memory when CPU threads push
//! in place of a kernel. Everything else lies in host memory that the GPU can access.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use peerway_sys::cuda::{HostMemory as Pinned, Plain};

use super::ring::{HostMemory, RingWords};
use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::os::pages::Pages;
use peerway_core::abi::{LINE, LINES, MAGIC, RawFault, RawProxy, RawRing, VERSION};

/// Distance in bytes between the producers' words of two rings. GPUs cache 128 bytes as one line.
const NEAR_LINE: usize = 128;

/// The sizes of a [`ProxyMemory`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rings: usize,
    pub(crate) log2_slots: u32,
    pub(crate) peers: usize,
    pub(crate) counters: usize,
    pub(crate) timeout_ns: u64,
}

/// See the module.
pub(crate) struct ProxyMemory {
    shape: Shape,
    layout: Layout,
    host: Host,
    near: Near,
}

/// Offsets in the host memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    credit: usize,
    completed: usize,
    peer_faults: usize,
    fault: usize,
    len: usize,
}

/// Memory that producers and the proxy share.
///
/// Both sides write it while the other side holds pointers into it. Each variant therefore owns its
/// memory by address, and the only references into it are references to atomics.
enum Host {
    Pinned(Pinned),
    Plain(Pages),
}

/// Memory of the producers, owned by address like [`Host`].
enum Near {
    Gpu(Plain),
    Host(Pages),
}

impl ProxyMemory {
    /// Allocates the memory, zeroes all words and writes the table.
    pub(crate) fn new(
        shape: Shape,
        device: Option<&Arc<Device>>,
        counter_words: u64,
    ) -> Result<Self, GpuError> {
        let layout = Layout::of(&shape);
        let near_len = shape.rings * 2 * NEAR_LINE
            + shape.rings * size_of::<RawRing>()
            + size_of::<RawProxy>();
        let (host, near) = match device {
            Some(device) => {
                let host = device.host_memory(layout.len)?;
                // SAFETY: the range is the allocation of the line above.
                unsafe { host.ptr().write_bytes(0, layout.len) };
                let near = Plain::allocate(&device.gpu, near_len)?;
                // SAFETY: the range is the allocation of the line above.
                unsafe { device.fill_now(near.address(), 0, near_len) }?;
                (Host::Pinned(host), Near::Gpu(near))
            }
            None => {
                (Host::Plain(Pages::new(layout.len, None)), Near::Host(Pages::new(near_len, None)))
            }
        };
        let memory = Self { shape, layout, host, near };
        let table = memory.table(counter_words);
        let behind_claims = shape.rings * 2 * NEAR_LINE;
        match (device, &memory.near) {
            (Some(device), _) => {
                let at = memory.near() + behind_claims as u64;
                // SAFETY: the table ends where the producers' memory ends (`near_len`).
                unsafe { device.copy_now(at, table.as_ptr() as u64, table.len()) }?;
            }
            (None, Near::Host(pages)) => {
                assert!(behind_claims + table.len() <= pages.len());
                // SAFETY: the assertion keeps the range inside the pages, and no other thread knows
                // them yet. The pointer is the allocation's own, so writing through it is allowed.
                unsafe {
                    let into = pages.ptr().add(behind_claims);
                    std::ptr::copy_nonoverlapping(table.as_ptr(), into, table.len());
                }
            }
            (None, Near::Gpu(_)) => unreachable!("without a GPU all memory is host memory"),
        }
        Ok(memory)
    }

    /// The table: one `RawRing` per ring, then the `RawProxy`.
    fn table(&self, counter_words: u64) -> Vec<u8> {
        let host = self.base().expose_provenance() as u64;
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

    /// The argument for kernels: the address of a `peerway_proxy` in memory that they can access.
    pub(crate) fn handle(&self) -> u64 {
        let rings = self.shape.rings;
        self.near() + (rings * 2 * NEAR_LINE + rings * size_of::<RawRing>()) as u64
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The words of a ring that the consumer uses.
    pub(crate) fn ring(&self, ring: usize) -> RingWords {
        assert!(ring < self.shape.rings, "ring number out of range");
        let at = |offset: usize| self.base().wrapping_add(offset).cast();
        RingWords { slots: at(self.slots_at(ring)), credit: at(self.credit_at(ring)) }
    }

    /// All words of a ring. `None` if its producers are kernels.
    pub(crate) fn host_ring(&self, ring: usize) -> Option<HostMemory> {
        assert!(ring < self.shape.rings, "ring number out of range");
        let Near::Host(pages) = &self.near else { return None };
        let near = pages.ptr().wrapping_add(ring * 2 * NEAR_LINE);
        let cached = near.wrapping_add(NEAR_LINE).cast();
        Some(HostMemory { ring: self.ring(ring), claim: near.cast(), cached })
    }

    /// Answers a `quiet`. The answers of one ring and peer only rise.
    pub(crate) fn answer(&self, ring: usize, peer: usize, answer: u64) {
        for line in 0..LINES {
            // Pairs with the loads of `peerway__await` and `Self::answered`. The store is a maximum
            // because a peer that was replaced may still answer late.
            let word = self.word(self.completed_at(ring, peer) + line * LINE);
            word.fetch_max(answer, Ordering::Release);
        }
    }

    /// The latest answer.
    pub(crate) fn answered(&self, ring: usize, peer: usize) -> u64 {
        self.word(self.completed_at(ring, peer)).load(Ordering::Acquire)
    }

    /// The fault code of a peer. Zero means that the peer is usable.
    pub(crate) fn peer_fault(&self, peer: usize) -> &AtomicU32 {
        assert!(peer < self.shape.peers, "peer number out of range");
        self.word32(self.layout.peer_faults + 4 * peer)
    }

    /// Writes the first fault. Only one thread may write it at a time: `Faults` holds its lock.
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
        // Stored last: a thread that sees the code also sees the other fields.
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
            Host::Plain(pages) => pages.ptr(),
        }
    }

    fn near(&self) -> u64 {
        match &self.near {
            Near::Gpu(memory) => memory.address(),
            // Exposed, because programs that act as kernels make pointers from the table's
            // addresses.
            Near::Host(pages) => pages.ptr().expose_provenance() as u64,
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= self.layout.len);
        // SAFETY: `base` is the address of an allocation of `layout.len` bytes. `self` owns it, it
        // is aligned to lines, and the only references into it are to atomics. The assertion keeps
        // the word inside, and `Layout` keeps it aligned. All threads access it atomically with
        // this size, and so do kernels.
        unsafe { AtomicU64::from_ptr(self.base().add(at).cast()) }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at + 4 <= self.layout.len);
        // SAFETY: the same argument as for `word`.
        unsafe { AtomicU32::from_ptr(self.base().add(at).cast()) }
    }
}

// SAFETY: the memory is bound to no thread. Addresses of GPU memory are only numbers here.
unsafe impl Send for ProxyMemory {}
// SAFETY: `new` has the memory to itself. All later accesses through `&ProxyMemory` are atomic.
unsafe impl Sync for ProxyMemory {}

impl Layout {
    fn of(shape: &Shape) -> Self {
        let credit = shape.rings * (16 << shape.log2_slots);
        let completed = (credit + shape.rings * LINE).next_multiple_of(LINE);
        let peer_faults = completed + shape.rings * shape.peers * LINES * LINE;
        let fault = (peer_faults + 4 * shape.peers).next_multiple_of(LINE);
        Self { credit, completed, peer_faults, fault, len: fault + LINE }
    }
}

/// The bytes of an ABI structure. No ABI structure has padding.
fn plain_bytes<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: `T` consists of integers without padding (see `abi`), so all its bytes are
    // initialised.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::super::ring::{CommandConsumer, CommandProducer};
    use super::*;

    const SHAPE: Shape =
        Shape { rings: 2, log2_slots: 2, peers: 3, counters: 4, timeout_ns: 1_000_000 };

    fn memory() -> ProxyMemory {
        ProxyMemory::new(SHAPE, None, 0).unwrap()
    }

    /// Finds a ring through the addresses in the table, as a kernel does.
    fn ring_by_table(memory: &ProxyMemory, ring: usize) -> RawRing {
        // SAFETY: `handle` is the address of a `RawProxy` in memory that `memory` owns.
        let proxy =
            unsafe { &*std::ptr::with_exposed_provenance::<RawProxy>(memory.handle() as usize) };
        assert_eq!(
            (proxy.magic, proxy.version, proxy.rings as usize),
            (MAGIC, VERSION, SHAPE.rings)
        );
        let rings = std::ptr::with_exposed_provenance::<RawRing>(proxy.ring_table as usize);
        // SAFETY: the table holds `rings` entries, and no thread writes it.
        unsafe { rings.add(ring).read() }
    }

    #[test]
    fn producers_and_the_consumer_of_a_moved_proxy_memory_share_it() {
        let memory = Box::new(memory());
        let mut consumers =
            [0, 1].map(|ring| CommandConsumer::new(memory.ring(ring), SHAPE.log2_slots));
        let laps = if cfg!(miri) { 12 } else { 4000 };
        std::thread::scope(|scope| {
            for ring in 0..SHAPE.rings {
                let words = memory.host_ring(ring).unwrap();
                scope.spawn(move || {
                    let producer = CommandProducer::new(words, SHAPE.log2_slots);
                    for n in 0..laps {
                        let patient = || {
                            std::thread::yield_now();
                            true
                        };
                        assert_eq!(producer.push(&[[n << 1, n << 1]], patient), Ok(n));
                    }
                });
            }
            let mut got = [0u64; 2];
            while got != [laps; 2] {
                for (ring, consumer) in consumers.iter_mut().enumerate() {
                    consumer.drain(usize::MAX, |_, _| {
                        got[ring] += 1;
                        ControlFlow::Continue(())
                    });
                    memory.answer(ring, 2, got[ring]);
                }
                std::thread::yield_now();
            }
        });
        for ring in 0..SHAPE.rings {
            assert_eq!(memory.answered(ring, 2), laps);
            let raw = ring_by_table(&memory, ring);
            let claim = std::ptr::with_exposed_provenance::<u64>(raw.claim as usize);
            // SAFETY: a word of memory that `memory` owns. Its producers have ended.
            assert_eq!(unsafe { claim.read() }, laps);
        }
    }

    #[test]
    fn a_fault_is_where_the_table_says() {
        let memory = memory();
        memory.peer_fault(1).store(7, Ordering::Release);
        let mut fault = plain_zero::<RawFault>();
        (fault.code, fault.peer, fault.position) = (5, 1, 9);
        memory.write_fault(&fault);
        // SAFETY: the same argument as in `ring_by_table`.
        let proxy =
            unsafe { &*std::ptr::with_exposed_provenance::<RawProxy>(memory.handle() as usize) };
        let written = std::ptr::with_exposed_provenance::<RawFault>(proxy.fault as usize);
        // SAFETY: memory that `memory` owns, and no thread writes it now.
        let written = unsafe { written.read() };
        assert_eq!((written.code, written.peer, written.position), (5, 1, 9));
        let peers = std::ptr::with_exposed_provenance::<u32>(proxy.peer_faults as usize);
        // SAFETY: the same argument; there are three words.
        assert_eq!(unsafe { [peers.read(), peers.add(1).read()] }, [0, 7]);
    }

    fn plain_zero<T: Copy>() -> T {
        // SAFETY: `T` is an ABI structure, which consists of integers.
        unsafe { std::mem::zeroed() }
    }
}
