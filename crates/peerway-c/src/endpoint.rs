//! Endpoints.

use std::ffi::{c_char, c_void};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use peerway::{AcceptError, ConnectError, Endpoint, Pin};
use peerway_core::metadata::Metadata;
use peerway_core::topology::show_cpus;

use crate::arguments::{self, Fill, Out, Versioned, until};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::log;
use crate::notification::peerway_notification;
use crate::peer::peerway_peer;
use crate::status::{Answer, Failure, peerway_status};

/// One end of transfers: it listens, connects, and owns registered memory.
pub struct peerway_endpoint {
    _private: (),
}

handle!(peerway_endpoint, Endpoint, "an endpoint", 1);

/// The name of one life of an endpoint: a restarted one has another.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct peerway_incarnation {
    /// Random bytes.
    pub bytes: [u8; 16],
}

impl From<peerway::Incarnation> for peerway_incarnation {
    fn from(incarnation: peerway::Incarnation) -> Self {
        Self { bytes: incarnation.0 }
    }
}

/// Settings of an endpoint. What is zero or null comes from the environment (`peerway doctor --config` lists the variables), and
/// where that says nothing, from the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_endpoint_options {
    /// sizeof(struct peerway_endpoint_options).
    pub size: usize,
    /// Where to listen: an IP address, with or without a port ("10.0.0.1:5000", "[::1]:0").
    pub bind: *const c_char,
    /// The IP address that peers are told instead.
    pub advertise: *const c_char,
    /// Network interfaces to use: prefixes of names, separated by commas.
    pub interfaces: *const c_char,
    /// RDMA devices to use: names or numbers, separated by commas.
    pub rdma_devices: *const c_char,
    /// The one transport that is allowed: auto, local, local-map, local-cma, local-ring, tcp, ib or efa.
    pub transport: *const c_char,
    /// Deadline of transfers that name none.
    pub deadline_ns: u64,
    /// Silence after which a peer is held dead.
    pub detect_ns: u64,
    /// How long a cancel or revoke waits for its fence.
    pub fence_ns: u64,
    /// How long a connect or an import may take.
    pub connect_timeout_ns: u64,
    /// How long a waiter polls before it sleeps.
    pub spin_ns: u64,
    /// Bytes of notifications kept until they are taken.
    pub notify_bytes: u64,
    /// Transfers that can be in flight.
    pub slots: u32,
    /// Bulk lanes per TCP peer, at most 64, as for the next two.
    pub lanes: u16,
    /// Service threads; peers are spread over them.
    pub shards: u16,
    /// Threads that may copy for one large local transfer.
    pub copy_threads: u16,
    /// Zero.
    pub reserved: [u16; 3],
    /// Any other setting, or one of the above as text; null for none. What is given above wins.
    pub settings: *const peerway_setting,
    /// How many.
    pub settings_count: usize,
}

/// A setting by its name in the environment. This struct stays as it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_setting {
    /// The name ("PEERWAY_DEADLINE"): docs/configuration.md lists them.
    pub name: *const c_char,
    /// The value as it would be in the environment ("5s"). Empty is as usual.
    pub value: *const c_char,
}

// SAFETY: repr(C), its size first, and numbers and pointers only.
unsafe impl Versioned for peerway_endpoint_options {
    const FIRST: usize = 112;
    const NAME: &'static str = "struct peerway_endpoint_options";
}

/// Makes an endpoint, which listens when this returns. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_new(
    options: *const peerway_endpoint_options,
    endpoint: *mut *mut peerway_endpoint,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise, for all of these.
        let (out, options) =
            unsafe { (arguments::handle(endpoint, "endpoint")?, arguments::read_if_any(options)?) };
        log::start();
        let builder = match &options {
            // SAFETY: the caller's promise for the texts.
            Some(options) => unsafe { builder(options) }?,
            None => Endpoint::builder(),
        };
        out.set(handles::new(builder.build()?)?);
        Ok(())
    })
}

/// # Safety
///
/// The texts are null or strings.
unsafe fn builder(options: &peerway_endpoint_options) -> Answer<peerway::Builder> {
    if options.reserved != [0; 3] {
        return Err(Failure::bad("reserved must be zero"));
    }
    // SAFETY: the caller's promise.
    let text = |at, name| unsafe { arguments::text(at, name) };
    let mut builder = Endpoint::builder();
    // SAFETY: the caller's promise.
    for setting in unsafe { arguments::list(options.settings, options.settings_count, "settings") }?
    {
        let (name, value) = (text(setting.name, "name")?, text(setting.value, "value")?);
        let missing = || Failure::new(peerway_status::NullArgument, "a setting has no name");
        builder = builder.setting(name.ok_or_else(missing)?, value.unwrap_or_default());
    }
    if let Some(text) = text(options.bind, "bind")? {
        // A port of its own choice where none is named.
        let addr = match text.parse::<IpAddr>() {
            Ok(ip) => Ok(SocketAddr::new(ip, 0)),
            Err(_) => text.parse(),
        };
        let addr = addr.map_err(|_| {
            Failure::bad(format!("bind: '{text}' is not an IP address with or without a port"))
        })?;
        builder = builder.bind(addr);
    }
    if let Some(text) = text(options.advertise, "advertise")? {
        let addr = text
            .parse()
            .map_err(|_| Failure::bad(format!("advertise: '{text}' is not an IP address")))?;
        builder = builder.advertise(addr);
    }
    if let Some(text) = text(options.interfaces, "interfaces")? {
        builder = builder.interfaces(text);
    }
    if let Some(text) = text(options.rdma_devices, "rdma_devices")? {
        builder = builder.rdma_devices(text);
    }
    if let Some(text) = text(options.transport, "transport")? {
        let pin: Pin = text.parse().map_err(|error| {
            let sentence = format!("transport: '{text}': {error}");
            Failure::new(peerway_status::InvalidSetting, sentence)
        })?;
        builder = builder.transport(pin);
    }
    for (value, set) in [
        (options.deadline_ns, peerway::Builder::deadline as fn(_, Duration) -> _),
        (options.detect_ns, peerway::Builder::detect),
        (options.fence_ns, peerway::Builder::fence),
        (options.connect_timeout_ns, peerway::Builder::connect_timeout),
        (options.spin_ns, peerway::Builder::spin),
    ] {
        if let Some(time) = arguments::time(value) {
            builder = set(builder, time);
        }
    }
    if options.notify_bytes != 0 {
        builder = builder.notify_bytes(options.notify_bytes);
    }
    if options.slots != 0 {
        builder = builder.slots(options.slots);
    }
    for (value, set) in [
        (options.lanes, peerway::Builder::lanes as fn(_, u16) -> _),
        (options.shards, peerway::Builder::shards),
        (options.copy_threads, peerway::Builder::copy_threads),
    ] {
        if value != 0 {
            builder = set(builder, value);
        }
    }
    Ok(builder)
}

/// Closes an endpoint: its transfers end, its threads stop, its sockets close. The handle stays until it is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_close(
    endpoint: *const peerway_endpoint,
) -> peerway_status {
    call(|| {
        get(endpoint)?.close();
        Ok(())
    })
}

/// Closes an endpoint and frees its handle. Null is nothing to free, here and in all such calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_free(endpoint: *mut peerway_endpoint) -> peerway_status {
    call(|| {
        if let Some(endpoint) = handles::free(endpoint)? {
            // Also where another thread is in a call with it.
            endpoint.close();
        }
        Ok(())
    })
}

/// Whether an endpoint was closed, or belongs to the parent process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_is_closed(
    endpoint: *const peerway_endpoint,
    closed: *mut bool,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(closed, "closed", true) }?;
        out.set(get(endpoint)?.is_closed());
        Ok(())
    })
}

/// What others need to connect, to be handed over by any means: some hundred bytes. *len becomes their number whether or not
/// there is room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_metadata(
    endpoint: *const peerway_endpoint,
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let metadata = get(endpoint)?.metadata();
        // SAFETY: the caller's promise.
        unsafe { arguments::give(&metadata, buffer, room, len) }
    })
}

/// The name of this life of the endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_incarnation(
    endpoint: *const peerway_endpoint,
    incarnation: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(incarnation, "incarnation", NOBODY) }?;
        out.set(get(endpoint)?.incarnation().into());
        Ok(())
    })
}

pub(crate) const NOBODY: peerway_incarnation = peerway_incarnation { bytes: [0; 16] };

/// Where peers can connect, best first: address number `nth` as text ("10.0.0.1:5000"), with its zero byte. NOTHING where there
/// are not so many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_address(
    endpoint: *const peerway_endpoint,
    nth: usize,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let endpoint = get(endpoint)?;
        let address = endpoint.addresses().get(nth).ok_or(Failure::NOTHING)?;
        // SAFETY: the caller's promise.
        unsafe { arguments::give_text(&address.to_string(), buffer, room, len) }
    })
}

/// How an endpoint runs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_endpoint_stats {
    /// sizeof(struct peerway_endpoint_stats).
    pub size: usize,
    /// How many processors its threads may run on: peerway_endpoint_cpus says which. 0 where the kernel does not tell.
    pub cpus: u64,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_endpoint_stats {
    const FIRST: usize = 16;
    const NAME: &'static str = "struct peerway_endpoint_stats";
}

/// How an endpoint runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_statistics(
    endpoint: *const peerway_endpoint,
    stats: *mut peerway_endpoint_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::new(stats) }?;
        let stats = get(endpoint)?.stats();
        fill.set(peerway_endpoint_stats { size: 0, cpus: stats.cpus.len() as u64 });
        Ok(())
    })
}

/// The processors that the endpoint's threads may run on, as text ("0-3,8"), with its zero byte. Empty where the kernel
/// does not tell.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_cpus(
    endpoint: *const peerway_endpoint,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let cpus: Vec<usize> =
            get(endpoint)?.stats().cpus.into_iter().map(|cpu| cpu as usize).collect();
        // SAFETY: the caller's promise.
        unsafe { arguments::give_text(&show_cpus(&cpus), buffer, room, len) }
    })
}

/// Checks metadata without connecting: the name of the life of the endpoint that gave it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_metadata_incarnation(
    metadata: *const c_void,
    len: usize,
    incarnation: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise, for both.
        let (out, metadata) = unsafe {
            let nobody = peerway_incarnation { bytes: [0; 16] };
            (
                Out::new(incarnation, "incarnation", nobody)?,
                arguments::bytes(metadata, len, "metadata")?,
            )
        };
        let metadata = Metadata::from_bytes(metadata).map_err(ConnectError::from)?;
        out.set(metadata.incarnation.into());
        Ok(())
    })
}

/// Connects to the endpoint that gave this metadata; a second connect to the same life of it gives a second handle to the same
/// peer. A time-out of zero is the endpoint's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_connect(
    endpoint: *const peerway_endpoint,
    metadata: *const c_void,
    len: usize,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, metadata) = unsafe {
            (arguments::handle(peer, "peer")?, arguments::bytes(metadata, len, "metadata")?)
        };
        let endpoint = get(endpoint)?;
        let timeout = arguments::time(timeout_ns).unwrap_or_else(|| endpoint.connect_timeout());
        out.set(handles::new(endpoint.connect_within(metadata, timeout)?)?);
        Ok(())
    })
}

/// Connects to whichever endpoint listens at "host:port" ("[::1]:5000").
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_connect_address(
    endpoint: *const peerway_endpoint,
    address: *const c_char,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, text) =
            unsafe { (arguments::handle(peer, "peer")?, arguments::text(address, "address")?) };
        let text =
            text.ok_or_else(|| Failure::new(peerway_status::NullArgument, "address is null"))?;
        let endpoint = get(endpoint)?;
        let timeout = arguments::time(timeout_ns).unwrap_or_else(|| endpoint.connect_timeout());
        out.set(handles::new(connect_to(&endpoint, text, timeout)?)?);
        Ok(())
    })
}

/// Tries every address that a name stands for while nobody answers, each for its share of the time
/// that looking up the name has left.
fn connect_to(endpoint: &Endpoint, text: &str, timeout: Duration) -> Answer<peerway::Peer> {
    let start = Instant::now();
    let found = text.to_socket_addrs().map_err(|error| {
        Failure::bad(format!("address: '{text}' is not host:port, or not found: {error}"))
    })?;
    let addresses: Vec<SocketAddr> = found.collect();
    let mut untried = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut failure = Failure::bad(format!("address: '{text}' has no address"));
    for address in addresses {
        let share = timeout.saturating_sub(start.elapsed()) / untried.max(1);
        untried = untried.saturating_sub(1);
        match endpoint.connect_addr_within(address, share) {
            Ok(peer) => return Ok(peer),
            Err(error @ (ConnectError::Unreachable { .. } | ConnectError::TimedOut { .. })) => {
                failure = error.into();
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(failure)
}

/// The next peer that connected to us, waiting for one for so long: PENDING where none came. Peers are accepted whether or not
/// anybody asks; this only hands them out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_accept(
    endpoint: *const peerway_endpoint,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(peer, "peer") }?;
        let endpoint = get(endpoint)?;
        let peer = until(timeout_ns, |left| match endpoint.accept(left) {
            Err(AcceptError::TimedOut) => None,
            answer => Some(answer.map_err(Failure::from)),
        })?;
        out.set(handles::new(peer)?);
        Ok(())
    })
}

/// A handle to every live peer, each to be freed. *count becomes their number; where there is not room for so many there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_peers(
    endpoint: *const peerway_endpoint,
    peers: *mut *mut peerway_peer,
    room: usize,
    count: *mut usize,
) -> peerway_status {
    call(|| {
        let live = get(endpoint)?.peers();
        // SAFETY: the caller's promise.
        unsafe { Out::new(count, "count", live.len()) }?;
        if live.len() > room {
            let sentence = format!("there is room for {room} peers, and there are {}", live.len());
            return Err(Failure::new(peerway_status::TooSmall, sentence));
        }
        if live.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { Out::new(peers, "peers", std::ptr::null_mut()) }?;
        for (at, peer) in live.into_iter().enumerate() {
            let handle = handles::new(peer)?;
            // SAFETY: there is room for it.
            unsafe { peers.add(at).write(handle) };
        }
        Ok(())
    })
}

/// The oldest notification, waiting for one for so long: PENDING where there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_notification(
    endpoint: *const peerway_endpoint,
    timeout_ns: u64,
    notification: *mut *mut peerway_notification,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(notification, "notification") }?;
        let endpoint = get(endpoint)?;
        let found = until(timeout_ns, |left| {
            let found = endpoint.notification(left).map(Ok);
            found.or_else(|| endpoint.is_closed().then(|| Err(closed())))
        })?;
        out.set(handles::new(found)?);
        Ok(())
    })
}

pub(crate) fn closed() -> Failure {
    Failure::new(peerway_status::EndpointClosed, "the endpoint is closed")
}

/// Arrivals counted under this id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_counter(
    endpoint: *const peerway_endpoint,
    id: u32,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(value, "value", 0) }?;
        out.set(get(endpoint)?.counter(id));
        Ok(())
    })
}

/// Waits until at least `wanted` arrivals have been counted; PENDING where they have not in time. *value, which may be null, becomes
/// how many have.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_wait_counter(
    endpoint: *const peerway_endpoint,
    id: u32,
    wanted: u64,
    timeout_ns: u64,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        let endpoint = get(endpoint)?;
        let reached = until(timeout_ns, |left| {
            let count = endpoint.wait_counter(id, wanted, left);
            let closed = || endpoint.is_closed().then(|| Err(closed()));
            (count >= wanted).then_some(Ok(())).or_else(closed)
        });
        if !value.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(value, "value", 0) }?.set(endpoint.counter(id));
        }
        reached
    })
}

/// Forgets a counter, so that its id can be used afresh. *value, which may be null, becomes what it had.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_reset_counter(
    endpoint: *const peerway_endpoint,
    id: u32,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        let count = get(endpoint)?.reset_counter(id);
        if !value.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(value, "value", count) }?;
        }
        Ok(())
    })
}
