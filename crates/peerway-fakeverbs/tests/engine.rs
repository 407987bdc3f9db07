//! Runs the engine's tests for real devices on this library: for connections and datagrams, on a
//! fabric without faults and on bad ones.
//!
//! Every test runs in its own process, because a script counts and times the actions of one
//! process.

mod support;

#[path = "../../peerway/tests/verbs.rs"]
mod verbs;

/// The names of all tests. `all_tests_are_named` checks that the list is complete.
const TESTS: [&str; 7] = [
    "commands_of_kernels_are_carried_out_whatever_order_completions_come_in",
    "writes_and_reads_of_every_shape_arrive",
    "counts_and_notifications_come_after_the_bytes_and_once",
    "a_revoked_region_is_quiet_at_once_and_others_go_on",
    "many_threads_and_transfers_share_the_queue_pairs",
    "memory_mapped_anew_under_a_registration_is_noticed",
    "large_reads_and_writes_arrive_whole",
];

/// Connections and datagrams: the pin of the tests, and the beginning of the script.
const KINDS: [(&str, &str); 2] = [("ib", ""), ("efa", "efa,")];

/// Runs every test with this script, for both kinds of devices. The engine's log of at least one
/// test must contain `sign`, which shows that the fault occurred.
fn pass_with(script: &str, sign: &str) {
    for (pin, kind) in KINDS {
        let logs = TESTS.map(|test| pass(test, pin, &format!("{kind}{script}")));
        let seen = logs.iter().any(|log| log.contains(sign));
        assert!(seen, "`{script}` caused no {sign:?} in the log for {pin}");
    }
}

/// Runs one test in a process with the library and this script, and returns its output.
fn pass(test: &str, pin: &str, script: &str) -> String {
    let fabric = format!("{:x}-{pin}-{test}", std::process::id());
    let said = support::pass(
        support::engine(script, &fabric)
            .args(["--exact", &format!("verbs::{test}"), "--ignored", "--nocapture"])
            .env("PEERWAY_TEST_PIN", pin)
            .env("PEERWAY_TEST_LOG", "1"),
    );
    assert!(said.contains(" 1 passed"), "{test} of {pin} with `{script}`: {said}");
    said
}

#[test]
fn all_tests_are_named() {
    let (_, listed) = support::run(support::program().args(["--list", "verbs::"]));
    let listed = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let mut listed: Vec<&str> = listed.filter_map(|name| name.strip_prefix("verbs::")).collect();
    let mut named = TESTS.to_vec();
    listed.sort_unstable();
    named.sort_unstable();
    assert_eq!(listed, named);
}

#[test]
fn they_pass() {
    pass_with("", "");
}

#[test]
fn they_pass_on_a_bad_fabric() {
    pass_with("seed=7,reorder=5%,drop=0.5%,rnr=5%,late=10%,latency=20us,delay=300us", "");
}

#[test]
fn they_pass_while_queue_pairs_fail_and_are_replaced() {
    pass_with("seed=8,flush_after=150", "queue pair replaced");
}

#[test]
fn they_pass_when_a_device_goes_away() {
    pass_with("remove=fake1@12", "queue pair failed");
}

#[test]
fn they_pass_while_a_link_is_down() {
    for link in ["fake0", "fake1"] {
        pass_with(&format!("linkdown={link}@100..1500"), "queue pair failed");
    }
}
