//! Each proxy thread has its own session with a peer if lanes carry its commands.
//!
//! There is one test, in its own program, because it counts the threads and sockets of the process.

use std::time::{Duration, Instant};

use peerway::driven::{HostProducerError, Proxy};
use peerway::{Endpoint, Pin};

const SOON: Duration = Duration::from_secs(60);

/// Progress threads of this process.
fn serving_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.ok()?));
    names.filter(|name| name.trim() == "peerway-serve").count()
}

/// Sockets of this process.
fn sockets() -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// Whether a condition holds soon.
fn comes_to(mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + SOON;
    while Instant::now() < until {
        if is_so() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

#[test]
fn each_thread_has_lanes_of_its_own() {
    for pin in [Pin::Tcp, Pin::LocalRing, Pin::LocalMap] {
        // The threads of the previous round are joined. The kernel removes them a moment later.
        assert!(comes_to(|| serving_threads() == 0), "{pin}: {} at first", serving_threads());
        let endpoints = [0, 1].map(|_| Endpoint::builder().transport(pin).build().unwrap());
        let [a, b] = &endpoints;
        let [near, far] = [a, b].map(|endpoint| {
            Proxy::builder(endpoint).threads(3).rings(4).slots(64).build().unwrap()
        });
        let (ours, theirs) = (a.allocate(4096).unwrap(), b.allocate(4096).unwrap());
        let from = near.window(&ours).unwrap().base;
        let to = far.window(&theirs).unwrap().base;
        let listening = sockets();
        let there = a.connect(&b.metadata()).unwrap();
        let back = b.accept(SOON).unwrap();
        let of_a_session = sockets() - listening;
        // Both sides have proxies that know each other. They share the sub-sessions that either
        // side opened.
        far.add_peer(0, &back, &near.peer_info().unwrap()).unwrap();
        near.add_peer(0, &there, &far.peer_info().unwrap()).unwrap();
        // One thread for each endpoint, and two more for a proxy of three threads. A thread sets
        // its name when it first runs.
        let (wanted, threads) = (2 * (1 + 2), serving_threads);
        assert!(comes_to(|| threads() == wanted), "{pin}: {} and not {wanted}", threads());
        // One session for each of them, whichever side opened it. There is only one if nothing goes
        // by lanes.
        let sessions = if pin == Pin::LocalMap { 1 } else { 3 };
        let there_are = || (sockets() - listening) as f64 / of_a_session as f64;
        assert!(comes_to(|| there_are() == f64::from(sessions)), "{pin}: {} sessions", there_are());
        for endpoint in &endpoints {
            assert_eq!(endpoint.peers().len(), 1, "{pin}: a sub-session is not a peer");
            assert!(endpoint.accept(Duration::from_millis(1)).is_err(), "{pin}: not accepted");
        }
        let _armed = (near.arm(), far.arm());
        for ring in 0..4u64 {
            let (at, text) = (ring * 100, format!("from ring {ring}."));
            ours.write_at(at, text.as_bytes()).unwrap();
            let producer = near.host_producer(ring as u32).unwrap();
            producer.put_with_count(0, to + at, from + at, 12, 7).unwrap();
            producer.quiet(0).unwrap();
            let mut came = [0; 12];
            theirs.read_at(at, &mut came).unwrap();
            assert_eq!(came, text.as_bytes(), "{pin}");
            far.host_producer(ring as u32).unwrap().signal(0, 9).unwrap();
        }
        assert_eq!(far.wait_counter(7, 4, SOON), 4, "{pin}");
        assert_eq!(near.wait_counter(9, 4, SOON), 4, "{pin}");
        if pin != Pin::LocalMap {
            assert_eq!(there.stats().bytes_written, 48, "{pin}: the sum over all threads");
        }
        // The sub-sessions end with the peer, and every thread reports that, on both sides.
        a.remove_peer(&there);
        for proxy in [&near, &far] {
            for ring in 0..4 {
                let producer = proxy.host_producer(ring).unwrap();
                let told = comes_to(|| {
                    let _ = producer.put(0, to, from, 4);
                    matches!(producer.quiet(0), Err(HostProducerError::Failed))
                });
                assert!(told, "{pin}, ring {ring}");
            }
        }
    }
}
