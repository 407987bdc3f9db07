//! Completions, pages of the manual and the version, as packagers generate them.

use std::process::{Command, Output};

fn peerway(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peerway")).args(line.split_whitespace()).output().unwrap()
}

fn printed(line: &str) -> String {
    let output = peerway(line);
    assert!(output.status.success(), "peerway {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_shell_has_completions_with_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = printed(&format!("completions {shell}"));
        for word in ["doctor", "bench", "nixl-install", "memory-kinds"] {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(peerway("completions tcsh").status.code(), Some(2));
}

#[test]
fn bash_accepts_its_completions_and_completes() {
    let script = format!(
        "{}\nCOMP_WORDS=(peerway do) COMP_CWORD=1\n_peerway peerway do peerway\necho \"${{COMPREPLY[@]}}\"",
        printed("completions bash")
    );
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "doctor", "{said}");
}

#[test]
fn every_command_has_a_page() {
    for (line, title, word) in [
        ("man", ".TH peerway 1", "doctor"),
        ("man bench", ".TH peerway-bench 1", "perftest"),
        ("man bench serve", ".TH peerway-bench-serve 1", "ADDR"),
        ("man doctor", ".TH peerway-doctor 1", "config"),
    ] {
        let page = printed(line);
        assert!(page.contains(title) && page.contains(word), "{line}: {page}");
    }
    let output = peerway("man bnech");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("no subcommand `bnech`") && said.contains("doctor"), "{said}");
}
