//! Logs of the engine on standard error, as much as PEERWAY_LOG_LEVEL asks for.

use peerway_core::config::{Config, LogLevel};
use tracing_subscriber::filter::LevelFilter;

/// Starts logging. A configuration that cannot be used is told by whoever uses it.
pub(crate) fn start() {
    let level = Config::from_env(|name| std::env::var(name).ok())
        .map_or(LogLevel::Warn, |(config, _)| config.log_level);
    let filter = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt().with_max_level(filter).with_writer(std::io::stderr).init();
}
