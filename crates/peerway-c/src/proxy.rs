//! The host's side of the GPU-driven engine.

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

/// What a kernel is given: its layout is in peerway_abi.h, for peerway_device.cuh. The host only hands its address on.
pub struct peerway_proxy {
    _private: (),
}

/// The host's handle to a proxy: rings that kernels write commands into, threads that carry them out, windows (registered memory that
/// commands name by offset), and counters that peers raise and kernels wait for. It has another name than what kernels are given,
/// because that is a struct of its own.
pub struct peerway_proxy_host {
    _private: (),
}

handle!(peerway_proxy_host, Host, "a proxy", 12);

/// A proxy and what C cannot hold of it.
pub struct Host {
    /// Disarmed before the proxy goes.
    armed: Mutex<Vec<Armed>>,
    windows: Mutex<HashMap<u16, Vec<Window>>>,
    proxy: Proxy,
}

/// Settings of a proxy. What is zero is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_proxy_options {
    /// sizeof(struct peerway_proxy_options).
    pub size: usize,
    /// Not zero: rings for kernels of a GPU. Else for processors, with peerway_device.cuh compiled for them.
    pub on_gpu: u32,
    /// And which.
    pub gpu: u32,
    /// Threads that drain rings: a quarter of the processors, at most four, as usual.
    pub threads: u32,
    /// Rings, dealt to the threads: eight for each, as usual.
    pub rings: u32,
    /// Commands that a ring holds: 2048 as usual.
    pub slots: u32,
    /// Peers that can be numbered: 64 as usual.
    pub peers: u32,
    /// Counters that peers can raise: 1024 as usual.
    pub counters: u32,
    /// How GPUs copy what they reach: a peerway_copier.
    pub copier: u32,
    /// The longest that a kernel waits for room, an answer or a counter: 10 s as usual.
    pub timeout_ns: u64,
}

/// How a GPU copies what it reaches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_copier {
    /// A kernel is launched for every list.
    Launched = 0,
    /// A kernel stays on the GPU while there is something to do: sooner, and takes two multiprocessors for each thread of the proxy.
    Resident = 1,
    /// The driver copies, by copy engines where it can.
    Engines = 2,
}

fn copier(given: u32) -> Answer<CopierKind> {
    // A number of C's need not be one of the enum's, so it is not taken as one.
    const LAUNCHED: u32 = peerway_copier::Launched as u32;
    const RESIDENT: u32 = peerway_copier::Resident as u32;
    const ENGINES: u32 = peerway_copier::Engines as u32;
    match given {
        LAUNCHED => Ok(CopierKind::Launched),
        RESIDENT => Ok(CopierKind::Resident),
        ENGINES => Ok(CopierKind::Engines),
        _ => Err(Failure::bad(format!("copier: {given} is no peerway_copier"))),
    }
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_proxy_options {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_proxy_options";
}

/// Where a window is in its side's space of offsets. This struct stays as it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_window {
    /// What a kernel adds to an offset in the window.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl From<Window> for peerway_window {
    fn from(Window { base, len }: Window) -> Self {
        Self { base, len }
    }
}

const NO_WINDOW: peerway_window = peerway_window { base: 0, len: 0 };

/// A part of a region. This struct stays as it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_place {
    /// The region.
    pub region: *const peerway_region,
    /// The first byte in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A counter of a numbered peer. This struct stays as it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_answer {
    /// The peer's number.
    pub peer: u16,
    /// The peer's counter.
    pub counter: u16,
}

/// What is to happen when a counter of ours rises: what has arrived is copied on, and then others are told.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_forward {
    /// sizeof(struct peerway_forward).
    pub size: usize,
    /// What has arrived when the counter rises.
    pub from: peerway_place,
    /// It is copied to all of these, which are as long.
    pub to: *const peerway_place,
    /// How many.
    pub to_count: usize,
    /// Then these counters of ours go up by one.
    pub then: *const u16,
    /// How many.
    pub then_count: usize,
    /// And these of peers: how a sender learns that the bytes went all the way.
    pub answers: *const peerway_answer,
    /// How many.
    pub answer_count: usize,
    /// The counter. One counter has one rule.
    pub counter: u16,
    /// Zero.
    pub reserved: [u16; 3],
}

// SAFETY: repr(C), its size first, and numbers and pointers only.
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
    /// Its position in the ring. Of commands that went together, the first.
    pub position: u64,
    /// Why: one of PEERWAY_FAULT_* in peerway_abi.h. peerway_fault_text has its words.
    pub code: u32,
    /// Whom it was for, by number.
    pub peer: u32,
    /// The ring it came from.
    pub ring: u32,
    /// Its operation: one of PEERWAY_OP_* in peerway_abi.h.
    pub op: u32,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_proxy_fault {
    const FIRST: usize = 32;
    const NAME: &'static str = "struct peerway_proxy_fault";
}

/// What a proxy did.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_proxy_stats {
    /// sizeof(struct peerway_proxy_stats).
    pub size: usize,
    /// Commands taken out of rings.
    pub commands: u64,
    /// Puts submitted.
    pub puts: u64,
    /// And their bytes.
    pub bytes: u64,
    /// Counters of peers raised.
    pub counts: u64,
    /// Submissions that puts went in; those that a thread of the proxy copied by itself are not among them.
    pub flights: u64,
    /// Commands that failed.
    pub faults: u64,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_proxy_stats {
    const FIRST: usize = 56;
    const NAME: &'static str = "struct peerway_proxy_stats";
}

/// Makes a proxy of an endpoint, with its threads asleep. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_new(
    endpoint: *const peerway_endpoint,
    options: *const peerway_proxy_options,
    proxy: *mut *mut peerway_proxy_host,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, options) =
            unsafe { (arguments::handle(proxy, "proxy")?, arguments::read_if_any(options)?) };
        let mut builder = Proxy::builder(&*get(endpoint)?);
        if let Some(options) = options {
            builder = builder.copier(copier(options.copier)?);
            if options.on_gpu != 0 {
                builder = builder.gpu(options.gpu);
            } else if options.gpu != 0 {
                return Err(Failure::bad("gpu is given and on_gpu is zero"));
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

/// Stops a proxy's threads and frees it. No kernel uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_free(proxy: *mut peerway_proxy_host) -> peerway_status {
    call(|| handles::free(proxy).map(drop))
}

/// What kernels are given, until the proxy is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_handle(
    proxy: *const peerway_proxy_host,
    kernel: *mut *const peerway_proxy,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(kernel, "kernel", std::ptr::null()) }?;
        out.set(get(proxy)?.proxy.handle() as *const peerway_proxy);
        Ok(())
    })
}

/// How many rings there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_rings(
    proxy: *const peerway_proxy_host,
    rings: *mut u32,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(rings, "rings", 0) }?;
        out.set(get(proxy)?.proxy.rings());
        Ok(())
    })
}

/// Makes registered memory a window, which the proxy keeps registered: commands name it from then on, and so do those of peers that
/// are given peer info made after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_window(
    proxy: *const peerway_proxy_host,
    region: *const peerway_region,
    window: *mut peerway_window,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(window, "window", NO_WINDOW) }?;
        out.set(get(proxy)?.proxy.window(&*get(region)?)?.into());
        Ok(())
    })
}

/// What a peer needs to send to us, to be handed over by any means: it grants the windows, for writing, and the counters. *len becomes
/// the number of bytes whether or not there is room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_peer_info(
    proxy: *const peerway_proxy_host,
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let info = get(proxy)?.proxy.peer_info()?;
        // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise, which is the same.
    unsafe { peerway_proxy_peer_info(proxy, buffer, room, len) }
}

/// Has commands to `number` go to this peer, whose proxy gave the info. *windows, which may be null, becomes how many it has.
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
        // SAFETY: the caller's promise.
        let info = unsafe { arguments::bytes(info, len, "info") }?;
        let host = get(proxy)?;
        let theirs = host.proxy.add_peer(number, &*get(peer)?, info)?;
        let count = theirs.len();
        host.windows.lock().unwrap_or_else(PoisonError::into_inner).insert(number, theirs);
        if !windows.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(windows, "windows", count) }?;
        }
        Ok(())
    })
}

/// A window of a peer: number `nth` in the order in which the peer made them. NOTHING where there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_peer_window(
    proxy: *const peerway_proxy_host,
    number: u16,
    nth: usize,
    window: *mut peerway_window,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(window, "window", NO_WINDOW) }?;
        let host = get(proxy)?;
        let windows = host.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let found = windows.get(&number).and_then(|windows| windows.get(nth));
        out.set((*found.ok_or(Failure::NOTHING)?).into());
        Ok(())
    })
}

/// Has the proxy's threads look for commands: from before a kernel is launched until after it has ended. While it is armed by nobody
/// they sleep. To be taken back as often as it was done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_arm(proxy: *const peerway_proxy_host) -> peerway_status {
    call(|| {
        let host = get(proxy)?;
        host.armed.lock().unwrap_or_else(PoisonError::into_inner).push(host.proxy.arm());
        Ok(())
    })
}

/// Takes one peerway_proxy_arm back.
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

/// From now on, whenever the rule's counter rises, what has arrived is copied on, and then others are told; by the proxy's threads,
/// while it is armed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_forward(
    proxy: *const peerway_proxy_host,
    rule: *const peerway_forward,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise, for the struct and its lists.
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

/// Takes the rule of a counter away; NOTHING where it had none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_stop_forwarding(
    proxy: *const peerway_proxy_host,
    counter: u16,
) -> peerway_status {
    call(|| get(proxy)?.proxy.stop_forwarding(counter).then_some(()).ok_or(Failure::NOTHING))
}

/// Where a counter of ours is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_counter(
    proxy: *const peerway_proxy_host,
    counter: u16,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(value, "value", 0) }?;
        out.set(get(proxy)?.proxy.counter(counter));
        Ok(())
    })
}

/// Waits until a counter of ours has come to a value; PENDING where it has not in time. *value, which may be null, becomes where it is.
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
            // SAFETY: the caller's promise.
            unsafe { Out::new(value, "value", 0) }?.set(host.proxy.counter(counter));
        }
        reached
    })
}

/// The first command that failed since this was asked last; NOTHING where none has. The call starts a new fault epoch: a later quiet of a kernel
/// reports only commands that fail after it, except for peers that are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_take_fault(
    proxy: *const peerway_proxy_host,
    fault: *mut peerway_proxy_fault,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
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

/// What a fault's code means, as text with its zero byte; NOTHING for a number that is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_fault_text(
    code: u32,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let code = FaultCode::from_number(code).ok_or(Failure::NOTHING)?;
        // SAFETY: the caller's promise.
        unsafe { arguments::give_text(&code.to_string(), buffer, room, len) }
    })
}

/// What a proxy did so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_proxy_statistics(
    proxy: *const peerway_proxy_host,
    stats: *mut peerway_proxy_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
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
