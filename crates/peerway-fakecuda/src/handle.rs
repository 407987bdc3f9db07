//! Handles: numbers that look like pointers, and the objects that they name.
//!
//! A handle is never dereferenced and never reused. A wrong or destroyed handle therefore gives an
//! error instead of a crash.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use peerway_sys::cuda::ffi::*;

use crate::errors::INVALID_HANDLE;
use crate::lock;

/// The existing objects of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    known: Mutex<HashMap<usize, Arc<T>>>,
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self { known: Mutex::default() }
    }
}

impl<T> Handles<T> {
    pub(crate) fn add(&self, value: Arc<T>) -> *mut c_void {
        let number = next();
        lock(&self.known).insert(number, value);
        ptr::without_provenance_mut(number)
    }

    pub(crate) fn get(&self, handle: *mut c_void) -> Result<Arc<T>, CUresult> {
        lock(&self.known).get(&handle.addr()).cloned().ok_or(INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: *mut c_void) -> Result<Arc<T>, CUresult> {
        lock(&self.known).remove(&handle.addr()).ok_or(INVALID_HANDLE)
    }

    /// Removes and returns the objects for which `question` is true.
    pub(crate) fn take(&self, question: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        lock(&self.known).extract_if(|_, value| question(value)).map(|(_, value)| value).collect()
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.known).values().cloned().collect()
    }

    pub(crate) fn count(&self) -> u64 {
        lock(&self.known).len() as u64
    }
}

/// Starts above the special streams (1 and 2) and above the contexts.
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);

fn next() -> usize {
    // The numbers order no other memory accesses. A step of 16 makes them look like pointers.
    NEXT.fetch_add(16, Ordering::Relaxed)
}
