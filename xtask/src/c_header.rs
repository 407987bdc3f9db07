//! Generates `include/peerway.h` from the Rust files whose functions it declares.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use cbindgen::{
    Builder, Config, DocumentationStyle, EnumConfig, ExportConfig, FunctionConfig, Language,
    Layout, RenameRule, SortKey, Style,
};

pub(crate) const FILE: &str = "include/peerway.h";
const SOURCES: &str = "crates/peerway-c/src";

/// The source files, in the order of their declarations in the header.
const ORDER: &[&str] = &[
    "version",
    "status",
    "entry",
    "arguments",
    "endpoint",
    "peer",
    "region",
    "quarantine",
    "refusals",
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
// Peerway for C and C++: transfers between the memories of two processes, by one-sided reads and
// writes.
//
// `cargo xtask c-header` generates this file from crates/peerway-c/src; edit those files.
//
// - Calls return a peerway_status. peerway_last_error() describes the last failed call of the
//   thread. No call throws an exception or ends the process: an internal error is
//   PEERWAY_STATUS_PANIC.
// - Calls create handles (pointers to structs without members). The calls that end in _free free
//   them, in any order. Handles are numbers, not addresses: a freed handle or one of another kind
//   gives PEERWAY_STATUS_BAD_HANDLE. Any thread may use any handle, and several threads may use one
//   at once. A handle that is freed during a call of another thread stays until that call returns.
// - The last arguments receive the results. They must not be null unless the call allows it. If a
//   call creates no handle, it sets the handle to null.
// - Structs with a `size` grow in later versions. Set all bytes to zero and `size` to sizeof the
//   struct. Zero means the default.
// - Times are in nanoseconds, including PEERWAY_FOREVER.
// - Enumerations are passed as uint32_t. A number without a meaning gives
//   PEERWAY_STATUS_BAD_ARGUMENT.
// - After a fork, the child cannot use its handles to endpoints and to the objects that belong to
//   them: calls return PEERWAY_STATUS_FORKED.
//
// The caller guarantees that pointers lead to memory of the given length, that no other thread
// changes this memory during the call, and that texts end with a zero byte. The library checks
// everything else.
//
//     struct peerway_endpoint *endpoint;
//     if (peerway_endpoint_new(NULL, &endpoint) != PEERWAY_STATUS_OK) {
//         fprintf(stderr, \"%s\\n\", peerway_last_error());
//     }
";

/// Renamed identifiers. The old names stay available.
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
                "{name}.rs defines calls but is not in the header: add it to ORDER in \
                 xtask/src/c_header.rs"
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
        // Enumerations that calls take as numbers appear in no declaration.
        export: ExportConfig {
            include: strings(&[
                "peerway_access",
                "peerway_class",
                "peerway_copier",
                "peerway_direction",
                "peerway_fence",
                "peerway_operation",
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
    fn the_header_matches_the_sources() {
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
