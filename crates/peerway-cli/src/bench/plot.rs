//! Draws the rows as an SVG plot: GB/s over size, both axes logarithmic.
//!
//! Each path has a colour. Writes are solid, reads are dashed with hollow dots, baselines are
//! dotted. The plot has only the rows with the smallest number of pieces. Rows with other numbers
//! have the same sizes and would overlap them.

use std::fmt::Write;

use super::baseline::Against;
use super::report::{Line, between};
use super::{Op, size};

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 560.0;
/// The area of the curves.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 770.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 500.0;

/// A palette of Okabe and Ito, which is also distinct to colour-blind people.
const COLOURS: [(&str, &str); 5] = [
    ("local-map", "#0072b2"),
    ("local-cma", "#009e73"),
    ("local-ring", "#e69f00"),
    ("tcp", "#d55e00"),
    ("gpu-ipc", "#56b4e9"),
];
const OTHER: &str = "#cc79a7";

/// Draws the plot of the rows.
pub(crate) fn svg(lines: &[Line]) -> String {
    let iovs = lines.iter().map(|line| line.iovs).min().unwrap_or(1);
    let lines: Vec<&Line> = lines.iter().filter(|line| line.iovs == iovs).collect();
    let curves = curves(&lines);
    let axes = Axes::around(&curves);
    let mut out = String::new();
    let pieces = if iovs == 1 { "one piece".to_owned() } else { format!("{iovs} pieces") };
    let memory = lines.first().and_then(|line| between([line.memory_local, line.memory_remote]));
    let memory = memory.map_or_else(String::new, |memory| format!("; memory: {memory}"));
    // A write to a string cannot fail.
    let _ = draw(&mut out, &axes, &curves, &format!("{pieces}{memory}"));
    out
}

/// One curve of the plot.
struct Curve {
    name: String,
    colour: &'static str,
    dash: &'static str,
    /// The fill colour of a dot.
    dot: &'static str,
    points: Vec<(f64, f64)>,
}

const SOLID: &str = "none";
const DASHED: &str = "7 4";
const DOTTED: &str = "1.5 4";
const PAPER: &str = "#ffffff";

fn curves(lines: &[&Line]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    let mut add = |name: &str, colour, dash, point| match curves
        .iter_mut()
        .find(|curve| curve.name == name)
    {
        Some(curve) => curve.points.push(point),
        None => {
            let (name, dot) = (name.to_owned(), if dash == DASHED { PAPER } else { colour });
            curves.push(Curve { name, colour, dash, dot, points: vec![point] });
        }
    };
    for line in lines {
        let dash = if line.op == Op::Read { DASHED } else { SOLID };
        let name = format!("{} {}", line.path, line.op.name());
        add(&name, colour_of(&line.path), dash, (line.size as f64, line.gbps));
    }
    // Every row has its own measurement of the baseline. Of several for the same baseline and size,
    // the median is drawn.
    let local: Of = |line| of_kind(line, Against::Copies);
    let tcp: Of = |line| of_kind(line, Against::Sockets);
    let rdma: Of = |line| of_kind(line, Against::Perftest);
    let driver: Of = |line| of_kind(line, Against::Driver);
    let ring: Of = |line| of_host_memory(line, "local-ring");
    let tcp_of_host: Of = |line| of_host_memory(line, "tcp");
    let mut sizes: Vec<u64> = lines.iter().map(|line| line.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for (name, colour, of) in [
        ("baseline, local: a copy", "#555555", local),
        ("baseline, tcp: a socket", "#999999", tcp),
        ("baseline, RDMA: perftest", "#777777", rdma),
        ("baseline, GPU: the driver's copy", "#555555", driver),
        ("local-ring, host memory", colour_of("local-ring"), ring),
        ("tcp, host memory", colour_of("tcp"), tcp_of_host),
        ("process_vm_readv", colour_of("local-cma"), |line| line.kernel.map(|kernel| kernel.gbps)),
    ] {
        for size in &sizes {
            let same = lines.iter().filter(|line| line.size == *size);
            let mut baselines: Vec<f64> = same.filter_map(|line| of(line)).collect();
            baselines.sort_unstable_by(f64::total_cmp);
            if let Some(baseline) = baselines.get(baselines.len() / 2) {
                add(name, colour, DOTTED, (*size as f64, *baseline));
            }
        }
    }
    for curve in &mut curves {
        curve.points.retain(|(x, y)| x.is_finite() && y.is_finite() && *x > 0.0 && *y > 0.0);
        curve.points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

/// The rate of the path with host memory, which is the baseline of a row with GPU memory.
fn of_host_memory(line: &Line, path: &str) -> Option<f64> {
    of_kind(line, Against::HostMemory).filter(|_| line.path == path)
}

/// The rate of the row's baseline, if it is of this kind.
fn of_kind(line: &Line, against: Against) -> Option<f64> {
    line.baseline.filter(|_| line.against() == against).map(|baseline| baseline.gbps)
}

/// Extracts the value of one baseline from a row.
type Of = fn(&Line) -> Option<f64>;

fn colour_of(path: &str) -> &'static str {
    COLOURS.iter().find(|(known, _)| *known == path).map_or(OTHER, |colour| colour.1)
}

/// The ranges of the axes. They map values to coordinates.
struct Axes {
    /// Exponents of two.
    x: (f64, f64),
    /// Exponents of ten.
    y: (f64, f64),
}

impl Axes {
    /// The smallest axes that contain all points. They end at powers of two, and at 1, 2, 5, 10 ...
    fn around(curves: &[Curve]) -> Self {
        let points = || curves.iter().flat_map(|curve| &curve.points);
        let ends = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
                (low.min(v), high.max(v))
            })
        };
        let (x, y) = (ends(&mut points().map(|p| p.0)), ends(&mut points().map(|p| p.1)));
        if x.0 > x.1 {
            return Self { x: (0.0, 1.0), y: (0.0, 1.0) };
        }
        let x = (x.0.log2().floor(), x.1.log2().ceil());
        let (low, high) = (y.0.log10().floor(), y.1.log10().ceil());
        let ticks: Vec<f64> = ticks((low, high.max(low + 1.0))).collect();
        let under = ticks.iter().rposition(|tick| *tick <= y.0.log10()).unwrap_or(0);
        let over = ticks.iter().position(|tick| *tick >= y.1.log10()).unwrap_or(ticks.len() - 1);
        // The axis needs some height, even if all values are equal.
        let under = under.min(over.saturating_sub(1));
        Self { x: (x.0, x.1.max(x.0 + 1.0)), y: (ticks[under], ticks[over.max(under + 1)]) }
    }

    fn x(&self, power: f64) -> f64 {
        LEFT + (power - self.x.0) / (self.x.1 - self.x.0) * (RIGHT - LEFT)
    }

    fn y(&self, power: f64) -> f64 {
        BOTTOM - (power - self.y.0) / (self.y.1 - self.y.0) * (BOTTOM - TOP)
    }
}

/// The logarithms of 1, 2 and 5 times every power of ten in the range.
fn ticks((low, high): (f64, f64)) -> impl Iterator<Item = f64> {
    // Two computations of the same logarithm may differ in the last digits.
    const NEAR: f64 = 1e-9;
    (low.floor() as i32..=high.ceil() as i32)
        .flat_map(|power| [1.0f64, 2.0, 5.0].map(|times| f64::from(power) + times.log10()))
        .filter(move |tick| (low - NEAR..=high + NEAR).contains(tick))
}

fn draw(out: &mut String, axes: &Axes, curves: &[Curve], what: &str) -> std::fmt::Result {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222222\">"
    )?;
    writeln!(out, "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>")?;
    writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"28\" font-size=\"16\">peerway {} bench: GB/s by size, transfers of \
         {what}</text>",
        env!("CARGO_PKG_VERSION")
    )?;
    draw_grid(out, axes)?;
    for curve in curves {
        let places: Vec<String> = curve
            .points
            .iter()
            .map(|(x, y)| format!("{:.1},{:.1}", axes.x(x.log2()), axes.y(y.log10())))
            .collect();
        writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" \
             stroke-dasharray=\"{}\" stroke-linejoin=\"round\"/>",
            places.join(" "),
            curve.colour,
            curve.dash
        )?;
        // A dot per point, so that a curve of one size is visible too.
        for place in places {
            if let Some((x, y)) = place.split_once(',') {
                writeln!(
                    out,
                    "<circle cx=\"{x}\" cy=\"{y}\" r=\"2.5\" fill=\"{}\" stroke=\"{}\"/>",
                    curve.dot, curve.colour
                )?;
            }
        }
    }
    draw_legend(out, curves)?;
    writeln!(out, "</svg>")
}

fn draw_grid(out: &mut String, axes: &Axes) -> std::fmt::Result {
    let (first, last) = (axes.x.0 as i32, axes.x.1 as i32);
    // Label every fourth power of two (256, 4K, 64K ...), or every one if there are few.
    let every = if last - first > 12 { 4 } else { 1 };
    for power in first..=last {
        let labelled = power % every == 0;
        let (x, shade) = (axes.x(power.into()), if labelled { "#dddddd" } else { "#f2f2f2" });
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{BOTTOM}\" stroke=\"{shade}\"/>"
        )?;
        if labelled {
            let (y, label) = (BOTTOM + 18.0, size::show(f64::from(power).exp2() as u64));
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>")?;
        }
    }
    // With more decades than this, the labels between the decades would overlap.
    let crowded = axes.y.1 - axes.y.0 > 7.0;
    for power in ticks(axes.y) {
        let whole = (power - power.round()).abs() < 1e-9;
        let (y, x) = (axes.y(power), LEFT - 8.0);
        let shade = if whole { "#cccccc" } else { "#eeeeee" };
        writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\" stroke=\"{shade}\"/>"
        )?;
        if whole || !crowded {
            let decimals = (-(power + 1e-9).floor()).max(0.0) as usize;
            let label = format!("{:.decimals$}", 10f64.powf(power));
            let y = y + 4.0;
            writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>")?;
        }
    }
    let (middle, under) = ((LEFT + RIGHT) / 2.0, BOTTOM + 42.0);
    writeln!(
        out,
        "<text x=\"{middle}\" y=\"{under}\" text-anchor=\"middle\">bytes of a piece (K = \
         1024)</text>"
    )?;
    let (x, y) = (22.0, (TOP + BOTTOM) / 2.0);
    writeln!(
        out,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\">GB/s \
         (10⁹ bytes, by the median time)</text>"
    )
}

fn draw_legend(out: &mut String, curves: &[Curve]) -> std::fmt::Result {
    let (start, end) = (RIGHT + 20.0, RIGHT + 54.0);
    for (i, curve) in curves.iter().enumerate() {
        let y = TOP + 10.0 + 22.0 * i as f64;
        writeln!(
            out,
            "<line x1=\"{start}\" y1=\"{y}\" x2=\"{end}\" y2=\"{y}\" stroke=\"{}\" \
             stroke-width=\"2\" stroke-dasharray=\"{}\"/>",
            curve.colour, curve.dash
        )?;
        let middle = (start + end) / 2.0;
        writeln!(
            out,
            "<circle cx=\"{middle}\" cy=\"{y}\" r=\"2.5\" fill=\"{}\" stroke=\"{}\"/>",
            curve.dot, curve.colour
        )?;
        let (x, y) = (end + 8.0, y + 4.0);
        writeln!(out, "<text x=\"{x}\" y=\"{y}\">{}</text>", escaped(&curve.name))?;
    }
    Ok(())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::memory::Memory;
    use crate::bench::report::tests::line;

    /// Checks that tags nest, attributes are quoted, and every number is finite.
    fn check(svg: &str) {
        let mut open = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            assert!(!tag.contains('<'), "{tag}");
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) => assert_eq!(open.pop(), Some(name)),
                (_, true) => {}
                _ => open.push(name),
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn the_picture_is_well_formed_and_has_every_curve() {
        let mut lines = Vec::new();
        for path in ["local-map", "local-cma", "local-ring", "tcp", "verbs"] {
            for op in [Op::Write, Op::Read] {
                for size in [256, 4096, 1 << 20, 100 << 20] {
                    lines.push(line(path, op, size, 1));
                    lines.push(line(path, op, size, 128));
                }
            }
        }
        let svg = svg(&lines);
        check(&svg);
        // Two curves a path and three baselines.
        assert_eq!(svg.matches("<polyline").count(), 13);
        assert_eq!(
            svg.matches("<circle").count(),
            52 + 13,
            "one dot per point and per legend entry"
        );
        for label in [">256<", ">4K<", ">16M<", ">tcp read<", ">baseline, tcp: a socket<", "GB/s"] {
            assert!(svg.contains(label), "{label}");
        }
    }

    #[test]
    fn rows_of_gpu_memory_name_it_and_their_own_baselines() {
        let of = |path| Line { memory_local: Memory::GpuPlain, ..line(path, Op::Write, 4096, 1) };
        let svg = svg(&[of("gpu-ipc"), of("local-ring"), of("tcp")]);
        check(&svg);
        assert_eq!(svg.matches("<polyline").count(), 6);
        for label in [
            "memory: local gpu-plain, remote host<",
            ">baseline, GPU: the driver's copy<",
            ">tcp, host memory<",
        ] {
            assert!(svg.contains(label), "{label}");
        }
    }

    #[test]
    fn odd_rows_are_drawn_too() {
        check(&svg(&[]));
        check(&svg(&[line("tcp", Op::Pingpong, 1, 1)]));
        let broken = Line { gbps: f64::NAN, baseline: None, ..line("a<&b", Op::Read, 9, 3) };
        check(&svg(&[broken]));
        // A single size is labelled even if its exponent is no multiple of four.
        assert!(svg(&[line("tcp", Op::Read, 1024, 1)]).contains(">1K<"));
        let bound = Line {
            kernel: line("local-cma", Op::Read, 4096, 1).baseline,
            ..line("local-cma", Op::Read, 1 << 20, 1)
        };
        assert!(svg(&[bound]).contains(">process_vm_readv<"));
    }

    #[test]
    fn axes_hold_every_point_and_little_more() {
        for (low, high, expected) in [
            (0.011, 111.0, (0.01, 200.0)),
            (3.0, 4.0, (2.0, 5.0)),
            (5.0, 5.0, (2.0, 5.0)),
            (1.0, 1.0, (1.0, 2.0)),
            (0.6, 80.0, (0.5, 100.0)),
        ] {
            let curve = Curve {
                name: String::new(),
                colour: OTHER,
                dash: SOLID,
                dot: OTHER,
                points: vec![(256.0, low), (1e6, high)],
            };
            let axes = Axes::around(&[curve]);
            let found = (10f64.powf(axes.y.0), 10f64.powf(axes.y.1));
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-6;
            assert!(near(found.0, expected.0) && near(found.1, expected.1), "{found:?}");
            assert_eq!(axes.x, (8.0, 20.0));
        }
    }
}
