//! The quota file while its writer is killed at any moment: it holds the table before the write or the one after it.
//!
//! `KVTIER_QUOTA_KILLS=10000 cargo test -p kvtier-server quota_kills` kills that often.
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use kvtier_server::config::Limit;
use kvtier_server::quota::{QuotaFile, TenantEntry, TenantTable};

/// Environment variable of a writer process: its file.
const FILE: &str = "KVTIER_QUOTA_KILLS_FILE";

/// Kills unless more are asked for.
const KILLS: u64 = 200;

/// The table of one generation; sizes differ, so that none could be a part of another.
fn table(generation: u64) -> TenantTable {
    let entry = |limit| TenantEntry {
        limit: Limit(Some(limit)),
        ..TenantEntry::default()
    };
    let tenants = 1 + generation % 50;
    (0..tenants)
        .map(|tenant| (format!("tenant-{tenant}"), entry(generation)))
        .collect()
}

fn generation(table: &TenantTable) -> u64 {
    let first = table.get("tenant-0").map(|entry| entry.limit.0.unwrap());
    let generation = first.unwrap_or(0);
    if generation > 0 {
        assert_eq!(*table, self::table(generation), "a mixture of two");
    }
    generation
}

#[test]
#[ignore = "the process that is killed; run by killed_write_leaves_old_or_new_file"]
fn writer() {
    let path = std::env::var_os(FILE).expect("set by the test");
    let (file, table) = QuotaFile::open(Path::new(&path)).unwrap();
    let mut log = std::io::stderr();
    for generation in generation(&table) + 1.. {
        writeln!(log, "begin {generation}").unwrap();
        file.save(&self::table(generation)).unwrap();
        writeln!(log, "done {generation}").unwrap();
    }
}

#[test]
fn killed_write_leaves_old_or_new_file() {
    let kills = std::env::var("KVTIER_QUOTA_KILLS");
    let kills = kills.map_or(KILLS, |kills| kills.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("quotas.json");
    let (mut old, mut new, mut last) = (0, 0, 0);
    let mut random = std::process::id() | 1;
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "quota_kills::writer", "--ignored", "--nocapture"])
            .env(FILE, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        // Some lines, and then some more of its time.
        let mut log = Vec::new();
        for line in lines.by_ref().take(1 + random as usize % 4) {
            log.push(line.unwrap());
        }
        for _ in 0..random % 200_000 {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        log.extend(lines.map_while(Result::ok));
        let number = |word: &str| {
            let lines = log.iter().rev();
            let mut numbers = lines.filter_map(|line| line.strip_prefix(word)?.trim().parse().ok());
            numbers.next()
        };
        let begun: u64 = number("begin").unwrap_or_else(|| panic!("{log:?}"));
        let done: u64 = number("done").unwrap_or(last);
        let table = QuotaFile::peek(&path).unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        let found = generation(&table);
        assert!(
            found == begun || found == done,
            "kill {kill}: {found} is neither {done} nor {begun}"
        );
        if found == begun && done < begun {
            new += 1
        } else {
            old += u64::from(done < begun)
        }
        last = found;
    }
    let (_file, _table) = QuotaFile::open(&path).unwrap();
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 1, "files that were half-written are still there");
    println!(
        "{kills} kills, {last} tables written: {} within a write, which left the table before it {old} times and the one after it {new} times; \
         0 files that could not be read",
        old + new
    );
}
