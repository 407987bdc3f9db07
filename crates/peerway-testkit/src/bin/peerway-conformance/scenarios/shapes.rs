//! Bytes of every shape and size arrive, in both directions, whichever side initiates.

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, PostError, Reason, WorkError};
use peerway_testkit::memory;

use crate::options::Options;
use crate::remote::Memory;
use crate::world::{Pair, Transport, Verdict, World, fine};

/// Zero, one, odd lengths, and lengths around an inline copy, a segment, a frame and a pull.
const SIZES: [u64; 14] = [
    0,
    1,
    7,
    256,
    4095,
    32 << 10,
    64 << 10,
    (64 << 10) + 1,
    1 << 20,
    (1 << 20) + 1,
    (2 << 20) - 3,
    (5 << 20) + 13,
    (16 << 20) + 1,
    (33 << 20) + 5,
];

pub(crate) fn run(world: &World) -> Result<Verdict> {
    with(world, &world.calm())
}

pub(crate) fn lanes(world: &World) -> Result<Verdict> {
    with(world, &Options { lanes: 3, ..world.calm() })
}

fn with(world: &World, options: &Options) -> Result<Verdict> {
    let mut pair = world.pair_with(options)?;
    pair.b.accept()?;
    let kinds: &[Memory] = match world.transport {
        Transport::LocalMap => &[Memory::Shareable],
        _ => &[Memory::Shareable, Memory::Private],
    };
    for &kind in kinds {
        for len in SIZES {
            world.step(format!("{len} bytes, {kind:?}"));
            range(&mut pair, kind, len).with_context(|| format!("{len} bytes, {kind:?}"))?;
        }
    }
    world.step("vectors");
    vectors(world, &mut pair).context("vectors")?;
    world.step("blocks");
    blocks(world, &mut pair).context("block lists")?;
    fine()
}

/// Writes and reads back, from both sides, with different odd offsets.
fn range(pair: &mut Pair, kind: Memory, len: u64) -> Result<()> {
    let (here, there) = (3, 5);
    let whole = len + 16;
    let remote = pair.theirs("r", whole, kind, 1)?;
    let make = |len: u64| match kind {
        Memory::Shareable => pair.a.allocate(len as usize),
        Memory::Private => pair.a.register(vec![0u8; len as usize]),
    };
    let (ours, back) = (make(whole)?, make(whole)?);
    memory::fill_all(&ours, 2)?;
    let part = remote.slice(there..there + len);
    pair.peer.write(&ours.slice(here..here + len), &part).context("write")?;
    pair.b.ask(&format!("check r 2 {here} {there} {len}")).context("after a write")?;
    // The bytes around the range must not change.
    pair.b.ask(&format!("check r 1 0 0 {there}")).context("before the range")?;
    let after = there + len;
    pair.b
        .ask(&format!("check r 1 {after} {after} {}", whole - after))
        .context("after the range")?;
    pair.peer.read(&back.slice(here..here + len), &part).context("read")?;
    memory::check(&back, 2, here, here, len).context("after a read")?;
    let mut edge = [0; 3];
    back.read_at(0, &mut edge)?;
    ensure!(edge == [0; 3], "a read wrote before its range");
    back.read_at(here + len, &mut edge)?;
    ensure!(edge == [0; 3], "a read wrote after its range");

    // The other direction: the peer initiates on the same session.
    pair.b.import("x", &back.advertise(Access::READ_WRITE)?)?;
    pair.b.ask("fill r 9")?;
    let ended = pair.b.ask(&format!("xfer p write r {there} x {here} {len}"))?;
    ensure!(ended == "Done Held", "the peer's write: {ended}");
    memory::check(&back, 9, there, here, len).context("after the peer's write")?;
    memory::fill_all(&back, 4)?;
    let ended = pair.b.ask(&format!("xfer p read r {there} x {here} {len}"))?;
    ensure!(ended == "Done Held", "the peer's read: {ended}");
    pair.b.ask(&format!("check r 4 {here} {there} {len}")).context("after the peer's read")?;
    Ok(())
}

/// Ranges of three regions on each side, each mapped to a different region on the other side.
fn vectors(world: &World, pair: &mut Pair) -> Result<()> {
    let len = 300_000u64;
    let mut remotes = Vec::new();
    let mut locals = Vec::new();
    for i in 0..3u64 {
        remotes.push(pair.theirs(&format!("v{i}"), len, world.memory(), 1)?);
        let region = world.region(&pair.a, len)?;
        memory::fill_all(&region, 100 + i)?;
        locals.push(region);
    }
    let piece = 997;
    let pairs: Vec<_> = (0..len / piece)
        .map(|i| {
            let range = i * piece..(i + 1) * piece;
            let (from, to) = ((i % 3) as usize, ((i + 1) % 3) as usize);
            (locals[from].slice(range.clone()), remotes[to].slice(range))
        })
        .collect();
    pair.peer.run(&Batch::write_vector(&pairs)?)?.ok()?;
    for i in 0..len / piece {
        let (from, at) = (100 + i % 3, i * piece);
        pair.b.ask(&format!("check v{} {from} {at} {at} {piece}", (i + 1) % 3))?;
    }
    for region in &locals {
        region.fill(0, len, 0)?;
    }
    let prepared = pair.peer.prepare(Batch::read_vector(&pairs)?)?;
    for _ in 0..3 {
        prepared.run()?.ok()?;
    }
    for i in 0..len / piece {
        let from = (i % 3) as usize;
        memory::check(&locals[from], 100 + i % 3, i * piece, i * piece, piece)?;
    }
    Ok(())
}

/// Writes a permutation of blocks with gaps and reads it back.
fn blocks(world: &World, pair: &mut Pair) -> Result<()> {
    let (stride, len, count) = (1500u64, 1024u64, 5000u32);
    let whole = stride * u64::from(count);
    let remote = pair.theirs("b", whole, world.memory(), 1)?;
    let ours = world.region(&pair.a, whole)?;
    memory::fill_all(&ours, 6)?;
    let here: Vec<u32> = (0..count).collect();
    // 1237 is coprime to the count, so this is a permutation.
    let there: Vec<u32> = (0..count).map(|i| (i * 1237) % count).collect();
    let batch = Batch::write_blocks(
        ours.blocks(0, stride, len, &here),
        remote.blocks(0, stride, len, &there),
    )?;
    pair.peer.run(&batch)?.ok()?;
    for i in (0..count).step_by(37) {
        let (from, to) = (u64::from(i) * stride, u64::from(there[i as usize]) * stride);
        pair.b.ask(&format!("check b 6 {from} {to} {len}"))?;
        pair.b.ask(&format!("check b 1 {0} {0} {1}", to + len, stride - len)).context("a gap")?;
    }
    ours.fill(0, whole, 0)?;
    let batch = Batch::read_blocks(
        ours.blocks(0, stride, len, &here),
        remote.blocks(0, stride, len, &there),
    )?;
    let transfer = pair.peer.post(&batch)?;
    ensure!(transfer.join().reason == Reason::Done, "a block list was not read");
    for i in 0..count {
        let at = u64::from(i) * stride;
        memory::check(&ours, 6, at, at, len)?;
    }
    Ok(())
}

pub(crate) fn bad_work(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let remote = pair.theirs("r", 4096, world.memory(), 1)?;
    let ours = world.region(&pair.a, 4096)?;
    let refused = |made: std::result::Result<Batch, PostError>, what: &str| match made {
        Err(PostError::Work(_)) => Ok(()),
        Err(other) => bail!("{what}: {other:?}"),
        Ok(_) => bail!("{what} was accepted"),
    };
    refused(Batch::write(&ours.slice(0..10), &remote.slice(0..11)), "mismatched lengths")?;
    refused(Batch::write(&ours.slice(4000..5000), &remote.slice(0..1000)), "local overrun")?;
    refused(Batch::read(&ours.slice(0..1000), &remote.slice(4000..5000)), "remote overrun")?;
    let (start, end) = (u64::MAX - 5, 4);
    refused(Batch::read(&ours.slice(start..end), &remote.slice(0..10)), "backwards range")?;
    let huge = u64::MAX - 8;
    refused(Batch::write(&ours.slice(huge..u64::MAX), &remote.slice(0..8)), "offset overflow")?;
    refused(
        Batch::write(&ours.slice(0..8), &remote.slice(huge..u64::MAX)),
        "remote offset overflow",
    )?;
    refused(
        Batch::write_blocks(ours.blocks(0, 64, 64, &[64]), remote.blocks(0, 64, 64, &[0])),
        "a local index outside",
    )?;
    refused(
        Batch::write_blocks(ours.blocks(0, 64, 64, &[0]), remote.blocks(0, 64, 64, &[64])),
        "a remote index outside",
    )?;
    refused(
        Batch::write_blocks(ours.blocks(0, u64::MAX / 2, 64, &[3]), remote.blocks(0, 64, 64, &[0])),
        "a stride that overflows",
    )?;
    refused(
        Batch::read_blocks(ours.blocks(0, 64, 64, &[0, 1]), remote.blocks(0, 64, 64, &[0])),
        "lists of different lengths",
    )?;
    let outside = ours.read_at(4090, &mut [0; 10]);
    ensure!(
        matches!(outside, Err(WorkError::Outside { .. })),
        "read_at beyond the end: {outside:?}"
    );
    // None of the refused batches has an effect: a valid transfer still works.
    pair.peer.write(&ours.all(), &remote.all())?;
    fine()
}
