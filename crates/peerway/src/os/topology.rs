//! Locations of devices and CPUs, read from `/sys`.
//!
//! Every function takes a root directory: `/` describes this machine, any other tree of files
//! describes that tree. A link is followed only if its target lies inside the root. A missing or
//! malformed file leaves a fact unknown; it never removes a device. [`peerway_core::topology`]
//! interprets the facts.

use std::fs;
use std::path::{Path, PathBuf};

pub use peerway_core::topology::{
    Device, Nearness, Place, Shared, nearest, nearest_group, nearness,
};
use peerway_core::topology::{by_name, parse_cpus};

/// The RDMA devices, sorted by name.
///
/// A device that is not on the PCI bus, such as soft-RoCE, has the location of the network
/// interface that it runs over.
pub fn read(root: &Path) -> Vec<Device> {
    let base = root.join("sys/class/infiniband");
    let mut devices: Vec<Device> = names(&base)
        .into_iter()
        .map(|name| {
            let dir = base.join(&name);
            let function = dir.join("device");
            let (pci, numa) = if function.exists() {
                location(root, &function)
            } else {
                interface_below(&dir).map_or_else(Default::default, |interface| {
                    location(root, &root.join("sys/class/net").join(interface).join("device"))
                })
            };
            Device { name, pci, numa }
        })
        .collect();
    devices.sort_by(|one, other| by_name(&one.name, &other.name));
    devices
}

/// The location of the PCI function with this address, such as `0000:3b:00.0`. The GPU driver's
/// spelling, with a longer domain and capital letters (`00000000:3B:00.0`), is accepted too.
pub fn function(root: &Path, address: &str) -> Place {
    let Some(address) = kernels_spelling(address) else { return Place::Unknown };
    let (pci, numa) = location(root, &root.join("sys/bus/pci/devices").join(address));
    match (pci.is_empty(), numa) {
        (true, None) => Place::Unknown,
        (true, Some(node)) => Place::Node(node),
        (false, numa) => Place::Function { pci, numa },
    }
}

/// The CPUs of a NUMA node, in ascending order. Empty if the node does not exist or its list is
/// malformed.
pub fn cpus_of_node(root: &Path, node: u16) -> Vec<usize> {
    let file = root.join(format!("sys/devices/system/node/node{node}/cpulist"));
    text(&file).and_then(|list| parse_cpus(&list)).unwrap_or_default()
}

/// The NUMA node of a CPU.
pub fn node_of_cpu(root: &Path, cpu: usize) -> Option<u16> {
    let mut nodes: Vec<u16> = names(&root.join("sys/devices/system/node"))
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .collect();
    // In numerical order, so that the result is deterministic if two lists contain the CPU.
    nodes.sort_unstable();
    nodes.into_iter().find(|node| cpus_of_node(root, *node).contains(&cpu))
}

/// A device's path in the PCI tree, and its NUMA node.
fn location(root: &Path, device: &Path) -> (Vec<String>, Option<u16>) {
    let Some(real) = inside(root, device) else { return Default::default() };
    // The kernel writes -1 if a device belongs to no node.
    let numa = text(&real.join("numa_node")).and_then(|node| node.trim().parse().ok());
    (pci_path(&real), numa)
}

/// The target of a path, if it lies inside `root`. `None` for a loop of links.
fn inside(root: &Path, path: &Path) -> Option<PathBuf> {
    let real = path.canonicalize().ok()?;
    real.starts_with(root.canonicalize().ok()?).then_some(real)
}

/// The PCI part of a device's directory: from the first root complex down to the last function. It
/// omits anything below, such as a virtio device.
fn pci_path(device: &Path) -> Vec<String> {
    let parts = device.iter().filter_map(|part| part.to_str());
    parts
        .skip_while(|part| !is_root_complex(part))
        // A root complex may also lie below a function: a volume management device is one.
        .take_while(|part| is_root_complex(part) || is_address(part))
        .map(str::to_owned)
        .collect()
}

/// Whether a name has the form `pci0000:16`.
fn is_root_complex(name: &str) -> bool {
    let parts = name.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    parts.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

/// Whether a name has the form `0000:3b:00.0`.
fn is_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4 && parts.iter().all(|part| is_hex(part))
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// An address in the kernel's spelling: lower case, and a domain of at least four digits.
fn kernels_spelling(address: &str) -> Option<String> {
    let address = address.trim().to_ascii_lowercase();
    let (domain, rest) = address.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    is_address(&address).then(|| format!("{domain:04x}:{rest}"))
}

/// The network interface that a virtual RDMA device runs over. Soft-RoCE names it in a file. For
/// any other device, it is the interface of the first address.
fn interface_below(device: &Path) -> Option<String> {
    let named = |file: &str| {
        let name = text(&device.join(file))?.trim().to_owned();
        // The name becomes part of a path.
        (!name.is_empty() && !name.contains('/') && name != "..").then_some(name)
    };
    named("parent").or_else(|| named("ports/1/gid_attrs/ndevs/0"))
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(found) = fs::read_dir(dir) else { return Vec::new() };
    found.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn text(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A directory tree made from lines, removed on drop. `path = text` is a file, `path -> target`
    /// a link, `path: node` a PCI function on a NUMA node, and `name @ path` an RDMA device of a
    /// function.
    struct Tree(PathBuf);

    impl Tree {
        fn new(description: &str) -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("peerway-topology-{}-{number}", std::process::id());
            let tree = Self(std::env::temp_dir().join(name));
            fs::create_dir_all(&tree.0).unwrap();
            for line in description.lines().map(str::trim).filter(|line| !line.is_empty()) {
                if let Some((path, text)) = line.split_once(" = ") {
                    tree.file(path, text);
                } else if let Some((path, target)) = line.split_once(" -> ") {
                    tree.link(path, target);
                } else if let Some((path, node)) = line.split_once(": ") {
                    tree.function(path, node);
                } else if let Some((name, path)) = line.split_once(" @ ") {
                    tree.device(name, path);
                } else {
                    panic!("{line}");
                }
            }
            tree
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn link(&self, path: &str, target: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
        }

        fn function(&self, path: &str, node: &str) {
            self.file(&format!("sys/devices/{path}/numa_node"), node);
            let address = path.rsplit('/').next().unwrap();
            let target = format!("../../../devices/{path}");
            self.link(&format!("sys/bus/pci/devices/{address}"), &target);
        }

        /// As in the kernel: the entry of the class links to a directory below the function, and
        /// its `device` links back.
        fn device(&self, name: &str, path: &str) {
            let below = format!("devices/{path}/infiniband/{name}");
            self.link(&format!("sys/{below}/device"), "../..");
            self.link(&format!("sys/class/infiniband/{name}"), &format!("../../{below}"));
        }

        fn group(&self, place: &Place) -> Vec<String> {
            let devices = read(&self.0);
            nearest_group(&devices, place).iter().map(|device| device.name.clone()).collect()
        }

        fn order(&self, place: &Place) -> Vec<String> {
            let devices = read(&self.0);
            nearest(&devices, place).iter().map(|device| device.name.clone()).collect()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Two sockets with two switches each, and two GPUs and two NICs below each switch. As on real
    /// machines, the device numbers do not follow the order of the bus.
    fn big_box() -> Tree {
        let mut lines = vec![
            "sys/devices/system/node/node0/cpulist = 0-55,112-167".to_owned(),
            "sys/devices/system/node/node1/cpulist = 56-111,168-223".to_owned(),
        ];
        for (switch, bus) in [0x16, 0x40, 0x96, 0xc0].into_iter().enumerate() {
            let port = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
            let upstream = format!("{port}/0000:{:02x}:00.0", bus + 1);
            for slot in 0..4 {
                let below = format!("{upstream}/0000:{:02x}:{slot:02x}.0", bus + 2);
                let function = format!("{below}/0000:{:02x}:00.0", bus + 3 + slot);
                lines.push(format!("{function}: {}", switch / 2));
                if slot >= 2 {
                    // 11, 10, 9, ...: the numerical and the alphabetical order differ.
                    let number = 11 - (2 * switch + slot - 2);
                    lines.push(format!("mlx5_{number} @ {function}"));
                }
            }
        }
        Tree::new(&lines.join("\n"))
    }

    #[test]
    fn a_big_box_has_two_nics_at_every_gpus_switch() {
        let tree = big_box();
        assert_eq!(read(&tree.0).len(), 8);
        for (switch, bus) in [0x16, 0x40, 0x96, 0xc0].into_iter().enumerate() {
            for slot in 0..2 {
                let gpu = function(&tree.0, &format!("00000000:{:02X}:00.0", bus + 3 + slot));
                let near = [10 - 2 * switch, 11 - 2 * switch].map(|n| format!("mlx5_{n}"));
                assert_eq!(tree.group(&gpu), near, "{gpu:?}");
            }
        }
        let gpu = function(&tree.0, "0000:19:00.0");
        let order = [10, 11, 8, 9, 4, 5, 6, 7].map(|n| format!("mlx5_{n}"));
        assert_eq!(tree.order(&gpu), order);
        assert_eq!(tree.group(&Place::Node(1)), [4, 5, 6, 7].map(|n| format!("mlx5_{n}")));
        assert_eq!(node_of_cpu(&tree.0, 60), Some(1));
        assert_eq!(node_of_cpu(&tree.0, 112), Some(0));
        assert_eq!(node_of_cpu(&tree.0, 224), None);
        assert_eq!(cpus_of_node(&tree.0, 1).len(), 112);
    }

    #[test]
    fn a_box_with_one_socket_is_ordered_by_its_root_complexes() {
        let tree = Tree::new(
            "pci0000:60/0000:60:01.0/0000:61:00.0: -1
             pci0000:60/0000:60:03.0/0000:62:00.0: -1
             pci0000:20/0000:20:01.0/0000:21:00.0: -1
             mlx5_0 @ pci0000:20/0000:20:01.0/0000:21:00.0
             mlx5_1 @ pci0000:60/0000:60:03.0/0000:62:00.0
             sys/devices/system/node/node0/cpulist = 0-31",
        );
        assert_eq!(tree.order(&function(&tree.0, "0000:61:00.0")), ["mlx5_1", "mlx5_0"]);
        assert_eq!(tree.group(&Place::Node(0)), ["mlx5_0", "mlx5_1"]);
        assert_eq!(read(&tree.0)[0].numa, None);
        assert_eq!(node_of_cpu(&tree.0, 3), Some(0));
    }

    #[test]
    fn a_virtual_machine_with_a_flat_bus_has_no_near_and_far() {
        let tree = Tree::new(
            "pci0000:00/0000:00:05.0: -1
             pci0000:00/0000:00:1e.0: -1
             pci0000:00/0000:00:1f.0: -1
             rdmap0s30 @ pci0000:00/0000:00:1e.0
             rdmap0s31 @ pci0000:00/0000:00:1f.0",
        );
        let gpu = function(&tree.0, "0000:00:05.0");
        assert_eq!(tree.group(&gpu), ["rdmap0s30", "rdmap0s31"]);
        assert_eq!(nearness(&read(&tree.0)[0], &gpu), Nearness::RootComplex);
    }

    #[test]
    fn soft_roce_is_where_its_interface_is() {
        let tree = Tree::new(
            "pci0000:16/0000:16:01.0/0000:17:00.0: 1
             sys/class/net/eth0/device -> ../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0
             sys/class/net/va0/mtu = 9000
             sys/class/infiniband/rxe0/parent = eth0
             sys/class/infiniband/rxe1/parent = va0
             sys/class/infiniband/siw2/ports/1/gid_attrs/ndevs/0 = eth0
             sys/class/infiniband/rxe3/parent = ../../class",
        );
        let devices = read(&tree.0);
        assert_eq!((devices[0].numa, devices[0].pci.len()), (Some(1), 3));
        assert_eq!((devices[1].numa, devices[1].pci.len()), (None, 0));
        assert_eq!((devices[3].name.as_str(), devices[3].numa), ("siw2", Some(1)));
        assert_eq!(tree.order(&Place::Node(1)), ["rxe0", "siw2", "rxe1", "rxe3"]);
        assert_eq!(tree.order(&Place::Node(0)), ["rxe1", "rxe3", "rxe0", "siw2"]);
    }

    #[test]
    fn a_virtio_function_and_a_nested_root_complex_are_on_the_bus() {
        let path = |text: &str| pci_path(Path::new(text)).join(" ");
        let virtio = "/sys/devices/pci0000:00/0000:00:04.0/virtio1";
        assert_eq!(path(virtio), "pci0000:00 0000:00:04.0");
        let nested = "/sys/devices/pci0000:16/0000:16:05.5/pci10000:00/10000:00:01.0";
        assert_eq!(path(nested), "pci0000:16 0000:16:05.5 pci10000:00 10000:00:01.0");
        let deep = "/sys/devices/LNXSYSTM:00/VMBUS:01/4a2b/pci4a2b:00/4a2b:00:02.0";
        assert_eq!(path(deep), "pci4a2b:00 4a2b:00:02.0");
        assert_eq!(path("/sys/devices/virtual/net/va0"), "");
    }

    #[test]
    fn a_broken_tree_loses_facts_and_no_device() {
        let tree = Tree::new(
            "pci0000:16/0000:16:01.0: many
             sys/class/infiniband/dangling/device -> ../../../devices/none
             sys/class/infiniband/loop/device -> ../loop/device
             sys/class/infiniband/outside/device -> /proc/self
             sys/class/infiniband/away -> ../../gone
             sys/class/infiniband/parentless/node_type = 1: CA
             sys/class/infiniband/lost/parent = none
             garbage @ pci0000:16/0000:16:01.0
             sys/devices/system/node/node0/cpulist = 0-,7
             sys/devices/system/node/node1/meminfo = x
             sys/devices/system/node/nodes/cpulist = 0
             sys/devices/system/node/node70000/cpulist = 0
             sys/devices/system/node/node2/cpulist = 5",
        );
        let devices = read(&tree.0);
        assert_eq!(devices.len(), 7);
        for device in &devices {
            assert_eq!(device.numa, None, "{device:?}");
            assert_eq!(device.pci.is_empty(), device.name != "garbage", "{device:?}");
        }
        assert_eq!(tree.group(&Place::Node(0)).len(), 7);
        assert_eq!(cpus_of_node(&tree.0, 0), []);
        assert_eq!(node_of_cpu(&tree.0, 0), None);
        assert_eq!(node_of_cpu(&tree.0, 5), Some(2));
        for address in ["", "..", "../../etc", "0000:ff:00.0", "zz:00:00.0", "0:0"] {
            assert_eq!(function(&tree.0, address), Place::Unknown, "{address}");
        }
        assert!(read(Path::new("/nonexistent")).is_empty());
    }

    mod needs_numa_nodes {
        use super::*;

        #[test]
        #[ignore = "probes whether the kernel reports the NUMA node of CPU 0"]
        fn probe() {
            let node = Path::new("/sys/devices/system/node/node0/cpulist");
            assert!(node.is_file(), "the kernel reports no NUMA nodes");
        }

        #[test]
        #[ignore = "needs a kernel that reports NUMA nodes: cargo xtask test --only test"]
        fn a_cpu_is_among_the_cpus_of_its_node() {
            let root = Path::new("/");
            let node = node_of_cpu(root, 0).expect("CPU 0 has a node");
            assert!(cpus_of_node(root, node).contains(&0));
        }
    }
}
