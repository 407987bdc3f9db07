//! The host side of the GPU-driven engine.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

use peerway::driven::{Armed, FaultCode, Forward, Proxy, Window};
use peerway::gpu::CopierKind;

use crate::arguments::{self, Fill, Out, Versioned, until};
use crate::endpoint::peerway_endpoint;
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::peer::peerway_peer;
use crate::region::{self, peerway_region};
use crate::status::{Answer, Failure, peerway_status};

/// The argument of a kernel. peerway_abi.h has its layout, for peerway_device.cuh. The host only
/// passes its address on.
pub struct peerway_proxy {
    _private: (),
}

/// The host's handle to a proxy. A proxy has rings that kernels write commands into, threads that
/// carry them out, windows (registered memory that commands name by offset), and counters that
/// peers raise and kernels wait for.
///
/// The kernels' argument is a different struct, peerway_proxy.
pub struct peerway_proxy_host {
    _private: (),
}

handle!(peerway_proxy_host, Host, "a proxy", 12);

/// A proxy, with the state that C cannot hold.
pub struct Host {
    /// Dropped before the proxy, because fields drop in order of declaration.
    armed: Mutex<Vec<Armed>>,
    windows: Mutex<HashMap<u16, Vec<Window>>>,
    proxy: Proxy,
}

/// Settings of a proxy. Zero means the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_proxy_options {
    /// sizeof(struct peerway_proxy_options).
    pub size: usize,
    /// If not zero, the rings are for kernels of a GPU. Otherwise they are for CPU threads, which
    /// compile peerway_device.cuh for the CPU.
    pub on_gpu: u32,
    /// The number of that GPU.
    pub gpu: u32,
    /// Threads that drain rings. Default: a quarter of the processors, at most four.
    pub threads: u32,
    /// Rings, which are divided among the threads. Default: eight per thread.
    pub rings: u32,
    /// Commands that a ring holds. Default: 2048.
    pub slots: u32,
    /// The most peers. Default: 64.
    pub peers: u32,
    /// Counters that peers can raise. Default: 1024.
    pub counters: u32,
    /// How a GPU copies between buffers that it can access: a peerway_copier.
    pub copier: u32,
    /// The longest wait of a kernel for room, an answer or a counter. Default: 10 s.
    pub timeout_ns: u64,
}

/// How a GPU copies between buffers that it can access.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_copier {
    /// Launch a kernel for every list of copies.
    Launched = 0,
    /// Keep a kernel on the GPU while there is work. It starts copies sooner, but takes two
    /// multiprocessors per proxy thread.
    Resident = 1,
    /// Use the driver's copies, with copy engines where possible.
    Engines = 2,
}

fn copier(given: u32) -> Answer<CopierKind> {
    // C can pass any number, so the argument is an integer and not an enum.
    const LAUNCHED: u32 = peerway_copier::Launched as u32;
    const RESIDENT: u32 = peerway_copier::Resident as u32;
    const ENGINES: u32 = peerway_copier::Engines as u32;
    match given {
        LAUNCHED => Ok(CopierKind::Launched),
        RESIDENT => Ok(CopierKind::Resident),
        ENGINES => Ok(CopierKind::Engines),
        _ => Err(Failure::bad(format!("copier: {given} is not a peerway_copier"))),
    }
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_proxy_options {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_proxy_options";
}

/// The place of a window in the offset space of its side. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_window {
    /// The base that a kernel adds to an offset in the window.
    pub base: u64,
    /// The length in bytes.
    pub len: u64,
}

impl From<Window> for peerway_window {
    fn from(Window { base, len }: Window) -> Self {
        Self { base, len }
    }
}

const NO_WINDOW: peerway_window = peerway_window { base: 0, len: 0 };

/// A part of a region. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_place {
    /// The region.
    pub region: *const peerway_region,
    /// The offset of the first byte in it.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// A counter of a numbered peer. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_answer {
    /// The peer's number.
    pub peer: u16,
    /// The peer's counter.
    pub counter: u16,
}

/// A forwarding rule. When a counter of this proxy rises, the proxy copies the arrived bytes on,
/// and then raises other counters.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_forward {
    /// sizeof(struct peerway_forward).
    pub size: usize,
    /// The bytes that have arrived when the counter rises.
    pub from: peerway_place,
    /// The destinations of the copies. Each has the same length as `from`.
    pub to: *const peerway_place,
    /// The number of destinations.
    pub to_count: usize,
    /// Counters of this proxy that rise by one after the copies.
    pub then: *const u16,
    /// The number of these counters.
    pub then_count: usize,
    /// Counters of peers that rise by one after the copies. They tell a sender that its bytes have
    /// reached all destinations.
    pub answers: *const peerway_answer,
    /// The number of these counters.
    pub answer_count: usize,
    /// The counter that triggers the rule. A counter has at most one rule.
    pub counter: u16,
    /// Must be zero.
    pub reserved: [u16; 3],
}

// SAFETY: repr(C), the size first, and only integers and pointers.
unsafe impl Versioned for peerway_forward {
    const FIRST: usize = 88;
    const NAME: &'static str = "struct peerway_forward";
}

/// A command that failed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_proxy_fault {
    /// sizeof(struct peerway_proxy_fault).
    pub size: usize,
    /// The position of the command in its ring. If several commands were submitted together, the
    /// first position.
    pub position: u64,
    /// The reason: one of PEERWAY_FAULT_* in peerway_abi.h. peerway_fault_text describes it.
    pub code: u32,
    /// The number of the command's peer.
    pub peer: u32,
    /// The ring of the command.
    pub ring: u32,
    /// The operation: one of PEERWAY_OP_* in peerway_abi.h.
    pub op: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_proxy_fault {
    const FIRST: usize = 32;
    const NAME: &'static str = "struct peerway_proxy_fault";
}

/// Statistics of a proxy.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_proxy_stats {
    /// sizeof(struct peerway_proxy_stats).
    pub size: usize,
    /// Commands taken out of rings.
    pub commands: u64,
    /// Submitted puts.
    pub puts: u64,
    /// Bytes of these puts.
    pub bytes: u64,
    /// How often counters of peers were raised.
    pub counts: u64,
    /// Requests that carried puts. Puts that a proxy thread copied itself are not included.
    pub flights: u64,
    /// Commands that failed.
    pub faults: u64,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_proxy_stats {
    const FIRST: usize = 56;
    const NAME: &'static str = "struct peerway_proxy_stats";
}

/// Creates a proxy of an endpoint. Its threads sleep until it is armed. `options` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_new(
    endpoint: *const peerway_endpoint,
    options: *const peerway_proxy_options,
    proxy: *mut *mut peerway_proxy_host,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, options) =
            unsafe { (arguments::handle(proxy, "proxy")?, arguments::read_if_any(options)?) };
        let mut builder = Proxy::builder(&*get(endpoint)?);
        if let Some(options) = options {
            builder = builder.copier(copier(options.copier)?);
            if options.on_gpu != 0 {
                builder = builder.gpu(options.gpu);
            } else if options.gpu != 0 {
                return Err(Failure::bad("gpu is set but on_gpu is zero: set on_gpu to 1"));
            }
            for (value, set) in [
                (options.threads, peerway::driven::ProxyBuilder::threads as fn(_, usize) -> _),
                (options.rings, peerway::driven::ProxyBuilder::rings),
                (options.peers, peerway::driven::ProxyBuilder::peers),
                (options.counters, peerway::driven::ProxyBuilder::counters),
            ] {
                if value != 0 {
                    builder = set(builder, value as usize);
                }
            }
            if options.slots != 0 {
                builder = builder.slots(options.slots);
            }
            if let Some(timeout) = arguments::time(options.timeout_ns) {
                builder = builder.timeout(timeout);
            }
        }
        let (armed, windows) = (Mutex::default(), Mutex::default());
        out.set(handles::new(Host { armed, windows, proxy: builder.build()? })?);
        Ok(())
    })
}

/// Stops the threads of a proxy and frees it. No kernel may use it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_free(proxy: *mut peerway_proxy_host) -> peerway_status {
    call(|| handles::free(proxy).map(drop))
}

/// Sets *kernel to the argument for kernels. It is valid until the proxy is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_handle(
    proxy: *const peerway_proxy_host,
    kernel: *mut *const peerway_proxy,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(kernel, "kernel", std::ptr::null()) }?;
        out.set(get(proxy)?.proxy.handle() as *const peerway_proxy);
        Ok(())
    })
}

/// Sets *rings to the number of rings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_rings(
    proxy: *const peerway_proxy_host,
    rings: *mut u32,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(rings, "rings", 0) }?;
        out.set(get(proxy)?.proxy.rings());
        Ok(())
    })
}

/// Makes a region a window. The proxy keeps the memory registered. Local commands can name the
/// window at once. Commands of a peer can name it if the peer received peer info that was made
/// after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_window(
    proxy: *const peerway_proxy_host,
    region: *const peerway_region,
    window: *mut peerway_window,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(window, "window", NO_WINDOW) }?;
        out.set(get(proxy)?.proxy.window(&*get(region)?)?.into());
        Ok(())
    })
}

/// Copies the peer info that a peer needs to send to this proxy, to be sent by any means. It grants
/// write access to the windows, and access to the counters. Sets *len to the number of bytes
/// whether or not they fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_peer_info(
    proxy: *const peerway_proxy_host,
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let info = get(proxy)?.proxy.peer_info()?;
        // SAFETY: the C contract.
        unsafe { arguments::give(&info, buffer, room, len) }
    })
}

/// The former name of peerway_proxy_peer_info.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_card(
    proxy: *const peerway_proxy_host,
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    // SAFETY: the C contract, which is the same for both calls.
    unsafe { peerway_proxy_peer_info(proxy, buffer, room, len) }
}

/// Makes `number` stand for this peer in commands. The peer's proxy made `info`. Sets *windows to
/// the number of the peer's windows. `windows` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_add_peer(
    proxy: *const peerway_proxy_host,
    number: u16,
    peer: *const peerway_peer,
    info: *const c_void,
    len: usize,
    windows: *mut usize,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let info = unsafe { arguments::bytes(info, len, "info") }?;
        let host = get(proxy)?;
        let theirs = host.proxy.add_peer(number, &*get(peer)?, info)?;
        let count = theirs.len();
        host.windows.lock().unwrap_or_else(PoisonError::into_inner).insert(number, theirs);
        if !windows.is_null() {
            // SAFETY: the C contract.
            unsafe { Out::new(windows, "windows", count) }?;
        }
        Ok(())
    })
}

/// The nth window of a peer, in the order in which the peer made them. NOTHING if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_peer_window(
    proxy: *const peerway_proxy_host,
    number: u16,
    nth: usize,
    window: *mut peerway_window,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(window, "window", NO_WINDOW) }?;
        let host = get(proxy)?;
        let windows = host.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let found = windows.get(&number).and_then(|windows| windows.get(nth));
        out.set((*found.ok_or(Failure::NOTHING)?).into());
        Ok(())
    })
}

/// Arms the proxy: its threads poll the rings for commands. Arm it before a kernel is launched, and
/// disarm it after the kernel has ended. The threads sleep while the proxy is not armed. Each arm
/// needs one disarm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_arm(proxy: *const peerway_proxy_host) -> peerway_status {
    call(|| {
        let host = get(proxy)?;
        host.armed.lock().unwrap_or_else(PoisonError::into_inner).push(host.proxy.arm());
        Ok(())
    })
}

/// Undoes one peerway_proxy_arm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_disarm(proxy: *const peerway_proxy_host) -> peerway_status {
    call(|| {
        let armed = get(proxy)?.armed.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match armed {
            Some(armed) => {
                drop(armed);
                Ok(())
            }
            None => Err(Failure::new(peerway_status::NotArmed, "the proxy is not armed")),
        }
    })
}

/// Adds a forwarding rule. From now on, whenever the rule's counter rises, the proxy copies the
/// arrived bytes on and then raises the rule's counters. The proxy's threads do this while the
/// proxy is armed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_forward(
    proxy: *const peerway_proxy_host,
    rule: *const peerway_forward,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract, for the struct and its lists.
        let (rule, to, then, answers) = unsafe {
            let rule = arguments::read(rule)?;
            let to = arguments::list(rule.to, rule.to_count, "to")?;
            let then = arguments::list(rule.then, rule.then_count, "then")?;
            (rule, to, then, arguments::list(rule.answers, rule.answer_count, "answers")?)
        };
        if rule.reserved != [0; 3] {
            return Err(Failure::bad("reserved must be zero"));
        }
        let slice = |place: &peerway_place| region::part(place.region, place.offset, place.len);
        let host = get(proxy)?;
        let mut made = Forward::new(rule.counter, slice(&rule.from)?);
        for place in to {
            made = made.to(slice(place)?);
        }
        made = then.iter().fold(made, |made, counter| made.count(*counter));
        made = answers.iter().fold(made, |made, answer| made.answer(answer.peer, answer.counter));
        Ok(host.proxy.forward(made)?)
    })
}

/// Removes the rule of a counter. NOTHING if it has none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_stop_forwarding(
    proxy: *const peerway_proxy_host,
    counter: u16,
) -> peerway_status {
    call(|| get(proxy)?.proxy.stop_forwarding(counter).then_some(()).ok_or(Failure::NOTHING))
}

/// Sets *value to the value of a counter of this proxy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_counter(
    proxy: *const peerway_proxy_host,
    counter: u16,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(value, "value", 0) }?;
        out.set(get(proxy)?.proxy.counter(counter));
        Ok(())
    })
}

/// Waits until a counter of this proxy reaches `wanted`. PENDING if it does not within timeout_ns.
/// Sets *value to the counter's value. `value` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_wait_counter(
    proxy: *const peerway_proxy_host,
    counter: u16,
    wanted: u64,
    timeout_ns: u64,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        let host = get(proxy)?;
        let reached = until(timeout_ns, |left| {
            (host.proxy.wait_counter(counter, wanted, left) >= wanted).then_some(Ok(()))
        });
        if !value.is_null() {
            // SAFETY: the C contract.
            unsafe { Out::new(value, "value", 0) }?.set(host.proxy.counter(counter));
        }
        reached
    })
}

/// Fills in the first command that failed since the last such call. NOTHING if none has failed.
///
/// The call starts a new fault epoch. A later quiet of a kernel reports only commands that fail
/// after this call, except for peers that are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_take_fault(
    proxy: *const peerway_proxy_host,
    fault: *mut peerway_proxy_fault,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(fault) }?;
        let fault = get(proxy)?.proxy.take_fault().ok_or(Failure::NOTHING)?;
        fill.set(peerway_proxy_fault {
            size: 0,
            position: fault.position,
            code: fault.code as u32,
            peer: fault.peer.into(),
            ring: fault.ring,
            op: fault.op.into(),
        });
        Ok(())
    })
}

/// Describes the code of a fault, as text with its zero byte. NOTHING if the number is not a code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_fault_text(
    code: u32,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let code = FaultCode::from_number(code).ok_or(Failure::NOTHING)?;
        // SAFETY: the C contract.
        unsafe { arguments::give_text(&code.to_string(), buffer, room, len) }
    })
}

/// Fills in the statistics of a proxy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_statistics(
    proxy: *const peerway_proxy_host,
    stats: *mut peerway_proxy_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(stats) }?;
        let stats = get(proxy)?.proxy.stats();
        fill.set(peerway_proxy_stats {
            size: 0,
            commands: stats.commands,
            puts: stats.puts,
            bytes: stats.bytes,
            counts: stats.counts,
            flights: stats.requests,
            faults: stats.faults,
        });
        Ok(())
    })
}
