//! RDMA: the devices, their capabilities, the GIDs that connections would use, and what is missing.
//!
//! The facts from the kernel's files need no libibverbs. The other facts come from the devices. A
//! machine without devices gets one row. The `data` of a device's row has every fact for programs.

use std::path::Path;

use peerway::topology as places;
use peerway_core::config::SETTINGS;
use peerway_sys::Library;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::report::{Row, Section, bytes};
use super::topology::{self, RdmaDevice, RdmaPort};
use super::verbs::{self, Answers, Asked, Port};
use super::{libraries, local, machine};

/// The capability that lifts the limit on locked memory, as a bit of `CapEff`.
const CAP_IPC_LOCK: u32 = 14;

/// How many GIDs of a port the table shows. A port with many VLANs has hundreds. The JSON has all.
const SHOWN: usize = 16;

/// The section about RDMA.
pub(super) fn section(root: &Path) -> Section {
    let mut section = Section::new("rdma", "RDMA");
    let devices = topology::rdma_devices(root);
    if devices.is_empty() {
        section.push(no_devices(root));
        return section;
    }
    section.push(libraries::row(Library::Ibverbs));
    if devices.iter().any(|device| device.driver.as_deref() == Some("efa")) {
        section.push(libraries::row(Library::Efa));
    }
    let limit = getrlimit(Resource::Memlock).current;
    section.push(memlock(limit, local::has_capability(root, CAP_IPC_LOCK)));
    describe(&mut section, root, devices, verbs::ask(), named_gid(|name| std::env::var(name).ok()));
    section
}

/// The only row of a machine without RDMA devices.
fn no_devices(root: &Path) -> Row {
    let row = Row::absent("devices", "none in /sys/class/infiniband");
    if root.join("sys/class/infiniband").is_dir() {
        return row.note("RDMA modules are loaded, but no device has come up");
    }
    row.note(
        "no RDMA module is loaded: load the NIC's driver (such as mlx5_ib or efa), which loads the others",
    )
}

fn memlock(limit: Option<u64>, exempt: bool) -> Row {
    let name = "locked memory";
    match limit {
        None => Row::ok(name, "unlimited").data("unlimited"),
        Some(limit) if exempt => Row::ok(name, bytes(limit))
            .note("does not apply to this process (CAP_IPC_LOCK)")
            .data(limit),
        Some(limit) if limit < machine::SMALL_MEMLOCK => Row::attention(name, bytes(limit))
            .note("larger registrations fail: raise the limit with `ulimit -l unlimited`")
            .data(limit),
        Some(limit) => Row::ok(name, bytes(limit)).data(limit),
    }
}

/// A GID index that a setting names for all ports, and the environment variable that sets it.
#[derive(Debug)]
struct NamedGid {
    variable: &'static str,
    value: String,
    index: Option<u32>,
}

fn named_gid(lookup: impl Fn(&str) -> Option<String>) -> Option<NamedGid> {
    let setting = SETTINGS.iter().find(|setting| setting.name == "PEERWAY_RDMA_GID_INDEX")?;
    let found = setting.find(lookup).filter(|found| !found.value.eq_ignore_ascii_case("auto"))?;
    Some(NamedGid { variable: found.name, index: found.value.parse().ok(), value: found.value })
}

/// Every known fact about a device, for programs.
#[derive(Debug, Serialize)]
struct Known<'a> {
    #[serde(flatten)]
    kernel: &'a RdmaDevice,
    /// The PCI path from the root complex to the function. If the device has none, the path of its
    /// network interface.
    pci_path: &'a [String],
    verbs: Option<&'a Answers>,
    /// The GID index that a setting names for all ports. It replaces the chosen indices.
    named_gid: Option<u32>,
}

fn describe(
    section: &mut Section,
    root: &Path,
    mut devices: Vec<RdmaDevice>,
    asked: Asked,
    named: Option<NamedGid>,
) {
    if let Some(NamedGid { variable, value, index: None }) = &named {
        section.push(Row::attention(*variable, value).note("expected the index of a GID"));
    }
    let named = named.as_ref().and_then(|named| Some((named.variable, named.index?)));
    let places = places::read(root);
    for device in &mut devices {
        let place = places.iter().find(|place| place.name == device.name);
        device.numa_node = place.and_then(|place| place.numa).map(u32::from);
        let (answers, wrong) = match &asked {
            Asked::NoLibrary => {
                (None, Some("needs libibverbs and the device's provider".to_owned()))
            }
            Asked::NoList(error) => (None, Some(error.to_string())),
            Asked::Devices(list) => match list.iter().find(|(name, _)| *name == device.name) {
                Some((_, Ok(answers))) => (Some(answers), None),
                Some((_, Err(error))) => (None, Some(error.to_string())),
                None => (None, Some(not_listed(root).to_owned())),
            },
        };
        let pci_path = place.map_or(&[][..], |place| &place.pci);
        let named_gid = named.map(|(_, index)| index);
        let known = Known { kernel: device, pci_path, verbs: answers, named_gid };
        section.push(device_row(&known, wrong));
        for port in &device.ports {
            let own = answers.and_then(|answers| {
                answers.ports.iter().find(|own| u32::from(own.number) == port.number)
            });
            port_rows(section, &device.name, port, own, named);
        }
    }
}

/// Why libibverbs does not list a device that the kernel has.
fn not_listed(root: &Path) -> &'static str {
    if !root.join("sys/class/infiniband_verbs").is_dir() {
        "programs cannot open it: load the module ib_uverbs"
    } else if !root.join("dev/infiniband").is_dir() {
        "/dev/infiniband is missing: in a container, pass it in"
    } else {
        "libibverbs has no provider for it: install the provider (ibverbs-providers)"
    }
}

fn device_row(known: &Known<'_>, wrong: Option<String>) -> Row {
    let device = known.kernel;
    let mut value = Vec::new();
    let mut notes = Vec::new();
    if let Some(answers) = known.verbs {
        value.push(answers.node.to_owned());
        let ethernet = device.ports.iter().any(|port| port.link == "Ethernet");
        value.push(match answers.transport {
            "InfiniBand" if ethernet => "RoCE".to_owned(),
            transport => transport.to_owned(),
        });
        value.push(format!("{} queue pairs", answers.max_queue_pairs));
        value.push(format!("{} memory regions", answers.max_memory_regions));
        value.push(if answers.memory_windows.is_empty() {
            "no memory windows".to_owned()
        } else {
            format!("memory windows of type {}", answers.memory_windows.join(", "))
        });
    }
    notes.extend(device.pci.as_ref().map(|pci| format!("PCI {pci}")));
    notes.extend(device.numa_node.map(|node| format!("NUMA node {node}")));
    notes.extend(device.driver.as_ref().map(|driver| format!("driver {driver}")));
    notes.extend(
        device
            .firmware
            .as_ref()
            .filter(|text| !text.is_empty())
            .map(|text| format!("firmware {text}")),
    );
    if !device.interfaces.is_empty() {
        notes.push(format!("interface {}", device.interfaces.join(", ")));
    }
    let usable = device.ports.iter().any(RdmaPort::is_active);
    if !usable {
        notes.push("no port is active".to_owned());
    }
    let row = match wrong {
        Some(wrong) => Row::attention(&device.name, wrong),
        None if usable => Row::ok(&device.name, value.join(", ")),
        None => Row::attention(&device.name, value.join(", ")),
    };
    let row = if notes.is_empty() { row } else { row.note(notes.join(", ")) };
    row.data(known)
}

fn port_rows(
    section: &mut Section,
    device: &str,
    port: &RdmaPort,
    answers: Option<&Port>,
    named: Option<(&'static str, u32)>,
) {
    let name = format!("{device}:{}", port.number);
    let mut value = vec![port.state.to_lowercase(), port.link.clone(), port.rate.clone()];
    value.extend(answers.and_then(|own| own.mtu).map(|mtu| format!("MTU {mtu}")));
    let value = value.join(", ");
    section.push(match port.is_active() {
        true => Row::ok(&name, value),
        false => Row::absent(&name, value).note("check the cable and the switch"),
    });
    let Some(own) = answers else { return };
    for (at, gid) in own.gids.iter().enumerate() {
        let chosen = match named {
            Some((variable, index)) => (index == gid.index).then(|| format!("chosen: {variable}")),
            None => (own.chosen == Some(gid.index)).then(|| "chosen".to_owned()),
        };
        if at >= SHOWN && chosen.is_none() {
            continue;
        }
        let mut value = vec![gid.kind, &gid.address];
        value.extend(gid.interface.as_deref());
        let row = Row::ok(format!("{name} GID {}", gid.index), value.join(", "));
        section.push(match chosen {
            Some(chosen) => row.note(chosen),
            None => row,
        });
    }
    if own.gids.len() > SHOWN {
        let all = own.gids.len();
        section.push(Row::ok(format!("{name} GIDs"), format!("{all} in all; `--json` lists them")));
    }
    if own.gids.is_empty() {
        section.push(
            Row::attention(format!("{name} GIDs"), "none")
                .note("no connection is possible: give the port's interface an address"),
        );
    } else if let Some((variable, index)) = named
        && own.gids.iter().all(|gid| gid.index != index)
    {
        section.push(
            Row::attention(format!("{name} GID {index}"), "empty")
                .note(format!("{variable} selects this GID, so the port cannot be used")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::topology::fixture::Tree;
    use crate::doctor::verbs::Address;

    fn roce() -> Tree {
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        Tree::new()
            .file(&format!("{port}/state"), "4: ACTIVE\n")
            .file(&format!("{port}/rate"), "400 Gb/sec (4X NDR)\n")
            .file(&format!("{port}/link_layer"), "Ethernet\n")
            .link(
                "sys/class/infiniband/mlx5_0/device",
                "../../../devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0",
            )
            .file("sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/numa_node", "1\n")
    }

    fn answers(gids: &[(u32, &'static str, &str)]) -> Asked {
        let address = |(index, kind, address): &(u32, &'static str, &str)| Address {
            index: *index,
            kind,
            address: (*address).to_owned(),
            interface: Some("eth7".to_owned()),
        };
        let gids = gids.iter().map(address).collect();
        let answers = Answers {
            node: "channel adapter",
            transport: "InfiniBand",
            memory_windows: vec!["1", "2B"],
            max_queue_pairs: 131_072,
            max_memory_regions: 16_777_216,
            ports: vec![Port { number: 1, mtu: Some(4096), gids, chosen: Some(3) }],
            ..Answers::default()
        };
        Asked::Devices(vec![("mlx5_0".to_owned(), Ok(answers))])
    }

    fn shown(tree: &Tree, asked: Asked, named: Option<(&'static str, &str)>) -> Section {
        let named = named
            .and_then(|(name, value)| named_gid(|asked| (asked == name).then(|| value.to_owned())));
        let mut section = Section::new("rdma", "RDMA");
        describe(&mut section, tree.root(), topology::rdma_devices(tree.root()), asked, named);
        section
    }

    const GIDS: &[(u32, &str, &str)] =
        &[(0, "RoCE v1", "fe80::1"), (1, "RoCE v2", "fe80::1"), (3, "RoCE v2", "10.1.2.3")];

    fn line<'a>(text: &'a str, part: &str) -> &'a str {
        text.lines().find(|line| line.contains(part)).unwrap_or_default()
    }

    #[test]
    fn a_machine_without_devices_gets_one_line() {
        let tree = Tree::new();
        let none = section(tree.root());
        assert_eq!(none.rows().len(), 1);
        assert!(none.to_string().contains("no RDMA module is loaded"), "{none}");
        let tree = tree.file("sys/class/infiniband/.keep", "");
        std::fs::remove_file(tree.root().join("sys/class/infiniband/.keep")).unwrap();
        assert!(section(tree.root()).to_string().contains("no device has come up"));
    }

    #[test]
    fn a_device_its_port_and_its_addresses_are_shown() {
        let section = shown(&roce(), answers(GIDS), None);
        let text = section.to_string();
        for part in ["channel adapter", "RoCE", "131072 queue", "type 1, 2B", "NUMA node 1"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("active, Ethernet, 400 Gb/sec (4X NDR), MTU 4096"), "{text}");
        assert!(line(&text, "GID 3").contains("RoCE v2, 10.1.2.3, eth7"), "{text}");
        assert!(line(&text, "GID 3").contains("chosen"), "{text}");
        assert!(!line(&text, "GID 1").contains("chosen"), "{text}");
        let json = serde_json::to_value(&section).unwrap();
        let data = &json["rows"][0]["data"];
        assert_eq!((&data["name"], &data["pci"]), (&"mlx5_0".into(), &"0000:3b:00.0".into()));
        assert_eq!(data["pci_path"][0], "pci0000:3a");
        assert_eq!(data["verbs"]["ports"][0]["chosen"], 3);
        assert_eq!(data["verbs"]["ports"][0]["gids"][2]["address"], "10.1.2.3");
    }

    #[test]
    fn a_named_index_is_chosen_or_found_wanting() {
        let text = |value| {
            let named = Some(("UCCL_P2P_RDMA_GID_INDEX", value));
            shown(&roce(), answers(GIDS), named).to_string()
        };
        let first = text("1");
        assert!(line(&first, "GID 1").contains("chosen"), "{first}");
        assert!(!line(&first, "GID 3").contains("chosen"), "{first}");
        let section = shown(&roce(), answers(GIDS), Some(("PEERWAY_RDMA_GID_INDEX", "1")));
        let json = serde_json::to_value(section).unwrap();
        assert_eq!(json["rows"][0]["data"]["named_gid"], 1);
        let empty = text("7");
        assert!(line(&empty, "GID 7").contains("empty"), "{empty}");
        let auto = text("auto");
        assert!(line(&auto, "GID 3").contains("chosen") && !auto.contains("expected"), "{auto}");
        let garbage = text("-1");
        assert!(garbage.contains("expected the index of a GID"), "{garbage}");
        assert!(line(&garbage, "GID 3").contains("chosen"), "{garbage}");
    }

    #[test]
    fn a_port_with_many_addresses_shows_some_and_the_chosen_one() {
        let many: Vec<_> = (0..40).map(|index| (index, "RoCE v2", "fe80::1")).collect();
        let named = Some(("PEERWAY_RDMA_GID_INDEX", "39"));
        let text = shown(&roce(), answers(&many), named).to_string();
        assert!(line(&text, "GID 39").contains("chosen"), "{text}");
        assert!(text.contains("40 in all") && !text.contains("GID 16 "), "{text}");
        let none = shown(&roce(), answers(&[]), None).to_string();
        assert!(none.contains("no connection is possible"), "{none}");
    }

    #[test]
    fn an_inactive_port_is_worth_a_look() {
        let tree = roce().file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
        let text = shown(&tree, answers(GIDS), None).to_string();
        assert!(text.contains("down, Ethernet") && text.contains("check the cable"), "{text}");
    }

    #[test]
    fn what_libibverbs_does_not_list_says_why() {
        let tree = roce();
        let text = |tree: &Tree| shown(tree, Asked::Devices(Vec::new()), None).to_string();
        assert!(text(&tree).contains("ib_uverbs"));
        let tree = tree.file("sys/class/infiniband_verbs/abi_version", "6\n");
        assert!(text(&tree).contains("/dev/infiniband"));
        let tree = tree.file("dev/infiniband/uverbs0", "");
        assert!(text(&tree).contains("provider"));
    }

    #[test]
    fn without_the_library_the_kernels_facts_are_shown() {
        let text = shown(&roce(), Asked::NoLibrary, None).to_string();
        assert!(text.contains("needs libibverbs") && text.contains("NUMA node 1"), "{text}");
        assert!(text.contains("active, Ethernet") && !text.contains("GID"), "{text}");
    }

    #[test]
    fn small_limits_are_worth_a_look() {
        let state = |limit, exempt| serde_json::to_value(memlock(limit, exempt)).unwrap();
        let small = state(Some(8 << 20), false);
        assert_eq!(small["state"], "attention");
        assert!(small["note"].as_str().unwrap().contains("ulimit -l"));
        for (limit, exempt) in [(None, false), (Some(8 << 20), true), (Some(64 << 20), false)] {
            assert_eq!(state(limit, exempt)["state"], "ok");
        }
    }
}
