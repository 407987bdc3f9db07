//! Checks what the paths inside one host need: memfd, cross-memory attach, Yama, namespaces.

use std::fs;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::ffi;
use super::report::{Row, Section};

/// The capability that overrides Yama, as a bit of `CapEff`.
const CAP_SYS_PTRACE: u32 = 19;

/// The section about paths inside this host.
pub(super) fn section(root: &Path) -> Section {
    let mut section = Section::new("local", "Paths inside this host");
    section.push(memfd());
    section.push(cma());
    section.push(yama(root));
    section.push(pidfd());
    for name in ["pid", "net", "mnt", "user"] {
        section.push(namespace(root, name));
    }
    section
}

/// Shared mappings and the ring live in sealed memfds, so the probe also adds a seal.
fn memfd() -> Row {
    let tried = memfd_create("peerway-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .and_then(|fd| {
            ftruncate(&fd, 4096)?;
            fcntl_add_seals(&fd, SealFlags::SHRINK)
        });
    match tried {
        Ok(()) => Row::ok("memfd", "works").note("for local-map and local-ring"),
        Err(error) => Row::attention("memfd", format!("refused: {error}"))
            .note("local-map and local-ring are not available; allow memfd_create and seals"),
    }
}

fn cma() -> Row {
    match ffi::cma_on_itself() {
        Ok(()) => Row::ok("CMA", "works").note("process_vm_readv, for local-cma"),
        Err(error) => Row::attention("CMA", format!("refused: {error}"))
            .note("local-cma is not available; allow process_vm_readv in the seccomp profile"),
    }
}

fn yama(root: &Path) -> Row {
    let Ok(text) = fs::read_to_string(root.join("proc/sys/kernel/yama/ptrace_scope")) else {
        return Row::ok("Yama", "not in this kernel").note("CMA between processes of one user");
    };
    let scope = text.trim();
    let privileged = has_capability(root, CAP_SYS_PTRACE);
    let (free, meaning) = match scope {
        "0" => (true, "CMA between processes of one user"),
        "1" | "2" if privileged => (true, "CMA allowed: this process has CAP_SYS_PTRACE"),
        "1" => (false, "CMA only into processes that allow it (PR_SET_PTRACER) or are children"),
        "2" => (false, "CMA only with CAP_SYS_PTRACE"),
        _ => (false, "CMA into other processes is off; local-ring is used instead"),
    };
    let value = format!("ptrace_scope {scope}");
    let row = if free { Row::ok("Yama", value) } else { Row::attention("Yama", value) };
    row.note(meaning)
}

/// Whether this process has a capability, as a bit of `CapEff`.
pub(super) fn has_capability(root: &Path, bit: u32) -> bool {
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << bit) != 0)
}

/// The engine detects the death of a local peer through a pidfd.
fn pidfd() -> Row {
    match pidfd_open(getpid(), PidfdFlags::empty()) {
        Ok(_) => Row::ok("pidfd", "works").note("the death of a local peer is detected at once"),
        Err(Errno::NOSYS) => Row::attention("pidfd", "not in this kernel (needs 5.3 or later)")
            .note("the death of a local peer is detected only when it stops answering"),
        Err(error) => Row::attention("pidfd", format!("refused: {error}"))
            .note("the death of a local peer is detected only when it stops answering"),
    }
}

fn namespace(root: &Path, name: &str) -> Row {
    let label = format!("{name} namespace");
    let Some(own) = namespace_inode(&root.join("proc/self/ns").join(name)) else {
        return Row::attention(label, "cannot be read");
    };
    // This link needs privileges to read. It belongs to the machine's init only if this process is
    // in the machine's PID namespace.
    let init = namespace_inode(&root.join("proc/1/ns").join(name));
    let row = Row::ok(label, own.to_string()).data(own);
    match is_initial(name, own, init) {
        Some(true) => row.note("the machine's own"),
        Some(false) => row.note("a container's; each path to a peer outside is probed"),
        None => row.note("the machine's or a container's: this kernel does not tell"),
    }
}

/// The inode in a link such as `pid:[4026531836]`.
fn namespace_inode(link: &Path) -> Option<u64> {
    let target = fs::read_link(link).ok()?;
    let text = target.to_str()?;
    text.split_once(":[")?.1.strip_suffix(']')?.parse().ok()
}

/// Whether a namespace is the one that the machine booted with. `None` if this cannot be decided.
///
/// The kernel gives the initial namespaces fixed inodes (`include/linux/proc_ns.h`,
/// `uapi/linux/nsfs.h`). For `net` and `mnt` the inodes are fixed only in recent kernels. A
/// different inode is therefore conclusive only if init's namespace has the fixed inode.
fn is_initial(name: &str, own: u64, init: Option<u64>) -> Option<bool> {
    let (fixed, always) = match name {
        "user" => (0xEFFF_FFFD, true),
        "pid" => (0xEFFF_FFFC, true),
        "net" => (0xEFFF_FFF9, false),
        "mnt" => (0xEFFF_FFF8, false),
        _ => return None,
    };
    if own == fixed {
        return Some(true);
    }
    if always || init == Some(fixed) {
        return Some(false);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::topology::fixture::Tree;

    #[test]
    fn yama_levels_say_what_they_mean() {
        for (scope, caps, expected) in [
            ("0", "0", "between processes of one user"),
            ("1", "0", "PR_SET_PTRACER"),
            ("1", "80000", "has CAP_SYS_PTRACE"),
            ("2", "0", "only with CAP_SYS_PTRACE"),
            ("3", "80000", "is off"),
        ] {
            let tree = Tree::new()
                .file("proc/sys/kernel/yama/ptrace_scope", &format!("{scope}\n"))
                .file("proc/self/status", &format!("Name:\tx\nCapEff:\t{caps}\n"));
            let text = section(tree.root()).to_string();
            assert!(text.contains(&format!("ptrace_scope {scope}")), "{text}");
            assert!(text.contains(expected), "{text}");
        }
        let text = section(Tree::new().root()).to_string();
        assert!(text.contains("not in this kernel"), "{text}");
    }

    #[test]
    fn namespaces_are_recognised() {
        let tree = Tree::new()
            .link("proc/self/ns/pid", "pid:[4026531836]")
            .link("proc/self/ns/user", "user:[4026532999]")
            .link("proc/self/ns/net", "net:[4026532008]")
            .link("proc/self/ns/mnt", "garbage");
        let text = section(tree.root()).to_string();
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_default();
        assert!(line("pid namespace").contains("the machine's own"), "{text}");
        assert!(line("user namespace").contains("a container's"), "{text}");
        assert!(line("net namespace").contains("does not tell"), "{text}");
        assert!(line("mnt namespace").contains("cannot be read"), "{text}");
    }

    #[test]
    fn a_new_kernels_init_decides_for_net() {
        assert_eq!(is_initial("net", 4026532008, Some(0xEFFF_FFF9)), Some(false));
        assert_eq!(is_initial("net", 0xEFFF_FFF9, None), Some(true));
        assert_eq!(is_initial("net", 7, Some(7)), None);
    }
}
