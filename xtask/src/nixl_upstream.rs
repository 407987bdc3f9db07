//! NIXL's own tests, and UCCL's benchmark of it, on our plugin: compiled and run in a release of NIXL. Copies of what does not fit are changed,
//! as little as can be; a text that is not found where it is to be changed is an error.

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

/// What stands in for Abseil, and shows the tests NIXL's log.
const STAND_INS: &str = "plugins/nixl/tests/upstream";

const GTEST: Tool = Tool {
    program: "/usr/include/gmock/gmock.h",
    package: "libgmock-dev",
    why: "NIXL's tests in C++",
};

/// Takes the place of NIXL's backend for UCX in its tests.
const OURS_FOR_UCX: (&str, &str) = ("\"UCX\",", "\"PEERWAY\",");

/// Parameters that UCX has and we have not.
const WITHOUT_UCX: &[(&str, &str)] = &[
    OURS_FOR_UCX,
    ("EXPECT_EQ(ucx_err_handling_mode_peer, params[ucx_err_handling_mode_key]);", ""),
    ("params[\"num_workers\"] = std::to_string(num_workers);", ""),
    ("params[\"num_threads\"] = std::to_string(num_threads);", ""),
    ("params[\"split_batch_size\"] = \"0\";", ""),
];

/// Whether UCX has calls for GPUs, which releases before 1.5 do not say and a test asks.
const NOT_OF_ALL: (&str, &str) =
    ("bindings.HAVE_UCX_GPU_DEVICE_API", "getattr(bindings, \"HAVE_UCX_GPU_DEVICE_API\", False)");

/// Memory is listed twice where an agent is made a second time, which NIXL allows no backend.
const LISTED_ONCE: &[(&str, &str)] = &[(
    "nixl::fillRegList(m_dlist, m_desc, m_data);",
    "m_dlist.clear(); nixl::fillRegList(m_dlist, m_desc, m_data);",
)];

/// The failures are what those tests are about, and NIXL logs them as errors.
const LOGGED: &str = "const LogIgnoreGuard expected(\"remote agent 'target' was disconnected\");";

/// The benchmark's check passes for zeros, looks at the wrong side of a read, and does not fail the program.
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

/// Bytes per transfer. Each has its own two processes: from one size to the next the benchmark's client may talk to the socket that
/// the server is about to close, and both wait for ever.
const SIZES: &[&str] = &["256", "65536", "1048576", "104857600"];
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A checkout of NIXL.
    #[arg(long, value_name = "DIR")]
    nixl: PathBuf,
    /// A checkout of UCCL, for its benchmark of NIXL.
    #[arg(long, value_name = "DIR")]
    uccl: Option<PathBuf>,
    /// The release of NIXL to run them in, which is fetched: the checkout's, or one whose interface is the same.
    #[arg(long, value_name = "VERSION", default_value = "1.4.1")]
    release: String,
    /// A Python with pip, numpy, torch and pytest, and with pyzmq for the benchmark.
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
}

/// Builds the plugin and runs everything, one after the other.
pub(crate) fn run(workspace: &Path, target: &Path, args: &Args) -> anyhow::Result<()> {
    setup::have(&GTEST)?;
    cargo(&["build", "--release", "--package", "peerway-nixl"], &[])?;
    let place = target.join("nixl-upstream");
    // Where the tests look for the backends that they name.
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

/// NIXL's packages, put where nothing else is.
struct Wheel {
    packages: PathBuf,
    libraries: PathBuf,
}

/// Fetches the wheel for the CUDA that torch was built for: NIXL imports no other.
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

    /// The tests of NIXL's interface for Python.
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

    /// The tests of the backend for UCCL, those too that are switched off there.
    fn of_uccl(&self) -> anyhow::Result<()> {
        let text = read(&self.args.nixl.join("test/gtest/plugins/uccl/uccl_test.cpp"))?;
        let copy = self.copy("uccl_test.cpp", &changed(&switched_on(&text)?, LISTED_ONCE)?)?;
        let program = self.compile("uccl_gtest", &[copy])?;
        step_with(&[("NIXL_PLUGIN_DIR", &self.plugins("uccl"))], &program, self.place, &[])
    }

    /// Transfers and failures as the backend for UCX is tested.
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

    /// UCCL's benchmark of its backend, each of the two ways, its check mended.
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

    /// Compiles these with what NIXL's tests have in common, and links them with the release.
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
        // The release brings the libraries it needs; and its log is to find our fwrite().
        flags.push("-Wl,--allow-shlib-undefined,--export-dynamic-symbol=fwrite".into());
        flags.extend(["-o".into(), program.display().to_string()]);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        step(Path::new("g++"), self.place, &flags)?;
        Ok(program)
    }
}

/// Waits for both. Where one fails, or neither ends, what is left is ended.
fn both(mut server: Child, mut client: Child) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let ended = [server.try_wait()?, client.try_wait()?];
        if ended.iter().all(|status| status.is_some_and(|s| s.success())) {
            return Ok(());
        }
        if ended.iter().flatten().any(|status| !status.success()) || Instant::now() > until {
            for mut left in [server, client] {
                // Fails where it has ended.
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

/// The text with every one of these put in the place of the other.
fn changed(text: &str, changes: &[(&str, &str)]) -> anyhow::Result<String> {
    changes.iter().try_fold(text.to_owned(), |text, (from, to)| {
        ensure!(text.contains(from), "the text to be changed is not there: {from}");
        Ok(text.replace(from, to))
    })
}

/// The text with the tests that are commented out at its end, which expect failures and that they are logged.
fn switched_on(text: &str) -> anyhow::Result<String> {
    let marked = "// TODO: Enable failure tests";
    let (before, after) = text.split_once(marked).context("no tests are switched off")?;
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
    fn what_is_not_there_is_not_changed_in_silence() {
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
