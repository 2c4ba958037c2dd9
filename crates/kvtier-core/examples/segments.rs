//! Cost of the segment index: searching a prompt, registering, memory, and how many segments are reachable.
//!
//! `cargo run --release -p kvtier-core --example segments [segments] [tokens] [repeats]` (default 1 million, 131 072 and 9).

use kvtier_core::random::SplitMix64;
use kvtier_core::segments::{SegmentScope, Segments};
use kvtier_core::{ChunkHash, Namespace};
use std::time::Instant;

const CHUNK: usize = 256;
/// Chunks per registration, a store of 16,384 tokens.
const STORED: usize = 64;

/// Tokens that no other number has.
fn text(number: u64, tokens: usize) -> Vec<u32> {
    let mut random = SplitMix64::new(number << 20);
    (0..tokens).map(|_| random.below(128_000) as u32).collect()
}

fn scope(number: u64) -> SegmentScope {
    let salt = format!("tenant-{number}");
    let namespace = Namespace::new("meta-llama/Llama-3.1-8B-Instruct", 1 << 24, 0, 7, salt);
    SegmentScope::new([&namespace.expect("good names")], CHUNK)
}

fn hash(number: u64) -> ChunkHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    ChunkHash(bytes)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds per unit.
fn timed(units: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64 / units as f64
}

/// Registers texts `from..to` of [`STORED`] chunks, each in the scope of its number; returns nanoseconds per segment.
fn register(segments: &Segments, scopes: &[SegmentScope], from: u64, to: u64) -> f64 {
    let hashes: Vec<_> = (0..STORED as u64).map(hash).collect();
    let mut nanoseconds: Vec<_> = (from..to)
        .map(|number| {
            let tokens = text(number, STORED * CHUNK);
            let scope = &scopes[number as usize % scopes.len()];
            timed(STORED, || {
                segments.register(scope, CHUNK, 1, &hashes, &tokens)
            })
        })
        .collect();
    median(&mut nanoseconds)
}

/// Segments of texts `0..to` that are found.
fn reachable(segments: &Segments, scopes: &[SegmentScope], to: u64) -> usize {
    (0..to)
        .map(|number| {
            let tokens = text(number, STORED * CHUNK);
            let scope = &scopes[number as usize % scopes.len()];
            let found = segments.find(scope, CHUNK, &tokens, 0, || true);
            found.expect("not refused").len()
        })
        .sum()
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>());
    let mut number = |default| args.next().and_then(Result::ok).unwrap_or(default);
    let (capacity, tokens, repeats) = (number(1_000_000), number(131_072), number(9));
    let texts = (capacity / STORED) as u64;
    for count in [1, 1000] {
        let scopes: Vec<_> = (0..count).map(scope).collect();
        let segments = Segments::new([7; 32], capacity);
        let filling = register(&segments, &scopes, 0, texts);
        let stats = segments.stats();
        let found = reachable(&segments, &scopes, texts);
        println!(
            "{count} scopes, {} segments of {CHUNK} tokens, medians",
            stats.segments
        );
        println!("  reachable           {found} of {}", stats.segments);
        println!(
            "  bytes per segment   {:.2}",
            stats.bytes as f64 / stats.capacity as f64
        );
        println!("  registering         {filling:.0} ns per segment while the index fills");
        let other = text(texts + 1_000_000, tokens);
        // Texts of the scope, at places that are no multiples of the chunk.
        let mut mixed = text(texts + 2_000_000, 100);
        for part in (0..texts)
            .step_by(scopes.len())
            .take(tokens / (STORED * CHUNK))
        {
            mixed.extend(text(part, STORED * CHUNK));
        }
        let equal = vec![5; tokens];
        segments.register(&scopes[0], CHUNK, 1, &[hash(0)], &equal);
        for (name, prompt) in [
            ("no match", &other),
            ("matches everywhere", &mixed),
            ("one token, repeated", &equal),
        ] {
            let mut matches = 0;
            let mut nanoseconds: Vec<_> = (0..repeats)
                .map(|_| {
                    timed(prompt.len(), || {
                        let found = segments.find(&scopes[0], CHUNK, prompt, 0, || true);
                        matches = found.expect("not refused").len();
                    })
                })
                .collect();
            let best = nanoseconds.iter().copied().fold(f64::MAX, f64::min);
            let median = median(&mut nanoseconds);
            println!(
                "  {name:19} {median:.2} ns per token (best {best:.2}), {:.2} ms for {} tokens, {matches} matches",
                median * prompt.len() as f64 / 1e6,
                prompt.len(),
            );
        }
        let full = register(&segments, &scopes, texts, texts + texts / 16);
        println!("  registering         {full:.0} ns per segment into a full index");
    }
}
