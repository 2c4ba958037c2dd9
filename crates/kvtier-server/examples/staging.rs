//! L1 that a worker which never commits holds, and the hit rate of the others: a server in this process and its clients.
//!
//! `staging [REQUESTS [SEEDS [stores|background]]]`. Three workers take turns. A request looks a prompt up, drawn by a Zipf law, and stores
//! it on a miss. In the runs with a hog, another worker prepares a store of 128 chunks after each request and commits
//! none. Every 64 requests 20 seconds pass, so a run covers several write TTLs. To warm up, each prompt is asked for once, the
//! most popular last, and then REQUESTS / 4 are drawn; the REQUESTS after them count.
//! `less` is a run without a hog on an L1 that is smaller by what the hog may hold. `stores`: only stores evict, so nothing
//! depends on the speed of the machine; `background`: the background pass does too, by its default flags. No bytes are copied.
#![expect(clippy::unwrap_used, reason = "a measurement that fails is none")]

use std::time::Duration;

use kvtier_client::{EngineDrivenSpec, EngineDrivenWorker, InstanceId, Prompt, Scope};
use kvtier_core::random::SplitMix64;
use kvtier_server::{Server, ServerConfig};

const CHUNK_TOKENS: usize = 16;
const CHUNK_BYTES: usize = 8 << 10;
/// 8192 objects.
const L1_BYTES: usize = 64 << 20;
/// What the hog may have: seven eighths of a quarter.
const HOG_BYTES: usize = 14 << 20;
const WORKERS: i64 = 3;
const HOG: i64 = 100;
const ZIPF_EXPONENT: f64 = 0.8;
/// Prompts have 4 to 16 chunks, 10 on average.
const MEAN_CHUNKS: usize = 10;
const REQUESTS_PER_PASS: usize = 64;
const PASS: Duration = Duration::from_secs(20);

/// A random number from 0 to 1.
fn fraction(random: &mut SplitMix64) -> f64 {
    (random.next() >> 11) as f64 / (1u64 << 53) as f64
}

/// Cumulated weights of a Zipf law.
fn zipf(prompts: usize) -> Vec<f64> {
    let mut sum = 0.0;
    let weights = (1..=prompts).map(|rank| {
        sum += (rank as f64).powf(-ZIPF_EXPONENT);
        sum
    });
    weights.collect()
}

fn prompt(number: usize, chunks: usize) -> Prompt {
    let tokens = (0..chunks * CHUNK_TOKENS).map(|index| (number * 4096 + index) as u32);
    Prompt::new(&tokens.collect::<Vec<_>>())
}

#[derive(Clone, Copy, PartialEq)]
enum Variant {
    Alone,
    Hog,
    Less,
}

/// What one run is.
#[derive(Clone, Copy)]
struct Setup {
    /// Eviction by stores alone, or the background pass too, as by default.
    background: bool,
    /// Bytes of all prompts, in percent of L1.
    working_set: usize,
    requests: usize,
}

fn start(setup: Setup, variant: Variant) -> Server {
    let bytes = match variant {
        Variant::Less => L1_BYTES - HOG_BYTES,
        Variant::Alone | Variant::Hog => L1_BYTES,
    };
    let gib = (bytes as f64 / (1u64 << 30) as f64).to_string();
    let pool = format!("kvtier_staging_{}", std::process::id());
    let mut flags = vec!["--port", "0", "--http-port", "0", "--l1-size-gb", &gib];
    flags.extend([
        "--chunk-size",
        "16",
        "--no-l1-prefault",
        "--shm-name",
        &pool,
    ]);
    if !setup.background {
        flags.extend(["--eviction-trigger-watermark", "1", "--eviction-ratio", "0"]);
    }
    Server::start(ServerConfig::from_flags(&flags).unwrap()).unwrap()
}

fn worker(server: &Server, instance: i64, scope: &Scope) -> EngineDrivenWorker {
    let mut spec = EngineDrivenSpec::new(InstanceId(instance), scope.clone(), 2, 64);
    spec.block_tokens = 4;
    let connection = kvtier_client::Connection::connect(server.endpoint()).unwrap();
    let worker = EngineDrivenWorker::register(connection, spec).unwrap();
    assert_eq!(worker.chunk_bytes(), CHUNK_BYTES);
    worker
}

/// Prepares a store of these chunks; returns whether slots were granted.
fn prepare(worker: &mut EngineDrivenWorker, prompt: &Prompt, chunks: usize, request: &str) -> bool {
    let (scope, instance) = (worker.spec().scope.clone(), worker.spec().instance);
    let key = scope.worker_key(0, prompt, 0..(chunks * CHUNK_TOKENS) as u64, request);
    let prepared = worker.connection().prepare_store(&key, instance).unwrap();
    prepared
        .target
        .is_some_and(|target| !target.slots.is_empty())
}

/// The others' hit rate and the most that the hog held, both in percent.
fn run(setup: Setup, variant: Variant, seed: u64) -> (f64, f64) {
    let server = start(setup, variant);
    let (scope, hog_scope) = (Scope::new("others"), Scope::new("hog"));
    let mut workers: Vec<_> = (0..WORKERS).map(|id| worker(&server, id, &scope)).collect();
    let mut hog = (variant == Variant::Hog).then(|| worker(&server, HOG, &hog_scope));
    let prompts = L1_BYTES * setup.working_set / 100 / (MEAN_CHUNKS * CHUNK_BYTES);
    let weights = zipf(prompts);
    let mut random = SplitMix64::new(seed);
    let (mut asked, mut hit, mut held) = (0, 0, 0);
    let warm_up = prompts + setup.requests / 4;
    for request in 0..warm_up + setup.requests {
        let worker = &mut workers[request % WORKERS as usize];
        let number = match prompts.checked_sub(request + 1) {
            Some(number) => number,
            None => {
                let rank = fraction(&mut random) * weights[prompts - 1];
                weights.partition_point(|weight| *weight < rank)
            }
        };
        let chunks = 4 + number % 13;
        let prompt_of = prompt(number, chunks);
        let found = worker.lookup(&prompt_of, "r").unwrap() as usize;
        worker.connection().end_session("r").unwrap();
        if request >= warm_up {
            asked += chunks;
            hit += found;
        }
        if found < chunks && prepare(worker, &prompt_of, chunks, "r") {
            let instance = worker.spec().instance;
            let key = scope.worker_key(0, &prompt_of, 0..(chunks * CHUNK_TOKENS) as u64, "r");
            let connection = worker.connection();
            assert!(connection.commit_store(&key, instance, b"").unwrap());
        }
        if let Some(hog) = &mut hog {
            prepare(hog, &prompt(request, 128), 128, "h");
            held = held.max(server.engine().admin().readings().staged_bytes);
        }
        if request % REQUESTS_PER_PASS == 0 {
            server.engine().clock().skip(PASS);
            server.engine().housekeep();
            for worker in workers.iter_mut().chain(&mut hog) {
                let instance = worker.spec().instance;
                assert!(worker.connection().ping(Some(instance)).unwrap());
            }
        }
    }
    let percent = |part: f64, all: f64| 100.0 * part / all;
    (
        percent(hit as f64, asked as f64),
        percent(held as f64, L1_BYTES as f64),
    )
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| {
        let argument = arguments.next();
        argument.map_or(default, |number| number.parse().expect("a number"))
    };
    let (requests, seeds) = (number(3000), number(3));
    let only = arguments.next();
    println!(
        "eviction\tworking set, % of L1\tseed\thits alone %\thits with hog %\thits less %\theld by hog, % of L1"
    );
    for (background, name) in [(false, "stores"), (true, "background")] {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        for working_set in [50, 75, 100, 150, 300] {
            let setup = Setup {
                background,
                working_set,
                requests,
            };
            let mut columns = [const { Vec::new() }; 4];
            for seed in 0..seeds as u64 {
                let (alone, _) = run(setup, Variant::Alone, seed);
                let (beside, held) = run(setup, Variant::Hog, seed);
                let (less, _) = run(setup, Variant::Less, seed);
                println!(
                    "{name}\t{working_set}\t{seed}\t{alone:.1}\t{beside:.1}\t{less:.1}\t{held:.1}"
                );
                for (column, value) in columns.iter_mut().zip([alone, beside, less, held]) {
                    column.push(value);
                }
            }
            let [alone, beside, less, held] = columns.map(median);
            println!(
                "{name}\t{working_set}\tmedian\t{alone:.1}\t{beside:.1}\t{less:.1}\t{held:.1}"
            );
        }
    }
}
