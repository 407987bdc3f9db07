//! A transfer that was posted with `begin` and is awaited ends without help from the awaiting
//! thread.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use peerway::{Access, Batch, Direction, Ended, Endpoint, Fence, Peer, Pin, Reason, RemoteRegion};
use peerway::{Region, TransferError};

/// The endpoints send heartbeats every 10 s, the longest interval that there is.
const DETECT: Duration = Duration::from_secs(3600);
/// Long enough for the progress threads to block after the previous transfer.
const REST: Duration = Duration::from_millis(20);
/// A transfer that waits for heartbeats of either side takes 5 s on average. This many would take
/// twice the watchdog's time.
const ROUNDS: usize = 24;
const WATCHDOG: Duration = Duration::from_secs(60);

/// Wakes the thread that runs [`block_on`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// An executor for one future. It polls only when the waker was called, as real executors do.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

struct Pair {
    peer: Peer,
    ours: Region,
    remote: RemoteRegion,
    /// Keeps the far endpoint and its memory.
    _far: (Endpoint, Region),
    near: Endpoint,
}

fn pair(pin: Pin, len: usize) -> Pair {
    let make = || Endpoint::builder().transport(pin).detect(DETECT).build().unwrap();
    let (near, far) = (make(), make());
    let peer = near.connect(&far.metadata()).unwrap();
    let (ours, theirs) = (near.allocate(len).unwrap(), far.allocate(len).unwrap());
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    Pair { peer, ours, remote, _far: (far, theirs), near }
}

impl Pair {
    fn batch(&self, direction: Direction) -> Batch {
        let (ours, remote) = (self.ours.all(), self.remote.all());
        match direction {
            Direction::Write => Batch::write(&ours, &remote).unwrap(),
            Direction::Read => Batch::read(&ours, &remote).unwrap(),
        }
    }

    fn begin_and_await(&self, direction: Direction) -> Ended {
        block_on(self.peer.begin(&self.batch(direction)).unwrap())
    }
}

/// Runs `work` in its own thread and fails if it does not end in time.
fn watched(what: String, work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    let worker = thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = receiver.recv_timeout(WATCHDOG) {
        panic!("{what}: the awaited transfers did not end within {WATCHDOG:?}");
    }
    worker.join().unwrap();
}

fn awaited_transfers_end(pin: Pin, len: usize, direction: Direction) {
    watched(format!("{direction:?} of {len} bytes over {pin}"), move || {
        let pair = pair(pin, len);
        for _ in 0..ROUNDS {
            thread::sleep(REST);
            assert_eq!(pair.begin_and_await(direction).reason, Reason::Done);
        }
    });
}

#[test]
fn awaited_writes_over_tcp_do_not_wait_for_heartbeats() {
    awaited_transfers_end(Pin::Tcp, 64 << 10, Direction::Write);
    awaited_transfers_end(Pin::Tcp, 1 << 20, Direction::Write);
}

#[test]
fn awaited_reads_over_tcp_do_not_wait_for_heartbeats() {
    awaited_transfers_end(Pin::Tcp, 64 << 10, Direction::Read);
    awaited_transfers_end(Pin::Tcp, 1 << 20, Direction::Read);
}

#[test]
fn awaited_transfers_through_the_ring_do_not_wait_for_heartbeats() {
    awaited_transfers_end(Pin::LocalRing, 64 << 10, Direction::Write);
    awaited_transfers_end(Pin::LocalRing, 1 << 20, Direction::Read);
}

#[test]
fn awaited_copies_of_mapped_memory_end() {
    // Below and above the size from which `begin` itself asks the copy pool for help.
    awaited_transfers_end(Pin::LocalMap, 256 << 10, Direction::Write);
    awaited_transfers_end(Pin::LocalMap, 4 << 20, Direction::Read);
}

#[test]
fn a_transfer_that_is_first_awaited_after_the_endpoint_closed_ends() {
    for pin in [Pin::Tcp, Pin::LocalMap] {
        watched(format!("a transfer over {pin} of a closed endpoint"), move || {
            let pair = pair(pin, 256 << 10);
            let transfer = pair.peer.begin(&pair.batch(Direction::Write)).unwrap();
            pair.near.close();
            let ended = block_on(transfer);
            let closed = Reason::Failed(TransferError::EndpointClosed);
            assert!(matches!(ended.fence, Fence::Held | Fence::Open), "{ended:?}");
            assert!([closed, Reason::Done].contains(&ended.reason), "{ended:?}");
        });
    }
}
