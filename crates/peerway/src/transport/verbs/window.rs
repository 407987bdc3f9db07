//! Memory windows: keys that open advertised memory to one queue pair.
//!
//! A key of a registration is valid for every queue pair of its protection domain, so a peer that
//! guesses it gets access. A type 2 window is bound to a range of a registration by a work request
//! on a queue pair, and its key is valid for requests that arrive by that queue pair alone. The
//! registration itself then gives peers no right at all.
//!
//! A window is bound once. It must be closed before its registration can be ended, and before its
//! queue pair is destroyed: drivers count references. Whichever end comes first closes it.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Mr, Mw, Pd, Qp, VerbsError, WcStatus, next_rkey};

use crate::transport::device::KeyWindow;

/// See the module.
pub(super) struct Window {
    state: Mutex<Option<OpenWindow>>,
    key: u32,
    /// The range of memory, and what the peer may do with it.
    address: u64,
    len: u64,
    access: c_uint,
    /// Set if a device refuses to bind windows to this memory.
    refused: Arc<AtomicBool>,
}

struct OpenWindow {
    mw: Mw,
    mr: Arc<Mr>,
}

impl Window {
    /// Makes a window for this range of a registration. It opens nothing before it is bound.
    pub(super) fn new(
        pd: &Arc<Pd>,
        mr: &Arc<Mr>,
        (address, len): (u64, u64),
        access: c_uint,
        refused: &Arc<AtomicBool>,
    ) -> Result<Self, VerbsError> {
        let mw = Mw::alloc(pd)?;
        let key = next_rkey(mw.rkey());
        let state = Mutex::new(Some(OpenWindow { mw, mr: mr.clone() }));
        Ok(Self { state, key, address, len, access, refused: refused.clone() })
    }

    /// Posts the bind, with this id. Returns false if the window has been closed.
    pub(super) fn bind(&self, qp: &Qp, id: u64) -> Result<bool, VerbsError> {
        let state = self.state.lock().unwrap();
        let Some(OpenWindow { mw, mr }) = &*state else { return Ok(false) };
        let info = ibv_mw_bind_info::new(mr, self.address, self.len, self.access);
        let bind = ibv_send_wr::bind_window(id, mw, self.key, info);
        // SAFETY: the list has one request, which names no local memory. The lock keeps the window
        // and its region until the call returns.
        let posted = unsafe { qp.post_send(&mut bind.with_flags(IBV_SEND_SIGNALED)) };
        drop(state);
        posted.map_err(|error| {
            let error = VerbsError::of_post("ibv_post_send", qp.number(), error.errno);
            self.note_refusal(&error.to_string());
            error
        })?;
        Ok(true)
    }

    /// The device did not carry out the bind.
    pub(super) fn was_refused(&self, status: &WcStatus) {
        // A bind fails if its window was closed in the meantime.
        if self.is_open() {
            self.note_refusal(&status.to_string());
        }
    }

    fn note_refusal(&self, why: &str) {
        tracing::warn!(why, "an RDMA device does not bind a window to advertised memory");
        self.refused.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_open(&self) -> bool {
        self.state.lock().unwrap().is_some()
    }

    /// Closes the window, unless it is closed. A thread that finds it closed knows that the device
    /// has closed it.
    pub(super) fn try_close(&self) -> Result<(), VerbsError> {
        let mut state = self.state.lock().unwrap();
        let Some(OpenWindow { mw, mr }) = state.take() else { return Ok(()) };
        mw.close().map_err(|(mw, error)| {
            *state = Some(OpenWindow { mw, mr });
            error
        })
    }
}

impl KeyWindow for Window {
    fn key(&self) -> u32 {
        self.key
    }

    fn close(&self) {
        if let Err(error) = self.try_close() {
            tracing::error!(%error, "a device did not close a memory window");
        }
    }
}
