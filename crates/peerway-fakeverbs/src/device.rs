//! The devices of this process: their number, their attributes, and when their links are down.
//!
//! They are created once, from the script, and never freed, because contexts refer to them by
//! pointer. Each has one port. A RoCE device has two GIDs: a link-local one and one that maps
//! 127.88.0.(n+1). An EFA device has only the first. Programs that read sysfs find a directory like
//! the kernel's under the temporary directory.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, io, ptr, thread};

use peerway_sys::verbs::ffi::*;

use crate::script::Script;

/// Longest message, as on most hardware.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;
pub(crate) const MAX_WR: u32 = 16384;
pub(crate) const MAX_SGE: u32 = 16;
pub(crate) const MAX_INLINE: u32 = 512;
pub(crate) const MAX_CQE: c_int = 1 << 20;
pub(crate) const MAX_READS: u8 = 16;
/// Longest unreliable datagram, and longest send on EFA.
pub(crate) const DATAGRAM: u64 = 4096;

/// Settings that all devices share.
#[derive(Debug)]
pub(crate) struct Fabric {
    pub(crate) script: Script,
    /// Processes with the same fabric name reach each other.
    pub(crate) name: String,
    loaded: Instant,
}

/// A device. It starts with the structure that the program sees.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Device {
    raw: Raw,
    pub(crate) fabric: &'static Fabric,
    pub(crate) index: u32,
    requests: AtomicU64,
    remove_after: u64,
    removed: AtomicBool,
    down: Vec<(Duration, Duration)>,
}

#[repr(transparent)]
struct Raw(ibv_device);

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ibv_device")
    }
}

/// The devices of this process, removed ones included.
pub(crate) fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let text = env::var("PEERWAY_FAKE_VERBS").unwrap_or_default();
        match Script::parse(&text) {
            Ok(script) => make(script),
            Err(why) => {
                eprintln!(
                    "peerway-fakeverbs: no devices, because PEERWAY_FAKE_VERBS is invalid: {why}"
                );
                Vec::new()
            }
        }
    })
}

fn make(script: Script) -> Vec<Device> {
    // SAFETY: getuid only returns a number.
    let user = unsafe { libc::getuid() };
    let name = env::var("PEERWAY_FAKE_VERBS_FABRIC").ok().filter(|name| !name.is_empty());
    let name = name.map_or_else(|| format!("user{user}"), |name| name.chars().take(32).collect());
    let fabric = Fabric { script, name, loaded: Instant::now() };
    let fabric: &'static Fabric = Box::leak(Box::new(fabric));
    let root = env::temp_dir().join(format!("peerway-fakeverbs-{user}"));
    let device = |index: u32| {
        let name = format!("fake{index}");
        let path = root.join(if fabric.script.efa { "efa" } else { "roce" }).join(&name);
        let mut raw = ibv_device::zeroed();
        let efa = fabric.script.efa;
        raw.node_type = if efa { IBV_NODE_UNSPECIFIED } else { IBV_NODE_CA };
        raw.transport_type = if efa { IBV_TRANSPORT_UNSPECIFIED } else { IBV_TRANSPORT_IB };
        text(&mut raw.name, &name);
        text(&mut raw.dev_name, &format!("uverbs{index}"));
        text(&mut raw.dev_path, "/dev/null");
        text(&mut raw.ibdev_path, &path.to_string_lossy());
        let remove = fabric.script.remove.iter().find(|(removed, _)| *removed == name);
        let down = fabric.script.linkdown.iter().filter(|(down, ..)| *down == name);
        let device = Device {
            raw: Raw(raw),
            fabric,
            index,
            requests: AtomicU64::new(0),
            remove_after: remove.map_or(u64::MAX, |(_, after)| *after),
            removed: AtomicBool::new(false),
            down: down.map(|(_, from, to)| (*from, *to)).collect(),
        };
        if let Err(error) = device.write_files(&path) {
            eprintln!(
                "peerway-fakeverbs: cannot write the sysfs files of {name} to {}: {error}",
                path.display()
            );
        }
        device
    };
    (0..fabric.script.devices).map(device).collect()
}

impl Device {
    /// # Safety
    ///
    /// `raw` is a device of this library.
    pub(crate) unsafe fn of(raw: *mut ibv_device) -> &'static Self {
        // SAFETY: by this function's contract. A device starts with the `ibv_device` and is never
        // freed.
        unsafe { &*raw.cast::<Self>() }
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_device {
        ptr::from_ref(self).cast_mut().cast()
    }

    pub(crate) fn is_efa(&self) -> bool {
        self.fabric.script.efa
    }

    /// Whether the script has removed the device.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Counts a request. Returns true for the request that removes the device.
    pub(crate) fn count_request(&self) -> bool {
        let count = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        count >= self.remove_after && !self.removed.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn link_down(&self, now: Instant) -> bool {
        let time = now.saturating_duration_since(self.fabric.loaded);
        self.down.iter().any(|(from, to)| (*from..*to).contains(&time))
    }

    /// The first change of the link after `time`, and whether the link goes down.
    pub(crate) fn link_change_after(&self, time: Instant) -> Option<(Instant, bool)> {
        let changes = self.down.iter().flat_map(|(from, to)| [(*from, true), (*to, false)]);
        let changes = changes.map(|(moment, down)| (self.fabric.loaded + moment, down));
        changes.filter(|(moment, _)| *moment > time).min()
    }

    pub(crate) fn gids(&self) -> u32 {
        if self.is_efa() { 1 } else { 2 }
    }

    pub(crate) fn gid(&self, index: u32) -> Option<[u8; 16]> {
        let host = self.index + 1;
        match index {
            0 => Some(link_local(self.index)),
            1 if !self.is_efa() => {
                let mut gid = [0; 16];
                gid[10..].copy_from_slice(&[0xff, 0xff, 127, 88, 0, host as u8]);
                Some(gid)
            }
            _ => None,
        }
    }

    pub(crate) fn guid(&self) -> u64 {
        0x0250_57ff_fe00_0000 | u64::from(self.index + 1)
    }

    pub(crate) fn attr(&self) -> ibv_device_attr {
        let mut attr = ibv_device_attr::zeroed();
        text(&mut attr.fw_ver, "0.0.1");
        attr.node_guid = self.guid().to_be();
        attr.sys_image_guid = attr.node_guid;
        attr.max_mr_size = u64::MAX;
        attr.page_size_cap = 0xffff_f000;
        // Amazon's vendor number for EFA, otherwise no vendor.
        attr.vendor_id = if self.is_efa() { 0x1d0f } else { 0 };
        attr.vendor_part_id = if self.is_efa() { 0xefa1 } else { 0 };
        attr.max_qp = 65536;
        attr.max_qp_wr = MAX_WR as c_int;
        if !self.is_efa() {
            attr.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_MEM_MGT_EXTENSIONS;
            if self.fabric.script.windows > 0 {
                attr.device_cap_flags |= IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
            }
            attr.max_mw = self.fabric.script.windows as c_int;
        }
        attr.max_sge = MAX_SGE as c_int;
        attr.max_sge_rd = MAX_SGE as c_int;
        attr.max_cq = 65536;
        attr.max_cqe = MAX_CQE;
        attr.max_mr = 1 << 20;
        attr.max_pd = 65536;
        attr.max_qp_rd_atom = c_int::from(MAX_READS);
        attr.max_qp_init_rd_atom = c_int::from(MAX_READS);
        attr.max_res_rd_atom = c_int::from(MAX_READS) * attr.max_qp;
        attr.atomic_cap = IBV_ATOMIC_NONE;
        attr.max_ah = 65536;
        attr.max_pkeys = 1;
        attr.phys_port_cnt = 1;
        attr
    }

    pub(crate) fn port_attr(&self) -> ibv_port_attr {
        let down = self.link_down(Instant::now());
        let mut attr = ibv_port_attr::zeroed();
        attr.state = if down { IBV_PORT_DOWN } else { IBV_PORT_ACTIVE };
        attr.max_mtu = IBV_MTU_4096;
        attr.active_mtu = IBV_MTU_4096;
        attr.gid_tbl_len = self.gids().cast_signed();
        attr.max_msg_sz = if self.is_efa() { DATAGRAM } else { MAX_MESSAGE } as u32;
        attr.pkey_tbl_len = 1;
        attr.max_vl_num = 1;
        // Four lanes of 25 Gbit/s, and the physical states "link up" and "polling".
        attr.active_width = 2;
        attr.active_speed = 32;
        attr.phys_state = if down { 2 } else { 5 };
        let efa = self.is_efa();
        attr.link_layer = if efa { IBV_LINK_LAYER_UNSPECIFIED } else { IBV_LINK_LAYER_ETHERNET };
        attr
    }

    /// Writes the sysfs files that programs read about a device. All processes write the same
    /// contents, and none ever sees a file without them.
    fn write_files(&self, path: &std::path::Path) -> io::Result<()> {
        let port = path.join("ports/1");
        for directory in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(port.join(directory))?;
        }
        fs::create_dir_all(path.join("device"))?;
        put(&path.join("device/numa_node"), "-1\n")?;
        put(&path.join("node_type"), if self.is_efa() { "7: \n" } else { "1: CA\n" })?;
        put(&port.join("link_layer"), if self.is_efa() { "Unspecified\n" } else { "Ethernet\n" })?;
        put(&port.join("state"), "4: ACTIVE\n")?;
        put(&port.join("rate"), "100 Gb/sec (4X EDR)\n")?;
        for index in 0..self.gids() {
            let gid = self.gid(index).unwrap_or_default();
            let words: Vec<String> =
                gid.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
            put(&port.join(format!("gids/{index}")), &format!("{}\n", words.join(":")))?;
            let kind = if self.is_efa() { "IB/RoCE v1\n" } else { "RoCE v2\n" };
            put(&port.join(format!("gid_attrs/types/{index}")), kind)?;
            put(&port.join(format!("gid_attrs/ndevs/{index}")), "lo\n")?;
        }
        Ok(())
    }
}

/// Gives a file this text, by renaming. Writing in place would empty the file for a moment, and
/// another process may read it then.
fn put(path: &std::path::Path, text: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|now| now == text) {
        return Ok(());
    }
    let new = path.with_extension(format!("{}-{:?}", std::process::id(), thread::current().id()));
    fs::write(&new, text)?;
    fs::rename(&new, path)
}

/// The first GID of a device, on any fabric.
pub(crate) fn link_local(device: u32) -> [u8; 16] {
    let mut gid = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x50, 0x57, 0xff, 0xfe, 0, 0, 0];
    gid[14..].copy_from_slice(&(device as u16 + 1).to_be_bytes());
    gid
}

/// The device that has a GID, on any fabric.
pub(crate) fn device_of(gid: &[u8; 16]) -> Option<u32> {
    let host = if gid[..14] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x50, 0x57, 0xff, 0xfe, 0] {
        u32::from(u16::from_be_bytes([gid[14], gid[15]]))
    } else if gid[..15] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 88, 0] {
        u32::from(gid[15])
    } else {
        return None;
    };
    host.checked_sub(1)
}

/// Copies a string and its terminating zero into a fixed array.
fn text(into: &mut [c_char], from: &str) {
    let room = into.len() - 1;
    for (to, from) in into[..room].iter_mut().zip(from.bytes()) {
        *to = from.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_gids_lead_back_to_their_device() {
        for device in make(Script { devices: 3, ..Script::default() }) {
            for index in 0..device.gids() {
                let gid = device.gid(index).expect("the device has `gids()` GIDs");
                assert_eq!(device_of(&gid), Some(device.index));
            }
            assert_eq!(device.gid(2), None);
        }
        assert_eq!(device_of(&[1; 16]), None);
    }

    #[test]
    fn a_device_goes_with_its_last_request_and_once() {
        let script = Script::parse("remove=fake1@2").expect("a script");
        let devices = make(script);
        assert!(!devices[1].count_request() && !devices[1].is_removed());
        assert!(devices[1].count_request() && devices[1].is_removed());
        assert!(!devices[1].count_request());
        assert!(!devices[0].count_request());
    }
}
