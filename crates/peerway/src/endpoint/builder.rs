//! Settings of an endpoint: the builder first, then the environment, then the default.

use std::net::{IpAddr, SocketAddr};
use std::sync::Once;
use std::time::Duration;

use peerway_core::config::{self, Config, ConfigError, Kind, Pin, SETTINGS};

use crate::address;
use crate::endpoint::Endpoint;
use crate::error::BuildError;

/// Settings of an endpoint to build. Settings that are absent here come from the environment
/// (`peerway doctor --config` lists the variables).
///
/// Each method below stands for a variable, and its value has the same bounds. [`Self::build`]
/// fails if a number is out of bounds or a time is too short; a time that is too long means the
/// longest. The last call counts.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    bind: Option<SocketAddr>,
    advertise: Option<IpAddr>,
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
    pub fn interfaces(self, filter: impl Into<String>) -> Self {
        self.setting("PEERWAY_INTERFACES", filter)
    }

    /// Uses these RDMA devices, separated by commas: names, or numbers in the order of `peerway
    /// doctor`.
    pub fn rdma_devices(self, devices: impl Into<String>) -> Self {
        self.setting("PEERWAY_RDMA_DEV", devices)
    }

    /// Allows only this transport. A peer that it cannot reach is an error that says why.
    pub fn transport(self, pin: Pin) -> Self {
        self.setting("PEERWAY_TRANSPORT", pin.to_string())
    }

    /// The deadline of transfers that set none.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.time("PEERWAY_DEADLINE", deadline)
    }

    /// The time of silence after which a peer counts as dead.
    pub fn detect(self, detect: Duration) -> Self {
        self.time("PEERWAY_DETECT", detect)
    }

    /// How long a cancel or revoke waits for its fence.
    pub fn fence(self, fence: Duration) -> Self {
        self.time("PEERWAY_FENCE", fence)
    }

    /// The time limit of a connect, an import and a half-open connection.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        self.time("PEERWAY_CONNECT_TIMEOUT", timeout)
    }

    /// How long a waiting thread polls before it blocks.
    pub fn spin(self, spin: Duration) -> Self {
        self.time("PEERWAY_SPIN", spin)
    }

    /// Bulk lanes per TCP peer.
    pub fn lanes(self, lanes: u16) -> Self {
        self.setting("PEERWAY_LANES", lanes.to_string())
    }

    /// The number of progress threads. Peers are spread over them.
    pub fn shards(self, shards: u16) -> Self {
        self.setting("PEERWAY_SHARDS", shards.to_string())
    }

    /// Threads that may copy for one large local transfer.
    pub fn copy_threads(self, threads: u16) -> Self {
        self.setting("PEERWAY_COPY_THREADS", threads.to_string())
    }

    /// The most transfers in flight.
    pub fn slots(self, slots: u32) -> Self {
        self.setting("PEERWAY_SLOTS", slots.to_string())
    }

    /// The most bytes of notifications that wait for the application.
    pub fn notify_bytes(self, bytes: u64) -> Self {
        // No endpoint keeps more than a terabyte, which is the most that the setting allows.
        self.setting("PEERWAY_NOTIFY_BYTES", bytes.min(1 << 40).to_string())
    }

    /// A longer time than the setting allows means the longest.
    fn time(self, name: &str, time: Duration) -> Self {
        let longest = SETTINGS.iter().find(|setting| setting.name == name).map(|s| s.kind);
        let time = match longest {
            Some(Kind::Time { max, .. }) => time.min(max),
            _ => time,
        };
        self.setting(name, config::show_duration(time))
    }

    /// Sets the value of an environment variable for this endpoint alone (`docs/configuration.md`
    /// lists them). It takes precedence over the environment. Use it in programs that get their
    /// settings as text.
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
    ///
    /// # Errors
    ///
    /// A setting is unknown or out of bounds, a pinned transport cannot be used, or the endpoint
    /// cannot listen.
    pub fn build(self) -> Result<Endpoint, BuildError> {
        let (config, warnings) = self.config()?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        warn_of_unknown_variables();
        if let Pin::Unavailable(name) = config.transport {
            return Err(BuildError::TransportUnavailable(name.to_owned()));
        }
        Endpoint::start(config, self.bind)
    }

    /// The addresses on which an endpoint with these settings would listen. Opens nothing.
    ///
    /// # Errors
    ///
    /// A setting is unknown or out of bounds, or no interface has the name that is asked for.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, BuildError> {
        let places = address::places(&self.config()?.0, self.bind)?;
        Ok(places.bind.iter().map(SocketAddr::ip).collect())
    }

    fn config(&self) -> Result<(Config, Vec<String>), BuildError> {
        let given = |name: &str| {
            let (_, value) = self.settings.iter().rev().find(|(other, _)| other == name)?;
            (!value.trim().is_empty()).then(|| value.clone())
        };
        if let Some((name, _)) = self.settings.iter().find(|(name, _)| !config::is_setting(name)) {
            return Err(BuildError::Config(ConfigError::unknown(name)));
        }
        // A setting of the builder hides every name that the environment has for it.
        let hides = |name: &str| {
            let setting = SETTINGS.iter().find(|setting| setting.names().any(|n| n == name));
            setting.is_some_and(|setting| setting.names().any(|name| given(name).is_some()))
        };
        let lookup = |name: &str| match given(name) {
            None if !hides(name) => std::env::var(name).ok(),
            value => value,
        };
        let (mut config, warnings) = Config::from_env(lookup).map_err(|error| match error {
            // The environment is not to blame for a value of the builder.
            ConfigError::BadValue { name, value, allowed } if given(&name).is_some() => {
                let argument = name.trim_start_matches("PEERWAY_").to_lowercase();
                ConfigError::BadValue { name: format!("{argument} ({name})"), value, allowed }
            }
            error => error,
        })?;
        if let Some(addr) = self.advertise {
            config.advertise = Some(addr.to_string());
        }
        Ok((config, warnings))
    }
}

/// Warns of variables that look like settings, once for the process.
fn warn_of_unknown_variables() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for sentence in config::unknown(names) {
            tracing::warn!("{sentence}");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_bounds_of_their_settings() {
        let (zero, builder) = (Duration::ZERO, Endpoint::builder);
        for (wrong, text) in [
            (builder().lanes(1000), "lanes (PEERWAY_LANES)=\"1000\""),
            (builder().lanes(0), "lanes (PEERWAY_LANES)=\"0\""),
            (builder().deadline(zero), "deadline (PEERWAY_DEADLINE)=\"0\""),
            (builder().slots(0), "slots (PEERWAY_SLOTS)=\"0\""),
        ] {
            let error = wrong.build().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn a_time_that_is_too_long_means_the_longest() {
        let builder = Endpoint::builder().deadline(Duration::MAX).spin(Duration::from_secs(1));
        let config = builder.config().unwrap().0;
        assert_eq!(config.deadline, Duration::from_secs(24 * 3600));
        assert_eq!(config.spin, Duration::from_millis(10));
    }

    #[test]
    fn the_last_call_counts() {
        let config = |builder: Builder| builder.config().unwrap().0;
        let text = |builder: Builder| builder.setting("PEERWAY_LANES", "3");
        assert_eq!(config(text(Endpoint::builder().lanes(2))).lanes, Some(3));
        assert_eq!(config(text(Endpoint::builder()).lanes(2)).lanes, Some(2));
    }
}
