//! Network interfaces and TCP defaults.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use super::ffi;
use super::report::{Row, Section};
use super::topology;

/// The section about TCP and the network interfaces.
pub(super) fn section(root: &Path) -> Section {
    let mut section = Section::new("network", "Network");
    section.push(congestion_control(root));
    section.push(listens_on(peerway::Endpoint::builder().addresses()));
    let addresses = ffi::addresses();
    let nics = topology::nics(root);
    if nics.is_empty() {
        section.push(Row::absent("interfaces", "none in /sys/class/net"));
    }
    for nic in nics {
        let own: Vec<IpAddr> = match &addresses {
            Ok(all) => {
                all.iter().filter(|(name, _)| *name == nic.name).map(|(_, ip)| *ip).collect()
            }
            Err(_) => Vec::new(),
        };
        section.push(interface(&nic, &own));
    }
    if let Err(error) = addresses {
        section.push(Row::attention("addresses", format!("cannot be listed: {error}")));
    }
    section
}

/// The addresses on which an endpoint with the settings of the environment would listen.
fn listens_on(addresses: Result<Vec<IpAddr>, peerway::BuildError>) -> Row {
    let name = "an endpoint here would listen on";
    match addresses {
        Ok(all) => {
            let text: Vec<String> = all.iter().map(ToString::to_string).collect();
            if all.iter().all(IpAddr::is_loopback) {
                let note = "no other host can connect; PEERWAY_BIND or PEERWAY_INTERFACES names \
                            an interface";
                return Row::attention(name, text.join(", ")).note(note);
            }
            Row::ok(name, text.join(", ")).data(serde_json::json!({ "addresses": all }))
        }
        Err(error) => Row::attention(name, error.to_string()),
    }
}

fn congestion_control(root: &Path) -> Row {
    let path = root.join("proc/sys/net/ipv4/tcp_congestion_control");
    match fs::read_to_string(path) {
        Ok(name) => Row::ok("TCP congestion control", name.trim()),
        Err(error) => Row::attention("TCP congestion control", format!("cannot be read: {error}")),
    }
}

fn interface(nic: &topology::Nic, addresses: &[IpAddr]) -> Row {
    // Loopback reports no carrier, so its state is `unknown` while it is up.
    let loopback = addresses.iter().any(IpAddr::is_loopback);
    let state = if loopback { "loopback" } else { &nic.state };
    let mut value = vec![state.to_owned()];
    value.extend(nic.speed_mbps.map(|speed| match speed {
        1000.. => format!("{} Gb/s", speed / 1000),
        _ => format!("{speed} Mb/s"),
    }));
    value.extend(nic.mtu.map(|mtu| format!("mtu {mtu}")));

    let mut notes: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    notes.extend(nic.numa_node.map(|node| format!("NUMA node {node}")));
    notes.extend(nic.driver.as_ref().map(|driver| format!("driver {driver}")));

    let value = value.join(", ");
    // Tunnels report no carrier either.
    let usable = !addresses.is_empty() && matches!(nic.state.as_str(), "up" | "unknown");
    let row = if usable { Row::ok(&nic.name, value) } else { Row::absent(&nic.name, value) };
    row.note(notes.join(", ")).data(serde_json::json!({ "nic": nic, "addresses": addresses }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::topology::fixture::Tree;

    #[test]
    fn a_machine_without_anything_says_so() {
        let tree = Tree::new();
        assert!(section(tree.root()).to_string().contains("none in /sys/class/net"));
    }

    #[test]
    fn loopback_alone_needs_attention() {
        let row = |ips: &[&str]| {
            let ips = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            serde_json::to_value(listens_on(Ok(ips))).unwrap()
        };
        assert_eq!(row(&["127.0.0.1"])["state"], "attention");
        assert_eq!(row(&["127.0.0.1", "192.0.2.7"])["state"], "ok");
    }

    #[test]
    fn an_interface_without_address_is_no_path() {
        let nic = topology::Nic {
            name: "eth0".to_owned(),
            state: "up".to_owned(),
            speed_mbps: Some(100_000),
            mtu: Some(9000),
            pci: None,
            driver: None,
            numa_node: Some(1),
        };
        let json = |row: Row| serde_json::to_value(row).unwrap();
        assert_eq!(json(interface(&nic, &[]))["state"], "absent");
        let shown = json(interface(&nic, &["192.0.2.7".parse().unwrap()]));
        assert_eq!(shown["state"], "ok");
        assert_eq!(shown["value"], "up, 100 Gb/s, mtu 9000");
        assert_eq!(shown["note"], "192.0.2.7, NUMA node 1");
    }
}
