//! The test programs of `cargo test --workspace`, for runs elsewhere or with other variables.
//!
//! One command builds all of them, in the same way as `cargo test --workspace`. Selecting one
//! package or one test would change the features of the dependencies and recompile all of them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::needs::Program;
use crate::steps;

/// Cargo's messages about the programs, one JSON object per line.
pub(crate) struct Programs(String);

impl Programs {
    /// Builds the programs that are missing or outdated.
    pub(crate) fn build(workspace: &Path) -> anyhow::Result<Self> {
        Self::build_with(workspace, "cargo test --workspace --no-run", &[])
    }

    /// Builds other programs with this command and these variables.
    pub(crate) fn build_with(
        workspace: &Path,
        shown: &str,
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        println!("$ {shown}");
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(shown.split(' ').skip(1)).arg("--message-format=json-render-diagnostics");
        command.envs(variables.iter().copied()).current_dir(workspace);
        steps::capture(&mut command, shown).map(Self)
    }

    /// The test program of a package's target.
    pub(crate) fn find(&self, package: &str, target: &str) -> anyhow::Result<PathBuf> {
        let mut found = self
            .named()
            .filter(|(name, program)| name == target && program.directory.ends_with(package));
        let (_, program) = found.next().with_context(|| {
            format!("cargo built no test program for the target {target} of {package}")
        })?;
        Ok(program.file)
    }

    /// All test programs.
    pub(crate) fn all(&self) -> impl Iterator<Item = Program> {
        self.named().map(|(_, program)| program)
    }

    /// All test programs with the names of their targets.
    fn named(&self) -> impl Iterator<Item = (String, Program)> {
        self.0.lines().filter_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            let manifest = Path::new(message["manifest_path"].as_str()?);
            let file =
                message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
            let program = Program { file: file.into(), directory: manifest.parent()?.to_owned() };
            Some((message["target"]["name"].as_str()?.to_owned(), program))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_among_cargos_messages() {
        let message = |package: &str, name: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/{package}/Cargo.toml","target":{{"name":"{name}"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let messages = [
            message("x", "device", false, "null"),
            message("x", "device", false, r#""/t/bin""#),
            message("x", "other", true, r#""/t/other-1""#),
            message("y", "device", true, r#""/t/device-1""#),
            "not JSON".to_owned(),
            r#"{"reason":"build-script-executed","package_id":"x"}"#.to_owned(),
            message("x", "device", true, r#""/t/device-2""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let programs = Programs(messages.join("\n"));
        assert_eq!(programs.find("x", "device").unwrap(), Path::new("/t/device-2"));
        assert_eq!(programs.find("y", "device").unwrap(), Path::new("/t/device-1"));
        assert!(programs.find("x", "none").is_err());
        let all: Vec<_> = programs.all().map(|program| program.file).collect();
        assert_eq!(all, ["/t/other-1", "/t/device-1", "/t/device-2"].map(PathBuf::from));
        assert!(Programs(String::new()).find("x", "device").is_err());
    }
}
