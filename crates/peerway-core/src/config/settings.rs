//! The table of settings.
//!
//! A setting's [`Kind`] holds its bounds and the function that stores a parsed value. A value of
//! the wrong type or out of range therefore cannot reach [`Config`]. To add a setting, add a field
//! to [`Config`] and a row here, then run `cargo xtask config-docs`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::parse::{
    parse_bytes, parse_duration, parse_flag, parse_ports, show_bytes, show_duration,
};
use super::{Config, ConfigError, DataProtection, IdentityMode, KeyWindows, LogLevel, Pin};
use crate::topology::parse_cpus;

/// One row of the configuration table.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Setting {
    /// The variable's preferred name.
    pub name: &'static str,
    /// Other names of the same setting, in lookup order.
    pub aliases: &'static [&'static str],
    /// The default value as text, or an empty string if the setting starts unset.
    pub default: &'static str,
    /// The documentation of the setting, in sentences.
    pub doc: &'static str,
    /// The kind of value.
    pub kind: Kind,
    /// Whether it has an effect.
    pub status: Status,
}

impl Setting {
    /// The preferred name, then the aliases.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// The first name with a non-empty value in `lookup`.
    pub fn find(&self, lookup: impl Fn(&str) -> Option<String>) -> Option<FoundSetting> {
        let mut set = self.names().filter_map(|name| {
            let value = lookup(name)?.trim().to_owned();
            (!value.is_empty()).then_some((name, value))
        });
        let (name, value) = set.next()?;
        let overruled = set.find(|(_, other)| *other != value).map(|(name, _)| name);
        Some(FoundSetting { name, value, overruled })
    }

    /// The allowed values, as the end of the sentence "expected ...".
    pub fn allowed(&self) -> String {
        match self.kind {
            Kind::Transport { .. } => Pin::ALLOWED.to_owned(),
            Kind::Level { .. } => LogLevel::ALLOWED.to_owned(),
            Kind::Identity { .. } => IdentityMode::ALLOWED.to_owned(),
            Kind::Data { .. } => DataProtection::ALLOWED.to_owned(),
            Kind::Windows { .. } => KeyWindows::ALLOWED.to_owned(),
            Kind::Text { what, .. } => what.to_owned(),
            Kind::Count { min, max, .. } => format!("a whole number from {min} to {max}"),
            Kind::CountOrAuto { min, max, .. } => {
                format!("auto or a whole number from {min} to {max}")
            }
            Kind::Time { min, max, .. } => format!(
                "a time with its unit (ns, us, ms, s, m, h) from {} to {}",
                show_duration(min),
                show_duration(max)
            ),
            Kind::Bytes { min, max, .. } => {
                format!("a byte count from {} to {}", show_bytes(min), show_bytes(max))
            }
            Kind::Ports { .. } => "a port or a range of ports such as 7000-7010".to_owned(),
            Kind::Cpus { .. } => "processors such as 0-3,8".to_owned(),
            Kind::Flag { .. } => "1, true, yes, on or 0, false, no, off".to_owned(),
            Kind::ReadElsewhere { what } => what.to_owned(),
            Kind::Kept => "any text".to_owned(),
        }
    }

    /// Parses `value` of the variable `name` and stores it in its field of `config`.
    pub(super) fn apply(
        &self,
        config: &mut Config,
        name: &'static str,
        value: &str,
    ) -> Result<(), ConfigError> {
        let stored = match self.kind {
            Kind::Transport { set } => Pin::parse(value).map(|pin| set(config, pin)),
            Kind::Level { set } => LogLevel::parse(value).map(|level| set(config, level)),
            Kind::Identity { set } => IdentityMode::parse(value).map(|mode| set(config, mode)),
            Kind::Data { set } => DataProtection::parse(value).map(|mode| set(config, mode)),
            Kind::Windows { set } => KeyWindows::parse(value).map(|mode| set(config, mode)),
            Kind::Text { set, .. } => {
                set(config, value.to_owned());
                Some(())
            }
            Kind::Count { min, max, set } => {
                count(value, min, max).map(|number| set(config, number))
            }
            Kind::CountOrAuto { set, .. } if value.eq_ignore_ascii_case("auto") => {
                set(config, None);
                Some(())
            }
            Kind::CountOrAuto { min, max, set } => {
                count(value, min, max).map(|number| set(config, Some(number)))
            }
            Kind::Time { min, max, set } => parse_duration(value)
                .filter(|time| (min..=max).contains(time))
                .map(|time| set(config, time)),
            Kind::Bytes { min, max, set } => parse_bytes(value)
                .filter(|bytes| (min..=max).contains(bytes))
                .map(|bytes| set(config, bytes)),
            Kind::Ports { set } => parse_ports(value).map(|ports| set(config, ports)),
            Kind::Cpus { set } => {
                parse_cpus(value).filter(|cpus| !cpus.is_empty()).map(|cpus| set(config, cpus))
            }
            Kind::Flag { set } => parse_flag(value).map(|flag| set(config, flag)),
            Kind::ReadElsewhere { .. } | Kind::Kept => Some(()),
        };
        stored.ok_or_else(|| ConfigError::bad_value(name, value, self.allowed()))
    }
}

/// A setting with a value in the environment.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct FoundSetting {
    /// The name of the variable.
    pub name: &'static str,
    /// The trimmed value.
    pub value: String,
    /// Another name of the setting that holds a different value and is ignored.
    pub overruled: Option<&'static str>,
}

/// The values that a setting accepts, and the function that stores them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// A transport pin.
    Transport {
        /// Stores the value.
        set: fn(&mut Config, Pin),
    },
    /// A log level.
    Level {
        /// Stores the value.
        set: fn(&mut Config, LogLevel),
    },
    /// Which endpoints may come in.
    Identity {
        /// Stores the value.
        set: fn(&mut Config, IdentityMode),
    },
    /// How data is protected.
    Data {
        /// Stores the value.
        set: fn(&mut Config, DataProtection),
    },
    /// Whether RDMA keys are for one queue pair each.
    Windows {
        /// Stores the value.
        set: fn(&mut Config, KeyWindows),
    },
    /// Free text. The code that uses it checks it.
    Text {
        /// The expected content.
        what: &'static str,
        /// Stores the value.
        set: fn(&mut Config, String),
    },
    /// A whole number.
    Count {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
        /// Stores the value.
        set: fn(&mut Config, u32),
    },
    /// A whole number, or `auto` to leave the choice to the engine.
    CountOrAuto {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
        /// Stores the value.
        set: fn(&mut Config, Option<u32>),
    },
    /// A time with its unit.
    Time {
        /// The minimum.
        min: Duration,
        /// The maximum.
        max: Duration,
        /// Stores the value.
        set: fn(&mut Config, Duration),
    },
    /// A byte count.
    Bytes {
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
        /// Stores the value.
        set: fn(&mut Config, u64),
    },
    /// A port or a range of ports.
    Ports {
        /// Stores the value.
        set: fn(&mut Config, RangeInclusive<u16>),
    },
    /// A list of processors.
    Cpus {
        /// Stores the value.
        set: fn(&mut Config, Vec<usize>),
    },
    /// A flag.
    Flag {
        /// Stores the value.
        set: fn(&mut Config, bool),
    },
    /// A setting that does not pass through [`Config`]. The loader reads the library overrides, and
    /// the Python package reads its own settings.
    ReadElsewhere {
        /// The expected content.
        what: &'static str,
    },
    /// A value that nothing reads.
    Kept,
}

/// Whether a setting has an effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Status {
    /// The setting has an effect.
    Used,
    /// The setting is reserved for this transport or feature, which is not in this build.
    Reserved(&'static str),
    /// The setting never has an effect. The endpoint warns about it and gives this reason.
    AnsweredWithWarning(&'static str),
}

/// All settings.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "PEERWAY_TRANSPORT",
        aliases: &["UCCL_P2P_TRANSPORT"],
        default: "auto",
        doc: "The transport that the endpoint uses for every peer. `auto` selects the best one \
              that both sides can use. If a pinned transport cannot reach a peer, connecting \
              fails with an error that says why; there is no fallback.",
        kind: Kind::Transport { set: |config, pin| config.transport = pin },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_BIND",
        aliases: &[],
        default: "",
        doc: "The address to listen on: IPv4 or IPv6, with or without a port (`192.0.2.7`, \
              `[::]:7000`). If unset, the endpoint listens on loopback and on the interfaces that \
              PEERWAY_INTERFACES or the routing table selects. If neither selects any, it listens \
              on every interface that is up.",
        kind: Kind::Text {
            what: "an address such as 192.0.2.7 or [::]:7000",
            set: |config, text| config.bind = Some(text),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_PORTS",
        aliases: &[],
        default: "",
        doc: "The ports to listen on, for firewalls: one port or a range (`7000-7010`). An endpoint \
              takes the first port that is free on all its addresses, so each endpoint of a host \
              needs one. If unset, the system picks a port. A port in PEERWAY_BIND comes first.",
        kind: Kind::Ports { set: |config, ports| config.ports = Some(ports) },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_ADVERTISE",
        aliases: &[],
        default: "",
        doc: "The address that peers connect to, if it differs from the bound address: behind \
              NAT, or in a container with a published port.",
        kind: Kind::Text {
            what: "an address such as 192.0.2.7 or 192.0.2.7:7000",
            set: |config, text| config.advertise = Some(text),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_INTERFACES",
        aliases: &["UCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"],
        default: "",
        doc: "Network interfaces to use, separated by commas. Each entry is a prefix of a name; a \
              leading `=` requires exact names, a leading `^` excludes the names. Several \
              interfaces are several rails: the endpoint listens on each and distributes bulk \
              lanes over them in turn, each to the peer's address on the same network.",
        kind: Kind::Text {
            what: "interface names such as eth0,eth1 or ^docker",
            set: |config, text| config.interfaces = Some(text),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_IDENTITY",
        aliases: &[],
        default: "pinned",
        doc: "Which endpoints may open a session with this one. Every endpoint proves its own key, \
              and a connect by metadata reaches the endpoint that made the metadata or none. \
              `pinned` asks for nothing more: every endpoint may come in under its own identity, \
              and a connect by address alone reaches whatever endpoint answers there. `cluster` \
              lets both sides prove that they know the secret in PEERWAY_CLUSTER_SECRET_FILE, in \
              every connect. `mtls` lets both sides prove that they have a certificate of an \
              authority in PEERWAY_TLS_CA_FILE.",
        kind: Kind::Identity { set: |config, mode| config.identity = mode },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_DATA",
        aliases: &[],
        default: "off",
        doc: "How TCP connections protect what they carry after the handshake: data, control \
              messages and tokens. `integrity` adds a CRC32C to each record and finds bytes that \
              changed by accident. `encrypt` uses AES-128-GCM with keys of the session: the \
              network can neither read nor change the bytes. Both check a record before any of its \
              bytes counts as arrived. A session uses the stricter setting of its two endpoints. \
              Local paths stay inside the kernel of this host and are not covered; neither are \
              bytes that RDMA devices move.",
        kind: Kind::Data { set: |config, mode| config.data = mode },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_CLUSTER_SECRET_FILE",
        aliases: &[],
        default: "",
        doc: "The file with the secret that all endpoints of a cluster share, for \
              PEERWAY_IDENTITY=cluster. It needs at least 32 bytes; `openssl rand -hex 32` makes \
              one. White space at its end does not count. An endpoint reads the file when it \
              starts.",
        kind: Kind::Text {
            what: "the path of a file",
            set: |config, path| config.cluster_secret_file = Some(path),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_TLS_CA_FILE",
        aliases: &[],
        default: "",
        doc: "The file with the certificates of the authorities that admit endpoints, for \
              PEERWAY_IDENTITY=mtls: a CA, or a SPIFFE bundle, as PEM. The endpoint reads this \
              file and the next two again when they change.",
        kind: Kind::Text {
            what: "the path of a PEM file",
            set: |config, path| config.tls_ca_file = Some(path),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_TLS_CERT_FILE",
        aliases: &[],
        default: "",
        doc: "The file with the certificate of this endpoint, for PEERWAY_IDENTITY=mtls, as PEM. The \
              certificates between it and the authority follow it. It must be valid for clients \
              and for servers, or not say for which.",
        kind: Kind::Text {
            what: "the path of a PEM file",
            set: |config, path| config.tls_cert_file = Some(path),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_TLS_KEY_FILE",
        aliases: &[],
        default: "",
        doc: "The file with the private key of the certificate in PEERWAY_TLS_CERT_FILE, as PEM.",
        kind: Kind::Text {
            what: "the path of a PEM file",
            set: |config, path| config.tls_key_file = Some(path),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_LANES",
        aliases: &[],
        default: "auto",
        doc: "Bulk connections per TCP peer. `auto` is 1 on loopback, where more connections \
              compete for the same cores. On a network it is 4, because one connection keeps one \
              core busy on each side, or one for each rail if there are more than 4. A connection that \
              breaks is opened again while another one lives.",
        kind: Kind::CountOrAuto {
            min: 1,
            max: 64,
            // The maximum keeps the value within 16 bits, here and below.
            set: |config, lanes| config.lanes = lanes.map(|lanes| lanes as u16),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_SHARDS",
        aliases: &[],
        default: "1",
        doc: "Progress threads per endpoint. They block while there is no work and serve the \
              requests of all peers fairly. More threads help an endpoint that serves many peers \
              at once.",
        kind: Kind::Count { min: 1, max: 64, set: |config, n| config.shards = n as u16 },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_COPY_THREADS",
        aliases: &[],
        default: "2",
        doc: "The number of threads that may copy at the same time for one large transfer on this \
              host. One core cannot saturate the memory bus; two come close.",
        kind: Kind::Count { min: 1, max: 64, set: |config, n| config.copy_threads = n as u16 },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_CPUS",
        aliases: &[],
        default: "",
        doc: "Processors that the engine's threads run on, as a list such as `0-3,8`. If unset, \
              the engine uses the processors that the main thread had when the process loaded it. \
              It therefore respects `taskset` and containers, and a thread that the program pins \
              later does not pin the engine. Set it if the program is pinned before it loads the \
              engine. Processors that the process may not use are skipped with a warning; if none \
              is left, creating the endpoint fails. Threads that serve an RDMA device or a GPU \
              prefer the processors in the list that are near it.",
        kind: Kind::Cpus { set: |config, cpus| config.cpus = Some(cpus) },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_SLOTS",
        aliases: &[],
        default: "4096",
        doc: "The number of transfers that can be in flight on one endpoint. Posting one more \
              returns `Busy`.",
        kind: Kind::Count { min: 1, max: 1 << 20, set: |config, n| config.slots = n },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MAX_INFLIGHT_OPS",
        aliases: &["UCCL_P2P_MAX_INFLIGHT_OPS"],
        default: "auto",
        doc: "The number of operations on the wire at once per lane; the others wait. `auto` \
              leaves the limit to the transport.",
        kind: Kind::CountOrAuto {
            min: 1,
            max: 1 << 20,
            set: |config, ops| config.max_inflight_ops = ops,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_NOTIFY_BYTES",
        aliases: &[],
        default: "64MiB",
        doc: "The number of bytes of notifications that an endpoint stores until the application \
              fetches them. The endpoint rejects notifications beyond that. One peer may use an \
              eighth; all peers that have no right to count may use half.",
        kind: Kind::Bytes {
            min: 64 << 10,
            max: 1 << 40,
            set: |config, bytes| config.notify_bytes = bytes,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MAX_HANDSHAKES",
        aliases: &[],
        default: "128",
        doc: "The number of connections that may be in the handshake at a time, over TCP and over \
              the local socket each. An endpoint with few file descriptors allows fewer. One \
              address may have an eighth of them for longer than a moment. Further connections \
              wait, and the oldest one of the busiest address is dropped.",
        kind: Kind::Count { min: 16, max: 1 << 16, set: |config, n| config.limits.handshakes = n },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MAX_SESSIONS",
        aliases: &[],
        default: "1024",
        doc: "The number of sessions that peers may open. Sessions that this endpoint opens do \
              not count. Proxy threads may have three sub-sessions for each session of the limit, \
              here and in PEERWAY_MAX_SESSIONS_PER_ADDRESS.",
        kind: Kind::Count { min: 1, max: 1 << 16, set: |config, n| config.limits.sessions = n },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MAX_SESSIONS_PER_ADDRESS",
        aliases: &[],
        default: "64",
        doc: "The number of sessions that peers at one address may open. Raise it if more \
              processes than that connect from one host.",
        kind: Kind::Count {
            min: 1,
            max: 1 << 16,
            set: |config, n| config.limits.sessions_per_address = n,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MAX_LANES",
        aliases: &[],
        default: "16",
        doc: "The number of bulk connections that a peer may open in a session. A peer with a \
              greater PEERWAY_LANES does with fewer.",
        kind: Kind::Count { min: 1, max: 64, set: |config, n| config.limits.lanes = n as u16 },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_MESSAGE_BYTES",
        aliases: &[],
        default: "64MiB",
        doc: "The number of bytes of notifications that may be half received. A notification is \
              charged when its header arrives. One session may have a sixteenth; all peers that \
              have no right to count may have half. The endpoint rejects notifications beyond \
              that.",
        kind: Kind::Bytes {
            // A sixteenth holds the longest notification.
            min: 16 << 20,
            max: 1 << 40,
            set: |config, bytes| config.limits.message_bytes = bytes,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_FREE_DESCRIPTORS",
        aliases: &[],
        default: "64",
        doc: "The number of file descriptors that an endpoint leaves to the rest of the process \
              when it accepts connections, and at most a sixteenth of the process's limit.",
        kind: Kind::Count {
            min: 0,
            max: 1 << 20,
            set: |config, n| config.limits.free_descriptors = n,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_DETECT",
        aliases: &[],
        default: "2s",
        doc: "How long a peer may be silent before the endpoint declares it dead and ends its \
              transfers. If the peer's time is longer, the endpoint uses that, up to four times \
              its own.",
        kind: Kind::Time {
            // With a shorter time, a busy scheduler looks like a dead peer.
            min: Duration::from_millis(50),
            max: Duration::from_secs(3600),
            set: |config, time| config.detect = time,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_FENCE",
        aliases: &[],
        default: "1s",
        doc: "How long a cancel or a revoke waits for the guarantee that no more bytes land. \
              After that it reports `Open` and the memory stays in quarantine.",
        kind: Kind::Time {
            min: Duration::from_millis(1),
            max: Duration::from_secs(3600),
            set: |config, time| config.fence = time,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_DEADLINE",
        aliases: &[],
        default: "30s",
        doc: "The deadline of a transfer that sets none.",
        kind: Kind::Time {
            min: Duration::from_millis(1),
            // One day is long enough for any transfer, and sums with clock values cannot overflow.
            max: Duration::from_secs(24 * 3600),
            set: |config, time| config.deadline = time,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_CONNECT_TIMEOUT",
        aliases: &[],
        default: "5s",
        doc: "How long a connection attempt may take, including the handshake.",
        kind: Kind::Time {
            min: Duration::from_millis(1),
            max: Duration::from_secs(3600),
            set: |config, time| config.connect_timeout = time,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_SPIN",
        aliases: &[],
        default: "50us",
        doc: "How long a waiting thread polls before it blocks. Polling halves the latency of \
              small transfers and uses that much time of a core for each wait; `0` never polls.",
        kind: Kind::Time {
            min: Duration::ZERO,
            // A longer time would keep a thread busy on an idle endpoint.
            max: Duration::from_millis(10),
            set: |config, time| config.spin = time,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_DISABLE_IPC",
        aliases: &["UCCL_P2P_DISABLE_IPC"],
        default: "0",
        doc: "Use a network transport for peers on this host too: no shared mapping, no \
              cross-memory attach, no ring, no GPU IPC.",
        kind: Kind::Flag { set: |config, flag| config.disable_ipc = flag },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_LOG_LEVEL",
        aliases: &["UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG"],
        default: "warn",
        doc: "The log level: `info` has a line for each endpoint, connect, accept, loss and \
              refusal. `RUST_LOG` selects instead, where it is set. In Python the logger `peerway` \
              gets the lines; without these variables its level decides.",
        kind: Kind::Level { set: |config, level| config.log_level = level },
        status: Status::Used,
    },
    // The drop-in for uccl.p2p reads the next three settings, not the engine.
    Setting {
        name: "PEERWAY_BROKER_PORT",
        aliases: &[],
        default: "51780",
        doc: "The port on which the first `uccl.p2p` endpoint of a host tells other processes \
              which endpoint serves which GPU. Only processes of one user can register there, so \
              each user of a host needs a port. 0 turns that off.",
        kind: Kind::Count { min: 0, max: 65535, set: |_, _| () },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_BROKER_WAIT",
        aliases: &[],
        default: "10",
        doc: "How long `uccl.p2p` waits for the endpoint of a GPU to appear, in seconds.",
        kind: Kind::Text { what: "seconds, such as 10 or 0.5", set: |_, _| () },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_GPU_MAP",
        aliases: &[],
        default: "",
        doc: "The GPU behind each index of `uccl.p2p`: `0,0` maps indices 0 and 1 to the same \
              GPU, so that programs for two GPUs run on one.",
        kind: Kind::ReadElsewhere {
            what: "GPUs separated by commas, by number, UUID or PCI address, such as 0,0",
        },
        status: Status::Used,
    },
    library(
        "PEERWAY_IBV_SO",
        &["UCCL_IBV_SO"],
        "The libibverbs to load. Peerway tries it before libibverbs.so.1.",
    ),
    library(
        "PEERWAY_EFA_SO",
        &["UCCL_EFA_SO"],
        "The libefa to load. Peerway tries it before libefa.so.1.",
    ),
    library(
        "PEERWAY_LIBFABRIC_SO",
        &["UCCL_LIBFABRIC_SO"],
        "The libfabric to load. Peerway tries it before libfabric.so.1.",
    ),
    library(
        "PEERWAY_NCCL_SO",
        &["UCCL_NCCL_SO"],
        "The libnccl to load. Peerway tries it before libnccl.so.2.",
    ),
    library(
        "PEERWAY_CUDA_SO",
        &[],
        "The CUDA driver to load. Peerway tries it before libcuda.so.1.",
    ),
    library(
        "PEERWAY_NVRTC_SO",
        &[],
        "The libnvrtc to load. Peerway tries it before libnvrtc.so.13 and .so.12.",
    ),
    // Peerway reads this setting when it compiles the first kernel, which needs no endpoint.
    Setting {
        name: "PEERWAY_KERNEL_CACHE",
        aliases: &[],
        default: "",
        doc: "The directory for compiled kernels, at most 256 MiB of them. Peerway creates it if \
              it is missing; `off` disables the cache. The directory must belong to the user, and \
              no other user may have write access. If unset: `peerway/kernels` in \
              `XDG_CACHE_HOME`, or in `~/.cache`.",
        kind: Kind::ReadElsewhere { what: "a directory, or off" },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_DEV",
        aliases: &["UCCL_P2P_RDMA_DEV"],
        default: "",
        doc: "RDMA devices to use, separated by commas: names, or numbers in the order of \
              `peerway doctor`. If unset: every device with an active port, of one kind.",
        kind: Kind::Text {
            what: "device names such as mlx5_0,mlx5_1",
            set: |config, text| config.rdma.devices = Some(text),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_GID_INDEX",
        aliases: &["UCCL_P2P_RDMA_GID_INDEX"],
        default: "auto",
        doc: "The index of the GID that connections use. `auto` prefers RoCE v2 with an IPv4 \
              address (index 3 on most ConnectX ports), then RoCE v2 with an IPv6 address. On \
              InfiniBand and EFA it is 0.",
        kind: Kind::CountOrAuto {
            min: 0,
            max: 1023,
            set: |config, index| config.rdma.gid_index = index,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_MAX_RD_ATOMIC",
        aliases: &["UCCL_P2P_RDMA_MAX_RD_ATOMIC"],
        default: "16",
        doc: "The number of outstanding reads that a queue pair starts, limited by the device.",
        kind: Kind::Count {
            min: 1,
            max: 255,
            // The maximum keeps these values within 8 bits, here and below.
            set: |config, reads| config.rdma.max_rd_atomic = reads as u8,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_MAX_DEST_RD_ATOMIC",
        aliases: &["UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC"],
        default: "16",
        doc: "The number of outstanding reads that a queue pair serves, limited by the device.",
        kind: Kind::Count {
            min: 1,
            max: 255,
            set: |config, reads| config.rdma.max_dest_rd_atomic = reads as u8,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_SL",
        aliases: &["UCCL_P2P_RDMA_SL"],
        default: "auto",
        doc: "The service level of RDMA packets. `auto` is 3, or 8 on EFA.",
        kind: Kind::CountOrAuto {
            min: 0,
            max: 15,
            set: |config, level| config.rdma.service_level = level.map(|level| level as u8),
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_TC",
        aliases: &["UCCL_P2P_RDMA_TC"],
        default: "104",
        doc: "The traffic class of RDMA packets. On RoCE it is the traffic class byte of the IP \
              header.",
        kind: Kind::Count {
            min: 0,
            max: 255,
            set: |config, class| config.rdma.traffic_class = class as u8,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_QUEUE_PAIRS",
        aliases: &[],
        default: "2",
        doc: "The number of queue pairs for large transfers per device and peer. Small transfers \
              use one additional queue pair.",
        kind: Kind::Count {
            min: 1,
            max: 16,
            set: |config, pairs| config.rdma.queue_pairs = pairs as u16,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_RETRIES",
        aliases: &[],
        default: "7",
        doc: "How often a device retransmits an unacknowledged packet before its queue pair fails.",
        kind: Kind::Count {
            min: 0,
            max: 7,
            set: |config, retries| config.rdma.retries = retries as u8,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_TIMEOUT",
        aliases: &[],
        default: "67ms",
        doc: "How long a device waits for an acknowledgement. Devices round it up to 4.096 us \
              times a power of two, and some wait up to four times as long.",
        kind: Kind::Time {
            min: Duration::from_micros(8),
            max: Duration::from_secs(60),
            set: |config, timeout| config.rdma.timeout = timeout,
        },
        status: Status::Used,
    },
    Setting {
        name: "PEERWAY_RDMA_WINDOWS",
        aliases: &[],
        default: "auto",
        doc: "Whether the key of advertised memory opens it to one queue pair of one peer. `auto` \
              uses type 2 memory windows where the device has them, and a key for all peers when \
              none is left. `require` uses no device without them, and no key for all peers.",
        kind: Kind::Windows { set: |config, mode| config.rdma.windows = mode },
        status: Status::Used,
    },
    kept(
        "UCCL_P2P_RDMA_CC",
        &[],
        "Upstream: congestion control in software over RDMA.",
        Status::AnsweredWithWarning("the device's own congestion control is used"),
    ),
    kept(
        "UCCL_P2P_RDMA_LINK_GBPS",
        &[],
        "Upstream: speed of the RDMA link, for congestion control.",
        Status::AnsweredWithWarning("the device's own congestion control is used"),
    ),
    kept(
        "PEERWAY_CXI_DOMAIN",
        &["UCCL_CXI_DOMAIN"],
        "The libfabric domain to open, such as cxi0.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_CXI_DEVICE_INDEX",
        &["UCCL_CXI_DEVICE_INDEX"],
        "The device to use if no domain is set.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_CXI_THREADING",
        &["UCCL_CXI_THREADING"],
        "The threading model to request from libfabric.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_CXI_TX_QUEUE_SIZE",
        &["UCCL_CXI_TX_QUEUE_SIZE"],
        "Length of the transmit queue.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_CXI_RX_QUEUE_SIZE",
        &["UCCL_CXI_RX_QUEUE_SIZE"],
        "Length of the receive queue.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_CXI_CQ_SIZE",
        &["UCCL_CXI_CQ_SIZE"],
        "Length of the completion queue.",
        Status::Reserved("cxi"),
    ),
    kept(
        "PEERWAY_COMPRESS_STRATEGY",
        &["UCCL_P2P_COMPRESS_STRATEGY"],
        "How floating-point data is compressed for the wire.",
        Status::Reserved("compression"),
    ),
    kept(
        "PEERWAY_MIN_COMPRESS_BYTES",
        &["UCCL_P2P_MIN_COMPRESS_BYTES"],
        "The size of the smallest transfer to compress.",
        Status::Reserved("compression"),
    ),
    kept(
        "PEERWAY_COMPRESS_BUFFER_BYTES",
        &["UCCL_P2P_COMPRESS_BUFFER_BYTES"],
        "Memory for compressed data.",
        Status::Reserved("compression"),
    ),
    kept(
        "PEERWAY_NCCL_OOB_PORT",
        &["UCCL_TCP_OOB_PORT", "UCCL_TCPX_OOB_PORT"],
        "A fixed port for setting up the nccl transport.",
        Status::Reserved("nccl"),
    ),
    kept(
        "NCCL_SOCKET_FAMILY",
        &[],
        "Address family; libnccl reads it itself.",
        Status::Reserved("nccl"),
    ),
    kept(
        "NCCL_COMM_ID",
        &[],
        "Bootstrap address; libnccl reads it itself.",
        Status::Reserved("nccl"),
    ),
    kept("NCCL_IB_HCA", &[], "RDMA devices; libnccl reads it itself.", Status::Reserved("nccl")),
    kept("NCCL_IB_GID_INDEX", &[], "GID index; libnccl reads it itself.", Status::Reserved("nccl")),
    kept(
        "UCCL_RDMA_ADAPTIVE_SLEEP",
        &[],
        "Upstream: let idle proxy threads sleep.",
        Status::AnsweredWithWarning("idle threads always block; PEERWAY_SPIN sets after how long"),
    ),
    kept(
        "UCCL_DEBUG_SUBSYS",
        &[],
        "Upstream: the subsystems that log.",
        Status::AnsweredWithWarning("PEERWAY_LOG_LEVEL sets one level for all subsystems"),
    ),
    kept(
        "UCCL_DEBUG_VLOG_LEVEL",
        &[],
        "Upstream: verbosity of the logs.",
        Status::AnsweredWithWarning("use PEERWAY_LOG_LEVEL=debug or trace"),
    ),
    kept(
        "UCCL_RCMODE",
        &[],
        "Upstream: connection mode of the collectives.",
        Status::AnsweredWithWarning("it belongs to UCCL's collectives"),
    ),
    kept(
        "UCCL_IB_HCA",
        &[],
        "Upstream: RDMA devices of the collectives.",
        Status::AnsweredWithWarning("it belongs to UCCL's collectives; see PEERWAY_RDMA_DEV"),
    ),
    kept(
        "UCCL_GPU_RT",
        &[],
        "Upstream: the GPU runtime that its tests load.",
        Status::AnsweredWithWarning("it belongs to UCCL's own tests"),
    ),
    kept(
        "UCCL_GPU_RT_LIB",
        &[],
        "Upstream: the library that its tests load.",
        Status::AnsweredWithWarning("it belongs to UCCL's own tests"),
    ),
    kept(
        "USE_DIETGPU",
        &[],
        "Upstream: a build option.",
        Status::AnsweredWithWarning("it is an option of UCCL's build"),
    ),
];

/// A row for the path of a vendor library. The loader reads it, not [`Config`].
const fn library(
    name: &'static str,
    aliases: &'static [&'static str],
    doc: &'static str,
) -> Setting {
    Setting {
        name,
        aliases,
        default: "",
        doc,
        kind: Kind::ReadElsewhere { what: "the path or soname of a shared library" },
        status: Status::Used,
    }
}

/// A row for a setting that has no effect.
const fn kept(
    name: &'static str,
    aliases: &'static [&'static str],
    doc: &'static str,
    status: Status,
) -> Setting {
    Setting { name, aliases, default: "", doc, kind: Kind::Kept, status }
}

fn count(value: &str, min: u32, max: u32) -> Option<u32> {
    value.parse().ok().filter(|number| (min..=max).contains(number))
}
