//! What stores and retrieves of random pages do, to be compared with LMCache: `random_pages FIRST COUNT`.
//!
//! For each seed a line of JSON on stdout, which says what is where, and the bytes it announces in `blobs`, in order: the
//! engine's memories, the objects stored from them, other objects, and the memories into which those were retrieved.
//! `tests/conformance/test_pages.py` reads it. The reference and what runs on GPUs must agree on each.

#![expect(clippy::unwrap_used, reason = "a tool of the tests")]

use std::io::{BufWriter, Write};

use kvtier_device::{BlockTable, ChunkRequest, Direction, MemorySpec};
use serde_json::{Value, json};

use executors::EXECUTORS;
use model::{Case, Random, random_case};

#[path = "../tests/it/executors.rs"]
mod executors;
#[path = "../tests/it/model.rs"]
#[expect(dead_code, reason = "the tests need more of it")]
mod model;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|each| each.parse::<u64>());
    let (Some(Ok(first)), Some(Ok(count)), None) =
        (arguments.next(), arguments.next(), arguments.next())
    else {
        eprintln!("usage: random_pages FIRST COUNT");
        std::process::exit(2);
    };
    let mut out = BufWriter::new(std::io::stdout().lock());
    for seed in first..first + count {
        write(&mut out, seed).unwrap();
    }
}

fn write(out: &mut impl Write, seed: u64) -> std::io::Result<()> {
    let mut case = random_case(seed, "pages");
    // One object for each chunk, whole: which part of a window is kept is not for copies to say.
    case.separate = false;
    for spec in &mut case.specs {
        spec.sliding_window_tokens = -1;
        spec.extra_object_group_tag = 0;
        spec.recurrent_state = false;
    }
    let before: Vec<Vec<u8>> = case
        .memories
        .iter()
        .map(|(_, bytes)| bytes.clone())
        .collect();
    let object_bytes = case.layout().object_groups()[0].object_bytes;
    let mut stored = vec![vec![0; object_bytes as usize]; case.chunks];
    copy(&case, 0, &mut before.clone(), &mut stored, Direction::Store);
    let mut random = Random::new(!seed);
    let mut others: Vec<Vec<u8>> = (0..case.chunks)
        .map(|_| random.bytes(object_bytes))
        .collect();
    let mut after = before.clone();
    copy(
        &case,
        case.skip_tokens,
        &mut after,
        &mut others,
        Direction::Retrieve,
    );

    let blobs: Vec<&Vec<u8>> = [&before, &stored, &others, &after]
        .into_iter()
        .flatten()
        .collect();
    let lengths: Vec<usize> = blobs.iter().map(|blob| blob.len()).collect();
    let mut line = describe(&case);
    line["seed"] = json!(seed);
    line["blobs"] = json!(lengths);
    writeln!(out, "{line}")?;
    blobs.into_iter().try_for_each(|blob| out.write_all(blob))
}

/// Runs one way, by everything that can, which must come to the same.
fn copy(
    case: &Case,
    skip_tokens: u64,
    memories: &mut Vec<Vec<u8>>,
    objects: &mut Vec<Vec<u8>>,
    direction: Direction,
) {
    let layout = case.layout();
    assert_eq!(layout.object_groups().len(), 1);
    let table = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
    let outcomes = EXECUTORS.map(|(_, run)| {
        let (mut memories, mut objects) = (memories.clone(), objects.clone());
        let mut copies = Vec::new();
        for (chunk, object) in objects.iter_mut().enumerate() {
            let request = ChunkRequest {
                object_group: 0,
                chunk,
                skip_tokens,
            };
            request.plan(&layout, &table, &mut copies).unwrap();
            run(&copies, &mut memories, object, direction);
        }
        (memories, objects)
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
    [(*memories, *objects), ..] = outcomes;
}

fn describe(case: &Case) -> Value {
    let memory = |spec: &MemorySpec| {
        let MemorySpec::CpuShm { name, .. } = spec else {
            panic!("not shared memory")
        };
        case.memories.iter().position(|(other, _)| other == name)
    };
    let tensors: Vec<Value> = case
        .tensors
        .iter()
        .map(|tensor| {
            // The stride of a single element means nothing, and is any number here.
            let sizes = tensor.shape.iter().zip(&tensor.stride);
            let strides: Vec<u64> = sizes
                .map(|(size, stride)| if *size == 1 { 1 } else { *stride })
                .collect();
            json!({
                "memory": memory(&tensor.memory),
                "dtype": tensor.dtype_name,
                "shape": tensor.shape,
                "stride": strides,
                "storage_offset": tensor.storage_offset,
            })
        })
        .collect();
    let groups: Vec<Value> = case
        .groups
        .iter()
        .map(|group| {
            json!({
                "format": group.format.name(),
                "layers": group.layers,
                "slots": group.slots,
                "tokens_per_block": group.tokens_per_block,
                "heads": group.heads,
                "head_size": group.head_size,
                "blocks": group.ids,
            })
        })
        .collect();
    json!({
        "chunk_tokens": case.chunk_tokens,
        "skip_tokens": case.skip_tokens,
        "tensors": tensors,
        "groups": groups,
        "memories": case.memories.len(),
        "objects": case.chunks,
    })
}
