//! Selects the directory for compiled kernels.

use std::ffi::OsString;
use std::path::PathBuf;

/// The place for compiled kernels.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// The user turned the cache off.
    Off,
    /// The environment names neither a directory nor a home.
    Unknown,
    At(PathBuf),
}

impl Place {
    /// Reads the place from the environment.
    pub(super) fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        if let Some(value) = set("PEERWAY_KERNEL_CACHE") {
            return if value.eq_ignore_ascii_case("off") {
                Self::Off
            } else {
                Self::At(value.into())
            };
        }
        // XDG requires that relative paths are ignored.
        let absolute = |name| set(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        caches.map_or(Self::Unknown, |caches| Self::At(caches.join("peerway/kernels")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Place {
        Place::of(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_environment_says_where() {
        let at = |path: &str| Place::At(path.into());
        let home = ("HOME", "/home/user");
        assert_eq!(place(&[home]), at("/home/user/.cache/peerway/kernels"));
        assert_eq!(place(&[home, ("XDG_CACHE_HOME", "/xdg")]), at("/xdg/peerway/kernels"));
        assert_eq!(
            place(&[home, ("XDG_CACHE_HOME", "xdg")]),
            at("/home/user/.cache/peerway/kernels")
        );
        assert_eq!(place(&[home, ("PEERWAY_KERNEL_CACHE", "/mine")]), at("/mine"));
        assert_eq!(
            place(&[home, ("PEERWAY_KERNEL_CACHE", "")]),
            at("/home/user/.cache/peerway/kernels")
        );
        assert_eq!(place(&[home, ("PEERWAY_KERNEL_CACHE", "off")]), Place::Off);
        assert_eq!(place(&[("HOME", "")]), Place::Unknown);
    }
}
