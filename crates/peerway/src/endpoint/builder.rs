//! Settings of an endpoint: the builder first, then the environment, then the default.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use peerway_core::config::{self, Config, ConfigError, Pin};

use crate::endpoint::Endpoint;
use crate::error::BuildError;

/// Settings of an endpoint to build. Settings that are absent here come from the environment
/// (`peerway doctor --config` lists the variables).
#[derive(Clone, Debug, Default)]
pub struct Builder {
    bind: Option<SocketAddr>,
    advertise: Option<IpAddr>,
    interfaces: Option<String>,
    rdma_devices: Option<String>,
    transport: Option<Pin>,
    deadline: Option<Duration>,
    detect: Option<Duration>,
    fence: Option<Duration>,
    connect_timeout: Option<Duration>,
    spin: Option<Duration>,
    lanes: Option<u16>,
    shards: Option<u16>,
    copy_threads: Option<u16>,
    slots: Option<u32>,
    notify_bytes: Option<u64>,
    settings: Vec<(String, String)>,
}

impl Builder {
    /// Listens on this address. Port 0 chooses a free port.
    pub fn bind(mut self, addr: SocketAddr) -> Self {
        self.bind = Some(addr);
        self
    }

    /// Advertises this address to peers instead of the bound one.
    pub fn advertise(mut self, addr: IpAddr) -> Self {
        self.advertise = Some(addr);
        self
    }

    /// Uses these network interfaces: prefixes of names, separated by commas (`eth0,eth1`). Bulk
    /// lanes alternate between them.
    pub fn interfaces(mut self, filter: impl Into<String>) -> Self {
        self.interfaces = Some(filter.into());
        self
    }

    /// Uses these RDMA devices, separated by commas: names, or numbers in the order of `peerway
    /// doctor`.
    pub fn rdma_devices(mut self, devices: impl Into<String>) -> Self {
        self.rdma_devices = Some(devices.into());
        self
    }

    /// Allows only this transport. A peer that it cannot reach is an error that says why.
    pub fn transport(mut self, pin: Pin) -> Self {
        self.transport = Some(pin);
        self
    }

    /// The deadline of transfers that set none.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// The time of silence after which a peer counts as dead.
    pub fn detect(mut self, detect: Duration) -> Self {
        self.detect = Some(detect);
        self
    }

    /// How long a cancel or revoke waits for its fence.
    pub fn fence(mut self, fence: Duration) -> Self {
        self.fence = Some(fence);
        self
    }

    /// The time limit of a connect, an import and a half-open connection.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How long a waiting thread polls before it blocks.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = Some(spin);
        self
    }

    /// Bulk lanes per TCP peer.
    pub fn lanes(mut self, lanes: u16) -> Self {
        self.lanes = Some(lanes);
        self
    }

    /// The number of progress threads. Peers are spread over them.
    pub fn shards(mut self, shards: u16) -> Self {
        self.shards = Some(shards);
        self
    }

    /// Threads that may copy for one large local transfer.
    pub fn copy_threads(mut self, threads: u16) -> Self {
        self.copy_threads = Some(threads);
        self
    }

    /// The most transfers in flight.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = Some(slots);
        self
    }

    /// The most bytes of notifications that wait for the application.
    pub fn notify_bytes(mut self, bytes: u64) -> Self {
        self.notify_bytes = Some(bytes);
        self
    }

    /// Sets the value of an environment variable for this endpoint alone (`docs/configuration.md`
    /// lists them). It takes precedence over the environment, and the methods above take precedence
    /// over it. Use it in programs that get their settings as text.
    ///
    /// ```
    /// use peerway::Endpoint;
    ///
    /// let endpoint = Endpoint::builder().setting("PEERWAY_DEADLINE", "5s").build()?;
    /// let error = Endpoint::builder().setting("PEERWAY_DEADLNE", "5s").build().unwrap_err();
    /// let text = error.to_string();
    /// assert_eq!(text, "PEERWAY_DEADLNE is not a setting; did you mean PEERWAY_DEADLINE?");
    /// # Ok::<(), peerway::BuildError>(())
    /// ```
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Builds the endpoint. It listens when this returns.
    pub fn build(self) -> Result<Endpoint, BuildError> {
        let given = |name: &str| {
            let (_, value) = self.settings.iter().rev().find(|(other, _)| other == name)?;
            (!value.trim().is_empty()).then(|| value.clone())
        };
        if let Some((name, _)) = self.settings.iter().find(|(name, _)| !config::is_setting(name)) {
            return Err(BuildError::Config(ConfigError::unknown(name)));
        }
        let (mut config, warnings) =
            Config::from_env(|name| given(name).or_else(|| std::env::var(name).ok()))?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        let set = |into: &mut Duration, value: Option<Duration>| {
            *into = value.unwrap_or(*into).max(Duration::from_micros(1));
        };
        config.interfaces = self.interfaces.or(config.interfaces);
        config.rdma.devices = self.rdma_devices.or(config.rdma.devices);
        config.transport = self.transport.unwrap_or(config.transport);
        set(&mut config.deadline, self.deadline);
        set(&mut config.detect, self.detect);
        set(&mut config.fence, self.fence);
        set(&mut config.connect_timeout, self.connect_timeout);
        // Spinning is for short waits. A longer wait must block, so the value is capped.
        config.spin = self.spin.unwrap_or(config.spin).min(Duration::from_secs(1));
        // The same bounds as for the environment: a peer refuses more lanes, and more threads only
        // compete.
        let few = |count: u16| count.clamp(1, 64);
        config.lanes = self.lanes.or(config.lanes).map(few);
        config.shards = few(self.shards.unwrap_or(config.shards));
        config.copy_threads = few(self.copy_threads.unwrap_or(config.copy_threads));
        config.slots = self.slots.unwrap_or(config.slots).clamp(1, 1 << 20);
        config.notify_bytes = self.notify_bytes.unwrap_or(config.notify_bytes);
        if config.disable_ipc && config.transport.is_local() {
            return Err(BuildError::Config(ConfigError::Contradiction {
                one: "PEERWAY_TRANSPORT",
                value: config.transport.to_string(),
                other: "PEERWAY_DISABLE_IPC",
            }));
        }
        if let Pin::Unavailable(name) = config.transport {
            return Err(BuildError::TransportUnavailable(name.to_owned()));
        }
        Endpoint::start(config, self.bind, self.advertise)
    }
}
