//! Peers that flood an endpoint with counts and notifications. An honest peer beside them succeeds.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, TransferError};
use peerway_core::wire::{Control, HEADER_LEN, Header, Kind};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame};
use zerocopy::FromBytes;

use crate::world::{Verdict, World, fine_with};

/// More than an endpoint holds of messages and of counter ids: 65,536 each.
const FLOOD: u64 = 66_000;
/// Frames between two looks at the answers.
const BURST: u64 = 256;

/// The answers to a flood.
#[derive(Debug, Default)]
struct Answers {
    acknowledged: u64,
    refused: u64,
    /// The last reason for a refusal.
    reason: u16,
    bytes: Vec<u8>,
}

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut b = world.remote(&world.options())?;
    let honest = world.options().build()?;
    let peer = world.connect(&honest, &b)?;
    b.region("r", 4096, world.memory())?;
    let descriptor = b.advertise("r", Access::WRITE)?;
    peer.import(&descriptor)?;

    world.step("a stranger counts");
    let mut random = Random::new(0x516);
    let mut stranger = Raw::connect(b.addr()?, &mut random)?;
    stranger.open()?;
    let told = flood(world, &mut stranger, Kind::Count, 2 * BURST)?;
    ensure!(told.refused == 2 * BURST, "counts of a stranger were accepted: {told:?}");
    ensure!(told.reason == TransferError::RemoteAccess as u16, "another reason: {told:?}");
    for id in [0, 1, 2 * BURST - 1] {
        ensure!(b.number(&format!("counter e {id}"))? == 0, "a stranger raised counter {id}");
    }

    world.step("strangers fill the inbox");
    let mut taken = 0;
    for _ in 0..8 {
        let mut stranger = Raw::connect(b.addr()?, &mut random)?;
        stranger.open()?;
        let told = flood(world, &mut stranger, Kind::Notify, FLOOD / 8)?;
        taken += FLOOD / 8 - told.refused;
    }
    // Another stranger: the first one has answered no heartbeat since its flood.
    let mut stranger = Raw::connect(b.addr()?, &mut random)?;
    stranger.open()?;
    let told = flood(world, &mut stranger, Kind::Notify, BURST)?;
    ensure!(told.refused == BURST, "the inbox has no bound for strangers: {told:?}");
    let full = TransferError::NotificationsFull as u16;
    ensure!(told.reason == full, "another reason: {told:?}");
    peer.notify(b"honest")?.join().ok().context("an honest notification beside the flood")?;

    world.step("a peer with a descriptor fills the counters");
    let mut guest = Raw::connect(b.addr()?, &mut random)?;
    guest.open()?;
    guest.send(&control(&Control::Import { request: 1, descriptor: descriptor.to_vec() }))?;
    match imported(&mut guest)? {
        Control::Imported { result: Ok(_), .. } => {}
        other => bail!("the import of a peer was answered with {other:?}"),
    }
    let told = flood(world, &mut guest, Kind::Count, FLOOD)?;
    ensure!(told.refused > 0 && told.refused < FLOOD, "the counters have no share: {told:?}");
    ensure!(told.reason == TransferError::CountersFull as u16, "another reason: {told:?}");
    peer.count(u32::MAX >> 4)?.join().ok().context("an honest count beside the flood")?;
    ensure!(b.number(&format!("counter e {}", u32::MAX >> 4))? == 1, "the honest count is lost");
    fine_with(format!("{taken} messages and {} ids taken", FLOOD - told.refused))
}

/// Sends frames of one kind, numbered from the next free number, and collects the answers.
fn flood(world: &World, raw: &mut Raw, kind: Kind, frames: u64) -> Result<Answers> {
    let mut told = Answers::default();
    let first = raw.sequence;
    let until = Instant::now() + world.profile.limit;
    for at in 0..frames {
        raw.sequence += 1;
        let sequence = raw.sequence;
        let bytes = frame(
            kind,
            |head| {
                head.sequence = sequence.into();
                head.immediate = (at as u32).into();
            },
            &[],
            &[],
        );
        raw.send(&bytes)?;
        let is_last = at + 1 == frames;
        while (is_last || at % BURST == BURST - 1) && told.acknowledged < raw.sequence {
            ensure!(Instant::now() < until, "frame {sequence} was not answered: {told:?}");
            told.read(raw)?;
        }
    }
    ensure!(told.acknowledged == first + frames, "answers without a request: {told:?}");
    Ok(told)
}

impl Answers {
    /// Reads what has arrived.
    fn read(&mut self, raw: &mut Raw) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        raw.stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let read = raw.stream.read(&mut buffer).context("the endpoint closed the flood's lane")?;
        ensure!(read > 0, "the endpoint closed the lane of the flood");
        self.bytes.extend_from_slice(&buffer[..read]);
        while let Some(head) = self.bytes.first_chunk::<HEADER_LEN>() {
            let head = Header::read_from_bytes(head).ok().context("a header")?;
            let checked = head.check()?;
            ensure!(checked.table + checked.payload == 0, "a {:?} with a body", checked.kind);
            match checked.kind {
                Kind::Ack => self.acknowledged = head.sequence.get(),
                Kind::Nack => (self.refused, self.reason) = (self.refused + 1, head.status.get()),
                // A flood on a busy machine may take longer than the detection time.
                Kind::Beat => {
                    raw.send(&frame(Kind::Beat, |beat| beat.transfer = head.sequence, &[], &[]))?
                }
                _ => {}
            }
            self.bytes.drain(..HEADER_LEN);
        }
        Ok(())
    }
}

/// The answer to an import. Heartbeats may come before it.
fn imported(raw: &mut Raw) -> Result<Control> {
    loop {
        let mut head = [0; HEADER_LEN];
        raw.stream.read_exact(&mut head).context("no answer to the import")?;
        let checked = Header::read_from_bytes(&head).ok().context("a header")?.check()?;
        let mut body = vec![0; checked.table + checked.payload];
        raw.stream.read_exact(&mut body)?;
        if checked.kind == Kind::Control {
            return Ok(Control::from_bytes(&body)?);
        }
    }
}
