use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;

use super::*;

/// A ring in a vector, and the addresses into that vector.
struct Ring {
    _memory: Vec<u64>,
    words: HostMemory,
    log2: u32,
}

// SAFETY: all words are accessed atomically, and the vector's heap buffer does not move.
unsafe impl Send for Ring {}
// SAFETY: the same argument as for `Send`.
unsafe impl Sync for Ring {}

impl Ring {
    fn new(log2: u32) -> Self {
        let slots = 2usize << log2;
        let mut memory = vec![0u64; slots + 3];
        let base = memory.as_mut_ptr();
        let at = |index: usize| base.wrapping_add(index);
        let ring = RingWords { slots: base, credit: at(slots) };
        let words = HostMemory { ring, claim: at(slots + 1), cached: at(slots + 2) };
        Self { _memory: memory, words, log2 }
    }

    fn producer(&self) -> CommandProducer<HostMemory> {
        CommandProducer::new(self.words, self.log2)
    }

    fn consumer(&self) -> CommandConsumer<RingWords> {
        CommandConsumer::new(self.words.ring, self.log2)
    }
}

fn all(consumer: &mut CommandConsumer<RingWords>) -> Vec<[u64; 2]> {
    let mut got = Vec::new();
    consumer.drain(usize::MAX, |_, words| {
        got.push(words.map(|word| word & !peerway_core::command::PHASE));
        ControlFlow::Continue(())
    });
    got
}

#[test]
fn commands_come_out_in_order_over_many_laps() {
    let ring = Ring::new(2);
    let (producer, mut consumer) = (ring.producer(), ring.consumer());
    for round in 0..40u64 {
        let commands = [[round, 1], [round, 2], [round, 3]];
        assert_eq!(producer.push(&commands, || false), Ok(3 * round));
        assert_eq!(all(&mut consumer), commands);
        assert_eq!(all(&mut consumer), [] as [[u64; 2]; 0], "empty; publishes the credit");
    }
}

#[test]
fn a_refused_command_is_given_again() {
    let ring = Ring::new(3);
    let (producer, mut consumer) = (ring.producer(), ring.consumer());
    producer.push(&[[1, 0], [2, 0], [3, 0]], || false).unwrap();
    let mut seen = 0;
    let refuse_the_second = |_, _| {
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert_eq!(consumer.drain(8, refuse_the_second), 1);
    assert_eq!(all(&mut consumer), [[2, 0], [3, 0]]);
}

#[test]
fn a_half_that_is_late_holds_the_command_back() {
    let ring = Ring::new(2);
    let mut consumer = ring.consumer();
    let phase = peerway_core::command::PHASE;
    ring.words.set_slot(0, [phase | 5, 0]);
    assert!(all(&mut consumer).is_empty());
    ring.words.set_slot(0, [phase | 5, phase | 6]);
    assert_eq!(all(&mut consumer), [[5, 6]]);
}

#[test]
fn a_full_ring_is_refused_and_works_again_when_drained() {
    let ring = Ring::new(2);
    let (producer, mut consumer) = (ring.producer(), ring.consumer());
    producer.push(&[[7, 7]; 4], || false).unwrap();
    let mut patience = 3;
    let bounded = || {
        patience -= 1;
        patience > 0
    };
    assert_eq!(producer.push(&[[8, 8]], bounded), Err(PushError::Full));
    assert_eq!(all(&mut consumer).len(), 4);
    all(&mut consumer);
    assert_eq!(producer.push(&[[9, 9]], || false), Ok(4), "the refused push gave its claim back");
    assert_eq!(all(&mut consumer), [[9, 9]]);
}

#[test]
fn an_abandoned_claim_makes_the_ring_dead_and_not_wrong() {
    let ring = Ring::new(1);
    let (producer, mut consumer) = (ring.producer(), ring.consumer());
    producer.push(&[[1, 1]; 2], || false).unwrap();
    // A producer behind this one claims a position and never gives it back.
    let claimed_behind = || {
        ring.words.claim(1);
        false
    };
    assert_eq!(producer.push(&[[2, 2]], claimed_behind), Err(PushError::Full));
    assert_eq!(producer.push(&[[3, 3]], || true), Err(PushError::Dead));
    assert_eq!(all(&mut consumer).len(), 2, "the consumer still drains earlier commands");
    assert!(all(&mut consumer).is_empty());
}

#[test]
fn many_producers_lose_nothing() {
    const EACH: u64 = if cfg!(miri) { 40 } else { 20_000 };
    let ring = Arc::new(Ring::new(4));
    let mut consumer = ring.consumer();
    let threads: Vec<_> = (0..3u64)
        .map(|me| {
            let ring = ring.clone();
            thread::spawn(move || {
                let producer = ring.producer();
                for at in (0..EACH).step_by(2) {
                    let wait = || {
                        thread::yield_now();
                        true
                    };
                    producer.push(&[[at, me], [at + 1, me]], wait).unwrap();
                }
            })
        })
        .collect();
    let mut next = [0u64; 3];
    while next.iter().sum::<u64>() < 3 * EACH {
        for [at, me] in all(&mut consumer) {
            assert_eq!(at, next[me as usize], "commands of producer {me} arrive in order");
            next[me as usize] += 1;
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(all(&mut consumer).is_empty());
}
