//! Locks are stated where they are: each file says what its locks guard and what is acquired inside.

use std::collections::BTreeSet;
use std::fs;

use crate::docs::root;

#[test]
fn files_of_the_order_exist() {
    for (file, _) in kvtier_common::sync::ORDER {
        assert!(root().join(file).exists(), "{file}");
    }
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
    let files = files_with_locks();
    let lacking: Vec<_> = files.iter().filter(|file| lacks(file)).collect();
    assert!(
        lacking.is_empty(),
        "the header lacks \"guards\", or what is acquired inside: {lacking:?}"
    );
}

/// Files of the source that declare a lock.
fn files_with_locks() -> BTreeSet<String> {
    let mut files = BTreeSet::new();
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
                "kvtier-common/src/sync/checked",
                "kvtier-common/src/sync/shuttled",
            ];
            if apart.iter().any(|part| file.contains(part)) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if file.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                let is_ours =
                    text.contains("use kvtier_common::sync::") || file.contains("kvtier-common");
                if is_ours && text.lines().any(|line| lock(line).is_some()) {
                    files.insert(file.to_owned());
                }
            }
        }
    }
    files
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
