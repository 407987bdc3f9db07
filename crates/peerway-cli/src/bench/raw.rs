//! The baseline of TCP: the better of two socket loops without an engine, one that blocks and one
//! that spins.
//!
//! Both loops use the same connection, with `TCP_NODELAY` and the system's congestion control, and
//! the same threads. A write row sends its bytes in calls of 1 MiB and waits for one byte back. A
//! read row sends one byte and receives. A ping-pong sends all bytes in both directions. Both ends
//! use a buffer as large as the row, as the engine does.
//!
//! The last byte that the client sends with a message says how the serving end waits for the next
//! message: [`BLOCK`] or [`SPIN`]. So the serving end spins during the client's spinning rounds
//! only.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::clock::Stopwatch;
use super::measure::{Baseline, Times, timed};
use super::placement::Placed;
use super::{Op, memory};

/// Bytes per call.
const SEND: usize = 1 << 20;

/// How long either end waits for the other. It is longer than the watchdog's patience, so that the
/// watchdog reports a hang first.
const PATIENCE: Duration = Duration::from_secs(120);

/// The serving end blocks until the next message comes.
const BLOCK: u8 = 0;
/// The serving end spins until the next message comes.
const SPIN: u8 = 1;

/// How often a spinning end looks at the clock.
const LOOKS: u32 = 1 << 20;

/// Listens for one connection and runs the serving end of a row on it, on the given CPUs.
pub(crate) fn offer(
    ip: IpAddr,
    op: Op,
    len: u64,
    cpus: Option<String>,
) -> anyhow::Result<SocketAddr> {
    let mut buffer = memory::touched(len)?;
    let listener = TcpListener::bind((ip, 0)).context("cannot listen for the plain socket")?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("bench-raw".to_owned()).spawn(move || {
        let _placed = cpus.and_then(|cpus| Placed::on(&cpus));
        // The client closes the connection at the end of the row, so an error here is the normal
        // end.
        let _ = accept(&listener).and_then(|stream| answer(stream, op, &mut buffer));
    })?;
    Ok(address)
}

fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let mut ready = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
    let patience = PATIENCE.try_into().map_err(io::Error::other)?;
    if poll(&mut ready, Some(&patience))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(listener.accept()?.0)
}

fn answer(mut stream: TcpStream, op: Op, buffer: &mut [u8]) -> io::Result<()> {
    prepare(&stream)?;
    let mut byte = [BLOCK];
    loop {
        match op {
            Op::Write => {
                receive(&mut stream, buffer, byte[0])?;
                byte[0] = *buffer.last().unwrap_or(&BLOCK);
                stream.write_all(&byte)?;
            }
            Op::Read => {
                let how = byte[0];
                receive(&mut stream, &mut byte, how)?;
                send(&mut stream, buffer)?;
            }
            Op::Pingpong => {
                receive(&mut stream, buffer, byte[0])?;
                byte[0] = *buffer.last().unwrap_or(&BLOCK);
                send(&mut stream, buffer)?;
            }
        }
    }
}

/// The client's end of a row's baseline.
pub(crate) struct Sockets<'a> {
    stream: TcpStream,
    op: Op,
    buffer: &'a mut [u8],
    /// The times of the loop that blocks and of the one that spins.
    times: [Times; 2],
}

impl<'a> Sockets<'a> {
    /// Connects to the address that [`offer`] returned.
    pub(crate) fn new(address: SocketAddr, op: Op, buffer: &'a mut [u8]) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))
            .with_context(|| format!("cannot reach the plain socket at {address}"))?;
        prepare(&stream)?;
        Ok(Self { stream, op, buffer, times: [Times::new(), Times::new()] })
    }

    /// One message, after which the serving end waits for the next one in the way `how`.
    fn once(&mut self, how: u8) -> io::Result<()> {
        let Self { stream, op, buffer, .. } = self;
        let mut byte = [how];
        if let Some(last) = buffer.last_mut() {
            *last = how;
        }
        match op {
            Op::Write => {
                send(stream, buffer)?;
                receive(stream, &mut byte, how)
            }
            Op::Read => {
                stream.write_all(&byte)?;
                receive(stream, buffer, how)
            }
            Op::Pingpong => {
                send(stream, buffer)?;
                receive(stream, buffer, how)
            }
        }
    }
}

impl Baseline for Sockets<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64> {
        let share = if self.op == Op::Pingpong { 2 } else { 1 };
        let mut best = f64::INFINITY;
        for how in [BLOCK, SPIN] {
            let mut round = Times::new();
            timed(budget / 2, watch, share, &mut round, || Ok(self.once(how)?))
                .and_then(|_| Ok(self.once(BLOCK)?))
                .context("the plain socket failed")?;
            self.times[usize::from(how)].add(&round);
            best = best.min(round.p50());
        }
        Ok(self.buffer.len() as f64 / best)
    }

    fn gbps(&self) -> f64 {
        let [block, spin] = &self.times;
        self.buffer.len() as f64 / block.p50().min(spin.p50())
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

fn send(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    bytes.chunks(SEND).try_for_each(|part| stream.write_all(part))
}

/// Receives all bytes.
fn receive(stream: &mut TcpStream, bytes: &mut [u8], how: u8) -> io::Result<()> {
    if how == BLOCK {
        return stream.read_exact(bytes);
    }
    let (mut done, mut looks, start) = (0, 0, Instant::now());
    while done < bytes.len() {
        match recv(&*stream, &mut bytes[done..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => done += count,
            Err(Errno::AGAIN | Errno::INTR) => {
                looks += 1;
                if looks % LOOKS == 0 && start.elapsed() > PATIENCE {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn every_kind_of_row_has_a_baseline_of_two_loops() {
        for op in [Op::Write, Op::Read, Op::Pingpong] {
            for len in [1, 3 << 20] {
                let address = offer(Ipv4Addr::LOCALHOST.into(), op, len, None).unwrap();
                let mut buffer = vec![0; len as usize];
                let mut baseline = Sockets::new(address, op, &mut buffer).unwrap();
                let round = baseline.round(Duration::from_millis(5), &Stopwatch::new()).unwrap();
                assert!(round > 0.0 && baseline.gbps() > 0.0);
                assert!(baseline.times.iter().all(|times| times.max() > 0.0), "{op:?}");
            }
        }
    }

    /// The CPU time of a thread of this process, in ticks of 10 ms.
    fn ticks(thread: u32) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        // User and system time. Fields are numbered from the state on: see proc_pid_stat(5).
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    #[test]
    fn the_serving_end_blocks_after_a_round() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            accept(&listener).and_then(|stream| answer(stream, Op::Write, &mut [0; 64]))
        });
        let mut buffer = vec![0; 64];
        let mut baseline = Sockets::new(address, Op::Write, &mut buffer).unwrap();
        let server = told.recv().unwrap();
        baseline.round(Duration::from_millis(5), &Stopwatch::new()).unwrap();
        let before = ticks(server);
        thread::sleep(Duration::from_millis(500));
        assert!(ticks(server) - before < 10, "the serving end spins");
    }
}
