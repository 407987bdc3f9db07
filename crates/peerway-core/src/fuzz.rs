//! Fuzz targets: one plain function for each parser of external bytes.
//!
//! `cargo test` runs them with a seeded mutator. The `fuzz/` directory wraps them for libFuzzer.

use zerocopy::FromBytes;

use crate::descriptor::Descriptor;
use crate::metadata::Metadata;
use crate::wire::{Control, HEADER_LEN, Header, MAX_PAYLOAD};

/// The name of a target and the function that receives the input.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] =
    &[("descriptor", descriptor), ("metadata", metadata), ("header", header), ("control", control)];

/// A descriptor that parses names a window inside its advertisement and survives a round trip.
pub fn descriptor(data: &[u8]) {
    if let Ok(parsed) = Descriptor::from_bytes(data) {
        let window = parsed.window();
        assert!(window.end().is_some_and(|end| end <= parsed.advertised));
        if let Ok(again) = Descriptor::from_bytes(&parsed.to_bytes()) {
            assert_eq!(again.window(), window);
        }
    }
}

/// Metadata that parses survives a round trip byte for byte.
pub fn metadata(data: &[u8]) {
    if let Ok(parsed) = Metadata::from_bytes(data) {
        assert_eq!(parsed.to_bytes(), data);
    }
}

/// A header that passes [`Header::check`] is within its caps.
pub fn header(data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<HEADER_LEN>()
        && let Ok(header) = Header::read_from_bytes(bytes)
        && let Ok(checked) = header.check()
    {
        assert!(checked.payload as u64 <= MAX_PAYLOAD);
        assert!(checked.table <= 20 * 256);
    }
}

/// A control message that parses survives a round trip.
pub fn control(data: &[u8]) {
    if let Ok(parsed) = Control::from_bytes(data) {
        assert_eq!(Control::from_bytes(&parsed.to_bytes()), Ok(parsed));
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;
    use crate::ids::{Incarnation, SlotId};
    use crate::region::Access;
    use crate::wire::{Kind, Refusal};

    /// xorshift64*: small, seeded, and identical on every platform.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
        }

        fn below(&mut self, n: usize) -> usize {
            (self.next() % n.max(1) as u64) as usize
        }
    }

    fn corpus() -> Vec<Vec<u8>> {
        let who = Incarnation([3; 16]);
        let grant = SlotId { index: 1, generation: 2 };
        let descriptor = Descriptor::new(&who, grant, [1; 16], Access::READ_WRITE, 4096, 5 << 30);
        let addresses = vec!["10.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()];
        let mut frames: Vec<Vec<u8>> = (1..=12)
            .filter_map(|code| {
                let mut head = Header::new(Kind::Beat);
                head.as_mut_bytes()[3] = code;
                head.check().ok().map(|_| head.as_bytes().to_vec())
            })
            .collect();
        frames.push(descriptor.to_bytes().to_vec());
        let network = crate::metadata::NetworkId([1; 8]);
        frames.push(Metadata { incarnation: who, network, addresses }.to_bytes());
        frames.push(Control::Refuse(Refusal::Pinned("why".into())).to_bytes());
        frames.push(
            Control::Import { request: 9, descriptor: descriptor.to_bytes().to_vec() }.to_bytes(),
        );
        frames
    }

    #[test]
    fn seeded_mutations_of_good_inputs() {
        let mut random = Random(0x5EED);
        let corpus = corpus();
        for round in 0..200_000 {
            let mut data = corpus[round % corpus.len()].clone();
            for _ in 0..random.below(6) {
                match random.below(4) {
                    0 => data.truncate(random.below(data.len() + 1)),
                    1 => data.push(random.next() as u8),
                    2 if !data.is_empty() => {
                        let at = random.below(data.len());
                        data[at] ^= 1 << random.below(8);
                    }
                    _ if !data.is_empty() => {
                        let at = random.below(data.len());
                        data[at] = [0, 1, 0x7F, 0x80, 0xFF][random.below(5)];
                    }
                    _ => {}
                }
            }
            for (_, target) in TARGETS {
                target(&data);
            }
        }
    }
}
