//! The CPUs on which the engine's threads run.
//!
//! Each case runs in its own process, because it pins threads, including the main thread. This
//! program therefore has no test harness: it starts itself once for each case.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use peerway::driven::Proxy;
use peerway::{Access, Batch, Endpoint, Pin, Reason};
use peerway_core::topology::{parse_cpus, show_cpus};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const WATCHDOG: Duration = Duration::from_secs(60);
/// Tells a process which case to run.
const CASE: &str = "PEERWAY_TEST_CASE";
/// The CPUs on which the case must find its engine threads.
const EXPECTED: &str = "PEERWAY_TEST_EXPECTED";

/// A case: its name, its code, and the CPUs that its process starts with.
struct Case {
    name: &'static str,
    run: fn(),
    starts_on: StartsOn,
}

#[derive(Clone, Copy, PartialEq)]
enum StartsOn {
    /// All CPUs of this process.
    All,
    /// Only the first of them, as under `taskset`.
    First,
}

const CASES: [Case; 6] = [
    Case {
        name: "threads_do_not_inherit_the_mask_of_a_pinned_thread",
        run: || {
            let pinned = thread::spawn(|| {
                pin_to_first();
                use_engine();
            });
            pinned.join().unwrap();
        },
        starts_on: StartsOn::All,
    },
    Case {
        name: "threads_do_not_inherit_the_mask_of_a_pinned_main_thread",
        run: || {
            pin_to_first();
            use_engine();
        },
        starts_on: StartsOn::All,
    },
    Case {
        name: "a_setting_says_where_threads_run",
        run: || {
            let last = allowed().last().copied().unwrap();
            // SAFETY: this process has no other thread yet.
            unsafe { std::env::set_var("PEERWAY_CPUS", last.to_string()) };
            pin_to_first();
            use_engine_on(&[last]);
            // An endpoint's own setting takes precedence over the environment.
            let endpoint = Endpoint::builder().setting("PEERWAY_CPUS", "0-1023").build().unwrap();
            assert!(endpoint.stats().cpus.len() > 1, "{:?}", endpoint.stats());
        },
        starts_on: StartsOn::All,
    },
    Case {
        name: "a_setting_that_cannot_be_met_is_an_error",
        run: || {
            for bad in ["4095", "0-", "some"] {
                let error = Endpoint::builder().setting("PEERWAY_CPUS", bad).build().unwrap_err();
                let error = error.to_string();
                assert!(error.contains("PEERWAY_CPUS") && error.contains(bad), "{error}");
                assert!(error.contains("processors"), "{error}");
            }
        },
        starts_on: StartsOn::All,
    },
    Case {
        name: "threads_stay_on_the_processors_that_the_process_started_with",
        run: use_engine,
        starts_on: StartsOn::First,
    },
    Case {
        name: "the_thread_that_accepts_lives_from_the_first_connection_to_the_close",
        run: || {
            let accepts =
                || engine_threads().keys().filter(|(_, name)| name == "peerway-accept").count();
            let make = || Endpoint::builder().transport(Pin::Tcp).build().unwrap();
            let (a, b) = (make(), make());
            assert_eq!(accepts(), 0, "no connection has come");
            let peer = a.connect(&b.metadata()).unwrap();
            assert_eq!(accepts(), 1, "only `b` has accepted");
            peer.notify(b"hello").unwrap().join();
            b.close();
            assert_eq!(accepts(), 0, "the close ends the thread");
        },
        starts_on: StartsOn::All,
    },
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(CASE) {
        (CASES.iter().find(|case| case.name == name).expect("a known case").run)();
        return ExitCode::SUCCESS;
    }
    let mut arguments = std::env::args().skip(1);
    let (mut filters, mut lists) = (Vec::new(), false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--test-threads" | "--skip" => drop(arguments.next()),
            "--list" => lists = true,
            flag if flag.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    let wanted = |case: &&Case| filters.is_empty() || filters.iter().any(|f| case.name.contains(f));
    let cases: Vec<&Case> = CASES.iter().filter(wanted).collect();
    if lists {
        cases.iter().for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", cases.len());
    let all = allowed();
    let (mut passed, mut ignored, mut failed) = (0, 0, Vec::new());
    let began = Instant::now();
    for case in &cases {
        if all.len() < 2 {
            println!("test {} ... ignored, this process has one processor", case.name);
            ignored += 1;
        } else if run_case(case, &all) {
            println!("test {} ... ok", case.name);
            passed += 1;
        } else {
            println!("test {} ... FAILED", case.name);
            failed.push(case.name);
        }
    }
    let result = if failed.is_empty() { "ok" } else { "FAILED" };
    if !failed.is_empty() {
        println!("\nfailures:\n    {}", failed.join("\n    "));
    }
    println!(
        "\ntest result: {result}. {passed} passed; {} failed; {ignored} ignored; 0 measured; \
         {} filtered out; finished in {:.2}s\n",
        failed.len(),
        CASES.len() - cases.len(),
        began.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// Runs a case in its own process. Returns whether it passed.
fn run_case(case: &Case, all: &[usize]) -> bool {
    let cpus = if case.starts_on == StartsOn::First { &all[..1] } else { all };
    let exe = std::env::current_exe().expect("this program has a file");
    let mut command = Command::new(exe);
    command.env(CASE, case.name).env(EXPECTED, show_cpus(cpus)).env_remove("PEERWAY_CPUS");
    // A process starts with the mask of the thread that creates it.
    let cpus = cpus.to_vec();
    let started = thread::spawn(move || {
        pin_to(&cpus);
        command.output().expect("this program starts")
    });
    let output = started.join().unwrap();
    if !output.status.success() {
        println!("---- {} stdout ----\n{}", case.name, String::from_utf8_lossy(&output.stdout));
        println!("{}", String::from_utf8_lossy(&output.stderr));
    }
    output.status.success()
}

fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

fn pin_to(cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).unwrap();
}

fn pin_to_first() {
    pin_to(&allowed()[..1]);
    assert_eq!(allowed().len(), 1);
}

/// Makes the engine start every kind of thread that needs no device, and checks their masks.
fn use_engine() {
    use_engine_on(&parse_cpus(&std::env::var(EXPECTED).unwrap()).unwrap());
}

fn use_engine_on(expected: &[usize]) {
    // A busy machine may not run one of the threads for longer than the usual detection time.
    let detect = Duration::from_secs(600);
    let make = |pin| Endpoint::builder().transport(pin).detect(detect).build().unwrap();
    for pin in [Pin::LocalMap, Pin::Tcp] {
        let (near, far) = (make(pin), make(pin));
        let peer = near.connect(&far.metadata()).unwrap();
        // Large enough for several threads to copy.
        let len = 64 << 20;
        let (ours, theirs) = (near.allocate(len).unwrap(), far.allocate(len).unwrap());
        let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
        assert_eq!(peer.post(&batch).unwrap().join().reason, Reason::Done);
        let proxy = Proxy::builder(&near).threads(2).build().unwrap();
        let mut names =
            vec!["peerway-serve", "peerway-accept", "peerway-proxy-0", "peerway-proxy-1"];
        if pin == Pin::LocalMap {
            names.push("peerway-copy");
        }
        let stats = near.stats();
        assert!(
            stats.cpus.iter().map(|cpu| *cpu as usize).eq(expected.iter().copied()),
            "{stats:?}"
        );
        wait_for_masks(&names, expected);
        drop(proxy);
    }
}

/// Waits until threads of all these names exist, and every thread of the engine may run on exactly
/// these CPUs. A thread that has just started may still have the mask and the name of its creator.
fn wait_for_masks(names: &[&str], expected: &[usize]) {
    let began = Instant::now();
    loop {
        let masks = engine_threads();
        let there = names.iter().all(|name| masks.keys().any(|(_, comm)| comm == name));
        if there && masks.values().all(|mask| mask == expected) {
            return;
        }
        assert!(
            began.elapsed() < WATCHDOG,
            "the engine's threads should run on {expected:?}, but run on {masks:?}"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// The masks of the engine's threads, by number and name.
fn engine_threads() -> BTreeMap<(u32, String), Vec<usize>> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    // A thread may end between the two reads.
    let statuses = tasks.filter_map(|task| {
        let number = task.file_name().to_str()?.parse().ok()?;
        Some((number, fs::read_to_string(task.path().join("status")).ok()?))
    });
    let field = |status: &str, name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let threads = statuses.filter_map(|(number, status)| {
        let name = field(&status, "Name:")?;
        let cpus = parse_cpus(&field(&status, "Cpus_allowed_list:")?)?;
        name.starts_with("peerway-").then_some(((number, name), cpus))
    });
    threads.collect()
}
