//! The memory against plain decoding and hashing, and what it remembers.

use super::generations::MAX_ARRIVALS;
use super::*;
use crate::hashing::{DEFAULT_SEED, HashAlgorithm};
use kvtier_proto::key::VecTokens;
use proptest::prelude::*;

fn memory(chunk_size: usize, budget: usize) -> PromptMemory {
    let chunk_size = chunk_size.try_into().unwrap();
    PromptMemory::new(
        ChunkHasher::new(HashAlgorithm::Blake3, chunk_size, DEFAULT_SEED),
        budget,
    )
}

/// Decodes everything, hashes everything.
fn plain(memory: &PromptMemory, count: usize, data: &[u8]) -> Result<(Prompt, usize), DecodeError> {
    let (tokens, consumed) = VecTokens.read(count, data)?;
    let hashes = memory.hasher.hash_prompt(&tokens);
    Ok((
        Prompt {
            token_count: count,
            chunk_size: memory.hasher.chunk_size(),
            hashes,
            tokens: Default::default(),
            is_object_keys: false,
        },
        consumed,
    ))
}

/// Reads through the memory and checks the result, errors included, and the bounds.
fn read(memory: &PromptMemory, count: usize, data: &[u8]) -> Result<(Prompt, usize), DecodeError> {
    let result = memory.reader().read(count, data);
    assert_eq!(result, plain(memory, count, data));
    memory.generations.read().check_invariants();
    result
}

/// Token ids in their shortest form.
fn encoded(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
    let mut data = Vec::new();
    tokens
        .into_iter()
        .for_each(|token| wire::write_uint(&mut data, token.into()));
    data
}

/// A prompt of a realistic mix of widths; different for each `seed` from its first token on.
fn prompt(seed: u32, count: u32) -> Vec<u8> {
    encoded((0..count).map(|at| {
        (at + 1)
            .wrapping_mul(2_654_435_761)
            .wrapping_add(seed * 7919)
            % 128_000
    }))
}

/// Counters of one read alone.
fn counted(memory: &PromptMemory, count: usize, data: &[u8]) -> PromptStats {
    let before = memory.stats();
    read(memory, count, data).unwrap();
    let after = memory.stats();
    PromptStats {
        prompts: after.prompts - before.prompts,
        chunks_known: after.chunks_known - before.chunks_known,
        chunks_hashed: after.chunks_hashed - before.chunks_hashed,
        tokens_decoded: after.tokens_decoded - before.tokens_decoded,
        ..after
    }
}

#[test]
fn a_repeated_prompt_is_neither_decoded_nor_hashed() {
    let memory = memory(256, 64 << 20);
    let data = prompt(1, 32_768);
    let first = counted(&memory, 32_768, &data);
    assert_eq!(
        (
            first.chunks_known,
            first.chunks_hashed,
            first.tokens_decoded
        ),
        (0, 128, 32_768)
    );
    for _ in 0..3 {
        let again = counted(&memory, 32_768, &data);
        assert_eq!(
            (
                again.chunks_known,
                again.chunks_hashed,
                again.tokens_decoded
            ),
            (128, 0, 0)
        );
    }
    assert_eq!(memory.stats().entries, 128);
}

#[test]
fn longer_prompt_hashes_only_its_new_chunks() {
    let memory = memory(256, 64 << 20);
    let data = prompt(1, 32_768);
    let start = wire::skip_tokens(30_000, &data).unwrap();
    counted(&memory, 30_000, &data[..start]);
    // 117 chunks are 29,952 tokens; the rest is decoded, 10 chunks of it for the first time.
    let whole = counted(&memory, 32_768, &data);
    assert_eq!(
        (
            whole.chunks_known,
            whole.chunks_hashed,
            whole.tokens_decoded
        ),
        (117, 11, 2816)
    );
    let short = counted(&memory, 30_000, &data[..start]);
    assert_eq!(
        (
            short.chunks_known,
            short.chunks_hashed,
            short.tokens_decoded
        ),
        (117, 0, 48)
    );
}

#[test]
fn prompts_diverging_inside_a_chunk_are_all_known() {
    let memory = memory(256, 64 << 20);
    let prompts: Vec<Vec<u8>> = (0..50)
        .map(|user| encoded((0..700).map(move |at| if at < 200 { at } else { at * 91 + user })))
        .collect();
    for data in &prompts {
        assert_eq!(counted(&memory, 700, data).chunks_known, 0);
    }
    for data in prompts.iter().chain(prompts.iter().rev()) {
        assert_eq!(counted(&memory, 700, data).chunks_hashed, 0);
    }
}

#[test]
fn a_prompt_in_use_outlives_a_flood() {
    let memory = memory(16, 30_000);
    let kept = prompt(0, 64);
    read(&memory, 64, &kept).unwrap();
    let mut most = 0;
    for seed in 1..500 {
        read(&memory, 64, &prompt(seed, 64)).unwrap();
        assert_eq!(counted(&memory, 64, &kept).chunks_known, 4, "after {seed}");
        most = most.max(memory.stats().bytes);
    }
    // Two generations of a third each; they do get used.
    assert!((10_000..20_000).contains(&most), "{most}");
    // Unused entries were removed.
    assert_eq!(counted(&memory, 64, &prompt(1, 64)).chunks_known, 0);
}

#[test]
fn start_of_overlong_prompt_is_kept() {
    let memory = memory(16, 30_000);
    let data = prompt(5, 16_000);
    for _ in 0..3 {
        read(&memory, 16_000, &data).unwrap();
    }
    let stats = counted(
        &memory,
        160,
        &data[..wire::skip_tokens(160, &data).unwrap()],
    );
    assert_eq!(stats.chunks_known, 10);
}

#[test]
fn a_very_long_prompt_is_remembered_in_parts() {
    let memory = memory(2, 64 << 20);
    let chunks = MAX_ARRIVALS + 2000;
    let data = prompt(3, chunks as u32 * 2);
    for (known, hashed) in [(0, chunks), (MAX_ARRIVALS, 2000), (chunks, 0)] {
        let stats = counted(&memory, chunks * 2, &data);
        assert_eq!(
            (stats.chunks_known, stats.chunks_hashed),
            (known as u64, hashed as u64)
        );
    }
}

#[test]
fn without_a_budget_nothing_is_kept() {
    let memory = memory(4, 0);
    let data = prompt(1, 64);
    for _ in 0..2 {
        assert_eq!(counted(&memory, 64, &data).chunks_known, 0);
    }
    assert_eq!((memory.stats().entries, memory.stats().bytes), (0, 0));
}

#[test]
fn nothing_of_an_invalid_prompt_is_remembered() {
    // -1, 2^32, true, 1.0, a string, nil, the end.
    let invalid: [&[u8]; 7] = [
        &[0xff],
        &[0xcf, 0, 0, 0, 1, 0, 0, 0, 0],
        &[0xc3],
        &[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0],
        &[0xa0],
        &[0xc0],
        &[],
    ];
    for bad in invalid {
        let memory = memory(4, 1 << 20);
        let good = prompt(1, 8);
        let data = [&good, bad].concat();
        let error = read(&memory, 9, &data).unwrap_err();
        assert_eq!(memory.stats(), PromptStats::default(), "{error}");
        // Once the good part is known, it stays so, and the error is the same.
        read(&memory, 8, &good).unwrap();
        assert_eq!(read(&memory, 9, &data).unwrap_err(), error);
        assert_eq!((memory.stats().entries, memory.stats().prompts), (2, 1));
    }
}

#[test]
fn a_claimed_count_allocates_nothing() {
    let memory = memory(1, 1 << 20);
    assert!(read(&memory, usize::MAX, &[1, 2, 3]).is_err());
    assert!(read(&memory, usize::MAX, &[]).is_err());
}

#[test]
fn a_key_alone_proves_nothing() {
    let limits = GenerationLimits::new(1 << 20, 4);
    let mut generations = Generations::new(limits);
    let (before, hash) = (ChunkHash([1; 32]), ChunkHash([2; 32]));
    let raw = encoded([1, 2, 3, 4]);
    let mut arrivals = Arrivals::default();
    assert!(arrivals.push(RememberedChunk::new(77, &before, &hash, &raw), &limits));
    generations.admit(&mut arrivals, None);
    assert!(generations.find(77, &before, &raw).is_some());
    assert!(
        generations
            .find(77, &before, &[&raw[..], &[9]].concat())
            .is_some()
    );
    // Other bytes, too few bytes, or another start of the prompt under the same key.
    assert!(
        generations
            .find(77, &before, &encoded([1, 2, 3, 5]))
            .is_none()
    );
    assert!(generations.find(77, &before, &raw[..3]).is_none());
    assert!(generations.find(77, &hash, &raw).is_none());
    // An entry that collides with it finds the place taken.
    let mut arrivals = Arrivals::default();
    assert!(arrivals.push(RememberedChunk::new(77, &hash, &before, &raw), &limits));
    generations.admit(&mut arrivals, None);
    assert!(generations.find(77, &before, &raw).is_some());
    generations.check_invariants();
}

#[test]
fn threads_share_one_memory() {
    let memory = memory(16, 40_000);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let memory = &memory;
            scope.spawn(move || {
                for round in 0..200 {
                    // Some prompts are shared by all threads, some are not.
                    let seed = if round % 2 == 0 {
                        round % 10
                    } else {
                        thread * 1000 + round
                    };
                    let data = prompt(seed, 100);
                    assert_eq!(memory.reader().read(100, &data), plain(memory, 100, &data));
                }
            });
        }
    });
    memory.generations.read().check_invariants();
    assert_eq!(memory.stats().prompts, 800);
}

/// One token id in one of the encodings that mean it, mostly the shortest; now and then something invalid.
fn token() -> impl Strategy<Value = Vec<u8>> {
    // Few values, so that prompts share beginnings.
    let value = prop_oneof![0u32..3, Just(200), Just(70_000), Just(u32::MAX)];
    prop_oneof![
        60 => value.clone().prop_map(|value| encoded([value])),
        5 => value.clone().prop_map(|value| [&[0xce], &value.to_be_bytes()[..]].concat()),
        5 => value.clone().prop_map(|value| [&[0xcf], &u64::from(value).to_be_bytes()[..]].concat()),
        5 => value.prop_map(|value| [&[0xd3], &u64::from(value).to_be_bytes()[..]].concat()),
        5 => (0u8..3).prop_map(|value| vec![0xd0, value]),
        1 => Just(vec![0xff]),
        1 => Just(vec![0xc2]),
        1 => Just(vec![0xcf, 0, 0, 0, 1, 0, 0, 0, 0]),
        1 => Just(vec![0xca, 0, 0, 0, 0]),
    ]
}

proptest! {
    #[test]
    fn the_memory_changes_no_result(
        chunk_size in 1usize..6,
        budget in prop_oneof![0usize..4000, Just(1 << 20)],
        base in proptest::collection::vec(token(), 0..40),
        // Each: how much of the base it keeps, what follows, a cut off the bytes' end, an error in the count.
        requests in proptest::collection::vec(
            (0usize..40, proptest::collection::vec(token(), 0..12), 0usize..3, 0usize..2), 1..40),
    ) {
        let memory = memory(chunk_size, budget);
        for (keep, tail, cut, claim) in requests {
            let tokens: Vec<&Vec<u8>> = base.iter().take(keep).chain(&tail).collect();
            let mut data: Vec<u8> = tokens.iter().flat_map(|token| token.iter().copied()).collect();
            data.truncate(data.len().saturating_sub(cut / 2));
            let _ = read(&memory, tokens.len() + claim, &data);
            let _ = read(&memory, tokens.len(), &data);
        }
        prop_assert!(memory.stats().bytes <= budget / 3 * 2);
    }
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
#[test]
fn chunk_sizes_share_a_memory_and_no_hash() {
    let memory = memory(2, 1 << 20);
    let data = prompt(3, 512);
    let tokens = VecTokens.read(512, &data).unwrap().0;
    // Twice, and in turns: what the walk for one size has left is the hint of the other.
    for _ in 0..2 {
        let mut seen = std::collections::HashSet::new();
        for size in [2, 16, 24, 32, 64, 512] {
            let mut reader = memory.reader();
            reader.set_chunk_tokens(size);
            let (found, consumed) = reader.read(512, &data).unwrap();
            let size = NonZeroUsize::new(size as usize).unwrap();
            assert_eq!(found.chunk_size, size);
            assert_eq!(found.hashes, memory.hasher.hash_chunks(size, &tokens));
            assert_eq!(consumed, data.len());
            assert!(found.hashes.iter().all(|hash| seen.insert(*hash)), "{size}");
        }
    }
    // 512 tokens are 21 whole chunks of 24 tokens.
    assert_eq!(memory.stats().chunks_known, 256 + 32 + 21 + 16 + 8 + 1);
    memory.generations.read().check_invariants();
}

#[test]
fn packed_prompts_have_the_hashes_of_their_ids() {
    let memory = memory(16, 1 << 20);
    let data = prompt(3, 500);
    let ids = VecTokens.read(500, &data).unwrap().0;
    let packed: Vec<PackedToken> = ids.iter().map(|id| id.to_be_bytes()).collect();
    // In turns: neither finds what the other has left, and each finds its own.
    for known in [0, 31] {
        let before = memory.stats().chunks_known;
        let found = memory.reader().read_packed(&packed).unwrap();
        assert_eq!(found, plain(&memory, 500, &data).unwrap().0);
        assert_eq!(memory.stats().chunks_known - before, known);
        read(&memory, 500, &data).unwrap();
    }
    let none = memory.reader().read_packed(&[]).unwrap();
    assert_eq!((none.token_count, none.hashes.len()), (0, 0));
    memory.generations.read().check_invariants();
}

#[test]
fn same_bytes_in_two_encodings_are_two_prompts() {
    const ID: u32 = 0x0101_0101;
    // Four chunks of ones as ints, one chunk of `ID` when packed.
    let bytes = [1; 64];
    let packed = [bytes, bytes].concat();
    let mut ints = encoded([ID; 16]);
    ints.extend_from_slice(&bytes);
    for packed_first in [true, false] {
        let memory = memory(16, 1 << 20);
        let read_packed = || {
            let found = memory.reader().read_packed(packed.as_chunks().0).unwrap();
            assert_eq!(found.hashes, memory.hasher.hash_prompt(&[ID; 32]));
        };
        if packed_first {
            read_packed();
        }
        // Behind nothing, and behind a chunk that both have.
        read(&memory, 64, &bytes).unwrap();
        read(&memory, 80, &ints).unwrap();
        read_packed();
    }
}
