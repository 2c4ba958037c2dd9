//! The table and the tiers it holds for. What tiers do with limits is tested where they are.

use std::path::Path;

use std::sync::Arc;

use kvtier_common::error::ErrorKind;
use kvtier_config::{Limit, ServerConfig};
use kvtier_core::quota::Grant;
use kvtier_observe::metrics::Metrics;
use kvtier_store::tenants::*;

use crate::Engine;

const MIB: u64 = 1 << 20;

fn engine(flags: &[&str]) -> kvtier_common::error::Result<Engine> {
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

fn entry(limit: u64, reserved: u64) -> Option<TenantEntry> {
    Some(TenantEntry {
        limit: Limit(Some(limit)),
        reserved,
        ..TenantEntry::default()
    })
}

fn refused(outcome: kvtier_common::error::Result<bool>) -> String {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    error.to_string()
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
    for part in ["l1", "8388609B reserved", "the 8MiB it has"] {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(quotas.change("b", entry(8 * MIB, 3 * MIB)), Ok(false));
    // In place of its own share.
    assert_eq!(quotas.change("a", entry(8 * MIB, 4 * MIB)), Ok(true));
    assert_eq!(quotas.change("b", entry(8 * MIB, 4 * MIB)), Ok(true));
    let told = refused(quotas.change("c", entry(1, 2)));
    assert_eq!(told, "l1: 2B reserved is more than the limit of 1B");
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
    let told = engine(&flags).err().unwrap().to_string();
    assert!(
        told.starts_with("--quota-file: l1: 8MiB reserved"),
        "{told}"
    );
    let config = [
        &["--shm-name", "", "--eviction-policy", "IsolatedLRU"][..],
        &flags,
    ]
    .concat();
    let config = ServerConfig::from_flags(&config).unwrap();
    assert_eq!(preflight(&config).unwrap_err().to_string(), told);
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
        assert_eq!(told.kind(), ErrorKind::Io, "{told}");
        assert_eq!(
            quotas.table().get("a").map(|entry| entry.limit),
            Some(Limit(Some(5)))
        );
        assert_eq!(quotas.look().tenant("a")[0].grant.limit, Some(5));
    }
    // Nothing to write.
    assert_eq!(quotas.change("a", entry(5, 0)), Ok(true));
    // Shares of a change that was not written are available to other tenants.
    let lost = quotas.change("b", entry(8 * MIB, 8 * MIB)).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Io, "{lost}");
    std::fs::remove_file(&path).unwrap();
    let (file, _) = QuotaFile::open(&path).unwrap();
    assert!(file.save(&TenantTable::default()).is_ok());
    let again = quotas.change("c", entry(8 * MIB, 8 * MIB)).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Io, "{again}");
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

/// A file system tier that keeps tenants apart, called `name` where there is one.
fn tier(place: &Path, name: &str) -> String {
    let name = match name {
        "" => String::new(),
        name => format!(r#""name":"{name}","#),
    };
    format!(
        r#"{{"type":"fs",{name}"base_path":"{}","max_capacity_gb":1,"eviction":{{"eviction_policy":"IsolatedLRU"}}}}"#,
        place.display()
    )
}

#[test]
fn shares_of_a_tier_bound_its_reloaded_capacity() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    let written = |gib: &str| {
        let place = directory.path().join("tier");
        let text = format!(
            "l2-adapter = [{{type = \"fs\", base_path = {place:?}, max_capacity_gb = {gib}, \
             eviction = {{eviction_policy = \"IsolatedLRU\"}}}}]"
        );
        std::fs::write(&file, text).unwrap();
    };
    written("1");
    let engine = engine(&["--config", file.to_str().unwrap()]).unwrap();
    let quotas = engine.quotas();
    let reserve = |reserved: u64| {
        let share = TierEntry {
            limit: None,
            reserved: Some(reserved),
        };
        let entry = TenantEntry {
            limit: Limit(None),
            reserved: 0,
            tiers: [("fs-0".to_owned(), share)].into(),
        };
        quotas.change("a", Some(entry))
    };
    reserve(600 * MIB).unwrap();
    written("0.5");
    let error = engine.admin.reload().unwrap_err().to_string();
    assert!(
        error.contains(
            "fs-0: 600MiB reserved for all tenants together is more than the 512MiB it has"
        ),
        "{error}"
    );
    written("2");
    assert_eq!(engine.admin.reload().unwrap().len(), 1);
    reserve(1500 * MIB).unwrap();
    assert!(reserve(2500 * MIB).is_err());
}

#[test]
fn limits_of_a_tier_do_not_hold_for_another_directory() {
    let directory = tempfile::tempdir().unwrap();
    let [one, two, file] = ["one", "two", "quotas"].map(|name| directory.path().join(name));
    let file = file.to_str().unwrap();
    let flags = |tiers: &[String]| {
        let tiers = tiers
            .iter()
            .flat_map(|tier| ["--l2-adapter".to_owned(), tier.clone()]);
        ["--quota-file".to_owned(), file.to_owned()]
            .into_iter()
            .chain(tiers)
            .collect::<Vec<_>>()
    };
    let start = |tiers: &[String]| {
        let flags = flags(tiers);
        engine(&flags.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let own = || TierEntry {
        limit: Some(Limit(Some(7))),
        reserved: None,
    };
    let with_own = |name: &str| TenantEntry {
        limit: Limit(None),
        reserved: 0,
        tiers: [(name.to_owned(), own())].into(),
    };
    let first = start(&[tier(&one, ""), tier(&two, "")]).unwrap();
    let entry = with_own("fs-1");
    assert_eq!(first.quotas().change("a", Some(entry)), Ok(false));
    drop(first);
    // As it was.
    drop(start(&[tier(&one, ""), tier(&two, "")]).unwrap());
    let swapped = [tier(&two, ""), tier(&one, "")];
    let told = start(&swapped).err().unwrap().to_string();
    let (one_shown, two_shown) = (one.canonicalize().unwrap(), two.canonicalize().unwrap());
    for part in [
        format!("tier fs-1, which was in {}", two_shown.display()),
        format!("is in {} now", one_shown.display()),
        "\"name\": \"fs-1\"".to_owned(),
    ] {
        assert!(told.contains(&part), "{told}");
    }
    let flags = flags(&swapped);
    let all = ["--shm-name", "", "--eviction-policy", "IsolatedLRU"];
    let all: Vec<_> = all
        .into_iter()
        .chain(flags.iter().map(String::as_str))
        .collect();
    let config = ServerConfig::from_flags(&all).unwrap();
    assert_eq!(preflight(&config).unwrap_err().to_string(), told);
    // With what it says to do, limits go with their directory.
    let again = start(&[tier(&two, "fs-1"), tier(&one, "other")]).unwrap();
    let look = again.quotas().look();
    let limits: Vec<_> = look
        .tenant("a")
        .iter()
        .map(|tier| (tier.place.name.to_string(), tier.grant.limit))
        .collect();
    let expected = [("l1", None), ("fs-1", Some(7)), ("other", None)];
    assert_eq!(
        limits,
        expected.map(|(name, limit)| (name.to_owned(), limit))
    );
    drop(look);
    // Without a limit of its own a tier may be anywhere.
    again.quotas().change("a", None).unwrap();
    drop(again);
    drop(start(&swapped).unwrap());
}

#[test]
fn a_file_from_before_places_were_kept_takes_them_on() {
    let directory = tempfile::tempdir().unwrap();
    let [one, path] = ["one", "quotas"].map(|name| directory.path().join(name));
    let (file, _) = QuotaFile::open(&path).unwrap();
    let own = TierEntry::default();
    let entry = TenantEntry {
        tiers: [("fs-0".to_owned(), own)].into(),
        ..TenantEntry::default()
    };
    file.save(&TenantTable::from_iter([("a", entry)])).unwrap();
    let flags = [
        "--quota-file",
        path.to_str().unwrap(),
        "--l2-adapter",
        &tier(&one, ""),
    ];
    drop(engine(&flags).unwrap());
    let places = QuotaFile::peek(&path).unwrap().places().clone();
    let one = one.canonicalize().unwrap().display().to_string();
    assert_eq!(places, [("fs-0".to_owned(), one)].into());
}

#[test]
fn salts_in_clear_leave_the_file_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let [path, secret] = ["quotas", "secret"].map(|name| directory.path().join(name));
    std::fs::write(&secret, "a secret of the operator").unwrap();
    let (path, secret) = (path.to_str().unwrap(), secret.to_str().unwrap());
    let flags = ["--quota-file", path, "--hash-salts", secret];
    let plain = with_file(Path::new(path));
    plain.quotas().change("acme", entry(5, 0)).unwrap();
    drop(plain);
    let hashing = engine(&flags).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    assert!(!text.contains("acme") && text.contains("\"h1-"), "{text}");
    assert_eq!(
        QuotaFile::peek(Path::new(path)).as_ref(),
        Ok(&*hashing.quotas().table())
    );
    drop(hashing);
    // The salt and its hash: which of both is meant is ambiguous.
    let plain = with_file(Path::new(path));
    plain.quotas().change("acme", entry(6, 0)).unwrap();
    drop(plain);
    let before = std::fs::read_to_string(path).unwrap();
    let told = engine(&flags).err().unwrap().to_string();
    assert!(
        told.contains("h1-") && told.contains("start without --hash-salts"),
        "{told}"
    );
    assert!(!told.contains("acme"));
    assert_eq!(std::fs::read_to_string(path).unwrap(), before);
}

#[test]
fn many_changes_are_made_together_or_not_at_all() {
    let engine = engine(&[]).unwrap();
    let quotas = engine.quotas();
    quotas.change("a", entry(8 * MIB, 8 * MIB)).unwrap();
    let before = quotas.table();
    let changes = |list: &[(&str, u64)]| -> Changes {
        let change = |(salt, share): &(&str, u64)| ((*salt).into(), entry(8 * MIB, share * MIB));
        list.iter().map(change).collect()
    };
    let told = quotas
        .change_all(changes(&[("b", 1), ("a", 7), ("b", 2)]))
        .unwrap_err();
    assert!(told.to_string().contains("9MiB reserved"), "{told}");
    assert!(quotas.change_all(changes(&[("a", 4), ("b", 9)])).is_err());
    assert_eq!(quotas.table(), before);
    assert_eq!(quotas.look().tenant("a")[0].grant.reserved, 8 * MIB);
    // What is there in the end counts, whatever comes first.
    assert_eq!(quotas.change_all(changes(&[("b", 4), ("a", 4)])), Ok(1));
    assert_eq!(quotas.look().tenant("b")[0].grant.reserved, 4 * MIB);
    assert_eq!(quotas.change_all(Vec::new()), Ok(0));
    assert_eq!(quotas.table().len(), 2);
}

#[test]
fn strict_quotas_with_read_only_tiers_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let read_only = tier(directory.path(), "").replace("\"type\"", "\"read_only\":true,\"type\"");
    let flags = ["--eviction-policy", "LRU", "--l2-adapter", &read_only];
    let config = ServerConfig::from_flags(&flags).unwrap();
    assert!(config.places().iter().all(|place| !place.isolates));
    let strict = [&flags[..], &["--quota-mode", "strict"]].concat();
    let told = ServerConfig::from_flags(&strict).unwrap_err().to_string();
    assert!(told.contains("no tier keeps tenants apart"), "{told}");
}
