//! The RDMA device of one side. The engine detects its parameters, but perftest needs them as
//! options.

use std::ffi::OsString;

use anyhow::{Context, ensure};
use peerway_core::config::Config;
use peerway_sys::Library;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Device, Verbs, choose_gid};

/// A device's first active port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Port {
    pub(crate) device: String,
    pub(crate) number: u8,
    /// Set on Ethernet, and for reliable datagrams.
    pub(crate) gid_index: Option<u32>,
    /// Bytes.
    pub(crate) mtu: u32,
    pub(crate) service_level: u8,
    /// Whether the device uses reliable datagrams instead of connections.
    pub(crate) datagrams: bool,
}

impl Port {
    /// The device `named`, or the first of `PEERWAY_RDMA_DEV`, or the first with an active port.
    pub(crate) fn choose(named: Option<&str>) -> anyhow::Result<Self> {
        let (config, _) = Config::from_env(|name| std::env::var(name).ok())?;
        let setting = config.rdma.devices.clone();
        let first = setting.as_deref().and_then(|all| all.split(',').next()).map(str::trim);
        let wanted = named.or(first);
        let verbs = Verbs::load(library())?;
        let list = verbs.devices()?;
        let mut why = None;
        for (at, device) in list.iter().enumerate() {
            let name = device.name();
            if wanted.is_some_and(|wanted| wanted != name && wanted.parse() != Ok(at)) {
                continue;
            }
            match Self::of(&device, &config) {
                Ok(port) => return Ok(port),
                Err(error) => {
                    why.get_or_insert_with(|| error.context(name));
                }
            }
        }
        let none = || anyhow::anyhow!("no RDMA device {}", wanted.unwrap_or("on this machine"));
        Err(why.unwrap_or_else(none))
    }

    fn of(device: &Device<'_>, config: &Config) -> anyhow::Result<Self> {
        let datagrams = device.node_type() == IBV_NODE_UNSPECIFIED
            || device.transport_type() == IBV_TRANSPORT_UNSPECIFIED;
        let context = device.open()?;
        let ports = 1..=context.device_attr()?.phys_port_cnt;
        let mut ports = ports.filter_map(|port| Some((port, context.port_attr(port).ok()?)));
        let active = ports.find(|(_, attr)| attr.state == IBV_PORT_ACTIVE);
        let (number, attr) = active.context("no active port")?;
        let ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
        let gids = (0..attr.gid_tbl_len.clamp(0, 256) as u32)
            .filter_map(|index| Some((index, context.gid(number, index).ok()?)))
            .filter(|(_, gid)| gid.raw != [0; 16]);
        let gids: Vec<_> = gids.collect();
        let gid_index = config.rdma.gid_index.or_else(|| choose_gid(&gids, !ethernet));
        ensure!(!ethernet || gid_index.is_some(), "no GID: give its interface an address");
        Ok(Self {
            device: device.name(),
            number,
            gid_index: gid_index.filter(|_| ethernet || datagrams),
            mtu: 128 << attr.active_mtu.clamp(1, 5),
            service_level: config.rdma.service_level.unwrap_or(if datagrams { 8 } else { 3 }),
            datagrams,
        })
    }
}

/// The path of libibverbs that an environment variable sets.
fn library() -> Option<OsString> {
    let mut names = Library::Ibverbs.override_variables().iter();
    names.find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

/// Whether the default device uses reliable datagrams. Such a device needs the pin `efa` instead of
/// `ib`.
pub(crate) fn has_efa() -> bool {
    Port::choose(None).is_ok_and(|port| port.datagrams)
}
