//! The engine's log on standard error, as much as PEERWAY_LOG_LEVEL asks for.

use std::sync::Once;

use peerway_core::config::{Config, LogLevel};
use tracing_subscriber::filter::LevelFilter;

/// Starts logging, with the first endpoint: to load the library must have no effect.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // A configuration that cannot be used is told by the endpoint that is being made.
        let level = Config::from_env(|name| std::env::var(name).ok())
            .map_or(LogLevel::Warn, |(config, _)| config.log_level);
        // The engine and tracing name levels alike.
        let filter = level.to_string().parse().unwrap_or(LevelFilter::WARN);
        let _ = tracing_subscriber::fmt()
            .with_max_level(filter)
            .with_writer(std::io::stderr)
            .try_init();
    });
}
