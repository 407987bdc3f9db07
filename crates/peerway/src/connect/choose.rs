//! Chooses the path to a peer from what the handshake found.

use peerway_core::config::{DataProtection, Pin};

use crate::path::{Path, PathKind};
use crate::session::Reach;

/// The result of the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) same_process: bool,
    pub(crate) linked: bool,
    pub(crate) we_pull: bool,
    pub(crate) peer_pulls: bool,
    /// The kind of RDMA path, if queue pairs are open.
    pub(crate) queues: Option<PathKind>,
    /// Whether a key to our memory opens it to one queue pair.
    pub(crate) windows: bool,
}

/// Whether to try local paths. If not, the reason.
pub(crate) fn offers_local(pin: Pin, disable_ipc: bool) -> Result<(), String> {
    match pin {
        Pin::Tcp | Pin::Ib | Pin::Efa => Err(format!("pinned to {pin}")),
        _ if disable_ipc => Err("local paths are switched off (PEERWAY_DISABLE_IPC)".into()),
        _ => Ok(()),
    }
}

/// Whether this side may copy from the peer's memory under its pin.
pub(crate) fn may_pull(pin: Pin) -> bool {
    matches!(pin, Pin::Auto | Pin::Local | Pin::LocalCma)
}

/// Whether two endpoints in one process may use each other's memory directly under this pin.
pub(crate) fn may_share_process(pin: Pin) -> bool {
    matches!(pin, Pin::Auto | Pin::Local)
}

/// Chooses the path, or returns why the pin cannot be met. `why` is the reason why there is nothing
/// better than TCP. `data` is the protection of TCP connections that the two sides agreed on.
pub(crate) fn choose(
    pin: Pin,
    found: Found,
    why: &str,
    data: DataProtection,
) -> Result<(Path, Reach), String> {
    let path = |kind, why: &str| {
        let why = match protection(kind, data) {
            Some(protected) => format!("{why}; {protected}"),
            None => why.to_owned(),
        };
        Path { kind, why, data }
    };
    if found.same_process && may_share_process(pin) {
        let reach = Reach { same_process: true, ..Reach::default() };
        return Ok((path(PathKind::SameProcess, "both endpoints are in this process"), reach));
    }
    if let Some(kind) = found.queues {
        let why = if pin.is_rdma() { format!("pinned to {pin}") } else { why.to_owned() };
        let whom = if found.windows { "one queue pair" } else { "all peers (no memory windows)" };
        let why = format!("{why}; an RDMA key to our memory is valid for {whom}");
        return Ok((path(kind, &why), Reach::default()));
    }
    if !found.linked {
        return match pin {
            Pin::Auto | Pin::Tcp => Ok((path(PathKind::Tcp, why), Reach::default())),
            _ => Err(why.to_owned()),
        };
    }
    let reach = Reach {
        same_process: false,
        map: true,
        we_pull: found.we_pull,
        peer_pulls: found.peer_pulls,
    };
    let cma = found.we_pull && found.peer_pulls;
    match pin {
        Pin::LocalRing => Ok((path(PathKind::LocalRing, "pinned to local-ring"), Reach::default())),
        Pin::LocalCma if cma => {
            let reach = Reach { map: false, ..reach };
            Ok((path(PathKind::LocalCma, "pinned to local-cma"), reach))
        }
        Pin::LocalCma => Err(format!(
            "process_vm_readv is refused ({}): \
             check Yama, seccomp, and the user and PID namespace of both processes",
            if found.we_pull { "for the peer" } else { "for us" }
        )),
        Pin::LocalMap => {
            let reach = Reach { we_pull: false, peer_pulls: false, ..reach };
            Ok((path(PathKind::LocalMap, "pinned to local-map"), reach))
        }
        _ if cma => {
            let why = "same host and user; memory that is not shareable goes by CMA";
            Ok((path(PathKind::LocalMap, why), reach))
        }
        _ => {
            let why = "same host and user; process_vm_readv is refused, so memory that is not \
                       shareable goes by the ring";
            Ok((path(PathKind::LocalMap, why), reach))
        }
    }
}

/// What `PEERWAY_DATA` does for a path. `None` if neither endpoint asks for anything.
fn protection(kind: PathKind, data: DataProtection) -> Option<String> {
    let how = match data {
        DataProtection::Off => return None,
        DataProtection::Integrity => "checked (CRC32C)",
        _ => "encrypted (AES-128-GCM)",
    };
    Some(match kind {
        PathKind::Tcp => format!("data is {how}"),
        PathKind::Verbs | PathKind::Efa => {
            format!("control messages are {how}, data that RDMA devices move is not")
        }
        _ => format!("TCP is {how}, data stays on this host and is not (PEERWAY_DATA={data})"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Found = Found {
        same_process: true,
        linked: true,
        we_pull: true,
        peer_pulls: true,
        queues: None,
        windows: false,
    };

    #[test]
    fn the_best_common_path_is_taken_and_pins_are_met_or_refused() {
        let off = DataProtection::Off;
        let kind = |pin, found| choose(pin, found, "far", off).map(|(path, _)| path.kind);
        let apart = Found { same_process: false, ..ALL };
        let far = Found { linked: false, ..apart };
        assert_eq!(kind(Pin::Auto, ALL), Ok(PathKind::SameProcess));
        assert_eq!(kind(Pin::Auto, apart), Ok(PathKind::LocalMap));
        assert_eq!(kind(Pin::Auto, far), Ok(PathKind::Tcp));
        assert_eq!(kind(Pin::LocalCma, ALL), Ok(PathKind::LocalCma));
        assert_eq!(kind(Pin::LocalRing, apart), Ok(PathKind::LocalRing));
        assert_eq!(kind(Pin::Local, far), Err("far".into()));
        let rdma = Found { queues: Some(PathKind::Verbs), ..far };
        assert_eq!(kind(Pin::Auto, rdma), Ok(PathKind::Verbs));
        assert_eq!(kind(Pin::Ib, rdma), Ok(PathKind::Verbs));
        assert_eq!(kind(Pin::Ib, far), Err("far".into()));
        let denied = Found { we_pull: false, ..apart };
        assert!(kind(Pin::LocalCma, denied).unwrap_err().contains("for us"));
        assert_eq!(kind(Pin::Auto, denied), Ok(PathKind::LocalMap));
    }
    #[test]
    fn a_path_says_what_is_protected() {
        let far = Found { same_process: false, linked: false, ..ALL };
        let rdma = Found { queues: Some(PathKind::Verbs), ..far };
        let why = |found, data| choose(Pin::Auto, found, "far", data).unwrap().0.why;
        use DataProtection::{Encrypt, Integrity, Off};
        assert_eq!(why(far, Off), "far");
        assert_eq!(why(far, Integrity), "far; data is checked (CRC32C)");
        assert_eq!(why(far, Encrypt), "far; data is encrypted (AES-128-GCM)");
        assert!(why(rdma, Encrypt).ends_with("data that RDMA devices move is not"));
        assert!(why(rdma, Off).ends_with("is valid for all peers (no memory windows)"));
        assert!(why(Found { windows: true, ..rdma }, Off).ends_with("for one queue pair"));
        assert!(why(ALL, Integrity).ends_with("is not (PEERWAY_DATA=integrity)"));
    }
}
