//! Fuzz targets: one plain function for each parser of external bytes, and a seeded mutator.
//!
//! `cargo test` runs each target for a moment, `cargo xtask fuzz` for long, and the `fuzz/`
//! directory wraps them for libFuzzer. Other crates have targets of their own and run them with the
//! same [`explore`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

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

/// How long a failing input is made shorter.
const SHRINK: Duration = Duration::from_secs(5);
/// Values at which arithmetic and lengths go wrong.
const EDGES: [u64; 8] = [0, 1, 0x7F, 0xFF, 0xFFFF, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Makes inputs by changes to good ones. The same seed makes the same inputs.
pub struct Mutator {
    random: Random,
    corpus: Vec<Vec<u8>>,
    made: usize,
}

impl Mutator {
    /// Changes the inputs of this corpus, each in turn. `PEERWAY_FUZZ_SEED` changes the seed, so
    /// that several processes run different inputs of one target.
    pub fn new(seed: u64, corpus: Vec<Vec<u8>>) -> Self {
        let job = std::env::var("PEERWAY_FUZZ_SEED").ok().and_then(|job| job.parse::<u64>().ok());
        let job = job.unwrap_or(0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Self { random: Random((seed ^ job) | 1), corpus, made: 0 }
    }

    /// The next input: one of the corpus with up to six changes.
    pub fn mutated(&mut self) -> Vec<u8> {
        self.made += 1;
        let mut data = self.corpus[self.made % self.corpus.len()].clone();
        for _ in 0..self.random.below(7) {
            self.change(&mut data);
        }
        data
    }

    /// The next input: up to `most` random bytes, with no good input behind it. It suits a target
    /// that decodes every input into operations.
    pub fn random(&mut self, most: usize) -> Vec<u8> {
        let len = 1 + self.random.below(most);
        (0..len.div_ceil(8)).flat_map(|_| self.random.next().to_le_bytes()).take(len).collect()
    }

    fn change(&mut self, data: &mut Vec<u8>) {
        let random = &mut self.random;
        let at = random.below(data.len());
        let end = (at + 1 + random.below(16)).min(data.len());
        match random.below(9) {
            0 => data.truncate(random.below(data.len() + 1)),
            1 => data.push(random.next() as u8),
            2 => data.insert(at, random.next() as u8),
            _ if data.is_empty() => {}
            3 => drop(data.drain(at..end)),
            4 => {
                let part = data[at..end].to_vec();
                data.splice(at..at, part);
            }
            5 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                let len = [1, 2, 4, 8][random.below(4)].min(data.len() - at);
                data[at..at + len].copy_from_slice(&edge[..len]);
            }
            6 => {
                let other = &self.corpus[random.below(self.corpus.len())];
                let from = random.below(other.len() + 1);
                data.truncate(at);
                data.extend_from_slice(&other[from..]);
            }
            _ => data[at] ^= 1 << random.below(8),
        }
    }
}

/// How many cases of a target to run: `PEERWAY_FUZZ_CASES`, or `usual`. None if
/// `PEERWAY_FUZZ_TARGET` names another target.
pub fn cases(target: &str, usual: u64) -> u64 {
    let is_other = std::env::var("PEERWAY_FUZZ_TARGET").is_ok_and(|chosen| chosen != target);
    let cases = std::env::var("PEERWAY_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok());
    if is_other { 0 } else { cases.unwrap_or(usual) }
}

/// The input of `PEERWAY_FUZZ_INPUT`, in hexadecimal: a failure to repeat.
pub fn input() -> Option<Vec<u8>> {
    let text = std::env::var("PEERWAY_FUZZ_INPUT").ok()?;
    let byte = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok();
    (0..text.len() / 2).map(byte).collect()
}

/// Runs a target on inputs that `next` makes, and prints how many and how long.
///
/// # Errors
///
/// The failure of the first input that fails, made shorter, with the variable that repeats it.
pub fn explore(
    name: &str,
    cases: u64,
    mut next: impl FnMut() -> Vec<u8>,
    mut target: impl FnMut(&[u8]) -> Result<(), String>,
) -> Result<(), String> {
    let mut fails = |data: &[u8]| match catch_unwind(AssertUnwindSafe(|| target(data))) {
        Ok(result) => result.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()));
            Some(format!("panicked: {}", text.unwrap_or_default()))
        }
    };
    let began = Instant::now();
    for _ in 0..cases {
        let data = next();
        if let Some(why) = fails(&data) {
            let (data, why) = shrink(data, why, &mut fails);
            let hex: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
            return Err(format!(
                "{name}: {why}\nagain: PEERWAY_FUZZ_TARGET={name} PEERWAY_FUZZ_INPUT={hex}"
            ));
        }
    }
    if cases > 0 {
        println!("fuzz {name}: {cases} cases in {:.1} s", began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Leaves out parts of a failing input while it still fails.
fn shrink(
    mut data: Vec<u8>,
    mut why: String,
    fails: &mut impl FnMut(&[u8]) -> Option<String>,
) -> (Vec<u8>, String) {
    let began = Instant::now();
    let mut len = data.len() / 2;
    while len > 0 {
        let mut at = 0;
        while at < data.len() && began.elapsed() < SHRINK {
            let end = (at + len).min(data.len());
            let shorter = [&data[..at], &data[end..]].concat();
            match fails(&shorter) {
                Some(reason) => (data, why) = (shorter, reason),
                None => at = end,
            }
        }
        len /= 2;
    }
    (data, why)
}

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

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;
    use crate::config::DataProtection;
    use crate::ids::{Incarnation, SlotId};
    use crate::metadata::NetworkId;
    use crate::region::{Access, MemoryKind};
    use crate::wire::{
        Admission, GpuHandle, GpuOffer, Hello, Import, Kind, MappingOffer, PULL_SEGMENT_LEN,
        QueueEnd, QueueOffer, RdmaPort, Ready, Refusal, SEGMENT_LEN, SubSession, Welcome,
    };

    /// Cases of each target in a usual test run; `cargo xtask fuzz` runs more.
    const CASES: u64 = 200_000;

    const WHO: Incarnation = Incarnation([3; 16]);

    fn a_descriptor() -> Descriptor {
        let grant = SlotId { index: 1, generation: 2 };
        Descriptor::new(&WHO, grant, [1; 16], Access::READ_WRITE, 4096, 5 << 30)
    }

    fn some_metadata() -> Vec<u8> {
        let addresses = vec!["10.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()];
        let network = NetworkId([1; 8]);
        Metadata { incarnation: WHO, network, addresses }.to_bytes()
    }

    /// Good inputs of a target.
    fn corpus(target: &str) -> Vec<Vec<u8>> {
        match target {
            "descriptor" => {
                let small = Descriptor { len: 7, addr: 4100, ..a_descriptor() };
                vec![a_descriptor().to_bytes().to_vec(), small.to_bytes().to_vec()]
            }
            "metadata" => vec![some_metadata()],
            "header" => {
                let mut all = Vec::new();
                for (code, body) in (1..=12).flat_map(|code| [(code, 0), (code, 100)]) {
                    let mut head = Header::new(Kind::Beat);
                    head.set_body(usize::from(body > 0), body.min(20), body - body.min(20));
                    head.as_mut_bytes()[3] = code;
                    all.push(head.as_bytes().to_vec());
                }
                all
            }
            "frame" => frames(),
            "record" => vec![records()],
            _ => messages().iter().map(Control::to_bytes).collect(),
        }
    }

    /// Frames with a table of two runs of 257 bytes.
    fn frames() -> Vec<Vec<u8>> {
        let frame = |kind: Kind| {
            let entry = if kind == Kind::Pull { PULL_SEGMENT_LEN } else { SEGMENT_LEN };
            let payload = if kind == Kind::Write { 514 } else { 0 };
            let mut head = Header::new(kind);
            head.sequence = 1.into();
            head.set_body(2, 2 * entry, payload);
            let mut run = vec![0; entry];
            run[8..10].fill(1);
            [head.as_bytes(), &run, &run].concat()
        };
        [Kind::Write, Kind::Read, Kind::Pull].map(frame).to_vec()
    }

    /// Two records, one after the other.
    fn records() -> Vec<u8> {
        let mut position = Position::new(SEED);
        let mut records = Vec::new();
        for body in [&b"one"[..], &[7; 200]] {
            let (head, bytes) = position.head(body.len());
            position.advance();
            let trailer = crc32c::crc32c_append(head.check, body).to_le_bytes();
            records.extend([&bytes[..], body, &trailer].concat());
        }
        records
    }

    /// A message of each kind.
    fn messages() -> Vec<Control> {
        let port = RdmaPort {
            gid: [1; 16],
            lid: 2,
            mtu: 3,
            ethernet: true,
            datagrams: false,
            windows: true,
        };
        let end = QueueEnd {
            port: 1,
            number: 2,
            first_packet: 3,
            key: 4,
            to: 5,
            reads: 6,
            receives: 7,
            flush_addr: 8,
            flush_key: 9,
        };
        let gpu = GpuOffer {
            uuid: [1; 16],
            handle: GpuHandle::Fabric([[1; 32], [2; 32]]),
            len: 1 << 30,
            offset: 5,
            buffer: 6,
        };
        let import = Import {
            access: Access::READ_WRITE,
            len: 1 << 40,
            base: 77,
            gate: Some(3),
            pass: 9,
            mapping: Some(MappingOffer { file_len: 5, offset: 6 }),
            keys: vec![1, 2, 3],
            flush: true,
            kind: MemoryKind::Host,
            gpu: Some(gpu),
        };
        let hello = Hello {
            data: DataProtection::Encrypt,
            incarnation: WHO,
            session: [5; 16],
            replaces: Some([6; 16]),
            sub_session: Some(SubSession { number: 7, of: [8; 16] }),
            lanes: 4,
            detect_ms: 2000,
            host: [9; 32],
            local: true,
            rdma: vec![port; 2],
        };
        let welcome = Welcome {
            data: DataProtection::Integrity,
            detect_ms: 2000,
            metadata: some_metadata(),
            host: vec![1; 40],
            local: "peerway-1".into(),
            local_why: "why".into(),
            rdma: vec![port],
            rdma_why: "why not".into(),
        };
        let ready = Ready {
            same_process: false,
            linked: true,
            opener_pulls: true,
            queues: false,
            host: vec![2; 40],
            why: "because".into(),
        };
        let shown = Admission::Certificate {
            chain: vec![vec![1; 100], vec![2; 50]],
            scheme: 0x0807,
            signature: vec![3; 64],
        };
        let offer = QueueOffer { lane: 1, to_port: 0, latency: true, end };
        vec![
            Control::Hello(hello),
            Control::OpenLane { session: [1; 16], lane: 2, proof: [3; 32] },
            Control::Welcome(welcome),
            Control::LaneOpened { proof: [4; 32] },
            Control::Ready(ready),
            Control::Refuse(Refusal::Pinned("why".into())),
            Control::Refuse(Refusal::Exists),
            Control::Import { request: 9, descriptor: a_descriptor().to_bytes().to_vec() },
            Control::Importing { request: 1 << 60 },
            Control::Imported { request: 9, result: Ok(import) },
            Control::Imported { request: 9, result: Err(3) },
            Control::LaneLost { lane: 3, generation: 1 },
            Control::LaneFenced {
                lane: 3,
                generation: 1,
                applied: 9,
                refused: vec![(1, 2); 9],
                immediates: 4,
            },
            Control::ReplaceLane { session: [1; 16], lane: 2, generation: 3, proof: [3; 32] },
            Control::OpenQueues { queues: vec![offer; 3] },
            Control::QueuesOpened { queues: vec![(1, Ok(end)), (2, Err("why".into()))] },
            Control::Bye,
            Control::Keys { keys: vec![(1 << 32 | 5, 0x1234), (7, 0)] },
            Control::Admit(Admission::Secret([1; 32])),
            Control::Admit(shown),
        ]
    }

    #[test]
    fn every_parser_survives_mutations_of_good_inputs() {
        for (name, target) in TARGETS {
            let mut mutator = Mutator::new(0x5EED, corpus(name));
            let run = |data: &[u8]| {
                target(data);
                Ok(())
            };
            if let (Some(data), true) = (input(), cases(name, 1) > 0) {
                target(&data);
            }
            explore(name, cases(name, CASES), || mutator.mutated(), run)
                .unwrap_or_else(|why| panic!("{why}"));
        }
    }

    #[test]
    fn every_good_input_parses() {
        for message in messages() {
            assert_eq!(Control::from_bytes(&message.to_bytes()), Ok(message));
        }
        assert!(corpus("descriptor").iter().all(|data| Descriptor::from_bytes(data).is_ok()));
        assert!(corpus("metadata").iter().all(|data| Metadata::from_bytes(data).is_ok()));
    }

    #[test]
    fn a_failing_input_is_found_and_made_shorter() {
        let mut mutator = Mutator::new(1, vec![vec![0; 64]]);
        let target = |data: &[u8]| {
            if data.contains(&0x80) { Err("found".to_owned()) } else { Ok(()) }
        };
        let why = explore("target", 10_000, || mutator.mutated(), target).unwrap_err();
        assert!(why.contains("found") && why.ends_with("PEERWAY_FUZZ_INPUT=80"), "{why}");
    }
}
