//! Tests of the handles on real verbs devices. Soft-RoCE is enough. `cargo xtask test --rdma` runs
//! them.
//!
//! Each test connects two queue pairs of one device in one process. Every kind of request crosses
//! the connection, and the device rejects invalid requests.
//!
//! SAFETY comments refer to this rule as the *test contract*: posted lists are valid, and each test
//! waits for the completions of its requests before it drops their buffers and handles.

use std::ffi::c_void;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{
    Ah, Batch, CompChannel, Context, Cq, Gid, GidKind, Mr, Mw, Pd, Qp, QpConfig, Verbs, masks,
    next_rkey,
};

/// Emulated devices on a busy machine are slow, but only a hang takes this long.
const WATCHDOG: Duration = Duration::from_secs(60);

const REMOTE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
const ALL: u32 = IBV_ACCESS_LOCAL_WRITE | REMOTE | IBV_ACCESS_MW_BIND;

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn writes_reads_and_messages_cross() {
    let pair = Pair::connect(None);
    let (from, to) = (Buffer::new(&pair.pd, 1 << 20, ALL), Buffer::new(&pair.pd, 1 << 20, ALL));
    from.fill(7);

    // A chain of three requests with one completion. The last one carries an immediate.
    pair.receive(100);
    let pieces = [from.sge(0, 4096), from.sge(4096, 1 << 16), from.sge(1 << 19, 1)];
    let mut requests = [
        ibv_send_wr::write(1, &pieces[..2], to.address(0), to.mr.rkey()),
        ibv_send_wr::write(2, &pieces[2..], to.address(1 << 19), to.mr.rkey()),
        ibv_send_wr::write_with_immediate(3, &[], to.address(0), to.mr.rkey(), 0xfeed_0001)
            .with_flags(IBV_SEND_SIGNALED),
    ];
    ibv_send_wr::chain(&mut requests);
    pair.post(&mut requests);
    let (mut sent, mut received) = (None, None);
    while sent.is_none() || received.is_none() {
        let wc = pair.completion();
        assert!(wc.status().is_success(), "{}", wc.status());
        *(if wc.is_receive() { &mut received } else { &mut sent }) = Some(wc);
    }
    let received = received.expect("both completions arrived");
    assert_eq!((received.wr_id, received.immediate()), (100, Some(0xfeed_0001)));
    assert_eq!(received.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    assert_eq!(sent.expect("both completions arrived").wr_id, 3);
    assert!(to.holds(0, 4096 + (1 << 16), 7) && to.holds(1 << 19, 1, 7));
    assert!(to.holds(4096 + (1 << 16), 1, 0));

    // Read back into a third buffer, behind a fence.
    let back = Buffer::new(&pair.pd, 8192, ALL);
    let piece = [back.sge(0, 8192)];
    let read = ibv_send_wr::read(4, &piece, to.address(0), to.mr.rkey());
    pair.one(read.with_flags(IBV_SEND_SIGNALED | IBV_SEND_FENCE));
    let wc = pair.completion();
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (4, IBV_WC_RDMA_READ, IBV_WC_SUCCESS));
    assert!(back.holds(0, 8192, 7));

    // Inline bytes from memory that is not registered.
    let word = *b"inline";
    let sge = [ibv_sge { addr: word.as_ptr().addr() as u64, length: 6, lkey: 0 }];
    let write = ibv_send_wr::write(5, &sge, to.address(64), to.mr.rkey());
    pair.one(write.with_flags(IBV_SEND_SIGNALED | IBV_SEND_INLINE));
    assert_eq!(pair.completion().status, IBV_WC_SUCCESS);
    assert_eq!(to.read(64, 6), word);
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn a_wrong_key_fails_the_request_and_flushes_the_queue() {
    let pair = Pair::connect(None);
    let from = Buffer::new(&pair.pd, 4096, ALL);
    let to = Buffer::new(&pair.pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    let piece = [from.sge(0, 64)];
    let mut requests = [1, 2].map(|id| {
        let write = ibv_send_wr::write(id, &piece, to.address(0), to.mr.rkey());
        write.with_flags(IBV_SEND_SIGNALED)
    });
    ibv_send_wr::chain(&mut requests);
    pair.post(&mut requests);
    let first = pair.completion();
    assert_eq!((first.wr_id, first.status), (1, IBV_WC_REM_ACCESS_ERR), "{}", first.status());
    let second = pair.completion();
    assert!(second.wr_id == 2 && second.status().is_flushed(), "{}", second.status());
    let (attr, _) = pair.near.query(IBV_QP_STATE).expect("the query succeeds");
    assert_eq!(attr.qp_state, IBV_QPS_ERR);
    assert!(to.holds(0, 4096, 0));
}

#[test]
#[ignore = "needs RDMA devices with memory windows: cargo xtask test --rdma"]
fn a_window_opens_and_shuts() {
    let pair = Pair::connect(None);
    let attr = pair.pd.context().device_attr().expect("the query succeeds");
    let kinds = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    let device = pair.pd.context().name();
    assert!(attr.device_cap_flags & kinds != 0, "{device} has no memory windows of type 2");
    let from = Buffer::new(&pair.pd, 4096, ALL);
    from.fill(9);
    // Writable only locally and through windows.
    let to = Buffer::new(&pair.pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    let mw = Mw::alloc(&pair.pd).expect("the device has windows");
    let key = next_rkey(mw.rkey());
    let info = ibv_mw_bind_info::new(&to.mr, to.address(1024), 1024, IBV_ACCESS_REMOTE_WRITE);
    // The remote side binds the window and the local side writes.
    let bind = ibv_send_wr::bind_window(1, &mw, key, info).with_flags(IBV_SEND_SIGNALED);
    pair.far_one(bind);
    let wc = pair.completion();
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_SUCCESS), "{}", wc.status());

    let piece = [from.sge(0, 512)];
    let write =
        |id| ibv_send_wr::write(id, &piece, to.address(1024), key).with_flags(IBV_SEND_SIGNALED);
    pair.one(write(2));
    assert_eq!(pair.completion().status, IBV_WC_SUCCESS);
    assert!(to.holds(1024, 512, 9) && to.holds(0, 1024, 0));

    pair.far_one(ibv_send_wr::invalidate(3, key).with_flags(IBV_SEND_SIGNALED));
    assert_eq!(pair.completion().status, IBV_WC_SUCCESS);
    to.fill(0);
    pair.one(write(4));
    let wc = pair.completion();
    assert_eq!((wc.wr_id, wc.status), (4, IBV_WC_REM_ACCESS_ERR), "{}", wc.status());
    assert!(to.holds(0, 4096, 0));
    mw.close().expect("the window is not bound");
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn batches_write_read_and_send() {
    let operations = IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_SEND
        | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let pair = Pair::connect(Some(operations));
    let (from, to) = (Buffer::new(&pair.pd, 8192, ALL), Buffer::new(&pair.pd, 8192, ALL));
    from.fill(3);
    let (address, key) = (to.address(0), to.mr.rkey());
    pair.receive(50);
    pair.receive(51);
    // SAFETY: test contract, and this is the only batch.
    let mut batch = unsafe { Batch::start(&pair.near) }.expect("the queue pair is extended");
    let made = (|| {
        batch.write(1, 0, address, key)?;
        batch.sge(from.sge(0, 4096))?;
        batch.write_with_immediate(2, 0, address + 4096, key, 77)?;
        // Equal lengths: the soft-RoCE driver before rdma-core 64 uses the first length for all
        // pieces.
        batch.sge_list(&[from.sge(0, 512), from.sge(1000, 512)])?;
        batch.send_with_immediate(3, 0, 78)?;
        batch.sge_list(&[])?;
        batch.write(4, IBV_SEND_SIGNALED | IBV_SEND_INLINE, address + 6000, key)?;
        batch.inline_data(b"in line")
    })();
    made.expect("the queue pair supports all operations");
    batch.complete().expect("the queue has room");
    let mut seen: Vec<(u64, Option<u32>)> = (0..3)
        .map(|_| pair.completion())
        .map(|wc| {
            assert!(wc.status().is_success(), "{}", wc.status());
            (wc.wr_id, wc.immediate())
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [(4, None), (50, Some(77)), (51, Some(78))]);
    assert!(to.holds(0, 4096 + 1024, 3) && to.holds(5120, 800, 0));
    assert_eq!(to.read(6000, 7), *b"in line");

    // SAFETY: this is the only batch, and it posts nothing.
    let mut batch = unsafe { Batch::start(&pair.near) }.expect("the queue pair is extended");
    batch.write(9, IBV_SEND_SIGNALED, address, key).expect("the queue pair supports writes");
    drop(batch);
    // SAFETY: test contract, and this is the only batch.
    let mut batch = unsafe { Batch::start(&pair.near) }.expect("the lock is free again");
    batch.read(5, IBV_SEND_SIGNALED, address, key).expect("the queue pair supports reads");
    batch.sge(from.sge(4096, 4096)).expect("as before");
    batch.complete().expect("the queue has room");
    assert_eq!(pair.completion().wr_id, 5);
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn datagrams_go_where_their_address_says() {
    const KEY: u32 = 0x1111;
    /// The header that the device puts in front of a datagram.
    const HEADER: usize = size_of::<ibv_grh>();
    let context = Arc::new(open());
    let pd = Arc::new(Pd::alloc(&context).expect("one domain"));
    let cq = Arc::new(Cq::create(&context, 16, 0, None, 0).expect("one queue"));
    let cap = ibv_qp_cap {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let config =
        QpConfig { send_cq: &cq, recv_cq: &cq, cap, qp_type: IBV_QPT_UD, signal_all: true };
    let make = |operations: Option<u64>| {
        let qp = match operations {
            None => Qp::create(&pd, &config),
            Some(operations) => Qp::create_extended(&pd, &config, operations),
        };
        let qp = qp.expect("a queue pair");
        let mut attr = ibv_qp_attr { port_num: 1, qkey: KEY, ..ibv_qp_attr::zeroed() };
        let steps = [
            (IBV_QPS_INIT, masks::UD_INIT),
            (IBV_QPS_RTR, masks::UD_RTR),
            (IBV_QPS_RTS, masks::UD_RTS),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            qp.modify(&attr, mask).expect("the next state");
        }
        qp
    };
    let (plain, extended) = (make(None), make(Some(IBV_QP_EX_WITH_SEND_WITH_IMM)));

    let (index, gid) = address(&context);
    let mut attr = ibv_ah_attr { is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() };
    attr.dlid = context.port_attr(1).expect("port 1 exists").lid;
    attr.grh.dgid.raw = gid.raw;
    attr.grh.sgid_index = index;
    attr.grh.hop_limit = 64;
    let ah = Ah::create(&pd, &attr).expect("the device's own address");

    let (from, to) = (Buffer::new(&pd, 64, ALL), Buffer::new(&pd, 2 * (HEADER + 64), ALL));
    from.fill(5);
    let piece = [from.sge(0, 64)];
    for (receiver, at) in [(&extended, 0), (&plain, HEADER + 64)] {
        let room = [to.sge(at, (HEADER + 64) as u32)];
        // SAFETY: test contract.
        unsafe { receiver.post_recv(&mut ibv_recv_wr::new(at as u64, &room)) }.expect("room");
    }
    let mut send =
        ibv_send_wr::send_with_immediate(1, &piece, 6).to_datagram(&ah, extended.number(), KEY);
    // SAFETY: test contract.
    unsafe { plain.post_send(&mut send) }.expect("the queue has room");
    // SAFETY: test contract, and this is the only batch.
    let mut batch = unsafe { Batch::start(&extended) }.expect("the queue pair is extended");
    batch.send_with_immediate(2, IBV_SEND_SIGNALED, 7).expect("the queue pair supports sends");
    batch.to(&ah, plain.number(), KEY).expect("datagrams have addresses");
    batch.sge(piece[0]).expect("every request has local memory");
    batch.complete().expect("the queue has room");

    let mut received: Vec<(u32, Option<u32>, u32)> = (0..4)
        .map(|_| completion(&cq))
        .inspect(|wc| assert!(wc.status().is_success(), "{}", wc.status()))
        .filter(ibv_wc::is_receive)
        .map(|wc| (wc.src_qp, wc.immediate(), wc.byte_len))
        .collect();
    received.sort_unstable_by_key(|(_, immediate, _)| *immediate);
    let length = (HEADER + 64) as u32;
    assert_eq!(received, [(plain.number(), Some(6), length), (extended.number(), Some(7), length)]);
    assert!(to.holds(HEADER, 64, 5) && to.holds(HEADER + 64 + HEADER, 64, 5));
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn an_armed_queue_wakes_a_blocked_thread_once() {
    let pair = Pair::connect(None);
    let channel = pair.cq.channel().expect("the queue has a channel");
    channel.set_nonblocking().expect("a descriptor");
    assert_eq!(channel.event(), Ok(None));
    pair.cq.request_notify(false).expect("arming succeeds");
    pair.one(ibv_send_wr::write(1, &[], 0, 0).with_flags(IBV_SEND_SIGNALED));
    let mut waited =
        libc::pollfd { fd: channel.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry, with a descriptor of this process.
    let ready = unsafe { libc::poll(&mut waited, 1, WATCHDOG.as_millis() as i32) };
    assert_eq!(ready, 1);
    assert_eq!(channel.event(), Ok(Some(Pair::COOKIE)));
    assert_eq!(channel.event(), Ok(None));
    assert_eq!(pair.completion().wr_id, 1);
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn reported_device_attributes_are_plausible() {
    let context = open();
    let attr = context.device_attr_ex().expect("the query succeeds");
    assert!(attr.orig_attr.max_qp > 0 && attr.orig_attr.max_cqe > 0);
    assert_eq!(attr.orig_attr.max_mr, context.device_attr().expect("the query succeeds").max_mr);
    assert!(context.sysfs_path().join("ports/1").is_dir());
    assert!(context.completion_vectors() > 0);
    let port = context.port_attr(1).expect("port 1 exists");
    assert!(matches!(port.link_layer, IBV_LINK_LAYER_INFINIBAND | IBV_LINK_LAYER_ETHERNET));
    assert!((IBV_MTU_256..=IBV_MTU_4096).contains(&port.active_mtu));
    let error = context.port_attr(200).map(|_| ()).expect_err("no device has 200 ports");
    assert!(error.to_string().contains("port 200"), "{error}");
    let error = context.gid(1, 100_000).map(|_| ()).expect_err("no table is that long");
    assert!(error.to_string().contains("GID 100000"), "{error}");
    context.set_async_nonblocking().expect("a descriptor");
    assert_eq!(context.async_event(), Ok(None));

    let context = Arc::new(context);
    let error = Cq::create(&context, i32::MAX, 0, None, 0).map(drop).expect_err("too many entries");
    assert!(error.to_string().starts_with("ibv_create_cq on "), "{error}");
    let cq = Cq::create(&context, 16, 0, None, 0).expect("a small queue");
    assert!(cq.resize(64).is_ok_and(|entries| entries >= 64));
    let pd = Arc::new(Pd::alloc(&context).expect("one domain"));
    // SAFETY: nothing is mapped at this address, so the registration fails.
    let error = unsafe {
        Mr::register(&pd, std::ptr::without_provenance_mut(4096), 4096, IBV_ACCESS_LOCAL_WRITE)
    };
    let error = error.map(drop).expect_err("nothing is mapped there");
    assert_eq!(error.errno, libc::EFAULT, "{error}");
}

#[test]
#[ignore = "needs RDMA devices: cargo xtask test --rdma"]
fn a_child_that_drops_the_handles_leaves_the_parents_alone() {
    let pair = Pair::connect(None);
    let to = Buffer::new(&pair.pd, 4096, ALL);
    // SAFETY: the child drops its copies and exits without unwinding. Its code needs no lock that
    // another thread may hold, except the allocator's, which fork keeps usable.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((pair, to));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: waits for the child from the fork above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let word = *b"alive";
    let sge = [ibv_sge { addr: word.as_ptr().addr() as u64, length: 5, lkey: 0 }];
    let write = ibv_send_wr::write(1, &sge, to.address(0), to.mr.rkey());
    pair.one(write.with_flags(IBV_SEND_SIGNALED | IBV_SEND_INLINE));
    assert_eq!(pair.completion().status, IBV_WC_SUCCESS);
    assert_eq!(to.read(0, 5), word);
}

/// The first device whose first port is up.
fn open() -> Context {
    let verbs = Verbs::load(std::env::var_os("PEERWAY_IBV_SO")).expect("libibverbs is installed");
    let devices = verbs.devices().expect("the kernel has RDMA");
    let mut opened = devices.iter().filter_map(|device| device.open().ok());
    let up =
        opened.find(|context| context.port_attr(1).is_ok_and(|port| port.state == IBV_PORT_ACTIVE));
    up.expect("a device has an active port")
}

/// Two queue pairs of one device that are connected to each other.
struct Pair {
    near: Qp,
    far: Qp,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
}

impl Pair {
    const COOKIE: usize = 0xc0c0;

    fn connect(operations: Option<u64>) -> Self {
        let context = Arc::new(open());
        let pd = Arc::new(Pd::alloc(&context).expect("one domain"));
        let channel = Arc::new(CompChannel::create(&context).expect("one channel"));
        let cq = Cq::create(&context, 64, Self::COOKIE, Some(&channel), 0).expect("one queue");
        let cq = Arc::new(cq);
        let cap = ibv_qp_cap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: 64,
        };
        let config =
            QpConfig { send_cq: &cq, recv_cq: &cq, cap, qp_type: IBV_QPT_RC, signal_all: false };
        let make = || match operations {
            None => Qp::create(&pd, &config).expect("a queue pair"),
            Some(operations) => {
                Qp::create_extended(&pd, &config, operations).expect("an extended queue pair")
            }
        };
        let (near, far) = (make(), make());
        let (index, gid) = address(&context);
        let port = context.port_attr(1).expect("port 1 exists");
        bring_up(&near, &far, index, &gid, &port);
        bring_up(&far, &near, index, &gid, &port);
        Self { near, far, cq, pd }
    }

    fn post(&self, requests: &mut [ibv_send_wr]) {
        // SAFETY: test contract.
        unsafe { self.near.post_send(requests.as_mut_ptr()) }.expect("the queue has room");
    }

    fn one(&self, request: ibv_send_wr) {
        self.post(&mut [request]);
    }

    fn far_one(&self, mut request: ibv_send_wr) {
        // SAFETY: test contract.
        unsafe { self.far.post_send(&mut request) }.expect("the queue has room");
    }

    /// Posts a receive for one immediate on the remote side.
    fn receive(&self, id: u64) {
        // SAFETY: the request names no memory.
        unsafe { self.far.post_recv(&mut ibv_recv_wr::new(id, &[])) }.expect("the queue has room");
    }

    fn completion(&self) -> ibv_wc {
        completion(&self.cq)
    }
}

fn completion(cq: &Cq) -> ibv_wc {
    let mut into = [ibv_wc::zeroed()];
    let begun = Instant::now();
    while cq.poll(&mut into).expect("polling succeeds") == 0 {
        assert!(begun.elapsed() < WATCHDOG, "no completion arrived");
        std::thread::yield_now();
    }
    into[0]
}

/// The GID to use: RoCE v2 with an IPv4 address if there is one.
fn address(context: &Context) -> (u8, Gid) {
    let gids: Vec<(u8, Gid)> = (0..16u8)
        .filter_map(|index| Some((index, context.gid(1, u32::from(index)).ok()?)))
        .collect();
    let best = gids.iter().find(|(_, gid)| gid.kind == GidKind::RoceV2 && gid.ipv4().is_some());
    *best.or_else(|| gids.first()).expect("an active port has an address")
}

fn bring_up(qp: &Qp, peer: &Qp, sgid_index: u8, gid: &Gid, port: &ibv_port_attr) {
    let mut attr = ibv_qp_attr::zeroed();
    attr.port_num = 1;
    attr.qp_access_flags = REMOTE;
    attr.qp_state = IBV_QPS_INIT;
    qp.modify(&attr, masks::RC_INIT).expect("reset to initialised");

    attr.path_mtu = port.active_mtu;
    attr.dest_qp_num = peer.number();
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = 12;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.dlid = port.lid;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid.raw = gid.raw;
    attr.ah_attr.grh.sgid_index = sgid_index;
    attr.ah_attr.grh.hop_limit = 64;
    attr.qp_state = IBV_QPS_RTR;
    qp.modify(&attr, masks::RC_RTR).expect("to ready to receive");

    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 4;
    attr.qp_state = IBV_QPS_RTS;
    qp.modify(&attr, masks::RC_RTS).expect("to ready to send");
}

/// Registered memory that the test touches only through pointers. It is never freed, so it outlives
/// the region in all cases. The process belongs to the test.
struct Buffer {
    mr: Mr,
    start: *mut u8,
    len: usize,
}

impl Buffer {
    fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Self {
        let start = Box::into_raw(vec![0u8; len].into_boxed_slice()).cast::<u8>();
        let access = access | IBV_ACCESS_RELAXED_ORDERING;
        // SAFETY: the memory is never freed, and no reference to it is created.
        let mr = unsafe { Mr::register(pd, start.cast::<c_void>(), len, access) };
        Self { mr: mr.expect("registration succeeds"), start, len }
    }

    fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.len);
        (self.start.addr() + offset) as u64
    }

    fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        assert!(offset + length as usize <= self.len);
        ibv_sge { addr: self.address(offset), length, lkey: self.mr.lkey() }
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the range is the whole buffer, and no request on it is pending.
        unsafe { self.start.write_bytes(byte, self.len) };
    }

    fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.len);
        let byte = |at| {
            // SAFETY: `at` is inside the buffer. The read is volatile because the device wrote the
            // memory.
            unsafe { self.start.add(at).read_volatile() }
        };
        (offset..offset + length).map(byte).collect()
    }

    fn holds(&self, offset: usize, length: usize, byte: u8) -> bool {
        self.read(offset, length).iter().all(|found| *found == byte)
    }
}
