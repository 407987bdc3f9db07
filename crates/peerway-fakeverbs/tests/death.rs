//! A process that dies while a device uses its memory. If the kernel releases its registrations
//! before its connections, its memory is refused first. The engine must report the death of the
//! peer, not a revoked region.

mod support;

use std::io::Read as _;
use std::time::Duration;

use peerway::{Access, Batch, Endpoint, Fence, Pin, Reason, TransferError};
use support::*;

const LEN: usize = 1 << 20;

fn endpoint(fence: Duration) -> Endpoint {
    let pin = std::env::var("PEERWAY_TEST_PIN").expect("the test sets PEERWAY_TEST_PIN");
    let pin: Pin = pin.parse().expect("`ib` or `efa`");
    let builder = Endpoint::builder().transport(pin).detect(WATCHDOG).fence(fence);
    builder.build().expect("there are devices")
}

/// The remote process: it grants access to its memory until the script ends it.
fn lend() {
    let endpoint = endpoint(WATCHDOG);
    let region = endpoint.register(vec![7u8; LEN]).expect("memory registers");
    let descriptor = region.advertise(Access::READ_WRITE).expect("the region can be advertised");
    say(&format!("{} {}", hex(&endpoint.metadata()), hex(&descriptor)));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Uses memory of a process until it dies. The last transfer must end with `why`.
fn use_until_death(test: &str, pin: &str, write: bool, fence: Duration, why: TransferError) {
    let efa = if pin == "efa" { "efa," } else { "" };
    if !scripted_with(test, &format!("{efa}devices=1"), &[("PEERWAY_TEST_PIN", pin)]) {
        return;
    }
    if role() == "far" {
        return lend();
    }
    let mut far = Far::start(child(test, &format!("{efa}devices=1,die=60"), "far"));
    let line = far.hear();
    let mut words = line.split(' ').map(unhex);
    let mut next = || words.next().expect("two words");

    let endpoint = endpoint(fence);
    let peer = endpoint.connect(&next()).expect("the peer is reachable");
    let remote = peer.import(&next()).expect("the region can be imported");
    let ours = endpoint.register(vec![1u8; LEN]).expect("memory registers");
    let batch = match write {
        true => Batch::write(&ours.all(), &remote.all()),
        false => Batch::read(&ours.all(), &remote.all()),
    };
    let batch = batch.expect("both regions have the same length");
    let ended = std::iter::from_fn(|| peer.run(&batch).ok()).find(|e| e.reason != Reason::Done);
    let ended = ended.expect("a transfer was pending when the peer died");
    assert_eq!(ended.reason, Reason::Failed(why));
    assert_eq!(ended.fence, Fence::Held, "no byte can land later");
}

#[test]
fn a_read_from_a_dying_process_reports_its_death() {
    let test = "a_read_from_a_dying_process_reports_its_death";
    use_until_death(test, "ib", false, WATCHDOG, TransferError::PeerGone);
}

#[test]
fn a_write_to_a_dying_process_reports_its_death() {
    let test = "a_write_to_a_dying_process_reports_its_death";
    use_until_death(test, "ib", true, WATCHDOG, TransferError::PeerGone);
}

#[test]
fn a_datagram_read_from_a_dying_process_reports_its_death() {
    let test = "a_datagram_read_from_a_dying_process_reports_its_death";
    use_until_death(test, "efa", false, WATCHDOG, TransferError::PeerGone);
}

#[test]
fn a_datagram_write_to_a_dying_process_reports_its_death() {
    let test = "a_datagram_write_to_a_dying_process_reports_its_death";
    use_until_death(test, "efa", true, WATCHDOG, TransferError::PeerGone);
}

/// A peer that refuses a read without a reason does not delay it for longer than the fence time.
#[test]
fn a_refused_read_without_a_reason_ends_by_the_fence() {
    let test = "a_refused_read_without_a_reason_ends_by_the_fence";
    use_until_death(test, "ib", false, Duration::from_millis(50), TransferError::Revoked);
}
