//! Signals that arrive: notifications and counters, both bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use peerway_core::counter::Counters;
use peerway_core::ids::Incarnation;
use peerway_core::outcome::TransferError;

/// The most messages, whatever their size. It bounds the queue's own overhead.
const MAX_MESSAGES: usize = 65_536;
/// The most counter ids of an endpoint at a time.
const MAX_COUNTERS: usize = 65_536;

/// The most proxies of an endpoint. Each has ids for as many counters as a command can name.
pub(crate) const MAX_PROXIES: usize = 1 << 14;

/// The first id of proxy counters. Each proxy of an endpoint has the next 65,536 ids from here on.
/// All other ids are the endpoint's own counters.
pub(crate) const FIRST_PROXY_ID: u32 = 0xc000_0000;

/// The counters of a proxy, which kernels wait for.
pub(crate) trait ProxyCounters: Send + Sync {
    /// Counts one arrival by a lane. Returns false if the counter does not exist.
    fn arrived(&self, counter: usize) -> bool;
}

/// A message from a peer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Notification {
    /// The sender.
    pub from: Incarnation,
    /// The content.
    pub message: Vec<u8>,
}

pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    max_bytes: u64,
    /// Counters that kernels wait for, by proxy.
    proxies: RwLock<Vec<Option<Arc<dyn ProxyCounters>>>>,
}

struct InboxState {
    messages: VecDeque<Notification>,
    bytes: u64,
    bytes_from: HashMap<Incarnation, u64>,
    counters: Counters,
    /// Threads that are blocked until something arrives. A notify without waiters still costs a
    /// system call, and a thread that waits for a count mostly polls instead of blocking.
    sleepers: u32,
    /// The endpoint is closed: no thread blocks here any more.
    closed: bool,
}

impl Inbox {
    pub(crate) fn new(max_bytes: u64) -> Self {
        let state = InboxState {
            messages: VecDeque::new(),
            bytes: 0,
            bytes_from: HashMap::new(),
            counters: Counters::new(MAX_COUNTERS),
            sleepers: 0,
            closed: false,
        };
        let proxies = RwLock::default();
        Self { state: Mutex::new(state), changed: Condvar::new(), max_bytes, proxies }
    }

    /// Queues a message, or refuses it if the queue is full. One peer may fill half of the queue.
    pub(crate) fn deliver(&self, from: Incarnation, message: Vec<u8>) -> Result<(), TransferError> {
        let mut state = self.state.lock().unwrap();
        let len = message.len() as u64;
        let from_peer = state.bytes_from.get(&from).copied().unwrap_or(0);
        let full = state.messages.len() >= MAX_MESSAGES
            || state.bytes + len > self.max_bytes
            || (from_peer > 0 && from_peer + len > self.max_bytes / 2);
        if full {
            return Err(TransferError::NotificationsFull);
        }
        state.bytes += len;
        *state.bytes_from.entry(from).or_insert(0) += len;
        state.messages.push_back(Notification { from, message });
        self.wake(state);
        Ok(())
    }

    /// Assigns ids to a proxy's counters and returns the first. `None` if no ids are left.
    pub(crate) fn add_counters(&self, counters: Arc<dyn ProxyCounters>) -> Option<u32> {
        let mut proxies = self.proxies.write().unwrap();
        // Never reuse the place of a former proxy: its peers may still count there.
        let at = proxies.len();
        if at >= MAX_PROXIES {
            return None;
        }
        proxies.push(Some(counters));
        Some(FIRST_PROXY_ID + ((at as u32) << 16))
    }

    pub(crate) fn remove_counters(&self, first_id: u32) {
        let at = (first_id - FIRST_PROXY_ID) >> 16;
        if let Some(place) = self.proxies.write().unwrap().get_mut(at as usize) {
            *place = None;
        }
    }

    /// Counts one arrival.
    pub(crate) fn count(&self, id: u32) -> Result<(), TransferError> {
        if id >= FIRST_PROXY_ID {
            let at = ((id - FIRST_PROXY_ID) >> 16) as usize;
            let proxies = self.proxies.read().unwrap();
            match proxies.get(at) {
                Some(Some(counters)) => {
                    let raised = counters.arrived((id & 0xffff) as usize);
                    return raised.then_some(()).ok_or(TransferError::CountersFull);
                }
                // The proxy is gone.
                Some(None) => return Err(TransferError::RemoteAccess),
                // There never was such a proxy, so the id is one of the endpoint's own.
                None => {}
            }
        }
        let mut state = self.state.lock().unwrap();
        let arrived = state.counters.arrive(id);
        self.wake(state);
        arrived.map(|_| ()).ok_or(TransferError::CountersFull)
    }

    pub(crate) fn counter(&self, id: u32) -> u64 {
        self.state.lock().unwrap().counters.value(id)
    }

    pub(crate) fn reset_counter(&self, id: u32) -> u64 {
        self.state.lock().unwrap().counters.reset(id)
    }

    /// Takes the oldest message, of one peer or of any.
    pub(crate) fn take(&self, from: Option<&Incarnation>) -> Option<Notification> {
        let mut state = self.state.lock().unwrap();
        let at = match from {
            None => 0,
            Some(from) => state.messages.iter().position(|m| m.from == *from)?,
        };
        let message = state.messages.remove(at)?;
        let len = message.message.len() as u64;
        state.bytes -= len;
        if let Some(bytes) = state.bytes_from.get_mut(&message.from) {
            *bytes -= len;
            if *bytes == 0 {
                state.bytes_from.remove(&message.from);
            }
        }
        Some(message)
    }

    /// Whether there is a message, of one peer or of any.
    pub(crate) fn has_message(&self, from: Option<&Incarnation>) -> bool {
        Arrivals(self.state.lock().unwrap()).has_message(from)
    }

    /// Blocks until something arrives or the time is over. It calls `ready` under the lock, so that
    /// it does not miss an arrival between the check and the wait.
    pub(crate) fn sleep_unless(&self, timeout: Duration, ready: impl Fn(&Arrivals<'_>) -> bool) {
        let mut arrivals = Arrivals(self.state.lock().unwrap());
        if arrivals.0.closed || ready(&arrivals) {
            return;
        }
        arrivals.0.sleepers += 1;
        let (mut state, _) = self.changed.wait_timeout(arrivals.0, timeout).unwrap();
        state.sleepers -= 1;
    }

    /// Wakes all blocked threads and lets none block again, because the endpoint is closed.
    pub(crate) fn close(&self) {
        self.state.lock().unwrap().closed = true;
        self.changed.notify_all();
    }

    /// Wakes blocked threads. A thread registers in `sleepers` under the lock that the arrival
    /// held.
    fn wake(&self, state: MutexGuard<'_, InboxState>) {
        let any = state.sleepers > 0;
        drop(state);
        if any {
            self.changed.notify_all();
        }
    }
}

/// The inbox under its lock.
pub(crate) struct Arrivals<'a>(MutexGuard<'a, InboxState>);

impl Arrivals<'_> {
    pub(crate) fn counter(&self, id: u32) -> u64 {
        self.0.counters.value(id)
    }

    pub(crate) fn has_message(&self, from: Option<&Incarnation>) -> bool {
        self.0.messages.iter().any(|m| from.is_none_or(|from| m.from == *from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_is_refused_and_draining_makes_room() {
        let inbox = Inbox::new(100);
        let (a, b) = (Incarnation([1; 16]), Incarnation([2; 16]));
        inbox.deliver(a, vec![0; 40]).unwrap();
        let full = Err(TransferError::NotificationsFull);
        assert_eq!(inbox.deliver(a, vec![0; 20]), full, "one peer may fill only half of the queue");
        inbox.deliver(b, vec![0; 50]).unwrap();
        assert_eq!(inbox.deliver(b, vec![0; 20]), full);
        assert_eq!(inbox.take(Some(&b)).unwrap().from, b);
        assert!(inbox.take(Some(&b)).is_none());
        inbox.deliver(b, vec![0; 20]).unwrap();
        assert_eq!(inbox.take(None).unwrap().from, a);
    }

    #[test]
    fn a_sleeper_is_woken_by_what_arrives() {
        let inbox = Inbox::new(100);
        let long = Duration::from_secs(60);
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while inbox.counter(7) == 0 {
                    inbox.sleep_unless(long, |arrivals| arrivals.counter(7) > 0);
                }
                while !inbox.has_message(None) {
                    inbox.sleep_unless(long, |arrivals| arrivals.has_message(None));
                }
            });
            while inbox.state.lock().unwrap().sleepers == 0 {
                std::thread::yield_now();
            }
            inbox.count(7).unwrap();
            while inbox.state.lock().unwrap().sleepers == 0 && !sleeper.is_finished() {
                std::thread::yield_now();
            }
            inbox.deliver(Incarnation([1; 16]), vec![1]).unwrap();
        });
        assert!(start.elapsed() < long, "the sleeping thread was not woken");
        assert_eq!(inbox.state.lock().unwrap().sleepers, 0);
    }
}
