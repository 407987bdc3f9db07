//! A connect keeps its single time-out, however slowly the other side answers.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{ConnectError, Endpoint};
use peerway_core::metadata::Metadata;
use peerway_core::wire::{Control, Kind, MAX_CONTROL};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame};

use crate::world::{Transport, Verdict, World, fine_with};

/// The time-out under test.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two bytes. Each byte arrives well within the time-out.
const DRIP: Duration = Duration::from_millis(100);
/// A connect that takes this long ignores its time-out. The slow answer ends here too.
const WATCHDOG: Duration = Duration::from_secs(20);

/// The answer that arrives one byte at a time, or never.
#[derive(Clone, Copy, Debug)]
enum Slow {
    Welcome,
    LaneOpened,
    QueuesOpened,
    Ready,
    /// The answer on the local socket, which never arrives.
    Attached,
}

impl Slow {
    fn is(self, answer: &Control) -> bool {
        match self {
            Self::Welcome => matches!(answer, Control::Welcome(_)),
            Self::LaneOpened => matches!(answer, Control::LaneOpened),
            Self::QueuesOpened => matches!(answer, Control::QueuesOpened { .. }),
            Self::Ready => matches!(answer, Control::Ready(_)),
            Self::Attached => false,
        }
    }

    fn all(transport: Transport) -> &'static [Self] {
        match transport {
            Transport::SameProcess => &[Self::Welcome, Self::Ready],
            Transport::LocalMap | Transport::LocalCma | Transport::LocalRing => {
                &[Self::Welcome, Self::Attached, Self::Ready]
            }
            Transport::Tcp => &[Self::Welcome, Self::LaneOpened, Self::Ready],
            Transport::Verbs | Transport::Efa => &[Self::Welcome, Self::QueuesOpened, Self::Ready],
        }
    }
}

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let a = world.options().build()?;
    let b = world.remote(&world.options())?;
    let to = Metadata::from_bytes(&b.metadata)?;
    let mut stages = Vec::new();
    for &slow in Slow::all(world.transport) {
        world.step(format!("{slow:?} is slow"));
        let between = Between::start(slow, b.addr()?)?;
        let slow_way = Metadata { addresses: vec![between.addr], ..to.clone() };
        let stage = times_out(&a, &slow_way).with_context(|| format!("{slow:?} is slow"))?;
        stages.push(stage);
    }
    world.step("three addresses, all slow");
    let ways: Vec<Between> =
        (0..3).map(|_| Between::start(Slow::Welcome, b.addr()?)).collect::<Result<_>>()?;
    let addresses = ways.iter().map(|way| way.addr).collect();
    times_out(&a, &Metadata { addresses, ..to }).context("three addresses")?;
    world.step("a direct connect works");
    let peer = world.connect(&a, &b)?;
    peer.notify(b"here")?.join().ok()?;
    fine_with(format!("timed out while {}", stages.join("; ")))
}

/// Connects, which must fail by the time-out. Returns the stage that the error names.
fn times_out(a: &Endpoint, to: &Metadata) -> Result<String> {
    let start = Instant::now();
    let result = a.connect_within(&to.to_bytes(), TIMEOUT);
    let took = start.elapsed();
    ensure!(took < WATCHDOG, "a connect with a time-out of {TIMEOUT:?} took {took:?}: {result:?}");
    ensure!(
        took >= TIMEOUT,
        "a connect with a time-out of {TIMEOUT:?} ended after {took:?}: {result:?}"
    );
    let Err(error) = result else { bail!("the connect succeeded") };
    let text = error.to_string();
    let ConnectError::TimedOut { addr, millis, stage } = error else { bail!("{error:?}") };
    ensure!(to.addresses.contains(&addr), "the error names {addr}");
    ensure!(u128::from(millis) == TIMEOUT.as_millis(), "the error names {millis} ms");
    let named = text.contains(&addr.to_string()) && !stage.is_empty() && text.contains(stage);
    ensure!(named, "the error does not name the address and the stage: {text}");
    Ok(stage.to_owned())
}

/// Relays the handshake to a peer, up to the slow answer. Its threads end with the process.
struct Between {
    addr: SocketAddr,
}

impl Between {
    fn start(slow: Slow, peer: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a listener")?;
        let addr = listener.local_addr()?;
        // No thread accepts on this socket: connecting succeeds, and no answer comes.
        let silent = format!("peerway-silent-{}-{}", std::process::id(), addr.port());
        let socket = match slow {
            Slow::Attached => Some(silent_socket(&silent)?),
            _ => None,
        };
        std::thread::spawn(move || {
            let _kept = socket;
            for stream in listener.incoming().flatten() {
                let silent = silent.clone();
                std::thread::spawn(move || pass_on(stream, slow, peer, &silent));
            }
        });
        Ok(Self { addr })
    }
}

/// Relays one message at a time: each message of the opener has exactly one answer.
fn pass_on(stream: TcpStream, slow: Slow, peer: SocketAddr, silent: &str) -> Result<()> {
    let mut random = Random::new(u64::from(peer.port()));
    let mut near = Raw::over(stream, &mut random)?;
    let mut far = Raw::connect(peer, &mut random)?;
    for stream in [&near.stream, &far.stream] {
        stream.set_read_timeout(Some(WATCHDOG))?;
    }
    loop {
        let asked = near.control()?;
        far.send(&control(&asked))?;
        let mut answer = far.control()?;
        if slow.is(&answer) {
            return drip(&mut near);
        }
        if let (Slow::Attached, Control::Welcome(welcome)) = (slow, &mut answer) {
            silent.clone_into(&mut welcome.local);
        }
        near.send(&control(&answer))?;
    }
}

/// Sends a header that announces a long message, then one byte at a time.
fn drip(near: &mut Raw) -> Result<()> {
    use std::io::Write;
    let bytes = frame(Kind::Control, |_| {}, &[], &[0; MAX_CONTROL]);
    let until = Instant::now() + WATCHDOG;
    for byte in &bytes {
        near.stream.write_all(&[*byte])?;
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(DRIP);
    }
    Ok(())
}

fn silent_socket(name: &str) -> Result<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, 8)?;
    Ok(socket)
}
