//! The operations that an input is decoded into.

use std::time::Duration;

use peerway_core::wire::{
    Admission, COUNTS, Control, HEADER_LEN, Header, Import, Kind, PullSegment, QueueEnd,
    QueueOffer, Ready, Refusal, Segment,
};
use zerocopy::IntoBytes;

use super::{GRANTED, MS, World};
use crate::{Access, clock};

/// The ids of counters in valid frames.
pub(super) const COUNTERS: u32 = 4;
/// Frames of a large flood: their answers are more than a peer may leave unread.
const LARGE_FLOOD: usize = 30_000;

/// A heartbeat.
pub(super) fn beat(clock: u64, echo: u64) -> Vec<u8> {
    let mut head = Header::new(Kind::Beat);
    (head.sequence, head.transfer) = (clock.into(), echo.into());
    head.as_bytes().to_vec()
}

/// An acknowledgement of all frames up to this one.
pub(super) fn acknowledgement(sequence: u64) -> Vec<u8> {
    let mut head = Header::new(Kind::Ack);
    head.sequence = sequence.into();
    head.as_bytes().to_vec()
}

impl World<'_> {
    /// Carries out the next operation of the input. The highest bit of its code makes the driver
    /// take a turn after it.
    pub(super) fn operate(&mut self) -> Result<(), String> {
        let code = self.input.byte();
        let lane = usize::from(code >> 5 & 3) % self.lanes.len();
        match code & 0x1F {
            0..4 => self.data_frame(lane, Kind::Write),
            4..6 => self.data_frame(lane, Kind::Read),
            6 | 7 => self.answer_read(lane),
            8 => self.data_frame(lane, Kind::Pull),
            9 | 10 => self.message(lane),
            11 => self.small_frame(lane, Kind::Count),
            12 | 13 => self.small_frame(lane, Kind::Ack),
            14 => self.small_frame(lane, Kind::Nack),
            15 => self.small_frame(lane, Kind::Pulled),
            16 | 17 => self.small_frame(lane, Kind::Beat),
            18 => self.small_frame(lane, Kind::Cancel),
            19..22 => self.control(lane),
            22 => {
                let len = self.input.below(100);
                // Secret bytes in granted memory would look like a leak.
                let bytes: Vec<u8> =
                    self.input.bytes(len).iter().map(|byte| byte & !4 | 2).collect();
                if self.is_wild() {
                    self.note(|| format!("lane {lane}: {} raw bytes", bytes.len()));
                    self.send(lane, &bytes);
                }
            }
            23 => self.flood(lane)?,
            24 => {
                if self.is_wild() {
                    self.note(|| format!("lane {lane} is closed"));
                    let more = self.input.below(400);
                    self.lanes[lane].break_at(1, more);
                }
            }
            25 | 26 => self.post(),
            27 => self.cancel()?,
            28 => self.revoke()?,
            29 => self.pass_time(),
            30 => {
                let most = 1 + self.input.below(2000);
                self.hear(most)?;
            }
            _ => {
                if self.input.byte() == 0xFF {
                    self.note(|| "the program closes the session".into());
                    self.node.disconnect();
                }
            }
        }
        if code & 0x80 != 0 {
            self.poll()?;
        }
        Ok(())
    }

    /// Whether the peer makes a mistake here.
    fn is_wild(&mut self) -> bool {
        self.wildness > 0 && self.input.byte() < self.wildness
    }

    fn pass_time(&mut self) {
        let choice = self.input.byte();
        let ms = match choice {
            0..0xF0 => u64::from(choice) / 4,
            _ => u64::from(choice & 15) * 200,
        };
        clock::advance(Duration::from_millis(ms));
        self.note(|| format!("{ms} ms pass"));
    }

    /// The number of the next sequenced frame on a lane, or a wrong one.
    fn sequence(&mut self, lane: usize) -> u64 {
        // The frames of `held` are not sent yet, and no frame may follow before they are.
        let next = self.streams[lane].last + 1;
        if !self.is_wild() {
            return next;
        }
        match self.input.byte() % 4 {
            0 => next.wrapping_sub(1),
            1 => next + 1,
            2 => 0,
            _ => self.input.number(),
        }
    }

    /// Sends a frame, changed or in part if the peer makes a mistake.
    fn send_frame(&mut self, lane: usize, mut bytes: Vec<u8>) {
        if self.is_wild() {
            let at = self.input.below(HEADER_LEN);
            bytes[at] ^= 1 << (self.input.byte() % 8);
        }
        let kind = bytes[3];
        if self.input.byte() & 0x0F == 0 {
            // The rest follows with the next frame of this lane.
            let cut = self.input.below(bytes.len() + 1);
            let rest = bytes.split_off(cut);
            self.note(|| format!("lane {lane}: {cut} bytes of a frame of kind {kind}"));
            self.send(lane, &bytes);
            self.held[lane] = rest;
        } else {
            self.note(|| format!("lane {lane}: a frame of kind {kind}, {} bytes", bytes.len()));
            self.send(lane, &bytes);
        }
    }

    /// Sends what is held back, so that the next frame gets a number of its own.
    fn release(&mut self, lane: usize) {
        if !self.held[lane].is_empty() {
            self.send(lane, &[]);
        }
    }

    /// A write, a read or a pull.
    fn data_frame(&mut self, lane: usize, kind: Kind) {
        self.release(lane);
        let mut head = Header::new(kind);
        head.sequence = self.sequence(lane).into();
        head.transfer = u64::from(self.input.byte() & 3).into();
        let choice = self.input.byte();
        let at = match choice {
            // Mostly what the peer may use.
            0..0xA0 if kind == Kind::Read => [0, 1][usize::from(choice) % 2],
            0..0xA0 => [0, 2, 4][usize::from(choice) % 3],
            _ => usize::from(choice) % self.granted.len(),
        };
        let granted = &self.granted[at];
        let (id, len) = (granted.descriptor.grant, granted.len as u64);
        head.token = granted.descriptor.token;
        (head.grant, head.generation) = (id.index.into(), id.generation.into());
        if self.is_wild() {
            match self.input.byte() % 4 {
                0 => head.token[self.input.below(16)] ^= 1 << (self.input.byte() % 8),
                1 => head.generation = (id.generation + 1).into(),
                2 => head.grant = (id.index + 1).into(),
                _ => head.token = [0; 16],
            }
        }
        let choice = self.input.byte();
        if choice & 7 == 7 && kind != Kind::Read {
            let id = self.counter();
            (head.status, head.immediate) = (COUNTS.into(), id.into());
        }
        let runs = if kind == Kind::Write { choice >> 3 & 3 } else { 1 + (choice >> 3 & 3) };
        let (mut table, mut payload) = (Vec::new(), 0);
        for at in 0..runs.max(1) {
            let (offset, run) = self.range(len);
            if kind == Kind::Write {
                payload += run as usize;
            }
            if at == 0 {
                head.offset = offset.into();
            }
            if kind == Kind::Pull {
                let source = self.input.number().into();
                let entry = PullSegment { offset: offset.into(), len: run.into(), source };
                table.extend_from_slice(entry.as_bytes());
            } else if runs > 0 {
                let entry = Segment { offset: offset.into(), len: run.into() };
                table.extend_from_slice(entry.as_bytes());
            }
        }
        if self.is_wild() {
            payload += self.input.below(40);
        }
        // A hostile length is announced, and few of its bytes follow.
        let most = payload.min(4096);
        head.set_body(usize::from(runs), table.len(), payload.min(1 << 20));
        let fill = GRANTED ^ 0x80 ^ (self.input.byte() & 3);
        let bytes = [head.as_bytes(), &table, &vec![fill; most]].concat();
        self.send_frame(lane, bytes);
    }

    /// A range of a grant of this length, or one that is not inside.
    fn range(&mut self, len: u64) -> (u64, u32) {
        let offset = self.input.below(len as usize) as u64;
        let left = (len - offset) as usize;
        let run = self.input.below(left.min(200) + 1) as u32;
        if !self.is_wild() {
            return (offset, run);
        }
        match self.input.byte() % 5 {
            0 => (len - u64::from(run) + 1, run),
            1 => (self.input.number(), run),
            2 => (u64::from(run).wrapping_neg(), run),
            3 => (offset, self.input.number() as u32),
            _ => (len, 1),
        }
    }

    fn counter(&mut self) -> u32 {
        if self.is_wild() {
            self.input.number() as u32
        } else {
            u32::from(self.input.byte()) % COUNTERS
        }
    }

    /// The answer to a read of the driver.
    fn answer_read(&mut self, lane: usize) {
        self.release(lane);
        let reads = self.heard[lane].open.iter().filter(|(kind, ..)| *kind == Kind::Read);
        let reads: Vec<_> = reads.map(|(_, sequence, len)| (*sequence, *len)).collect();
        let (mut sequence, mut len) = match reads.len() {
            0 => (1, 10),
            count => reads[self.input.below(count)],
        };
        if self.is_wild() {
            sequence = self.input.number();
        } else if reads.is_empty() {
            return;
        }
        if self.is_wild() {
            len = len.wrapping_add(self.input.number()) % 5000;
        }
        let mut head = Header::new(Kind::ReadData);
        head.sequence = sequence.into();
        head.set_body(0, 0, len as usize);
        self.heard[lane].open.retain(|(_, other, _)| *other != sequence);
        let bytes = [head.as_bytes(), &vec![0xC1; len as usize]].concat();
        self.send_frame(lane, bytes);
    }

    fn message(&mut self, lane: usize) {
        self.release(lane);
        let mut head = Header::new(Kind::Notify);
        let sequence = self.sequence(lane);
        head.sequence = sequence.into();
        let choice = self.input.byte();
        let len = match choice {
            0..0xC0 => usize::from(choice % 32),
            0xC0..0xF8 => usize::from(choice) * 16,
            // A hostile length: the rest never comes, or other frames are its rest.
            _ => 1 << 20,
        };
        head.set_body(0, 0, len);
        // Each message differs, so that none can stand for another.
        let unique = [&[lane as u8][..], &sequence.to_le_bytes()].concat();
        let body: Vec<u8> = unique.into_iter().cycle().take(len.min(4096)).collect();
        self.send_frame(lane, [head.as_bytes(), &body].concat());
    }

    /// A frame without a body.
    fn small_frame(&mut self, lane: usize, kind: Kind) {
        self.release(lane);
        let mut head = Header::new(kind);
        head.transfer = u64::from(self.input.byte() & 3).into();
        let wild = self.is_wild();
        let number = if wild { self.input.number() } else { u64::from(self.input.byte()) };
        let heard = &self.heard[lane];
        let open = heard.open.get(number as usize % heard.open.len().max(1));
        head.sequence = match kind {
            Kind::Count | Kind::Cancel => self.sequence(lane),
            Kind::Ack if !wild => heard.last,
            // A receiver may refuse a frame whose header alone has come.
            Kind::Nack if !wild && number & 3 == 3 => heard.last + 1,
            Kind::Nack | Kind::Pulled if !wild => match open {
                Some((_, sequence, _)) => *sequence,
                None => return,
            },
            _ => number,
        }
        .into();
        match kind {
            Kind::Count => head.immediate = self.counter().into(),
            Kind::Nack => head.status = u16::from(self.input.byte() % 16).into(),
            Kind::Beat if !wild => head.transfer = self.heard[lane].clock.into(),
            Kind::Beat => head.transfer = self.input.number().into(),
            _ => {}
        }
        if kind == Kind::Pulled && !wild {
            return;
        }
        let bytes = head.as_bytes().to_vec();
        self.send_frame(lane, bytes);
    }

    fn control(&mut self, lane: usize) {
        self.release(lane);
        let message = self.control_message(lane);
        let Some(message) = message else { return };
        let mut body = message.to_bytes();
        if self.is_wild() && !body.is_empty() {
            let at = self.input.below(body.len());
            body[at] = self.input.byte();
        }
        self.note(|| format!("lane {lane}: {message:?}"));
        let mut head = Header::new(Kind::Control);
        head.set_body(0, 0, body.len());
        self.send_frame(lane, [head.as_bytes(), &body].concat());
    }

    /// A message that a correct peer could send, or, if the peer is wild, any.
    fn control_message(&mut self, lane: usize) -> Option<Control> {
        let request = u64::from(self.input.byte() & 3);
        let choice = self.input.byte();
        let at = usize::from(choice >> 4) % self.granted.len();
        Some(match choice & 0x0F {
            0..4 => {
                let mut descriptor = self.granted[at].descriptor.to_bytes().to_vec();
                if self.is_wild() {
                    let at = self.input.below(descriptor.len());
                    descriptor[at] ^= self.input.byte();
                }
                Control::Import { request, descriptor }
            }
            4..6 => {
                let other = (lane + 1 + usize::from(choice >> 4)) % self.lanes.len();
                let number = if self.is_wild() { self.input.number() } else { other as u64 };
                let (lost, generation) = (number as u16, (number >> 16) as u32);
                if usize::from(lost) == lane && self.wildness == 0 {
                    return None;
                }
                Control::LaneLost { lane: lost, generation }
            }
            6..9 => {
                let asked = self.heard.iter().find_map(|heard| heard.lost.last().copied());
                let lane = match asked {
                    Some(lane) if !self.is_wild() => lane,
                    _ => self.input.byte().into(),
                };
                let applied = self.input.number();
                let refused = (0..self.input.below(3)).map(|at| (1 + at as u64, 3)).collect();
                let (generation, immediates) = (u32::from(choice >> 7), self.input.number());
                Control::LaneFenced { lane, generation, applied, refused, immediates }
            }
            9 => Control::Imported { request, result: Err(self.input.byte()) },
            10 => Control::Imported { request, result: Ok(import()) },
            11 => Control::Importing { request },
            12 => Control::Refuse(Refusal::Limit("why".repeat(self.input.below(40)))),
            13 => Control::OpenQueues { queues: vec![offer(); self.input.below(5)] },
            14 => Control::QueuesOpened {
                queues: vec![(choice.into(), Err(String::from("why"))); self.input.below(5)],
            },
            _ if !self.is_wild() => return None,
            _ => match self.input.byte() % 8 {
                1 => Control::OpenLane { session: [7; 16], lane: 1, proof: [0; 32] },
                2 => Control::LaneOpened { proof: [0; 32] },
                3 => Control::Refuse(Refusal::Exists),
                4 => Control::Admit(Admission::Secret([0; 32])),
                5 => Control::Ready(Ready {
                    same_process: true,
                    linked: true,
                    opener_pulls: true,
                    queues: true,
                    host: vec![0; 4],
                    why: String::new(),
                }),
                6 => Control::Keys { keys: vec![(u64::from(choice), 1); self.input.below(5)] },
                _ => Control::Bye,
            },
        })
    }

    /// Many frames at once, whose answers the peer may never read.
    fn flood(&mut self, lane: usize) -> Result<(), String> {
        self.release(lane);
        let choice = self.input.byte();
        let many = match self.input.byte() {
            0xFF => LARGE_FLOOD,
            byte => 1 + usize::from(byte) * 4,
        };
        let turns = self.input.below(if many == LARGE_FLOOD { 200 } else { 8 });
        self.note(|| format!("lane {lane}: {many} frames of flood {}", choice % 8));
        let mut bytes = Vec::with_capacity(many * 2 * HEADER_LEN);
        let first = self.streams[lane].last + 1;
        for at in 0..many {
            let sequence = (first + at as u64).into();
            let mut head = Header::new(Kind::Count);
            head.sequence = sequence;
            let mut body = Vec::new();
            match choice % 8 {
                0 => head.immediate = u32::from(choice).into(),
                1 => {
                    head = Header::new(Kind::Notify);
                    head.sequence = sequence;
                }
                2 => {
                    // A write without a right: refused.
                    head = Header::new(Kind::Write);
                    head.sequence = sequence;
                }
                3 => {
                    let granted = &self.granted[0].descriptor;
                    head = Header::new(Kind::Read);
                    (head.sequence, head.token) = (sequence, granted.token);
                    head.grant = granted.grant.index.into();
                    head.generation = granted.grant.generation.into();
                    let entry = Segment { offset: 0.into(), len: 64.into() };
                    body.extend_from_slice(entry.as_bytes());
                }
                4 => {
                    head = Header::new(Kind::Control);
                    let lost = (at % 60_000) as u16 + 4;
                    body = Control::LaneLost { lane: lost, generation: 0 }.to_bytes();
                }
                5 => {
                    head = Header::new(Kind::Control);
                    body = Control::Import { request: 0, descriptor: vec![0; 3] }.to_bytes();
                }
                6 => head = Header::new(Kind::Beat),
                _ => {
                    head = Header::new(Kind::Cancel);
                    head.sequence = sequence;
                }
            }
            match choice % 8 {
                3 => head.set_body(1, body.len(), 0),
                _ => head.set_body(0, 0, body.len()),
            }
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&body);
        }
        self.send(lane, &bytes);
        for _ in 0..turns {
            self.poll()?;
        }
        Ok(())
    }
}

fn import() -> Import {
    Import {
        access: Access::READ_WRITE,
        len: MS,
        base: 0,
        gate: Some(3),
        pass: 1,
        mapping: None,
        keys: vec![1; 4],
        flush: true,
        kind: peerway_core::region::MemoryKind::Host,
        gpu: None,
    }
}

fn offer() -> QueueOffer {
    let end = QueueEnd {
        port: 0,
        number: 1,
        first_packet: 1,
        key: 1,
        to: 1,
        reads: 1,
        receives: 1,
        flush_addr: 1,
        flush_key: 1,
    };
    QueueOffer { lane: 1, to_port: 0, latency: true, end }
}
