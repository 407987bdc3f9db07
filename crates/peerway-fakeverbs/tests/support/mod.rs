//! Shared parts of the tests. Each test runs in its own process, because a process reads its script
//! once.
#![allow(dead_code, unreachable_pub)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerway_fakeverbs::Stats;
use peerway_sys::efadv::Efa;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Ah, CompChannel, Context, Cq, Mr, Pd, Qp, QpConfig, Verbs, masks};

/// Longer than a busy machine needs, shorter than an endless hang.
pub const WATCHDOG: Duration = Duration::from_secs(180);

pub const REMOTE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
pub const ALL: u32 = IBV_ACCESS_LOCAL_WRITE | REMOTE;
pub const SIGNALED: u32 = IBV_SEND_SIGNALED;

const CHILD: &str = "PEERWAY_FAKEVERBS_TEST_CHILD";

/// Runs the test of this name in a process with this script. Returns true in that process, and
/// false here once it has passed.
pub fn scripted(test: &str, script: &str) -> bool {
    scripted_with(test, script, &[])
}

/// As [`scripted`], for an engine: the engine opens this library, and these variables are set.
pub fn scripted_with(test: &str, script: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = child(test, script, "test");
    child.env("PEERWAY_IBV_SO", library()).env("PEERWAY_EFA_SO", library());
    let status =
        child.envs(variables.iter().copied()).status().expect("the test program starts again");
    assert!(status.success(), "{test} with `{script}`: {status}");
    false
}

/// A process that runs a test in a role. The role `test` gets its own fabric.
pub fn child(test: &str, script: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test program has a path"));
    command.args(["--exact", test, "--include-ignored", "--nocapture"]).env(CHILD, role);
    command.env("PEERWAY_FAKE_VERBS", script);
    if role == "test" {
        let fabric = format!("{test}-{}", std::process::id());
        command.env("PEERWAY_FAKE_VERBS_FABRIC", &fabric[fabric.len().saturating_sub(30)..]);
    }
    command.stdin(Stdio::piped());
    command
}

/// The role of this process.
pub fn role() -> String {
    std::env::var(CHILD).unwrap_or_default()
}

/// A child process that is killed on drop.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The path of the library that was built with this test.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test program has a path");
    let deps = exe.parent().expect("the program is in a directory");
    let found = [deps, deps.parent().expect("the directory has a parent")]
        .map(|directory| directory.join("libpeerway_fakeverbs.so"));
    found.into_iter().find(|path| path.is_file()).expect("the library was built with this test")
}

pub fn verbs() -> Arc<Verbs> {
    Verbs::load(Some(library().into())).expect("the library exports every function")
}

pub fn efa() -> Arc<Efa> {
    Efa::load(Some(library().into())).expect("the library exports every function")
}

/// The library's counters.
pub fn stats() -> Stats {
    // SAFETY: the library is already loaded, and loading it runs no code.
    let library = unsafe { libloading::Library::new(library()) }.expect("the library is loaded");
    let mut stats = Stats::default();
    // SAFETY: the function has this type and fills the structure.
    unsafe {
        let read: libloading::Symbol<'_, unsafe extern "C" fn(*mut Stats)> =
            library.get(b"peerway_fakeverbs_stats\0").expect("the symbol is exported");
        read(&mut stats);
    }
    stats
}

pub fn open(name: &str) -> Arc<Context> {
    let devices = verbs().devices().expect("there is a list");
    let device =
        devices.iter().find(|device| device.name() == name).expect("the device is in the list");
    Arc::new(device.open().expect("the device opens"))
}

/// A device with the objects that queue pairs need.
pub struct Node {
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    pub cq: Arc<Cq>,
}

pub const COOKIE: usize = 0xc0c0;

impl Node {
    pub fn new(name: &str) -> Self {
        Self::with_entries(name, 4096)
    }

    pub fn with_entries(name: &str, entries: i32) -> Self {
        let context = open(name);
        let pd = Arc::new(Pd::alloc(&context).expect("one domain"));
        let channel = Arc::new(CompChannel::create(&context).expect("one channel"));
        channel.set_nonblocking().expect("a descriptor");
        let cq = Cq::create(&context, entries, COOKIE, Some(&channel), 0).expect("one queue");
        Self { context, pd, cq: Arc::new(cq) }
    }

    pub fn config(&self, depth: u32) -> QpConfig<'_> {
        let cap = ibv_qp_cap {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let (send_cq, recv_cq) = (&self.cq, &self.cq);
        QpConfig { send_cq, recv_cq, cap, qp_type: IBV_QPT_RC, signal_all: false }
    }

    pub fn qp(&self, depth: u32) -> Qp {
        Qp::create(&self.pd, &self.config(depth)).expect("a queue pair")
    }

    pub fn gid(&self) -> [u8; 16] {
        let index = u32::from(self.gid_index());
        self.context.gid(1, index).expect("the device has a GID").raw
    }

    pub fn gid_index(&self) -> u8 {
        u8::from(self.context.gid(1, 1).is_ok())
    }

    pub fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.pd, len, ALL)
    }

    pub fn ah(&self, gid: [u8; 16]) -> Ah {
        Ah::create(&self.pd, &self.ah_attr(gid)).expect("an address on the fabric")
    }

    pub fn ah_attr(&self, gid: [u8; 16]) -> ibv_ah_attr {
        let mut attr = ibv_ah_attr { is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() };
        attr.grh.dgid.raw = gid;
        attr.grh.sgid_index = self.gid_index();
        attr.grh.hop_limit = 64;
        attr
    }

    /// Brings a connection up to ready-to-send.
    pub fn connect(&self, qp: &Qp, gid: [u8; 16], number: u32) {
        self.connect_with(qp, gid, number, |_| {});
    }

    pub fn connect_with(
        &self,
        qp: &Qp,
        gid: [u8; 16],
        number: u32,
        change: impl FnOnce(&mut ibv_qp_attr),
    ) {
        let mut attr = ibv_qp_attr::zeroed();
        attr.port_num = 1;
        attr.qp_access_flags = REMOTE;
        attr.path_mtu = IBV_MTU_4096;
        attr.dest_qp_num = number;
        attr.max_dest_rd_atomic = 4;
        attr.max_rd_atomic = 4;
        attr.min_rnr_timer = 1;
        attr.ah_attr = self.ah_attr(gid);
        attr.timeout = 12;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.rq_psn = 77;
        attr.sq_psn = 77;
        change(&mut attr);
        let steps = [
            (IBV_QPS_INIT, masks::RC_INIT),
            (IBV_QPS_RTR, masks::RC_RTR),
            (IBV_QPS_RTS, masks::RC_RTS),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            qp.modify(&attr, mask).expect("the next state");
        }
    }

    /// Brings a datagram queue pair up to ready-to-send.
    pub fn bring_up(&self, qp: &Qp, qkey: u32) {
        let mut attr = ibv_qp_attr { port_num: 1, qkey, ..ibv_qp_attr::zeroed() };
        let steps = [
            (IBV_QPS_INIT, masks::UD_INIT),
            (IBV_QPS_RTR, masks::UD_RTR),
            (IBV_QPS_RTS, masks::UD_RTS),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            qp.modify(&attr, mask).expect("the next state");
        }
    }

    pub fn completion(&self) -> ibv_wc {
        completion(&self.cq)
    }

    /// Waits for `count` completions, which must all be successful.
    pub fn completions(&self, count: usize) -> Vec<ibv_wc> {
        let good = |wc: ibv_wc| {
            assert!(wc.status().is_success(), "{}: {}", wc.wr_id, wc.status());
            wc
        };
        (0..count).map(|_| good(self.completion())).collect()
    }

    pub fn nothing_comes(&self, within: Duration) {
        let begun = Instant::now();
        let mut into = [ibv_wc::zeroed()];
        while begun.elapsed() < within {
            assert_eq!(self.cq.poll(&mut into), Ok(0), "{:?}", into[0]);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub fn completion(cq: &Cq) -> ibv_wc {
    let mut into = [ibv_wc::zeroed()];
    let begun = Instant::now();
    while cq.poll(&mut into).expect("the queue can be polled") == 0 {
        assert!(begun.elapsed() < WATCHDOG, "no completion came");
        std::thread::yield_now();
    }
    into[0]
}

/// Two connected queue pairs, on two devices.
pub struct Pair {
    pub near: Qp,
    pub far: Qp,
    pub here: Node,
    pub there: Node,
}

impl Pair {
    pub fn new() -> Self {
        Self::with(64, |_| {})
    }

    pub fn with(depth: u32, change: impl Fn(&mut ibv_qp_attr)) -> Self {
        let (here, there) = (Node::new("fake0"), Node::new("fake1"));
        let (near, far) = (here.qp(depth), there.qp(depth));
        here.connect_with(&near, there.gid(), far.number(), &change);
        there.connect_with(&far, here.gid(), near.number(), &change);
        Self { near, far, here, there }
    }

    pub fn post(&self, request: ibv_send_wr) {
        post(&self.near, &mut [request]);
    }

    pub fn receive(&self, id: u64, pieces: &[ibv_sge]) {
        receive(&self.far, id, pieces);
    }
}

pub fn post(qp: &Qp, requests: &mut [ibv_send_wr]) {
    ibv_send_wr::chain(requests);
    // SAFETY: the chain is valid, and the tests never free their buffers.
    unsafe { qp.post_send(requests.as_mut_ptr()) }.expect("there is room");
}

/// The error number of a post.
pub fn try_post(qp: &Qp, mut request: ibv_send_wr) -> Result<(), i32> {
    // SAFETY: the request is a chain of one, and the tests never free their buffers.
    unsafe { qp.post_send(&mut request) }.map_err(|error| error.errno)
}

pub fn receive(qp: &Qp, id: u64, pieces: &[ibv_sge]) {
    // SAFETY: the tests never free their buffers.
    unsafe { qp.post_recv(&mut ibv_recv_wr::new(id, pieces)) }.expect("there is room");
}

pub fn state(qp: &Qp) -> u32 {
    qp.query(IBV_QP_STATE).expect("the query works").0.qp_state
}

/// Registered memory. It is accessed only through pointers and never freed.
pub struct Buffer {
    pub mr: Mr,
    pub start: *mut u8,
    pub len: usize,
}

impl Buffer {
    pub fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Self {
        let start = Box::into_raw(vec![0u8; len].into_boxed_slice()).cast::<u8>();
        // SAFETY: the memory is never freed, and no reference to it exists.
        let mr = unsafe { Mr::register(pd, start.cast::<c_void>(), len, access) };
        Self { mr: mr.expect("the memory can be registered"), start, len }
    }

    pub fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.len);
        (self.start.expose_provenance() + offset) as u64
    }

    pub fn sge(&self, offset: usize, length: usize) -> ibv_sge {
        assert!(offset + length <= self.len);
        ibv_sge { addr: self.address(offset), length: length as u32, lkey: self.mr.lkey() }
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: the range is the whole buffer, and no request uses it now.
        unsafe { self.start.write_bytes(byte, self.len) };
    }

    /// Fills the buffer so that every byte depends on its position.
    pub fn pattern(&self, seed: u8) {
        for at in 0..self.len {
            // SAFETY: `at` is inside the buffer, and no request uses it now.
            unsafe { self.start.add(at).write_volatile(pattern(seed, at)) };
        }
    }

    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: `at` is inside the buffer. The read is volatile, because the device writes the
        // memory.
        unsafe { self.start.add(at).read_volatile() }
    }

    pub fn word(&self, at: usize) -> u64 {
        assert!(at + 8 <= self.len && at.is_multiple_of(8));
        // SAFETY: the word is inside the buffer. The read is unaligned, because the buffer consists
        // of bytes.
        unsafe { self.start.add(at).cast::<u64>().read_unaligned() }
    }

    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        (offset..offset + length).map(|at| self.byte(at)).collect()
    }

    pub fn holds(&self, offset: usize, length: usize, byte: u8) -> bool {
        (offset..offset + length).all(|at| self.byte(at) == byte)
    }

    /// Whether `length` bytes, starting at `offset`, hold the pattern.
    pub fn has_pattern(&self, seed: u8, offset: usize, length: usize) -> bool {
        (offset..offset + length).all(|at| self.byte(at) == pattern(seed, at))
    }
}

pub fn pattern(seed: u8, at: usize) -> u8 {
    ((at ^ (at >> 8) ^ (at >> 16)) as u8).wrapping_add(seed)
}
