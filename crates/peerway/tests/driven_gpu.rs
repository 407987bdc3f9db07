//! The GPU-driven engine on GPU memory, on any CUDA driver. On a GPU, kernels push commands. On the
//! stand-in, CPU threads push them, and the same copies move its memory.

mod on_gpu;

use std::ffi::c_void;
use std::time::{Duration, Instant};

use peerway::driven::{FaultCode, Forward, KERNELS, Proxy, Window};
use peerway::gpu::{CopierKind, DeviceMemory, DeviceMemoryOptions};
use peerway::{Endpoint, Peer, Region};
use peerway_sys::Library;
use peerway_sys::cuda::{Cuda, Gpu, Grid, Module, Stream};

use on_gpu::require_gpu;

const LEN: u64 = 4 << 20;

/// Fails without a GPU that runs kernels. The stand-in does not run these kernels.
fn require_kernels() {
    require_gpu();
    assert!(std::env::var_os("PEERWAY_FAKE_CUDA").is_none(), "the stand-in does not run kernels");
}

/// A proxy whose peer 0 is another endpoint of this process. Each side has a window of GPU memory.
struct Two {
    _endpoints: [Endpoint; 2],
    ours: Proxy,
    theirs: Proxy,
    regions: [Region; 2],
    from: Window,
    to: Window,
    back: Peer,
}

impl Two {
    fn new(copier: CopierKind, kernels: bool) -> Self {
        let endpoints = [Endpoint::new().unwrap(), Endpoint::new().unwrap()];
        let mut builder = Proxy::builder(&endpoints[0]).threads(2).rings(4).copier(copier);
        if kernels {
            builder = builder.gpu(0);
        }
        let ours = builder.timeout(Duration::from_secs(5)).build().unwrap();
        let theirs = Proxy::builder(&endpoints[1]).threads(1).copier(copier).build().unwrap();
        let regions = [0, 1].map(|at: usize| endpoints[at].allocate_gpu(0, LEN).unwrap());
        let from = ours.window(&regions[0]).unwrap();
        theirs.window(&regions[1]).unwrap();
        let there = endpoints[0].connect(&endpoints[1].metadata()).unwrap();
        let back = endpoints[1].connect(&endpoints[0].metadata()).unwrap();
        let to = ours.add_peer(0, &there, &theirs.peer_info().unwrap()).unwrap()[0];
        theirs.add_peer(0, &back, &ours.peer_info().unwrap()).unwrap();
        Self { _endpoints: endpoints, ours, theirs, regions, from, to, back }
    }
}

fn contents(region: &Region, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(at, &mut bytes).unwrap();
    bytes
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed) as u8).collect()
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn puts_between_gpu_memories_arrive_whole_with_every_copier() {
    require_gpu();
    for copier in CopierKind::ALL {
        let two = Two::new(copier, false);
        let _armed = two.ours.arm();
        let bytes = pattern(7, LEN as usize);
        two.regions[0].write_at(0, &bytes).unwrap();
        two.regions[1].fill(0, LEN, 0xee).unwrap();
        let producer = two.ours.host_producer(1).unwrap();
        let (mut at, mut step, mut counted) = (64, 4, 0u64);
        while at + step + 64 < LEN {
            let (dst, src) = (two.to.base + at, two.from.base + at);
            if counted % 3 == 0 {
                producer.put_with_count(0, dst, src, step, 5).unwrap();
            } else {
                producer.put(0, dst, src, step).unwrap();
            }
            counted += 1;
            at += step;
            step = (step * 3 / 2 + 4) / 4 * 4 % (1 << 19);
            step = step.max(4);
        }
        producer.quiet(0).unwrap();
        let end = at as usize;
        let got = contents(&two.regions[1], 0, LEN as usize);
        assert!(got[..64] == [0xee; 64] && got[end..].iter().all(|byte| *byte == 0xee), "{copier}");
        assert!(got[64..end] == bytes[64..end], "{copier}: the written bytes");
        assert_eq!(two.theirs.counter(5), counted.div_ceil(3), "{copier}");
        let stats = two.ours.stats();
        assert_eq!((stats.faults, stats.puts), (0, counted), "{copier}");
        assert!(stats.requests > 0, "{copier}: a GPU must copy");
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn each_count_comes_after_its_bytes() {
    require_gpu();
    for copier in CopierKind::ALL {
        let two = Two::new(copier, false);
        let _armed = two.ours.arm();
        let producer = two.ours.host_producer(0).unwrap();
        for round in 1..=50u64 {
            let len = 4096 * (1 + round % 20);
            let bytes = pattern(round, len as usize);
            two.regions[0].write_at(0, &bytes).unwrap();
            producer.put_with_count(0, two.to.base, two.from.base, len, 9).unwrap();
            let seen = two.theirs.wait_counter(9, round, Duration::from_secs(10));
            assert_eq!(seen, round, "{copier}");
            assert!(contents(&two.regions[1], 0, len as usize) == bytes, "{copier}, {round}");
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn arrivals_go_on_to_several_memories_of_gpus_and_the_host() {
    require_gpu();
    for copier in CopierKind::ALL {
        let two = Two::new(copier, false);
        let experts = [
            two._endpoints[1].allocate_gpu(0, 65_536).unwrap(),
            two._endpoints[1].allocate_gpu(0, 65_536).unwrap(),
            two._endpoints[1].register(vec![0; 65_536]).unwrap(),
        ];
        let mut rule = Forward::new(3, two.regions[1].slice(0..65_536)).answer(0, 8);
        for expert in &experts {
            rule = rule.to(expert.all());
        }
        two.theirs.forward(rule).unwrap();
        let _armed = [two.ours.arm(), two.theirs.arm()];
        let producer = two.ours.host_producer(0).unwrap();
        for round in 1..=20u64 {
            let bytes = pattern(round, 65_536);
            two.regions[0].write_at(0, &bytes).unwrap();
            producer.put_with_count(0, two.to.base, two.from.base, 65_536, 3).unwrap();
            producer.wait_counter(8, round, Some(0)).unwrap();
            for expert in &experts {
                assert!(contents(expert, 0, 65_536) == bytes, "{copier}, {round}");
            }
        }
        assert!(two.back.is_alive());
    }
}

#[test]
#[ignore = "needs a GPU: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_window_whose_memory_was_freed_fails_its_commands_and_nothing_else() {
    require_gpu();
    for copier in CopierKind::ALL {
        let two = Two::new(copier, false);
        let memory = DeviceMemory::allocate(0, 65_536, &DeviceMemoryOptions::default()).unwrap();
        // SAFETY: the test frees the memory before the region on purpose. The engine must detect
        // that before it uses the address.
        let raw = unsafe { two._endpoints[0].register_gpu_raw(memory.address(), 65_536) }.unwrap();
        let window = two.ours.window(&raw).unwrap();
        let _armed = two.ours.arm();
        let producer = two.ours.host_producer(0).unwrap();
        producer.put(0, two.to.base, window.base, 4096).unwrap();
        producer.quiet(0).unwrap();
        drop(memory);
        producer.put_with_count(0, two.to.base, window.base, 4096, 2).unwrap();
        assert!(producer.quiet(0).is_err(), "{copier}");
        let fault = two.ours.take_fault().unwrap();
        assert_eq!(fault.code, FaultCode::Source, "{copier}: {fault}");
        assert_eq!(two.theirs.counter(2), 0, "{copier}: a failed put must not count");
        producer.put_with_count(0, two.to.base, two.from.base, 4096, 2).unwrap();
        producer.quiet(0).unwrap();
        assert_eq!(two.theirs.counter(2), 1, "{copier}: other commands still work");
    }
}

/// The kernels of these tests, and the memory for their status.
struct Kernels {
    module: Module,
    stream: Stream,
    status: Region,
}

impl Kernels {
    fn new(endpoint: &Endpoint) -> Self {
        let gpu = Gpu::open(&Cuda::load(Library::Cuda.named()).unwrap(), 0).unwrap();
        // SAFETY: the PTX is the engine's own.
        let module = unsafe { Module::load(&gpu, KERNELS.to_bytes_with_nul()) }.unwrap();
        let status = endpoint.register(peerway::gpu::PinnedMemory::allocate(64).unwrap()).unwrap();
        Self { module, stream: Stream::new(&gpu).unwrap(), status }
    }

    /// Starts a kernel of one thread. Its last argument is the address of its status word.
    fn start(&self, name: &std::ffi::CStr, arguments: &[u64]) {
        self.status.write_at(0, &99u32.to_le_bytes()).unwrap();
        let mut all = arguments.to_vec();
        all.push(self.status.addr());
        let mut pointers: Vec<*mut c_void> =
            all.iter().map(|argument| (&raw const *argument).cast_mut().cast()).collect();
        let function = self.module.function(name).unwrap();
        let stream = self.stream.raw();
        // SAFETY: the arguments match the kernel, and the memory that they name outlives `end`.
        unsafe { self.module.launch(function, Grid::row(1, 1), stream, &mut pointers) }.unwrap();
    }

    fn end(&self) -> u32 {
        self.stream.synchronize().unwrap();
        let mut status = [0; 4];
        self.status.read_at(0, &mut status).unwrap();
        u32::from_le_bytes(status)
    }
}

#[test]
#[ignore = "needs a GPU that runs kernels: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_kernel_puts_and_is_told_when_it_is_there() {
    require_kernels();
    let two = Two::new(CopierKind::Launched, true);
    let kernels = Kernels::new(&two._endpoints[0]);
    let bytes = pattern(3, 1 << 20);
    two.regions[0].write_at(0, &bytes).unwrap();
    let _armed = two.ours.arm();
    let handle = two.ours.handle();
    kernels.start(c"driven_put_quiet", &[handle, 0, two.to.base, two.from.base, 1 << 20]);
    assert_eq!(kernels.end(), 0);
    assert!(contents(&two.regions[1], 0, 1 << 20) == bytes);
    assert!(two.ours.host_producer(0).is_err(), "only kernels may push into rings of a GPU");
    // Outside the window: the kernel gets the failure, and nothing else happens.
    let outside = two.to.base + LEN - 4096;
    kernels.start(c"driven_put_quiet", &[handle, 0, outside, two.from.base, 8192]);
    assert_eq!(kernels.end(), 4, "PEERWAY_FAILED");
    assert!(two.ours.take_fault().is_some());
    kernels.start(c"driven_put_quiet", &[handle, 0, two.to.base, two.from.base, 4096]);
    assert_eq!(kernels.end(), 0, "taking the fault starts a new epoch");
    // No peer has that number.
    kernels.start(c"driven_put_quiet", &[handle, 63, two.to.base, two.from.base, 4096]);
    assert_eq!(kernels.end(), 4);
}

#[test]
#[ignore = "needs a GPU that runs kernels: cargo xtask gpu-test, then gpu/run.sh tests"]
fn quiet_waits_for_completions_that_are_late() {
    require_kernels();
    let two = Two::new(CopierKind::Launched, true);
    let kernels = Kernels::new(&two._endpoints[0]);
    let _armed = two.ours.arm();
    peerway::hooks::before_copy(Some(|| std::thread::sleep(Duration::from_millis(100))));
    let start = Instant::now();
    let handle = two.ours.handle();
    kernels.start(c"driven_put_quiet", &[handle, 0, two.to.base, two.from.base, 4096]);
    let status = kernels.end();
    peerway::hooks::before_copy(None);
    assert_eq!(status, 0);
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
}

#[test]
#[ignore = "needs a GPU that runs kernels: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_wait_for_what_never_comes_ends_in_time() {
    require_kernels();
    let two = Two::new(CopierKind::Launched, true);
    let kernels = Kernels::new(&two._endpoints[0]);
    let _armed = two.ours.arm();
    let start = Instant::now();
    kernels.start(c"driven_wait", &[two.ours.handle(), 1, 1, u64::from(u32::MAX)]);
    assert_eq!(kernels.end(), 3, "PEERWAY_TIMED_OUT");
    // The GPU has its own clock, so the bound is lower.
    assert!(start.elapsed() >= Duration::from_millis(4500));
}

#[test]
#[ignore = "needs a GPU that runs kernels: cargo xtask gpu-test, then gpu/run.sh tests"]
fn a_kernel_that_waits_for_a_peer_is_told_when_it_is_gone() {
    require_kernels();
    if std::env::var_os("PEERWAY_TEST_FAR").is_some() {
        // The far process prints its metadata and peer info, then waits to be killed.
        let endpoint = Endpoint::new().unwrap();
        let proxy = Proxy::builder(&endpoint).threads(1).build().unwrap();
        let region = endpoint.allocate_gpu(0, 4096).unwrap();
        proxy.window(&region).unwrap();
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        println!("\nfar {} {}", hex(endpoint.metadata()), hex(proxy.peer_info().unwrap()));
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let mut far = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["a_kernel_that_waits_for_a_peer", "--ignored", "--nocapture"])
        .env("PEERWAY_TEST_FAR", "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(far.stdout.take().unwrap()));
    let line = lines
        .find_map(|line| line.unwrap().strip_prefix("far ").map(str::to_owned))
        .expect("the far process prints its metadata");
    let bytes = |text: &str| -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    };
    let (metadata, card) = line.split_once(' ').unwrap();
    let endpoint = Endpoint::new().unwrap();
    let proxy = Proxy::builder(&endpoint).gpu(0).threads(1).build().unwrap();
    let ours = endpoint.allocate_gpu(0, 4096).unwrap();
    let from = proxy.window(&ours).unwrap();
    let peer = endpoint.connect(&bytes(metadata)).unwrap();
    let to = proxy.add_peer(0, &peer, &bytes(card)).unwrap()[0];
    let kernels = Kernels::new(&endpoint);
    let _armed = proxy.arm();
    kernels.start(c"driven_put_quiet", &[proxy.handle(), 0, to.base, from.base, 4096]);
    assert_eq!(kernels.end(), 0);
    kernels.start(c"driven_wait", &[proxy.handle(), 1, 1, 0]);
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    far.kill().unwrap();
    assert_eq!(kernels.end(), 4, "PEERWAY_FAILED");
    println!("a waiting kernel saw the failure after {:?}", start.elapsed());
    far.wait().unwrap();
    kernels.start(c"driven_put_quiet", &[proxy.handle(), 0, to.base, from.base, 4096]);
    assert_eq!(kernels.end(), 4, "a put to a peer that is gone fails");
}
