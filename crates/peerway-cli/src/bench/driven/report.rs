//! The tables of the benchmarks of the GPU-driven engine.

use std::fmt;

use serde::Serialize;

use crate::bench::measure::Times;
use crate::bench::report::{figure, table, write_table};
use crate::bench::size;
use crate::bench::text::paragraph;

/// One figure.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) what: &'static str,
    /// Threads of the proxy, rings, slots per ring, and warps that push.
    pub(super) threads: usize,
    pub(super) rings: usize,
    pub(super) slots: u32,
    pub(super) warps: u32,
    /// Bytes of a put.
    pub(super) size: Option<u64>,
    pub(super) avg_us: Option<f64>,
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// Millions of commands a second.
    pub(super) mops: Option<f64>,
    pub(super) gbps: Option<f64>,
}

impl Row {
    /// Sets the times. Each recorded time covers `share` commands.
    pub(super) fn times(mut self, times: &Times, share: f64) -> Self {
        let us = |nanos: f64| Some(nanos / share / 1e3);
        (self.avg_us, self.p50_us, self.p99_us) =
            (us(times.mean()), us(times.p50()), us(times.p99()));
        self
    }

    /// Sets the rate.
    pub(super) fn rate(mut self, commands: u64, seconds: f64) -> Self {
        self.mops = Some(commands as f64 / seconds / 1e6);
        self.gbps = self.size.map(|size| (commands * size) as f64 / seconds / 1e9);
        self
    }

    fn cells(&self) -> [String; 10] {
        let show = |value: Option<f64>| value.map_or_else(String::new, figure);
        [
            self.what.to_owned(),
            self.size.map_or_else(String::new, size::show),
            self.threads.to_string(),
            self.rings.to_string(),
            self.warps.to_string(),
            show(self.avg_us),
            show(self.p50_us),
            show(self.p99_us),
            show(self.mops),
            show(self.gbps),
        ]
    }
}

/// A table with a title above and notes below.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) title: String,
    pub(super) rows: Vec<Row>,
    pub(super) notes: &'static str,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = format!("peerway {} bench: {}", env!("CARGO_PKG_VERSION"), self.title);
        paragraph(f, &head)?;
        writeln!(f)?;
        let head = [
            "what", "size", "thr", "rings", "warps", "avg µs", "p50 µs", "p99 µs", "Mops/s", "GB/s",
        ];
        let mut table = table(&head);
        for row in &self.rows {
            table.add_row(row.cells());
        }
        write_table(f, &mut table, 1)?;
        writeln!(f)?;
        self.notes.lines().try_for_each(|note| paragraph(f, note))
    }
}
