//! The protection of data on TCP connections: `PEERWAY_DATA`.
//!
//! `PEERWAY_FLIP_BYTES=10GiB cargo test --release -p peerway-testkit --test data flips` moves that
//! many bytes through the proxy that flips bits, in each mode.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peerway::{
    Access, Batch, DataProtection, Endpoint, Fence, Peer, Pin, Reason, Region, RemoteRegion,
};
use peerway_core::config::parse_bytes;
use peerway_core::metadata::Metadata;
use peerway_core::wire::Kind;
use peerway_testkit::memory;
use peerway_testkit::proxy::Proxy;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, frame};

const WATCHDOG: Duration = Duration::from_secs(60);
const MODES: [DataProtection; 3] =
    [DataProtection::Off, DataProtection::Integrity, DataProtection::Encrypt];
/// The longest transfer. It sees a flipped bit about every second time.
const LONGEST: u64 = 1 << 20;
/// Bytes between two flipped bits.
const FLIP_EVERY: u64 = 1_000_000;

fn endpoint(data: DataProtection, lanes: u16) -> Endpoint {
    // A transfer whose session is lost waits this long for a proof that the peer's process has
    // ended, which does not come.
    let fence = Duration::from_millis(50);
    let builder = Endpoint::builder().transport(Pin::Tcp).lanes(lanes).fence(fence);
    builder.setting("PEERWAY_DATA", data.to_string()).build().unwrap()
}

/// The metadata of an endpoint with the address of a proxy in front of it.
fn through(proxy: &Proxy, endpoint: &Endpoint) -> Vec<u8> {
    let metadata = Metadata::from_bytes(&endpoint.metadata()).unwrap();
    Metadata { addresses: vec![proxy.addr()], ..metadata }.to_bytes()
}

#[test]
fn a_session_uses_the_stricter_setting_of_both_sides() {
    for ours in MODES {
        for theirs in MODES {
            let (a, b) = (endpoint(ours, 2), endpoint(theirs, 1));
            let region = b.register(vec![0u8; 3 << 20]).unwrap();
            let peer = a.connect(&b.metadata()).unwrap();
            let back = b.accept(WATCHDOG).unwrap();
            let expected = ours.max(theirs);
            for path in [peer.path(), back.path()] {
                assert_eq!(path.data, expected, "{ours} and {theirs}: {path}");
                let says = path.why.contains("data is");
                assert_eq!(says, expected != DataProtection::Off, "{path}");
            }
            let remote = peer.import(&region.advertise(Access::READ_WRITE).unwrap()).unwrap();
            let local = a.register(vec![0u8; 3 << 20]).unwrap();
            memory::fill_all(&local, 7).unwrap();
            peer.write(&local.all(), &remote.all()).unwrap();
            memory::check(&region, 7, 0, 0, 3 << 20).unwrap();
            local.fill(0, 3 << 20, 0).unwrap();
            peer.read(&local.all(), &remote.all()).unwrap();
            memory::check(&local, 7, 0, 0, 3 << 20).unwrap();
            let refused = [a.stats().refusals.corrupt_records, b.stats().refusals.corrupt_records];
            assert_eq!(refused, [0, 0]);
        }
    }
}

/// A peer that asks for no protection cannot have a session without it.
#[test]
fn frames_without_records_are_refused_where_protection_is_set() {
    for mode in &MODES[1..] {
        let b = endpoint(*mode, 1);
        let mut far = Raw::connect(b.addresses()[0], &mut Random::new(3)).unwrap();
        let welcome = far.greet().unwrap();
        assert_eq!(welcome.data, *mode);
        far.finish().unwrap();
        far.send(&frame(Kind::Notify, |head| head.sequence = 1.into(), &[], b"plain")).unwrap();
        assert!(far.is_hung_up(WATCHDOG));
        assert!(b.try_notification().is_none());
        let refused = b.stats().refusals.corrupt_records;
        assert_eq!(refused, 1, "{mode}");
    }
}

#[test]
fn nobody_on_the_network_reads_encrypted_data_tokens_or_notifications() {
    for (mode, is_visible) in [(MODES[0], true), (MODES[1], true), (MODES[2], false)] {
        let (a, b) = (endpoint(mode, 1), endpoint(mode, 1));
        let proxy = Proxy::recording(b.addresses()[0]).unwrap();
        let peer = a.connect(&through(&proxy, &b)).unwrap();
        let region = b.register(vec![0u8; 4096]).unwrap();
        let descriptor = region.advertise(Access::READ_WRITE).unwrap();
        let remote = peer.import(&descriptor).unwrap();
        let local = a.register(b"a secret of 32 bytes on the wire".to_vec()).unwrap();
        let batch = Batch::write(&local.all(), &remote.slice(0..32)).unwrap();
        peer.run(&batch.notify(b"a notification that is secret").unwrap()).unwrap();
        let seen = proxy.recorded();
        let token = &descriptor[32..48];
        for secret in [b"a secret of 32 bytes", &b"a notification that"[..], token] {
            let found = seen.windows(secret.len()).any(|window| window == secret);
            assert_eq!(found, is_visible, "{mode}");
        }
    }
}

/// What a run through the flipping proxy did.
#[derive(Debug, Default)]
struct Report {
    bytes: u64,
    flips: u64,
    corrupt: u64,
    done: u64,
    failed: u64,
    /// Sessions that ended.
    sessions: u64,
    lanes_lost: u64,
    lanes_reopened: u64,
    /// Transfers that were done with other bytes than the sent ones.
    wrong: u64,
}

/// The target of writes and the source of reads, and the session that reaches it.
struct Target {
    region: Region,
    peer: Peer,
    remote: RemoteRegion,
}

/// Connects through the proxy, however often a flipped bit prevents it.
fn connect(a: &Endpoint, b: &Endpoint, proxy: &Proxy) -> Target {
    let until = Instant::now() + WATCHDOG;
    loop {
        assert!(Instant::now() < until, "no session can be opened");
        let Ok(peer) = a.connect(&through(proxy, b)) else { continue };
        let region = b.register(vec![0u8; LONGEST as usize]).unwrap();
        let descriptor = region.advertise(Access::READ_WRITE).unwrap();
        if let Ok(remote) = peer.import(&descriptor) {
            return Target { region, peer, remote };
        }
        peer.remove();
    }
}

/// Writes and reads `total` bytes through a proxy that flips bits.
fn flip(mode: DataProtection, total: u64, seed: u64) -> Result<Report> {
    let (a, b) = (endpoint(mode, 16), endpoint(mode, 16));
    let proxy = Proxy::flipping(b.addresses()[0], FLIP_EVERY, seed)?;
    let mut random = Random::new(seed);
    let mut report = Report::default();
    let local = a.register(vec![0u8; LONGEST as usize])?;
    let mut target = connect(&a, &b, &proxy);
    let mut moved = 0;
    let mut notes: HashMap<u64, u64> = HashMap::new();
    let mut may_come: Vec<u64> = Vec::new();
    while moved < total {
        if !target.peer.is_alive() {
            report.lanes_lost += target.peer.stats().lanes_lost;
            report.lanes_reopened += target.peer.stats().lanes_reopened;
            // Bytes of the last session may still be on their way. They must not land in memory
            // that is checked below.
            ensure!(target.region.revoke() == Fence::Held, "a revoke on TCP holds");
            target = connect(&a, &b, &proxy);
            report.sessions += 1;
        }
        let number = report.done + report.failed;
        let longest = if random.one_in(3) { 2000 } else { LONGEST };
        let len = 1 + random.below(longest);
        let (here, there) = (local.slice(0..len), target.remote.slice(0..len));
        let is_write = random.one_in(2);
        let (from, to) = match is_write {
            true => (&local, &target.region),
            false => (&target.region, &local),
        };
        memory::fill(from, number, 0, 0, len)?;
        to.fill(0, len, 0)?;
        let batch = match is_write {
            true => Batch::write(&here, &there)?.notify(&number.to_le_bytes())?.count(1),
            false => Batch::read(&here, &there)?,
        };
        let Ok(transfer) = target.peer.post(&batch) else { continue };
        let ended = transfer.wait(WATCHDOG).expect("every transfer ends");
        if ended.reason != Reason::Done {
            report.failed += 1;
            if is_write {
                may_come.push(number);
            }
            // The session may live: its last lane is gone a moment later.
            target.peer.remove();
            continue;
        }
        report.done += 1;
        moved += len;
        report.wrong += u64::from(memory::check(to, number, 0, 0, len).is_err());
        if is_write && mode != DataProtection::Off {
            while !notes.contains_key(&number) {
                let note = b.notification(WATCHDOG).expect("a notification follows its write");
                *notes.entry(u64::from_le_bytes(note.message[..].try_into()?)).or_default() += 1;
            }
        }
        if mode == DataProtection::Off && report.wrong > 0 {
            break;
        }
    }
    if mode != DataProtection::Off {
        while let Some(note) = b.notification(Duration::from_millis(200)) {
            *notes.entry(u64::from_le_bytes(note.message[..].try_into()?)).or_default() += 1;
        }
        ensure!(notes.values().all(|times| *times == 1), "a notification came twice");
        let counts = b.counter(1);
        let sure = notes.keys().filter(|number| !may_come.contains(number)).count() as u64;
        let most = sure + may_come.len() as u64;
        ensure!((sure..=most).contains(&counts), "{counts} counts for {sure} to {most} writes");
    }
    report.lanes_lost += target.peer.stats().lanes_lost;
    report.lanes_reopened += target.peer.stats().lanes_reopened;
    let corrupt = |endpoint: &Endpoint| endpoint.stats().refusals.corrupt_records;
    report.corrupt = corrupt(&a) + corrupt(&b);
    (report.bytes, report.flips) = (proxy.bytes(), proxy.flips());
    Ok(report)
}

/// Bytes to move. The default takes a few seconds.
fn total() -> u64 {
    let set = std::env::var("PEERWAY_FLIP_BYTES").ok();
    set.and_then(|text| parse_bytes(&text)).unwrap_or(24 << 20)
}

fn no_flipped_bit_is_counted_as_arrived(mode: DataProtection) {
    let started = Instant::now();
    let report = flip(mode, total(), 0xB17).unwrap();
    eprintln!("{mode}: {report:?} in {:?}", started.elapsed());
    assert_eq!(report.wrong, 0, "{report:?}");
    assert!(report.flips >= 10 && report.corrupt >= report.flips / 4, "{report:?}");
    assert!(report.done >= 10 && report.lanes_lost > 0, "{report:?}");
    // Lost lanes come back, so a session has about all of its lanes at any time. It loses all of
    // them at once only if the machine has no time for a connect.
    assert!(report.lanes_reopened > report.lanes_lost / 2, "{report:?}");
    assert!(report.sessions <= 1 + report.lanes_lost / 100, "{report:?}");
}

#[test]
fn no_flipped_bit_is_counted_as_arrived_with_integrity() {
    no_flipped_bit_is_counted_as_arrived(DataProtection::Integrity);
}

#[test]
fn no_flipped_bit_is_counted_as_arrived_with_encrypt() {
    no_flipped_bit_is_counted_as_arrived(DataProtection::Encrypt);
}

/// The proxy and the checks work: without protection, wrong bytes count as arrived.
#[test]
fn flipped_bits_are_counted_as_arrived_without_protection() {
    let report = flip(DataProtection::Off, 1 << 30, 0xB17).unwrap();
    assert!(report.wrong > 0, "{report:?}");
}
