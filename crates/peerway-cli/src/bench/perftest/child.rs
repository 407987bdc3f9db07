//! perftest as child processes: the server runs on the serving side, the client in this process.

use std::fs;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::parse::{self, Found};
use super::port::Port;
use super::{Ask, Op};

/// The longest time of a run. It is shorter than the watchdog's patience.
const PATIENCE: Duration = Duration::from_secs(45);
/// The longest time until a server listens.
const START: Duration = Duration::from_secs(10);
/// How often the child processes are checked.
const LOOK: Duration = Duration::from_millis(50);

/// A server that listens for one client.
pub(crate) struct Server {
    /// Dropping it ends the process.
    _running: Running,
}

impl Server {
    /// Starts a server on this device, and returns its address.
    pub(crate) fn start(ask: &Ask, port: &Port, ip: IpAddr) -> anyhow::Result<(Self, SocketAddr)> {
        ask.check()?;
        // The port is free now. If another process takes it meanwhile, the run fails and is
        // repeated.
        let address = TcpListener::bind((ip, 0))?.local_addr()?;
        let mut running = Running::start(command(ask, port, address.port()), ask)?;
        let start = Instant::now();
        while !listens(address.port()) {
            if let Some(status) = running.child.try_wait()? {
                bail!("{} ended with {status}: {}", ask.tool(), running.said());
            }
            if start.elapsed() > START {
                bail!("{} did not start to listen within {} s", ask.tool(), START.as_secs());
            }
            thread::sleep(LOOK);
        }
        Ok((Self { _running: running }, address))
    }
}

/// Runs the client against a server and parses its output.
pub(crate) fn client(ask: &Ask, port: &Port, server: SocketAddr) -> anyhow::Result<Found> {
    let mut command = command(ask, port, server.port());
    command.arg(server.ip().to_string());
    let mut running = Running::start(command, ask)?;
    let status = running.wait()?;
    let said = running.said();
    match parse::row(&said, ask.op, ask.size) {
        Some(found) if status.success() => Ok(found),
        _ => bail!("{} ended with {status}: {}", ask.tool(), last_line(&said)),
    }
}

fn command(ask: &Ask, port: &Port, tcp: u16) -> Command {
    let mut command = Command::new(ask.tool());
    let mut option = |name: &str, value: String| {
        command.args([name, value.as_str()]);
    };
    option("-d", port.device.clone());
    option("-i", port.number.to_string());
    option("-S", port.service_level.to_string());
    option("-s", ask.size.to_string());
    option("-n", ask.iterations.to_string());
    option("-p", tcp.to_string());
    if let Some(index) = port.gid_index {
        option("-x", index.to_string());
    }
    match port.datagrams {
        true => option("-c", "SRD".to_owned()),
        false => option("-m", port.mtu.to_string()),
    }
    if ask.op != Op::Pingpong {
        option("-t", ask.depth.to_string());
        option("-q", ask.queue_pairs.to_string());
        command.arg("--report_gbits");
    }
    // Continue even if the CPU frequency changes.
    command.arg("-F");
    command
}

/// A child process that ends with this process, even if this process is killed.
struct Running {
    child: Child,
    tool: &'static str,
}

impl Running {
    fn start(mut command: Command, ask: &Ask) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec the closure only makes a system call, which is
        // async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let tool = ask.tool();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {tool}: is perftest installed?"))?;
        Ok(Self { child, tool })
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() > PATIENCE {
                bail!("{} did not end within {} s", self.tool, PATIENCE.as_secs());
            }
            thread::sleep(LOOK);
        }
    }

    /// The output of a process that has ended. It is about a page long, so the pipes hold all of
    /// it.
    fn said(&mut self) -> String {
        let mut said = Vec::new();
        let (out, err) = (self.child.stdout.take(), self.child.stderr.take());
        // If a read fails, the caller finds no figures in the output and reports that.
        let _ = out.map(|mut out| out.read_to_end(&mut said));
        let _ = err.map(|mut err| err.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process listens on this port. Reads the kernel's table, because perftest would take a
/// test connection for its client.
fn listens(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    tables.iter().flatten().any(|table| is_listening(table, port))
}

/// Parses `/proc/net/tcp`. The second word of a line is the local address, the fourth is the state,
/// and `0A` means listening.
fn is_listening(table: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|local| local.ends_with(&end)) && words.nth(1) == Some("0A")
    })
}

fn last_line(text: &str) -> &str {
    let lines = text.lines().map(str::trim);
    lines.rev().find(|line| line.chars().any(char::is_alphanumeric)).unwrap_or("no output")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(op: Op) -> Ask {
        Ask { op, size: 65536, iterations: 100, depth: 32, queue_pairs: 2 }
    }

    fn port() -> Port {
        let device = "rxe0".to_owned();
        let gid_index = Some(1);
        Port { device, number: 1, gid_index, mtu: 4096, service_level: 3, datagrams: false }
    }

    #[test]
    fn perftest_is_told_what_the_engine_uses() {
        let line = |op| {
            let command = command(&ask(op), &port(), 7);
            let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
            words.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            line(Op::Read),
            "-d rxe0 -i 1 -S 3 -s 65536 -n 100 -p 7 -x 1 -m 4096 -t 32 -q 2 --report_gbits -F"
        );
        assert_eq!(line(Op::Pingpong), "-d rxe0 -i 1 -S 3 -s 65536 -n 100 -p 7 -x 1 -m 4096 -F");
    }

    #[test]
    fn listeners_are_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(port));
        drop(listener);
        assert!(!listens(port));
        let table = "  0: 0100007F:1CE8 00000000:0000 0A 0\n  1: 0100007F:1CE9 0A:0 01 0\n";
        assert!(is_listening(table, 0x1CE8) && !is_listening(table, 0x1CE9));
    }

    #[test]
    fn the_last_words_are_told() {
        assert_eq!(last_line("a\n Couldn't connect\n-----\n\n"), "Couldn't connect");
        assert_eq!(last_line("---\n"), "no output");
    }
}
