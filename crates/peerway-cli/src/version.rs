//! What this program is: its version, commit, compiler and features.

/// The commit of the sources, or `unknown` if they were not built in a repository.
pub(crate) const COMMIT: &str = env!("BUILD_COMMIT");

/// The text of `peerway --version`. Its first line is the version and the commit.
pub(crate) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("BUILD_COMMIT"),
    ")\nbuilt:    ",
    env!("BUILD_PROFILE"),
    ", ",
    env!("BUILD_TARGET"),
    ", ",
    env!("BUILD_COMPILER"),
    "\nfeatures: same-process local-map local-cma local-ring tcp",
    "\n          with their libraries at run time: verbs efa cuda nvrtc"
);
