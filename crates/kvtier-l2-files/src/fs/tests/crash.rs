//! Several writers of one directory, and writers that die.

use std::process::{Command, Stdio};

use super::*;

/// Environment variable of a child process, with its directory.
const CHILD: &str = "KVTIER_FS_TEST_CHILD";

fn many(number: u64) -> ObjectSpec {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.to_be_bytes());
    let key = ObjectKey::new(ChunkHash(hash), "org/model", 0x0101_0000, 0, "").unwrap();
    ObjectSpec {
        key,
        len: 20_000 + number % 7000,
        layout: LAYOUT,
    }
}

/// Objects per round of stores.
const MANY: u64 = 200;

#[test]
#[ignore = "run by the test below, as a process to be killed"]
fn child_that_stores_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD) else {
        return;
    };
    let fixture = Fixture::with(|options| options.base_path = dir.into());
    for number in (0..MANY).cycle() {
        let object = many(number);
        let stored = fixture.store(&object);
        assert!(stored.is_ok());
        if number == MANY / 2 {
            // The parent reads this.
            println!("stored");
        }
        if number % 3 == 0 {
            block_on(fixture.adapter.delete(vec![object.key]));
        }
    }
}

#[test]
fn kill_9_during_stores_leaves_only_whole_objects() {
    use std::io::{BufRead, BufReader};

    let fixture = Fixture::new();
    for _ in 0..5 {
        let name = "fs::tests::crash::child_that_stores_until_it_is_killed";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture"])
            .env(CHILD, fixture.base())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines
            .map_while(Result::ok)
            .any(|line| line.contains("stored"));
        assert!(said, "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();

        let after = Fixture::with(|options| options.base_path = fixture.base().to_owned());
        let (listed, recovered) = after.recover();
        assert_eq!(recovered.foreign, 0);
        assert!(listed.len() as u64 >= MANY / 3);
        for number in 0..MANY {
            let object = many(number);
            let is_listed = listed.iter().any(|listed| listed.key == object.key);
            assert_eq!(after.has(&object), is_listed);
            let loaded = after.load(&object);
            assert_eq!(
                loaded,
                if is_listed {
                    Ok(true)
                } else {
                    Err(ErrorKind::NotFound)
                }
            );
        }
        assert_eq!(after.status("quarantined_files"), 0);
        // Two writers live: this one and the first.
        let temporary = names_in(after.base());
        let temporary = temporary
            .iter()
            .filter(|name| name.starts_with(names::TEMPORARY));
        assert_eq!(temporary.count(), 2);
    }
}

#[test]
fn two_adapters_on_one_directory_see_whole_objects() {
    let first = Fixture::new();
    let second = Fixture::with(|options| {
        options.base_path = first.base().to_owned();
        options.relative_tmp_dir = "tmp".into();
    });
    first.recover();
    second.recover();
    let object = ObjectSpec {
        len: SLOT,
        ..object(1)
    };
    std::thread::scope(|scope| {
        let writers = [&first, &second].map(|fixture| {
            let object = &object;
            scope.spawn(move || {
                for _ in 0..300 {
                    fixture.store(object).unwrap();
                    block_on(fixture.adapter.delete(vec![object.key.clone()]))
                        .remove(0)
                        .unwrap();
                }
            })
        });
        let reader = Fixture::with(|options| options.base_path = first.base().to_owned());
        let mut loaded = 0;
        while !writers.iter().all(|writer| writer.is_finished()) {
            match reader.load(&object) {
                Ok(verified) => {
                    assert!(verified);
                    loaded += 1;
                }
                Err(error) => assert_eq!(error, ErrorKind::NotFound),
            }
        }
        let _ = loaded;
    });
    first.store(&object).unwrap();
    assert_eq!(second.load(&object), Ok(true));
    assert!(matches!(second.store(&object), Ok(Stored::AlreadyThere(_))));
    assert_eq!(
        block_on(second.adapter.delete(vec![object.key.clone()])),
        [Ok(true)]
    );
    assert!(!first.has(&object));
}

#[test]
fn many_tasks_on_the_same_keys_at_once() {
    let fixture = Fixture::with(|options| options.num_workers = 4);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let fixture = Arc::new(fixture);
    let tasks: Vec<_> = (0..8_u64)
        .map(|task| {
            let fixture = Arc::clone(&fixture);
            runtime.spawn(async move {
                let objects: Vec<_> = (0..20)
                    .map(|n| ObjectSpec {
                        len: 5000,
                        ..many(n)
                    })
                    .collect();
                for _ in 0..10 {
                    let stores = objects.iter().map(|object| {
                        // All tasks write equal bytes from memory of their own.
                        let from = fixture.buffer(2 + task, object.len);
                        StoreItem {
                            object: object.clone(),
                            from,
                        }
                    });
                    let stored = fixture.adapter.store(stores.collect()).await;
                    assert!(stored.iter().all(Result::is_ok));
                    let loads = objects.iter().map(|object| {
                        let to = fixture.buffer(20 + task, object.len);
                        LoadItem {
                            object: object.clone(),
                            to,
                        }
                    });
                    for loaded in fixture.adapter.load(loads.collect()).await {
                        match loaded {
                            Ok(loaded) => assert!(loaded.verified),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
                        }
                    }
                    let keys = objects.iter().skip(task as usize).step_by(8);
                    fixture
                        .adapter
                        .delete(keys.map(|object| object.key.clone()).collect())
                        .await;
                }
            })
        })
        .collect();
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
    assert_eq!(fixture.status("quarantined_files"), 0);
}
