//! What registering memory with RDMA devices costs.

use std::fmt;

use super::figure;
use crate::bench::size;

/// Registrations of one path.
#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) path: String,
    /// Bytes and nanoseconds.
    pub(crate) sizes: Vec<(u64, u64)>,
    pub(crate) lookups: usize,
    /// Nanoseconds of one lookup.
    pub(crate) lookup: u64,
    /// The same, and how many smaller registrations it was behind.
    pub(crate) behind: (usize, u64),
}

impl fmt::Display for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, sizes, lookups, lookup, behind: (smaller, behind) } = self;
        writeln!(
            f,
            "registration, {path}: what the first prepare of a region takes longer than later ones"
        )?;
        for (size, nanos) in sizes {
            let millis = *nanos as f64 / 1e6;
            let per_gb = millis * 1e9 / *size as f64;
            writeln!(
                f,
                "  {:>5}  {} ms, {} ms/GB",
                size::show(*size),
                figure(millis),
                figure(per_gb)
            )?;
        }
        writeln!(
            f,
            "  {lookups} lookups of ranges nested in a registered one: {} µs each; behind {smaller} smaller \
             registrations inside it: {} µs",
            figure(*lookup as f64 / 1e3),
            figure(*behind as f64 / 1e3),
        )
    }
}
