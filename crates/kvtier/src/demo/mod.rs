//! `kvtier demo`: a whole server in this process, and engines that talk to it through its real socket.
//!
//! Twelve engine workers (four tenants times three ways for bytes to travel) serve conversations that grow turn by turn
//! behind one shared system prompt. Each turn is what an engine does: look the prompt up, load what hit, save the rest.
//! First everything fits, and every hit must be complete; then far more is said than fits, and the cache has to evict.
//! Every chunk that comes back is compared with the bytes its tenant and its whole prefix stand for, and tenants keep
//! asking for each other's prompts. With `--l2`, a second server then shows that prompts come back from a directory.
//! The command succeeds only if all of it was right.

mod conversation;
mod display;
mod engine;
mod ledger;
mod numbers;
mod report;
mod tally;
mod tier;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use kvtier_client::Connection;
use kvtier_server::{Server, ServerConfig};

use crate::signals;
use display::Display;
use engine::Kind;
use report::{Phase, Report};
use tally::{Counts, Faults, KindLatencies};
use workload::{Party, Stage, TENANTS};

/// What names of pools begin with; the process id follows.
const POOL_PREFIX: &str = "kvtier_demo_";

/// Share of L1 that the first phase may fill: below the watermark at which the server starts to evict.
const ROOMY: f64 = 0.75;

/// In the second phase at least so many times the size of L1 is stored.
const PRESSURE: u64 = 2;

/// Arguments of `kvtier demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// How long the two phases take together, 0 to 3600; each is played at least once
    #[arg(long, default_value_t = 8.0, value_parser = seconds)]
    seconds: f64,
    /// Turns of each conversation
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    turns: u32,
    /// What is said, and in which order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the server's L1 in GiB
    #[arg(long, value_name = "GB", default_value_t = 0.25)]
    l1_size_gb: f64,
    /// A directory for a second tier: at the end, a server with it shows that prompts come back when L1 was emptied.
    /// What it writes there stays
    #[arg(long, value_name = "DIR")]
    l2: Option<String>,
    /// Print the result as JSON instead of tables
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number".to_owned())?;
    if (0.0..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("give 0 to 3600 seconds".to_owned())
    }
}

/// Runs the demo. Exit code 0 if all was right, 1 if not, 130 after Ctrl-C.
pub fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let stop = signals::stop_flag()?;
    let config = server_config(args, None)?;
    // Before anything is played, so that a directory that cannot be used is told at once.
    let tiered = args.l2.as_deref().map(|dir| server_config(args, Some(dir)));
    let tiered = tiered.transpose()?;
    let _log = kvtier_server::logging::init(&config).context("no thread for the log")?;
    let server = Server::start(config)?;
    let outcome = play(args, &server, Arc::clone(&stop));
    server.stop();
    let mut report = outcome?;
    if let Some(config) = tiered.filter(|_| !report.interrupted) {
        let server = Server::start(config)?;
        let outcome = recall(args, &server, stop, &mut report);
        server.stop();
        outcome?;
    }
    report.print(args.json).context("cannot write the report")?;
    Ok(match (report.interrupted, report.ok) {
        (true, _) => ExitCode::from(signals::INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

/// Those of the server that no flag at all gives, but for its ports, its size, the name of its pool, and its tier.
fn server_config(args: &DemoArgs, l2: Option<&str>) -> anyhow::Result<ServerConfig> {
    // A demo that was killed could not remove its own, and no other one has its name.
    kvtier_server::remove_stale_pools(POOL_PREFIX);
    let (size, pool) = (
        format!("--l1-size-gb={}", args.l1_size_gb),
        format!("--shm-name={POOL_PREFIX}{}", std::process::id()),
    );
    let adapter = l2.map(|dir| {
        let adapter = serde_json::json!({ "type": "fs", "base_path": dir });
        format!("--l2-adapter={adapter}")
    });
    let mut flags = vec![
        "--port=0",
        "--http-port=0",
        "--log-level=warn",
        &size,
        &pool,
    ];
    flags.extend(adapter.as_deref());
    let mut config = ServerConfig::from_flags(&flags)?;
    if let Some(obstacle) = config.l2.as_ref().and_then(|l2| l2.obstacle()) {
        anyhow::bail!(obstacle);
    }
    // Where /dev/shm is small, the demo does without the pool, as a server without flags does.
    config.shm_required = false;
    Ok(config)
}

fn play(args: &DemoArgs, server: &Server, stop: Arc<AtomicBool>) -> anyhow::Result<Report> {
    let began = Instant::now();
    let config = server.engine().config();
    let chunk_tokens = config.chunk_size as usize;
    let longest = conversation::longest(args.turns, chunk_tokens);
    let stage = stage(args, server, stop);
    let capacity = (config.l1_bytes / (chunk_tokens as u64 * engine::TOKEN_BYTES)) as usize;
    let shared = conversation::shared(chunk_tokens);
    // Engines whose pages the server copies have the shared part for themselves.
    let needed = TENANTS.len() * (Kind::ALL.len() * (longest - shared) + 2 * shared);
    anyhow::ensure!(
        needed as f64 <= capacity as f64 * ROOMY,
        "--turns {}: the first phase may need {needed} chunks, and L1 has {capacity}; give fewer turns or a larger \
         --l1-size-gb",
        args.turns
    );
    let mut parties = Kind::ALL
        .iter()
        .zip(0..)
        .map(|(kind, number)| Party::start(&stage, *kind, number, longest))
        .collect::<Result<Vec<_>, _>>()
        .context("an engine could not register")?;
    let mut report = Report::new(args.seed, config, parties[0].chunk_bytes());
    let display = Display::new(
        args.seconds,
        parties.iter().map(|party| party.latencies.kind),
    );
    let half = Duration::from_secs_f64(args.seconds / 2.0);

    let mut phase = Phase::begin("all fits", server);
    while phase.rounds == 0 || (phase.elapsed() < half && !stage.stopped()) {
        side_by_side(&stage, &display, &mut parties, |party| {
            party.converse(&stage)
        });
        phase.rounds += 1;
        clear(&stage, server, &mut report.faults);
    }
    phase.end(server, &mut parties);
    if phase.evicted_objects > 0 {
        report.faults.note(format!(
            "{} objects were evicted although all fits",
            phase.evicted_objects
        ));
    }
    report.phases.push(phase);

    if !stage.stopped() {
        let mut phase = Phase::begin("under pressure", server);
        let (start, least) = (
            phase.began,
            config.l1_bytes * PRESSURE / parties.len() as u64,
        );
        // Twice as many conversations as fit, half of the way through on average.
        let at_once =
            (2 * capacity / (TENANTS.len() * parties.len()) / (longest / 2).max(1)).max(2);
        side_by_side(&stage, &display, &mut parties, |party| {
            party.crowd(&stage, at_once, |stored| {
                stored >= least && start.elapsed() >= half
            })
        });
        phase.rounds = 1;
        phase.end(server, &mut parties);
        if phase.evicted_objects == 0 && !stage.stopped() {
            report
                .faults
                .note("nothing was evicted although far more was stored than fits".to_owned());
        }
        clear(&stage, server, &mut report.faults);
        report.phases.push(phase);
    }
    display.finish();
    for party in &mut parties {
        if let Err(error) = party.stop() {
            report
                .faults
                .note(format!("an engine could not unregister: {error}"));
        }
        report.latencies.push(party.latencies.clone());
        report.faults.add(std::mem::take(&mut party.faults));
    }
    nothing_is_left(server, &mut report.faults);
    report.close(began.elapsed(), stage.stopped());
    Ok(report)
}

fn stage(args: &DemoArgs, server: &Server, stop: Arc<AtomicBool>) -> Stage {
    Stage {
        endpoint: server.endpoint().to_owned(),
        seed: args.seed,
        turns: args.turns,
        chunk_tokens: server.engine().config().chunk_size as usize,
        system: conversation::system_prompt(args.seed),
        ledgers: Default::default(),
        stop,
        progress: workload::Progress::default(),
    }
}

/// The part with a second tier, on a server that has one.
fn recall(
    args: &DemoArgs,
    server: &Server,
    stop: Arc<AtomicBool>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let stage = stage(args, server, stop);
    let longest = conversation::longest(args.turns, stage.chunk_tokens);
    report.recall = Some(tier::play(&stage, server, longest, &mut report.faults)?);
    nothing_is_left(server, &mut report.faults);
    report.close(report.took + began.elapsed(), stage.stopped());
    Ok(())
}

/// Runs `serve` for all parties, each on a thread of its own.
fn side_by_side<F>(stage: &Stage, display: &Display, parties: &mut [Party], serve: F)
where
    F: Fn(&mut Party) -> Result<(), kvtier_client::ClientError> + Sync,
{
    std::thread::scope(|scope| {
        let threads: Vec<_> = parties
            .iter_mut()
            .map(|party| {
                let serve = &serve;
                scope.spawn(move || {
                    if let Err(error) = serve(party) {
                        party.faults.note(format!("an engine gave up: {error}"));
                    }
                })
            })
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            display.show(&stage.progress);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// Drops everything, as `reset_prefix_cache` of vLLM does; nobody holds anything any more, so nothing may stay.
fn clear(stage: &Stage, server: &Server, faults: &mut Faults) {
    let cleared =
        Connection::connect(&stage.endpoint).and_then(|mut connection| connection.clear(false));
    if let Err(error) = cleared {
        faults.note(format!("the cache could not be cleared: {error}"));
        return;
    }
    stage.ledgers.iter().for_each(ledger::Ledger::clear);
    let left = server.engine().readings();
    if left.objects + left.used_bytes > 0 {
        faults.note(format!(
            "{} objects and {} bytes stayed after a clear ({} objects leased)",
            left.objects, left.used_bytes, left.leased_objects
        ));
    }
}

/// All engines are gone: whatever is left of them in the server is a leak.
fn nothing_is_left(server: &Server, faults: &mut Faults) {
    let left = server.engine().readings();
    for (what, count) in [
        ("engines", left.instances),
        ("sessions", left.sessions),
        ("leased objects", left.leased_objects),
        ("staged bytes", left.staged_bytes),
        ("accounting errors", left.accounting_errors),
    ] {
        if count > 0 {
            faults.note(format!("{count} {what} are left in the server"));
        }
    }
    if let Some(reason) = server.health().reason() {
        faults.note(format!("the server is not healthy: {reason}"));
    }
}

/// Adds up what all parties counted, and lets them begin anew.
fn take_counts(parties: &mut [Party]) -> Counts {
    let mut all = Counts::default();
    for party in parties {
        all.add(&std::mem::take(&mut party.counts));
    }
    all
}

/// Latencies of engines that turned out to be of one kind, together.
fn by_kind(latencies: &[KindLatencies]) -> Vec<KindLatencies> {
    let mut kinds: Vec<KindLatencies> = Vec::new();
    for one in latencies {
        match kinds.iter_mut().find(|known| known.kind == one.kind) {
            Some(known) => known.add(one),
            None => kinds.push(one.clone()),
        }
    }
    kinds
}
