//! A TCP proxy that breaks connections: it holds bytes back, kills single connections after a given
//! number of bytes, and flips bits.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::random::Random;

/// A proxy in front of one address. Connections are numbered in the order in which they arrive.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    /// Where new connections go.
    target: Mutex<SocketAddr>,
    /// A connection that has ended is gone, with its descriptors.
    links: Mutex<Vec<Weak<Link>>>,
    closed: AtomicBool,
    /// Drop new connections.
    barred: AtomicBool,
    dropped: AtomicU64,
    /// Bytes between two flipped bits, on average. `None` flips none.
    flip_every: Option<u64>,
    /// The seed of the next direction of a connection.
    seed: AtomicU64,
    flips: AtomicU64,
    bytes: AtomicU64,
    /// Everything that passed, if it is kept.
    recorded: Option<Mutex<Vec<u8>>>,
}

/// One proxied connection.
struct Link {
    client: TcpStream,
    server: TcpStream,
    /// Bytes from the opener to the target.
    forth: AtomicU64,
    /// Forward only this many of them, then kill the connection.
    kill_after: AtomicU64,
    hold_forth: AtomicBool,
    hold_back: AtomicBool,
    dead: AtomicBool,
}

impl Proxy {
    /// Starts a proxy in front of `target`.
    pub fn new(target: SocketAddr) -> Result<Self> {
        Self::start(target, None, 0, None)
    }

    /// Starts a proxy that keeps a copy of everything that passes.
    pub fn recording(target: SocketAddr) -> Result<Self> {
        Self::start(target, None, 0, Some(Mutex::default()))
    }

    /// Starts a proxy that flips one bit in `every` bytes on average, in both directions and from
    /// the first byte of a connection on. The same seed flips the same bits of the same bytes.
    pub fn flipping(target: SocketAddr, every: u64, seed: u64) -> Result<Self> {
        Self::start(target, Some(every), seed, None)
    }

    fn start(
        target: SocketAddr,
        flip_every: Option<u64>,
        seed: u64,
        recorded: Option<Mutex<Vec<u8>>>,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("binding the proxy's listener")?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            links: Mutex::default(),
            closed: AtomicBool::new(false),
            barred: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            flip_every,
            seed: AtomicU64::new(seed),
            flips: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            recorded,
        });
        let theirs = shared.clone();
        std::thread::spawn(move || serve(&listener, &theirs));
        Ok(Self { addr, shared })
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many bits were flipped.
    pub fn flips(&self) -> u64 {
        self.shared.flips.load(Ordering::SeqCst)
    }

    /// Bytes that all connections have carried, in both directions.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }

    /// What a recording proxy has kept, of all connections and directions in the order of time.
    pub fn recorded(&self) -> Vec<u8> {
        self.shared.recorded.as_ref().map(|kept| kept.lock().unwrap().clone()).unwrap_or_default()
    }

    /// How many connections have arrived.
    pub fn connections(&self) -> usize {
        self.shared.links.lock().unwrap().len()
    }

    /// Whether a connection lives.
    pub fn is_open(&self, connection: usize) -> bool {
        self.link(connection).is_some_and(|link| !link.dead.load(Ordering::SeqCst))
    }

    /// Bytes that a connection has carried from the opener to the target. 0 if it has ended.
    pub fn forwarded(&self, connection: usize) -> u64 {
        self.link(connection).map_or(0, |link| link.forth.load(Ordering::SeqCst))
    }

    /// Holds back (or releases) what the target sends on a connection, such as acknowledgements.
    pub fn hold_back(&self, connection: usize, hold: bool) {
        if let Some(link) = self.link(connection) {
            link.hold_back.store(hold, Ordering::SeqCst);
        }
    }

    /// Holds back (or releases) what the opener sends on a connection.
    pub fn hold_forth(&self, connection: usize, hold: bool) {
        if let Some(link) = self.link(connection) {
            link.hold_forth.store(hold, Ordering::SeqCst);
        }
    }

    /// Kills a connection after `bytes` more bytes have gone to the target.
    pub fn kill_after(&self, connection: usize, bytes: u64) {
        if let Some(link) = self.link(connection) {
            link.kill_after.store(link.forth.load(Ordering::SeqCst) + bytes, Ordering::SeqCst);
        }
    }

    /// Kills a connection: both sides see a reset.
    pub fn kill(&self, connection: usize) {
        if let Some(link) = self.link(connection) {
            link.die();
        }
    }

    /// Kills all connections.
    pub fn kill_all(&self) {
        for link in self.shared.links.lock().unwrap().iter().filter_map(Weak::upgrade) {
            link.die();
        }
    }

    /// Drops all new connections, or takes them again.
    pub fn bar(&self, bar: bool) {
        self.shared.barred.store(bar, Ordering::SeqCst);
    }

    /// How many new connections were dropped.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::SeqCst)
    }

    /// Passes new connections on to another address.
    pub fn redirect(&self, target: SocketAddr) {
        *self.shared.target.lock().unwrap() = target;
    }

    fn link(&self, connection: usize) -> Option<Arc<Link>> {
        self.shared.links.lock().unwrap().get(connection).and_then(Weak::upgrade)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.kill_all();
        // Wake the listener's thread.
        let _ = TcpStream::connect(self.addr);
    }
}

impl Link {
    fn die(&self) {
        self.dead.store(true, Ordering::SeqCst);
        for stream in [&self.client, &self.server] {
            // Reset the connection instead of closing it: the kernel drops bytes that it has not
            // sent yet.
            let linger = libc::linger { l_onoff: 1, l_linger: 0 };
            // SAFETY: the value is a `linger` of the given size, and the stream owns its
            // descriptor.
            unsafe {
                libc::setsockopt(
                    stream.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_LINGER,
                    (&raw const linger).cast(),
                    size_of::<libc::linger>() as u32,
                );
            }
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The next bit to flip in one direction of a connection.
struct Flips {
    random: Random,
    every: u64,
    /// Bytes before the byte whose bit is flipped.
    left: u64,
}

impl Flips {
    fn new(seed: u64, every: u64) -> Self {
        let mut random = Random::new(seed);
        let left = random.below(2 * every);
        Self { random, every, left }
    }

    /// Flips the bits whose turn it is. Returns their number.
    fn apply(&mut self, bytes: &mut [u8]) -> u64 {
        let (mut at, mut flips) = (0, 0);
        while self.left < (bytes.len() - at) as u64 {
            at += self.left as usize;
            bytes[at] ^= 1 << self.random.below(8);
            flips += 1;
            self.left = self.random.below(2 * self.every);
        }
        self.left -= (bytes.len() - at) as u64;
        flips
    }
}

fn serve(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming().flatten() {
        if shared.closed.load(Ordering::SeqCst) {
            return;
        }
        if shared.barred.load(Ordering::SeqCst) {
            shared.dropped.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        let target = *shared.target.lock().unwrap();
        let Ok(server) = TcpStream::connect(target) else { continue };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let link = Arc::new(Link {
            client,
            server,
            forth: AtomicU64::new(0),
            kill_after: AtomicU64::new(u64::MAX),
            hold_forth: AtomicBool::new(false),
            hold_back: AtomicBool::new(false),
            dead: AtomicBool::new(false),
        });
        shared.links.lock().unwrap().push(Arc::downgrade(&link));
        for forth in [true, false] {
            let (link, shared) = (link.clone(), shared.clone());
            std::thread::spawn(move || pump(&shared, &link, forth));
        }
    }
}

fn pump(shared: &Shared, link: &Link, forth: bool) {
    let seed = shared.seed.fetch_add(1, Ordering::SeqCst);
    let mut flips = shared.flip_every.map(|every| Flips::new(seed, every));
    let (mut from, mut to) =
        if forth { (&link.client, &link.server) } else { (&link.server, &link.client) };
    let hold = if forth { &link.hold_forth } else { &link.hold_back };
    let mut buffer = vec![0; 64 << 10];
    while let Ok(mut len) = from.read(&mut buffer) {
        while hold.load(Ordering::SeqCst) && !link.dead.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if len == 0 || link.dead.load(Ordering::SeqCst) {
            break;
        }
        let before = link.forth.load(Ordering::SeqCst);
        let allowed = link.kill_after.load(Ordering::SeqCst).saturating_sub(before);
        let last = forth && allowed <= len as u64;
        if last {
            len = allowed as usize;
        }
        if let Some(flips) = &mut flips {
            shared.flips.fetch_add(flips.apply(&mut buffer[..len]), Ordering::SeqCst);
        }
        shared.bytes.fetch_add(len as u64, Ordering::SeqCst);
        if let Some(kept) = &shared.recorded {
            kept.lock().unwrap().extend_from_slice(&buffer[..len]);
        }
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
        if forth {
            link.forth.fetch_add(len as u64, Ordering::SeqCst);
        }
        if last {
            link.die();
            return;
        }
    }
    let _ = from.shutdown(Shutdown::Read);
    let _ = to.shutdown(Shutdown::Write);
}
