//! Memory owned by address, for bytes that other threads, devices or processes change.
//!
//! A `Box` or a slice asserts that nothing else writes its bytes while it is borrowed or moved.
//! Memory that is written through raw pointers and atomics must not be in one: code may not write
//! through a pointer made from a shared borrow, and moving a box invalidates pointers into it.

use std::alloc::Layout;

use super::affinity;

/// Whole pages, initially zero. The value holds only their address and never makes a reference to
/// them.
pub(crate) struct Pages {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is tied to no thread, and only this value frees it.
unsafe impl Send for Pages {}
// SAFETY: `&Pages` only gives the address. All accesses go through the pointer, and the code that
// makes them must order them.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates at least `bytes` of memory, preferably on this NUMA node.
    pub(crate) fn new(bytes: usize, node: Option<u16>) -> Self {
        let bytes = bytes.max(1).next_multiple_of(4096);
        let layout =
            Layout::from_size_align(bytes, 4096).expect("the alignment of 4096 is a power of two");
        // SAFETY: the size is not zero.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        if let Some(node) = node {
            affinity::prefer_node(ptr as u64, bytes as u64, node);
        }
        Self { ptr, layout }
    }

    /// The first byte. The caller may write through the pointer. It stays valid until the value is
    /// dropped, even if the value moves.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and it is freed once.
        unsafe { std::alloc::dealloc(self.ptr, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_is_good_after_the_value_has_moved() {
        let pages = Pages::new(1, None);
        let ptr = pages.ptr();
        // SAFETY: inside the pages, which are alive and known to this thread only.
        unsafe { ptr.write(1) };
        let moved = Box::new(pages);
        // SAFETY: as above.
        unsafe { ptr.add(moved.len() - 1).write(2) };
        // SAFETY: as above.
        let (first, last) = unsafe { (moved.ptr().read(), moved.ptr().add(4095).read()) };
        assert_eq!((first, last), (1, 2));
    }
}
