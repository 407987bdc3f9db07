//! `cargo xtask test`: every check of the project, in one command.
//!
//! The first parts run in order: tools, quick checks, and the build of everything. The other parts
//! mostly wait, so they run side by side (`side_by_side.rs`), one for each processor. After a
//! failure no further part starts. A final table shows the minutes of each part. If a part fails,
//! the last line names the test and the reason. A thread downloads the files of later parts while
//! earlier ones compile. Continuous integration runs this command and nothing else.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{env, fmt, fs};

use clap::Args;

use crate::programs::Programs;
use crate::side_by_side::{self, Ended};
use crate::wheels::{self, Wheels};
use crate::{
    book, c_library, config_docs, fuzz, instructions, kernels, loom, needs, newcomer, nixl, python,
    rdma, setup, steps, workspace,
};

/// The parts to run.
#[derive(Args)]
#[command(after_help = "\
Examples:
  cargo xtask test                         everything that continuous integration runs
  cargo xtask test --only fmt --only clippy
  cargo xtask test --skip loom
  cargo xtask test --rdma                  only verbs, in a guest with soft-RoCE devices
  cargo xtask test --skip rdma             everything without that guest
  cargo xtask test --soak                  the long profiles: hours instead of minutes")]
pub(crate) struct TestArgs {
    /// Run this part. The option can be repeated.
    #[arg(long, value_name = "PART", value_parser = part_names(), conflicts_with = "skip")]
    only: Vec<String>,
    /// Skip this part. The option can be repeated.
    #[arg(long, value_name = "PART", value_parser = part_names())]
    skip: Vec<String>,
    /// Run the part `rdma`, alone or with the parts of `--only`.
    #[arg(long, conflicts_with = "skip")]
    rdma: bool,
    /// Run the long profiles.
    #[arg(long)]
    soak: bool,
    /// Run so many parts at once. Default: one for each processor; 1 with `--soak`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Run the one part of `--only` for another run, which reads the outcome.
    #[arg(long, hide = true, requires = "only")]
    child: bool,
    /// List the parts and run none.
    #[arg(long)]
    list: bool,
}

/// Runs the selected parts.
pub(crate) fn run(args: &TestArgs) -> ExitCode {
    let chosen: Vec<&Part> = PARTS.iter().filter(|part| part.is_chosen(args)).collect();
    if args.list {
        for part in PARTS {
            let mark = if part.is_chosen(args) { "" } else { " (not chosen)" };
            println!("{:<12} {}{mark}", part.name, part.about);
        }
        return ExitCode::SUCCESS;
    }

    if args.child {
        return side_by_side::child_exit(&chosen, args.soak);
    }

    let began = Instant::now();
    let jobs = args.jobs.map_or_else(|| default_jobs(args.soak), usize::from);
    let (first, rest): (Vec<&Part>, Vec<&Part>) =
        chosen.iter().copied().partition(|part| jobs == 1 || chosen.len() == 1 || part.is_first);
    let mut ended = Vec::new();
    let mut fetching = None;
    for part in first {
        if part.name != SETUP {
            // The setup part has installed the tools that downloads need.
            fetching.get_or_insert_with(|| Fetching::start(&chosen));
        }
        println!("\n=== {}: {}", part.name, part.about);
        ended.push(part.run_here(args.soak));
        if ended.iter().any(Ended::is_failure) {
            break;
        }
    }
    if !ended.iter().any(Ended::is_failure) {
        fetching.get_or_insert_with(|| Fetching::start(&chosen));
        ended.extend(side_by_side::run(&rest, jobs, args.soak));
    }
    // The thread may print that it waits. That line must come before the verdict.
    drop(fetching);
    summarise(&ended, chosen.len(), began.elapsed())
}

/// The number of parts that run at once: one for each processor. The long profiles measure times
/// too, so their parts run alone.
fn default_jobs(soak: bool) -> usize {
    if soak { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Why a part or a command cannot run on this machine. This error is not a failure.
#[derive(Debug)]
pub(crate) struct Ignored(pub(crate) String);

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ignored: {}", self.0)
    }
}

impl std::error::Error for Ignored {}

/// The outcome of a part.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    Passed,
    Ignored(String),
    /// What failed and why, on the first line. More lines may follow.
    Failed(String),
}

impl From<anyhow::Result<()>> for Outcome {
    fn from(result: anyhow::Result<()>) -> Self {
        match result {
            Ok(()) => Self::Passed,
            Err(error) => match error.downcast_ref::<Ignored>() {
                Some(Ignored(why)) => Self::Ignored(why.clone()),
                None => Self::Failed(format!("{error:#}").trim().to_owned()),
            },
        }
    }
}

/// The texts for a failed part: optional details before the table, and one final line.
fn verdict(part: &str, why: &str) -> (String, String) {
    let mut lines = why.lines();
    let line = format!("cargo xtask test: part `{part}` failed: {}", lines.next().unwrap_or(""));
    let details = if lines.next().is_some() { format!("\n{why}\n") } else { String::new() };
    (details, line)
}

/// A thread that downloads the files that parts need, in the order of the parts.
struct Fetching {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fetching {
    fn start(parts: &[&Part]) -> Self {
        let fetches: Vec<_> = parts.iter().filter_map(|part| part.fetch).collect();
        let over = Arc::new(AtomicBool::new(false));
        let is_over = over.clone();
        let thread = std::thread::spawn(move || {
            be_nice();
            for fetch in fetches {
                if !is_over.load(Ordering::Relaxed) {
                    // A part that lacks a file downloads it itself and reports the error.
                    drop(fetch());
                }
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Fetching {
    /// Waits for the download in progress, so that the next run finds it complete and no thread at
    /// work on it.
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take().filter(|thread| !thread.is_finished()) {
            println!("waiting for a download to finish");
            let _ = thread.join();
        }
    }
}

/// Lowers the priority of this thread's programs, so that tests run first. A failure is harmless.
fn be_nice() {
    let thread = fs::read_link("/proc/thread-self").unwrap_or_default();
    if let Some(thread) = thread.file_name() {
        let _ = Command::new("renice").args(["-n", "10", "-p"]).arg(thread).output();
    }
}

pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Whether the part runs before the parts that run side by side.
    is_first: bool,
    /// A part that must have ended before this one starts.
    pub(crate) after: Option<&'static str>,
    /// Downloads the files that the part needs, as the part itself would.
    fetch: Option<fn() -> anyhow::Result<()>>,
    run: fn(soak: bool) -> anyhow::Result<()>,
}

impl Part {
    /// Runs the part in this process and shows its output as it comes.
    pub(crate) fn run_here(&self, soak: bool) -> Ended {
        let began = Instant::now();
        let outcome = (self.run)(soak).into();
        Ended { part: self.name, elapsed: began.elapsed(), outcome }
    }

    fn is_chosen(&self, args: &TestArgs) -> bool {
        if args.rdma || !args.only.is_empty() {
            return args.rdma && self.name == RDMA
                || args.only.iter().any(|name| name == self.name);
        }
        !args.skip.iter().any(|name| name == self.name)
    }
}

const SETUP: &str = "setup";
const RDMA: &str = "rdma";

/// Parts that run side by side start in this order, so the longest come first.
const PARTS: &[Part] = &[
    Part {
        name: SETUP,
        about: "the tools that tests need",
        is_first: true,
        after: None,
        fetch: None,
        run: |_| setup::run(),
    },
    Part {
        name: "fmt",
        about: "formatting",
        is_first: true,
        after: None,
        fetch: None,
        run: |_| cargo(&["fmt", "--all", "--check"], &[]),
    },
    Part {
        name: "config-docs",
        about: "docs/configuration.md matches the table of settings",
        is_first: true,
        after: None,
        fetch: None,
        run: |_| config_docs::check(workspace()),
    },
    Part {
        name: "clippy",
        about: "lints; warnings are errors",
        is_first: true,
        after: None,
        fetch: None,
        run: |_| {
            cargo(&["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"], &[])
        },
    },
    Part {
        name: "build",
        about: "every program and library that the parts below run",
        is_first: true,
        after: None,
        fetch: None,
        run: |_| {
            Programs::build(workspace())?;
            debug_build()?;
            Built::new().map(drop)
        },
    },
    Part {
        name: "test",
        about: "unit, integration, property and fuzz tests, and the examples in the documentation",
        is_first: false,
        after: None,
        fetch: Some(|| fetch(&[&wheels::OLD, &wheels::CUDA_12])),
        run: |soak| {
            // 256 cases are the default of proptest and take seconds. A soak runs more.
            let cases = if soak { "20000" } else { "256" };
            // Compile before waiting for wheels.
            let programs = Programs::build(workspace())?;
            let have = |set| Wheels::have(workspace(), &target_directory(), set);
            let variables = [
                ("PROPTEST_CASES", cases.into()),
                ("PEERWAY_TEST_CUDA_INCLUDE", have(&wheels::OLD)?.include().display().to_string()),
                ("PEERWAY_TEST_NVRTC", have(&wheels::CUDA_12)?.nvrtc().display().to_string()),
            ];
            // Run all test programs, so that one run reports every failed test.
            cargo(&["test", "--workspace", "--no-fail-fast"], &variables)?;
            needs::run(&programs, &variables)
        },
    },
    Part {
        name: "conformance",
        about: "the contract for every transport, between processes; RDMA with fake devices",
        is_first: false,
        after: None,
        fetch: None,
        run: conformance,
    },
    Part {
        name: "python",
        about: "the package in a virtual environment, and its tests",
        is_first: false,
        after: None,
        fetch: Some(|| python::environment(workspace(), &target_directory()).map(drop)),
        run: |_| python::run(workspace(), &target_directory(), &Built::new()?.fake_gpus()),
    },
    Part {
        name: "newcomer",
        about: "the lines of README.md in a clean clone, on the oldest and the newest Python",
        is_first: false,
        after: None,
        fetch: None,
        run: |_| newcomer::run(workspace(), &target_directory()),
    },
    Part {
        name: "nixl",
        about: "the backend for NIXL, in three versions of NIXL",
        is_first: false,
        // The part `python` replaces the package that the tests of this part import.
        after: Some("python"),
        fetch: Some(|| fetch(&wheels::NIXL.iter().collect::<Vec<_>>())),
        run: |soak| nixl::run(workspace(), &target_directory(), &Built::new()?, soak),
    },
    Part {
        name: RDMA,
        about: "verbs in a guest with four soft-RoCE devices",
        is_first: false,
        after: None,
        fetch: Some(|| rdma::fetch(workspace(), &target_directory())),
        run: |soak| {
            let program = Built::new()?.program("peerway-conformance");
            rdma::run(workspace(), &target_directory(), &program, soak)
        },
    },
    Part {
        name: "instructions",
        about: "instruction counts of hot operations match docs/instructions.txt",
        is_first: false,
        after: None,
        fetch: None,
        run: |_| instructions(false),
    },
    Part {
        name: "c",
        about: "the library for C: its header, its symbols, examples and tests, under valgrind too",
        is_first: false,
        after: None,
        fetch: None,
        run: |_| {
            debug_build()?;
            c_library::test(workspace(), &target_directory(), &debug_fake_gpus())
        },
    },
    Part {
        name: "loom",
        about: "all interleavings of the rings and queues",
        is_first: false,
        after: None,
        fetch: None,
        run: |_| loom::run(workspace(), &target_directory()),
    },
    Part {
        name: "gpu",
        about: "device code, with several compilers; the command on a driver that needs no GPU",
        is_first: false,
        after: None,
        fetch: Some(|| fetch(&[&wheels::CUDA_13])),
        run: |_| {
            kernels::run(workspace(), &target_directory(), true)?;
            debug_build()?;
            let fake = debug_fake_gpus().display().to_string();
            let programs = Programs::build(workspace())?;
            let package = workspace().join("crates/peerway-cli");
            // The tests of the command that need a GPU, which are ignored elsewhere.
            [("peerway", &[][..]), ("bench", &["--ignored"])].into_iter().try_for_each(
                |(target, which)| {
                    let program = programs.find("peerway-cli", target)?;
                    python::step_with(&[("PEERWAY_CUDA_SO", &fake)], &program, &package, which)
                },
            )
        },
    },
    Part {
        name: "simulation",
        about: "the promises, in many schedules of two drivers over simulated lanes",
        is_first: false,
        after: None,
        fetch: None,
        run: |soak| {
            if soak {
                return fuzz::simulation(workspace());
            }
            let program = Programs::build(workspace())?.find("peerway", "peerway")?;
            let test = "simulation::tests::every_schedule_keeps_the_promises";
            println!("$ {} --exact {test}", program.display());
            let mut command = Command::new(&program);
            command.args(["--exact", test, "--nocapture"]).env("PEERWAY_SIMULATION_RUNS", "100000");
            command.current_dir(workspace().join("crates/peerway"));
            let output = steps::run(&mut command, test)?;
            // A test that was renamed would run no schedule and pass.
            anyhow::ensure!(output.contains("1 passed"), "the test {test} did not run");
            Ok(())
        },
    },
    Part {
        name: "docs",
        about: "links of the book and the other pages; API documentation, warnings are errors",
        is_first: false,
        after: None,
        fetch: None,
        run: |_| {
            book::check(workspace())?;
            let flags = ("RUSTDOCFLAGS", "--deny warnings".into());
            cargo(&["doc", "--workspace", "--no-deps"], &[flags])
        },
    },
];

fn part_names() -> Vec<&'static str> {
    PARTS.iter().map(|part| part.name).collect()
}

/// Builds every program and library with the features that `cargo test --workspace` uses: the whole
/// workspace with its tests. A single package, or one without its test dependencies, would select
/// other features and recompile everything.
pub(crate) fn debug_build() -> anyhow::Result<()> {
    cargo(&["build", "--workspace", "--all-targets"], &[])
}

fn fetch(sets: &[&wheels::Set]) -> anyhow::Result<()> {
    let have = |set: &&wheels::Set| Wheels::have(workspace(), &target_directory(), set);
    sets.iter().try_for_each(|set| have(set).map(drop))
}

/// The fake CUDA library, after [`debug_build`].
fn debug_fake_gpus() -> PathBuf {
    target_directory().join("debug/libpeerway_fakecuda.so")
}

/// The release programs that tests need. One command builds them, for the same reason.
pub(crate) struct Built(PathBuf);

impl Built {
    /// Builds the programs that are missing or outdated.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let packages = ["peerway-testkit", "peerway-fakeverbs", "peerway-fakecuda", "peerway-nixl"];
        let named: Vec<&str> = packages.iter().flat_map(|name| ["--package", name]).collect();
        cargo(&[&["build", "--release"], &named[..]].concat(), &[])?;
        Ok(Self(target_directory().join("release")))
    }

    fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The fake RDMA devices.
    fn fake_devices(&self) -> PathBuf {
        self.0.join("libpeerway_fakeverbs.so")
    }

    /// The fake CUDA library.
    pub(crate) fn fake_gpus(&self) -> PathBuf {
        self.0.join("libpeerway_fakecuda.so")
    }

    /// The backend for NIXL.
    pub(crate) fn plugin(&self) -> PathBuf {
        self.0.join("libplugin_PEERWAY.so")
    }
}

/// Counts the instructions of the release build.
pub(crate) fn instructions(bless: bool) -> anyhow::Result<()> {
    let built = Built::new()?;
    let counted =
        instructions::Built { program: built.program("peerway-count"), fake: built.fake_devices() };
    instructions::run(workspace(), &counted, bless)
}

/// Runs the conformance program for the transports of every machine, and for RDMA with fake
/// devices.
fn conformance(soak: bool) -> anyhow::Result<()> {
    let profile = if soak { "soak" } else { "ci" };
    let built = Built::new()?;
    let program = built.program("peerway-conformance");
    // Scenarios mostly wait: each uses a processor for a quarter of its time.
    let jobs = if soak { "1" } else { "2" };
    let run = |transport: &str, variables: &[(&str, &str)]| {
        let arguments = ["--transport", transport, "--profile", profile, "--jobs", jobs];
        python::step_with(variables, &program, workspace(), &arguments)
    };
    run("all", &[])?;
    let fake = built.fake_devices().display().to_string();
    let fabric = format!("conformance-{}", std::process::id());
    for (transport, script) in [("verbs", ""), ("efa", "efa")] {
        let variables = [
            ("PEERWAY_IBV_SO", fake.as_str()),
            ("PEERWAY_EFA_SO", &fake),
            ("PEERWAY_FAKE_VERBS", script),
            ("PEERWAY_FAKE_VERBS_FABRIC", &fabric),
        ];
        run(transport, &variables)?;
    }
    Ok(())
}

/// Runs cargo in the workspace.
pub(crate) fn cargo(arguments: &[&str], variables: &[(&str, String)]) -> anyhow::Result<()> {
    let shown = format!("cargo {}", arguments.join(" "));
    println!("$ {shown}");
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments).envs(variables.iter().map(|(name, value)| (name, value)));
    steps::run(command.current_dir(workspace()), &shown).map(drop)
}

pub(crate) fn target_directory() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace().join(dir),
        None => workspace().join("target"),
    }
}

/// Prints the final table, the line that readers and programs look for, and the reason of a
/// failure as the last line.
fn summarise(ended: &[Ended], chosen: usize, elapsed: Duration) -> ExitCode {
    let mut failures = ended.iter().filter_map(|ended| match &ended.outcome {
        Outcome::Failed(why) => Some(verdict(ended.part, why)),
        _ => None,
    });
    let failure = failures.next();
    for (details, line) in failures {
        println!("{details}{line}");
    }
    if let Some((details, _)) = &failure {
        print!("{details}");
    }
    println!("\n{:<12} {:>7}  result", "part", "minutes");
    let minutes = |time: Duration| time.as_secs_f64() / 60.0;
    for Ended { part, elapsed, outcome } in ended {
        let result = match outcome {
            Outcome::Passed => "passed".to_owned(),
            Outcome::Ignored(why) => format!("ignored: {why}"),
            Outcome::Failed(_) => "FAILED".to_owned(),
        };
        println!("{part:<12} {:>7.1}  {result}", minutes(*elapsed));
    }
    println!("{:<12} {:>7.1}", "all", minutes(elapsed));
    if ended.len() < chosen {
        println!("not run after the failure: {}", chosen - ended.len());
    }
    let count = |wanted: fn(&Outcome) -> bool| ended.iter().filter(|e| wanted(&e.outcome)).count();
    let passed = count(|outcome| *outcome == Outcome::Passed);
    let failed = count(|outcome| matches!(outcome, Outcome::Failed(_)));
    let ignored = ended.len() - passed - failed;
    let ignored = if ignored == 0 { String::new() } else { format!(", {ignored} ignored") };
    println!("{passed} passed, {failed} failed{ignored}");
    match failure {
        None => ExitCode::SUCCESS,
        Some((_, line)) => {
            println!("{line}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(only: &[&str], skip: &[&str]) -> TestArgs {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        TestArgs {
            only: own(only),
            skip: own(skip),
            rdma: false,
            soak: false,
            jobs: None,
            child: false,
            list: false,
        }
    }

    fn chosen(args: &TestArgs) -> Vec<&'static str> {
        PARTS.iter().filter(|part| part.is_chosen(args)).map(|part| part.name).collect()
    }

    #[test]
    fn parts_are_chosen_by_name() {
        assert_eq!(chosen(&args(&["fmt", "loom"], &[])), ["fmt", "loom"]);
        assert!(!chosen(&args(&[], &["clippy"])).contains(&"clippy"));
        assert!(chosen(&args(&[], &[])).contains(&"clippy"));
    }

    #[test]
    fn the_guest_is_a_part_and_can_be_selected() {
        assert!(chosen(&args(&[], &[])).contains(&RDMA));
        assert!(!chosen(&args(&[], &[RDMA])).contains(&RDMA));
        assert_eq!(chosen(&args(&[RDMA], &[])), [RDMA]);
        assert_eq!(chosen(&TestArgs { rdma: true, ..args(&[], &[]) }), [RDMA]);
        assert_eq!(chosen(&TestArgs { rdma: true, ..args(&["fmt"], &[]) }), ["fmt", RDMA]);
    }

    #[test]
    fn the_last_line_is_one_line() {
        let why = "tests/test_x.py::test_y: AssertionError: 22 != 20";
        let line = format!("cargo xtask test: part `python` failed: {why}");
        assert_eq!(verdict("python", why), (String::new(), line));
        let error = anyhow::anyhow!("it ended with 1:\n  more\n").context("figure map-write");
        let Outcome::Failed(why) = Err(error).into() else { panic!("not a failure") };
        let (details, line) = verdict("instructions", &why);
        assert_eq!(
            line,
            "cargo xtask test: part `instructions` failed: figure map-write: it ended with 1:"
        );
        assert_eq!(details, "\nfigure map-write: it ended with 1:\n  more\n");
    }

    #[test]
    fn a_part_waits_only_for_an_earlier_part() {
        for (at, part) in PARTS.iter().enumerate() {
            let Some(after) = part.after else { continue };
            assert!(PARTS[..at].iter().any(|earlier| earlier.name == after), "{}", part.name);
        }
    }

    #[test]
    fn part_names_are_unique() {
        let mut names = part_names();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), PARTS.len());
    }
}
