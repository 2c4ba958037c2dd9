//! The kvtier command line. Each subcommand is a module; this file only tells them apart.

mod address;
mod bench;
mod demo;
mod out;
mod pattern;
mod ping;
mod quota;
mod server;
mod signals;
mod status;
mod units;
mod web;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A KV-cache server for LLM inference that speaks the LMCache MP protocol, with quotas for tenants.
#[derive(Debug, Parser)]
#[command(name = "kvtier", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a KV cache to LMCache clients.
    Server(server::ServerCommand),
    /// Load a server of the protocol (this one or LMCache's), check every byte, and print latencies.
    Bench(Box<bench::BenchArgs>),
    /// Start a server here, talk to it as many engines of several tenants do, and check every byte.
    Demo(demo::DemoArgs),
    /// Tell how a server is: health, memory, tiers, GPUs, workers, sessions.
    Status(status::StatusArgs),
    /// Set, take away, tell and list what tenants may have.
    Quota(quota::QuotaArgs),
    /// Measure the round trip to a server.
    Ping(ping::PingArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Server(command) => server::run(command),
        Command::Bench(args) => bench::run(*args),
        Command::Demo(args) => demo::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Quota(args) => quota::run(&args),
        Command::Ping(args) => ping::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
