//! The doctor's report, as text and as JSON.
//!
//! A report consists of sections, and a section of rows. The text output has a table per section.
//! The JSON output has the same rows, with a `data` field where a program would otherwise have to
//! parse the text.

use std::fmt;
use std::io::IsTerminal;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::Value;

/// The complete report.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: &'static str,
    sections: Vec<Section>,
}

impl Report {
    pub(crate) fn new(sections: Vec<Section>) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), sections }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "peerway {}", self.version)?;
        for section in &self.sections {
            write!(f, "\n{section}")?;
        }
        Ok(())
    }
}

/// A group of rows about one subject.
#[derive(Debug, Serialize)]
pub(crate) struct Section {
    id: &'static str,
    title: &'static str,
    rows: Vec<Row>,
}

impl Section {
    /// An empty section. Programs match `id`, so an existing `id` never changes.
    pub(crate) fn new(id: &'static str, title: &'static str) -> Self {
        Self { id, title, rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// The rows so far.
    #[cfg(test)]
    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let mut table = plain_table();
        for row in &self.rows {
            table.add_row([
                row.state.mark(),
                &row.name,
                &row.value,
                row.note.as_deref().unwrap_or_default(),
            ]);
        }
        write_table(f, &table)
    }
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    name: String,
    value: String,
    state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(skip_serializing_if = "Value::is_null")]
    data: Value,
}

impl Row {
    /// The checked thing is present.
    pub(crate) fn ok(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::new(name, value, State::Ok)
    }

    /// The checked thing is missing.
    pub(crate) fn absent(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::new(name, value, State::Absent)
    }

    /// The checked thing needs attention.
    pub(crate) fn attention(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::new(name, value, State::Attention)
    }

    /// Adds a remark: what the value means, or what to do.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// Adds the value in a form that programs need not parse.
    pub(crate) fn data(mut self, data: impl Serialize) -> Self {
        // Callers pass plain structs, whose serialisation cannot fail. If it did, the row would
        // keep its text.
        self.data = serde_json::to_value(data).unwrap_or(Value::Null);
        self
    }

    fn new(name: impl Into<String>, value: impl Into<String>, state: State) -> Self {
        Self { name: name.into(), value: value.into(), state, note: None, data: Value::Null }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Absent,
    Attention,
}

impl State {
    fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Absent => "-",
            Self::Attention => "!",
        }
    }
}

/// A table without borders, as wide as the terminal, or 120 columns if the output is no terminal.
pub(crate) fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(120);
    }
    table
}

/// Writes a table without the trailing blanks that pad its cells.
pub(crate) fn write_table(f: &mut fmt::Formatter<'_>, table: &Table) -> fmt::Result {
    for line in table.lines() {
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

/// A byte count in the largest unit that keeps it at 1 or more, with one decimal.
pub(crate) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut section = Section::new("machine", "Machine");
        section.push(Row::ok("cores", "2").data(2));
        section.push(Row::absent("libcuda", "not found").note("install the driver"));
        section.push(Row::attention("memlock", "8.0 MiB"));
        Report::new(vec![section])
    }

    #[test]
    fn people_see_marks_names_values_and_notes() {
        let text = sample().to_string();
        assert!(text.contains("Machine\n"));
        for line in [["ok", "cores", "2"], ["-", "libcuda", "install the driver"]] {
            let found = text.lines().any(|shown| line.iter().all(|part| shown.contains(part)));
            assert!(found, "{text}");
        }
        assert!(text.lines().all(|line| line.trim_end() == line));
    }

    #[test]
    fn programs_see_the_same_with_data() {
        let json = serde_json::to_value(sample()).unwrap();
        let rows = &json["sections"][0]["rows"];
        assert_eq!(json["sections"][0]["id"], "machine");
        assert_eq!(rows[0]["data"], 2);
        assert_eq!(rows[0]["state"], "ok");
        assert_eq!(rows[1]["state"], "absent");
        assert_eq!(rows[1]["note"], "install the driver");
        assert!(rows[2].get("note").is_none());
    }

    #[test]
    fn byte_counts_are_readable() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(8 << 20), "8.0 MiB");
        assert_eq!(bytes(24_000_000_000), "22.4 GiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }
}
