//! Engine logs on standard error: what RUST_LOG selects, or else the level that PEERWAY_LOG_LEVEL
//! sets.

use peerway_core::config::{self, Config, LogLevel, SETTINGS};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::output;

/// Starts logging. `default` is the level where no environment variable sets one. This function
/// ignores an invalid configuration: the subcommand that uses the configuration reports the error.
pub(crate) fn start(default: LogLevel) {
    let level = match Config::from_env(variable) {
        Ok((config, _)) if is_level_set() => config.log_level,
        _ => default,
    };
    // The engine and `tracing` use the same level names.
    let level: LevelFilter = level.to_string().parse().unwrap_or(LevelFilter::WARN);
    let filter = EnvFilter::builder().with_default_directive(level.into()).from_env_lossy();
    // A failed write is reported on standard error by default, with a panic if that is closed.
    let log = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    log.with_writer(std::io::stderr).init();
}

/// Prints each warning about the settings once, for a subcommand that hides the engine's warnings
/// by default. Where a variable sets the level, the engine logs these warnings.
pub(crate) fn report_settings() {
    if let (false, Ok((_, mut warnings))) = (is_level_set(), Config::from_env(variable)) {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        warnings.extend(config::unknown(names));
        for warning in warnings {
            output::report_line(format_args!("peerway: warning: {warning}"));
        }
    }
}

fn is_level_set() -> bool {
    SETTINGS
        .iter()
        .any(|setting| setting.name == "PEERWAY_LOG_LEVEL" && setting.find(variable).is_some())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
