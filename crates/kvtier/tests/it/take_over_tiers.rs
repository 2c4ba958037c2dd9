//! `kvtier server --take-over` with second tiers: no hit is lost, nothing is changed before the commit.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_client::EngineDrivenWorker;
use serde_json::Value;

use crate::prompts::{CHUNKS, read, store};
use crate::server::{KVTIER, Segments, Server, wait_until};
use crate::take_over::take_over;
use crate::take_over_between::{Between, Kill};

/// L1 of 8 MiB, which holds 250 prompts of 32 KiB.
const SMALL_L1: &str = "0.008";

/// Prompts that do not fit into it.
const PROMPTS: u64 = 400;

fn adapter(path: &Path, more: &str) -> String {
    let path = path.display();
    format!(r#"{{"type":"fs","base_path":"{path}"{more}}}"#)
}

fn flags(adapter: &str) -> [&str; 6] {
    [
        "--l2-adapter",
        adapter,
        "--l2-min-free-gb",
        "0",
        "--l1-size-gb",
        SMALL_L1,
    ]
}

/// What `/status` says of the only tier.
fn tier(server: &Server) -> Value {
    server.http("/status", None)["storage_manager"]["l2_adapters"][0].clone()
}

/// Waits until nothing waits to be stored, and the tier knows what it has.
fn settle(server: &Server) {
    wait_until("a tier with nothing to do", || {
        let status = server.http("/status", None);
        let stores = &status["storage_manager"]["store_controller"];
        let is_stored = stores["pending_keys_count"] == 0 && stores["in_flight_task_count"] == 0;
        is_stored && tier(server)["recovery"]["state"] == "done"
    });
}

/// Names, sizes and times of the files below a directory, for an assertion without all of them.
fn files(path: &Path) -> Vec<(String, u64, std::time::SystemTime)> {
    let mut found = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let about = entry.metadata().unwrap();
            if about.is_dir() {
                folders.push(entry.path());
                continue;
            }
            let changed = about.modified().unwrap();
            found.push((entry.path().display().to_string(), about.len(), changed));
        }
    }
    found.sort();
    found
}

/// Stores more than L1 has, all of it in the tier.
fn fill(server: &Server, worker: &mut EngineDrivenWorker) {
    for number in 0..PROMPTS {
        store(worker, "a", number);
        if number % 50 == 0 {
            settle(server);
        }
    }
    settle(server);
}

/// Expects that the first prompts are hits, byte for byte.
fn assert_hits(worker: &mut EngineDrivenWorker, prompts: u64) {
    for number in 0..prompts {
        assert_eq!(read(worker, "a", number), Ok(CHUNKS), "{number}");
    }
}

#[test]
fn objects_of_tier_are_hits_after_take_over() {
    let base = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    for more in [
        "",
        r#","layout":"sharded","relative_tmp_dir":"tmp","max_capacity_gb":1"#,
    ] {
        let folder = directory.path().join(more.len().to_string());
        let adapter = adapter(&folder, more);
        let flags = flags(&adapter);
        let mut server = Server::start(base.path(), SMALL_L1, &flags);
        let mut worker = server.worker(1, "a");
        fill(&server, &mut worker);
        // A scan would remove it.
        let left = folder.join(".kvtier-tmp-0000000000000001");
        std::fs::write(&left, "").unwrap();
        let (usage, there) = (tier(&server), files(&folder));
        assert_eq!(usage["stored_object_count"], PROMPTS * CHUNKS, "{usage:#}");
        for _ in 0..3 {
            take_over(&mut server, base.path(), &flags).unwrap();
            settle(&server);
            let now = tier(&server);
            for field in ["stored_object_count", "current_size_bytes"] {
                assert_eq!(now[field], usage[field], "{field}: {now:#}");
            }
            assert!(files(&folder) == there, "files of the tier have changed");
        }
        assert_hits(&mut worker, PROMPTS);
        std::fs::remove_file(left).unwrap();
        drop(worker);
        server.stop();
        let left = files(&folder);
        let left = left.iter().filter(|(name, ..)| name.contains("kvtier-tmp"));
        assert_eq!(left.count(), 0);
    }
}

/// A lower capacity evicts in the running server; the next one has it too.
#[test]
fn reloaded_capacity_holds_after_take_over() {
    let base = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let (folder, file) = (directory.path().join("tier"), directory.path().join("toml"));
    let written = |bytes: u64| {
        let text = format!(
            "l2-min-free-gb = 0\n[[l2-adapter]]\ntype = \"fs\"\nbase_path = {folder:?}\nmax_capacity_gb = {}\n",
            bytes as f64 / (1_u64 << 30) as f64
        );
        std::fs::write(&file, text).unwrap();
    };
    let used = |server: &Server| tier(server)["current_size_bytes"].as_u64().unwrap();
    written(1 << 30);
    let flags = ["--config", file.to_str().unwrap(), "--l1-size-gb", SMALL_L1];
    let mut server = Server::start(base.path(), SMALL_L1, &flags);
    let mut worker = server.worker(1, "a");
    fill(&server, &mut worker);
    let capacity = used(&server) / 2;
    written(capacity);
    let reload = ["config", "reload", server.http_url()];
    let output = Command::new(KVTIER).args(reload).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(tier(&server)["max_capacity_bytes"], capacity);
    wait_until("space below the capacity", || used(&server) <= capacity);
    take_over(&mut server, base.path(), &flags).unwrap();
    settle(&server);
    assert_eq!(tier(&server)["max_capacity_bytes"], capacity);
    assert!(used(&server) > 0 && used(&server) <= capacity);
    let last = PROMPTS - 1;
    assert_eq!(read(&mut worker, "a", last), Ok(CHUNKS));
    server.stop();
}

/// The new server reads the directory instead.
#[test]
fn server_killed_before_it_sends_its_index_costs_no_hit() {
    let base = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let adapter = adapter(directory.path(), "");
    let flags = flags(&adapter);
    let mut server = Server::start(base.path(), SMALL_L1, &flags);
    let mut worker = server.worker(1, "a");
    fill(&server, &mut worker);
    let (between, mut new) = Between::start_with(base.path(), &flags);
    between.run(Kill::OldAfterCommit, &mut new.child, &mut server.child);
    assert!(new.wait_until_served(), "{}", new.log);
    settle(&new);
    let usage = tier(&new);
    assert_eq!(usage["stored_object_count"], PROMPTS * CHUNKS, "{usage:#}");
    assert_hits(&mut worker, PROMPTS);
    new.stop();
}

/// Stores and reads of more than L1 has, while servers take over.
#[test]
fn no_object_is_lost_while_servers_take_over() {
    let base = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let adapter = adapter(directory.path(), "");
    let flags = flags(&adapter);
    let mut server = Server::start(base.path(), SMALL_L1, &flags);
    // As many as may wait to be stored, each time: of more, a tier that is slow drops some.
    let (permits, permitted) = std::sync::mpsc::channel();
    let done = Arc::<AtomicU64>::default();
    let counter = Arc::clone(&done);
    let mut worker = server.worker(1, "a");
    let work = std::thread::spawn(move || {
        for number in permitted {
            assert_eq!(store(&mut worker, "a", number), CHUNKS);
            // Old ones are in the tier alone.
            let old = number / 2;
            assert_eq!(read(&mut worker, "a", old), Ok(CHUNKS), "{old} of {number}");
            counter.store(number + 1, Ordering::Release);
        }
        worker
    });
    let (rounds, prompts) = (20, 32);
    let stored = rounds * prompts;
    for round in 0..rounds {
        let begun = round * prompts;
        (begun..begun + prompts).for_each(|number| permits.send(number).unwrap());
        take_over(&mut server, base.path(), &flags).unwrap_or_else(|log| panic!("{round}: {log}"));
        wait_until("the prompts of a round", || {
            done.load(Ordering::Acquire) == begun + prompts || work.is_finished()
        });
        settle(&server);
    }
    drop(permits);
    let mut worker = work.join().unwrap();
    assert_eq!(tier(&server)["stored_object_count"], stored * CHUNKS);
    assert_hits(&mut worker, stored);
    let l1 = || server.http("/status", None)["storage_manager"]["l1_manager"].clone();
    // The end of the last read has no answer.
    wait_until("an L1 without leases", || {
        let l1 = l1();
        l1["read_locked_count"] == 0 && l1["write_locked_count"] == 0
    });
    assert_eq!(l1()["accounting_errors"], 0);
    server.stop();
}

#[test]
fn refusals_leave_server_with_tier_alone() {
    let base = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let folder = directory.path().join("tier");
    let adapter = adapter(&folder, "");
    let flags = flags(&adapter);
    let mut server = Server::start(base.path(), SMALL_L1, &flags);
    let mut worker = server.worker_with(1, "a", 0..3);
    settle(&server);
    let there = files(&folder);
    // Tiers that differ: both are named.
    let other = adapter.replace("tier", "elsewhere");
    let log = take_over(&mut server, base.path(), &self::flags(&other)).unwrap_err();
    for told in ["--l2-adapter fs-0 base_path is", "tier", "elsewhere"] {
        assert!(log.contains(told), "{told}: {log}");
    }
    assert!(!directory.path().join("elsewhere").exists());
    let log = take_over(&mut server, base.path(), &["--l1-size-gb", SMALL_L1]).unwrap_err();
    assert!(log.contains("--l2-adapter is"), "{log}");
    // Its lock is no longer there to be taken.
    let lock = there.iter().find(|(name, ..)| name.contains("kvtier-tmp"));
    let lock = Path::new(&lock.unwrap().0);
    let aside = directory.path().join("lock");
    std::fs::rename(lock, &aside).unwrap();
    let log = take_over(&mut server, base.path(), &flags).unwrap_err();
    assert!(log.contains("was removed or replaced"), "{log}");
    std::fs::rename(&aside, lock).unwrap();
    // Another directory is in its place.
    let away = directory.path().join("away");
    std::fs::rename(&folder, &away).unwrap();
    std::fs::create_dir(&folder).unwrap();
    let log = take_over(&mut server, base.path(), &flags).unwrap_err();
    assert!(log.contains("put or mounted in its place"), "{log}");
    std::fs::remove_dir(&folder).unwrap();
    let log = take_over(&mut server, base.path(), &flags).unwrap_err();
    assert!(log.contains("cannot open base_path"), "{log}");
    assert!(!folder.exists());
    std::fs::rename(&away, &folder).unwrap();
    assert_eq!(files(&folder), there);
    for number in 0..3 {
        assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS));
    }
    take_over(&mut server, base.path(), &flags).unwrap();
    for number in 0..3 {
        assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS));
    }
    server.stop();
}

/// A Redis that accepts connections and answers nothing.
#[test]
fn frozen_tier_is_not_handed_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let frozen = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = frozen.local_addr().unwrap().port();
    let adapter = format!(r#"{{"type":"redis","host":"127.0.0.1","port":{port}}}"#);
    let flags = [
        "--l2-adapter",
        &adapter,
        "--l1-size-gb",
        SMALL_L1,
        "--l2-drain-timeout-seconds",
        "0",
    ];
    let mut server = Server::start(base.path(), SMALL_L1, &flags);
    let mut worker = server.worker_with(1, "a", 0..2);
    let log = take_over(&mut server, base.path(), &flags).unwrap_err();
    assert!(log.contains("tier redis-0"), "{log}");
    assert!(log.contains("the running server goes on"), "{log}");
    for number in 0..2 {
        assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS));
    }
    drop(frozen);
    server.stop();
}
