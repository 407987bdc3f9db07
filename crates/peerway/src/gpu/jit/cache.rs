//! The directory of compiled kernels, which all processes of a user share.
//!
//! Invariants:
//!
//! - A file under an image's name is complete, because it is written under another name and
//!   renamed. An invalid file counts as missing and is replaced.
//! - Nothing is trusted that another user could have written: code from the cache runs on a GPU
//!   with the rights of this process. A directory or file that belongs to another user, or that
//!   others can write, is not used. Files are opened through the open directory, so that it cannot
//!   be replaced in between.
//! - Locks are not needed. Two processes that write one image write the same content. A process
//!   that reads a removed file can still read it to the end.
//!
//! A file's modification time is the time of its last use, which determines what is evicted.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use peerway_sys::nvrtc::Architecture;
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::entry::CacheEntry;
use super::key::{Digest, file_name, parse_file_name};
use super::place::Place;

/// Maximum size of the cache in bytes: hundreds of programs.
pub(super) const LIMIT: u64 = 256 << 20;
/// Prefix of a file's name until it is complete.
const UNFINISHED: &str = ".new-";
/// No process writes a file for this long. An unfinished file older than this was left by a process
/// that died.
const ABANDONED: Duration = Duration::from_secs(3600);
/// Permission bits that let the group or others write.
const OTHERS_WRITE: u32 = 0o022;

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(
        "neither HOME nor XDG_CACHE_HOME is set; set PEERWAY_KERNEL_CACHE to a directory or to off"
    )]
    Unknown,
    #[error("{path:?} {what}")]
    NotOurs { path: PathBuf, what: &'static str },
    #[error("{path:?}: {error}")]
    Io { path: PathBuf, error: io::Error },
    #[error("the image has {len} bytes, more than the cache limit of {limit}")]
    TooLarge { len: usize, limit: u64 },
}

/// See the module.
pub(super) struct KernelCache {
    place: Place,
    limit: u64,
    /// Whether the warning that the cache is unusable was logged.
    told: AtomicBool,
}

/// The content of the cache.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) images: usize,
    pub(super) bytes: u64,
    pub(super) problem: Option<String>,
}

impl KernelCache {
    pub(super) fn new(place: Place, limit: u64) -> Self {
        Self { place, limit, told: AtomicBool::new(false) }
    }

    /// The directory, which may not exist.
    pub(super) fn directory(&self) -> Option<&Path> {
        match &self.place {
            Place::At(path) => Some(path),
            Place::Off | Place::Unknown => None,
        }
    }

    /// The image of a program made by this compiler.
    pub(super) fn get(
        &self,
        program: &Digest,
        architecture: Architecture,
        compiler: &str,
    ) -> Option<CacheEntry> {
        let directory = self.open(false).map_err(|error| self.tell(&error)).ok()??;
        let name = file_name(program, architecture, compiler);
        let entry = self.read(&directory, &name, program, architecture)?;
        // The name contains only some digits of the compiler's hash.
        (entry.compiler == compiler).then_some(entry)
    }

    /// The image of a program made by any compiler, for an architecture that `rank` accepts. It
    /// prefers the highest rank, then the most recent use.
    pub(super) fn get_any(
        &self,
        program: &Digest,
        rank: impl Fn(Architecture) -> Option<u32>,
    ) -> Option<(Architecture, CacheEntry)> {
        let directory = self.open(false).map_err(|error| self.tell(&error)).ok()??;
        let digits = program.to_string();
        let mut found: Vec<_> = self
            .list(&directory)
            .into_iter()
            .filter_map(|file| {
                let (of, architecture) = parse_file_name(&file.name)?;
                let rank = rank(architecture).filter(|_| of == digits)?;
                Some((rank, file.used, architecture, file.name))
            })
            .collect();
        found.sort();
        found.into_iter().rev().find_map(|(_, _, architecture, name)| {
            Some((architecture, self.read(&directory, &name, program, architecture)?))
        })
    }

    /// Stores an image, and evicts the least recently used ones if the cache is too large.
    pub(super) fn put(&self, program: &Digest, architecture: Architecture, entry: &CacheEntry) {
        let name = file_name(program, architecture, &entry.compiler);
        let bytes = entry.encode(program, architecture);
        if let Err(error) = self.write(&name, &bytes) {
            self.tell(&error);
        }
    }

    /// The current content.
    pub(super) fn contents(&self) -> Contents {
        match self.open(false) {
            Ok(None) => Contents::default(),
            Ok(Some(directory)) => {
                let files = self.list(&directory);
                let images = files.iter().filter(|file| parse_file_name(&file.name).is_some());
                let (images, bytes) =
                    images.fold((0, 0), |(count, sum), file| (count + 1, sum + file.len));
                Contents { images, bytes, problem: None }
            }
            Err(error) => Contents { problem: Some(error.to_string()), ..Contents::default() },
        }
    }

    /// Opens the directory. If it does not exist, creates it with `make`, otherwise returns `None`.
    fn open(&self, make: bool) -> Result<Option<OwnedFd>, Unusable> {
        let path = match &self.place {
            Place::Off => return Ok(None),
            Place::Unknown => return Err(Unusable::Unknown),
            Place::At(path) => path,
        };
        let failed = |error: io::Error| Unusable::Io { path: path.clone(), error };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) if !make => return Ok(None),
            Err(Errno::NOENT) => {
                DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
                rustix::fs::open(path, flags, Mode::empty())
            }
            opened => opened,
        };
        let directory = File::from(directory.map_err(|errno| failed(errno.into()))?);
        match why_not_ours(&directory.metadata().map_err(failed)?) {
            Some(what) => Err(Unusable::NotOurs { path: path.clone(), what }),
            None => Ok(Some(directory.into())),
        }
    }

    /// Reads a file, if its content matches its name.
    fn read(
        &self,
        directory: &OwnedFd,
        name: &str,
        program: &Digest,
        architecture: Architecture,
    ) -> Option<CacheEntry> {
        // Non-blocking, because the name could be a pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?);
        let refuse = |why: &dyn std::fmt::Display| {
            tracing::warn!(file = name, "ignoring a cached kernel and compiling it again: {why}");
        };
        let metadata = file.metadata().ok()?;
        if let Some(why) = why_not_ours(&metadata) {
            refuse(&why);
            return None;
        }
        if !metadata.is_file() || metadata.len() > self.limit {
            refuse(&"it is not a regular file, or is too large");
            return None;
        }
        let mut bytes = Vec::new();
        // Read one byte more than the limit, because the file may grow. Then its length is wrong.
        let read = (&mut file).take(self.limit + 1).read_to_end(&mut bytes);
        read.map_err(|error| refuse(&error)).ok()?;
        match CacheEntry::decode(&bytes, program, architecture) {
            Ok(entry) => {
                // If this is not permitted, the file is only evicted sooner.
                let _ = file.set_modified(SystemTime::now());
                Some(entry)
            }
            Err(why) => {
                refuse(&why);
                None
            }
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Unusable> {
        let Some(directory) = self.open(true)? else { return Ok(()) };
        if bytes.len() as u64 > self.limit {
            return Err(Unusable::TooLarge { len: bytes.len(), limit: self.limit });
        }
        let path = || self.directory().map_or_else(|| name.into(), |at| at.join(name));
        // Random, because processes in several containers may share a pid and the directory.
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| {
            let error = io::Error::other(error.to_string());
            Unusable::Io { path: path(), error }
        })?;
        let unfinished = format!("{UNFINISHED}{:016x}", u64::from_le_bytes(random));
        let written = write_new(&directory, &unfinished, bytes)
            .and_then(|()| Ok(rustix::fs::renameat(&directory, &unfinished, &directory, name)?));
        if let Err(error) = written {
            let _ = rustix::fs::unlinkat(&directory, &unfinished, AtFlags::empty());
            return Err(Unusable::Io { path: path(), error });
        }
        self.evict(&directory, name);
        Ok(())
    }

    /// Removes the least recently used images until the rest fits the limit. `keep` stays.
    fn evict(&self, directory: &OwnedFd, keep: &str) {
        let remove = |name: &str| {
            // Another process may have removed it already.
            let _ = rustix::fs::unlinkat(directory, name, AtFlags::empty());
        };
        let (unfinished, mut images): (Vec<_>, Vec<_>) =
            self.list(directory).into_iter().partition(|file| file.name.starts_with(UNFINISHED));
        let is_abandoned = |file: &&Listed| file.used.elapsed().is_ok_and(|age| age > ABANDONED);
        unfinished.iter().filter(is_abandoned).for_each(|file| remove(&file.name));
        images.sort_by_key(|file| file.used);
        let mut total: u64 = images.iter().map(|file| file.len).sum();
        for file in images.iter().filter(|file| file.name != keep) {
            if total <= self.limit {
                break;
            }
            remove(&file.name);
            total -= file.len;
        }
    }

    /// The images and unfinished files in the directory; ignores other files.
    fn list(&self, directory: &OwnedFd) -> Vec<Listed> {
        let Ok(entries) = Dir::read_from(directory) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().to_str().ok()?;
            let ours = name.starts_with(UNFINISHED) || parse_file_name(name).is_some();
            ours.then(|| name.to_owned())
        });
        let listed = names.filter_map(|name| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(directory, &*name, flags, Mode::empty()).ok()?;
            let metadata = File::from(file).metadata().ok().filter(|found| found.is_file())?;
            Some(Listed { name, len: metadata.len(), used: metadata.modified().ok()? })
        });
        listed.collect()
    }

    /// Logs once that the cache is not used.
    fn tell(&self, error: &Unusable) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!("the cache of compiled kernels is not used: {error}");
        }
    }

    #[cfg(test)]
    pub(super) fn has_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }
}

struct Listed {
    name: String,
    len: u64,
    used: SystemTime,
}

/// Why a file or directory cannot be trusted.
fn why_not_ours(found: &std::fs::Metadata) -> Option<&'static str> {
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Some("belongs to another user");
    }
    (found.mode() & OTHERS_WRITE != 0).then_some("can be written by other users (chmod go-w)")
}

fn write_new(directory: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?;
    File::from(file).write_all(bytes)
}
