//! The addresses on which an endpoint listens, and those that it advertises to peers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};

use peerway_core::config::{Config, ConfigError};

use crate::error::BuildError;
use crate::os::net::{self, Interface};

/// Addresses to bind, to advertise, and to send bulk lanes from.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) bind: Vec<SocketAddr>,
    pub(crate) rails: Vec<Rail>,
    advertise: Option<IpAddr>,
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
/// and the interface that the filter or the routing table names.
pub(crate) fn places(
    config: &Config,
    bind: Option<SocketAddr>,
    advertise: Option<IpAddr>,
) -> Result<Places, BuildError> {
    let interfaces = net::interfaces()
        .map_err(|source| BuildError::Os { what: "cannot list the network interfaces", source })?;
    let advertise = match (advertise, &config.advertise) {
        (Some(addr), _) => Some(addr),
        (None, Some(text)) => Some(resolve("PEERWAY_ADVERTISE", text)?.ip()),
        (None, None) => None,
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
                ips.extend(routed());
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
    Ok(Places { bind, rails, advertise })
}

impl Places {
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
        BuildError::Config(ConfigError::BadValue { name, value: text.to_owned(), allowed })
    })
}
