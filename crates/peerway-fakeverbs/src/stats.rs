//! Counters for tests: how many doorbells, requests and completions a process made.
//!
//! They count per process, over all devices. A program that opened the library by name reads them
//! through the exported function `peerway_fakeverbs_stats`.

use std::sync::atomic::{AtomicU64, Ordering};

/// The structure that `peerway_fakeverbs_stats` fills. It grows only at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stats {
    /// Calls that passed requests to the device: `ibv_post_send`, and `wr_complete` of a batch.
    pub doorbells: u64,
    /// Requests on send queues.
    pub requests: u64,
    /// Requests on send queues that ask for a completion.
    pub signalled: u64,
    /// Calls of `ibv_post_recv`.
    pub receive_doorbells: u64,
    /// Requests on receive queues.
    pub receives: u64,
    /// Calls of `ibv_poll_cq`.
    pub polls: u64,
    /// Completions that polls returned.
    pub completions: u64,
    /// Completion events raised.
    pub events: u64,
    /// Memory regions registered.
    pub registrations: u64,
    /// Memory regions deregistered.
    pub deregistrations: u64,
    /// Queue pairs that exist now.
    pub queue_pairs: u64,
    /// Packets sent, whether they arrived or not.
    pub packets: u64,
    /// Retransmissions, each of one or more packets.
    pub retransmissions: u64,
    /// Requests on send queues with inline data.
    pub inlined: u64,
    /// Calls of `ibv_modify_qp` that connect a queue pair.
    pub connects: u64,
    /// Such calls that have returned.
    pub connected: u64,
    /// Memory windows that exist now.
    pub windows: u64,
}

macro_rules! counters {
    ($($field:ident),* $(,)?) => {
        /// The counters of this process.
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
    connects,
    connected,
    windows,
);

pub(crate) static COUNTERS: Counters = Counters::new();

/// Adds to a counter. Counters order no other memory accesses, so relaxed suffices.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Fills `out` with the counters of this process.
///
/// # Safety
///
/// `out` is valid for a write of a [`Stats`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_fakeverbs_stats(out: *mut Stats) {
    // SAFETY: by this function's contract.
    unsafe { out.write(COUNTERS.read()) };
}
