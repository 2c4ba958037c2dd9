//! Stores and retrieves, in both transfer modes.

use std::time::{Duration, Instant};

use super::context::Context;
use super::engine::{Engine, EngineKind, PromptJob};
use super::memcpy::{self, Way};
use super::record::{Recorder, Row};
use super::report::Report;

/// Numbers of requests to warm up (one in eight, at least one) and to measure.
fn jobs(context: &Context, chunk_bytes: usize) -> (u64, u64) {
    let each = u64::from(context.args.chunks_per_request) * chunk_bytes as u64;
    let wanted = context
        .args
        .requests
        .unwrap_or(context.args.volume / each)
        .max(2);
    let warm_up = (wanted / 8).max(1);
    match context.args.requests {
        Some(_) => (warm_up, wanted),
        // Within the volume.
        None => (warm_up, wanted - warm_up),
    }
}

fn job(context: &Context, number: u64) -> PromptJob {
    let count = context.chunk_tokens * context.args.chunks_per_request as usize;
    let tokens = context.tokens(3 << 40 | number, count);
    PromptJob::new("", &tokens, context.chunk_tokens)
}

/// Page faults of this thread without I/O: 256 per MiB if it touches all pages for the first time.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    // The name before the bracket may contain anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let minor = fields.split_whitespace().nth(7);
    minor.and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

/// Measures stores and retrieves of one kind of worker. One whose pages the server copies stores from some blocks and retrieves
/// into others.
pub(crate) fn run(context: &Context, report: &mut Report, kind: EngineKind) -> anyhow::Result<()> {
    let chunks = context.args.chunks_per_request;
    let name = match kind {
        EngineKind::Pages => "lmcache-driven",
        EngineKind::Pool | EngineKind::Pickle => "engine-driven",
    };
    let (scope, wanted) = (context.scope(name), chunks as usize);
    let bytes = context.args.chunk_bytes;
    let mut engine = Engine::start(context, kind, &scope, bytes, u64::from(chunks))?;
    let size = engine.chunk_bytes();
    let (warm_up, measured) = jobs(context, size);
    let bar = context.bar(name, (warm_up + measured) * 2);
    let run_bytes = engine.run_bytes(context);
    let warm = match run_bytes {
        Some(_) => [size * wanted; 2],
        // The worker reads all chunks into one buffer.
        None => [size * wanted, size],
    };
    let copies = || {
        [
            copies(warm, size),
            run_bytes.map_or([0.0; 2], |run| copies(warm, run)),
        ]
    };
    let before = copies();

    let mut stores = Recorder::default();
    let mut done = Vec::new();
    let (mut store_wall, mut retrieve_wall) = (Duration::ZERO, Duration::ZERO);
    let (mut faults, mut stored_bytes) = (0, 0);
    for number in 0..warm_up + measured {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let (job, request) = (job(context, number), context.request_id());
        engine.fill(&job.seeds)?;
        let faults_before = page_faults();
        let start = Instant::now();
        let stored = engine.store(&job, &request, 0)?;
        let faults_after = page_faults();
        engine.connection().end_session(&request)?;
        match stored {
            None => stores.failure(|| "a store was answered with false".to_owned()),
            Some(stored) if stored.bytes != (wanted * size) as u64 => {
                stores.failure(|| not_all_taken(stored.bytes as usize / size, wanted));
            }
            Some(stored) if number >= warm_up => {
                stores.success(stored.latency, stored.bytes);
                faults += faults_after - faults_before;
                stored_bytes += stored.bytes;
                store_wall += start.elapsed();
            }
            Some(_) => {}
        }
        done.push(job);
    }

    let mut retrieves = Recorder::default();
    let mut timeout = VISIBLE_TIMEOUT;
    for (number, job) in (0..).zip(&done) {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let request = context.request_id();
        let whole = Instant::now();
        let hits = until_found(context, &mut timeout, wanted, || {
            engine.lookup(job, &request)
        })?;
        if hits == wanted {
            let wrong = |index| retrieves.mismatch(|| format!("chunk {index} of request {number}"));
            match engine.retrieve(job, &request, wanted, wrong)? {
                None => retrieves.failure(|| "a miss, right after a hit".to_owned()),
                Some(got) if number >= warm_up => {
                    retrieves.success(got.latency, got.bytes);
                    retrieve_wall += whole.elapsed();
                }
                Some(_) => {}
            }
        } else {
            retrieves.failure(|| evicted(hits, wanted));
        }
        engine.connection().end_session(&request)?;
    }
    bar.finish_and_clear();
    let after = copies();
    for (way, name, recorder, wall) in [
        (0, "store", stores, store_wall),
        (1, "retrieve", retrieves, retrieve_wall),
    ] {
        let mut row = recorder.row(engine.row_name(name), wall);
        let speed = median_speed(&row);
        let limits = [0, 1].map(|what| f64::midpoint(before[what][way], after[what][way]));
        row = row.fact("memcpy GB/s", limits[0]);
        if let Some(speed) = speed {
            row = row.fact("of memcpy", speed / limits[0]);
        }
        if let Some(run) = run_bytes {
            row = row.fact("run KiB", run as f64 / 1024.0);
            if let Some(speed) = speed {
                row = row.fact("of memcpy in runs", speed / limits[1]);
            }
        } else if way == 0 && stored_bytes > 0 {
            let mib = stored_bytes as f64 / 1_048_576.0;
            row = row.fact("page faults a MiB", faults as f64 / mib);
        }
        report.add(row);
    }
    engine.close()
}

fn evicted(hits: usize, stored: usize) -> String {
    format!(
        "{hits} of {stored} stored chunks are found; evicted? --volume (or the bytes of --requests) has to be less than L1"
    )
}

/// Time for chunks to be found after their store was answered: LMCache's server answers some time before.
const VISIBLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Looks up until all stored chunks are found, or for `timeout`. After one timeout the next lookups do not wait: a server
/// that has evicted chunks will not find later ones by waiting either.
fn until_found(
    context: &Context,
    timeout: &mut Duration,
    wanted: usize,
    mut lookup: impl FnMut() -> anyhow::Result<usize>,
) -> anyhow::Result<usize> {
    let start = Instant::now();
    loop {
        let hits = lookup()?;
        if hits >= wanted || context.is_stopped() {
            return Ok(hits);
        }
        if start.elapsed() >= *timeout {
            *timeout = Duration::ZERO;
            return Ok(hits);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Speeds of plain copies in either direction, with this number of bytes on the warm side of each.
fn copies(warm: [usize; 2], chunk_bytes: usize) -> [f64; 2] {
    [
        memcpy::gb_per_second(Way::Store, warm[0], chunk_bytes),
        memcpy::gb_per_second(Way::Retrieve, warm[1], chunk_bytes),
    ]
}

/// The row's median speed. All its requests move the same bytes, so its mean speed is that of its mean latency.
fn median_speed(row: &Row) -> Option<f64> {
    let (speed, latency) = row.gb_per_second.zip(row.latency_us)?;
    Some(speed * latency.mean / latency.p50)
}

fn not_all_taken(stored: usize, wanted: usize) -> String {
    format!("the server took {stored} of {wanted} new chunks; is it full?")
}
