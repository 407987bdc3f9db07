//! The result: rows as JSON, and a table with its definitions as text.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::layout::Layout;
use super::limit::Against;
use super::measure::{Figures, Times};
use super::memory::Memory;
use super::pong::Seen;
use super::{Op, size};

mod compared;
pub(crate) mod kinds;
mod registration;
pub(crate) use compared::Compared;
pub(crate) use registration::Registration;

/// One measured row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Line {
    pub(crate) path: String,
    /// The memory of this process.
    pub(crate) memory_local: Memory,
    /// The memory of the other process.
    pub(crate) memory_remote: Memory,
    pub(crate) op: Op,
    /// Bytes of one piece.
    pub(crate) size: u64,
    pub(crate) iovs: u32,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Bytes of all pieces divided by the median time.
    pub(crate) gbps: f64,
    /// The limit. `None` for RDMA devices without perftest.
    pub(crate) limit_gbps: Option<f64>,
    /// The rate of the kernel's copy between the two processes, for large rows of local-cma.
    pub(crate) kernel_gbps: Option<f64>,
    /// CPU time of both processes.
    pub(crate) cpu_s_per_gb: f64,
}

impl Line {
    /// A row of the path.
    pub(crate) fn new(
        path: &str,
        [memory_local, memory_remote]: [Memory; 2],
        op: Op,
        layout: &Layout,
        figures: &Figures,
    ) -> Self {
        let p50 = figures.times.p50();
        Self {
            path: path.to_owned(),
            memory_local,
            memory_remote,
            op,
            size: layout.size,
            iovs: layout.iovs,
            p50_us: p50 / 1e3,
            p99_us: figures.times.p99() / 1e3,
            gbps: layout.total() as f64 / p50,
            limit_gbps: figures.limit_gbps,
            kernel_gbps: figures.kernel_gbps,
            cpu_s_per_gb: figures.cpu_s_per_gb,
        }
    }

    /// The kind of the row's limit.
    pub(crate) fn against(&self) -> Against {
        Against::of(&self.path, [self.memory_local, self.memory_remote])
    }

    fn cells(&self) -> [String; 10] {
        let none = || "-".to_owned();
        [
            self.path.clone(),
            self.op.name().to_owned(),
            size::show(self.size),
            self.iovs.to_string(),
            figure(self.gbps),
            figure(self.p50_us),
            figure(self.p99_us),
            figure(self.cpu_s_per_gb),
            self.limit_gbps.map_or_else(none, figure),
            self.limit_gbps.map_or_else(none, |limit| percent(100.0 * self.gbps / limit)),
        ]
    }
}

/// The figures that a path has once.
#[derive(Clone, Debug)]
pub(crate) struct Besides {
    pub(crate) path: String,
    pub(crate) connect: Spread,
    /// Time inside the posting call of 100 MiB.
    pub(crate) post_range: Option<Spread>,
    /// Time inside the posting call of a prepared list of 100,000 blocks.
    pub(crate) post_list: Option<Spread>,
    /// CPU seconds per second of both processes while they are idle.
    pub(crate) idle: f64,
}

impl Besides {
    fn cells(&self) -> [String; 5] {
        let post = |spread: &Option<Spread>| {
            spread.map_or_else(|| "-".to_owned(), |spread| spread.show(1.0))
        };
        [
            self.path.clone(),
            self.connect.show(1e3),
            post(&self.post_range),
            post(&self.post_list),
            format!("{:.2} %", 100.0 * self.idle),
        ]
    }
}

/// Median and maximum, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    p50: f64,
    max: f64,
}

impl Spread {
    pub(crate) fn of(times: &Times) -> Self {
        Self { p50: times.p50() / 1e3, max: times.max() / 1e3 }
    }

    fn show(self, per_unit: f64) -> String {
        format!("{} / {}", figure(self.p50 / per_unit), figure(self.max / per_unit))
    }
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) lines: Vec<Line>,
    /// The memory of this side and of the other side.
    pub(crate) memory: [Memory; 2],
    /// A description of the memory of each side, if its kind was not fixed in advance.
    pub(crate) told: [String; 2],
    /// Rows that are compared with perftest.
    pub(crate) compared: Vec<Compared>,
    pub(crate) registrations: Vec<Registration>,
    pub(crate) besides: Vec<Besides>,
    /// Paths and rows that were not measured, with the reasons, and other remarks.
    pub(crate) notes: Vec<String>,
    pub(crate) seconds: f64,
    pub(crate) clock_cost: Duration,
    /// Whether round trips wait for counters on every path.
    pub(crate) counted: bool,
    /// How many threads the limit of local paths may use.
    pub(crate) copy_threads: u32,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pingpong = self.lines.iter().any(|line| line.op == Op::Pingpong);
        writeln!(
            f,
            "peerway {} bench: one {} in flight, {} s per row in turns with its limit",
            env!("CARGO_PKG_VERSION"),
            if pingpong { "round trip" } else { "transfer" },
            self.seconds
        )?;
        if let Some(memory) = between(self.memory) {
            writeln!(f, "memory: {memory}")?;
        }
        writeln!(
            f,
            "GB/s = bytes / p50 time{}; GB = 10^9 bytes, K = 1024; CPU s/GB: of both processes\n",
            if pingpong { " (half a round trip)" } else { "" }
        )?;
        self.write_rows(f)?;
        writeln!(f)?;
        if pingpong {
            let watched =
                |line: &Line| Seen::on(&line.path, line.size, self.counted) == Seen::Watched;
            let (any, all) = (self.lines.iter().any(watched), self.lines.iter().all(watched));
            writeln!(
                f,
                "arrivals:     {}",
                match (any, all) {
                    (_, true) => "each side watches the last byte, as ib_write_lat does",
                    (true, _) =>
                        "on verbs up to 64K, each side watches the last byte, as ib_write_lat does; otherwise counters",
                    _ => "each side waits for a counter",
                }
            )?;
        }
        self.write_limits(f)?;
        if !self.compared.is_empty() {
            writeln!(f)?;
            compared::write(f, &self.compared)?;
        }
        for registration in &self.registrations {
            write!(f, "\n{registration}")?;
        }
        if !self.besides.is_empty() {
            writeln!(f)?;
            self.write_besides(f)?;
        }
        if !self.notes.is_empty() {
            writeln!(f)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl Report {
    fn write_rows(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&[
            "path",
            "op",
            "size",
            "iovs",
            "GB/s",
            "p50 µs",
            "p99 µs",
            "CPU s/GB",
            "limit GB/s",
            "% of limit",
        ]);
        let mut last: Option<&Line> = None;
        for line in &self.lines {
            let group = |line: &Line| (line.path.clone(), line.op);
            if last.is_some_and(|last| group(last) != group(line)) {
                table.add_row([""; 10]);
            }
            table.add_row(line.cells());
            last = Some(line);
        }
        write_table(f, &mut table, 2)
    }

    fn write_limits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |against| self.lines.iter().any(|line| line.against() == against);
        if has(Against::Copies) {
            writeln!(
                f,
                "limit, local: the best of plain and non-temporal copies of the pieces, {},",
                if self.copy_threads > 1 { "by one and by two threads" } else { "by one thread" }
            )?;
            writeln!(
                f,
                "              inside one process, with the same kind of memory; such a copy \
                 notifies no peer,\n              so small transfers stay far below it"
            )?;
        }
        if has(Against::Driver) {
            writeln!(
                f,
                "limit, GPU:   one cuMemcpyAsync of all bytes and a wait, inside one process, {};",
                if self.memory.iter().all(|memory| memory.is_gpu()) {
                    "between two buffers of GPU memory"
                } else {
                    "between GPU memory and pinned host memory"
                }
            )?;
            writeln!(f, "              several pieces are compared with one copy of their total")?;
        }
        if has(Against::HostMemory) {
            let mut paths: Vec<&str> = Vec::new();
            for line in self.lines.iter().filter(|line| line.against() == Against::HostMemory) {
                if !paths.contains(&line.path.as_str()) {
                    paths.push(&line.path);
                }
            }
            writeln!(
                f,
                "limit, {}: the same transfers with host memory on both sides, in the same session",
                paths.join(" and ")
            )?;
        }
        self.write_kernel(f)?;
        if has(Against::Sockets) {
            writeln!(
                f,
                "limit, tcp:   a blocking socket loop on its own connection, the pieces as one \
                 message, sends of 1M,"
            )?;
            writeln!(
                f,
                "              TCP_NODELAY, default congestion control, one byte back\n              \
                 (read: one byte ahead; pingpong: all bytes back)"
            )?;
        }
        if has(Against::Perftest) {
            let with = self.compared.is_empty();
            writeln!(
                f,
                "limit, RDMA:  {}",
                if with {
                    "none; --perftest compares with ib_write_bw, ib_read_bw and ib_write_lat"
                } else {
                    "perftest, for single pieces (bandwidth from 64K on); see the table of these rows below"
                }
            )?;
        }
        self.write_memory(f)?;
        writeln!(
            f,
            "verified:     the bytes of every row; the cost of the clock ({} ns) is subtracted from each time",
            self.clock_cost.as_nanos()
        )
    }

    /// Describes the memory of both sides.
    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const HOST: &str =
            "allocated by the endpoint, 4K pages; others: private, huge pages advised";
        if self.memory == [Memory::Host; 2] {
            return writeln!(f, "memory:       local-map: {HOST}");
        }
        let mut head = "memory:";
        for (side, (memory, told)) in
            ["local", "remote"].into_iter().zip(self.memory.iter().zip(&self.told))
        {
            let told = match memory {
                Memory::Host if side == "local" => "private, huge pages advised".to_owned(),
                Memory::Host => format!("local-map, gpu-ipc: {HOST}"),
                _ => told.clone(),
            };
            writeln!(f, "{head:<13} {side} {memory}: {told}")?;
            head = "";
        }
        let [local, remote] = self.memory;
        if local == Memory::Host && remote.is_gpu() {
            writeln!(
                f,
                "              this process uses no GPU, so no GPU copies for it; with --memory pinned,{remote} one does"
            )?;
        }
        Ok(())
    }

    /// The bound of local-cma, with a line for each row that has it.
    fn write_kernel(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bounds = self.lines.iter().filter_map(|line| Some((line, line.kernel_gbps?)));
        for (i, (line, kernel)) in bounds.enumerate() {
            if i == 0 {
                writeln!(
                    f,
                    "bound, cma:   process_vm_readv alone from the other process, the \
                     best of one and two threads:"
                )?;
            }
            writeln!(
                f,
                "              {} {}: {} GB/s, {} % of the limit; the path reaches {}, {} % of the bound",
                line.op.name(),
                size::show(line.size),
                figure(kernel),
                percent(100.0 * kernel / line.limit_gbps.unwrap_or(f64::NAN)),
                figure(line.gbps),
                percent(100.0 * line.gbps / kernel)
            )?;
        }
        Ok(())
    }

    fn write_besides(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            table(&["path", "connect ms", "post 100M µs", "post 100000 x 4K µs", "idle CPU"]);
        for besides in &self.besides {
            table.add_row(besides.cells());
        }
        write_table(f, &mut table, 1)?;
        writeln!(
            f,
            "p50 / max; post: time inside the posting call of a prepared write;\n\
             idle: CPU time of both processes after a second of rest"
        )
    }
}

/// The memory of the two sides. `None` if both use host memory.
pub(crate) fn between([local, remote]: [Memory; 2]) -> Option<String> {
    let host = [local, remote] == [Memory::Host; 2];
    (!host).then(|| format!("local {local}, remote {remote}"))
}

/// A number with about three significant digits.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.995 => format!("{value:.2}"),
        v if v >= 0.00995 => format!("{value:.3}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.4}"),
    }
}

/// A percentage without decimals, or with one decimal below ten, so that small values are not shown
/// as 0.
fn percent(value: f64) -> String {
    if value >= 9.95 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// A table without borders.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().copied());
    if !std::io::stdout().is_terminal() {
        table.force_no_tty();
    }
    table
}

/// Writes a table without trailing blanks. All columns but the first `words` are numbers and are
/// aligned right.
pub(crate) fn write_table(
    f: &mut fmt::Formatter<'_>,
    table: &mut Table,
    words: usize,
) -> fmt::Result {
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for line in table.lines() {
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A plain row.
    pub(crate) fn line(path: &str, op: Op, size: u64, iovs: u32) -> Line {
        Line {
            path: path.to_owned(),
            memory_local: Memory::Host,
            memory_remote: Memory::Host,
            op,
            size,
            iovs,
            p50_us: 2.5,
            p99_us: 12.25,
            gbps: (size * u64::from(iovs)) as f64 / 2500.0,
            limit_gbps: Some(8.0),
            kernel_gbps: None,
            cpu_s_per_gb: 0.25,
        }
    }

    fn report() -> Report {
        let spread = Spread { p50: 1234.0, max: 5678.0 };
        Report {
            lines: vec![
                line("local-map", Op::Write, 4096, 1),
                line("local-map", Op::Read, 4096, 1),
                Line { kernel_gbps: Some(3.0), ..line("local-cma", Op::Read, 1 << 20, 1) },
                line("tcp", Op::Write, 4096, 100_000),
            ],
            memory: [Memory::Host; 2],
            told: Default::default(),
            compared: Vec::new(),
            registrations: Vec::new(),
            besides: vec![Besides {
                path: "tcp".to_owned(),
                connect: spread,
                post_range: Some(spread),
                post_list: None,
                idle: 0.0012,
            }],
            notes: vec!["local-cma: not measured: refused".to_owned()],
            seconds: 0.8,
            clock_cost: Duration::from_nanos(25),
            counted: false,
            copy_threads: 2,
        }
    }

    #[test]
    fn programs_get_exactly_the_fields_that_were_promised() {
        let json = serde_json::to_value(vec![line("tcp", Op::Read, 4096, 128)]).unwrap();
        let row = json[0].as_object().unwrap();
        let mut names: Vec<&str> = row.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "cpu_s_per_gb",
                "gbps",
                "iovs",
                "kernel_gbps",
                "limit_gbps",
                "memory_local",
                "memory_remote",
                "op",
                "p50_us",
                "p99_us",
                "path",
                "size"
            ]
        );
        assert_eq!(row["op"], "read");
        assert_eq!(row["memory_local"], "host");
        assert_eq!(row["size"], 4096);
        assert_eq!(row["iovs"], 128);
        assert!(row["kernel_gbps"].is_null());
    }

    #[test]
    fn people_see_rows_limits_and_notes() {
        let text = report().to_string();
        let found =
            |parts: &[&str]| text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(
            found(&["local-map", "write", "4K", "1.64", "2.50", "12.2", "8.00", "20"]),
            "{text}"
        );
        assert!(found(&["tcp", "100000"]));
        assert!(found(&["1.23 / 5.68", "1234 / 5678", "-", "0.12 %"]), "{text}");
        assert!(found(&["bound, cma:"]) && found(&["read 1M: 3.00 GB/s, 38 %", "419"]), "{text}");
        assert!(found(&["limit, local:"]) && found(&["limit, tcp:"]));
        assert!(found(&["local-cma: not measured: refused"]));
        assert!(text.lines().all(|line| line.trim_end() == line));
        let wide = text.lines().find(|line| line.chars().count() > 100);
        assert_eq!(wide, None, "a window has 100 columns");
    }

    #[test]
    fn the_memory_of_both_sides_is_told_with_its_limits() {
        let memory = [Memory::Gpu, Memory::Host];
        let of = |path| Line {
            memory_local: memory[0],
            memory_remote: memory[1],
            ..line(path, Op::Write, 4096, 1)
        };
        let text = Report {
            lines: vec![of("gpu-ipc"), of("local-ring"), of("local-ring"), of("tcp")],
            memory,
            told: ["GPU 0, posix-fd".to_owned(), String::new()],
            ..report()
        }
        .to_string();
        for part in [
            "memory: local gpu, remote host\n",
            "limit, GPU:   one cuMemcpyAsync",
            "between GPU memory and pinned host memory;",
            "limit, local-ring and tcp: the same transfers with host memory",
            "local gpu: GPU 0, posix-fd\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("limit, tcp:") && !text.contains("limit, local:"), "{text}");
        assert!(!report().to_string().contains("remote host"));
    }

    #[test]
    fn figures_are_short() {
        let shown = [0.0, 0.00123, 0.15, 1.0, 9.996, 25.04, 99.96, 1234.5].map(figure);
        assert_eq!(shown, ["0", "0.0012", "0.150", "1.00", "10.0", "25.0", "100", "1234"]);
    }
}
