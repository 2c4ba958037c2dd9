//! Frames and keys, with vectors recorded from LMCache 0.5.6.

use std::os::unix::fs::PermissionsExt;

use ring::hkdf::{HKDF_SHA256, Salt};

use super::*;
use crate::conformance::{Memory, content, object, object_with};

const PLAIN: &[u8] = b"kvtier aesgcm vector 0123456789";

fn with(frame: AesFrame, bits: AesBits, masters: &[&[u8]]) -> AesGcm {
    AesGcm {
        frame,
        bits,
        keys: masters
            .iter()
            .map(|master| MasterKey::new(master))
            .collect(),
        random: SystemRandom::new(),
    }
}

fn master() -> Vec<u8> {
    (0..32).collect()
}

fn tenant_a(len: usize) -> ObjectSpec {
    object_with(1, len as u64, "org/model", "tenant-A")
}

fn encoded(aes: &AesGcm, object: &ObjectSpec, plain: &[u8]) -> Vec<u8> {
    let memory = Memory::new(plain.len().max(1) as u64);
    let mut stored = vec![0; aes.stored_len(object.len).unwrap() as usize];
    aes.encode(object, &memory.filled(plain), &mut stored)
        .unwrap();
    stored
}

fn decoded(aes: &AesGcm, object: &ObjectSpec, stored: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let to = Memory::new(object.len.max(1)).buffer(object.len);
    let mut plain = Vec::new();
    let result = aes.decode(object, &mut stored.to_vec(), &to);
    to.read_into(0, object.len, &mut plain).unwrap();
    result.map(|()| plain).map_err(|error| error.kind())
}

#[test]
fn lmcache_frame_matches_the_recorded_bytes() {
    let recorded = "01a0a1a2a3a4a5a6a7a8a9aaab46ab27347e5d6319f203de962992ec2800d756723d4bccc09f2102d9a44650e069987a8a\
                    78fd8af74ff19d9db23332";
    let recorded = hex::decode(recorded).unwrap();
    let aes = with(AesFrame::Lmcache, AesBits::Aes128, &[&master()]);
    let object = tenant_a(PLAIN.len());
    let mut stored = vec![0; PLAIN.len() + 29];
    let iv: [u8; NONCE_LEN] = std::array::from_fn(|at| 0xa0 + at as u8);
    let from = Memory::new(1 << 20).filled(PLAIN);
    aes.seal(&object, &from, &mut stored, &iv).unwrap();
    assert_eq!(hex::encode(&stored), hex::encode(&recorded));
    assert_eq!(decoded(&aes, &object, &recorded), Ok(PLAIN.to_vec()));
}

#[test]
fn derived_keys_match_the_recorded_ones() {
    let recorded = [
        ("", "f6b3e40f45eef1b66d8858df666638df"),
        ("tenant-A", "14b93054ecfb0470d6d6467c95241704"),
    ];
    let prk = Salt::new(HKDF_SHA256, &[]).extract(&master());
    for (salt, key) in recorded {
        for len in [16, 32] {
            let mut out = vec![0; len];
            keys::fill(&prk, &[b"lmcache-l2-aesgcm-v1", salt.as_bytes()], &mut out);
            assert_eq!(hex::encode(&out[..16]), key);
        }
    }
}

#[test]
fn every_changed_bit_and_length_is_detected() {
    for frame in [AesFrame::Lmcache, AesFrame::Bound] {
        let aes = with(frame, AesBits::Aes256, &[&master()]);
        let object = tenant_a(PLAIN.len());
        let stored = encoded(&aes, &object, PLAIN);
        assert_eq!(stored.len(), frame.stored_len(object.len).unwrap() as usize);
        assert_eq!(decoded(&aes, &object, &stored), Ok(PLAIN.to_vec()));
        for bit in 0..stored.len() * 8 {
            let mut flipped = stored.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            // Another id of the key is the one of an unknown key.
            let is_id = frame == AesFrame::Bound && (8..72).contains(&bit);
            let kind = if is_id {
                ErrorKind::Refused
            } else {
                ErrorKind::Corrupt
            };
            assert_eq!(decoded(&aes, &object, &flipped), Err(kind), "bit {bit}");
        }
        for len in 0..stored.len() {
            let truncated = decoded(&aes, &object, &stored[..len]);
            assert_eq!(truncated, Err(ErrorKind::Corrupt), "{len} bytes");
        }
        let extended = [&stored[..], &[0]].concat();
        assert_eq!(decoded(&aes, &object, &extended), Err(ErrorKind::Corrupt));
    }
}

#[test]
fn bound_frame_is_of_one_object_only() {
    let object = tenant_a(PLAIN.len());
    let others = [
        object_with(2, object.len, "org/model", "tenant-A"),
        object_with(1, object.len, "org/other", "tenant-A"),
        ObjectSpec {
            layout: object.layout + 1,
            ..object.clone()
        },
    ];
    let lmcache = with(AesFrame::Lmcache, AesBits::Aes128, &[&master()]);
    let bound = with(AesFrame::Bound, AesBits::Aes128, &[&master()]);
    let (free, tied) = (
        encoded(&lmcache, &object, PLAIN),
        encoded(&bound, &object, PLAIN),
    );
    for other in &others {
        // What LMCache's frame cannot detect, which is why there is another.
        assert_eq!(decoded(&lmcache, other, &free), Ok(PLAIN.to_vec()));
        assert_eq!(decoded(&bound, other, &tied), Err(ErrorKind::Corrupt));
    }
    let other_tenant = object_with(1, object.len, "org/model", "tenant-B");
    assert_eq!(
        decoded(&lmcache, &other_tenant, &free),
        Err(ErrorKind::Corrupt)
    );
    assert_eq!(
        decoded(&bound, &other_tenant, &tied),
        Err(ErrorKind::Corrupt)
    );
}

#[test]
fn segments_cannot_be_swapped_or_cut() {
    let bound = with(AesFrame::Bound, AesBits::Aes128, &[&master()]);
    let step = SEGMENT + TAG_LEN;
    for len in [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT] {
        let object = tenant_a(len);
        let plain = content(&object);
        let stored = encoded(&bound, &object, &plain);
        let tags = len.div_ceil(SEGMENT).max(1);
        assert_eq!(stored.len(), 25 + len + 16 * tags);
        assert_eq!(decoded(&bound, &object, &stored), Ok(plain));
    }
    let object = tenant_a(3 * SEGMENT);
    let stored = encoded(&bound, &object, &content(&object));
    let (head, segments) = stored.split_at(25);
    let [one, two, three] = [0, 1, 2].map(|at| &segments[at * step..(at + 1) * step]);
    for order in [[two, one, three], [one, one, three], [one, three, two]] {
        let swapped = [&[head], &order[..]].concat().concat();
        assert_eq!(decoded(&bound, &object, &swapped), Err(ErrorKind::Corrupt));
    }
    // Of another store of the same object.
    let other = encoded(&bound, &object, &content(&object));
    let mixed = [head, one, &other[25 + step..]].concat();
    assert_eq!(decoded(&bound, &object, &mixed), Err(ErrorKind::Corrupt));
    // A shorter object of the same name.
    let cut = [head, one, two].concat();
    let shorter = tenant_a(2 * SEGMENT);
    assert_eq!(decoded(&bound, &shorter, &cut), Err(ErrorKind::Corrupt));
}

#[test]
fn rotated_keys_load_what_earlier_ones_stored() {
    let object = object(7, PLAIN.len() as u64);
    let old = with(AesFrame::Bound, AesBits::Aes128, &[b"the old key"]);
    let new = with(
        AesFrame::Bound,
        AesBits::Aes128,
        &[b"the new key", b"the old key"],
    );
    let retired = with(AesFrame::Bound, AesBits::Aes128, &[b"the new key"]);
    let stored = encoded(&old, &object, PLAIN);
    assert_eq!(decoded(&new, &object, &stored), Ok(PLAIN.to_vec()));
    assert_eq!(decoded(&retired, &object, &stored), Err(ErrorKind::Refused));
    let stored = encoded(&new, &object, PLAIN);
    assert_eq!(decoded(&retired, &object, &stored), Ok(PLAIN.to_vec()));
    assert_eq!(decoded(&old, &object, &stored), Err(ErrorKind::Refused));
}

#[test]
fn equal_objects_are_encrypted_differently() {
    let object = object(7, 1000);
    for frame in [AesFrame::Lmcache, AesFrame::Bound] {
        let aes = with(frame, AesBits::Aes128, &[&master()]);
        let plain = content(&object);
        let (one, two) = (
            encoded(&aes, &object, &plain),
            encoded(&aes, &object, &plain),
        );
        let iv = frame.prefix_len()..frame.head_len();
        assert_ne!(one[iv.clone()], two[iv]);
        assert_ne!(one[frame.head_len()..], two[frame.head_len()..]);
    }
}

#[test]
fn unusable_key_files_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(path("empty"), "").unwrap();
    std::fs::write(path("large"), vec![7; (1 << 20) + 1]).unwrap();
    for (name, why) in [
        (
            "missing",
            "cannot be read: No such file or directory (os error 2)",
        ),
        ("", "is not a file; give a file with the key"),
        ("empty", "is empty; give one with random bytes"),
        ("large", "has 1048577 bytes; give one of at most 1048576"),
    ] {
        let error = MasterKey::read(&path(name)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        let line = error.to_string();
        assert_eq!(
            line,
            format!("serde aesgcm: the key file {:?} {why}", path(name))
        );
    }
    // Every byte counts, as for LMCache: also the line end.
    std::fs::write(path("line"), "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(path("line"), std::fs::Permissions::from_mode(0o400)).unwrap();
    let read = MasterKey::read(&path("line")).unwrap();
    assert_eq!(read.id(), MasterKey::new(b"0123456789abcdef\n").id());
    assert_ne!(read.id(), MasterKey::new(b"0123456789abcdef").id());
}

#[test]
fn keys_are_never_shown() {
    let aes = with(AesFrame::Bound, AesBits::Aes128, &[b"MARK-of-a-secret"]);
    let mut status = Map::new();
    aes.report(&mut status);
    let shown = format!("{:?} {}", aes.keys, Value::Object(status));
    assert!(!shown.contains("MARK"), "{shown}");
    assert!(!shown.contains(&hex::encode(b"MARK-of")), "{shown}");
    assert!(shown.contains(&hex::encode(aes.keys[0].id())), "{shown}");
}
