//! `Endpoint` and `Notification`.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use peerway::{AcceptError, Pin};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::arguments::{Int, Time};
use crate::buffer::{self, Order, Use};
use crate::gpu::GpuMemory;
use crate::peer::Peer;
use crate::region::Region;
use crate::{arguments, errors, log, region, waiting};

/// Listens for peers, connects to them, and owns registered memory.
///
/// Settings that are not given come from the environment. ``peerway doctor --config`` lists
/// the variables.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Endpoint {
    pub(crate) endpoint: peerway::Endpoint,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        release(&self.endpoint);
    }
}

/// Call before dropping a reference to an endpoint. The last drop joins the endpoint's threads,
/// which must not block Python threads, so this closes the endpoint with the interpreter released.
pub(crate) fn release(endpoint: &peerway::Endpoint) {
    if endpoint.is_last() {
        // When the interpreter is shutting down, the drop blocks no Python thread.
        Python::try_attach(|py| py.detach(|| endpoint.close()));
    }
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (
        *, bind=None, advertise=None, transport=None, deadline=None, detect=None, fence=None,
        connect_timeout=None, spin=None, lanes=None, shards=None, copy_threads=None, slots=None,
        notify_bytes=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        bind: Option<&str>,
        advertise: Option<&str>,
        transport: Option<&str>,
        deadline: Option<Time>,
        detect: Option<Time>,
        fence: Option<Time>,
        connect_timeout: Option<Time>,
        spin: Option<Time>,
        lanes: Option<Int<u16>>,
        shards: Option<Int<u16>>,
        copy_threads: Option<Int<u16>>,
        slots: Option<Int<u32>>,
        notify_bytes: Option<Int<u64>>,
    ) -> PyResult<Self> {
        log::follow(py)?;
        let mut builder = peerway::Endpoint::builder();
        if let Some(text) = bind {
            // Port 0 lets the system choose a port.
            let addr = match text.parse::<IpAddr>() {
                Ok(ip) => Ok(SocketAddr::new(ip, 0)),
                Err(_) => text.parse(),
            };
            let addr =
                addr.map_err(|_| not_an("bind", text, "IP address with or without a port"))?;
            builder = builder.bind(addr);
        }
        if let Some(text) = advertise {
            let addr = text.parse().map_err(|_| not_an("advertise", text, "IP address"))?;
            builder = builder.advertise(addr);
        }
        if let Some(text) = transport {
            let pin: Pin = text.parse().map_err(|_| {
                let why = format!("transport: '{text}' is not one of {}", Pin::ALLOWED);
                errors::raise(py, "InvalidSetting", why)
            })?;
            builder = builder.transport(pin);
        }
        for (name, value, set) in [
            ("deadline", deadline, peerway::Builder::deadline as fn(_, Duration) -> _),
            ("detect", detect, peerway::Builder::detect),
            ("fence", fence, peerway::Builder::fence),
            ("connect_timeout", connect_timeout, peerway::Builder::connect_timeout),
            ("spin", spin, peerway::Builder::spin),
        ] {
            if let Some(value) = value {
                builder = set(builder, arguments::time(name, &value)?);
            }
        }
        if let Some(Int(lanes)) = lanes {
            builder = builder.lanes(lanes);
        }
        if let Some(Int(shards)) = shards {
            builder = builder.shards(shards);
        }
        if let Some(Int(threads)) = copy_threads {
            builder = builder.copy_threads(threads);
        }
        if let Some(Int(slots)) = slots {
            builder = builder.slots(slots);
        }
        if let Some(Int(bytes)) = notify_bytes {
            builder = builder.notify_bytes(bytes);
        }
        let endpoint = py.detach(|| builder.build()).map_err(|error| errors::build(py, error))?;
        Ok(Self { endpoint })
    }

    /// The bytes that a peer needs to connect. Send them to the peer by any means.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.endpoint.metadata())
    }

    /// The identity of this incarnation of the endpoint. A restart changes it.
    #[getter]
    fn incarnation(&self) -> String {
        self.endpoint.incarnation().to_string()
    }

    /// The addresses at which peers can connect, best first.
    #[getter]
    fn addresses(&self) -> Vec<(String, u16)> {
        self.endpoint.addresses().iter().map(|a| (a.ip().to_string(), a.port())).collect()
    }

    /// True after ``close()``, and in a child process after a fork.
    #[getter]
    fn closed(&self) -> bool {
        self.endpoint.is_closed()
    }

    /// ``peers``: those with an open session. The keys of ``Peer.stats``, summed over all peers,
    /// also those that are gone. ``cpus``: the processors that the endpoint's threads may run on.
    /// ``quarantine``: the result of ``peerway.quarantine()``. ``refusals``: what the endpoint has
    /// refused to peers, by reason, such as ``sessions`` or ``counts_without_right``.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.endpoint.stats();
        let dict = PyDict::new(py);
        dict.set_item("peers", stats.peers)?;
        crate::peer::set_traffic(&dict, &stats.traffic)?;
        dict.set_item("cpus", stats.cpus)?;
        dict.set_item("quarantine", region::quarantine(py)?)?;
        let refusals = PyDict::new(py);
        let refused = stats.refusals;
        for (reason, count) in [
            ("handshakes", refused.handshakes),
            ("sessions", refused.sessions),
            ("lanes", refused.lanes),
            ("descriptors", refused.descriptors),
            ("other_users", refused.other_users),
            ("message_bytes", refused.message_bytes),
            ("slow_messages", refused.slow_messages),
            ("notifications", refused.notifications),
            ("counters", refused.counters),
            ("counts_without_right", refused.counts_without_right),
            ("corrupt_records", refused.corrupt_records),
            ("windows", refused.windows),
        ] {
            refusals.set_item(reason, count)?;
        }
        dict.set_item("refusals", refusals)?;
        Ok(dict)
    }

    /// Connects to an endpoint by its metadata, ``"host:port"`` or ``(host, port)``.
    ///
    /// A second connect to the same incarnation returns the same peer.
    #[pyo3(signature = (to, timeout=None))]
    fn connect(
        &self,
        py: Python<'_>,
        to: &Bound<'_, PyAny>,
        timeout: Option<Time>,
    ) -> PyResult<Peer> {
        let timeout = waiting::timeout("timeout", timeout)?;
        log::follow(py)?;
        let target = target(to)?;
        let endpoint = self.endpoint.clone();
        let timeout = timeout.unwrap_or_else(|| endpoint.connect_timeout());
        let start = Instant::now();
        let name = match &target {
            Target::Metadata(_) => "the peer".to_owned(),
            Target::Host(host, port) => format!("{host}:{port}"),
        };
        let peer = waiting::aside(py, Some(timeout), move || match &target {
            Target::Metadata(metadata) => {
                Ok::<_, String>(endpoint.connect_within(metadata, timeout))
            }
            Target::Host(host, port) => {
                let addr = resolve(host, *port)?;
                let left = timeout.saturating_sub(start.elapsed());
                Ok(endpoint.connect_addr_within(addr, left))
            }
        })?;
        match peer {
            Some(Ok(Ok(peer))) => Ok(Peer::new(self.endpoint.clone(), peer)),
            Some(Ok(Err(error))) => Err(errors::connect(py, error)),
            Some(Err(unresolved)) => Err(errors::raise(py, "ConnectError", unresolved)),
            None => {
                let seconds = timeout.as_secs_f64();
                let why = format!("connecting to {name} timed out after {seconds} s");
                Err(errors::raise(py, "ConnectTimeout", why))
            }
        }
    }

    /// Returns the next peer that connected to this endpoint. Raises ``AcceptTimeout``.
    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<Time>) -> PyResult<Peer> {
        let timeout = waiting::timeout("timeout", timeout)?;
        let answer = waiting::until(py, timeout, |left| match self.endpoint.accept(left) {
            Err(AcceptError::TimedOut) => None,
            answer => Some(answer),
        })?;
        let peer = answer.unwrap_or(Err(AcceptError::TimedOut));
        let peer = peer.map_err(|error| errors::accept(py, error))?;
        Ok(Peer::new(self.endpoint.clone(), peer))
    }

    /// Returns every live peer.
    fn peers(&self) -> Vec<Peer> {
        let peers = self.endpoint.peers();
        peers.into_iter().map(|peer| Peer::new(self.endpoint.clone(), peer)).collect()
    }

    /// Registers writable, contiguous memory. The region keeps the object alive.
    ///
    /// The bytes of an array in Fortran order are not in the order of its elements, so such an
    /// array is registered only with ``order="any"``.
    #[pyo3(signature = (buffer, *, order="C"))]
    fn register(&self, buffer: &Bound<'_, PyAny>, order: &str) -> PyResult<Region> {
        let order = match order {
            "C" => Order::Row,
            "any" => Order::Any,
            _ => return Err(not_an("order", order, "order: give 'C' or 'any'")),
        };
        let region = buffer::register(&self.endpoint, "buffer", buffer, Use::Write, order)?;
        Ok(Region::new(region))
    }

    /// Registers memory by address. The region keeps ``owner`` alive. Without an owner, the
    /// caller must keep the memory valid until the region and all its transfers are gone.
    #[pyo3(signature = (address, nbytes, owner=None))]
    fn register_address(
        &self,
        py: Python<'_>,
        address: Int<usize>,
        nbytes: Int<usize>,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Region> {
        let owner = owner.unwrap_or_else(|| py.None());
        buffer::at_address(py, &self.endpoint, address.0, nbytes.0, owner)
    }

    /// Allocates zeroed memory that local peers can map, on the host or on a GPU.
    ///
    /// The region exposes host memory by the buffer protocol and GPU memory by
    /// ``__cuda_array_interface__``.
    #[pyo3(signature = (nbytes, *, gpu=None))]
    fn allocate(
        &self,
        py: Python<'_>,
        nbytes: Int<usize>,
        gpu: Option<Int<u32>>,
    ) -> PyResult<Region> {
        let region = match gpu {
            None => self.endpoint.allocate(nbytes.0).map_err(|error| errors::register(py, error)),
            Some(Int(gpu)) => {
                let memory = Bound::new(py, GpuMemory::allocate(py, gpu, nbytes.0 as u64)?)?;
                buffer::register(&self.endpoint, "gpu", memory.as_any(), Use::Write, Order::Row)
            }
        };
        region.map(Region::new)
    }

    /// Returns the oldest notification, or None after ``timeout`` seconds. ``None`` as the
    /// timeout waits without limit.
    #[pyo3(signature = (timeout=Some(Time::Seconds(0.0))), text_signature = "($self, timeout=0.0)")]
    fn notification(
        &self,
        py: Python<'_>,
        timeout: Option<Time>,
    ) -> PyResult<Option<Notification>> {
        let timeout = waiting::timeout("timeout", timeout)?;
        let found = waiting::until(py, timeout, |left| {
            self.endpoint
                .notification(left)
                .map(Some)
                .or_else(|| self.endpoint.is_closed().then_some(None))
        })?;
        Ok(found.flatten().map(Notification::from))
    }

    /// Returns the number of arrivals counted under this id.
    fn counter(&self, id: Int<u32>) -> u64 {
        self.endpoint.counter(id.0)
    }

    /// Waits for at least ``n`` arrivals and returns the count. Raises ``CounterTimeout``.
    #[pyo3(signature = (id, n, timeout=None))]
    fn wait_counter(
        &self,
        py: Python<'_>,
        id: Int<u32>,
        n: Int<u64>,
        timeout: Option<Time>,
    ) -> PyResult<u64> {
        let (Int(id), Int(n)) = (id, n);
        let timeout = waiting::timeout("timeout", timeout)?;
        let reached = waiting::until(py, timeout, |left| {
            let count = self.endpoint.wait_counter(id, n, left);
            let over = self.endpoint.is_closed();
            (count >= n).then_some(Ok(count)).or_else(|| over.then_some(Err(())))
        })?;
        match reached {
            Some(Ok(count)) => Ok(count),
            Some(Err(())) => Err(errors::raise(py, "EndpointClosed", "the endpoint is closed")),
            None => {
                let count = self.endpoint.counter(id);
                let what = format!("counter {id} is at {count}, not at {n}");
                Err(errors::raise(py, "CounterTimeout", what))
            }
        }
    }

    /// Removes a counter and returns its last value.
    fn reset_counter(&self, id: Int<u32>) -> u64 {
        self.endpoint.reset_counter(id.0)
    }

    /// Ends all transfers, stops the endpoint's threads and closes its sockets.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.endpoint.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let place = self.endpoint.addresses().first().map(ToString::to_string).unwrap_or_default();
        format!("<peerway.Endpoint {} at {place}>", self.endpoint.incarnation())
    }
}

/// The endpoint to connect to.
enum Target {
    Metadata(Vec<u8>),
    Host(String, u16),
}

fn target(to: &Bound<'_, PyAny>) -> PyResult<Target> {
    if let Ok(bytes) = to.cast::<PyBytes>() {
        return Ok(Target::Metadata(bytes.as_bytes().to_vec()));
    }
    if let Ok(text) = to.cast::<PyString>() {
        let (host, port) = host_and_port("to", &text.to_cow()?)?;
        return Ok(Target::Host(host, port));
    }
    if let Ok((host, Int(port))) = to.extract::<(String, Int<u16>)>() {
        return Ok(Target::Host(host, port));
    }
    Err(arguments::wrong_type("to", to, "metadata (bytes), 'host:port' or (host, port)"))
}

/// The two parts of `host:port` or `[v6]:port`.
fn host_and_port(name: &str, text: &str) -> PyResult<(String, u16)> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = parts.ok_or_else(|| not_an(name, text, "address of the form host:port"))?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Ok((host.to_owned(), port))
}

/// Resolves a host name. The system sets no limit on the time that this takes.
fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    match (host, port).to_socket_addrs().map(|mut found| found.next()) {
        Ok(Some(addr)) => Ok(addr),
        Ok(None) => Err(format!("the host '{host}' has no address")),
        Err(error) => Err(format!("cannot find the host '{host}': {error}")),
    }
}

fn not_an(name: &str, text: &str, what: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: '{text}' is not an {what}"))
}

/// A message from a peer.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Notification {
    sender: String,
    message: Vec<u8>,
}

impl From<peerway::Notification> for Notification {
    fn from(from: peerway::Notification) -> Self {
        Self { sender: from.from.to_string(), message: from.message }
    }
}

#[pymethods]
impl Notification {
    /// The incarnation of the sender.
    #[getter]
    fn sender(&self) -> &str {
        &self.sender
    }

    /// The bytes of the message.
    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.message)
    }

    fn __repr__(&self) -> String {
        format!("<peerway.Notification of {} bytes from {}>", self.message.len(), self.sender)
    }
}
