//! Device memory: its addresses, its attributes, and refused calls.

mod support;

use std::ffi::{c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

const INVALID: CUresult = CUDA_ERROR_INVALID_VALUE;

#[test]
fn the_host_cannot_touch_device_memory() {
    if !scripted("the_host_cannot_touch_device_memory", "") {
        return;
    }
    start();
    let address = allocate(10_000);
    let handle = create(GRANULE, 0);
    let mapped = map(handle, GRANULE);
    let (_reader, writer) = rustix::pipe::pipe().expect("a pipe can be created");
    for at in [address, address + 9_999, mapped] {
        use std::os::fd::AsRawFd as _;
        // SAFETY: the kernel checks the address before it reads.
        let wrote = unsafe { libc::write(writer.as_raw_fd(), at as *const c_void, 1) };
        assert_eq!(wrote, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        assert_eq!(read_by_kernel(at), Some(libc::EFAULT));
    }
    // A freed address does not become host memory.
    ok(cu!(cuMemFree_v2(address)));
    unmap(mapped, GRANULE);
    assert_eq!(read_by_kernel(address), Some(libc::EFAULT));
    assert_eq!(read_by_kernel(mapped), Some(libc::EFAULT));
}

#[test]
fn small_allocations_share_a_segment() {
    if !scripted("small_allocations_share_a_segment", "") {
        return;
    }
    start();
    let (first, second) = (allocate(100), allocate(700));
    assert_eq!(second, first + 512);
    assert!(!first.is_multiple_of(4096) && first / GRANULE as u64 == second / GRANULE as u64);
    let large = allocate(3 << 20);
    assert!(large.is_multiple_of(GRANULE as u64));
    for (address, len) in [(first, 100), (second, 700), (large, 3 << 20)] {
        let (mut base, mut size) = (0, 0);
        ok(cu!(cuMemGetAddressRange_v2(&mut base, &mut size, address + len as u64 - 1)));
        assert_eq!((base, size), (address, len));
        let end = address + len as u64;
        assert_ne!(cu!(cuMemGetAddressRange_v2(&mut base, &mut size, end)), CUDA_SUCCESS);
    }
    // The allocations do not overlap.
    upload(first, &[1; 100]);
    upload(second, &pattern(3, 700));
    upload(large, &pattern(5, 3 << 20));
    assert_eq!(download(first, 100), [1; 100]);
    assert_eq!(download(second, 700), pattern(3, 700));
    assert_eq!(download(large, 3 << 20), pattern(5, 3 << 20));
    // The address is reused, the number is not.
    let before = buffer_id(second);
    ok(cu!(cuMemFree_v2(second)));
    assert_eq!(cu!(cuMemFree_v2(second)), INVALID);
    assert_eq!(cu!(cuMemFree_v2(first + 1)), INVALID);
    let again = allocate(600);
    assert_eq!(again, second);
    assert!(buffer_id(again) > before);
    for address in [first, again, large] {
        ok(cu!(cuMemFree_v2(address)));
    }
    leave(0);
    assert_eq!(live(), [0; 9]);
}

fn buffer_id(address: u64) -> u64 {
    facts(address).5
}

type Facts = (c_uint, i32, i32, u64, u64, u64, u64, i32);

/// Memory type, device, managed, range, number, handle types, legacy IPC.
fn facts(address: u64) -> Facts {
    let mut facts: Facts = (9, 9, 9, 9, 9, 9, 9, 9);
    let mut which = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    ];
    let mut into: [*mut c_void; 8] = [
        (&raw mut facts.0).cast(),
        (&raw mut facts.1).cast(),
        (&raw mut facts.2).cast(),
        (&raw mut facts.3).cast(),
        (&raw mut facts.4).cast(),
        (&raw mut facts.5).cast(),
        (&raw mut facts.6).cast(),
        (&raw mut facts.7).cast(),
    ];
    ok(cu!(cuPointerGetAttributes(8, which.as_mut_ptr(), into.as_mut_ptr(), address)));
    facts
}

#[test]
fn pointers_say_what_they_are() {
    if !scripted("pointers_say_what_they_are", "devices=2") {
        return;
    }
    start();
    let unknown = (0, -2, 0, 0, 0, 0, 0, 0);
    let mut local = 0u8;
    assert_eq!(facts(&raw mut local as u64), unknown);
    assert_eq!(facts(0), unknown);
    assert_eq!(facts(u64::MAX), unknown);

    enter(1);
    let plain = allocate(1000);
    let id = buffer_id(plain);
    assert!(id > 0);
    assert_eq!(facts(plain + 999), (2, 1, 0, plain, 1000, id, 0, 1));
    assert_eq!(facts(plain + 1000), unknown);
    leave(1);
    // The context destroyed all memory that was created in it.
    assert_eq!(facts(plain), unknown);

    let types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let handle = create(GRANULE, types);
    let mut address = 0;
    ok(cu!(cuMemAddressReserve(&mut address, 2 * GRANULE, 0, 0, 0)));
    let range = (address, 2 * GRANULE as u64);
    assert_eq!(facts(address), (0, -2, 0, range.0, range.1, 0, 0, 0));
    ok(cu!(cuMemMap(address, GRANULE, 0, handle, 0)));
    let id = buffer_id(address);
    assert_eq!(facts(address + 7), (2, 0, 0, range.0, range.1, id, u64::from(types), 0));
    assert_eq!(facts(address + GRANULE as u64), (0, -2, 0, range.0, range.1, 0, 0, 0));

    let pinned = Pinned::new(5000);
    let id = buffer_id(pinned.address());
    assert_eq!(facts(pinned.address() + 4999), (1, 0, 0, pinned.address(), 5000, id, 0, 0));
    pinned.free();

    let mut which = [999];
    let mut into = [(&raw mut local).cast::<c_void>()];
    assert_eq!(cu!(cuPointerGetAttributes(1, which.as_mut_ptr(), into.as_mut_ptr(), 0)), INVALID);
    let yes: c_uint = 1;
    let sync = CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
    assert_eq!(cu!(cuPointerSetAttribute((&raw const yes).cast(), sync, 0)), INVALID);
    ok(cu!(cuPointerSetAttribute((&raw const yes).cast(), sync, address)));
}

#[test]
fn memory_is_mapped_and_unmapped() {
    if !scripted("memory_is_mapped_and_unmapped", "") {
        return;
    }
    start();
    let size = GRANULE as u64;
    let (first, second) = (create(GRANULE, 0), create(GRANULE, 0));
    let mut address = 0;
    ok(cu!(cuMemAddressReserve(&mut address, 4 * GRANULE, 64 << 20, 0, 0)));
    assert!(address.is_multiple_of(64 << 20));
    ok(cu!(cuMemMap(address, GRANULE, 0, first, 0)));
    // Refused: twice, outside the reservation, more than the memory, misaligned, unknown handle.
    assert_eq!(cu!(cuMemMap(address, GRANULE, 0, second, 0)), INVALID);
    assert_eq!(cu!(cuMemMap(address + 4 * size, GRANULE, 0, second, 0)), INVALID);
    assert_eq!(cu!(cuMemMap(address + size, 2 * GRANULE, 0, second, 0)), INVALID);
    assert_eq!(cu!(cuMemMap(address + 4096, GRANULE, 0, second, 0)), INVALID);
    assert_eq!(cu!(cuMemMap(address + size, GRANULE, 0, 12345, 0)), INVALID);
    ok(cu!(cuMemMap(address + size, GRANULE, 0, second, 0)));
    assert_eq!(cu!(cuMemUnmap(address + 4096, GRANULE)), INVALID);
    assert_eq!(cu!(cuMemUnmap(address, 3 * GRANULE)), INVALID);
    assert_eq!(cu!(cuMemAddressFree(address, 4 * GRANULE)), INVALID);
    grant(address, 2 * GRANULE, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

    // A copy may cross from one mapping to the next.
    let bytes = pattern(9, 10_001);
    upload(address + size - 5_000, &bytes);
    assert_eq!(download(address + size - 5_000, 10_001), bytes);
    // The same memory at another address has the same bytes.
    let alias = map(second, GRANULE);
    assert_eq!(download(alias, 5_001), bytes[5_000..]);

    // Memory stays while it is mapped, and the program can retain its handle again.
    ok(cu!(cuMemRelease(second)));
    assert_eq!(cu!(cuMemRelease(second)), INVALID);
    let mut again = 0;
    ok(cu!(cuMemRetainAllocationHandle(&mut again, (alias + 77) as *mut c_void)));
    ok(cu!(cuMemRelease(again)));
    ok(cu!(cuMemRelease(first)));
    let plain = allocate(64);
    assert_eq!(cu!(cuMemRetainAllocationHandle(&mut again, plain as *mut c_void)), INVALID);
    ok(cu!(cuMemFree_v2(plain)));
    assert_eq!(live(), [1, 0, 0, 2, 2, 3, 0, 0, 0]);
    unmap(alias, GRANULE);
    ok(cu!(cuMemUnmap(address, 2 * GRANULE)));
    ok(cu!(cuMemAddressFree(address, 4 * GRANULE)));
    leave(0);
    assert_eq!(live(), [0; 9]);
}

#[test]
fn impossible_allocations_are_refused() {
    if !scripted("impossible_allocations_are_refused", "memory=8388608") {
        return;
    }
    start();
    let good = prop(0, 0);
    let mut granularity = 0;
    let minimum = CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    ok(cu!(cuMemGetAllocationGranularity(&mut granularity, &good, minimum)));
    assert_eq!(granularity, GRANULE);
    assert_eq!(try_create(4096, &good), Err(INVALID));
    assert_eq!(try_create(0, &good), Err(INVALID));
    assert_eq!(try_create(GRANULE, &prop(1, 0)), Err(CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(try_create(GRANULE, &prop(0, 2)), Err(CUDA_ERROR_NOT_SUPPORTED));
    let mut other = good;
    other.type_ = 0;
    assert_eq!(try_create(GRANULE, &other), Err(INVALID));

    // The device has 8 MiB.
    let handle = create(3 * GRANULE, 0);
    assert_eq!(try_create(2 * GRANULE, &good), Err(CUDA_ERROR_OUT_OF_MEMORY));
    let rest = allocate(GRANULE - 512);
    let mut address = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 513)), CUDA_ERROR_OUT_OF_MEMORY);
    let (mut free, mut total) = (0, 0);
    ok(cu!(cuMemGetInfo_v2(&mut free, &mut total)));
    assert_eq!((free, total), (512, 8 << 20));
    ok(cu!(cuMemRelease(handle)));
    ok(cu!(cuMemFree_v2(rest)));
    ok(cu!(cuMemGetInfo_v2(&mut free, &mut total)));
    assert_eq!(free, total);
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 0)), INVALID);
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, usize::MAX)), CUDA_ERROR_OUT_OF_MEMORY);
}

#[test]
fn host_memory_is_pinned_once() {
    if !scripted("host_memory_is_pinned_once", "") {
        return;
    }
    start();
    let len = 64 << 10;
    let memory = Box::into_raw(vec![7u8; len].into_boxed_slice()).cast::<u8>();
    let part = |at: usize| memory.wrapping_add(at).cast::<c_void>();
    ok(cu!(cuMemHostRegister_v2(part(4096), 8192, CU_MEMHOSTREGISTER_PORTABLE)));
    let twice = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    for (at, len) in [(4096, 8192), (0, 4097), (12287, 1), (5000, 10), (0, len)] {
        assert_eq!(cu!(cuMemHostRegister_v2(part(at), len, 0)), twice);
    }
    ok(cu!(cuMemHostRegister_v2(part(0), 4096, 0)));
    ok(cu!(cuMemHostRegister_v2(part(12288), 100, 0)));
    assert_eq!(live()[7], 3);
    let device = allocate(8192);
    ok(cu!(cuMemcpyAsync(device, part(4096) as u64, 8192, ptr::null_mut())));
    assert_eq!(download(device, 8192), [7; 8192]);
    assert_eq!(cu!(cuMemHostUnregister(part(4097))), 713);
    for at in [0, 4096, 12288] {
        ok(cu!(cuMemHostUnregister(part(at))));
    }
    assert_eq!(cu!(cuMemFreeHost(part(0))), INVALID);
    // Neither device memory nor unmapped memory can be pinned.
    assert_eq!(cu!(cuMemHostRegister_v2(device as *mut c_void, 512, 0)), INVALID);
    assert_eq!(cu!(cuMemHostRegister_v2(ptr::without_provenance_mut(4096), 512, 0)), INVALID);
    let pinned = Pinned::new(10);
    assert_eq!(cu!(cuMemHostUnregister(pinned.start.cast())), 713);
    pinned.free();
    assert_eq!(live()[7], 0);
}

#[test]
fn a_dmabuf_has_the_bytes() {
    if !scripted("a_dmabuf_has_the_bytes", "") {
        return;
    }
    start();
    let kind = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let address = map(create(GRANULE, 0), GRANULE);
    upload(address, &pattern(1, 8192));
    let dmabuf = |address: u64, len: usize| {
        let mut fd = -1;
        match cu!(cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, len, kind, 0)) {
            // SAFETY: the call has created the descriptor for this process, and no other value owns
            // it.
            CUDA_SUCCESS => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            code => Err(code),
        }
    };
    let fd = dmabuf(address, 8192).expect("the range is inside one mapping");
    let mut bytes = vec![0; 8192];
    assert_eq!(rustix::io::read(&fd, &mut bytes), Ok(8192));
    assert_eq!(bytes, pattern(1, 8192));
    let fd = dmabuf(address + 4096, 4096).expect("a part is inside one mapping too");
    assert_eq!(rustix::io::read(&fd, &mut bytes[..4096]), Ok(4096));
    assert_eq!(bytes[..4096], pattern(1, 8192)[4096..]);
    dmabuf(allocate(3 << 20), 3 << 20).expect("a large allocation starts a segment");
    assert_eq!(dmabuf(address, 100).err(), Some(INVALID));
    assert_eq!(dmabuf(address + 100, 4096).err(), Some(INVALID));
    assert_eq!(dmabuf(address, GRANULE + 4096).err(), Some(INVALID));
    // A small allocation, by the pages that contain it.
    let small = allocate(8192);
    assert_ne!(small % 4096, 0);
    upload(small, &pattern(2, 8192));
    let (page, before) = (small & !4095, (small & 4095) as usize);
    let fd = dmabuf(page, 3 * 4096).expect("the pages belong to its segment");
    let mut bytes = vec![0; 3 * 4096];
    assert_eq!(rustix::io::read(&fd, &mut bytes), Ok(3 * 4096));
    assert_eq!(bytes[before..before + 8192], pattern(2, 8192));
    assert_eq!(dmabuf(small, 4096).err(), Some(INVALID));
}
