//! The byte layout, against objects that LMCache 0.5.6 made of known tensors.

use crate::executors::{EXECUTORS, Executor};
use crate::model::row_major;
use kvtier_device::{
    BlockTable, ChunkRequest, Direction, Engine, GroupSpec, KvAxisOrder, KvFormat, KvLayout,
    LayoutHints, MemorySpec, PlanError, TensorSpec,
};
use serde_json::Value;

const VECTORS: &str = include_str!("../vectors/kv_layouts.json");

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("not a number: {value}"))
}

fn numbers(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap_or_else(|| panic!("not a list: {value}"))
        .iter()
        .map(number)
        .collect()
}

/// Takes a field out, so that what is left over is noticed.
fn take(case: &mut serde_json::Map<String, Value>, name: &str) -> Value {
    case.remove(name).unwrap_or_else(|| panic!("no {name}"))
}

fn floats(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks(4)
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()) as u64)
        .collect()
}

#[test]
fn formats_have_the_recorded_numbers() {
    let file: Value = serde_json::from_str(VECTORS).unwrap();
    let recorded = file["engine_kv_format_enum"].as_object().unwrap();
    assert_eq!(recorded.len(), KvFormat::ALL.len());
    for (name, value) in recorded {
        let format = KvFormat::from_name(name).unwrap_or_else(|| panic!("unknown format {name}"));
        assert_eq!(u64::from(format.number()), number(value), "{name}");
        let at = usize::from(format.number());
        assert_eq!(KvFormat::ALL[at], format, "{name}");
    }
    assert_eq!(
        file["transfer_direction"],
        serde_json::json!({"H2D": 0, "D2H": 1})
    );
    assert_eq!(
        file.as_object().unwrap().len(),
        3,
        "an unknown kind of vector"
    );
}

#[test]
fn recorded_cases_match_in_both_directions() {
    let file: Value = serde_json::from_str(VECTORS).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        for (by, run) in EXECUTORS {
            check(case.as_object().unwrap().clone(), by, run);
        }
    }
}

fn check(mut case: serde_json::Map<String, Value>, by: &str, run: Executor) {
    let name = format!("{} by {by}", take(&mut case, "name"));
    let shape = numbers(&take(&mut case, "layer_shape"));
    let layers = number(&take(&mut case, "num_layers"));
    assert_eq!(take(&mut case, "dtype"), "torch.float32", "{name}");
    assert_eq!(
        take(&mut case, "fill"),
        "layer i element j (row-major, in the given shape) = i*100000 + j",
        "{name}"
    );
    let mut hints = LayoutHints::default();
    for (hint, value) in take(&mut case, "hints").as_object().unwrap() {
        assert_eq!(hint, "kv_layout", "{name}");
        hints.kv_layout = Some(KvAxisOrder::from_name(value.as_str().unwrap()).unwrap());
    }
    let elements: u64 = shape.iter().product();
    let mut memories: Vec<Vec<u8>> = (0..layers)
        .map(|layer| {
            (0..elements)
                .flat_map(|j| ((layer * 100_000 + j) as f32).to_le_bytes())
                .collect()
        })
        .collect();
    let tensors: Vec<TensorSpec> = (0..layers)
        .map(|layer| TensorSpec {
            memory: MemorySpec::CpuShm {
                name: format!("/layer{layer}"),
                nbytes: elements * 4,
            },
            dtype_size: 4,
            dtype_name: "float32".into(),
            shape: shape.clone(),
            stride: row_major(&shape),
            storage_offset: 0,
        })
        .collect();

    let block_size = number(&take(&mut case, "block_size"));
    let blocks_per_chunk = number(&take(&mut case, "blocks_per_chunk"));
    let group = GroupSpec::full_attention((0..layers as i64).collect(), block_size as i64);
    let chunk_tokens = block_size * blocks_per_chunk;
    let layout = KvLayout::detect(
        &tensors,
        Engine::Vllm,
        &hints,
        &[group],
        chunk_tokens,
        false,
    )
    .unwrap();
    let kernel = &layout.kernel_groups()[0];
    assert_eq!(
        take(&mut case, "engine_kv_format"),
        serde_json::json!([kernel.format.name(), kernel.format.number()]),
        "{name}"
    );
    assert_eq!(kernel.slots_per_block, block_size, "{name}");
    assert_eq!(kernel.blocks_per_chunk as u64, blocks_per_chunk, "{name}");
    assert_eq!(
        number(&take(&mut case, "num_layers_detected")),
        layout.num_layers() as u64
    );
    assert_eq!(
        number(&take(&mut case, "hidden_dim_size")),
        kernel.hidden_size(),
        "{name}"
    );
    assert_eq!(
        number(&take(&mut case, "kv_size")),
        kernel.kv_size,
        "{name}"
    );

    let ids: Vec<i64> = numbers(&take(&mut case, "block_ids"))
        .into_iter()
        .map(|id| id as i64)
        .collect();
    let expected: Vec<Vec<u64>> = take(&mut case, "chunks")
        .as_array()
        .unwrap()
        .iter()
        .map(numbers)
        .collect();
    for recorded in take(&mut case, "chunk_shapes").as_array().unwrap() {
        let mut own = kernel.object_shape().to_vec();
        if kernel.kv_size == 1 {
            own.remove(0);
        }
        assert_eq!(numbers(recorded), own, "{name}");
    }
    let table = BlockTable::check(&layout, &[&ids], expected.len()).unwrap();
    let mut copies = Vec::new();
    let mut plan = |chunk, skip_tokens| -> Result<Vec<_>, PlanError> {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens,
        };
        request.plan(&layout, &table, &mut copies)?;
        Ok(copies.clone())
    };

    let object_bytes = layout.object_groups()[0].object_bytes as usize;
    let mut objects = vec![vec![0xaa; object_bytes]; expected.len()];
    for (chunk, object) in objects.iter_mut().enumerate() {
        run(
            &plan(chunk, 0).unwrap(),
            &mut memories,
            object,
            Direction::Store,
        );
        assert_eq!(floats(object), expected[chunk], "{name} chunk {chunk}");
    }

    assert_eq!(take(&mut case, "scatter_restores_blocks"), true, "{name}");
    let blocks = |memories: &[Vec<u8>]| -> Vec<Vec<Vec<u8>>> {
        memories
            .iter()
            .map(|memory| by_block(memory, &shape, kernel.format))
            .collect()
    };
    let original = blocks(&memories);
    let mut zeroed: Vec<Vec<u8>> = memories
        .iter()
        .map(|memory| vec![0; memory.len()])
        .collect();
    for (chunk, object) in objects.iter_mut().enumerate() {
        run(
            &plan(chunk, 0).unwrap(),
            &mut zeroed,
            object,
            Direction::Retrieve,
        );
    }
    for (layer, now) in blocks(&zeroed).iter().enumerate() {
        for (block, bytes) in now.iter().enumerate() {
            if ids.contains(&(block as i64)) {
                assert_eq!(*bytes, original[layer][block], "{name} block {block}");
            } else {
                assert!(bytes.iter().all(|byte| *byte == 0), "{name} block {block}");
            }
        }
    }

    let mut skipped: Vec<Vec<u8>> = memories
        .iter()
        .map(|memory| vec![0; memory.len()])
        .collect();
    for (chunk, object) in objects.iter_mut().enumerate() {
        // One token more than a block still skips one block only.
        let copies = plan(chunk, block_size + 1).unwrap();
        run(&copies, &mut skipped, object, Direction::Retrieve);
    }
    let nonzero = numbers(&take(&mut case, "scatter_skip_first_block_nonzero_blocks"));
    for now in blocks(&skipped) {
        let filled: Vec<u64> = (0..now.len() as u64)
            .filter(|block| now[*block as usize].iter().any(|byte| *byte != 0))
            .collect();
        assert_eq!(filled, nonzero, "{name}");
    }
    assert!(
        case.is_empty(),
        "{name}: unchecked fields: {:?}",
        case.keys()
    );
}

/// The bytes of each block of a tight float32 tensor.
fn by_block(memory: &[u8], shape: &[u64], format: KvFormat) -> Vec<Vec<u8>> {
    let at = format
        .axes()
        .iter()
        .position(|axis| *axis == kvtier_device::Axis::Block)
        .unwrap();
    let inner: u64 = shape[at + 1..].iter().product::<u64>() * 4;
    let mut blocks = vec![Vec::new(); shape[at] as usize];
    for (index, piece) in memory.chunks(inner as usize).enumerate() {
        blocks[index % shape[at] as usize].extend_from_slice(piece);
    }
    blocks
}
