//! What is in the file is the old table or the new one, and anything else is refused.

use super::*;
use crate::tenants::TierEntry;
use kvtier_config::Limit;

fn table() -> TenantTable {
    let own = TierEntry {
        limit: Some(Limit(None)),
        reserved: Some(7),
    };
    let entry = |limit, reserved, tiers: &[&str]| TenantEntry {
        limit: Limit(limit),
        reserved,
        tiers: tiers.iter().map(|tier| (tier.to_string(), own)).collect(),
    };
    TenantTable::from_iter([
        ("", entry(None, 0, &[])),
        ("alice", entry(Some(1 << 40), 1 << 30, &["fs-0", "l1"])),
        ("b\"\n..é", entry(Some(0), 0, &[])),
    ])
}

fn placed() -> TenantTable {
    let places = [("fs-0".to_owned(), "/data/kv".to_owned())];
    table().with_places(places.into())
}

#[test]
fn written_table_is_read_back() {
    for table in [table(), placed(), TenantTable::default()] {
        assert_eq!(decode(&encode(&table).unwrap()), Ok(table));
    }
}

/// Files that earlier releases have written must be read by every later one.
#[test]
fn files_of_earlier_releases_are_read() {
    let rows = "{\n\
        \"\":{\"limit\":\"unlimited\",\"reserved\":0},\n\
        \"alice\":{\"limit\":1099511627776,\"reserved\":1073741824,\"tiers\":{\"fs-0\":{\"limit\":\"unlimited\",\"reserved\":7},\
        \"l1\":{\"limit\":\"unlimited\",\"reserved\":7}}},\n\
        \"b\\\"\\n..é\":{\"limit\":0,\"reserved\":0}\n}";
    let sum = "b3f6060a828a27b347e2a413189cbf76";
    let first = format!("{{\"version\":1,\"checksum\":\"{sum}\",\"quotas\":{rows}}}\n");
    assert_eq!(decode(first.as_bytes()), Ok(table()));
    let places = "{\"fs-0\":\"/data/kv\"}";
    let second = format!(
        "{{\"version\":2,\"checksum\":\"{sum}\",\"quotas\":{rows},\n\"places\":{places}}}\n"
    );
    assert_eq!(decode(second.as_bytes()), Ok(placed()));
}

#[test]
fn shortened_or_longer_file_is_refused() {
    let text = encode(&placed()).unwrap();
    for len in 0..text.len() {
        let told = decode(&text[..len]).unwrap_err().to_string();
        assert!(told.contains("damaged"), "{len} bytes: {told}");
    }
    assert!(decode(&[&text, &b"{}"[..]].concat()).is_err());
}

#[test]
fn what_it_cannot_be_is_named_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas.json");
    let head = |version| format!("{{\"version\":{version},\"checksum\":\"\",\"quotas\":{{}}}}");
    let future = head(4);
    let place = "{\"version\":3,\"quotas\":{},\"place\":{}}";
    let row = "\"a\":{\"limit\":1,\"reserved\":0}";
    let twice = &format!("{{\"version\":3,\"quotas\":{{{row},{row}}}}}");
    let no_quotas = "{\"version\":3,\"places\":{}}";
    let bad_salt = encode(&TenantTable::from_iter([("a/b", TenantEntry::default())])).unwrap();
    let bad_salt = String::from_utf8(bad_salt).unwrap();
    for (content, part) in [
        ("", "damaged, or no quota file"),
        ("limits: none", "damaged, or no quota file"),
        ("{}", "missing field `version`"),
        (
            &future,
            "version 4, and this server reads only versions up to 3",
        ),
        (no_quotas, "missing field `quotas`"),
        (place, "unknown field `place`"),
        (twice, "a tenant is named twice"),
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
    let stale = directory.path().join(".q.kvtier-tmp-7-0");
    fs::write(&stale, "half").unwrap();
    let other = directory.path().join(".other.kvtier-tmp");
    fs::write(&other, "of another").unwrap();
    fs::write(&path, encode(&TenantTable::default()).unwrap()).unwrap();
    let (file, before) = QuotaFile::open(&link).unwrap();
    assert!(before.is_empty() && !stale.exists() && other.exists());
    for table in [table(), TenantTable::default(), table()] {
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
    let theirs = encode(&TenantTable::default()).unwrap();
    fs::write(&path, &theirs).unwrap();
    let told = file.save(&table()).unwrap_err().to_string();
    assert!(told.contains("restart the server"), "{told}");
    assert_eq!(fs::read(&path).unwrap(), theirs);
    fs::remove_file(&path).unwrap();
    assert!(file.save(&table()).is_err());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn share_above_its_limit_is_refused_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q");
    let flags = [
        "--l1-size-gb",
        "1",
        "--eviction-policy",
        "IsolatedLRU",
        "--quota-file",
        path.to_str().unwrap(),
    ];
    let config = kvtier_config::ServerConfig::from_flags(&flags).unwrap();
    for (reserved, is_refused) in [(5, false), (6, true)] {
        let row = format!("{{\"limit\":5,\"reserved\":{reserved}}}");
        fs::write(
            &path,
            format!("{{\"version\":3,\"quotas\":{{\"a\":{row}}}}}"),
        )
        .unwrap();
        let told = crate::tenants::preflight(&config);
        assert_eq!(told.is_err(), is_refused, "{told:?}");
        let told = told.err().map_or(String::new(), |error| error.to_string());
        assert_eq!(
            told.contains("reserved is more than the limit"),
            is_refused,
            "{told}"
        );
    }
}
