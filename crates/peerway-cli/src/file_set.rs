//! Installs several files as one transaction: all of them, or none.
//!
//! Every file is first written under a temporary name in its directory. [`FileSet::commit`] then
//! renames the files one after the other. If a step fails, the old files are restored and the new
//! files and directories are removed. A program that has mapped an old file keeps its mapping.
//!
//! `xtask` includes this file too, for `install-c`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct FileSet {
    steps: Vec<Step>,
    /// Directories that this set created, in order of creation.
    made: Vec<PathBuf>,
}

#[derive(Debug)]
struct Step {
    /// The final path of the file.
    place: PathBuf,
    /// The temporary path of the new file. `None` if the step removes the file.
    new: Option<PathBuf>,
    /// The temporary path of the old file. It is set when the step replaces or removes the file.
    old: Option<PathBuf>,
    /// Whether the step is complete.
    done: bool,
}

impl FileSet {
    /// Creates a directory and its missing parents.
    ///
    /// # Errors
    ///
    /// If the operating system refuses to create a directory.
    #[allow(dead_code, reason = "only one of the two programs that include this file needs it")]
    pub(crate) fn make_directory(&mut self, directory: &Path) -> anyhow::Result<()> {
        let is_missing = |d: &&Path| !d.as_os_str().is_empty() && !d.exists();
        let missing: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
        for directory in missing.into_iter().rev() {
            fs::create_dir(directory)
                .with_context(|| format!("cannot create directory {}", directory.display()))?;
            self.made.push(directory.to_owned());
        }
        Ok(())
    }

    /// Adds a file. `make` writes it to the temporary path that it receives.
    ///
    /// # Errors
    ///
    /// If `make` fails.
    pub(crate) fn add(
        &mut self,
        place: &Path,
        make: impl FnOnce(&Path) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let new = beside(place, "new");
        // A killed process with the same process id may have left this file.
        let _ = fs::remove_file(&new);
        // Pushed before the call, so that `Drop` also removes what a failed `make` leaves behind.
        self.steps.push(Step { place: place.into(), new: Some(new), old: None, done: false });
        make(&beside(place, "new")).with_context(|| format!("cannot write {}", place.display()))
    }

    /// Adds a copy of a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or written.
    pub(crate) fn add_copy(&mut self, from: &Path, place: &Path) -> anyhow::Result<()> {
        self.add(place, |new| fs::copy(from, new).map(drop))
            .with_context(|| format!("cannot copy {}", from.display()))
    }

    /// Adds the removal of a file that exists.
    #[allow(dead_code, reason = "only one of the two programs that include this file needs it")]
    pub(crate) fn remove(&mut self, place: &Path) {
        self.steps.push(Step { place: place.into(), new: None, old: None, done: false });
    }

    /// Moves every file to its final path.
    ///
    /// # Errors
    ///
    /// If a step fails. The previous state is then restored, as far as the operating system allows.
    pub(crate) fn commit(mut self) -> anyhow::Result<()> {
        for step in &mut self.steps {
            step.run().with_context(|| match step.new {
                Some(_) => format!("cannot write {}", step.place.display()),
                None => format!("cannot remove {}", step.place.display()),
            })?;
        }
        for step in self.steps.drain(..) {
            if let Some(old) = step.old {
                // The new files are in place. An old file that keeps its temporary name does no
                // harm.
                let _ = fs::remove_file(old);
            }
        }
        self.made.clear();
        Ok(())
    }
}

impl Drop for FileSet {
    fn drop(&mut self) {
        // After a commit both lists are empty.
        while let Some(step) = self.steps.pop() {
            step.undo();
        }
        while let Some(directory) = self.made.pop() {
            let _ = fs::remove_dir(directory);
        }
    }
}

impl Step {
    fn run(&mut self) -> io::Result<()> {
        if let Ok(there) = fs::symlink_metadata(&self.place) {
            if there.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let old = beside(&self.place, "old");
            // A hard link keeps the file in place until the new file replaces it. Some file systems
            // do not support hard links.
            if self.new.is_none() || fs::hard_link(&self.place, &old).is_err() {
                fs::rename(&self.place, &old)?;
            }
            self.old = Some(old);
        }
        if let Some(new) = &self.new {
            fs::rename(new, &self.place)?;
        }
        self.done = true;
        Ok(())
    }

    /// Reverts the step, whether it is complete, partial or not started. Errors are ignored: the
    /// caller reports the error that caused the revert.
    fn undo(self) {
        if let Some(old) = &self.old {
            // If both paths are hard links of one file, `rename` does nothing, so the old path must
            // be removed too.
            let _ = fs::rename(old, &self.place);
            let _ = fs::remove_file(old);
        } else if self.done {
            let _ = fs::remove_file(&self.place);
        }
        if let Some(new) = &self.new {
            let _ = fs::remove_file(new);
        }
    }
}

/// A temporary path in the directory of `place`.
fn beside(place: &Path, word: &str) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    place.with_file_name(format!(".{name}.{word}.{}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let name = format!("peerway-file-set-{name}-{}", std::process::id());
            let place = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&place);
            fs::create_dir(&place).unwrap();
            Self(place)
        }

        /// Every file with its content.
        fn files(&self) -> BTreeMap<String, String> {
            let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap());
            let pairs = entries.map(|entry| {
                let text = fs::read_to_string(entry.path()).unwrap_or_else(|_| "(none)".into());
                (entry.file_name().into_string().unwrap(), text)
            });
            pairs.collect()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn written(text: &'static str) -> impl FnOnce(&Path) -> io::Result<()> {
        move |new| fs::write(new, text)
    }

    #[test]
    fn all_files_are_put_replaced_and_removed_at_once() {
        let place = Place::new("all");
        fs::write(place.0.join("replaced"), "before").unwrap();
        fs::write(place.0.join("removed"), "before").unwrap();
        let mut files = FileSet::default();
        files.add(&place.0.join("replaced"), written("after")).unwrap();
        files.add(&place.0.join("put"), written("after")).unwrap();
        files.remove(&place.0.join("removed"));
        assert!(!place.0.join("put").exists(), "the file is in place before the commit");
        files.commit().unwrap();
        let after = ["put", "replaced"].map(|name| (name.into(), "after".into()));
        assert_eq!(place.files(), BTreeMap::from(after));
    }

    #[test]
    fn a_step_that_fails_takes_the_others_back() {
        let place = Place::new("fails");
        for name in ["removed", "replaced", "untouched"] {
            fs::write(place.0.join(name), "before").unwrap();
        }
        // A file cannot replace a directory.
        fs::create_dir(place.0.join("blocked")).unwrap();
        let before = place.files();
        let mut files = FileSet::default();
        files.remove(&place.0.join("removed"));
        files.add(&place.0.join("replaced"), written("after")).unwrap();
        files.add(&place.0.join("put"), written("after")).unwrap();
        files.add(&place.0.join("blocked"), written("after")).unwrap();
        files.add(&place.0.join("untouched"), written("after")).unwrap();
        let error = files.commit().unwrap_err();
        assert!(error.to_string().contains("blocked"), "{error}");
        assert_eq!(place.files(), before);
    }

    #[test]
    fn a_file_that_cannot_be_made_leaves_nothing_behind() {
        let place = Place::new("made");
        let mut files = FileSet::default();
        files.make_directory(&place.0.join("a/b")).unwrap();
        files.add(&place.0.join("a/b/first"), written("after")).unwrap();
        let missing = place.0.join("missing");
        let error = files.add_copy(&missing, &place.0.join("a/b/second")).unwrap_err();
        assert!(format!("{error:#}").contains("missing"), "{error:#}");
        drop(files);
        assert_eq!(place.files(), BTreeMap::new());
    }
}
