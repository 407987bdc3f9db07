//! `HostProducer`: pushes commands from the host, as a kernel does.

use peerway::driven::{self, Command, HostProducerError, Op};
use pyo3::prelude::*;

use crate::arguments::{Int, Time};
use crate::proxy::Proxy;
use crate::waiting::{self, Listener};
use crate::{arguments, errors};

/// Pushes commands into one ring, from any thread: the calls of ``peerway_device.cuh``.
///
/// An offset is ``window.base`` plus the position within the window. Offsets and lengths
/// are multiples of four bytes.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct HostProducer {
    proxy: Py<Proxy>,
    producer: driven::HostProducer,
    ring: u32,
}

impl HostProducer {
    pub(crate) fn new(proxy: Py<Proxy>, producer: driven::HostProducer, ring: u32) -> Self {
        Self { proxy, producer, ring }
    }

    fn push(&self, py: Python<'_>, command: Command) -> PyResult<u64> {
        let proxy = self.proxy.get();
        proxy.open(py)?;
        let mut listener = Listener::default();
        let pushed = py.detach(|| {
            let interrupted = || listener.hears() || proxy.is_closed();
            self.producer.push_unless(command, interrupted)
        });
        listener.raise()?;
        pushed.map_err(|error| errors::host_producer(py, error))
    }

    /// Calls `step` until it returns a result. Returns `None` after `timeout`, or after the proxy's
    /// time-out without one.
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<Time>,
        mut step: impl FnMut(std::time::Duration) -> Result<(), HostProducerError> + Send,
    ) -> PyResult<Option<()>> {
        let proxy = self.proxy.get();
        let timeout = match timeout {
            Some(seconds) => arguments::time("timeout", &seconds)?,
            None => self.producer.timeout(),
        };
        let ended = waiting::until(py, Some(timeout), |left| match step(left) {
            Err(HostProducerError::TimedOut) => proxy.is_closed().then_some(None),
            ended => Some(Some(ended)),
        })?;
        match ended {
            None => Ok(None),
            Some(Some(ended)) => {
                ended.map(Some).map_err(|error: HostProducerError| errors::host_producer(py, error))
            }
            Some(None) => proxy.open(py).map(|_| None),
        }
    }
}

#[pymethods]
impl HostProducer {
    /// The number of the ring.
    #[getter]
    fn ring(&self) -> u32 {
        self.ring
    }

    /// Copies local bytes into the peer's memory.
    fn put(
        &self,
        py: Python<'_>,
        peer: Int<u16>,
        dst: Int<u64>,
        src: Int<u64>,
        nbytes: Int<u64>,
    ) -> PyResult<()> {
        let (dst, src, len) = (dst.0, src.0, nbytes.0);
        self.push(py, Command { op: Op::Put, peer: peer.0, counter: 0, src, dst, len }).map(drop)
    }

    /// As ``put``, and then increments a counter of the peer by one.
    fn put_with_count(
        &self,
        py: Python<'_>,
        peer: Int<u16>,
        dst: Int<u64>,
        src: Int<u64>,
        nbytes: Int<u64>,
        counter: Int<u16>,
    ) -> PyResult<()> {
        let (dst, src, len, counter) = (dst.0, src.0, nbytes.0, counter.0);
        self.push(py, Command { op: Op::PutCount, peer: peer.0, counter, src, dst, len }).map(drop)
    }

    /// Increments a counter of the peer by one. It does not wait for earlier puts; call
    /// ``quiet`` first if the order matters.
    fn signal(&self, py: Python<'_>, peer: Int<u16>, counter: Int<u16>) -> PyResult<()> {
        let (peer, counter) = (peer.0, counter.0);
        self.push(py, Command { op: Op::Signal, peer, counter, ..Command::NOP }).map(drop)
    }

    /// Waits until all commands pushed here earlier for the peer have reached its memory.
    ///
    /// Raises ``CommandFailed`` when a command failed (``Proxy.take_fault`` says which), and
    /// ``CommandTimeout`` after ``timeout`` or, without one, the proxy's time-out.
    #[pyo3(signature = (peer, timeout=None))]
    fn quiet(&self, py: Python<'_>, peer: Int<u16>, timeout: Option<Time>) -> PyResult<()> {
        let Int(peer) = peer;
        let position = self.push(py, Command { op: Op::Quiet, peer, ..Command::NOP })?;
        let wait = |left| self.producer.wait_answer(peer, position, left);
        self.wait(py, timeout, wait)?.ok_or_else(|| {
            let what = format!(
                "quiet for peer {peer} on ring {} was not answered in time; check that the proxy is armed",
                self.ring
            );
            errors::raise(py, "CommandTimeout", what)
        })
    }

    /// Waits until a counter of this proxy reaches ``value``. With ``peer``, a failure of that
    /// peer ends the wait (``CommandFailed``). Raises ``CounterTimeout`` after ``timeout`` or,
    /// without one, the proxy's time-out.
    #[pyo3(signature = (counter, value, peer=None, timeout=None))]
    fn wait_counter(
        &self,
        py: Python<'_>,
        counter: Int<u16>,
        value: Int<u64>,
        peer: Option<Int<u16>>,
        timeout: Option<Time>,
    ) -> PyResult<()> {
        let (Int(counter), Int(value), peer) = (counter, value, peer.map(|peer| peer.0));
        let wait = |left| self.producer.wait_counter_for(counter, value, peer, left);
        self.wait(py, timeout, wait)?.ok_or_else(|| {
            let what = format!("counter {counter} did not reach {value} in time");
            errors::raise(py, "CounterTimeout", what)
        })
    }

    fn __repr__(&self) -> String {
        format!("<peerway.HostProducer of ring {}>", self.ring)
    }
}
