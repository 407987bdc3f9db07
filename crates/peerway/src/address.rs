//! The addresses on which an endpoint listens, and those that it advertises to peers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};

use peerway_core::config::{Config, ConfigError};
use peerway_core::ids::Incarnation;
use peerway_core::metadata::NetworkId;
use sha2::{Digest, Sha256};

use crate::error::BuildError;
use crate::os::net::{self, Interface};
use crate::os::process::HostFacts;

/// The most addresses that an endpoint chooses by itself. Metadata have room for 16.
const MOST_CHOSEN: usize = 15;

/// Addresses to bind, to advertise, and to send bulk lanes from.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) bind: Vec<SocketAddr>,
    pub(crate) rails: Vec<Rail>,
    advertise: Option<IpAddr>,
    /// Whether the user named neither address nor interface.
    is_chosen: bool,
}

/// A source address of bulk lanes, and its network.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Rail {
    pub(crate) addr: IpAddr,
    prefix: u8,
}

impl Rail {
    /// Whether `ip` is on the rail's own network, so that packets to it take the rail's link.
    pub(crate) fn reaches(&self, ip: IpAddr) -> bool {
        net::same_network(self.addr, ip, self.prefix)
    }
}

/// Chooses the addresses. The builder's settings come first, then the configuration, then loopback
/// and the interface that the filter or the routing table names. If neither names any, every
/// interface that is up.
pub(crate) fn places(config: &Config, bind: Option<SocketAddr>) -> Result<Places, BuildError> {
    let interfaces = net::interfaces()
        .map_err(|source| BuildError::Os { what: "cannot list the network interfaces", source })?;
    let advertise = match &config.advertise {
        Some(text) => Some(resolve("PEERWAY_ADVERTISE", text)?.ip()),
        None => None,
    };
    let asked = match (bind, &config.bind) {
        (Some(addr), _) => Some(addr),
        (None, Some(text)) => Some(resolve("PEERWAY_BIND", text)?),
        (None, None) => None,
    };
    let rails = match &config.interfaces {
        Some(filter) => {
            let named: Vec<&Interface> =
                usable(&interfaces).filter(|i| net::matches(filter, &i.name)).collect();
            // Loopback reaches no other host, so it is a rail only if there is no other interface.
            let lone = named.iter().all(|i| i.loopback);
            let rails = named.iter().filter(|i| lone || !i.loopback);
            let rails: Vec<Rail> = rails.map(|i| Rail { addr: i.addr, prefix: i.prefix }).collect();
            if rails.is_empty() {
                return Err(BuildError::NoInterface(filter.clone()));
            }
            rails
        }
        None => Vec::new(),
    };
    let bind = match asked {
        Some(addr) => vec![addr],
        None => {
            // Bind every rail: the destination, not the source, decides which link packets take.
            let mut ips: Vec<IpAddr> = rails.iter().map(|rail| rail.addr).collect();
            ips.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
            if rails.is_empty() {
                ips.extend(outside(&interfaces, routed()));
            }
            let mut bind: Vec<SocketAddr> = Vec::new();
            for ip in ips {
                // Loopback may already be in the list as a rail. It can be bound only once.
                if !bind.iter().any(|addr| addr.ip() == ip) {
                    bind.push(SocketAddr::new(ip, 0));
                }
            }
            bind
        }
    };
    let is_chosen = asked.is_none() && config.interfaces.is_none();
    Ok(Places { bind, rails, advertise, is_chosen })
}

/// The addresses for peers on other hosts: the one that the routing table names, else those of
/// every interface that is up. A pod without a default route has only the latter.
fn outside(interfaces: &[Interface], routed: Option<IpAddr>) -> Vec<IpAddr> {
    if let Some(ip) = routed {
        return vec![ip];
    }
    let others = usable(interfaces).filter(|i| !i.loopback);
    others.map(|i| i.addr).take(MOST_CHOSEN).collect()
}

/// The place in which loopback addresses of this process are valid, as it appears in the metadata
/// of an endpoint. The boot id is a secret of the host, so the hash tells a stranger nothing.
pub(crate) fn network_of(incarnation: &Incarnation) -> NetworkId {
    let here = HostFacts::here();
    if here.boot_id == [0; 16] || here.net_ns == 0 {
        return NetworkId::default();
    }
    let mut hash = Sha256::new();
    hash.update(b"peerway network");
    hash.update(incarnation.0);
    hash.update(here.boot_id);
    hash.update(here.net_ns.to_le_bytes());
    let hash = hash.finalize();
    NetworkId(std::array::from_fn(|at| hash[at]))
}

impl Places {
    /// Warns if peers on other hosts cannot reach the endpoint although the user did not ask for
    /// that.
    pub(crate) fn warn_of_loopback(&self) {
        let only_here = self.bind.iter().all(|addr| addr.ip().is_loopback());
        if self.is_chosen && self.advertise.is_none() && only_here {
            tracing::warn!(
                "no network interface is up: the endpoint listens on loopback only, and no other \
                 host can connect; set PEERWAY_BIND or PEERWAY_INTERFACES if that is wrong"
            );
        }
    }

    /// The addresses for peers, given the bound ones: routable addresses before loopback.
    pub(crate) fn advertised(&self, bound: &[SocketAddr]) -> Vec<SocketAddr> {
        let port = bound.first().map_or(0, SocketAddr::port);
        if let Some(addr) = self.advertise {
            return vec![SocketAddr::new(addr, port)];
        }
        let mut all: Vec<SocketAddr> = Vec::new();
        for addr in bound {
            if addr.ip().is_unspecified() {
                let here = net::interfaces().unwrap_or_default();
                let fits = |i: &&Interface| addr.is_ipv6() || i.addr.is_ipv4();
                all.extend(here.iter().filter(fits).map(|i| SocketAddr::new(i.addr, addr.port())));
            } else {
                all.push(*addr);
            }
        }
        all.sort_by_key(|addr| addr.ip().is_loopback());
        all.truncate(16);
        all
    }
}

fn usable(interfaces: &[Interface]) -> impl Iterator<Item = &Interface> {
    interfaces.iter().filter(|i| i.up)
}

/// The source address of packets to other hosts. Nothing is sent: connecting a datagram socket only
/// queries the routing table.
fn routed() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // A documentation address (RFC 5737): never a real host.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

fn resolve(name: &'static str, text: &str) -> Result<SocketAddr, BuildError> {
    let with_port = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    let found = match with_port {
        Ok(addr) => Some(addr),
        Err(_) => text.to_socket_addrs().ok().and_then(|mut found| found.next()),
    };
    found.ok_or_else(|| {
        let allowed = "an address of this host, with or without a port".to_owned();
        let (name, value) = (name.to_owned(), text.to_owned());
        BuildError::Config(ConfigError::BadValue { name, value, allowed })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, addr: &str, up: bool) -> Interface {
        let addr: IpAddr = addr.parse().unwrap();
        Interface { name: name.to_owned(), addr, prefix: 24, loopback: addr.is_loopback(), up }
    }

    #[test]
    fn without_a_route_every_interface_that_is_up_is_used() {
        let all = [
            interface("lo", "127.0.0.1", true),
            interface("eth0", "192.0.2.7", true),
            interface("eth1", "198.51.100.7", false),
            interface("eth2", "203.0.113.7", true),
        ];
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(outside(&all, None), [ip("192.0.2.7"), ip("203.0.113.7")]);
        assert_eq!(outside(&all, Some(ip("203.0.113.7"))), [ip("203.0.113.7")]);
        assert_eq!(outside(&all[..1], None), [] as [IpAddr; 0]);
    }

    #[test]
    fn the_network_differs_by_incarnation() {
        let of = |byte| network_of(&Incarnation([byte; 16]));
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2), "the hash would name the host to strangers");
    }
}
