//! Runs every scenario in its own process under a watchdog, and counts the results.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use peerway_testkit::procfs;

use crate::args::Args;
use crate::profile::Profile;
use crate::scenarios::{ALL, Scenario};
use crate::world::Transport;

enum Result {
    Ok(String),
    Skip(String),
    /// The scenario came too late to catch the transfer that it tests.
    Late(String),
    Fail(String),
}

/// A scenario on a transport.
type Case = (Transport, &'static Scenario);

/// The counts over all scenarios.
#[derive(Default)]
struct Score {
    passed: usize,
    skipped: usize,
    /// Runs that were repeated.
    again: usize,
    failures: Vec<String>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let wanted = |&(on, scenario): &Case| match args.only.as_slice() {
        [] => scenario.is_usual_on(on),
        only => only.iter().any(|only| scenario.name.starts_with(only.as_str())),
    };
    let cases = args.transports.iter().flat_map(|&on| ALL.iter().map(move |case| (on, case)));
    let cases = cases.filter(wanted);
    let (alone, beside): (Vec<Case>, Vec<Case>) = cases.partition(|case| case.1.is_alone());
    let score = Mutex::new(Score::default());
    take_turns(&beside, args.jobs, args.profile, &score);
    take_turns(&alone, 1, args.profile, &score);
    let Score { passed, skipped, again, failures } =
        score.into_inner().unwrap_or_else(PoisonError::into_inner);
    if !failures.is_empty() {
        println!("\nfailed:\n{}\n", failures.join("\n"));
    }
    print!("{passed} passed, {} failed", failures.len());
    if skipped > 0 {
        print!(", {skipped} skipped");
    }
    if again > 0 {
        print!(", {again} repeated because the machine was busy or the scenario came too late");
    }
    println!();
    if failures.is_empty() && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the cases, `jobs` at a time.
fn take_turns(cases: &[Case], jobs: usize, profile: Profile, score: &Mutex<Score>) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    score_one(case, profile, score);
                }
            });
        }
    });
}

fn score_one((transport, scenario): Case, profile: Profile, score: &Mutex<Score>) {
    let start = Instant::now();
    let mut again = 0;
    let result = match (scenario.applies)(transport) {
        Err(why) => Result::Skip(why.to_owned()),
        Ok(()) => run_until_it_catches(transport, scenario, profile, &mut again),
    };
    let (word, note) = match &result {
        Result::Ok(note) => ("ok", note.clone()),
        Result::Skip(why) => ("skip", format!("({why})")),
        Result::Fail(why) | Result::Late(why) => ("FAIL", why.replace('\n', "\n    ")),
    };
    let ms = start.elapsed().as_millis();
    let line =
        format!("{:<13} {:<28} {word:<4} {ms:>6} ms  {note}", transport.name(), scenario.name);
    println!("{line}");
    let mut score = score.lock().unwrap_or_else(PoisonError::into_inner);
    score.again += again;
    match result {
        Result::Ok(_) => score.passed += 1,
        Result::Skip(_) => score.skipped += 1,
        Result::Fail(_) | Result::Late(_) => score.failures.push(line),
    }
}

/// Percent of stolen processor time above which a failure is blamed on the machine's host.
const STOLEN: u64 = 15;
/// How often a scenario runs while the host steals more than that.
const TRIES: usize = 3;

/// How often a scenario runs that comes too late to catch a transfer in flight.
const CATCHES: usize = 20;

/// Runs a scenario, and repeats it when it reports that it came too late for its transfer.
fn run_until_it_catches(
    transport: Transport,
    scenario: &Scenario,
    profile: Profile,
    again: &mut usize,
) -> Result {
    for _ in 1..CATCHES {
        let result = run_on_a_machine_of_ours(transport, scenario, profile, again);
        let Result::Late(why) = &result else { return result };
        *again += 1;
        println!("{:<13} {:<28} again: {why}", transport.name(), scenario.name);
    }
    match run_on_a_machine_of_ours(transport, scenario, profile, again) {
        Result::Late(why) => Result::Fail(format!("{why} ({CATCHES} times)")),
        other => other,
    }
}

/// Runs a scenario, and repeats it when it failed while the host of this virtual machine stole much
/// processor time. Most scenarios test time limits, and a peer that cannot run is silent. A failure
/// without stolen time is final.
fn run_on_a_machine_of_ours(
    transport: Transport,
    scenario: &Scenario,
    profile: Profile,
    again: &mut usize,
) -> Result {
    for _ in 1..TRIES {
        let before = procfs::machine_time();
        let result = run_one(transport, scenario, profile);
        let (Result::Fail(why), Some(before)) = (&result, before) else { return result };
        let Some(stolen) = procfs::machine_time().and_then(|now| now.stolen_since(before)) else {
            return result;
        };
        if stolen < STOLEN {
            return result;
        }
        *again += 1;
        let (path, name) = (transport.name(), scenario.name);
        println!("{path:<13} {name:<28} again: the host stole {stolen} % of its time when {why}");
    }
    run_one(transport, scenario, profile)
}

fn run_one(transport: Transport, scenario: &Scenario, profile: Profile) -> Result {
    match start(transport, scenario, profile) {
        Ok(process) => watch(process, scenario, profile.limit * scenario.patience),
        Err(error) => Result::Fail(format!("could not be started: {error}")),
    }
}

fn start(transport: Transport, scenario: &Scenario, profile: Profile) -> std::io::Result<Child> {
    let args = ["--run", "--transport", transport.name(), "--profile", profile.name];
    let mut command = Command::new("/proc/self/exe");
    command.args(args).args(["--only", scenario.name]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Its own process group, so that the watchdog can kill its peers with it.
    command.process_group(0);
    // SAFETY: prctl is a plain system call that allocates nothing, so it may run between fork and
    // exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command.spawn()
}

fn watch(mut process: Child, scenario: &Scenario, limit: Duration) -> Result {
    let group = process.id() as i32;
    let out = process.stdout.take().map(collect);
    let err = process.stderr.take().map(collect);
    let ended = wait(&mut process, limit);
    // SAFETY: kill takes no pointers. The group is the one that `start` created. Its leader may be
    // gone, but its peers must end too.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let status = ended.or_else(|| {
        let _ = process.wait();
        None
    });
    let text = |t: Option<std::thread::JoinHandle<String>>| {
        t.and_then(|t| t.join().ok()).unwrap_or_default()
    };
    let (out, err) = (text(out), text(err));
    let steps = err.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev();
    let steps: String = steps.map(|line| format!("\n{line}")).collect();
    let verdict = out.lines().rev().find_map(|line| line.strip_prefix("verdict "));
    match (verdict.and_then(|v| v.split_once(' ')), status) {
        (_, None) => {
            Result::Fail(format!("'{}' hung for {limit:?}; last steps:{steps}", scenario.name))
        }
        (Some(("ok", note)), Some(_)) => Result::Ok(note.to_owned()),
        (Some(("skip", why)), Some(_)) => Result::Skip(why.to_owned()),
        (Some(("again", why)), Some(_)) => Result::Late(why.to_owned()),
        (Some((_, why)), Some(_)) => Result::Fail(format!("{why}{steps}")),
        (None, Some(status)) => Result::Fail(format!("ended without a verdict: {status}{steps}")),
    }
}

fn wait(process: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    while Instant::now() < until {
        if let Ok(Some(status)) = process.try_wait() {
            return Some(status);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    None
}

fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
