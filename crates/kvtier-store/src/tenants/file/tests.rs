//! What is in the file is the old table or the new one, and anything else is refused.

use super::*;
use crate::tenants::TierEntry;
use kvtier_config::Limit;

fn table() -> Table {
    let own = TierEntry {
        limit: Some(Limit(None)),
        reserved: Some(7),
    };
    let entry = |limit, reserved, tiers: &[&str]| Entry {
        limit: Limit(limit),
        reserved,
        tiers: tiers.iter().map(|tier| (tier.to_string(), own)).collect(),
    };
    Table::from_iter([
        ("", entry(None, 0, &[])),
        ("alice", entry(Some(1 << 40), 1 << 30, &["fs-0", "l1"])),
        ("b\"\n..é", entry(Some(0), 0, &[])),
    ])
}

#[test]
fn a_table_is_written_in_one_way_and_read_back() {
    let text = encode(&table());
    // Files that are out there must be read by every later version.
    let expected = "{\"version\":1,\"checksum\":\"CHECKSUM\",\"quotas\":{\n\
        \"\":{\"limit\":\"unlimited\",\"reserved\":0},\n\
        \"alice\":{\"limit\":1099511627776,\"reserved\":1073741824,\"tiers\":{\"fs-0\":{\"limit\":\"unlimited\",\"reserved\":7},\
        \"l1\":{\"limit\":\"unlimited\",\"reserved\":7}}},\n\
        \"b\\\"\\n..é\":{\"limit\":0,\"reserved\":0}\n}}\n";
    let at = expected.find("CHECKSUM").unwrap();
    let checksum = &text[at..at + 32];
    assert_eq!(text, expected.replace("CHECKSUM", checksum));
    assert_eq!(checksum, "b3f6060a828a27b347e2a413189cbf76");
    let placed = || {
        let places = [("fs-0".to_owned(), "/data/kv".to_owned())];
        table().with_places(places.into())
    };
    let with_places = encode(&placed());
    assert!(with_places.starts_with("{\"version\":2,"), "{with_places}");
    let end = "\n},\n\"places\":{\"fs-0\":\"/data/kv\"}}\n";
    assert!(with_places.ends_with(end), "{with_places}");
    let elsewhere = with_places.replace("/data/kv", "/data/vk");
    assert!(
        decode(elsewhere.as_bytes()).is_err(),
        "the checksum is of places too"
    );
    for table in [table(), placed(), Table::default()] {
        assert_eq!(decode(encode(&table).as_bytes()), Ok(table));
    }
}

#[test]
fn a_file_that_ends_early_or_has_another_byte_anywhere_is_refused() {
    let text = encode(&table()).into_bytes();
    for len in 0..text.len() {
        let told = decode(&text[..len]).unwrap_err().to_string();
        assert!(told.contains("damaged"), "{len} bytes: {told}");
    }
    for at in 0..text.len() {
        for flip in 1..=255 {
            let mut other = text.clone();
            other[at] ^= flip;
            assert!(decode(&other).is_err(), "byte {at} ^ {flip:#x}");
        }
    }
    for more in [&b" "[..], b"\n", b"{}"] {
        assert!(decode(&[&text, more].concat()).is_err());
    }
}

#[test]
fn what_it_cannot_be_is_named_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas.json");
    let head = |version| format!("{{\"version\":{version},\"checksum\":\"\",\"quotas\":{{}}}}");
    let (future, edited) = (head(3), head(1));
    let bad_salt = encode(&Table::from_iter([("a/b", Entry::default())]));
    for (content, part) in [
        ("", "damaged, or no quota file"),
        ("limits: none", "damaged, or no quota file"),
        ("{}", "missing field `version`"),
        (
            &future,
            "version 3, and this server reads only versions up to 2",
        ),
        (&edited, "changed by hand"),
        (&bad_salt, "entry 1 is no tenant's"),
    ] {
        fs::write(&path, content).unwrap();
        for told in [
            QuotaFile::open(&path).map(|_| ()).unwrap_err(),
            QuotaFile::peek(&path).map(|_| ()).unwrap_err(),
        ] {
            let told = told.to_string();
            for part in [part, "--quota-file", "quotas.json", "or remove it"] {
                assert!(told.contains(part), "{content}: {told}");
            }
            assert!(!told.contains('\n'));
        }
        // The file stays as it was, so that its fault can be found.
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let told = |path| QuotaFile::open(path).unwrap_err().to_string();
    assert!(told(&path).contains("no file"));
    let nowhere = directory.path().join("no/such/quotas.json");
    assert!(told(&nowhere).contains("directory"));
}

#[test]
fn a_table_replaces_the_one_before() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let (path, link) = (directory.path().join("q"), directory.path().join("link"));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let stale = directory.path().join(".q.kvtier-tmp-1-0");
    fs::write(&stale, "half").unwrap();
    let other = directory.path().join(".other.kvtier-tmp-1-0");
    fs::write(&other, "of another").unwrap();
    fs::write(&path, encode(&Table::default())).unwrap();
    let (file, before) = QuotaFile::open(&link).unwrap();
    assert!(before.is_empty() && !stale.exists() && other.exists());
    for table in [table(), Table::default(), table()] {
        file.save(&table).unwrap();
        assert_eq!(QuotaFile::peek(&link), Ok(table));
    }
    assert!(link.is_symlink());
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
}

#[test]
fn what_cannot_be_written_leaves_the_file_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q");
    let (file, _) = QuotaFile::open(&path).unwrap();
    file.save(&table()).unwrap();
    // Another process has replaced the file.
    let theirs = encode(&Table::default());
    fs::write(&path, &theirs).unwrap();
    let told = file.save(&table()).unwrap_err().to_string();
    assert!(told.contains("restart the server"), "{told}");
    assert_eq!(fs::read_to_string(&path).unwrap(), theirs);
    fs::remove_file(&path).unwrap();
    assert!(file.save(&table()).is_err());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn what_the_next_start_would_not_read_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q");
    let (mut file, _) = QuotaFile::open(&path).unwrap();
    file.save(&Table::default()).unwrap();
    let len = encode(&table()).len() as u64;
    file.max_len = len - 1;
    let error = file.save(&table()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    let told = error.to_string();
    assert!(
        told.contains(&format!("{len} bytes, and may have {} at most", len - 1)),
        "{told}"
    );
    assert_eq!(QuotaFile::peek(&path), Ok(Table::default()));
    file.max_len = len;
    file.save(&table()).unwrap();
}
