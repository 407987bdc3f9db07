//! Locks between the processes of a run, for what only one may do at a time.

use std::fs::{self, File};

use anyhow::Context;

use crate::test::target_directory;

/// Waits for the lock of this name. Dropping the file releases it, as does the end of the process.
pub(crate) fn hold(name: &str) -> anyhow::Result<File> {
    let directory = target_directory();
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let path = directory.join(format!("{name}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}
