//! Hands the KV blocks of a request over to another process, by block list and with a notification.
//!
//! The prefill process writes into free blocks of the decode process. The notification names the
//! request and its blocks. `cargo run --release --package peerway --example hand_over`

use std::io::{BufRead, BufReader, read_to_string};
use std::process::{Command, Stdio};
use std::time::Duration;

use peerway::{Access, Batch, Endpoint};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Bytes of a KV block.
const BLOCK: u64 = 64 << 10;
/// Blocks of each process.
const BLOCKS: u64 = 64;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result {
    match std::env::args().nth(1).as_deref() {
        Some("decode") => decode(),
        _ => prefill(),
    }
}

/// Owns free blocks, and reads them when a notification names them.
fn decode() -> Result {
    let endpoint = Endpoint::new()?;
    let cache = endpoint.allocate((BLOCK * BLOCKS) as usize)?;
    let descriptor = cache.advertise(Access::WRITE)?;
    // Metadata and descriptors are bytes that travel by any means. Here it is a pipe.
    println!("{} {}", hex(&endpoint.metadata()), hex(&descriptor));

    let notification = endpoint.notification(PATIENCE).ok_or("no request came")?;
    let message = String::from_utf8(notification.message)?;
    let (request, blocks) = message.split_once(": ").ok_or("a message without blocks")?;
    // A notification is visible only after the bytes of its transfer.
    let mut bytes = vec![0; BLOCK as usize];
    for (n, block) in blocks.split(' ').enumerate() {
        cache.read_at(block.parse::<u64>()? * BLOCK, &mut bytes)?;
        if bytes.iter().any(|byte| usize::from(*byte) != n + 1) {
            return Err(format!("block {block} has other bytes").into());
        }
    }
    println!("{request} is complete in blocks {blocks}");
    // Stay until the other process has seen the end of its transfer and closes the pipe.
    read_to_string(std::io::stdin())?;
    Ok(())
}

/// Computes blocks and writes them into the other process.
fn prefill() -> Result {
    let mut decode = Command::new(std::env::current_exe()?)
        .arg("decode")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(decode.stdout.take().ok_or("no pipe")?).lines();
    let line = lines.next().ok_or("the decode process ended")??;
    let (metadata, descriptor) = line.split_once(' ').ok_or("no descriptor")?;

    let endpoint = Endpoint::new()?;
    let cache = endpoint.allocate((BLOCK * BLOCKS) as usize)?;
    // The blocks that hold the request here, and free blocks there, which a scheduler has chosen.
    let (ours, theirs) = ([17, 4, 60], [9, 2, 33]);
    for (n, block) in ours.into_iter().enumerate() {
        cache.fill(u64::from(block) * BLOCK, BLOCK, n as u8 + 1)?;
    }

    let peer = endpoint.connect(&unhex(metadata)?)?;
    let remote = peer.import(&unhex(descriptor)?)?;
    let batch = Batch::write_blocks(
        cache.blocks(0, BLOCK, BLOCK, &ours),
        remote.blocks(0, BLOCK, BLOCK, &theirs),
    )?
    .notify(b"request 7: 9 2 33")?;
    // Returns at once. The blocks must stay as they are until the transfer has ended.
    let transfer = peer.post(&batch)?;
    transfer.join().ok()?;
    println!("{} bytes written by {}", batch.total(), peer.path());

    println!("{}", lines.next().ok_or("the decode process ended")??);
    drop(decode.stdin.take());
    if !decode.wait()?.success() {
        return Err("the decode process failed".into());
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}
