//! Chunk hashes as LMCache 0.5.6 computes them: every row of `vectors/chunk_hashes.json`.

use kvtier_core::hashing::{ChunkHash, ChunkHasher, DEFAULT_SEED, HashAlgorithm, lookup_chunks};
use kvtier_core::prompt::PromptMemory;
use kvtier_proto::key::TokenReader;
use serde_json::{Map, Value};

#[test]
fn every_row_of_the_hash_vectors_holds() {
    let file: Map<String, Value> =
        serde_json::from_str(include_str!("../vectors/chunk_hashes.json")).unwrap();
    for (subject, content) in &file {
        let parts: Vec<&str> = subject.split('|').collect();
        match parts[..] {
            ["note"] => assert!(content.is_string()),
            ["blake3_rederived"] => rederived(HashAlgorithm::Blake3, "unused", content),
            [algorithm, vllm, seed] => {
                let seed = match seed.strip_prefix("PYTHONHASHSEED=").unwrap() {
                    "None" => DEFAULT_SEED,
                    seed => seed,
                };
                assert!(["vllm=present", "vllm=absent"].contains(&vllm), "{subject}");
                for row in content.as_array().unwrap() {
                    hashed(subject, algorithm, seed, row);
                }
            }
            [other] => match other.strip_prefix("sha256_cbor_rederived_seed_") {
                Some(seed) => rederived(HashAlgorithm::Sha256Cbor, seed, content),
                None => panic!("no test for {other}"),
            },
            _ => panic!("no test for {subject}"),
        }
    }
}

fn hashed(subject: &str, algorithm: &str, seed: &str, row: &Value) {
    let function = row["hash_func"].as_str().unwrap();
    let algorithm = match function {
        // What LMCache falls back to where vLLM is not installed, whatever was asked for.
        "builtins.hash" => {
            let error = "builtin".parse::<HashAlgorithm>().unwrap_err().to_string();
            assert!(
                error.contains("differ from one interpreter process to the next"),
                "{error}"
            );
            return;
        }
        "vllm.utils.hashing.sha256" => {
            let error = algorithm.parse::<HashAlgorithm>().unwrap_err().to_string();
            assert!(error.contains("pickles"), "{error}");
            return;
        }
        "lmcache.v1.multiprocess.token_hasher.blake3_hash" | "vllm.utils.hashing.sha256_cbor" => {
            algorithm.parse::<HashAlgorithm>().unwrap()
        }
        other => panic!("no test for {other}"),
    };
    let name = format!("{subject} {}", row["name"]);
    let chunk_size = usize::try_from(row["chunk_size"].as_u64().unwrap())
        .unwrap()
        .try_into()
        .unwrap();
    let hasher = ChunkHasher::new(algorithm, chunk_size, seed);
    assert_eq!(
        hasher.none_hash().to_string(),
        row["none_hash"].as_str().unwrap(),
        "{name}"
    );

    let tokens: Vec<i64> = row["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_i64().unwrap())
        .collect();
    let Ok(tokens) = tokens
        .iter()
        .map(|&t| u32::try_from(t))
        .collect::<Result<Vec<u32>, _>>()
    else {
        // Token ids outside 0..2^32 are refused whatever the algorithm. LMCache refuses them with blake3 only.
        let mut raw = Vec::new();
        tokens
            .iter()
            .for_each(|&token| kvtier_proto::wire::write_int(&mut raw, token));
        let memory = PromptMemory::new(hasher, 1 << 20);
        assert!(memory.reader().read(tokens.len(), &raw).is_err(), "{name}");
        assert!(
            row["hashes"].is_string() || algorithm == HashAlgorithm::Sha256Cbor,
            "{name}"
        );
        return;
    };
    let start = row.get("start").map_or(0, |start| start.as_u64().unwrap());
    let end = row.get("end").map_or(u64::MAX, |end| end.as_u64().unwrap());
    let range = lookup_chunks(chunk_size, tokens.len(), start, end);
    let hashes: Vec<String> = hasher.hash_prompt(&tokens)[range]
        .iter()
        .map(ChunkHash::to_string)
        .collect();
    assert_eq!(Value::from(hashes), row["hashes"], "{name}");
}

/// Values that were computed a second time from the description alone.
fn rederived(algorithm: HashAlgorithm, seed: &str, row: &Value) {
    let hasher = ChunkHasher::new(algorithm, 4.try_into().unwrap(), seed);
    for (name, value) in row.as_object().unwrap() {
        let value = value.as_str().unwrap();
        match name.as_str() {
            "none_hash" => assert_eq!(hasher.none_hash().to_string(), value),
            "one_chunk_of_4" => assert_eq!(hasher.hash_prompt(&[1, 2, 3, 4])[0].to_string(), value),
            "cbor_of_chunk1" => {
                let none_hash = hasher.none_hash();
                let mut cbor = vec![0x83, 0x58, 32];
                cbor.extend(none_hash.as_bytes());
                cbor.extend([0x84, 1, 2, 3, 4, 0xf6]);
                assert_eq!(hex::encode(cbor), value);
            }
            other => panic!("no test for {other}"),
        }
    }
}
