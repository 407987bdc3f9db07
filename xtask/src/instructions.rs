//! `cargo xtask instructions`: the cost of hot operations in instructions.
//!
//! Times on a shared machine vary by tens of percent and cannot gate a change. Instruction counts
//! from callgrind are the same in every run. Every figure of `peerway-count` is compared with
//! `docs/instructions.txt` and may exceed it by at most [`ALLOWED`] percent.
//!
//! Two other influences are fixed. `rust-toolchain.toml` pins the compiler, and [`PLAIN_COPIES`]
//! makes the C library copy in the same way on every processor. Transfers are also small. Valgrind
//! passes AVX through if the processor has it; with AVX, 256 B take 44 fewer instructions.
//!
//! RDMA figures use the fake device of `peerway-fakeverbs`. Its instructions, including the
//! functions it calls, are subtracted: the profile has the instructions of every call into its
//! library.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, bail};

use crate::setup::{self, Tool};
use crate::test::Ignored;

const FILE: &str = "docs/instructions.txt";
const ALLOWED: f64 = 10.0;
const VALGRIND: Tool =
    Tool { program: "valgrind", package: "valgrind", why: "counting instructions" };

/// The only function in which callgrind collects. See `peerway-count`.
const COLLECTED: &str = "--toggle-collect=*peerway_count::counted*";
/// The copies of the baseline, without wide registers, which not every processor has. Each glibc
/// knows one of the first two names and ignores the other.
const PLAIN_COPIES: &str = "glibc.cpu.hwcaps=-AVX2_Usable,-AVX2,-AVX_Fast_Unaligned_Load,-SSSE3";
/// The exit code of `peerway-count` if a path is not available.
const NOT_HERE: i32 = 77;

/// The programs to count.
pub(crate) struct Built {
    /// `peerway-count`.
    pub(crate) program: PathBuf,
    /// The fake RDMA devices.
    pub(crate) fake: PathBuf,
}

/// Counts, prints the table and fails if a figure grew. With `bless`, writes the figures as the new
/// baseline instead.
pub(crate) fn run(root: &Path, built: &Built, bless: bool) -> anyhow::Result<()> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Ignored(format!("the baseline in {FILE} is for x86_64")).into());
    }
    if let Err(why) = setup::have(&VALGRIND) {
        return Err(Ignored(format!("{why:#}")).into());
    }
    let counts = count_all(built)?;
    let file = root.join(FILE);
    if bless {
        return fs::write(file, page(&counts)).with_context(|| format!("cannot write {FILE}"));
    }
    let baseline = fs::read_to_string(file).with_context(|| format!("cannot read {FILE}"))?;
    let (table, grown) = compare(&counts, &parse(&baseline)?);
    print!("{table}");
    if grown.is_empty() {
        return Ok(());
    }
    bail!(
        "more than {ALLOWED} % above {FILE} or not in it: {}; if that is intended, run \
         `cargo xtask instructions --bless` and give the reason in the commit",
        grown.join(", ")
    )
}

/// A figure and its instructions per operation. `None` if this machine cannot run it.
struct Count {
    name: String,
    about: String,
    per_operation: Option<f64>,
}

/// Counts every figure that the program lists.
fn count_all(built: &Built) -> anyhow::Result<Vec<Count>> {
    let listed = Command::new(&built.program).output().context("cannot start peerway-count")?;
    let listed = String::from_utf8(listed.stdout)?;
    let out = env::temp_dir().join(format!("peerway-callgrind-{}", std::process::id()));
    let counts = listed.lines().map(|line| {
        let (name, about) = line.split_once(' ').unwrap_or((line, ""));
        let per_operation = count(built, name, &out).with_context(|| format!("figure {name}"))?;
        Ok(Count { name: name.to_owned(), about: about.trim().to_owned(), per_operation })
    });
    let counts = counts.collect();
    // A leftover in the temporary directory is harmless.
    let _ = fs::remove_file(&out);
    counts
}

fn count(built: &Built, name: &str, out: &PathBuf) -> anyhow::Result<Option<f64>> {
    // Only figures named after datagrams use datagram devices. Only figures that poll use a device
    // whose requests are already complete.
    let script = if name.starts_with("efa") {
        "efa"
    } else if name.ends_with("-poll") {
        "prompt"
    } else {
        ""
    };
    let run = Command::new(VALGRIND.program)
        .args(["--tool=callgrind", COLLECTED])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(&built.program)
        .arg(name)
        .env("GLIBC_TUNABLES", PLAIN_COPIES)
        .env("PEERWAY_IBV_SO", &built.fake)
        .env("PEERWAY_EFA_SO", &built.fake)
        .env("PEERWAY_FAKE_VERBS", script)
        .env("PEERWAY_FAKE_VERBS_FABRIC", format!("instructions-{}", std::process::id()))
        .output()
        .context("cannot start valgrind")?;
    let said = String::from_utf8_lossy(&run.stderr);
    if run.status.code() == Some(NOT_HERE) {
        return Ok(None);
    }
    if !run.status.success() {
        bail!("peerway-count ended with {}:\n{said}", run.status);
    }
    let operations: f64 = String::from_utf8(run.stdout)?.trim().parse()?;
    let profile = fs::read_to_string(out).context("cannot read callgrind's profile")?;
    match total(&profile) {
        Some(total) if total > 0 => {
            let of_fake = inclusive(&profile, &built.fake.to_string_lossy());
            Ok(Some((total - of_fake) as f64 / operations))
        }
        _ => bail!("callgrind collected nothing; check that `counted` is not inlined"),
    }
}

/// The total instructions of a profile.
fn total(profile: &str) -> Option<u64> {
    profile.lines().find_map(|line| line.strip_prefix("totals:"))?.trim().parse().ok()
}

/// The inclusive instructions of calls from other object files into this one.
fn inclusive(profile: &str, object: &str) -> u64 {
    // The profile writes a name once, after its number, and then uses the number.
    let mut names = BTreeMap::new();
    let mut is_it = |text: &str| {
        let (number, name) = text.split_once(' ').unwrap_or((text, ""));
        if !name.is_empty() {
            names.insert(number.to_owned(), name == object);
        }
        names.get(number).copied().unwrap_or(false)
    };
    let (mut inside, mut callee, mut sum) = (false, None, 0);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(text) = line.strip_prefix("ob=") {
            inside = is_it(text);
        } else if let Some(text) = line.strip_prefix("cob=") {
            callee = Some(is_it(text));
        } else if line.starts_with("calls=") {
            // The next line has the call site and the inclusive cost.
            let cost = lines.next().and_then(|line| line.split(' ').nth(1)?.parse::<u64>().ok());
            if callee.take().unwrap_or(inside) && !inside {
                sum += cost.unwrap_or(0);
            }
        }
    }
    sum
}

/// The file: one figure per line, with its name and its instructions per operation.
fn page(counts: &[Count]) -> String {
    let mut page = String::from(
        "# Instructions per operation, counted by callgrind. `cargo xtask instructions --bless` writes this file.\n\
         # The figures of verbs-* and efa-* exclude the fake device that replaces the hardware.\n",
    );
    for Count { name, per_operation, .. } in counts {
        // Writing to a string cannot fail.
        let _ = match per_operation {
            Some(count) => writeln!(page, "{name:<20} {count:>9.1}"),
            None => Ok(()),
        };
    }
    page
}

fn parse(page: &str) -> anyhow::Result<BTreeMap<&str, f64>> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let figures = lines.map(|line| {
        let (name, count) = line.split_once(' ').unwrap_or((line, ""));
        let count = count.trim().parse().ok().filter(|count: &f64| *count > 0.0);
        Ok((name, count.with_context(|| format!("{FILE}: no figure in '{line}'"))?))
    });
    figures.collect()
}

/// The table and the figures that fail.
fn compare(counts: &[Count], baseline: &BTreeMap<&str, f64>) -> (String, Vec<String>) {
    let (mut table, mut grown) = (String::new(), Vec::new());
    // Writing to a string cannot fail.
    let _ = writeln!(
        table,
        "{:<20} {:>9} {:>9} {:>8}  operation",
        "figure", "counted", "baseline", "change"
    );
    for Count { name, about, per_operation } in counts {
        let known = baseline.get(name.as_str());
        let change = per_operation.zip(known).map(|(now, known)| 100.0 * (now / known - 1.0));
        if per_operation.is_some() && change.is_none_or(|change| change > ALLOWED) {
            grown.push(name.clone());
        }
        let shown =
            |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1}"));
        let _ = writeln!(
            table,
            "{name:<20} {:>9} {:>9} {:>8}  {about}",
            shown(*per_operation),
            shown(known.copied()),
            change.map_or_else(|| "-".to_owned(), |change| format!("{change:+.1} %"))
        );
        if per_operation.is_none() {
            let _ = writeln!(
                table,
                "{:<20} this machine does not allow the operation: not compared",
                ""
            );
        }
    }
    (table, grown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(name: &str, per_operation: Option<f64>) -> Count {
        Count { name: name.to_owned(), about: "it".to_owned(), per_operation }
    }

    #[test]
    fn a_written_page_parses_back() {
        let counts = [count("a-write", Some(545.04)), count("gone", None), count("b", Some(7.0))];
        let page = page(&counts);
        let back = parse(&page).unwrap();
        assert_eq!(back, BTreeMap::from([("a-write", 545.0), ("b", 7.0)]));
        for bad in ["a", "a x", "a 0", "a -3"] {
            assert!(parse(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    #[test]
    fn only_growth_beyond_the_margin_fails() {
        let baseline = BTreeMap::from([("same", 100.0), ("more", 100.0), ("less", 100.0)]);
        let counts = [
            count("same", Some(109.9)),
            count("more", Some(110.2)),
            count("less", Some(50.0)),
            count("not-here", None),
            count("new", Some(1.0)),
        ];
        let (table, grown) = compare(&counts, &baseline);
        assert_eq!(grown, ["more", "new"]);
        assert!(table.contains("+10.2 %") && table.contains("-50.0 %"), "{table}");
        assert!(table.contains("does not allow"), "{table}");
    }

    #[test]
    fn calls_into_an_object_are_summed() {
        let profile = "\
ob=(1) /bin/program
fn=(1) post
10 5
cob=(2) /lib/fake.so
cfn=(2) post_send
calls=3 0
11 40
cfn=(3) local
calls=1 0
12 7
ob=(2)
fn=(2)
1 20
cob=(3) /lib/libc.so
cfn=(4) malloc
calls=3 0
2 20
cfn=(5) inner
calls=1 0
3 9
ob=(1)
fn=(6) poll
cob=(2)
cfn=(7) poll_cq
calls=1 0
20 2
";
        assert_eq!(inclusive(profile, "/lib/fake.so"), 42);
        assert_eq!(inclusive(profile, "/lib/none.so"), 0);
    }

    #[test]
    fn totals_are_found_in_a_profile() {
        assert_eq!(total("events: Ir\nsummary: 8\n\nfn=(1)\n1 8\n\ntotals: 8\n"), Some(8));
        assert_eq!(total("events: Ir\n"), None);
    }
}
