//! Which sessions and descriptors the acceptor gives to peers. The limits are settings.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use peerway_core::config::Limits;
use peerway_core::wire::Refusal;
use rustix::process::{Resource, getrlimit};

use crate::peers::OpenedByPeer;

/// The number of connections in the handshake that are always allowed, however low the process's
/// limit of file descriptors is.
const MIN_HANDSHAKES: usize = 16;
/// Half-open connections may hold one in this many of the process's file descriptors.
const DESCRIPTOR_SHARE: u64 = 4;
/// One source may have one in this many of the connections in the handshake.
const SOURCE_SHARE: usize = 8;
/// Accepting leaves at most one in this many of the process's file descriptors free.
const FREE_SHARE: u64 = 16;
/// Proxy threads may have this many sub-sessions for each main session of a limit.
const SUB_SESSIONS: u32 = 3;

/// The most connections in the handshake.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct MostHandshakes {
    pub(super) all: usize,
    /// Of one address, or of one process on the local socket.
    pub(super) of_source: usize,
}

impl MostHandshakes {
    pub(super) fn now(limits: &Limits) -> Self {
        Self::with(limits, allowed_descriptors())
    }

    fn with(limits: &Limits, descriptors: u64) -> Self {
        let most = usize::try_from(descriptors / DESCRIPTOR_SHARE).unwrap_or(usize::MAX);
        let all = most.max(MIN_HANDSHAKES).min(limits.handshakes as usize);
        Self { all, of_source: (all / SOURCE_SHARE).max(1) }
    }
}

/// Refuses a session if the endpoint or the peer's address has too many. `others` are the sessions
/// that peers have opened.
pub(super) fn check_session(
    limits: &Limits,
    new: OpenedByPeer,
    others: impl Iterator<Item = OpenedByPeer>,
) -> Result<(), Refusal> {
    let (mut all, mut of_address) = (0, 0);
    for other in others.filter(|other| other.is_sub_session == new.is_sub_session) {
        all += 1;
        of_address += u32::from(other.ip == new.ip);
    }
    let (times, what) = match new.is_sub_session {
        true => (SUB_SESSIONS, "sub-sessions"),
        false => (1, "sessions"),
    };
    if all >= limits.sessions.saturating_mul(times) {
        return Err(Refusal::Limit(format!(
            "it has {all} {what}, as many as its setting PEERWAY_MAX_SESSIONS allows"
        )));
    }
    if of_address >= limits.sessions_per_address.saturating_mul(times) {
        return Err(Refusal::Limit(format!(
            "it has {of_address} {what} with {}, as many as its setting \
             PEERWAY_MAX_SESSIONS_PER_ADDRESS allows",
            new.ip
        )));
    }
    Ok(())
}

/// Refuses a lane if the session has too many.
pub(super) fn check_lane(limits: &Limits, lane: u16) -> Result<(), Refusal> {
    if lane <= limits.lanes {
        return Ok(());
    }
    Err(Refusal::Limit(format!(
        "a session has at most {} bulk lanes by its setting PEERWAY_MAX_LANES",
        limits.lanes
    )))
}

/// The number from which on descriptors stay free for the rest of the process.
pub(super) fn first_kept_free(limits: &Limits) -> u64 {
    let allowed = allowed_descriptors();
    allowed - u64::from(limits.free_descriptors).min(allowed / FREE_SHARE)
}

/// Whether this process has a descriptor below `first_kept_free`. The kernel always gives out the
/// lowest free number. `any` is any open descriptor.
pub(super) fn has_descriptor_below(first_kept_free: u64, any: BorrowedFd<'_>) -> bool {
    let lowest = rustix::io::fcntl_dupfd_cloexec(any, 0);
    lowest.is_ok_and(|lowest| (lowest.as_raw_fd() as u64) < first_kept_free)
}

fn allowed_descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A session that a peer opens from `ip`.
pub(super) fn opened_from(ip: IpAddr, is_sub_session: bool) -> OpenedByPeer {
    OpenedByPeer { ip: ip.to_canonical(), is_sub_session }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use peerway_core::config::Config;

    use super::*;

    fn limits() -> Limits {
        let mut limits = Config::default().limits;
        (limits.sessions, limits.sessions_per_address) = (4, 2);
        limits
    }

    fn from(last: u8, is_sub_session: bool) -> OpenedByPeer {
        opened_from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)), is_sub_session)
    }

    fn refusal(new: OpenedByPeer, others: &[OpenedByPeer]) -> String {
        match check_session(&limits(), new, others.iter().copied()) {
            Ok(()) => String::new(),
            Err(refusal) => format!("{refusal:?}"),
        }
    }

    #[test]
    fn an_address_has_its_share_of_sessions() {
        let others = [from(1, false), from(1, false)];
        assert!(refusal(from(1, false), &others).contains("PEERWAY_MAX_SESSIONS_PER_ADDRESS"));
        assert_eq!(refusal(from(2, false), &others), "");
        let mapped = opened_from(IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped()), false);
        assert_ne!(refusal(mapped, &others), "", "the same address in another form");
        let full = [from(1, false), from(2, false), from(3, false), from(4, false)];
        assert!(refusal(from(5, false), &full).contains("PEERWAY_MAX_SESSIONS allows"));
    }

    #[test]
    fn sub_sessions_have_a_limit_of_their_own() {
        let mut others = vec![from(1, false), from(1, false)];
        for _ in 0..6 {
            assert_eq!(refusal(from(1, true), &others), "");
            others.push(from(1, true));
        }
        assert!(refusal(from(1, true), &others).contains("sub-sessions"));
        assert_eq!(refusal(from(2, false), &others), "");
    }

    #[test]
    fn handshakes_are_fewer_with_few_descriptors() {
        let limits = Config::default().limits;
        let most = |descriptors| MostHandshakes::with(&limits, descriptors);
        assert_eq!(most(u64::MAX), MostHandshakes { all: 128, of_source: 16 });
        assert_eq!(most(400), MostHandshakes { all: 100, of_source: 12 });
        assert_eq!(most(0), MostHandshakes { all: 16, of_source: 2 });
    }
}
