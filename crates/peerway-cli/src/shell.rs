//! Files for shells and readers of manuals, generated from the command line's definition.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::output;

/// `peerway completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  peerway completions bash > ~/.local/share/bash-completion/completions/peerway
  peerway completions zsh > ~/.zfunc/_peerway
  peerway completions fish > ~/.config/fish/completions/peerway.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// `peerway man`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  peerway man | man -l -                              read the page
  peerway man bench > ~/.local/share/man/man1/peerway-bench.1")]
pub(crate) struct ManArgs {
    /// The subcommand, such as `bench serve` [default: the program].
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "peerway", &mut text);
    output::print(String::from_utf8(text)?)
}

/// Prints a page of the manual.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let mut root = Cli::command();
    root.build();
    let mut command = &root;
    for name in &args.command {
        command = command.find_subcommand(name).ok_or_else(|| {
            let known: Vec<&str> = visible(command).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let above = command.get_bin_name().unwrap_or("peerway");
            anyhow::anyhow!("{above} has no subcommand `{name}`: its subcommands are {known}")
        })?;
    }
    let name = command.get_bin_name().unwrap_or("peerway").replace(' ', "-");
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone()).title(name).render(&mut text)?;
    output::print(String::from_utf8(text)?)
}

fn visible(command: &clap::Command) -> impl Iterator<Item = &str> {
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(clap::Command::get_name)
}
