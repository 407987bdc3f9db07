//! One process owns weights, and several processes pull each version when a counter announces it.
//!
//! The owner keeps two versions, so that it writes the next one while readers pull the last one.
//! `cargo run --release --package peerway --example weight_sync`

use std::process::{Child, Command};
use std::time::Duration;

use peerway::{Access, Endpoint, Peer};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Bytes of the weights.
const LEN: u64 = 8 << 20;
const VERSIONS: u64 = 5;
const READERS: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(60);
/// A reader's counter: how many versions the owner has published.
const PUBLISHED: u32 = 1;
/// The owner's counters: how many times readers have pulled even versions, and odd ones.
const PULLED: [u32; 2] = [2, 3];

fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [metadata, descriptor] => read(&unhex(metadata)?, &unhex(descriptor)?),
        _ => own(),
    }
}

fn own() -> Result {
    let endpoint = Endpoint::new()?;
    let weights = endpoint.allocate(2 * LEN as usize)?;
    let names = [hex(&endpoint.metadata()), hex(&weights.advertise(Access::READ)?)];
    let program = std::env::current_exe()?;
    let start = || Command::new(&program).args(&names).spawn();
    let mut readers = (0..READERS).map(|_| start()).collect::<std::io::Result<Vec<Child>>>()?;
    let peers = (0..READERS).map(|_| endpoint.accept(PATIENCE));
    let peers = peers.collect::<std::result::Result<Vec<Peer>, _>>()?;

    for version in 1..=VERSIONS {
        wait_for_pulls(&endpoint, version)?;
        weights.fill(half(version), LEN, version as u8)?;
        for peer in &peers {
            peer.count(PUBLISHED)?.join().ok()?;
        }
    }
    wait_for_pulls(&endpoint, VERSIONS + 1)?;
    wait_for_pulls(&endpoint, VERSIONS + 2)?;
    for reader in &mut readers {
        if !reader.wait()?.success() {
            return Err("a reader failed".into());
        }
    }
    println!("{READERS} readers pulled {VERSIONS} versions");
    Ok(())
}

/// Waits until every reader has pulled the version whose place `version` takes.
fn wait_for_pulls(endpoint: &Endpoint, version: u64) -> Result {
    // One counter for all versions would not do: a fast reader would count for a slow one.
    let wanted = READERS * ((version - 1) / 2);
    let pulls = endpoint.wait_counter(PULLED[version as usize % 2], wanted, PATIENCE);
    if pulls < wanted { Err("a reader has not pulled its version in time".into()) } else { Ok(()) }
}

fn read(metadata: &[u8], descriptor: &[u8]) -> Result {
    let endpoint = Endpoint::new()?;
    let owner = endpoint.connect(metadata)?;
    let remote = owner.import(descriptor)?;
    let weights = endpoint.allocate(LEN as usize)?;
    let mut bytes = vec![0; LEN as usize];
    for version in 1..=VERSIONS {
        if endpoint.wait_counter(PUBLISHED, version, PATIENCE) < version {
            return Err(format!("version {version} was not published").into());
        }
        let from = half(version);
        owner.read(&weights.all(), &remote.slice(from..from + LEN))?;
        owner.count(PULLED[version as usize % 2])?.join().ok()?;
        weights.read_at(0, &mut bytes)?;
        if bytes.iter().any(|byte| u64::from(*byte) != version) {
            return Err(format!("version {version} is mixed with another one").into());
        }
    }
    println!("versions 1 to {VERSIONS} pulled by {}", owner.path());
    Ok(())
}

/// Where a version begins: odd and even versions take turns.
fn half(version: u64) -> u64 {
    version % 2 * LEN
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}
