//! The tools that tests need besides Rust. This module finds them and installs missing ones if
//! possible.

use std::env;
use std::process::Command;

use anyhow::{Context, bail};

use crate::lock;

/// A program, or a file by its full path, and its Debian package.
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
    pub(crate) why: &'static str,
}

const TOOLS: &[Tool] = &[
    Tool { program: "cc", package: "gcc", why: "linking" },
    Tool { program: "g++", package: "g++", why: "the header for kernels" },
    Tool { program: "unshare", package: "util-linux", why: "namespace tests" },
    Tool { program: "python3", package: PYTHON_VENV, why: "the Python package" },
    Tool { program: "ip", package: "iproute2", why: "network namespace tests" },
    Tool {
        program: VERBS_HEADER,
        package: "libibverbs-dev",
        why: "the layouts of verbs structures",
    },
];

const PYTHON_VENV: &str = "python3-venv";
const VERBS_HEADER: &str = "/usr/include/infiniband/efadv.h";

/// Ensures that every tool is available.
pub(crate) fn run() -> anyhow::Result<()> {
    let missing: Vec<&Tool> = TOOLS.iter().filter(|tool| !is_there(tool)).collect();
    if missing.is_empty() {
        let found: Vec<&str> = TOOLS.iter().map(|tool| tool.program).collect();
        println!("found: {}", found.join(", "));
        return Ok(());
    }
    install(&missing)
}

/// Whether a tool is available. Python also needs the module that creates environments, which
/// Debian has in a separate package.
fn is_there(tool: &Tool) -> bool {
    let makes_environments = || {
        let import = Command::new(tool.program).args(["-c", "import ensurepip"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    on_path(tool.program) && (tool.package != PYTHON_VENV || makes_environments())
}

/// Ensures that a tool of a single part is available.
pub(crate) fn have(tool: &Tool) -> anyhow::Result<()> {
    if on_path(tool.program) { Ok(()) } else { install(&[tool]) }
}

/// The lock for package installations, because apt allows one at a time.
pub(crate) const INSTALLING: &str = "installing";

fn install(missing: &[&Tool]) -> anyhow::Result<()> {
    let _installing = lock::hold(INSTALLING)?;
    for tool in missing {
        println!("missing: {} (package {}), for {}", tool.program, tool.package, tool.why);
    }
    let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    if !is_root() || !on_path("apt-get") {
        bail!("install the packages {} and run this command again", packages.join(" "));
    }
    println!("installing {}", packages.join(" "));
    apt_get(&["update"])?;
    apt_get(&[&["install", "--yes", "--no-install-recommends"], packages.as_slice()].concat())
}

fn apt_get(arguments: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .context("cannot start apt-get")?;
    if !status.success() {
        bail!("`apt-get {}` failed ({status})", arguments.join(" "));
    }
    Ok(())
}

/// Whether a program is on the search path, or a file exists at its full path.
fn on_path(program: &str) -> bool {
    let paths = env::var_os("PATH").unwrap_or_default();
    // Administration programs are not on every user's path, but can still be run.
    env::split_paths(&paths)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        // A full path replaces the directory it is joined to.
        .any(|dir| dir.join(program).is_file())
}

/// Whether this process may install packages: the effective user is 0.
fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    uids.and_then(|uids| uids.split_whitespace().nth(1)) == Some("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_or_not() {
        assert!(on_path("sh"));
        assert!(!on_path("no-such-program-anywhere"));
        assert!(on_path("/proc/self/status"));
        assert!(!on_path("/proc/self/no-such-file"));
    }
}
