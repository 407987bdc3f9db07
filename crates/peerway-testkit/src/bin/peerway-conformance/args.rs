//! The command line.

use anyhow::{Context, Result, bail};

use crate::profile::{self, Profile};
use crate::world::Transport;

pub(crate) const USAGE: &str = "\
usage: peerway-conformance --transport same-process|local-map|local-cma|local-ring|tcp|
                           tcp-integrity|tcp-encrypt|all|verbs|efa
                           --profile ci|guest|soak [--jobs N] [--only NAME] [--list]
--jobs N runs N scenarios at once (default 1); scenarios that need an idle machine run alone
CONFORMANCE_DEVICES=OURS/THEIRS names the RDMA devices of the two sides (rxe0,rxe2/rxe1,rxe3)
CONFORMANCE_LOG=DIRECTORY makes every process write the engine's log to a file there";

/// The role of this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// Runs the scenarios, each in its own process.
    Supervise,
    /// Prints the names of the scenarios.
    List,
    /// Runs one scenario.
    Run,
    /// Acts as a peer in a scenario.
    Serve,
    /// Acts as a peer in its own namespaces, which `only` names.
    ServeApart,
}

pub(crate) struct Args {
    pub(crate) role: Role,
    pub(crate) transports: Vec<Transport>,
    pub(crate) profile: Profile,
    /// How many scenarios run at once.
    pub(crate) jobs: usize,
    /// Names of scenarios, or prefixes of names. Empty selects all scenarios.
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
                args.profile = *known.with_context(|| format!("unknown profile '{name}'"))?;
            }
            "--jobs" => {
                let jobs = value()?;
                let parsed = jobs.parse().ok().filter(|jobs| (1..=64).contains(jobs));
                args.jobs =
                    parsed.with_context(|| format!("--jobs must be 1 to 64, not '{jobs}'"))?;
            }
            "--only" => args.only.extend(value()?.split(',').map(str::to_owned)),
            "--list" => args.role = Role::List,
            // Internal arguments: this program passes them to the processes that it starts.
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
        known.copied().with_context(|| format!("unknown transport '{name}'"))
    };
    text.split(',').map(named).collect()
}
