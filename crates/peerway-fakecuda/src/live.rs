//! Counts the existing objects, for tests that look for leaks.

use crate::lock;
use crate::machine::{Machine, machine_if_any};
use crate::space::Kind;

/// The number of objects of a kind that the process has: 0 active contexts, 1 streams, 2 events, 3
/// physical allocations (of `cuMemCreate`, imported, and of `cuMemAlloc`), 4 address reservations,
/// 5 mappings by `cuMemMap`, 6 allocations opened by IPC, 7 pinned host ranges, 8 modules. NULL
/// streams are not counted. Zero for other kinds.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_live(kind: u32) -> u64 {
    machine_if_any().map_or(0, |machine| live(machine, kind))
}

fn live(machine: &Machine, kind: u32) -> u64 {
    let space = || lock(&machine.space);
    let mappings = |of: fn(&Kind) -> bool| {
        space().mappings.values().filter(|mapping| of(&mapping.kind)).count()
    };
    let count = match kind {
        0 => machine.devices.iter().filter(|device| *lock(&device.held) > 0).count(),
        1 => return machine.streams.count(),
        2 => return machine.events.count(),
        3 => {
            let created = space().created();
            created + mappings(|kind| matches!(kind, Kind::Plain { .. }))
        }
        4 => space().reservations.len(),
        5 => mappings(|kind| matches!(kind, Kind::Mapped)),
        6 => mappings(|kind| matches!(kind, Kind::Opened { .. })),
        7 => space().pinned.len(),
        8 => return machine.modules.count(),
        _ => 0,
    };
    count as u64
}
