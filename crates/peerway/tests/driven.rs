//! The GPU-driven engine inside one process, with CPU threads in place of kernels. The conformance
//! program covers several processes and their failures.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use peerway::driven::{
    Command, FaultCode, Forward, HostProducerError, Op, Proxy, ProxyError, PushError, Window,
};
use peerway::{Access, Endpoint, Peer, Region};

const LEN: usize = 1 << 20;
const SOON: Duration = Duration::from_secs(60);

/// Two endpoints with a proxy each. Each proxy knows the other as peer 0.
struct Two {
    endpoints: [Endpoint; 2],
    proxies: [Proxy; 2],
    regions: [Region; 2],
    windows: [Window; 2],
    peers: [Peer; 2],
}

impl Two {
    fn new() -> Self {
        let endpoints = [Endpoint::new().unwrap(), Endpoint::new().unwrap()];
        let proxy = |endpoint| Proxy::builder(endpoint).threads(2).rings(4).slots(64).build();
        let proxies = [0, 1].map(|at| proxy(&endpoints[at]).unwrap());
        let regions = [0, 1].map(|at: usize| endpoints[at].allocate(LEN).unwrap());
        let windows = [0, 1].map(|at: usize| proxies[at].window(&regions[at]).unwrap());
        let there = endpoints[0].connect(&endpoints[1].metadata()).unwrap();
        let back = endpoints[1].connect(&endpoints[0].metadata()).unwrap();
        let peers = [there, back];
        for at in 0..2 {
            let card = proxies[1 - at].peer_info().unwrap();
            let theirs = proxies[at].add_peer(0, &peers[at], &card).unwrap();
            assert_eq!(theirs, [windows[1 - at]]);
        }
        Self { endpoints, proxies, regions, windows, peers }
    }
}

fn bytes(region: &Region, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(at, &mut bytes).unwrap();
    bytes
}

#[test]
fn arrivals_are_forwarded_to_several_places_and_the_sender_is_answered() {
    let two = Two::new();
    let experts: Vec<Region> = (0..3).map(|_| two.endpoints[1].allocate(4096).unwrap()).collect();
    for slot in 0..4u16 {
        let from = u64::from(slot) * 512;
        let arrived = two.regions[1].slice(from..from + 512);
        let mut rule = Forward::new(slot, arrived).count(100).answer(0, 50);
        for expert in &experts {
            rule = rule.to(expert.slice(from..from + 512));
        }
        two.proxies[1].forward(rule).unwrap();
    }
    let _armed = two.proxies.each_ref().map(Proxy::arm);
    let producer = two.proxies[0].host_producer(0).unwrap();
    for round in 1..=200u64 {
        for slot in 0..4u64 {
            let token = [(round * 4 + slot) as u8; 512];
            two.regions[0].write_at(slot * 512, &token).unwrap();
            let [src, dst] = two.windows.map(|window| window.base + slot * 512);
            producer.put_with_count(0, dst, src, 512, slot as u16).unwrap();
        }
        // This counter of the sender rises after all copies are done.
        producer.wait_counter(50, 4 * round, Some(0)).unwrap();
        assert_eq!(two.proxies[1].counter(100), 4 * round, "the receiver counts before the sender");
        for (slot, expert) in (0..4u64).flat_map(|slot| experts.iter().map(move |e| (slot, e))) {
            assert_eq!(bytes(expert, slot * 512, 512), [(round * 4 + slot) as u8; 512]);
        }
    }
    assert!(two.proxies[1].stop_forwarding(2) && !two.proxies[1].stop_forwarding(2));
    producer.signal(0, 2).unwrap();
    producer.quiet(0).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(two.proxies[0].counter(50), 800, "a removed rule must not count");
    assert_eq!(two.proxies.each_ref().map(|proxy| proxy.stats().faults), [0, 0]);
}

#[test]
fn rules_that_make_no_sense_are_refused() {
    let two = Two::new();
    let proxy = &two.proxies[1];
    let region = &two.regions[1];
    let good = Forward::new(1, region.slice(0..64)).to(region.slice(64..128));
    let long = LEN as u64;
    let refused = [
        Forward::new(1024, region.slice(0..64)),
        good.clone().count(1024),
        good.clone().count(1),
        Forward::new(1, region.slice(long..long + 4)),
        good.clone().to(region.slice(0..65)),
        good.clone().to(region.slice(long - 32..long + 32)),
    ];
    for rule in refused {
        let error = proxy.forward(rule.clone()).expect_err("a bad rule was accepted");
        assert!(matches!(error, ProxyError::Forward { .. }), "{rule:?}: {error}");
    }
    proxy.forward(good.clone()).unwrap();
    assert!(proxy.forward(good).is_err(), "a second rule for one counter");
}

#[test]
fn numbers_and_peer_info_are_checked() {
    let two = Two::new();
    let endpoint = &two.endpoints[0];
    for builder in [
        Proxy::builder(endpoint).threads(0),
        Proxy::builder(endpoint).threads(4).rings(3),
        Proxy::builder(endpoint).slots(16),
        Proxy::builder(endpoint).peers(4097),
        Proxy::builder(endpoint).counters(0),
    ] {
        let shown = format!("{builder:?}");
        let error = builder.build().expect_err(&shown);
        assert!(matches!(error, ProxyError::OutOfRange { .. }), "{shown}: {error}");
    }
    let proxy = &two.proxies[0];
    let card = two.proxies[1].peer_info().unwrap();
    let taken = proxy.add_peer(0, &two.peers[0], &card).expect_err("a number was accepted twice");
    assert!(matches!(taken, ProxyError::Taken { number: 0 }), "{taken}");
    assert!(proxy.add_peer(64, &two.peers[0], &card).is_err(), "number above the limit of peers");
    assert!(matches!(proxy.add_peer(1, &two.peers[0], &card[1..]), Err(ProxyError::NotPeerInfo)));
    assert!(proxy.host_producer(4).is_err());
    let unknown = proxy.host_producer(0).unwrap().put(64, 0, 0, 4);
    assert!(matches!(unknown, Err(HostProducerError::NoSuch { what: "peer", .. })), "{unknown:?}");
    // A descriptor is not peer info.
    let other = two.endpoints[1].allocate(100).unwrap().advertise(Access::WRITE).unwrap();
    assert!(proxy.add_peer(1, &two.peers[0], &other).is_err());
}

#[test]
fn an_unarmed_proxy_sleeps_and_ends_at_once() {
    let two = Two::new();
    let producer = two.proxies[0].host_producer(1).unwrap();
    producer.signal(0, 3).unwrap();
    assert_eq!(two.proxies[1].wait_counter(3, 1, Duration::from_millis(100)), 0, "not armed");
    let armed = two.proxies[0].arm();
    assert_eq!(two.proxies[1].wait_counter(3, 1, SOON), 1);
    drop(armed);
    let start = std::time::Instant::now();
    drop(two.proxies);
    assert!(start.elapsed() < SOON);
}

#[test]
fn waits_of_a_host_producer_can_be_interrupted_and_resumed() {
    let two = Two::new();
    let producer = two.proxies[0].host_producer(0).unwrap();
    let signal = Command { op: Op::Signal, peer: 0, counter: 3, ..Command::NOP };
    // No proxy is armed, so the ring fills. The wait for room is interrupted long before the
    // time-out.
    let start = std::time::Instant::now();
    let (mut asked, mut pushed) = (0, 0);
    let refused = loop {
        let mut interrupted = || {
            asked += 1;
            true
        };
        match producer.push_unless(signal, &mut interrupted) {
            Ok(_) => pushed += 1,
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, HostProducerError::Push(PushError::Full)), "{refused}");
    assert!(asked > 0 && start.elapsed() < producer.timeout());
    // The push gave its claim back, so the ring continues at the same position.
    let _armed = two.proxies[0].arm();
    assert_eq!(two.proxies[1].wait_counter(3, pushed, SOON), pushed);
    // The threads of the other proxy have been blocked for a long time.
    let producer = two.proxies[1].host_producer(0).unwrap();
    let position = producer.push(Command { op: Op::Quiet, peer: 0, ..Command::NOP }).unwrap();
    let bit = Duration::from_millis(10);
    assert_eq!(producer.wait_answer(0, position, bit), Err(HostProducerError::TimedOut));
    assert_eq!(producer.wait_counter_for(5, 1, Some(0), bit), Err(HostProducerError::TimedOut));
    let unknown = producer.wait_answer(64, position, bit);
    assert!(matches!(unknown, Err(HostProducerError::NoSuch { what: "peer", .. })), "{unknown:?}");
    let _armed = two.proxies[1].arm();
    assert_eq!(producer.wait_answer(0, position, SOON), Ok(()));
    assert_eq!((two.proxies[0].peers(), two.proxies[0].counters()), (64, 1024));
}

#[test]
fn windows_can_be_added_while_it_runs() {
    let two = Two::new();
    let _armed = two.proxies[0].arm();
    let producer = two.proxies[0].host_producer(0).unwrap();
    // Each of many windows is used at once, while the thread may be in a round that began without
    // it.
    for turn in 1..=40 {
        let more = two.endpoints[0].register(vec![turn; 4096]).unwrap();
        let window = two.proxies[0].window(&more).unwrap();
        producer.put(0, two.windows[1].base + 64, window.base + 4, 128).unwrap();
        producer.quiet(0).unwrap();
        let expected = [vec![0; 64], vec![turn; 128], vec![0; 64]].concat();
        assert_eq!(bytes(&two.regions[1], 0, 256), expected);
    }
}

/// The header that kernels use, compiled for the CPU: the same protocol from C++.
#[test]
fn the_header_for_kernels_follows_the_proxys_protocol() {
    const PROGRAM: &str = r#"
        #include "peerway_device.cuh"
        extern "C" int run(const peerway_proxy *proxy, peerway_u64 dst, peerway_u64 src, peerway_u32 rounds) {
            if (proxy->magic != PEERWAY_MAGIC || proxy->version != PEERWAY_VERSION) return 100;
            if (peerway_put(proxy, 0, 1000, dst, src, 4) != PEERWAY_BAD_ARGUMENT) return 101;
            if (peerway_put(proxy, 0, 0, dst, src + 2, 4) != PEERWAY_BAD_ARGUMENT) return 102;
            if (peerway_put(proxy, 99, 0, dst, src, 4) != PEERWAY_BAD_ARGUMENT) return 103;
            for (peerway_u32 i = 0; i < rounds; i++) {
                peerway_u32 ring = i % proxy->rings;
                int status = peerway_put_with_count(proxy, ring, 0, dst + 64 * (i % 1000), src + 64 * (i % 1000), 64, 9);
                if (status != PEERWAY_OK) return status;
            }
            for (peerway_u32 ring = 0; ring < proxy->rings; ring++) {
                int status = peerway_quiet(proxy, ring, 0);
                if (status != PEERWAY_OK) return 10 + status;
            }
            int status = peerway_signal(proxy, 2, 0, 10);
            // The other side answers.
            return status != PEERWAY_OK ? status : peerway_wait_counter(proxy, 11, 1, 0) * 20;
        }
        extern "C" int stray(const peerway_proxy *proxy, peerway_u64 dst, peerway_u64 src) {
            int status = peerway_put(proxy, 1, 0, dst, src, 64);
            return status != PEERWAY_OK ? 100 : peerway_quiet(proxy, 1, 0);
        }
    "#;
    let two = Two::new();
    let program = Library::compile(PROGRAM);
    let _armed = two.proxies.each_ref().map(Proxy::arm);
    let pattern: Vec<u8> = (0..64_000u32).map(|at| (at % 251) as u8).collect();
    two.regions[0].write_at(0, &pattern).unwrap();
    let [src, dst] = two.windows.map(|window| window.base);
    let handle = two.proxies[0].handle();
    let answer = std::thread::spawn({
        let producer = two.proxies[1].host_producer(0).unwrap();
        move || {
            producer.wait_counter(10, 1, Some(0)).unwrap();
            producer.signal(0, 11).unwrap();
        }
    });
    type Run = unsafe extern "C" fn(u64, u64, u64, u32) -> i32;
    // SAFETY: the signature matches the C++ function above, and the proxy is alive.
    let status = unsafe {
        let run: Run = std::mem::transmute(program.symbol(c"run"));
        run(handle, dst, src, 20_000)
    };
    assert_eq!(status, 0);
    answer.join().unwrap();
    assert_eq!(two.proxies[1].counter(9), 20_000);
    assert_eq!(bytes(&two.regions[1], 0, 64_000), pattern);
    type Stray = unsafe extern "C" fn(u64, u64, u64) -> i32;
    // SAFETY: the signature matches the C++ function above, and the proxy is alive.
    let status = unsafe {
        let stray: Stray = std::mem::transmute(program.symbol(c"stray"));
        stray(handle, dst + LEN as u64, src)
    };
    assert_eq!(status, 4, "PEERWAY_FAILED");
    assert!(two.proxies[0].take_fault().is_some());
}

#[test]
fn a_fault_names_the_address_of_its_peer() {
    let two = Two::new();
    let _armed = two.proxies[0].arm();
    let address = two.peers[0].address();
    let producer = two.proxies[0].host_producer(0).unwrap();
    let next_fault = || {
        let watchdog = Instant::now() + SOON;
        loop {
            if let Some(fault) = two.proxies[0].take_fault() {
                return fault;
            }
            assert!(Instant::now() < watchdog, "no fault");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    producer.signal(0, u16::MAX).unwrap();
    let fault = next_fault();
    assert_eq!((fault.code, fault.peer, fault.address), (FaultCode::Counter, 0, Some(address)));
    assert!(fault.to_string().contains(&format!("peer 0 at {address}): ")), "{fault}");

    producer.signal(3, 0).unwrap();
    let fault = next_fault();
    assert_eq!((fault.code, fault.peer, fault.address), (FaultCode::Peer, 3, None));
    assert!(fault.to_string().contains("peer 3): "), "{fault}");

    // The answer of a rule is for a numbered peer. The copies of a rule concern no peer.
    let slice = two.regions[0].slice(0..8);
    two.proxies[0].forward(Forward::new(7, slice).answer(0, u16::MAX)).unwrap();
    let _their_armed = two.proxies[1].arm();
    two.proxies[1].host_producer(0).unwrap().signal(0, 7).unwrap();
    let fault = next_fault();
    assert_eq!((fault.code, fault.peer, fault.address), (FaultCode::Counter, 0, Some(address)));
}

/// A loaded library that was compiled from C++ text.
struct Library(*mut c_void);

impl Library {
    fn compile(text: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("peerway-header-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (source, made) = (directory.join("program.cpp"), directory.join("program.so"));
        std::fs::write(&source, text).unwrap();
        let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
        let compiled = std::process::Command::new("g++")
            .args([
                "-std=c++17",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-shared",
                "-fPIC",
                "-I",
                include,
            ])
            .arg("-o")
            .args([&made, &source])
            .status();
        let compiled =
            compiled.expect("g++ is needed to test the header: `cargo xtask test` installs it");
        assert!(compiled.success());
        let name = std::ffi::CString::new(made.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the library has only the functions above and no initialisers.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        std::fs::remove_dir_all(directory).unwrap();
        Self(library)
    }

    fn symbol(&self, name: &std::ffi::CStr) -> *mut c_void {
        // SAFETY: the library is never closed.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null());
        symbol
    }
}
