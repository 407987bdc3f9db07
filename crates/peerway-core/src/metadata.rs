//! Endpoint metadata: the incarnation and the addresses that a peer needs to connect.
//!
//! The encoding is `"PWMD" | version u8 | incarnation[16] | network[8] | count u8`, followed by
//! `count` addresses of `family u8 | ip 4 or 16 bytes | port u16 BE`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::ids::Incarnation;

const MAGIC: &[u8; 4] = b"PWMD";
/// Version 3 added the network.
const VERSION: u8 = 3;
/// The maximum number of addresses. No machine has more, and it bounds the parser's work.
const MAX_ADDRESSES: usize = 16;

/// The identity and the addresses of an endpoint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Metadata {
    /// The incarnation of the endpoint. It authenticates the endpoint: the handshake fails unless
    /// the other side has the key of which this is the hash.
    pub incarnation: Incarnation,
    /// Where its loopback addresses are valid.
    pub network: NetworkId,
    /// The addresses it listens on, best first.
    pub addresses: Vec<SocketAddr>,
}

/// A host and a network namespace, known by a hash. Endpoints in the same place compute the same
/// value for the same incarnation; others learn nothing from it. Zero means unknown.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NetworkId(pub [u8; 8]);

impl NetworkId {
    /// Whether both sides are known, and differ.
    pub fn is_elsewhere(self, here: Self) -> bool {
        self != Self::default() && here != Self::default() && self != here
    }
}

impl Metadata {
    /// Encodes the metadata. The application passes the bytes to peers by its own means.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(30 + 19 * self.addresses.len());
        out.extend_from_slice(MAGIC);
        out.push(VERSION);
        out.extend_from_slice(&self.incarnation.0);
        out.extend_from_slice(&self.network.0);
        let addresses = &self.addresses[..self.addresses.len().min(MAX_ADDRESSES)];
        out.push(addresses.len() as u8);
        for addr in addresses {
            match addr.ip() {
                IpAddr::V4(ip) => {
                    out.push(4);
                    out.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(6);
                    out.extend_from_slice(&ip.octets());
                }
            }
            out.extend_from_slice(&addr.port().to_be_bytes());
        }
        out
    }

    /// Parses metadata bytes. Every byte must be part of the encoding.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, MetadataError> {
        let mut rest = bytes;
        if take::<4>(&mut rest)? != *MAGIC {
            return Err(MetadataError::NotMetadata);
        }
        let [version] = take(&mut rest)?;
        if version != VERSION {
            return Err(MetadataError::Version(version));
        }
        let incarnation = Incarnation(take(&mut rest)?);
        let network = NetworkId(take(&mut rest)?);
        let [count] = take(&mut rest)?;
        if count == 0 || usize::from(count) > MAX_ADDRESSES {
            return Err(MetadataError::NotMetadata);
        }
        let mut addresses = Vec::with_capacity(count.into());
        for _ in 0..count {
            let [family] = take(&mut rest)?;
            let ip = match family {
                4 => IpAddr::V4(Ipv4Addr::from(take::<4>(&mut rest)?)),
                6 => IpAddr::V6(Ipv6Addr::from(take::<16>(&mut rest)?)),
                _ => return Err(MetadataError::NotMetadata),
            };
            addresses.push(SocketAddr::new(ip, u16::from_be_bytes(take(&mut rest)?)));
        }
        if !rest.is_empty() {
            return Err(MetadataError::NotMetadata);
        }
        Ok(Self { incarnation, network, addresses })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], MetadataError> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or(MetadataError::NotMetadata)?;
    *rest = tail;
    Ok(*head)
}

/// Why bytes are not endpoint metadata.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The bytes are truncated, too long, or not metadata.
    #[error("these bytes are not Peerway endpoint metadata (truncated or corrupted)")]
    NotMetadata,
    /// Another version of Peerway encoded the metadata.
    #[error("endpoint metadata version {0} is not supported: this build reads version {VERSION}")]
    Version(u8),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        Metadata {
            incarnation: Incarnation([9; 16]),
            network: NetworkId([7; 8]),
            addresses: vec!["127.0.0.1:80".parse().unwrap(), "[::1]:9".parse().unwrap()],
        }
    }

    #[test]
    fn round_trip() {
        assert_eq!(Metadata::from_bytes(&sample().to_bytes()), Ok(sample()));
    }

    #[test]
    fn only_two_known_networks_differ() {
        let (one, other, unknown) = (NetworkId([1; 8]), NetworkId([2; 8]), NetworkId::default());
        assert!(one.is_elsewhere(other));
        for (peer, here) in [(one, one), (one, unknown), (unknown, one), (unknown, unknown)] {
            assert!(!peer.is_elsewhere(here), "{peer:?} {here:?}");
        }
    }

    #[test]
    fn every_truncation_and_a_tail_is_refused() {
        let mut bytes = sample().to_bytes();
        for n in 0..bytes.len() {
            assert!(Metadata::from_bytes(&bytes[..n]).is_err(), "{n} bytes");
        }
        bytes.push(0);
        assert_eq!(Metadata::from_bytes(&bytes), Err(MetadataError::NotMetadata));
        bytes.pop();
        bytes[4] = 1;
        assert_eq!(Metadata::from_bytes(&bytes), Err(MetadataError::Version(1)));
    }
}
