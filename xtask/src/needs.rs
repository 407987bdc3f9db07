//! Tests that need something that not every machine has.
//!
//! Such tests are `#[ignore]`d and stand in a module called `needs_<what>`, beside a test `probe` that passes where
//! it is there. `cargo test` calls them ignored, and says why. Here each probe is run first: where it passes the tests
//! of its module are run, and where it fails they are reported as ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::failures;
use crate::programs::Programs;
use crate::python::output;
use crate::steps;

/// What `cargo xtask test` itself provides: tests that need it must run.
const PROVIDED: &[&str] = &["needs_cuda_header", "needs_nvrtc", "needs_rdma_headers"];

/// Runs the tests of all programs that need something that is here.
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
        Some(what) => bail!("no program has tests of {what}"),
        None => Ok(()),
    }
}

/// Modules of tests that need something, by their whole names, and their tests without probes.
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

/// Whether what a module needs is here, or why not.
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

/// A program of tests.
pub(crate) struct Program {
    pub(crate) file: PathBuf,
    /// Of its package, where cargo runs it.
    pub(crate) directory: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_by_the_module_that_they_stand_in() {
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
