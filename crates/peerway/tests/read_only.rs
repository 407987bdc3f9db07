//! Memory that is advertised for reading is mapped for reading.

use peerway::{Access, Endpoint, Pin};

/// The rights of this process's mappings of files whose name contains `name`. "may write" means
/// that the process could make the mapping writable: the descriptor that it mapped can write.
fn rights(name: &str) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut rights = Vec::new();
    let mut mapping: Option<String> = None;
    for line in maps.lines() {
        if let (Some(flags), Some(rights_of)) = (line.strip_prefix("VmFlags:"), &mut mapping) {
            let may_write =
                if flags.split(' ').any(|flag| flag == "mw") { ", may write" } else { "" };
            rights.push(format!("{rights_of}{may_write}"));
            mapping = None;
        } else if line.contains(name) {
            mapping = line.split(' ').nth(1).map(str::to_owned);
        }
    }
    rights.sort();
    rights
}

const WRITABLE: &str = "rw-s, may write";

/// Both endpoints are in this process, so its mappings are those of the owner and of the peer.
#[test]
fn a_peer_maps_memory_with_the_rights_that_it_has() {
    let new = || Endpoint::builder().transport(Pin::LocalMap).build().unwrap();
    let (a, b) = (new(), new());
    let memory = b.allocate(8192).unwrap();
    memory.write_at(0, &[5; 8192]).unwrap();
    let peer = a.connect(&b.metadata()).unwrap();
    let name = "memfd:peerway-region";
    assert_eq!(rights(name), [WRITABLE], "the owner's mapping");

    let remote = peer.import(&memory.advertise(Access::READ).unwrap()).unwrap();
    assert_eq!(rights(name), ["r--s", WRITABLE], "a peer that may read");
    let ours = a.register(vec![0; 8192]).unwrap();
    peer.read(&ours.all(), &remote.all()).unwrap();
    let mut got = [0; 8192];
    ours.read_at(0, &mut got).unwrap();
    assert_eq!(got, [5; 8192]);
    assert!(peer.write(&ours.all(), &remote.all()).is_err());

    // A right to write the same memory needs a mapping of its own.
    let writable = peer.import(&memory.advertise(Access::READ_WRITE).unwrap()).unwrap();
    assert_eq!(rights(name), ["r--s", WRITABLE, WRITABLE], "a peer that may write");
    ours.write_at(0, &[6; 8192]).unwrap();
    peer.write(&ours.all(), &writable.all()).unwrap();
    memory.read_at(0, &mut got).unwrap();
    assert_eq!(got, [6; 8192]);
}
