//! Plays a newcomer: a clean copy of the repository, and the lines of README.md as they stand.
//!
//! The copy has exactly the files of a clone (`git archive`), nothing of this directory, and none
//! of the caller's variables but those that reach the network and find tools. Every shell block of
//! README.md runs there with `bash -e`. Blocks that use Python run once with Python 3.11, the
//! oldest version, and once with the newest that is installed; so does the first example of the
//! guide. A newcomer's build outputs are kept between runs, in directories of their own: cargo
//! builds again what has changed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::steps;
use crate::test::Ignored;

/// What a block must print, if it has the first text.
const PRINTS: &[(&str, &[&str])] = &[
    ("owner.py", &["reader: read b'hello' by ", "owner: a reader wrote b'world' and says b'done'"]),
    ("-- bench", &["local-ring ", "tcp ", "verified:"]),
    ("-- doctor", &["tcp"]),
];

/// The page whose first Python block a newcomer tries next.
const GUIDE: &str = "docs/book/src/guide/python.md";

/// The oldest supported minor version of Python 3.
const OLDEST: u32 = 11;
/// A minor version that does not exist yet.
const FUTURE: u32 = 30;

/// Variables that a newcomer has too.
const KEPT: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "TMPDIR",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
];

/// Runs README.md.
pub(crate) fn run(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    let place = target.join("newcomer");
    let clone = place.join("clone");
    clone_into(workspace, &place, &clone)?;
    let readme = fs::read_to_string(clone.join("README.md")).context("cannot read README.md")?;
    let pythons = pythons()?;
    let newcomer = Newcomer { place: &place, clone: &clone };
    for python in &pythons {
        newcomer.python(&readme, python)?;
    }
    for block in blocks(&readme, "sh").into_iter().filter(|block| !uses_python(block)) {
        newcomer.shell(&block, &pythons[0])?;
    }
    Ok(())
}

struct Newcomer<'a> {
    place: &'a Path,
    clone: &'a Path,
}

impl Newcomer<'_> {
    /// Runs everything of README.md that uses Python, in an environment that does not exist yet.
    fn python(&self, readme: &str, python: &Python) -> anyhow::Result<()> {
        let environment = self.clone.join(".venv");
        if environment.exists() {
            fs::remove_dir_all(&environment).context("cannot remove the last environment")?;
        }
        let shells: Vec<_> =
            blocks(readme, "sh").into_iter().filter(|block| uses_python(block)).collect();
        ensure!(!shells.is_empty(), "README.md has no shell block with Python any more");
        for block in shells {
            self.shell(&block, python)?;
        }
        // The first example of the guide, with NumPy.
        let guide = fs::read_to_string(self.clone.join(GUIDE)).context("cannot read the guide")?;
        let block = blocks(&guide, "python").into_iter().next();
        let file = self.place.join("block.py");
        fs::write(&file, block.with_context(|| format!("{GUIDE} has no Python any more"))?)
            .context("cannot write a block of the guide")?;
        self.shell(&format!(".venv/bin/python {}", file.display()), python)
    }

    /// Runs a block. `python3` is this Python.
    fn shell(&self, block: &str, python: &Python) -> anyhow::Result<()> {
        let links = self.place.join("bin");
        fs::create_dir_all(&links).context("cannot make a directory for the newcomer's Python")?;
        let link = links.join("python3");
        let _ = fs::remove_file(&link);
        symlink(&python.program, &link).context("cannot link the newcomer's Python")?;
        println!("Python 3.{}:\n{}", python.minor, block.trim_end());
        let mut command = Command::new("bash");
        command.args(["-e", "-o", "pipefail", "-c", block]).current_dir(self.clone);
        command.env_clear().stdin(Stdio::null());
        for (name, value) in std::env::vars_os() {
            let upper = name.to_string_lossy().to_uppercase();
            if KEPT.contains(&upper.as_str()) || upper.starts_with("PIP_") {
                command.env(name, value);
            }
        }
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(links).chain(std::env::split_paths(&paths));
        command.env("PATH", std::env::join_paths(paths)?);
        // One for each Python: the binding's libraries are built anew for another interpreter.
        let build = self.place.join(format!("build-3.{}", python.minor));
        command.env("CARGO_TARGET_DIR", build);
        let first = block.lines().next().unwrap_or_default();
        let output = steps::run(&mut command, &format!("README.md: {first}"))?;
        ensure!(!output.contains("is not a setting"), "README.md: {first}: it warns of a setting");
        for (mark, wanted) in PRINTS {
            for text in wanted.iter().filter(|_| block.contains(mark)) {
                ensure!(output.contains(text), "README.md: {first}: it does not print \"{text}\"");
            }
        }
        Ok(())
    }
}

/// Makes `clone` a copy of all files that git knows, with uncommitted changes. Files that did not
/// change keep their times, so that cargo builds only what changed.
fn clone_into(workspace: &Path, place: &Path, clone: &Path) -> anyhow::Result<()> {
    let git = |arguments: &[&str]| {
        steps::capture(Command::new("git").args(arguments).current_dir(workspace), "git")
    };
    let is_clone = git(&["rev-parse", "--is-inside-work-tree"]).is_ok();
    if !is_clone {
        return Err(Ignored("a newcomer needs a git repository to clone".to_owned()).into());
    }
    // A commit of the tracked files as they are, which no branch has. Empty if nothing changed.
    let changed = git(&["stash", "create"])?;
    let commit = if changed.trim().is_empty() { "HEAD" } else { changed.trim() };
    let fresh = place.join("fresh");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).context("cannot remove the last copy")?;
    }
    fs::create_dir_all(&fresh).context("cannot make a directory for the copy")?;
    let archive = place.join("files.tar");
    let [file, directory] = [&archive, &fresh].map(|path| path.display().to_string());
    git(&["archive", "--format=tar", "--output", &file, commit])?;
    let mut tar = Command::new("tar");
    steps::capture(tar.args(["-xf", &file, "-C", &directory]), "tar")?;
    fs::create_dir_all(clone).context("cannot make a directory for the copy")?;
    synchronise(&fresh, clone)?;
    fs::remove_dir_all(&fresh).context("cannot remove the unpacked files")?;
    fs::remove_file(&archive).context("cannot remove the archive")
}

/// Makes `to` the same as `from`. Files with the same content and mode are not touched.
fn synchronise(from: &Path, to: &Path) -> anyhow::Result<()> {
    let names = |directory: &Path| -> anyhow::Result<BTreeSet<_>> {
        let entries =
            fs::read_dir(directory).with_context(|| format!("cannot list {directory:?}"))?;
        Ok(entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<Result<_, _>>()?)
    };
    let wanted = names(from)?;
    for name in names(to)?.difference(&wanted) {
        remove(&to.join(name))?;
    }
    for name in wanted {
        let (source, place) = (from.join(&name), to.join(&name));
        let kind = fs::symlink_metadata(&source)?.file_type();
        if kind.is_dir() {
            if !fs::symlink_metadata(&place).is_ok_and(|there| there.is_dir()) {
                remove(&place)?;
                fs::create_dir(&place)?;
            }
            synchronise(&source, &place)?;
        } else if !is_same(&source, &place) {
            remove(&place)?;
            fs::rename(&source, &place).with_context(|| format!("cannot write {place:?}"))?;
            if !kind.is_symlink() {
                // The archive has the time of the commit, which may be before the last build.
                fs::File::options()
                    .append(true)
                    .open(&place)?
                    .set_modified(std::time::SystemTime::now())?;
            }
        }
    }
    Ok(())
}

fn remove(place: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(place) {
        Err(_) => Ok(()),
        Ok(there) if there.is_dir() => fs::remove_dir_all(place),
        Ok(_) => fs::remove_file(place),
    }
    .with_context(|| format!("cannot remove {place:?}"))
}

fn is_same(one: &Path, other: &Path) -> bool {
    let read = |path: &Path| -> Option<(u32, Vec<u8>)> {
        let about = fs::symlink_metadata(path).ok()?;
        if about.is_symlink() {
            use std::os::unix::ffi::OsStringExt as _;
            return Some((0, fs::read_link(path).ok()?.into_os_string().into_vec()));
        }
        Some((about.permissions().mode(), fs::read(path).ok()?))
    };
    read(one).is_some_and(|content| read(other) == Some(content))
}

/// The blocks of a Markdown file in this language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        match &mut block {
            None if line == format!("```{language}") => block = Some(String::new()),
            None => {}
            Some(_) if line == "```" => blocks.extend(block.take()),
            Some(block) => {
                block.push_str(line);
                block.push('\n');
            }
        }
    }
    blocks
}

fn uses_python(block: &str) -> bool {
    block.contains("python") || block.contains("pip ")
}

/// An interpreter.
#[derive(Debug)]
struct Python {
    minor: u32,
    program: PathBuf,
}

/// Python 3.11 and the newest one that is installed. One may be missing.
fn pythons() -> anyhow::Result<Vec<Python>> {
    let newest = (OLDEST + 1..FUTURE).rev().find_map(find);
    let oldest = find(OLDEST);
    for (found, name) in [(&oldest, "Python 3.11"), (&newest, "a newer Python")] {
        if found.is_none() {
            println!("ignored: {name} is not installed");
        }
    }
    let found: Vec<Python> = oldest.into_iter().chain(newest).collect();
    if found.is_empty() {
        return Err(Ignored("no Python of version 3.11 or later is installed".to_owned()).into());
    }
    Ok(found)
}

/// The interpreter of this minor version: on the search path, or of pyenv, whose names on the
/// search path may not work.
fn find(minor: u32) -> Option<Python> {
    let name = format!("python3.{minor}");
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".pyenv"));
    let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from).or_else(home)?;
    let versions = fs::read_dir(pyenv.join("versions")).into_iter().flatten().flatten();
    places.extend(versions.map(|version| version.path().join("bin")));
    // The interpreter names its own file, because a link of pyenv only works with pyenv's
    // variables.
    const ASK: &str = "import ensurepip, sys; assert sys.version_info.releaselevel == 'final'; \
                       print(sys.version_info.minor, sys._base_executable)";
    places.into_iter().map(|place| place.join(&name)).find_map(|program| {
        let output = Command::new(&program).args(["-c", ASK]).output().ok()?;
        let told = String::from_utf8(output.stdout).ok()?;
        let (found, program) = told.trim().split_once(' ')?;
        (output.status.success() && found == minor.to_string())
            .then(|| Python { minor, program: program.into() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_language() {
        let text =
            "a\n```sh\none\ntwo\n```\n```python\nimport x\n```\n```\nno\n```\n```sh\nthree\n```\n";
        assert_eq!(blocks(text, "sh"), ["one\ntwo\n", "three\n"]);
        assert_eq!(blocks(text, "python"), ["import x\n"]);
    }

    #[test]
    fn readme_has_what_a_newcomer_runs() {
        let readme = fs::read_to_string(crate::workspace().join("README.md")).unwrap();
        let shells = blocks(&readme, "sh");
        for (mark, _) in PRINTS {
            let count = shells.iter().filter(|block| block.contains(mark)).count();
            assert_eq!(count, 1, "the shell blocks of README.md with {mark}");
        }
        assert!(!shells.iter().any(|block| block.contains("xtask test")), "it would run itself");
        // The quick start comes first.
        assert!(shells[0].contains("owner.py"));
    }

    #[test]
    fn a_copy_becomes_the_same_and_unchanged_files_keep_their_times() {
        let folder = std::env::temp_dir().join(format!("peerway-newcomer-{}", std::process::id()));
        let (from, to) = (folder.join("from"), folder.join("to"));
        fs::create_dir_all(from.join("kept")).unwrap();
        fs::create_dir_all(to.join("kept")).unwrap();
        fs::create_dir_all(to.join("gone")).unwrap();
        for (name, old, new) in [("kept/same", "1", "1"), ("kept/changed", "1", "2")] {
            fs::write(to.join(name), old).unwrap();
            fs::write(from.join(name), new).unwrap();
        }
        fs::write(to.join("gone/file"), "1").unwrap();
        fs::write(from.join("new"), "1").unwrap();
        let time = |name: &str| fs::metadata(to.join(name)).unwrap().modified().unwrap();
        let before = time("kept/same");
        synchronise(&from, &to).unwrap();
        assert_eq!(before, time("kept/same"));
        assert_eq!(fs::read_to_string(to.join("kept/changed")).unwrap(), "2");
        assert!(!to.join("gone").exists() && to.join("new").is_file());
        fs::remove_dir_all(&folder).unwrap();
    }
}
