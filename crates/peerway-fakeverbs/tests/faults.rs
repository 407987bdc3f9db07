//! The faults of the script, each alone and together.

mod support;

use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{CompChannel, Cq, Subject};

use support::*;

const LEN: usize = 100_000;

/// Writes with immediates, reads and sends, all checked. The results must be the same as without
/// faults.
fn traffic(pair: &Pair, rounds: usize) {
    let buffers = [&pair.here, &pair.there, &pair.there, &pair.here].map(|node| node.buffer(LEN));
    exchange(pair, &buffers, rounds);
}

fn exchange(pair: &Pair, [from, to, inbox, back]: &[Buffer; 4], rounds: usize) {
    for round in 0..rounds {
        let seed = round as u8;
        from.pattern(seed);
        let len = 1 + (round * 7919) % LEN;
        let (piece, answer) = ([from.sge(0, len)], [back.sge(0, len)]);
        pair.receive(1, &[]);
        pair.receive(2, &[inbox.sge(0, LEN)]);
        let rkey = to.mr.rkey();
        let mut requests = [
            ibv_send_wr::write(10, &piece, to.address(0), rkey),
            ibv_send_wr::write_with_immediate(11, &piece, to.address(0), rkey, round as u32),
            ibv_send_wr::read(12, &answer, to.address(0), rkey),
            ibv_send_wr::send(13, &piece).with_flags(SIGNALED | IBV_SEND_FENCE),
        ];
        post(&pair.near, &mut requests);
        let received = pair.there.completions(2);
        assert_eq!((received[0].wr_id, received[0].immediate()), (1, Some(round as u32)));
        assert_eq!((received[1].wr_id, received[1].byte_len as usize), (2, len));
        assert!(to.has_pattern(seed, 0, len) && inbox.has_pattern(seed, 0, len));
        assert_eq!(pair.here.completions(1)[0].wr_id, 13);
        assert!(back.has_pattern(seed, 0, len));
    }
}

/// A pair with a long time-out, so that only the script causes failures.
fn patient() -> Pair {
    Pair::with(64, |attr| attr.timeout = 16)
}

#[test]
fn lost_packets_are_sent_again() {
    if !scripted("lost_packets_are_sent_again", "seed=3,drop=5%") {
        return;
    }
    traffic(&patient(), 100);
    assert!(stats().retransmissions > 0);
}

#[test]
fn packets_that_overtake_are_put_right() {
    if !scripted("packets_that_overtake_are_put_right", "seed=4,reorder=20%,delay=1ms") {
        return;
    }
    traffic(&patient(), 100);
}

#[test]
fn spurious_refusals_are_sat_out() {
    if !scripted("spurious_refusals_are_sat_out", "seed=5,rnr=30%") {
        return;
    }
    traffic(&patient(), 100);
}

#[test]
fn everything_at_once() {
    let script = "seed=6,drop=2%,reorder=10%,rnr=10%,late=20%,latency=50us,delay=500us";
    if !scripted("everything_at_once", script) {
        return;
    }
    traffic(&patient(), 60);
}

#[test]
fn late_completions_come_in_order_after_their_effect() {
    if !scripted("late_completions_come_in_order_after_their_effect", "late=50%,delay=20ms") {
        return;
    }
    let pair = Pair::new();
    let (from, to) = (pair.here.buffer(8), pair.there.buffer(8));
    from.fill(1);
    pair.here.cq.request_notify(false).expect("the queue can be armed");
    let begun = Instant::now();
    let piece = [from.sge(0, 8)];
    for id in 0..20 {
        let write = ibv_send_wr::write(id, &piece, to.address(0), to.mr.rkey());
        pair.post(write.with_flags(SIGNALED));
    }
    while to.byte(7) == 0 {
        assert!(begun.elapsed() < WATCHDOG);
    }
    let ids: Vec<u64> = pair.here.completions(20).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, (0..20).collect::<Vec<_>>());
    assert!(begun.elapsed() >= Duration::from_millis(20), "no completion was late");
    // The event came with the completion, not with the effect, and only once.
    let channel = pair.here.cq.channel().expect("the queue has a channel");
    assert_eq!(channel.event(), Ok(Some(COOKIE)));
    assert_eq!(channel.event(), Ok(None));
}

#[test]
fn a_queue_pair_fails_in_its_time() {
    if !scripted("a_queue_pair_fails_in_its_time", "flush_after=10") {
        return;
    }
    let pair = Pair::new();
    let to = pair.there.buffer(8);
    for id in 1..=15 {
        pair.post(ibv_send_wr::write(id, &[], to.address(0), to.mr.rkey()).with_flags(SIGNALED));
    }
    let wcs: Vec<ibv_wc> = (0..15).map(|_| pair.here.completion()).collect();
    assert_eq!(wcs.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (1..=15).collect::<Vec<_>>());
    let good = wcs.iter().take_while(|wc| wc.status().is_success()).count();
    assert!(good < 10, "{good}");
    assert!(wcs[good..].iter().all(|wc| wc.status().is_flushed()));
    assert_eq!((state(&pair.near), state(&pair.far)), (IBV_QPS_ERR, IBV_QPS_RTS));
}

#[test]
fn a_device_goes_away() {
    if !scripted("a_device_goes_away", "remove=fake0@20,patience=1000s") {
        return;
    }
    let pair = Pair::new();
    let to = pair.there.buffer(8);
    receive(&pair.near, 99, &[]);
    let write = |id| ibv_send_wr::write(id, &[], to.address(0), to.mr.rkey()).with_flags(SIGNALED);
    for id in 1..=20 {
        pair.post(write(id));
    }
    assert_eq!(try_post(&pair.near, write(21)), Err(libc::EIO));
    let event = pair
        .here
        .context
        .async_event()
        .expect("the device can be asked")
        .expect("the call blocks for an event");
    assert_eq!((event.kind, event.subject), (IBV_EVENT_DEVICE_FATAL, Subject::Device));
    let wcs: Vec<ibv_wc> = (0..21).map(|_| pair.here.completion()).collect();
    assert!(wcs[19].status().is_flushed() && wcs[20].wr_id == 99);
    assert!(pair.here.context.port_attr(1).is_err());
    let names: Vec<String> =
        verbs().devices().expect("a list").iter().map(|device| device.name()).collect();
    assert_eq!(names, ["fake1"]);
    // The other side gets no answer.
    post(&pair.far, &mut [ibv_send_wr::write(1, &[], 0, 0)]);
    assert_eq!(pair.there.completion().status, IBV_WC_RETRY_EXC_ERR);
    // All objects can still be destroyed.
    pair.near.close().expect("the queue pair can be destroyed");
    let channel = CompChannel::create(&pair.there.context).map(drop);
    assert!(channel.is_ok());
}

#[test]
fn a_short_break_of_the_link_is_survived() {
    if !scripted("a_short_break_of_the_link_is_survived", "linkdown=fake1@2000..2200") {
        return;
    }
    // Eight times 134 ms is longer than the interruption.
    let pair = Pair::with(64, |attr| attr.timeout = 15);
    let buffers = [&pair.here, &pair.there, &pair.there, &pair.here].map(|node| node.buffer(LEN));
    let context = &pair.there.context;
    context.set_async_nonblocking().expect("a descriptor");
    let begun = Instant::now();
    let mut events = Vec::new();
    while events.len() < 2 {
        assert!(begun.elapsed() < WATCHDOG);
        exchange(&pair, &buffers, 1);
        std::thread::sleep(Duration::from_millis(1));
        while let Some(event) = context.async_event().expect("the device can be asked") {
            assert_eq!(event.subject, Subject::Port(1));
            events.push(event.kind);
        }
    }
    assert_eq!(events, [IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE]);
    assert_eq!(context.port_attr(1).map(|port| port.state), Ok(IBV_PORT_ACTIVE));
}

#[test]
fn a_long_break_of_the_link_is_not() {
    if !scripted("a_long_break_of_the_link_is_not", "linkdown=fake0@50..100000,patience=1000s") {
        return;
    }
    let pair = Pair::with(64, |attr| attr.retry_cnt = 3);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(pair.here.context.port_attr(1).map(|port| port.state), Ok(IBV_PORT_DOWN));
    // From both sides: the near device has the broken link, the other one does not. The packets are
    // known to be lost, so the script's patience does not apply.
    for (node, qp) in [(&pair.here, &pair.near), (&pair.there, &pair.far)] {
        post(qp, &mut [ibv_send_wr::write(1, &[], 0, 0)]);
        let wc = node.completion();
        assert_eq!(wc.status, IBV_WC_RETRY_EXC_ERR, "{}", wc.status());
    }
}

#[test]
fn a_script_that_does_not_parse_gives_no_devices_and_says_why() {
    let test = "a_script_that_does_not_parse_gives_no_devices_and_says_why";
    if role().is_empty() {
        let words = pass(&mut child(test, "drop=lots", "test"));
        assert!(words.contains("`drop=lots`: `lots` is not a percentage"), "{words}");
        return;
    }
    assert_eq!(verbs().devices().expect("a list").iter().count(), 0);
}

#[test]
fn as_many_devices_as_the_script_says() {
    if !scripted("as_many_devices_as_the_script_says", "devices=5") {
        return;
    }
    let devices = verbs().devices().expect("a list");
    let mut gids = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        assert_eq!(device.name(), format!("fake{index}"));
        assert!(device.sysfs_path().join("ports/1/gids/1").is_file());
        let context = device.open().expect("the device opens");
        gids.push(
            context
                .gid(1, 1)
                .expect("the device has two GIDs")
                .ipv4()
                .expect("the GID maps IPv4")
                .octets(),
        );
        assert!(context.gid(1, 2).is_err());
        let context = std::sync::Arc::new(context);
        assert!(Cq::create(&context, 1, 0, None, 99).is_err());
    }
    assert_eq!(gids.last(), Some(&[127, 88, 0, 5]));
}
