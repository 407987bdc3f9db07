//! `peerway bench` as a user runs it: two processes, real transfers, and a process that is killed.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A generous limit: these tests do not measure speed.
const WATCHDOG: Duration = Duration::from_secs(300);

fn bench(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerway"));
    command.arg("bench").args(line.split_whitespace());
    // The tests compare what the command prints without a log level.
    for name in ["PEERWAY_LOG_LEVEL", "UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the process, and kills it if it does not end in time.
fn finish(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > WATCHDOG {
            child.kill().unwrap();
            panic!("still running after {WATCHDOG:?}: {:?}", child.wait_with_output());
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

/// The rows of a JSON document.
fn rows(text: &[u8]) -> Vec<serde_json::Value> {
    let document: serde_json::Value = serde_json::from_slice(text).unwrap();
    document["rows"].as_array().unwrap().clone()
}

/// The children of a process, as the kernel lists them.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses. Z is a zombie.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// The second process of a run, once its row runs. A row of these tests lasts for minutes.
fn working_second(first: u32) -> u32 {
    wait_until("no second process", || !children(first).is_empty());
    let second = children(first)[0];
    wait_for_work(second);
    second
}

/// Waits until a process is in the middle of its work: it has used much more CPU time than its
/// start takes.
fn wait_for_work(pid: u32) {
    let ticks = || -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // User and system time. Fields are numbered from the state on: see proc_pid_stat(5).
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    };
    wait_until("the second process is idle", || ticks().is_some_and(|ticks| ticks >= 50));
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WATCHDOG, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn rows_come_as_json_and_as_a_table() {
    let line = "--seconds 0.01 --sizes 256,100003 --iovs 1,3 --paths local-map,tcp --json -";
    let output = finish(bench(line).spawn().unwrap());
    let table = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{table}");
    let rows = rows(&output.stdout);
    assert_eq!(rows.len(), 2 * 2 * 2 * 2, "paths, operations, sizes, pieces");
    for row in &rows {
        for field in ["p50_us", "p99_us", "gbps", "cpu_s_per_gb"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field} of {row}");
        }
        let baseline = &row["baseline"];
        assert_eq!(baseline["name"], if row["path"] == "tcp" { "socket" } else { "copy" }, "{row}");
        let figure = |name: &str| baseline[name].as_f64().unwrap();
        assert!(figure("gbps") > 0.0 && figure("low") > 0.0, "{row}");
        assert!(figure("low") <= figure("ratio") && figure("ratio") <= figure("high"), "{row}");
    }
    assert!(table.contains("socket:") && table.contains("100003"), "{table}");
    let wide = table.lines().find(|line| line.chars().count() > 80);
    assert_eq!(wide, None, "{table}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["complete"], true);
    assert_eq!(document["settings"]["command"][1], "bench");
    let paths = document["paths"].as_array().unwrap();
    let names: Vec<&str> = paths.iter().map(|path| path["path"].as_str().unwrap()).collect();
    assert_eq!(names, ["auto", "local-map", "tcp"]);
    for path in paths {
        // The first letters are enough: the table wraps the text.
        let why = path["why"].as_str().unwrap();
        let line = format!("{:<11} {}", path["path"].as_str().unwrap(), &why[..4]);
        assert!(table.contains(&line), "{line}: {table}");
    }
}

/// A directory that is removed at the end of a test.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Reads the first line that contains `text`, while the process runs.
fn wait_for_line(child: &mut Child, text: &str) -> String {
    let mut told = Vec::new();
    let mut byte = [0];
    loop {
        // Read byte by byte, because the rest of the output may never come.
        let got = child.stdout.as_mut().unwrap().read(&mut byte).unwrap();
        assert_eq!(got, 1, "{}", String::from_utf8_lossy(&told));
        if byte[0] != b'\n' {
            told.push(byte[0]);
            continue;
        }
        let line = String::from_utf8_lossy(&told).into_owned();
        if line.contains(text) {
            return line;
        }
        told.clear();
    }
}

#[test]
fn an_interrupted_run_prints_and_saves_the_rows_that_are_done() {
    let folder = Folder::new("peerway-interrupted");
    let (json, plot) = (folder.0.join("rows.json"), folder.0.join("plot.svg"));
    fs::write(&json, "old").unwrap();
    // The signal comes in the second row, or a little later on a busy machine.
    let line = "--seconds 1 --sizes 256,4K --iovs 1 --op write --paths tcp,local-ring,tcp";
    for signal in ["-INT", "-TERM"] {
        let mut command = bench(line);
        command.arg("--json").arg(&json).arg("--plot").arg(&plot);
        let mut child = command.spawn().unwrap();
        let row = wait_for_line(&mut child, "tcp ");
        assert!(row.contains(" 256 "), "{row}");
        let second = children(child.id())[0];
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let output = finish(child);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(said.starts_with("peerway: stopped after ") && said.lines().count() == 1, "{said}");
        let below = String::from_utf8(output.stdout).unwrap();
        assert!(below.contains("socket:") && below.contains("verified:"), "{below}");
        let document: serde_json::Value =
            serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        assert_eq!(document["complete"], false);
        let saved = document["rows"].as_array().unwrap();
        assert!((1..4).contains(&saved.len()), "{saved:?}");
        assert!(fs::read_to_string(&plot).unwrap().contains("tcp write"));
        wait_until("the second process is still alive", || !is_alive(second));
        let mut names: Vec<_> =
            fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["plot.svg", "rows.json"], "a temporary file is left");
    }
}

#[test]
fn a_run_that_fails_keeps_the_rows_that_are_done() {
    let folder = Folder::new("peerway-failed");
    let json = folder.0.join("rows.json");
    let line = "--seconds 2 --sizes 256,4K --iovs 1 --op write --paths tcp";
    let mut child = bench(line).arg("--json").arg(&json).spawn().unwrap();
    wait_for_line(&mut child, "tcp ");
    Command::new("kill").args(["-9", &children(child.id())[0].to_string()]).status().unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(rows(&fs::read(&json).unwrap()).len(), 1);
}

#[test]
fn a_picture_that_is_no_svg_is_refused_with_the_name_to_use() {
    let output = finish(bench("--plot some/x.png").spawn().unwrap());
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("SVG") && said.contains("some/x.svg"), "{said}");
}

#[test]
fn large_rows_of_cma_tell_what_the_kernel_reaches() {
    let line = "--seconds 0.01 --sizes 4K,1M --iovs 1 --paths local-cma,tcp --json -";
    let output = finish(bench(line).spawn().unwrap());
    let table = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{table}");
    let rows = rows(&output.stdout);
    for row in &rows {
        // If the kernel forbids the path, there is no such row.
        let told = row["path"] == "local-cma" && row["size"] == 1 << 20;
        let gbps = row["kernel"]["gbps"].as_f64();
        assert_eq!(gbps.is_some_and(|gbps| gbps > 0.0), told, "{row}");
        assert!(told || row["kernel"].is_null(), "{row}");
        assert!(!told || table.contains("process_vm_readv alone"), "{table}");
    }
}

#[test]
fn a_round_trip_is_measured() {
    let line =
        "--seconds 0.01 --sizes 256,256K --mode pingpong --paths tcp,local-ring,local-map --json -";
    let output = finish(bench(line).spawn().unwrap());
    let table = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{table}");
    let rows = rows(&output.stdout);
    assert!(rows.len() == 6 && rows.iter().all(|row| row["op"] == "pingpong"), "{rows:?}");
}

/// Whether the text is a single line with the reason for the missing GPU, and has the reason once.
fn no_gpu(told: &str) -> bool {
    let reason = ["peerway: no GPU can be used: ", "peerway: there is no GPU 0: "];
    told.lines().count() == 1
        && reason.iter().any(|reason| told.starts_with(reason))
        && told.matches("libcuda (").count() <= 1
}

#[test]
fn what_needs_a_gpu_is_refused_in_one_line_without_one() {
    let lines = [
        "--memory gpu --seconds 0.01 --sizes 4K",
        "--memory pinned,gpu --paths auto --seconds 0.01 --sizes 4K",
        "--memory-kinds --seconds 0.01 --json -",
        "peer-copy --seconds 0.01 --sizes 256 --json -",
    ];
    for line in lines {
        // With these variables the driver of a machine with GPUs shows none of them.
        let mut command = bench(line);
        command.env_remove("PEERWAY_CUDA_SO").env("CUDA_VISIBLE_DEVICES", "");
        let output = finish(command.spawn().unwrap());
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {told}");
        assert!(no_gpu(&told), "{line}: {told}");
    }
}

#[test]
#[ignore = "needs a GPU or a stand-in for one: cargo xtask test --only gpu"]
fn gpu_memory_is_measured() {
    let all = ["gpu-ipc", "local-ring", "tcp"];
    // The runs execute in parallel, because most of a run this short is the second of idle time.
    let runs = [
        ("gpu", "", &all[..]),
        ("gpu-plain,host", "--paths auto", &all[..1]),
        ("pinned,gpu", "--paths auto", &all[..1]),
    ]
    .map(|(memory, flags, paths)| {
        let line = format!(
            "--memory {memory} {flags} --seconds 0.01 --sizes 4K,100003 --iovs 1,3 --json -"
        );
        (memory, paths, bench(&line).spawn().unwrap())
    });
    for (memory, paths, run) in runs {
        let output = finish(run);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        let rows = rows(&output.stdout);
        assert_eq!(rows.len(), paths.len() * 2 * 2 * 2, "paths, operations, sizes, pieces");
        let (local, remote) = memory.split_once(',').unwrap_or((memory, memory));
        let mut seen: Vec<&str> = Vec::new();
        for row in &rows {
            assert!(row["memory_local"] == local && row["memory_remote"] == remote, "{row}");
            assert!(row["baseline"]["gbps"].as_f64().unwrap() > 0.0, "{row}");
            seen.push(row["path"].as_str().unwrap());
        }
        seen.dedup();
        assert_eq!(seen, paths, "{told}");
        assert!(told.contains(&format!("memory: local {local}, remote {remote}\n")), "{told}");
        assert!(told.contains("driver:"), "{told}");
        assert_eq!(told.contains("host:  "), paths.len() > 1, "{told}");
    }
}

#[test]
#[ignore = "needs a GPU or a stand-in for one: cargo xtask test --only gpu"]
fn kinds_of_gpu_memory_are_compared() {
    let output = finish(bench("--memory-kinds --seconds 0.01 --json -").spawn().unwrap());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let rows = rows(&output.stdout);
    assert_eq!(rows.len(), 4 * 2 * 2, "things, sizes, kinds");
    assert!(rows.iter().all(|row| row["p50_us"].as_f64().unwrap() > 0.0), "{rows:?}");
    assert!(told.contains("fd / plain") && told.contains("gpu-ipc read"), "{told}");
}

#[test]
#[ignore = "needs a GPU or a stand-in for one: cargo xtask test --only gpu"]
fn copiers_are_compared() {
    let line = "peer-copy --seconds 0.01 --sizes 256,100003 --tasks 1,40 --blocks 1,3 --json -";
    let output = finish(bench(line).spawn().unwrap());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let rows = rows(&output.stdout);
    assert_eq!(rows.len(), 4 * 2 * 2, "copiers, sizes, tasks: {told}");
    let count = |name: &str| rows.iter().filter(|row| row["copier"] == name).count();
    assert_eq!((count("launched"), count("resident"), count("engines")), (4, 8, 4), "{told}");
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("p50_us") > 0.0 && number("p99_us") >= number("p50_us"), "{row}");
        assert!(number("gbps") > 0.0, "{row}");
        assert_eq!(row["blocks"].is_null(), row["copier"] != "resident", "{row}");
    }
    assert!(told.contains("resident x3") && told.contains("GB/s"), "{told}");
}

#[test]
fn the_gpu_driven_engine_is_measured_without_a_gpu() {
    let line = "gpu-local --simulate --threads 1 --warps 2 --commands 20000 --rounds 200 --json -";
    let output = finish(bench(line).spawn().unwrap());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let rows = rows(&output.stdout);
    let whats: Vec<&str> = rows.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let wanted = ["push, one thread", "push, 32 at once", "round trip", "drained", "posted"];
    assert_eq!(whats, wanted, "{told}");
    assert!(told.contains("Mops/s"), "{told}");
}

#[test]
fn two_ranks_are_measured_without_a_gpu_on_every_path() {
    for path in ["auto", "tcp", "local-ring"] {
        let port = free_port();
        let line = format!(
            "gpu-remote --simulate --path {path} --port {port} --threads 1 --sizes 256,8K --puts 500 \
             --rounds 50 --layers 5 --steps 5 --json -"
        );
        let output = finish(bench(&line).spawn().unwrap());
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{path}: {told}");
        let rows = rows(&output.stdout);
        let count = |what: &str| rows.iter().filter(|row| row["what"] == what).count();
        let counts = ["one way", "puts", "puts with counts", "forwarded", "step + sent"].map(count);
        assert_eq!(counts, [2, 2, 2, 2, 1], "{path}: {told}");
    }
}

/// A free port below the kernel's ephemeral range, so that no other socket gets it by chance.
fn free_port() -> u16 {
    let mut ports = (0..1000).map(|at| 20_000 + (std::process::id() as u16 % 9000) + at);
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(is_free).expect("no port is free")
}

#[test]
fn a_gpu_that_is_not_there_is_one_line() {
    let output = finish(bench("--memory gpu --gpu 4000").spawn().unwrap());
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("GPU") && told.lines().count() == 1, "{told}");
}

#[test]
fn a_killed_second_process_ends_the_run_with_one_line() {
    let child = bench("--seconds 600 --sizes 4K --paths tcp").spawn().unwrap();
    let second = working_second(child.id());
    Command::new("kill").args(["-9", &second.to_string()]).status().unwrap();
    let output = finish(child);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(lines[0].starts_with("peerway: the second process ended"), "{said}");
    assert!(lines[0].contains("signal: 9"), "{said}");
}

#[test]
fn the_log_of_the_engine_is_shown_only_at_a_level_that_is_set() {
    let line = "--seconds 0.01 --sizes 4K --iovs 1 --paths tcp --json -";
    let logged = |level: &str| {
        let output = finish(bench(line).env("PEERWAY_LOG_LEVEL", level).spawn().unwrap());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        said.lines().any(|line| line.contains("peerway::"))
    };
    assert!(logged("debug"));
    assert!(!logged(""));
}

#[test]
fn a_setting_without_effect_is_one_line() {
    let mut command = bench("--seconds 0.01 --sizes 4K --iovs 1 --paths tcp,local-ring --json -");
    let child = command.env("UCCL_DEBUG_SUBSYS", "P2P").spawn().unwrap();
    let output = finish(child);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let about: Vec<&str> = said.lines().filter(|line| line.contains("UCCL_DEBUG_SUBSYS")).collect();
    assert_eq!(about.len(), 1, "{said}");
    assert!(about[0].starts_with("peerway: warning: UCCL_DEBUG_SUBSYS has no effect"), "{said}");
}

#[test]
fn a_misspelt_setting_is_one_line_with_the_likely_name() {
    let mut command = bench("--seconds 0.01 --sizes 4K --iovs 1 --paths local-ring --json -");
    let output = finish(command.env("PEERWAY_TRANSPROT", "tcp").spawn().unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let about: Vec<&str> = said.lines().filter(|line| line.contains("TRANSPROT")).collect();
    let wanted =
        "peerway: warning: PEERWAY_TRANSPROT is not a setting; did you mean PEERWAY_TRANSPORT?";
    assert_eq!(about, [wanted], "{said}");
}

#[test]
fn a_killed_first_process_leaves_no_second_one() {
    let mut child = bench("--seconds 600 --sizes 4K --paths local-ring").spawn().unwrap();
    let second = working_second(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the second process is still alive", || !is_alive(second));
}

#[test]
fn two_sides_meet_over_tcp() {
    let mut server = bench("serve 127.0.0.1:0").spawn().unwrap();
    let mut told = Vec::new();
    let mut byte = [0];
    let address = loop {
        // Read byte by byte, because the rest of the output may never come.
        assert_eq!(server.stdout.as_mut().unwrap().read(&mut byte).unwrap(), 1);
        told.push(byte[0]);
        let text = String::from_utf8_lossy(&told);
        if let Some((_, rest)) = text.split_once("bench connect ")
            && let Some((address, _)) = rest.split_once('\n')
        {
            break address.to_owned();
        }
    };
    let line = format!("connect {address} --seconds 0.01 --sizes 4K --iovs 1 --json -");
    let output = finish(bench(&line).spawn().unwrap());
    server.kill().unwrap();
    server.wait().unwrap();
    let table = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{table}");
    let rows = rows(&output.stdout);
    // Between two processes of one host, `auto` selects a mapping. The second path is tcp.
    let paths: Vec<&str> = rows.iter().map(|row| row["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["local-map", "local-map", "tcp", "tcp"], "{table}");
}

#[test]
fn what_cannot_be_measured_is_one_line_with_the_reason() {
    for (line, reason) in [("--paths ib --sizes 256", "ib"), ("--sizes 64T", "free memory")] {
        let output = finish(bench(line).spawn().unwrap());
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(reason) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn an_address_without_a_server_is_one_line() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = finish(bench(&format!("connect {free}")).spawn().unwrap());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("peerway: cannot reach") && said.lines().count() == 1, "{said}");
}
