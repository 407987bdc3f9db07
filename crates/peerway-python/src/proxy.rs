//! `Proxy`: transfers that kernels issue themselves, and what goes with it.

use std::sync::{Arc, Mutex};

use peerway::driven::{self, FaultCode, Forward, HostProducerError};
use peerway::gpu::{CopierKind, NoSuchCopier};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arguments::{Gpu, Int};
use crate::buffer::{self, Use};
use crate::endpoint::{Endpoint, release};
use crate::gpu::without_interpreter;
use crate::host_producer::HostProducer;
use crate::peer::Peer;
use crate::region::{LocalSlice, Region};
use crate::{arguments, errors, waiting};

/// Rings that kernels push commands into, and threads that carry them out.
///
/// ``gpu`` is the GPU whose kernels push: a number or a ``torch.device``. Without one, processors do, by a
/// ``HostProducer``. ``copier`` is how GPUs copy what they reach: ``launched``, ``resident`` (sooner, and takes two
/// multiprocessors for each thread) or ``engines``. Close it, or leave its ``with`` block, when every kernel that
/// was given it has ended.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Proxy {
    endpoint: peerway::Endpoint,
    /// None once it is closed.
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

    /// What a kernel of that GPU is given; `at` names the argument.
    pub(crate) fn handle_for(&self, py: Python<'_>, at: &str, gpu: u32) -> PyResult<u64> {
        let proxy = self.open(py)?;
        let whose = match self.gpu {
            Some(own) if own == gpu => return Ok(proxy.handle()),
            Some(other) => format!("kernels of GPU {other}"),
            None => "processors".to_owned(),
        };
        let what = format!("{at}: the proxy is for {whose}, and the kernel is on GPU {gpu}");
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
        // The last reference joins threads.
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
            counters=Int(1024), timeout=10.0, copier="launched"
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
        timeout: f64,
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
            .timeout(arguments::seconds("timeout", timeout)?)
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

    /// What a kernel is given: the address of a ``peerway_proxy`` (``peerway_device.cuh``).
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.handle())
    }

    /// The GPU whose kernels push; None where processors do.
    #[getter]
    fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    /// Rings that there are.
    #[getter]
    fn rings(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.open(py)?.rings())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.is_closed()
    }

    /// Makes memory a window: commands name it by offset, and so do those of peers that get a later ``peer_info``.
    ///
    /// A region, or an object with memory, which is registered and kept.
    fn window(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<Window> {
        let proxy = self.open(py)?;
        let region = match memory.cast::<Region>() {
            Ok(region) if !region.get().writable => return Err(buffer::refuse_readonly("memory")),
            Ok(region) => region.get().region.clone(),
            Err(_) => buffer::register(&self.endpoint, "memory", memory, Use::Write)?,
        };
        let made = py.detach(|| proxy.window(&region));
        let window = made.map_err(|error| errors::proxy(py, error))?;
        Ok(Window { window })
    }

    /// What a peer's proxy needs to send to this one: the windows that there are now, and the counters.
    fn peer_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let info = self.open(py)?.peer_info().map_err(|error| errors::proxy(py, error))?;
        Ok(PyBytes::new(py, &info))
    }

    /// The former name of ``peer_info``.
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.peer_info(py)
    }

    /// Sends commands for ``number`` to this peer; ``info`` is its proxy's ``peer_info()``. Returns the peer's windows.
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

    /// Has the threads look for commands, until the answer's ``disarm()``.
    fn arm(slf: &Bound<'_, Self>) -> PyResult<Armed> {
        let armed = Self::armed(slf);
        armed.arm(slf.py())?;
        Ok(armed)
    }

    /// For a ``with`` statement: the threads look for commands inside it, and sleep outside.
    fn armed(slf: &Bound<'_, Self>) -> Armed {
        Armed { proxy: slf.clone().unbind(), held: Mutex::new(None) }
    }

    /// Where a counter of ours is.
    fn counter(&self, py: Python<'_>, counter: Int<u16>) -> PyResult<u64> {
        Ok(self.counter_of(py, counter.0)?.counter(counter.0))
    }

    /// Waits until a counter of ours has come to a value; returns where it is. Raises ``CounterTimeout``.
    #[pyo3(signature = (counter, value, timeout=None))]
    fn wait_counter(
        &self,
        py: Python<'_>,
        counter: Int<u16>,
        value: Int<u64>,
        timeout: Option<f64>,
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

    /// Whenever ``counter`` rises, the bytes of ``source`` have arrived: they are copied to each of ``to``, then
    /// counters of ours (``count``) and of peers (``answer``: pairs of peer and counter) go up. While it is armed.
    ///
    /// Places are regions, parts of regions, or ``(region, offset, nbytes)``.
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

    /// Takes the rule of a counter away; False where it had none.
    fn stop_forwarding(&self, py: Python<'_>, counter: Int<u16>) -> PyResult<bool> {
        Ok(self.open(py)?.stop_forwarding(counter.0))
    }

    /// The first command that failed since the last time this was asked. This starts a new fault epoch: a
    /// later ``quiet`` reports only commands that fail after this call.
    fn take_fault(&self, py: Python<'_>) -> PyResult<Option<Fault>> {
        Ok(self.open(py)?.take_fault().map(|fault| Fault { fault }))
    }

    /// ``commands``, ``puts``, ``bytes``, ``counts``, ``requests`` (submissions that carried puts; also as ``flights``, its former name), ``faults``.
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

    /// A processor in a kernel's place, on one of the rings.
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

    /// Ends its threads and gives its memory back. Kernels that have its handle must have ended.
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
        let of = self.gpu.map_or_else(|| "processors".to_owned(), |gpu| format!("GPU {gpu}"));
        match &*self.proxy.lock().unwrap() {
            Some(proxy) => format!("<peerway.Proxy of {of} with {} rings>", proxy.rings()),
            None => format!("<peerway.Proxy of {of}, closed>"),
        }
    }
}

/// A place that arrivals come from or go to.
fn place(name: &str, object: &Bound<'_, PyAny>, needs: Use) -> PyResult<peerway::LocalSlice> {
    let (slice, writable) = if let Ok(region) = object.cast::<Region>() {
        (region.get().region.all(), region.get().writable)
    } else if let Ok(slice) = object.cast::<LocalSlice>() {
        (slice.get().slice.clone(), slice.get().writable)
    } else if let Ok((region, Int(offset), Int(nbytes))) =
        object.extract::<(Bound<'_, Region>, Int<u64>, Int<u64>)>()
    {
        let end = offset.checked_add(nbytes).ok_or_else(|| {
            PyBufferError::new_err(format!("{name}: {offset} + {nbytes} is no place"))
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

/// Memory that commands name: ``base`` is what is added to an offset in it.
#[pyclass(frozen, eq, hash, module = "peerway")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Window {
    window: driven::Window,
}

#[pymethods]
impl Window {
    /// The offset of its first byte.
    #[getter]
    fn base(&self) -> u64 {
        self.window.base
    }

    /// Bytes in it.
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

/// Has a proxy's threads look for commands: from before kernels are launched until after they have ended.
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
    /// Whether it holds the proxy armed.
    #[getter]
    fn active(&self) -> bool {
        self.held.lock().unwrap().is_some()
    }

    /// Lets the threads sleep, unless another holds the proxy armed.
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

/// A command of a kernel's that failed.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Fault {
    fault: driven::Fault,
}

#[pymethods]
impl Fault {
    /// Why, as one of the numbers ``PEERWAY_FAULT_*``.
    #[getter]
    fn code(&self) -> u32 {
        self.fault.code as u32
    }

    /// Why, in a word: ``operation``, ``peer``, ``source``, ``destination`` or ``counter`` names what there is none
    /// of; ``peer-gone``, ``refused``, ``timed-out`` and ``failed`` say what became of the transfer.
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

    /// Whom it was for, by number.
    #[getter]
    fn peer(&self) -> u16 {
        self.fault.peer
    }

    /// The ring it came from.
    #[getter]
    fn ring(&self) -> u32 {
        self.fault.ring
    }

    /// Its operation, as one of the numbers ``PEERWAY_OP_*``.
    #[getter]
    fn op(&self) -> u8 {
        self.fault.op
    }

    /// Its position in the ring; of commands that went together, the first one's.
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
