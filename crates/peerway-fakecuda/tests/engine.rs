//! The library as the engine opens it: by its path, with every function, through the engine's own
//! types.

mod support;

use std::sync::Arc;

use peerway_sys::cuda::{Cuda, Event, Gpu, Plain, Pointer, Stream};

use support::*;

#[test]
fn the_engine_opens_it() {
    if !scripted("the_engine_opens_it", "latency=300ms") {
        return;
    }
    // SAFETY: loading the library runs no code.
    let library =
        unsafe { libloading::Library::new(support::library()) }.expect("the library loads");
    // SAFETY: the function has this type.
    let live = unsafe { library.get::<extern "C" fn(u32) -> u64>(b"fakecuda_live\0") };
    let live = *live.expect("the symbol is exported");

    let cuda =
        Cuda::load(Some(support::library().into())).expect("the library exports every function");
    assert_eq!((cuda.version(), cuda.device_count()), (13_000, Ok(1)));
    // The optional functions exist too.
    assert!(cuda.symbols().cuMemGetHandleForAddressRange.is_some());
    assert!(cuda.symbols().cuStreamWaitValue64_v2.is_some());
    let gpu: Arc<Gpu> = Gpu::open(&cuda, 0).expect("the machine has one GPU");
    let (memory, stream) = (Plain::allocate(&gpu, 1000), Stream::new(&gpu));
    let (memory, stream) =
        (memory.expect("GPU memory is available"), stream.expect("streams are not limited"));
    let event = Event::new(&gpu).expect("events are not limited");
    let known = Pointer::of(&cuda, memory.address() + 10).expect("any pointer can be queried");
    assert!(matches!(known, Pointer::Device { base, len: 1000, .. } if base == memory.address()));
    let mut bytes = vec![0u8; 1000];
    assert_eq!(Pointer::of(&cuda, bytes.as_ptr() as u64), Ok(Pointer::Pageable));
    // SAFETY: memory and stream live until the end of the test.
    unsafe {
        gpu.fill(memory.address(), 0x5a, 1000, stream.raw())
            .expect("the memory belongs to the GPU");
        event.record(stream.raw()).expect("event and stream belong to the same context");
        assert_eq!(event.is_done(), Ok(false));
        event.synchronize().expect("the event completes");
        gpu.copy(bytes.as_mut_ptr() as u64, memory.address(), 1000, stream.raw())
            .expect("the copy works");
    }
    assert_eq!(bytes, [0x5a; 1000]);
    assert_eq!((live(0), live(1), live(2), live(3)), (1, 1, 1, 1));
    drop((memory, stream, event));
    drop(gpu);
    assert_eq!((live(0), live(1), live(2), live(3)), (0, 0, 0, 0));
}
