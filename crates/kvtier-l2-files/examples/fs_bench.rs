//! Speed of the `fs` adapter beside the same files moved with plain system calls.
//!
//! `cargo run --release -p kvtier-l2 --example fs_bench -- DIR [direct]`: writes up to about a gigabyte to a new
//! directory below DIR and removes it. With `direct`, past the page cache.
//!
//! `... -- DIR scan 1000000`: how long that many files take to be adopted, and the longest lookup meanwhile.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::hashing::ChunkHash;
use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_l2::{Adapter, Buffer, LoadItem, ObjectSpec, StoreItem};
use kvtier_l2_files::fs::{FsAdapter, FsOptions};
use kvtier_memory::{Arena, ArenaKind, Extent};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

type Error = Box<dyn std::error::Error>;

const ROUNDS: usize = 3;
const WORKERS: usize = 4;

fn key(number: usize) -> Result<ObjectKey, Error> {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    let model = "meta-llama/Llama-3.1-8B-Instruct";
    Ok(ObjectKey::new(ChunkHash(hash), model, 0x0101_0000, 0, "")?)
}

struct Case {
    len: u64,
    count: usize,
    direct: bool,
}

/// Seconds each of store, lookup and load.
type Times = [f64; 3];

async fn adapter(case: &Case, dir: &Path, arena: &Arc<Arena>) -> Result<Times, Error> {
    let mut options = FsOptions::new(dir);
    options.num_workers = WORKERS;
    options.use_odirect = case.direct;
    let adapter = FsAdapter::open("fs", &options)?;
    adapter.recover(&|_| true).await?;
    let objects: Vec<_> = (0..case.count)
        .map(|number| {
            let (len, layout) = (case.len, 1);
            Ok(ObjectSpec {
                key: key(number)?,
                len,
                layout,
            })
        })
        .collect::<Result<_, Error>>()?;
    let slot = case.len.next_multiple_of(4096);
    let buffer = |number: usize| {
        let offset = number as u64 % (arena.len() / slot) * slot;
        Buffer::new(
            Arc::clone(arena),
            Extent::new(offset, case.len),
            Arc::new(()),
        )
    };
    let items = objects.iter().cloned().enumerate();
    let stores = items
        .clone()
        .map(|(n, object)| StoreItem {
            object,
            from: buffer(n),
        })
        .collect();
    let loads: Vec<_> = items
        .map(|(n, object)| LoadItem {
            object,
            to: buffer(n),
        })
        .collect();

    let start = Instant::now();
    for stored in adapter.store(stores).await {
        stored?;
    }
    let store = start.elapsed();
    let start = Instant::now();
    let found = adapter.lookup(objects).await?;
    let lookup = start.elapsed();
    assert!(found.iter().all(Option::is_some));
    let start = Instant::now();
    for loaded in adapter.load(loads).await {
        assert!(loaded?.verified);
    }
    let load = start.elapsed();
    adapter.close().await;
    Ok([store, lookup, load].map(|time: Duration| time.as_secs_f64()))
}

/// The least work of any implementation: one file per object, published by a rename; the same number of threads.
fn raw(case: &Case, dir: &Path, arena: &Arc<Arena>) -> Result<Times, Error> {
    let base = rustix::fs::openat(CWD, dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let names: Vec<_> = (0..case.count)
        .map(|number| Ok(key(number)?.text().file_name(KeyShape::Grouped)))
        .collect::<Result<_, Error>>()?;
    let slot = case.len.next_multiple_of(4096);
    let extent = |number: usize| {
        let offset = number as u64 % (arena.len() / slot) * slot;
        Extent::new(offset, case.len)
    };
    let direct = if case.direct {
        OFlags::DIRECT
    } else {
        OFlags::empty()
    };
    let open = |name: &str, flags: OFlags| -> Result<OwnedFd, Error> {
        Ok(rustix::fs::openat(
            &base,
            name,
            flags | direct | OFlags::CLOEXEC,
            Mode::RWXU,
        )?)
    };
    let each = |work: &(dyn Fn(usize) -> Result<(), Error> + Sync)| -> f64 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                scope.spawn(move || {
                    for number in (worker..case.count).step_by(WORKERS) {
                        if let Err(error) = work(number) {
                            panic!("file {number}: {error}");
                        }
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    };
    let store = each(&|number| {
        use std::os::fd::AsFd;
        let temporary = format!(".tmp-{number}");
        let file = open(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        arena.write_file(extent(number), &[], file.as_fd(), 0)?;
        drop(file);
        Ok(rustix::fs::renameat(
            &base,
            &temporary,
            &base,
            &names[number],
        )?)
    });
    let lookup = each(&|number| {
        rustix::fs::statat(&base, &names[number], AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    });
    let load = each(&|number| {
        use std::os::fd::AsFd;
        let file = open(&names[number], OFlags::RDONLY)?;
        arena.read_file(extent(number), &mut [], file.as_fd(), 0, case.len)?;
        Ok(())
    });
    Ok([store, lookup, load])
}

async fn scan(dir: &Path, count: usize) -> Result<(), Error> {
    let base = rustix::fs::openat(CWD, dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..count {
        let name = key(number)?.text().file_name(KeyShape::Grouped);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        rustix::fs::openat(&base, name, flags, Mode::RUSR)?;
    }
    let start = Instant::now();
    let adapter = FsAdapter::open("fs", &FsOptions::new(dir))?;
    let opened = start.elapsed();
    let recovered = adapter.recover(&|_| true);
    tokio::pin!(recovered);
    let mut lookups = Vec::new();
    let recovered = loop {
        let object = ObjectSpec {
            key: key(count + lookups.len())?,
            len: 1,
            layout: 1,
        };
        let asked = Instant::now();
        tokio::select! {
            recovered = &mut recovered => break recovered?,
            found = adapter.lookup(vec![object]) => assert_eq!(found?, [None]),
        }
        lookups.push(asked.elapsed());
    };
    let scanned = start.elapsed();
    lookups.sort_unstable();
    let part = |part: f64| lookups[(lookups.len() as f64 * part) as usize % lookups.len()];
    println!(
        "{} files: opened in {opened:.1?}, scanned in {scanned:.1?}; {} lookups meanwhile: p50 {:.1?}, p99.9 {:.1?}, longest {:.1?}",
        recovered.objects,
        lookups.len(),
        part(0.5),
        part(0.999),
        part(0.999_999_9)
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: fs_bench DIR [direct | scan COUNT]";
    let dir = args.next().ok_or(usage)?;
    let mode = args.next();
    if mode.as_deref() == Some("scan") {
        let count = args.next().ok_or(usage)?.parse()?;
        let place = Path::new(&dir).join(format!("fs-bench-{}", std::process::id()));
        std::fs::create_dir(&place)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let scanned = runtime.block_on(scan(&place, count));
        std::fs::remove_dir_all(&place)?;
        return scanned;
    }
    let direct = mode.as_deref() == Some("direct");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 256 << 20)?);
    let noise: Vec<u8> = (0..1 << 20_u32)
        .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for at in (0..arena.len()).step_by(noise.len()) {
        arena.write(Extent::new(at, noise.len() as u64), 0, &noise)?;
    }
    println!("us per key (GB/s)            store            lookup           load");
    for (len, count) in [(4 << 10, 16_384), (2 << 20, 256)] {
        let case = Case { len, count, direct };
        for round in 0..ROUNDS {
            for ours in [false, true] {
                let place = Path::new(&dir).join(format!("fs-bench-{}", std::process::id()));
                std::fs::create_dir(&place)?;
                let times = if ours {
                    runtime.block_on(adapter(&case, &place, &arena))
                } else {
                    raw(&case, &place, &arena)
                };
                std::fs::remove_dir_all(&place)?;
                let [store, lookup, load] = times?;
                let us = |time: f64| time * 1e6 / count as f64;
                let rate = |time: f64| len as f64 * count as f64 / time / 1e9;
                println!(
                    "{:>7} KiB {} {round}: {:>8.2} ({:>5.2}) {:>8.2}         {:>8.2} ({:>5.2})",
                    len >> 10,
                    if ours { "fs " } else { "raw" },
                    us(store),
                    rate(store),
                    us(lookup),
                    us(load),
                    rate(load)
                );
            }
        }
    }
    Ok(())
}
