//! Where a run writes: files, and the two standard streams.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Serialize;

use super::document::Document;
use crate::file_set::FileSet;
use crate::output;

/// The outputs of a run.
#[derive(Debug)]
pub(crate) struct Outputs {
    json: Option<Target>,
    plot: Option<Target>,
}

#[derive(Debug)]
enum Target {
    StandardOutput,
    /// A regular file. It is replaced by a rename, so that no reader sees half a file.
    File(PathBuf),
    /// A device or a pipe, which a rename would replace.
    Device(PathBuf),
}

impl Outputs {
    /// Checks that the files can be written, so that a wrong name does not cost a whole run.
    pub(crate) fn open(json: Option<&Path>, plot: Option<&Path>) -> anyhow::Result<Self> {
        let json = match json {
            Some(path) if path.as_os_str() == "-" => Some(Target::StandardOutput),
            path => path.map(Target::new).transpose()?,
        };
        Ok(Self { json, plot: plot.map(Target::new).transpose()? })
    }

    /// Whether a file is wanted. Then a run continues after the reader has closed standard output.
    pub(crate) fn has_files(&self) -> bool {
        let is_file = |target: &Option<Target>| {
            target.as_ref().is_some_and(|target| !matches!(target, Target::StandardOutput))
        };
        is_file(&self.json) || is_file(&self.plot)
    }

    /// Shows a text to the user: on standard output, or on standard error if the JSON goes to
    /// standard output.
    pub(crate) fn show(&self, text: &str) -> anyhow::Result<()> {
        match &self.json {
            Some(Target::StandardOutput) => {
                output::report(text);
                Ok(())
            }
            _ => output::print(text),
        }
    }

    /// Writes the JSON, if it is wanted.
    pub(crate) fn save<R: Serialize>(&self, document: &Document<'_, R>) -> anyhow::Result<()> {
        self.json.as_ref().map_or(Ok(()), |target| target.write(&document.text()?))
    }

    /// Writes the plot, if it is wanted.
    pub(crate) fn draw(&self, svg: impl FnOnce() -> String) -> anyhow::Result<()> {
        self.plot.as_ref().map_or(Ok(()), |target| target.write(&svg()))
    }

    /// Writes a finished table and its rows.
    pub(crate) fn rows<R: Serialize>(&self, text: &str, rows: &[R]) -> anyhow::Result<()> {
        // The file comes first, so that it is complete even if standard output is closed.
        if self.has_files() {
            self.save(&Document::new(rows))?;
            return self.show(text);
        }
        self.show(text)?;
        self.save(&Document::new(rows))
    }
}

impl Target {
    fn new(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write {}", path.display());
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => bail!("{}: it is a directory", cannot()),
            Ok(found) if !found.is_file() => return Ok(Self::Device(path.to_owned())),
            // The file that a link names is replaced, not the link.
            Ok(_) => {
                let place = fs::canonicalize(path).with_context(cannot)?;
                fs::OpenOptions::new().append(true).open(&place).with_context(cannot)?;
                Ok(Self::File(place))
            }
            Err(_) => Ok(Self::File(path.to_owned())),
        }
        .and_then(|target| target.probe().map(|()| target))
    }

    /// Writes nothing under a temporary name, and removes it again.
    fn probe(&self) -> anyhow::Result<()> {
        match self {
            Self::File(place) => FileSet::default().add(place, |new| fs::write(new, "")),
            Self::Device(_) | Self::StandardOutput => Ok(()),
        }
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        match self {
            Self::StandardOutput => output::print(text),
            Self::Device(path) => {
                let open = || fs::OpenOptions::new().write(true).open(path);
                open()
                    .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
                    .with_context(|| format!("cannot write {}", path.display()))
            }
            Self::File(place) => {
                let mut files = FileSet::default();
                files.add(place, |new| fs::write(new, text))?;
                files.commit()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory that is removed at the end of a test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap();
            let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
            let mut names: Vec<String> =
                names.map(|entry| name(entry).into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_at_once() {
        for path in ["/nowhere/x.json", "/proc/x.json", "/tmp"] {
            let error = Outputs::open(Some(Path::new(path)), None).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.starts_with(&format!("cannot write {path}: ")), "{text}");
        }
    }

    #[test]
    fn an_old_file_stays_whole_until_the_new_one_replaces_it() {
        let folder = Folder::new("peerway-outputs");
        let file = folder.0.join("rows.json");
        fs::write(&file, "old").unwrap();
        let link = folder.0.join("link.json");
        symlink("rows.json", &link).unwrap();
        let outputs = Outputs::open(Some(&link), None).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "old", "nothing is written before the end");
        assert_eq!(folder.names(), ["link.json", "rows.json"]);
        let before = fs::File::open(&file).unwrap();
        outputs.save(&Document::new(&[1])).unwrap();
        // A rename leaves the old file to those who have it open.
        assert_eq!(io::read_to_string(before).unwrap(), "old");
        assert!(fs::read_to_string(&file).unwrap().contains("\"rows\""));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(folder.names(), ["link.json", "rows.json"]);
    }

    #[test]
    fn a_device_is_not_replaced() {
        let outputs = Outputs::open(Some(Path::new("/dev/null")), None).unwrap();
        outputs.save(&Document::new(&[1])).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
