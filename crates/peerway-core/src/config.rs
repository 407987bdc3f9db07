//! The configuration: one table of settings, and the values an endpoint starts with.
//!
//! [`SETTINGS`] is the only place that defines a setting's name, default and meaning. Parsing,
//! `peerway doctor --config` and `docs/configuration.md` all read that table, so they cannot
//! disagree.
//!
//! Invariants:
//!
//! - Every default parses.
//! - A `PEERWAY_*` name takes precedence over its aliases.
//! - An empty value counts as unset.
//! - No value is replaced silently. An invalid value is a [`ConfigError`] that names the variable,
//!   the value and the allowed values.
//!
//! The endpoint builder, the command line program and `xtask` use this module. The caller reads the
//! environment and passes it in as a function, so this module does no IO.

mod parse;
mod pin;
mod settings;

use std::ops::RangeInclusive;
use std::time::Duration;

pub use parse::{parse_bytes, parse_duration, show_duration};
pub use pin::{DataProtection, IdentityMode, KeyWindows, LogLevel, Pin};
pub use settings::{FoundSetting, Kind, SETTINGS, Setting, Status};

/// The configuration of an endpoint. [`Config::default`] holds the defaults of the table.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The transport that the endpoint uses for every peer.
    pub transport: Pin,
    /// The address to listen on, with or without a port. `None`: loopback and the chosen
    /// interfaces.
    pub bind: Option<String>,
    /// The address that peers connect to, if it differs from the bound one (containers, NAT).
    pub advertise: Option<String>,
    /// The ports to listen on, if the address names none. `None`: a port that the system picks.
    pub ports: Option<RangeInclusive<u16>>,
    /// The network interfaces to use, as prefixes. See the documentation of the setting.
    pub interfaces: Option<String>,
    /// Bulk lanes per TCP peer. `None`: one on loopback; on a network four, or one for each rail if
    /// there are more.
    pub lanes: Option<u16>,
    /// Progress threads of an endpoint, each with its own epoll.
    pub shards: u16,
    /// The number of threads that may copy for one large local transfer at the same time.
    pub copy_threads: u16,
    /// The processors that engine threads run on, in ascending order. `None`: the processors that
    /// the process started with.
    pub cpus: Option<Vec<usize>>,
    /// The number of transfers that can be in flight on one endpoint.
    pub slots: u32,
    /// How long a peer may be silent before the endpoint declares it dead.
    pub detect: Duration,
    /// How long a cancel or a revoke waits for its fence.
    pub fence: Duration,
    /// The deadline of a transfer that sets none.
    pub deadline: Duration,
    /// How long connection setup may take.
    pub connect_timeout: Duration,
    /// How long a waiting thread polls before it blocks.
    pub spin: Duration,
    /// The log level.
    pub log_level: LogLevel,
    /// Whether the endpoint reaches peers on this host over a network transport too.
    pub disable_ipc: bool,
    /// The number of bytes of notifications that an endpoint stores for the application. It rejects
    /// more.
    pub notify_bytes: u64,
    /// The number of operations on the wire at once per lane. `None`: the transport's limit.
    pub max_inflight_ops: Option<u32>,
    /// Which endpoints may open a session.
    pub identity: IdentityMode,
    /// How TCP connections protect what they carry.
    pub data: DataProtection,
    /// The file with the secret of the cluster.
    pub cluster_secret_file: Option<String>,
    /// The file with the certificates of the authorities whose certificates admit.
    pub tls_ca_file: Option<String>,
    /// The file with the certificate of this endpoint and its chain.
    pub tls_cert_file: Option<String>,
    /// The file with the private key of that certificate.
    pub tls_key_file: Option<String>,
    /// RDMA settings.
    pub rdma: Rdma,
    /// Limits against strangers.
    pub limits: Limits,
}

/// Limits against strangers: what peers may use of an endpoint before and after they are known.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Connections in the handshake at a time. One address may have an eighth of them.
    pub handshakes: u32,
    /// Sessions that peers have opened.
    pub sessions: u32,
    /// The same for one address.
    pub sessions_per_address: u32,
    /// Bulk lanes that a peer may open in a session.
    pub lanes: u16,
    /// Bytes of messages that are arriving. One session may have a sixteenth of them.
    pub message_bytes: u64,
    /// File descriptors of the process that accepting connections leaves free.
    pub free_descriptors: u32,
}

/// RDMA settings.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Rdma {
    /// The devices to use, by name or number. `None`: all usable devices.
    pub devices: Option<String>,
    /// The GID index. `None`: the best one.
    pub gid_index: Option<u32>,
    /// The service level. `None`: 3, or 8 on EFA.
    pub service_level: Option<u8>,
    /// The traffic class.
    pub traffic_class: u8,
    /// The number of outstanding reads that a queue pair starts.
    pub max_rd_atomic: u8,
    /// The number of outstanding reads that a queue pair serves.
    pub max_dest_rd_atomic: u8,
    /// The number of queue pairs for large transfers per device and peer.
    pub queue_pairs: u16,
    /// How often a device retransmits a packet.
    pub retries: u8,
    /// How long a device waits for an acknowledgement.
    pub timeout: Duration,
    /// Whether keys open advertised memory to one queue pair each.
    pub windows: KeyWindows,
}

impl Config {
    /// Builds the configuration from the variables that `lookup` finds. Also returns warnings about
    /// variables that have no effect.
    ///
    /// For each setting, this function looks up the `PEERWAY_*` name first, then the aliases in the
    /// order of the table. An unset or empty variable leaves the default. If two names of one
    /// setting hold different values, a warning names the ignored one.
    ///
    /// # Errors
    ///
    /// Returns an error for the first value that does not parse or is out of range, and for two
    /// settings that contradict each other.
    ///
    /// # Examples
    ///
    /// ```
    /// use peerway_core::config::{Config, Pin};
    ///
    /// let (config, warnings) = Config::from_env(|name| std::env::var(name).ok())?;
    /// # let _ = (config, warnings);
    ///
    /// let (config, _) = Config::from_env(|name| match name {
    ///     "UCCL_P2P_TRANSPORT" => Some("tcp".into()),
    ///     _ => None,
    /// })?;
    /// assert_eq!(config.transport, Pin::Tcp);
    ///
    /// let error = Config::from_env(|name| (name == "PEERWAY_DETECT").then(|| "2".into()))
    ///     .unwrap_err();
    /// assert!(error.to_string().contains("PEERWAY_DETECT"));
    /// # Ok::<(), peerway_core::config::ConfigError>(())
    /// ```
    pub fn from_env(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<(Self, Vec<String>), ConfigError> {
        let mut config = Self::default();
        let mut warnings = Vec::new();
        let mut reserved = Vec::new();
        for setting in SETTINGS {
            let Some(found) = setting.find(&lookup) else { continue };
            if let Some(loser) = found.overruled {
                warnings.push(format!(
                    "{loser} is overruled by {}, which is set to another value",
                    found.name
                ));
            }
            match setting.status {
                Status::Used => setting.apply(&mut config, found.name, &found.value)?,
                // Cluster administrators set NCCL variables for NCCL, so Peerway does not warn
                // about them.
                Status::Reserved(_) if found.name.starts_with("NCCL_") => {}
                Status::Reserved(transport) => {
                    reserved.push(format!("{} ({transport})", found.name));
                }
                Status::AnsweredWithWarning(why) => {
                    warnings.push(format!("{} has no effect: {why}", found.name));
                }
            }
        }
        if !reserved.is_empty() {
            warnings.push(format!(
                "these variables have no effect because this build lacks their transport or feature: {}",
                reserved.join(", ")
            ));
        }
        if config.disable_ipc && config.transport.is_local() {
            return Err(ConfigError::Contradiction {
                one: "PEERWAY_TRANSPORT",
                value: config.transport.to_string(),
                other: "PEERWAY_DISABLE_IPC",
            });
        }
        Ok((config, warnings))
    }

    /// The state before the defaults of the table are applied. Only [`Config::default`] sees it.
    fn blank() -> Self {
        Self {
            transport: Pin::Auto,
            bind: None,
            advertise: None,
            ports: None,
            interfaces: None,
            lanes: None,
            shards: 0,
            copy_threads: 0,
            cpus: None,
            slots: 0,
            detect: Duration::ZERO,
            fence: Duration::ZERO,
            deadline: Duration::ZERO,
            connect_timeout: Duration::ZERO,
            spin: Duration::ZERO,
            log_level: LogLevel::Off,
            disable_ipc: false,
            notify_bytes: 0,
            max_inflight_ops: None,
            identity: IdentityMode::Pinned,
            data: DataProtection::Off,
            cluster_secret_file: None,
            tls_ca_file: None,
            tls_cert_file: None,
            tls_key_file: None,
            rdma: Rdma {
                devices: None,
                gid_index: None,
                service_level: None,
                traffic_class: 0,
                max_rd_atomic: 0,
                max_dest_rd_atomic: 0,
                queue_pairs: 0,
                retries: 0,
                timeout: Duration::ZERO,
                windows: KeyWindows::Auto,
            },
            limits: Limits {
                handshakes: 0,
                sessions: 0,
                sessions_per_address: 0,
                lanes: 0,
                message_bytes: 0,
                free_descriptors: 0,
            },
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        let mut config = Self::blank();
        for setting in SETTINGS.iter().filter(|setting| !setting.default.is_empty()) {
            // The defaults are constants. The test
            // `every_default_parses_and_nothing_set_is_the_default` proves that they parse.
            if let Err(error) = setting.apply(&mut config, setting.name, setting.default) {
                unreachable!("a default in the table of settings does not parse: {error}");
            }
        }
        config
    }
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting does not accept its value.
    #[error("{name}={value:?} is invalid: expected {allowed}")]
    BadValue {
        /// The variable, or the argument that stands for it.
        name: String,
        /// The value, truncated to a readable length.
        value: String,
        /// The values that the setting accepts.
        allowed: String,
    },
    /// Two settings contradict each other.
    #[error("{one}={value} and {other} contradict each other: unset one of them")]
    Contradiction {
        /// The first setting.
        one: &'static str,
        /// Its value.
        value: String,
        /// The second setting: a flag that is on.
        other: &'static str,
    },
    /// No setting has this name.
    #[error("{sentence}")]
    Unknown {
        /// A sentence with the name and, if one is close, the likely setting.
        sentence: String,
    },
}

impl ConfigError {
    /// Creates the error for a name that no setting has.
    pub fn unknown(name: &str) -> Self {
        Self::Unknown { sentence: not_a_setting(name) }
    }

    fn bad_value(name: &'static str, value: &str, allowed: String) -> Self {
        // 80 characters are enough to recognise a value. A variable can hold megabytes.
        let value = match value.char_indices().nth(80) {
            Some((cut, _)) => format!("{}...", &value[..cut]),
            None => value.to_owned(),
        };
        Self::BadValue { name: name.to_owned(), value, allowed }
    }
}

/// How the variables of the project's own tests and tools begin. They are no settings, and no
/// mistakes.
const OF_TESTS: [&str; 6] = [
    "PEERWAY_FAKE_",
    "PEERWAY_FLIP_",
    "PEERWAY_FUZZ_",
    "PEERWAY_SIMULATION",
    "PEERWAY_TEST_",
    "PEERWAY_UPSTREAM",
];

/// Returns a sentence for each name in `names` that starts with `PEERWAY_` but is not a setting,
/// for example because of a typing mistake.
///
/// # Examples
///
/// ```
/// let names = ["PEERWAY_TRANSPROT", "PEERWAY_LANES", "PEERWAY_TEST_LOG", "PATH"];
/// let found = peerway_core::config::unknown(names);
/// assert_eq!(found.len(), 1);
/// assert!(found[0].contains("PEERWAY_TRANSPORT"));
/// ```
pub fn unknown(names: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<String> {
    let names = names.into_iter();
    names
        .filter(|name| name.as_ref().starts_with("PEERWAY_") && !is_ours(name.as_ref()))
        .filter(|name| !OF_TESTS.iter().any(|prefix| name.as_ref().starts_with(prefix)))
        .map(|name| not_a_setting(name.as_ref()))
        .collect()
}

/// Whether a setting has this name or alias.
pub fn is_setting(name: &str) -> bool {
    SETTINGS.iter().any(|setting| setting.names().any(|other| other == name))
}

fn is_ours(name: &str) -> bool {
    SETTINGS.iter().any(|setting| setting.name == name)
}

fn not_a_setting(name: &str) -> String {
    let nearest = SETTINGS
        .iter()
        .map(|setting| (parse::distance(name, setting.name), setting.name))
        .min()
        // Allow two typing mistakes, one of them a swap of neighbours, which counts as two edits. A
        // more distant name is only a guess.
        .filter(|(distance, _)| *distance <= 3);
    match nearest {
        Some((_, nearest)) => format!("{name} is not a setting; did you mean {nearest}?"),
        None => format!("{name} is not a setting"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<(Config, Vec<String>), ConfigError> {
        let map: HashMap<&str, &str> = pairs.iter().copied().collect();
        Config::from_env(|name| map.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn every_default_parses_and_nothing_set_is_the_default() {
        let (config, warnings) = from(&[]).unwrap();
        assert_eq!(config, Config::default());
        assert!(warnings.is_empty());
        assert_eq!(config.transport, Pin::Auto);
        assert_eq!((config.lanes, &config.cpus), (None, &None));
        assert_eq!((config.shards, config.copy_threads, config.slots), (1, 2, 4096));
        assert_eq!(config.detect, Duration::from_secs(2));
        assert_eq!(config.fence, Duration::from_secs(1));
        assert_eq!(config.deadline, Duration::from_secs(30));
        assert_eq!(config.connect_timeout, Duration::from_secs(5));
        assert_eq!(config.spin, Duration::from_micros(50));
        assert_eq!(config.log_level, LogLevel::Warn);
        assert!(!config.disable_ipc);
        assert_eq!(config.notify_bytes, 64 << 20);
        assert_eq!(config.max_inflight_ops, None);
        let rdma = Rdma {
            devices: None,
            gid_index: None,
            service_level: None,
            traffic_class: 104,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            queue_pairs: 2,
            retries: 7,
            timeout: Duration::from_millis(67),
            windows: KeyWindows::Auto,
        };
        assert_eq!(config.rdma, rdma);
    }

    #[test]
    fn names_are_unique_and_used_ones_are_ours() {
        let mut seen = HashSet::new();
        for setting in SETTINGS {
            for name in setting.names() {
                assert!(seen.insert(name), "{name} is in the table twice");
            }
            assert!(!setting.doc.is_empty() && setting.doc.ends_with('.'), "{}", setting.name);
            if setting.status == Status::Used {
                assert!(setting.name.starts_with("PEERWAY_"), "{}", setting.name);
            }
        }
    }

    #[test]
    fn every_variable_of_uccl_is_in_the_table() {
        let known: HashSet<&str> = SETTINGS.iter().flat_map(Setting::names).collect();
        let upstream = "UCCL_P2P_TRANSPORT UCCL_P2P_LOG_LEVEL UCCL_P2P_RDMA_GID_INDEX \
            UCCL_P2P_RDMA_MAX_RD_ATOMIC UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC UCCL_P2P_RDMA_SL \
            UCCL_P2P_RDMA_TC UCCL_P2P_RDMA_DEV UCCL_CXI_DOMAIN UCCL_CXI_DEVICE_INDEX \
            UCCL_CXI_THREADING UCCL_CXI_TX_QUEUE_SIZE UCCL_CXI_RX_QUEUE_SIZE UCCL_CXI_CQ_SIZE \
            UCCL_LIBFABRIC_SO UCCL_P2P_MAX_INFLIGHT_OPS UCCL_P2P_COMPRESS_STRATEGY \
            UCCL_RDMA_ADAPTIVE_SLEEP UCCL_P2P_DISABLE_IPC UCCL_P2P_RDMA_CC \
            UCCL_P2P_RDMA_LINK_GBPS UCCL_P2P_MIN_COMPRESS_BYTES UCCL_P2P_COMPRESS_BUFFER_BYTES \
            UCCL_TCP_OOB_PORT UCCL_TCPX_OOB_PORT UCCL_IBV_SO UCCL_NCCL_SO UCCL_EFA_SO \
            UCCL_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_COMM_ID UCCL_DEBUG \
            UCCL_DEBUG_SUBSYS UCCL_DEBUG_VLOG_LEVEL USE_DIETGPU UCCL_GPU_RT UCCL_GPU_RT_LIB \
            UCCL_RCMODE UCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_IB_HCA";
        for name in upstream.split_whitespace() {
            assert!(known.contains(name), "{name} is not in the table");
        }
    }

    #[test]
    fn our_name_wins_over_an_alias_and_says_so() {
        let (config, warnings) =
            from(&[("PEERWAY_TRANSPORT", "local"), ("UCCL_P2P_TRANSPORT", "tcp")]).unwrap();
        assert_eq!(config.transport, Pin::Local);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("UCCL_P2P_TRANSPORT is overruled by PEERWAY_TRANSPORT"));
        let (_, warnings) =
            from(&[("PEERWAY_TRANSPORT", "tcp"), ("UCCL_P2P_TRANSPORT", "tcp")]).unwrap();
        assert!(warnings.is_empty());
    }

    #[test]
    fn an_empty_value_counts_as_unset() {
        let (config, warnings) =
            from(&[("PEERWAY_DETECT", " "), ("PEERWAY_TRANSPORT", ""), ("PEERWAY_BIND", "")])
                .unwrap();
        assert_eq!(config, Config::default());
        assert!(warnings.is_empty());
    }

    #[test]
    fn values_reach_their_fields() {
        let (config, _) = from(&[
            ("PEERWAY_BIND", "[::1]:7000"),
            ("PEERWAY_ADVERTISE", "192.0.2.7"),
            ("NCCL_SOCKET_IFNAME", "^docker"),
            ("PEERWAY_LANES", "8"),
            ("PEERWAY_SHARDS", "2"),
            ("PEERWAY_COPY_THREADS", "4"),
            ("PEERWAY_CPUS", "8,0-3"),
            ("PEERWAY_SLOTS", "16"),
            ("PEERWAY_DETECT", "500ms"),
            ("PEERWAY_FENCE", "3s"),
            ("PEERWAY_DEADLINE", "2m"),
            ("PEERWAY_CONNECT_TIMEOUT", "1s"),
            ("PEERWAY_SPIN", "0"),
            ("UCCL_P2P_LOG_LEVEL", "INFO"),
            ("UCCL_P2P_DISABLE_IPC", "1"),
            ("PEERWAY_NOTIFY_BYTES", "1MiB"),
            ("UCCL_P2P_MAX_INFLIGHT_OPS", "32"),
            ("PEERWAY_IDENTITY", "Cluster"),
            ("PEERWAY_DATA", "Encrypt"),
            ("PEERWAY_CLUSTER_SECRET_FILE", "/run/secret"),
            ("PEERWAY_TLS_CA_FILE", "/run/ca"),
            ("PEERWAY_TLS_CERT_FILE", "/run/cert"),
            ("PEERWAY_TLS_KEY_FILE", "/run/key"),
            ("UCCL_P2P_RDMA_DEV", "mlx5_0,3"),
            ("UCCL_P2P_RDMA_GID_INDEX", "3"),
            ("UCCL_P2P_RDMA_SL", "5"),
            ("UCCL_P2P_RDMA_TC", "0"),
            ("UCCL_P2P_RDMA_MAX_RD_ATOMIC", "4"),
            ("UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC", "8"),
            ("PEERWAY_RDMA_QUEUE_PAIRS", "1"),
            ("PEERWAY_RDMA_RETRIES", "2"),
            ("PEERWAY_RDMA_TIMEOUT", "5ms"),
        ])
        .unwrap();
        assert_eq!(config.bind.as_deref(), Some("[::1]:7000"));
        assert_eq!(config.advertise.as_deref(), Some("192.0.2.7"));
        assert_eq!(config.interfaces.as_deref(), Some("^docker"));
        assert_eq!(config.lanes, Some(8));
        assert_eq!((config.shards, config.copy_threads, config.slots), (2, 4, 16));
        assert_eq!(config.cpus, Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(config.detect, Duration::from_millis(500));
        assert_eq!(config.fence, Duration::from_secs(3));
        assert_eq!(config.deadline, Duration::from_secs(120));
        assert_eq!(config.connect_timeout, Duration::from_secs(1));
        assert_eq!(config.spin, Duration::ZERO);
        assert_eq!(config.log_level, LogLevel::Info);
        assert!(config.disable_ipc);
        assert_eq!(config.notify_bytes, 1 << 20);
        assert_eq!(config.max_inflight_ops, Some(32));
        assert_eq!(config.identity, IdentityMode::Cluster);
        assert_eq!(config.data, DataProtection::Encrypt);
        assert_eq!(config.cluster_secret_file.as_deref(), Some("/run/secret"));
        assert_eq!(config.tls_ca_file.as_deref(), Some("/run/ca"));
        assert_eq!(config.tls_cert_file.as_deref(), Some("/run/cert"));
        assert_eq!(config.tls_key_file.as_deref(), Some("/run/key"));
        let rdma = Rdma {
            devices: Some("mlx5_0,3".into()),
            gid_index: Some(3),
            service_level: Some(5),
            traffic_class: 0,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 8,
            queue_pairs: 1,
            retries: 2,
            timeout: Duration::from_millis(5),
            windows: KeyWindows::Auto,
        };
        assert_eq!(config.rdma, rdma);
    }

    #[test]
    fn errors_name_the_variable_that_was_set_the_value_and_what_is_allowed() {
        let error = from(&[("UCCL_P2P_TRANSPORT", "carrier-pigeon")]).unwrap_err().to_string();
        for part in ["UCCL_P2P_TRANSPORT", "carrier-pigeon", "local-cma", "tcp"] {
            assert!(error.contains(part), "{error}");
        }
        for (name, value) in [
            ("PEERWAY_LANES", "0"),
            ("PEERWAY_LANES", "65536"),
            ("PEERWAY_LANES", "-1"),
            ("PEERWAY_CPUS", "0-"),
            ("PEERWAY_CPUS", "3-1"),
            ("PEERWAY_CPUS", "all"),
            ("PEERWAY_CPUS", "99999"),
            ("PEERWAY_SLOTS", "4294967296"),
            ("PEERWAY_DETECT", "2"),
            ("PEERWAY_DETECT", "0s"),
            ("PEERWAY_DETECT", "999999999999999999999s"),
            ("PEERWAY_SPIN", "1s"),
            ("PEERWAY_NOTIFY_BYTES", "99999999999GiB"),
            ("PEERWAY_DISABLE_IPC", "maybe"),
            ("PEERWAY_LOG_LEVEL", "loud"),
        ] {
            let error = from(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
            assert!(error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn a_long_value_is_cut_on_a_character() {
        let error = from(&[("PEERWAY_TRANSPORT", &"µ".repeat(5000))]).unwrap_err();
        assert!(error.to_string().len() < 500);
    }

    #[test]
    fn local_pins_contradict_disable_ipc() {
        let error = from(&[("PEERWAY_TRANSPORT", "local-map"), ("PEERWAY_DISABLE_IPC", "1")]);
        assert!(matches!(error, Err(ConfigError::Contradiction { .. })));
        assert!(from(&[("PEERWAY_TRANSPORT", "tcp"), ("PEERWAY_DISABLE_IPC", "1")]).is_ok());
    }

    #[test]
    fn settings_without_effect_say_so() {
        let (config, warnings) = from(&[
            ("UCCL_P2P_RDMA_CC", "swift"),
            ("UCCL_CXI_CQ_SIZE", "8192"),
            ("UCCL_RDMA_ADAPTIVE_SLEEP", "1"),
            ("NCCL_IB_HCA", "mlx5_0"),
        ])
        .unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[0].starts_with("UCCL_P2P_RDMA_CC has no effect"));
        assert!(warnings[1].starts_with("UCCL_RDMA_ADAPTIVE_SLEEP has no effect"));
        assert!(warnings[2].contains("UCCL_CXI_CQ_SIZE (cxi)"));
    }

    #[test]
    fn unknown_names_are_reported_with_the_nearest() {
        let said = unknown(["PEERWAY_LANE", "PEERWAY_QQQQQQQQQQQQ", "HOME", "PEERWAY_SPIN"]);
        assert_eq!(
            said,
            [
                "PEERWAY_LANE is not a setting; did you mean PEERWAY_LANES?",
                "PEERWAY_QQQQQQQQQQQQ is not a setting",
            ]
        );
    }

    proptest! {
        #[test]
        fn no_environment_panics(which in 0..SETTINGS.len(), alias in 0..4usize, value in ".*") {
            let names: Vec<&str> = SETTINGS[which].names().collect();
            let name = names[alias % names.len()];
            match from(&[(name, &value)]) {
                Ok((_, warnings)) => prop_assert!(warnings.len() <= 1),
                Err(error) => prop_assert!(error.to_string().contains(name)),
            }
        }

        #[test]
        fn no_number_and_unit_panics(number in "[-+]?[0-9]{0,30}", unit in "[a-zA-Zµ]{0,4}") {
            let value = format!("{number}{unit}");
            for setting in SETTINGS {
                let _ = from(&[(setting.name, &value)]);
            }
        }

        #[test]
        fn unknown_never_panics(name in ".*", tail in "[A-Z_]{0,40}") {
            let _ = unknown([name, format!("PEERWAY_{tail}")]);
        }
    }
}
