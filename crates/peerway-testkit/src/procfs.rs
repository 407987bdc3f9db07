//! Reads `/proc`: descriptors, threads, mappings, memory and processor time of a process.

use std::fs;

use anyhow::{Context, Result};

/// Resources that a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Open file descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings.
    pub maps: usize,
    /// Resident memory in KiB.
    pub resident_kib: usize,
}

/// The resources that process `pid` holds now.
pub fn holdings(pid: u32) -> Result<Holdings> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).context("reading statm")?;
    let pages: usize = statm.split(' ').nth(1).context("statm is short")?.parse()?;
    let count = |what: &str| -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{pid}/{what}")).with_context(|| what.to_owned())?.count())
    };
    Ok(Holdings {
        fds: count("fd")?,
        threads: count("task")?,
        maps: fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count(),
        resident_kib: pages * 4,
    })
}

/// Processor ticks (10 ms) that `pid` has used in user and kernel mode.
pub fn ticks(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let field =
        |n: usize| -> Result<u64> { Ok(after_name(&text, n).context("stat is short")?.parse()?) };
    // Fields 14 and 15 of proc_pid_stat(5). `after_name` counts from the field after the name,
    // which is field 2.
    Ok(field(11)? + field(12)?)
}

/// Ticks of all processors of this machine, and the ticks that its host stole from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineTime {
    all: u64,
    stolen: u64,
}

impl MachineTime {
    fn parse(stat: &str) -> Option<Self> {
        let ticks = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let ticks: Vec<u64> = ticks.map(|ticks| ticks.parse().ok()).collect::<Option<_>>()?;
        // Guest ticks are already part of the first two fields, see proc_stat(5).
        Some(Self { all: ticks.iter().take(8).sum(), stolen: *ticks.get(7)? })
    }

    /// Percent of the ticks since `before` that the host stole; `None` if no tick has passed.
    pub fn stolen_since(self, before: Self) -> Option<u64> {
        (100 * self.stolen.saturating_sub(before.stolen))
            .checked_div(self.all.checked_sub(before.all)?)
    }
}

/// The machine's time so far, where `/proc/stat` shows it.
pub fn machine_time() -> Option<MachineTime> {
    MachineTime::parse(&fs::read_to_string("/proc/stat").ok()?)
}

/// The state letter of `pid`: `T` when it is stopped, `None` when it is gone.
pub fn state(pid: u32) -> Option<char> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    after_name(&text, 0)?.chars().next()
}

/// Field `n` after the process name. The name may hold spaces and brackets, so counting starts at
/// its end.
fn after_name(text: &str, n: usize) -> Option<&str> {
    text.rsplit_once(')')?.1.split_whitespace().nth(n)
}

/// Address ranges of this process's mappings whose name contains `name`.
pub fn mappings_of(name: &str) -> Result<Vec<(usize, usize)>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut found = Vec::new();
    for line in maps.lines().filter(|line| line.contains(name)) {
        let range = line.split(' ').next().unwrap_or_default();
        let (start, end) = range.split_once('-').context("maps changed its format")?;
        found.push((usize::from_str_radix(start, 16)?, usize::from_str_radix(end, 16)?));
    }
    Ok(found)
}

/// Memory of another process of the same user as it is now, whether the process runs or not.
pub fn memory_of(pid: u32, addr: u64, len: usize) -> Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mem = fs::File::open(format!("/proc/{pid}/mem")).context("opening a peer's memory")?;
    let mut bytes = vec![0; len];
    mem.read_exact_at(&mut bytes, addr).context("reading a peer's memory")?;
    Ok(bytes)
}

/// The id of the running boot, as the engine puts it into proofs. Zeros if it cannot be read.
pub fn boot_id() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or_default().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_a_part_of_all() {
        let at = |line: &str| MachineTime::parse(line).unwrap();
        let before = at("cpu  100 0 100 700 0 0 0 100 50 50\ncpu0 1");
        let now = at("cpu  150 0 120 710 0 0 0 120 60 50\ncpu0 1");
        assert_eq!(now.stolen_since(before), Some(20));
        assert_eq!(now.stolen_since(now), None);
        assert_eq!(MachineTime::parse("cpu  1 2 3"), None);
        assert_eq!(MachineTime::parse(""), None);
    }

    #[test]
    fn this_process_is_described() {
        let me = std::process::id();
        let held = holdings(me).unwrap();
        assert!(held.fds >= 3 && held.threads >= 1 && held.maps > 3 && held.resident_kib > 100);
        assert!(ticks(me).is_ok());
        assert!(matches!(state(me), Some('R' | 'S')));
        assert_eq!(state(u32::MAX), None);
    }
}
