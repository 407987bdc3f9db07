//! The limit of TCP: a blocking socket loop without an engine.
//!
//! The loop uses its own connection, with `TCP_NODELAY` and the system's congestion control. A
//! write row sends its bytes in calls of 1 MiB and waits for one byte back. A read row sends one
//! byte and receives. A ping-pong sends all bytes in both directions. Both ends use a buffer as
//! large as the row, as the engine does.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};

use super::clock::Stopwatch;
use super::measure::{Limit, Times, timed};
use super::{Op, memory};

/// Bytes per call.
const SEND: usize = 1 << 20;

/// How long either end waits for the other. It is longer than the watchdog's patience, so that the
/// watchdog reports a hang first.
const PATIENCE: Duration = Duration::from_secs(120);

/// Listens for one connection and runs the serving end of a row on it.
pub(crate) fn offer(ip: IpAddr, op: Op, len: u64) -> anyhow::Result<SocketAddr> {
    let mut buffer = memory::touched(len)?;
    let listener = TcpListener::bind((ip, 0)).context("cannot listen for the plain socket")?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("bench-raw".to_owned()).spawn(move || {
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
    let mut byte = [0];
    loop {
        match op {
            Op::Write => {
                stream.read_exact(buffer)?;
                stream.write_all(&byte)?;
            }
            Op::Read => {
                stream.read_exact(&mut byte)?;
                send(&mut stream, buffer)?;
            }
            Op::Pingpong => {
                stream.read_exact(buffer)?;
                send(&mut stream, buffer)?;
            }
        }
    }
}

/// The client's end of a row's limit.
pub(crate) struct Sockets<'a> {
    stream: TcpStream,
    op: Op,
    buffer: &'a mut [u8],
    times: Times,
}

impl<'a> Sockets<'a> {
    /// Connects to the address that [`offer`] returned.
    pub(crate) fn new(address: SocketAddr, op: Op, buffer: &'a mut [u8]) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))
            .with_context(|| format!("cannot reach the plain socket at {address}"))?;
        prepare(&stream)?;
        Ok(Self { stream, op, buffer, times: Times::new() })
    }
}

impl Limit for Sockets<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<()> {
        let Self { stream, op, buffer, times } = self;
        let share = if *op == Op::Pingpong { 2 } else { 1 };
        timed(budget, watch, share, times, || {
            let mut byte = [0];
            match op {
                Op::Write => {
                    send(stream, buffer)?;
                    stream.read_exact(&mut byte)?;
                }
                Op::Read => {
                    stream.write_all(&byte)?;
                    stream.read_exact(buffer)?;
                }
                Op::Pingpong => {
                    send(stream, buffer)?;
                    stream.read_exact(buffer)?;
                }
            }
            Ok(())
        })
        .context("the plain socket failed")?;
        Ok(())
    }

    fn gbps(&self) -> f64 {
        self.buffer.len() as f64 / self.times.p50()
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn every_kind_of_row_has_a_limit() {
        for op in [Op::Write, Op::Read, Op::Pingpong] {
            let address = offer(Ipv4Addr::LOCALHOST.into(), op, 3 << 20).unwrap();
            let mut buffer = vec![0; 3 << 20];
            let mut limit = Sockets::new(address, op, &mut buffer).unwrap();
            limit.round(Duration::from_millis(5), &Stopwatch::new()).unwrap();
            assert!(limit.gbps() > 0.0);
        }
    }
}
