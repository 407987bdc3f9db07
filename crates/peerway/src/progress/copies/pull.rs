//! The target's side of a CMA write: the target copies from the initiator's memory into its own.
//!
//! The owner of the destination does the copy, so that it can stop it, revoke access and account
//! for every byte.

use std::cell::RefCell;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use peerway_core::outcome::TransferError;

use crate::hooks;
use crate::memory::grants::Grant;
use crate::os::{Piece, cma};
use crate::progress::copies::pool::{Job, QUANTUM};
use crate::progress::shard::{DriverCommand, Shard};
use crate::session::{PROCESS_ENDED, Session};

/// One pull frame being carried out.
pub(crate) struct PullJob {
    pub(crate) shard: Arc<Shard>,
    pub(crate) session: Arc<Session>,
    /// The frame that this job answers, and its lane.
    pub(crate) origin: PullOrigin,
    pub(crate) grant: Arc<Grant>,
    /// The initiator's memory.
    pub(crate) memory: Arc<cma::ProcessMemory>,
    /// Destination pieces in this process and source pieces in the initiator, in pairs.
    pub(crate) here: Vec<Piece>,
    pub(crate) there: Vec<Piece>,
    pub(crate) state: Mutex<PullState>,
}

/// Copies from another process into granted memory of this process, behind the grant's gate.
pub(crate) fn copy(
    session: &Arc<Session>,
    grant: &Grant,
    memory: &cma::ProcessMemory,
    here: &[Piece],
    there: &[Piece],
) -> Result<(), TransferError> {
    let gate = grant.gate();
    if !gate.enter() {
        return Err(TransferError::Revoked);
    }
    hooks::about_to_copy();
    // SAFETY: `find` checked the local pieces against the grant, which keeps their memory alive and
    // whose gate this function holds. The remote pieces are addresses in another process, which the
    // kernel checks.
    let result = unsafe { memory.read(here, there) };
    gate.leave();
    result.map_err(|error| cma_failed(session, &error))?;
    let bytes = here.iter().map(|piece| piece.len).sum();
    session.stats.bytes_landed.fetch_add(bytes, Ordering::Relaxed);
    Ok(())
}

/// Maps a failed copy between processes to a transfer error.
pub(crate) fn cma_failed(session: &Arc<Session>, error: &io::Error) -> TransferError {
    match error.raw_os_error() {
        Some(libc::ESRCH) => {
            session.found_gone();
            TransferError::PeerGone
        }
        _ if session.is_process_dead() => {
            session.note_event(PROCESS_ENDED);
            TransferError::PeerGone
        }
        _ => TransferError::Fault,
    }
}

/// The frame that a pull answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PullOrigin {
    pub(crate) lane: u16,
    pub(crate) sequence: u64,
    pub(crate) transfer: u64,
    /// The counter to increment when the pull is done.
    pub(crate) counts: Option<u32>,
}

#[derive(Default)]
pub(crate) struct PullState {
    piece: usize,
    within: u64,
    running: u32,
    stop: Option<TransferError>,
    finished: bool,
}

impl PullJob {
    /// Claims the next quantum as two piece lists of the same total. Returns false when nothing is
    /// left.
    fn claim(&self, here: &mut Vec<Piece>, there: &mut Vec<Piece>) -> bool {
        here.clear();
        there.clear();
        let mut state = self.state.lock().unwrap();
        if state.stop.is_some() || state.piece >= self.here.len() {
            return false;
        }
        let mut left = QUANTUM;
        while left > 0
            && let Some(piece) = self.here.get(state.piece)
        {
            let source = self.there[state.piece];
            let len = (piece.len - state.within).min(left);
            here.push(Piece { addr: piece.addr + state.within, len });
            there.push(Piece { addr: source.addr.wrapping_add(state.within), len });
            left -= len;
            state.within += len;
            if state.within == piece.len {
                state.piece += 1;
                state.within = 0;
            }
        }
        state.running += 1;
        true
    }

    fn finish_if_over(&self) {
        let mut state = self.state.lock().unwrap();
        let over = state.running == 0 && (state.stop.is_some() || state.piece >= self.here.len());
        if !over || state.finished {
            return;
        }
        state.finished = true;
        let result = state.stop.map_or(Ok(()), Err);
        drop(state);
        self.session.pull_ended();
        let (session, origin) = (self.session.clone(), self.origin);
        self.shard.submit(DriverCommand::Pulled { session, origin, result });
    }
}

impl Job for PullJob {
    fn step(&self) -> bool {
        // A quantum has at most as many pieces as it has 4 KiB blocks, so the lists stay small.
        // Each thread reuses them.
        thread_local! {
            static PIECES: RefCell<(Vec<Piece>, Vec<Piece>)> = const {
                RefCell::new((Vec::new(), Vec::new()))
            };
        }
        // Take the lists out: finishing may run a driver that steps another pull on this thread.
        let (mut here, mut there) = PIECES.take();
        let claimed = self.claim(&mut here, &mut there);
        if claimed {
            let result = copy(&self.session, &self.grant, &self.memory, &here, &there);
            let mut state = self.state.lock().unwrap();
            state.running -= 1;
            if let Err(error) = result {
                state.stop.get_or_insert(error);
            }
            drop(state);
            self.finish_if_over();
        }
        PIECES.set((here, there));
        claimed
    }

    /// The answer goes out when the quanta in progress are done.
    fn cancel(&self) {
        let mut state = self.state.lock().unwrap();
        // The initiator cancelled, so it ignores the error code of the refusal.
        state.stop.get_or_insert(TransferError::RemoteAccess);
        drop(state);
        self.finish_if_over();
    }

    fn halt(&self) {
        self.cancel();
    }
}
