//! A completion queue as the driver sees it: the session and lane of each device queue.

use std::sync::Arc;

use crate::transport::device::{Completion, CompletionQueue};

/// The number of early completions at which those of destroyed queues are removed.
const MANY_EARLY: usize = 1024;

/// See the module.
pub(crate) struct Port {
    pub(crate) shared: Arc<dyn CompletionQueue>,
    /// By index: key, session, lane.
    owners: Vec<Option<(u32, usize, u16)>>,
    /// Completions of queues that no session has adopted yet.
    early: Vec<Completion>,
    /// The number of adopted queues.
    pub(crate) adopted: usize,
    /// The next completion generates an event.
    pub(crate) armed: bool,
    /// The device no longer responds.
    pub(crate) gone: bool,
}

impl Port {
    pub(crate) fn new(shared: Arc<dyn CompletionQueue>) -> Self {
        Self {
            shared,
            owners: Vec::new(),
            early: Vec::new(),
            adopted: 0,
            armed: false,
            gone: false,
        }
    }

    /// Assigns a queue to a session's lane. Returns the completions that arrived before.
    pub(crate) fn adopt(&mut self, key: u32, session: usize, lane: u16) -> Vec<Completion> {
        let index = (key & 0xFFFF) as usize;
        if self.owners.len() <= index {
            self.owners.resize(index + 1, None);
        }
        self.owners[index] = Some((key, session, lane));
        self.adopted += 1;
        let (its, others): (Vec<_>, Vec<_>) =
            self.early.drain(..).partition(|completion| completion.queue == key);
        self.early = others;
        its
    }

    /// Removes a queue that is gone.
    pub(crate) fn forget(&mut self, key: u32) {
        let entry = self.owners.get_mut((key & 0xFFFF) as usize);
        if let Some(entry) = entry.filter(|e| e.is_some_and(|(of, ..)| of == key)) {
            *entry = None;
            self.adopted -= 1;
        }
    }

    /// The session and lane of a completion. A completion of a queue that is not yet adopted
    /// is kept for `adopt`.
    #[inline]
    pub(crate) fn owner(&mut self, completion: &Completion) -> Option<(usize, u16)> {
        let key = completion.queue;
        match self.owners.get((key & 0xFFFF) as usize) {
            Some(Some((of, session, lane))) if *of == key => Some((*session, *lane)),
            _ => {
                if self.shared.has_queue(key) {
                    // Drop the completions of queues that never got a session.
                    if self.early.len() >= MANY_EARLY {
                        let Self { shared, early, .. } = self;
                        early.retain(|completion| shared.has_queue(completion.queue));
                    }
                    self.early.push(*completion);
                }
                None
            }
        }
    }
}
