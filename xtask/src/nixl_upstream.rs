//! Runs NIXL's tests, and UCCL's benchmark of NIXL, on Peerway's plugin in a NIXL release. Small
//! changes are applied to copies of files that do not fit. It is an error if a text to replace is
//! missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::c_library::put;
use crate::python::{output, step, step_with};
use crate::setup::{self, Tool};
use crate::test::cargo;
use crate::uccl_library::nixl_headers;

/// Replacements for Abseil headers. They also show NIXL's log to the tests.
const STAND_INS: &str = "plugins/nixl/tests/upstream";

const GTEST: Tool = Tool {
    program: "/usr/include/gmock/gmock.h",
    package: "libgmock-dev",
    why: "NIXL's tests in C++",
};

/// Replaces NIXL's UCX backend in its tests.
const OURS_FOR_UCX: (&str, &str) = ("\"UCX\",", "\"PEERWAY\",");

/// Removes parameters that only the UCX backend has.
const WITHOUT_UCX: &[(&str, &str)] = &[
    OURS_FOR_UCX,
    ("EXPECT_EQ(ucx_err_handling_mode_peer, params[ucx_err_handling_mode_key]);", ""),
    ("params[\"num_workers\"] = std::to_string(num_workers);", ""),
    ("params[\"num_threads\"] = std::to_string(num_threads);", ""),
    ("params[\"split_batch_size\"] = \"0\";", ""),
];

/// A test asks whether UCX has calls for GPUs. Releases before 1.5 do not have this attribute.
const NOT_OF_ALL: (&str, &str) =
    ("bindings.HAVE_UCX_GPU_DEVICE_API", "getattr(bindings, \"HAVE_UCX_GPU_DEVICE_API\", False)");

/// The test lists memory twice if it creates an agent a second time. NIXL does not allow that for
/// any backend.
const LISTED_ONCE: &[(&str, &str)] = &[(
    "nixl::fillRegList(m_dlist, m_desc, m_data);",
    "m_dlist.clear(); nixl::fillRegList(m_dlist, m_desc, m_data);",
)];

/// Those tests provoke failures, which NIXL logs as errors.
const LOGGED: &str = "const LogIgnoreGuard expected(\"remote agent 'target' was disconnected\");";

/// The benchmark's check passes for zeros, inspects the wrong side of a read, and does not fail the
/// program.
const CHECKED: &[(&str, &str)] = &[
    (
        "if \"server\" in args.role:\n            for",
        "if (\"server\" in args.role) == (op == \"WRITE\"):\n            for",
    ),
    (
        "assert torch.mean(block) - 1 < 1e-8,",
        "assert bool((block == (1 if op == \"WRITE\" else 0)).all()),",
    ),
    (
        "print(f\"Error in agent pair {args.role}: {traceback.format_exc()}\")\n        return 0.0",
        "raise",
    ),
];

/// Bytes per transfer. Each size has its own two processes. Between two sizes the benchmark's
/// client may talk to a socket that the server is about to close, and both then wait forever.
const SIZES: &[&str] = &["256", "65536", "1048576", "104857600"];
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A NIXL checkout.
    #[arg(long, value_name = "DIR")]
    nixl: PathBuf,
    /// A UCCL checkout, for its benchmark of NIXL.
    #[arg(long, value_name = "DIR")]
    uccl: Option<PathBuf>,
    /// The NIXL release to download and test: the release of the checkout, or one with the same
    /// interface.
    #[arg(long, value_name = "VERSION", default_value = "1.4.1")]
    release: String,
    /// A Python with pip, numpy, torch and pytest, and with pyzmq for the benchmark.
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
}

/// Builds the plugin and runs all tests in turn.
pub(crate) fn run(workspace: &Path, target: &Path, args: &Args) -> anyhow::Result<()> {
    setup::have(&GTEST)?;
    cargo(&["build", "--release", "--package", "peerway-nixl"], &[])?;
    let place = target.join("nixl-upstream");
    // The tests search for the backends here.
    let plugins = place.join("src/plugins");
    let built = target.join("release/libplugin_PEERWAY.so");
    for (directory, name) in [("ucx", "PEERWAY"), ("uccl", "UCCL")] {
        let directory = plugins.join(directory);
        fs::create_dir_all(&directory).with_context(|| format!("cannot make {directory:?}"))?;
        put(&built, &directory.join(format!("libplugin_{name}.so")))?;
    }
    let judge = Judge { workspace, place: &place, args, wheel: fetch(&place, args)? };
    judge.in_python()?;
    judge.of_uccl()?;
    judge.of_ucx()?;
    match &args.uccl {
        Some(uccl) => judge.benchmark(uccl),
        None => Ok(()),
    }
}

/// NIXL's packages in a separate directory.
struct Wheel {
    packages: PathBuf,
    libraries: PathBuf,
}

/// Downloads the wheel for torch's CUDA version, because NIXL imports no other.
fn fetch(place: &Path, args: &Args) -> anyhow::Result<Wheel> {
    let find = "import torch; print((torch.version.cuda or '12').split('.')[0])";
    let cuda = output(Command::new(&args.python).args(["-c", find]))?;
    let cuda = cuda.trim();
    let packages = place.join(format!("wheel-{}-cu{cuda}", args.release));
    let libraries = packages.join(format!(".nixl_cu{cuda}.mesonpy.libs"));
    if !libraries.exists() {
        let wheels =
            ["nixl".into(), format!("nixl-cu{cuda}")].map(|w| format!("{w}=={}", args.release));
        let to = packages.display().to_string();
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", &to];
        step(&args.python, place, &[&pip[..], &[&wheels[0], &wheels[1]]].concat())?;
    }
    Ok(Wheel { packages, libraries })
}

struct Judge<'a> {
    workspace: &'a Path,
    place: &'a Path,
    args: &'a Args,
    wheel: Wheel,
}

impl Judge<'_> {
    fn plugins(&self, directory: &str) -> String {
        self.place.join("src/plugins").join(directory).display().to_string()
    }

    /// Runs the tests of NIXL's Python interface.
    fn in_python(&self) -> anyhow::Result<()> {
        let plugins = self.plugins("ucx");
        let packages = self.wheel.packages.display().to_string();
        let variables = [("NIXL_PLUGIN_DIR", &*plugins), ("PYTHONPATH", &*packages)];
        let theirs = self.args.nixl.join("test/python");
        let text = changed(&read(&theirs.join("test_nixl_api.py"))?, &[NOT_OF_ALL])?;
        let tests = self.copy("test_nixl_api.py", &text)?.display().to_string();
        self.copy("conftest.py", &read(&theirs.join("conftest.py"))?)?;
        let pytest =
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", "PEERWAY", &tests];
        step_with(&variables, &self.args.python, self.place, &pytest)
    }

    /// Runs the tests of the UCCL backend, including the disabled ones.
    fn of_uccl(&self) -> anyhow::Result<()> {
        let text = read(&self.args.nixl.join("test/gtest/plugins/uccl/uccl_test.cpp"))?;
        let copy = self.copy("uccl_test.cpp", &changed(&switched_on(&text)?, LISTED_ONCE)?)?;
        let program = self.compile("uccl_gtest", &[copy])?;
        step_with(&[("NIXL_PLUGIN_DIR", &self.plugins("uccl"))], &program, self.place, &[])
    }

    /// Runs the transfer and failure tests of the UCX backend.
    fn of_ucx(&self) -> anyhow::Result<()> {
        let gtest = self.args.nixl.join("test/gtest");
        let failures = changed(&read(&gtest.join("error_handling.cpp"))?, WITHOUT_UCX)?;
        let transfers = changed(&read(&gtest.join("test_transfer.cpp"))?, &[OURS_FOR_UCX])?;
        let copies = [
            self.copy("error_handling.cpp", &failures)?,
            self.copy("test_transfer.cpp", &transfers)?,
        ];
        let program = self.compile("gtest", &copies)?;
        step_with(&[("NIXL_PLUGIN_DIR", &self.plugins("ucx"))], &program, self.place, &[])
    }

    /// Runs UCCL's benchmark of its backend in both directions, with a corrected check.
    fn benchmark(&self, uccl: &Path) -> anyhow::Result<()> {
        let text = read(&uccl.join("p2p/benchmarks/benchmark_nixl.py"))?;
        let program = self.copy("benchmark_nixl.py", &changed(&text, CHECKED)?)?;
        for direction in ["write", "read"] {
            for size in SIZES {
                println!("$ benchmark_nixl.py --op-type {direction} --sizes {size}");
                let start = |role| {
                    Command::new(&self.args.python)
                        .arg(&program)
                        .args(["--role", role, "--remote-ip", "127.0.0.1", "--device", "cpu"])
                        .args(["--backend", "uccl", "--op-type", direction])
                        .args(["--sizes", size, "--iters", "10", "--num-kvblocks", "4"])
                        .env("NIXL_PLUGIN_DIR", self.plugins("uccl"))
                        .env("PYTHONPATH", &self.wheel.packages)
                        .spawn()
                        .with_context(|| format!("cannot start the benchmark's {role}"))
                };
                both(start("server")?, start("client")?)?;
            }
        }
        Ok(())
    }

    fn copy(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let file = self.place.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {file:?}"))?;
        Ok(file)
    }

    /// Compiles the sources with the common files of NIXL's tests and links them with the release.
    fn compile(&self, name: &str, sources: &[PathBuf]) -> anyhow::Result<PathBuf> {
        let program = self.place.join(name);
        let gtest = self.args.nixl.join("test/gtest");
        let ours = self.workspace.join(STAND_INS);
        let mut flags = vec!["-std=c++20".into(), "-O1".into(), "-pthread".into()];
        flags.push(format!("-DBUILD_DIR=\"{}\"", self.place.display()));
        flags.push(format!("-I{}", ours.display()));
        flags.extend(nixl_headers(self.workspace, &self.args.nixl.join("src")));
        flags.push(format!("-I{}", gtest.display()));
        flags.extend(sources.iter().map(|source| source.display().to_string()));
        flags.extend(
            ["main.cpp", "common.cpp"].map(|source| gtest.join(source).display().to_string()),
        );
        flags.push(ours.join("log_sinks.cpp").display().to_string());
        let libraries = self.wheel.libraries.display();
        flags.extend([format!("-L{libraries}"), format!("-Wl,-rpath,{libraries}")]);
        flags
            .extend(["-lnixl", "-lnixl_build", "-lserdes", "-lgtest", "-lgmock"].map(String::from));
        // The release brings its own libraries. Its log must use this program's fwrite().
        flags.push("-Wl,--allow-shlib-undefined,--export-dynamic-symbol=fwrite".into());
        flags.extend(["-o".into(), program.display().to_string()]);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        step(Path::new("g++"), self.place, &flags)?;
        Ok(program)
    }
}

/// Waits for both processes. If one fails or the time is over, kills the remaining ones.
fn both(mut server: Child, mut client: Child) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let ended = [server.try_wait()?, client.try_wait()?];
        if ended.iter().all(|status| status.is_some_and(|s| s.success())) {
            return Ok(());
        }
        if ended.iter().flatten().any(|status| !status.success()) || Instant::now() > until {
            for mut left in [server, client] {
                // The call fails if the process has already ended.
                let _ = left.kill();
                left.wait()?;
            }
            bail!("the benchmark's server and client did not both succeed: {ended:?}");
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {file:?}"))
}

/// Applies all replacements to the text.
fn changed(text: &str, changes: &[(&str, &str)]) -> anyhow::Result<String> {
    changes.iter().try_fold(text.to_owned(), |text, (from, to)| {
        ensure!(text.contains(from), "the text to replace was not found: {from}");
        Ok(text.replace(from, to))
    })
}

/// Enables the tests that are commented out at the end of the text. They expect failures and log
/// messages about them.
fn switched_on(text: &str) -> anyhow::Result<String> {
    let marked = "// TODO: Enable failure tests";
    let (before, after) = text.split_once(marked).context("the file has no disabled tests")?;
    let mut all = before.to_owned();
    for line in after.lines().skip(1) {
        let line = line.strip_prefix("// ").unwrap_or(line);
        all += line;
        all += if line.starts_with("TEST_F(") { LOGGED } else { "" };
        all += "\n";
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_text_is_an_error() {
        assert_eq!(changed("a b a", &[("a", "c"), ("b", "d")]).unwrap(), "c d c");
        assert!(changed("a b a", &[("a", "c"), ("a", "d")]).is_err());
    }

    #[test]
    fn tests_are_switched_on() {
        let text = "// kept\nTEST_F(A, B) {\n}\n// TODO: Enable failure tests later\n// TEST_F(A, C) {\n//     c();\n// }\n\n}\n";
        let expected =
            format!("// kept\nTEST_F(A, B) {{\n}}\nTEST_F(A, C) {{{LOGGED}\n    c();\n}}\n\n}}\n");
        assert_eq!(switched_on(text).unwrap(), expected);
        assert!(switched_on("TEST_F(A, B) {\n}\n").is_err());
    }
}
