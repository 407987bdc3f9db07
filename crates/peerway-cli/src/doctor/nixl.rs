//! NIXL: where it is installed, and whether Peerway's backend is installed in it.

use std::path::Path;

use serde_json::json;

use super::report::{Row, Section};
use crate::nixl::{self, Found, State};

/// The names that the backend can be installed under.
const NAMES: [&str; 2] = ["PEERWAY", "UCCL"];

/// The section about the NIXL installations that `python3` finds.
pub(super) fn section(_root: &Path) -> Section {
    let mut section = Section::new("nixl", "NIXL (as python3 finds it)");
    match nixl::look("python3") {
        Ok(found) if found.is_empty() => {
            section.push(Row::absent("nixl", "not installed"));
        }
        Ok(found) => found.iter().for_each(|nixl| section.push(row(nixl))),
        Err(error) => section.push(Row::absent("nixl", format!("cannot look for it: {error:#}"))),
    }
    section
}

fn row(nixl: &Found) -> Row {
    let has = |name: &&str| nixl.state(name).is_ok_and(|state| state == State::Ours);
    let under: Vec<&str> = NAMES.into_iter().filter(has).collect();
    let data = json!({
        "version": nixl.version,
        "plugins": nixl.plugins,
        "backends": nixl.all(),
        "ours": under,
        "tested": nixl.is_tested(),
    });
    let row = if under.is_empty() {
        Row::absent(nixl.shown(), "Peerway's backend is not installed")
            .note("install it with peerway nixl-install")
    } else if nixl.is_tested() {
        Row::ok(nixl.shown(), format!("has Peerway's backend as {}", under.join(" and ")))
    } else {
        Row::attention(nixl.shown(), format!("has Peerway's backend as {}", under.join(" and ")))
            .note("the backend is not tested with this NIXL version")
    };
    row.data(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nixl_without_our_backend_says_what_to_do() {
        let mut section = Section::new("nixl", "NIXL");
        let plugins = std::env::temp_dir().join("no-such-directory-of-plugins");
        section.push(row(&Found { package: "nixl_cu12".into(), version: "1.5.1".into(), plugins }));
        let text = section.to_string();
        assert!(
            text.contains("nixl_cu12 1.5.1") && text.contains("peerway nixl-install"),
            "{text}"
        );
    }
}
