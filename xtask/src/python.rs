//! The Python package, installed into a virtual environment, and its tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::{lock, steps};

/// The libraries that the extension may need. Any Linux with Python has them.
const ALLOWED: &[&str] =
    &["linux-vdso", "libc.so", "libm.so", "libgcc_s.so", "libpthread.so", "ld-linux"];

/// The directory that the package is installed into.
const ENVIRONMENT: &str = "python";

/// Tests of GPU memory, which also run on the library in `PEERWAY_CUDA_SO`.
const GPU_TESTS: &[&str] =
    &["test_gpu.py", "test_driven.py", "test_no_gpu.py", "uccl/test_uccl_gpu.py"];

/// Builds, installs, checks and tests the package. `fake` is the fake CUDA library.
pub(crate) fn run(workspace: &Path, target: &Path, fake: &Path) -> anyhow::Result<()> {
    let environment = target.join(ENVIRONMENT);
    let python = make(workspace, target)?;
    let code = ["python", "compat", "plugins"];
    step(&python, workspace, &[&["-m", "ruff", "check", "--quiet"], &code[..]].concat())?;
    step(
        &python,
        workspace,
        &[&["-m", "ruff", "format", "--check", "--quiet"], &code[..]].concat(),
    )?;
    // Outside of the sources, so that Python imports the installed package.
    let elsewhere = environment.as_path();
    step(&python, elsewhere, &["-c", "import peerway, uccl.p2p"])?;
    check_libraries(&python, elsewhere)?;
    let tests = workspace.join("python/tests");
    let root = workspace.display().to_string();
    let pytest = [&PYTEST[..], &["--durations=5", "--rootdir", &root]].concat();
    let all = tests.display().to_string();
    step(&python, elsewhere, &[&pytest[..], &[&all]].concat())?;
    // The tests with fake GPUs run separately. The tests above check the behaviour without GPUs.
    let of_gpus: Vec<_> = GPU_TESTS.iter().map(|t| tests.join(t).display().to_string()).collect();
    let of_gpus: Vec<_> = of_gpus.iter().map(String::as_str).collect();
    let fake = fake.display().to_string();
    let variables = [("PEERWAY_CUDA_SO", fake.as_str())];
    step_with(&variables, &python, elsewhere, &[&pytest[..], &of_gpus].concat())
}

/// Installs the current package into the test environment, as users would.
fn make(workspace: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let python = environment(workspace, target)?;
    let anew = ["--force-reinstall", "--no-deps", ".", "./compat/uccl"];
    step(&python, workspace, &[&PIP_INSTALL[..], &anew].concat())?;
    Ok(python)
}

/// The interpreter of the test environment with some build of the package. Installs the package if
/// it is missing.
pub(crate) fn have(workspace: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let python = environment(workspace, target)?;
    // Outside of a directory with the same name.
    let import = ["-c", "import peerway"];
    let there = output(Command::new(&python).args(import).current_dir(target)).is_ok();
    if there { Ok(python) } else { make(workspace, target) }
}

/// Three processes at once, because tests mostly wait.
pub(crate) const PYTEST: [&str; 5] = ["-m", "pytest", "-q", "--numprocesses=3", "--dist=worksteal"];

pub(crate) const PIP_INSTALL: [&str; 5] =
    ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];

/// The lock for the creation of the environment.
const MAKING: &str = "environment";

/// An interpreter with the packages that the tests use. Creates the environment if it is missing or
/// its packages differ.
pub(crate) fn environment(workspace: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let environment = target.join(ENVIRONMENT);
    let python = environment.join("bin/python");
    let _making = lock::hold(MAKING)?;
    let system = Path::new("python3");
    let used = output(Command::new(system).args(["-c", USED_BY_TESTS]).current_dir(workspace))?;
    let stamp = environment.join(STAMP);
    if fs::read_to_string(&stamp).is_ok_and(|there| there == used) {
        return Ok(python);
    }
    let shown = environment.display().to_string();
    step(system, workspace, &["-m", "venv", "--clear", &shown])?;
    let packages: Vec<&str> = used.lines().next().unwrap_or("").split_whitespace().collect();
    step(&python, workspace, &[&PIP_INSTALL[..], &packages].concat())?;
    fs::write(&stamp, used).with_context(|| format!("cannot write {stamp:?}"))?;
    Ok(python)
}

/// Prints the test packages of `pyproject.toml` and the Python version.
const USED_BY_TESTS: &str = "import sys, tomllib; \
    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['test']); \
    print(sys.executable, sys.version)";
/// A file with the contents of an environment.
const STAMP: &str = "packages.txt";

pub(crate) fn step(program: &Path, directory: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    step_with(&[], program, directory, arguments)
}

pub(crate) fn step_with(
    variables: &[(&str, &str)],
    program: &Path,
    directory: &Path,
    arguments: &[&str],
) -> anyhow::Result<()> {
    let shown = format!("{} {}", program.display(), arguments.join(" "));
    println!("$ {shown}");
    let mut command = Command::new(program);
    command.args(arguments).envs(variables.iter().copied()).current_dir(directory);
    steps::run(&mut command, shown.trim_end()).map(drop)
}

/// Checks that the extension loads on a machine without CUDA, RDMA and Rust.
fn check_libraries(python: &Path, directory: &Path) -> anyhow::Result<()> {
    let find = "import peerway._native as native; print(native.__file__)";
    let found = output(Command::new(python).args(["-c", find]).current_dir(directory))?;
    let needed = output(Command::new("ldd").arg(found.trim()))?;
    for line in needed.lines() {
        println!("{}", line.trim());
        if !ALLOWED.iter().any(|name| line.contains(name)) {
            bail!("the extension needs a library that not every Linux has: {}", line.trim());
        }
    }
    Ok(())
}

pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
