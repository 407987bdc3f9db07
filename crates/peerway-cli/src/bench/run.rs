//! A complete run of the benchmark, on one machine or against another machine.

use std::io::BufReader;
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use peerway::Pin;

use super::clock::Stopwatch;
use super::control::{Control, Lost};
use super::copies::Mate;
use super::document::{Document, Why};
use super::interrupt::{self, Interrupted};
use super::memory::{Memory, Place};
use super::outputs::Outputs;
use super::perftest::port;
use super::plan::Plan;
use super::report::kinds::Kinds;
use super::report::{Columns, Compared, Line, Report};
use super::second::{self, Second};
use super::session::{self, Session, Tools};
use super::watchdog::{self, Verdict, Watchdog};
use super::{Measure, Mode, kinds, memory, placement, plot, serve};
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
    if !measure.memory_kinds {
        interrupt::catch()?;
    }
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
    let mut tools = tools(measure, &plan, control, second::HERE, &dog)?;
    tools.halves = placement::halves();
    let mut run = Run::new(measure, &plan, &tools, &outputs, &bar);
    let ended = run.paths(&pins, &mut tools).map_err(|error| second.blame(error));
    bar.finish_and_clear();
    drop(tools);
    drop(dog);
    run.finish(ended)
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
    interrupt::catch()?;
    let stream = reach(address)?;
    let ip = serve::prepare(&stream)?;
    let control = Control::new(BufReader::new(stream.try_clone()?), stream)
        .with_context(|| format!("{address} is not a matching `peerway bench serve`"))?;
    let bar = progress();
    let dog = start_watchdog(measure, &bar, || None, || ());
    let mut tools = tools(measure, &plan, control, ip, &dog)?;
    let mut run = Run::new(measure, &plan, &tools, &outputs, &bar);
    let ended = run.paths(&REMOTE, &mut tools);
    bar.finish_and_clear();
    drop(tools);
    drop(dog);
    run.finish(ended)
}

/// Compares the kinds of GPU memory.
fn kinds(measure: &Measure, control: Control, dog: &Watchdog) -> anyhow::Result<Kinds> {
    let mut tools = tools_with(measure, control, second::HERE, dog, 0)?;
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

fn tools<'a>(
    measure: &Measure,
    plan: &Plan,
    control: Control,
    ip: IpAddr,
    dog: &'a Watchdog,
) -> anyhow::Result<Tools<'a>> {
    let scratch = if measure.has_gpu() { 0 } else { plan.largest() };
    tools_with(measure, control, ip, dog, scratch)
}

fn tools_with<'a>(
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
        halves: None,
    })
}

/// A run: what it has measured so far, and what has failed.
struct Run<'a> {
    measure: &'a Measure,
    plan: &'a Plan,
    outputs: &'a Outputs,
    bar: &'a ProgressBar,
    columns: Columns,
    report: Report,
    failed: Vec<String>,
    /// The reader has closed standard output. The run continues for the files.
    closed: bool,
}

impl<'a> Run<'a> {
    fn new(
        measure: &'a Measure,
        plan: &'a Plan,
        tools: &Tools<'_>,
        outputs: &'a Outputs,
        bar: &'a ProgressBar,
    ) -> Self {
        let report = Report {
            lines: Vec::new(),
            memory: measure.memory,
            told: Default::default(),
            besides: Vec::new(),
            compared: Vec::new(),
            registrations: Vec::new(),
            whys: Vec::new(),
            notes: plan.left_out().into_iter().collect(),
            seconds: measure.seconds,
            clock_cost: tools.watch.cost(),
            counted: measure.counted,
            copy_threads: if tools.mate.is_some() { 2 } else { 1 },
            halves: tools.halves.clone(),
        };
        let (columns, failed) = (Columns::new(plan), Vec::new());
        Self { measure, plan, outputs, bar, columns, report, failed, closed: false }
    }

    /// Measures the paths that the flags name, or else `pins`. Returns an error if the run cannot
    /// continue. What was measured before is kept.
    fn paths(&mut self, pins: &[Pin], tools: &mut Tools<'_>) -> anyhow::Result<()> {
        let pins = if self.measure.paths.is_empty() { pins } else { &self.measure.paths };
        self.bar.set_length((pins.len() * (self.plan.rows.len() + 1)) as u64);
        if !pins.contains(&Pin::Auto) && !self.measure.has_gpu() {
            self.report.whys.extend(session::why_auto(tools)?);
        }
        for &pin in pins {
            interrupt::check()?;
            tools.dog.begin(format!("opening {pin}"));
            self.bar.set_message(pin.to_string());
            match Session::open(tools, pin, self.plan.largest()) {
                Ok(session) => self.path(tools, session)?,
                Err(error) if error.is::<Lost>() => return Err(error),
                Err(error) => {
                    self.report.notes.push(format!("{pin}: not measured: {error:#}"));
                    self.bar.inc(self.plan.rows.len() as u64 + 1);
                }
            }
        }
        if self.report.lines.is_empty() && self.failed.is_empty() {
            bail!("no path works on this machine: {}", self.report.notes.join("; "));
        }
        Ok(())
    }

    /// Measures a path. A failure is recorded, and the run continues with the next path. If the
    /// connection to the other side is lost, the run ends with an error.
    fn path(&mut self, tools: &mut Tools<'_>, session: Session) -> anyhow::Result<()> {
        let name = session.name.clone();
        self.report.told.clone_from(&session.told);
        let end = self.bar.position() + self.plan.rows.len() as u64 + 1;
        if self.report.lines.iter().any(|line| line.path == name) {
            let note = format!("{name} is also the path that auto selects: measured once");
            self.report.notes.push(note);
        } else {
            self.report.whys.push(Why { path: name.clone(), why: session.why() });
            self.rows(tools, &session, &name)?;
        }
        self.bar.set_position(end);
        session.close(tools)
    }

    fn rows(&mut self, tools: &mut Tools<'_>, session: &Session, name: &str) -> anyhow::Result<()> {
        for row in &self.plan.rows {
            let what = format!("{name} {}", row.name());
            self.begin(tools, &what);
            match session.row(tools, row) {
                Ok((line, pairs)) => {
                    let pairs = pairs.map(|pairs| Compared::new(&line, &pairs));
                    self.report.compared.extend(pairs);
                    self.add(line)?;
                }
                Err(error) => return self.fail(what, error),
            }
            self.bar.inc(1);
        }
        if self.measure.registration && session.is_rdma() {
            let what = format!("{name} registering memory");
            self.begin(tools, &what);
            match session.registration(tools) {
                Ok(registration) => self.report.registrations.push(registration),
                Err(error) => return self.fail(what, error),
            }
        }
        if self.measure.full && self.measure.mode == Mode::Bandwidth {
            let what = format!("{name} connect, post and idle");
            self.begin(tools, &what);
            match session.besides(tools) {
                Ok(besides) => self.report.besides.push(besides),
                Err(error) => return self.fail(what, error),
            }
        }
        Ok(())
    }

    fn begin(&self, tools: &Tools<'_>, what: &str) {
        tools.dog.begin(what.to_owned());
        self.bar.set_message(what.to_owned());
    }

    /// Adds a row and prints it.
    fn add(&mut self, line: Line) -> anyhow::Result<()> {
        let mut text = match self.report.lines.last() {
            None => self.report.head(line.op) + &self.columns.head(),
            Some(last) if last.path != line.path => "\n".to_owned(),
            Some(_) => String::new(),
        };
        text += &self.columns.row(&line);
        self.report.lines.push(line);
        self.show(&text)
    }

    fn show(&mut self, text: &str) -> anyhow::Result<()> {
        if self.closed {
            return Ok(());
        }
        match self.bar.suspend(|| self.outputs.show(text)) {
            Err(error) if error.is::<output::Closed>() && self.outputs.has_files() => {
                self.closed = true;
                Ok(())
            }
            shown => shown,
        }
    }

    fn fail(&mut self, what: String, error: anyhow::Error) -> anyhow::Result<()> {
        // A signal also ends the children of this process, whose failures are then no news.
        if interrupt::is_asked() {
            return Err(Interrupted.into());
        }
        if error.is::<Lost>() {
            return Err(error.context(what));
        }
        self.failed.push(format!("{what}: {error:#}"));
        Ok(())
    }

    /// Writes what was measured, also if the run `ended` with an error, and returns that error.
    fn finish(mut self, ended: anyhow::Result<()>) -> anyhow::Result<()> {
        if self.report.lines.is_empty() || ended.as_ref().is_err_and(|e| e.is::<output::Closed>()) {
            return ended.and_then(|()| self.failures());
        }
        let complete = ended.is_ok() && self.failed.is_empty();
        let ended = match ended {
            Err(error) if error.is::<Interrupted>() => {
                let rows = self.report.lines.len();
                Err(error.context(format!("stopped after {rows} rows, which are shown above")))
            }
            ended => ended,
        };
        // The files come first, so that they are complete even if standard output is closed.
        let to_stdout = !self.outputs.has_files();
        if to_stdout {
            self.show(&self.report.legend())?;
        }
        let Report { lines, whys, notes, .. } = &self.report;
        self.outputs.save(&Document::new(lines).with(complete, whys, notes))?;
        self.outputs.draw(|| plot::svg(lines))?;
        if !to_stdout {
            self.show(&self.report.legend())?;
        }
        ended.and_then(|()| self.failures())
    }

    fn failures(&self) -> anyhow::Result<()> {
        if !self.failed.is_empty() {
            bail!("{}", self.failed.join("; "));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_server_is_one_sentence() {
        // A free port: nothing listens there.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = reach(&free.to_string()).unwrap_err().to_string();
        assert!(error.contains("bench serve"), "{error}");
    }
}
