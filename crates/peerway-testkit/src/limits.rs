//! Limits of this process.

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Allows this process as many file descriptors as it may allow itself; returns how many.
pub fn raise_descriptors() -> Result<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    set(maximum)?;
    Ok(maximum.unwrap_or(u64::MAX))
}

/// Allows this process only descriptors below `most`. Those that are open stay open.
pub fn lower_descriptors(most: u64) -> Result<()> {
    set(Some(most))
}

fn set(current: Option<u64>) -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).context("the limit of descriptors")
}
