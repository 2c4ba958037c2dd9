//! `--blend`: passages of stored prompts are found in the middle of another prompt, and retrieved to where they are in it.

use std::ops::Range;
use std::time::Instant;

use anyhow::Context as _;
use kvtier_client::proto::descriptor::{CpuShm, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_client::proto::request::{MatchedSegment, Request, RetrieveMatched, RopeRegistration};
use kvtier_client::proto::response::Response;
use kvtier_client::{LmcacheDrivenSpec, LmcacheDrivenWorker, Prompt, Scope};
use kvtier_memory::OwnSegment;

use super::{CHECK_INTERVAL, Demo};
use crate::context::block_tokens;
use crate::pattern;
use crate::record::Recorder;
use crate::report::Report;

/// Passages in the order of the prompt; they are stored in the order of their numbers, each behind a chunk of its own.
const ORDER: [usize; 3] = [2, 0, 1];
/// Whole chunks of a passage.
const PASSAGE_CHUNKS: usize = 2;
/// Tokens before each passage of the prompt: no multiple of a block.
const GAP_TOKENS: usize = 37;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD_SIZE: usize = 64;
/// Values of a token in one plane of a layer.
const HIDDEN: usize = HEADS * HEAD_SIZE;

/// Chunks of a prompt, their bytes as the server keeps them.
type Chunks = Vec<Vec<u8>>;

/// A chunk of a passage: its number, where it was stored, and where it is in the prompt.
struct Move {
    passage: usize,
    old: usize,
    new: usize,
}

/// Stores the passages, finds and retrieves them in the prompt, and compares keys with their own rotation, values bit by bit.
pub(super) fn play(demo: &Demo<'_>, report: &mut Report) -> anyhow::Result<()> {
    let (context, chunk, began) = (&demo.context, demo.chunk_tokens(), Instant::now());
    let passages = [0, 1, 2].map(|number| context.tokens(number, PASSAGE_CHUNKS * chunk));
    let (mut tokens, mut moves) = (Vec::new(), Vec::new());
    for (gap, passage) in (10..).zip(ORDER) {
        tokens.extend(context.tokens(gap, GAP_TOKENS));
        moves.extend((0..PASSAGE_CHUNKS).map(|index| Move {
            passage,
            old: (index + 1) * chunk,
            new: tokens.len() + index * chunk,
        }));
        tokens.extend(&passages[passage]);
    }
    let mut worker = register(demo, tokens.len())?;
    let _table = register_table(&mut worker, tokens.len())?;
    let stored = store(demo, &mut worker, &passages)?;

    let (prompt, request, mut faults) = (
        Prompt::new(&tokens),
        context.request_id(),
        Recorder::default(),
    );
    let (prefix, matches) = look_up(demo, &mut worker, &prompt, &request)?;
    let found = matches.len() * chunk;
    let places = matches.iter().map(|found| (found.old_start, found.start));
    if !places.eq(moves.iter().map(|to| (to.old as i64, to.new as i64))) {
        faults.failure(|| format!("{found} tokens were found, and not those of the passages"));
    }
    match retrieve(&mut worker, &prompt, &request, matches)? {
        None => faults.failure(|| "the passages were found, then missed".to_owned()),
        Some(retrieved) => {
            for to in &moves {
                if !is_moved(&stored[to.passage], &retrieved, to, chunk) {
                    let Move { passage, old, new } = to;
                    faults.mismatch(|| format!("passage {passage}, from token {old} to {new}"));
                }
            }
        }
    }
    worker.connection().end_session(&request)?;
    worker.close().context("unregistering a worker")?;
    let row = faults.row("passages in another order", began.elapsed());
    report.add(
        row.fact("tokens asked", tokens.len() as f64)
            .fact("tokens hit by prefix", prefix as f64)
            .fact("tokens hit by blending", found as f64),
    );
    Ok(())
}

/// A worker with pages for a prompt of this number of tokens, at a server that must blend.
fn register(demo: &Demo<'_>, tokens: usize) -> anyhow::Result<LmcacheDrivenWorker> {
    let mut connection = demo.context.connect()?;
    let handshake: Request<'_, Vec<u32>> = Request::CbProtocolHandshake { client_version: 1 };
    let is_blending = matches!(
        connection.call(&handshake)?.response()?,
        Response::Handshake {
            compatible: true,
            ..
        }
    );
    anyhow::ensure!(
        is_blending,
        "the server does not blend: it needs --engine-type blend"
    );
    let chunk = demo.chunk_tokens();
    let block = block_tokens(chunk as u64);
    let blocks = 1 + tokens.next_multiple_of(chunk) as u64 / block;
    let (scope, instance) = (Scope::new("kvtier/demo-blend"), demo.context.instance());
    let (layers, heads, size) = (LAYERS as u64, HEADS as u64, HEAD_SIZE as u64);
    let mut spec = LmcacheDrivenSpec::new(instance, scope, layers, heads, size, blocks);
    spec.block_tokens = block;
    LmcacheDrivenWorker::register(connection, spec).context("registering a worker that blends")
}

/// The blocks of these chunks.
fn blocks(worker: &LmcacheDrivenWorker, chunks: Range<usize>) -> Vec<i64> {
    let per_chunk = worker.blocks_per_chunk() as usize;
    let blocks = chunks.start * per_chunk..chunks.end * per_chunk;
    blocks.map(|block| 1 + block as i64).collect()
}

/// Stores each passage behind a chunk of its own; returns the bytes.
fn store(
    demo: &Demo<'_>,
    worker: &mut LmcacheDrivenWorker,
    passages: &[Vec<u32>],
) -> anyhow::Result<Vec<Chunks>> {
    let (context, chunk, mut stored) = (&demo.context, demo.chunk_tokens(), Vec::new());
    for (number, passage) in (20..).zip(passages) {
        let tokens = [&context.tokens(number, chunk)[..], passage].concat();
        let values = worker.chunk_bytes() / 2;
        let chunks: Chunks = (0..=PASSAGE_CHUNKS as u64)
            .map(|index| bfloat16s(number << 8 | index, values))
            .collect();
        for (index, bytes) in chunks.iter().enumerate() {
            worker.write_chunk(&blocks(worker, index..index + 1), bytes)?;
        }
        let (prompt, request) = (Prompt::new(&tokens), context.request_id());
        let (range, from) = (prompt.whole_chunks(chunk), blocks(worker, 0..chunks.len()));
        let is_stored = worker.store(&prompt, range, &request, &from)?;
        anyhow::ensure!(is_stored, "a store was answered with false");
        worker.connection().end_session(&request)?;
        stored.push(chunks);
    }
    Ok(stored)
}

/// Looks the prompt up until all is loaded; returns the tokens of its prefix and the segments beyond it.
fn look_up(
    demo: &Demo<'_>,
    worker: &mut LmcacheDrivenWorker,
    prompt: &Prompt,
    request: &str,
) -> anyhow::Result<(i64, Vec<MatchedSegment<'static>>)> {
    let scope = worker.spec().scope.clone();
    let lookup = Request::CbUnifiedLookup {
        key: scope.scheduler_key(prompt, 0..prompt.len() as u64, request),
        tp_size: 1,
    };
    loop {
        anyhow::ensure!(!demo.context.is_stopped(), "interrupted");
        match worker.connection().call(&lookup)?.response()? {
            Response::UnifiedLookup(found) => {
                let owned = |found: MatchedSegment<'_>| MatchedSegment {
                    hash: found.hash.into_owned().into(),
                    ..found
                };
                let matches = found.non_prefix_segments.into_iter().map(owned);
                return Ok((found.prefix_coverage_tokens, matches.collect()));
            }
            _ => std::thread::sleep(CHECK_INTERVAL),
        }
    }
}

/// Retrieves the segments into pages that hold other bytes; returns the chunks of the whole prompt.
fn retrieve(
    worker: &mut LmcacheDrivenWorker,
    prompt: &Prompt,
    request: &str,
    matches: Vec<MatchedSegment<'_>>,
) -> anyhow::Result<Option<Chunks>> {
    let chunks = prompt.len().div_ceil(worker.chunk_tokens());
    for index in 0..chunks {
        let other = vec![0xA5; worker.chunk_bytes()];
        worker.write_chunk(&blocks(worker, index..index + 1), &other)?;
    }
    let (scope, instance) = (worker.spec().scope.clone(), worker.spec().instance);
    let retrieve = Request::CbRetrievePreComputed(RetrieveMatched {
        key: scope.worker_key(0, prompt, 0..prompt.len() as u64, request),
        matches,
        block_ids: vec![blocks(worker, 0..chunks)],
        instance,
        event_handle: b"",
    });
    let reply = worker.connection().call(&retrieve)?;
    if !matches!(reply.response()?, Response::Transfer(verdict) if verdict.ok) {
        return Ok(None);
    }
    let mut retrieved = vec![Vec::new(); chunks];
    for (index, bytes) in retrieved.iter_mut().enumerate() {
        worker.read_chunk(&blocks(worker, index..index + 1), bytes)?;
    }
    Ok(Some(retrieved))
}

/// Registers cosines and sines of all positions; the segment has them as long as it lives.
fn register_table(
    worker: &mut LmcacheDrivenWorker,
    positions: usize,
) -> anyhow::Result<OwnSegment> {
    let half = 0..HEAD_SIZE / 2;
    let row = |position| {
        let angles = half.clone().map(move |index| angle(position as f64, index));
        let values = angles.clone().map(f64::cos).chain(angles.map(f64::sin));
        values.flat_map(|value| (value as f32).to_le_bytes())
    };
    let bytes: Vec<u8> = (0..positions).flat_map(row).collect();
    let segment = OwnSegment::create(bytes.len() as u64)?;
    segment.as_segment().write(0, &bytes)?;
    let table = TensorDescriptor::CpuShm(CpuShm {
        shm_name: segment.name().to_owned(),
        nbytes: bytes.len() as u64,
        metadata: TensorMetadata {
            dtype: Dtype::Float32,
            shape: vec![positions as u64, HEAD_SIZE as u64],
            stride: vec![HEAD_SIZE as u64, 1],
            storage_offset: 0,
            device_uuid: "cpu".to_owned(),
        },
    });
    let rope: Request<'_, Vec<u32>> = Request::CbRegisterRope(RopeRegistration {
        instance: worker.spec().instance,
        caches: vec![table],
        head_size: HEAD_SIZE as i64,
        is_neox_style: true,
        group_to_cache: vec![0],
        group_rot: vec![vec![0, HEAD_SIZE as i64]],
        group_head_size: vec![HEAD_SIZE as i64],
        kv_quant: "",
    });
    worker.connection().call(&rope)?.response()?;
    Ok(segment)
}

/// Angle of the rotary embedding of dimensions `index` and `index + HEAD_SIZE / 2`.
fn angle(position: f64, index: usize) -> f64 {
    position * 10_000_f64.powf(-(index as f64) / (HEAD_SIZE / 2) as f64)
}

/// Values in bfloat16 between 1 and 2, of both signs.
fn bfloat16s(seed: u64, count: usize) -> Vec<u8> {
    let value = |index| {
        let random = pattern::mix(seed << 32 | index) as u16;
        (random & 0x807f | 0x3f80).to_le_bytes()
    };
    (0..count as u64).flat_map(value).collect()
}

/// Whether a chunk has moved: its values bit by bit, its keys rotated within the rounding of bfloat16.
fn is_moved(stored: &Chunks, retrieved: &Chunks, to: &Move, chunk: usize) -> bool {
    // The bytes of a chunk are `[2, LAYERS, chunk, HIDDEN]`.
    let value = |chunks: &Chunks, plane: usize, token: usize, index: usize| {
        let at = 2 * ((plane * chunk + token % chunk) * HIDDEN + index);
        let bytes = &chunks[token / chunk][at..at + 2];
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    };
    let (half, delta) = (HEAD_SIZE / 2, to.new as f64 - to.old as f64);
    (0..chunk * 2 * LAYERS * HIDDEN).all(|index| {
        let (token, plane, index) = (
            index / (2 * LAYERS * HIDDEN),
            index / HIDDEN % (2 * LAYERS),
            index % HIDDEN,
        );
        let before = |index| value(stored, plane, to.old + token, index);
        let after = value(retrieved, plane, to.new + token, index);
        if plane >= LAYERS {
            return after.to_bits() == before(index).to_bits();
        }
        let left = index - index % HEAD_SIZE + index % half;
        let (sin, cos) = angle(delta, index % half).sin_cos();
        let (left, right) = (f64::from(before(left)), f64::from(before(left + half)));
        let key = if index % HEAD_SIZE < half {
            left * cos - right * sin
        } else {
            right * cos + left * sin
        };
        (f64::from(after) - key).abs() <= key.abs() / 256.0 + 1e-5
    })
}
