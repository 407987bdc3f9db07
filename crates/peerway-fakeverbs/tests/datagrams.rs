//! EFA's reliable datagrams, on a fabric without faults and on one with many.

mod support;

use std::collections::BTreeSet;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use peerway_sys::efadv::ffi::*;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Ah, Batch, Qp};

use support::*;

const KEY: u32 = 0x4242;
const OPERATIONS: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM;

/// A queue pair for reliable datagrams.
fn srd(node: &Node, depth: u32) -> Qp {
    let attr = efadv_qp_init_attr::zeroed();
    let qp = efa().create_srd(&node.pd, &node.config(depth), OPERATIONS, &attr);
    let qp = qp.expect("EFA devices have SRD queue pairs");
    node.bring_up(&qp, KEY);
    qp
}

struct Two {
    near: Qp,
    far: Qp,
    ah: Ah,
    here: Node,
    there: Node,
}

fn two(depth: u32) -> Two {
    let (here, there) = (Node::new("fake0"), Node::new("fake1"));
    let (near, far) = (srd(&here, depth), srd(&there, depth));
    let ah = here.ah(there.gid());
    Two { near, far, ah, here, there }
}

impl Two {
    fn write(&self, id: u64, piece: ibv_sge, address: u64, key: u32, immediate: Option<u32>) {
        // SAFETY: this is the only batch of the queue pair, and the tests never free their buffers.
        let mut batch = unsafe { Batch::start(&self.near) }.expect("the queue pair is extended");
        match immediate {
            None => batch.write(id, SIGNALED, address, key),
            Some(word) => batch.write_with_immediate(id, SIGNALED, address, key, word),
        }
        .and_then(|()| batch.to(&self.ah, self.far.number(), KEY))
        .and_then(|()| batch.sge(piece))
        .expect("the queue pair allows these operations");
        batch.complete().expect("there is room");
    }

    fn read(&self, id: u64, piece: ibv_sge, address: u64, key: u32) {
        // SAFETY: as in `write`.
        let mut batch = unsafe { Batch::start(&self.near) }.expect("the queue pair is extended");
        batch
            .read(id, SIGNALED, address, key)
            .and_then(|()| batch.to(&self.ah, self.far.number(), KEY))
            .and_then(|()| batch.sge(piece))
            .expect("the queue pair allows these operations");
        batch.complete().expect("there is room");
    }

    fn send(&self, id: u64, piece: ibv_sge, immediate: u32, qkey: u32) {
        // SAFETY: as in `write`.
        let mut batch = unsafe { Batch::start(&self.near) }.expect("the queue pair is extended");
        batch
            .send_with_immediate(id, SIGNALED, immediate)
            .and_then(|()| batch.to(&self.ah, self.far.number(), qkey))
            .and_then(|()| batch.sge(piece))
            .expect("the queue pair allows these operations");
        batch.complete().expect("there is room");
    }
}

#[test]
fn efa_devices_say_what_they_are() {
    if !scripted("efa_devices_say_what_they_are", "efa") {
        return;
    }
    let list = verbs().devices().expect("a list");
    let device = list.iter().next().expect("the first");
    assert_eq!(device.transport_type(), IBV_TRANSPORT_UNSPECIFIED);
    let node = Node::new("fake0");
    assert!(node.context.gid(1, 1).is_err());
    let attr = efa().device_attr(&node.context).expect("the device is an EFA device");
    let caps = EFADV_DEVICE_ATTR_CAPS_RDMA_READ
        | EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE
        | EFADV_DEVICE_ATTR_CAPS_RNR_RETRY;
    assert_eq!(attr.device_caps, caps);
    let refused = Qp::create(&node.pd, &node.config(4)).map(drop).expect_err("no connections");
    assert_eq!(refused.errno, libc::EOPNOTSUPP);
    assert_eq!(efa().address_number(&node.ah(node.gid())), Ok(0));
}

#[test]
fn other_devices_are_not_efa() {
    if !scripted("other_devices_are_not_efa", "") {
        return;
    }
    let node = Node::new("fake0");
    assert!(efa().device_attr(&node.context).is_err_and(|error| error.is_unsupported()));
    let attr = efadv_qp_init_attr::zeroed();
    let refused = efa().create_srd(&node.pd, &node.config(4), OPERATIONS, &attr).map(drop);
    assert!(refused.is_err_and(|error| error.is_unsupported()));
}

#[test]
fn writes_reads_and_messages_cross() {
    if !scripted("writes_reads_and_messages_cross", "efa") {
        return;
    }
    let two = two(16);
    let len = 300_000;
    let (from, to, back) = (two.here.buffer(len), two.there.buffer(len), two.here.buffer(len));
    from.pattern(1);
    receive(&two.far, 5, &[]);
    two.write(1, from.sge(0, len), to.address(0), to.mr.rkey(), Some(0x1234));
    let wc = two.there.completion();
    assert!(wc.status().is_success() && to.has_pattern(1, 0, len));
    assert_eq!((wc.wr_id, wc.opcode), (5, IBV_WC_RECV_RDMA_WITH_IMM));
    assert_eq!((wc.immediate(), wc.byte_len as usize), (Some(0x1234), len));
    assert_eq!((wc.src_qp, wc.slid), (two.near.number(), 0));
    let wc = two.here.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE));

    two.read(2, back.sge(0, len), to.address(0), to.mr.rkey());
    let wc = two.here.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (2, IBV_WC_SUCCESS, IBV_WC_RDMA_READ));
    assert!(back.has_pattern(1, 0, len));

    // No receive is posted yet: the send waits for it.
    two.send(3, from.sge(0, 100), 9, KEY);
    two.here.nothing_comes(Duration::from_millis(50));
    to.fill(0);
    receive(&two.far, 6, &[to.sge(0, 100)]);
    let wc = two.there.completion();
    assert_eq!((wc.wr_id, wc.opcode, wc.byte_len), (6, IBV_WC_RECV, 100));
    assert!(to.has_pattern(1, 0, 100) && wc.immediate() == Some(9));
    assert!(two.here.completion().status().is_success());

    // Through structures, as libibverbs allows for sends.
    receive(&two.far, 7, &[to.sge(0, 100)]);
    let piece = [from.sge(0, 8)];
    let send = ibv_send_wr::send(4, &piece).to_datagram(&two.ah, two.far.number(), KEY);
    post(&two.near, &mut [send.with_flags(SIGNALED)]);
    assert_eq!(two.there.completion().wr_id, 7);
    assert_eq!(two.here.completion().wr_id, 4);
}

#[test]
fn one_request_fails_and_the_others_go_on() {
    if !scripted("one_request_fails_and_the_others_go_on", "efa,patience=1000s") {
        return;
    }
    let two = two(16);
    let (from, to) = (two.here.buffer(4096), two.there.buffer(4096));
    from.pattern(2);
    let (address, key) = (to.address(0), to.mr.rkey());
    two.write(1, from.sge(0, 8), address, key, None);
    two.write(2, from.sge(0, 8), address, key ^ 0x100, None);
    two.read(3, from.sge(8, 16), to.address(4090), key);
    two.write(4, ibv_sge { lkey: 1, ..from.sge(0, 8) }, address, key, None);
    two.send(5, from.sge(0, 8), 0, KEY ^ 1);
    // A queue pair that does not exist.
    let nobody = ibv_send_wr::send(6, &[]).to_datagram(&two.ah, 0x00ff_fff0, KEY);
    post(&two.near, &mut [nobody.with_flags(SIGNALED)]);
    two.write(7, from.sge(0, 4096), address, key, None);
    let mut ends: Vec<(u64, u32)> =
        (0..7).map(|_| two.here.completion()).map(|wc| (wc.wr_id, wc.status)).collect();
    ends.sort_unstable();
    let expected = [
        (1, IBV_WC_SUCCESS),
        (2, IBV_WC_REM_ACCESS_ERR),
        (3, IBV_WC_REM_ACCESS_ERR),
        (4, IBV_WC_LOC_PROT_ERR),
        (5, IBV_WC_RESP_TIMEOUT_ERR),
        (6, IBV_WC_RESP_TIMEOUT_ERR),
        (7, IBV_WC_SUCCESS),
    ];
    assert_eq!(ends, expected);
    assert_eq!((state(&two.near), state(&two.far)), (IBV_QPS_RTS, IBV_QPS_RTS));
    assert!(to.has_pattern(2, 0, 4096));
}

/// Checks that each immediate arrives once, after its own bytes. Returns whether they arrived in
/// order.
fn shuffle(rounds: u32) -> bool {
    let two = two(64);
    const LEN: usize = 40_000;
    let (from, to) = (two.here.buffer(LEN), two.there.buffer(LEN * 64));
    let back = two.here.buffer(LEN);
    let mut in_order = true;
    for round in 0..rounds {
        from.pattern(round as u8);
        to.fill(0);
        let mut wanted = BTreeSet::new();
        for id in 0..32 {
            receive(&two.far, id, &[]);
            let place = to.address(id as usize * LEN);
            two.write(id, from.sge(0, LEN), place, to.mr.rkey(), Some(id as u32));
            wanted.insert(id as u32);
        }
        two.read(1000, back.sge(0, LEN), to.address(0), to.mr.rkey());
        let mut last = 0;
        for wc in two.there.completions(32) {
            let word = wc.immediate().expect("every completion has an immediate");
            assert!(wanted.remove(&word), "{word} came twice");
            let start = word as usize * LEN;
            let whole = (0..LEN).all(|at| to.byte(start + at) == pattern(round as u8, at));
            assert!(whole, "{word} came before its bytes");
            in_order &= word >= last;
            last = word;
        }
        two.here.completions(33);
    }
    in_order
}

#[test]
fn requests_overtake_each_other_and_arrive_once() {
    if !scripted("requests_overtake_each_other_and_arrive_once", "efa,seed=2,reorder=20%") {
        return;
    }
    assert!(!shuffle(5), "no request overtook another");
}

#[test]
fn everything_at_once() {
    let script = "efa,seed=9,drop=3%,reorder=20%,rnr=10%,late=20%,latency=20us,delay=500us";
    if !scripted("everything_at_once", script) {
        return;
    }
    shuffle(5);
}

#[test]
fn garbage_is_passed_over() {
    if !scripted("garbage_is_passed_over", "efa") {
        return;
    }
    let two = two(16);
    let fabric = std::env::var("PEERWAY_FAKE_VERBS_FABRIC").expect("the test sets the fabric");
    let name = format!("peerway-fakeverbs/{fabric}/1/{:06x}", two.far.number());
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let stranger = UnixDatagram::unbound().expect("a socket");
    let (from, to) = (two.here.buffer(64), two.there.buffer(64));
    for length in 0..200 {
        let bytes: Vec<u8> = (0..length).map(|at| pattern(length as u8, at)).collect();
        stranger.send_to_addr(&bytes, &address).expect("the queue pair's socket exists");
        two.write(1, from.sge(0, 64), to.address(0), to.mr.rkey(), None);
        two.here.completions(1);
    }
    assert_eq!(state(&two.far), IBV_QPS_RTS);
}

#[test]
fn a_queue_pair_that_fails_flushes_all_of_it() {
    if !scripted("a_queue_pair_that_fails_flushes_all_of_it", "efa,flush_after=5") {
        return;
    }
    let two = two(16);
    let (from, to) = (two.here.buffer(64), two.there.buffer(64));
    for id in 1..=8 {
        two.write(id, from.sge(0, 64), to.address(0), to.mr.rkey(), None);
    }
    let wcs: Vec<ibv_wc> = (0..8).map(|_| two.here.completion()).collect();
    let good = wcs.iter().filter(|wc| wc.status().is_success()).count();
    let flushed = wcs.iter().filter(|wc| wc.status().is_flushed()).count();
    assert!(good < 5 && good + flushed == 8, "{good} good, {flushed} flushed");
    assert_eq!(state(&two.near), IBV_QPS_ERR);
}
