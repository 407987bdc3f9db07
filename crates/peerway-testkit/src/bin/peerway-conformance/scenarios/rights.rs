//! A peer reaches only what the owner advertised to it: range, direction and lifetime.

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, ImportError, PostError, RemoteRegion, TransferError};
use peerway_core::descriptor::Descriptor;
use peerway_core::wire::{Kind, Segment};
use peerway_testkit::hex;
use peerway_testkit::memory;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, frame};

use crate::world::{REVOKED, Verdict, World, fine};

const LEN: u64 = 256 << 10;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    pair.b.region("r", LEN, world.memory())?;
    pair.b.ask("fill r 1")?;
    let whole = pair.b.advertise("r", Access::READ_WRITE)?;
    let ours = world.region(&pair.a, LEN)?;
    memory::fill_all(&ours, 2)?;

    world.step("a wrong token");
    for at in [32, 40, 47] {
        let mut wrong = whole.clone();
        wrong[at] ^= 1;
        refused(pair.peer.import(&wrong), TransferError::RemoteAccess)?;
    }
    world.step("invalid descriptors");
    for bad in [&whole[..63], &[0; 64][..], &[0xFF; 64][..], b""] {
        match pair.peer.import(bad) {
            Err(ImportError::Descriptor(_)) => {}
            other => bail!("{} bad bytes: {other:?}", bad.len()),
        }
    }
    world.step("wrong direction");
    for (access, name) in [(Access::READ, "read"), (Access::WRITE, "write")] {
        let narrow = pair.b.advertise("r", access)?;
        let remote = pair.peer.import(&narrow)?;
        let made = match name {
            "read" => Batch::write(&ours.all(), &remote.all()),
            _ => Batch::read(&ours.all(), &remote.all()),
        };
        ensure!(matches!(made, Err(PostError::Access { .. })), "against a {name}-only region");
        // Claim more rights than the owner granted.
        let mut wide = narrow.clone();
        wide[13] = Access::READ_WRITE.bits();
        refused_or_narrow(pair.peer.import(&wide), access)?;
    }
    world.step("ranges rewritten in the descriptor");
    let descriptor = Descriptor::from_bytes(&whole)?;
    let (base, end) = (descriptor.base, descriptor.base + LEN);
    let rewritten = |addr: u64, size: u32| {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&size.to_le_bytes());
        bytes
    };
    let inside = pair.peer.import(&rewritten(base + 1000, 500))?;
    ensure!(inside.len() == 500, "a rewritten window is {} bytes long", inside.len());
    pair.peer.write(&ours.slice(0..500), &inside.all())?;
    pair.b.ask("check r 2 0 1000 500")?;
    pair.b.ask("fill r 1")?;
    let outside = [
        (base - 1, 10),
        (base, LEN as u32 + 1),
        (end, 1),
        (end - 5, 6),
        (u64::MAX, 1),
        (u64::MAX - 3, 8),
        (0, u32::MAX),
        (0, 0),
    ];
    for (addr, size) in outside {
        out_of_range(pair.peer.import(&rewritten(addr, size)))
            .with_context(|| format!("{addr:#x}+{size} of {base:#x}+{LEN}"))?;
    }
    world.step("a length and base rewritten to claim more");
    let mut longer = whole.clone();
    longer[48..56].copy_from_slice(&(LEN * 4).to_le_bytes());
    longer[8..12].copy_from_slice(&(LEN as u32 * 4).to_le_bytes());
    out_of_range(pair.peer.import(&longer))?;
    let mut lower = whole.clone();
    lower[..8].copy_from_slice(&(base - 4096).to_le_bytes());
    lower[56..].copy_from_slice(&(base - 4096).to_le_bytes());
    if let Ok(remote) = pair.peer.import(&lower) {
        // The engine ignores a false base. At worst, the window starts at the advertised base.
        ensure!(remote.len() <= LEN, "a lower base widens the window");
    }

    world.step("bound to another peer");
    let mut third = world.remote(&world.options())?;
    let stranger = hex::encode(&pair.b.metadata);
    third.ask(&format!("connect e p {stranger}"))?;
    let bound = hex::decode(&pair.b.ask("advertise_to r 3 p")?)?;
    let refusal = third.refused(&format!("import p x {}", hex::encode(&bound)))?;
    ensure!(refusal.contains("RemoteAccess"), "{refusal}");
    let remote = pair
        .peer
        .import(&bound)
        .context("importing as the peer that the descriptor is bound to")?;
    pair.peer.read(&ours.slice(0..10), &remote.slice(0..10))?;

    world.step("a stale generation");
    memory::fill_all(&ours, 2)?;
    let remote = pair.peer.import(&whole)?;
    let hash = pair.b.ask("hash r")?;
    let fence = pair.b.ask("revoke r")?;
    ensure!(fence.starts_with("Held"), "revoke of a quiet region: {fence}");
    for len in [100, LEN] {
        let batch = Batch::write(&ours.slice(0..len), &remote.slice(0..len))?;
        let ended = pair.peer.run(&batch)?;
        ensure!(ended.reason == REVOKED, "a write after revoke: {ended:?}");
        let ended = pair.peer.run(&Batch::read(&ours.slice(0..len), &remote.slice(0..len))?)?;
        ensure!(ended.reason == REVOKED, "a read after revoke: {ended:?}");
    }
    memory::check(&ours, 2, 0, 0, LEN).context("a refused read changed its buffer")?;
    drop((remote, inside));
    let again = pair.b.advertise("r", Access::READ_WRITE)?;
    ensure!(again != whole, "the same descriptor after a revoke");
    match pair.peer.import(&whole) {
        Err(ImportError::Refused(TransferError::Revoked | TransferError::RemoteAccess)) => {}
        other => bail!("the revoked descriptor: {other:?}"),
    }
    ensure!(pair.b.ask("hash r")? == hash, "a refused access changed memory");
    let remote = pair.peer.import(&again)?;
    pair.peer.write(&ours.all(), &remote.all())?;
    pair.b.ask(&format!("check r 2 0 0 {LEN}"))?;

    world.step("a descriptor of another endpoint");
    third.region("t", 100, world.memory())?;
    let theirs = third.advertise("t", Access::READ)?;
    match pair.peer.import(&theirs) {
        Err(ImportError::OtherIncarnation) => {}
        other => bail!("a descriptor of another endpoint: {other:?}"),
    }
    fine()
}

fn refused(result: Result<RemoteRegion, ImportError>, with: TransferError) -> Result<()> {
    match result {
        Err(ImportError::Refused(error)) if error == with => Ok(()),
        other => bail!("refused with {other:?} instead of {with:?}"),
    }
}

fn refused_or_narrow(result: Result<RemoteRegion, ImportError>, allowed: Access) -> Result<()> {
    match result {
        Err(ImportError::Refused(_)) => Ok(()),
        Ok(remote) if remote.access() == allowed => Ok(()),
        other => bail!("a descriptor that claims more rights: {other:?}"),
    }
}

fn out_of_range(result: Result<RemoteRegion, ImportError>) -> Result<()> {
    match result {
        Err(ImportError::Descriptor(_) | ImportError::Refused(_)) => Ok(()),
        other => bail!("a range outside the grant: {other:?}"),
    }
}

/// A hand-made peer holds a valid descriptor and asks for more than it grants.
pub(crate) fn liar(world: &World) -> Result<Verdict> {
    let mut b = world.remote(&world.options())?;
    b.region("r", LEN, world.memory())?;
    b.ask("fill r 1")?;
    let good = Descriptor::from_bytes(&b.advertise("r", Access::READ)?)?;
    let write = Descriptor::from_bytes(&b.advertise("r", Access::WRITE)?)?;
    let mut random = Random::new(3);
    let cases: [(&str, Kind, Descriptor, u64, u32, TransferError); 7] = [
        ("a write to a read grant", Kind::Write, good, 0, 64, TransferError::RemoteAccess),
        ("a read of a write grant", Kind::Read, write, 0, 64, TransferError::RemoteAccess),
        ("a write beyond the end", Kind::Write, write, LEN - 63, 64, TransferError::OutOfBounds),
        ("a read beyond the end", Kind::Read, good, LEN, 1, TransferError::OutOfBounds),
        (
            "an offset that overflows",
            Kind::Write,
            write,
            u64::MAX - 3,
            64,
            TransferError::OutOfBounds,
        ),
        ("a read that overflows", Kind::Read, good, u64::MAX, 64, TransferError::OutOfBounds),
        (
            "a guessed token",
            Kind::Write,
            Descriptor { token: [9; 16], ..write },
            0,
            64,
            TransferError::RemoteAccess,
        ),
    ];
    for (what, kind, with, offset, len, error) in cases {
        world.step(what);
        let mut raw = Raw::connect(b.addr()?, &mut random)?;
        raw.open()?;
        let payload = vec![0xEE; if kind == Kind::Write { len as usize } else { 0 }];
        let bytes = frame(
            kind,
            |head| {
                head.grant = with.grant.index.into();
                head.generation = with.grant.generation.into();
                head.token = with.token;
                head.sequence = 1.into();
                head.offset = offset.into();
            },
            &[(offset, len)],
            &payload,
        );
        raw.send(&bytes)?;
        let code = raw.nack().with_context(|| what.to_owned())?;
        ensure!(code == error as u16, "{what}: refused with code {code}, not {error:?}");
        b.ask(&format!("check r 1 0 0 {LEN}"))
            .with_context(|| format!("{what}: memory changed"))?;
    }
    const { assert!(size_of::<Segment>() == 12) };
    fine()
}
