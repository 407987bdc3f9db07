//! Many peers on one RDMA device: in one process, in two processes, and 32 peers. The tests also
//! check that the kernel has no queue pairs left after the peers are removed.

use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, PathKind, Peer, Pin, Reason, Region, RemoteRegion};

const WATCHDOG: Duration = Duration::from_secs(60);
const PEERS: usize = 32;
const LEN: usize = 200_000;
/// The variables for the second process.
const METADATA: &str = "PEERWAY_TEST_METADATA";
const DESCRIPTOR: &str = "PEERWAY_TEST_DESCRIPTOR";

/// The tests count the queue pairs of the whole machine, so they run one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// An endpoint on the first device.
fn endpoint() -> Endpoint {
    let built = Endpoint::builder()
        .transport(Pin::Ib)
        .rdma_devices("0")
        .connect_timeout(WATCHDOG)
        // An emulated guest may stand still for longer than the default time-out.
        .detect(Duration::from_secs(20))
        .build();
    built.expect("this test needs an RDMA device")
}

fn filled(endpoint: &Endpoint, seed: u8) -> Region {
    let bytes: Vec<u8> = (0..LEN).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    endpoint.register(bytes).expect("cannot register memory")
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).expect("the range lies inside the region");
    bytes
}

/// Writes, reads back into other memory, and compares.
fn transfer(endpoint: &Endpoint, peer: &Peer, remote: &RemoteRegion, seed: u8) {
    assert_eq!(peer.path().kind, PathKind::Verbs, "{}", peer.path());
    let (ours, back) = (filled(endpoint, seed), filled(endpoint, !seed));
    let write = Batch::write(&ours.all(), &remote.all()).unwrap();
    assert_eq!(peer.run(&write).unwrap().reason, Reason::Done, "{seed}");
    let read = Batch::read(&back.all(), &remote.all()).unwrap();
    assert_eq!(peer.run(&read).unwrap().reason, Reason::Done, "{seed}");
    assert!(bytes(&ours) == bytes(&back), "{seed}");
}

/// The queue pairs of all devices in the kernel.
fn queue_pairs() -> usize {
    let listed = Command::new("rdma").args(["resource", "show"]).output();
    let listed = listed.expect("this test needs the `rdma` program of iproute2");
    assert!(listed.status.success(), "`rdma resource show` ended with {}", listed.status);
    // `0: rxe0: pd 34 cq 34 qp 53 ...`
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let counts = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "qp");
        words.nth(1)?.parse::<usize>().ok()
    });
    counts.sum()
}

/// Waits until there are so many queue pairs. The kernel frees a queue pair after its work has
/// ended.
fn expect_queue_pairs(expected: usize) {
    let start = Instant::now();
    loop {
        let count = queue_pairs();
        if count == expected {
            return;
        }
        assert!(start.elapsed() < WATCHDOG, "{count} queue pairs, not {expected}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs RDMA devices and the `rdma` program: cargo xtask test --rdma"]
fn many_peers_share_a_device_and_leave_nothing_behind() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let hub = endpoint();
    let none = queue_pairs();
    let others: Vec<Endpoint> = (0..PEERS).map(|_| endpoint()).collect();
    let regions: Vec<Region> = others.iter().map(|other| filled(other, 0)).collect();
    let peers: Vec<Peer> =
        others.iter().map(|other| hub.connect(&other.metadata()).expect("it connects")).collect();
    let remotes: Vec<RemoteRegion> = { peers.iter().zip(&regions) }
        .map(|(peer, region)| peer.import(&region.advertise(Access::READ_WRITE).unwrap()).unwrap())
        .collect();
    // All at once, from several threads.
    std::thread::scope(|scope| {
        for quarter in 0..4 {
            let (hub, peers, remotes) = (&hub, &peers, &remotes);
            scope.spawn(move || {
                for at in (quarter..PEERS).step_by(4) {
                    transfer(hub, &peers[at], &remotes[at], at as u8);
                }
            });
        }
    });
    for (at, region) in regions.iter().enumerate() {
        let first = bytes(region)[0];
        assert_eq!(first, at as u8, "each peer has its own bytes");
    }
    let all = queue_pairs();
    // Both ends are in this process, and each session has at least two queue pairs.
    assert!(all - none >= 2 * 2 * PEERS, "{all} queue pairs");
    let (gone, kept) = peers.split_at(PEERS / 2);
    gone.iter().for_each(|peer| hub.remove_peer(peer));
    expect_queue_pairs(none + (all - none) / 2);
    transfer(&hub, &kept[0], &remotes[PEERS / 2], 200);
    peers.iter().for_each(|peer| hub.remove_peer(peer));
    expect_queue_pairs(none);
    assert!(peers.iter().all(|peer| !peer.is_alive()));
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn two_processes_meet_by_one_device() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let owner = endpoint();
    let region = filled(&owner, 0);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let program = std::env::current_exe().expect("this program has a path");
    let other = Command::new(program)
        .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
        .env(METADATA, hex(&owner.metadata()))
        .env(DESCRIPTOR, hex(&region.advertise(Access::READ_WRITE).unwrap()))
        .stdin(Stdio::null())
        .output()
        .expect("the second process starts");
    let said = String::from_utf8_lossy(&other.stdout);
    assert!(other.status.success() && said.contains("1 passed"), "{said}");
    assert_eq!(bytes(&region)[0], 77, "the byte that the other process wrote");
}

#[test]
#[ignore = "run by two_processes_meet_by_one_device"]
fn the_other_process() {
    let unhex = |name: &str| -> Vec<u8> {
        let text = std::env::var(name).expect("set by the first process");
        let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
        (0..text.len()).step_by(2).map(byte).collect()
    };
    let endpoint = endpoint();
    let peer = endpoint.connect(&unhex(METADATA)).expect("the devices connect");
    let remote = peer.import(&unhex(DESCRIPTOR)).expect("the import succeeds");
    transfer(&endpoint, &peer, &remote, 77);
}
