//! What a path is measured against.

/// The kind of a path's limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Against {
    /// Plain copies inside one process.
    Copies,
    /// A blocking socket loop.
    Sockets,
    /// perftest, where it is asked for and has such a row.
    Perftest,
}

impl Against {
    /// By the name that rows have for their path.
    pub(crate) fn of(path: &str) -> Self {
        match path {
            "tcp" => Self::Sockets,
            "verbs" | "efa" => Self::Perftest,
            _ => Self::Copies,
        }
    }
}
