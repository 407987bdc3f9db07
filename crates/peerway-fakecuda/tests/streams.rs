//! Streams execute work late and in order, and a failed stream stays failed.

mod support;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

const ILLEGAL: CUresult = CUDA_ERROR_ILLEGAL_ADDRESS;

#[test]
fn copies_are_late_until_an_event_is_waited_for() {
    if !scripted("copies_are_late_until_an_event_is_waited_for", "latency=30ms") {
        return;
    }
    start();
    let (stream, event, device) = (stream(), event(), allocate(1000));
    let (from, to) = (Pinned::new(1000), Pinned::new(1000));
    ok(cu!(cuEventQuery(event)));
    from.write(0, &pattern(1, 1000));
    to.fill(0xee);
    let gate = Gate::close(stream);
    ok(cu!(cuMemcpyAsync(device, from.address(), 1000, stream)));
    ok(cu!(cuMemcpyAsync(to.address(), device, 1000, stream)));
    ok(cu!(cuEventRecord(event, stream)));
    assert_eq!(cu!(cuEventQuery(event)), CUDA_ERROR_NOT_READY);
    assert_eq!(cu!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
    assert_eq!(to.read(), [0xee; 1000]);
    // The stream reads the source late, too.
    from.write(0, &pattern(2, 1000));
    let begun = Instant::now();
    gate.open();
    ok(cu!(cuEventSynchronize(event)));
    // Two copies and the event.
    assert!(begun.elapsed() >= Duration::from_millis(90), "{:?}", begun.elapsed());
    assert_eq!(to.read(), pattern(2, 1000));
    ok(cu!(cuEventQuery(event)));
    ok(cu!(cuStreamSynchronize(stream)));
    ok(cu!(cuStreamQuery(stream)));
}

#[test]
fn pageable_memory_is_copied_at_the_call() {
    if !scripted("pageable_memory_is_copied_at_the_call", "latency=20ms") {
        return;
    }
    start();
    let (stream, device) = (stream(), allocate(1000));
    let mut host = pattern(1, 1000);
    let gate = Gate::close(stream);
    ok(cu!(cuMemcpyAsync(device, host.as_ptr() as u64, 1000, stream)));
    // The call may return before the copy is done, but not before it has read the bytes.
    assert_eq!(cu!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
    host.fill(0);
    let begun = Instant::now();
    gate.open();
    ok(cu!(cuMemcpyAsync(host.as_mut_ptr() as u64, device, 1000, stream)));
    assert!(begun.elapsed() >= Duration::from_millis(40));
    assert_eq!(host, pattern(1, 1000));
    // Unmapped memory gives an error, not a crash.
    assert_eq!(cu!(cuMemcpyAsync(device, 4096, 8, stream)), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cu!(cuMemcpyAsync(4096, device, 8, stream)), CUDA_ERROR_INVALID_VALUE);
    ok(cu!(cuMemcpyAsync(0, 0, 0, stream)));
    ok(cu!(cuMemsetD8Async(device, 0x5a, 10, stream)));
    ok(cu!(cuCtxSynchronize()));
    assert_eq!(download(device, 11)[9..], [0x5a, pattern(1, 11)[10]]);
    ok(cu!(cuMemsetD8_v2(device, 1, 1000)));
    assert_eq!(download(device, 1000), [1; 1000]);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    if !scripted("a_stream_waits_for_an_event_of_another", "jitter=3ms,seed=5") {
        return;
    }
    start();
    let (first, second, event, device) = (stream(), stream(), event(), allocate(64));
    let (from, to) = (Pinned::new(64), Pinned::new(64));
    for round in 0..20 {
        from.fill(round);
        ok(cu!(cuMemcpyAsync(device, from.address(), 64, first)));
        ok(cu!(cuEventRecord(event, first)));
        ok(cu!(cuStreamWaitEvent(second, event, 0)));
        ok(cu!(cuMemcpyAsync(to.address(), device, 64, second)));
        ok(cu!(cuStreamSynchronize(second)));
        assert_eq!(to.read(), [round; 64]);
    }
    // An event that was never recorded, and one that is destroyed while a stream waits for it.
    let never = support::event();
    ok(cu!(cuStreamWaitEvent(second, never, 0)));
    ok(cu!(cuEventSynchronize(never)));
    ok(cu!(cuEventRecord(never, first)));
    ok(cu!(cuStreamWaitEvent(second, never, 0)));
    ok(cu!(cuEventDestroy_v2(never)));
    assert_eq!(cu!(cuEventQuery(never)), 400);
    ok(cu!(cuStreamSynchronize(second)));
    // Work on a destroyed stream is still done.
    from.fill(0x77);
    ok(cu!(cuMemcpyAsync(to.address(), from.address(), 64, first)));
    ok(cu!(cuEventRecord(event, first)));
    ok(cu!(cuStreamDestroy_v2(first)));
    assert_eq!(cu!(cuStreamSynchronize(first)), 400);
    ok(cu!(cuEventSynchronize(event)));
    assert_eq!(to.read(), [0x77; 64]);
    from.free();
    to.free();
    ok(cu!(cuStreamDestroy_v2(second)));
    ok(cu!(cuEventDestroy_v2(event)));
    ok(cu!(cuMemFree_v2(device)));
    leave(0);
    assert_eq!(live(), [0; 9]);
}

static CALLED: AtomicU64 = AtomicU64::new(0);
static ANSWER: AtomicI32 = AtomicI32::new(-1);

unsafe extern "C" fn callback(data: *mut c_void) {
    ANSWER.store(cu!(cuCtxSynchronize()), Ordering::Relaxed);
    CALLED.store(data.addr() as u64, Ordering::Release);
}

#[test]
fn functions_and_values() {
    if !scripted("functions_and_values", "") {
        return;
    }
    start();
    let (first, second) = (stream(), stream());
    let word = Pinned::new(8);
    let device = allocate(16);
    upload(device, &[0; 16]);
    ok(cu!(cuStreamWaitValue64_v2(first, word.address(), 5, CU_STREAM_WAIT_VALUE_GEQ)));
    ok(cu!(cuLaunchHostFunc(first, Some(callback), ptr::without_provenance_mut(42))));
    ok(cu!(cuStreamWriteValue64_v2(first, device + 8, 9, 0)));
    ok(cu!(cuStreamWaitValue64_v2(second, device + 8, 9, CU_STREAM_WAIT_VALUE_GEQ)));
    word.write(0, &4u64.to_ne_bytes());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(CALLED.load(Ordering::Acquire), 0);
    assert_eq!(cu!(cuStreamQuery(second)), CUDA_ERROR_NOT_READY);
    word.write(0, &6u64.to_ne_bytes());
    ok(cu!(cuStreamSynchronize(second)));
    assert_eq!(CALLED.load(Ordering::Acquire), 42);
    // No call is permitted in a callback.
    assert_eq!(ANSWER.load(Ordering::Relaxed), CUDA_ERROR_NOT_PERMITTED);
    let odd = word.address() + 4;
    assert_eq!(cu!(cuStreamWaitValue64_v2(first, odd, 5, 0)), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cu!(cuStreamWriteValue64_v2(first, odd, 5, 0)), CUDA_ERROR_INVALID_VALUE);
    word.free();
}

#[test]
fn an_illegal_address_is_for_ever() {
    if !scripted("an_illegal_address_is_for_ever", "devices=2") {
        return;
    }
    start();
    let (stream, event, device) = (stream(), event(), allocate(1000));
    let to = Pinned::new(8);
    to.fill(1);
    let gate = Gate::close(stream);
    ok(cu!(cuMemsetD8Async(device, 7, 1001, stream)));
    ok(cu!(cuMemcpyAsync(to.address(), device, 8, stream)));
    ok(cu!(cuEventRecord(event, stream)));
    gate.open();
    assert_eq!(cu!(cuStreamSynchronize(stream)), ILLEGAL);
    // The work behind it is not done.
    assert_eq!(to.read(), [1; 8]);
    assert_eq!(cu!(cuEventSynchronize(event)), ILLEGAL);
    assert_eq!(cu!(cuEventQuery(event)), ILLEGAL);
    let mut address = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 8)), ILLEGAL);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL);
    // The other device still works.
    enter(1);
    let other = allocate(8);
    upload(other, &[3; 8]);
    assert_eq!(download(other, 8), [3; 8]);
    leave(1);
    // Calls that release something return the error, but take effect.
    assert_eq!(cu!(cuMemFree_v2(device)), ILLEGAL);
    assert_eq!(cu!(cuEventDestroy_v2(event)), ILLEGAL);
    assert_eq!(cu!(cuStreamDestroy_v2(stream)), ILLEGAL);
    assert_eq!(cu!(cuMemFreeHost(to.start.cast())), ILLEGAL);
    leave(0);
    assert_eq!(live(), [0; 9]);
    enter(0);
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 8)), ILLEGAL);
}

/// Each case uses its own device, because each fails its context.
#[test]
fn addresses_that_are_illegal() {
    if !scripted("addresses_that_are_illegal", "devices=9") {
        return;
    }
    ok(cu!(cuInit(0)));
    let pageable = [0u8; 64];
    let word = pageable.as_ptr().addr().next_multiple_of(8) as u64;
    for case in 0..8 {
        enter(case);
        let stream = stream();
        let device = allocate(4096);
        let mut reserved = 0;
        ok(cu!(cuMemAddressReserve(&mut reserved, 2 * GRANULE, 0, 0, 0)));
        let handle = try_create(GRANULE, &prop(case, 0)).expect("there is memory");
        ok(cu!(cuMemMap(reserved, GRANULE, 0, handle, 0)));
        let fill = |at: u64, len: usize| ok(cu!(cuMemsetD8Async(at, 1, len, stream)));
        match case {
            // Mapped, but no device has access.
            0 => fill(reserved, 1),
            // Only another device has access.
            1 => {
                grant(reserved, GRANULE, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
                fill(reserved, 1);
            }
            // Read-only access.
            2 => {
                grant(reserved, GRANULE, case, 1);
                ok(cu!(cuMemcpyAsync(device, reserved, 8, stream)));
                ok(cu!(cuStreamSynchronize(stream)));
                fill(reserved, 1);
            }
            // Beyond the mapping.
            3 => {
                grant(reserved, GRANULE, case, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
                fill(reserved, GRANULE);
                ok(cu!(cuStreamSynchronize(stream)));
                fill(reserved + 1, GRANULE);
            }
            // Freed memory.
            4 => {
                ok(cu!(cuMemFree_v2(device)));
                ok(cu!(cuMemcpyAsync(device, device, 8, stream)));
            }
            // From one allocation into the next.
            5 => {
                assert_eq!(allocate(4096), device + 4096);
                fill(device + 4095, 2);
            }
            // Host memory that is not pinned.
            6 => fill(word, 1),
            _ => ok(cu!(cuStreamWaitValue64_v2(stream, word, 1, 0))),
        }
        assert_eq!(cu!(cuStreamSynchronize(stream)), ILLEGAL, "case {case}");
    }
}

#[test]
fn special_streams_and_wrong_ones() {
    if !scripted("special_streams_and_wrong_ones", "devices=2") {
        return;
    }
    start();
    let (device, other, event) = (allocate(8), stream(), event());
    for handle in 0..3 {
        let special = ptr::without_provenance_mut(handle);
        ok(cu!(cuMemsetD8Async(device, handle as u8, 8, special)));
        ok(cu!(cuEventRecord(event, special)));
        ok(cu!(cuStreamSynchronize(special)));
        assert_eq!(download(device, 8), [handle as u8; 8]);
    }
    assert_eq!(live()[1], 1);
    enter(1);
    // Work in one context on a stream of another, and the same for an event.
    assert_eq!(cu!(cuMemsetD8Async(device, 1, 8, other)), 400);
    assert_eq!(cu!(cuEventRecord(event, stream())), 400);
    // Waiting for them works from any context.
    ok(cu!(cuStreamSynchronize(other)));
    ok(cu!(cuStreamWaitEvent(stream(), event, 0)));
    // The driver copies from any device.
    let here = allocate(8);
    ok(cu!(cuMemcpyAsync(here, device, 8, ptr::null_mut())));
    assert_eq!(download(here, 8), [2; 8]);
    leave(1);
    let nothing = ptr::without_provenance_mut(0x1234_5678);
    assert_eq!(cu!(cuStreamSynchronize(nothing)), 400);
    assert_eq!(cu!(cuEventRecord(nothing, other)), 400);
    assert_eq!(cu!(cuEventRecord(event, nothing)), 400);
}

#[test]
fn copies_take_their_time() {
    if !scripted("copies_take_their_time", "gbps=1,jitter=0us") {
        return;
    }
    start();
    let len = 50 << 20;
    let (from, to) = (allocate(len), allocate(len));
    let begun = Instant::now();
    ok(cu!(cuMemcpyAsync(to, from, len, ptr::null_mut())));
    ok(cu!(cuStreamSynchronize(ptr::null_mut())));
    assert!(begun.elapsed() >= Duration::from_millis(50), "{:?}", begun.elapsed());
}

#[test]
fn threads_do_not_disturb_each_other() {
    if !scripted("threads_do_not_disturb_each_other", "jitter=10us") {
        return;
    }
    start();
    let work = |thread: u8| {
        enter(0);
        let (stream, event) = (stream(), event());
        for round in 0..100 {
            let len = 1 + usize::from(round) * 37 + usize::from(thread);
            let (device, host) = (allocate(len), Pinned::new(len));
            let mapped = map(create(GRANULE, 0), GRANULE);
            ok(cu!(cuMemsetD8Async(device, round ^ thread, len, stream)));
            ok(cu!(cuMemcpyAsync(mapped, device, len, stream)));
            ok(cu!(cuMemcpyAsync(host.address(), mapped, len, stream)));
            ok(cu!(cuEventRecord(event, stream)));
            ok(cu!(cuEventSynchronize(event)));
            assert_eq!(host.read(), vec![round ^ thread; len]);
            let mut handle = 0;
            ok(cu!(cuMemRetainAllocationHandle(&mut handle, mapped as *mut c_void)));
            unmap(mapped, GRANULE);
            ok(cu!(cuMemRelease(handle)));
            ok(cu!(cuMemRelease(handle)));
            ok(cu!(cuMemFree_v2(device)));
            host.free();
        }
        ok(cu!(cuStreamDestroy_v2(stream)));
        ok(cu!(cuEventDestroy_v2(event)));
        leave(0);
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || work(thread));
        }
    });
    leave(0);
    assert_eq!(live(), [0; 9]);
}
