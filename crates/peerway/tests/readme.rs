//! The example of README.md, compiled and run.

use peerway::{Access, Endpoint};

/// The code of README.md. `the_code_is_that_of_the_readme` compares the two.
#[rustfmt::skip]
fn example() -> Result<(), Box<dyn std::error::Error>> {
    let owner = Endpoint::new()?;
    let memory = owner.allocate(1 << 30)?;                    // or register your own
    let descriptor = memory.advertise(Access::READ_WRITE)?;   // 64 bytes
    let metadata = owner.metadata();                          // hand both over by any means

    let endpoint = Endpoint::new()?;                          // usually another process or machine
    let peer = endpoint.connect(&metadata)?;
    let remote = peer.import(&descriptor)?;
    let ours = endpoint.register(vec![7u8; 1 << 20])?;
    peer.write(&ours.all(), &remote.slice(0..1 << 20))?;      // blocking; `post` returns at once

    Ok(())
}

#[test]
fn the_example_runs() {
    example().unwrap();
}

#[test]
fn the_code_is_that_of_the_readme() {
    let readme = include_str!("../../../README.md");
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).collect();
    assert_eq!(blocks.len(), 1, "this program has one example");
    let code = blocks[0].split("```").next().unwrap();
    let (uses, body) = code.split_once("\n\n").expect("imports stand before the code");
    let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    let source = include_str!("readme.rs");
    assert!(source.contains(&format!("\n{uses}\n")), "the imports differ");
    let (_, copy) = source.split_once("Box<dyn std::error::Error>> {\n").unwrap();
    let (copy, _) = copy.split_once("\n\n    Ok(())\n}\n").unwrap();
    assert_eq!(lines(copy), lines(body), "copy the code of README.md into `example`");
}
