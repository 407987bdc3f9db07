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

/// One end of transfers. An endpoint listens, connects, and owns registered memory.
pub struct peerway_endpoint {
    _private: (),
}

handle!(peerway_endpoint, Endpoint, "an endpoint", 1);

/// The identity of one life of an endpoint. A restarted endpoint has another one.
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

/// Settings of an endpoint. A field that is zero or null takes its value from the environment
/// (`peerway doctor --config` lists the variables), or else the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_endpoint_options {
    /// sizeof(struct peerway_endpoint_options).
    pub size: usize,
    /// The address to listen on: an IP address, with or without a port ("10.0.0.1:5000",
    /// "[::1]:0").
    pub bind: *const c_char,
    /// The IP address to advertise to peers instead of the bound one.
    pub advertise: *const c_char,
    /// Network interfaces to use: prefixes of names, separated by commas.
    pub interfaces: *const c_char,
    /// RDMA devices to use: names or numbers, separated by commas.
    pub rdma_devices: *const c_char,
    /// The only allowed transport: auto, local, local-map, local-cma, local-ring, tcp, ib or efa.
    pub transport: *const c_char,
    /// The deadline of transfers that set none.
    pub deadline_ns: u64,
    /// The time of silence after which a peer counts as dead.
    pub detect_ns: u64,
    /// How long a cancel or revoke waits for its fence.
    pub fence_ns: u64,
    /// How long a connect or an import may take.
    pub connect_timeout_ns: u64,
    /// How long a waiting thread polls before it blocks.
    pub spin_ns: u64,
    /// Bytes of notifications that the endpoint keeps for the application.
    pub notify_bytes: u64,
    /// The most transfers in flight.
    pub slots: u32,
    /// Bulk lanes per TCP peer. At most 64, as for the next two fields.
    pub lanes: u16,
    /// The number of progress threads. Peers are spread over them.
    pub shards: u16,
    /// Threads that may copy for one large local transfer.
    pub copy_threads: u16,
    /// Must be zero.
    pub reserved: [u16; 3],
    /// Any other setting, or a setting above as text. Null if there are none. The fields above take
    /// precedence.
    pub settings: *const peerway_setting,
    /// The number of settings.
    pub settings_count: usize,
}

/// A setting by the name of its environment variable. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_setting {
    /// The name ("PEERWAY_DEADLINE"). docs/configuration.md lists the names.
    pub name: *const c_char,
    /// The value, as in the environment ("5s"). Empty means the default.
    pub value: *const c_char,
}

// SAFETY: repr(C), the size first, and only integers and pointers.
unsafe impl Versioned for peerway_endpoint_options {
    const FIRST: usize = 112;
    const NAME: &'static str = "struct peerway_endpoint_options";
}

/// Creates an endpoint. It listens when this call returns. `options` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_new(
    options: *const peerway_endpoint_options,
    endpoint: *mut *mut peerway_endpoint,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, options) =
            unsafe { (arguments::handle(endpoint, "endpoint")?, arguments::read_if_any(options)?) };
        log::start();
        let builder = match &options {
            // SAFETY: the C contract, for the texts.
            Some(options) => unsafe { builder(options) }?,
            None => Endpoint::builder(),
        };
        out.set(handles::new(builder.build()?)?);
        Ok(())
    })
}

/// # Safety
///
/// The texts and lists of `options` follow the C contract.
unsafe fn builder(options: &peerway_endpoint_options) -> Answer<peerway::Builder> {
    if options.reserved != [0; 3] {
        return Err(Failure::bad("reserved must be zero"));
    }
    // SAFETY: required of the caller.
    let text = |at, name| unsafe { arguments::text(at, name) };
    let mut builder = Endpoint::builder();
    // SAFETY: required of the caller.
    for setting in unsafe { arguments::list(options.settings, options.settings_count, "settings") }?
    {
        let (name, value) = (text(setting.name, "name")?, text(setting.value, "value")?);
        let missing = || Failure::new(peerway_status::NullArgument, "a setting has no name");
        builder = builder.setting(name.ok_or_else(missing)?, value.unwrap_or_default());
    }
    if let Some(text) = text(options.bind, "bind")? {
        // Port 0 lets the system choose, if the text has no port.
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

/// Closes an endpoint: its transfers end, its threads stop, its sockets close. The handle stays
/// valid until it is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_close(
    endpoint: *const peerway_endpoint,
) -> peerway_status {
    call(|| {
        get(endpoint)?.close();
        Ok(())
    })
}

/// Closes an endpoint and frees its handle. Here and in all _free calls, null has no effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_free(endpoint: *mut peerway_endpoint) -> peerway_status {
    call(|| {
        if let Some(endpoint) = handles::free(endpoint)? {
            // Close explicitly, because another thread in a call may keep the value alive.
            endpoint.close();
        }
        Ok(())
    })
}

/// Sets *closed to whether an endpoint is closed or belongs to the parent process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_is_closed(
    endpoint: *const peerway_endpoint,
    closed: *mut bool,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(closed, "closed", true) }?;
        out.set(get(endpoint)?.is_closed());
        Ok(())
    })
}

/// Copies the metadata that other endpoints need to connect: a few hundred bytes, to be sent by any
/// means. Sets *len to the number of bytes whether or not they fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_metadata(
    endpoint: *const peerway_endpoint,
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> peerway_status {
    call(|| {
        let metadata = get(endpoint)?.metadata();
        // SAFETY: the C contract.
        unsafe { arguments::give(&metadata, buffer, room, len) }
    })
}

/// The identity of this life of the endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_incarnation(
    endpoint: *const peerway_endpoint,
    incarnation: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(incarnation, "incarnation", NOBODY) }?;
        out.set(get(endpoint)?.incarnation().into());
        Ok(())
    })
}

pub(crate) const NOBODY: peerway_incarnation = peerway_incarnation { bytes: [0; 16] };

/// The nth address that peers can connect to, best first, as text with its zero byte
/// ("10.0.0.1:5000"). Returns NOTHING if there are fewer addresses.
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
        // SAFETY: the C contract.
        unsafe { arguments::give_text(&address.to_string(), buffer, room, len) }
    })
}

/// Statistics of an endpoint.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_endpoint_stats {
    /// sizeof(struct peerway_endpoint_stats).
    pub size: usize,
    /// The number of processors that its threads may run on. peerway_endpoint_cpus lists them. 0 if
    /// unknown.
    pub cpus: u64,
    /// Peers with an open session.
    pub peers: u64,
    /// Transfers posted to all peers. This and the numbers below count peers that are gone too.
    pub transfers: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes that peers read from this endpoint.
    pub bytes_served: u64,
    /// Bytes that peers wrote to this endpoint.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_endpoint_stats {
    const FIRST: usize = 16;
    const NAME: &'static str = "struct peerway_endpoint_stats";
}

/// Fills in the statistics of an endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_statistics(
    endpoint: *const peerway_endpoint,
    stats: *mut peerway_endpoint_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(stats) }?;
        let stats = get(endpoint)?.stats();
        let traffic = stats.traffic;
        fill.set(peerway_endpoint_stats {
            size: 0,
            cpus: stats.cpus.len() as u64,
            peers: stats.peers as u64,
            transfers: traffic.transfers,
            bytes_written: traffic.bytes_written,
            bytes_read: traffic.bytes_read,
            bytes_served: traffic.bytes_served,
            bytes_landed: traffic.bytes_landed,
            lanes_lost: traffic.lanes_lost,
        });
        Ok(())
    })
}

/// The processors that the endpoint's threads may run on, as text with its zero byte ("0-3,8").
/// Empty if unknown.
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
        // SAFETY: the C contract.
        unsafe { arguments::give_text(&show_cpus(&cpus), buffer, room, len) }
    })
}

/// Checks metadata without connecting, and sets *incarnation to the identity of its endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_metadata_incarnation(
    metadata: *const c_void,
    len: usize,
    incarnation: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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

/// Connects to the endpoint that gave this metadata. A second connect to the same incarnation gives
/// a second handle to the same peer. If timeout_ns is zero, the endpoint's connect time-out
/// applies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_connect(
    endpoint: *const peerway_endpoint,
    metadata: *const c_void,
    len: usize,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, metadata) = unsafe {
            (arguments::handle(peer, "peer")?, arguments::bytes(metadata, len, "metadata")?)
        };
        let endpoint = get(endpoint)?;
        let timeout = arguments::time(timeout_ns).unwrap_or_else(|| endpoint.connect_timeout());
        out.set(handles::new(endpoint.connect_within(metadata, timeout)?)?);
        Ok(())
    })
}

/// Connects to the endpoint that listens at "host:port" ("[::1]:5000"), whatever its identity.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_connect_address(
    endpoint: *const peerway_endpoint,
    address: *const c_char,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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

/// Tries the addresses of a name one after the other, until one answers. Each gets an equal share
/// of the time that remains after the lookup of the name.
fn connect_to(endpoint: &Endpoint, text: &str, timeout: Duration) -> Answer<peerway::Peer> {
    let start = Instant::now();
    let found = text.to_socket_addrs().map_err(|error| {
        Failure::bad(format!(
            "address: '{text}' is not host:port, or the host cannot be resolved: {error}"
        ))
    })?;
    let addresses: Vec<SocketAddr> = found.collect();
    let mut untried = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut failure = Failure::bad(format!("address: the host of '{text}' has no address"));
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

/// Returns the next peer that connected to this endpoint. Waits at most timeout_ns; PENDING if none
/// connected. The endpoint accepts peers in any case; this call only returns them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_accept(
    endpoint: *const peerway_endpoint,
    timeout_ns: u64,
    peer: *mut *mut peerway_peer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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

/// Fills in a handle to every live peer. The caller frees each. Sets *count to the number of peers.
/// If there is not enough room, no handle is made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_peers(
    endpoint: *const peerway_endpoint,
    peers: *mut *mut peerway_peer,
    room: usize,
    count: *mut usize,
) -> peerway_status {
    call(|| {
        let live = get(endpoint)?.peers();
        // SAFETY: the C contract.
        unsafe { Out::new(count, "count", live.len()) }?;
        if live.len() > room {
            let sentence = format!("there is room for {room} peers, but there are {}", live.len());
            return Err(Failure::new(peerway_status::TooSmall, sentence));
        }
        if live.is_empty() {
            return Ok(());
        }
        // SAFETY: the C contract.
        unsafe { Out::new(peers, "peers", std::ptr::null_mut()) }?;
        for (at, peer) in live.into_iter().enumerate() {
            let handle = handles::new(peer)?;
            // SAFETY: the C contract, and there is room for `live.len()` handles.
            unsafe { peers.add(at).write(handle) };
        }
        Ok(())
    })
}

/// Returns the oldest notification. Waits at most timeout_ns; PENDING if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_notification(
    endpoint: *const peerway_endpoint,
    timeout_ns: u64,
    notification: *mut *mut peerway_notification,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
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

/// Sets *value to the number of arrivals that the counter has counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_counter(
    endpoint: *const peerway_endpoint,
    id: u32,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(value, "value", 0) }?;
        out.set(get(endpoint)?.counter(id));
        Ok(())
    })
}

/// Waits until the counter has counted at least `wanted` arrivals. PENDING if it has not within
/// timeout_ns. Sets *value to the count. `value` may be null.
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
            // SAFETY: the C contract.
            unsafe { Out::new(value, "value", 0) }?.set(endpoint.counter(id));
        }
        reached
    })
}

/// Removes a counter, so that its id can be used again from zero. Sets *value to its last count.
/// `value` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_endpoint_reset_counter(
    endpoint: *const peerway_endpoint,
    id: u32,
    value: *mut u64,
) -> peerway_status {
    call(|| {
        let count = get(endpoint)?.reset_counter(id);
        if !value.is_null() {
            // SAFETY: the C contract.
            unsafe { Out::new(value, "value", count) }?;
        }
        Ok(())
    })
}
