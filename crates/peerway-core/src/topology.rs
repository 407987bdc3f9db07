//! Device locality: an order of NICs by their distance from memory.
//!
//! A device has a path through the PCI tree and a NUMA node. Both come from the kernel and may be
//! unknown. Nearness to a [`Place`] is the part of the machine that bytes must cross, from a shared
//! PCIe switch to the link between sockets. A device with unknown location ranks before a device on
//! another node, and equals every other unknown device. Virtual devices and virtual machines are
//! therefore ordered by name alone.
//!
//! Invariants: the order is total and does not depend on the order of discovery. Equally near
//! devices stand together, ordered by name (`mlx5_2` before `mlx5_10`).
//!
//! All functions are pure. The caller reads `/sys`.

use std::cmp::Ordering;

/// A device and its location.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Device {
    /// The kernel's name for the device.
    pub name: String,
    /// The path from the root complex down to the function itself, such as `pci0000:16`,
    /// `0000:16:01.0`, `0000:17:00.0`. Empty if the device is not on the PCI bus.
    pub pci: Vec<String>,
    /// The NUMA node. `None` if the kernel does not report one.
    pub numa: Option<u16>,
}

/// The location of memory.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Place {
    /// Unknown: all devices are equally near.
    #[default]
    Unknown,
    /// Memory or a processor of a NUMA node.
    Node(u16),
    /// Memory of a PCI function, such as a GPU.
    Function {
        /// As in [`Device::pci`].
        pci: Vec<String>,
        /// As in [`Device::numa`].
        numa: Option<u16>,
    },
}

/// The distance between two locations. A smaller value is nearer.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Nearness {
    /// Both are below one port of the root complex. Bytes stay in the switches there.
    Switch(Shared),
    /// Bytes cross one root complex.
    RootComplex,
    /// Bytes cross the node, from one root complex to another or to its memory.
    Node,
    /// The distance is unknown.
    Unknown,
    /// Bytes cross the link between nodes.
    OtherNode,
}

/// The number of steps from the root complex that two functions share. A larger number compares as
/// less, because it is nearer.
///
/// Comparing two values is meaningful only for the same place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Shared(pub usize);

impl Ord for Shared {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.cmp(&self.0)
    }
}

impl PartialOrd for Shared {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// How near `device` is to `place`.
pub fn nearness(device: &Device, place: &Place) -> Nearness {
    let node = match place {
        Place::Unknown => return Nearness::Unknown,
        Place::Node(node) => Some(*node),
        Place::Function { pci, numa } => {
            // The first element is the root complex.
            match device.pci.iter().zip(pci).take_while(|(one, other)| one == other).count() {
                0 => *numa,
                1 => return Nearness::RootComplex,
                shared => return Nearness::Switch(Shared(shared)),
            }
        }
    };
    match (device.numa, node) {
        (Some(one), Some(other)) if one == other => Nearness::Node,
        (Some(_), Some(_)) => Nearness::OtherNode,
        _ => Nearness::Unknown,
    }
}

/// All `devices`, ordered by nearness to `place`.
pub fn nearest<'a>(devices: &'a [Device], place: &Place) -> Vec<&'a Device> {
    let mut ordered: Vec<&Device> = devices.iter().collect();
    ordered.sort_by(|one, other| {
        let near = nearness(one, place).cmp(&nearness(other, place));
        near.then_with(|| by_name(&one.name, &other.name))
    });
    ordered
}

/// The `devices` that are nearest to `place`, which a transfer stripes over. All devices if the
/// place is unknown; empty if there are no devices.
pub fn nearest_group<'a>(devices: &'a [Device], place: &Place) -> Vec<&'a Device> {
    let mut ordered = nearest(devices, place);
    let Some(first) = ordered.first().map(|device| nearness(device, place)) else { return ordered };
    ordered.retain(|device| nearness(device, place) == first);
    ordered
}

/// Orders names and compares numbers in them by value: `mlx5_2` before `mlx5_10`.
pub fn by_name(one: &str, other: &str) -> Ordering {
    let (mut left, mut right) = (one, other);
    loop {
        let (left_number, right_number) = (digits(left), digits(right));
        if !left_number.is_empty() && !right_number.is_empty() {
            left = &left[left_number.len()..];
            right = &right[right_number.len()..];
            // Without leading zeros, the longer number is the greater one, whatever its length.
            let (one, other) =
                (left_number.trim_start_matches('0'), right_number.trim_start_matches('0'));
            let order = one.len().cmp(&other.len()).then_with(|| one.cmp(other));
            if order.is_ne() {
                return order;
            }
            continue;
        }
        let (mut left_chars, mut right_chars) = (left.chars(), right.chars());
        match (left_chars.next(), right_chars.next()) {
            // `a1` and `a01` are different names with the same number.
            (None, None) => return one.cmp(other),
            (one, other) if one != other => return one.cmp(&other),
            _ => (left, right) = (left_chars.as_str(), right_chars.as_str()),
        }
    }
}

fn digits(text: &str) -> &str {
    &text[..text.bytes().take_while(u8::is_ascii_digit).count()]
}

/// More processors than any kernel supports. A list that names a higher number is invalid.
const MAX_CPUS: usize = 1 << 16;

/// Parses a list of processors in the kernel's format, such as `0-15,32-47`. The result is
/// ascending and has no duplicates. An empty list gives an empty result. Returns `None` if any part
/// is invalid.
pub fn parse_cpus(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    let list = list.trim();
    if list.is_empty() {
        return Some(cpus);
    }
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
        // Reject a list of many large overlapping ranges. No kernel writes one.
        if cpus.len() > MAX_CPUS {
            return None;
        }
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

/// Formats an ascending list of processors for [`parse_cpus`]: `0-15,32-47`.
///
/// ```
/// assert_eq!(peerway_core::topology::show_cpus(&[0, 1, 2, 8]), "0-2,8");
/// ```
pub fn show_cpus(cpus: &[usize]) -> String {
    let runs = cpus.chunk_by(|one, next| next.checked_sub(*one) == Some(1));
    let show = |run: &[usize]| match *run {
        [first, .., last] => format!("{first}-{last}"),
        [only] => only.to_string(),
        [] => String::new(),
    };
    runs.map(show).collect::<Vec<_>>().join(",")
}

/// As `parse`, but rejects a sign.
fn number(text: &str) -> Option<usize> {
    (digits(text) == text).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device(name: &str, pci: &str, numa: Option<u16>) -> Device {
        let pci = pci.split_whitespace().map(str::to_owned).collect();
        Device { name: name.to_owned(), pci, numa }
    }

    fn gpu(pci: &str, numa: Option<u16>) -> Place {
        Place::Function { pci: pci.split_whitespace().map(str::to_owned).collect(), numa }
    }

    fn names<'a>(devices: &[&'a Device]) -> Vec<&'a str> {
        devices.iter().map(|device| device.name.as_str()).collect()
    }

    /// One device of each class, as seen from [`HERE`].
    fn one_of_each() -> Vec<Device> {
        vec![
            device("other_node", "pci0000:80 0000:80:01.0 0000:81:00.0", Some(1)),
            device("virtual", "", None),
            device("node", "pci0000:40 0000:40:01.0 0000:41:00.0", Some(0)),
            device("root_complex", "pci0000:16 0000:16:03.0 0000:1f:00.0", Some(0)),
            device("upper_switch", "pci0000:16 0000:16:01.0 0000:17:00.0 0000:18:02.0", Some(0)),
            // This NIC is behind its own bridge, as some NICs are, but still at the same switch.
            device(
                "switch_2",
                "pci0000:16 0000:16:01.0 0000:17:00.0 0000:18:00.0 0000:19:00.0 0000:1a:00.0 \
                 0000:1b:00.0 0000:1c:00.0 0000:1d:00.0",
                Some(0),
            ),
            device(
                "switch_10",
                "pci0000:16 0000:16:01.0 0000:17:00.0 0000:18:00.0 0000:19:00.0 0000:1a:02.0",
                Some(0),
            ),
        ]
    }

    const HERE: &str =
        "pci0000:16 0000:16:01.0 0000:17:00.0 0000:18:00.0 0000:19:00.0 0000:1a:01.0";

    #[test]
    fn classes_in_order() {
        let (devices, here) = (one_of_each(), gpu(HERE, Some(0)));
        let order = [
            "switch_2",
            "switch_10",
            "upper_switch",
            "root_complex",
            "node",
            "virtual",
            "other_node",
        ];
        assert_eq!(names(&nearest(&devices, &here)), order);
        assert_eq!(names(&nearest_group(&devices, &here)), ["switch_2", "switch_10"]);
        let of = |name| {
            let device = devices.iter().find(|device| device.name == name);
            nearness(device.expect("the name is in the list"), &here)
        };
        assert_eq!(of("upper_switch"), Nearness::Switch(Shared(3)));
        assert_eq!(of("root_complex"), Nearness::RootComplex);
        assert_eq!(of("virtual"), Nearness::Unknown);
        assert_eq!(of("other_node"), Nearness::OtherNode);
    }

    #[test]
    fn memory_of_a_node_is_near_devices_on_that_node() {
        let devices = one_of_each();
        assert_eq!(names(&nearest_group(&devices, &Place::Node(1))), ["other_node"]);
        assert_eq!(nearest(&devices, &Place::Node(1))[1].name, "virtual");
        // All devices with a known location are on other nodes. The unknown one may be on this
        // node.
        assert_eq!(names(&nearest_group(&devices, &Place::Node(7))), ["virtual"]);
    }

    #[test]
    fn nothing_known_is_all_equal() {
        let devices = ["rxe10", "rxe9", "mlx5_0"].map(|name| device(name, "", None));
        for place in [Place::Unknown, Place::Node(0), gpu(HERE, Some(0)), gpu("", None)] {
            let group = nearest_group(&devices, &place);
            assert_eq!(names(&group), ["mlx5_0", "rxe9", "rxe10"], "{place:?}");
        }
        assert!(nearest_group(&[], &Place::Unknown).is_empty());
    }

    #[test]
    fn a_shared_root_complex_counts_without_nodes_and_nodes_without_one() {
        let flat = device("flat", "pci0000:00 0000:00:05.0", None);
        assert_eq!(nearness(&flat, &gpu("pci0000:00 0000:00:06.0", None)), Nearness::RootComplex);
        let virtual_device = device("rxe0", "", Some(1));
        assert_eq!(nearness(&virtual_device, &gpu(HERE, Some(1))), Nearness::Node);
        assert_eq!(nearness(&virtual_device, &gpu(HERE, Some(0))), Nearness::OtherNode);
    }

    #[test]
    fn two_functions_of_one_card_are_at_one_switch() {
        let card = "pci0000:16 0000:16:01.0 0000:17:00";
        let nic = device("mlx5_1", &format!("{card}.1"), Some(0));
        assert_eq!(nearness(&nic, &gpu(&format!("{card}.0"), None)), Nearness::Switch(Shared(2)));
    }

    #[test]
    fn numbers_in_names_are_numbers() {
        let mut sorted = vec!["mlx5_10", "mlx5_2", "mlx5", "mlx5_02", "mlx5_2b", "efa_0", ""];
        sorted.sort_by(|one, other| by_name(one, other));
        assert_eq!(sorted, ["", "efa_0", "mlx5", "mlx5_02", "mlx5_2", "mlx5_2b", "mlx5_10"]);
        let long = "9".repeat(40);
        assert_eq!(by_name(&long, &format!("1{long}")), Ordering::Less);
    }

    #[test]
    fn lists_of_processors() {
        assert_eq!(parse_cpus("0-3,8,2-4\n"), Some(vec![0, 1, 2, 3, 4, 8]));
        assert_eq!(parse_cpus("\n"), Some(vec![]));
        for garbage in ["x", "1-", "-1", "3-1", "0-99999999999", "1,,2", "+1", "0-70000", "1 2"] {
            assert_eq!(parse_cpus(garbage), None, "{garbage}");
        }
        assert_eq!(parse_cpus(&"0-65535,".repeat(9999)), None);
    }

    proptest! {
        #[test]
        fn the_order_is_total_whatever_the_names(
            one in "[a-b0-1_é]{0,6}", other in "[a-b0-1_é]{0,6}", third in "[a-b0-1_é]{0,6}",
        ) {
            prop_assert_eq!(by_name(&one, &other), by_name(&other, &one).reverse());
            prop_assert_eq!(by_name(&one, &other).is_eq(), one == other);
            if by_name(&one, &other).is_le() && by_name(&other, &third).is_le() {
                prop_assert!(by_name(&one, &third).is_le());
            }
        }

        #[test]
        fn lists_never_panic(text in "[0-9,\\-\n ]{0,40}") {
            if let Some(cpus) = parse_cpus(&text) {
                prop_assert_eq!(parse_cpus(&show_cpus(&cpus)), Some(cpus.clone()));
                prop_assert!(cpus.is_sorted_by(|one, other| one < other));
            }
        }

        #[test]
        fn the_order_does_not_depend_on_the_order_of_discovery(
            devices in Just(one_of_each()).prop_shuffle(),
        ) {
            let here = gpu(HERE, Some(0));
            let sorted = one_of_each();
            prop_assert_eq!(names(&nearest(&devices, &here)), names(&nearest(&sorted, &here)));
        }
    }
}
