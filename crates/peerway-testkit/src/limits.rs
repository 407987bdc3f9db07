//! Resource limits of this process.

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of file descriptors to the hard limit and returns it.
pub fn raise_descriptors() -> Result<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    set(maximum)?;
    Ok(maximum.unwrap_or(u64::MAX))
}

/// Limits this process to descriptors below `most`. Open descriptors stay open.
pub fn lower_descriptors(most: u64) -> Result<()> {
    set(Some(most))
}

fn set(current: Option<u64>) -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current, maximum })
        .context("setting the limit of file descriptors")
}
