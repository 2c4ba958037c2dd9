//! Time until a subscriber has the event of a chunk that was stored, while other clients store and look up.
//!
//! ```text
//! kvtier server --port 5599 --http-port 0 --l1-size-gb 1 &
//! cargo run --release -p kvtier-client --example event_latency -- 127.0.0.1:5599 [STORES [CLIENTS]]
//! ```
//!
//! A worker stores prompts of four chunks, one per 5 ms. Each other client in turn looks up a resident prompt of 128 chunks and stores
//! a chunk, without a pause. The server is another process. An event that arrives before the reply to its commit counts as 0.
#![expect(clippy::unwrap_used, reason = "a program for developers")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvtier_client::{
    Client, Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, KvEventUpdate, Prompt,
    Scope,
};

const CHUNKS: usize = 4;
const LONG: usize = 128;
const INTERVAL: Duration = Duration::from_millis(5);

fn worker(endpoint: &str, instance: i64, scope: Scope) -> EngineDrivenWorker {
    let connection = Connection::connect(endpoint).unwrap();
    let spec = EngineDrivenSpec::new(InstanceId(instance), scope, 2, 64);
    EngineDrivenWorker::register(connection, spec).unwrap()
}

/// Stores a prompt whose chunks begin with the tokens `first..first + chunks`.
fn store(worker: &mut EngineDrivenWorker, first: usize, chunks: usize) -> Prompt {
    let (size, bytes) = (worker.chunk_tokens(), worker.chunk_bytes());
    let tokens = (0..chunks * size).map(|at| (first + at / size) as u32);
    let prompt = Prompt::new(&tokens.collect::<Vec<_>>());
    let stored = worker.store(&prompt, prompt.whole_chunks(size), "s", |_| vec![1; bytes]);
    assert_eq!(stored.unwrap().chunks.len(), chunks);
    prompt
}

fn load(endpoint: &str, number: usize, is_over: &AtomicBool) -> u64 {
    let scope = Scope::new(format!("load-{number}-{}", std::process::id()));
    let mut worker = worker(endpoint, 100 + number as i64, scope.clone());
    let prompt = store(&mut worker, 0, LONG);
    let mut rounds = 0;
    while !is_over.load(Ordering::Relaxed) {
        let range = prompt.whole_chunks(worker.chunk_tokens());
        let key = scope.scheduler_key(&prompt, range, "l");
        assert_eq!(worker.connection().lookup_hits(&key).unwrap(), LONG as u64);
        worker.connection().end_session("l").unwrap();
        store(&mut worker, LONG + rounds, 1);
        rounds += 1;
    }
    rounds as u64
}

fn print(what: &str, mut latencies: Vec<Duration>) {
    latencies.sort_unstable();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    let (p50, p99, max) = (at(0.5), at(0.99), at(1.0));
    println!("{what:30} p50 {p50:>10.1?}  p99 {p99:>10.1?}  max {max:>10.1?}");
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let endpoint = &*arguments[0];
    let count = |at: usize, default| arguments.get(at).map_or(default, |it| it.parse().unwrap());
    let (stores, clients) = (count(1, 2000), count(2, 4));
    let scope = Scope::new(format!("events-{}", std::process::id()));
    let client = Client::connect(endpoint).unwrap();
    let (sender, arrived) = mpsc::channel();
    let callback = move |update: KvEventUpdate<'_>| match update {
        KvEventUpdate::Requested => {}
        KvEventUpdate::Batch(batch) => {
            let now = Instant::now();
            let stored = batch
                .events
                .iter()
                .filter_map(|event| event.token_ids.first());
            let firsts: Vec<_> = stored.map(|token| *token as usize).collect();
            sender.send((now, firsts)).unwrap();
        }
        KvEventUpdate::Ended(why) => panic!("{why}"),
    };
    let name = &*scope.model_name;
    client.on_kv_events(name, Box::new(callback)).unwrap();
    arrived.recv().unwrap();
    let mut worker = worker(endpoint, 1, scope);
    let (is_over, mut times, began) = (AtomicBool::new(false), Vec::new(), Instant::now());
    let rounds: u64 = std::thread::scope(|threads| {
        let load = |number| {
            threads.spawn({
                let over = &is_over;
                move || load(endpoint, number, over)
            })
        };
        let others: Vec<_> = (0..clients).map(load).collect();
        for number in 0..stores {
            let asked = Instant::now();
            store(&mut worker, number * CHUNKS, CHUNKS);
            times.push((asked, Instant::now()));
            std::thread::sleep(INTERVAL.saturating_sub(asked.elapsed()));
        }
        is_over.store(true, Ordering::Relaxed);
        others.into_iter().map(|it| it.join().unwrap()).sum()
    });
    let seconds = began.elapsed().as_secs_f64();
    let (mut since_reply, mut since_request) = (Vec::new(), Vec::new());
    while since_reply.len() < stores * CHUNKS {
        let (now, firsts) = arrived.recv_timeout(Duration::from_secs(60)).unwrap();
        for first in firsts {
            let (asked, answered) = times[first / CHUNKS];
            since_reply.push(now.saturating_duration_since(answered));
            since_request.push(now - asked);
        }
    }
    let events = since_reply.len();
    println!(
        "{events} events in {seconds:.1} s, {clients} clients beside with {rounds} lookups and stores"
    );
    print("from the reply to a commit", since_reply);
    print("from the start of a store", since_request);
}
