//! A complete run of the benchmark, on one machine or against another machine.

use std::fs::File;
use std::io::{BufReader, Write};
use std::net::{IpAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use peerway::Pin;
use serde::Serialize;

use super::clock::Stopwatch;
use super::control::{Control, Lost};
use super::copies::Mate;
use super::memory::{Memory, Place};
use super::perftest::port;
use super::plan::Plan;
use super::report::kinds::Kinds;
use super::report::{Compared, Report};
use super::second::{self, Second};
use super::session::{Session, Tools};
use super::watchdog::{self, Verdict, Watchdog};
use super::{Measure, Mode, kinds, memory, plot, serve};
use crate::output;

/// The default paths on one machine.
const LOCAL: [Pin; 5] = [Pin::LocalMap, Pin::LocalCma, Pin::LocalRing, Pin::Tcp, Pin::Ib];
/// The default paths on one machine with GPU memory.
const GPU: [Pin; 3] = [Pin::Auto, Pin::LocalRing, Pin::Tcp];
/// The default paths to another machine.
const REMOTE: [Pin; 2] = [Pin::Auto, Pin::Tcp];

/// Measures on this machine, with a second process.
pub(crate) fn alone(measure: &Measure) -> anyhow::Result<()> {
    let plan = Plan::new(measure)?;
    // The second process sees the same GPUs, so this check holds for both sides.
    measure.places().iter().try_for_each(|place| place.check())?;
    if measure.memory_kinds {
        let gpus = measure.gpu.map(|gpu| Place { memory: Memory::Gpu, gpu });
        gpus.iter().try_for_each(|place| place.check())?;
    }
    let outputs = Outputs::open(measure.json.as_deref(), measure.plot.as_deref())?;
    let (second, control) = Second::start()?;
    let (asked, killed) = (second.clone(), second.clone());
    let bar = progress();
    let trouble =
        move || asked.ended().map(|status| format!("the second process ended ({status})"));
    let dog = start_watchdog(measure, &bar, trouble, move || killed.kill());
    if measure.memory_kinds {
        let report = kinds(measure, control, &dog).map_err(|error| second.blame(error));
        bar.finish_and_clear();
        drop(dog);
        let report = report?;
        return outputs.rows(&report.to_string(), &report.rows);
    }
    let pins = pins(measure);
    let report = run(measure, &plan, &pins, control, second::HERE, &dog, &bar);
    let report = report.map_err(|error| second.blame(error));
    bar.finish_and_clear();
    drop(dog);
    outputs.write(report?)
}

/// The default paths on one machine for the selected memory.
fn pins(measure: &Measure) -> Vec<Pin> {
    if measure.has_gpu() {
        return GPU.to_vec();
    }
    let mut pins = LOCAL.to_vec();
    if port::has_efa() {
        pins[LOCAL.len() - 1] = Pin::Efa;
    }
    // Another process cannot map memory that the driver pinned.
    pins.retain(|pin| *pin != Pin::LocalMap || measure.memory[1] == Memory::Host);
    pins
}

/// Measures against `bench serve` on another machine.
pub(crate) fn across(address: &str, measure: &Measure) -> anyhow::Result<()> {
    let plan = Plan::new(measure)?;
    if measure.memory_kinds {
        bail!("--memory-kinds works on one machine only: do not use it with `bench connect`");
    }
    measure.places()[0].check()?;
    let outputs = Outputs::open(measure.json.as_deref(), measure.plot.as_deref())?;
    let stream = reach(address)?;
    let ip = serve::prepare(&stream)?;
    let control = Control::new(BufReader::new(stream.try_clone()?), stream)
        .with_context(|| format!("{address} is not a matching `peerway bench serve`"))?;
    let bar = progress();
    let dog = start_watchdog(measure, &bar, || None, || ());
    let report = run(measure, &plan, &REMOTE, control, ip, &dog, &bar);
    bar.finish_and_clear();
    drop(dog);
    outputs.write(report?)
}

/// Compares the kinds of GPU memory.
fn kinds(measure: &Measure, control: Control, dog: &Watchdog) -> anyhow::Result<Kinds> {
    let mut tools = tools(measure, control, second::HERE, dog, 0)?;
    let rows = kinds::measure(&mut tools, measure.gpu)?;
    Ok(Kinds { gpus: measure.gpu, seconds: measure.seconds, rows })
}

fn reach(address: &str) -> anyhow::Result<TcpStream> {
    let mut last = None;
    for place in serve::resolve(address)? {
        match TcpStream::connect_timeout(&place, Duration::from_secs(5)) {
            Ok(stream) => {
                // The stream has no read time-out. If the other machine dies, the watchdog ends the
                // run.
                return Ok(stream);
            }
            Err(error) => last = Some(error),
        }
    }
    let why = last.map_or_else(String::new, |error| format!(": {error}"));
    bail!("cannot reach {address}{why}: start `peerway bench serve` there")
}

fn run(
    measure: &Measure,
    plan: &Plan,
    pins: &[Pin],
    control: Control,
    ip: IpAddr,
    dog: &Watchdog,
    bar: &ProgressBar,
) -> anyhow::Result<Finished> {
    let pins = if measure.paths.is_empty() { pins } else { &measure.paths };
    bar.set_length((pins.len() * (plan.rows.len() + 1)) as u64);
    let scratch = if measure.has_gpu() { 0 } else { plan.largest() };
    let mut tools = tools(measure, control, ip, dog, scratch)?;
    let mut finished = Finished {
        failed: Vec::new(),
        report: Report {
            lines: Vec::new(),
            memory: measure.memory,
            told: Default::default(),
            besides: Vec::new(),
            compared: Vec::new(),
            registrations: Vec::new(),
            notes: plan.left_out().into_iter().collect(),
            seconds: measure.seconds,
            clock_cost: tools.watch.cost(),
            counted: measure.counted,
            copy_threads: if tools.mate.is_some() { 2 } else { 1 },
        },
    };
    for &pin in pins {
        dog.begin(format!("opening {pin}"));
        bar.set_message(pin.to_string());
        match Session::open(&mut tools, pin, plan.largest()) {
            Ok(session) => finished.path(measure, plan, &mut tools, session, bar)?,
            Err(error) if error.is::<Lost>() => return Err(error),
            Err(error) => {
                finished.report.notes.push(format!("{pin}: not measured: {error:#}"));
                bar.inc(plan.rows.len() as u64 + 1);
            }
        }
    }
    if finished.report.lines.is_empty() && finished.failed.is_empty() {
        bail!("no path works on this machine: {}", finished.report.notes.join("; "));
    }
    Ok(finished)
}

fn tools<'a>(
    measure: &Measure,
    control: Control,
    ip: IpAddr,
    dog: &'a Watchdog,
    scratch: u64,
) -> anyhow::Result<Tools<'a>> {
    Ok(Tools {
        control,
        watch: Stopwatch::new(),
        dog,
        mate: Mate::start(),
        scratch: memory::touched(scratch)?,
        seconds: measure.seconds,
        ip,
        places: measure.places(),
        devices: measure.devices(),
        perftest: measure.perftest,
        counted: measure.counted,
    })
}

/// A finished run, with its failures.
struct Finished {
    report: Report,
    failed: Vec<String>,
}

impl Finished {
    /// Measures a path. A failure is recorded, and the run continues with the next path. If the
    /// connection to the other side is lost, the run ends with an error.
    fn path(
        &mut self,
        measure: &Measure,
        plan: &Plan,
        tools: &mut Tools<'_>,
        session: Session,
        bar: &ProgressBar,
    ) -> anyhow::Result<()> {
        let name = session.name.clone();
        self.report.told.clone_from(&session.told);
        let end = bar.position() + plan.rows.len() as u64 + 1;
        if self.report.lines.iter().any(|line| line.path == name) {
            self.report
                .notes
                .push(format!("{name} is also the path that auto selects: measured once"));
        } else {
            let failed = self.failed.len();
            for row in &plan.rows {
                let what = format!("{name} {}", row.name());
                tools.dog.begin(what.clone());
                bar.set_message(what.clone());
                match session.row(tools, row) {
                    Ok((line, pairs)) => {
                        let pairs = pairs.map(|pairs| Compared::new(&line, &pairs));
                        self.report.compared.extend(pairs);
                        self.report.lines.push(line);
                    }
                    Err(error) => {
                        self.fail(what, error)?;
                        break;
                    }
                }
                bar.inc(1);
            }
            if measure.registration && session.is_rdma() && self.failed.len() == failed {
                let what = format!("{name} registering memory");
                tools.dog.begin(what.clone());
                bar.set_message(what.clone());
                match session.registration(tools) {
                    Ok(registration) => self.report.registrations.push(registration),
                    Err(error) => self.fail(what, error)?,
                }
            }
            if measure.mode == Mode::Bandwidth && self.failed.len() == failed {
                let what = format!("{name} connect, post and idle");
                tools.dog.begin(what.clone());
                bar.set_message(what.clone());
                match session.besides(tools) {
                    Ok(besides) => self.report.besides.push(besides),
                    Err(error) => self.fail(what, error)?,
                }
            }
        }
        bar.set_position(end);
        session.close(tools)
    }

    fn fail(&mut self, what: String, error: anyhow::Error) -> anyhow::Result<()> {
        if error.is::<Lost>() {
            return Err(error.context(what));
        }
        self.failed.push(format!("{what}: {error:#}"));
        Ok(())
    }
}

/// A progress bar on standard error. It draws nothing if standard error is no terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} after {elapsed}: {msg}") {
        bar.set_style(style);
    }
    bar
}

fn start_watchdog(
    measure: &Measure,
    bar: &ProgressBar,
    trouble: impl Fn() -> Option<String> + Send + 'static,
    clean_up: impl FnOnce() + Send + 'static,
) -> Watchdog {
    // There is at least one beat per round, and a round is a part of a row.
    let patience = watchdog::PATIENCE + Duration::from_secs_f64(measure.seconds);
    let bar = bar.clone();
    Watchdog::start(patience, trouble, move |Verdict(why)| {
        bar.finish_and_clear();
        output::report_line(format_args!("peerway: {why}"));
        clean_up();
        // A thread that hangs cannot be stopped, so the process exits.
        std::process::exit(1);
    })
}

/// The output files. They are created at the start, so that a wrong name does not cost a whole run.
pub(crate) struct Outputs {
    json: Option<(String, Option<File>)>,
    plot: Option<(String, File)>,
}

impl Outputs {
    /// Creates the files.
    pub(crate) fn open(json: Option<&Path>, plot: Option<&Path>) -> anyhow::Result<Self> {
        let create = |path: &Path| {
            let name = path.display().to_string();
            let file = File::create(path).with_context(|| format!("cannot write {name}"))?;
            anyhow::Ok((name, file))
        };
        let json = match json {
            Some(path) if path.as_os_str() == "-" => Some(("standard output".to_owned(), None)),
            Some(path) => Some(create(path).map(|(name, file)| (name, Some(file)))?),
            None => None,
        };
        Ok(Self { json, plot: plot.map(create).transpose()? })
    }

    /// Writes all results. Then returns an error if a row failed.
    fn write(self, finished: Finished) -> anyhow::Result<()> {
        let Finished { report, failed } = finished;
        let written = self.rows(&report.to_string(), &report.lines);
        if let Some((name, mut file)) = self.plot {
            file.write_all(plot::svg(&report.lines).as_bytes())
                .with_context(|| format!("cannot write {name}"))?;
        }
        if !failed.is_empty() {
            bail!("{}", failed.join("; "));
        }
        written
    }

    /// Writes the table and the rows.
    pub(crate) fn rows(&self, text: &str, rows: &impl Serialize) -> anyhow::Result<()> {
        match &self.json {
            Some((_, None)) => {
                output::report(text);
                output::print(json(rows)?)
            }
            Some((name, Some(file))) => {
                // The file comes first, so that it is complete even if standard output is closed.
                (&*file)
                    .write_all(json(rows)?.as_bytes())
                    .with_context(|| format!("cannot write {name}"))?;
                output::print(text)
            }
            None => output::print(text),
        }
    }
}

fn json(rows: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(rows)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::tests::defaults;

    #[test]
    fn a_file_that_cannot_be_written_is_told_at_once() {
        let measure = Measure { json: Some("/nowhere/x.json".into()), ..defaults() };
        let error = Outputs::open(measure.json.as_deref(), None).err().unwrap();
        assert!(format!("{error:#}").starts_with("cannot write /nowhere/x.json: "));
    }

    #[test]
    fn an_address_without_a_server_is_one_sentence() {
        // A free port: nothing listens there.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = reach(&free.to_string()).unwrap_err().to_string();
        assert!(error.contains("bench serve"), "{error}");
    }
}
