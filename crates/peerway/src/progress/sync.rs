//! The poller's atomics and queue: the real ones, or loom's models in its tests.

#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

#[cfg(not(loom))]
pub(super) use crate::clock::now as now_ns;
#[cfg(not(loom))]
pub(super) use crossbeam_queue::SegQueue as CommandQueue;

#[cfg(loom)]
pub(super) use self::modelled::*;

#[cfg(loom)]
mod modelled {
    use std::collections::VecDeque;
    use std::sync::atomic::Ordering;

    pub(crate) use loom::sync::atomic::{AtomicU32, fence};

    /// loom lets a swap that follows a store read the value before the store. So stores are
    /// modelled as swaps.
    macro_rules! stored_by_swap {
        ($name:ident, $value:ty) => {
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    self.0.load(order)
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    self.0.swap(value, order);
                }

                #[allow(dead_code, reason = "only flags are swapped")]
                pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                    self.0.swap(value, order)
                }
            }
        };
    }
    stored_by_swap!(AtomicBool, bool);
    stored_by_swap!(AtomicU64, u64);

    /// Time does not advance: a model must behave the same in every run.
    pub(crate) fn now_ns() -> u64 {
        1
    }

    /// A queue whose length is only a hint, so that the fences around it matter.
    pub(crate) struct CommandQueue<C> {
        len: AtomicU32,
        commands: loom::sync::Mutex<VecDeque<C>>,
    }

    impl<C> CommandQueue<C> {
        pub(crate) fn new() -> Self {
            Self { len: AtomicU32::new(0), commands: loom::sync::Mutex::default() }
        }

        pub(crate) fn push(&self, command: C) {
            self.commands.lock().unwrap().push_back(command);
            self.len.fetch_add(1, Ordering::Relaxed);
        }

        pub(crate) fn pop(&self) -> Option<C> {
            let popped = self.commands.lock().unwrap().pop_front();
            if popped.is_some() {
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
            popped
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.len.load(Ordering::Relaxed) == 0
        }
    }
}
