//! A healthy peer's writes while strangers flood its endpoint with connections.
//!
//! ```sh
//! cargo run --release -p peerway-testkit --example flood -- 20 10000 0
//! ```
//!
//! The arguments are the seconds of the flood (at most 120), the connections a second (at most
//! 20,000) and the niceness of the attacker. Three processes take part, all on loopback: the
//! endpoint, the healthy peer, which writes 4 KiB again and again by TCP, and the attacker. A
//! quarter of the connections each send random bytes, half a TLS hello, a whole TLS hello and
//! nothing after it, and a whole TLS handshake with a hello that names another identity. The last
//! row shows what the endpoint holds when the flood is over.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Endpoint, Peer, Pin, Reason};
use peerway_core::ids::Incarnation;
use peerway_testkit::hex;
use peerway_testkit::procfs::{Holdings, holdings};
use peerway_testkit::random::Random;
use peerway_testkit::raw::Raw;
use peerway_testkit::tls::{Key, Tls};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Bytes of a write.
const LEN: usize = 4096;
/// How long the healthy peer writes before the flood.
const QUIET: Duration = Duration::from_secs(5);
/// How long the endpoint may take after the flood to release what it holds.
const SETTLE: Duration = Duration::from_secs(3);
const MOST_SECONDS: u64 = 120;
const MOST_RATE: u64 = 20_000;
/// Connections that the attacker holds open. It resets the oldest one.
const HELD: usize = 256;
/// Addresses of this host from which the attacker connects.
const SOURCES: u64 = 64;
/// Threads that complete handshakes. Each has one connection at a time.
const SHAKERS: u64 = 2;
/// How long the attacker waits for a full backlog.
const PATIENCE: Duration = Duration::from_millis(4);
/// The time between two bursts of the attacker.
const TICK: Duration = Duration::from_millis(2);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["endpoint"] => serve(),
        ["attack", to, seconds, rate] => attack(to.parse()?, seconds.parse()?, rate.parse()?),
        _ => measure(&arguments),
    }
}

/// Measures the healthy peer and prints the table.
fn measure(arguments: &[&str]) -> Result<()> {
    let number = |at: usize, default: u64| -> Result<u64> {
        arguments.get(at).map_or(Ok(default), |text| text.parse().context("expected a number"))
    };
    let (seconds, rate, nice) = (number(0, 20)?, number(1, 10_000)?, number(2, 0)?);
    ensure!(seconds <= MOST_SECONDS && rate <= MOST_RATE, "too long or too fast");

    let mut server = start(&["endpoint"], 0)?;
    let mut lines = BufReader::new(server.stdout.take().context("no pipe")?).lines();
    let mut bytes = || -> Result<Vec<u8>> {
        hex::decode(&lines.next().context("the endpoint ended early")??).context("not hexadecimal")
    };
    let (metadata, descriptor) = (bytes()?, bytes()?);
    let addr = String::from_utf8(bytes()?)?;

    let endpoint = Endpoint::builder().transport(Pin::Tcp).build()?;
    let peer = endpoint.connect(&metadata)?;
    let (ours, remote) = (endpoint.allocate(LEN)?, peer.import(&descriptor)?);
    let write = Batch::write(&ours.all(), &remote.all())?;

    println!(
        "{:<8} {:>8} {:>8} {:>8} {:>9} {:>10} {:>9} {:>5} {:>8}",
        "", "p50 us", "p99 us", "max us", "writes/s", "accepts/s", "RSS KiB", "fds", "threads"
    );
    let row = |name: &str, times: &mut Vec<u32>, accepts: u64, held: Holdings, time: Duration| {
        times.sort_unstable();
        let at = |share: usize| f64::from(times[(times.len() - 1) * share / 1000]) / 1e3;
        println!(
            "{name:<8} {:>8.1} {:>8.1} {:>8.0} {:>9.0} {:>10} {:>9} {:>5} {:>8}",
            at(500),
            at(990),
            at(1000),
            times.len() as f64 / time.as_secs_f64(),
            accepts,
            held.resident_kib,
            held.fds,
            held.threads
        );
    };

    // The first writes warm up both sides.
    writes(&peer, &write, Duration::from_secs(1), || false)?;
    let mut times = writes(&peer, &write, QUIET, || false)?;
    row("quiet", &mut times, 0, holdings(server.id())?, QUIET);

    let mut attacker = start(&["attack", &addr, &seconds.to_string(), &rate.to_string()], nice)?;
    let begun = Instant::now();
    let limit = Duration::from_secs(2 * MOST_SECONDS);
    let mut times = writes(&peer, &write, limit, || !matches!(attacker.try_wait(), Ok(None)))?;
    let (took, during) = (begun.elapsed(), holdings(server.id())?);
    let mut reached = String::new();
    BufReader::new(attacker.stdout.take().context("no pipe")?).read_line(&mut reached)?;
    let reached: u64 = reached.trim().parse().context("the attacker failed")?;
    row("flood", &mut times, reached / seconds.max(1), during, took);

    std::thread::sleep(SETTLE);
    let mut times = writes(&peer, &write, QUIET, || false)?;
    row("after", &mut times, 0, holdings(server.id())?, QUIET);
    drop(server.stdin.take());
    server.wait()?;
    Ok(())
}

/// The times of writes in ns, for `time` or until `over`.
fn writes(
    peer: &Peer,
    write: &Batch,
    time: Duration,
    mut over: impl FnMut() -> bool,
) -> Result<Vec<u32>> {
    let (begun, mut times) = (Instant::now(), Vec::new());
    while begun.elapsed() < time {
        // Asking whether the attacker has ended takes a system call.
        if times.len() % 1024 == 0 && over() {
            break;
        }
        let posted = Instant::now();
        let ended = peer.run(write)?;
        times.push(u32::try_from(posted.elapsed().as_nanos()).unwrap_or(u32::MAX));
        ensure!(ended.reason == Reason::Done, "a write of the healthy peer ended: {ended:?}");
    }
    Ok(times)
}

/// Starts this program in another role.
fn start(arguments: &[&str], nice: u64) -> Result<Child> {
    let mut command = Command::new("nice");
    command.arg("-n").arg(nice.to_string()).arg(std::env::current_exe()?).args(arguments);
    Ok(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?)
}

/// The endpoint: owns memory until its standard input closes.
fn serve() -> Result<()> {
    let builder = Endpoint::builder().transport(Pin::Tcp).setting("PEERWAY_BIND", "127.0.0.1");
    let endpoint = builder.build()?;
    let region = endpoint.allocate(LEN)?;
    let descriptor = region.advertise(Access::WRITE)?;
    let addr = endpoint.addresses().first().context("no address")?.to_string();
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", hex::encode(&endpoint.metadata()))?;
    writeln!(output, "{}", hex::encode(descriptor.as_ref()))?;
    writeln!(output, "{}", hex::encode(addr.as_bytes()))?;
    output.flush()?;
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// The attacker: prints how many connections the endpoint's kernel accepted.
fn attack(to: SocketAddr, seconds: u64, rate: u64) -> Result<()> {
    ensure!(to.ip().is_loopback(), "only on loopback");
    let until = Instant::now() + Duration::from_secs(seconds.min(MOST_SECONDS));
    let rate = rate.min(MOST_RATE);
    let reached = std::thread::scope(|scope| -> Result<u64> {
        let shakers: Vec<_> = (0..SHAKERS)
            .map(|number| scope.spawn(move || shake_hands(to, until, rate / 4 / SHAKERS, number)))
            .collect();
        let mut reached = half_open(to, until, rate - rate / 4)?;
        for shaker in shakers {
            reached += shaker.join().unwrap_or(Ok(0))?;
        }
        Ok(reached)
    })?;
    println!("{reached}");
    Ok(())
}

/// Connections that send something and then nothing.
fn half_open(to: SocketAddr, until: Instant, rate: u64) -> Result<u64> {
    let mut random = Random::new(1);
    let hello = Tls::opener(&Key::new(&mut random)?)?.output()?;
    let (mut held, mut reached, mut number) = (VecDeque::new(), 0, 0);
    paced(until, rate, || {
        number += 1;
        let noise = random.bytes(64);
        let bytes = match number % 3 {
            0 => &noise[..],
            1 => &hello[..hello.len() / 2],
            _ => &hello[..],
        };
        // With a full backlog, the next connection is due.
        let Ok(mut stream) = connect(to, number % SOURCES) else { return Ok(()) };
        if stream.write_all(bytes).is_ok() {
            reached += 1;
            held.push_back(stream);
        }
        if held.len() > HELD {
            held.pop_front();
        }
        Ok(())
    })?;
    Ok(reached)
}

/// Connections that complete TLS and then claim another identity.
fn shake_hands(to: SocketAddr, until: Instant, rate: u64, seed: u64) -> Result<u64> {
    let mut random = Random::new(100 + seed);
    let mut reached = 0;
    paced(until, rate, || {
        let Ok(stream) = connect(to, random.below(SOURCES)) else { return Ok(()) };
        let mut raw = Raw::over(stream, &mut random)?;
        reached += 1;
        // The endpoint may drop any of these connections at any time.
        let other = random.bytes(16);
        let _ =
            raw.ask(|hello| hello.incarnation = Incarnation(std::array::from_fn(|at| other[at])));
        Ok(())
    })?;
    Ok(reached)
}

/// Calls `once` at this rate. What a slow machine misses is left out.
fn paced(until: Instant, rate: u64, mut once: impl FnMut() -> Result<()>) -> Result<()> {
    let mut due = 0.0;
    let mut last = Instant::now();
    while last < until {
        std::thread::sleep(TICK);
        let now = Instant::now();
        due += now.duration_since(last).as_secs_f64() * rate as f64;
        due = due.min(rate as f64 / 20.0);
        last = now;
        while due >= 1.0 && Instant::now() < until {
            due -= 1.0;
            once()?;
        }
    }
    Ok(())
}

/// Connects from one of the sources. The connection is reset when it is closed, so that no port
/// stays taken.
fn connect(to: SocketAddr, source: u64) -> Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    let from = Ipv4Addr::new(127, 0, 1, 1 + source as u8);
    rustix::net::bind(&socket, &SocketAddrV4::new(from, 0))?;
    rustix::net::connect(&socket, &to)?;
    Ok(TcpStream::from(socket))
}
