//! The engine's log on standard error: what RUST_LOG selects, or else the level that
//! PEERWAY_LOG_LEVEL sets.

use std::sync::Once;

use peerway_core::config::{Config, LogLevel};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Starts logging. The first endpoint calls this, because loading the library must have no effect.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // The endpoint under construction reports an invalid configuration, so this ignores it.
        let level = Config::from_env(|name| std::env::var(name).ok())
            .map_or(LogLevel::Warn, |(config, _)| config.log_level);
        // The engine and `tracing` use the same level names.
        let level: LevelFilter = level.to_string().parse().unwrap_or(LevelFilter::WARN);
        let filter = EnvFilter::builder().with_default_directive(level.into()).from_env_lossy();
        // Other code of the process may already have set a subscriber. Keep that one.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .try_init();
    });
}
