//! `include/peerway.h`, out of the Rust files whose functions it declares.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use cbindgen::{
    Builder, Config, DocumentationStyle, EnumConfig, ExportConfig, FunctionConfig, Language,
    Layout, RenameRule, SortKey, Style,
};

pub(crate) const FILE: &str = "include/peerway.h";
const SOURCES: &str = "crates/peerway-c/src";

/// The files in the order in which their calls are declared.
const ORDER: &[&str] = &[
    "version",
    "status",
    "entry",
    "arguments",
    "endpoint",
    "peer",
    "region",
    "quarantine",
    "remote",
    "batch",
    "transfer",
    "completions",
    "stream",
    "staged",
    "notification",
    "proxy",
];

const INTRODUCTION: &str = "\
// Peerway for C and C++: bytes between the memories of two processes, by one-sided reads and writes.
//
// Written by `cargo xtask c-header` from crates/peerway-c/src; changes belong there.
//
// - Calls answer with a peerway_status; peerway_last_error() is a sentence about the last one of the thread that failed. Nothing is
//   thrown and nothing ends the process: what should not happen inside is PEERWAY_STATUS_PANIC.
// - Handles (pointers to structs that have no members) are made by calls and freed by the calls that end in _free, in any order. They
//   are numbers and not addresses: one that was freed, or is of another kind, is PEERWAY_STATUS_BAD_HANDLE. Any thread may use any
//   handle, several at once too; one that is freed while another thread is in a call with it stays until that call returns.
// - Results go where the last arguments say; these must not be null unless it is said that they may. A handle that is not made is null.
// - Structs with a `size` grow in later versions. Set all of them to zero and `size` to sizeof the struct; zero means \"as usual\".
// - Times are in nanoseconds, PEERWAY_FOREVER among them.
// - Numbers that name one of several things are passed as uint32_t, and a number that names none is PEERWAY_STATUS_BAD_ARGUMENT.
// - After a fork the child's handles to endpoints and to what belongs to them are of no more use: calls say PEERWAY_STATUS_FORKED.
//
// What a caller owes: pointers lead to memory of the length that is given, which nobody else changes meanwhile, and texts end with a
// zero byte. Everything else is checked.
//
//   struct peerway_endpoint *endpoint;
//   if (peerway_endpoint_new(NULL, &endpoint) != PEERWAY_STATUS_OK) fprintf(stderr, \"%s\\n\", peerway_last_error());
";

/// Names that changed. The old ones stay.
const FORMER_NAMES: &str = "\
// Former names.
#define PEERWAY_STATUS_NOT_A_CARD PEERWAY_STATUS_NOT_PEER_INFO
";

/// Writes the header, or only compares it.
pub(crate) fn run(workspace: &Path, check: bool) -> anyhow::Result<()> {
    let wanted = text(workspace)?;
    let file = workspace.join(FILE);
    if !check {
        return fs::write(&file, wanted).with_context(|| format!("cannot write {FILE}"));
    }
    let found = fs::read_to_string(&file).with_context(|| format!("cannot read {FILE}"))?;
    if found != wanted {
        let same = found.lines().zip(wanted.lines()).take_while(|(left, right)| left == right);
        let line = same.count() + 1;
        bail!("{FILE} differs from {SOURCES} at line {line}: run `cargo xtask c-header`");
    }
    Ok(())
}

fn text(workspace: &Path) -> anyhow::Result<String> {
    let files = fs::read_dir(workspace.join(SOURCES)).context("cannot read the sources")?;
    for file in files {
        let file = file?.path();
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file:?}"))?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        if text.contains("no_mangle") && !ORDER.contains(&name.as_ref()) {
            bail!(
                "{name}.rs has calls and no place in the header: name it in xtask/src/c_header.rs"
            );
        }
    }
    let builder = ORDER.iter().fold(Builder::new().with_config(config()), |builder, name| {
        builder.with_src(workspace.join(SOURCES).join(name).with_extension("rs"))
    });
    let mut header = Vec::new();
    builder.generate().context("cbindgen cannot read the sources")?.write(&mut header);
    Ok(String::from_utf8(header)?)
}

fn config() -> Config {
    let strings = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
    Config {
        language: Language::C,
        style: Style::Both,
        header: Some(INTRODUCTION.into()),
        include_guard: Some("PEERWAY_H".into()),
        trailer: Some(FORMER_NAMES.into()),
        no_includes: true,
        sys_includes: strings(&["stdbool.h", "stddef.h", "stdint.h"]),
        cpp_compat: true,
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C99,
        line_length: 120,
        tab_width: 4,
        sort_by: SortKey::None,
        // Those that calls take as numbers are in no declaration.
        export: ExportConfig {
            include: strings(&[
                "peerway_access",
                "peerway_class",
                "peerway_copier",
                "peerway_direction",
                "peerway_fence",
                "peerway_path",
            ]),
            ..Default::default()
        },
        function: FunctionConfig {
            args: Layout::Auto,
            sort_by: Some(SortKey::None),
            ..Default::default()
        },
        enumeration: EnumConfig {
            rename_variants: RenameRule::QualifiedScreamingSnakeCase,
            ..Default::default()
        },
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_what_the_sources_say() {
        run(crate::workspace(), true).unwrap();
    }

    #[test]
    fn everything_public_is_in_the_header() {
        let header = text(crate::workspace()).unwrap();
        let mut found = 0;
        for name in ORDER {
            let file = crate::workspace().join(SOURCES).join(name).with_extension("rs");
            let source = fs::read_to_string(file).unwrap();
            for (before, after) in [
                ("extern \"C\" fn peerway_", "peerway_%("),
                ("pub enum peerway_", "typedef enum peerway_% {"),
                ("pub struct peerway_", "typedef struct peerway_% "),
                ("pub const PEERWAY_", "#define PEERWAY_% "),
            ] {
                for named in source.split(before).skip(1) {
                    let end = named.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap();
                    let wanted = after.replace('%', &named[..end]);
                    assert!(header.contains(&wanted), "{wanted}");
                    found += 1;
                }
            }
        }
        assert!(found > 100);
    }
}
