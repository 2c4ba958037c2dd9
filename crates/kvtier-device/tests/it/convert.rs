//! Which formats share objects: pages of every format and block size are filled from objects of every other one, token
//! by token, against the naive model.

use kvtier_device::{
    BlockTable, ChunkRequest, Direction, Engine, GroupSpec, KvAxisOrder, KvFormat, KvListLayout,
    LayoutHints, TokenContent,
};
use proptest::prelude::*;

use crate::model::{Case, Group, Random, apply, place};

/// Formats that no registration is read as: their shapes are those of others, or of devices that are not served.
const UNREACHABLE: [KvFormat; 6] = [
    KvFormat::TWO_X_NL_X_NBBS_NH_HS,
    KvFormat::NL_X_NBBS_ONE_HS,
    KvFormat::NL_X_NB_NH_BS_TWO_HS,
    KvFormat::NL_X_NB_BS_NH_TWO_HS,
    KvFormat::NL_X_TWO_X_NB_BS_NH_HS,
    KvFormat::NL_X_NP_X_NB_BS_ONE_HS,
];

/// Divisible by every block size below.
const CHUNK_TOKENS: u64 = 24;
const CHUNKS: usize = 2;
const BLOCK_SIZES: [u64; 5] = [1, 2, 3, 6, 24];

/// Registered pages of one format, with the engines and hints that make the server read them so.
fn pages(
    format: KvFormat,
    slots: u64,
    geometry: [u64; 3],
    dtype: (&'static str, u64),
    seed: u64,
) -> Case {
    use KvFormat as F;
    let random = &mut Random::new(seed);
    let mut hints = LayoutHints::default();
    let heads_first = [
        F::NL_X_TWO_NB_NH_BS_HS,
        F::NL_X_NB_TWO_NH_BS_HS,
        F::NL_X_NB_NH_BS_CS,
        F::NB_NL_TWO_NH_BS_HS,
    ];
    let order = if heads_first.contains(&format) {
        KvAxisOrder::Hnd
    } else {
        KvAxisOrder::Nhd
    };
    hints.kv_layout = Some(order);
    let engine = match format {
        F::TWO_X_NL_X_NB_BS_NH_HS => {
            hints.kv_list_layout = Some(KvListLayout::Separate);
            Engine::Sglang
        }
        F::NL_X_NB_BS_NH_HS => {
            hints.kv_list_layout = Some(KvListLayout::Unified);
            Engine::Sglang
        }
        F::NB_NL_TWO_NH_BS_HS if random.chance(2) => Engine::Trtllm,
        _ => Engine::Vllm,
    };
    let [layers, heads, head_size] = geometry;
    let blocks = CHUNKS as u64 * CHUNK_TOKENS / slots;
    let mut ids: Vec<i64> = (0..blocks as i64 + 3).collect();
    for _ in 0..blocks {
        let last = ids.len() as u64 - 1;
        ids.swap(
            random.within(0, last) as usize,
            random.within(0, last) as usize,
        );
    }
    ids.truncate(blocks as usize);
    let layer_indices: Vec<usize> = (0..layers as usize).collect();
    let mut case = Case {
        engine,
        hints,
        tensors: Vec::new(),
        specs: vec![GroupSpec::full_attention(
            (0..layers as i64).collect(),
            slots as i64,
        )],
        groups: vec![Group {
            format,
            slots,
            tokens_per_block: slots,
            heads,
            head_size,
            dtype,
            layers: layer_indices,
            ids,
        }],
        chunk_tokens: CHUNK_TOKENS,
        chunks: CHUNKS,
        skip_tokens: 0,
        separate: false,
        memories: Vec::new(),
    };
    place(&mut case, layers as usize, random, "convert");
    case
}

/// Runs the planner's copies of one chunk.
fn run(
    case: &Case,
    chunk: usize,
    memories: &mut [Vec<u8>],
    object: &mut [u8],
    direction: Direction,
) {
    let layout = case.layout();
    let table = BlockTable::check(&layout, &case.block_ids(), CHUNKS).unwrap();
    let mut copies = Vec::new();
    let request = ChunkRequest {
        object_group: 0,
        chunk,
        skip_tokens: 0,
    };
    request.plan(&layout, &table, &mut copies).unwrap();
    apply(&copies, memories, object, direction);
}

/// What byte `at` of a chunk is: `at` names plane, layer, token, head and element in one order for all formats.
fn byte(chunk: usize, at: u64) -> u8 {
    Random::new((chunk as u64) << 40 | at).next() as u8
}

#[test]
fn every_format_is_convertible_or_unreachable() {
    for format in KvFormat::ALL {
        let has_shape = !format.axes().is_empty() && !UNREACHABLE.contains(&format);
        assert!(has_shape || UNREACHABLE.contains(&format), "{format}");
        if has_shape {
            let (geometry, dtype) = geometry_of(format.token_content(), 1, 2, 3, ("bfloat16", 2));
            let layout = pages(format, 2, geometry, dtype, 0).layout();
            assert_eq!(layout.kernel_groups()[0].format, format);
        }
    }
}

/// Layers, heads, elements of a head and their type, as far as the content leaves the choice.
fn geometry_of(
    content: TokenContent,
    layers: u64,
    heads: u64,
    head_size: u64,
    dtype: (&'static str, u64),
) -> ([u64; 3], (&'static str, u64)) {
    match content {
        TokenContent::Latent => ([layers, 1, head_size], dtype),
        TokenContent::ScaledIndex => ([layers, 1, 132], ("uint8", 1)),
        _ => ([layers, heads, head_size], dtype),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// For all pairs of formats of one content, and block sizes on both sides that differ.
    // proves: docs/identity.md#the-fingerprint
    #[test]
    fn tokens_survive_other_formats_and_block_sizes(
        seed in any::<u64>(),
        (layers, heads, head_size) in (1u64..4, 1u64..5, 1u64..6),
        (from_slots, to_slots) in (prop::sample::select(&BLOCK_SIZES[..]), prop::sample::select(&BLOCK_SIZES[..])),
        dtype in prop::sample::select(&[("float8_e4m3fn", 1), ("bfloat16", 2), ("float32", 4)][..]),
    ) {
        let reachable = || KvFormat::ALL.into_iter().filter(|format| !UNREACHABLE.contains(format));
        for from in reachable() {
            let (geometry, dtype) = geometry_of(from.token_content(), layers, heads, head_size, dtype);
            let source = pages(from, from_slots, geometry, dtype, seed);
            for to in reachable().filter(|to| to.token_content() == from.token_content()) {
                let target = pages(to, to_slots, geometry, dtype, seed ^ 1);
                for chunk in 0..CHUNKS {
                    let memories_of = |case: &Case| -> Vec<Vec<u8>> {
                        case.memories.iter().map(|(_, bytes)| bytes.clone()).collect()
                    };
                    let mut memories = memories_of(&source);
                    source.each_byte(&[0], chunk, 0, |memory, engine, at| {
                        memories[memory][engine as usize] = byte(chunk, at);
                    });
                    let mut object = vec![0; source.layout().object_groups()[0].object_bytes as usize];
                    run(&source, chunk, &mut memories, &mut object, Direction::Store);

                    let mut memories = memories_of(&target);
                    run(&target, chunk, &mut memories, &mut object, Direction::Retrieve);
                    target.each_byte(&[0], chunk, 0, |memory, engine, at| {
                        assert_eq!(
                            memories[memory][engine as usize], byte(chunk, at),
                            "{from} of {from_slots} to {to} of {to_slots}, chunk {chunk}, byte {at}"
                        );
                    });
                }
            }
        }
    }
}

/// A page of a CPU attention kernel, packed by columns, in a tensor of the same shape.
// proves: docs/identity.md#bound-pages
#[test]
fn packed_pages_survive_only_pages_of_their_block_size() {
    let (geometry, dtype) = ([1, 1, 4], ("bfloat16", 2));
    let packed = |slots| pages(KvFormat::NL_X_NB_NH_BS_CS, slots, geometry, dtype, 7);
    let moved = |from_slots: u64, to_slots: u64| {
        let (source, target) = (packed(from_slots), packed(to_slots));
        // Element `d` of token `t` in a page of `slots` is at `d * slots + t`, which the shape reads as another place.
        let place = |slots: u64, page_start: u64, token: u64, d: u64| {
            page_start + (d * slots + token % slots) * dtype.1
        };
        let starts = |case: &Case| {
            let mut starts = Vec::new();
            let slots = case.groups[0].slots;
            case.each_byte(&[0], 0, 0, |_, engine, at| {
                if at % (slots * 4 * dtype.1) == 0 {
                    starts.push(engine);
                }
            });
            starts
        };
        let mut memory = [source.memories[0].1.clone()];
        let (sources, targets) = (starts(&source), starts(&target));
        for token in 0..CHUNK_TOKENS {
            for d in 0..4 {
                let at = place(from_slots, sources[(token / from_slots) as usize], token, d);
                memory[0][at as usize] = byte(0, token * 4 + d);
            }
        }
        let mut object = vec![0; source.layout().object_groups()[0].object_bytes as usize];
        run(&source, 0, &mut memory, &mut object, Direction::Store);
        let mut memory = [target.memories[0].1.clone()];
        run(&target, 0, &mut memory, &mut object, Direction::Retrieve);
        (0..CHUNK_TOKENS).all(|token| {
            (0..4).all(|d| {
                let at = place(to_slots, targets[(token / to_slots) as usize], token, d);
                memory[0][at as usize] == byte(0, token * 4 + d)
            })
        })
    };
    assert!(moved(6, 6));
    assert!(!moved(6, 3) && !moved(3, 6));
}
