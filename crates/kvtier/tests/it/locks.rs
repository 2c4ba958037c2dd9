//! The tables of locks in ARCHITECTURE.md against the source and the order that debug builds check.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Name and file of each lock of one of the two tables, in their order.
fn table(number: usize) -> Vec<(String, String)> {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = page.split("\n## Locks\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let table = section.split("\n| lock").nth(number).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let cell = |row: &str, number| {
        let cell: &str = row.split('`').nth(number).unwrap();
        cell.to_owned()
    };
    rows.map(|row| (cell(row, 1), path(&cell(row, 3))))
        .collect()
}

fn path(shown: &str) -> String {
    match shown.starts_with("bindings/") {
        true => shown.to_owned(),
        false => format!("crates/{shown}"),
    }
}

fn folder(file: &str) -> &str {
    file.rsplit_once('/').unwrap().0
}

#[test]
fn order_in_architecture_is_the_checked_one() {
    let listed = table(1);
    // A lock may be created by another file of its folder.
    let listed: Vec<_> = listed.iter().map(|(_, file)| folder(file)).collect();
    let checked = kvtier_sync::ORDER.iter();
    let checked: Vec<_> = checked.map(|(file, _)| folder(file)).collect();
    assert_eq!(listed, checked);
    for (file, _) in kvtier_sync::ORDER {
        assert!(root().join(file).exists(), "{file}");
    }
}

#[test]
fn every_lock_is_in_architecture() {
    let locks = locks();
    let listed: BTreeSet<_> = [table(1), table(2)].concat().into_iter().collect();
    let missing: Vec<_> = locks.difference(&listed).collect();
    let superfluous: Vec<_> = listed.difference(&locks).collect();
    assert!(
        missing.is_empty() && superfluous.is_empty(),
        "missing: {missing:?}, superfluous: {superfluous:?}"
    );
}

#[test]
fn headers_say_what_locks_guard_and_their_place() {
    let lacks = |file: &String| {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let header = text.lines().filter(|line| line.starts_with("//!"));
        let header: String = header.collect();
        let has_place = ["inside", "outside"].iter().any(|it| header.contains(it));
        !header.contains("guard") || !has_place
    };
    let files: BTreeSet<_> = locks().into_iter().map(|(_, file)| file).collect();
    let lacking: Vec<_> = files.iter().filter(|file| lacks(file)).collect();
    assert!(
        lacking.is_empty(),
        "the header lacks \"guards\", or what is acquired inside: {lacking:?}"
    );
}

/// Name and file of each lock in the source.
fn locks() -> BTreeSet<(String, String)> {
    let mut locks = BTreeSet::new();
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let mut folders: Vec<_> = crates.map(|it| it.unwrap().path().join("src")).collect();
    folders.push(root().join("bindings/python/src"));
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
            // Without what is only for tests, and what wraps the locks.
            let apart = [
                "test",
                "conformance",
                "kvtier-cuda-fake",
                "kvtier-sync/src/checked",
                "kvtier-sync/src/shuttled",
            ];
            if apart.iter().any(|part| file.contains(part)) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if file.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                if text.contains("use kvtier_sync::") || file.contains("kvtier-sync") {
                    let names = text.lines().filter_map(lock);
                    locks.extend(names.map(|name| (name.to_owned(), file.to_owned())));
                }
            }
        }
    }
    locks
}

/// The name of the lock that a line declares: a field, a static, or a struct around one.
fn lock(line: &str) -> Option<&str> {
    let line = line.trim();
    let at = ["Mutex<", "RwLock<"].iter().find_map(|it| line.find(it))?;
    let before = &line[..at];
    if ["//", "fn ", "&", "impl", "tokio"]
        .iter()
        .any(|it| before.contains(it))
    {
        return None;
    }
    let name = before.split(": ").next()?.trim_end_matches('(');
    name.split(' ').next_back()
}

#[test]
fn declarations_of_locks_are_found() {
    let lines = [
        "    state: Mutex<State<A>>,",
        "    pub(super) pages: Mutex<Pages>,",
        "pub struct Pending(Mutex<Holds>);",
        "pub(super) struct Unreadable(Mutex<VecDeque<(u64, u64)>>);",
        "static DECREMENT_LOCK: Mutex<()> = Mutex::new(());",
        "    table: Arc<Mutex<HashMap<Name, ()>>>,",
        "fn lock(set: &Mutex<HashSet<u64>>) {",
        "    breaker: &'a Mutex<Breaker>,",
    ];
    let names: Vec<_> = lines.iter().filter_map(|line| lock(line)).collect();
    assert_eq!(
        names,
        [
            "state",
            "pages",
            "Pending",
            "Unreadable",
            "DECREMENT_LOCK",
            "table"
        ]
    );
}
