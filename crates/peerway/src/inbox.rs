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
/// One peer may fill one in this many of the messages, of their bytes and of the counter ids. So a
/// peer that fills its share does not make another peer fail.
const SHARE: usize = 8;
/// All peers without a right (see `Peers::has_right`) together may fill one in this many of the
/// messages and of their bytes. So strangers do not make a known peer fail, however many they are.
const SHARE_OF_STRANGERS: usize = 2;

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
    messages: VecDeque<Queued>,
    all: Held,
    strangers: Held,
    /// What each peer holds. A peer without messages has no entry.
    peers: HashMap<Incarnation, Held>,
    counters: Counters,
    /// Threads that are blocked until something arrives. A notify without waiters still costs a
    /// system call, and a thread that waits for a count mostly polls instead of blocking.
    sleepers: u32,
    /// The endpoint is closed: no thread blocks here any more.
    closed: bool,
}

struct Queued {
    notification: Notification,
    is_from_stranger: bool,
}

/// What a peer or a group of peers holds of the queue.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Held {
    messages: usize,
    bytes: u64,
}

impl Held {
    fn add(&mut self, len: u64) {
        self.messages += 1;
        self.bytes += len;
    }

    fn remove(&mut self, len: u64) {
        self.messages -= 1;
        self.bytes -= len;
    }

    /// Whether another message of `len` bytes fits into one in `share` of the queue.
    fn has_room(&self, len: u64, max_bytes: u64, share: usize) -> bool {
        self.messages < MAX_MESSAGES / share && self.bytes + len <= max_bytes / share as u64
    }
}

impl Inbox {
    pub(crate) fn new(max_bytes: u64) -> Self {
        let state = InboxState {
            messages: VecDeque::new(),
            all: Held::default(),
            strangers: Held::default(),
            peers: HashMap::new(),
            counters: Counters::new(MAX_COUNTERS, MAX_COUNTERS / SHARE),
            sleepers: 0,
            closed: false,
        };
        let proxies = RwLock::default();
        Self { state: Mutex::new(state), changed: Condvar::new(), max_bytes, proxies }
    }

    /// Queues a message, or refuses it if the queue or the sender's share of it is full. A stranger
    /// is a peer without a right (see `Peers::has_right`).
    ///
    /// A small queue has shares that are smaller than a message may be. So a peer without waiting
    /// messages may send one of any size.
    pub(crate) fn deliver(
        &self,
        from: Incarnation,
        is_from_stranger: bool,
        message: Vec<u8>,
    ) -> Result<(), TransferError> {
        let mut state = self.state.lock().unwrap();
        let (len, max) = (message.len() as u64, self.max_bytes);
        let share = match state.peers.get(&from) {
            Some(held) => held.has_room(len, max, SHARE),
            None => true,
        };
        let strangers = !is_from_stranger || state.strangers.has_room(len, max, SHARE_OF_STRANGERS);
        if !share || !strangers || !state.all.has_room(len, max, 1) {
            return Err(TransferError::NotificationsFull);
        }
        state.all.add(len);
        state.peers.entry(from).or_default().add(len);
        if is_from_stranger {
            state.strangers.add(len);
        }
        let notification = Notification { from, message };
        state.messages.push_back(Queued { notification, is_from_stranger });
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

    /// Counts one arrival from a peer.
    pub(crate) fn count(&self, id: u32, from: &Incarnation) -> Result<(), TransferError> {
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
        let arrived = state.counters.arrive(id, from);
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
            Some(from) => state.messages.iter().position(|m| m.notification.from == *from)?,
        };
        let Queued { notification, is_from_stranger } = state.messages.remove(at)?;
        let len = notification.message.len() as u64;
        state.all.remove(len);
        if is_from_stranger {
            state.strangers.remove(len);
        }
        if let Some(held) = state.peers.get_mut(&notification.from) {
            held.remove(len);
            if held.messages == 0 {
                state.peers.remove(&notification.from);
            }
        }
        Some(notification)
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
        let is_from = |m: &Queued| from.is_none_or(|from| m.notification.from == *from);
        self.0.messages.iter().any(is_from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Result<(), TransferError> = Err(TransferError::NotificationsFull);

    fn peer(number: u32) -> Incarnation {
        let mut name = [0; 16];
        name[..4].copy_from_slice(&number.to_le_bytes());
        Incarnation(name)
    }

    #[test]
    fn full_is_refused_and_draining_makes_room() {
        let inbox = Inbox::new(800);
        let (a, b) = (peer(1), peer(2));
        inbox.deliver(a, false, vec![0; 60]).unwrap();
        inbox.deliver(a, false, vec![0; 40]).unwrap();
        assert_eq!(inbox.deliver(a, false, vec![0; 1]), FULL, "one peer fills only its share");
        inbox.deliver(b, false, vec![0; 90]).unwrap();
        assert_eq!(inbox.deliver(b, false, vec![0; 20]), FULL);
        assert_eq!(inbox.take(Some(&b)).unwrap().from, b);
        assert!(inbox.take(Some(&b)).is_none());
        inbox.deliver(b, false, vec![0; 20]).unwrap();
        assert_eq!(inbox.take(None).unwrap().from, a);
        inbox.deliver(a, false, vec![0; 1]).unwrap();
    }

    #[test]
    fn a_single_message_may_exceed_the_share_of_a_small_queue() {
        let inbox = Inbox::new(800);
        assert_eq!(inbox.deliver(peer(1), true, vec![0; 401]), FULL, "strangers have half");
        inbox.deliver(peer(1), true, vec![0; 400]).unwrap();
        assert_eq!(inbox.deliver(peer(1), true, Vec::new()), FULL);
        inbox.deliver(peer(2), false, vec![0; 400]).unwrap();
        assert_eq!(inbox.deliver(peer(3), false, vec![0; 1]), FULL, "the whole queue is full");
    }

    #[test]
    fn empty_messages_of_one_peer_leave_places_for_others() {
        let inbox = Inbox::new(1 << 20);
        let taken = (0..MAX_MESSAGES).take_while(|_| inbox.deliver(peer(1), false, vec![]).is_ok());
        assert_eq!(taken.count(), MAX_MESSAGES / SHARE);
        inbox.deliver(peer(2), false, vec![]).unwrap();
    }

    #[test]
    fn strangers_leave_half_of_the_queue_to_known_peers() {
        let inbox = Inbox::new(1 << 20);
        let mut taken = 0;
        for stranger in 100..200 {
            while inbox.deliver(peer(stranger), true, vec![]).is_ok() {
                taken += 1;
            }
        }
        assert_eq!(taken, MAX_MESSAGES / SHARE_OF_STRANGERS);
        inbox.deliver(peer(1), false, vec![0; 1000]).unwrap();
        assert_eq!(inbox.take(Some(&peer(100))).unwrap().from, peer(100));
        inbox.deliver(peer(300), true, vec![]).unwrap();
        assert_eq!(inbox.deliver(peer(301), true, vec![]), FULL);
        while inbox.take(None).is_some() {}
        let state = inbox.state.lock().unwrap();
        assert_eq!((state.all, state.strangers), (Held::default(), Held::default()));
        assert!(state.peers.is_empty(), "peers without messages are forgotten");
    }

    #[test]
    fn counter_ids_of_one_peer_leave_ids_for_others() {
        let inbox = Inbox::new(100);
        let begun = (0..MAX_COUNTERS as u32).take_while(|id| inbox.count(*id, &peer(1)).is_ok());
        assert_eq!(begun.count(), MAX_COUNTERS / SHARE);
        inbox.count(u32::MAX, &peer(2)).unwrap();
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
            inbox.count(7, &peer(1)).unwrap();
            while inbox.state.lock().unwrap().sleepers == 0 && !sleeper.is_finished() {
                std::thread::yield_now();
            }
            inbox.deliver(peer(1), false, vec![1]).unwrap();
        });
        assert!(start.elapsed() < long, "the sleeping thread was not woken");
        assert_eq!(inbox.state.lock().unwrap().sleepers, 0);
    }
}
