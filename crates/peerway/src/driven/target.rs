//! A peer as commands name it: its windows, its counters, and how each local window reaches each of
//! its windows.

use std::sync::Arc;

use super::counters;
use super::outgoing::Locals;
use super::space::Space;
use crate::gpu::device::Device;
use crate::memory::RegionInner;
use crate::peer::Peer;
use crate::progress::engine::Engine;
use crate::session::Session;
use crate::session::remote::{RemoteInner, RemoteRegion};
use peerway_core::abi::FaultCode;

/// See the module.
pub(crate) struct PeerTarget {
    pub(crate) peer: Peer,
    pub(crate) space: Space<RemoteRegion>,
    pub(crate) counters: usize,
    pub(crate) first_id: u32,
    /// Mapped here if the peer is on this host.
    pub(crate) counter_words: RemoteRegion,
}

/// A peer as each proxy thread sees it. Each thread has its own sub-session if lanes carry
/// anything.
#[derive(Clone)]
pub(crate) struct Targets(Arc<[Arc<PeerTarget>]>);

impl Targets {
    /// The first target belongs to the first thread, and to every thread that has no target of its
    /// own.
    pub(crate) fn new(targets: Vec<Arc<PeerTarget>>) -> Self {
        Self(targets.into())
    }

    /// The target of a thread.
    pub(crate) fn of(&self, worker: usize) -> &Arc<PeerTarget> {
        self.0.get(worker).unwrap_or(&self.0[0])
    }

    pub(crate) fn all(&self) -> &[Arc<PeerTarget>] {
        &self.0
    }
}

/// How bytes of one local window reach one window of a peer.
#[derive(Clone)]
pub(crate) enum CopyMethod {
    /// The proxy thread copies.
    Copy { src: *mut u8, dst: *mut u8 },
    /// A GPU copies.
    Gpu { device: Arc<Device>, src: u64, dst: u64, by_kernel: bool },
    /// The endpoint transfers the bytes.
    Post,
}

// SAFETY: the addresses belong to memory that the windows keep alive. The worker copies through
// them only inside the owner's gate.
unsafe impl Send for CopyMethod {}

impl PeerTarget {
    pub(crate) fn session(&self) -> &Arc<Session> {
        self.peer.session()
    }

    pub(crate) fn endpoint(&self) -> &Arc<Engine> {
        self.peer.endpoint()
    }

    pub(crate) fn remote(&self, window: usize) -> &Arc<RemoteInner> {
        &self.space.get(window).inner
    }

    /// Whether lanes carry counts, or bytes from any of these windows.
    pub(crate) fn needs_lanes(&self, locals: &Locals) -> bool {
        let by_lanes = |local: &RegionInner| {
            (0..self.space.len()).any(|window| matches!(self.way(local, window), CopyMethod::Post))
        };
        self.counter_words.inner.direct.mapped().is_none()
            || locals.iter().any(|(_, local)| by_lanes(local))
    }

    /// How the bytes of a local window get to window `window` of the peer.
    pub(crate) fn way(&self, local: &RegionInner, window: usize) -> CopyMethod {
        let remote = self.space.get(window);
        // The descriptor may name a part of the mapped memory.
        let offset = remote.window.offset;
        let remote = &remote.inner;
        let of_gpu = local.gpu.is_some() || remote.is_of_gpu();
        if !of_gpu {
            return match remote.direct.mapped() {
                Some((base, _)) => {
                    CopyMethod::Copy { src: local.ptr(), dst: base.wrapping_add(offset as usize) }
                }
                None => CopyMethod::Post,
            };
        }
        if !remote.open_for_gpu() {
            return CopyMethod::Post;
        }
        let device = match (local.device(), remote.device()) {
            (Some(ours), Some(theirs)) if ours.index() != theirs.index() => {
                return CopyMethod::Post;
            }
            (Some(device), _) | (None, Some(device)) => device.clone(),
            (None, None) => return CopyMethod::Post,
        };
        let Some((base, reached)) = remote.by_gpu(&device) else { return CopyMethod::Post };
        let by_kernel = reached && local.is_reached_by(&device);
        CopyMethod::Gpu { device, src: local.ptr() as u64, dst: base + offset, by_kernel }
    }

    /// Adds to a counter of the peer through its mapping. `None` if it is not mapped, so that only
    /// the endpoint can raise it.
    #[inline]
    pub(crate) fn raise(&self, counter: u16, by: u64) -> Option<Result<(), FaultCode>> {
        let (base, gate) = self.counter_words.inner.direct.mapped()?;
        if !gate.enter() {
            return Some(Err(FaultCode::Refused));
        }
        let base = base.wrapping_add(self.counter_words.window.offset as usize);
        // SAFETY: `Outgoing::check` and `Forwarding::tell` check `counter` against the number of
        // counters, and `target_of` checked their extent against the advertisement. The gate keeps
        // the memory mapped.
        unsafe { counters::raise(base, counter.into(), by) };
        gate.leave();
        Some(Ok(()))
    }
}
