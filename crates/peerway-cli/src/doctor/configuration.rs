//! The configuration: whether it is valid, and every setting with its value and source.

use std::fmt;
use std::path::Path;

use anyhow::Context;
use peerway_core::config::{self, Config, ConfigError, SETTINGS, Setting, Status};
use serde::Serialize;

use super::report::{Row, Section, plain_table, write_table};

/// A setting with its value in this environment.
#[derive(Debug, Serialize)]
pub(super) struct Current {
    name: &'static str,
    aliases: &'static [&'static str],
    value: String,
    /// The environment variable that sets it. `None` if the default applies.
    from: Option<&'static str>,
    default: &'static str,
    allowed: String,
    doc: &'static str,
    effect: String,
    #[serde(skip)]
    used: bool,
}

/// The section about the configuration: the settings that are set, and their errors.
pub(super) fn section(_root: &Path) -> Section {
    let mut section = Section::new("configuration", "Configuration (all settings: --config)");
    let outcome = Config::from_env(variable);
    let bad = match &outcome {
        Err(ConfigError::BadValue { name, .. }) => Some(name.as_str()),
        _ => None,
    };
    let set: Vec<Current> =
        settings().into_iter().filter(|current| current.from.is_some()).collect();
    if set.is_empty() {
        section.push(Row::ok("settings", "all at their defaults"));
    }
    for current in set {
        let name = current.from.unwrap_or(current.name);
        section.push(if bad == current.from {
            Row::attention(name, current.value).note(format!("expected {}", current.allowed))
        } else if current.used {
            Row::ok(name, current.value)
        } else {
            Row::absent(name, current.value).note(current.effect)
        });
    }
    match outcome {
        Ok((_, warnings)) => {
            for warning in warnings {
                section.push(Row::attention("warning", warning));
            }
        }
        Err(error) => section.push(Row::attention("error", error.to_string())),
    }
    for sentence in config::unknown(variable_names()) {
        section.push(Row::attention("warning", sentence));
    }
    section
}

/// Every setting with its value in this environment.
pub(super) fn settings() -> Vec<Current> {
    SETTINGS.iter().map(|setting| current(setting, variable)).collect()
}

/// A table of the settings that have an effect or are set, and the number of the other settings.
pub(super) fn table(settings: &[Current]) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        let (shown, others): (Vec<&Current>, Vec<&Current>) =
            settings.iter().partition(|current| current.used || current.from.is_some());
        let mut table = plain_table();
        table.set_header(["setting", "value", "from", "meaning"]);
        for current in shown {
            let value = if current.value.is_empty() { "(unset)" } else { &current.value };
            let meaning = if current.used { current.doc } else { &current.effect };
            table.add_row([current.name, value, current.from.unwrap_or("default"), meaning]);
        }
        write_table(f, &table)?;
        writeln!(
            f,
            "\n{} more settings are known but have no effect in this build; `--config --json` lists them.",
            others.len()
        )?;
        for sentence in config::unknown(variable_names()) {
            writeln!(f, "warning: {sentence}")?;
        }
        Ok(())
    })
}

/// Returns an error if the configuration is invalid.
pub(super) fn check() -> anyhow::Result<()> {
    Config::from_env(variable).context("the configuration is invalid").map(drop)
}

fn current(setting: &'static Setting, lookup: impl Fn(&str) -> Option<String>) -> Current {
    let found = setting.find(lookup);
    let effect = match setting.status {
        Status::Used => "used".to_owned(),
        Status::Reserved(what) => format!("reserved for {what}, which is not in this build yet"),
        Status::AnsweredWithWarning(why) => format!("no effect: {why}"),
        _ => String::new(),
    };
    Current {
        name: setting.name,
        aliases: setting.aliases,
        from: found.as_ref().map(|found| found.name),
        value: found.map_or_else(|| setting.default.to_owned(), |found| found.value),
        default: setting.default,
        allowed: setting.allowed(),
        doc: setting.doc,
        effect,
        used: setting.status == Status::Used,
    }
}

/// An environment variable. A value that is not UTF-8 becomes a text that no setting accepts.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn variable_names() -> impl Iterator<Item = String> {
    std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> Vec<Current> {
        let lookup = |asked: &str| (asked == name).then(|| value.to_owned());
        SETTINGS.iter().map(|setting| current(setting, lookup)).collect()
    }

    #[test]
    fn a_value_says_where_it_came_from() {
        let all = with("UCCL_P2P_TRANSPORT", "tcp");
        let transport = all.iter().find(|one| one.name == "PEERWAY_TRANSPORT").unwrap();
        assert_eq!(transport.value, "tcp");
        assert_eq!(transport.from, Some("UCCL_P2P_TRANSPORT"));
        let detect = all.iter().find(|one| one.name == "PEERWAY_DETECT").unwrap();
        assert_eq!((detect.value.as_str(), detect.from), ("2s", None));
    }

    #[test]
    fn the_table_shows_used_and_set_ones() {
        let text = table(&with("UCCL_CXI_CQ_SIZE", "12345")).to_string();
        assert!(text.contains("12345") && text.contains("reserved for cxi"), "{text}");
        assert!(!text.contains("PEERWAY_CXI_DOMAIN"), "{text}");
        for setting in SETTINGS.iter().filter(|setting| setting.status == Status::Used) {
            assert!(text.contains(setting.name), "{text}");
        }
    }

    #[test]
    fn programs_see_every_setting() {
        let json = serde_json::to_value(with("PEERWAY_LANES", "8")).unwrap();
        assert_eq!(json.as_array().unwrap().len(), SETTINGS.len());
        assert!(json[0]["allowed"].as_str().unwrap().contains("tcp"));
    }
}
