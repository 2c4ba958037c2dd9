//! `kvtier config`: the configuration that a server runs with, what a file would change, and reload.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Subcommand};
use kvtier_observe::api::{ChangedFlag, Reloaded};
use kvtier_server::config::flags_by_name;
use kvtier_server::escape::escape;
use kvtier_server::{Parsed, ServerConfig};
use serde_json::Value;

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client};

/// Exit code of a comparison that found differences.
const DIFFERENT: u8 = 3;

/// Arguments of `kvtier config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Print the value of each flag that a server runs with; secrets are hidden.
    Show(ServerArgs),
    /// Make a server read its configuration file, tokens and certificate again; print what has changed.
    Reload(ServerArgs),
    /// Print what a restart with a configuration file would change; exit code 3 if anything.
    Diff(DiffArgs),
}

/// Arguments for the server.
#[derive(Debug, Args)]
struct ServerArgs {
    #[command(flatten)]
    address: HttpArgs,
    /// Timeout of the request, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "10", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Debug, Args)]
struct DiffArgs {
    /// Configuration file, as for `kvtier server`
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

/// Values by flag, without the dashes in front.
type Flags = BTreeMap<String, Value>;

/// Prints the configuration of a server, or its differences from a file.
pub(crate) fn run(args: &ConfigArgs) -> anyhow::Result<ExitCode> {
    let mut out = out::stdout();
    match &args.command {
        ConfigCommand::Show(server) => {
            for (flag, value) in running(server)? {
                writeln!(out, "{flag} = {value}")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        ConfigCommand::Reload(server) => {
            let reloaded = reload(server)?;
            for ChangedFlag { flag, from, to } in &reloaded.changed {
                writeln!(out, "{flag}: {} -> {}", out::shown(from), out::shown(to))?;
            }
            for what in &reloaded.checked {
                writeln!(out, "read again: {}", escape(what))?;
            }
            if reloaded == Reloaded::default() {
                writeln!(out, "nothing has changed")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        ConfigCommand::Diff(args) => {
            let file = args.config.as_os_str().to_owned();
            let parsed = ServerConfig::parse(vec!["--config".into(), file])?;
            let Parsed::Run { config, .. } = parsed else {
                bail!("--config {}: is no configuration", args.config.display());
            };
            let (mut running, wanted) = (running(&args.server)?, flags_by_name(&config.shown));
            let mut is_different = false;
            for (flag, wanted) in wanted {
                // One that an older server does not have.
                let now = running.remove(&flag).unwrap_or_default();
                if now != wanted {
                    is_different = true;
                    writeln!(out, "{flag}: {now} -> {}", out::shown(&wanted))?;
                }
            }
            Ok(ExitCode::from(if is_different { DIFFERENT } else { 0 }))
        }
    }
}

/// What a server runs with.
fn running(args: &ServerArgs) -> anyhow::Result<Flags> {
    let answer = args.client()?.json("GET", "/config", None)?;
    Ok(flags_by_name(&out::shown(&answer)))
}

/// Reloads a server; returns what has changed.
fn reload(args: &ServerArgs) -> anyhow::Result<Reloaded> {
    let answer = args.client()?.json("POST", "/config/reload", None)?;
    Ok(kvtier_observe::api::from_value(answer)?)
}

impl ServerArgs {
    fn client(&self) -> anyhow::Result<Client> {
        Client::new(self.address.url(), &self.access, self.timeout)
    }
}
