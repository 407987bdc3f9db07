//! GIDs, the addresses of ports, and the choice of one for connections.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::ffi::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};

/// An address of a port.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct Gid {
    /// The 16 bytes in network order.
    pub raw: [u8; 16],
    /// The protocol of the address.
    pub kind: GidKind,
    /// The network interface of the address. 0 if there is none or it is unknown.
    pub interface_index: u32,
}

impl Gid {
    /// Creates an address without a known interface.
    pub fn new(address: Ipv6Addr, kind: GidKind) -> Self {
        Self { raw: address.octets(), kind, interface_index: 0 }
    }

    /// The GID as an IPv6 address. On Ethernet it is one.
    pub fn ipv6(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.raw)
    }

    /// The IPv4 address, if the GID is an IPv4 address mapped into IPv6.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.ipv6().to_ipv4_mapped()
    }
}

/// The protocol of a GID.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand, or a device that does not distinguish, such as EFA.
    Infiniband,
    /// RDMA in Ethernet frames, not routable.
    RoceV1,
    /// RDMA in UDP.
    RoceV2,
    /// The system does not report the protocol.
    Unknown,
}

impl GidKind {
    pub(super) fn from_verbs(gid_type: u32) -> Self {
        match gid_type {
            IBV_GID_TYPE_IB => Self::Infiniband,
            IBV_GID_TYPE_ROCE_V1 => Self::RoceV1,
            IBV_GID_TYPE_ROCE_V2 => Self::RoceV2,
            _ => Self::Unknown,
        }
    }

    /// Parses `ports/P/gid_attrs/types/N` and `ports/P/link_layer`. The kernel uses one word for
    /// InfiniBand and RoCE v1.
    fn from_words(kind: &str, link_layer: &str) -> Self {
        match (kind.trim(), link_layer.trim()) {
            ("RoCE v2", _) => Self::RoceV2,
            ("IB/RoCE v1", "Ethernet") => Self::RoceV1,
            ("IB/RoCE v1", _) => Self::Infiniband,
            _ => Self::Unknown,
        }
    }
}

/// Chooses the GID index for connections from the GIDs of a port, unless the user sets one.
///
/// On InfiniBand it is the first one, which is the port's own. On Ethernet it is the one that
/// routers and both ends most likely know. RoCE v2 with an IPv4 address comes first, then RoCE v2
/// with a global IPv6 address, then with a link-local one. RoCE v1 comes next, then any other.
/// Among equals the lowest index wins. A device that does not distinguish, such as EFA, has only
/// one.
///
/// # Examples
///
/// ```
/// use std::net::Ipv4Addr;
/// use peerway_sys::verbs::{Gid, GidKind, choose_gid};
///
/// let link_local = Gid::new("fe80::1".parse().unwrap(), GidKind::RoceV2);
/// let routed = Gid::new(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped(), GidKind::RoceV2);
/// assert_eq!(choose_gid(&[(0, link_local), (3, routed)], false), Some(3));
/// ```
pub fn choose_gid(gids: &[(u32, Gid)], infiniband: bool) -> Option<u32> {
    let rank = |gid: &Gid| match gid.kind {
        _ if infiniband => 0,
        GidKind::RoceV2 if gid.ipv4().is_some() => 0,
        GidKind::RoceV2 if !gid.ipv6().is_unicast_link_local() => 1,
        GidKind::RoceV2 => 2,
        GidKind::RoceV1 => 3,
        GidKind::Infiniband | GidKind::Unknown => 4,
    };
    gids.iter().map(|(index, gid)| (rank(gid), *index)).min().map(|(_, index)| index)
}

/// Reads the kind and the interface of a GID from sysfs.
pub(super) fn from_sysfs(device: &Path, port: u8, index: u32) -> (GidKind, u32) {
    let port = device.join("ports").join(port.to_string());
    let read = |file: String| fs::read_to_string(port.join(file)).unwrap_or_default();
    let kind = GidKind::from_words(
        &read(format!("gid_attrs/types/{index}")),
        &read("link_layer".to_owned()),
    );
    let interface = read(format!("gid_attrs/ndevs/{index}"));
    let interface = interface.trim();
    // A name with a slash would leave the directory. The kernel allows none.
    let index_of = |name: &str| {
        let file = Path::new("/sys/class/net").join(name).join("ifindex");
        fs::read_to_string(file).ok()?.trim().parse().ok()
    };
    let named = !interface.is_empty() && !interface.contains('/');
    (kind, named.then(|| index_of(interface)).flatten().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_from_the_kernels_files() {
        let device = std::env::temp_dir().join(format!("peerway-gid-{}", std::process::id()));
        let port = device.join("ports/1");
        for directory in ["gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(port.join(directory)).expect("a directory");
        }
        let write = |file: &str, text: &str| fs::write(port.join(file), text).expect("a file");
        write("link_layer", "Ethernet\n");
        write("gid_attrs/types/0", "IB/RoCE v1\n");
        write("gid_attrs/types/1", "RoCE v2\n");
        write("gid_attrs/ndevs/1", "lo\n");
        assert_eq!(from_sysfs(&device, 1, 0), (GidKind::RoceV1, 0));
        assert_eq!(from_sysfs(&device, 1, 1), (GidKind::RoceV2, 1));
        assert_eq!(from_sysfs(&device, 1, 2), (GidKind::Unknown, 0));
        write("link_layer", "InfiniBand\n");
        assert_eq!(from_sysfs(&device, 1, 0), (GidKind::Infiniband, 0));
        fs::remove_dir_all(&device).expect("the test created it");
    }

    #[test]
    fn addresses_of_ethernet_are_ip_addresses() {
        let raw = Ipv4Addr::new(10, 77, 0, 1).to_ipv6_mapped().octets();
        let gid = Gid { raw, kind: GidKind::from_verbs(2), interface_index: 0 };
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 77, 0, 1)));
        let gid = Gid { raw: Ipv6Addr::LOCALHOST.octets(), kind: GidKind::Unknown, ..gid };
        assert_eq!((gid.ipv4(), gid.ipv6()), (None, Ipv6Addr::LOCALHOST));
        assert_eq!(GidKind::from_verbs(99), GidKind::Unknown);
    }

    #[test]
    fn the_gid_that_both_ends_most_likely_know_is_chosen() {
        let gid = |address: &str, kind| Gid::new(address.parse().expect("an address"), kind);
        let all = [
            (0, gid("fe80::1", GidKind::RoceV1)),
            (1, gid("fe80::1", GidKind::RoceV2)),
            (2, gid("::ffff:10.0.0.1", GidKind::RoceV1)),
            (3, gid("2001:db8::1", GidKind::RoceV2)),
            (4, gid("2001:db8::2", GidKind::RoceV2)),
            (5, gid("::ffff:10.0.0.1", GidKind::RoceV2)),
            (9, gid("::ffff:10.0.0.2", GidKind::RoceV2)),
        ];
        assert_eq!(choose_gid(&all, false), Some(5));
        let mut reversed = all;
        reversed.reverse();
        assert_eq!(choose_gid(&reversed, false), Some(5));
        for (left, expected) in [(5, 3), (3, 1), (1, 0)] {
            assert_eq!(choose_gid(&all[..left], false), Some(expected));
        }
        assert_eq!(choose_gid(&all, true), Some(0));
        assert_eq!(choose_gid(&all[4..], true), Some(4));
        assert_eq!(choose_gid(&[], false), None);
        // EFA does not distinguish kinds, and some kernels do not report one.
        assert_eq!(choose_gid(&[(0, gid("fe80::1", GidKind::Infiniband))], false), Some(0));
        let unknown = [(0, gid("fe80::1", GidKind::Unknown)), (1, all[1].1)];
        assert_eq!(choose_gid(&unknown, false), Some(1));
    }
}
