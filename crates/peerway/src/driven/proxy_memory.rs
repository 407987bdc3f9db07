//! The memory of rings and answers: slots, credit, answers to `quiet`, faults, and the table by which a kernel finds them.
//!
//! All but claims and the table lies in host memory that the GPU reaches; those lie in the GPU's own, or, where a
//! processor stands in for it, in host memory too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use peerway_sys::cuda::{HostMemory as Pinned, Plain};

use super::ring::{HostMemory, RingWords};
use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::os::pages::Pages;
use peerway_core::abi::{LINE, LINES, MAGIC, RawFault, RawProxy, RawRing, VERSION};

/// Bytes between the words of two rings that producers use: GPUs keep 128 bytes together.
const NEAR_LINE: usize = 128;

/// What a memory is made for.
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

/// Offsets in the host's part.
#[derive(Clone, Copy, Debug)]
struct Layout {
    credit: usize,
    completed: usize,
    peer_faults: usize,
    fault: usize,
    len: usize,
}

/// RingWords that producers and the proxy share.
///
/// Both write it while the other holds pointers into it. So each variant owns its memory by address, and
/// no reference to it is made but to atomics in it.
enum Host {
    Pinned(Pinned),
    Plain(Pages),
}

/// RingWords of the producers, owned by address as [`Host`] is.
enum Near {
    Gpu(Plain),
    Host(Pages),
}

impl ProxyMemory {
    /// A memory all of whose words are zero, and its table.
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
                // SAFETY: all of what was just allocated.
                unsafe { host.ptr().write_bytes(0, layout.len) };
                let near = Plain::allocate(&device.gpu, near_len)?;
                // SAFETY: all of what was just allocated.
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
                // SAFETY: the table ends where the producers' memory does (`near_len`).
                unsafe { device.copy_now(at, table.as_ptr() as u64, table.len()) }?;
            }
            (None, Near::Host(pages)) => {
                assert!(behind_claims + table.len() <= pages.len());
                // SAFETY: inside the pages, as was just checked, and no other thread knows them yet. The
                // pointer is the allocation's own, so it may be written through.
                unsafe {
                    let into = pages.ptr().add(behind_claims);
                    std::ptr::copy_nonoverlapping(table.as_ptr(), into, table.len());
                }
            }
            (None, Near::Gpu(_)) => unreachable!("a memory without a GPU has host memory"),
        }
        Ok(memory)
    }

    /// The rings' structures, and the proxy's behind them.
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

    /// What a kernel is given: the address of a `peerway_proxy`, in its memory.
    pub(crate) fn handle(&self) -> u64 {
        let rings = self.shape.rings;
        self.near() + (rings * 2 * NEAR_LINE + rings * size_of::<RawRing>()) as u64
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The consumer's words of a ring.
    pub(crate) fn ring(&self, ring: usize) -> RingWords {
        assert!(ring < self.shape.rings, "a ring of the memory");
        let at = |offset: usize| self.base().wrapping_add(offset).cast();
        RingWords { slots: at(self.slots_at(ring)), credit: at(self.credit_at(ring)) }
    }

    /// All words of a ring, where its producers are processors.
    pub(crate) fn host_ring(&self, ring: usize) -> Option<HostMemory> {
        assert!(ring < self.shape.rings, "a ring of the memory");
        let Near::Host(pages) = &self.near else { return None };
        let near = pages.ptr().wrapping_add(ring * 2 * NEAR_LINE);
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
        assert!(peer < self.shape.peers, "a peer of the memory");
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
            Host::Plain(pages) => pages.ptr(),
        }
    }

    fn near(&self) -> u64 {
        match &self.near {
            Near::Gpu(memory) => memory.address(),
            // Exposed: programs that stand in for kernels make pointers of what the table says.
            Near::Host(pages) => pages.ptr().expose_provenance() as u64,
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= self.layout.len);
        // SAFETY: `base` is the address of an allocation of `layout.len` bytes, owned by `self` and aligned
        // to lines, and no reference to it exists but to atomics. The check keeps the word inside, the
        // layout keeps it aligned, and all threads access it as this size or as kernels do, atomically.
        unsafe { AtomicU64::from_ptr(self.base().add(at).cast()) }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at + 4 <= self.layout.len);
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.base().add(at).cast()) }
    }
}

// SAFETY: the memory is tied to no thread; addresses of a GPU's memory are only numbers here.
unsafe impl Send for ProxyMemory {}
// SAFETY: after `new`, which has the memory to itself, all accesses through `&ProxyMemory` are atomic.
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

/// The bytes of a structure of the ABI, none of which has padding.
fn plain_bytes<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: plain integers without padding: see `abi`.
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

    /// What a program finds that follows the addresses in the table, as a kernel does.
    fn ring_by_table(memory: &ProxyMemory, ring: usize) -> RawRing {
        // SAFETY: `handle` is the address of a `RawProxy` in memory that the memory keeps.
        let proxy =
            unsafe { &*std::ptr::with_exposed_provenance::<RawProxy>(memory.handle() as usize) };
        assert_eq!(
            (proxy.magic, proxy.version, proxy.rings as usize),
            (MAGIC, VERSION, SHAPE.rings)
        );
        let rings = std::ptr::with_exposed_provenance::<RawRing>(proxy.ring_table as usize);
        // SAFETY: the table holds that many rings, and no thread writes it.
        unsafe { rings.add(ring).read() }
    }

    #[test]
    fn producers_and_the_consumer_of_a_moved_board_share_its_memory() {
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
            // SAFETY: a word of the memory's memory; its producers are gone.
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
        // SAFETY: as in `ring_by_table`.
        let proxy =
            unsafe { &*std::ptr::with_exposed_provenance::<RawProxy>(memory.handle() as usize) };
        let written = std::ptr::with_exposed_provenance::<RawFault>(proxy.fault as usize);
        // SAFETY: the memory's memory, which no thread writes now.
        let written = unsafe { written.read() };
        assert_eq!((written.code, written.peer, written.position), (5, 1, 9));
        let peers = std::ptr::with_exposed_provenance::<u32>(proxy.peer_faults as usize);
        // SAFETY: as above; there are three.
        assert_eq!(unsafe { [peers.read(), peers.add(1).read()] }, [0, 7]);
    }

    fn plain_zero<T: Copy>() -> T {
        // SAFETY: used for structures of the ABI, which are plain integers.
        unsafe { std::mem::zeroed() }
    }
}
