//! Runs the tests of `peerway-sys` for real devices on this library: on a fabric without faults,
//! and on one with reordered packets, missing receives and late completions.

mod support;

#[path = "../../peerway-sys/tests/device.rs"]
mod device;

use std::process::Command;

/// Runs the tests of `device` in a process with the library and this script.
fn pass_with(script: &str) {
    let output = Command::new(std::env::current_exe().expect("the test program has a path"))
        .args(["device::", "--ignored", "--nocapture"])
        .env("PEERWAY_IBV_SO", support::library())
        .env("PEERWAY_FAKE_VERBS", script)
        .output()
        .expect("the test program starts again");
    let words = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains(" 0 passed"), "{said}{words}");
}

#[test]
fn they_pass() {
    pass_with("");
}

#[test]
fn they_pass_on_a_bad_fabric() {
    pass_with("seed=5,reorder=20%,rnr=20%,late=30%,latency=30us,delay=2ms");
}
