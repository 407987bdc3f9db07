//! The advertisements of this endpoint. Every request from a peer is checked against this table.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, RwLock};

use peerway_core::descriptor::Descriptor;
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::outcome::TransferError;
use peerway_core::region::{Access, Span};
use subtle::ConstantTimeEq;

use crate::bugs::{Bug, is_planted};
use crate::error::RegisterError;
use crate::memory::RegionInner;
use crate::os::gate::{Gate, GateRef, SharedGate};
use crate::transport::device::{Devices, QueueKey, RemoteKeys};
use crate::transport::error::RdmaError;

/// Maximum number of advertisements of one endpoint at a time.
const MAX_GRANTS: usize = 1 << 20;
/// The pass for a grant's own gate. A grant has one pass, which is never reused.
const PASS: u32 = 1;

/// One advertisement.
pub(crate) struct Grant {
    pub(crate) id: SlotId,
    pub(crate) token: [u8; 16],
    pub(crate) memory: Arc<RegionInner>,
    pub(crate) span: Span,
    pub(crate) access: Access,
    pub(crate) bound: Option<Incarnation>,
    gate: Arc<Gate>,
    /// Gates given to peers that access the memory themselves.
    exports: Mutex<Vec<Export>>,
    keys: Mutex<Keys>,
}

/// The keys for peers' RDMA devices.
enum Keys {
    /// No peer has requested them yet.
    None,
    Made(Box<dyn RemoteKeys>),
    /// The memory could not be registered.
    Failed,
    /// Revoked.
    Closed,
}

/// A gate in the segment that this process shares with a peer.
pub(crate) struct Export {
    pub(crate) to: Arc<dyn Importer>,
    pub(crate) gate: SharedGate,
}

/// A peer of this host that accesses granted memory by itself.
pub(crate) trait Importer: Send + Sync {
    /// The address of the peer, for logs.
    fn addr(&self) -> SocketAddr;
    /// Whether the session is open.
    fn is_alive(&self) -> bool;
    /// Whether the peer's process has certainly ended.
    fn is_process_dead(&self) -> bool;
    /// Releases the gate of a grant.
    fn forget_gate(&self, grant: SlotId);
}

impl Grant {
    /// Whether the grant is not barred.
    pub(crate) fn is_live(&self) -> bool {
        let live = self.gate.enter(PASS);
        if live {
            self.gate.leave();
        }
        live
    }

    /// The gate for copies in this process.
    pub(crate) fn gate(&self) -> GateRef {
        GateRef::Here(self.gate.clone(), PASS)
    }

    /// Records a gate given to a peer. Fails if the grant was barred in the meantime.
    pub(crate) fn export(&self, export: Export) -> Result<(), TransferError> {
        let mut exports = self.exports.lock().unwrap();
        if !self.is_live() {
            export.gate.gate().close();
            return Err(TransferError::Revoked);
        }
        exports.retain(|e| {
            // A closed session may have left a copy in progress.
            let quiet = e.gate.gate().is_empty() || e.to.is_process_dead();
            !std::ptr::addr_eq(Arc::as_ptr(&e.to), Arc::as_ptr(&export.to))
                && (e.to.is_alive() || !quiet)
        });
        exports.push(export);
        Ok(())
    }

    /// Bars all access: in this process, in other processes and by devices.
    pub(crate) fn bar(&self) {
        let exports = self.exports.lock().unwrap();
        self.gate.close();
        for export in exports.iter() {
            export.gate.gate().close();
        }
        drop(exports);
        let mut keys = self.keys.lock().unwrap();
        if let Keys::Made(made) = std::mem::replace(&mut *keys, Keys::Closed)
            && let Err(kept) = made.close()
        {
            *keys = Keys::Made(kept);
        }
    }

    /// Whether its keys are available at once. False while another thread makes them.
    pub(crate) fn has_keys(&self) -> bool {
        self.keys.try_lock().is_ok_and(|keys| !matches!(*keys, Keys::None))
    }

    /// Keys to the memory for peers' devices, one per local device; empty if there are none. The
    /// first call registers the memory, which takes a while.
    pub(crate) fn keys(&self, rdma: &dyn Devices) -> Vec<u32> {
        let mut keys = self.keys.lock().unwrap();
        if let (Keys::None, true) = (&*keys, self.span.len > 0) {
            // SAFETY: the span lies in the region (checked when it was granted), and the grant
            // keeps the region's memory. No reference to it is made.
            let made = unsafe {
                // Wrapping, because GPU memory is not an allocation known to Rust.
                let ptr = self.memory.ptr().wrapping_add(self.span.offset as usize);
                let (len, gpu) = (self.span.len as usize, self.memory.gpu.as_ref());
                rdma.register_remote(ptr, len, self.access, gpu)
            };
            *keys =
                made.inspect_err(|error| rdma.not_reached(error)).map_or(Keys::Failed, Keys::Made);
        }
        match &*keys {
            Keys::Made(made) => made.keys(),
            _ => Vec::new(),
        }
    }

    /// A key to the memory for one queue of this device. `None` if there are no keys. May block.
    pub(crate) fn queue_key(&self, device: usize) -> Option<Result<QueueKey, RdmaError>> {
        match &*self.keys.lock().unwrap() {
            Keys::Made(made) if self.is_live() => Some(made.queue_key(device)),
            _ => None,
        }
    }

    /// Releases the gates if no copy is inside. Returns false if one still is.
    pub(crate) fn release_if_quiet(&self) -> bool {
        let quiet = self.is_quiet();
        if quiet {
            for export in self.exports.lock().unwrap().drain(..) {
                export.to.forget_gate(self.id);
            }
        }
        quiet
    }

    /// The peers that are inside, as text for a log.
    pub(crate) fn inside(&self) -> String {
        let exports = self.exports.lock().unwrap();
        let is_inside = |e: &&Export| !e.gate.gate().is_empty() && !e.to.is_process_dead();
        let names = exports.iter().filter(is_inside).map(|e| format!("peer {}", e.to.addr()));
        names.collect::<Vec<_>>().join(", ")
    }

    /// Whether no copy is inside any more. The count of a dead peer is ignored.
    pub(crate) fn is_quiet(&self) -> bool {
        let quiet = |e: &Export| e.gate.gate().is_empty() || e.to.is_process_dead();
        let open = matches!(*self.keys.lock().unwrap(), Keys::Made(_)) && !self.is_live();
        !open && self.gate.is_empty() && self.exports.lock().unwrap().iter().all(quiet)
    }
}

/// All grants of an endpoint.
#[derive(Default)]
pub(crate) struct Grants {
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    slots: Vec<(u32, Option<Arc<Grant>>)>,
    free: Vec<u32>,
}

impl Grants {
    /// Adds an advertisement with a new random token.
    pub(crate) fn add(
        &self,
        memory: Arc<RegionInner>,
        span: Span,
        access: Access,
        bound: Option<Incarnation>,
    ) -> Result<Arc<Grant>, RegisterError> {
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|_| RegisterError::NoRandomness)?;
        let mut table = self.table.write().unwrap();
        let index = match table.free.pop() {
            Some(index) => index,
            None if table.slots.len() < MAX_GRANTS => {
                table.slots.push((0, None));
                table.slots.len() as u32 - 1
            }
            None => return Err(RegisterError::TooMany { max: MAX_GRANTS }),
        };
        let slot = &mut table.slots[index as usize];
        slot.0 = slot.0.wrapping_add(1);
        let id = SlotId { index, generation: slot.0 };
        let gate = Arc::new(Gate::default());
        gate.open(PASS);
        let grant = Arc::new(Grant {
            id,
            token,
            memory,
            span,
            access,
            bound,
            gate,
            exports: Mutex::default(),
            keys: Mutex::new(Keys::None),
        });
        slot.1 = Some(grant.clone());
        Ok(grant)
    }

    /// Bars every advertisement, because the endpoint closes.
    pub(crate) fn bar_all(&self) {
        let table = self.table.read().unwrap();
        for grant in table.slots.iter().filter_map(|(_, grant)| grant.as_ref()) {
            grant.bar();
        }
    }

    /// Removes an advertisement. Its slot is reused with another generation.
    pub(crate) fn remove(&self, id: SlotId) {
        let mut table = self.table.write().unwrap();
        let slot = table.slots.get_mut(id.index as usize).filter(|slot| slot.0 == id.generation);
        let grant = slot.and_then(|slot| slot.1.take());
        if grant.is_some() {
            table.free.push(id.index);
        }
        // Dropping the last reference to a grant frees its memory, which must not happen under the
        // lock.
        drop(table);
        drop(grant);
    }

    /// The grant for a request from `peer` with this kind of access.
    pub(crate) fn find(
        &self,
        id: SlotId,
        token: &[u8; 16],
        access: Access,
        peer: &Incarnation,
    ) -> Result<Arc<Grant>, TransferError> {
        let table = self.table.read().unwrap();
        let grant = match table.slots.get(id.index as usize) {
            Some((generation, Some(grant))) if *generation == id.generation => grant,
            Some((generation, None)) if *generation == id.generation => {
                return Err(TransferError::Revoked);
            }
            _ => return Err(TransferError::RemoteAccess),
        };
        // Constant time, so that the duration of a refusal reveals nothing about the token.
        let token_ok: bool = grant.token.ct_eq(token).into();
        let bound_ok = grant.bound.as_ref().is_none_or(|bound| bound == peer);
        let access_ok = grant.access.allows(access) || is_planted(Bug::AccessIgnored);
        if token_ok && bound_ok && access_ok {
            Ok(grant.clone())
        } else {
            Err(TransferError::RemoteAccess)
        }
    }

    /// The grant of a descriptor, with all rights that the descriptor claims.
    pub(crate) fn find_descriptor(
        &self,
        descriptor: &Descriptor,
        peer: &Incarnation,
    ) -> Result<Arc<Grant>, TransferError> {
        self.find(descriptor.grant, &descriptor.token, descriptor.access, peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Backing;

    fn grants() -> (Grants, Arc<Grant>) {
        let grants = Grants::default();
        let memory = RegionInner::new(std::ptr::null_mut(), 0, Backing::Raw, None);
        let span = Span { offset: 0, len: 0 };
        let grant = grants.add(memory, span, Access::READ, None).unwrap();
        (grants, grant)
    }

    #[test]
    fn only_the_right_token_direction_and_peer_pass() {
        let (grants, grant) = grants();
        let me = Incarnation([1; 16]);
        assert!(grants.find(grant.id, &grant.token, Access::READ, &me).is_ok());
        let refused = Some(TransferError::RemoteAccess);
        assert_eq!(grants.find(grant.id, &grant.token, Access::WRITE, &me).err(), refused);
        let mut wrong = grant.token;
        wrong[15] ^= 1;
        assert_eq!(grants.find(grant.id, &wrong, Access::READ, &me).err(), refused);
        let other = SlotId { generation: grant.id.generation + 1, ..grant.id };
        assert_eq!(grants.find(other, &grant.token, Access::READ, &me).err(), refused);
        let span = grant.span;
        let bound = grants.add(grant.memory.clone(), span, Access::READ, Some(me)).unwrap();
        assert!(grants.find(bound.id, &bound.token, Access::READ, &me).is_ok());
        let stranger = Incarnation([2; 16]);
        assert_eq!(grants.find(bound.id, &bound.token, Access::READ, &stranger).err(), refused);
    }

    #[test]
    fn a_removed_grant_says_revoked_and_its_slot_comes_back_under_another_name() {
        let (grants, grant) = grants();
        let me = Incarnation([1; 16]);
        grants.remove(grant.id);
        let answer = grants.find(grant.id, &grant.token, Access::READ, &me).err();
        assert_eq!(answer, Some(TransferError::Revoked));
        let next = grants.add(grant.memory.clone(), grant.span, Access::READ, None).unwrap();
        assert_eq!(next.id.index, grant.id.index);
        let answer = grants.find(grant.id, &grant.token, Access::READ, &me).err();
        assert_eq!(answer, Some(TransferError::RemoteAccess));
    }
}
