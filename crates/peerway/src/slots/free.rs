//! The stack of free slot numbers. The number used last, whose slot is likely in a cache, is used
//! next.

#[cfg(all(test, loom))]
use ::loom::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::atomic::Ordering;
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU32, AtomicU64};

/// See the module.
pub(super) struct Free {
    /// The lower half is the topmost number plus one, or 0 when the stack is empty. The upper half
    /// counts the changes, so that a compare-exchange fails if a number was taken and given back in
    /// between.
    top: AtomicU64,
    /// For each free number, the next one below it plus one, or 0.
    below: Box<[AtomicU32]>,
}

impl Free {
    /// Creates a stack of all numbers less than `count`, the least on top.
    pub(super) fn new(count: u32) -> Self {
        let below = (0..count).map(|_| AtomicU32::new(0)).collect();
        let free = Self { top: AtomicU64::new(0), below };
        (0..count).rev().for_each(|number| free.give_back(number));
        free
    }

    #[inline]
    pub(super) fn take(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let number = (top as u32).checked_sub(1)?;
            // Another thread may own the number by now, so this value may be out of date. Then
            // `top` has changed too, and the exchange fails.
            let below = self.below[number as usize].load(Ordering::Relaxed);
            match self.replace(top, below, Ordering::Acquire) {
                Ok(_) => return Some(number),
                Err(now) => top = now,
            }
        }
    }

    /// Gives back a number that was taken.
    #[inline]
    pub(super) fn give_back(&self, number: u32) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            self.below[number as usize].store(top as u32, Ordering::Relaxed);
            // Pairs with the acquires in `take`: the next owner of the number sees everything done
            // with it before.
            match self.replace(top, number + 1, Ordering::Release) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    #[inline]
    fn replace(&self, top: u64, with: u32, order: Ordering) -> Result<u64, u64> {
        let changes = (top >> 32).wrapping_add(1) << 32;
        self.top.compare_exchange_weak(top, changes | u64::from(with), order, Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod loom {
    //! `RUSTFLAGS="--cfg loom" cargo test -p peerway --release --lib slots::free::loom`

    use std::sync::Arc;

    use ::loom::thread;

    use super::*;

    /// One thread takes both numbers and gives one back while another thread takes one: the top is
    /// the same as before, but the number below it is not.
    #[test]
    fn nobody_takes_what_another_has() {
        ::loom::model(|| {
            let free = Arc::new(Free::new(2));
            let its = free.clone();
            let other = thread::spawn(move || its.take());
            let ours = [free.take(), free.take()];
            if let Some(first) = ours[0] {
                free.give_back(first);
            }
            let mut held = vec![other.join().unwrap(), ours[1], free.take(), free.take()];
            held.retain(Option::is_some);
            held.sort();
            assert_eq!(held, [Some(0), Some(1)]);
        });
    }

    /// Writes before a number is given back are visible to the next thread that takes it.
    #[test]
    fn who_takes_a_number_sees_what_its_last_holder_did() {
        ::loom::model(|| {
            let free = Arc::new(Free::new(1));
            let written = Arc::new(AtomicU32::new(0));
            let number = free.take().unwrap();
            let (its, there) = (free.clone(), written.clone());
            let other = thread::spawn(move || {
                if its.take().is_some() {
                    assert_eq!(there.load(Ordering::Relaxed), 1);
                }
            });
            written.store(1, Ordering::Relaxed);
            free.give_back(number);
            other.join().unwrap();
        });
    }
}
