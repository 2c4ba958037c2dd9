//! `kvtier completions` and `kvtier man`: what is made from the definitions of the commands.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;
use kvtier_server::config::server_command;

use crate::{Cli, out, version};

/// Arguments of `kvtier completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell that is to complete commands and flags
    shell: Shell,
}

/// Arguments of `kvtier man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for the pages of all commands, created if it does not exist [default: kvtier(1) alone, to stdout]
    directory: Option<PathBuf>,
}

/// All commands, with the flags of the server, which its library parses.
fn definitions() -> Command {
    Cli::command().mut_subcommand("server", |command| {
        let about = command.get_about().cloned().unwrap_or_default();
        server_command()
            .name("server")
            .about(about)
            .version(version::TEXT)
    })
}

/// Prints the completions of a shell.
pub(crate) fn complete(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    // The generator panics if the reader has closed its end; ours drops the rest.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut definitions(), "kvtier", &mut script);
    out::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page per command, or prints the one of `kvtier`.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let Some(directory) = &args.directory else {
        // As the generator of all pages has it.
        let mut command = definitions().disable_help_subcommand(true);
        command.build();
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        out::stdout().write_all(&page)?;
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(definitions(), directory))
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    writeln!(
        out::stdout(),
        "man pages written to {}",
        directory.display()
    )?;
    Ok(ExitCode::SUCCESS)
}
