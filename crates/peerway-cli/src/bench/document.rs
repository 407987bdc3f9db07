//! The JSON document of a run: where and how it was measured, and its rows.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use peerway_core::config::SETTINGS;
use serde::Serialize;

use crate::version;

/// Everything that a program or a reader needs to judge and repeat a run.
#[derive(Debug, Serialize)]
pub(crate) struct Document<'a, R> {
    /// When the document was made, in UTC: `2026-01-31T23:59:59Z`.
    date: String,
    host: Host,
    versions: Versions,
    settings: Settings,
    /// `false` if the run was interrupted or failed before its last row.
    complete: bool,
    rows: &'a [R],
    /// The paths that were measured, each with the reason why a peer has it.
    paths: &'a [Why],
    /// What was not measured, with the reasons, and other remarks.
    notes: &'a [String],
}

/// A path and the reason why a peer has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Why {
    pub(crate) path: String,
    pub(crate) why: String,
}

#[derive(Debug, Serialize)]
struct Host {
    name: String,
    processor: String,
    /// How many CPUs this process may use.
    cpus: usize,
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Versions {
    peerway: &'static str,
    commit: &'static str,
    kernel: String,
}

#[derive(Debug, Serialize)]
struct Settings {
    /// The command line, without the program's directory.
    command: Vec<String>,
    /// The settings that environment variables change, under their own names.
    environment: BTreeMap<&'static str, String>,
}

impl<'a, R: Serialize> Document<'a, R> {
    /// A document of these rows.
    pub(crate) fn new(rows: &'a [R]) -> Self {
        Self {
            date: date(SystemTime::now()),
            host: Host::new(),
            versions: Versions {
                peerway: env!("CARGO_PKG_VERSION"),
                commit: version::COMMIT,
                kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            },
            settings: Settings::new(),
            complete: true,
            rows,
            paths: &[],
            notes: &[],
        }
    }

    /// Adds what only the benchmark of paths has.
    pub(crate) fn with(mut self, complete: bool, paths: &'a [Why], notes: &'a [String]) -> Self {
        (self.complete, self.paths, self.notes) = (complete, paths, notes);
        self
    }

    /// The text of the file.
    pub(crate) fn text(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl Host {
    fn new() -> Self {
        // The value of the first line with this name, in a file of the form `name : value`.
        let find = |file: &str, name: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let mut values = text.lines().filter_map(|line| line.split_once(':'));
            values.find(|(found, _)| found.trim() == name).map(|(_, value)| value.trim().to_owned())
        };
        let kibibytes = find("/proc/meminfo", "MemTotal")
            .and_then(|value| value.split(' ').next()?.parse::<u64>().ok());
        Self {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            processor: find("/proc/cpuinfo", "model name").unwrap_or_default(),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: kibibytes.unwrap_or(0) * 1024,
        }
    }
}

impl Settings {
    fn new() -> Self {
        let mut command: Vec<String> =
            std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        if let Some(program) = command.first_mut() {
            "peerway".clone_into(program);
        }
        let variable = |name: &str| std::env::var(name).ok();
        let set = SETTINGS.iter().filter_map(|setting| {
            let found = setting.find(variable)?;
            Some((found.name, found.value))
        });
        Self { command, environment: set.collect() }
    }
}

/// A time as RFC 3339 writes it, in UTC and whole seconds.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days are counted in eras of 400 years from 0000-03-01 on, so that the day that a leap year
    // has more is the last one of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let leap = day_of_era / 1460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn a_document_says_where_and_how() {
        let notes = ["nothing".to_owned()];
        let text = Document::new(&[7, 8]).with(false, &[], &notes).text().unwrap();
        let found: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(found["rows"], serde_json::json!([7, 8]));
        assert_eq!(found["complete"], false);
        assert_eq!(found["versions"]["peerway"], env!("CARGO_PKG_VERSION"));
        assert_eq!(found["settings"]["command"][0], "peerway");
        assert!(found["settings"]["environment"].is_object());
        assert!(found["host"]["cpus"].as_u64().unwrap() > 0);
        assert!(found["host"]["memory_bytes"].as_u64().unwrap() > 0);
        assert_eq!(found["notes"][0], "nothing");
        assert!(found["date"].as_str().unwrap().ends_with('Z'));
    }
}
