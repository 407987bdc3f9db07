//! Settings and machines without usable RDMA: each error is one sentence that names the wrong
//! setting or the command that helps.

mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};

use peerway::{Access, Endpoint, PathKind, Pin};
use peerway_sys::verbs::Verbs;
use rustix::process::{Resource, Rlimit, setrlimit};

use support::{scripted, scripted_with};

fn endpoint(pin: Pin) -> Endpoint {
    Endpoint::builder().transport(pin).build().expect("the endpoint can be created")
}

/// The error text with which an endpoint is refused.
fn refusal(pin: Pin) -> String {
    let refused = Endpoint::builder().transport(pin).build();
    refused.expect_err("the endpoint cannot be created").to_string()
}

/// Checks that the text is one sentence that contains all of these words.
#[track_caller]
fn says(sentence: &str, words: &[&str]) {
    for word in words {
        assert!(sentence.contains(word), "{word:?} is missing in: {sentence}");
    }
    assert!(!sentence.contains('\n') && sentence.len() < 400, "not one short sentence: {sentence}");
}

#[test]
fn an_unknown_device() {
    let set = [("PEERWAY_RDMA_DEV", "fake0,mlx5_9")];
    if !scripted_with("an_unknown_device", "", &set) {
        return;
    }
    says(&refusal(Pin::Ib), &["PEERWAY_RDMA_DEV", "\"mlx5_9\"", "fake0, fake1"]);
}

#[test]
fn an_address_that_is_not_there() {
    let set = [("PEERWAY_RDMA_GID_INDEX", "7")];
    if !scripted_with("an_address_that_is_not_there", "", &set) {
        return;
    }
    says(&refusal(Pin::Ib), &["PEERWAY_RDMA_GID_INDEX=7", "fake0", "peerway doctor"]);
}

#[test]
fn an_address_that_is_no_number() {
    let set = [("PEERWAY_RDMA_GID_INDEX", "eth0")];
    if !scripted_with("an_address_that_is_no_number", "", &set) {
        return;
    }
    says(&refusal(Pin::Ib), &["PEERWAY_RDMA_GID_INDEX", "eth0"]);
}

#[test]
fn no_link_is_up() {
    let down = "linkdown=fake0@0..100000,linkdown=fake1@0..100000";
    if !scripted("no_link_is_up", down) {
        return;
    }
    says(&refusal(Pin::Ib), &["PEERWAY_TRANSPORT=ib", "fake0", "`rdma link`", "ip link set"]);
}

#[test]
fn a_link_that_is_down_is_left_out() {
    if !scripted("a_link_that_is_down_is_left_out", "linkdown=fake0@0..100000") {
        return;
    }
    let (a, b) = (endpoint(Pin::Ib), endpoint(Pin::Ib));
    let peer = a.connect(&b.metadata()).expect("one device is left");
    assert_eq!(peer.path().kind, PathKind::Verbs);
}

/// Lowers the kernel's limit of locked memory, to match the limit that the script sets on the
/// device.
fn little_memory() {
    let kib = Some(64 << 10);
    setrlimit(Resource::Memlock, Rlimit { current: kib, maximum: kib })
        .expect("a lower limit is allowed");
}

#[test]
fn no_memory_may_be_locked() {
    if !scripted("no_memory_may_be_locked", "memlock=100") {
        return;
    }
    little_memory();
    says(&refusal(Pin::Ib), &["64 KiB", "`ulimit -l unlimited`", "--ulimit memlock=-1"]);
}

#[test]
fn too_little_memory_may_be_locked_for_a_peer() {
    if !scripted("too_little_memory_may_be_locked_for_a_peer", "memlock=50000") {
        return;
    }
    little_memory();
    let (a, b) = (endpoint(Pin::Ib), endpoint(Pin::Ib));
    let refused = a.connect(&b.metadata()).expect_err("queue pairs have buffers").to_string();
    says(&refused, &["path 'ib'", "64 KiB", "`ulimit -l unlimited`"]);
}

/// Collects the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("the lock is not poisoned").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn too_little_memory_may_be_locked_for_a_region() {
    if !scripted("too_little_memory_may_be_locked_for_a_region", "memlock=8000000") {
        return;
    }
    little_memory();
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let (a, b) = (endpoint(Pin::Ib), endpoint(Pin::Ib));
    let peer = a.connect(&b.metadata()).expect("queue pairs fit");
    let small = b.allocate(1 << 16).expect("memory");
    let large = b.allocate(64 << 20).expect("memory");
    peer.import(&small.advertise(Access::READ_WRITE).expect("a grant")).expect("the region fits");
    let descriptor = large.advertise(Access::READ_WRITE).expect("a grant");
    let refused = peer.import(&descriptor).expect_err("the region exceeds the limit").to_string();
    says(&refused, &["path 'ib'", "owner could not register it", "log"]);
    let logged =
        String::from_utf8(log.0.lock().expect("the lock is not poisoned").clone()).expect("text");
    assert!(logged.contains("64 KiB") && logged.contains("ulimit -l unlimited"), "{logged}");
}

#[test]
fn a_peer_without_devices() {
    if !scripted("a_peer_without_devices", "") {
        return;
    }
    let (a, tcp) = (endpoint(Pin::Ib), endpoint(Pin::Tcp));
    let refused = a.connect(&tcp.metadata()).expect_err("the peer has no RDMA device").to_string();
    says(&refused, &["path 'ib'", "the peer has none", "pinned to tcp"]);
    let refused = tcp.connect(&a.metadata()).expect_err("the peer requires RDMA").to_string();
    says(&refused, &["refuses", "pinned to ib", "no RDMA device or is pinned to another path"]);
}

#[test]
fn the_wrong_kind_of_devices() {
    if !scripted("the_wrong_kind_of_devices", "") {
        return;
    }
    says(&refusal(Pin::Efa), &["PEERWAY_TRANSPORT=efa", "no EFA device", "`rdma link`"]);
}

#[test]
fn no_device() {
    let set = [("UCCL_P2P_TRANSPORT", "ib")];
    if !scripted_with("no_device", "devices=0", &set) {
        return;
    }
    let refused =
        Endpoint::builder().build().expect_err("the endpoint cannot be created").to_string();
    says(&refused, &["UCCL_P2P_TRANSPORT", "no RDMA device", "`rdma link`"]);
}

const MISSING: &str = "/nonexistent/libibverbs.so";

/// If the named library is missing, the engine opens the machine's own one. Where that one has
/// devices, nothing is refused.
mod needs_no_rdma_devices {
    use super::*;

    /// The expected error: the missing path, or the error of the machine's own library. `None` if
    /// that library has devices.
    fn why_not() -> Option<String> {
        let Ok(own) = Verbs::load(None) else { return Some(MISSING.to_owned()) };
        match own.devices() {
            Ok(devices) if devices.iter().next().is_some() => None,
            Ok(_) => Some("no RDMA device".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    #[test]
    #[ignore = "probes whether this machine has no RDMA devices"]
    fn probe() {
        assert!(why_not().is_some(), "this machine has RDMA devices");
    }

    #[test]
    #[ignore = "needs a machine without RDMA devices: cargo xtask test --only test"]
    fn no_library() {
        let set = [("PEERWAY_IBV_SO", MISSING), ("UCCL_P2P_TRANSPORT", "ib")];
        if !scripted_with("needs_no_rdma_devices::no_library", "", &set) {
            return;
        }
        let why = why_not().expect("this machine has no RDMA devices");
        let refused =
            Endpoint::builder().build().expect_err("the endpoint cannot be created").to_string();
        says(&refused, &["PEERWAY_TRANSPORT=ib", "UCCL_P2P_TRANSPORT", &why]);
    }

    /// Without the library everything else still works: a pair that chooses its own path connects,
    /// and the path says why it is not RDMA.
    #[test]
    #[ignore = "needs a machine without RDMA devices: cargo xtask test --only test"]
    fn no_library_and_none_needed() {
        let set = [("PEERWAY_IBV_SO", MISSING), ("PEERWAY_DISABLE_IPC", "1")];
        if !scripted_with("needs_no_rdma_devices::no_library_and_none_needed", "", &set) {
            return;
        }
        let why = why_not().expect("this machine has no RDMA devices");
        for pin in [Pin::Auto, Pin::Tcp] {
            let (a, b) = (endpoint(pin), endpoint(pin));
            let peer = a.connect(&b.metadata()).expect("there is TCP");
            let path = peer.path();
            assert_eq!(path.kind, PathKind::Tcp);
            if pin == Pin::Auto {
                says(&path.why, &["no RDMA", &why]);
            }
            let theirs = b.allocate(4096).expect("memory");
            let remote = peer.import(&theirs.advertise(Access::WRITE).expect("a grant"));
            let remote = remote.expect("TCP");
            let ours = a.register(vec![7; 4096]).expect("memory");
            peer.write(&ours.all(), &remote.all()).expect("TCP carries it");
        }
    }
}

/// Without the library, local paths still work.
#[test]
fn no_library_and_a_local_path() {
    let set = [("PEERWAY_IBV_SO", MISSING)];
    if !scripted_with("no_library_and_a_local_path", "", &set) {
        return;
    }
    for pin in [Pin::Auto, Pin::Local, Pin::LocalMap, Pin::LocalRing] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).expect("the peer is local");
        assert_ne!(peer.path().kind, PathKind::Tcp, "{pin}");
    }
}
