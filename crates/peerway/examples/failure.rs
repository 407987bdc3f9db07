//! What a program sees when its peer stops or dies: deadlines, cancels, fences, and a new session.
//! `cargo run --release --package peerway --example failure`

use std::io::{BufRead, BufReader, read_to_string};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use peerway::{Access, Batch, Ended, Endpoint, Peer, Pin, Region, Transfer};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// More than the sockets of both processes hold.
const LEN: usize = 64 << 20;

fn main() -> Result {
    match std::env::args().nth(1).as_deref() {
        Some("owner") => own(),
        _ => write(),
    }
}

fn endpoint() -> Result<Endpoint> {
    // A peer that is silent for a minute counts as gone. This bounds every wait below.
    Ok(Endpoint::builder().transport(Pin::Tcp).detect(Duration::from_secs(60)).build()?)
}

fn own() -> Result {
    let endpoint = endpoint()?;
    let memory = endpoint.allocate(LEN)?;
    println!("{} {}", hex(&endpoint.metadata()), hex(&memory.advertise(Access::WRITE)?));
    read_to_string(std::io::stdin())?;
    Ok(())
}

fn write() -> Result {
    let endpoint = endpoint()?;
    let ours = endpoint.allocate(LEN)?;
    let (mut owner, peer, batch) = session(&endpoint, &ours)?;
    peer.run(&batch)?.ok()?;

    // The peer stops. A deadline and a cancel end transfers without its help. An open fence says
    // that bytes are on their way, which may still change the peer's memory.
    send("STOP", &owner)?;
    let late = peer.post(&batch.clone().deadline(Duration::from_millis(200)))?;
    println!("with a deadline: {}", late.join());
    let cancelled = peer.post(&batch)?;
    cancelled.cancel();
    println!("cancelled: {}", cancelled.join());

    // The peer goes on and acknowledges what was sent. From then on the fence is held.
    send("CONT", &owner)?;
    println!("with a deadline, later: {}", fenced(&late));
    println!("cancelled, later: {}", fenced(&cancelled));

    // The peer dies with a transfer in flight. The transfer fails, and other peers are served.
    send("STOP", &owner)?;
    let lost = peer.post(&batch)?;
    owner.kill()?;
    owner.wait()?;
    println!("to a dead peer: {}", lost.join());

    // A restarted peer is another one: new metadata, new descriptors, a new session.
    let (_owner, again, batch) = session(&endpoint, &ours)?;
    let ended = again.run(&batch)?;
    println!("the old peer is alive: {}. To the new one: {ended}", peer.is_alive());
    Ok(())
}

/// Starts an owner of memory, connects to it and makes a batch that writes all of its memory.
fn session(endpoint: &Endpoint, ours: &Region) -> Result<(Child, Peer, Batch)> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut owner = command.arg("owner").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(owner.stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
    let (metadata, descriptor) = line.trim().split_once(' ').ok_or("the owner failed")?;
    let peer = endpoint.connect(&unhex(metadata)?)?;
    let batch = Batch::write(&ours.all(), &peer.import(&unhex(descriptor)?)?.all())?;
    Ok((owner, peer, batch))
}

/// Waits for as long as the engine can still learn that the fence holds.
fn fenced(transfer: &Transfer) -> Ended {
    while transfer.is_fence_pending() {
        std::thread::sleep(Duration::from_millis(1));
    }
    transfer.join()
}

fn send(signal: &str, to: &Child) -> Result {
    let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", to.id())]).status()?;
    sent.success().then_some(()).ok_or_else(|| "the signal was not sent".into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}
