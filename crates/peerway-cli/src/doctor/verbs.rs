//! Attributes of RDMA devices, queried through libibverbs.
//!
//! [`ask`] opens each device, queries it and closes it. It creates no object on the device.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use peerway_sys::Library;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Context, Device, Gid, GidKind, Verbs, VerbsError, choose_gid};
use serde::Serialize;

/// The attributes of a device.
#[derive(Debug, Default, Serialize)]
pub(super) struct Answers {
    pub(super) node: &'static str,
    /// `InfiniBand` (RoCE included), `iWARP`, `EFA` or `unknown`.
    pub(super) transport: &'static str,
    /// The supported types of memory window. Empty if the device supports none.
    pub(super) memory_windows: Vec<&'static str>,
    pub(super) max_memory_windows: i32,
    pub(super) max_queue_pairs: i32,
    pub(super) max_memory_regions: i32,
    pub(super) ports: Vec<Port>,
}

/// The attributes of a port.
#[derive(Debug, Default, Serialize)]
pub(super) struct Port {
    pub(super) number: u8,
    /// Bytes.
    pub(super) mtu: Option<u32>,
    /// The entries of the GID table that are not empty.
    pub(super) gids: Vec<Address>,
    /// The GID index that connections use unless a setting names one.
    pub(super) chosen: Option<u32>,
}

/// An entry of a port's GID table.
#[derive(Debug, Serialize)]
pub(super) struct Address {
    pub(super) index: u32,
    pub(super) kind: &'static str,
    pub(super) address: String,
    pub(super) interface: Option<String>,
}

/// The result of the query.
#[derive(Debug)]
pub(super) enum Asked {
    /// libibverbs cannot be loaded.
    NoLibrary,
    /// libibverbs cannot list the devices.
    NoList(VerbsError),
    /// Every device that libibverbs lists.
    Devices(Vec<(String, Result<Answers, VerbsError>)>),
}

/// Queries every device of this machine.
pub(super) fn ask() -> Asked {
    let named = Library::Ibverbs.override_variables().iter();
    ask_by(named.filter_map(std::env::var_os).find(|value| !value.is_empty()))
}

/// Queries every device that this library lists, or libibverbs if no library is named.
fn ask_by(named: Option<OsString>) -> Asked {
    let Ok(verbs) = Verbs::load(named) else { return Asked::NoLibrary };
    match verbs.devices() {
        Ok(list) => {
            Asked::Devices(list.iter().map(|device| (device.name(), about(&device))).collect())
        }
        Err(error) => Asked::NoList(error),
    }
}

fn about(device: &Device<'_>) -> Result<Answers, VerbsError> {
    let context = device.open()?;
    let attr = context.device_attr()?;
    let ports = (1..=attr.phys_port_cnt).map(|number| port(&context, number));
    Ok(Answers {
        node: node(device.node_type()),
        transport: transport(device.transport_type()),
        memory_windows: memory_windows(attr.device_cap_flags),
        max_memory_windows: attr.max_mw,
        max_queue_pairs: attr.max_qp,
        max_memory_regions: attr.max_mr,
        ports: ports.collect::<Result<_, _>>()?,
    })
}

fn port(context: &Context, number: u8) -> Result<Port, VerbsError> {
    let attr = context.port_attr(number)?;
    let entries = 0..u32::try_from(attr.gid_tbl_len).unwrap_or(0);
    // A query of an empty entry fails or returns zeros.
    let gids: Vec<(u32, Gid)> = entries
        .filter_map(|index| Some((index, context.gid(number, index).ok()?)))
        .filter(|(_, gid)| gid.raw != [0; 16])
        .collect();
    let chosen = choose_gid(&gids, attr.link_layer == IBV_LINK_LAYER_INFINIBAND);
    let gids = gids
        .iter()
        .map(|(index, gid)| Address {
            index: *index,
            kind: kind(gid.kind),
            address: gid.ipv4().map_or_else(|| gid.ipv6().to_string(), |ip| ip.to_string()),
            interface: interface(Path::new("/"), gid.interface_index),
        })
        .collect();
    Ok(Port { number, mtu: mtu(attr.active_mtu), gids, chosen })
}

fn node(node_type: i32) -> &'static str {
    match node_type {
        IBV_NODE_CA => "channel adapter",
        IBV_NODE_RNIC => "RDMA NIC",
        _ => "adapter",
    }
}

fn transport(transport_type: i32) -> &'static str {
    match transport_type {
        IBV_TRANSPORT_IB => "InfiniBand",
        IBV_TRANSPORT_IWARP => "iWARP",
        // EFA is the only device in use that reports no transport type.
        IBV_TRANSPORT_UNSPECIFIED => "EFA",
        _ => "unknown",
    }
}

fn kind(kind: GidKind) -> &'static str {
    match kind {
        GidKind::Infiniband => "InfiniBand",
        GidKind::RoceV1 => "RoCE v1",
        GidKind::RoceV2 => "RoCE v2",
        _ => "unknown kind",
    }
}

fn memory_windows(flags: u32) -> Vec<&'static str> {
    let kinds = [
        (IBV_DEVICE_MEM_WINDOW, "1"),
        (IBV_DEVICE_MEM_WINDOW_TYPE_2A, "2A"),
        (IBV_DEVICE_MEM_WINDOW_TYPE_2B, "2B"),
    ];
    kinds.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, name)| *name).collect()
}

/// The MTU in bytes. `code` is the verbs enumeration, in which 1 means 256 bytes.
fn mtu(code: u32) -> Option<u32> {
    (IBV_MTU_256..=IBV_MTU_4096).contains(&code).then(|| 128 << code)
}

/// The name of the network interface with that index.
fn interface(root: &Path, index: u32) -> Option<String> {
    let wanted = (index != 0).then(|| index.to_string())?;
    fs::read_dir(root.join("sys/class/net")).ok()?.flatten().find_map(|entry| {
        let found = fs::read_to_string(entry.path().join("ifindex")).ok()?;
        (found.trim() == wanted).then(|| entry.file_name().into_string().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::topology::fixture::Tree;

    /// The stand-in for libibverbs, which cargo builds with this test.
    fn stand_in() -> OsString {
        let exe = std::env::current_exe().unwrap();
        let library = exe.with_file_name("libpeerway_fakeverbs.so");
        assert!(library.is_file(), "{} was not built", library.display());
        library.into()
    }

    #[test]
    fn each_device_answers_with_its_attributes() {
        let Asked::Devices(devices) = ask_by(Some(stand_in())) else {
            panic!("the library lists no devices");
        };
        let names: Vec<&str> = devices.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["fake0", "fake1"]);
        for (name, answers) in &devices {
            let answers = answers.as_ref().unwrap();
            assert_eq!((answers.node, answers.transport), ("channel adapter", "InfiniBand"));
            assert!(answers.max_queue_pairs > 0 && answers.max_memory_regions > 0, "{answers:?}");
            let [port] = &answers.ports[..] else { panic!("{name}: {:?}", answers.ports) };
            assert_eq!((port.number, port.mtu), (1, Some(4096)));
            let chosen = port.gids.iter().find(|gid| Some(gid.index) == port.chosen);
            assert_eq!(chosen.map(|gid| gid.kind), Some("RoCE v2"), "{port:?}");
        }
    }

    #[test]
    fn numbers_become_words() {
        assert_eq!([1, 3, 5].map(mtu), [Some(256), Some(1024), Some(4096)]);
        assert_eq!([0, 6].map(mtu), [None, None]);
        assert_eq!(memory_windows(1 << 17 | 1 << 24), ["1", "2B"]);
        assert!(memory_windows(0).is_empty());
        assert_eq!((transport(0), transport(1), transport(4)), ("InfiniBand", "iWARP", "EFA"));
        assert_eq!((node(1), node(-1)), ("channel adapter", "adapter"));
        assert_eq!(kind(GidKind::RoceV2), "RoCE v2");
    }

    #[test]
    fn interfaces_are_found_by_number() {
        let tree = Tree::new()
            .file("sys/class/net/lo/ifindex", "1\n")
            .file("sys/class/net/eth0/ifindex", "12\n");
        assert_eq!(interface(tree.root(), 12).as_deref(), Some("eth0"));
        assert_eq!(interface(tree.root(), 2), None);
        assert_eq!(interface(tree.root(), 0), None);
    }
}
