//! Addresses without a usable peer: each connect fails with a typed error, in bounded time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{ConnectError, Endpoint};
use peerway_core::ids::Incarnation;
use peerway_core::metadata::{Metadata, NetworkId};
use peerway_core::wire::{Control, FrameError, Kind};
use peerway_testkit::raw::{control, frame};

use crate::healthy::Healthy;
use crate::world::{Verdict, World, fine};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let a = world.options().build()?;
    let healthy = Healthy::start(world, &a)?;
    let timed = |what: &str, metadata: &[u8]| -> Result<ConnectError> {
        world.step(what);
        let start = Instant::now();
        let result = a.connect(metadata);
        let took = start.elapsed();
        let bound = world.options().connect + world.profile.slack;
        ensure!(took < bound, "{what}: the error took {took:?}");
        match result {
            Ok(peer) => bail!("{what}: connected to {peer:?}"),
            Err(error) => {
                ensure!(!error.to_string().is_empty(), "{what}: the error has no text");
                Ok(error)
            }
        }
    };
    let to = |addr: SocketAddr| Metadata {
        incarnation: Incarnation([5; 16]),
        network: NetworkId::default(),
        addresses: vec![addr],
    };

    for bad in [&b""[..], b"PWMD", b"\x00", &[0xFF; 100], b"http://example"] {
        let error = timed("malformed metadata", bad)?;
        ensure!(matches!(error, ConnectError::Metadata(_)), "malformed metadata: {error:?}");
    }
    let mut other = a.metadata();
    other[4] = 9;
    let error = timed("metadata of another version", &other)?;
    ensure!(matches!(error, ConnectError::Metadata(_)), "{error:?}");

    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let error = timed("a dead port", &to(closed).to_bytes())?;
    ensure!(matches!(error, ConnectError::Unreachable { .. }), "a dead port: {error:?}");
    // TEST-NET-1 has no hosts. A network may drop or refuse packets to it.
    let nowhere = SocketAddr::from(([192, 0, 2, 7], 9));
    let error = timed("a dead address", &to(nowhere).to_bytes())?;
    ensure!(
        matches!(
            error,
            // Some networks answer for every address.
            ConnectError::Unreachable { .. }
                | ConnectError::TimedOut { .. }
                | ConnectError::PeerMisbehaved { .. }
                | ConnectError::PeerIncompatible { .. }
                | ConnectError::NotSecure { .. }
        ),
        "a dead address: {error:?}"
    );
    let answers: [(&str, Answer); 6] = [
        ("an echo", Answer::Echo),
        (
            "a web server",
            Answer::Bytes(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".repeat(4)),
        ),
        ("one that says nothing", Answer::Silence),
        ("one that hangs up", Answer::HangUp),
        ("version 9", Answer::Bytes(version_nine())),
        (
            "one that answers out of turn",
            Answer::Bytes(control(&Control::LaneOpened { proof: [0; 32] })),
        ),
    ];
    for (what, answer) in answers {
        let addr = listener(answer)?;
        let error = timed(what, &to(addr).to_bytes())?;
        let fits = match what {
            "version 9" => {
                matches!(error, ConnectError::PeerIncompatible { why: FrameError::Version(9), .. })
            }
            "a web server" => {
                matches!(error, ConnectError::PeerIncompatible { why: FrameError::NotPeerway, .. })
            }
            "one that says nothing" => matches!(error, ConnectError::TimedOut { .. }),
            "one that hangs up" => {
                matches!(
                    error,
                    ConnectError::Unreachable { .. } | ConnectError::PeerMisbehaved { .. }
                )
            }
            "an echo" => matches!(error, ConnectError::NotSecure { .. }),
            _ => matches!(error, ConnectError::PeerIncompatible { .. }),
        };
        ensure!(fits, "{what}: {error:?}");
    }
    world.step("an endpoint with another incarnation than expected");
    let b = world.options().build()?;
    let network = NetworkId::default();
    let wrong = Metadata {
        incarnation: Incarnation([9; 16]),
        network,
        ..Metadata::from_bytes(&b.metadata())?
    };
    let error = timed("another incarnation", &wrong.to_bytes())?;
    ensure!(matches!(error, ConnectError::OtherIncarnation { .. }), "{error:?}");
    world.step("a closed endpoint");
    let closed = Endpoint::builder().transport(world.transport.pin()).build()?;
    closed.close();
    ensure!(
        matches!(closed.connect(&b.metadata()), Err(ConnectError::EndpointClosed)),
        "a closed endpoint connected"
    );
    ensure!(closed.allocate(100).is_err(), "a closed endpoint allocated");
    healthy.finish(world)?;
    fine()
}

enum Answer {
    Echo,
    Bytes(Vec<u8>),
    Silence,
    HangUp,
}

fn version_nine() -> Vec<u8> {
    let mut bytes = frame(Kind::Control, |_| {}, &[], &[0; 8]);
    // The version lies at byte 2 of the header.
    bytes[2] = 9;
    bytes
}

/// A listener that is not a peer. Its thread ends with the process.
fn listener(answer: Answer) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("a listener")?;
    let addr = listener.local_addr()?;
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut buffer = [0; 4096];
            match &answer {
                Answer::HangUp => continue,
                Answer::Silence => {}
                Answer::Bytes(bytes) => {
                    let _ = stream.read(&mut buffer);
                    let _ = stream.write_all(bytes);
                }
                Answer::Echo => {
                    let n = stream.read(&mut buffer).unwrap_or(0);
                    let _ = stream.write_all(&buffer[..n]);
                }
            }
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            kept.push(stream);
        }
    });
    Ok(addr)
}
