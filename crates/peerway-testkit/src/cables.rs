//! Two network namespaces joined by virtual cables.
//!
//! The namespaces have no names. Each belongs to a process and disappears with it, together with
//! its ends of the cables, however the process ends. Nothing is left to clean up.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// The cables between two namespaces. This process has the ends `near0`, `near1`, ...; the other
/// namespace has `far0`, `far1`, ...
pub struct Cables {
    /// The directory of `ip` and `tc`.
    programs: &'static Path,
    /// A process in the other namespace.
    there: u32,
}

/// One end of a cable.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// In the namespace of this process.
    Near,
    /// In the other namespace.
    Far,
}

impl End {
    /// The prefix of this end's interface names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Far => "far",
        }
    }

    /// The address of this end of cable `at`. Every cable is its own network.
    pub fn addr(self, at: u8) -> IpAddr {
        let host = if self == Self::Near { 1 } else { 2 };
        Ipv4Addr::new(10, 77, at, host).into()
    }
}

impl Cables {
    /// Moves the calling thread, and the threads that it starts from now on, to a new network
    /// namespace. `Err` says why that is impossible on this machine.
    pub fn leave() -> Result<()> {
        programs()?;
        // SAFETY: unshare takes no pointers and concerns only the calling thread.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        ensure!(rc == 0, "cannot create a network namespace: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Joins this namespace and that of process `there` by `count` cables and switches them on.
    pub fn join(there: u32, count: u8) -> Result<Self> {
        let cables = Self { programs: programs()?, there };
        cables.ip(End::Near, "link set lo up")?;
        cables.ip(End::Far, "link set lo up")?;
        for at in 0..count {
            let pair = format!("link add near{at} type veth peer name far{at} netns {there}");
            cables.ip(End::Near, &pair)?;
            for end in [End::Near, End::Far] {
                let (name, addr) = (end.name(), end.addr(at));
                cables.ip(end, &format!("addr add {addr}/24 dev {name}{at}"))?;
                cables.ip(end, &format!("link set {name}{at} up"))?;
            }
            cables.wait_up(at)?;
        }
        Ok(cables)
    }

    /// Limits the rate of every cable, so that the cable and not a processor bounds the throughput.
    /// `Err` where the kernel cannot do that.
    pub fn slow_down(&self, count: u8, rate: &str) -> Result<()> {
        let ends = || (0..count).flat_map(|at| [(End::Near, at), (End::Far, at)]);
        let bucket = format!("root tbf rate {rate} burst 1mb latency 50ms");
        let slow = ends().try_for_each(|(end, at)| {
            self.run("tc", end, &format!("qdisc add dev {}{at} {bucket}", end.name())).map(drop)
        });
        if slow.is_err() {
            // All or none: a single slow cable would carry little beside a fast one.
            for (end, at) in ends() {
                let _ = self.run("tc", end, &format!("qdisc del dev {}{at} root", end.name()));
            }
        }
        slow
    }

    /// Switches one end of a cable off. The other end then has no carrier.
    pub fn unplug(&self, end: End, at: u8) -> Result<()> {
        self.ip(end, &format!("link set {}{at} down", end.name())).map(drop)
    }

    /// Switches the end on again, and returns when the cable has a carrier.
    pub fn plug_in(&self, end: End, at: u8) -> Result<()> {
        self.ip(end, &format!("link set {}{at} up", end.name()))?;
        self.wait_up(at)?;
        // After a failed lookup the kernel waits a second before it asks for a neighbour again.
        // Flushing the entries avoids that wait.
        for end in [End::Near, End::Far] {
            self.ip(end, &format!("neigh flush dev {}{at}", end.name()))?;
        }
        Ok(())
    }

    /// Waits until both ends are up. The kernel tells its queues of a carrier up to a second later,
    /// and drops packets sent before.
    fn wait_up(&self, at: u8) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(10);
        for end in [End::Near, End::Far] {
            while !self.ip(end, &format!("link show {}{at}", end.name()))?.contains("state UP") {
                ensure!(Instant::now() < until, "cable {at} does not come up");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// Bytes sent by this end.
    pub fn sent(&self, end: End, at: u8) -> Result<u64> {
        let pid = if end == End::Near { std::process::id() } else { self.there };
        // /proc shows the namespace of the process. sysfs shows it only where it was mounted in
        // that namespace.
        let table = fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
        let name = format!("{}{at}:", end.name());
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix(&name));
        // The eight columns of received traffic come first.
        let sent = line.and_then(|line| line.split_whitespace().nth(8));
        Ok(sent.with_context(|| format!("no interface {name}"))?.parse()?)
    }

    fn ip(&self, end: End, words: &str) -> Result<String> {
        self.run("ip", end, words)
    }

    fn run(&self, program: &str, end: End, words: &str) -> Result<String> {
        let mut command = Command::new(self.programs.join(program));
        command.args(words.split(' '));
        if end == End::Far {
            let namespace = File::open(format!("/proc/{}/ns/net", self.there))?;
            // SAFETY: setns is a plain system call, so it may run between fork and exec. The
            // closure owns the descriptor.
            unsafe {
                command.pre_exec(move || match libc::setns(namespace.as_raw_fd(), 0) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                });
            }
        }
        let output = command.output().with_context(|| format!("running {program} {words}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} {words}: {}", said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The directory of `ip`. The directories of administrators' programs are often not in `PATH`.
fn programs() -> Result<&'static Path> {
    let places = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    match places.into_iter().map(Path::new).find(|path| path.join("ip").is_file()) {
        Some(path) => Ok(path),
        None => bail!("the program `ip` is missing; install the package iproute2"),
    }
}
