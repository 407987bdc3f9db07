//! Files that are put into their places all together, or not at all.
//!
//! Every file is first made under a temporary name in its directory. [`FileSet::commit`] then
//! renames them one after the other. Where a step fails, what was replaced is put back, and what was
//! made is removed, directories included. A program that has an old file mapped keeps it.
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
    /// Directories that were made, in that order.
    made: Vec<PathBuf>,
}

#[derive(Debug)]
struct Step {
    /// The place of the file.
    place: PathBuf,
    /// The new file; none where the place is to be empty.
    new: Option<PathBuf>,
    /// What was in the place, from the moment it is replaced.
    old: Option<PathBuf>,
    /// Whether the place has its new content.
    done: bool,
}

impl FileSet {
    /// Makes a directory, and those above it that do not exist.
    ///
    /// # Errors
    ///
    /// Where the operating system refuses.
    #[allow(dead_code, reason = "of the two programs that include this file, one needs it")]
    pub(crate) fn make_directory(&mut self, directory: &Path) -> anyhow::Result<()> {
        let is_missing = |d: &&Path| !d.as_os_str().is_empty() && !d.exists();
        let missing: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
        for directory in missing.into_iter().rev() {
            fs::create_dir(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
            self.made.push(directory.to_owned());
        }
        Ok(())
    }

    /// Adds a file, which `make` makes under the name that it is given.
    ///
    /// # Errors
    ///
    /// Where `make` fails.
    pub(crate) fn add(
        &mut self,
        place: &Path,
        make: impl FnOnce(&Path) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let new = beside(place, "new");
        // Left by a process of the same number that was killed.
        let _ = fs::remove_file(&new);
        // Pushed first: what a failed call leaves behind is removed with the rest.
        self.steps.push(Step { place: place.into(), new: Some(new), old: None, done: false });
        make(&beside(place, "new")).with_context(|| format!("cannot write {}", place.display()))
    }

    /// Adds a copy of a file.
    ///
    /// # Errors
    ///
    /// Where it cannot be read or written.
    pub(crate) fn add_copy(&mut self, from: &Path, place: &Path) -> anyhow::Result<()> {
        self.add(place, |new| fs::copy(from, new).map(drop))
            .with_context(|| format!("cannot copy {}", from.display()))
    }

    /// Adds the removal of a file that exists.
    #[allow(dead_code, reason = "of the two programs that include this file, one needs it")]
    pub(crate) fn remove(&mut self, place: &Path) {
        self.steps.push(Step { place: place.into(), new: None, old: None, done: false });
    }

    /// Puts every file into its place.
    ///
    /// # Errors
    ///
    /// Where one cannot be. Everything is as it was then, as far as the operating system allows.
    pub(crate) fn commit(mut self) -> anyhow::Result<()> {
        for step in &mut self.steps {
            step.run().with_context(|| match step.new {
                Some(_) => format!("cannot write {}", step.place.display()),
                None => format!("cannot remove {}", step.place.display()),
            })?;
        }
        for step in self.steps.drain(..) {
            if let Some(old) = step.old {
                // The new files are in place. An old one that stays under its temporary name does no harm.
                let _ = fs::remove_file(old);
            }
        }
        self.made.clear();
        Ok(())
    }
}

impl Drop for FileSet {
    fn drop(&mut self) {
        // After a commit there is nothing left to take back.
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
            // A second name keeps the place filled until the new file takes it. Some file systems
            // have no second names.
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

    /// Takes it back, whether it was carried out, half of it, or not at all. Best effort: the error
    /// that is reported is the one that led here.
    fn undo(self) {
        if let Some(old) = &self.old {
            // Renaming one name of a file onto another name of it does nothing, so both are handled.
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

/// A temporary name in the directory of a file.
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

        /// Every file and what it contains.
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
        assert!(!place.0.join("put").exists(), "nothing is in place before the commit");
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
        // A directory is not replaced by a file.
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
