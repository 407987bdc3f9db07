//! An endpoint of a process that has no file descriptors left. The test is alone in its program,
//! because the limit applies to the whole process.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use peerway::{Endpoint, Pin};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Several rests of a listener.
const WINDOW: Duration = Duration::from_secs(2);
const WATCHDOG: Duration = Duration::from_secs(30);

/// The log of the engine.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Lines of this level that contain `text`.
    fn count(&self, level: &str, text: &str) -> usize {
        let log = self.0.lock().unwrap();
        let log = String::from_utf8_lossy(&log);
        log.lines().filter(|line| line.contains(level) && line.contains(text)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + WATCHDOG;
    while !holds() {
        assert!(Instant::now() < until, "{what}: not within {WATCHDOG:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn listeners_rest_without_descriptors_and_say_so_once() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    let new = || Endpoint::builder().transport(Pin::Auto).build().unwrap();
    let (a, b) = (new(), new());
    let addr = b.addresses()[0];
    let allowed = getrlimit(Resource::Nofile);
    let limit = |current| {
        setrlimit(Resource::Nofile, Rlimit { current, maximum: allowed.maximum }).unwrap();
    };

    // The connection waits in the backlog, which takes no file descriptor of the acceptor.
    let socket =
        socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None);
    let socket = socket.unwrap();
    limit(Some(0));
    socket.connect(&addr.into()).unwrap();
    wait_for("a warning", || log.count("WARN", "no connection can be accepted") > 0);
    let (before, start) = (processor_time(), Instant::now());
    std::thread::sleep(WINDOW);
    let (used, window) = (processor_time() - before, start.elapsed());
    limit(allowed.current);
    assert!(used < window / 3, "{used:?} of CPU time in {window:?} without descriptors");
    assert_eq!(log.count("WARN", "no connection can be accepted"), 1, "warnings");

    wait_for("recovery", || log.count("INFO", "connections are accepted again") > 0);
    let peer = a.connect_within(&b.metadata(), WATCHDOG).unwrap();
    peer.notify(b"served").unwrap().join().ok().unwrap();
    assert_eq!(log.count("WARN", "no connection can be accepted"), 1, "warnings");
    assert_eq!(log.count("INFO", "connections are accepted again"), 1, "recoveries");
    drop(TcpStream::from(socket));
}
