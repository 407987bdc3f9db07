//! Tests with requirements that not every machine meets.
//!
//! Such tests are `#[ignore]`d and live in a module called `needs_<requirement>`. A test `probe` in
//! the same module passes if the machine meets the requirement. `cargo test` reports them as
//! ignored, with the reason. This module runs each probe first. If the probe passes, it runs the
//! tests of the module; otherwise it reports them as ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::failures;
use crate::programs::Programs;
use crate::python::output;
use crate::steps;

/// The requirements that `cargo xtask test` itself provides. Tests that need them must run.
const PROVIDED: &[&str] = &["needs_cuda_header", "needs_nvrtc", "needs_rdma_headers"];

/// Runs the tests of all programs whose requirements are met.
pub(crate) fn run(programs: &Programs, variables: &[(&str, String)]) -> anyhow::Result<()> {
    let mut found = BTreeSet::new();
    for program in programs.all() {
        let listed = output(Command::new(&program.file).args(["--list", "--ignored"]))?;
        for (module, tests) in modules(&listed) {
            let what = module.rsplit("::").next().unwrap_or(module);
            if let Err(why) = probe(&program.file, &program.directory, variables, module)? {
                if PROVIDED.contains(&what) {
                    bail!("{module}: {why}");
                }
                for test in &tests {
                    println!("test {test} ... ignored, {why}");
                }
                continue;
            }
            found.insert(what.to_owned());
            let filter = format!("{module}::");
            println!("$ {} --ignored {filter}", program.file.display());
            let mut command = command(&program.file, &program.directory, variables);
            command.args(["--ignored", &filter, "--skip", &format!("{module}::probe")]);
            steps::run(&mut command, &format!("{} {filter}", program.file.display()))?;
        }
    }
    match PROVIDED.iter().find(|what| !found.contains(**what)) {
        Some(what) => bail!("no test program has a module {what}"),
        None => Ok(()),
    }
}

/// The `needs_` modules by their full names, with their tests except probes.
fn modules(listed: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut modules: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for test in listed.lines().filter_map(|line| line.strip_suffix(": test")) {
        let Some((module, name)) = test.rsplit_once("::") else { continue };
        let is_needy = module.rsplit("::").next().is_some_and(|last| last.starts_with("needs_"));
        if is_needy && name != "probe" {
            modules.entry(module).or_default().push(test);
        }
    }
    modules
}

/// Runs the probe of a module. The inner error says why the requirement is not met.
fn probe(
    program: &Path,
    directory: &Path,
    variables: &[(&str, String)],
    module: &str,
) -> anyhow::Result<Result<(), String>> {
    let name = format!("{module}::probe");
    let ran = command(program, directory, variables)
        .args(["--ignored", "--exact", &name])
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    if ran.status.success() && said.contains(" 0 passed") {
        bail!("{} has no test {name}", program.display());
    }
    let why =
        || failures::first(&said).map_or_else(String::new, |failure| failure.why().to_owned());
    Ok(if ran.status.success() { Ok(()) } else { Err(why()) })
}

fn command(program: &Path, directory: &Path, variables: &[(&str, String)]) -> Command {
    let mut command = Command::new(program);
    command.envs(variables.iter().map(|(name, value)| (name, value))).current_dir(directory);
    command
}

/// A test program.
pub(crate) struct Program {
    pub(crate) file: PathBuf,
    /// The directory of its package, where cargo runs it.
    pub(crate) directory: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_by_their_module() {
        let listed = "\
os::vma::tests::needs_huge_pages::probe: test
os::vma::tests::needs_huge_pages::they_are_files: test
needs_ipv6::ipv6_works: test
needs_nothing: test
owner: test
verbs::needs_a_module::inner::test: test

5 tests, 0 benchmarks
";
        let found = modules(listed);
        let huge = "os::vma::tests::needs_huge_pages";
        let tests = BTreeMap::from([
            (huge, vec!["os::vma::tests::needs_huge_pages::they_are_files"]),
            ("needs_ipv6", vec!["needs_ipv6::ipv6_works"]),
        ]);
        assert_eq!(found, tests);
    }
}
