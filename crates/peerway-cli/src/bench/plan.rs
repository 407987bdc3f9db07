//! The rows of a run.

use super::layout::Layout;
use super::memory::Memory;
use super::size;
use super::{Measure, Mode, Op, Ops};

/// The sizes of a run without `--full`: few enough for half a minute.
const FEW_SIZES: [u64; 5] = [256, 4 << 10, 64 << 10, 1 << 20, 100 << 20];
/// The sizes that comparable engines report.
const SIZES: [u64; 10] =
    [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 10 << 20, 16 << 20, 100 << 20];
/// GPUs need larger sizes to reach full bandwidth. Fewer sizes suffice: a GPU copy has a start-up
/// cost and a bandwidth.
const GPU_SIZES: [u64; 7] = [256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];
const FEW_IOVS: [u32; 1] = [1];
const IOVS: [u32; 2] = [1, 128];

/// The block list of a paged KV cache: 100,000 blocks of 4 KiB.
pub(crate) const BLOCK_LIST: (u64, u32) = (4096, 100_000);

/// The largest total of a row with several pieces. Larger pieces perform like single ones, and both
/// processes would need gigabytes for them.
const MAX_SCATTERED: u64 = 512 << 20;

/// One row to measure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Row {
    pub(crate) op: Op,
    pub(crate) layout: Layout,
}

impl Row {
    /// The name in messages.
    pub(crate) fn name(&self) -> String {
        let Layout { size, iovs, .. } = self.layout;
        match iovs {
            1 => format!("{} {}", self.op.name(), size::show(size)),
            _ => format!("{} {iovs} x {}", self.op.name(), size::show(size)),
        }
    }
}

/// The rows of every path, and the rows that were left out.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) rows: Vec<Row>,
    pub(crate) left_out: Vec<String>,
}

impl Plan {
    /// The rows that the flags select.
    pub(crate) fn new(measure: &Measure) -> anyhow::Result<Self> {
        let pingpong = measure.mode == Mode::Pingpong;
        if pingpong && (measure.op == Ops::Read || measure.iovs.iter().any(|n| *n != 1)) {
            anyhow::bail!(
                "--mode pingpong writes one piece there and back: remove --op read and --iovs"
            );
        }
        if pingpong && measure.memory != [Memory::Host; 2] {
            anyhow::bail!("--mode pingpong works only with host memory: remove --memory");
        }
        if measure.perftest && measure.has_gpu() {
            anyhow::bail!("--perftest works only with host memory: remove --memory or --perftest");
        }
        let ops: &[Op] = match (pingpong, measure.op) {
            (true, _) => &[Op::Pingpong],
            (_, Ops::Write) => &[Op::Write],
            (_, Ops::Read) => &[Op::Read],
            (_, Ops::Both) => &[Op::Write, Op::Read],
        };
        let has_list =
            measure.full && measure.sizes.is_empty() && measure.iovs.is_empty() && !pingpong;
        let sizes = match (measure.sizes.is_empty(), measure.full, measure.has_gpu()) {
            (false, ..) => &measure.sizes[..],
            (_, false, _) => &FEW_SIZES,
            (_, _, true) => &GPU_SIZES,
            _ => &SIZES,
        };
        let iovs = match (pingpong, measure.iovs.is_empty()) {
            (true, _) => &[1][..],
            (_, true) if measure.full => &IOVS,
            (_, true) => &FEW_IOVS,
            _ => &measure.iovs,
        };
        let mut plan = Self { rows: Vec::new(), left_out: Vec::new() };
        for op in ops {
            for &iovs in iovs {
                for &size in sizes {
                    plan.add(*op, size, iovs);
                }
            }
            if has_list {
                plan.add(*op, BLOCK_LIST.0, BLOCK_LIST.1);
            }
        }
        plan.left_out.dedup();
        if plan.rows.is_empty() {
            anyhow::bail!("every row is too large to measure: {}", plan.left_out.join(", "));
        }
        Ok(plan)
    }

    fn add(&mut self, op: Op, size: u64, iovs: u32) {
        let seed = self.rows.len() as u64 + 1;
        let layout = Layout { size, iovs, seed };
        if iovs > 1 && layout.total() > MAX_SCATTERED {
            let what = format!("{iovs} x {}", size::show(size));
            if !self.left_out.contains(&what) {
                self.left_out.push(what);
            }
            return;
        }
        self.rows.push(Row { op, layout });
    }

    /// Bytes of the largest row.
    pub(crate) fn largest(&self) -> u64 {
        self.rows.iter().map(|row| row.layout.total()).max().unwrap_or(0)
    }

    /// One line about the rows that were left out. `None` if there are none.
    pub(crate) fn left_out(&self) -> Option<String> {
        let limit = size::show(MAX_SCATTERED);
        (!self.left_out.is_empty()).then(|| {
            format!("not measured (more than {limit} in all): {}", self.left_out.join(", "))
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The default flags.
    pub(crate) fn defaults() -> Measure {
        Measure {
            full: false,
            json: None,
            plot: None,
            paths: Vec::new(),
            sizes: Vec::new(),
            iovs: Vec::new(),
            op: Ops::Both,
            seconds: 0.5,
            mode: Mode::Bandwidth,
            rdma_dev: Vec::new(),
            perftest: false,
            registration: false,
            counted: false,
            memory: [Memory::Host; 2],
            gpu: [0; 2],
            memory_kinds: false,
        }
    }

    #[test]
    fn without_flags_few_sizes_both_ways() {
        let plan = Plan::new(&defaults()).unwrap();
        assert_eq!(plan.rows.len(), 2 * 5);
        assert!(plan.left_out().is_none());
        // Four paths, and a fifth with RDMA devices.
        let seconds = 5.0 * plan.rows.len() as f64 * defaults().seconds;
        assert!(seconds <= 25.0, "a run without flags takes less than half a minute");
    }

    #[test]
    fn a_full_run_has_every_size_both_ways_and_the_block_list() {
        let full = Measure { full: true, ..defaults() };
        let plan = Plan::new(&full).unwrap();
        // 10 single sizes, 7 of 128 pieces (to 1M), and the block list; twice.
        assert_eq!(plan.rows.len(), 2 * (10 + 7 + 1));
        assert_eq!(plan.largest(), 409_600_000);
        assert!(plan.left_out().unwrap().ends_with("128 x 10M, 128 x 16M, 128 x 100M"));
        let names: Vec<String> = plan.rows.iter().map(Row::name).collect();
        assert!(names.contains(&"read 100000 x 4K".to_owned()));
        assert!(names.contains(&"write 128 x 1M".to_owned()));
        let mut seeds: Vec<u64> = plan.rows.iter().map(|row| row.layout.seed).collect();
        seeds.dedup();
        assert_eq!(seeds.len(), plan.rows.len());
    }

    #[test]
    fn flags_narrow_it_down() {
        let plan = Plan::new(&Measure { sizes: vec![4096], iovs: vec![1], ..defaults() }).unwrap();
        assert_eq!(plan.rows.len(), 2);
        assert!(plan.left_out().is_none());
        let pingpong = Measure { mode: Mode::Pingpong, full: true, ..defaults() };
        assert_eq!(Plan::new(&pingpong).unwrap().rows.len(), 10);
        assert!(Plan::new(&Measure { op: Ops::Read, ..pingpong }).is_err());
        let gpu = [Memory::Gpu, Memory::Pinned];
        let plan = Plan::new(&Measure { memory: gpu, full: true, ..defaults() }).unwrap();
        // 7 single sizes, 4 of 128 pieces (to 1M), and the block list; twice.
        assert_eq!(plan.rows.len(), 2 * (7 + 4 + 1));
        let too_much = Measure { sizes: vec![1 << 30], iovs: vec![2], ..defaults() };
        assert!(Plan::new(&too_much).unwrap_err().to_string().contains("2 x 1G"));
    }

    #[test]
    fn what_is_only_for_host_memory_is_refused_in_a_sentence() {
        let refused = |measure: &Measure| Plan::new(measure).unwrap_err().to_string();
        let pinned = [Memory::Host, Memory::Pinned];
        let pingpong = Measure { mode: Mode::Pingpong, memory: pinned, ..defaults() };
        assert!(refused(&pingpong).contains("host memory"));
        let perftest = Measure { perftest: true, memory: [Memory::Gpu; 2], ..defaults() };
        assert!(refused(&perftest).contains("host memory"));
        assert!(Plan::new(&Measure { memory: pinned, ..perftest }).is_ok());
    }
}
