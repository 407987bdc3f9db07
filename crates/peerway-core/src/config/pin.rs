//! The settings with a fixed list of words: the transport pin, the log level, the admission of
//! peers and the protection of data.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// The transport that an endpoint must use for its peers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Pin {
    /// The best transport that both sides can use.
    Auto,
    /// Any path that stays on this host.
    Local,
    /// Shared mappings only.
    LocalMap,
    /// Cross-memory attach (`process_vm_readv`) only.
    LocalCma,
    /// The bounce ring only.
    LocalRing,
    /// TCP only, also to peers on this host.
    Tcp,
    /// RDMA verbs only (InfiniBand or RoCE), also to peers on this host.
    Ib,
    /// RDMA by an AWS EFA device only.
    Efa,
    /// A known transport that is not part of this build. An endpoint refuses it and says why.
    Unavailable(&'static str),
}

impl Pin {
    /// The values that [`Pin::from_str`] accepts, for errors and help texts.
    pub const ALLOWED: &str = "auto, local, local-map, local-cma, local-ring, tcp, ib (also rdma or verbs) or efa \
        (known, but not in this build: nccl, tcpx, cxi)";

    /// Whether this pin allows only paths inside this host.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Local | Self::LocalMap | Self::LocalCma | Self::LocalRing)
    }

    /// Whether this pin allows only RDMA devices.
    pub fn is_rdma(self) -> bool {
        matches!(self, Self::Ib | Self::Efa)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Self::Auto,
            "local" => Self::Local,
            "local-map" => Self::LocalMap,
            "local-cma" => Self::LocalCma,
            "local-ring" => Self::LocalRing,
            "tcp" => Self::Tcp,
            "ib" | "rdma" | "verbs" => Self::Ib,
            "efa" => Self::Efa,
            "nccl" => Self::Unavailable("nccl"),
            "tcpx" => Self::Unavailable("tcpx"),
            "cxi" => Self::Unavailable("cxi"),
            _ => return None,
        })
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::LocalMap => "local-map",
            Self::LocalCma => "local-cma",
            Self::LocalRing => "local-ring",
            Self::Tcp => "tcp",
            Self::Ib => "ib",
            Self::Efa => "efa",
            Self::Unavailable(name) => name,
        })
    }
}

impl FromStr for Pin {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text).ok_or_else(|| {
            ConfigError::bad_value("PEERWAY_TRANSPORT", text, Self::ALLOWED.to_owned())
        })
    }
}

/// The log level. Each level includes the levels above it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum LogLevel {
    /// No messages.
    Off,
    /// Failures.
    Error,
    /// Problems that a user should act on.
    Warn,
    /// Life-cycle events of sessions.
    Info,
    /// Details, for example once per transfer.
    Debug,
    /// All messages.
    Trace,
}

impl LogLevel {
    /// The values that [`LogLevel::from_str`] accepts, for errors and help texts.
    pub const ALLOWED: &str = "off, error, warn, info, debug or trace \
        (also UCCL's warning, fatal, abort, version and 0 to 3)";

    pub(super) fn parse(text: &str) -> Option<Self> {
        // UCCL numbers its levels 0 INFO, 1 WARNING, 2 ERROR, 3 FATAL. Peerway has no fatal errors,
        // so FATAL means the level of errors.
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "off" | "none" => Self::Off,
            "error" | "fatal" | "abort" | "2" | "3" => Self::Error,
            "warn" | "warning" | "version" | "1" => Self::Warn,
            "info" | "0" => Self::Info,
            "debug" => Self::Debug,
            "trace" => Self::Trace,
            _ => return None,
        })
    }
}

/// Which endpoints may open a session with an endpoint, and how they show it. Every endpoint proves
/// its own key in any case.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum IdentityMode {
    /// Every endpoint may come in. An opener reaches the endpoint that it dialled, or none.
    Pinned,
    /// Both sides prove that they know the secret of the cluster.
    Cluster,
    /// Both sides prove that they have a certificate of the authority.
    Mtls,
}

impl IdentityMode {
    /// The values that the setting accepts, for errors and help texts.
    pub const ALLOWED: &str = "pinned, cluster or mtls";

    pub(super) fn parse(text: &str) -> Option<Self> {
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "pinned" => Self::Pinned,
            "cluster" => Self::Cluster,
            "mtls" => Self::Mtls,
            _ => return None,
        })
    }
}

impl fmt::Display for IdentityMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned",
            Self::Cluster => "cluster",
            Self::Mtls => "mtls",
        })
    }
}

/// How TCP connections protect what they carry after the handshake. The order is that of
/// strictness: of two settings, a session uses the greater one.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[non_exhaustive]
pub enum DataProtection {
    /// Not at all, beyond the checksum of TCP.
    #[default]
    Off,
    /// A CRC32C for each record. It finds bytes that changed by accident.
    Integrity,
    /// AES-128-GCM for each record. The network can neither read nor change the bytes.
    Encrypt,
}

impl DataProtection {
    /// The values that the setting accepts, for errors and help texts.
    pub const ALLOWED: &str = "off, integrity or encrypt";

    pub(super) fn parse(text: &str) -> Option<Self> {
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "off" => Self::Off,
            "integrity" => Self::Integrity,
            "encrypt" => Self::Encrypt,
            _ => return None,
        })
    }
}

impl FromStr for DataProtection {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text)
            .ok_or_else(|| ConfigError::bad_value("PEERWAY_DATA", text, Self::ALLOWED.to_owned()))
    }
}

impl fmt::Display for DataProtection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Off => "off",
            Self::Integrity => "integrity",
            Self::Encrypt => "encrypt",
        })
    }
}

/// Whether keys of RDMA devices open advertised memory to one queue pair each.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum KeyWindows {
    /// Where the device has type 2 memory windows, and while it has any left.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always. Devices without such windows are not used, and memory for which none is left goes
    /// by frames.
    Require,
}

impl KeyWindows {
    /// The values that the setting accepts, for errors and help texts.
    pub const ALLOWED: &str = "auto, off or require";

    pub(super) fn parse(text: &str) -> Option<Self> {
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Self::Auto,
            "off" => Self::Off,
            "require" => Self::Require,
            _ => return None,
        })
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        })
    }
}

impl FromStr for LogLevel {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text).ok_or_else(|| {
            ConfigError::bad_value("PEERWAY_LOG_LEVEL", text, Self::ALLOWED.to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_protection_is_the_greater_one() {
        use DataProtection::{Encrypt, Integrity, Off};
        assert!(Off < Integrity && Integrity < Encrypt);
        assert_eq!(DataProtection::default(), Off);
        for mode in [Off, Integrity, Encrypt] {
            assert_eq!(DataProtection::parse(&mode.to_string()), Some(mode));
        }
        assert_eq!(DataProtection::parse("tls"), None);
    }

    #[test]
    fn pins_read_back_as_they_are_shown() {
        for pin in [
            Pin::Auto,
            Pin::Local,
            Pin::LocalMap,
            Pin::LocalCma,
            Pin::LocalRing,
            Pin::Tcp,
            Pin::Ib,
            Pin::Efa,
            Pin::Unavailable("nccl"),
            Pin::Unavailable("tcpx"),
            Pin::Unavailable("cxi"),
        ] {
            assert_eq!(pin.to_string().parse(), Ok(pin));
            assert!(Pin::ALLOWED.contains(&pin.to_string()));
        }
        assert_eq!(" TCP ".parse(), Ok(Pin::Tcp));
        assert_eq!("rdma".parse(), Ok(Pin::Ib));
        assert_eq!("verbs".parse(), Ok(Pin::Ib));
        assert!("".parse::<Pin>().is_err());
    }

    #[test]
    fn levels_read_back_and_are_ordered() {
        for level in [
            LogLevel::Off,
            LogLevel::Error,
            LogLevel::Warn,
            LogLevel::Info,
            LogLevel::Debug,
            LogLevel::Trace,
        ] {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!(LogLevel::Error < LogLevel::Trace);
        assert_eq!("FATAL".parse(), Ok(LogLevel::Error));
        assert_eq!("0".parse(), Ok(LogLevel::Info));
    }
}
