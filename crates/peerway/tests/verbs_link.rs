//! A link goes down during transfers that use it, and comes up again. The other device continues
//! its transfers. Nothing is lost, late or counted twice, and afterwards the link carries its share
//! again.
//!
//! The test needs two devices a side and a link to cut: `PEERWAY_TEST_DEVICES=rxe0,rxe2/rxe1,rxe3`
//! and `PEERWAY_TEST_LINK=va1` in the guest of `testbed/rdma-vm.sh`.

use std::process::Command;
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Pin, Reason, Region};

const LEN: usize = 4 << 20;
const ROUNDS: u64 = 12;
const WATCHDOG: Duration = Duration::from_secs(60);

fn set(link: &str, state: &str) {
    let status = Command::new("ip").args(["link", "set", link, state]).status();
    assert!(status.expect("the `ip` program starts").success(), "ip link set {link} {state}");
}

fn sent_by(link: &str) -> u64 {
    let file = format!("/sys/class/net/{link}/statistics/tx_bytes");
    std::fs::read_to_string(file).expect("the link exists").trim().parse().expect("a number")
}

fn filled(endpoint: &Endpoint, seed: u8) -> Region {
    let bytes: Vec<u8> = (0..LEN).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect();
    endpoint.register(bytes).expect("cannot register memory")
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    region.read_at(0, &mut bytes).expect("the range lies inside the region");
    bytes
}

#[test]
#[ignore = "needs RDMA devices and a link to cut: cargo xtask test --rdma"]
fn a_link_goes_down_and_up_under_transfers() {
    let devices = std::env::var("PEERWAY_TEST_DEVICES").expect("it names devices of both sides");
    let link = std::env::var("PEERWAY_TEST_LINK").expect("it names the link to cut");
    let (ours, theirs) = devices.split_once('/').expect("PEERWAY_TEST_DEVICES is `ours/theirs`");
    let endpoint = |devices: &str| {
        let builder = Endpoint::builder().transport(Pin::Ib).rdma_devices(devices);
        builder
            .deadline(WATCHDOG)
            .detect(Duration::from_secs(10))
            .build()
            .expect("the devices exist")
    };
    let (a, b) = (endpoint(ours), endpoint(theirs));
    let peer = a.connect(&b.metadata()).expect("the devices connect");
    let target = filled(&b, 0);
    let remote = peer.import(&target.advertise(Access::READ_WRITE).unwrap()).unwrap();

    let transfer = |round: u64| {
        let from = filled(&a, round as u8);
        let write = Batch::write(&from.all(), &remote.all()).unwrap().count(1);
        let write = peer.post(&write).unwrap();
        assert_eq!(b.wait_counter(1, round, WATCHDOG), round, "a count was lost");
        assert!(bytes(&target) == bytes(&from), "round {round}: a count came before its bytes");
        assert_eq!(write.join().reason, Reason::Done, "round {round}");
        let back = filled(&a, 0);
        let read = peer.post(&Batch::read(&back.all(), &remote.all()).unwrap()).unwrap();
        assert_eq!(read.join().reason, Reason::Done, "round {round}");
        assert!(bytes(&back) == bytes(&from), "round {round}: a read returned other bytes");
        assert_eq!(b.counter(1), round, "a write was counted twice");
    };

    let before = sent_by(&link);
    transfer(1);
    assert!(sent_by(&link) - before > LEN as u64 / 4, "the link carries no share of the bytes");

    let cut = std::thread::scope(|scope| {
        let cutter = scope.spawn(|| {
            // In the middle of a transfer: each transfer takes longer than this in the guest.
            std::thread::sleep(Duration::from_millis(30));
            set(&link, "down");
            Instant::now()
        });
        (2..ROUNDS).for_each(&transfer);
        cutter.join().expect("the cutting thread ends")
    });
    let lost = peer.stats().lanes_lost;
    eprintln!(
        "{} rounds in {:?} after the cut, {lost} queue pairs lost",
        ROUNDS - 2,
        cut.elapsed()
    );
    assert!(lost > 0, "nothing was lost: the link was not in use");

    set(&link, "up");
    let up = Instant::now();
    let mut round = ROUNDS;
    // The driver replaces the queue pairs gradually.
    loop {
        let before = sent_by(&link);
        transfer(round);
        if sent_by(&link) - before > LEN as u64 / 4 {
            break;
        }
        assert!(up.elapsed() < WATCHDOG, "the link carries nothing again");
        round += 1;
    }
    eprintln!("the link carries its share again {:?} after it came up", up.elapsed());
}
