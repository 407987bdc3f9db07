//! The table of rows that are compared with perftest.

use std::fmt;

use super::{Line, figure, table, write_table};
use crate::bench::perftest::{PAIRS, Pairs};
use crate::bench::text::paragraph;
use crate::bench::{Op, size};

/// A row and perftest's figures.
#[derive(Clone, Debug)]
pub(crate) struct Compared {
    op: Op,
    size: u64,
    depth: u32,
    queue_pairs: u16,
    /// GB/s, or half a round trip in microseconds. The same holds for `theirs`.
    ours: f64,
    theirs: f64,
    p50_us: f64,
    p99_us: f64,
    their_p99_us: Option<f64>,
    again: usize,
}

impl Compared {
    pub(crate) fn new(line: &Line, pairs: &Pairs) -> Self {
        Self {
            op: line.op,
            size: line.size,
            depth: pairs.depth,
            queue_pairs: pairs.queue_pairs,
            ours: pairs.our_median(),
            theirs: pairs.their_median(),
            p50_us: line.p50_us,
            p99_us: line.p99_us,
            their_p99_us: pairs.their_p99(),
            again: pairs.again,
        }
    }

    fn cells(&self) -> [String; 8] {
        let unit = if self.op == Op::Pingpong { "µs" } else { "GB/s" };
        [
            match self.op {
                Op::Write => "ib_write_bw",
                Op::Read => "ib_read_bw",
                Op::Pingpong => "ib_write_lat",
            }
            .to_owned(),
            size::show(self.size),
            format!("{} x {}", self.depth, self.queue_pairs),
            format!("{} {unit}", figure(self.ours)),
            format!("{} {unit}", figure(self.theirs)),
            figure(self.p50_us),
            figure(self.p99_us),
            self.their_p99_us.map_or_else(|| "-".to_owned(), figure),
        ]
    }
}

/// Writes the table and the definitions of its columns.
pub(super) fn write(f: &mut fmt::Formatter<'_>, rows: &[Compared]) -> fmt::Result {
    let mut table = table(&[
        "beside",
        "size",
        "depth x QPs",
        "ours",
        "perftest",
        "p50 µs",
        "p99 µs",
        "its p99",
    ]);
    for row in rows {
        table.add_row(row.cells());
    }
    write_table(f, &mut table, 1)?;
    let what = format!(
        "medians of {PAIRS} rounds, each of Peerway and then of perftest, on the same devices; \
         GB/s: from the first post to the last completion, with depth transfers in flight; p50, \
         p99: of one transfer, from its post"
    );
    paragraph(f, &what)?;
    let again: usize = rows.iter().map(|row| row.again).sum();
    if again > 0 {
        writeln!(f, "perftest failed or printed no number in {again} runs; these were repeated")?;
    }
    Ok(())
}
