//! Parses perftest's output: a heading that begins with `#bytes`, and below it a row of numbers.

use super::Op;

/// The figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Found {
    /// GB/s, or the typical time one way in microseconds.
    pub(crate) value: f64,
    /// The 99th percentile in microseconds. `None` for bandwidth.
    pub(crate) p99: Option<f64>,
}

/// Parses the row of that size. `None` if there is no such row, or if a figure is missing, `inf` or
/// `nan`.
pub(crate) fn row(text: &str, op: Op, size: u64) -> Option<Found> {
    let lines = text.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let row = { lines }.skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        let is_it = words.next().is_some_and(|word| word.parse() == Ok(size));
        is_it.then(|| words.map(|word| word.parse().unwrap_or(f64::NAN)).collect::<Vec<f64>>())
    })?;
    // If a column is missing, the others shift.
    if row.len() < if op == Op::Pingpong { 8 } else { 4 } {
        return None;
    }
    let real = |at: usize| row.get(at).copied().filter(|value| value.is_finite() && *value > 0.0);
    match op {
        // iterations, peak and average in Gbit/s, messages
        Op::Write | Op::Read => Some(Found { value: real(2)? / 8.0, p99: None }),
        // iterations, minimum, maximum, typical, average, deviation, 99 %, 99.9 %
        Op::Pingpong => Some(Found { value: real(3)?, p99: Some(real(6)?) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Number of qps   : 2\t\tTransport type : IB
 remote address: LID 0000 QPN 0x0012 PSN 0xc4f5e5 RKey 0x00027c VAddr 0x007f2b3fd3e000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      200              0.58               0.55   \t\t   0.001050
---------------------------------------------------------------------------------------
";

    const LATENCY: &str = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 8       1000          21.10          310.50       26.60              29.32          12.10           88.20                  310.50
";

    #[test]
    fn rows_are_found_by_their_size() {
        let found = row(BANDWIDTH, Op::Write, 65536).unwrap();
        assert!((found.value - 0.55 / 8.0).abs() < 1e-9 && found.p99.is_none());
        assert_eq!(row(BANDWIDTH, Op::Write, 4096), None);
        let found = row(LATENCY, Op::Pingpong, 8).unwrap();
        assert_eq!(found, Found { value: 26.6, p99: Some(88.2) });
    }

    #[test]
    fn nonsense_is_no_row() {
        for value in ["inf", "-nan", "0.00", "", "-1"] {
            assert_eq!(row(&BANDWIDTH.replace("0.55", value), Op::Write, 65536), None, "{value}");
            assert_eq!(row(&LATENCY.replace("26.60", value), Op::Pingpong, 8), None, "{value}");
        }
        for text in ["", "#bytes", "65536 200 1 1 1", "Couldn't connect to 127.0.0.1:18515"] {
            assert_eq!(row(text, Op::Read, 65536), None, "{text}");
        }
    }
}
