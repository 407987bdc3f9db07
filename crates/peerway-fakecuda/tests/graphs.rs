//! Work for a capturing stream is done when the graph is launched, once per launch.

mod support;

use std::ffi::c_void;
use std::ptr;

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

fn capturing(stream: CUstream) -> bool {
    let mut status = 9;
    ok(cu!(cuStreamIsCapturing(stream, &mut status)));
    status == CU_STREAM_CAPTURE_STATUS_ACTIVE
}

fn end(stream: CUstream) -> Result<*mut c_void, CUresult> {
    let mut graph = ptr::null_mut();
    match cu!(cuStreamEndCapture(stream, &mut graph)) {
        CUDA_SUCCESS => Ok(graph),
        code => Err(code),
    }
}

#[test]
fn a_graph_is_launched_twice() {
    if !scripted("a_graph_is_launched_twice", "") {
        return;
    }
    start();
    let (stream, device) = (stream(), allocate(64));
    let (from, to, count) = (Pinned::new(64), Pinned::new(64), Pinned::new(8));
    to.fill(0);
    count.fill(0);
    from.fill(1);
    ok(cu!(cuStreamBeginCapture_v2(stream, 0)));
    assert!(capturing(stream));
    ok(cu!(cuMemcpyAsync(device, from.address(), 64, stream)));
    ok(cu!(cuMemcpyAsync(to.address(), device, 32, stream)));
    ok(cu!(cuStreamWriteValue64_v2(stream, count.address(), 5, 0)));
    let graph = end(stream).expect("the capture succeeds");
    assert!(!capturing(stream));
    let mut executable = ptr::null_mut();
    ok(cu!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)));
    ok(cu!(cuGraphDestroy(graph)));
    assert_eq!(cu!(cuGraphDestroy(graph)), 400);
    ok(cu!(cuCtxSynchronize()));
    assert_eq!(to.read(), [0; 64]);
    for round in 1..3 {
        from.fill(round);
        count.fill(0);
        ok(cu!(cuGraphLaunch(executable, stream)));
        ok(cu!(cuStreamSynchronize(stream)));
        assert_eq!(to.read()[..32], [round; 32]);
        assert_eq!(to.read()[32..], [0; 32]);
        assert_eq!(count.read(), 5u64.to_ne_bytes());
    }
    ok(cu!(cuGraphExecDestroy(executable)));
    assert_eq!(cu!(cuGraphLaunch(executable, stream)), 400);
}

#[test]
fn branches_join() {
    if !scripted("branches_join", "jitter=1ms") {
        return;
    }
    start();
    let (main, side) = (stream(), stream());
    let (fork, join) = (event(), event());
    let device = allocate(64);
    let (from, to) = (Pinned::new(64), Pinned::new(64));
    ok(cu!(cuStreamBeginCapture_v2(main, 0)));
    ok(cu!(cuMemcpyAsync(device, from.address(), 64, main)));
    ok(cu!(cuEventRecord(fork, main)));
    assert!(!capturing(side));
    ok(cu!(cuStreamWaitEvent(side, fork, 0)));
    assert!(capturing(side));
    ok(cu!(cuMemcpyAsync(to.address(), device, 64, side)));
    ok(cu!(cuEventRecord(join, side)));
    assert_eq!(cu!(cuEventQuery(join)), 907);
    ok(cu!(cuStreamWaitEvent(main, join, 0)));
    ok(cu!(cuMemsetD8Async(device, 0, 64, main)));
    assert_eq!(end(side), Err(903));
    let graph = end(main).expect("both branches are joined");
    assert!(!capturing(main) && !capturing(side));
    let mut executable = ptr::null_mut();
    ok(cu!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)));
    for round in 1..3 {
        from.fill(round);
        ok(cu!(cuGraphLaunch(executable, side)));
        ok(cu!(cuStreamSynchronize(side)));
        assert_eq!(to.read(), [round; 64]);
        assert_eq!(download(device, 64), [0; 64]);
    }
    // After the capture, events work on streams again.
    ok(cu!(cuEventRecord(join, side)));
    ok(cu!(cuEventSynchronize(join)));
}

#[test]
fn a_capture_that_is_not_right_fails() {
    if !scripted("a_capture_that_is_not_right_fails", "") {
        return;
    }
    start();
    let (main, side, device) = (stream(), stream(), allocate(64));
    let (inside, outside) = (event(), event());
    assert_eq!(cu!(cuStreamBeginCapture_v2(ptr::null_mut(), 0)), 400);
    assert_eq!(end(main), Err(903));

    // A branch that is not joined.
    ok(cu!(cuStreamBeginCapture_v2(main, 2)));
    ok(cu!(cuEventRecord(inside, main)));
    ok(cu!(cuStreamWaitEvent(side, inside, 0)));
    ok(cu!(cuMemsetD8Async(device, 0, 64, side)));
    assert_eq!(end(main), Err(904));
    assert!(!capturing(side));

    // A wait for captured work.
    ok(cu!(cuStreamBeginCapture_v2(main, 2)));
    assert_eq!(cu!(cuStreamSynchronize(main)), 900);
    assert_eq!(cu!(cuMemsetD8Async(device, 0, 64, main)), 901);
    assert_eq!(end(main), Err(901));

    // A dependency on uncaptured work.
    ok(cu!(cuEventRecord(outside, side)));
    ok(cu!(cuStreamBeginCapture_v2(main, 2)));
    assert_eq!(cu!(cuStreamWaitEvent(main, outside, 0)), 905);
    assert_eq!(end(main), Err(901));

    // Two captures.
    ok(cu!(cuStreamBeginCapture_v2(main, 2)));
    ok(cu!(cuStreamBeginCapture_v2(side, 2)));
    ok(cu!(cuEventRecord(inside, main)));
    assert_eq!(cu!(cuStreamWaitEvent(side, inside, 0)), 902);
    assert_eq!((end(main), end(side)), (Err(901), Err(901)));

    // Pageable memory.
    ok(cu!(cuStreamBeginCapture_v2(main, 2)));
    let pageable = [0u8; 8];
    assert_eq!(cu!(cuMemcpyAsync(device, pageable.as_ptr() as u64, 8, main)), 900);
    end(main).expect("the capture itself stays valid");
}
