//! An open device with the port in use.

use std::sync::Arc;

use peerway_core::config::{self, KeyWindows};
use peerway_core::wire::RdmaPort;
use peerway_sys::efadv::Efa;
use peerway_sys::efadv::ffi::{
    EFADV_DEVICE_ATTR_CAPS_RDMA_READ, EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE,
};
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Context, Device, Mr, Pd, choose_gid};

use crate::os::pages::Pages;
use crate::transport::error::RdmaError;

/// See the module.
pub(crate) struct Nic {
    /// Its index among the endpoint's devices.
    pub(crate) index: usize,
    pub(crate) context: Arc<Context>,
    pub(crate) pd: Arc<Pd>,
    /// Set for devices with reliable datagrams instead of connections.
    pub(crate) efa: Option<Arc<Efa>>,
    /// The port's address, for peers.
    pub(crate) address: RdmaPort,
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    /// The NUMA node of the device, if known.
    pub(crate) node: Option<u16>,
    pub(crate) limits: ibv_device_attr,
    /// Whether advertised memory has a key for each queue pair.
    pub(crate) windows: bool,
    pub(crate) config: config::Rdma,
    flush: Mr,
    flush_page: Pages,
}

/// Whether a device has reliable datagrams and no connections.
pub(crate) fn is_efa(device: &Device<'_>) -> bool {
    device.transport_type() == IBV_TRANSPORT_UNSPECIFIED
        || device.node_type() == IBV_NODE_UNSPECIFIED
}

impl Nic {
    /// Opens a device and takes its first active port.
    pub(crate) fn open(
        device: &Device<'_>,
        index: usize,
        efa: Option<&Arc<Efa>>,
        node: Option<u16>,
        config: &config::Rdma,
    ) -> Result<Self, RdmaError> {
        let context = Arc::new(device.open()?);
        let limits = context.device_attr()?;
        if let Some(efa) = efa {
            let both = EFADV_DEVICE_ATTR_CAPS_RDMA_READ | EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE;
            if efa.device_attr(&context)?.device_caps & both != both {
                return Err(RdmaError::NoMemoryRequests { device: context.name().to_owned() });
            }
        }
        let ports = (1..=limits.phys_port_cnt).map(|port| (port, context.port_attr(port)));
        let active = ports.filter_map(|(port, attr)| Some((port, attr.ok()?)));
        let (port, attr) = { active }
            .find(|(_, attr)| is_active(attr.state))
            .ok_or_else(|| RdmaError::NoActivePort { devices: context.name().to_owned() })?;
        let ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
        let (gid_index, gid) = gid(&context, port, attr.gid_tbl_len, ethernet, config.gid_index)?;
        let windows = use_windows(&context, &limits, efa.is_some(), config.windows)?;
        let pd = Arc::new(Pd::alloc(&context)?);
        let flush_page = Pages::new(1, node);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
        // SAFETY: the device keeps the page next to the registration and drops the registration
        // first. No Rust reference to the page exists.
        let flush = unsafe { Mr::register(&pd, flush_page.ptr().cast(), flush_page.len(), access) }
            .map_err(RdmaError::registering)?;
        let address = RdmaPort {
            gid,
            lid: attr.lid,
            mtu: attr.active_mtu as u8,
            ethernet,
            datagrams: efa.is_some(),
            windows,
        };
        Ok(Self {
            index,
            pd,
            efa: efa.cloned(),
            address,
            port,
            gid_index,
            node,
            limits,
            windows,
            config: config.clone(),
            flush,
            flush_page,
            context,
        })
    }

    /// Whether the link is up. A queue pair can be created without a link, but fails at its first
    /// request.
    pub(crate) fn has_link(&self) -> bool {
        self.context.port_attr(self.port).is_ok_and(|attr| is_active(attr.state))
    }

    /// Address and key of the eight bytes that peers read to learn that their writes have arrived.
    pub(crate) fn flush_word(&self) -> (u64, u32) {
        (self.flush_page.ptr() as u64, self.flush.rkey())
    }

    /// The destination for the read of a peer's flush word. No code reads it.
    pub(crate) fn flush_target(&self) -> ibv_sge {
        let addr = self.flush_page.ptr() as u64 + 64;
        ibv_sge { addr, length: 8, lkey: self.flush.lkey() }
    }

    /// The service level of its packets.
    pub(crate) fn service_level(&self) -> u8 {
        let default = if self.efa.is_some() { 8 } else { 3 };
        self.config.service_level.unwrap_or(default)
    }
}

/// Whether to give each queue pair its own keys: if the device has type 2 memory windows and the
/// setting allows them.
fn use_windows(
    context: &Context,
    limits: &ibv_device_attr,
    datagrams: bool,
    setting: KeyWindows,
) -> Result<bool, RdmaError> {
    let flags = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    let has = !datagrams && limits.device_cap_flags & flags != 0 && limits.max_mw > 0;
    if setting == KeyWindows::Require && !has {
        return Err(RdmaError::NoWindows { device: context.name().to_owned() });
    }
    Ok(has && setting != KeyWindows::Off)
}

fn is_active(state: u32) -> bool {
    matches!(state, IBV_PORT_ACTIVE | IBV_PORT_ACTIVE_DEFER)
}

/// The GID to use: the configured one, or the best one.
fn gid(
    context: &Context,
    port: u8,
    entries: i32,
    ethernet: bool,
    asked: Option<u32>,
) -> Result<(u8, [u8; 16]), RdmaError> {
    let no_gid = |index: String| RdmaError::NoGid { index, device: context.name().to_owned() };
    if let Some(index) = asked {
        let gid = context.gid(port, index).ok().filter(|gid| gid.raw != [0; 16]);
        let gid = gid.ok_or_else(|| no_gid(index.to_string()))?;
        return Ok((u8::try_from(index).map_err(|_| no_gid(index.to_string()))?, gid.raw));
    }
    let all = (0..entries.clamp(0, 256) as u32).filter_map(|index| {
        let gid = context.gid(port, index).ok()?;
        (gid.raw != [0; 16]).then_some((index, gid))
    });
    let all: Vec<_> = all.collect();
    let index = choose_gid(&all, !ethernet).ok_or_else(|| no_gid("auto".to_owned()))?;
    let gid = all.iter().find(|(at, _)| *at == index).map(|(_, gid)| gid.raw);
    Ok((index as u8, gid.unwrap_or_default()))
}
