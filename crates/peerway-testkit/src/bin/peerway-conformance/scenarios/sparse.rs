//! A region larger than 32 bits can address, of which only the touched pages exist.

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Descriptor};
use peerway_testkit::memory;

use crate::remote::Memory;
use crate::world::{Verdict, World, fine};

const GIB: u64 = 1 << 30;
const LEN: u64 = 5 * GIB;
/// Bytes of each transfer.
const PART: u64 = 3 << 20;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    // A memfd is sparse. So is a large zeroed vector, but peers can map only a memfd.
    pair.b.region("r", LEN, Memory::Shareable)?;
    let descriptor = pair.b.advertise("r", Access::READ_WRITE)?;
    ensure!(Descriptor::from_bytes(&descriptor)?.len == LEN, "the descriptor has a wrong length");
    let remote = pair.peer.import(&descriptor)?;
    ensure!(remote.len() == LEN, "imported {} of {LEN} bytes", remote.len());
    let ours = world.region(&pair.a, PART)?;
    let back = world.region(&pair.a, PART)?;
    let places = [0, 2 * GIB - 1000, 4 * GIB - PART / 2 - 1, 4 * GIB, LEN - PART];
    for (i, at) in places.into_iter().enumerate() {
        world.step(format!("at {at:#x}"));
        let seed = 40 + i as u64;
        memory::fill_all(&ours, seed)?;
        pair.peer.write(&ours.all(), &remote.slice(at..at + PART))?;
        pair.b
            .ask(&format!("check r {seed} 0 {at} {PART}"))
            .with_context(|| format!("at {at:#x}"))?;
        back.fill(0, PART, 0)?;
        pair.peer.read(&back.all(), &remote.slice(at..at + PART))?;
        memory::check(&back, seed, 0, 0, PART)?;
    }
    world.step("a window that starts above 4 GiB");
    let base = Descriptor::from_bytes(&descriptor)?.base;
    let mut moved = descriptor.clone();
    moved[..8].copy_from_slice(&(base + 4 * GIB + 5).to_le_bytes());
    moved[8..12].copy_from_slice(&1000u32.to_le_bytes());
    let window = pair.peer.import(&moved)?;
    pair.peer.write(&ours.slice(0..1000), &window.all())?;
    pair.b.ask(&format!("check r 44 0 {} 1000", 4 * GIB + 5))?;
    world.step("blocks that are far apart");
    let batch = Batch::write_blocks(
        ours.blocks(0, 4096, 4096, &[0, 1, 2, 3, 4]),
        remote.blocks(100, GIB - 1000, 4096, &[0, 4, 1, 3, 2]),
    )?;
    pair.peer.run(&batch)?.ok()?;
    for (i, block) in [0u64, 4, 1, 3, 2].into_iter().enumerate() {
        let at = 100 + block * (GIB - 1000);
        pair.b.ask(&format!("check r 44 {} {at} 4096", i * 4096))?;
    }
    ensure!(
        Batch::write(&ours.slice(0..2), &remote.slice(LEN - 1..LEN + 1)).is_err(),
        "a write beyond the end of the region was accepted"
    );
    fine()
}
