//! The command line.

use anyhow::{Context, Result, bail};

use crate::profile::{self, Profile};
use crate::world::Transport;

pub(crate) const USAGE: &str = "\
usage: peerway-conformance --transport same-process|local-map|local-cma|local-ring|tcp|all|verbs|efa
                           --profile ci|guest|soak [--jobs N] [--only NAME] [--list]
--jobs runs so many scenarios at once, except those that need the machine for themselves (1)
CONFORMANCE_DEVICES=OURS/THEIRS names RDMA devices of the two sides (rxe0,rxe2/rxe1,rxe3)
CONFORMANCE_LOG=DIRECTORY has every process write the engine's log there";

/// What this process is to be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// Runs the scenarios, each in a process.
    Supervise,
    /// Prints their names.
    List,
    /// One scenario.
    Run,
    /// A peer in one.
    Serve,
    /// A peer in namespaces of its own, which `only` names.
    ServeApart,
}

pub(crate) struct Args {
    pub(crate) role: Role,
    pub(crate) transports: Vec<Transport>,
    pub(crate) profile: Profile,
    /// Scenarios at once.
    pub(crate) jobs: usize,
    /// Names, or beginnings of names; empty for all.
    pub(crate) only: Vec<String>,
}

pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Args> {
    let mut args = Args {
        role: Role::Supervise,
        transports: Transport::ANYWHERE.to_vec(),
        profile: profile::CI,
        jobs: 1,
        only: Vec::new(),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value"));
        match word.as_str() {
            "--transport" => args.transports = transports(&value()?)?,
            "--profile" => {
                let name = value()?;
                let known = profile::ALL.iter().find(|p| p.name == name);
                args.profile = *known.with_context(|| format!("no profile '{name}'"))?;
            }
            "--jobs" => {
                let jobs = value()?;
                let parsed = jobs.parse().ok().filter(|jobs| (1..=64).contains(jobs));
                args.jobs = parsed.with_context(|| format!("--jobs is 1 to 64, not '{jobs}'"))?;
            }
            "--only" => args.only.extend(value()?.split(',').map(str::to_owned)),
            "--list" => args.role = Role::List,
            // Only this program says these, to itself.
            "--run" => args.role = Role::Run,
            "--serve-apart" => {
                args.role = Role::ServeApart;
                args.only.extend(value()?.split(',').map(str::to_owned));
            }
            "--serve" => args.role = Role::Serve,
            _ => bail!("unknown argument '{word}'"),
        }
    }
    Ok(args)
}

fn transports(text: &str) -> Result<Vec<Transport>> {
    if text == "all" {
        return Ok(Transport::ANYWHERE.to_vec());
    }
    let named = |name: &str| {
        let known = Transport::ALL.iter().find(|t| t.name() == name);
        known.copied().with_context(|| format!("no transport '{name}'"))
    };
    text.split(',').map(named).collect()
}
