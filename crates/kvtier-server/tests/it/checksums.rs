//! Checksums of a worker's own pages, computed again from the bytes of its segment.

use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope};
use md5::{Digest, Md5};
use serde_json::{Value, json};

use crate::http::json_of;
use crate::support::{TestServer, bytes};

/// Checksums of some blocks of a worker's layers, computed from the segment's own bytes.
fn checksum(
    worker: &LmcacheDrivenWorker,
    layers: std::ops::Range<usize>,
    blocks: &[usize],
) -> String {
    let spec = worker.spec();
    let segment = std::fs::read(format!("/dev/shm{}", worker.segment_name())).unwrap();
    let piece =
        usize::try_from(spec.block_tokens * spec.heads * spec.head_size * spec.dtype.item_size())
            .unwrap();
    let plane = piece * usize::try_from(spec.blocks).unwrap();
    let mut hash = Md5::new();
    for layer in layers {
        for kv in 0..2 {
            for block in blocks {
                let start = (layer * 2 + kv) * plane + block * piece;
                let values = &segment[start..start + piece];
                match spec.dtype {
                    // A float32 whose upper half is the bfloat16.
                    Dtype::BFloat16 => values.chunks_exact(2).for_each(|value| {
                        let half = u16::from_le_bytes([value[0], value[1]]);
                        hash.update(f32::from_bits(u32::from(half) << 16).to_le_bytes());
                    }),
                    _ => hash.update(values),
                }
            }
        }
    }
    hex::encode(hash.finalize())
}

#[test]
fn checksums_are_those_of_the_workers_blocks() {
    let server = TestServer::start(&[]);
    for (instance, dtype) in [(1, Dtype::BFloat16), (2, Dtype::Float32)] {
        let mut spec = LmcacheDrivenSpec::new(
            InstanceId(instance),
            Scope::new("http/checksums"),
            3,
            2,
            8,
            16,
        );
        (spec.block_tokens, spec.dtype) = (4, dtype);
        let mut worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
        let len = worker.chunk_bytes();
        for chunk in 0..4 {
            let blocks: Vec<i64> = (chunk * 4..chunk * 4 + 4).collect();
            worker
                .write_chunk(&blocks, &bytes(instance as u64, chunk as u64, len))
                .unwrap();
        }
        let asked =
            json!({ "instance_id": instance, "block_ids": [0, 1, 2, 3, 9], "chunk_size": 2 });
        let (status, answer) = json_of(&server, "POST", "/cache/checksums", &asked.to_string());
        let sums = [&[0, 1][..], &[2, 3], &[9]].map(|blocks| checksum(&worker, 0..3, blocks));
        let expected = json!({
            "status": "success", "chunk_size": 2, "num_chunks": 3, "chunk_checksums": sums, "layerwise": false,
            "block_id_ranges": [[0, 3], 9],
        });
        assert_eq!((status, answer), (200, expected));

        let asked = json!({ "instance_id": instance, "block_ids": [5, 4], "chunk_size": 2, "layerwise": true });
        let (_, answer) = json_of(&server, "POST", "/cache/checksums", &asked.to_string());
        let layers: serde_json::Map<_, _> = (0..3)
            .map(|layer| {
                (
                    format!("layer_{layer}"),
                    json!([checksum(&worker, layer..layer + 1, &[5, 4])]),
                )
            })
            .collect();
        assert_eq!(answer["chunk_checksums"], Value::Object(layers));
        assert_eq!(answer["block_id_ranges"], json!([5, 4]));

        for (body, error) in [
            (
                json!({ "instance_id": instance, "block_ids": vec![1; 65_537], "chunk_size": 2 }),
                "block_ids has 65537 ids; allowed: at most 65536",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [], "chunk_size": 2 }),
                "block_ids is required",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [1], "chunk_size": 0 }),
                "chunk_size must be positive",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [1], "chunk_size": -1 }),
                "chunk_size must be positive",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [16], "chunk_size": 1 }),
                "16",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [-1], "chunk_size": 1 }),
                "-1",
            ),
        ] {
            let (status, answer) = json_of(&server, "POST", "/cache/checksums", &body.to_string());
            assert_eq!(status, 400, "{body}: {answer}");
            assert!(
                answer["detail"].as_str().unwrap().contains(error),
                "{body}: {answer}"
            );
        }
    }
    let unknown = json_of(
        &server,
        "POST",
        "/cache/checksums",
        r#"{"instance_id": 77, "block_ids": [1], "chunk_size": 1}"#,
    );
    assert_eq!(
        unknown,
        (404, json!({ "detail": "instance_id 77 not registered" }))
    );
    let _own = server.engine_driven(3, &Scope::new("http/own"));
    let (status, _) = json_of(
        &server,
        "POST",
        "/cache/checksums",
        r#"{"instance_id": 3, "block_ids": [1], "chunk_size": 1}"#,
    );
    assert_eq!(status, 501);
}
