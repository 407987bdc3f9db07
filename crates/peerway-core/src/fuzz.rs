//! Fuzz targets: one plain function for each parser of external bytes.
//!
//! `cargo test` runs them with a seeded mutator. The `fuzz/` directory wraps them for libFuzzer.

use zerocopy::FromBytes;

use crate::descriptor::Descriptor;
use crate::metadata::Metadata;
use crate::protocol::{AppliedFrames, Arrival, Asked};
use crate::record::{HEAD_LEN, MAX_BODY, Position};
use crate::wire::{Control, HEADER_LEN, Header, MAX_PAYLOAD, MAX_PULL, MAX_SEGMENTS};

/// The name of a target and the function that receives the input.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("descriptor", descriptor),
    ("metadata", metadata),
    ("header", header),
    ("frame", frame),
    ("control", control),
    ("record", record),
];

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

/// A frame that can be read names no more runs and bytes than its kind allows.
pub fn frame(data: &[u8]) {
    let Some((header, body)) = data.split_first_chunk::<HEADER_LEN>() else { return };
    let arrival = Arrival::read(header, &AppliedFrames::new(1));
    if let Ok(Arrival::Table(ahead)) = arrival
        && let Some(table) = body.get(..ahead.len())
    {
        let mut runs = Vec::new();
        let total: u64 = match ahead.read(table, &mut runs) {
            Ok(Asked::Write(total) | Asked::Read(total)) => total.min(MAX_PAYLOAD),
            Ok(Asked::Pull(total)) => total.min(MAX_PULL),
            Err(_) => return,
        };
        assert!((1..=MAX_SEGMENTS).contains(&runs.len()));
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), total);
    }
}

/// A control message that parses survives a round trip.
pub fn control(data: &[u8]) {
    if let Ok(parsed) = Control::from_bytes(data) {
        assert_eq!(Control::from_bytes(&parsed.to_bytes()), Ok(parsed));
    }
}

/// Records that open hold their caps, end inside the input, and are sealed again byte for byte.
pub fn record(data: &[u8]) {
    let mut position = Position::new(SEED);
    let mut rest = data;
    while let Ok(Some(head)) = position.find(rest, 4) {
        assert!((1..=MAX_BODY).contains(&head.len));
        assert_eq!(position.head(head.len).1, rest[..HEAD_LEN]);
        let (body, after) = rest[HEAD_LEN..].split_at(head.len);
        let Some((trailer, after)) = after.split_first_chunk() else { return };
        let crc = crc32c::crc32c_append(head.check, body);
        if position.check_body(crc, *trailer).is_err() {
            return;
        }
        position.advance();
        rest = after;
    }
}

/// The seed of the records that the target accepts.
const SEED: u32 = 0x5EED;

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;
    use crate::ids::{Incarnation, SlotId};
    use crate::region::Access;
    use crate::wire::{Kind, PULL_SEGMENT_LEN, Refusal, SEGMENT_LEN};

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
        for kind in [Kind::Write, Kind::Read, Kind::Pull] {
            let entry = if kind == Kind::Pull { PULL_SEGMENT_LEN } else { SEGMENT_LEN };
            let payload = if kind == Kind::Write { 514 } else { 0 };
            let mut head = Header::new(kind);
            head.sequence = 1.into();
            head.set_body(2, 2 * entry, payload);
            // Two runs of 257 bytes.
            let mut run = vec![0; entry];
            run[8..10].fill(1);
            frames.push([head.as_bytes(), &run, &run].concat());
        }
        frames.push(descriptor.to_bytes().to_vec());
        frames.push(Metadata { incarnation: who, addresses }.to_bytes());
        frames.push(Control::Refuse(Refusal::Pinned("why".into())).to_bytes());
        frames.push(
            Control::Import { request: 9, descriptor: descriptor.to_bytes().to_vec() }.to_bytes(),
        );
        let mut position = Position::new(SEED);
        let mut records = Vec::new();
        for body in [&b"one"[..], &[7; 200]] {
            let (head, bytes) = position.head(body.len());
            position.advance();
            let trailer = crc32c::crc32c_append(head.check, body).to_le_bytes();
            records.extend([&bytes[..], body, &trailer].concat());
        }
        frames.push(records);
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
