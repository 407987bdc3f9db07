//! NUMA nodes, interfaces, RDMA devices and GPUs, read from `/sys`, `/proc` and `/dev`.
//!
//! Every function takes a root directory. Given `/`, it describes this machine. Given a tree of
//! files, it describes the machine of that tree. A missing or unexpected file leaves a field empty,
//! but it never hides a device.

use std::fs;
use std::path::Path;

use serde::Serialize;

use super::report::{Row, Section};

/// A NUMA node.
#[derive(Debug, Eq, PartialEq, Serialize)]
pub(super) struct Node {
    pub(super) id: u32,
    /// In the kernel's list form, such as `0-15,32-47`.
    pub(super) cpus: String,
    /// Bytes.
    pub(super) memory: Option<u64>,
}

/// The NUMA nodes, by number.
pub(super) fn numa_nodes(root: &Path) -> Vec<Node> {
    let base = root.join("sys/devices/system/node");
    let mut nodes: Vec<Node> = entries(&base)
        .into_iter()
        .filter_map(|name| {
            let id = name.strip_prefix("node")?.parse().ok()?;
            let dir = base.join(&name);
            let memory = attribute(&dir, "meminfo").and_then(|text| meminfo(&text, "MemTotal"));
            Some(Node { id, cpus: attribute(&dir, "cpulist").unwrap_or_default(), memory })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// A field of `/proc/meminfo`, or of a node's, in bytes.
pub(super) fn meminfo(text: &str, field: &str) -> Option<u64> {
    // In a node's file the lines begin with `Node 0`, so the field is the first word or the third.
    let value = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.split_whitespace().last() == Some(field)).then_some(value)
    })?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A network interface.
#[derive(Debug, Eq, PartialEq, Serialize)]
pub(super) struct Nic {
    pub(super) name: String,
    pub(super) state: String,
    pub(super) speed_mbps: Option<u64>,
    pub(super) mtu: Option<u64>,
    pub(super) pci: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) numa_node: Option<u32>,
}

/// The network interfaces, by name.
pub(super) fn nics(root: &Path) -> Vec<Nic> {
    let base = root.join("sys/class/net");
    entries(&base)
        .into_iter()
        // The bonding driver puts a plain file into this directory.
        .filter(|name| base.join(name).is_dir())
        .map(|name| {
            let dir = base.join(&name);
            let device = dir.join("device");
            Nic {
                state: attribute(&dir, "operstate").unwrap_or_else(|| "unknown".to_owned()),
                // Virtual interfaces report -1, or the read fails.
                speed_mbps: number(&dir, "speed").filter(|speed| *speed > 0),
                mtu: number(&dir, "mtu"),
                pci: link_name(&device).filter(|name| is_pci_address(name)),
                driver: link_name(&device.join("driver")),
                numa_node: numa_node(&device),
                name,
            }
        })
        .collect()
}

/// An RDMA device.
#[derive(Debug, Eq, PartialEq, Serialize)]
pub(super) struct RdmaDevice {
    pub(super) name: String,
    pub(super) ports: Vec<RdmaPort>,
    pub(super) firmware: Option<String>,
    pub(super) pci: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) numa_node: Option<u32>,
    /// Network interfaces of the same PCI function.
    pub(super) interfaces: Vec<String>,
}

/// A port of an RDMA device.
#[derive(Debug, Eq, PartialEq, Serialize)]
pub(super) struct RdmaPort {
    pub(super) number: u32,
    /// The kernel's word without its number: `ACTIVE`, `DOWN`.
    pub(super) state: String,
    pub(super) rate: String,
    /// `InfiniBand` or `Ethernet`.
    pub(super) link: String,
}

impl RdmaPort {
    /// Whether the port carries traffic.
    pub(super) fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// The RDMA devices, by name.
pub(super) fn rdma_devices(root: &Path) -> Vec<RdmaDevice> {
    let base = root.join("sys/class/infiniband");
    entries(&base)
        .into_iter()
        .map(|name| {
            let dir = base.join(&name);
            let device = dir.join("device");
            RdmaDevice {
                ports: rdma_ports(&dir.join("ports")),
                firmware: attribute(&dir, "fw_ver"),
                pci: link_name(&device).filter(|name| is_pci_address(name)),
                driver: link_name(&device.join("driver")),
                numa_node: numa_node(&device),
                interfaces: entries(&device.join("net")),
                name,
            }
        })
        .collect()
}

fn rdma_ports(base: &Path) -> Vec<RdmaPort> {
    let unknown = || "unknown".to_owned();
    let mut ports: Vec<RdmaPort> = entries(base)
        .into_iter()
        .filter_map(|name| {
            let dir = base.join(&name);
            let state = attribute(&dir, "state");
            // The kernel writes `4: ACTIVE`.
            let state = state.map(|text| match text.split_once(": ") {
                Some((_, word)) => word.to_owned(),
                None => text,
            });
            Some(RdmaPort {
                number: name.parse().ok()?,
                state: state.unwrap_or_else(unknown),
                rate: attribute(&dir, "rate").unwrap_or_else(unknown),
                link: attribute(&dir, "link_layer").unwrap_or_else(unknown),
            })
        })
        .collect();
    ports.sort_by_key(|port| port.number);
    ports
}

/// A GPU.
#[derive(Debug, Eq, PartialEq, Serialize)]
pub(super) struct Gpu {
    pub(super) pci: String,
    pub(super) vendor: &'static str,
    pub(super) model: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) numa_node: Option<u32>,
}

/// The GPUs, by PCI address. The list includes GPUs that only the NVIDIA driver shows, because some
/// containers hide the PCI bus.
pub(super) fn gpus(root: &Path) -> Vec<Gpu> {
    let bus = root.join("sys/bus/pci/devices");
    let driver_view = root.join("proc/driver/nvidia/gpus");
    let mut gpus: Vec<Gpu> = entries(&bus)
        .into_iter()
        .filter_map(|pci| {
            let dir = bus.join(&pci);
            let vendor = match attribute(&dir, "vendor")?.as_str() {
                "0x10de" => "NVIDIA",
                "0x1002" => "AMD",
                _ => return None,
            };
            // VGA, 3D and other display controllers. AMD Instinct GPUs are processing accelerators.
            let class = attribute(&dir, "class")?;
            if !["0x0300", "0x0302", "0x0380", "0x1200"].iter().any(|gpu| class.starts_with(gpu)) {
                return None;
            }
            Some(Gpu {
                vendor,
                model: nvidia_model(&driver_view.join(&pci)),
                driver: link_name(&dir.join("driver")),
                numa_node: numa_node(&dir),
                pci,
            })
        })
        .collect();
    for pci in entries(&driver_view) {
        if !gpus.iter().any(|gpu| gpu.pci == pci) {
            let model = nvidia_model(&driver_view.join(&pci));
            let driver = Some("nvidia".to_owned());
            gpus.push(Gpu { pci, vendor: "NVIDIA", model, driver, numa_node: None });
        }
    }
    gpus.sort_by(|left, right| left.pci.cmp(&right.pci));
    gpus
}

fn nvidia_model(dir: &Path) -> Option<String> {
    let text = attribute(dir, "information")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(line.trim().to_owned())
}

/// The section about GPUs.
pub(super) fn gpu_section(root: &Path) -> Section {
    let mut section = Section::new("gpus", "GPUs");
    let gpus = gpus(root);
    if gpus.is_empty() {
        section.push(Row::absent("devices", "none on the PCI bus or in /proc/driver/nvidia"));
    }
    let rdma = peerway::topology::read(root);
    for gpu in &gpus {
        let name = match &gpu.model {
            Some(model) => model.clone(),
            None => format!("{} device", gpu.vendor),
        };
        let numa = gpu.numa_node.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
        let near = near_rdma(root, &rdma, &gpu.pci);
        let row = match &gpu.driver {
            Some(driver) => Row::ok(&gpu.pci, name).note(format!("driver {driver}{numa}{near}")),
            None => Row::attention(&gpu.pci, name)
                .note(format!("no driver is bound: install the vendor's driver{numa}{near}")),
        };
        section.push(row.data(gpu));
    }
    if let Some(version) = attribute(&root.join("proc/driver/nvidia"), "version") {
        // The first line reads `NVRM version: NVIDIA UNIX ... 580.65.06 ...`.
        let line = version.lines().next().unwrap_or_default();
        let text = line.split_once(':').map_or(line, |(_, text)| text);
        section
            .push(Row::ok("NVIDIA driver", text.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    let nodes: Vec<String> = entries(&root.join("dev"))
        .into_iter()
        .filter(|name| name.starts_with("nvidia") || name == "kfd")
        .map(|name| format!("/dev/{name}"))
        .collect();
    if nodes.is_empty() {
        if !gpus.is_empty() {
            section.push(
                Row::attention("device nodes", "none")
                    .note("in a container, pass the GPU in (for example `--gpus all`)"),
            );
        }
    } else {
        section.push(Row::ok("device nodes", nodes.join(" ")).data(&nodes));
    }
    section
}

/// The RDMA devices that are nearest to a GPU. Empty if their distance is unknown.
fn near_rdma(root: &Path, rdma: &[peerway::topology::Device], gpu: &str) -> String {
    use peerway::topology::{Nearness, function, nearest_group, nearness};

    let place = function(root, gpu);
    let group = nearest_group(rdma, &place);
    if group.first().is_none_or(|first| nearness(first, &place) >= Nearness::Unknown) {
        return String::new();
    }
    let names: Vec<&str> = group.iter().map(|device| device.name.as_str()).collect();
    format!(", nearest RDMA {}", names.join(" "))
}

/// The names in a directory, sorted. Empty if the directory cannot be read.
fn entries(dir: &Path) -> Vec<String> {
    let Ok(found) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        found.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The text of a small file, trimmed. `None` if the file is empty or cannot be read.
fn attribute(dir: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(dir.join(name)).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn number(dir: &Path, name: &str) -> Option<u64> {
    attribute(dir, name)?.parse().ok()
}

/// The NUMA node of a device. The kernel writes -1 if the device belongs to no node.
fn numa_node(device: &Path) -> Option<u32> {
    attribute(device, "numa_node")?.parse().ok()
}

/// The last component of a symbolic link's target.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

/// Whether a name has the form `0000:3b:00.0`.
fn is_pci_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4
        && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Trees of files for tests.
#[cfg(test)]
pub(super) mod fixture {
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::{env, fs, process};

    /// A unique directory under the system's temporary directory. Dropping the value removes it.
    pub(in crate::doctor) struct Tree(PathBuf);

    impl Tree {
        pub(in crate::doctor) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let root = env::temp_dir().join(format!("peerway-doctor-{}-{number}", process::id()));
            fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        pub(in crate::doctor) fn root(&self) -> &Path {
            &self.0
        }

        pub(in crate::doctor) fn file(self, path: &str, text: &str) -> Self {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        pub(in crate::doctor) fn link(self, path: &str, target: &str) -> Self {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
            self
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::Tree;
    use super::*;

    #[test]
    fn an_empty_tree_has_nothing() {
        let tree = Tree::new();
        assert!(numa_nodes(tree.root()).is_empty());
        assert!(nics(tree.root()).is_empty());
        assert!(rdma_devices(tree.root()).is_empty());
        assert!(gpus(tree.root()).is_empty());
        assert!(gpu_section(tree.root()).to_string().contains("none on the PCI bus"));
    }

    #[test]
    fn nodes_are_ordered_by_number() {
        let base = "sys/devices/system/node";
        let mut tree = Tree::new().file(&format!("{base}/online"), "0-10\n");
        for id in [10, 2, 0] {
            tree = tree
                .file(&format!("{base}/node{id}/cpulist"), &format!("{id}\n"))
                .file(&format!("{base}/node{id}/meminfo"), "Node 0 MemTotal:  1024 kB\n");
        }
        let nodes = numa_nodes(tree.root());
        assert_eq!(nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 2, 10]);
        assert_eq!(nodes[1], Node { id: 2, cpus: "2".to_owned(), memory: Some(1 << 20) });
    }

    #[test]
    fn meminfo_fields() {
        let text = "MemTotal:       1000 kB\nHugePages_Total: 3\nShmem: 99999999999999999999 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(1_024_000));
        assert_eq!(meminfo(text, "HugePages_Total"), None);
        assert_eq!(meminfo(text, "Shmem"), None);
        assert_eq!(meminfo(text, "Total"), None);
    }

    #[test]
    fn interfaces_with_and_without_hardware() {
        let pci = "sys/devices/pci0000:3a/0000:3b:00.0";
        let tree = Tree::new()
            .file(&format!("{pci}/numa_node"), "1\n")
            .link(&format!("{pci}/driver"), "../../../bus/pci/drivers/mlx5_core")
            .file("sys/class/net/eth0/operstate", "up\n")
            .file("sys/class/net/eth0/speed", "200000\n")
            .file("sys/class/net/eth0/mtu", "9000\n")
            .link("sys/class/net/eth0/device", "../../../devices/pci0000:3a/0000:3b:00.0")
            .file("sys/class/net/lo/operstate", "unknown\n")
            .file("sys/class/net/lo/speed", "-1\n")
            .file("sys/class/net/bonding_masters", "\n");
        let nics = nics(tree.root());
        assert_eq!(nics.len(), 2);
        assert_eq!(
            nics[0],
            Nic {
                name: "eth0".to_owned(),
                state: "up".to_owned(),
                speed_mbps: Some(200_000),
                mtu: Some(9000),
                pci: Some("0000:3b:00.0".to_owned()),
                driver: Some("mlx5_core".to_owned()),
                numa_node: Some(1),
            }
        );
        assert_eq!((nics[1].speed_mbps, &nics[1].pci, nics[1].numa_node), (None, &None, None));
    }

    #[test]
    fn rdma_devices_with_ports() {
        let base = "sys/class/infiniband/mlx5_0";
        let tree = Tree::new()
            .file(&format!("{base}/fw_ver"), "28.41.1000\n")
            .file(&format!("{base}/ports/1/state"), "4: ACTIVE\n")
            .file(&format!("{base}/ports/1/rate"), "400 Gb/sec (4X NDR)\n")
            .file(&format!("{base}/ports/1/link_layer"), "InfiniBand\n")
            .file(&format!("{base}/ports/2/state"), "\n")
            .file(&format!("{base}/device/numa_node"), "-1\n")
            .file(&format!("{base}/device/net/ib0/operstate"), "up\n");
        let devices = rdma_devices(tree.root());
        assert_eq!(devices.len(), 1);
        let device = &devices[0];
        assert_eq!(device.firmware.as_deref(), Some("28.41.1000"));
        assert_eq!(device.numa_node, None);
        assert_eq!(device.interfaces, ["ib0"]);
        assert_eq!(device.ports.len(), 2);
        assert_eq!(device.ports[0].state, "ACTIVE");
        assert_eq!(device.ports[1].state, "unknown");
    }

    #[test]
    fn gpus_from_the_bus_and_from_the_driver() {
        let bus = "sys/bus/pci/devices";
        let tree = Tree::new()
            .file(&format!("{bus}/0000:03:00.0/vendor"), "0x10de\n")
            .file(&format!("{bus}/0000:03:00.0/class"), "0x030200\n")
            .link(&format!("{bus}/0000:03:00.0/driver"), "../drivers/nvidia")
            .file(&format!("{bus}/0000:03:00.0/numa_node"), "0\n")
            // An NVSwitch, which has NVIDIA's vendor id but is no GPU.
            .file(&format!("{bus}/0000:04:00.0/vendor"), "0x10de\n")
            .file(&format!("{bus}/0000:04:00.0/class"), "0x068000\n")
            .file(&format!("{bus}/0000:05:00.0/vendor"), "0x1002\n")
            .file(&format!("{bus}/0000:05:00.0/class"), "0x120000\n")
            .file(&format!("{bus}/0000:06:00.0/vendor"), "0x8086\n")
            .file(&format!("{bus}/0000:06:00.0/class"), "0x030000\n")
            .file("proc/driver/nvidia/gpus/0000:03:00.0/information", "Model: \t\t Test GPU\n")
            .file("proc/driver/nvidia/gpus/0000:09:00.0/information", "IRQ: 1\n")
            .file("proc/driver/nvidia/version", "NVRM version: NVIDIA  580.65\nGCC: x\n")
            .file("dev/nvidia0", "");
        let gpus = gpus(tree.root());
        let found: Vec<&str> = gpus.iter().map(|gpu| gpu.pci.as_str()).collect();
        assert_eq!(found, ["0000:03:00.0", "0000:05:00.0", "0000:09:00.0"]);
        assert_eq!(gpus[0].model.as_deref(), Some("Test GPU"));
        assert_eq!(gpus[0].numa_node, Some(0));
        assert_eq!((gpus[1].vendor, &gpus[1].driver), ("AMD", &None));
        let text = gpu_section(tree.root()).to_string();
        for part in ["Test GPU", "NVIDIA 580.65", "/dev/nvidia0", "no driver is bound"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_gpu_names_the_rdma_devices_near_it() {
        let switch = "sys/devices/pci0000:16/0000:16:01.0";
        let mut tree = Tree::new();
        for (pci, file, text) in [
            ("0000:17:00.0", "vendor", "0x10de\n"),
            ("0000:17:00.0", "class", "0x030200\n"),
            ("0000:18:00.0", "numa_node", "0\n"),
        ] {
            tree = tree.file(&format!("{switch}/{pci}/{file}"), text);
        }
        let tree = tree
            .link(
                "sys/bus/pci/devices/0000:17:00.0",
                "../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0",
            )
            .link(
                "sys/class/infiniband/mlx5_3/device",
                "../../../devices/pci0000:16/0000:16:01.0/0000:18:00.0",
            )
            .file("sys/class/infiniband/mlx5_4/device/numa_node", "1\n");
        let text = gpu_section(tree.root()).to_string();
        assert!(text.contains("nearest RDMA mlx5_3"), "{text}");
        assert!(!text.contains("mlx5_4"), "{text}");
    }

    #[test]
    fn pci_addresses() {
        assert!(is_pci_address("0000:3b:00.0"));
        assert!(!is_pci_address("virtio2"));
        assert!(!is_pci_address("0000:3b:00."));
    }
}
