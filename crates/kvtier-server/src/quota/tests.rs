//! The table and the tiers it holds for. What tiers do with limits is tested where they are.

use std::path::Path;

use super::*;
use crate::engine::Engine;
use crate::metrics::Metrics;

const MIB: u64 = 1 << 20;

fn engine(flags: &[&str]) -> Result<Engine, String> {
    let mut all = vec![
        "--l1-size-gb",
        "0.0078125",
        "--shm-name",
        "",
        "--eviction-policy",
        "IsolatedLRU",
    ];
    all.extend(flags);
    let config = ServerConfig::from_flags(&all).unwrap();
    Engine::new(Arc::new(config), Arc::new(Metrics::new()))
}

fn with_file(path: &Path) -> Engine {
    engine(&["--quota-file", path.to_str().unwrap()]).unwrap()
}

fn entry(limit: u64, reserved: u64) -> Option<Entry> {
    Some(Entry {
        limit: Limit(Some(limit)),
        reserved,
        ..Entry::default()
    })
}

fn refused(outcome: Result<bool, ChangeError>) -> String {
    match outcome {
        Err(ChangeError::Refused(what)) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn entries_are_there_after_a_restart_and_hold_before_anything_is_stored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas");
    let first = with_file(&path);
    let quotas = first.quotas();
    assert_eq!(quotas.change("a", entry(5, 0)), Ok(false));
    assert_eq!(quotas.change("a", entry(7, 3)), Ok(true));
    assert_eq!(quotas.change("b", entry(1, 0)), Ok(false));
    assert_eq!(quotas.change("b", None), Ok(true));
    assert_eq!(quotas.change("b", None), Ok(false));
    drop(first);
    let second = with_file(&path);
    let quotas = second.quotas();
    assert_eq!(quotas.table().len(), 1);
    let look = quotas.look();
    let [l1] = &look.tenant("a")[..] else {
        panic!("only L1");
    };
    let granted = Grant {
        limit: Some(7),
        reserved: 3,
    };
    assert_eq!(l1.grant, granted);
    let known = l1.usage.as_ref().and_then(|usage| usage.grant);
    assert_eq!(known, Some(granted), "the cache knows it");
}

#[test]
fn shares_have_to_be_there() {
    let engine = engine(&[]).unwrap();
    let quotas = engine.quotas();
    assert_eq!(quotas.change("a", entry(8 * MIB, 5 * MIB)), Ok(false));
    let told = refused(quotas.change("b", entry(8 * MIB, 3 * MIB + 1)));
    for part in ["l1", "8388609 reserved bytes", "the 8388608 bytes it has"] {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(quotas.change("b", entry(8 * MIB, 3 * MIB)), Ok(false));
    // In place of its own share.
    assert_eq!(quotas.change("a", entry(8 * MIB, 4 * MIB)), Ok(true));
    assert_eq!(quotas.change("b", entry(8 * MIB, 4 * MIB)), Ok(true));
    let told = refused(quotas.change("c", entry(1, 2)));
    assert_eq!(told, "l1: 2 reserved bytes are more than the limit of 1");
    assert_eq!(quotas.table().len(), 2);
}

#[test]
fn a_file_with_shares_that_are_not_there_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas");
    let first = with_file(&path);
    let share = entry(8 * MIB, 8 * MIB);
    assert_eq!(first.quotas().change("a", share), Ok(false));
    drop(first);
    let flags = [
        "--quota-file",
        path.to_str().unwrap(),
        "--l1-size-gb",
        "0.00390625",
    ];
    let told = engine(&flags).err().unwrap();
    assert!(
        told.starts_with("--quota-file: l1: 8388608 reserved bytes"),
        "{told}"
    );
    let config = [
        &["--shm-name", "", "--eviction-policy", "IsolatedLRU"][..],
        &flags,
    ]
    .concat();
    let config = ServerConfig::from_flags(&config).unwrap();
    assert_eq!(obstacle(&config), Some(told));
}

#[test]
fn what_cannot_be_written_does_not_hold() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas");
    let engine = with_file(&path);
    let quotas = engine.quotas();
    quotas.change("a", entry(5, 0)).unwrap();
    std::fs::write(&path, "").unwrap();
    for change in [entry(7, 0), None] {
        let told = quotas.change("a", change).unwrap_err();
        assert!(matches!(told, ChangeError::NotWritten(_)), "{told}");
        assert_eq!(
            quotas.table().get("a").map(|entry| entry.limit),
            Some(Limit(Some(5)))
        );
        assert_eq!(quotas.look().tenant("a")[0].grant.limit, Some(5));
    }
    // Nothing to write.
    assert_eq!(quotas.change("a", entry(5, 0)), Ok(true));
    // Shares of what was not written can be had by others.
    let lost = quotas.change("b", entry(8 * MIB, 8 * MIB)).unwrap_err();
    assert!(matches!(lost, ChangeError::NotWritten(_)), "{lost}");
    std::fs::remove_file(&path).unwrap();
    let (file, _) = QuotaFile::open(&path).unwrap();
    assert!(file.save(&Table::default()).is_ok());
    let again = quotas.change("c", entry(8 * MIB, 8 * MIB)).unwrap_err();
    assert!(matches!(again, ChangeError::NotWritten(_)), "{again}");
}

#[test]
fn changes_of_many_at_once_are_all_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas");
    let engine = with_file(&path);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let quotas = engine.quotas();
            scope.spawn(move || {
                for number in 0..25 {
                    let salt = format!("{thread}-{number}");
                    assert_eq!(quotas.change(&salt, entry(number, 0)), Ok(false));
                    assert!(quotas.table().get(&salt).is_some());
                }
            });
        }
    });
    assert_eq!(engine.quotas().table().len(), 200);
    assert_eq!(
        QuotaFile::peek(&path).as_ref(),
        Ok(&*engine.quotas().table())
    );
}

#[test]
fn tiers_that_do_not_keep_tenants_apart_have_no_limits() {
    let engine = engine(&["--eviction-policy", "LRU", "--quota-default", "0"]).unwrap();
    let quotas = engine.quotas();
    // A share beyond its size means nothing to it either.
    quotas.change("a", entry(100 * MIB, 100 * MIB)).unwrap();
    let look = quotas.look();
    let [l1] = &look.tenant("a")[..] else {
        panic!("only L1");
    };
    assert!(!l1.place.isolates && l1.usage.is_none());
}
