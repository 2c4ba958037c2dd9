//! Prompts whose chunks have bytes that nothing else has, and the workers that store and read them.

use std::ops::Range;

use kvtier_client::{EngineDrivenWorker, LmcacheDrivenWorker, Prompt, Scope};
use kvtier_core::random::SplitMix64;

/// Tokens of a chunk.
pub(crate) const CHUNK: usize = 16;
/// Chunks of a prompt.
pub(crate) const CHUNKS: u64 = 4;

pub(crate) fn scope(salt: &str) -> Scope {
    Scope {
        cache_salt: salt.to_owned(),
        ..Scope::new("kills/model")
    }
}

pub(crate) fn prompt(number: u64) -> Prompt {
    let first = u32::try_from(number).unwrap() * 1000;
    let tokens: Vec<_> = (0..CHUNKS as u32 * CHUNK as u32)
        .map(|token| first + token)
        .collect();
    Prompt::new(&tokens)
}

pub(crate) fn whole() -> Range<u64> {
    0..CHUNKS * CHUNK as u64
}

/// Bytes of a chunk that nothing else has.
pub(crate) fn bytes(salt: &str, number: u64, chunk: u64, len: usize) -> Vec<u8> {
    let tenant = salt.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte));
    SplitMix64::new(tenant << 32 ^ number << 8 ^ chunk).bytes(len)
}

/// Stores a prompt; returns how many chunks the server has taken.
pub(crate) fn store(worker: &mut EngineDrivenWorker, salt: &str, number: u64) -> u64 {
    let len = worker.chunk_bytes();
    let source = |chunk| bytes(salt, number, chunk, len);
    let stored = worker.store(&prompt(number), whole(), "s", source);
    stored.unwrap().chunks.len() as u64
}

/// Chunks of a prompt that a worker reads, all of them right.
pub(crate) fn read(
    worker: &mut EngineDrivenWorker,
    salt: &str,
    number: u64,
) -> Result<u64, String> {
    let (prompt, request) = (prompt(number), format!("r{number}"));
    let hit = worker
        .lookup(&prompt, &request)
        .map_err(|error| error.to_string())?;
    let len = worker.chunk_bytes();
    let mut wrong = None;
    if hit > 0 {
        let range = 0..hit * CHUNK as u64;
        let check = |chunk, found: &[u8]| {
            if found != bytes(salt, number, chunk, len) {
                wrong = Some(chunk);
            }
        };
        let read = worker.retrieve(&prompt, range, &request, check);
        if read.map_err(|error| error.to_string())?.is_none() {
            return Err(format!(
                "{hit} chunks were found, and their retrieve was refused"
            ));
        }
    }
    assert_eq!(
        wrong, None,
        "wrong bytes in a chunk of prompt {number} of {salt:?}"
    );
    Ok(hit)
}

/// Blocks of a worker's pages, four per chunk: stored from these, and retrieved into those behind them.
const BLOCKS: i64 = 4 * CHUNKS as i64;

/// Writes a prompt to the pages of a worker, and stores it; returns whether the server has taken it.
pub(crate) fn try_store_pages(
    pages: &mut LmcacheDrivenWorker,
    salt: &str,
    number: u64,
) -> Result<bool, String> {
    let blocks: Vec<_> = (0..BLOCKS).collect();
    for (chunk, own) in (0..CHUNKS).zip(blocks.chunks(4)) {
        let content = bytes(salt, number, chunk, pages.chunk_bytes());
        pages.write_chunk(own, &content).unwrap();
    }
    let stored = pages.store(&prompt(number), whole(), "s", &blocks);
    stored.map_err(|error| error.to_string())
}

/// Stores pages on a server that has the memory for them.
pub(crate) fn store_pages(pages: &mut LmcacheDrivenWorker, salt: &str, number: u64) {
    assert_eq!(try_store_pages(pages, salt, number), Ok(true));
}

/// Chunks of a prompt that a worker retrieves into its pages, all of them right.
pub(crate) fn read_pages(
    pages: &mut LmcacheDrivenWorker,
    salt: &str,
    number: u64,
) -> Result<u64, String> {
    let (prompt, request) = (prompt(number), format!("r{number}"));
    let hit = pages.lookup(&prompt, &request);
    let hit = hit.map_err(|error| error.to_string())?;
    if hit > 0 {
        let blocks: Vec<_> = (BLOCKS..BLOCKS + 4 * hit as i64).collect();
        let range = 0..hit * CHUNK as u64;
        let got = pages.retrieve(&prompt, range, &request, &blocks, 0);
        if !got.map_err(|error| error.to_string())? {
            return Err(format!(
                "{hit} chunks were found, and their retrieve was refused"
            ));
        }
        for (chunk, own) in (0..hit).zip(blocks.chunks(4)) {
            let mut found = Vec::new();
            pages.read_chunk(own, &mut found).unwrap();
            assert_eq!(found, bytes(salt, number, chunk, found.len()));
        }
    }
    Ok(hit)
}

/// Retrieves a prompt whose lookup under `request` has hit, all of it right.
pub(crate) fn retrieve_pages(
    pages: &mut LmcacheDrivenWorker,
    salt: &str,
    number: u64,
    request: &str,
) {
    let blocks: Vec<_> = (BLOCKS..2 * BLOCKS).collect();
    let got = pages.retrieve(&prompt(number), whole(), request, &blocks, 0);
    assert!(got.unwrap());
    for (chunk, own) in (0..CHUNKS).zip(blocks.chunks(4)) {
        let mut found = Vec::new();
        pages.read_chunk(own, &mut found).unwrap();
        assert_eq!(found, bytes(salt, number, chunk, found.len()));
    }
}
