//! Finds NIXL: the wheels that a Python interpreter can import, and the plugins in their plugin
//! directories.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

/// The packages that contain NIXL's library, one per CUDA version.
const PACKAGES: &[&str] = &["nixl_cu12", "nixl_cu13"];

/// The first and the last NIXL version that the plugin is tested with.
const TESTED: [(u32, u32); 2] = [(1, 3), (1, 5)];

/// Bytes that occur in Peerway's plugin and in no other plugin.
const OURS: &[u8] = b"[PEERWAY] agent '";

/// Looks for the packages without importing them. An import would load NIXL and its dependencies.
const SCRIPT: &str = "\
import importlib.metadata, importlib.util, json, os, sys
found = []
for package in sys.argv[1:]:
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin:
        site = os.path.dirname(os.path.dirname(spec.origin))
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = ''
        plugins = os.path.join(site, f'.{package}.mesonpy.libs', 'plugins')
        found.append({'package': package, 'version': version, 'plugins': plugins})
print(json.dumps(found))
";

/// An installation of NIXL.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub(crate) struct Found {
    /// The package's name.
    pub(crate) package: String,
    /// Its version. Empty if unknown.
    pub(crate) version: String,
    /// Its plugin directory.
    pub(crate) plugins: PathBuf,
}

/// Which plugin is installed under a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// No plugin.
    Absent,
    /// Peerway's plugin, of any version.
    Ours,
    /// A plugin of another project.
    Others,
}

impl Found {
    /// The path of the plugin with that name.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.plugins.join(format!("libplugin_{name}.so"))
    }

    /// Which plugin is installed under that name.
    pub(crate) fn state(&self, name: &str) -> anyhow::Result<State> {
        let file = self.file(name);
        if !file.exists() {
            return Ok(State::Absent);
        }
        Ok(if is_ours(&file)? { State::Ours } else { State::Others })
    }

    /// The names of all installed plugins, sorted.
    pub(crate) fn all(&self) -> Vec<String> {
        let names =
            fs::read_dir(&self.plugins).into_iter().flatten().flatten().filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some(name.strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned())
            });
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Whether Peerway's plugin is tested with this NIXL version.
    pub(crate) fn is_tested(&self) -> bool {
        let mut numbers = self.version.split('.').map_while(|part| part.parse().ok());
        let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else { return false };
        (TESTED[0]..=TESTED[1]).contains(&(major, minor))
    }

    /// The package and its version, for messages.
    pub(crate) fn shown(&self) -> String {
        match self.version.as_str() {
            "" => self.package.clone(),
            version => format!("{} {version}", self.package),
        }
    }
}

/// The range of tested NIXL versions, for messages.
pub(crate) fn tested() -> String {
    let [(major, minor), (last_major, last_minor)] = TESTED;
    format!("{major}.{minor} to {last_major}.{last_minor}")
}

/// Whether a file is Peerway's plugin.
pub(super) fn is_ours(file: &Path) -> anyhow::Result<bool> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(bytes.windows(OURS.len()).any(|window| window == OURS))
}

/// Every NIXL installation that a Python interpreter finds.
pub(crate) fn look(python: &str) -> anyhow::Result<Vec<Found>> {
    let output = Command::new(python)
        .args(["-c", SCRIPT])
        .args(PACKAGES)
        .output()
        .with_context(|| format!("cannot start {python}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("no output on standard error");
        bail!("{python} failed to look for NIXL: {last}");
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{python} gave an invalid answer to the search for NIXL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(version: &str, plugins: &Path) -> Found {
        Found { package: "nixl_cu12".into(), version: version.into(), plugins: plugins.into() }
    }

    #[test]
    fn versions_are_tested_or_not() {
        let tested = |version| found(version, Path::new("")).is_tested();
        assert!(tested("1.3.0") && tested("1.4.1") && tested("1.5"));
        assert!(
            !tested("1.2.9") && !tested("1.6.0") && !tested("2.3") && !tested("") && !tested("x")
        );
    }

    #[test]
    fn an_interpreter_that_is_none_is_named() {
        let error = look("no-such-python").unwrap_err();
        assert!(error.to_string().contains("no-such-python"));
    }
}
