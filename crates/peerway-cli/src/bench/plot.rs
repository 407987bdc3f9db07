//! The rows as a picture: GB/s over size, both logarithmic, in SVG written by hand.
//!
//! One colour per path, writes solid, reads dashed, limits dotted and grey. Only rows of one piece count
//! are drawn, the smallest that was measured: others have the same sizes and would lie over them.

use std::fmt::Write;

use super::report::Line;
use super::{Op, size};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 560.0;
/// The part with the curves.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 770.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 500.0;

/// Distinct also to eyes that see no red or green (a palette of Okabe and Ito).
const COLOURS: [(&str, &str); 4] = [
    ("local-map", "#0072b2"),
    ("local-cma", "#009e73"),
    ("local-ring", "#e69f00"),
    ("tcp", "#d55e00"),
];
const OTHER: &str = "#cc79a7";

/// The picture of the rows.
pub(crate) fn svg(lines: &[Line]) -> String {
    let iovs = lines.iter().map(|line| line.iovs).min().unwrap_or(1);
    let lines: Vec<&Line> = lines.iter().filter(|line| line.iovs == iovs).collect();
    let curves = curves(&lines);
    let axes = Axes::around(&curves);
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = draw(&mut out, &axes, &curves, iovs);
    out
}

/// One line of the picture.
struct Curve {
    name: String,
    colour: &'static str,
    dash: &'static str,
    points: Vec<(f64, f64)>,
}

fn curves(lines: &[&Line]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    let mut add = |name: String, colour, dash, point| match curves
        .iter_mut()
        .find(|curve| curve.name == name)
    {
        Some(curve) => curve.points.push(point),
        None => curves.push(Curve { name, colour, dash, points: vec![point] }),
    };
    for line in lines {
        let colour = COLOURS.iter().find(|(path, _)| *path == line.path).map_or(OTHER, |c| c.1);
        let dash = if line.op == Op::Read { "7 4" } else { "none" };
        let name = format!("{} {}", line.path, line.op.name());
        add(name, colour, dash, (line.size as f64, line.gbps));
    }
    // The limit is measured beside every row; of several that mean the same, the median is drawn.
    for (name, colour, tcp) in [("limit, local", "#555555", false), ("limit, tcp", "#999999", true)]
    {
        let mut sizes: Vec<u64> = lines.iter().map(|line| line.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            let same = lines.iter().filter(|l| l.size == size && (l.path == "tcp") == tcp);
            let mut limits: Vec<f64> = same.map(|line| line.limit_gbps).collect();
            limits.sort_unstable_by(f64::total_cmp);
            if let Some(limit) = limits.get(limits.len() / 2) {
                add(name.to_owned(), colour, "1.5 4", (size as f64, *limit));
            }
        }
    }
    for curve in &mut curves {
        curve.points.retain(|(x, y)| x.is_finite() && y.is_finite() && *x > 0.0 && *y > 0.0);
        curve.points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

/// From values to places.
struct Axes {
    /// Powers of two.
    x: (f64, f64),
    /// Powers of ten.
    y: (f64, f64),
}

impl Axes {
    fn around(curves: &[Curve]) -> Self {
        let points = || curves.iter().flat_map(|curve| &curve.points);
        let span = |values: &mut dyn Iterator<Item = f64>, step: f64| {
            let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
                (low.min(v), high.max(v))
            });
            if low > high {
                return (0.0, step);
            }
            let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
            (low, high.max(low + step))
        };
        Self {
            x: span(&mut points().map(|(x, _)| x.log2()), 1.0),
            y: span(&mut points().map(|(_, y)| y.log10()), 1.0),
        }
    }

    fn x(&self, power: f64) -> f64 {
        LEFT + (power - self.x.0) / (self.x.1 - self.x.0) * (RIGHT - LEFT)
    }

    fn y(&self, power: f64) -> f64 {
        BOTTOM - (power - self.y.0) / (self.y.1 - self.y.0) * (BOTTOM - TOP)
    }
}

fn draw(out: &mut String, axes: &Axes, curves: &[Curve], iovs: u32) -> std::fmt::Result {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222222\">"
    )?;
    writeln!(out, "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>")?;
    let pieces = if iovs == 1 { String::new() } else { format!(", {iovs} pieces") };
    writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"28\" font-size=\"16\">peerway bench: GB/s by size{pieces}</text>"
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
        // A dot each, so that a curve of one size is seen too.
        for place in places {
            if let Some((x, y)) = place.split_once(',') {
                writeln!(
                    out,
                    "<circle cx=\"{x}\" cy=\"{y}\" r=\"2.2\" fill=\"{}\"/>",
                    curve.colour
                )?;
            }
        }
    }
    draw_legend(out, curves)?;
    writeln!(out, "</svg>")
}

fn draw_grid(out: &mut String, axes: &Axes) -> std::fmt::Result {
    let steps = |(low, high): (f64, f64)| (low as i32..=high as i32).map(f64::from);
    for power in steps(axes.x) {
        // Every fourth power of two is labelled: 256, 4K, 64K ...
        let labelled = power as i32 % 4 == 0;
        let (x, shade) = (axes.x(power), if labelled { "#dddddd" } else { "#f2f2f2" });
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{BOTTOM}\" stroke=\"{shade}\"/>"
        )?;
        if labelled {
            let (y, label) = (BOTTOM + 18.0, size::show(power.exp2() as u64));
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>")?;
        }
    }
    for power in steps(axes.y) {
        let (y, x) = (axes.y(power), LEFT - 8.0);
        writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>"
        )?;
        let decimals = (-power).max(0.0) as usize;
        let label = format!("{:.decimals$}", 10f64.powf(power));
        writeln!(out, "<text x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", y + 4.0)?;
    }
    let (middle, under) = ((LEFT + RIGHT) / 2.0, BOTTOM + 42.0);
    writeln!(
        out,
        "<text x=\"{middle}\" y=\"{under}\" text-anchor=\"middle\">bytes of a piece</text>"
    )?;
    let (x, y) = (22.0, (TOP + BOTTOM) / 2.0);
    writeln!(
        out,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\">GB/s \
         (10^9 bytes by the median time)</text>"
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
    use crate::bench::report::tests::line;

    /// Every tag is closed in order, attributes are quoted, and no number is missing.
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
        // Two curves a path and two limits.
        assert_eq!(svg.matches("<polyline").count(), 12);
        assert_eq!(svg.matches("<circle").count(), 48);
        for label in [">256<", ">4K<", ">16M<", ">tcp read<", ">limit, tcp<", "GB/s"] {
            assert!(svg.contains(label), "{label}");
        }
    }

    #[test]
    fn odd_rows_are_drawn_too() {
        check(&svg(&[]));
        check(&svg(&[line("tcp", Op::Pingpong, 1, 1)]));
        let broken =
            Line { gbps: f64::NAN, limit_gbps: f64::INFINITY, ..line("a<&b", Op::Read, 9, 3) };
        check(&svg(&[broken]));
    }
}
