//! The engine's errors as Python exceptions. `peerway/_errors.py` defines the classes.

use std::net::SocketAddr;

use peerway::driven::{HostProducerError, ProxyError, PushError};
use peerway::gpu::GpuError;
use peerway::gpu::jit::JitError;
use peerway::{
    AcceptError, BuildError, ConnectError, Ended, Failure, Fence, ImportError, Incarnation,
    PostError, Reason, RegisterError, TransferError,
};
use pyo3::exceptions::{PyBaseException, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// An exception of the class with this name and the message `what`.
pub(crate) fn raise(py: Python<'_>, class: &str, what: impl ToString) -> PyErr {
    let made = py.import("peerway._errors").and_then(|errors| {
        let class = errors.getattr(class)?.cast_into::<PyType>()?;
        Ok(PyErr::from_type(class, what.to_string()))
    });
    // The class is missing only in a broken installation.
    made.unwrap_or_else(|error| PyRuntimeError::new_err(format!("{} ({error})", what.to_string())))
}

/// The exception for a transfer that ended without success; `None` for one that is done. It gets
/// its attributes and its message from `failure`, where there is one.
pub(crate) fn ended(
    py: Python<'_>,
    ended: Ended,
    failure: impl FnOnce() -> Option<Failure>,
) -> Option<PyErr> {
    let class = match ended.reason {
        Reason::Done => return None,
        Reason::Cancelled => "TransferCancelled",
        Reason::TimedOut => "TransferTimeout",
        Reason::Failed(why) => transfer(why),
    };
    let class = match ended.fence {
        Fence::Held => class.to_owned(),
        Fence::Open => format!("Unfenced{class}"),
    };
    let Some(failure) = failure() else { return Some(raise(py, &class, ended)) };
    let error = raise(py, &class, &failure);
    // An exception that takes no attributes is still the right one.
    let _ = describe(error.value(py), &failure);
    Some(error)
}

/// Sets the attributes of `TransferError`.
fn describe(error: &Bound<'_, PyBaseException>, failure: &Failure) -> PyResult<()> {
    name_peer(error, failure.peer, failure.incarnation)?;
    error.setattr("path", failure.path.to_string())?;
    error.setattr("op", failure.operation.name())?;
    error.setattr("bytes_done", failure.bytes_done)?;
    error.setattr("bytes_total", failure.bytes_total)?;
    let fence = match failure.ended.fence {
        Fence::Held => "held",
        Fence::Open => "open",
    };
    error.setattr("fence", fence)?;
    error.setattr("last_event", failure.last_event.as_ref().map(|event| &event.what))
}

/// Sets the attributes that name the peer.
fn name_peer(
    error: &Bound<'_, PyBaseException>,
    peer: SocketAddr,
    incarnation: Incarnation,
) -> PyResult<()> {
    error.setattr("peer", peer.to_string())?;
    error.setattr("incarnation", incarnation.to_string())
}

fn transfer(error: TransferError) -> &'static str {
    match error {
        TransferError::PeerGone => "PeerGone",
        TransferError::PeerSilent => "PeerSilent",
        TransferError::RemoteAccess => "AccessDenied",
        TransferError::OutOfBounds => "OutOfBounds",
        TransferError::Revoked => "Revoked",
        TransferError::NotificationsFull => "NotificationsFull",
        TransferError::CountersFull => "CountersFull",
        TransferError::Fault => "MemoryFault",
        TransferError::PeerMisbehaved => "PeerMisbehaved",
        TransferError::EndpointClosed => "EndpointClosed",
        TransferError::DeliveryUnknown => "DeliveryUnknown",
        TransferError::Device => "DeviceError",
        _ => "TransferError",
    }
}

/// Why an endpoint could not be built.
pub(crate) fn build(py: Python<'_>, error: BuildError) -> PyErr {
    let class = match error {
        BuildError::Config(_) | BuildError::Identity(_) => "InvalidSetting",
        _ => "BuildError",
    };
    raise(py, class, error)
}

/// Why memory could not be registered or advertised.
pub(crate) fn register(py: Python<'_>, error: RegisterError) -> PyErr {
    let class = match error {
        RegisterError::Outside { .. } | RegisterError::BadRange { .. } => "InvalidWork",
        RegisterError::EndpointClosed | RegisterError::Forked => "EndpointClosed",
        RegisterError::Gpu(error) => return gpu(py, error),
        _ => "RegisterError",
    };
    raise(py, class, error)
}

/// As `register`, but names the argument that caused a GPU error.
pub(crate) fn register_argument(py: Python<'_>, name: &str, error: RegisterError) -> PyErr {
    match error {
        RegisterError::Gpu(error) => raise(py, gpu_class(&error), format!("{name}: {error}")),
        error => register(py, error),
    }
}

/// Why a GPU or its memory cannot be used.
pub(crate) fn gpu(py: Python<'_>, error: GpuError) -> PyErr {
    raise(py, gpu_class(&error), error)
}

fn gpu_class(error: &GpuError) -> &'static str {
    match error {
        GpuError::NoDriver(_) => "NoCuda",
        GpuError::NoSuchGpu { .. } => "NoSuchGpu",
        _ => "GpuError",
    }
}

/// Why a peer could not be reached.
pub(crate) fn connect(py: Python<'_>, error: ConnectError) -> PyErr {
    let class = match error {
        ConnectError::Metadata(_) => "InvalidMetadata",
        ConnectError::TimedOut { .. } => "ConnectTimeout",
        ConnectError::PeerMisbehaved { .. } | ConnectError::PeerIncompatible { .. } => {
            "PeerIncompatible"
        }
        ConnectError::NotSecure { .. } => "NotSecure",
        ConnectError::NotAdmitted { .. } => "NotAdmitted",
        ConnectError::OtherIncarnation { .. } => "PeerGone",
        ConnectError::EndpointClosed | ConnectError::Forked => "EndpointClosed",
        _ => "ConnectError",
    };
    raise(py, class, error)
}

/// Why no peer was accepted.
pub(crate) fn accept(py: Python<'_>, error: AcceptError) -> PyErr {
    let class = match error {
        AcceptError::TimedOut => "AcceptTimeout",
        _ => "EndpointClosed",
    };
    raise(py, class, error)
}

/// Why a descriptor could not be imported.
pub(crate) fn import(py: Python<'_>, error: ImportError) -> PyErr {
    let class = match &error {
        ImportError::Descriptor(_) => "InvalidDescriptor",
        ImportError::OtherIncarnation => "AccessDenied",
        ImportError::Refused(why) => transfer(*why),
        ImportError::TimedOut => "ConnectTimeout",
        ImportError::EndpointClosed | ImportError::Forked => "EndpointClosed",
        _ => "PathUnavailable",
    };
    raise(py, class, error)
}

/// Why a transfer could not be posted.
pub(crate) fn post(py: Python<'_>, error: PostError) -> PyErr {
    let class = match error {
        PostError::Busy { .. } => "Busy",
        PostError::Access { .. } => "AccessDenied",
        PostError::PeerGone { .. } => "PeerGone",
        PostError::EndpointClosed | PostError::Forked => "EndpointClosed",
        PostError::Gpu(_) => "GpuError",
        _ => "InvalidWork",
    };
    let raised = raise(py, class, &error);
    if let PostError::PeerGone { peer, incarnation } = error {
        // An exception that takes no attributes is still the right one.
        let _ = name_peer(raised.value(py), peer, incarnation);
    }
    raised
}

/// Why a proxy could not be built.
pub(crate) fn proxy_made(py: Python<'_>, error: ProxyError) -> PyErr {
    match error {
        ProxyError::OutOfRange { .. } => raise(py, "InvalidSetting", error),
        error => proxy(py, error),
    }
}

/// Why a call of a proxy failed.
pub(crate) fn proxy(py: Python<'_>, error: ProxyError) -> PyErr {
    let class = match error {
        ProxyError::OutOfRange { .. } | ProxyError::Forward { .. } | ProxyError::Taken { .. } => {
            "InvalidCommand"
        }
        ProxyError::NotPeerInfo => "InvalidPeerInfo",
        ProxyError::Register(error) => return register(py, error),
        ProxyError::Import(error) => return import(py, error),
        ProxyError::Gpu(error) => return gpu(py, error),
        _ => "ProxyError",
    };
    raise(py, class, error)
}

/// Why a command was not pushed or not answered.
pub(crate) fn host_producer(py: Python<'_>, error: HostProducerError) -> PyErr {
    let class = match error {
        HostProducerError::OfAGpu
        | HostProducerError::NoSuch { .. }
        | HostProducerError::Command(_) => "InvalidCommand",
        HostProducerError::Push(PushError::Full) => "RingFull",
        HostProducerError::Push(_) => "RingDead",
        HostProducerError::TimedOut => "CommandTimeout",
        HostProducerError::Failed => "CommandFailed",
        _ => "ProxyError",
    };
    raise(py, class, error)
}

/// Why a program was not compiled, loaded or launched.
pub(crate) fn jit(py: Python<'_>, error: JitError) -> PyErr {
    let class = match error {
        JitError::NoCompiler { .. } => "NoCompiler",
        JitError::Nul { .. } | JitError::ArchitectureOption { .. } => "InvalidSource",
        JitError::NoKernel { .. } => "NoKernel",
        JitError::Arguments { .. } => return PyTypeError::new_err(error.to_string()),
        JitError::Gpu(error) => return gpu(py, error),
        _ => "CompileError",
    };
    raise(py, class, error)
}
