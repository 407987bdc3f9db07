//! A TCP proxy that breaks connections: it holds bytes back, and kills single connections after a
//! given number of bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};

/// A proxy in front of one address. Connections are numbered in the order in which they arrive.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    links: Mutex<Vec<Arc<Link>>>,
    closed: AtomicBool,
    /// Drop new connections.
    barred: AtomicBool,
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
        let listener = TcpListener::bind("127.0.0.1:0").context("binding the proxy's listener")?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            links: Mutex::default(),
            closed: AtomicBool::new(false),
            barred: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        std::thread::spawn(move || serve(&listener, &theirs));
        Ok(Self { addr, shared })
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections have arrived.
    pub fn connections(&self) -> usize {
        self.shared.links.lock().unwrap().len()
    }

    /// Bytes that a connection has carried from the opener to the target.
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
        for link in self.shared.links.lock().unwrap().iter() {
            link.die();
        }
    }

    /// Drops all new connections.
    pub fn bar(&self) {
        self.shared.barred.store(true, Ordering::SeqCst);
    }

    fn link(&self, connection: usize) -> Option<Arc<Link>> {
        self.shared.links.lock().unwrap().get(connection).cloned()
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

fn serve(listener: &TcpListener, shared: &Shared) {
    for client in listener.incoming().flatten() {
        if shared.closed.load(Ordering::SeqCst) {
            return;
        }
        if shared.barred.load(Ordering::SeqCst) {
            continue;
        }
        let Ok(server) = TcpStream::connect(shared.target) else { continue };
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
        shared.links.lock().unwrap().push(link.clone());
        let other = link.clone();
        std::thread::spawn(move || pump(&link, true));
        std::thread::spawn(move || pump(&other, false));
    }
}

fn pump(link: &Link, forth: bool) {
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
