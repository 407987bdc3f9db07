//! Memory that two processes share, by every kind of handle.

mod support;

use std::ffi::{c_char, c_void};
use std::os::fd::AsRawFd as _;
use std::ptr;

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

const FD: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: u32 = CU_MEM_HANDLE_TYPE_FABRIC;
const PEERS: u32 = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;

/// The other process, with the same script.
fn far(test: &str) -> Far {
    let script = std::env::var("PEERWAY_FAKE_CUDA").unwrap_or_default();
    Far::start(child(test, &script, "far"))
}

/// A handle, as the other process printed it.
fn handle_of(text: &str) -> [u8; 64] {
    unhex(text).try_into().expect("a handle has 64 bytes")
}

fn ipc_handle(address: u64) -> [u8; 64] {
    let mut handle = CUipcMemHandle::zeroed();
    ok(cu!(cuIpcGetMemHandle(&mut handle, address)));
    handle.reserved.map(|byte| byte as u8)
}

fn ipc_open(handle: [u8; 64]) -> Result<u64, CUresult> {
    let mut address = 0;
    let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
    match cu!(cuIpcOpenMemHandle_v2(&mut address, handle, PEERS)) {
        CUDA_SUCCESS => Ok(address),
        code => Err(code),
    }
}

/// Opens the handles that it receives, and reports what it finds.
fn serve_ipc() {
    start();
    loop {
        let line = hear();
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "open" => match ipc_open(handle_of(rest)) {
                Ok(address) => say(&address.to_string()),
                Err(code) => say(&format!("error {code}")),
            },
            "range" => {
                let (mut base, mut size) = (0, 0);
                let address = rest.parse().expect("a number");
                ok(cu!(cuMemGetAddressRange_v2(&mut base, &mut size, address)));
                say(&format!("{base} {size}"));
            }
            "read" => say(&hex(&download(rest.parse().expect("a number"), 64))),
            "fill" => {
                ok(cu!(cuMemsetD8_v2(rest.parse().expect("a number"), 0x99, 64)));
                say("done");
            }
            "close" => {
                let code = cu!(cuIpcCloseMemHandle(rest.parse().expect("a number")));
                say(&format!("{code} {}", live()[6]));
            }
            "own" => say(&hex(&ipc_handle(allocate(64)))),
            _ => return,
        }
    }
}

#[test]
fn ipc_gives_the_allocation() {
    if !scripted("ipc_gives_the_allocation", "") {
        return;
    }
    if role() == "far" {
        return serve_ipc();
    }
    start();
    let mut far = far("ipc_gives_the_allocation");
    let (first, second) = (allocate(1000), allocate(2000));
    upload(first, &pattern(1, 1000));
    upload(second, &pattern(2, 2000));
    // The handle names the allocation, whichever address inside it was given.
    let handle = ipc_handle(second + 1999);
    assert_eq!(handle, ipc_handle(second));
    assert_ne!(handle, ipc_handle(first));
    assert_eq!(ipc_open(handle), Err(CUDA_ERROR_INVALID_CONTEXT));
    let opened = far.ask(&format!("open {}", hex(&handle)));
    let address: u64 = opened.parse().expect("an address");
    assert_eq!(far.ask(&format!("range {}", address + 1999)), format!("{address} 2000"));
    assert_eq!(far.ask(&format!("read {address}")), hex(&pattern(2, 64)));
    assert_eq!(far.ask(&format!("read {}", address + 1936)), hex(&pattern(2, 2000)[1936..]));
    // Opening twice returns the same address and counts.
    assert_eq!(far.ask(&format!("open {}", hex(&handle))), opened);
    assert_eq!(far.ask(&format!("close {address}")), "0 1");
    // Both processes write.
    assert_eq!(far.ask(&format!("fill {address}")), "done");
    assert_eq!(download(second, 65), [&[0x99; 64][..], &pattern(2, 65)[64..]].concat());
    upload(second, &pattern(3, 64));
    assert_eq!(far.ask(&format!("read {address}")), hex(&pattern(3, 64)));

    // After the free, the opener can still read the memory, but no process can open the handle.
    ok(cu!(cuMemFree_v2(second)));
    assert_eq!(far.ask(&format!("read {address}")), hex(&pattern(3, 64)));
    assert_eq!(far.ask(&format!("open {}", hex(&handle))), "error 1");
    let next = allocate(2000);
    assert_eq!(next, second);
    assert_eq!(far.ask(&format!("open {}", hex(&handle))), "error 1");
    assert_ne!(ipc_handle(next), handle);
    assert_eq!(far.ask(&format!("close {address}")), "0 0");
    assert_eq!(far.ask(&format!("close {address}")), "1 0");
    assert_eq!(far.ask(&format!("close {first}")), "1 0");

    // Invalid handles of all kinds.
    let good = ipc_handle(first);
    assert_eq!(far.ask(&format!("open {}", hex(&[0xff; 64]))), "error 1");
    for at in 0..56 {
        let mut bad = good;
        bad[at] ^= 0x41;
        let answer = far.ask(&format!("open {}", hex(&bad)));
        match at {
            // Unused bytes, and the offset and size, which may also be valid for this segment.
            20..24 | 40..56 => {
                if let Ok(address) = answer.parse::<u64>() {
                    far.ask(&format!("close {address}"));
                }
            }
            _ => assert_eq!(answer, "error 1", "byte {at}"),
        }
    }

    // The owner's process is gone.
    let theirs = handle_of(&far.ask("own"));
    let address = ipc_open(theirs).expect("the allocation exists");
    far.process.0.kill().expect("the process runs");
    far.process.0.wait().expect("the process ended");
    assert_eq!(ipc_open(theirs), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(download(address, 64), [0; 64]);
    assert_eq!(live()[6], 1);
    ok(cu!(cuIpcCloseMemHandle(address)));
    let mut out = 0;
    let handle = CUipcMemHandle { reserved: theirs.map(|byte| byte as c_char) };
    assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut out, handle, 0)), CUDA_ERROR_INVALID_VALUE);
    // Only `cuMemAlloc` memory has IPC handles.
    let mut none = CUipcMemHandle::zeroed();
    let mapped = map(create(GRANULE, FD), GRANULE);
    assert_eq!(cu!(cuIpcGetMemHandle(&mut none, mapped)), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cu!(cuIpcGetMemHandle(&mut none, 4096)), CUDA_ERROR_INVALID_VALUE);
}

fn import(shareable: *mut c_void, kind: u32) -> Result<u64, CUresult> {
    let mut handle = 0;
    match cu!(cuMemImportFromShareableHandle(&mut handle, shareable, kind)) {
        CUDA_SUCCESS => Ok(handle),
        code => Err(code),
    }
}

fn export_fd(handle: u64) -> i32 {
    let mut fd = -1;
    ok(cu!(cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FD, 0)));
    fd
}

/// Maps the memory that it imports, reports its contents, and writes other bytes.
fn serve_mapped(import: impl Fn(&str) -> Result<u64, CUresult>) {
    start();
    let handle = import(&hear()).expect("the memory can be imported");
    let address = map(handle, GRANULE);
    say(&hex(&download(address + 4096, 64)));
    ok(cu!(cuMemsetD8_v2(address, 0x42, 4096)));
    say("done");
    hear();
    // The exporter has released everything; the importer still has the memory.
    say(&hex(&download(address, 64)));
    unmap(address, GRANULE);
    ok(cu!(cuMemRelease(handle)));
    leave(0);
    assert_eq!(live(), [0; 9]);
    say("end");
}

/// The exporter's side of [`serve_mapped`].
fn offer(test: &str, types: u32, words: impl Fn(u64) -> String) {
    start();
    let handle = create(GRANULE, types);
    let address = map(handle, GRANULE);
    upload(address + 4096, &pattern(6, 64));
    let words = words(handle);
    let mut far = far(test);
    assert_eq!(far.ask(&words), hex(&pattern(6, 64)));
    assert_eq!(far.hear(), "done");
    assert_eq!(download(address, 4096), [0x42; 4096]);
    unmap(address, GRANULE);
    ok(cu!(cuMemRelease(handle)));
    assert_eq!(far.ask("on"), hex(&[0x42; 64]));
    assert_eq!(far.hear(), "end");
    leave(0);
    assert_eq!(live(), [0; 9]);
}

#[test]
fn a_descriptor_gives_the_memory() {
    if !scripted("a_descriptor_gives_the_memory", "") {
        return;
    }
    if role() == "far" {
        return serve_mapped(|fd| {
            import(ptr::without_provenance_mut(fd.parse().expect("a number")), FD)
        });
    }
    offer("a_descriptor_gives_the_memory", FD, |handle| {
        let fd = export_fd(handle);
        // SAFETY: fcntl takes only numbers here. The other process is to inherit the descriptor.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
        fd.to_string()
    });
}

#[test]
fn a_fabric_handle_gives_the_memory() {
    if !scripted("a_fabric_handle_gives_the_memory", "fabric=ok") {
        return;
    }
    if role() == "far" {
        return serve_mapped(|text| import(handle_of(text).as_mut_ptr().cast(), FABRIC));
    }
    offer("a_fabric_handle_gives_the_memory", FABRIC | FD, |handle| {
        let mut fabric = CUmemFabricHandle::zeroed();
        let out = (&raw mut fabric).cast();
        ok(cu!(cuMemExportToShareableHandle(out, handle, FABRIC, 0)));
        hex(&fabric.data)
    });
}

#[test]
fn invalid_handles_are_refused() {
    if !scripted("invalid_handles_are_refused", "fabric=ok") {
        return;
    }
    start();
    let invalid = Err(CUDA_ERROR_INVALID_VALUE);
    let number = |fd: i32| ptr::without_provenance_mut(fd as usize);
    let file = std::fs::File::open("/dev/null").expect("/dev/null exists");
    assert_eq!(import(number(file.as_raw_fd()), FD), invalid);
    assert_eq!(import(number(100_000), FD), invalid);
    assert_eq!(import(number(-1), FD), invalid);
    assert_eq!(import([0xffu8; 64].as_mut_ptr().cast(), FABRIC), invalid);
    assert_eq!(import(ptr::null_mut(), FABRIC), invalid);
    assert_eq!(import(ptr::null_mut(), 2), invalid);
    // Memory created for one kind of handle has no handle of another kind. A dma-buf of
    // `cuMemAlloc` memory cannot be imported at all.
    let handle = create(GRANULE, FD);
    let mut fabric = CUmemFabricHandle::zeroed();
    let out = (&raw mut fabric).cast();
    assert_eq!(cu!(cuMemExportToShareableHandle(out, handle, FABRIC, 0)), CUDA_ERROR_INVALID_VALUE);
    let plain = allocate(GRANULE);
    let mut fd = -1;
    ok(cu!(cuMemGetHandleForAddressRange((&raw mut fd).cast(), plain, GRANULE, 1, 0)));
    assert_eq!(import(number(fd), FD), invalid);
    // A process may import its own memory: another address, the same bytes.
    let (first, second) = (map(handle, GRANULE), import(number(export_fd(handle)), FD));
    let second = map(second.expect("the memory belongs to this process"), GRANULE);
    upload(first, &pattern(8, 100));
    assert_eq!(download(second, 100), pattern(8, 100));
    // A fabric handle of memory that was released.
    let handle = create(GRANULE, FABRIC);
    ok(cu!(cuMemExportToShareableHandle(out, handle, FABRIC, 0)));
    ok(cu!(cuMemRelease(handle)));
    assert_eq!(import(out, FABRIC), invalid);
}
