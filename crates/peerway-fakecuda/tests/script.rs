//! Every item of the script, contexts, and a process without a driver.

mod support;

use std::ffi::{CStr, c_char};
use std::ptr;

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

const FD: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: u32 = CU_MEM_HANDLE_TYPE_FABRIC;
const FD_ATTRIBUTE: u32 = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
const FABRIC_ATTRIBUTE: u32 = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
const VMM_ATTRIBUTE: u32 = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
const RDMA_ATTRIBUTE: u32 = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
const NOT_SUPPORTED: CUresult = CUDA_ERROR_NOT_SUPPORTED;
const NOT_PERMITTED: CUresult = CUDA_ERROR_NOT_PERMITTED;

fn rdma_prop() -> CUmemAllocationProp {
    let mut prop = prop(0, 0);
    prop.allocFlags.gpuDirectRDMACapable = 1;
    prop
}

#[test]
fn a_machine_by_default() {
    if !scripted("a_machine_by_default", "") {
        return;
    }
    let mut version = 0;
    ok(cu!(cuDriverGetVersion(&mut version)));
    assert_eq!(version, 13_000);
    start();
    let mut count = 0;
    ok(cu!(cuDeviceGetCount(&mut count)));
    assert_eq!(count, 1);
    let mut total = 0;
    ok(cu!(cuDeviceTotalMem_v2(&mut total, 0)));
    assert_eq!(total, 4 << 30);
    let attributes = [
        (CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8),
        (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
        (VMM_ATTRIBUTE, 1),
        (FD_ATTRIBUTE, 1),
        (RDMA_ATTRIBUTE, 1),
        (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1),
        (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1),
        (FABRIC_ATTRIBUTE, 1),
        (CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0),
    ];
    for (which, value) in attributes {
        assert_eq!(attribute(which), value, "{which}");
    }
    assert_eq!(try_create(GRANULE, &prop(0, FABRIC)), Err(NOT_PERMITTED));
    try_create(GRANULE, &prop(0, FD)).expect("memory with descriptors can be created");
    try_create(GRANULE, &rdma_prop()).expect("memory for NICs can be created");
    let mut value = 0;
    assert_eq!(cu!(cuDeviceGetAttribute(&mut value, 10_000, 0)), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn devices_are_told_apart() {
    if !scripted("devices_are_told_apart", "devices=3,version=12040") {
        return;
    }
    ok(cu!(cuInit(0)));
    let mut version = 0;
    ok(cu!(cuDriverGetVersion(&mut version)));
    assert_eq!(version, 12_040);
    let mut device = -1;
    ok(cu!(cuDeviceGet(&mut device, 2)));
    assert_eq!(device, 2);
    assert_eq!(cu!(cuDeviceGet(&mut device, 3)), CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(cu!(cuDeviceGet(&mut device, -1)), CUDA_ERROR_INVALID_DEVICE);
    let text = |call: unsafe extern "C" fn(*mut c_char, i32, i32) -> CUresult, room: i32| {
        let mut into = [1 as c_char; 64];
        // SAFETY: `into` has space for `room` bytes.
        ok(unsafe { call(into.as_mut_ptr(), room, 2) });
        // SAFETY: the call has written a terminating zero.
        unsafe { CStr::from_ptr(into.as_ptr()) }.to_str().expect("the text is ASCII").to_owned()
    };
    assert_eq!(text(cuDeviceGetName, 64), "Fake GPU 2");
    assert_eq!(text(cuDeviceGetName, 5), "Fake");
    assert_eq!(text(cuDeviceGetPCIBusId, 64), "0000:0C:00.0");
    let uuid = |device: i32| {
        let mut uuid = CUuuid::zeroed();
        ok(cu!(cuDeviceGetUuid_v2(&mut uuid, device)));
        uuid.bytes
    };
    assert_eq!(uuid(1), uuid(1));
    assert_ne!(uuid(1), uuid(2));
}

#[test]
fn fabric_is_ok() {
    if scripted("fabric_is_ok", "fabric=ok") {
        start();
        assert_eq!(attribute(FABRIC_ATTRIBUTE), 1);
        try_create(GRANULE, &prop(0, FABRIC | FD)).expect("memory with both kinds can be created");
    }
}

#[test]
fn fabric_is_unsupported() {
    if scripted("fabric_is_unsupported", "fabric=unsupported") {
        start();
        assert_eq!(attribute(FABRIC_ATTRIBUTE), 0);
        assert_eq!(try_create(GRANULE, &prop(0, FABRIC)), Err(NOT_SUPPORTED));
    }
}

#[test]
fn descriptors_are_refused() {
    if scripted("descriptors_are_refused", "fd=refused") {
        start();
        assert_eq!(attribute(FD_ATTRIBUTE), 1);
        assert_eq!(try_create(GRANULE, &prop(0, FD)), Err(NOT_PERMITTED));
        create(GRANULE, 0);
    }
}

#[test]
fn descriptors_are_unsupported() {
    if scripted("descriptors_are_unsupported", "fd=unsupported") {
        start();
        assert_eq!(attribute(FD_ATTRIBUTE), 0);
        assert_eq!(try_create(GRANULE, &prop(0, FD)), Err(NOT_SUPPORTED));
    }
}

#[test]
fn there_is_no_virtual_memory_management() {
    if !scripted("there_is_no_virtual_memory_management", "vmm=no") {
        return;
    }
    start();
    for which in [VMM_ATTRIBUTE, FD_ATTRIBUTE, FABRIC_ATTRIBUTE, RDMA_ATTRIBUTE] {
        assert_eq!(attribute(which), 0);
    }
    assert_eq!(try_create(GRANULE, &prop(0, 0)), Err(NOT_SUPPORTED));
    let (mut address, mut size, mut fd) = (0, 0, -1);
    assert_eq!(cu!(cuMemAddressReserve(&mut address, GRANULE, 0, 0, 0)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemAddressFree(0, GRANULE)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemMap(0, GRANULE, 0, 0, 0)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemUnmap(0, GRANULE)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemSetAccess(0, GRANULE, ptr::null(), 0)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemRelease(1)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemRetainAllocationHandle(&mut address, ptr::null_mut())), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemGetAllocationGranularity(&mut size, &prop(0, 0), 0)), NOT_SUPPORTED);
    let out = (&raw mut fd).cast();
    assert_eq!(cu!(cuMemExportToShareableHandle(out, 1, FD, 0)), NOT_SUPPORTED);
    assert_eq!(cu!(cuMemImportFromShareableHandle(&mut address, out, FD)), NOT_SUPPORTED);
    // Plain memory still works.
    upload(allocate(100), &[1; 100]);
}

#[test]
fn nics_cannot_have_mapped_memory() {
    if scripted("nics_cannot_have_mapped_memory", "rdma_vmm=no") {
        start();
        assert_eq!(attribute(RDMA_ATTRIBUTE), 0);
        assert_eq!(try_create(GRANULE, &rdma_prop()), Err(NOT_SUPPORTED));
        create(GRANULE, FD);
    }
}

#[test]
fn there_are_no_dmabufs_and_no_ipc() {
    if !scripted("there_are_no_dmabufs_and_no_ipc", "dmabuf=no,ipc=no") {
        return;
    }
    start();
    assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED), 0);
    let address = allocate(GRANULE);
    let mut fd = -1;
    let out = (&raw mut fd).cast();
    assert_eq!(cu!(cuMemGetHandleForAddressRange(out, address, GRANULE, 1, 0)), NOT_SUPPORTED);
    let mut handle = CUipcMemHandle::zeroed();
    assert_eq!(cu!(cuIpcGetMemHandle(&mut handle, address)), NOT_SUPPORTED);
    let mut opened = 0;
    assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut opened, handle, 1)), NOT_SUPPORTED);
}

#[test]
fn calls_fail_as_the_script_says() {
    let script = "fail=cuMemMap@1:999,fail=cuMemAlloc@2,fail=cuMemAlloc_v2@3:719,fail=cuInit@1:100";
    if !scripted("calls_fail_as_the_script_says", script) {
        return;
    }
    assert_eq!(cu!(cuInit(0)), CUDA_ERROR_NO_DEVICE);
    start();
    let mut address = 0;
    let answers: Vec<CUresult> = (0..4).map(|_| cu!(cuMemAlloc_v2(&mut address, 8))).collect();
    assert_eq!(answers, [0, CUDA_ERROR_OUT_OF_MEMORY, 719, 0]);
    assert_eq!(live()[3], 2);
    let handle = create(GRANULE, 0);
    let mut reserved = 0;
    ok(cu!(cuMemAddressReserve(&mut reserved, GRANULE, 0, 0, 0)));
    assert_eq!(cu!(cuMemMap(reserved, GRANULE, 0, handle, 0)), 999);
    ok(cu!(cuMemMap(reserved, GRANULE, 0, handle, 0)));
    assert_eq!((calls("cuMemAlloc_v2"), calls("cuMemAlloc"), calls("cuInit")), (4, 4, 2));
    assert_eq!((calls("cuMemMap"), calls("cuMemUnmap"), calls("cuNothing")), (2, 0, 0));
}

#[test]
fn initialisation_is_refused() {
    if scripted("initialisation_is_refused", "no_init=802") {
        assert_eq!(cu!(cuInit(0)), 802);
        assert_eq!(without_a_driver(), [CUDA_ERROR_NOT_INITIALIZED; 4]);
    }
}

#[test]
fn there_is_no_device() {
    if scripted("there_is_no_device", "devices=0") {
        assert_eq!(cu!(cuInit(0)), CUDA_ERROR_NO_DEVICE);
    }
}

#[test]
fn a_script_that_does_not_parse() {
    if std::env::var_os("PEERWAY_FAKE_CUDA").is_some() {
        assert_eq!(cu!(cuInit(0)), CUDA_ERROR_UNKNOWN);
        assert_eq!(cu!(cuInit(0)), CUDA_ERROR_UNKNOWN);
        return;
    }
    let words = pass(&mut child("a_script_that_does_not_parse", "latncy=1us", "test"));
    assert_eq!(
        words.matches("PEERWAY_FAKE_CUDA: `latncy=1us`: unknown item").count(),
        1,
        "{words}"
    );
}

/// The results of some calls.
fn without_a_driver() -> [CUresult; 4] {
    let (mut count, mut context, mut address) = (0, ptr::null_mut(), 0);
    [
        cu!(cuDeviceGetCount(&mut count)),
        cu!(cuDevicePrimaryCtxRetain(&mut context, 0)),
        cu!(cuMemAlloc_v2(&mut address, 8)),
        cu!(cuEventQuery(ptr::null_mut())),
    ]
}

#[test]
fn a_process_without_a_driver() {
    if !scripted("a_process_without_a_driver", "") {
        return;
    }
    assert_eq!(without_a_driver(), [CUDA_ERROR_NOT_INITIALIZED; 4]);
    assert_eq!(cu!(cuInit(1)), CUDA_ERROR_INVALID_VALUE);
    start();
    let address = allocate(8);
    upload(address, &[1; 8]);
    // SAFETY: the child calls only functions that take no lock there, and exits without clean-up.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let nothing = without_a_driver() == [CUDA_ERROR_NOT_INITIALIZED; 4];
        let again = cu!(cuInit(0)) == CUDA_ERROR_NOT_INITIALIZED;
        // SAFETY: `_exit` ends this process without running exit handlers.
        unsafe { libc::_exit(i32::from(!(nothing && again))) };
    }
    let mut status = -1;
    // SAFETY: `status` is valid, and the process was forked by this one.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(download(address, 8), [1; 8]);
}

#[test]
fn contexts_are_held_and_current() {
    if !scripted("contexts_are_held_and_current", "devices=2") {
        return;
    }
    ok(cu!(cuInit(0)));
    let state = || {
        let (mut flags, mut active) = (9, 9);
        ok(cu!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)));
        (flags, active)
    };
    let current = || {
        let mut context = ptr::dangling_mut();
        ok(cu!(cuCtxGetCurrent(&mut context)));
        context
    };
    let mut address = 0;
    let none = CUDA_ERROR_INVALID_CONTEXT;
    assert_eq!((state(), current()), ((0, 0), ptr::null_mut()));
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 8)), none);
    assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(0)), none);
    assert_eq!(cu!(cuCtxPopCurrent_v2(ptr::null_mut())), none);
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    ok(cu!(cuDevicePrimaryCtxRetain(&mut first, 0)));
    ok(cu!(cuDevicePrimaryCtxRetain(&mut first, 0)));
    ok(cu!(cuDevicePrimaryCtxRetain(&mut second, 1)));
    assert_ne!(first, second);
    assert_eq!((state(), current(), live()[0]), ((0, 1), ptr::null_mut(), 2));
    ok(cu!(cuCtxPushCurrent_v2(first)));
    ok(cu!(cuCtxPushCurrent_v2(second)));
    assert_eq!(current(), second);
    // Another thread has its own current context.
    std::thread::spawn(move || assert_eq!(cu!(cuCtxSynchronize()), none))
        .join()
        .expect("the thread's check passed");
    let mut popped = ptr::null_mut();
    ok(cu!(cuCtxPopCurrent_v2(&mut popped)));
    assert_eq!((popped, current()), (second, first));
    ok(cu!(cuCtxSetCurrent(second)));
    assert_eq!(current(), second);
    ok(cu!(cuCtxSetCurrent(ptr::null_mut())));
    assert_eq!(current(), ptr::null_mut());
    ok(cu!(cuCtxSetCurrent(first)));
    assert_eq!(cu!(cuCtxPushCurrent_v2(ptr::dangling_mut())), none);

    // The last release destroys everything that was created in the context.
    let address = allocate(100);
    let (stream, event, pinned) = (stream(), event(), Pinned::new(10));
    ok(cu!(cuMemcpyAsync(address, pinned.address(), 10, stream)));
    ok(cu!(cuDevicePrimaryCtxRelease_v2(0)));
    assert_eq!(live(), [2, 1, 1, 1, 0, 0, 0, 1, 0]);
    ok(cu!(cuDevicePrimaryCtxRelease_v2(0)));
    ok(cu!(cuDevicePrimaryCtxRelease_v2(1)));
    assert_eq!(live(), [0; 9]);
    assert_eq!(cu!(cuCtxSynchronize()), 709);
    assert_eq!(cu!(cuEventQuery(event)), 400);
    assert_eq!(state(), (0, 0));
}

#[test]
fn errors_have_names() {
    let words = |call: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult, code| {
        let mut text = ptr::null();
        // SAFETY: `text` is valid for the write of a pointer.
        let answer = unsafe { call(code, &mut text) };
        // SAFETY: the pointer refers to a static string.
        (
            answer,
            (!text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_str().expect("the text is ASCII")),
        )
    };
    assert_eq!(words(cuGetErrorName, 2), (0, Some("CUDA_ERROR_OUT_OF_MEMORY")));
    assert_eq!(words(cuGetErrorString, 700), (0, Some("an illegal memory access")));
    assert_eq!(words(cuGetErrorName, 12_345), (CUDA_ERROR_INVALID_VALUE, None));
}
