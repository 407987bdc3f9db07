//! `peerway bench data`: what the protection of TCP connections costs (`PEERWAY_DATA`).
//!
//! Two endpoints of this process talk over the loopback, one pair for each mode. The modes take
//! turns within each row, so that a busy machine slows all of them. Beside them stands `openssl`:
//! one process sends to another over TLS 1.3 with the same cipher.

use std::fmt;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use peerway::{Access, Batch, DataProtection, Endpoint, Peer, Pin, Region, RemoteRegion};
use serde::Serialize;

use super::outputs::Outputs;
use super::report::{figure, table, write_table};
use super::seconds;
use super::size::show;
use super::text::paragraph;

const MODES: [DataProtection; 3] =
    [DataProtection::Off, DataProtection::Integrity, DataProtection::Encrypt];
const SIZES: [u64; 3] = [256, 1 << 20, 16 << 20];
/// Transfers of one mode before the next mode has its turn take about this long.
const TURN: Duration = Duration::from_millis(20);
/// Connects of each mode.
const CONNECTS: usize = 30;
/// Bytes that openssl sends.
const OPENSSL_BYTES: u64 = 512 << 20;

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    /// Seconds per row, of all modes together.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "3")]
    seconds: f64,
    /// Write the rows to FILE as JSON. With `-`, the JSON goes to standard output and the table to
    /// standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One row: a value of each mode, in the order of [`MODES`].
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    size: u64,
    /// The median time, in microseconds.
    micros: Vec<f64>,
    /// The shortest median of a turn. On a busy machine it tells more than the median of all.
    best_micros: Vec<f64>,
}

impl Row {
    /// The row of these times in seconds, one list for each mode.
    fn new(what: &'static str, size: u64, times: &mut [Vec<f64>]) -> Self {
        let micros = times.iter_mut().map(|times| median(times) * 1e6).collect();
        // `median` has sorted them.
        let best_micros = times.iter().map(|times| times[0] * 1e6).collect();
        Self { what, size, micros, best_micros }
    }
}

/// The rows, and the rate of openssl or the reason why there is none.
struct Report {
    rows: Vec<Row>,
    openssl: anyhow::Result<f64>,
}

/// Runs the benchmark.
pub(crate) fn run(args: &DataArgs) -> anyhow::Result<()> {
    let outputs = Outputs::open(args.json.as_deref(), None)?;
    let mut rows = vec![connects()?];
    let pairs = MODES.iter().map(|mode| Pair::new(*mode)).collect::<anyhow::Result<Vec<_>>>()?;
    for size in SIZES {
        for (what, is_write) in [("write", true), ("read", false)] {
            rows.push(row(&pairs, what, is_write, size, args.seconds)?);
        }
    }
    drop(pairs);
    let report = Report { rows, openssl: openssl() };
    outputs.rows(&report.to_string(), &report.rows)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["row", "mode", "p50 µs", "best µs", "GB/s", "off / mode (best)"];
        let mut table = table(&head);
        for row in &self.rows {
            for (at, mode) in MODES.iter().enumerate() {
                let name = match row.size {
                    _ if at > 0 => String::new(),
                    0 => row.what.to_owned(),
                    size => format!("{} {}", row.what, show(size)),
                };
                let of = |times: &[f64]| times[0] / times[at];
                table.add_row([
                    name,
                    mode.to_string(),
                    format!("{:.1}", row.micros[at]),
                    format!("{:.1}", row.best_micros[at]),
                    match row.size {
                        0..1024 => "-".to_owned(),
                        size => figure(size as f64 / row.micros[at] / 1e3),
                    },
                    match at {
                        0 => String::new(),
                        _ => format!("{:.2} ({:.2})", of(&row.micros), of(&row.best_micros)),
                    },
                ]);
            }
        }
        write_table(f, &mut table, 2)?;
        writeln!(f)?;
        let openssl = match &self.openssl {
            Ok(rate) => format!(
                "openssl: {rate:.2} GB/s ({} from s_client to s_server, TLS_AES_128_GCM_SHA256)",
                show(OPENSSL_BYTES)
            ),
            Err(why) => format!("openssl: not measured: {why:#}"),
        };
        paragraph(f, &openssl)?;
        paragraph(
            f,
            "two endpoints of one process over the loopback, the modes in turns; best: the best \
             turn; the bytes of every row are compared",
        )
    }
}

fn endpoint(mode: DataProtection) -> anyhow::Result<Endpoint> {
    let builder = Endpoint::builder().transport(Pin::Tcp).bind("127.0.0.1:0".parse()?);
    Ok(builder.setting("PEERWAY_DATA", mode.to_string()).build()?)
}

/// Two endpoints with a session.
struct Pair {
    peer: Peer,
    local: Region,
    target: Region,
    remote: RemoteRegion,
    _ends: [Endpoint; 2],
}

impl Pair {
    fn new(mode: DataProtection) -> anyhow::Result<Self> {
        let (a, b) = (endpoint(mode)?, endpoint(mode)?);
        let peer = a.connect(&b.metadata())?;
        ensure!(peer.path().data == mode, "the session is not protected as asked for");
        let longest = SIZES[SIZES.len() - 1] as usize;
        let bytes: Vec<u8> = (0..longest as u32).map(|at| (at ^ (at >> 9)) as u8).collect();
        let local = a.register(bytes)?;
        let target = b.register(vec![0u8; longest])?;
        let remote = peer.import(&target.advertise(Access::READ_WRITE)?)?;
        Ok(Self { peer, local, target, remote, _ends: [a, b] })
    }

    /// The median time of a transfer.
    fn turn(&self, batch: &Batch, times: usize) -> anyhow::Result<f64> {
        let mut all = Vec::with_capacity(times);
        for _ in 0..times {
            let start = Instant::now();
            self.peer.run(batch)?.ok()?;
            all.push(start.elapsed().as_secs_f64());
        }
        Ok(median(&mut all))
    }

    fn check(&self, size: u64) -> anyhow::Result<()> {
        let [mut ours, mut theirs] = [vec![0; size as usize], vec![1; size as usize]];
        self.local.read_at(0, &mut ours)?;
        self.target.read_at(0, &mut theirs)?;
        ensure!(ours == theirs, "the bytes differ after a row");
        Ok(())
    }
}

fn row(
    pairs: &[Pair],
    what: &'static str,
    is_write: bool,
    size: u64,
    seconds: f64,
) -> anyhow::Result<Row> {
    let mut batches = Vec::new();
    for pair in pairs {
        let (here, there) = (pair.local.slice(0..size), pair.remote.slice(0..size));
        batches.push(match is_write {
            true => Batch::write(&here, &there)?,
            false => Batch::read(&here, &there)?,
        });
    }
    let mut times = vec![Vec::new(); pairs.len()];
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let mut per_turn = 3;
    while times[0].len() < 3 || Instant::now() < until {
        for (at, (pair, batch)) in pairs.iter().zip(&batches).enumerate() {
            let one = pair.turn(batch, per_turn)?;
            times[at].push(one);
            if at == 0 {
                let turns = TURN.as_secs_f64() / one;
                per_turn = (turns as usize).clamp(3, 2000);
            }
        }
    }
    for pair in pairs {
        pair.check(size)?;
    }
    Ok(Row::new(what, size, &mut times))
}

/// The time to connect, from a new endpoint each time.
fn connects() -> anyhow::Result<Row> {
    let mut times = vec![Vec::new(); MODES.len()];
    for _ in 0..CONNECTS {
        for (at, mode) in MODES.iter().enumerate() {
            let (a, b) = (endpoint(*mode)?, endpoint(*mode)?);
            let start = Instant::now();
            a.connect(&b.metadata())?;
            times[at].push(start.elapsed().as_secs_f64());
        }
    }
    Ok(Row::new("connect", 0, &mut times))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Ends a process that may still run.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Gigabytes per second that `openssl s_client` sends to `openssl s_server`.
fn openssl() -> anyhow::Result<f64> {
    let folder = std::env::temp_dir().join(format!("peerway-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let rate = openssl_in(&folder);
    let _ = std::fs::remove_dir_all(&folder);
    rate
}

fn openssl_in(folder: &std::path::Path) -> anyhow::Result<f64> {
    let quiet = |words: &str| {
        let mut command = Command::new("openssl");
        command.args(words.split_whitespace()).current_dir(folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut made = quiet(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key -out cert -days 1 \
         -subj /CN=bench",
    );
    let made = made.status().context("`openssl` cannot be run; install it to compare with it")?;
    ensure!(made.success(), "`openssl req` makes no certificate");
    // The port is free a moment before openssl takes it.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut server =
        quiet(&format!("s_server -accept 127.0.0.1:{port} -cert cert -key key -quiet -naccept 1"));
    // A server whose input is over closes the connection.
    let _server = Process(server.stdin(Stdio::piped()).spawn()?);
    let until = Instant::now() + Duration::from_secs(5);
    while !is_listening(port) {
        ensure!(Instant::now() < until, "`openssl s_server` does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut client = quiet(&format!(
        "s_client -connect 127.0.0.1:{port} -tls1_3 -ciphersuites TLS_AES_128_GCM_SHA256 -quiet \
         -no_ign_eof"
    ));
    let mut client = Process(client.stdin(Stdio::piped()).spawn()?);
    let mut input = client.0.stdin.take().context("no input of openssl")?;
    std::thread::sleep(Duration::from_millis(200));
    let block = vec![0; 1 << 20];
    let start = Instant::now();
    for _ in 0..OPENSSL_BYTES >> 20 {
        input.write_all(&block).context("`openssl s_client` ended early")?;
    }
    drop(input);
    client.0.wait()?;
    Ok(OPENSSL_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// Whether a process listens on a port of the loopback. A connection would be the only one that the
/// server accepts.
fn is_listening(port: u16) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    // The second word is the local address, the fourth the state; 0A is that of a listener.
    sockets.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(1).is_some_and(|address| address.ends_with(&format!(":{port:04X}")))
            && words.get(3) == Some(&"0A")
    })
}
