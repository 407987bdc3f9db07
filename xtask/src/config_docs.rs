//! `docs/configuration.md`, written from the table of settings so that it cannot disagree with it.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use peerway_core::config::{SETTINGS, Setting, Status};

const FILE: &str = "docs/configuration.md";

/// Writes the page.
pub(crate) fn write(root: &Path) -> anyhow::Result<()> {
    let path = root.join(FILE);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)
            .with_context(|| format!("cannot create the directory of {FILE}"))?;
    }
    fs::write(path, page()).with_context(|| format!("cannot write {FILE}"))
}

/// Fails where the page is not what `write` would write.
pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let found =
        fs::read_to_string(root.join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    let wanted = page();
    if found == wanted {
        return Ok(());
    }
    let differs = found.lines().zip(wanted.lines()).take_while(|(left, right)| left == right);
    bail!(
        "{FILE} differs from the table of settings at line {}: run `cargo xtask config-docs`",
        differs.count() + 1
    )
}

fn page() -> String {
    let mut page = String::from(
        "# Configuration\n\n\
         <!-- Written by `cargo xtask config-docs` from crates/peerway-core/src/config/settings.rs. -->\n\n\
         Settings are environment variables, read when an endpoint is made; what its builder is told \
         comes first. A `PEERWAY_*` name is preferred to the other names of the same setting, and an \
         empty value counts as unset. A value that cannot be used is an error that names the variable, \
         the value and what is allowed. `peerway doctor --config` shows the values in force and where \
         each came from.\n\n\
         Times are a whole number and a unit (`50us`, `500ms`, `2s`, `1m`, `1h`); byte counts may end \
         in `K`, `M`, `G` or `T`, in powers of 1024.\n\n\
         ## Settings\n",
    );
    for setting in of_status(|status| status == Status::Used) {
        // Writing to a string cannot fail.
        let _ = write!(page, "\n### `{}`\n\n{}\n\n", setting.name, setting.doc);
        let _ = writeln!(page, "- Allowed: {}", setting.allowed());
        let default = match setting.default {
            "" => "unset".to_owned(),
            default => format!("`{default}`"),
        };
        let _ = writeln!(page, "- Default: {default}");
        if !setting.aliases.is_empty() {
            let _ = writeln!(page, "- Also read from: {}", code_list(setting.aliases));
        }
    }
    page.push_str(
        "\n## Kept for later\n\n\
         Known names of transports and features that are not in this build yet. Setting one has no \
         effect and is mentioned in a warning, except for those that libnccl reads itself.\n\n\
         | name | also | for | meaning |\n|---|---|---|---|\n",
    );
    for setting in of_status(|status| matches!(status, Status::Reserved(_))) {
        if let Status::Reserved(what) = setting.status {
            let aliases = code_list(setting.aliases);
            let _ = writeln!(page, "| `{}` | {aliases} | {what} | {} |", setting.name, setting.doc);
        }
    }
    page.push_str(
        "\n## Without effect here\n\n\
         Names that UCCL reads and Peerway has no use for. Setting one is answered with a warning.\n\n\
         | name | meaning | why not |\n|---|---|---|\n",
    );
    for setting in SETTINGS {
        if let Status::AnsweredWithWarning(why) = setting.status {
            let _ = writeln!(page, "| `{}` | {} | {why} |", setting.name, setting.doc);
        }
    }
    page
}

fn of_status(wanted: impl Fn(Status) -> bool) -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(move |setting| wanted(setting.status))
}

fn code_list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_on_the_page() {
        let page = page();
        for name in SETTINGS.iter().flat_map(Setting::names) {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
        assert!(page.ends_with("|\n") && !page.ends_with("\n\n"));
    }

    #[test]
    fn table_rows_keep_their_columns() {
        for line in page().lines().filter(|line| line.starts_with('|')) {
            assert!(matches!(line.matches('|').count(), 4 | 5), "{line}");
        }
    }

    #[test]
    fn a_changed_page_is_refused_and_writing_it_heals() {
        let root = std::env::temp_dir().join(format!("peerway-xtask-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        assert!(check(&root).unwrap_err().to_string().contains("cannot read"));
        write(&root).unwrap();
        check(&root).unwrap();
        fs::write(root.join(FILE), page().replace("# Configuration", "# Else")).unwrap();
        assert!(check(&root).unwrap_err().to_string().contains("at line 1"));
        fs::remove_dir_all(&root).unwrap();
    }
}
