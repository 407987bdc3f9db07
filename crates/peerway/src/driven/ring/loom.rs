//! Runs the ring code over loom's atomics, in every order of events that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p peerway --release --lib loom`

use std::ops::ControlFlow;

use ::loom::cell::UnsafeCell;
use ::loom::model::Builder;
use ::loom::sync::atomic::{AtomicU64, Ordering};
use ::loom::sync::{Arc, Notify};
use ::loom::thread;

use super::*;

/// A ring, and for each command a cell that its producer writes before the push. Loom reports a
/// race if the consumer reads the cell too soon.
struct Model {
    slots: Vec<[AtomicU64; 2]>,
    claim: AtomicU64,
    cached: AtomicU64,
    credit: AtomicU64,
    payload: Vec<UnsafeCell<u64>>,
    /// `set_slot` stores the second half of a slot first.
    backwards: bool,
    /// Slot stores are relaxed, as if the fence were missing.
    unfenced: bool,
    /// Replaces busy polling, which loom would follow for ever. A notification is kept until a
    /// thread waits for it, and it adds no ordering beyond what waiting needs.
    pushed: Notify,
    freed: Vec<Notify>,
}

impl Words for Arc<Model> {
    fn slot(&self, at: usize) -> [u64; 2] {
        [0, 1].map(|half| self.slots[at][half].load(Ordering::Acquire))
    }

    fn set_slot(&self, at: usize, words: [u64; 2]) {
        let order = if self.unfenced { Ordering::Relaxed } else { Ordering::Release };
        let halves = if self.backwards { [1, 0] } else { [0, 1] };
        halves.iter().for_each(|half| self.slots[at][*half].store(words[*half], order));
        self.pushed.notify();
    }

    fn credit(&self) -> u64 {
        self.credit.load(Ordering::Acquire)
    }

    fn set_credit(&self, consumed: u64) {
        self.credit.store(consumed, Ordering::Release);
        self.freed.iter().for_each(Notify::notify);
    }
}

impl ClaimWords for Arc<Model> {
    fn claim(&self, count: u64) -> u64 {
        self.claim.fetch_add(count, Ordering::Relaxed)
    }

    fn unclaim(&self, first: u64, count: u64) -> bool {
        let claimed = first + count;
        self.claim.compare_exchange(claimed, first, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn cached(&self) -> u64 {
        self.cached.load(Ordering::Acquire)
    }

    fn raise_cached(&self, credit: u64) {
        self.cached.fetch_max(credit, Ordering::AcqRel);
    }

    fn die(&self) {
        self.cached.fetch_or(DEAD, Ordering::AcqRel);
    }
}

/// `each` commands by each of `producers` through a ring of `1 << log2` slots.
fn model(
    (log2, producers, each): (u32, usize, u64),
    (backwards, unfenced): (bool, bool),
    preemptions: usize,
) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let total = producers as u64 * each;
        let ring = Arc::new(Model {
            slots: (0..1 << log2).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            claim: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            credit: AtomicU64::new(0),
            payload: (0..total).map(|_| UnsafeCell::new(0)).collect(),
            backwards,
            unfenced,
            pushed: Notify::new(),
            freed: (0..producers).map(|_| Notify::new()).collect(),
        });
        let threads: Vec<_> = (0..producers as u64)
            .map(|me| {
                let ring = ring.clone();
                thread::spawn(move || {
                    let producer = CommandProducer::new(ring.clone(), log2);
                    for name in me * each..(me + 1) * each {
                        // SAFETY: only this producer writes this cell. Loom checks every read of
                        // it.
                        ring.payload[name as usize].with_mut(|cell| unsafe { *cell = name + 100 });
                        let wait = || {
                            ring.freed[me as usize].wait();
                            true
                        };
                        producer.push(&[[name, name]], wait).unwrap();
                    }
                })
            })
            .collect();
        let mut consumer = CommandConsumer::new(ring.clone(), log2);
        let mut next: Vec<u64> = (0..producers as u64).map(|me| me * each).collect();
        let mut got = 0;
        while got < total {
            let taken = consumer.drain(usize::MAX, |_, words| {
                let [name, again] = words.map(|word| word & !peerway_core::command::PHASE);
                assert_eq!(name, again, "both halves belong to the same command");
                assert_eq!(name, next[(name / each) as usize], "in the order of pushes");
                next[(name / each) as usize] += 1;
                // SAFETY: the producer wrote the cell before it pushed the command. Loom reports a
                // violation.
                ring.payload[name as usize].with(|cell| assert_eq!(unsafe { *cell }, name + 100));
                ControlFlow::Continue(())
            });
            got += taken as u64;
            if taken == 0 {
                ring.pushed.wait();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn one_producer_wraps() {
    model((0, 1, 3), (false, false), 3);
    model((1, 1, 4), (true, false), 3);
}

#[test]
fn two_producers_share_a_ring_and_wait_for_credit() {
    model((1, 2, 1), (false, false), 3);
    model((0, 2, 1), (false, false), 2);
    model((0, 2, 1), (true, false), 2);
    model((1, 2, 2), (false, false), 1);
}

/// Shows that the model detects a missing fence.
#[test]
#[should_panic]
fn without_the_fence_the_bytes_are_not_there() {
    model((1, 1, 1), (false, true), 3);
}
