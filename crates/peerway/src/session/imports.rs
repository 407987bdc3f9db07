//! Imports of a session that wait for the peer's answer.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use peerway_core::outcome::TransferError;
use peerway_core::wire::Import;

use crate::clock;
use crate::transport::device::KeyTable;

/// Imports that wait for an answer.
#[derive(Default)]
pub(crate) struct Imports {
    waiting: Mutex<HashMap<u64, Answer>>,
    changed: Condvar,
    next: AtomicU64,
}

/// The answer to one import, as far as it has come.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) result: Option<Result<Import, TransferError>>,
    pub(crate) fd: Option<OwnedFd>,
    /// The file descriptor arrived, but this process could not open it.
    pub(crate) is_fd_lost: bool,
    /// The owner has received the import and is working on the answer.
    takes_time: bool,
    /// The keys to the memory, and the lanes for which they have not come.
    keys: Option<Arc<KeyTable>>,
    lanes: Vec<u16>,
}

impl Answer {
    fn is_complete(&self) -> bool {
        match &self.result {
            _ if self.is_fd_lost => true,
            Some(Ok(import)) => {
                (!import.has_descriptor() || self.fd.is_some()) && self.lanes.is_empty()
            }
            Some(Err(_)) => true,
            None => false,
        }
    }
}

impl Answer {
    fn look_at_keys(&mut self) {
        let Self { keys: Some(keys), lanes, .. } = self else { return };
        // Transfers to revoked memory end without a key.
        let lacks = |lane: &u16| keys.get(KeyTable::of_lane(*lane)) == 0 && !keys.is_revoked();
        lanes.retain(lacks);
    }
}

impl Imports {
    /// Names a new request. Keys to the memory come into the table.
    pub(crate) fn begin(&self, keys: Option<Arc<KeyTable>>) -> u64 {
        let request = self.number();
        self.waiting.lock().unwrap().insert(request, Answer { keys, ..Answer::default() });
        request
    }

    /// A number for a request.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for the complete answer and returns what has come of it. Waits until `deadline`, or
    /// until `at_work_until` if the owner reports that it is working, and while `is_open` holds.
    pub(crate) fn wait(
        &self,
        request: u64,
        deadline: u64,
        at_work_until: u64,
        is_open: impl Fn() -> bool,
    ) -> Option<Answer> {
        let mut waiting = self.waiting.lock().unwrap();
        loop {
            let answer = waiting.get(&request);
            let complete = answer.is_none_or(Answer::is_complete);
            let at_work = answer.is_some_and(|answer| answer.takes_time);
            let by = if at_work { at_work_until } else { deadline };
            let left = clock::until(by, clock::now());
            if complete || left == Duration::ZERO || !is_open() {
                break;
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap().0;
        }
        waiting.remove(&request)
    }

    /// Whether this side waits for the answer to a request.
    pub(crate) fn is_waiting(&self, request: u64) -> bool {
        self.waiting.lock().unwrap().contains_key(&request)
    }

    /// Stores the peer's answer. If devices can access the memory, these lanes need keys, which
    /// come on the lanes themselves.
    pub(crate) fn answered(
        &self,
        request: u64,
        result: Result<Import, TransferError>,
        lanes: Vec<u16>,
    ) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            if result.as_ref().is_ok_and(|import| !import.keys.is_empty()) {
                answer.lanes = lanes;
                answer.look_at_keys();
            }
            answer.result.get_or_insert(result);
            self.changed.notify_all();
        }
    }

    /// Keys have come into the tables.
    pub(crate) fn keys_came(&self) {
        self.waiting.lock().unwrap().values_mut().for_each(Answer::look_at_keys);
        self.changed.notify_all();
    }

    /// A lane is lost, and its keys do not come.
    pub(crate) fn lane_lost(&self, lane: u16) {
        for answer in self.waiting.lock().unwrap().values_mut() {
            answer.lanes.retain(|waiting| *waiting != lane);
        }
        self.changed.notify_all();
    }

    /// Records that the peer has begun to register the memory, which may take long.
    pub(crate) fn takes_time(&self, request: u64) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.takes_time = true;
            self.changed.notify_all();
        }
    }

    /// Stores a file descriptor that arrived on the local socket.
    pub(crate) fn descriptor_came(&self, request: u64, fd: OwnedFd) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.fd.get_or_insert(fd);
            self.changed.notify_all();
        }
    }

    /// Records that a file descriptor arrived on the local socket and this process could not open
    /// it.
    pub(crate) fn descriptor_lost(&self, request: u64) {
        if let Some(answer) = self.waiting.lock().unwrap().get_mut(&request) {
            answer.is_fd_lost = true;
            self.changed.notify_all();
        }
    }

    /// Fails all waiting imports, because the peer is gone.
    pub(crate) fn fail_all(&self) {
        for answer in self.waiting.lock().unwrap().values_mut() {
            answer.result = Some(Err(TransferError::PeerGone));
        }
        self.changed.notify_all();
    }
}
