//! The vendor libraries: whether each is found, and why not.

use std::path::Path;

use peerway_sys::{Library, probe};

use super::report::{Row, Section};

/// The section about vendor libraries. The loader finds them, so `root` has no effect.
pub(super) fn section(_root: &Path) -> Section {
    let mut section =
        Section::new("libraries", "Vendor libraries (opened at run time; none is required)");
    for library in Library::ALL {
        section.push(row(library));
    }
    section
}

/// The row of one library.
pub(super) fn row(library: Library) -> Row {
    match probe(library) {
        Ok(found) => {
            let version = found.version.clone().unwrap_or_else(|| "found".to_owned());
            let mut note = match &found.path {
                Some(path) => path.display().to_string(),
                None => found.soname.clone(),
            };
            for tried in &found.passed_over {
                note.push_str(&format!("; rejected {tried}"));
            }
            let data = serde_json::json!({ "path": found.path, "version": found.version });
            let row = if found.passed_over.is_empty() {
                Row::ok(library.name(), version)
            } else {
                Row::attention(library.name(), version)
            };
            row.note(note).data(data)
        }
        Err(error) => {
            let missing = error.tried.iter().all(|tried| tried.reason.contains("No such file"));
            // The loader's full message matters only if a file exists but cannot be used.
            let (value, places): (_, Vec<String>) = if missing {
                let names = error.tried.iter().map(|tried| tried.name.clone());
                ("not installed", names.collect())
            } else {
                ("not usable", error.tried.iter().map(ToString::to_string).collect())
            };
            Row::absent(library.name(), value)
                .note(format!("needed for {}; tried {}", library.purpose(), places.join(", ")))
                .data(serde_json::json!({ "error": error.to_string() }))
        }
    }
}

#[cfg(test)]
mod tests {
    use peerway_core::config::SETTINGS;

    use super::*;

    #[test]
    fn every_library_has_a_row() {
        assert_eq!(section(Path::new("/")).rows().len(), Library::ALL.len());
    }

    #[test]
    fn the_configuration_table_knows_every_override() {
        for library in Library::ALL {
            let variables = library.override_variables();
            let setting = SETTINGS.iter().find(|setting| setting.name == variables[0]);
            let names: Vec<&str> = setting.expect("in the table").names().collect();
            assert_eq!(names, variables);
            let doc = setting.expect("in the table").doc;
            assert!(doc.contains(library.sonames()[0]), "{doc}");
        }
    }
}
