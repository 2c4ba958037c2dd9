//! What the vector tests share: loading, and typed values as the JSON the vectors hold.
//!
//! The vectors are bytes that the LMCache 0.5.6 client and server really exchanged, with what they decoded.

use kvtier_proto::frames::OperationId;
use kvtier_proto::generation::{Generation, OperationSpec};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{LayoutHints, MatchedSegment};
use kvtier_proto::wire::Reader;
use serde_json::{Value, json};

/// A vector file.
pub fn load(name: &str) -> Value {
    let path = format!("{}/tests/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The files whose names start like this.
pub fn files(prefix: &str) -> Vec<String> {
    let folder = format!("{}/tests/vectors", env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(prefix))
        .collect();
    names.sort();
    assert!(!names.is_empty());
    names
}

pub fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub fn bytes(value: &Value) -> Vec<u8> {
    hex::decode(text(value)).unwrap()
}

pub fn frames(value: &Value) -> Vec<Vec<u8>> {
    list(value).iter().map(bytes).collect()
}

pub fn slices(frames: &[Vec<u8>]) -> Vec<&[u8]> {
    frames.iter().map(Vec::as_slice).collect()
}

/// The newest generation's first row for an op frame.
pub fn g6_row(op: &[u8]) -> &'static OperationSpec {
    let id = OperationId::decode(op).unwrap();
    Generation::G6.rows(id).next().unwrap()
}

pub fn hex_json(bytes: &[u8]) -> Value {
    json!({ "bytes": hex::encode(bytes) })
}

/// A key as the vectors write it.
pub fn key_json(key: &CacheKey<'_, Vec<u32>>) -> Value {
    json!({ "dataclass": "IPCCacheServerKey", "fields": {
        "model_name": key.model_name,
        "world_size": key.world_size,
        "worker_id": key.worker_id,
        "token_ids": key.tokens,
        "start": key.start,
        "end": key.end,
        "request_id": key.request_id,
        "cache_salt": key.cache_salt,
        "request_configs": key.request_configs.map(|raw| value_json(&mut Reader::new(raw))),
        // Absent is 0 for 0.5.6.
        "num_kv_readers": key.num_kv_readers.unwrap_or(0),
    }})
}

pub fn segment_json(segment: &MatchedSegment<'_>) -> Value {
    json!({ "dataclass": "CBMatchResult", "fields": {
        "old_st": segment.old_start,
        "old_ed": segment.old_end,
        "cur_st": segment.start,
        "cur_ed": segment.end,
        "hash": hex_json(&segment.hash),
    }})
}

pub fn hints_json(hints: &LayoutHints) -> Value {
    let mut pairs = Vec::new();
    let mut push = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            pairs.push(json!([name, value]));
        }
    };
    push("kv_layout", hints.kv_layout.map(|v| json!(v.name())));
    push("num_kv_heads", hints.num_kv_heads.map(|v| json!(v)));
    push("tokens_per_block", hints.tokens_per_block.map(|v| json!(v)));
    push(
        "kv_list_layout",
        hints.kv_list_layout.map(|v| json!(v.name())),
    );
    push("head_dim", hints.head_dim.map(|v| json!(v)));
    push("kvtier.held_blocks", hints.held_blocks.map(|v| json!(v)));
    json!({ "map": pairs })
}

/// Any value as the vectors write it: maps as lists of pairs.
pub fn value_json(reader: &mut Reader<'_>) -> Value {
    match reader.peek().unwrap() {
        0xc0 => {
            reader.nil().unwrap();
            Value::Null
        }
        0xc2 | 0xc3 => json!(reader.bool().unwrap()),
        0xca | 0xcb => json!(reader.f64().unwrap()),
        0xa0..=0xbf | 0xd9..=0xdb => json!(reader.str().unwrap()),
        0xc4..=0xc6 => hex_json(reader.bin().unwrap()),
        0x90..=0x9f | 0xdc | 0xdd => {
            let len = reader.array_len().unwrap();
            (0..len).map(|_| value_json(reader)).collect()
        }
        0x80..=0x8f | 0xde | 0xdf => {
            let len = reader.map_len().unwrap();
            let pairs: Vec<_> = (0..len)
                .map(|_| json!([value_json(reader), value_json(reader)]))
                .collect();
            json!({ "map": pairs })
        }
        _ => json!(reader.int::<i64>().unwrap()),
    }
}
