//! Counts for gates: how many doorbells, requests and completions a process made.
//!
//! Counted per process, over all devices. They are read through the exported
//! `peerway_fakeverbs_stats`, which a program that opened the library by name looks up there.

use std::sync::atomic::{AtomicU64, Ordering};

/// What `peerway_fakeverbs_stats` fills. Grows only at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stats {
    /// Calls that handed requests to the device: `ibv_post_send`, and `wr_complete` of a batch.
    pub doorbells: u64,
    /// Requests on send queues.
    pub requests: u64,
    /// Those of them that were to make a completion.
    pub signalled: u64,
    /// Calls of `ibv_post_recv`.
    pub receive_doorbells: u64,
    /// Requests on receive queues.
    pub receives: u64,
    /// Calls of `ibv_poll_cq`.
    pub polls: u64,
    /// Completions that polls gave out.
    pub completions: u64,
    /// Completion events raised.
    pub events: u64,
    /// Memory regions registered.
    pub registrations: u64,
    /// Memory regions given back.
    pub deregistrations: u64,
    /// Queue pairs that are there now.
    pub queue_pairs: u64,
    /// Packets sent, whether they arrived or not.
    pub packets: u64,
    /// Packets that were sent again.
    pub retransmissions: u64,
    /// Requests on send queues that carried their bytes themselves.
    pub inlined: u64,
}

macro_rules! counters {
    ($($field:ident),* $(,)?) => {
        /// The counts of this process.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $( pub(crate) $field: AtomicU64, )* }

        impl Counters {
            const fn new() -> Self {
                Self { $( $field: AtomicU64::new(0), )* }
            }

            fn read(&self) -> Stats {
                Stats { $( $field: self.$field.load(Ordering::Relaxed), )* }
            }
        }
    };
}

counters!(
    doorbells,
    requests,
    signalled,
    receive_doorbells,
    receives,
    polls,
    completions,
    events,
    registrations,
    deregistrations,
    queue_pairs,
    packets,
    retransmissions,
    inlined,
);

pub(crate) static COUNTERS: Counters = Counters::new();

/// Adds to a count. Counts order nothing, so relaxed.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Fills `out` with the counts of this process.
///
/// # Safety
///
/// `out` is a place for a [`Stats`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_fakeverbs_stats(out: *mut Stats) {
    // SAFETY: by this function's contract.
    unsafe { out.write(COUNTERS.read()) };
}
