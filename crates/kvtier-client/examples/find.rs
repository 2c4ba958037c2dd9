//! How long a find of many objects takes, all of them in L1: `cargo run --release -p kvtier-client --example find -- HOST:PORT [KEYS] [ROUNDS]`.

use std::error::Error;
use std::time::{Duration, Instant};

use kvtier_client::{
    Client, Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, Prompt, Scope,
};

/// Tokens that each object stands for.
const CHUNK: u32 = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let endpoint = arguments
        .next()
        .ok_or("the server's HOST:PORT is missing")?;
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (count, rounds) = (number(512)?, number(5000)?);

    let scope = Scope {
        chunk_tokens: Some(CHUNK),
        ..Scope::new(format!("example/find-{}", std::process::id()))
    };
    let spec = EngineDrivenSpec::new(
        InstanceId(i64::from(std::process::id())),
        scope.clone(),
        1,
        64,
    );
    let mut worker = EngineDrivenWorker::register(Connection::connect(&endpoint)?, spec)?;
    let keys: Vec<[u8; 32]> = (0..count).map(|key| key_of(key as u64)).collect();
    let objects = Prompt::of_object_keys(&keys, CHUNK as usize);
    let range = 0..objects.len() as u64;
    let bytes = vec![7; worker.chunk_bytes()];
    worker.store(&objects, range.clone(), "store", |_| &bytes)?;

    let client = Client::connect(&endpoint)?;
    if !client.wait_healthy(Duration::from_secs(5)) {
        return Err("the server does not answer".into());
    }
    let key = scope.scheduler_key(&objects, range, "find");
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        let found = client.find(&key, Duration::from_secs(5)).join()?;
        times.push(start.elapsed());
        if !found.iter().all(|found| *found) {
            return Err("an object was not found".into());
        }
        client.end_session("find").join()?;
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    println!(
        "find of {count} keys, {rounds} rounds: p50 {:.1} us, p90 {:.1} us, p99 {:.1} us",
        at(50),
        at(90),
        at(99)
    );
    Ok(())
}

/// Bytes that differ for each number in all places.
fn key_of(number: u64) -> [u8; 32] {
    let mut key = [0; 32];
    for (place, word) in key.chunks_exact_mut(8).enumerate() {
        let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ place as u64);
        word.copy_from_slice(&mixed.rotate_left(31).to_le_bytes());
    }
    key
}
