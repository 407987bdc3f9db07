//! The cost of registering memory with RDMA devices.

use std::fmt;

use super::figure;
use crate::bench::size;
use crate::bench::text::paragraph;

/// The figures of one path.
#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) path: String,
    /// Bytes and nanoseconds.
    pub(crate) sizes: Vec<(u64, u64)>,
    pub(crate) lookups: usize,
    /// Nanoseconds per lookup.
    pub(crate) lookup: u64,
    /// How many smaller registrations existed, and nanoseconds per lookup with them.
    pub(crate) behind: (usize, u64),
}

impl fmt::Display for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, sizes, lookups, lookup, behind: (smaller, behind) } = self;
        let head = format!(
            "registration, {path}: the time of a region's first prepare minus that of later ones"
        );
        paragraph(f, &head)?;
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
        let lookups = format!(
            "{lookups} lookups of ranges inside a registered range: {} µs each; with {smaller} \
             smaller registrations inside it: {} µs",
            figure(*lookup as f64 / 1e3),
            figure(*behind as f64 / 1e3),
        );
        paragraph(f, &lookups)
    }
}
