//! Runs the tests of `peerway-sys` for real devices on this library: on a fabric without faults,
//! and on one with reordered packets, missing receives and late completions.

mod support;

#[path = "../../peerway-sys/tests/device.rs"]
mod device;

/// Runs the tests of `device` in a process with the library and this script.
fn pass_with(script: &str) {
    let mut command = support::engine(script, &format!("d{:x}-{script}", std::process::id()));
    support::pass(command.args(["device::", "--ignored", "--nocapture"]));
}

#[test]
fn they_pass() {
    pass_with("");
}

#[test]
fn they_pass_on_a_bad_fabric() {
    pass_with("seed=5,reorder=20%,rnr=20%,late=30%,latency=30us,delay=2ms");
}
