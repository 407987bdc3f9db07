//! The bytes that a proxy gives to its peers: descriptors of its windows and of its counters. The
//! application can send them by any means.

use peerway_core::descriptor::DESCRIPTOR_LEN;
use serde::{Deserialize, Serialize};

use super::space::Window;

const VERSION: u16 = 2;
/// The most windows that peer info may name. It is more than any proxy has, and small enough that a
/// peer's bytes cannot exhaust memory.
pub(crate) const MAX_WINDOWS: usize = 64;

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct PeerInfo {
    version: u16,
    /// The endpoint's metadata, for proxy threads that open their own sub-sessions.
    pub(crate) metadata: Bytes,
    pub(crate) windows: Vec<(Window, Bytes)>,
    /// The number of counters, and the id of the first one for counts that travel on lanes.
    pub(crate) counters: u32,
    pub(crate) first_id: u32,
    pub(crate) counter_words: Bytes,
}

/// A descriptor.
pub(crate) type Bytes = Vec<u8>;

impl PeerInfo {
    pub(crate) fn new(
        metadata: Bytes,
        windows: Vec<(Window, [u8; DESCRIPTOR_LEN])>,
        counters: u32,
        first_id: u32,
        counter_words: [u8; DESCRIPTOR_LEN],
    ) -> Self {
        let windows = windows.into_iter().map(|(window, bytes)| (window, bytes.to_vec()));
        Self {
            version: VERSION,
            metadata,
            windows: windows.collect(),
            counters,
            first_id,
            counter_words: counter_words.to_vec(),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("serialising to a vector fails only without memory")
    }

    /// `None` if the bytes are not peer info of this version.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        // Peer info with the most windows is shorter than this, so longer input is rejected unread.
        if bytes.len() > (MAX_WINDOWS + 16) * 128 {
            return None;
        }
        let (info, rest) = postcard::take_from_bytes::<Self>(bytes).ok()?;
        let sound = info.version == VERSION
            && rest.is_empty()
            && info.windows.len() <= MAX_WINDOWS
            && info.windows.iter().all(|(_, bytes)| bytes.len() == DESCRIPTOR_LEN)
            && info.counter_words.len() == DESCRIPTOR_LEN
            && info.counters as usize <= peerway_core::command::MAX_COUNTERS;
        sound.then_some(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_or_foreign_bytes_are_not_peer_info() {
        let window = Window { base: 0, len: 4096 };
        let info = PeerInfo::new(
            vec![9; 40],
            vec![(window, [3; DESCRIPTOR_LEN])],
            16,
            7,
            [5; DESCRIPTOR_LEN],
        );
        let bytes = info.to_bytes();
        assert_eq!(PeerInfo::from_bytes(&bytes), Some(info.clone()));
        for cut in 0..bytes.len() {
            assert_eq!(PeerInfo::from_bytes(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(PeerInfo::from_bytes(&[&bytes[..], &[0]].concat()), None);
        let other = PeerInfo { version: VERSION + 1, ..info.clone() };
        assert_eq!(PeerInfo::from_bytes(&other.to_bytes()), None);
        let short = PeerInfo { counter_words: vec![1; 63], ..info };
        assert_eq!(PeerInfo::from_bytes(&short.to_bytes()), None);
    }
}
