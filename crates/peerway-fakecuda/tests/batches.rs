//! Lists of copies in one call, in the two versions that CUDA has.

mod support;

use std::ptr;

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

/// A list in the form that the driver takes.
struct List {
    to: Vec<u64>,
    from: Vec<u64>,
    sizes: Vec<usize>,
    attributes: CUmemcpyAttributes,
    first: usize,
}

impl List {
    fn new(copies: &[(u64, u64, usize)]) -> Self {
        let mut attributes = CUmemcpyAttributes::zeroed();
        attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        Self {
            to: copies.iter().map(|copy| copy.0).collect(),
            from: copies.iter().map(|copy| copy.1).collect(),
            sizes: copies.iter().map(|copy| copy.2).collect(),
            attributes,
            first: 0,
        }
    }

    /// The call of CUDA 12.8. Returns also the copy that failed.
    fn old(&mut self, stream: CUstream) -> (CUresult, usize) {
        let mut failed = 7;
        let (to, from, sizes) =
            (self.to.as_mut_ptr(), self.from.as_mut_ptr(), self.sizes.as_mut_ptr());
        let (count, attributes, first) = (self.sizes.len(), &mut self.attributes, &mut self.first);
        let result = cu!(cuMemcpyBatchAsync(
            to,
            from,
            sizes,
            count,
            attributes,
            first,
            1,
            &mut failed,
            stream
        ));
        (result, failed)
    }

    /// The call of CUDA 13.0.
    fn new_one(&mut self, stream: CUstream) -> CUresult {
        let (to, from, sizes) = (self.to.as_ptr(), self.from.as_ptr(), self.sizes.as_ptr());
        let (count, attributes, first) = (self.sizes.len(), &mut self.attributes, &mut self.first);
        cu!(cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, first, 1, stream))
    }
}

#[test]
fn lists_are_copied_in_stream_order() {
    if !scripted("lists_are_copied_in_stream_order", "jitter=200us") {
        return;
    }
    start();
    let stream = stream();
    let bytes = pattern(3, 1000);
    let (a, b) = (allocate(1000), allocate(1000));
    let host = Pinned::new(1000);
    upload(a, &bytes);
    // The second list reads what the first has written. Both calls read their lists before they
    // return.
    let gate = Gate::close(stream);
    ok(List::new(&[(b, a, 600), (b + 600, a + 600, 400)]).new_one(stream));
    let mut list = List::new(&[(host.address() + 10, b + 10, 990), (host.address(), b, 10)]);
    assert_eq!(list.old(stream), (CUDA_SUCCESS, usize::MAX));
    drop(list);
    gate.open();
    ok(cu!(cuStreamSynchronize(stream)));
    assert!(host.read() == bytes);
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    if !scripted("lists_that_make_no_sense_are_refused", "fail=cuMemcpyBatchAsync_v2@1:801") {
        return;
    }
    start();
    let stream = stream();
    let (a, b) = (allocate(100), allocate(100));
    let good = [(b, a, 50), (b + 50, a + 50, 50)];
    let refused = CUDA_ERROR_INVALID_VALUE;
    // The script refuses the first call only.
    assert_eq!(List::new(&good).new_one(stream), CUDA_ERROR_NOT_SUPPORTED);
    ok(List::new(&good).new_one(stream));
    // An empty copy, whose number is reported; the NULL stream; no access order; a wrong first
    // copy; no copies.
    assert_eq!(List::new(&[good[0], (b, a, 0)]).old(stream), (refused, 1));
    assert_eq!(List::new(&good).old(ptr::null_mut()), (refused, usize::MAX));
    let mut list = List::new(&good);
    list.attributes.srcAccessOrder = 0;
    assert_eq!(list.new_one(stream), refused);
    list = List::new(&good);
    list.first = 1;
    assert_eq!(list.new_one(stream), refused);
    assert_eq!(List::new(&[]).new_one(stream), refused);
    ok(cu!(cuStreamSynchronize(stream)));
    assert_eq!((calls("cuMemcpyBatchAsync"), calls("cuMemcpyBatchAsync_v2")), (2, 5));
}
