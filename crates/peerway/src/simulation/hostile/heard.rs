//! What the driver under test has sent on a lane. Every byte is checked: a hostile peer must not
//! make an honest one break the protocol, or send memory that it does not own.

use std::collections::HashSet;

use peerway_core::wire::{Control, HEADER_LEN, Header, Kind, SEGMENT_LEN, Segment};
use zerocopy::FromBytes;

use super::SECRET;
use super::stream::Stream;

/// This many secret bytes in a row are no accident. Random tokens may contain fewer.
const LEAK: usize = 4;

#[derive(Default)]
pub(super) struct Heard {
    bytes: Vec<u8>,
    /// The number of the last sequenced frame.
    pub(super) last: u64,
    acknowledged: u64,
    refused: HashSet<u64>,
    answered: HashSet<u64>,
    /// Sequenced frames that the peer may answer: kind, number, bytes.
    pub(super) open: Vec<(Kind, u64, u64)>,
    /// Lanes that the driver asks about.
    pub(super) lost: Vec<u16>,
    /// The driver's clock, from its last heartbeat.
    pub(super) clock: u64,
    imported: u64,
    /// Bytes of granted memory that came.
    pub(super) served: u64,
}

impl Heard {
    /// Takes bytes of the driver. `sent` is what it has received on this lane.
    pub(super) fn take(&mut self, bytes: &[u8], sent: &Stream) -> Result<(), String> {
        self.bytes.extend_from_slice(bytes);
        let all = std::mem::take(&mut self.bytes);
        let mut rest = &all[..];
        while let Some(head) = rest.first_chunk::<HEADER_LEN>() {
            let head = Header::read_from_bytes(head).map_err(|_| "no header")?;
            let checked = head.check().map_err(|why| format!("the driver sent: {why}"))?;
            let need = HEADER_LEN + checked.table + checked.payload;
            let Some(body) = rest.get(HEADER_LEN..need) else { break };
            let kind = checked.kind;
            self.frame(kind, &head, body, sent).map_err(|why| format!("{kind:?}: {why}"))?;
            rest = &rest[need..];
        }
        self.bytes = rest.to_vec();
        Ok(())
    }

    fn frame(
        &mut self,
        kind: Kind,
        head: &Header,
        body: &[u8],
        sent: &Stream,
    ) -> Result<(), String> {
        let sequence = head.sequence.get();
        if kind.is_sequenced() {
            if sequence != self.last + 1 {
                return Err(format!("frame {sequence} follows frame {}", self.last));
            }
            self.last = sequence;
        }
        let is_due = (1..=sent.last).contains(&sequence);
        match kind {
            Kind::Write | Kind::ReadData if leaks(body) => {
                return Err("the frame has bytes that were not granted".into());
            }
            Kind::Write | Kind::Notify => self.open.push((kind, sequence, body.len() as u64)),
            Kind::Read => {
                let entries = body.chunks_exact(SEGMENT_LEN).flat_map(Segment::read_from_bytes);
                let total = entries.map(|entry| u64::from(entry.len.get())).sum();
                self.open.push((kind, sequence, total));
            }
            Kind::Count | Kind::Pull | Kind::Cancel => self.open.push((kind, sequence, 0)),
            Kind::ReadData => {
                let reads = sent.count(Kind::Read);
                if !is_due || !self.answered.insert(sequence) || self.answered.len() as u64 > reads
                {
                    return Err(format!("read {sequence} is answered twice, or was not sent"));
                }
                self.served += body.len() as u64;
            }
            Kind::Ack => {
                if !is_due || sequence <= self.acknowledged {
                    let last = sent.last;
                    return Err(format!("acknowledges {sequence} of {last} frames"));
                }
                self.acknowledged = sequence;
            }
            Kind::Nack => {
                if !is_due || !self.refused.insert(sequence) {
                    return Err(format!("frame {sequence} is refused twice, or was not sent"));
                }
            }
            Kind::Pulled => return Err("there is no path for a pull".into()),
            Kind::Beat => self.clock = self.clock.max(sequence),
            Kind::Control => match Control::from_bytes(body).map_err(|why| why.to_string())? {
                Control::LaneLost { lane, .. } => self.lost.push(lane),
                Control::Imported { .. } => {
                    self.imported += 1;
                    if self.imported > sent.count(Kind::Control) {
                        return Err("more answers than imports".into());
                    }
                }
                Control::LaneFenced { .. } | Control::Refuse(_) | Control::Bye => {}
                other => return Err(format!("the driver has no reason to send {other:?}")),
            },
        }
        Ok(())
    }
}

fn leaks(bytes: &[u8]) -> bool {
    bytes.windows(LEAK).any(|window| window.iter().all(|byte| *byte == SECRET))
}
