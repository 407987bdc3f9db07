//! The table that compares kinds of GPU memory.

use std::fmt;

use serde::Serialize;

use super::{figure, table, write_table};
use crate::bench::measure::Times;
use crate::bench::memory::Memory;
use crate::bench::size;
use crate::bench::text::paragraph;

/// The timed operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// Allocate and free memory.
    AllocFree,
    /// Copy inside one process with the driver.
    Copy,
    /// Write to the other process's memory.
    IpcWrite,
    /// Read the other process's memory.
    IpcRead,
}

impl What {
    /// The name in the table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllocFree => "alloc + free",
            Self::Copy => "copy",
            Self::IpcWrite => "gpu-ipc write",
            Self::IpcRead => "gpu-ipc read",
        }
    }
}

/// One figure of one kind of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    what: What,
    memory: Memory,
    /// Bytes.
    size: u64,
    p50_us: f64,
    /// Bytes divided by the median time. `None` if the operation moves no bytes.
    gbps: Option<f64>,
}

impl Row {
    pub(crate) fn new(what: What, size: u64, memory: Memory, times: &Times) -> Self {
        let p50 = times.p50();
        let gbps = (what != What::AllocFree).then(|| size as f64 / p50);
        Self { what, memory, size, p50_us: p50 / 1e3, gbps }
    }

    fn value(&self) -> f64 {
        self.gbps.unwrap_or(self.p50_us)
    }
}

/// All figures. The rows of the two kinds alternate.
#[derive(Debug)]
pub(crate) struct Kinds {
    pub(crate) gpus: [u32; 2],
    pub(crate) seconds: f64,
    pub(crate) rows: Vec<Row>,
}

impl fmt::Display for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [local, remote] = self.gpus;
        let head = format!(
            "peerway {} bench: kinds of GPU memory, {} s per row, GPU {local} here, GPU {remote} on \
             the other side",
            env!("CARGO_PKG_VERSION"),
            self.seconds
        );
        paragraph(f, &head)?;
        writeln!(f, "medians; GB = 10^9 bytes, K = 1024\n")?;
        let mut table = table(&["what", "unit", "size", "gpu-fd", "gpu-plain", "fd / plain"]);
        for pair in self.rows.chunks_exact(2) {
            let [ours, plain] = [pair[0].value(), pair[1].value()];
            table.add_row([
                pair[0].what.name().to_owned(),
                if pair[0].gbps.is_some() { "GB/s" } else { "µs" }.to_owned(),
                size::show(pair[0].size),
                figure(ours),
                figure(plain),
                figure(ours / plain),
            ]);
        }
        write_table(f, &mut table, 2)?;
        writeln!(f)?;
        paragraph(
            f,
            "gpu-fd: cuMemCreate, mapped, shared as a file descriptor; gpu-plain: cuMemAlloc, shared \
             by the driver's own IPC",
        )?;
        paragraph(
            f,
            "copy: one cuMemcpyAsync and a wait, between two buffers of the same kind inside one \
             process",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_stand_beside_each_other_and_programs_get_a_row_each() {
        let row = |what, memory, p50: u64| {
            let mut times = Times::new();
            times.record(p50);
            Row::new(what, 64 << 20, memory, &times)
        };
        let rows = vec![
            row(What::AllocFree, Memory::GpuFd, 300_000),
            row(What::AllocFree, Memory::GpuPlain, 150_000),
            row(What::IpcRead, Memory::GpuFd, 1 << 16),
            row(What::IpcRead, Memory::GpuPlain, 1 << 16),
        ];
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["what"], "alloc_free");
        assert_eq!(json[1]["memory"], "gpu-plain");
        assert!(json[0]["gbps"].is_null() && json[2]["gbps"].as_f64().unwrap() > 1000.0);
        let text = Kinds { gpus: [0, 0], seconds: 0.6, rows }.to_string();
        let found =
            |parts: &[&str]| text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found(&["alloc + free", "µs", "64M", "300", "150", "2.00"]), "{text}");
        assert!(found(&["gpu-ipc read", "GB/s", "64M", "1.00"]), "{text}");
    }
}
