//! `peerway nixl-install`: installs the backend into NIXL's plugin directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;

use super::find::{self, Found, State};
use crate::file_set::FileSet;
use crate::output::print;

const FILE: &str = "libplugin_PEERWAY.so";

/// Where to install the backend, and under which names.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cargo build --release -p peerway-nixl          build the plugin next to this program
  peerway nixl-install                           install into the NIXL that python3 finds
  peerway nixl-install --python venv/bin/python  install into the NIXL of a virtual environment
  peerway nixl-install --name PEERWAY --name UCCL
                                                 install also in place of NIXL's UCCL backend
  peerway nixl-install --remove                  remove the backend

A program then selects the backend by name: nixl_agent_config(backends=[\"PEERWAY\"]).
The command does not touch NIXL's own plugins or any other file of the wheel. If it cannot write or
remove one file, it leaves all files as they were.")]
pub(crate) struct InstallArgs {
    /// Python interpreter whose NIXL gets the backend.
    #[arg(long, value_name = "PROGRAM", default_value = "python3", conflicts_with = "into")]
    python: String,
    /// Plugin directory to use instead of --python: the value of NIXL_PLUGIN_DIR, or the plugin
    /// directory of a NIXL built from source.
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
    /// Name of the backend in NIXL. May be given more than once.
    #[arg(long, value_name = "NAME", value_parser = ["PEERWAY", "UCCL"], default_value = "PEERWAY")]
    name: Vec<String>,
    /// Plugin file, if it is not next to this program.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Remove the backend.
    #[arg(long, conflicts_with = "plugin")]
    remove: bool,
}

/// Installs or removes the backend, and prints the result.
pub(crate) fn run(args: &InstallArgs) -> anyhow::Result<()> {
    let lines = install(args)?;
    print(lines.join("\n") + "\n")
}

/// Installs or removes the backend under all names, or changes nothing. Returns lines that describe
/// the result.
fn install(args: &InstallArgs) -> anyhow::Result<Vec<String>> {
    let found = match &args.into {
        Some(plugins) => {
            ensure!(plugins.is_dir(), "{} is not a directory", plugins.display());
            let package = format!("NIXL at {}", plugins.display());
            vec![Found { package, version: String::new(), plugins: plugins.clone() }]
        }
        None => find::look(&args.python)?,
    };
    if found.is_empty() {
        bail!(
            "{} finds no NIXL: install it (pip install nixl-cu12 or nixl-cu13), or use --python to \
             name the interpreter that has it",
            args.python
        );
    }
    let plugin = if args.remove { None } else { Some(plugin(args.plugin.as_deref())?) };
    let names: BTreeSet<&str> = args.name.iter().map(String::as_str).collect();
    let mut files = FileSet::default();
    let mut done = Vec::new();
    for nixl in &found {
        ensure!(
            nixl.plugins.is_dir(),
            "{} has no plugin directory at {}",
            nixl.shown(),
            nixl.plugins.display()
        );
        for name in &names {
            done.push(match &plugin {
                Some(plugin) => put(&mut files, nixl, name, plugin)?,
                None => remove(&mut files, nixl, name)?,
            });
        }
    }
    // No file has changed so far. `commit` changes all files or none.
    files.commit()?;
    let mut lines = Vec::new();
    for (nixl, done) in found.iter().zip(done.chunks(names.len())) {
        let shown = nixl.shown();
        lines.extend(done.iter().map(|done| format!("{shown}: {done}")));
        if plugin.is_some() && args.into.is_none() && !nixl.is_tested() {
            lines.push(format!(
                "{shown}: the backend is tested with NIXL {} only; it logs an error if this version \
                 is incompatible",
                find::tested()
            ));
        }
        lines.push(format!("{shown}: installed plugins: {}", nixl.all().join(", ")));
    }
    Ok(lines)
}

/// The plugin file: `given`, or the file next to this program.
fn plugin(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let file = match given {
        Some(file) => file.to_owned(),
        None => {
            let program =
                std::env::current_exe().context("cannot find the path of this program")?;
            program.with_file_name(FILE)
        }
    };
    if !file.is_file() {
        bail!(
            "no plugin at {}: build it with `cargo build --release -p peerway-nixl`, or name it with \
             --plugin",
            file.display()
        );
    }
    ensure!(find::is_ours(&file)?, "{} is not Peerway's plugin", file.display());
    Ok(file)
}

fn put(files: &mut FileSet, nixl: &Found, name: &str, plugin: &Path) -> anyhow::Result<String> {
    let file = nixl.file(name);
    let done = match nixl.state(name)? {
        State::Absent => "installed",
        State::Ours => "replaced",
        State::Others => bail!(
            "{} is another plugin of that name: remove it first to install Peerway's plugin in its \
             place",
            file.display()
        ),
    };
    files.add_copy(plugin, &file)?;
    Ok(format!("backend {name} {done} at {}", file.display()))
}

fn remove(files: &mut FileSet, nixl: &Found, name: &str) -> anyhow::Result<String> {
    let file = nixl.file(name);
    match nixl.state(name)? {
        State::Absent => Ok(format!("backend {name} was not installed")),
        State::Others => bail!("{} is not Peerway's plugin: not removed", file.display()),
        State::Ours => {
            files.remove(&file);
            Ok(format!("backend {name} removed from {}", nixl.plugins.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A plugin directory that contains one plugin of NIXL.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let place = std::env::temp_dir().join(format!("peerway-{name}-{}", std::process::id()));
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join("libplugin_UCX.so"), "theirs").unwrap();
            Self(place)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let file = self.0.join(name);
            fs::write(&file, text).unwrap();
            file
        }

        fn args(&self, remove: bool, plugin: Option<PathBuf>, name: &str) -> InstallArgs {
            let into = Some(self.0.clone());
            InstallArgs { python: String::new(), into, name: vec![name.into()], plugin, remove }
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn put_replaced_and_removed_beside_what_is_there() {
        let place = Place::new("nixl-install");
        let ours = place.write("ours", "before [PEERWAY] agent ' after");
        for _ in 0..2 {
            install(&place.args(false, Some(ours.clone()), "UCCL")).unwrap();
        }
        let copied = fs::read_to_string(place.0.join("libplugin_UCCL.so")).unwrap();
        assert!(copied.contains("[PEERWAY] agent"));
        install(&place.args(true, None, "UCCL")).unwrap();
        install(&place.args(true, None, "UCCL")).unwrap();
        assert!(!place.0.join("libplugin_UCCL.so").exists());
        assert_eq!(fs::read_to_string(place.0.join("libplugin_UCX.so")).unwrap(), "theirs");
    }

    #[test]
    fn a_name_that_is_taken_leaves_the_others_as_they_were() {
        let place = Place::new("nixl-whole");
        let ours = place.write("ours", "[PEERWAY] agent ' new");
        place.write("libplugin_PEERWAY.so", "[PEERWAY] agent ' old");
        place.write("libplugin_UCCL.so", "NIXL's own");
        let all = || {
            let entries = fs::read_dir(&place.0).unwrap().map(|entry| entry.unwrap().path());
            let texts = entries.map(|file| (fs::read_to_string(&file).unwrap(), file));
            texts.collect::<BTreeSet<_>>()
        };
        let before = all();
        let mut args = place.args(false, Some(ours), "PEERWAY");
        args.name.push("UCCL".into());
        install(&args).unwrap_err();
        assert_eq!(all(), before);
        args.remove = true;
        install(&args).unwrap_err();
        assert_eq!(all(), before);
    }

    #[test]
    fn what_is_not_ours_stays() {
        let place = Place::new("nixl-keep");
        let ours = place.write("ours", "[PEERWAY] agent '");
        let theirs = place.write("libplugin_UCCL.so", "NIXL's own");
        let error = install(&place.args(false, Some(ours), "UCCL")).unwrap_err();
        assert!(error.to_string().contains("another plugin of that name"), "{error}");
        let error = install(&place.args(true, None, "UCCL")).unwrap_err();
        assert!(error.to_string().contains("is not Peerway's"), "{error}");
        let error = install(&place.args(false, Some(theirs), "PEERWAY")).unwrap_err();
        assert!(error.to_string().contains("is not Peerway's plugin"), "{error}");
    }

    #[test]
    fn a_plugin_that_was_not_built_says_how() {
        let place = Place::new("nixl-missing");
        let missing = place.0.join("missing.so");
        let error = install(&place.args(false, Some(missing), "PEERWAY")).unwrap_err();
        assert!(error.to_string().contains("cargo build --release -p peerway-nixl"), "{error}");
    }
}
