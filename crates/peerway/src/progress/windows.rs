//! Keys for one queue pair each: how the owner of memory makes, binds and sends them.
//!
//! Where our devices have memory windows, a peer that imports memory gets a key for each of its
//! queue pairs. A thread makes the windows, because that takes system calls. The driver binds each
//! window on its queue pair. When the bind has completed, the driver sends the key on the lane of
//! that queue pair ([`Control::Keys`]), so a key never meets another queue pair than its own. A
//! queue pair that replaces a lost one gets new keys to everything that the peer has imported.
//!
//! The importer keeps the keys in a table by lane. A part waits for a queue pair with keys.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Weak};

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Reason, TransferError};
use peerway_core::wire::{Control, FrameError, Import};

use super::driver::Driver;
use super::ending::LaneEnd;
use super::imports::{self, Turn};
use super::lane::Lane;
use super::receive::{Step, nonsense};
use super::sessions::SessionDriver;
use super::shard::DriverCommand;
use crate::clock;
use crate::limits::RefusalReason;
use crate::memory::grants::Grant;
use crate::session::Session;
use crate::threads;
use crate::transport::device::{KeyTable, KeyWindow, QueueEnds, QueueKey};

/// In place of a key: the memory is revoked.
const REVOKED: u32 = 0;

/// The keys to our memory for the peer of one queue pair. Closes their windows when it is dropped.
#[derive(Default)]
pub(crate) struct LaneWindows {
    keys: HashMap<SlotId, QueueKey>,
    /// Windows that wait for room on the queue pair.
    unbound: VecDeque<(SlotId, Arc<dyn KeyWindow>)>,
    /// The keys of posted binds, in order.
    binding: VecDeque<(SlotId, u32)>,
}

impl LaneWindows {
    /// Whether there is a key for this grant, or one is being bound.
    fn has(&self, grant: SlotId) -> bool {
        self.keys.contains_key(&grant)
    }

    /// The key for this grant, if it works.
    fn ready(&self, grant: SlotId) -> Option<u32> {
        match self.keys.get(&grant)? {
            QueueKey::Open(key) => Some(*key),
            QueueKey::Window(window) => {
                let is_unbound = self.unbound.iter().any(|(id, _)| *id == grant);
                let is_binding = self.binding.iter().any(|(id, _)| *id == grant);
                (!is_unbound && !is_binding).then(|| window.key())
            }
        }
    }
}

impl Drop for LaneWindows {
    fn drop(&mut self) {
        self.keys.values().for_each(close);
    }
}

fn close(key: &QueueKey) {
    if let QueueKey::Window(window) = key {
        window.close();
    }
}

/// What a peer has imported of our memory, where keys are for one queue pair each.
#[derive(Default)]
pub(crate) struct Exposed {
    grants: HashMap<SlotId, Weak<Grant>>,
    /// Grants whose keys are to be sent again, because the peer has imported them again.
    again: Vec<SlotId>,
    /// A thread makes keys for queue pairs that lack them.
    is_busy: bool,
    /// A queue pair may lack keys.
    is_short: bool,
}

/// The lane of a queue pair that lacks a key, and the index of its device.
pub(crate) type KeyLane = (u16, usize);

/// New keys to a grant.
pub(crate) struct NewKeys {
    grant: Arc<Grant>,
    /// By lane. An error says why there is no key.
    keys: Vec<(KeyLane, Result<QueueKey, String>)>,
}

impl NewKeys {
    /// Makes keys to a grant for these queue pairs. May block. Makes none if the grant is revoked.
    pub(super) fn make(grant: Arc<Grant>, lanes: &[KeyLane]) -> Self {
        let make = |lane: &KeyLane| {
            let key = grant.queue_key(lane.1)?;
            Some((*lane, key.map_err(|error| error.to_string())))
        };
        let keys = lanes.iter().map_while(make).collect();
        Self { grant, keys }
    }

    /// Whether the grant was revoked before all keys were made for so many queue pairs.
    pub(super) fn is_revoked(&self, lanes: usize) -> bool {
        self.keys.len() < lanes
    }

    /// Why a queue pair has no key.
    pub(super) fn failure(&self) -> Option<&str> {
        self.keys.iter().find_map(|(_, key)| key.as_ref().err()).map(String::as_str)
    }
}

impl Drop for NewKeys {
    fn drop(&mut self) {
        self.keys.iter().filter_map(|(_, key)| key.as_ref().ok()).for_each(close);
    }
}

/// What a thread has made for a session.
pub(crate) enum KeysMade {
    /// Keys for an import, and the answer to it.
    Import(NewKeys, u64, Box<Import>),
    /// Keys for queue pairs that lacked them.
    Missing(Vec<NewKeys>),
}

impl SessionDriver {
    /// The queue pairs that lack a key for this grant. `taken` is a lane that is not in the table.
    pub(super) fn lanes_without_key(
        &mut self,
        taken: Option<&mut Lane>,
        id: SlotId,
    ) -> Vec<KeyLane> {
        let lanes = self.lanes.iter_mut().flatten().map(|lane| &mut **lane).chain(taken);
        let lacks = |lane: &mut Lane| {
            let is_open = lane.is_queue() && !lane.windows.has(id);
            let queue = lane.wire.queue().filter(|queue| is_open && queue.has_windows())?;
            Some((lane.index, queue.device()))
        };
        lanes.filter_map(lacks).collect()
    }
}

impl Driver {
    /// Answers an import that came on `lane`, which is not in the table.
    pub(super) fn import(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        request: u64,
        descriptor: &[u8],
    ) {
        let (grant, import) =
            match imports::look_up(&self.endpoint, &s.session, request, descriptor) {
                Ok(found) => found,
                Err(error) => {
                    let result = Err(error as u8);
                    lane.push_control_answer(&Control::Imported { request, result });
                    return;
                }
            };
        let lanes = s.lanes_without_key(Some(lane), grant.id);
        // The peer may have forgotten the keys of an earlier import.
        if s.exposed.grants.contains_key(&grant.id) && !s.exposed.again.contains(&grant.id) {
            s.exposed.again.push(grant.id);
            self.set_timer(s, clock::now());
        }
        let shard = self.shard.clone();
        let answer =
            imports::answer(&self.endpoint, &s.session, &shard, request, grant, import, lanes);
        lane.push_control_answer(&answer);
    }

    /// Handles keys that a thread has made. If the session is over, dropping them closes them.
    pub(super) fn keys_made(&mut self, session: &Arc<Session>, made: KeysMade) {
        self.with(session, |driver, s| {
            if !s.session.is_alive() {
                return;
            }
            match made {
                KeysMade::Import(keys, request, import) => {
                    driver.take_keys(s, keys);
                    // A lane may have been replaced meanwhile.
                    s.exposed.is_short = true;
                    if let Some(lane) = s.control_lane() {
                        let result = Ok(*import);
                        lane.push_control_answer(&Control::Imported { request, result });
                    }
                }
                KeysMade::Missing(all) => {
                    s.exposed.is_busy = false;
                    for keys in all {
                        driver.take_keys(s, keys);
                    }
                }
            }
            s.dirty = true;
            if s.exposed.is_short {
                driver.want_keys(s);
            }
        });
    }

    fn take_keys(&mut self, s: &mut SessionDriver, mut new: NewKeys) {
        let id = new.grant.id;
        if s.exposed.grants.len() == s.exposed.grants.capacity() {
            s.forget_revoked();
        }
        s.exposed.grants.insert(id, Arc::downgrade(&new.grant));
        for ((at, device), key) in std::mem::take(&mut new.keys) {
            let at = usize::from(at);
            let lane = s.lanes.get_mut(at).and_then(Option::as_mut).filter(|lane| {
                lane.is_queue() && lane.ends.is_some_and(|ends| ends.device == device)
            });
            match (lane, key) {
                (Some(lane), Ok(key)) if !lane.windows.has(id) => {
                    match &key {
                        QueueKey::Open(key) => {
                            send_key(lane, id, *key);
                            let peer = &s.session.addr;
                            self.endpoint.refusals.note(RefusalReason::NoWindow, peer);
                        }
                        QueueKey::Window(window) => {
                            lane.windows.unbound.push_back((id, window.clone()));
                        }
                    }
                    lane.windows.keys.insert(id, key);
                    self.bind_windows(s, at);
                }
                (Some(_), Err(why)) => {
                    // Without a key, the peer's transfers would wait for this lane in vain.
                    let error = format!("no key to imported memory for its queue pair: {why}");
                    self.lane_ended(s, at, LaneEnd::Broken(io::Error::other(error)));
                }
                (_, Ok(key)) => close(&key),
                (None, Err(_)) => {}
            }
        }
    }

    /// Binds windows of a lane while its queue pair has room.
    fn bind_windows(&mut self, s: &mut SessionDriver, at: usize) {
        let Some(Some(lane)) = s.lanes.get_mut(at) else { return };
        let Lane { windows, wire, .. } = &mut **lane;
        let Some(queue) = wire.queue() else { return };
        let mut revoked = Vec::new();
        while !windows.unbound.is_empty()
            && queue.can_bind()
            && let Some((id, window)) = windows.unbound.pop_front()
        {
            match queue.bind(&window) {
                Ok(true) => windows.binding.push_back((id, window.key())),
                Ok(false) => revoked.push(id),
                Err(error) => {
                    tracing::debug!(%error, peer = %s.session.addr, "cannot bind a memory window");
                    if let Some(key) = windows.keys.remove(&id) {
                        close(&key);
                    }
                    s.exposed.is_short = true;
                }
            }
        }
        for id in revoked {
            send_key(lane, id, REVOKED);
            s.dirty = true;
        }
        if s.exposed.is_short {
            self.want_keys(s);
        }
    }

    /// A bind has completed: the oldest key of the lane works.
    pub(super) fn window_bound(&mut self, s: &mut SessionDriver, at: usize) {
        let Some(Some(lane)) = s.lanes.get_mut(at) else { return };
        if let Some((id, key)) = lane.windows.binding.pop_front() {
            send_key(lane, id, key);
            s.dirty = true;
        }
        self.bind_windows(s, at);
    }

    /// Has keys made for queue pairs that lack them, in the next turn.
    pub(super) fn want_keys(&mut self, s: &mut SessionDriver) {
        s.exposed.is_short = true;
        self.set_timer(s, clock::now());
    }

    /// Sends keys again, and has missing ones made. All lanes are in the table here.
    pub(super) fn keys_tick(&mut self, s: &mut SessionDriver) {
        for id in std::mem::take(&mut s.exposed.again) {
            for at in 0..s.lanes.len() {
                let Some(lane) = &mut s.lanes[at] else { continue };
                let Some(key) = lane.windows.ready(id) else { continue };
                send_key(lane, id, key);
                s.dirty = true;
                if lane.owes_too_much() {
                    self.lane_ended(s, at, LaneEnd::Misbehaved(FrameError::Order));
                }
            }
        }
        if s.exposed.is_busy || !std::mem::take(&mut s.exposed.is_short) {
            return;
        }
        s.forget_revoked();
        let grants: Vec<Arc<Grant>> = s.exposed.grants.values().filter_map(Weak::upgrade).collect();
        let missing = grants.into_iter().map(|grant| (s.lanes_without_key(None, grant.id), grant));
        let missing: Vec<(Vec<KeyLane>, Arc<Grant>)> =
            missing.filter(|(lanes, _)| !lanes.is_empty()).collect();
        if missing.is_empty() {
            return;
        }
        let (shard, session) = (self.shard.clone(), s.session.clone());
        let Some(turn) = Turn::take() else {
            s.exposed.is_short = true;
            return;
        };
        let work = move || {
            let make = |(lanes, grant): (Vec<KeyLane>, _)| NewKeys::make(grant, &lanes);
            let made = KeysMade::Missing(missing.into_iter().map(make).collect());
            shard.submit(DriverCommand::KeysMade { session, made: Box::new(made) });
            shard.notify_if_blocked();
            drop(turn);
        };
        s.exposed.is_busy = threads::spawn("peerway-register", &self.endpoint.cpus, work).is_ok();
        s.exposed.is_short = !s.exposed.is_busy;
    }

    /// A part could not be posted on this queue pair, perhaps because that has no key to the peer's
    /// memory. Other queue pairs may carry the part. The owner sends keys unasked for memory
    /// that is not revoked, so ask once: either the keys come, or the memory is revoked.
    #[cold]
    pub(super) fn without_key(
        &mut self,
        s: &mut SessionDriver,
        ends: Option<QueueEnds>,
        slot: SlotId,
    ) {
        let Some(ends) = ends else { return };
        let Some(request) = self.request(slot) else { return };
        let Some(work) = request.work.clone() else { return };
        for remote in work.without_key(ends.key_index) {
            if remote.keys.is_revoked() {
                let revoked = Reason::Failed(TransferError::Revoked);
                self.stop(s, slot, revoked, clock::now());
                return;
            }
            if remote.by_device && remote.keys.begin_asking() {
                let request = s.session.imports.number();
                s.asked.insert(request, Arc::downgrade(&remote.keys));
                let descriptor = remote.descriptor.clone();
                if let Some(control) = s.control_lane() {
                    control.push_control(&Control::Import { request, descriptor });
                    s.dirty = true;
                }
            }
        }
    }

    /// The owner has answered an import. If that was a question for missing keys and the answer is
    /// no, the memory is revoked.
    pub(super) fn keys_answered(&mut self, s: &mut SessionDriver, request: u64, granted: bool) {
        let Some(keys) = s.asked.remove(&request) else { return };
        if let (false, Some(keys)) = (granted, keys.upgrade()) {
            keys.set_revoked();
            s.dirty = true;
        }
    }

    /// The owner of imported memory has sent keys for the queue pair of this lane.
    pub(super) fn keys_came(
        &mut self,
        s: &mut SessionDriver,
        lane: &Lane,
        keys: &[(u64, u32)],
    ) -> Step<()> {
        // A queue pair that is shut down may still bring keys. They are voided when it is replaced.
        let index = KeyTable::of_lane(lane.index);
        if lane.ends.is_none_or(|ends| ends.key_index != index) {
            return Err(nonsense(FrameError::Control));
        }
        for &(grant, key) in keys {
            let is_revoked = key == REVOKED;
            s.session.set_key(SlotId::from_bits(grant), index, key, is_revoked);
        }
        s.session.imports.keys_came();
        s.dirty = true;
        Ok(())
    }
}

impl SessionDriver {
    /// Drops what is kept for grants that are revoked.
    fn forget_revoked(&mut self) {
        self.exposed.grants.retain(|_, grant| grant.upgrade().is_some_and(|it| it.is_live()));
        let grants = &self.exposed.grants;
        for lane in self.lanes.iter_mut().flatten() {
            let LaneWindows { keys, unbound, .. } = &mut lane.windows;
            keys.extract_if(|id, _| !grants.contains_key(id)).for_each(|(_, key)| close(&key));
            unbound.retain(|(id, _)| grants.contains_key(id));
        }
    }

    /// The lanes whose queue pairs need keys of their own for the peer's memory.
    pub(super) fn keyed_lanes(&self) -> Vec<u16> {
        let lanes = self.lanes.iter().flatten();
        lanes.filter(|lane| lane.is_keyed()).map(|lane| lane.index).collect()
    }
}

fn send_key(lane: &mut Lane, grant: SlotId, key: u32) {
    lane.push_control_answer(&Control::Keys { keys: vec![(grant.to_bits(), key)] });
}
