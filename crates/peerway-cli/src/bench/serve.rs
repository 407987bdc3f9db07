//! The serving side: owns the memory, carries out requests, and blocks between them.
//!
//! The second process of a run on one machine and `bench serve` run the same loop. It validates
//! every request: sizes against the buffer, and allocations against the machine's free memory.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use peerway::{Access, Endpoint, Pin, Region};
use rustix::net::sockopt;

use super::control::{self, Reply, Request};
use super::layout::Side;
use super::perftest::child;
use super::perftest::port::Port;
use super::pong::Pong;
use super::{MAX_PIECES, clock, pattern, placement, raw};
use crate::output::{print_line, report_line};

/// The default port of `bench serve`.
pub(crate) const PORT: u16 = 7400;
/// The default address of `bench serve`.
pub(crate) const DEFAULT_ADDRESS: &str = "0.0.0.0:7400";

/// How long the listener sleeps after a failed accept.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The most additional buffers, besides the buffer that rows are checked in.
const MAX_MORE: usize = 4;

/// Serves clients one after the other until the process is interrupted.
pub(crate) fn listen(address: &str) -> anyhow::Result<()> {
    let places = resolve(address)?;
    let listener = TcpListener::bind(&*places)
        .with_context(|| format!("cannot listen on {address}; choose another address or port"))?;
    let bound = listener.local_addr()?;
    print_line(format_args!("listening on {bound}; on the other machine run one of:"))?;
    for ip in reachable(bound.ip()) {
        let there = SocketAddr::new(ip, bound.port());
        print_line(format_args!("  peerway bench connect {there}"))?;
    }
    print_line("Any host that can reach this address can use the server. Ctrl-C stops it.")?;
    let mut warned = false;
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                // The process may be out of file descriptors or memory, which can pass. The
                // connection waits in the backlog.
                if !std::mem::replace(&mut warned, true) {
                    report_line(format_args!("cannot accept a connection: {error}; retrying"));
                }
                std::thread::sleep(ACCEPT_REST);
                continue;
            }
        };
        warned = false;
        print_line(format_args!("{from}: connected"))?;
        let served = prepare(&stream)
            .and_then(|ip| Ok((ip, stream.try_clone()?)))
            .map_err(anyhow::Error::from)
            .and_then(|(ip, reader)| session(BufReader::new(reader), &stream, ip));
        match served {
            Ok(()) => print_line(format_args!("{from}: done"))?,
            Err(error) => print_line(format_args!("{from}: {error:#}"))?,
        }
    }
}

/// Enables keepalive on a control connection, so that a dead peer is detected. Returns the local
/// address that the peer connected to.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<IpAddr> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    // A dead machine is detected after about a minute: 20 s of silence, then nine probes (the
    // system's default) at intervals of 5 s.
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(20))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    Ok(stream.local_addr()?.ip())
}

/// The addresses of a host, with the default port if `address` has none.
pub(crate) fn resolve(address: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().or_else(|_| (address, PORT).to_socket_addrs());
    let found: Vec<SocketAddr> = found
        .with_context(|| {
            format!("cannot resolve '{address}': expected an address such as 192.0.2.7:{PORT}")
        })?
        .collect();
    ensure!(!found.is_empty(), "the host '{address}' has no address");
    Ok(found)
}

/// The addresses under which other machines can reach a listener on `ip`.
fn reachable(ip: IpAddr) -> Vec<IpAddr> {
    if !ip.is_unspecified() {
        return vec![ip];
    }
    let mut all: Vec<IpAddr> = peerway::interfaces()
        .unwrap_or_default()
        .into_iter()
        .filter(|interface| interface.up && !interface.loopback)
        .map(|interface| interface.addr)
        .filter(|addr| ip.is_ipv6() || addr.is_ipv4())
        .collect();
    if all.is_empty() {
        all.push(Ipv4Addr::LOCALHOST.into());
    }
    all
}

/// Answers requests until the other side closes.
pub(crate) fn session(
    mut reader: impl BufRead,
    mut writer: impl Write,
    ip: IpAddr,
) -> anyhow::Result<()> {
    let mut server = Server::new(ip);
    while let Some(request) = control::receive(&mut reader).context("invalid request")? {
        let reply =
            server.answer(request).unwrap_or_else(|error| Reply::Failed(format!("{error:#}")));
        control::send(&mut writer, &reply)?;
    }
    Ok(())
}

/// The state of the serving side.
struct Server {
    ip: IpAddr,
    greeted: bool,
    endpoint: Option<Endpoint>,
    /// Where the threads of the endpoint run, and that of a plain socket.
    cpus: Option<String>,
    region: Option<Region>,
    /// Additional buffers, for baselines. They are not checked.
    more: Vec<Region>,
    pong: Option<Pong>,
    port: Option<Port>,
    perftest: Option<child::Server>,
}

impl Server {
    fn new(ip: IpAddr) -> Self {
        Self {
            ip,
            greeted: false,
            endpoint: None,
            cpus: None,
            region: None,
            more: Vec::new(),
            pong: None,
            port: None,
            perftest: None,
        }
    }

    fn answer(&mut self, request: Request) -> anyhow::Result<Reply> {
        if !self.greeted && !matches!(request, Request::Hello { .. }) {
            bail!("the first request must be Hello");
        }
        match request {
            Request::Hello { version } => {
                let ours = env!("CARGO_PKG_VERSION");
                ensure!(
                    version == ours,
                    "the other side is peerway {ours}, this side is {version}: use the same version"
                );
                self.greeted = true;
            }
            Request::Open { pin, device, cpus } => {
                self.close();
                let endpoint = endpoint(pin.parse()?, self.ip, device, cpus.as_deref())?;
                self.cpus = cpus;
                let metadata = endpoint.metadata();
                self.endpoint = Some(endpoint);
                return Ok(Reply::Bytes(metadata));
            }
            Request::Device { named } => {
                let port = Port::choose(named.as_deref())?;
                let name = port.device.clone();
                self.port = Some(port);
                return Ok(Reply::Name(name));
            }
            Request::Perftest { ask } => {
                self.perftest = None;
                let port = self.port.as_ref().context("no device is chosen for perftest")?;
                let (server, address) = child::Server::start(&ask, port, self.ip)?;
                self.perftest = Some(server);
                return Ok(Reply::Address(address));
            }
            Request::StopPerftest => self.perftest = None,
            Request::Memory { len, shared, place, more } => {
                if more {
                    // Baselines need at most one buffer per kind of GPU memory.
                    ensure!(self.more.len() < MAX_MORE, "too many buffers (maximum {MAX_MORE})");
                } else {
                    self.region = None;
                    self.more.clear();
                }
                let (region, told) = place.region(self.endpoint()?, len, shared)?;
                let descriptor = region.advertise(Access::READ_WRITE)?.to_vec();
                match more {
                    true => self.more.push(region),
                    false => self.region = Some(region),
                }
                return Ok(Reply::Memory { descriptor, told });
            }
            Request::Fill { len, seed } => pattern::fill(self.region(len)?, len, seed)?,
            Request::Blank { len } => pattern::blank(self.region(len)?, len)?,
            Request::Checksum { layout } => {
                ensure!(layout.iovs <= MAX_PIECES, "too many pieces (maximum {MAX_PIECES})");
                let region = self.region(layout.total())?;
                return Ok(Reply::Sum(pattern::checksum(region, &layout, Side::Server)?));
            }
            Request::Place => {
                let addr = self.region(0)?.addr();
                return Ok(Reply::Place { pid: std::process::id(), addr });
            }
            Request::Cpu => return Ok(Reply::Seconds(clock::cpu_seconds())),
            Request::Raw { op, len } => {
                return Ok(Reply::Address(raw::offer(self.ip, op, len, self.cpus.clone())?));
            }
            Request::Pong { metadata, descriptor, size, seen } => {
                self.stop_pong()?;
                let (endpoint, region) = (self.endpoint()?, self.region(size)?);
                let pong = Pong::start(endpoint, region, &metadata, &descriptor, size, seen)?;
                self.pong = Some(pong);
            }
            Request::StopPong => self.stop_pong()?,
            Request::Close => self.close(),
        }
        Ok(Reply::Done)
    }

    fn endpoint(&self) -> anyhow::Result<&Endpoint> {
        self.endpoint.as_ref().context("no endpoint is open")
    }

    /// The buffer, if it has at least `len` bytes.
    fn region(&self, len: u64) -> anyhow::Result<&Region> {
        let region = self.region.as_ref().context("no buffer is allocated")?;
        ensure!(len <= region.len(), "{len} bytes exceed the buffer of {}", region.len());
        Ok(region)
    }

    fn stop_pong(&mut self) -> anyhow::Result<()> {
        self.pong.take().map_or(Ok(()), Pong::stop)
    }

    fn close(&mut self) {
        // A failure of the thread was reported when its row ended.
        let _ = self.stop_pong();
        self.perftest = None;
        self.region = None;
        self.more.clear();
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.close();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// An endpoint of the benchmark, on one address and with one path. If `device` is given, it uses
/// only that RDMA device. If `cpus` are given, its threads run there.
pub(crate) fn endpoint(
    pin: Pin,
    ip: IpAddr,
    device: Option<String>,
    cpus: Option<&str>,
) -> anyhow::Result<Endpoint> {
    let mut builder = Endpoint::builder().bind(SocketAddr::new(ip, 0)).transport(pin);
    if let Some(device) = device {
        builder = builder.rdma_devices(device);
    }
    if let Some(cpus) = cpus {
        builder = builder.setting(placement::SETTING, cpus);
    }
    Ok(builder.build()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Op;
    use crate::bench::layout::Layout;
    use crate::bench::memory::{Memory, Place};
    use crate::bench::perftest::Ask;
    use crate::bench::pong::Seen;

    fn server() -> Server {
        let ip = Ipv4Addr::LOCALHOST.into();
        let mut server = Server::new(ip);
        server.greeted = true;
        server
    }

    fn memory(len: u64, shared: bool) -> Request {
        Request::Memory { len, shared, place: Place::default(), more: false }
    }

    fn failure(server: &mut Server, request: Request) -> String {
        server.answer(request).expect_err("the request must fail").to_string()
    }

    #[test]
    fn a_stranger_gets_nothing() {
        let ip = Ipv4Addr::LOCALHOST.into();
        let mut written = Vec::new();
        session(&b"\"Cpu\"\n"[..], &mut written, ip).unwrap();
        assert!(String::from_utf8_lossy(&written).contains("must be Hello"));
        assert!(session(&b"GET / HTTP/1.1\r\n"[..], io::sink(), ip).is_err());
        let hello = Request::Hello { version: "0.0.0-other".to_owned() };
        let mut fresh = server();
        fresh.greeted = false;
        assert!(failure(&mut fresh, hello).contains("0.0.0-other"));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut server = server();
        assert!(failure(&mut server, memory(1, true)).contains("endpoint"));
        let opened =
            server.answer(Request::Open { pin: "tcp".to_owned(), device: None, cpus: None });
        assert!(matches!(opened, Ok(Reply::Bytes(_))));
        assert!(failure(&mut server, Request::Blank { len: 1 }).contains("no buffer"));
        assert!(failure(&mut server, Request::Place).contains("no buffer"));
        assert!(server.answer(memory(4096, false)).is_ok());
        let here = std::process::id();
        assert!(
            matches!(server.answer(Request::Place), Ok(Reply::Place { pid, .. }) if pid == here)
        );
        assert!(failure(&mut server, Request::Fill { len: 4097, seed: 0 }).contains("4097"));
        let another =
            || Request::Memory { len: 1, shared: false, place: Place::default(), more: true };
        for _ in 0..MAX_MORE {
            assert!(matches!(server.answer(another()), Ok(Reply::Memory { .. })));
        }
        assert!(failure(&mut server, another()).contains("too many"));
        let place = Place { memory: Memory::Gpu, gpu: 99 };
        let gpu = Request::Memory { len: 4096, shared: false, place, more: false };
        assert!(failure(&mut server, gpu).contains("GPU"));
        assert!(server.answer(memory(4096, false)).is_ok());
        let layout = Layout { size: u64::MAX, iovs: 3, seed: 0 };
        failure(&mut server, Request::Checksum { layout });
        failure(&mut server, memory(u64::MAX, true));
        failure(&mut server, memory(u64::MAX, false));
        failure(&mut server, Request::Raw { op: Op::Write, len: u64::MAX });
        failure(&mut server, Request::Open { pin: "pigeon".to_owned(), device: None, cpus: None });
        let ask = Ask { op: Op::Read, size: 1 << 20, iterations: 5, depth: 1, queue_pairs: 1 };
        assert!(failure(&mut server, Request::Perftest { ask }).contains("no device"));
        let seen = Seen::Counted;
        let pong = Request::Pong { metadata: vec![1], descriptor: vec![2], size: 1, seen };
        failure(&mut server, pong);
        assert!(server.answer(Request::StopPong).is_ok());
    }

    #[test]
    fn addresses_need_no_port() {
        assert_eq!(resolve("127.0.0.1").unwrap(), ["127.0.0.1:7400".parse().unwrap()]);
        assert_eq!(resolve("127.0.0.1:9").unwrap(), ["127.0.0.1:9".parse().unwrap()]);
        assert_eq!(resolve("[::1]:9").unwrap(), ["[::1]:9".parse().unwrap()]);
        assert!(resolve("no such host").unwrap_err().to_string().contains("no such host"));
        assert!(!reachable(Ipv4Addr::UNSPECIFIED.into()).is_empty());
    }
}
