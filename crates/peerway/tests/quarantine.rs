//! Where and when destructors of callers' memory run.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, OwnedMemory, Peer, Pin, Region};

/// Memory whose destructor calls into the engine, waits for a transfer and reports that it ran.
struct Nested {
    bytes: Vec<u8>,
    peer: Peer,
    inner: Option<Region>,
    freed: Sender<()>,
}

// SAFETY: the vector's heap memory does not move with the value, and nothing else uses it.
unsafe impl OwnedMemory for Nested {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.bytes.as_mut_ptr(), self.bytes.len())
    }
}

impl Drop for Nested {
    fn drop(&mut self) {
        // A region inside the memory: its own destructor uses the quarantine.
        drop(self.inner.take());
        // A transfer on a lane, which needs the driver.
        let ended = self.peer.notify(b"freed").map(|transfer| transfer.join());
        if ended.is_ok_and(|ended| ended.ok().is_ok()) {
            let _ = self.freed.send(());
        }
    }
}

/// A copy has entered its gate and waits in `park`. It copies after `MAY_GO_ON` is set.
static IS_PARKED: AtomicBool = AtomicBool::new(false);
static MAY_GO_ON: AtomicBool = AtomicBool::new(false);

fn park() {
    IS_PARKED.store(true, Ordering::SeqCst);
    while !MAY_GO_ON.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let watchdog = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < watchdog, "waited for a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Owner {
    endpoint: Endpoint,
    /// Another endpoint, for the session.
    _witness: Endpoint,
    peer: Peer,
    region: Region,
    freed: Receiver<()>,
}

/// The hook and the quarantine belong to the process, so the tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn owner(pin: Pin) -> Owner {
    let make = || Endpoint::builder().transport(pin).build().unwrap();
    let (endpoint, witness) = (make(), make());
    let peer = endpoint.connect(&witness.metadata()).unwrap();
    let inner = endpoint.register(vec![0u8; 64]).unwrap();
    inner.advertise(Access::READ_WRITE).unwrap();
    let (sender, freed) = channel();
    let memory =
        Nested { bytes: vec![1; 4096], peer: peer.clone(), inner: Some(inner), freed: sender };
    let region = endpoint.register(memory).unwrap();
    Owner { endpoint, _witness: witness, peer, region, freed }
}

#[test]
fn destructors_of_quarantined_memory_run_under_no_lock() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Owner { endpoint, _witness, region, freed, .. } = owner(Pin::Auto);
    let descriptor = region.advertise(Access::READ_WRITE).unwrap();
    let writer = Endpoint::new().unwrap();
    let peer = writer.connect(&endpoint.metadata()).unwrap();
    let remote = peer.import(&descriptor).unwrap();
    let source = writer.register(vec![2u8; 4096]).unwrap();

    peerway::hooks::before_copy(Some(park));
    let write = std::thread::spawn(move || peer.write(&source.all(), &remote.all()));
    wait_until("the write is inside its gate", || IS_PARKED.load(Ordering::SeqCst));
    drop(region);
    assert_eq!(peerway::quarantine().regions, 1);
    assert!(freed.try_recv().is_err(), "memory was freed under a copy");
    peerway::hooks::before_copy(None);
    MAY_GO_ON.store(true, Ordering::SeqCst);
    write.join().unwrap().unwrap();
    freed.recv_timeout(Duration::from_secs(60)).expect("the destructor did not run to its end");
    wait_until("the quarantine is empty", || peerway::quarantine().regions == 0);

    // The endpoint still works.
    let again = endpoint.connect(&writer.metadata()).unwrap();
    again.notify(b"well").unwrap().join().ok().unwrap();
}

#[test]
fn destructors_of_memory_that_a_transfer_kept_run_under_no_lock() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Owner { endpoint, _witness: witness, peer, region, freed } = owner(Pin::Tcp);
    let target = witness.register(vec![0u8; 4096]).unwrap();
    let remote = peer.import(&target.advertise(Access::READ_WRITE).unwrap()).unwrap();
    let batch = Batch::write(&region.all(), &remote.all()).unwrap();
    // The transfer holds the last reference. Its end drops the memory inside the driver.
    let transfer = peer.post(&batch).unwrap();
    drop((region, batch));
    transfer.join().ok().unwrap();
    freed.recv_timeout(Duration::from_secs(60)).expect("the destructor did not run to its end");
    drop(endpoint);
}

#[test]
fn memory_that_nothing_uses_is_freed_by_the_call_that_drops_its_region() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let owner = owner(Pin::Auto);
    owner.region.advertise(Access::READ).unwrap();
    drop(owner.region);
    assert!(owner.freed.try_recv().is_ok(), "the destructor had not run when the drop returned");
}
