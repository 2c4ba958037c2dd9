//! Keys as LMCache 0.5.6 makes, writes and reads them: every row of `vectors/keys.json`.

use kvtier_core::hashing::{ChunkHasher, DEFAULT_SEED, HashAlgorithm, store_chunks};
use kvtier_core::object_key::{
    EncodedObjectKey, ForeignKey, KeyScope, KeyShape, ObjectKey, kv_rank, kv_rank_parts,
};
use serde_json::{Map, Value};

#[test]
fn every_row_of_the_key_vectors_holds() {
    let file: Map<String, Value> =
        serde_json::from_str(include_str!("../vectors/keys.json")).unwrap();
    for (subject, rows) in &file {
        let check = match subject.as_str() {
            "ipc_to_object" => expansion,
            "kv_rank" => rank,
            "strings" => text_forms,
            "object_key_validation" => validation,
            "filename_parse" => file_name,
            "string_parse" => string,
            other => panic!("no test for {other}"),
        };
        let rows = rows.as_array().unwrap();
        assert!(!rows.is_empty(), "{subject}");
        for row in rows {
            check(row);
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn number<T: TryFrom<u64, Error: std::fmt::Debug>>(value: &Value) -> T {
    value.as_u64().unwrap().try_into().unwrap()
}

fn ints<T: TryFrom<u64, Error: std::fmt::Debug>>(value: &Value) -> Vec<T> {
    value.as_array().unwrap().iter().map(number).collect()
}

/// A key from the vectors' `{"dataclass": "ObjectKey", "fields": {..}}`.
fn foreign(value: &Value) -> ForeignKey {
    let fields = &value["fields"];
    ForeignKey::new(
        hex::decode(text(&fields["chunk_hash"]["bytes"])).unwrap(),
        text(&fields["model_name"]).to_owned(),
        number(&fields["kv_rank"]),
        number(&fields["object_group_id"]),
        text(&fields["cache_salt"]).to_owned(),
    )
    .unwrap()
}

/// A request's key becomes object keys: group-major, then chunk-major, then rank.
fn expansion(row: &Value) {
    let name = text(&row["name"]);
    let fields = &row["key"]["fields"];
    let chunk_size = number::<usize>(&row["chunk_size"]).try_into().unwrap();
    let tokens = ints::<u32>(&fields["token_ids"]);
    let hashes =
        ChunkHasher::new(HashAlgorithm::Blake3, chunk_size, DEFAULT_SEED).hash_prompt(&tokens);
    let chunks = store_chunks(
        chunk_size,
        tokens.len(),
        number(&fields["start"]),
        number(&fields["end"]),
    )
    .unwrap();
    let scope = KeyScope::new(
        text(&fields["model_name"]),
        text(&fields["cache_salt"]),
        number(&fields["world_size"]),
        fields["worker_id"]
            .as_u64()
            .map(|worker| worker.try_into().unwrap()),
    )
    .unwrap();
    let groups = ints::<u32>(&row["object_group_ids"]);
    let expected: Vec<Vec<String>> = row["object_keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|keys| keys.as_array().unwrap().iter().map(listed_key).collect())
        .collect();
    let made: Vec<Vec<String>> = groups
        .iter()
        .map(|&group| {
            let namespaces = scope.kv_ranks().map(|rank| scope.namespace(rank, group, 0));
            let namespaces: Vec<_> = namespaces.collect();
            let keys = hashes[chunks.clone()].iter().flat_map(|hash| {
                namespaces
                    .iter()
                    .map(|namespace| ObjectKey::of(namespace, *hash))
            });
            keys.map(|key| key.text().name(KeyShape::Grouped)).collect()
        })
        .collect();
    assert_eq!(made, expected, "{name}");
}

/// The generic string of a key listed with plain fields.
fn listed_key(value: &Value) -> String {
    let rank: u64 = number(&value["kv_rank"]);
    assert_eq!(text(&value["kv_rank_hex"]), format!("{rank:#010x}"));
    ForeignKey::new(
        hex::decode(text(&value["chunk_hash"])).unwrap(),
        text(&value["model_name"]).to_owned(),
        rank,
        number(&value["object_group_id"]),
        text(&value["cache_salt"]).to_owned(),
    )
    .unwrap()
    .text()
    .name(KeyShape::Grouped)
}

fn rank(row: &Value) {
    let args = ints::<u32>(&row["args"]);
    let [world, global, local_world, local] = args[..] else {
        panic!("{row}")
    };
    let packed = kv_rank_parts(world, global, local_world, local);
    assert_eq!(packed, number::<u64>(&row["kv_rank"]), "{row}");
    assert_eq!(format!("{packed:#010x}"), text(&row["hex"]), "{row}");
    if (local_world, local) == (world, global) {
        assert_eq!(kv_rank(world, global), packed, "{row}");
    }
}

fn text_forms(row: &Value) {
    let key = foreign(&row["key"]);
    let forms = key.text();
    let name = forms.name(KeyShape::Grouped);
    let file = forms.file_name(KeyShape::Grouped);
    assert_eq!(file, text(&row["fs_filename"]));
    assert_eq!(name, text(&row["string"]));
    assert_eq!(name, text(&row["s3_string"]));
    assert_eq!(
        serde_json::to_string(&EncodedObjectKey::from(forms)).unwrap(),
        text(&row["encoded_object_key"])
    );

    // Back again, with and without knowing the shape.
    for shape in [Some(KeyShape::Grouped), None] {
        assert_eq!(ForeignKey::parse_name(&name, shape).unwrap(), key);
        let parsed = ForeignKey::parse_file_name(&file, shape).unwrap();
        assert_eq!(parsed, foreign(&row["fs_parsed_back"]));
        assert_eq!(Value::from(parsed == key), row["fs_roundtrip_equal"]);
    }
    let json: EncodedObjectKey = serde_json::from_str(text(&row["encoded_object_key"])).unwrap();
    assert_eq!(ForeignKey::try_from(json).unwrap(), key);

    // Hashes of 32 bytes make keys of our own, with the same forms.
    match ObjectKey::try_from(key.clone()) {
        Ok(own) => assert_eq!(own.text().name(KeyShape::Grouped), name),
        Err(error) => {
            assert_ne!(key.chunk_hash().len(), 32);
            assert!(error.to_string().contains("32 bytes"), "{error}");
        }
    }
}

fn validation(row: &Value) {
    let entries = row["fields"]["map"].as_array().unwrap();
    let [entry] = &entries[..] else {
        panic!("{row}")
    };
    let (field, value) = (text(&entry[0]), &entry[1]);
    let accepted = row.get("accepted").is_some();
    assert_ne!(accepted, row.get("error").is_some(), "{row}");
    let result = match field {
        "model_name" => key_with(text(value), ""),
        "cache_salt" => key_with("m", text(value)),
        "object_group_id" => {
            // A group is unsigned, so a negative one ends at the text and message boundaries.
            assert_eq!(value, &Value::from(-1));
            let json = r#"{"chunk_hash_hex":"","model_name":"m","kv_rank":0,"object_group_id":-1}"#;
            assert!(serde_json::from_str::<EncodedObjectKey>(json).is_err());
            assert!(ForeignKey::parse_name("m@0@-1@00", None).is_err());
            return;
        }
        other => panic!("unknown field {other}"),
    };
    match result {
        Ok(()) => assert!(accepted, "{row}"),
        Err(error) => {
            assert!(!accepted, "{row}");
            assert!(error.contains(field), "{error}");
        }
    }
}

/// Both kinds of key and the scope of a request say the same.
fn key_with(model: &str, salt: &str) -> Result<(), String> {
    let foreign = ForeignKey::new(vec![0; 32], model.to_owned(), 0, 0, salt.to_owned());
    let own = ObjectKey::new(kvtier_core::ChunkHash([0; 32]), model, 0, 0, salt);
    let scope = KeyScope::new(model, salt, 1, None);
    assert_eq!(foreign.as_ref().err(), own.as_ref().err());
    assert_eq!(foreign.as_ref().err(), scope.as_ref().err());
    foreign.map(drop).map_err(|error| error.to_string())
}

fn file_name(row: &Value) {
    let name = text(&row["filename"]);
    let parsed = ForeignKey::parse_file_name(name, Some(KeyShape::Grouped));
    match &row["parsed"] {
        Value::Null => assert!(parsed.is_err(), "{name}"),
        key => assert_eq!(parsed.expect(name), foreign(key), "{name}"),
    }
}

fn string(row: &Value) {
    let name = text(&row["string"]);
    let parsed = ForeignKey::parse_name(name, Some(KeyShape::Grouped));
    match (row.get("parsed"), row.get("error").map(text)) {
        (Some(key), None) => assert_eq!(parsed.expect(name), foreign(key), "{name}"),
        (None, Some(expected)) => {
            let error = parsed.expect_err(name).to_string();
            let part = ["field count", "bad kv_rank", "bad chunk_hash", "cache_salt"]
                .into_iter()
                .find(|part| expected.contains(part))
                .expect(expected);
            let part = part.strip_prefix("field count").map_or(part, |_| "fields");
            assert!(error.contains(part), "{error} for {expected}");
        }
        _ => panic!("{row}"),
    }
}
