//! Kernel, processors, memory and limits.

use std::fs;
use std::path::Path;
use std::thread;

use peerway::threads::Cpus;
use rustix::process::{Resource, getrlimit};

use super::report::{Row, Section, bytes};
use super::topology;

/// With a lower limit, registrations of pinned memory fail at common sizes. The usual default is
/// 8 MiB.
pub(super) const SMALL_MEMLOCK: u64 = 64 << 20;

/// The section about the machine itself.
pub(super) fn section(root: &Path) -> Section {
    let mut section = Section::new("machine", "Machine");
    let kernel = rustix::system::uname();
    section.push(Row::ok(
        "kernel",
        format!("{} {}", kernel.release().to_string_lossy(), kernel.machine().to_string_lossy()),
    ));
    section.push(cores(root));
    section.push(engine_threads());
    section.push(numa(root));
    section.push(memory(root));
    section.push(memlock());
    section
}

fn cores(root: &Path) -> Row {
    let model = cpu_model(root).unwrap_or_default();
    match thread::available_parallelism() {
        Ok(count) => Row::ok("cores", count.to_string()).note(model).data(count),
        Err(error) => Row::attention("cores", format!("cannot be counted: {error}")).note(model),
    }
}

/// The CPUs for engine threads in a process that is started like this one.
fn engine_threads() -> Row {
    match Cpus::of_environment() {
        Ok(cpus) if cpus.numbers().is_empty() => {
            Row::attention("engine threads", "the kernel does not report the allowed processors")
        }
        Ok(cpus) => {
            let row = Row::ok("engine threads", format!("on processors {cpus}"));
            row.data(cpus.numbers())
                .note("PEERWAY_CPUS, or the processors of the main thread at start")
        }
        Err(error) => Row::attention("engine threads", error.to_string()),
    }
}

fn cpu_model(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn numa(root: &Path) -> Row {
    let nodes = topology::numa_nodes(root);
    if nodes.is_empty() {
        return Row::absent("NUMA nodes", "not shown by this kernel");
    }
    let note = nodes
        .iter()
        .map(|node| {
            let memory = node.memory.map(|size| format!(", {}", bytes(size))).unwrap_or_default();
            format!("node {}: cpus {}{memory}", node.id, node.cpus)
        })
        .collect::<Vec<_>>()
        .join("; ");
    Row::ok("NUMA nodes", nodes.len().to_string()).note(note).data(&nodes)
}

fn memory(root: &Path) -> Row {
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let (Some(total), Some(available)) =
        (topology::meminfo(&text, "MemTotal"), topology::meminfo(&text, "MemAvailable"))
    else {
        return Row::attention("memory", "cannot be read from /proc/meminfo");
    };
    let row = Row::ok("memory", format!("{}, {} available", bytes(total), bytes(available)))
        .data(serde_json::json!({ "total": total, "available": available }));
    match cgroup_limit(root).filter(|limit| *limit < total) {
        Some(limit) => row.note(format!("this container may use {}", bytes(limit))),
        None => row,
    }
}

/// The memory limit of the control group that this process sees as its root.
fn cgroup_limit(root: &Path) -> Option<u64> {
    fs::read_to_string(root.join("sys/fs/cgroup/memory.max")).ok()?.trim().parse().ok()
}

fn memlock() -> Row {
    let limit = getrlimit(Resource::Memlock).current;
    match limit {
        None => Row::ok("memlock limit", "unlimited").data("unlimited"),
        Some(limit) if limit < SMALL_MEMLOCK => Row::attention("memlock limit", bytes(limit))
            .note("enough for local and tcp; RDMA and pinned memory need `ulimit -l unlimited`")
            .data(limit),
        Some(limit) => Row::ok("memlock limit", bytes(limit)).data(limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::topology::fixture::Tree;

    #[test]
    fn an_empty_root_is_answered_not_refused() {
        let tree = Tree::new();
        let text = section(tree.root()).to_string();
        assert!(text.contains("not shown by this kernel"), "{text}");
        assert!(text.contains("engine threads") && text.contains("on processors"), "{text}");
        assert!(text.contains("cannot be read from /proc/meminfo"), "{text}");
    }

    #[test]
    fn processors_memory_and_container_limit_are_shown() {
        let tree = Tree::new()
            .file("proc/cpuinfo", "processor : 0\nmodel name\t: Test CPU 3000\n")
            .file("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n")
            .file("sys/fs/cgroup/memory.max", "1073741824\n")
            .file("sys/devices/system/node/node0/cpulist", "0-1\n");
        let text = section(tree.root()).to_string();
        for part in ["Test CPU 3000", "4.0 GiB, 1.0 GiB available", "may use 1.0 GiB", "cpus 0-1"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
