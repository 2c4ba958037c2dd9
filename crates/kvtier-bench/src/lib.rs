//! `kvtier bench`, a load generator for any server of the LMCache MP protocol, and `kvtier demo`.
//!
//! It measures round trips with one blocking DEALER socket per client, like an engine's process. Latencies are those of
//! single calls (or of the two or three calls that a row names), without cleanup. By default each client sends its next
//! request when the last one was answered (closed loop), so a server that stalls receives fewer requests and its stalls
//! are under-represented ("coordinated omission"). With `--rate` requests have intended times, and their latency counts
//! from those, even if they are sent later.
//!
//! Every stored chunk has bytes derived from its whole prefix, and every retrieved chunk is compared.

mod args;
pub mod cli;
mod compare;
mod context;
pub mod demo;
mod engine;
mod footprint;
mod l2;
mod latency;
mod lookups;
mod memcpy;
mod mixed;
mod pattern;
mod record;
mod replay;
mod report;
mod start;
mod tenants;
mod transfer;

use std::process::ExitCode;

use anyhow::Context as _;

pub use args::BenchArgs;
use args::{BenchCommand, LoadArgs, Scenario};
use context::Context;
use engine::EngineKind;
use report::Report;

use crate::cli::USAGE;
use crate::cli::out::complain;
use crate::cli::stop::stop_flag;

/// Runs the command. Exit code 0 if all requests succeeded and all bytes were correct.
///
/// # Errors
/// If the server does not answer, or the report cannot be written.
pub fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        Some(BenchCommand::Start(args)) => start::run(&args),
        Some(BenchCommand::Compare(args)) => compare::run(&args),
        Some(BenchCommand::L2(args)) => l2::run(&args),
        None => load(args.load),
    }
}

fn load(args: LoadArgs) -> anyhow::Result<ExitCode> {
    if let Some(missing) = args.missing() {
        complain("bench", missing);
        return Ok(ExitCode::from(USAGE));
    }
    let json = args.json.clone();
    let context = Context::new(args, stop_flag()?)?;
    let (url, label) = (&context.url, context.args.label.clone());
    let label = label.unwrap_or_else(|| url.clone());
    let mut report = Report::new(label, url, context.chunk_tokens, context.args.seed);
    let outcome = scenarios(&context, &mut report);
    if let Err(error) = &outcome {
        report.abort(format!("{error:#}"));
    } else if context.is_stopped() {
        report.abort("interrupted".to_owned());
    }
    report
        .print(json.as_deref())
        .context("cannot write the report")?;
    outcome?;
    Ok(report.exit_code())
}

/// Runs the scenarios in order. The first request without a reply ends the run.
fn scenarios(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    for scenario in &context.args.scenarios() {
        if context.is_stopped() {
            break;
        }
        if context.args.clear {
            context
                .connect()?
                .clear(false)
                .context("clearing the cache")?;
        }
        match scenario {
            Scenario::Ping => latency::ping(context, report),
            Scenario::LookupHit => lookups::hit(context, report),
            Scenario::LookupMiss => lookups::miss(context, report),
            Scenario::RetrieveBookkeeping => latency::retrieve_bookkeeping(context, report),
            Scenario::StoreBookkeeping => latency::store_bookkeeping(context, report),
            Scenario::EngineDriven => transfer::run(context, report, EngineKind::of(context)),
            Scenario::LmcacheDriven => transfer::run(context, report, EngineKind::Pages),
            Scenario::Mixed => mixed::run(context, report),
            Scenario::Replay => replay::run(context, report),
            Scenario::Tenants => tenants::run(context, report),
            Scenario::Memory => footprint::run(context, report),
        }
        .with_context(|| format!("scenario {}", scenario.name()))?;
    }
    Ok(())
}
