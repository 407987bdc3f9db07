//! GPU memory that the engine allocates in the best way that works, with a driver that refuses one
//! step after the other. The tests check which way the engine takes instead, what it reports, and
//! that nothing leaks.

mod support;

use peerway::gpu::{DeviceMemory, DeviceMemoryKind, DeviceMemoryOptions, ImportedMemory};

/// Runs a test of this file in a process with this script, and returns its output.
fn with(script: &str, test: &str) -> String {
    let mut command = support::child(test, script, "test");
    support::pass(command.env("PEERWAY_CUDA_SO", support::library()))
}

/// Whether `with` has started this process.
fn is_inner() -> bool {
    !support::role().is_empty()
}

/// The number of objects of each kind that the driver has: see `fakecuda_live`.
fn live() -> Vec<u64> {
    // SAFETY: the library is already loaded, and the function has this type.
    let live = unsafe {
        let library = libloading::Library::new(support::library()).expect("the library is loaded");
        let function = library.get::<extern "C" fn(u32) -> u64>(b"fakecuda_live\0");
        *function.expect("the symbol is exported")
    };
    [3, 4, 5, 6].map(|kind| live(kind)).to_vec()
}

/// A helper, not a test: allocates, prints the result, and checks that nothing leaks.
#[test]
fn allocate() {
    if !is_inner() {
        return;
    }
    let before = {
        // The first use of a GPU creates some objects that stay.
        let warm = DeviceMemoryOptions::default().from(DeviceMemoryKind::Plain);
        let _ = DeviceMemory::allocate(0, 1, &warm);
        live()
    };
    match DeviceMemory::allocate(0, 3_000_000, &DeviceMemoryOptions::default().zeroed()) {
        Ok(memory) => {
            println!("kind {} why {:?}", memory.kind(), memory.why_not_better());
            drop(memory);
        }
        Err(error) => println!("refused: {error}"),
    }
    assert_eq!(live(), before, "allocations, reservations, mappings, imports");
}

#[test]
fn every_step_that_fails_leads_to_the_next_way_and_leaves_nothing() {
    if is_inner() {
        return;
    }
    // The attribute says that fabric handles are supported, but the attempt is refused.
    let said = with("fabric=refused", "allocate");
    assert!(said.contains("kind posix-fd") && said.contains("IMEX"), "{said}");
    let said = with("fabric=ok", "allocate");
    assert!(said.contains("kind fabric why None"), "{said}");
    let said = with("fabric=unsupported,fd=unsupported", "allocate");
    assert!(said.contains("kind plain"), "{said}");
    assert!(
        said.contains("fabric: ") && said.contains("posix-fd: "),
        "both kinds are named: {said}"
    );
    for call in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        // The first such call is for the descriptor kind: the fabric kind is refused before it.
        let said = with(&format!("fabric=unsupported,fail={call}@1:999"), "allocate");
        let expected = if call == "cuMemCreate" {
            // The engine tries again without access for NICs, which works.
            "kind posix-fd"
        } else {
            "kind plain"
        };
        assert!(said.contains(expected), "{call}: {said}");
        if expected == "kind plain" {
            assert!(said.contains(call) && said.contains("999"), "{call} is not named: {said}");
        }
    }
    let said = with("fabric=unsupported,fail=cuMemGetAllocationGranularity@1", "allocate");
    assert!(said.contains("kind "), "{said}");
    // Memory without access for NICs is still usable.
    let said = with("fabric=unsupported,rdma_vmm=no", "allocate");
    assert!(said.contains("kind posix-fd"), "{said}");
}

#[test]
fn a_failed_allocation_gives_one_sentence() {
    if is_inner() {
        return;
    }
    let said = with("memory=1000000", "allocate");
    assert!(said.contains("refused: cannot allocate 3000000 bytes on GPU 0"), "{said}");
    assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{said}");
    let said = with("version=11000", "allocate");
    assert!(
        said.contains("refused: no GPU can be used") && said.contains("newer driver"),
        "{said}"
    );
    let said = with("no_init=100", "allocate");
    assert!(said.contains("cuInit") && said.contains("CUDA_ERROR_NO_DEVICE"), "{said}");
    let said = with("devices=0", "allocate");
    assert!(said.contains("no GPU can be used"), "{said}");
}

/// A helper, not a test: many threads use two GPUs with different attributes at once.
#[test]
fn many() {
    if !is_inner() {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            scope.spawn(move || {
                for round in 0..20 {
                    let gpu = (thread + round) % 2;
                    let peers = [1 - gpu];
                    let options = DeviceMemoryOptions::default().peers(&peers);
                    let memory =
                        DeviceMemory::allocate(gpu, 10_000, &options).expect("there is room");
                    assert_eq!(
                        memory.gpu(),
                        gpu,
                        "the memory is on the named GPU, whichever context is current"
                    );
                }
            });
        }
    });
    let exported = DeviceMemory::allocate(0, 5_000, &DeviceMemoryOptions::default());
    let exported = exported.expect("there is room").export().expect("the memory can be exported");
    let imported = ImportedMemory::open(1, &exported).expect("the other GPU can import it");
    assert_eq!((imported.len(), imported.gpu()), (5_000, 1));
    let mut garbage = exported;
    garbage.bytes.truncate(10);
    assert!(ImportedMemory::open(0, &garbage).is_err());
    drop(imported);
    println!("left {:?}", live());
}

#[test]
fn threads_and_gpus_do_not_mix_up() {
    if is_inner() {
        return;
    }
    with("devices=2", "many");
}
