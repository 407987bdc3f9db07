//! The handles of `peerway-sys` on this library, behind a table that records successful calls and
//! fails others on demand.
//!
//! The library refuses to destroy an object that others use. A recorded destruction therefore
//! proves that it came after those of its users.

mod support;

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;
use std::sync::{Arc, LazyLock};

use peerway_sys::efadv::ffi::*;
use peerway_sys::efadv::{Efa, EfaSymbols};
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{
    Ah, Batch, CompChannel, Context, Cq, GidKind, Mr, Mw, Pd, Qp, QpConfig, Symbols, Verbs,
    VerbsError, masks,
};

use support::*;

thread_local! {
    /// The successful calls.
    static LOG: RefCell<Vec<&'static str>> = RefCell::default();
    /// The calls to fail, with their error numbers.
    static FAILURES: RefCell<Vec<(&'static str, i32)>> = RefCell::default();
}

/// The successful calls since the previous `log()`.
fn log() -> Vec<&'static str> {
    LOG.take()
}

/// Makes the next call of `name` fail with `errno`.
fn fail(name: &'static str, errno: i32) {
    FAILURES.with_borrow_mut(|failures| failures.push((name, errno)));
}

/// The result of a verb.
trait Outcome: PartialEq + Sized {
    const SUCCESS: Option<Self>;
    /// A failure whose error number is in `errno`.
    const FAILURE: Self;
}

impl Outcome for () {
    const SUCCESS: Option<Self> = Some(());
    const FAILURE: Self = ();
}

impl Outcome for c_int {
    const SUCCESS: Option<Self> = Some(0);
    const FAILURE: Self = -1;
}

impl<T> Outcome for *mut T {
    const SUCCESS: Option<Self> = None;
    const FAILURE: Self = ptr::null_mut();
}

fn record<T: Outcome>(name: &'static str, call: impl FnOnce() -> T) -> T {
    let failure = FAILURES.with_borrow_mut(|failures| {
        let at = failures.iter().position(|(failing, _)| *failing == name)?;
        Some(failures.remove(at).1)
    });
    if let Some(errno) = failure {
        // SAFETY: errno belongs to this thread.
        unsafe { *libc::__errno_location() = errno };
        return T::FAILURE;
    }
    let outcome = call();
    if T::SUCCESS.map_or(outcome != T::FAILURE, |success| outcome == success) {
        LOG.with_borrow_mut(|log| log.push(name));
    }
    outcome
}

static REAL: LazyLock<Symbols> = LazyLock::new(|| *verbs().symbols());

macro_rules! recorded {
    (
        required { $( fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?; )* }
        optional { $( fn $opt:ident($($opt_arg:ident: $opt_ty:ty),*) -> $opt_ret:ty; )* }
    ) => {
        $( unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the caller keeps the contract of libibverbs.
            record(stringify!($name), || unsafe { (REAL.$name)($($arg),*) })
        } )*
        $( unsafe extern "C" fn $opt($($opt_arg: $opt_ty),*) -> $opt_ret {
            let real = REAL.$opt.expect("the library exports it");
            // SAFETY: the caller keeps the contract of libibverbs.
            record(stringify!($opt), || unsafe { real($($opt_arg),*) })
        } )*

        /// The library's functions, but for those that came last.
        fn symbols() -> Symbols {
            Symbols {
                $( $name, )*
                $( $opt: Some($opt), )*
                ibv_reg_dmabuf_mr: None,
                ibv_query_qp_data_in_order: None,
                ..*REAL
            }
        }
    };
}

recorded! {
    required {
        fn ibv_close_device(context: *mut ibv_context) -> c_int;
        fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        fn ibv_ack_async_event(event: *mut ibv_async_event);
        fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
        fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
        fn ibv_reg_mr(pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr;
        fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
        fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int;
        fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
        fn ibv_get_cq_event(
            channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cookie: *mut *mut c_void
        ) -> c_int;
        fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint);
        fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
        fn ibv_query_qp(
            qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr
        ) -> c_int;
        fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
        fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
    }
    optional {
        fn ibv_reg_mr_iova2(
            pd: *mut ibv_pd, at: *mut c_void, len: usize, iova: u64, access: c_uint
        ) -> *mut ibv_mr;
        fn _ibv_query_gid_ex(
            context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry,
            flags: u32, size: usize
        ) -> c_int;
    }
}

fn open() -> Arc<Context> {
    // SAFETY: the functions are those of the library, which behave as documented.
    let verbs = unsafe { Verbs::from_symbols(symbols()) };
    let devices = verbs.devices().expect("there is a list");
    Arc::new(devices.iter().next().expect("there is a device").open().expect("the device opens"))
}

fn node() -> Node {
    Node::on(open(), 64)
}

/// The table around a context.
fn table(context: &Context) -> *mut verbs_context {
    context.as_ptr().wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
}

#[track_caller]
fn errno<T>(result: Result<T, VerbsError>) -> i32 {
    result.map(drop).expect_err("the call fails").errno
}

/// Registers 64 bytes that are never freed.
fn register(pd: &Arc<Pd>, access: c_uint) -> Mr {
    let memory = Box::leak(Box::new([0u8; 64])).as_mut_ptr();
    // SAFETY: the memory is never freed, and no reference to it exists.
    unsafe { Mr::register(pd, memory.cast(), 64, access) }.expect("the memory can be registered")
}

#[test]
fn an_address_is_made_and_given_back() {
    let node = node();
    let unknown = Ah::create(&node.pd, &node.ah_attr([7; 16]));
    assert_eq!(errno(unknown), libc::EHOSTUNREACH);
    let own = node.ah_attr(node.gid());
    log();
    drop(Ah::create(&node.pd, &own).expect("an address on the fabric"));
    assert_eq!(log(), ["ibv_create_ah", "ibv_destroy_ah"]);
}

#[test]
fn a_batch_is_posted_whole_or_aborted() {
    unsafe extern "C" fn no_abort(_: *mut ibv_qp_ex) {
        panic!("a batch was aborted after it had failed");
    }
    if !scripted("a_batch_is_posted_whole_or_aborted", "") {
        return;
    }
    let node = node();
    let operations = IBV_QP_EX_WITH_RDMA_WRITE;
    let qp = Qp::create_extended(&node.pd, &node.config(4), operations).expect("a queue pair");
    node.connect(&qp, node.gid(), qp.number());
    let (from, to) = (node.buffer(8), node.buffer(8));
    from.fill(3);
    // SAFETY: the tests never free their buffers, and there is never a second batch.
    let start = || unsafe { Batch::start(&qp) }.expect("it is extended");
    let mut batch = start();
    batch.write(1, SIGNALED, to.address(4), to.mr.rkey()).expect("it was made for writes");
    batch.sge(from.sge(0, 2)).expect("every request has local memory");
    assert!(batch.read(2, 0, 0, 0).is_err_and(|error| error.is_unsupported()));
    assert_eq!(stats().requests, 0);
    batch.complete().expect("there is room");
    assert_eq!(node.completions(1)[0].wr_id, 1);
    assert_eq!(to.read(0, 8), [0, 0, 0, 0, 3, 3, 0, 0]);

    let mut batch = start();
    batch.write(2, SIGNALED, to.address(0), to.mr.rkey()).expect("it was made for writes");
    drop(batch);

    // The library still holds the lock of an aborted batch unless it was told.
    let mut batch = start();
    // SAFETY: the queue pair is extended, and no other thread uses its table.
    unsafe { (*qp.as_ptr().cast::<ibv_qp_ex>()).wr_abort = Some(no_abort) };
    batch.sge(from.sge(0, 2)).expect("the mistake shows at the end");
    assert_eq!(errno(batch.complete()), libc::EINVAL);
    assert_eq!(stats().requests, 1);
}

#[test]
fn a_plain_queue_pair_has_no_batches() {
    let node = node();
    let qp = node.qp(4);
    // SAFETY: the call fails, so no batch starts.
    let refused = unsafe { Batch::start(&qp) }.map(drop);
    assert!(refused.is_err_and(|error| error.is_unsupported()));
}

#[test]
fn a_queue_is_polled_armed_and_resized_through_its_device() {
    if !scripted("a_queue_is_polled_armed_and_resized_through_its_device", "prompt") {
        return;
    }
    let node = node();
    let channel = Arc::new(CompChannel::create(&node.context).expect("a channel"));
    channel.set_nonblocking().expect("a descriptor");
    let cq = Cq::create(&node.context, 16, 0x77, Some(&channel), 0).expect("a queue");
    let cq = Arc::new(cq);
    assert_eq!((cq.entries(), cq.channel().is_some()), (16, true));
    assert_eq!((cq.resize(32), cq.entries()), (Ok(32), 32));

    let qp = Qp::create(&node.pd, &QpConfig { send_cq: &cq, ..node.config(8) });
    let qp = qp.expect("a queue pair");
    node.connect(&qp, node.gid(), qp.number());
    let mut into = [ibv_wc::zeroed(); 4];
    assert_eq!((cq.poll(&mut into), cq.request_notify(false)), (Ok(0), Ok(())));
    assert_eq!(channel.event(), Ok(None));
    let request = |id| ibv_send_wr::write(id, &[], 0, 0).with_flags(SIGNALED);
    post(&qp, &mut [3, 4, 5, 6, 7].map(request));
    assert_eq!(cq.poll(&mut into), Ok(4));
    assert_eq!(into.map(|wc| wc.wr_id), [3, 4, 5, 6]);
    assert_eq!(cq.poll(&mut into), Ok(1));
    log();
    assert_eq!(channel.event(), Ok(Some(0x77)));
    assert_eq!(log(), ["ibv_get_cq_event", "ibv_ack_cq_events"]);
    assert_eq!(channel.event(), Ok(None));

    drop((qp, node, channel));
    log();
    drop(cq);
    assert_eq!(log(), ["ibv_destroy_cq", "ibv_destroy_comp_channel", "ibv_close_device"]);
}

#[test]
fn refusals_of_queues_are_named() {
    let context = open();
    fail("ibv_create_comp_channel", libc::EMFILE);
    assert_eq!(errno(CompChannel::create(&context)), libc::EMFILE);
    let channel = Arc::new(CompChannel::create(&context).expect("a channel"));
    assert_eq!(errno(Cq::create(&context, 0, 0, None, 0)), libc::EINVAL);
    let cq = Cq::create(&context, 1, 0, Some(&channel), 0).expect("a queue");
    fail("ibv_resize_cq", libc::EOPNOTSUPP);
    assert!(cq.resize(9).is_err_and(|error| error.is_unsupported()));
    fail("ibv_get_cq_event", libc::EIO);
    assert_eq!(errno(channel.event()), libc::EIO);
    assert_eq!(errno(Cq::create(&open(), 1, 0, Some(&channel), 0)), libc::EINVAL);

    unsafe extern "C" fn poll_cq(_: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
        -libc::EIO
    }
    unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
        libc::EIO
    }
    // SAFETY: the context is open, and no other thread uses its table.
    let ops = unsafe { &mut (*context.as_ptr()).ops };
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq = Some(req_notify_cq);
    assert_eq!(errno(cq.poll(&mut [ibv_wc::zeroed()])), libc::EIO);
    assert_eq!(errno(cq.request_notify(true)), libc::EIO);
}

#[test]
fn device_attributes_are_read_and_refusals_are_named() {
    let context = open();
    assert_eq!(context.name(), "fake0");
    assert!(context.sysfs_path().ends_with("fake0") && context.sysfs_path().is_dir());
    assert_eq!(context.completion_vectors(), 4);
    let most = context.device_attr().expect("the device answers").max_qp;
    assert_eq!(context.device_attr_ex().map(|attr| attr.orig_attr.max_qp), Ok(most));
    assert!(most > 0);
    assert_eq!(context.port_attr(1).map(|attr| attr.state), Ok(IBV_PORT_ACTIVE));

    fail("ibv_query_device", libc::EIO);
    let error = context.device_attr().map(drop).expect_err("the call fails");
    assert_eq!((error.call, &*error.on, error.errno), ("ibv_query_device", "fake0", libc::EIO));
    let error = context.port_attr(9).map(drop).expect_err("there is one port");
    assert_eq!((&*error.on, error.errno), ("port 9 of fake0", libc::EINVAL));
}

#[test]
fn addresses_come_from_the_new_call_or_the_old_one() {
    let context = open();
    let gid = context.gid(1, 1).expect("the device has it");
    assert_eq!((gid.kind, gid.interface_index), (GidKind::RoceV2, 1));
    log();
    // Without the new call, the kind comes from the files of the device.
    fail("_ibv_query_gid_ex", libc::EOPNOTSUPP);
    assert_eq!(context.gid(1, 1), Ok(gid));
    assert!(log().is_empty());
    fail("_ibv_query_gid_ex", libc::ENODATA);
    let error = context.gid(1, 4).expect_err("the call fails");
    assert_eq!((&*error.on, error.errno), ("GID 4 of port 1 of fake0", libc::ENODATA));
}

#[test]
fn an_extended_context_is_asked_through_its_table_as_far_as_it_reaches() {
    unsafe extern "C" fn query_port(
        _: *mut ibv_context,
        _: u8,
        attr: *mut ibv_port_attr,
        size: usize,
    ) -> c_int {
        assert_eq!(size, size_of::<ibv_port_attr>());
        // SAFETY: the caller passes a structure of that size.
        unsafe { (*attr).link_layer = IBV_LINK_LAYER_INFINIBAND };
        0
    }

    let context = open();
    let table = table(&context);
    // SAFETY: the context is open and lies in a table that only this thread uses.
    let change = |size: usize, compat: usize| unsafe {
        (*table).query_port = Some(query_port);
        (*table).sz = size;
        (*table).context.abi_compat = ptr::without_provenance_mut(compat);
    };
    let link_layer = || context.port_attr(1).map(|attr| attr.link_layer);
    let ports = || context.device_attr_ex().map(|attr| attr.phys_port_cnt_ex);
    change(size_of::<verbs_context>(), usize::MAX);
    assert_eq!((link_layer(), ports()), (Ok(IBV_LINK_LAYER_INFINIBAND), Ok(1)));
    // One entry shorter: an older library, where the memory at that offset is not a function.
    change(size_of::<verbs_context>() - 8, usize::MAX);
    assert_eq!(link_layer(), Ok(IBV_LINK_LAYER_ETHERNET));
    change(size_of::<verbs_context>(), 0);
    assert_eq!((link_layer(), ports()), (Ok(IBV_LINK_LAYER_ETHERNET), Ok(0)));
    assert!(context.device_attr_ex().is_ok_and(|attr| attr.orig_attr.max_qp > 0));
}

#[test]
fn an_event_is_read_and_acknowledged_at_once() {
    let test = "an_event_is_read_and_acknowledged_at_once";
    if !scripted(test, "remove=fake0@1") {
        return;
    }
    let node = node();
    let (context, qp) = (&node.context, node.qp(4));
    node.connect(&qp, node.gid(), qp.number());
    post(&qp, &mut [ibv_send_wr::write(1, &[], 0, 0)]);
    log();
    let event = context.async_event().expect("no error").expect("the call blocks for an event");
    assert_eq!(event.to_string(), "device failed");
    assert_eq!(log(), ["ibv_get_async_event", "ibv_ack_async_event"]);
    context.set_async_nonblocking().expect("a descriptor");
    // SAFETY: this command only reads flags.
    let flags = unsafe { libc::fcntl(context.async_fd().as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0);
    assert_eq!(context.async_event(), Ok(None));
    fail("ibv_get_async_event", libc::EIO);
    assert_eq!(errno(context.async_event()), libc::EIO);
}

#[test]
fn teardown_is_children_first_in_whatever_order_they_are_dropped() {
    let context = open();
    let pd = Arc::new(Pd::alloc(&context).expect("a domain"));
    let (mr, mw) = (register(&pd, IBV_ACCESS_LOCAL_WRITE), Mw::alloc(&pd).expect("a window"));
    log();
    drop((context, pd));
    assert!(log().is_empty());
    drop(mr);
    assert_eq!(log(), ["ibv_dereg_mr"]);
    drop(mw);
    assert_eq!(log(), ["ibv_dealloc_pd", "ibv_close_device"]);
}

#[test]
fn a_refused_close_gives_the_handle_back() {
    let pd = Arc::new(Pd::alloc(&open()).expect("a domain"));
    let mr = register(&pd, 0);
    let keys = (mr.lkey(), mr.rkey());
    fail("ibv_dereg_mr", libc::EBUSY);
    let (mr, error) = mr.close().expect_err("the call fails");
    assert_eq!((error.call, error.errno), ("ibv_dereg_mr", libc::EBUSY));
    assert_eq!((mr.lkey(), mr.rkey()), keys);
    log();
    mr.close().expect("the second attempt succeeds");
    assert_eq!(log(), ["ibv_dereg_mr"]);
}

#[test]
fn optional_access_takes_the_call_that_knows_it() {
    let pd = Arc::new(Pd::alloc(&open()).expect("a domain"));
    log();
    let _relaxed = register(&pd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
    assert_eq!(log(), ["ibv_reg_mr_iova2"]);
    let _strict = register(&pd, IBV_ACCESS_LOCAL_WRITE);
    assert_eq!(log(), ["ibv_reg_mr"]);
}

#[test]
fn refusals_say_what_was_asked() {
    unsafe extern "C" fn alloc_mw(_: *mut ibv_pd, _: c_uint) -> *mut ibv_mw {
        // SAFETY: errno belongs to this thread.
        unsafe { *libc::__errno_location() = libc::EPERM };
        ptr::null_mut()
    }
    let context = open();
    fail("ibv_alloc_pd", libc::ENOMEM);
    assert_eq!(errno(Pd::alloc(&context)), libc::ENOMEM);
    let pd = Arc::new(Pd::alloc(&context).expect("a domain"));
    let place = ptr::without_provenance_mut(0x1000);
    fail("ibv_reg_mr", libc::ENOMEM);
    // SAFETY: the calls fail, so nothing is registered.
    let error = unsafe { Mr::register(&pd, place, 64, 0) }.map(drop).expect_err("the call fails");
    assert_eq!((&*error.on, error.errno), ("fake0 (64 bytes at 0x1000)", libc::ENOMEM));
    fail("ibv_reg_mr_iova2", libc::EINVAL);
    // SAFETY: as above.
    assert_eq!(errno(unsafe { Mr::register_at(&pd, place, 1, 0x10, 0) }), libc::EINVAL);
    // SAFETY: as above; the table lacks the call, so the descriptor is not used.
    let dmabuf = unsafe { Mr::register_dmabuf(&pd, BorrowedFd::borrow_raw(0), 0, 1, 0, 0) };
    assert!(dmabuf.is_err_and(|error| error.is_unsupported()));
    // SAFETY: the context is open, and no other thread uses its table.
    unsafe { (*context.as_ptr()).ops.alloc_mw = Some(alloc_mw) };
    assert_eq!(errno(Mw::alloc(&pd)), libc::EPERM);
}

#[test]
fn lists_are_posted_through_the_device_and_a_full_queue_names_the_first_left_out() {
    let test = "lists_are_posted_through_the_device_and_a_full_queue_names_the_first_left_out";
    if !scripted(test, "") {
        return;
    }
    let pair = Pair::with(4, |_| {});
    // The remote side has no receive, so the sends stay pending.
    let mut requests = [1, 2, 3].map(|id| ibv_send_wr::send(id, &[]));
    post(&pair.near, &mut requests);
    // SAFETY: the list is valid and names no memory.
    let error = unsafe { pair.near.post_send(requests.as_mut_ptr()) }.expect_err("room for one");
    assert_eq!((error.errno, error.rejected), (libc::ENOMEM, &raw mut requests[1]));

    let many = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 5];
    let mut receives = [ibv_recv_wr::new(4, &[]), ibv_recv_wr::new(5, &many)];
    ibv_recv_wr::chain(&mut receives);
    // SAFETY: the list is valid and names no memory.
    let error = unsafe { pair.near.post_recv(receives.as_mut_ptr()) }.expect_err("too many pieces");
    assert_eq!((error.errno, error.rejected), (libc::EINVAL, &raw mut receives[1]));
    assert_eq!(stats().receives, 1);
}

#[test]
fn modify_and_query_reach_the_driver_and_refusals_name_the_transition() {
    let node = node();
    let qp = node.qp(4);
    assert_eq!(qp.cap().max_send_wr, 4);
    // SAFETY: the queue pair exists.
    assert_eq!(qp.number(), unsafe { (*qp.as_ptr()).qp_num });
    let attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, ..ibv_qp_attr::zeroed() };
    qp.modify(&attr, masks::RC_INIT).expect("the next state");
    assert_eq!(state(&qp), IBV_QPS_INIT);
    fail("ibv_modify_qp", libc::EINVAL);
    let error = qp.modify(&attr, masks::RC_INIT).expect_err("the call fails").to_string();
    let number = qp.number();
    let start =
        format!("ibv_modify_qp on queue pair {number} of fake0 (to initialised): Invalid argument");
    assert!(error.starts_with(&start), "{error}");
    fail("ibv_query_qp", libc::EIO);
    assert_eq!(errno(qp.query(0)), libc::EIO);
    assert_eq!(qp.data_in_order(IBV_WR_RDMA_WRITE, 0), 0);
}

#[test]
fn a_queue_pair_goes_before_its_queues() {
    let node = node();
    let qp = node.qp(4);
    drop(node);
    log();
    drop(qp);
    let log = log();
    assert_eq!((log[0], log.last()), ("ibv_destroy_qp", Some(&"ibv_close_device")));
    assert!(log.contains(&"ibv_destroy_cq") && log.contains(&"ibv_dealloc_pd"), "{log:?}");
}

#[test]
fn a_queue_pair_that_cannot_be_created_is_refused() {
    let (node, other) = (node(), node());
    let qp = node.qp(4);
    fail("ibv_create_qp", libc::ENOMEM);
    assert_eq!(errno(Qp::create(&node.pd, &node.config(4))), libc::ENOMEM);
    let mixed = QpConfig { recv_cq: &other.cq, ..node.config(4) };
    assert_eq!(errno(Qp::create(&node.pd, &mixed)), libc::EINVAL);
    // SAFETY: the context is open, and no other thread uses its table.
    unsafe { (*other.context.as_ptr()).abi_compat = ptr::null_mut() };
    let extended = Qp::create_extended(&other.pd, &other.config(4), IBV_QP_EX_WITH_SEND);
    assert!(extended.is_err_and(|error| error.is_unsupported()));
    fail("ibv_destroy_qp", libc::EBUSY);
    let number = qp.number();
    let (qp, error) = qp.close().expect_err("the call fails");
    assert_eq!((qp.number(), error.errno), (number, libc::EBUSY));
}

#[test]
fn requests_name_their_window_and_their_address() {
    let node = node();
    let mw = Mw::alloc(&node.pd).expect("a window");
    let info = ibv_mw_bind_info { length: 64, ..ibv_mw_bind_info::zeroed() };
    let bind = ibv_send_wr::bind_window(1, &mw, 5, info);
    assert_eq!((bind.opcode, bind.bind_mw.mw, bind.bind_mw.rkey), (8, mw.as_ptr(), 5));
    assert_eq!(bind.bind_mw.bind_info.length, 64);

    let ah = node.ah(node.gid());
    let datagram = ibv_send_wr::send(1, &[])
        .to_datagram(&ah, 4, 5)
        .with_flags(IBV_SEND_SIGNALED | IBV_SEND_INLINE);
    // SAFETY: `to_datagram` initialises this field of the union.
    let target = unsafe { datagram.wr.ud };
    assert_eq!((target.ah, target.remote_qpn, target.remote_qkey), (ah.as_ptr(), 4, 5));
    assert_eq!(datagram.send_flags, 10);
}

type CreateQp = unsafe extern "C" fn(
    *mut ibv_context,
    *mut ibv_qp_init_attr_ex,
    *mut efadv_qp_init_attr,
    u32,
) -> *mut ibv_qp;

unsafe extern "C" fn create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    efa: *mut efadv_qp_init_attr,
    size: u32,
) -> *mut ibv_qp {
    // SAFETY: the caller passes two valid structures.
    let (full, own) = unsafe { (&*attr, &*efa) };
    assert_eq!((full.qp_type, full.comp_mask), (IBV_QPT_DRIVER, 0x41));
    assert_eq!((full.send_ops_flags, own.sl, size), (IBV_QP_EX_WITH_RDMA_WRITE, 8, 16));
    // SAFETY: the caller keeps the contract of the function, which has this type.
    unsafe { symbol::<CreateQp>("efadv_create_qp_ex")(context, attr, efa, size) }
}

#[test]
fn a_reliable_datagram_queue_pair_is_made_by_libefa_and_given_back_by_verbs() {
    let test = "a_reliable_datagram_queue_pair_is_made_by_libefa_and_given_back_by_verbs";
    if !scripted(test, "efa") {
        return;
    }
    // SAFETY: the functions of the library have these types.
    let table = unsafe {
        EfaSymbols {
            efadv_create_qp_ex: create_qp,
            efadv_query_device: symbol("efadv_query_device"),
            efadv_query_ah: Some(symbol("efadv_query_ah")),
        }
    };
    // SAFETY: the functions are those of the library, which behave as documented.
    let (efa, older) = unsafe {
        (Efa::from_symbols(table), Efa::from_symbols(EfaSymbols { efadv_query_ah: None, ..table }))
    };
    let node = node();
    let attr = efadv_qp_init_attr { sl: 8, ..efadv_qp_init_attr::zeroed() };
    let make = |depth| {
        efa.create_srd(&node.pd, &node.config(depth), IBV_QP_EX_WITH_RDMA_WRITE, &attr).map(drop)
    };
    log();
    make(4).expect("EFA devices have SRD queue pairs");
    assert_eq!(log(), ["ibv_destroy_qp"]);
    let most = efa.device_attr(&node.context).expect("the device answers").max_sq_wr;
    let error = make(most + 1).expect_err("more requests than the device supports");
    assert_eq!((error.call, error.errno), ("efadv_create_qp_ex", libc::EINVAL));

    let ah = node.ah(Node::new("fake1").gid());
    assert_eq!(efa.address_number(&ah), Ok(1));
    assert!(older.address_number(&ah).is_err_and(|error| error.is_unsupported()));
}
