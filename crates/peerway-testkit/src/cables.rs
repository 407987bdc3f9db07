//! Two network namespaces joined by virtual cables.
//!
//! The namespaces have no names: each belongs to a process and goes, with its ends of the cables,
//! when the process does, however that ends. Nothing is left to clean up.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// See the module. Ours are the ends `near0`, `near1` and so on, the other's `far0`, `far1`.
pub struct Cables {
    /// Where `ip` and `tc` are.
    programs: &'static Path,
    /// A process in the other namespace.
    there: u32,
}

/// One end of a cable.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// In our namespace.
    Near,
    /// In the other.
    Far,
}

impl End {
    /// What the names of its interfaces begin with.
    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Far => "far",
        }
    }

    /// The address at this end of cable `at`. Every cable is a network of its own.
    pub fn addr(self, at: u8) -> IpAddr {
        let host = if self == Self::Near { 1 } else { 2 };
        Ipv4Addr::new(10, 77, at, host).into()
    }
}

impl Cables {
    /// Moves the calling thread, and those it starts from now on, to a network namespace of its own.
    /// `Err` says why that cannot be had here.
    pub fn leave() -> Result<()> {
        programs()?;
        // SAFETY: a plain system call that concerns the calling thread.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        ensure!(rc == 0, "no network namespace: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Joins our namespace and that of process `there` by so many cables, which are plugged in.
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

    /// Makes every cable a slow one, so that it and no processor bounds what it carries. `Err` where the kernel cannot.
    pub fn slow_down(&self, count: u8, rate: &str) -> Result<()> {
        let ends = || (0..count).flat_map(|at| [(End::Near, at), (End::Far, at)]);
        let bucket = format!("root tbf rate {rate} burst 1mb latency 50ms");
        let slow = ends().try_for_each(|(end, at)| {
            self.run("tc", end, &format!("qdisc add dev {}{at} {bucket}", end.name())).map(drop)
        });
        if slow.is_err() {
            // All or none: one slow cable would carry little beside a fast one.
            for (end, at) in ends() {
                let _ = self.run("tc", end, &format!("qdisc del dev {}{at} root", end.name()));
            }
        }
        slow
    }

    /// Switches one end of a cable off. The other has no carrier then.
    pub fn unplug(&self, end: End, at: u8) -> Result<()> {
        self.ip(end, &format!("link set {}{at} down", end.name())).map(drop)
    }

    /// Switches it on again, and returns when it carries.
    pub fn plug_in(&self, end: End, at: u8) -> Result<()> {
        self.ip(end, &format!("link set {}{at} up", end.name()))?;
        self.wait_up(at)?;
        // Who was asked for in vain is asked for again only a second later, unless forgotten.
        for end in [End::Near, End::Far] {
            self.ip(end, &format!("neigh flush dev {}{at}", end.name()))?;
        }
        Ok(())
    }

    /// The kernel tells its queues of a carrier up to a second later, and drops what is sent before.
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

    /// Bytes that have left by this end.
    pub fn sent(&self, end: End, at: u8) -> Result<u64> {
        let pid = if end == End::Near { std::process::id() } else { self.there };
        // A namespace's own view, which sysfs gives only to those who mount it there.
        let table = fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
        let name = format!("{}{at}:", end.name());
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix(&name));
        // Eight columns of what was received come first.
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
            // SAFETY: setns is a plain system call, allowed between fork and exec; the descriptor is
            // the closure's own.
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

/// Where `ip` is: administrators' programs are not on everyone's path.
fn programs() -> Result<&'static Path> {
    let places = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    match places.into_iter().map(Path::new).find(|path| path.join("ip").is_file()) {
        Some(path) => Ok(path),
        None => bail!("the program `ip` is not here (package iproute2)"),
    }
}
