//! `Peer`: transfers, notifications and counters with one remote endpoint.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

use peerway::{Batch, Direction, ImportError};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::arguments::{Int, Time};
use crate::buffer::{self, Order, Use};
use crate::endpoint::{Notification, release};
use crate::region::{BlockList, BlockSide, LocalSlice, Region, RemoteRegion, RemoteSlice};
use crate::transfer::{Prepared, Staged, Transfer};
use crate::{arguments, errors, waiting};

/// The most imports that a peer keeps for callers that pass descriptors. With a kept import, only
/// the first use of a descriptor needs a request to the peer.
const KEPT_IMPORTS: usize = 1 << 14;

/// One incarnation of a remote endpoint. A restarted peer is a different peer.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Peer {
    endpoint: peerway::Endpoint,
    pub(crate) peer: peerway::Peer,
    kept: Mutex<Kept>,
}

/// Regions imported for callers that pass descriptors.
#[derive(Default)]
struct Kept {
    regions: HashMap<Advertisement, peerway::RemoteRegion>,
    since_sweep: usize,
}

/// The bytes of a descriptor that identify the advertisement. They do not depend on the range.
type Advertisement = [u8; 32];

fn advertisement(descriptor: &[u8]) -> Option<Advertisement> {
    descriptor.get(16..48)?.try_into().ok()
}

impl Peer {
    pub(crate) fn new(endpoint: peerway::Endpoint, peer: peerway::Peer) -> Self {
        Self { endpoint, peer, kept: Mutex::default() }
    }

    fn import(&self, py: Python<'_>, descriptor: &[u8]) -> PyResult<peerway::RemoteRegion> {
        let imported = match self.is_kept(descriptor) {
            // A kept import sends no request, so it needs no other thread.
            true => py.detach(|| self.peer.import(descriptor)),
            false => {
                let (peer, descriptor) = (self.peer.clone(), descriptor.to_vec());
                let imported = waiting::aside(py, None, move || peer.import(&descriptor))?;
                imported.unwrap_or(Err(ImportError::TimedOut))
            }
        };
        imported.map_err(|error| errors::import(py, error))
    }

    /// As `import`, for many descriptors, and keeps the imports for later calls.
    fn import_and_keep(
        &self,
        py: Python<'_>,
        descriptors: &[&[u8]],
    ) -> PyResult<Vec<peerway::RemoteRegion>> {
        let unknown = descriptors.iter().filter(|descriptor| !self.is_kept(descriptor));
        let unknown: Vec<Vec<u8>> = unknown.map(|descriptor| descriptor.to_vec()).collect();
        if !unknown.is_empty() {
            // One thread sends the requests for all unknown descriptors.
            let peer = self.peer.clone();
            let asked = waiting::aside(py, None, move || {
                let ask = |descriptor: Vec<u8>| peer.import(&descriptor).map(|r| (descriptor, r));
                unknown.into_iter().map(ask).collect::<Result<Vec<_>, _>>()
            })?;
            let asked = asked.unwrap_or(Err(ImportError::TimedOut));
            for (descriptor, region) in asked.map_err(|error| errors::import(py, error))? {
                self.keep(&descriptor, region);
            }
        }
        let imported = py.detach(|| {
            let imported = descriptors.iter().map(|descriptor| self.peer.import(descriptor));
            imported.collect::<Result<Vec<_>, _>>()
        });
        imported.map_err(|error| errors::import(py, error))
    }

    fn is_kept(&self, descriptor: &[u8]) -> bool {
        let kept = self.kept.lock().unwrap();
        advertisement(descriptor).is_some_and(|key| kept.regions.contains_key(&key))
    }

    fn keep(&self, descriptor: &[u8], region: peerway::RemoteRegion) {
        let Some(key) = advertisement(descriptor) else { return };
        let kept = &mut *self.kept.lock().unwrap();
        kept.since_sweep += 1;
        if kept.since_sweep > kept.regions.len() / 2 {
            // A kept import must not keep memory mapped that the owner has revoked.
            kept.regions.retain(|_, region| !region.is_revoked());
            kept.since_sweep = 0;
        }
        if kept.regions.len() >= KEPT_IMPORTS {
            kept.regions.clear();
        }
        kept.regions.insert(key, region);
    }

    fn local(&self, object: &Bound<'_, PyAny>, needs: Use) -> PyResult<peerway::LocalSlice> {
        let (slice, writable) = if let Ok(region) = object.cast::<Region>() {
            (region.get().region.all(), region.get().writable)
        } else if let Ok(slice) = object.cast::<LocalSlice>() {
            (slice.get().slice.clone(), slice.get().writable)
        } else {
            let region = buffer::register(&self.endpoint, "local", object, needs, Order::Row)?;
            (region.all(), true)
        };
        if needs == Use::Write && !writable {
            return Err(buffer::refuse_readonly("local"));
        }
        Ok(slice)
    }

    fn remote_slice(&self, object: &Bound<'_, PyAny>) -> PyResult<peerway::RemoteSlice> {
        if let Ok(region) = object.cast::<RemoteRegion>() {
            return Ok(region.get().region.all());
        }
        if let Ok(slice) = object.cast::<RemoteSlice>() {
            return Ok(slice.get().slice.clone());
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            let mut imported = self.import_and_keep(object.py(), &[bytes.as_bytes()])?;
            return Ok(imported.remove(0).all());
        }
        let wanted = "a remote region, a part of one, or a descriptor (bytes)";
        Err(arguments::wrong_type("remote", object, wanted))
    }

    fn batch(
        &self,
        direction: Direction,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        options: Options<'_, '_>,
    ) -> PyResult<Batch> {
        let py = local.py();
        let needs = match direction {
            Direction::Write => Use::Read,
            Direction::Read => Use::Write,
        };
        let batch = if is_sequence(local) || is_sequence(remote) {
            if !is_sequence(local) || !is_sequence(remote) {
                return Err(PyTypeError::new_err(
                    "local and remote: pass a list or tuple for both or for neither",
                ));
            }
            let (locals, remotes) = (items(local)?, items(remote)?);
            if locals.len() != remotes.len() {
                return Err(PyValueError::new_err(format!(
                    "local and remote: {} pieces against {}; pass as many local pieces as remote ones",
                    locals.len(),
                    remotes.len()
                )));
            }
            let pairs = locals
                .iter()
                .zip(&remotes)
                .map(|(local, remote)| Ok((self.local(local, needs)?, self.remote_slice(remote)?)));
            let pairs: Vec<_> = pairs.collect::<PyResult<_>>()?;
            match direction {
                Direction::Write => Batch::write_vector(&pairs),
                Direction::Read => Batch::read_vector(&pairs),
            }
        } else if let Ok(local) = local.cast::<BlockList>() {
            let blocks = remote.cast::<BlockList>();
            let blocks = blocks.map_err(|_| {
                arguments::wrong_type("remote", remote, "a BlockList, as local is one")
            })?;
            if needs == Use::Write && !local.get().writable {
                return Err(buffer::refuse_readonly("local"));
            }
            match (&local.get().side, &blocks.get().side, direction) {
                (BlockSide::Local(local), BlockSide::Remote(remote), Direction::Write) => {
                    Batch::write_blocks(local.clone(), remote.clone())
                }
                (BlockSide::Local(local), BlockSide::Remote(remote), Direction::Read) => {
                    Batch::read_blocks(local.clone(), remote.clone())
                }
                (BlockSide::Remote(_), ..) => {
                    return Err(PyTypeError::new_err("local: the blocks are of a remote region"));
                }
                _ => {
                    return Err(PyTypeError::new_err("remote: the blocks are of a local region"));
                }
            }
        } else {
            let (local, remote) = (self.local(local, needs)?, self.remote_slice(remote)?);
            match direction {
                Direction::Write => Batch::write(&local, &remote),
                Direction::Read => Batch::read(&local, &remote),
            }
        };
        options.apply(batch.map_err(|error| errors::post(py, error))?, py)
    }

    fn run(&self, py: Python<'_>, batch: &Batch) -> PyResult<()> {
        let begun = self.peer.begin(batch).map_err(|error| errors::post(py, error))?;
        waiting::finish(py, &begun)
    }

    fn post(&self, py: Python<'_>, batch: &Batch) -> PyResult<Transfer> {
        let posted = self.peer.post(batch).map_err(|error| errors::post(py, error))?;
        Ok(Transfer::new(posted))
    }

    fn prepare(&self, py: Python<'_>, batch: Batch) -> PyResult<Prepared> {
        let prepared = self.peer.prepare(batch).map_err(|error| errors::post(py, error))?;
        Ok(Prepared { prepared })
    }
}

/// Optional settings of a transfer.
struct Options<'a, 'py> {
    notify: Option<&'a Bound<'py, PyAny>>,
    count: Option<Int<u32>>,
    deadline: Option<Time>,
    kind: &'a str,
}

impl Options<'_, '_> {
    fn apply(&self, mut batch: Batch, py: Python<'_>) -> PyResult<Batch> {
        if let Some(message) = self.notify {
            let message = arguments::bytes("notify", message)?;
            batch = batch.notify(message).map_err(|error| errors::post(py, error))?;
        }
        if let Some(Int(id)) = self.count {
            batch = batch.count(id);
        }
        if let Some(deadline) = &self.deadline {
            batch = batch.deadline(arguments::time("deadline", deadline)?);
        }
        if self.kind != "auto" {
            batch = batch.class(arguments::class(self.kind)?);
        }
        Ok(batch)
    }
}

fn is_sequence(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>()
}

fn items<'py>(object: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    object.try_iter()?.collect()
}

impl Drop for Peer {
    fn drop(&mut self) {
        release(&self.endpoint);
    }
}

#[pymethods]
impl Peer {
    /// Imports a descriptor that this peer advertised and returns the memory that it names.
    fn remote(&self, py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<RemoteRegion> {
        let region = self.import(py, arguments::bytes("descriptor", descriptor)?)?;
        Ok(RemoteRegion { region })
    }

    /// Writes local bytes into the peer's memory and waits until they are there.
    ///
    /// Two sequences of equal length make one transfer of many pieces. ``notify`` sends a
    /// message and ``count`` increments a counter of the peer. The peer sees both after the
    /// bytes, exactly once.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn write(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<()> {
        let options = Options { notify, count, deadline, kind };
        self.run(py, &self.batch(Direction::Write, local, remote, options)?)
    }

    /// Reads the peer's memory into local memory and waits until the bytes are there.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn read(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<()> {
        let options = Options { notify, count, deadline, kind };
        self.run(py, &self.batch(Direction::Read, local, remote, options)?)
    }

    /// As ``write``, but returns at once.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn post_write(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<Transfer> {
        let options = Options { notify, count, deadline, kind };
        self.post(py, &self.batch(Direction::Write, local, remote, options)?)
    }

    /// As ``read``, but returns at once.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn post_read(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<Transfer> {
        let options = Options { notify, count, deadline, kind };
        self.post(py, &self.batch(Direction::Read, local, remote, options)?)
    }

    /// Checks a write once. Any thread can then post it many times.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn prepare_write(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<Prepared> {
        let options = Options { notify, count, deadline, kind };
        self.prepare(py, self.batch(Direction::Write, local, remote, options)?)
    }

    /// Checks a read once. Any thread can then post it many times.
    #[pyo3(signature = (local, remote, *, notify=None, count=None, deadline=None, kind="auto"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn prepare_read(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        notify: Option<&Bound<'_, PyAny>>,
        count: Option<Int<u32>>,
        deadline: Option<Time>,
        kind: &str,
    ) -> PyResult<Prepared> {
        let options = Options { notify, count, deadline, kind };
        self.prepare(py, self.batch(Direction::Read, local, remote, options)?)
    }

    /// Groups prepared transfers as stages that the caller releases one by one: layer-wise
    /// streaming.
    fn stage(&self, py: Python<'_>, stages: Vec<Bound<'_, Prepared>>) -> PyResult<Staged> {
        let stages = stages.iter().map(|stage| stage.get().prepared.clone()).collect();
        let staged = self.peer.stage_prepared(stages).map_err(|error| errors::post(py, error))?;
        Ok(Staged { staged })
    }

    /// Posts one transfer of pieces that are given by local address.
    ///
    /// Each piece lies in its region. Each descriptor names where the remote side of its piece
    /// starts. The four sequences have the same length.
    fn post_addresses(
        &self,
        py: Python<'_>,
        op: &str,
        regions: Vec<Bound<'_, Region>>,
        addresses: Vec<Int<u64>>,
        sizes: Vec<Int<u64>>,
        descriptors: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<Transfer> {
        let count = regions.len();
        if [addresses.len(), sizes.len(), descriptors.len()] != [count; 3] {
            return Err(PyValueError::new_err(format!(
                "{count} regions, {} addresses, {} sizes and {} descriptors; pass as many of each",
                addresses.len(),
                sizes.len(),
                descriptors.len()
            )));
        }
        let descriptors: Vec<&[u8]> = descriptors.iter().map(|bytes| bytes.as_bytes()).collect();
        let remotes = self.import_and_keep(py, &descriptors)?;
        let mut pairs = Vec::with_capacity(count);
        for (i, region) in regions.iter().enumerate() {
            if op == "read" && !region.get().writable {
                return Err(buffer::refuse_readonly("regions"));
            }
            let region = &region.get().region;
            let (start, size) = (addresses[i].0.wrapping_sub(region.addr()), sizes[i].0);
            // `Batch` refuses a piece that is not inside its region.
            let local = region.slice(start..start.saturating_add(size));
            // A descriptor may cover more than the piece. The piece is at its start.
            pairs.push((local, remotes[i].slice(0..size)));
        }
        let batch = match (op, &pairs[..]) {
            ("write", [(local, remote)]) => Batch::write(local, remote),
            ("read", [(local, remote)]) => Batch::read(local, remote),
            ("write", pairs) => Batch::write_vector(pairs),
            ("read", pairs) => Batch::read_vector(pairs),
            _ => {
                return Err(PyValueError::new_err(format!(
                    "op: '{op}' is neither 'read' nor 'write'"
                )));
            }
        };
        self.post(py, &batch.map_err(|error| errors::post(py, error))?)
    }

    /// Sends a message to the peer's notification queue.
    fn notify(&self, py: Python<'_>, message: &Bound<'_, PyAny>) -> PyResult<Transfer> {
        let message = arguments::bytes("message", message)?;
        let posted = self.peer.notify(message).map_err(|error| errors::post(py, error))?;
        Ok(Transfer::new(posted))
    }

    /// Adds one to a counter of the peer.
    fn count(&self, py: Python<'_>, id: Int<u32>) -> PyResult<Transfer> {
        let posted = self.peer.count(id.0).map_err(|error| errors::post(py, error))?;
        Ok(Transfer::new(posted))
    }

    /// Returns the oldest notification from this peer; None after ``timeout`` seconds, or when
    /// the peer is gone.
    #[pyo3(signature = (timeout=Some(Time::Seconds(0.0))), text_signature = "($self, timeout=0.0)")]
    fn notification(
        &self,
        py: Python<'_>,
        timeout: Option<Time>,
    ) -> PyResult<Option<Notification>> {
        let timeout = waiting::timeout("timeout", timeout)?;
        let found = waiting::until(py, timeout, |left| {
            let found = self.peer.notification(left);
            // A peer that is gone sends no more notifications.
            found.map(Some).or_else(|| (!self.peer.is_alive()).then_some(None))
        })?;
        Ok(found.flatten().map(Notification::from))
    }

    /// The best path that both sides support.
    #[getter]
    fn path(&self) -> String {
        self.peer.path().kind.to_string()
    }

    /// Why this path was chosen and not a better one, and what ``PEERWAY_DATA`` protects on it.
    #[getter]
    fn why(&self) -> &str {
        &self.peer.path().why
    }

    /// How the TCP connections to the peer protect what they carry: ``off``, ``integrity`` or
    /// ``encrypt``, the stricter ``PEERWAY_DATA`` of both sides. ``why`` says what that covers.
    #[getter]
    fn data(&self) -> String {
        self.peer.path().data.to_string()
    }

    /// Whether access limits on this path bind only honest peers.
    #[getter]
    fn trusted(&self) -> bool {
        self.peer.path().is_trusted()
    }

    /// The address with which the session was established.
    #[getter]
    fn address(&self) -> (String, u16) {
        let addr = self.peer.address();
        (addr.ip().to_string(), addr.port())
    }

    /// The identity of this incarnation of the peer.
    #[getter]
    fn incarnation(&self) -> String {
        self.peer.incarnation().to_string()
    }

    /// Whether this side opened the session.
    #[getter]
    fn initiator(&self) -> bool {
        self.peer.is_initiator()
    }

    /// Whether transfers can be posted to the peer.
    #[getter]
    fn alive(&self) -> bool {
        self.peer.is_alive()
    }

    /// ``transfers`` posted; bytes that this side moved (``bytes_written``, ``bytes_read``) and
    /// that the peer moved (``bytes_served``, ``bytes_landed``), on every path; ``lanes_lost``;
    /// ``lanes_reopened``: TCP lanes that took the place of lost ones; ``corrupt_records``: lanes
    /// that were closed because of them.
    ///
    /// The peer tells what it moved without this side's processor (by a mapping, CMA, a GPU or a
    /// device): with each notification and count, and otherwise within an eighth of the detection
    /// time.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        set_traffic(&dict, &self.peer.stats())?;
        Ok(dict)
    }

    /// Closes the session. Its transfers end.
    fn remove(&self, py: Python<'_>) {
        self.kept.lock().unwrap().regions.clear();
        py.detach(|| self.peer.remove());
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().peer == self.peer)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.peer.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let (kind, alive) = (self.peer.path().kind, self.peer.is_alive());
        let gone = if alive { "" } else { ", gone" };
        format!(
            "<peerway.Peer {} at {} by {kind}{gone}>",
            self.peer.incarnation(),
            self.peer.address()
        )
    }
}

/// Adds the counters of one peer, or of all peers, to a dict.
pub(crate) fn set_traffic(dict: &Bound<'_, PyDict>, stats: &peerway::PeerStats) -> PyResult<()> {
    for (name, count) in [
        ("transfers", stats.transfers),
        ("bytes_written", stats.bytes_written),
        ("bytes_read", stats.bytes_read),
        ("bytes_served", stats.bytes_served),
        ("bytes_landed", stats.bytes_landed),
        ("lanes_lost", stats.lanes_lost),
        ("lanes_reopened", stats.lanes_reopened),
        ("corrupt_records", stats.corrupt_records),
    ] {
        dict.set_item(name, count)?;
    }
    Ok(())
}
