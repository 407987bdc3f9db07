//! Pairs our ports with the peer's ports.

use peerway_core::wire::RdmaPort;

/// Pairs of port indexes, ours first. Each of our ports takes the nearest free port of the peer by
/// address, while there are any. Ports of one rail share a subnet and so have the longest common
/// prefix.
pub(crate) fn pair(ours: &[RdmaPort], theirs: &[RdmaPort]) -> Vec<(usize, usize)> {
    let mut left: Vec<usize> = (0..theirs.len()).collect();
    let mut pairs = Vec::new();
    for (at, our) in ours.iter().enumerate() {
        let fits =
            |their: &RdmaPort| their.datagrams == our.datagrams && their.ethernet == our.ethernet;
        let candidates = left.iter().copied().filter(|their| fits(&theirs[*their]));
        // Take the first of equals, so that rails pair in order.
        let best = candidates.rev().max_by_key(|their| common_bits(our.gid, theirs[*their].gid));
        if let Some(their) = best {
            left.retain(|at| *at != their);
            pairs.push((at, their));
        }
    }
    pairs
}

fn common_bits(a: [u8; 16], b: [u8; 16]) -> u32 {
    (u128::from_be_bytes(a) ^ u128::from_be_bytes(b)).leading_zeros()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn port(addr: [u8; 4]) -> RdmaPort {
        let gid = Ipv4Addr::from(addr).to_ipv6_mapped().octets();
        RdmaPort { gid, lid: 0, mtu: 3, ethernet: true, datagrams: false, windows: false }
    }

    #[test]
    fn ports_of_one_subnet_meet() {
        let ours = [port([10, 77, 0, 1]), port([10, 78, 0, 1])];
        let theirs = [port([10, 78, 0, 2]), port([10, 77, 0, 2])];
        assert_eq!(pair(&ours, &theirs), [(0, 1), (1, 0)]);
        assert_eq!(pair(&ours, &theirs[..1]), [(0, 0)], "one is left over");
        assert_eq!(pair(&ours[..1], &theirs), [(0, 1)]);
        assert_eq!(pair(&ours, &[]), []);
    }

    #[test]
    fn equals_meet_in_order_and_kinds_do_not_mix() {
        let ib = |last| RdmaPort {
            gid: [0xFE; 16],
            lid: last,
            mtu: 5,
            ethernet: false,
            datagrams: false,
            windows: false,
        };
        let (ours, theirs) = ([ib(1), ib(2)], [ib(3), ib(4)]);
        assert_eq!(pair(&ours, &theirs), [(0, 0), (1, 1)]);
        let efa = RdmaPort { datagrams: true, ..ib(5) };
        assert_eq!(pair(&ours, &[efa]), []);
    }
}
