//! What a failed transfer says of itself, and what the log says of a lost session.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use peerway::{
    Access, Batch, Ended, Endpoint, Error, Failure, Fence, Operation, PathKind, Peer, Pin,
    PostError, Reason, Region, RemoteRegion, Transfer, TransferError,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const BYTES: usize = 64 << 20;
const WATCHDOG: Duration = Duration::from_secs(60);
/// Makes a test the owner of memory for its parent process, and names the transport.
const OWNER: &str = "PEERWAY_TEST_OWNER";

fn endpoint(pin: Pin) -> Endpoint {
    Endpoint::builder()
        .transport(pin)
        // Only the end of a process, a deadline and a cancel end transfers here.
        .detect(Duration::from_secs(600))
        .fence(Duration::from_millis(100))
        .build()
        .unwrap()
}

/// Another process, with memory of `BYTES` bytes.
struct Owner {
    process: Child,
    metadata: Vec<u8>,
    descriptor: Vec<u8>,
}

impl Owner {
    /// Runs the test of this name again, in another process.
    fn start(test: &str, pin: Pin) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(OWNER, pin.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut invitation = lines.find_map(|line| {
            let line = line.unwrap();
            let hex = line.split_once("invitation ")?.1;
            let digits = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            Some((0..hex.len()).step_by(2).map(digits).collect::<Vec<u8>>())
        });
        let mut metadata = invitation.take().expect("the owner ended");
        let descriptor = metadata.split_off(metadata.len() - peerway::DESCRIPTOR_LEN);
        Self { process, metadata, descriptor }
    }

    /// In the other process: owns memory until its parent is gone.
    fn be_one(pin: &str) {
        let pins = [Pin::LocalRing, Pin::Tcp];
        let pin = pins.into_iter().find(|known| known.to_string() == pin).unwrap();
        let endpoint = endpoint(pin);
        let region = endpoint.allocate(BYTES).unwrap();
        let descriptor = region.advertise(Access::READ_WRITE).unwrap();
        let invitation = [endpoint.metadata(), descriptor.to_vec()].concat();
        let hex: String = invitation.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("invitation {hex}");
        let _ = io::stdin().read_line(&mut String::new());
    }

    /// Stops the process, and returns when every thread of it has stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        waitpid(Some(Pid::from_child(&self.process)), WaitOptions::UNTRACED).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A write to a stopped process, with the first of its bytes sent.
struct Stopped {
    owner: Owner,
    peer: Peer,
    transfer: Transfer,
    _kept: (Endpoint, Region, RemoteRegion),
}

fn write_to_stopped(test: &str, pin: Pin, deadline: Duration) -> Option<Stopped> {
    if let Ok(pin) = std::env::var(OWNER) {
        Owner::be_one(&pin);
        return None;
    }
    let owner = Owner::start(test, pin);
    let endpoint = endpoint(pin);
    let peer = endpoint.connect(&owner.metadata).unwrap();
    let remote = peer.import(&owner.descriptor).unwrap();
    let ours = endpoint.allocate(BYTES).unwrap();
    owner.stop();
    let batch = Batch::write(&ours.all(), &remote.all()).unwrap().deadline(deadline);
    let transfer = peer.post(&batch).unwrap();
    assert_eq!(transfer.failure(), None, "it runs");
    wait_until("bytes are sent", || transfer.stats().until_sent.is_some());
    Some(Stopped { owner, peer, transfer, _kept: (endpoint, ours, remote) })
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let watchdog = Instant::now() + WATCHDOG;
    while !is_so() {
        assert!(Instant::now() < watchdog, "waited for a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks what every failure says, and that its text says the same.
fn check(failure: &Failure, peer: &Peer, operation: Operation, total: u64, ended: Ended) {
    assert_eq!(failure.peer, peer.address());
    assert_eq!(failure.incarnation, peer.incarnation());
    assert_eq!(failure.operation, operation);
    assert_eq!(failure.bytes_total, total);
    assert!(failure.bytes_done <= total, "{failure:?}");
    assert_eq!(failure.ended, ended);
    let text = failure.to_string();
    for part in
        [peer.address().to_string(), peer.incarnation().to_string(), format!("by {}", failure.path)]
    {
        assert!(text.contains(&part), "{part} is not in: {text}");
    }
}

#[test]
fn a_cancelled_transfer_says_so_and_what_its_fence_says() {
    let test = "a_cancelled_transfer_says_so_and_what_its_fence_says";
    for pin in [Pin::LocalRing, Pin::Tcp] {
        let Some(stopped) = write_to_stopped(test, pin, WATCHDOG) else { return };
        let Stopped { owner, peer, transfer, .. } = &stopped;
        transfer.cancel();
        let ended = transfer.join();
        assert_eq!(ended, Ended { reason: Reason::Cancelled, fence: Fence::Open }, "{pin}");
        let failure = transfer.failure().unwrap();
        check(&failure, peer, Operation::Write, BYTES as u64, ended);
        assert!(failure.bytes_done < BYTES as u64, "{failure}");
        assert_eq!(failure.last_event, None, "{failure}");
        assert!(failure.to_string().contains("was cancelled after"), "{failure}");
        assert!(failure.to_string().contains("the fence is open"), "{failure}");
        owner.signal(Signal::CONT);
        wait_until("the fence holds", || {
            transfer.poll();
            transfer.failure().unwrap().ended.fence == Fence::Held
        });
        assert!(transfer.failure().unwrap().to_string().contains("the fence is held"));
    }
}

#[test]
fn a_transfer_that_takes_too_long_says_how_far_it_came() {
    let test = "a_transfer_that_takes_too_long_says_how_far_it_came";
    let deadline = Duration::from_millis(200);
    let Some(stopped) = write_to_stopped(test, Pin::Tcp, deadline) else { return };
    let Stopped { peer, transfer, .. } = &stopped;
    let ended = transfer.join();
    assert_eq!(ended, Ended { reason: Reason::TimedOut, fence: Fence::Open });
    let failure = transfer.failure().unwrap();
    check(&failure, peer, Operation::Write, BYTES as u64, ended);
    assert_eq!((failure.path, failure.last_event.as_ref()), (PathKind::Tcp, None));
    let far = format!("failed after {} of {BYTES} bytes: the deadline passed", failure.bytes_done);
    assert!(failure.to_string().contains(&far), "{failure}");
}

#[test]
fn a_killed_peer_is_named_in_failures_and_in_one_warning() {
    let test = "a_killed_peer_is_named_in_failures_and_in_one_warning";
    for (pin, path) in [(Pin::LocalRing, PathKind::LocalRing), (Pin::Tcp, PathKind::Tcp)] {
        let log = Log::of_process();
        let Some(stopped) = write_to_stopped(test, pin, WATCHDOG) else { return };
        let Stopped { owner, peer, transfer, .. } = &stopped;
        let notified = peer.notify(b"nobody hears").unwrap();
        owner.signal(Signal::KILL);
        let gone = Reason::Failed(TransferError::PeerGone);
        let ended = transfer.join();
        assert_eq!(ended.reason, gone, "{pin}");
        let failure = transfer.failure().unwrap();
        check(&failure, peer, Operation::Write, BYTES as u64, ended);
        assert_eq!(failure.path, path);
        assert!(failure.bytes_done < BYTES as u64, "{failure}");
        let event = failure.last_event.as_ref().expect("a session ended");
        assert!(failure.to_string().contains(&event.what), "{failure}");
        assert!(event.age < WATCHDOG, "{failure}");

        let ended = notified.join();
        assert_eq!(ended.reason, gone, "{pin}");
        let failure = notified.failure().unwrap();
        check(&failure, peer, Operation::Notify, 0, ended);

        let refused = peer.notify(b"nobody is there").err().unwrap();
        let (address, incarnation) = (peer.address(), peer.incarnation());
        assert_eq!(refused, PostError::PeerGone { peer: address, incarnation }, "{pin}");
        let expected = format!(
            "the peer is gone: {address} (incarnation {incarnation}); connect again to continue"
        );
        assert_eq!(refused.to_string(), expected, "{pin}");

        let addr = peer.address().to_string();
        wait_until("a warning", || !log.lines("WARN", &addr).is_empty());
        let warnings = log.lines("WARN", &addr);
        let [warning] = warnings.as_slice() else { panic!("not one warning: {warnings:?}") };
        for part in [
            format!("peer={addr}"),
            format!("incarnation={}", peer.incarnation()),
            format!("path={path}"),
            format!("cause={:?}", event.what),
            "transfers=2".to_owned(),
        ] {
            assert!(warning.contains(&part), "{part} is not in: {warning}");
        }
    }
}

#[test]
fn a_peer_that_closes_while_nothing_is_under_way_is_no_warning() {
    for pin in [Pin::Auto, Pin::LocalRing, Pin::Tcp] {
        let log = Log::of_process();
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        peer.notify(b"here").unwrap().join().ok().unwrap();
        b.close();
        let addr = peer.address().to_string();
        wait_until("a line", || !log.lines("a session closed", &addr).is_empty());
        assert_eq!(log.lines("WARN", &addr), Vec::<String>::new(), "{pin}");
    }
}

#[test]
fn revoked_memory_is_named_on_every_path() {
    for pin in [Pin::Auto, Pin::LocalMap, Pin::LocalCma, Pin::LocalRing, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        // The posting call copies the first; a job or a lane carries the second.
        for len in [512, 2 << 20] {
            let (ours, theirs) = (a.allocate(len).unwrap(), b.allocate(len).unwrap());
            let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
            assert_eq!(theirs.revoke(), Fence::Held);
            let reason = Reason::Failed(TransferError::Revoked);
            let ended = Ended { reason, fence: Fence::Held };
            for operation in [Operation::Read, Operation::Write] {
                let batch = match operation {
                    Operation::Read => Batch::read(&ours.all(), &remote.all()),
                    _ => Batch::write(&ours.all(), &remote.all()),
                };
                let transfer = peer.post(&batch.unwrap()).unwrap();
                assert_eq!(transfer.join(), ended, "{pin} {len}");
                let failure = transfer.failure().unwrap();
                check(&failure, &peer, operation, len as u64, ended);
                assert_eq!((failure.bytes_done, failure.path), (0, transfer.path()), "{pin}");
                assert_eq!(failure.last_event, None, "{pin}");
                assert!(failure.to_string().contains("the peer revoked the region"), "{failure}");
                let blocking = match operation {
                    Operation::Read => peer.read(&ours.all(), &remote.all()),
                    _ => peer.write(&ours.all(), &remote.all()),
                };
                assert_eq!(blocking, Err(Error::Ended(Box::new(failure))), "{pin} {len}");
            }
        }
        let theirs = b.allocate(64).unwrap();
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let ours = a.allocate(64).unwrap();
        let done = peer.post(&Batch::write(&ours.all(), &remote.all()).unwrap()).unwrap();
        assert_eq!((done.join(), done.failure()), (Ended::DONE, None), "{pin}");
    }
}

#[test]
fn a_closed_endpoint_and_a_removed_peer_say_who_closed() {
    for pin in [Pin::Auto, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let (ours, theirs) = (a.allocate(BYTES).unwrap(), b.allocate(BYTES).unwrap());
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
        // It makes no progress before a thread waits for it.
        let transfer = peer.begin(&batch).unwrap();
        let staged = peer.stage(vec![batch]).unwrap();
        staged.release(0).unwrap();
        a.close();
        let ended = transfer.join();
        assert_eq!(ended.reason, Reason::Failed(TransferError::EndpointClosed), "{pin}");
        let failure = transfer.failure().unwrap();
        check(&failure, &peer, Operation::Write, BYTES as u64, ended);
        let staged_failure = staged.failure().map(|failure| failure.ended.reason);
        assert_eq!(staged_failure.unwrap_or(Reason::Done), staged.join().reason, "{pin}");
    }
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let peer = a.connect(&b.metadata()).unwrap();
    let (ours, theirs) = (a.allocate(BYTES).unwrap(), b.allocate(BYTES).unwrap());
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let transfer = peer.begin(&Batch::write(&ours.all(), &remote.all()).unwrap()).unwrap();
    peer.remove();
    transfer.join();
    let failure = transfer.failure().expect("the session is over");
    assert_eq!(failure.last_event.unwrap().what, "this process closed the session");
}

/// The log of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn of_process() -> Self {
        static LOG: LazyLock<Log> = LazyLock::new(|| {
            let log = Log::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::INFO)
                .with_ansi(false)
                .with_writer(move || writer.clone())
                .init();
            log
        });
        LOG.clone()
    }

    /// Lines that contain both texts.
    fn lines(&self, one: &str, other: &str) -> Vec<String> {
        let log = self.0.lock().unwrap();
        let lines = std::str::from_utf8(&log).unwrap().lines();
        lines.filter(|line| line.contains(one) && line.contains(other)).map(str::to_owned).collect()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
