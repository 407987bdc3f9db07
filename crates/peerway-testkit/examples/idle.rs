//! The processor time of an idle endpoint, without peers and with 20 local and 20 TCP ones.
//!
//! ```sh
//! cargo run --release -p peerway-testkit --example idle -- 20
//! ```
//!
//! The argument is the number of seconds per row. The peers live in a second process, this program
//! again. Each row counts the ticks (10 ms) of user and kernel time of the first process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use peerway::{Endpoint, PathKind, Pin};
use peerway_testkit::hex;
use peerway_testkit::procfs::ticks;

/// Peers of each kind.
const PEERS: usize = 20;
/// The argument that makes this program the second process.
const SECOND: &str = "second";

fn main() -> Result<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some(SECOND) {
        return serve();
    }
    let seconds: u64 = argument.as_deref().unwrap_or("20").parse().context("expected seconds")?;
    println!("{:<30} {:>6} {:>12}", "idle endpoint", "ticks", "% of a core");
    let endpoint = Endpoint::new()?;
    measure("no peers", seconds)?;

    let (mut second, metadata) = start()?;
    let mut peers = Vec::new();
    for (number, metadata) in metadata.iter().enumerate() {
        let peer = endpoint.connect(metadata)?;
        let is_tcp = peer.path().kind == PathKind::Tcp;
        ensure!(is_tcp == (number >= PEERS), "peer {number} has the path {}", peer.path());
        peer.notify(b"hello")?.join();
        peers.push(peer);
        if number + 1 == PEERS {
            measure("20 local peers", seconds)?;
        }
    }
    measure("20 local and 20 tcp peers", seconds)?;
    ensure!(peers.iter().all(|peer| peer.is_alive()), "a session ended");
    drop(second.stdin.take());
    second.wait()?;
    Ok(())
}

/// Prints the ticks of this process over some seconds.
fn measure(what: &str, seconds: u64) -> Result<()> {
    let pid = std::process::id();
    // Threads go to sleep after the work before.
    std::thread::sleep(Duration::from_secs(1));
    let before = ticks(pid)?;
    std::thread::sleep(Duration::from_secs(seconds));
    let used = ticks(pid)? - before;
    println!("{what:<30} {used:>6} {:>12.2}", used as f64 / seconds as f64);
    Ok(())
}

/// Starts the second process. Returns the metadata of its endpoints.
fn start() -> Result<(Child, Vec<Vec<u8>>)> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(SECOND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
    let metadata: Vec<Vec<u8>> = lines
        .take(2 * PEERS)
        .map(|line| hex::decode(&line?).context("not hexadecimal"))
        .collect::<Result<_>>()?;
    ensure!(metadata.len() == 2 * PEERS, "the second process ended early");
    Ok((child, metadata))
}

/// The second process: owns the peers until its standard input closes.
fn serve() -> Result<()> {
    let mut endpoints = Vec::new();
    for number in 0..2 * PEERS {
        let pin = if number < PEERS { Pin::Auto } else { Pin::Tcp };
        endpoints.push(Endpoint::builder().transport(pin).build()?);
    }
    let mut output = std::io::stdout().lock();
    for endpoint in &endpoints {
        writeln!(output, "{}", hex::encode(&endpoint.metadata()))?;
    }
    output.flush()?;
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
