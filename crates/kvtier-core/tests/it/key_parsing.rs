//! Key names of both generations of LMCache, and what a hostile name or world may do.

use kvtier_core::ChunkHash;
use kvtier_core::object_key::{
    ForeignKey, KeyError, KeyScope, KeyShape, MAX_WORLD_SIZE, ObjectKey, ParseError,
};
use proptest::prelude::*;
use std::collections::HashSet;

fn key(group: u32, salt: &str) -> ObjectKey {
    ObjectKey::new(ChunkHash([0xab; 32]), "org/model", 0x0201_0201, group, salt).unwrap()
}

#[test]
fn both_shapes_parse_without_a_hint() {
    for (group, salt) in [
        (0, ""),
        (0, "0123456789abcdef0123"),
        (0, "0"),
        (7, ""),
        (7, "tenant"),
    ] {
        for shape in [KeyShape::Grouped, KeyShape::Ungrouped] {
            let key = key(group, salt);
            let name = key.text().name(shape);
            let file = key.text().file_name(shape);
            assert_eq!(
                ObjectKey::parse_name(&name, None),
                Ok(key.clone()),
                "{name}"
            );
            assert_eq!(ObjectKey::parse_file_name(&file, None), Ok(key), "{file}");
        }
    }
}

#[test]
fn old_shape_is_that_of_0_4_4() {
    let hash = "ab".repeat(32);
    let names = [
        (key(0, ""), format!("org-SEP-model@0x02010201@{hash}.data")),
        (
            key(0, "t"),
            format!("org-SEP-model@0x02010201@{hash}@t.data"),
        ),
        // It has no place for a group, so others are written as 0.5.6 does.
        (
            key(17, "t"),
            format!("org-SEP-model@0x02010201@11@{hash}@t.data"),
        ),
    ];
    for (key, name) in names {
        assert_eq!(key.text().file_name(KeyShape::Ungrouped), name);
    }
    let old = format!("m@01000100@{hash}");
    assert!(ObjectKey::parse_name(&old, Some(KeyShape::Ungrouped)).is_ok());
    assert!(matches!(
        ObjectKey::parse_name(&old, Some(KeyShape::Grouped)),
        Err(ParseError::FieldCount(_, 3))
    ));
}

#[test]
fn errors_name_the_field() {
    let wrong = |name: &str| ForeignKey::parse_name(name, None).unwrap_err().to_string();
    assert!(wrong("m@x@0@00").contains("kv_rank \"x\""));
    assert!(wrong("m@10000000000000000@0@00").contains("64 bits"));
    assert!(wrong("m@1@100000000@00").contains("object_group_id \"100000000\""));
    assert!(wrong("m@1@0@0g").contains("chunk_hash \"0g\""));
    assert!(wrong("").contains("1 fields"));
    let error = ObjectKey::parse_name("m@1@0@00ff", None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("32 bytes"), "{error}");
}

#[test]
fn no_two_workers_share_a_rank() {
    let mut ranks = HashSet::new();
    for world_size in 1..=MAX_WORLD_SIZE {
        let all = KeyScope::new("m", "", world_size, None).unwrap();
        assert_eq!(all.kv_ranks().len(), world_size as usize);
        for worker in 0..MAX_WORLD_SIZE {
            let one = KeyScope::new("m", "", world_size, Some(worker)).unwrap();
            assert!(one.kv_ranks().all(|rank| ranks.insert(rank)));
        }
    }
}

#[test]
fn ambiguous_worlds_are_refused() {
    let scope = |world, worker| KeyScope::new("m", "", world, worker).unwrap_err();
    assert_eq!(scope(0, None), KeyError::WorldSize(0));
    assert_eq!(scope(u32::MAX, None), KeyError::WorldSize(u32::MAX));
    assert_eq!(scope(1, Some(256)), KeyError::WorkerId(256));
}

proptest! {
    #[test]
    fn any_key_reads_back(
        model in "[^@]{0,40}",
        salt in "[^@/\\\\\0]{0,40}",
        rank: u64,
        group: u32,
        hash: [u8; 32],
    ) {
        let key = ObjectKey::new(ChunkHash(hash), model.as_str(), rank, group, salt.as_str()).unwrap();
        for shape in [KeyShape::Grouped, KeyShape::Ungrouped] {
            prop_assert_eq!(ObjectKey::parse_name(&key.text().name(shape), None), Ok(key.clone()));
            if !model.contains("-SEP-") {
                let file = key.text().file_name(shape);
                prop_assert_eq!(ObjectKey::parse_file_name(&file, None), Ok(key.clone()));
            }
        }
    }

    #[test]
    fn no_text_panics(text in "[m@0x1_ \\-+a-g.SEP]{0,60}") {
        let _ = ForeignKey::parse_name(&text, None);
        let _ = ForeignKey::parse_file_name(&format!("{text}.data"), None);
    }
}

#[test]
fn hash_is_read_as_written() {
    let hash = ChunkHash([0xab; 32]);
    assert_eq!(hash.to_string().parse(), Ok(hash));
    for text in ["x", &"ab".repeat(31), &"ab".repeat(33), &"xy".repeat(32)] {
        let refused = text.parse::<ChunkHash>().unwrap_err().to_string();
        assert!(
            refused.contains("is no chunk hash: 64 hex digits"),
            "{refused}"
        );
    }
}
