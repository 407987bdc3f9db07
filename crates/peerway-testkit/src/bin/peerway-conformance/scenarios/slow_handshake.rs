//! A connect keeps its single time-out, however slowly the other side answers.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{ConnectError, Endpoint};
use peerway_core::metadata::{Metadata, NetworkId};
use peerway_core::wire::{Control, Hello, Kind, MAX_CONTROL, Proof, Welcome};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame};
use peerway_testkit::tls::{Key, Side};

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
    /// The answer to the first bytes of TLS.
    Tls,
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
            Self::LaneOpened => matches!(answer, Control::LaneOpened { .. }),
            Self::QueuesOpened => matches!(answer, Control::QueuesOpened { .. }),
            Self::Ready => matches!(answer, Control::Ready(_)),
            Self::Tls | Self::Attached => false,
        }
    }

    fn all(transport: Transport) -> &'static [Self] {
        match transport {
            Transport::SameProcess => &[Self::Tls, Self::Welcome, Self::Ready],
            Transport::LocalMap | Transport::LocalCma | Transport::LocalRing => {
                &[Self::Tls, Self::Welcome, Self::Attached, Self::Ready]
            }
            Transport::Tcp | Transport::TcpIntegrity | Transport::TcpEncrypt => {
                &[Self::Tls, Self::Welcome, Self::LaneOpened, Self::Ready]
            }
            Transport::Verbs | Transport::Efa => {
                &[Self::Tls, Self::Welcome, Self::QueuesOpened, Self::Ready]
            }
        }
    }
}

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let a = world.options().build()?;
    let b = world.remote(&world.options())?;
    let mut stages = Vec::new();
    for &slow in Slow::all(world.transport) {
        world.step(format!("{slow:?} is slow"));
        let between = Between::start(slow, b.addr()?)?;
        let slow_way = between.metadata([&between]);
        let stage = times_out(&a, &slow_way).with_context(|| format!("{slow:?} is slow"))?;
        stages.push(stage);
    }
    world.step("three addresses, all slow");
    let ways: Vec<Between> =
        (0..3).map(|_| Between::start(Slow::Welcome, b.addr()?)).collect::<Result<_>>()?;
    times_out(&a, &ways[0].metadata(&ways)).context("three addresses")?;
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
    let ConnectError::TimedOut { addr, millis, stage, .. } = error else { bail!("{error:?}") };
    ensure!(to.addresses.contains(&addr), "the error names {addr}");
    ensure!(u128::from(millis) == TIMEOUT.as_millis(), "the error names {millis} ms");
    let named = text.contains(&addr.to_string()) && !stage.is_empty() && text.contains(stage);
    ensure!(named, "the error does not name the address and the stage: {text}");
    Ok(stage.to_owned())
}

/// A peer that answers as the real peer does, up to the slow answer. It asks the real peer for its
/// answers, in a session of its own. Its threads end with the process.
struct Between {
    addr: SocketAddr,
    key: Key,
}

/// What the connections of one such peer share.
struct Shared {
    slow: Slow,
    peer: SocketAddr,
    key: Key,
    /// The local socket of this peer.
    local: String,
    /// The session of the opener, by which it proves its lanes and its link.
    session: Mutex<Option<Proofs>>,
}

/// The proofs of the acceptor that the opener will ask for.
struct Proofs {
    link: Proof,
    lanes: Vec<Proof>,
}

impl Between {
    fn start(slow: Slow, peer: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a listener")?;
        let addr = listener.local_addr()?;
        // All of them have one key, so that metadata can name several addresses.
        let key = Key::new(&mut Random::new(0x510))?;
        let local = format!("peerway-slow-{}-{}", std::process::id(), addr.port());
        let socket = listen_locally(&local)?;
        let session = Mutex::default();
        let shared = Arc::new(Shared { slow, peer, key: key.clone(), local, session });
        let here = shared.clone();
        std::thread::spawn(move || {
            // With `Slow::Attached` no thread accepts: connecting succeeds, and no answer comes.
            while !matches!(slow, Slow::Attached) && attach(&socket, &here).is_ok() {}
            std::thread::sleep(WATCHDOG);
            drop(socket);
        });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        Ok(Self { addr, key })
    }

    fn metadata<'a>(&self, all: impl IntoIterator<Item = &'a Self>) -> Metadata {
        let addresses = all.into_iter().map(|between| between.addr).collect();
        let network = NetworkId::default();
        Metadata { incarnation: self.key.incarnation, network, addresses }
    }
}

impl Shared {
    /// Serves one connection: a session or a lane.
    fn serve(&self, stream: TcpStream) -> Result<()> {
        let mut random = Random::new(u64::from(self.peer.port()));
        let mut first = [0];
        stream.peek(&mut first)?;
        let mut near = Raw::over(stream, &mut random)?;
        near.stream.set_read_timeout(Some(WATCHDOG))?;
        if first != [22] {
            let Control::OpenLane { lane, .. } = near.control()? else { bail!("no lane") };
            let session = self.session.lock().unwrap();
            let proofs = session.as_ref().context("a lane of no session")?;
            let proof = *proofs.lanes.get(usize::from(lane)).context("too many lanes")?;
            drop(session);
            return self.answer(&mut near, &Control::LaneOpened { proof }).map(drop);
        }
        if matches!(self.slow, Slow::Tls) {
            return drip_bytes(&mut near, &[&b"\x16\x03\x03\x40\x00"[..], &[0; 1 << 14]].concat());
        }
        near.key = self.key.clone();
        near.secure_as_acceptor()?;
        let mut far = Raw::connect(self.peer, &mut random)?;
        far.stream.set_read_timeout(Some(WATCHDOG))?;
        far.secure()?;
        // Each message of the opener has exactly one answer.
        loop {
            let answer = match near.control()? {
                Control::Hello(hello) => {
                    near.session = hello.session;
                    far.session = hello.session;
                    let Control::Hello(own) = far.hello() else { bail!("no hello") };
                    let Hello { incarnation, host, .. } = own;
                    far.send(&control(&Control::Hello(Hello { incarnation, host, ..hello })))?;
                    self.keep_proofs(&near)?;
                    match far.control()? {
                        Control::Welcome(welcome) if !welcome.local.is_empty() => {
                            let local = self.local.clone();
                            Control::Welcome(Welcome { local, ..welcome })
                        }
                        answer => answer,
                    }
                }
                // The real peer has no link and no lanes, and would refuse.
                Control::Ready(ready) => Control::Ready(ready),
                message => {
                    far.send(&control(&message))?;
                    far.control()?
                }
            };
            if self.answer(&mut near, &answer)? {
                return Ok(());
            }
        }
    }

    /// Answers, or lets the answer drip. Returns whether it was the slow one.
    fn answer(&self, near: &mut Raw, answer: &Control) -> Result<bool> {
        if self.slow.is(answer) {
            return drip(near).map(|()| true);
        }
        near.send(&control(answer)).map(|()| false)
    }

    fn keep_proofs(&self, near: &Raw) -> Result<()> {
        let proof = |purpose, object: &[u8]| near.proof(Side::Acceptor, purpose, object);
        let lanes = (0..64_u16).map(|lane| proof("lane", &lane.to_le_bytes()));
        let proofs = Proofs { link: proof("link", &[])?, lanes: lanes.collect::<Result<_>>()? };
        *self.session.lock().unwrap() = Some(proofs);
        Ok(())
    }
}

/// Accepts a connection on the local socket and answers its attach.
fn attach(listener: &OwnedFd, shared: &Shared) -> Result<()> {
    let socket = rustix::net::accept(listener)?;
    let mut packet = [0; 200];
    rustix::net::recv(&socket, &mut packet, rustix::net::RecvFlags::empty())?;
    let session = shared.session.lock().unwrap();
    let link = session.as_ref().context("an attach without a session")?.link;
    // The opener probes this process, which is its own, and finds these bytes.
    let secret: &'static [u8; 16] = Box::leak(Box::new(*b"a secret to read"));
    let addr = (secret.as_ptr() as u64).to_le_bytes();
    let answer = [&[1][..], &link, &addr, secret].concat();
    rustix::net::send(&socket, &answer, rustix::net::SendFlags::NOSIGNAL)?;
    // The opener watches the socket for the end of the peer.
    std::mem::forget(socket);
    Ok(())
}

/// Sends a header that announces a long message, then one byte at a time.
fn drip(near: &mut Raw) -> Result<()> {
    let mut bytes = frame(Kind::Control, |_| {}, &[], &[0; MAX_CONTROL]);
    if let (Some(tls), true) = (&mut near.tls, near.is_secure) {
        bytes = tls.encrypt(&bytes)?;
    }
    drip_bytes(near, &bytes)
}

fn drip_bytes(near: &mut Raw, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let until = Instant::now() + WATCHDOG;
    for byte in bytes {
        near.stream.write_all(&[*byte])?;
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(DRIP);
    }
    Ok(())
}

fn listen_locally(name: &str) -> Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, 8)?;
    Ok(socket)
}
