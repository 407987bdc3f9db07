//! `peerway doctor` as a user runs it.

use std::process::{Command, Output};

#[test]
fn it_says_where_an_endpoint_would_listen() {
    let text = doctor().stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("an endpoint here would listen on"), "{text}");
}

fn doctor() -> Output {
    Command::new(env!("CARGO_BIN_EXE_peerway")).arg("doctor").output().expect("it starts")
}

#[test]
fn endpoints_that_close_in_order_are_not_lost() {
    // The endpoints that try the paths end at about the same time. Each must hear the other's
    // goodbye, even if a session had only just been accepted.
    for _ in 0..20 {
        let output = doctor();
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(!log.contains("lost the session"), "{log}");
    }
}
