//! Stores and retrieves, in both transfer modes.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvtier_client::{LmcacheDrivenSpec, LmcacheDrivenWorker, Prompt, Scope, Transport};

use super::context::{Context, block_tokens, geometry};
use super::memcpy::{self, Way};
use super::record::{Recorder, Row};
use super::report::Report;
use crate::pattern;

/// One request of the scenario: a prompt and the seeds of its chunks.
struct Job {
    prompt: Prompt,
    seeds: Vec<u64>,
    store_request: String,
}

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

fn job(context: &Context, base: u64, number: u64) -> Job {
    let tokens = context.tokens(
        base | number,
        context.chunk_tokens * context.args.chunks_per_request as usize,
    );
    Job {
        prompt: Prompt::new(&tokens),
        seeds: pattern::chunk_seeds(&tokens, context.chunk_tokens),
        store_request: context.request_id(),
    }
}

/// Page faults of this thread without I/O: 256 per MiB if it touches all pages for the first time.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    // The name before the bracket may contain anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let minor = fields.split_whitespace().nth(7);
    minor.and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

/// Measures a worker that copies by itself.
pub(crate) fn engine_driven(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("engine-driven");
    let mut worker = context.engine_driven(&scope, context.args.chunk_bytes)?;
    let size = worker.chunk_bytes();
    let way = match worker.transport() {
        Transport::SharedPool => "shm",
        Transport::Pickle => "pickle",
    };
    let (warm_up, measured) = jobs(context, size);
    let bar = context.bar("engine-driven", (warm_up + measured) * 2);
    let mut stores = Recorder::new();
    let mut chunks = Vec::new();
    let mut done = Vec::new();
    let mut store_wall = Duration::ZERO;
    let (mut faults, mut stored_bytes) = (0, 0);
    // The worker reads all chunks into one buffer.
    let warm = [size * context.args.chunks_per_request as usize, size];
    let before = copies(warm, size);

    for number in 0..warm_up + measured {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let job = job(context, 3 << 40, number);
        chunks.resize(job.seeds.len(), Vec::new());
        for (chunk, seed) in chunks.iter_mut().zip(&job.seeds) {
            chunk.resize(size, 0);
            pattern::fill(*seed, chunk);
        }
        let range = job.prompt.whole_chunks(context.chunk_tokens);
        let faults_before = page_faults();
        let start = Instant::now();
        let stored = worker.store(&job.prompt, range, &job.store_request, |index| {
            &chunks[index as usize]
        })?;
        let latency = start.elapsed();
        let faults_after = page_faults();
        worker.connection().end_session(&job.store_request)?;
        if stored.chunks.len() != job.seeds.len() {
            stores.failure(|| not_all_taken(stored.chunks.len(), job.seeds.len()));
        } else if number >= warm_up {
            stores.success(latency, stored.bytes);
            faults += faults_after - faults_before;
            stored_bytes += stored.bytes;
            store_wall += start.elapsed();
        }
        done.push(job);
    }

    let mut retrieves = Recorder::new();
    let mut timeout = VISIBLE_TIMEOUT;
    let mut retrieve_wall = Duration::ZERO;
    for (number, job) in (0..).zip(&done) {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let request = context.request_id();
        let wanted = job.seeds.len() as u64;
        let whole = Instant::now();
        let hits = until_found(context, &mut timeout, wanted, &request, |request| {
            worker.lookup(&job.prompt, request)
        })?;
        if hits == wanted {
            let range = job.prompt.whole_chunks(context.chunk_tokens);
            let mut checking = Duration::ZERO;
            let start = Instant::now();
            let got = worker.retrieve(&job.prompt, range, &request, |index, bytes| {
                let check = Instant::now();
                if !pattern::matches(job.seeds[index as usize], bytes) {
                    retrieves.mismatch(|| format!("chunk {index} of request {number}"));
                }
                checking += check.elapsed();
            })?;
            let latency = start.elapsed() - checking;
            match got {
                None => retrieves.failure(|| "a miss, right after a hit".to_owned()),
                Some(got) if number >= warm_up => {
                    retrieves.success(latency, got.bytes);
                    retrieve_wall += whole.elapsed();
                }
                Some(_) => {}
            }
        } else {
            retrieves.failure(|| evicted(hits, wanted));
        }
        worker.connection().end_session(&request)?;
    }
    bar.finish_and_clear();
    let after = copies(warm, size);
    let memcpy = [0, 1].map(|way| f64::midpoint(before[way], after[way]));
    for (name, recorder, wall, memcpy) in [
        ("store", stores, store_wall, memcpy[0]),
        ("retrieve", retrieves, retrieve_wall, memcpy[1]),
    ] {
        let row = recorder.row(format!("engine-driven {name} ({way})"), wall);
        let mut row = with_copy(row, memcpy);
        if name == "store" && stored_bytes > 0 {
            let mib = stored_bytes as f64 / 1_048_576.0;
            row = row.fact("page faults a MiB", faults as f64 / mib);
        }
        report.add(row);
    }
    worker.close()?;
    Ok(())
}

/// Measures a worker whose pages the server copies, from some blocks and back into others.
pub(crate) fn lmcache_driven(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("lmcache-driven");
    let per_request = u64::from(context.args.chunks_per_request);
    let mut worker = paged_worker(context, &scope, per_request)?;
    let size = worker.chunk_bytes();
    let (sources, targets) = blocks(context, &worker, per_request);
    let per_chunk = worker.blocks_per_chunk() as usize;
    let (warm_up, measured) = jobs(context, size);
    let bar = context.bar("lmcache-driven", (warm_up + measured) * 2);
    let mut stores = Recorder::new();
    let mut done = Vec::new();
    let mut store_wall = Duration::ZERO;
    let mut chunk = vec![0; size];
    let warm = [size * context.args.chunks_per_request as usize; 2];
    let run = run_bytes(context, &worker);
    let before = (copies(warm, size), copies(warm, run));

    for number in 0..warm_up + measured {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let job = job(context, 4 << 40, number);
        for (blocks, seed) in sources.chunks_exact(per_chunk).zip(&job.seeds) {
            pattern::fill(*seed, &mut chunk);
            worker.write_chunk(blocks, &chunk)?;
        }
        let range = job.prompt.whole_chunks(context.chunk_tokens);
        let start = Instant::now();
        let ok = worker.store(&job.prompt, range, &job.store_request, &sources)?;
        let latency = start.elapsed();
        worker.connection().end_session(&job.store_request)?;
        if !ok {
            stores.failure(|| "a store was answered with false".to_owned());
        } else if number >= warm_up {
            stores.success(latency, per_request * size as u64);
            store_wall += start.elapsed();
        }
        done.push(job);
    }

    let mut retrieves = Recorder::new();
    let mut timeout = VISIBLE_TIMEOUT;
    let mut retrieve_wall = Duration::ZERO;
    for (number, job) in (0..).zip(&done) {
        if context.is_stopped() {
            break;
        }
        bar.inc(1);
        let request = context.request_id();
        let whole = Instant::now();
        let hits = until_found(context, &mut timeout, per_request, &request, |request| {
            worker.lookup(&job.prompt, request)
        })?;
        if hits == per_request {
            let range = job.prompt.whole_chunks(context.chunk_tokens);
            let start = Instant::now();
            let ok = worker.retrieve(&job.prompt, range, &request, &targets, 0)?;
            let latency = start.elapsed();
            if !ok {
                retrieves.failure(|| "a miss, right after a hit".to_owned());
            } else if number >= warm_up {
                retrieves.success(latency, per_request * size as u64);
                retrieve_wall += whole.elapsed();
            }
            for (index, (blocks, seed)) in
                targets.chunks_exact(per_chunk).zip(&job.seeds).enumerate()
            {
                worker.read_chunk(blocks, &mut chunk)?;
                if ok && !pattern::matches(*seed, &chunk) {
                    retrieves.mismatch(|| format!("chunk {index} of request {number}"));
                }
            }
        } else {
            retrieves.failure(|| evicted(hits, per_request));
        }
        worker.connection().end_session(&request)?;
    }
    bar.finish_and_clear();
    let after = (copies(warm, size), copies(warm, run));
    let memcpy = [0, 1].map(|way| f64::midpoint(before.0[way], after.0[way]));
    let in_runs = [0, 1].map(|way| f64::midpoint(before.1[way], after.1[way]));
    for (name, recorder, wall, way) in [
        ("store", stores, store_wall, 0),
        ("retrieve", retrieves, retrieve_wall, 1),
    ] {
        let row = recorder.row(format!("lmcache-driven {name}"), wall);
        let of_runs = ratio(&row, in_runs[way]);
        let row = with_copy(row, memcpy[way]).fact("run KiB", run as f64 / 1024.0);
        report.add(match of_runs {
            Some(ratio) => row.fact("of memcpy in runs", ratio),
            None => row,
        });
    }
    worker.close()?;
    Ok(())
}

/// A worker with the null block and twice the blocks of a request.
fn paged_worker(
    context: &Context,
    scope: &Scope,
    chunks: u64,
) -> anyhow::Result<LmcacheDrivenWorker> {
    let chunk_tokens = context.chunk_tokens as u64;
    let (layers, hidden) = geometry(context.args.chunk_bytes, chunk_tokens)?;
    let (heads, head_size) = match hidden {
        hidden if hidden.is_multiple_of(128) => (hidden / 128, 128),
        hidden => (1, hidden),
    };
    let block = block_tokens(chunk_tokens);
    let blocks = 1 + 2 * chunks * (chunk_tokens / block);
    let mut spec = LmcacheDrivenSpec::new(
        context.instance(),
        scope.clone(),
        layers,
        heads,
        head_size,
        blocks,
    );
    spec.block_tokens = block;
    LmcacheDrivenWorker::register(context.connect()?, spec)
        .context("registering a worker whose pages the server copies")
}

/// Block ids to store from, and others to retrieve to: in random order, like those of an engine's allocator after a while,
/// unless `--ordered-blocks`.
fn blocks(context: &Context, worker: &LmcacheDrivenWorker, chunks: u64) -> (Vec<i64>, Vec<i64>) {
    let count = (chunks * worker.blocks_per_chunk()) as i64;
    let shuffled = |first: i64| {
        let mut ids: Vec<i64> = (first..first + count).collect();
        if !context.args.ordered_blocks {
            ids.sort_by_key(|id| pattern::mix(context.args.seed ^ *id as u64));
        }
        ids
    };
    (shuffled(1), shuffled(1 + count))
}

fn evicted(hits: u64, stored: u64) -> String {
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
    wanted: u64,
    request: &str,
    mut lookup: impl FnMut(&str) -> Result<u64, kvtier_client::ClientError>,
) -> anyhow::Result<u64> {
    let start = Instant::now();
    loop {
        let hits = lookup(request)?;
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

/// Contiguous bytes in both the worker's blocks and the chunk: a block of one plane of one layer, or all of them.
fn run_bytes(context: &Context, worker: &LmcacheDrivenWorker) -> usize {
    let all = worker.chunk_bytes() / (2 * worker.spec().layers as usize);
    if context.args.ordered_blocks {
        all
    } else {
        all / worker.blocks_per_chunk() as usize
    }
}

/// Speeds of plain copies in either direction, with this number of bytes on the warm side of each.
fn copies(warm: [usize; 2], chunk_bytes: usize) -> [f64; 2] {
    [
        memcpy::gb_per_second(Way::Store, warm[0], chunk_bytes),
        memcpy::gb_per_second(Way::Retrieve, warm[1], chunk_bytes),
    ]
}

/// Adds the plain copy's speed to the row, and the ratio.
fn with_copy(row: Row, memcpy: f64) -> Row {
    let ratio = ratio(&row, memcpy);
    let row = row.fact("memcpy GB/s", memcpy);
    match ratio {
        Some(ratio) => row.fact("of memcpy", ratio),
        None => row,
    }
}

/// The row's median speed divided by that of a copy. All its requests move the same bytes, so its mean speed is that of
/// its mean latency.
fn ratio(row: &Row, memcpy: f64) -> Option<f64> {
    let (speed, latency) = row.gb_per_second.zip(row.latency_us)?;
    Some(speed * latency.mean / latency.p50 / memcpy)
}

fn not_all_taken(stored: usize, wanted: usize) -> String {
    format!("the server took {stored} of {wanted} new chunks; is it full?")
}
