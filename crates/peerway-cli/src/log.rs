//! Engine logs on standard error, at the level that PEERWAY_LOG_LEVEL sets.

use peerway_core::config::{Config, LogLevel};
use tracing_subscriber::filter::LevelFilter;

/// Starts logging. This function ignores an invalid configuration: the subcommand that uses the
/// configuration reports the error.
pub(crate) fn start() {
    let level = Config::from_env(|name| std::env::var(name).ok())
        .map_or(LogLevel::Warn, |(config, _)| config.log_level);
    // The engine and `tracing` use the same level names.
    let filter = level.to_string().parse().unwrap_or(LevelFilter::WARN);
    tracing_subscriber::fmt().with_max_level(filter).with_writer(std::io::stderr).init();
}
