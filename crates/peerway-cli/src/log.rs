//! Logs of the engine on standard error, as much as PEERWAY_LOG_LEVEL asks for.

use peerway_core::config::{Config, LogLevel};
use tracing_subscriber::filter::LevelFilter;

/// Starts logging. A configuration that cannot be used is told by whoever uses it.
pub(crate) fn start() {
    let level = Config::from_env(|name| std::env::var(name).ok())
        .map_or(LogLevel::Warn, |(config, _)| config.log_level);
    // The engine and tracing name levels alike.
    let filter = level.to_string().parse().unwrap_or(LevelFilter::WARN);
    tracing_subscriber::fmt().with_max_level(filter).with_writer(std::io::stderr).init();
}
