//! The kvtier command line. Each subcommand is a module; this file dispatches to them.

mod config;
mod definitions;
mod explain;
mod inherited;
mod notify;
mod ping;
mod pools;
mod quota;
mod server;
mod signals;
mod status;
mod tier_test;
mod top;
mod version;
mod web;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use kvtier_bench::cli::{USAGE, address, out, units};
use kvtier_bench::demo;
use kvtier_server::escape::escape;

/// A KV-cache server for LLM inference that speaks the LMCache MP protocol, with quotas for tenants.
#[derive(Debug, Parser)]
#[command(name = "kvtier", version = version::TEXT)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a KV cache to LMCache clients.
    Server(server::ServerCommand),
    /// Generate load for a server of the protocol (this one or LMCache's), check every byte, and print latencies.
    Bench(Box<kvtier_bench::BenchArgs>),
    /// Start a server here, use it like engines of several tenants, and check every byte.
    Demo(demo::DemoArgs),
    /// Show server status: health, memory, tiers, GPUs, workers, sessions.
    Status(status::StatusArgs),
    /// Show a server's load on the terminal: hit rate, requests, memory, tiers, GPUs, tenants.
    Top(top::TopArgs),
    /// Say why a lookup misses: where each chunk of a prompt is, or what became of it.
    Explain(explain::ExplainArgs),
    /// Manage tenant quotas.
    Quota(quota::QuotaArgs),
    /// Show or reload the configuration of a server, or show what a file would change.
    Config(config::ConfigArgs),
    /// Measure the round trip to a server.
    Ping(ping::PingArgs),
    /// List memory that servers have in /dev/shm, or free what no server has.
    Pools(pools::PoolsArgs),
    /// Check a second tier by the conformance suite: a configured one, or a program that is one.
    TierTest(tier_test::TierTestArgs),
    /// Print a shell's completions of commands and flags.
    Completions(definitions::CompletionsArgs),
    /// Write a man page per command.
    Man(definitions::ManArgs),
    /// Print the version, commit and target, and the clients it serves.
    Version,
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Server(_) => "server",
            Self::Bench(_) => "bench",
            Self::Demo(_) => "demo",
            Self::Status(_) => "status",
            Self::Top(_) => "top",
            Self::Explain(_) => "explain",
            Self::Quota(_) => "quota",
            Self::Config(_) => "config",
            Self::Ping(_) => "ping",
            Self::Pools(_) => "pools",
            Self::TierTest(_) => "tier-test",
            Self::Completions(_) => "completions",
            Self::Man(_) => "man",
            Self::Version => "version",
        }
    }
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return refuse(&error),
    };
    let name = command.name();
    let outcome = match command {
        Command::Server(command) => server::run(command),
        Command::Bench(args) => kvtier_bench::run(*args),
        Command::Demo(args) => demo::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Quota(args) => quota::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Ping(args) => ping::run(&args),
        Command::Pools(args) => pools::run(&args),
        Command::TierTest(args) => tier_test::run(&args),
        Command::Completions(args) => definitions::complete(&args),
        Command::Man(args) => definitions::man(&args),
        Command::Version => version::print(),
    };
    outcome.unwrap_or_else(|error| {
        out::complain(name, format!("{error:#}"));
        ExitCode::FAILURE
    })
}

/// Prints in one line what is wrong with the arguments, or the requested help.
fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A closed pipe is no error.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // The usage follows, which --help has too.
    let message = text.split("\nUsage:").next().unwrap_or_default();
    let message = message
        .split("\nFor more information")
        .next()
        .unwrap_or_default();
    let words: Vec<_> = message.split_whitespace().collect();
    let command = Cli::command();
    let name = std::env::args().nth(1).unwrap_or_default();
    let known = command
        .get_subcommands()
        .any(|known| known.get_name() == name);
    let prefix = if known {
        format!("kvtier {name}")
    } else {
        "kvtier".to_owned()
    };
    eprintln!(
        "{prefix}: {}; see {prefix} --help",
        escape(&words.join(" "))
    );
    ExitCode::from(USAGE)
}
