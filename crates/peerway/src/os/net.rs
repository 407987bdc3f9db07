//! TCP sockets and network interfaces.
//!
//! Sockets are close-on-exec. Set-up ([`listen`], [`connect`], [`tune`]) allocates and may block
//! for a given time. Used by the TCP transport and, for the interfaces, by `peerway doctor`.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ptr;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// One address of one network interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Interface {
    /// The kernel's name, such as `eth0`.
    pub name: String,
    /// One of its addresses. An interface with several addresses appears once for each.
    pub addr: IpAddr,
    /// Number of leading bits of the address that form its network.
    pub prefix: u8,
    /// Whether it only reaches this host.
    pub loopback: bool,
    /// Whether it is up.
    pub up: bool,
}

/// The IPv4 and IPv6 addresses of this host. It omits link-local IPv6 addresses, which a peer
/// cannot use without knowing the link.
///
/// # Errors
///
/// The kernel cannot list the interfaces.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut first = ptr::null_mut();
    // SAFETY: on success, `first` is the head of a list that this function owns until `freeifaddrs`
    // below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: list entries, and the strings and addresses that they point to, live until
    // `freeifaddrs`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: `ifa_addr` is null or points to an address as long as its family requires.
        let Some(addr) = (unsafe { ip_of(entry.ifa_addr) }) else { continue };
        if matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
            continue;
        }
        // SAFETY: as for `ifa_addr`.
        let mask = unsafe { ip_of(entry.ifa_netmask) };
        let prefix = mask.map_or_else(|| bits(addr).1, |mask| bits(mask).0.leading_ones() as u8);
        // SAFETY: `ifa_name` is a C string inside the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        let has = |flag: libc::c_int| entry.ifa_flags & flag as libc::c_uint != 0;
        let (loopback, up) = (has(libc::IFF_LOOPBACK), has(libc::IFF_UP));
        found.push(Interface { name, addr, prefix, loopback, up });
    }
    // SAFETY: `first` came from `getifaddrs`, and all results are copies.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// Whether two addresses agree in their first `prefix` bits.
pub(crate) fn same_network(one: IpAddr, other: IpAddr, prefix: u8) -> bool {
    let (one, other) = (bits(one), bits(other));
    one.1 == other.1 && (one.0 ^ other.0).leading_zeros() >= u32::from(prefix)
}

/// An address as bits, left-aligned in the integer, and its number of bits.
fn bits(addr: IpAddr) -> (u128, u8) {
    match addr {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

/// Whether the interface `name` passes `filter`, which has the syntax of NCCL and UCCL: a list of
/// prefixes (`eth,ib`), of excluded prefixes (`^docker,lo`), or of exact names (`=eth0`, `^=eth0`).
/// An empty filter passes every name.
pub(crate) fn matches(filter: &str, name: &str) -> bool {
    let (exclude, rest) = match filter.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, filter),
    };
    let (exact, rest) = match rest.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let mut wanted = rest.split(',').map(str::trim).filter(|word| !word.is_empty()).peekable();
    if wanted.peek().is_none() {
        return true;
    }
    let listed = wanted.any(|word| if exact { name == word } else { name.starts_with(word) });
    listed != exclude
}

/// Listens on `addr`, non-blocking. A listener on an IPv6 wildcard also accepts IPv4 connections.
pub(crate) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    // A whole cluster may connect at once after a restart, and few handshakes run at a time. A full
    // backlog would cost a new peer a second or more until its next attempt. The kernel caps this
    // at somaxconn.
    const BACKLOG: i32 = 4096;

    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // A restarted process can bind its port again while old connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Connects to `addr` within `timeout`, from the local address `from` if given. The stream is
/// blocking, for the handshake, and has TCP_NODELAY set.
pub(crate) fn connect(
    addr: SocketAddr,
    from: Option<IpAddr>,
    timeout: Duration,
) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    socket.connect_timeout(&addr.into(), timeout)?;
    socket.set_tcp_nodelay(true)?;
    let stream = TcpStream::from(socket);
    // If no process listens on an ephemeral port of this host, TCP may connect a socket to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// Prepares a stream for data: non-blocking, TCP_NODELAY, and cubic congestion control if the peer
/// is on this host. Between processes of one host, bbr paces without need (11-34 % more sender
/// CPU).
pub(crate) fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    if stays_on_host(stream)?
        && let Err(error) = SockRef::from(stream).set_tcp_congestion(b"cubic")
    {
        tracing::debug!(%error, "cannot select cubic; keeping the default congestion control");
    }
    Ok(())
}

/// Whether the peer's address is an address of this host.
fn stays_on_host(stream: &TcpStream) -> io::Result<bool> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    // For a connection to its own address, the kernel also uses that address as the source. This
    // saves the lookup.
    if peer.is_loopback() || peer == stream.local_addr()?.ip().to_canonical() {
        return Ok(true);
    }
    Ok(interfaces()?.iter().any(|interface| interface.addr == peer))
}

/// The IP address in a socket address, if it has one.
///
/// # Safety
///
/// `addr` must be null or point to a socket address as long as its family requires.
unsafe fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller guarantees at least the family, which every socket address begins with.
    let family = unsafe { addr.as_ref()? }.sa_family;
    match libc::c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: the family is that of a `sockaddr_in`. The read is unaligned, so it assumes
            // no alignment.
            let v4 = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for a `sockaddr_in6`.
            let v6 = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_read_as_in_nccl() {
        for (filter, name, passes) in [
            ("", "eth0", true),
            ("eth,ib", "eth0", true),
            ("eth,ib", "ib1", true),
            ("eth,ib", "docker0", false),
            ("^docker,lo", "docker0", false),
            ("^docker,lo", "eth0", true),
            ("=eth0", "eth0", true),
            ("=eth0", "eth01", false),
            ("^=eth0", "eth0", false),
            ("^=eth0", "eth01", true),
            (" eth0 , ", "eth0", true),
        ] {
            assert_eq!(matches(filter, name), passes, "{filter:?} {name:?}");
        }
    }

    #[test]
    fn networks_are_told_apart_by_their_first_bits() {
        for (one, other, prefix, same) in [
            ("10.1.2.3", "10.1.2.99", 24, true),
            ("10.1.2.3", "10.1.3.3", 24, false),
            ("10.1.2.3", "10.1.3.3", 0, true),
            ("10.1.2.3", "10.1.2.3", 32, true),
            ("fd00::1", "fd00::2", 64, true),
            ("fd00::1", "fd00:0:0:1::1", 64, false),
            ("0.0.0.0", "::", 0, false),
        ] {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(same_network(one, other, prefix), same, "{one} {other} {prefix}");
        }
    }

    #[test]
    fn loopback_is_among_the_interfaces() {
        let found = interfaces().unwrap();
        let lo = found.iter().find(|i| i.addr == IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap();
        assert!(lo.loopback && lo.up);
        assert_eq!(lo.prefix, 8);
        assert!(!lo.name.is_empty());
    }

    #[test]
    fn connecting_ends() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = listener.local_addr().unwrap();
        let from = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let stream = connect(addr, Some(from), Duration::from_secs(10)).unwrap();
        assert_eq!(stream.local_addr().unwrap().ip(), from);
        assert!(stream.nodelay().unwrap());
        drop((stream, listener));
        assert!(connect(addr, None, Duration::from_secs(10)).is_err());
        // TEST-NET-1 is not an address of this host.
        let foreign = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        assert!(connect(addr, Some(foreign), Duration::from_secs(10)).is_err());
    }

    mod needs_ipv6 {
        use super::*;

        #[test]
        #[ignore = "probes whether this machine has IPv6"]
        fn probe() {
            std::net::TcpListener::bind("[::]:0").expect("this machine has no IPv6");
        }

        #[test]
        #[ignore = "needs IPv6: cargo xtask test --only test"]
        fn a_v6_wildcard_takes_v4_too() {
            let listener = listen("[::]:0".parse().unwrap()).unwrap();
            let port = listener.local_addr().unwrap().port();
            let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            connect(addr, None, Duration::from_secs(10)).unwrap();
        }
    }
}
