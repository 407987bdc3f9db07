//! The result: a table that grows row by row, with its definitions below.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::baseline::Against;
use super::document::Why;
use super::layout::Layout;
use super::measure::{Beside, Figures, Ratio, Times};
use super::memory::Memory;
use super::plan::Plan;
use super::pong::Seen;
use super::text::{explain, paragraph};
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
    /// CPU time of both processes.
    pub(crate) cpu_s_per_gb: f64,
    /// `None` for RDMA devices without perftest.
    pub(crate) baseline: Option<Compare>,
    /// The kernel's copy between the two processes, for large rows of local-cma.
    pub(crate) kernel: Option<Compare>,
}

/// A baseline and the row's ratio to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Compare {
    pub(crate) name: &'static str,
    /// Of the baseline.
    pub(crate) gbps: f64,
    /// The row's GB/s divided by those of the baseline: the median of the rounds.
    pub(crate) ratio: f64,
    /// The lowest and the highest ratio of a round.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Compare {
    fn new(name: &'static str, Beside { gbps, ratio }: Beside) -> Self {
        let Ratio { median, low, high } = ratio;
        Self { name, gbps, ratio: median, low, high }
    }
}

/// The ratio with its spread, at most 16 columns wide.
impl fmt::Display for Compare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |value: f64| match value {
            value if value >= 99.5 => format!("{value:.0}"),
            value if value >= 9.95 => format!("{value:.1}"),
            value => format!("{value:.2}"),
        };
        // Such a ratio has no digits to show a spread in.
        let text = match self.high {
            high if high < 0.01 => "<0.01".to_owned(),
            high => format!("{} ({}-{})", short(self.ratio), short(self.low), short(high)),
        };
        f.pad(&text)
    }
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
        let against = Against::of(path, [memory_local, memory_remote]).name();
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
            cpu_s_per_gb: figures.cpu_s_per_gb,
            baseline: figures.baseline.map(|beside| Compare::new(against, beside)),
            kernel: figures.kernel.map(|beside| Compare::new("process_vm_readv", beside)),
        }
    }

    /// The kind of the row's baseline.
    pub(crate) fn against(&self) -> Against {
        Against::of(&self.path, [self.memory_local, self.memory_remote])
    }
}

/// The size of a row as the table shows it.
fn shape(size: u64, iovs: u32) -> String {
    match iovs {
        1 => size::show(size),
        _ => format!("{iovs}x{}", size::show(size)),
    }
}

/// The widths of the columns that depend on the rows of a run. They are fixed before the first row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    path: usize,
    op: usize,
    size: usize,
}

impl Columns {
    /// Wide enough for all rows of the plan on all paths.
    pub(crate) fn new(plan: &Plan) -> Self {
        let widest = |widths: &mut dyn Iterator<Item = usize>| widths.max().unwrap_or(0).max(4);
        Self {
            path: "local-ring".len(),
            op: widest(&mut plan.rows.iter().map(|row| row.op.name().len())),
            size: widest(
                &mut plan.rows.iter().map(|row| shape(row.layout.size, row.layout.iovs).len()),
            ),
        }
    }

    fn line(&self, [path, op, size, gbps, p50, p99, cpu, ratio, to]: [&str; 9]) -> String {
        let Self { path: a, op: b, size: c } = *self;
        let line = format!(
            "{path:<a$} {op:<b$} {size:>c$} {gbps:>6} {p50:>6} {p99:>6} {cpu:>6} {ratio:>16} {to}"
        );
        line.trim_end().to_owned() + "\n"
    }

    /// The names of the columns.
    pub(crate) fn head(&self) -> String {
        let ratio = "ratio (low-high)";
        self.line(["path", "op", "size", "GB/s", "p50 µs", "p99 µs", "CPU", ratio, "to"])
    }

    /// One row.
    pub(crate) fn row(&self, line: &Line) -> String {
        let none = || "-".to_owned();
        self.line([
            &line.path,
            line.op.name(),
            &shape(line.size, line.iovs),
            &figure(line.gbps),
            &figure(line.p50_us),
            &figure(line.p99_us),
            &figure(line.cpu_s_per_gb),
            &line.baseline.map_or_else(none, |baseline| baseline.to_string()),
            line.baseline.map_or("", |baseline| baseline.name),
        ])
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
    /// Why a peer has each path.
    pub(crate) whys: Vec<Why>,
    /// Paths and rows that were not measured, with the reasons, and other remarks.
    pub(crate) notes: Vec<String>,
    pub(crate) seconds: f64,
    pub(crate) clock_cost: Duration,
    /// Whether round trips wait for counters on every path.
    pub(crate) counted: bool,
    /// How many threads the baseline of local paths may use.
    pub(crate) copy_threads: u32,
    /// The CPUs of the two sides in rows of TCP.
    pub(crate) halves: Option<[String; 2]>,
}

impl Report {
    /// What stands above the table.
    pub(crate) fn head(&self, op: Op) -> String {
        let round_trip = op == Op::Pingpong;
        let mut out = String::new();
        let what = if round_trip { "round trip" } else { "transfer" };
        // A write to a string cannot fail.
        let _ = paragraph(
            &mut out,
            &format!(
                "peerway {} bench: one {what} in flight, {} s per row in turns with its baseline",
                env!("CARGO_PKG_VERSION"),
                self.seconds
            ),
        );
        if let Some(memory) = between(self.memory) {
            out += &format!("memory: {memory}\n");
        }
        let half = if round_trip { " (half a round trip)" } else { "" };
        let _ = paragraph(
            &mut out,
            &format!(
                "GB/s = bytes / p50 time{half}; GB = 10^9 bytes, K = 1024; CPU = seconds of both \
                 processes per GB"
            ),
        );
        out + "\n"
    }

    /// What stands below the table.
    pub(crate) fn legend(&self) -> String {
        let mut out = String::new();
        // A write to a string cannot fail.
        let _ = self.write_legend(&mut out);
        out
    }

    fn write_legend(&self, f: &mut impl fmt::Write) -> fmt::Result {
        writeln!(f)?;
        explain(
            f,
            "ratio:",
            "GB/s of the row divided by those of its baseline: the median of five pairs of rounds, \
             the lowest and the highest; the baseline is what the machine reaches without an engine",
        )?;
        self.write_baselines(f)?;
        if self.lines.iter().any(|line| line.op == Op::Pingpong) {
            let watched =
                |line: &Line| Seen::on(&line.path, line.size, self.counted) == Seen::Watched;
            let (any, all) = (self.lines.iter().any(watched), self.lines.iter().all(watched));
            explain(
                f,
                "arrivals:",
                match (any, all) {
                    (_, true) => "each side watches the last byte, as ib_write_lat does",
                    (true, _) => {
                        "on verbs up to 64K, each side watches the last byte, as ib_write_lat does; \
                         otherwise counters"
                    }
                    _ => "each side waits for a counter",
                },
            )?;
        }
        self.write_memory(f)?;
        explain(
            f,
            "verified:",
            &format!(
                "the bytes of every row; the cost of the clock ({} ns) is subtracted from each time",
                self.clock_cost.as_nanos()
            ),
        )?;
        self.write_kernel(f)?;
        if !self.compared.is_empty() {
            write!(f, "\n{}", fmt::from_fn(|f| compared::write(f, &self.compared)))?;
        }
        for registration in &self.registrations {
            write!(f, "\n{registration}")?;
        }
        if !self.besides.is_empty() {
            write!(f, "\n{}", fmt::from_fn(|f| self.write_besides(f)))?;
        }
        if !self.whys.is_empty() {
            writeln!(f, "\nwhy:")?;
        }
        for Why { path, why } in &self.whys {
            explain(f, path, why)?;
        }
        if !self.notes.is_empty() {
            writeln!(f)?;
        }
        self.notes.iter().try_for_each(|note| paragraph(f, note))
    }

    fn write_baselines(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let has = |against| self.lines.iter().any(|line| line.against() == against);
        if has(Against::Copies) {
            let threads =
                if self.copy_threads > 1 { "by one and by two threads" } else { "by one thread" };
            explain(
                f,
                "copy:",
                &format!(
                    "the best of plain and non-temporal copies of the pieces, {threads}, inside one \
                     process, with the same kind of memory; such a copy notifies no peer, so small \
                     transfers stay far below it"
                ),
            )?;
        }
        if has(Against::Sockets) {
            let placed = match &self.halves {
                Some([ours, theirs]) => format!(
                    "; the engine and both loops run on CPUs {ours} here and {theirs} in the other \
                     process"
                ),
                None => String::new(),
            };
            explain(
                f,
                "socket:",
                &format!(
                    "the better of a socket loop that blocks and one that spins, on a connection of \
                     its own, the pieces as one message, sends of 1M, TCP_NODELAY, one byte back \
                     (read: one byte ahead; pingpong: all bytes back){placed}"
                ),
            )?;
        }
        if has(Against::Driver) {
            let memory = if self.memory.iter().all(|memory| memory.is_gpu()) {
                "between two buffers of GPU memory"
            } else {
                "between GPU memory and pinned host memory"
            };
            explain(
                f,
                "driver:",
                &format!(
                    "one cuMemcpyAsync of all bytes and a wait, inside one process, {memory}; \
                     several pieces are compared with one copy of their total"
                ),
            )?;
        }
        if has(Against::HostMemory) {
            explain(
                f,
                "host:",
                "the same transfers with host memory on both sides, in the same session",
            )?;
        }
        if has(Against::Perftest) {
            let text = if self.compared.is_empty() {
                "none for RDMA devices; --perftest compares with ib_write_bw, ib_read_bw and \
                 ib_write_lat"
            } else {
                "ib_write_bw, ib_read_bw or ib_write_lat, for single pieces (bandwidth from 64K \
                 on); see the table of these rows below"
            };
            explain(f, "perftest:", text)?;
        }
        Ok(())
    }

    /// Describes the memory of both sides.
    fn write_memory(&self, f: &mut impl fmt::Write) -> fmt::Result {
        const HOST: &str =
            "allocated by the endpoint, 4K pages; others: private, huge pages advised";
        if self.memory == [Memory::Host; 2] {
            return explain(f, "memory:", &format!("local-map: {HOST}"));
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
            explain(f, head, &format!("{side} {memory}: {told}"))?;
            head = "";
        }
        let [local, remote] = self.memory;
        if local == Memory::Host && remote.is_gpu() {
            explain(
                f,
                "",
                &format!(
                    "this process uses no GPU, so no GPU copies for it; with --memory \
                     pinned,{remote} one does"
                ),
            )?;
        }
        Ok(())
    }

    /// The bound of local-cma, with a line for each row that has it.
    fn write_kernel(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let bounds = self.lines.iter().filter_map(|line| Some((line, line.kernel?)));
        for (i, (line, kernel)) in bounds.enumerate() {
            if i == 0 {
                writeln!(f)?;
                paragraph(
                    f,
                    "process_vm_readv alone from the other process, the best of one and two \
                     threads, bounds large rows of local-cma:",
                )?;
            }
            writeln!(
                f,
                "  {:<5} {:>4}: {} GB/s; the row's ratio to it: {kernel}",
                line.op.name(),
                size::show(line.size),
                figure(kernel.gbps),
            )?;
        }
        Ok(())
    }

    fn write_besides(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            table(&["path", "connect ms", "post 100M µs", "post 100000x4K µs", "idle CPU"]);
        for besides in &self.besides {
            table.add_row(besides.cells());
        }
        write_table(f, &mut table, 1)?;
        paragraph(
            f,
            "p50 / max; post: time inside the posting call of a prepared write; idle: CPU time of \
             both processes after a second of rest",
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
    use crate::bench::plan::tests::defaults;
    use crate::bench::text::WIDTH;
    use crate::bench::{Measure, Mode};

    /// A plain row.
    pub(crate) fn line(path: &str, op: Op, size: u64, iovs: u32) -> Line {
        let name = Against::of(path, [Memory::Host; 2]).name();
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
            cpu_s_per_gb: 0.25,
            baseline: Some(Compare { name, gbps: 8.0, ratio: 0.205, low: 0.192, high: 0.218 }),
            kernel: None,
        }
    }

    fn report() -> Report {
        let spread = Spread { p50: 1234.0, max: 5678.0 };
        let kernel = Compare { name: "kernel", gbps: 3.0, ratio: 1.01, low: 0.97, high: 1.1 };
        Report {
            lines: vec![
                line("local-map", Op::Write, 4096, 1),
                line("local-map", Op::Read, 4096, 1),
                Line { kernel: Some(kernel), ..line("local-cma", Op::Read, 1 << 20, 1) },
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
            whys: vec![Why { path: "tcp".to_owned(), why: "the peer is far away. ".repeat(9) }],
            notes: vec!["local-cma: not measured: refused".to_owned()],
            seconds: 0.8,
            clock_cost: Duration::from_nanos(25),
            counted: false,
            copy_threads: 2,
            halves: Some(["0".to_owned(), "1".to_owned()]),
        }
    }

    /// Everything that a run prints.
    fn text(report: &Report, measure: &Measure) -> String {
        let columns = Columns::new(&Plan::new(measure).unwrap());
        let rows: String = report.lines.iter().map(|line| columns.row(line)).collect();
        let op = report.lines.first().map_or(Op::Write, |line| line.op);
        report.head(op) + &columns.head() + &rows + &report.legend()
    }

    fn check_width(text: &str) {
        assert!(text.lines().all(|line| line.trim_end() == line), "{text}");
        let wide = text.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(wide, None, "a window has {WIDTH} columns");
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
                "baseline",
                "cpu_s_per_gb",
                "gbps",
                "iovs",
                "kernel",
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
        assert!(row["kernel"].is_null());
        let baseline = serde_json::json!(
            {"name": "socket", "gbps": 8.0, "ratio": 0.205, "low": 0.192, "high": 0.218}
        );
        assert_eq!(row["baseline"], baseline);
    }

    #[test]
    fn people_see_rows_baselines_and_notes() {
        let text = text(&report(), &Measure { full: true, ..defaults() });
        let found =
            |parts: &[&str]| text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        let row = ["local-map", "write", "4K", "1.64", "2.50", "12.2", "0.20 (0.19-0.22) copy"];
        assert!(found(&row), "{text}");
        assert!(found(&["tcp", "100000x4K", "socket"]), "{text}");
        assert!(found(&["1.23 / 5.68", "1234 / 5678", "-", "0.12 %"]), "{text}");
        assert!(found(&["read", "1M: 3.00 GB/s", "1.01 (0.97-1.10)"]), "{text}");
        assert!(found(&["copy:"]) && found(&["socket:", "blocks"]), "{text}");
        assert!(found(&["tcp", "the peer is far away."]), "{text}");
        assert!(found(&["local-cma: not measured: refused"]));
        assert!(!text.contains("% of"), "{text}");
        check_width(&text);
    }

    #[test]
    fn no_row_is_wider_than_a_window() {
        for (measure, size, iovs, op) in [
            (Measure { full: true, ..defaults() }, 4096, 100_000, Op::Write),
            (Measure { mode: Mode::Pingpong, ..defaults() }, 100 << 20, 1, Op::Pingpong),
        ] {
            let mut row = line("local-ring", op, size, iovs);
            row.p50_us = 234_567.0;
            row.p99_us = 345_678.0;
            row.gbps = 0.001_23;
            row.cpu_s_per_gb = 0.001_23;
            for value in [0.0049, 0.995, 9.96, 12.345, 123.45] {
                let name = Against::Perftest.name();
                let (low, high) = (value * 0.95, value * 1.05);
                row.baseline = Some(Compare { name, gbps: 8.0, ratio: value, low, high });
                check_width(&text(&Report { lines: vec![row.clone()], ..report() }, &measure));
            }
        }
    }

    #[test]
    fn the_memory_of_both_sides_is_told_with_its_baselines() {
        let memory = [Memory::Gpu, Memory::Host];
        let of = |path| Line {
            memory_local: memory[0],
            memory_remote: memory[1],
            ..line(path, Op::Write, 4096, 1)
        };
        let report = Report {
            lines: vec![of("gpu-ipc"), of("local-ring"), of("local-ring"), of("tcp")],
            memory,
            told: ["GPU 0, posix-fd".to_owned(), String::new()],
            ..report()
        };
        let text = text(&report, &defaults());
        for part in [
            "memory: local gpu, remote host\n",
            "driver:     one cuMemcpyAsync",
            "host:       the same transfers with host memory",
            "local gpu: GPU 0, posix-fd\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("socket:") && !text.contains("copy:"), "{text}");
        check_width(&text);
    }

    #[test]
    fn figures_are_short() {
        let shown = [0.0, 0.00123, 0.15, 1.0, 9.996, 25.04, 99.96, 1234.5].map(figure);
        assert_eq!(shown, ["0", "0.0012", "0.150", "1.00", "10.0", "25.0", "100", "1234"]);
    }
}
