//! `Proxy`, for transfers that kernels issue themselves, with `Window`, `Armed` and `Fault`.

use std::sync::{Arc, Mutex};

use peerway::driven::{self, FaultCode, Forward, HostProducerError};
use peerway::gpu::{CopierKind, NoSuchCopier};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arguments::{Gpu, Int, Time};
use crate::buffer::{self, Order, Use};
use crate::endpoint::{Endpoint, release};
use crate::gpu::without_interpreter;
use crate::host_producer::HostProducer;
use crate::peer::Peer;
use crate::region::{LocalSlice, Region};
use crate::{arguments, errors, waiting};

/// Command rings that kernels push into, and threads that execute the commands.
///
/// ``gpu`` is the GPU whose kernels push: a number or a ``torch.device``. Without a GPU,
/// host threads push by a ``HostProducer``. ``copier`` selects how GPUs copy memory that
/// they can access: ``launched``, ``resident`` (lower latency, but takes two
/// multiprocessors for each thread) or ``engines``. Close the proxy, or leave its ``with``
/// block, after every kernel that uses it has ended.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Proxy {
    endpoint: peerway::Endpoint,
    /// `None` after `close`.
    proxy: Mutex<Option<Arc<driven::Proxy>>>,
    gpu: Option<u32>,
}

impl Proxy {
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<Arc<driven::Proxy>> {
        let proxy = self.proxy.lock().unwrap().clone();
        proxy.ok_or_else(|| errors::raise(py, "ProxyClosed", "the proxy is closed"))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.proxy.lock().unwrap().is_none()
    }

    /// The handle for a kernel of this GPU. `at` names the argument in errors.
    pub(crate) fn handle_for(&self, py: Python<'_>, at: &str, gpu: u32) -> PyResult<u64> {
        let proxy = self.open(py)?;
        let whose = match self.gpu {
            Some(own) if own == gpu => return Ok(proxy.handle()),
            Some(other) => format!("kernels of GPU {other}"),
            None => "host threads".to_owned(),
        };
        let what = format!(
            "{at}: the proxy is for {whose}, but the kernel is on GPU {gpu}; make a proxy for GPU {gpu}"
        );
        Err(errors::raise(py, "InvalidCommand", what))
    }

    fn counter_of(&self, py: Python<'_>, counter: u16) -> PyResult<Arc<driven::Proxy>> {
        let proxy = self.open(py)?;
        let (number, count) = (u32::from(counter), proxy.counters());
        if number < count {
            return Ok(proxy);
        }
        Err(errors::host_producer(py, HostProducerError::NoSuch { what: "counter", number, count }))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let proxy = self.proxy.lock().unwrap().take();
        // Dropping the last reference joins the proxy's threads.
        without_interpreter(move || drop(proxy));
        release(&self.endpoint);
    }
}

#[pymethods]
impl Proxy {
    #[new]
    #[pyo3(
        signature = (
            endpoint, gpu=None, *, threads=None, rings=None, slots=Int(2048), peers=Int(64),
            counters=Int(1024), timeout=Time::Seconds(10.0), copier="launched"
        ),
        text_signature = "(endpoint, gpu=None, *, threads=None, rings=None, slots=2048, peers=64, counters=1024, timeout=10.0, copier='launched')"
    )]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        endpoint: &Bound<'_, Endpoint>,
        gpu: Option<Gpu>,
        threads: Option<Int<usize>>,
        rings: Option<Int<usize>>,
        slots: Int<u32>,
        peers: Int<usize>,
        counters: Int<usize>,
        timeout: Time,
        copier: &str,
    ) -> PyResult<Self> {
        let copier: CopierKind = copier
            .parse()
            .map_err(|error: NoSuchCopier| PyValueError::new_err(error.to_string()))?;
        let endpoint = endpoint.get().endpoint.clone();
        let mut builder = driven::Proxy::builder(&endpoint)
            .slots(slots.0)
            .peers(peers.0)
            .counters(counters.0)
            .timeout(arguments::time("timeout", &timeout)?)
            .copier(copier);
        let gpu = gpu.map(|gpu| gpu.0);
        if let Some(gpu) = gpu {
            builder = builder.gpu(gpu);
        }
        if let Some(Int(threads)) = threads {
            builder = builder.threads(threads);
        }
        if let Some(Int(rings)) = rings {
            builder = builder.rings(rings);
        }
        let made = py.detach(|| builder.build());
        let proxy = made.map_err(|error| errors::proxy_made(py, error))?;
        Ok(Self { endpoint, proxy: Mutex::new(Some(Arc::new(proxy))), gpu })
    }

    /// The address of a ``peerway_proxy`` (``peerway_device.cuh``): the argument for kernels.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.handle())
    }

    /// The GPU whose kernels push commands; None when host threads push.
    #[getter]
    fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    /// Number of rings.
    #[getter]
    fn rings(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.open(py)?.rings())
    }

    /// Whether the proxy was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.is_closed()
    }

    /// Makes memory a window, which commands address by offset.
    ///
    /// Peers that receive a later ``peer_info`` can address it, too. ``memory`` is a region, or
    /// an object with memory, which the proxy registers and keeps alive.
    fn window(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<Window> {
        let proxy = self.open(py)?;
        let region = match memory.cast::<Region>() {
            Ok(region) if !region.get().writable => return Err(buffer::refuse_readonly("memory")),
            Ok(region) => region.get().region.clone(),
            Err(_) => buffer::register(&self.endpoint, "memory", memory, Use::Write, Order::Row)?,
        };
        let made = py.detach(|| proxy.window(&region));
        let window = made.map_err(|error| errors::proxy(py, error))?;
        Ok(Window { window })
    }

    /// Returns the bytes that a peer's proxy needs to send to this one: the current windows and
    /// the counters.
    fn peer_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let info = self.open(py)?.peer_info().map_err(|error| errors::proxy(py, error))?;
        Ok(PyBytes::new(py, &info))
    }

    /// The former name of ``peer_info``.
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.peer_info(py)
    }

    /// Sends commands for ``number`` to this peer and returns the peer's windows. ``info`` is
    /// the result of ``peer_info()`` of the peer's proxy.
    fn add_peer(
        &self,
        py: Python<'_>,
        number: Int<u16>,
        peer: &Bound<'_, Peer>,
        info: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Window>> {
        let proxy = self.open(py)?;
        let (peer, info) = (peer.get().peer.clone(), arguments::bytes("info", info)?.to_vec());
        let added = waiting::aside(py, None, move || proxy.add_peer(number.0, &peer, &info))?;
        let Some(added) = added else {
            return Err(errors::raise(py, "ConnectTimeout", "the peer did not answer in time"));
        };
        let windows = added.map_err(|error| errors::proxy(py, error))?;
        Ok(windows.into_iter().map(|window| Window { window }).collect())
    }

    /// Makes the threads poll for commands until ``disarm()`` of the returned object.
    fn arm(slf: &Bound<'_, Self>) -> PyResult<Armed> {
        let armed = Self::armed(slf);
        armed.arm(slf.py())?;
        Ok(armed)
    }

    /// For a ``with`` statement: the threads poll for commands inside the block and sleep
    /// outside it.
    fn armed(slf: &Bound<'_, Self>) -> Armed {
        Armed { proxy: slf.clone().unbind(), held: Mutex::new(None) }
    }

    /// Returns the value of a counter of this proxy.
    fn counter(&self, py: Python<'_>, counter: Int<u16>) -> PyResult<u64> {
        Ok(self.counter_of(py, counter.0)?.counter(counter.0))
    }

    /// Waits until a counter of this proxy reaches ``value`` and returns the counter's value.
    /// Raises ``CounterTimeout``.
    #[pyo3(signature = (counter, value, timeout=None))]
    fn wait_counter(
        &self,
        py: Python<'_>,
        counter: Int<u16>,
        value: Int<u64>,
        timeout: Option<Time>,
    ) -> PyResult<u64> {
        let (Int(counter), Int(value)) = (counter, value);
        let proxy = self.counter_of(py, counter)?;
        let timeout = waiting::timeout("timeout", timeout)?;
        let reached = waiting::until(py, timeout, |left| {
            let count = proxy.wait_counter(counter, value, left);
            let over = self.is_closed() || self.endpoint.is_closed();
            (count >= value).then_some(Ok(count)).or_else(|| over.then_some(Err(())))
        })?;
        match reached {
            Some(Ok(count)) => Ok(count),
            Some(Err(())) if self.is_closed() => self.open(py).map(|_| 0),
            Some(Err(())) => Err(errors::raise(py, "EndpointClosed", "the endpoint is closed")),
            None => {
                let count = proxy.counter(counter);
                let what = format!("counter {counter} is at {count}, not at {value}");
                Err(errors::raise(py, "CounterTimeout", what))
            }
        }
    }

    /// Copies the bytes of ``source`` to each of ``to`` whenever ``counter`` rises, while the
    /// proxy is armed.
    ///
    /// A rise of the counter means that the bytes of ``source`` have arrived. After the copies,
    /// the proxy increments its own counters in ``count`` and the peers' counters in ``answer``
    /// (pairs of peer and counter). Places are regions, parts of regions, or ``(region, offset,
    /// nbytes)``.
    #[pyo3(signature = (counter, source, to=Vec::new(), count=Vec::new(), answer=Vec::new()), text_signature = "($self, counter, source, to=(), count=(), answer=())")]
    fn forward(
        &self,
        py: Python<'_>,
        counter: Int<u16>,
        source: &Bound<'_, PyAny>,
        to: Vec<Bound<'_, PyAny>>,
        count: Vec<Int<u16>>,
        answer: Vec<(Int<u16>, Int<u16>)>,
    ) -> PyResult<()> {
        let proxy = self.open(py)?;
        let mut rule = Forward::new(counter.0, place("source", source, Use::Read)?);
        for object in &to {
            rule = rule.to(place("to", object, Use::Write)?);
        }
        for Int(counter) in count {
            rule = rule.count(counter);
        }
        for (Int(peer), Int(counter)) in answer {
            rule = rule.answer(peer, counter);
        }
        py.detach(|| proxy.forward(rule)).map_err(|error| errors::proxy(py, error))
    }

    /// Removes the forwarding rule of a counter. Returns False when the counter has no rule.
    fn stop_forwarding(&self, py: Python<'_>, counter: Int<u16>) -> PyResult<bool> {
        Ok(self.open(py)?.stop_forwarding(counter.0))
    }

    /// Returns the first command that failed since the last call, or None. This starts a new
    /// fault epoch: a later ``quiet`` reports only commands that fail after this call.
    fn take_fault(&self, py: Python<'_>) -> PyResult<Option<Fault>> {
        Ok(self.open(py)?.take_fault().map(|fault| Fault { fault }))
    }

    /// Counts of ``commands``, ``puts``, ``bytes``, ``counts``, ``requests`` (submissions that
    /// carried puts; also under the former name ``flights``) and ``faults``.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.open(py)?.stats();
        let dict = PyDict::new(py);
        dict.set_item("commands", stats.commands)?;
        dict.set_item("puts", stats.puts)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("counts", stats.counts)?;
        dict.set_item("requests", stats.requests)?;
        dict.set_item("flights", stats.requests)?;
        dict.set_item("faults", stats.faults)?;
        Ok(dict)
    }

    /// Returns a producer that pushes commands into one ring from the host, as a kernel does.
    #[pyo3(signature = (ring=Int(0)), text_signature = "($self, ring=0)")]
    fn host_producer(slf: &Bound<'_, Self>, ring: Int<u32>) -> PyResult<HostProducer> {
        let py = slf.py();
        let producer = slf.get().open(py)?.host_producer(ring.0);
        let producer = producer.map_err(|error| errors::host_producer(py, error))?;
        Ok(HostProducer::new(slf.clone().unbind(), producer, ring.0))
    }

    /// The former name of ``host_producer``.
    #[pyo3(signature = (ring=Int(0)), text_signature = "($self, ring=0)")]
    fn pusher(slf: &Bound<'_, Self>, ring: Int<u32>) -> PyResult<HostProducer> {
        Self::host_producer(slf, ring)
    }

    /// Stops the threads and frees the memory. Every kernel that has the handle must have
    /// ended.
    fn close(&self, py: Python<'_>) {
        let proxy = self.proxy.lock().unwrap().take();
        py.detach(|| drop(proxy));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let of = self.gpu.map_or_else(|| "the host".to_owned(), |gpu| format!("GPU {gpu}"));
        match &*self.proxy.lock().unwrap() {
            Some(proxy) => format!("<peerway.Proxy of {of} with {} rings>", proxy.rings()),
            None => format!("<peerway.Proxy of {of}, closed>"),
        }
    }
}

/// The source or a destination of a forwarding rule.
fn place(name: &str, object: &Bound<'_, PyAny>, needs: Use) -> PyResult<peerway::LocalSlice> {
    let (slice, writable) = if let Ok(region) = object.cast::<Region>() {
        (region.get().region.all(), region.get().writable)
    } else if let Ok(slice) = object.cast::<LocalSlice>() {
        (slice.get().slice.clone(), slice.get().writable)
    } else if let Ok((region, Int(offset), Int(nbytes))) =
        object.extract::<(Bound<'_, Region>, Int<u64>, Int<u64>)>()
    {
        let end = offset.checked_add(nbytes).ok_or_else(|| {
            PyBufferError::new_err(format!("{name}: offset {offset} + {nbytes} bytes overflows"))
        })?;
        (region.get().region.slice(offset..end), region.get().writable)
    } else {
        let wanted = "a region, a part of one, or (region, offset, nbytes)";
        return Err(arguments::wrong_type(name, object, wanted));
    };
    if needs == Use::Write && !writable {
        return Err(buffer::refuse_readonly(name));
    }
    Ok(slice)
}

/// Memory that commands address. An address is ``base`` plus the offset within the window.
#[pyclass(frozen, eq, hash, module = "peerway")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Window {
    window: driven::Window,
}

#[pymethods]
impl Window {
    /// The offset of the window's first byte.
    #[getter]
    fn base(&self) -> u64 {
        self.window.base
    }

    /// Bytes in the window.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.window.len
    }

    fn __len__(&self) -> usize {
        self.window.len as usize
    }

    fn __repr__(&self) -> String {
        format!("<peerway.Window of {} bytes at {}>", self.window.len, self.window.base)
    }
}

/// Makes a proxy's threads poll for commands. Keep the proxy armed from before kernels are
/// launched until after they have ended.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Armed {
    proxy: Py<Proxy>,
    held: Mutex<Option<driven::Armed>>,
}

impl Armed {
    fn arm(&self, py: Python<'_>) -> PyResult<()> {
        let proxy = self.proxy.get().open(py)?;
        self.held.lock().unwrap().get_or_insert_with(|| proxy.arm());
        Ok(())
    }
}

#[pymethods]
impl Armed {
    /// Whether this object keeps the proxy armed.
    #[getter]
    fn active(&self) -> bool {
        self.held.lock().unwrap().is_some()
    }

    /// Lets the threads sleep, unless another object keeps the proxy armed.
    fn disarm(&self) {
        drop(self.held.lock().unwrap().take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().arm(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.disarm();
    }
}

/// A command of a kernel that failed.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Fault {
    fault: driven::Fault,
}

#[pymethods]
impl Fault {
    /// The reason, as one of the numbers ``PEERWAY_FAULT_*``.
    #[getter]
    fn code(&self) -> u32 {
        self.fault.code as u32
    }

    /// The reason in a word. ``operation``, ``peer``, ``source``, ``destination`` or
    /// ``counter`` names the field of the command that is not valid. ``peer-gone``,
    /// ``refused``, ``timed-out`` or ``failed`` says how the transfer ended.
    #[getter]
    fn reason(&self) -> &'static str {
        match self.fault.code {
            FaultCode::Operation => "operation",
            FaultCode::Peer => "peer",
            FaultCode::Source => "source",
            FaultCode::Destination => "destination",
            FaultCode::Counter => "counter",
            FaultCode::PeerGone => "peer-gone",
            FaultCode::Refused => "refused",
            FaultCode::TimedOut => "timed-out",
            _ => "failed",
        }
    }

    /// The number of the peer that the command was for.
    #[getter]
    fn peer(&self) -> u16 {
        self.fault.peer
    }

    /// The address of that peer, or None if the number names no peer.
    #[getter]
    fn address(&self) -> Option<String> {
        self.fault.address.map(|address| address.to_string())
    }

    /// The ring that the command came from.
    #[getter]
    fn ring(&self) -> u32 {
        self.fault.ring
    }

    /// The operation of the command, as one of the numbers ``PEERWAY_OP_*``.
    #[getter]
    fn op(&self) -> u8 {
        self.fault.op
    }

    /// The position of the command in the ring; for commands submitted together, the position
    /// of the first.
    #[getter]
    fn position(&self) -> u64 {
        self.fault.position
    }

    fn __str__(&self) -> String {
        self.fault.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<peerway.Fault: {}>", self.fault)
    }
}
