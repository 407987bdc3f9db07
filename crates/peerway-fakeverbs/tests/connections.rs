//! Reliable connections on a fabric without faults, and the errors that a program can make.

mod support;

use std::os::fd::{AsFd as _, FromRawFd as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{AsyncEvent, Cq, Mr, Mw, Qp, QpConfig, Subject, masks, next_rkey};

use support::*;

#[test]
fn large_messages_cross_whole() {
    if !scripted("large_messages_cross_whole", "") {
        return;
    }
    let pair = Pair::new();
    let len = (1 << 20) + 12345;
    let (from, to, back) = (pair.here.buffer(len), pair.there.buffer(len), pair.here.buffer(len));
    from.pattern(3);
    let pieces = [from.sge(0, 70_000), from.sge(70_000, 1), from.sge(70_001, len - 70_001)];
    pair.receive(9, &[]);
    pair.post(
        ibv_send_wr::write_with_immediate(1, &pieces, to.address(0), to.mr.rkey(), 0xabcd)
            .with_flags(SIGNALED),
    );
    let wc = pair.there.completion();
    assert_eq!((wc.wr_id, wc.opcode), (9, IBV_WC_RECV_RDMA_WITH_IMM));
    assert_eq!((wc.byte_len as usize, wc.immediate()), (len, Some(0xabcd)));
    assert_eq!(wc.qp_num, pair.far.number());
    // The immediate arrives after the bytes.
    assert!(to.has_pattern(3, 0, len));
    let wc = pair.here.completion();
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (1, IBV_WC_RDMA_WRITE, IBV_WC_SUCCESS));

    let pieces = [back.sge(0, 100), back.sge(100, len - 100)];
    pair.post(ibv_send_wr::read(2, &pieces, to.address(0), to.mr.rkey()).with_flags(SIGNALED));
    let wc = pair.here.completion();
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (2, IBV_WC_RDMA_READ, IBV_WC_SUCCESS));
    assert_eq!(wc.byte_len as usize, len);
    assert!(back.has_pattern(3, 0, len));

    to.fill(0);
    pair.receive(10, &[to.sge(0, 10), to.sge(10, len - 10)]);
    pair.post(ibv_send_wr::send(3, &[from.sge(0, len)]).with_flags(SIGNALED));
    let wc = pair.there.completion();
    assert_eq!((wc.wr_id, wc.opcode, wc.byte_len as usize), (10, IBV_WC_RECV, len));
    assert!(to.has_pattern(3, 0, len));
    assert_eq!(pair.here.completion().wr_id, 3);
}

#[test]
fn two_hundred_thousand_small_writes_arrive_in_order() {
    if !scripted("two_hundred_thousand_small_writes_arrive_in_order", "") {
        return;
    }
    const WRITES: u64 = 200_000;
    /// Every request whose number is a multiple of this is signalled.
    const STRIDE: u64 = 32;
    let pair = Pair::with(256, |_| {});
    let to = pair.there.buffer(8);
    let (mut posted, mut done) = (0, 0);
    let mut last = 0;
    while done < WRITES {
        while posted < WRITES && posted - done + STRIDE <= 256 {
            let words: Vec<u64> = (posted + 1..=posted + STRIDE).collect();
            let pieces: Vec<[ibv_sge; 1]> = words
                .iter()
                .map(|word| {
                    let addr = std::ptr::from_ref(word).expose_provenance() as u64;
                    [ibv_sge { addr, length: 8, lkey: 0 }]
                })
                .collect();
            let mut requests: Vec<ibv_send_wr> = pieces
                .iter()
                .zip(&words)
                .map(|(piece, word)| {
                    let signal = if word % STRIDE == 0 { SIGNALED } else { 0 };
                    ibv_send_wr::write(*word, piece, to.address(0), to.mr.rkey())
                        .with_flags(IBV_SEND_INLINE | signal)
                })
                .collect();
            post(&pair.near, &mut requests);
            posted += STRIDE;
        }
        let wc = pair.here.completion();
        assert!(wc.status().is_success(), "{}", wc.status());
        assert_eq!(wc.wr_id, done + STRIDE);
        done = wc.wr_id;
        let word = to.word(0);
        assert!(word >= done && word >= last, "{word} after {last}, {done} done");
        last = word;
    }
    assert_eq!(to.word(0), WRITES);
    let stats = stats();
    assert_eq!((stats.requests, stats.signalled), (WRITES, WRITES / STRIDE));
    assert_eq!((stats.doorbells, stats.completions), (WRITES / STRIDE, WRITES / STRIDE));
    assert_eq!((stats.queue_pairs, stats.registrations), (2, 1));
    assert!(stats.polls >= stats.completions);
}

#[test]
fn every_kind_of_loopback_works() {
    if !scripted("every_kind_of_loopback_works", "") {
        return;
    }
    let here = Node::new("fake0");
    let (from, to) = (here.buffer(100_000), here.buffer(100_000));
    from.pattern(1);
    // A queue pair connected to itself, two of one context, two contexts of one device.
    let own = here.qp(8);
    here.connect(&own, here.gid(), own.number());
    let (one, two) = (here.qp(8), here.qp(8));
    here.connect(&one, here.gid(), two.number());
    here.connect(&two, here.gid(), one.number());
    for qp in [&own, &one] {
        to.fill(0);
        let piece = [from.sge(0, 100_000)];
        let write = ibv_send_wr::write(1, &piece, to.address(0), to.mr.rkey());
        post(qp, &mut [write.with_flags(SIGNALED)]);
        assert!(here.completion().status().is_success());
        assert!(to.has_pattern(1, 0, 100_000));
    }
    let other = Node::new("fake0");
    let (three, four) = (here.qp(8), other.qp(8));
    // By the link-local address this time.
    let gid = other.context.gid(1, 0).expect("the device has two GIDs").raw;
    here.connect(&three, gid, four.number());
    other.connect(&four, gid, three.number());
    let target = other.buffer(64);
    let piece = [from.sge(0, 64)];
    let write =
        ibv_send_wr::write(1, &piece, target.address(0), target.mr.rkey()).with_flags(SIGNALED);
    post(&three, &mut [write]);
    assert!(here.completion().status().is_success());
    assert!(target.has_pattern(1, 0, 64));
}

#[test]
fn a_forbidden_request_is_refused_and_flushes_both_sides() {
    if !scripted("a_forbidden_request_is_refused_and_flushes_both_sides", "") {
        return;
    }
    /// Posts one bad request between good ones. Returns its status, and whether the remote side
    /// failed.
    fn refused(bad: impl Fn(&Pair, &Buffer, &Buffer) -> ibv_send_wr) -> (u32, bool) {
        let pair = Pair::new();
        let (from, to) = (pair.here.buffer(4096), pair.there.buffer(4096));
        receive(&pair.near, 50, &[]);
        pair.receive(60, &[]);
        let piece = [from.sge(0, 8)];
        let good = |id| ibv_send_wr::write(id, &piece, to.address(0), to.mr.rkey());
        let mut requests = [good(1), bad(&pair, &from, &to), good(3)];
        requests[1].wr_id = 2;
        post(&pair.near, &mut requests);
        // The first request is not signalled; errors always are.
        let second = pair.here.completion();
        assert_eq!(second.wr_id, 2);
        let third = pair.here.completion();
        assert!(third.wr_id == 3 && third.status().is_flushed(), "{}", third.status());
        let receive = pair.here.completion();
        assert!(receive.wr_id == 50 && receive.status().is_flushed());
        assert_eq!(state(&pair.near), IBV_QPS_ERR);
        // Later posts are flushed too.
        pair.post(good(4));
        let fourth = pair.here.completion();
        assert!(fourth.wr_id == 4 && fourth.status().is_flushed());
        let mut far_failed = false;
        if second.status != IBV_WC_LOC_PROT_ERR {
            let wc = pair.there.completion();
            assert!(wc.wr_id == 60 && !wc.status().is_success());
            far_failed = state(&pair.far) == IBV_QPS_ERR;
        }
        (second.status, far_failed)
    }
    let access = (IBV_WC_REM_ACCESS_ERR, true);
    let wrong_key = refused(|_, from, to| {
        ibv_send_wr::write(2, leak([from.sge(0, 8)]), to.address(0), to.mr.rkey() ^ 0x100)
    });
    assert_eq!(wrong_key, access);
    let past_end = refused(|_, from, to| {
        ibv_send_wr::write(2, leak([from.sge(0, 8)]), to.address(4090), to.mr.rkey())
    });
    assert_eq!(past_end, access);
    let read_past_end = refused(|_, from, to| {
        ibv_send_wr::read(2, leak([from.sge(0, 8)]), to.address(4089), to.mr.rkey())
    });
    assert_eq!(read_past_end, access);
    let not_readable = refused(|pair, from, _| {
        let shut = Buffer::new(&pair.there.pd, 64, IBV_ACCESS_LOCAL_WRITE);
        let read = ibv_send_wr::read(2, leak([from.sge(0, 8)]), shut.address(0), shut.mr.rkey());
        std::mem::forget(shut);
        read
    });
    assert_eq!(not_readable, access);
    let too_long = refused(|_, from, _| ibv_send_wr::send(2, leak([from.sge(0, 8)])));
    assert_eq!(too_long, (IBV_WC_REM_INV_REQ_ERR, true));
    let local = refused(|_, from, to| {
        let piece = ibv_sge { lkey: from.mr.lkey() ^ 0x100, ..from.sge(0, 8) };
        ibv_send_wr::write(2, leak([piece]), to.address(0), to.mr.rkey())
    });
    assert_eq!(local, (IBV_WC_LOC_PROT_ERR, false));
    let local_read = refused(|pair, _, to| {
        let shut = Buffer::new(&pair.here.pd, 64, IBV_ACCESS_REMOTE_READ);
        let read = ibv_send_wr::read(2, leak([shut.sge(0, 8)]), to.address(0), to.mr.rkey());
        std::mem::forget(shut);
        read
    });
    assert_eq!(local_read, (IBV_WC_LOC_PROT_ERR, false));
}

/// Pieces that outlive their request.
fn leak(pieces: [ibv_sge; 1]) -> &'static [ibv_sge] {
    Box::leak(Box::new(pieces))
}

#[test]
fn states_take_what_they_need_and_nothing_else() {
    if !scripted("states_take_what_they_need_and_nothing_else", "") {
        return;
    }
    let node = Node::new("fake0");
    let qp = node.qp(4);
    let errno = |qp: &Qp, attr: &ibv_qp_attr, mask| qp.modify(attr, mask).map_err(|e| e.errno);
    let mut attr = ibv_qp_attr { port_num: 1, path_mtu: IBV_MTU_1024, ..ibv_qp_attr::zeroed() };
    attr.ah_attr = node.ah_attr(node.gid());
    attr.dest_qp_num = qp.number();
    attr.max_dest_rd_atomic = 1;
    attr.retry_cnt = 1;
    let piece = [];
    assert_eq!(try_post(&qp, ibv_send_wr::send(1, &piece)), Err(libc::EINVAL));
    let steps = [
        (IBV_QPS_INIT, masks::RC_INIT),
        (IBV_QPS_RTR, masks::RC_RTR),
        (IBV_QPS_RTS, masks::RC_RTS),
    ];
    for (next, mask) in steps {
        attr.qp_state = next;
        for bit in (0..26).map(|bit| 1 << bit).filter(|bit| mask & bit != 0 && *bit != 1) {
            assert_eq!(errno(&qp, &attr, mask & !bit), Err(libc::EINVAL), "without {bit:#x}");
        }
        assert_eq!(errno(&qp, &attr, mask | IBV_QP_QKEY), Err(libc::EINVAL));
        let before = state(&qp);
        let far =
            ibv_qp_attr { qp_state: if before == 0 { IBV_QPS_RTS } else { 1 + next }, ..attr };
        assert!(errno(&qp, &far, mask).is_err());
        assert_eq!(state(&qp), before);
        assert_eq!(errno(&qp, &attr, mask), Ok(()));
        assert_eq!(state(&qp), next);
    }
    let (found, made) = qp.query(IBV_QP_STATE).expect("the queue pair can be queried");
    assert_eq!((found.dest_qp_num, found.retry_cnt), (qp.number(), 1));
    assert_eq!((made.cap.max_send_wr, made.qp_type), (4, IBV_QPT_RC));
    // No GID, a bad index, an unknown device.
    attr.qp_state = IBV_QPS_RESET;
    assert_eq!(errno(&qp, &attr, IBV_QP_STATE), Ok(()));
    attr.qp_state = IBV_QPS_INIT;
    assert_eq!(errno(&qp, &attr, masks::RC_INIT), Ok(()));
    attr.qp_state = IBV_QPS_RTR;
    let change = |change: fn(&mut ibv_ah_attr)| {
        let mut changed = attr;
        change(&mut changed.ah_attr);
        errno(&qp, &changed, masks::RC_RTR)
    };
    assert_eq!(change(|ah| ah.is_global = 0), Err(libc::EINVAL));
    assert_eq!(change(|ah| ah.grh.sgid_index = 2), Err(libc::EINVAL));
    assert_eq!(change(|ah| ah.grh.dgid.raw = [7; 16]), Err(libc::EHOSTUNREACH));
}

#[test]
fn queues_have_the_room_they_were_made_with() {
    if !scripted("queues_have_the_room_they_were_made_with", "") {
        return;
    }
    let pair = Pair::with(4, |_| {});
    let buffer = pair.there.buffer(64);
    // The remote side has no receive yet, so the sends stay pending.
    for id in 0..4 {
        pair.post(ibv_send_wr::send_with_immediate(id, &[], id as u32).with_flags(SIGNALED));
    }
    assert_eq!(try_post(&pair.near, ibv_send_wr::send(4, &[])), Err(libc::ENOMEM));
    let mut chain = [ibv_send_wr::send(5, &[]), ibv_send_wr::send(6, &[])];
    ibv_send_wr::chain(&mut chain);
    // SAFETY: the chain is valid and names no memory.
    let error = unsafe { pair.near.post_send(chain.as_mut_ptr()) }.expect_err("the queue is full");
    assert_eq!((error.errno, error.rejected), (libc::ENOMEM, chain.as_mut_ptr()));
    for id in 0..4 {
        pair.receive(id, &[buffer.sge(0, 64)]);
    }
    // SAFETY: the receive names no memory.
    let full = unsafe { pair.far.post_recv(&mut ibv_recv_wr::new(9, &[])) };
    // The first receive may have been used by now.
    if let Err(error) = full {
        assert_eq!(error.errno, libc::ENOMEM);
    }
    let wcs = pair.here.completions(4);
    assert_eq!(wcs.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let wcs = pair.there.completions(4);
    assert_eq!(wcs.iter().filter_map(ibv_wc::immediate).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let many = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 5];
    assert_eq!(try_post(&pair.near, ibv_send_wr::send(1, &many)), Err(libc::EINVAL));
    let inline = [buffer.sge(0, 64), buffer.sge(0, 1)];
    let request = ibv_send_wr::send(1, &inline).with_flags(IBV_SEND_INLINE);
    assert_eq!(try_post(&pair.near, request), Err(libc::EINVAL));
}

#[test]
fn missing_receives_are_waited_for_as_often_as_was_asked() {
    if !scripted("missing_receives_are_waited_for_as_often_as_was_asked", "") {
        return;
    }
    let pair = Pair::with(4, |attr| attr.rnr_retry = 2);
    pair.post(ibv_send_wr::send(1, &[]));
    let wc = pair.here.completion();
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_RNR_RETRY_EXC_ERR));
    assert_eq!((state(&pair.near), state(&pair.far)), (IBV_QPS_ERR, IBV_QPS_RTS));

    let pair = Pair::new();
    let (from, to) = (pair.here.buffer(64), pair.there.buffer(64));
    from.pattern(1);
    let piece = [from.sge(0, 64)];
    pair.post(ibv_send_wr::write_with_immediate(1, &piece, to.address(0), to.mr.rkey(), 5));
    pair.post(ibv_send_wr::send(2, &[]).with_flags(SIGNALED));
    pair.here.nothing_comes(Duration::from_millis(100));
    pair.receive(7, &[]);
    pair.receive(8, &[]);
    let wcs = pair.there.completions(2);
    assert_eq!(wcs.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [7, 8]);
    assert!(to.has_pattern(1, 0, 64));
    assert_eq!(pair.here.completion().wr_id, 2);
}

#[test]
fn an_absent_peer_is_retry_exceeded() {
    if !scripted("an_absent_peer_is_retry_exceeded", "patience=1000s") {
        return;
    }
    // All packets are known to be lost, so the script's patience does not apply.
    let exceeded = |node: &Node, qp: &Qp| {
        post(qp, &mut [ibv_send_wr::write(1, &[], 0, 0)]);
        let wc = node.completion();
        assert_eq!(wc.status, IBV_WC_RETRY_EXC_ERR, "{}", wc.status());
    };
    let (here, there) = (Node::new("fake0"), Node::new("fake1"));
    // An unused number, a destroyed queue pair, one that is not ready, and one connected elsewhere.
    let qp = here.qp(4);
    here.connect(&qp, there.gid(), 0x00ff_ff00);
    exceeded(&here, &qp);
    let (qp, gone) = (here.qp(4), there.qp(4));
    here.connect(&qp, there.gid(), gone.number());
    drop(gone);
    exceeded(&here, &qp);
    let (qp, unready) = (here.qp(4), there.qp(4));
    here.connect(&qp, there.gid(), unready.number());
    exceeded(&here, &qp);
    let (qp, taken, other) = (here.qp(4), there.qp(4), here.qp(4));
    here.connect(&qp, there.gid(), taken.number());
    there.connect(&taken, here.gid(), other.number());
    exceeded(&here, &qp);
    // Both exist, but count from different numbers.
    for (sent, expected) in [(77, 70), (77, 1000), (77, 200_000)] {
        let (qp, far) = (here.qp(4), there.qp(4));
        here.connect_with(&qp, there.gid(), far.number(), |attr| attr.sq_psn = sent);
        there.connect_with(&far, here.gid(), qp.number(), |attr| attr.rq_psn = expected);
        exceeded(&here, &qp);
    }
}

#[test]
fn an_error_flushes_in_order_and_a_reset_forgets() {
    if !scripted("an_error_flushes_in_order_and_a_reset_forgets", "") {
        return;
    }
    let pair = Pair::new();
    let to_error = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() };
    for id in 0..5 {
        receive(&pair.near, 100 + id, &[]);
        // Without receives at the remote side the sends stay pending.
        pair.post(ibv_send_wr::send(id, &[]));
    }
    pair.near.modify(&to_error, IBV_QP_STATE).expect("the error state is reachable from any state");
    let ids: Vec<u64> = (0..10)
        .map(|_| pair.here.completion())
        .inspect(|wc| assert!(wc.status().is_flushed(), "{}", wc.status()))
        .map(|wc| wc.wr_id)
        .collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]);

    let reset = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..ibv_qp_attr::zeroed() };
    for qp in [&pair.near, &pair.far] {
        qp.modify(&reset, IBV_QP_STATE).expect("reset is reachable from any state");
    }
    pair.here.connect(&pair.near, pair.there.gid(), pair.far.number());
    pair.there.connect(&pair.far, pair.here.gid(), pair.near.number());
    for id in 0..3 {
        receive(&pair.near, id, &[]);
        pair.post(ibv_send_wr::send(id, &[]));
    }
    pair.near.modify(&reset, IBV_QP_STATE).expect("reset is reachable from any state");
    pair.here.nothing_comes(Duration::from_millis(50));
    // The queue pairs work again after a reset.
    pair.far.modify(&reset, IBV_QP_STATE).expect("reset is reachable from any state");
    pair.here.connect(&pair.near, pair.there.gid(), pair.far.number());
    pair.there.connect(&pair.far, pair.here.gid(), pair.near.number());
    pair.receive(1, &[]);
    pair.post(ibv_send_wr::send(1, &[]).with_flags(SIGNALED));
    assert!(pair.here.completion().status().is_success());
    assert!(pair.there.completion().status().is_success());
    drop(pair.near);
    drop(pair.far);
    assert_eq!(stats().queue_pairs, 0);
}

#[test]
fn events_come_once_per_arming() {
    if !scripted("events_come_once_per_arming", "") {
        return;
    }
    let pair = Pair::new();
    let channel = pair.there.cq.channel().expect("the queue has a channel");
    let wait = || {
        let begun = std::time::Instant::now();
        while begun.elapsed() < WATCHDOG {
            if let Some(cookie) = channel.event().expect("the channel can be read") {
                return cookie;
            }
            std::thread::yield_now();
        }
        panic!("no event came");
    };
    for id in 0..40 {
        pair.receive(id, &[]);
    }
    let send = |flags| pair.post(ibv_send_wr::send(1, &[]).with_flags(flags));
    // Not armed: no event.
    send(0);
    pair.there.completions(1);
    assert_eq!(channel.event(), Ok(None));
    pair.there.cq.request_notify(false).expect("the queue can be armed");
    for _ in 0..3 {
        send(0);
    }
    assert_eq!(wait(), COOKIE);
    pair.there.completions(3);
    assert_eq!(channel.event(), Ok(None));
    // Solicited completions only.
    pair.there.cq.request_notify(true).expect("the queue can be armed");
    send(0);
    pair.there.completions(1);
    assert_eq!(channel.event(), Ok(None));
    send(IBV_SEND_SOLICITED);
    assert_eq!(wait(), COOKIE);
    pair.there.completions(1);
    // No wake-up is lost: repeat arming and waiting a thousand times.
    for round in 0..1000 {
        pair.receive(round, &[]);
        pair.there.cq.request_notify(false).expect("the queue can be armed");
        send(SIGNALED);
        assert_eq!(wait(), COOKIE);
        pair.there.completions(1);
        pair.here.completions(1);
    }
    assert_eq!(channel.event(), Ok(None));
}

#[test]
fn a_queue_that_overruns_says_so() {
    if !scripted("a_queue_that_overruns_says_so", "") {
        return;
    }
    let here = Node::new("fake0");
    let small = Arc::new(Cq::create(&here.context, 2, 0x77, None, 0).expect("a small queue"));
    let config = QpConfig { send_cq: &small, ..here.config(8) };
    let qp = Qp::create(&here.pd, &config).expect("a queue pair");
    here.connect(&qp, here.gid(), qp.number());
    for id in 0..3 {
        post(&qp, &mut [ibv_send_wr::write(id, &[], 0, 0).with_flags(SIGNALED)]);
    }
    let event = here
        .context
        .async_event()
        .expect("the device can be asked")
        .expect("the call blocks for an event");
    let AsyncEvent { kind, subject, .. } = event;
    assert_eq!((kind, subject), (IBV_EVENT_CQ_ERR, Subject::Cq(0x77)));
    assert_eq!(small.poll(&mut [ibv_wc::zeroed(); 4]), Ok(2));
    let error = small.poll(&mut [ibv_wc::zeroed(); 4]).expect_err("the overrun queue fails");
    assert_eq!(error.errno, libc::EIO);
}

/// After a region is deregistered, no pending write changes its memory.
#[test]
fn memory_that_was_given_back_is_not_touched() {
    if !scripted("memory_that_was_given_back_is_not_touched", "") {
        return;
    }
    for round in 0..30u8 {
        let pair = Pair::new();
        let from = pair.here.buffer(256 << 10);
        from.fill(0xaa);
        let stop = AtomicBool::new(false);
        let target = Box::into_raw(vec![0u8; 256 << 10].into_boxed_slice()).cast::<u8>();
        // SAFETY: the memory is never freed, and is accessed only through pointers.
        let mr = unsafe { Mr::register(&pair.there.pd, target.cast(), 256 << 10, ALL) };
        let mr = mr.expect("the memory can be registered");
        let (address, rkey) = (target.expose_provenance() as u64, mr.rkey());
        std::thread::scope(|scope| {
            let piece = [from.sge(0, 256 << 10)];
            let (pair, stop) = (&pair, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let write = ibv_send_wr::write(1, &piece, address, rkey).with_flags(SIGNALED);
                    if try_post(&pair.near, write).is_ok() {
                        let wc = pair.here.completion();
                        if wc.status != IBV_WC_SUCCESS {
                            assert_eq!(wc.status, IBV_WC_REM_ACCESS_ERR, "{}", wc.status());
                            return;
                        }
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(500 + 100 * u64::from(round)));
            drop(mr);
            for at in (0..256 << 10).step_by(4096) {
                // SAFETY: `at` is inside the leaked memory. No device writes to it after the
                // deregistration.
                unsafe { target.add(at).write_volatile(0x55) };
            }
            std::thread::sleep(Duration::from_millis(5));
            for at in (0..256 << 10).step_by(4096) {
                // SAFETY: `at` is inside the leaked memory.
                assert_eq!(unsafe { target.add(at).read_volatile() }, 0x55);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn a_region_with_a_window_on_it_stays() {
    if !scripted("a_region_with_a_window_on_it_stays", "") {
        return;
    }
    let pair = Pair::new();
    let here = &pair.here;
    let buffer = Buffer::new(&here.pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    let mw = Mw::alloc(&here.pd).expect("the device has windows");
    let key = next_rkey(mw.rkey());
    let info = ibv_mw_bind_info::new(&buffer.mr, buffer.address(0), 64, IBV_ACCESS_REMOTE_READ);
    let (near, far) = (&pair.near, &pair.far);
    post(near, &mut [ibv_send_wr::bind_window(1, &mw, key, info).with_flags(SIGNALED)]);
    let wc = here.completions(1)[0];
    assert_eq!((wc.wr_id, wc.opcode), (1, IBV_WC_BIND_MW));
    let (mr, error) = buffer.mr.close().expect_err("a window is bound to the region");
    assert_eq!(error.errno, libc::EBUSY);
    // The key allows reads only; a write through it would end the connection.
    let answer = pair.there.buffer(64);
    let piece = [answer.sge(0, 64)];
    let address = buffer.start.expose_provenance() as u64;
    post(far, &mut [ibv_send_wr::read(2, &piece, address, key).with_flags(SIGNALED)]);
    pair.there.completions(1);
    let mut requests =
        [ibv_send_wr::invalidate(3, key), ibv_send_wr::send(4, &[]).with_flags(SIGNALED)];
    pair.receive(5, &[]);
    post(near, &mut requests);
    here.completions(1);
    pair.there.completions(1);
    mr.close().expect("no window is bound to the region");
    post(far, &mut [ibv_send_wr::read(6, &piece, address, key)]);
    assert_eq!(pair.there.completion().status, IBV_WC_REM_ACCESS_ERR);

    let pair = Pair::new();
    let shut = Buffer::new(&pair.here.pd, 4096, IBV_ACCESS_LOCAL_WRITE);
    let mw = Mw::alloc(&pair.here.pd).expect("the device has windows");
    let info = ibv_mw_bind_info::new(&shut.mr, shut.address(0), 64, IBV_ACCESS_REMOTE_READ);
    let bind = ibv_send_wr::bind_window(1, &mw, next_rkey(mw.rkey()), info);
    post(&pair.near, &mut [bind, ibv_send_wr::send(2, &[])]);
    assert_eq!(pair.here.completion().status, IBV_WC_MW_BIND_ERR);
    assert!(pair.here.completion().status().is_flushed());
}

#[test]
fn a_file_in_memory_stands_in_for_a_dma_buf() {
    if !scripted("a_file_in_memory_stands_in_for_a_dma_buf", "") {
        return;
    }
    use std::io::{Read as _, Seek as _};
    let pair = Pair::new();
    // SAFETY: memfd_create returns a new descriptor, which the file then owns.
    let mut file = unsafe {
        std::fs::File::from_raw_fd(libc::memfd_create(c"peerway-test".as_ptr(), libc::MFD_CLOEXEC))
    };
    file.set_len(64 << 10).expect("there is memory");
    let (offset, iova) = (5000, 0x7000_0000);
    // SAFETY: the program only reads the file.
    let mr =
        unsafe { Mr::register_dmabuf(&pair.there.pd, file.as_fd(), offset, 40_000, iova, ALL) };
    let mr = mr.expect("the file can be mapped");
    let from = pair.here.buffer(40_000);
    from.pattern(5);
    let piece = [from.sge(0, 40_000)];
    pair.post(ibv_send_wr::write(1, &piece, iova, mr.rkey()).with_flags(SIGNALED));
    pair.here.completions(1);
    mr.close().expect("the region can be deregistered");
    let mut bytes = vec![0; 40_000];
    file.seek(std::io::SeekFrom::Start(offset)).expect("the file is that long");
    file.read_exact(&mut bytes).expect("the file is that long");
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(5, at)));
}

#[test]
fn a_queue_pair_may_signal_everything() {
    if !scripted("a_queue_pair_may_signal_everything", "") {
        return;
    }
    let node = Node::new("fake0");
    let config = QpConfig { signal_all: true, ..node.config(8) };
    let qp = Qp::create(&node.pd, &config).expect("a queue pair");
    node.connect(&qp, node.gid(), qp.number());
    for id in 0..5 {
        post(&qp, &mut [ibv_send_wr::write(id, &[], 0, 0)]);
    }
    let ids: Vec<u64> = node.completions(5).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4]);
    assert_eq!((stats().signalled, stats().doorbells), (5, 5));
}

#[test]
fn many_threads_and_queue_pairs_share_a_device() {
    if !scripted("many_threads_and_queue_pairs_share_a_device", "") {
        return;
    }
    let (here, there) = (Node::new("fake0"), Node::new("fake1"));
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (here, there) = (&here, &there);
            scope.spawn(move || {
                for round in 0..20u8 {
                    // Queues and memory come and go while the other threads work.
                    let cq = Cq::create(&here.context, 64, 0, None, 0).expect("a queue");
                    let cq = Arc::new(cq);
                    let config = QpConfig { send_cq: &cq, recv_cq: &cq, ..here.config(64) };
                    let near = Qp::create(&here.pd, &config).expect("a queue pair");
                    let far = there.qp(64);
                    here.connect(&near, there.gid(), far.number());
                    there.connect(&far, here.gid(), near.number());
                    let (from, to) = (here.buffer(50_000), there.buffer(50_000));
                    from.pattern(thread ^ round);
                    let piece = [from.sge(0, 50_000)];
                    for id in 0..8 {
                        let write = ibv_send_wr::write(id, &piece, to.address(0), to.mr.rkey());
                        post(&near, &mut [write.with_flags(SIGNALED)]);
                    }
                    for id in 0..8 {
                        let wc = completion(&cq);
                        assert_eq!((wc.wr_id, wc.status), (id, IBV_WC_SUCCESS), "{}", wc.status());
                        assert_eq!(wc.qp_num, near.number());
                    }
                    assert!(to.has_pattern(thread ^ round, 0, 50_000));
                    // The queue pairs are destroyed with a pending request.
                    let write = ibv_send_wr::write(9, &piece, to.address(0), to.mr.rkey());
                    post(&near, &mut [write]);
                }
            });
        }
    });
    let stats = stats();
    assert_eq!((stats.queue_pairs, stats.requests), (0, 4 * 20 * 9));
    assert_eq!((stats.registrations, stats.deregistrations), (160, 160));
}

#[test]
fn reads_are_limited_and_fences_wait_for_them() {
    if !scripted("reads_are_limited_and_fences_wait_for_them", "latency=200us") {
        return;
    }
    let pair = Pair::with(64, |attr| attr.max_rd_atomic = 2);
    let (from, to) = (pair.there.buffer(1 << 18), pair.here.buffer(1 << 18));
    from.pattern(4);
    let piece = 1 << 14;
    for id in 0..16usize {
        let local = [to.sge(id * piece, piece)];
        let read = ibv_send_wr::read(id as u64, &local, from.address(id * piece), from.mr.rkey());
        post(&pair.near, &mut [read.with_flags(SIGNALED)]);
    }
    // The write is behind a fence, so the reads return the old bytes.
    let zero = pair.here.buffer(1 << 18);
    let local = [zero.sge(0, 1 << 18)];
    let write = ibv_send_wr::write(16, &local, from.address(0), from.mr.rkey());
    post(&pair.near, &mut [write.with_flags(SIGNALED | IBV_SEND_FENCE)]);
    let ids: Vec<u64> = pair.here.completions(17).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, (0..17).collect::<Vec<_>>());
    assert!(to.has_pattern(4, 0, 1 << 18) && from.holds(0, 1 << 18, 0));
}
