//! `kvtier bench l2`: speed of a second tier, with all its guards, compared with plain system calls on the same files.
//!
//! Both move the same objects, in turn, in the same run, so other load of the machine affects both.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use comfy_table::Table;
use kvtier_core::{ChunkHash, ObjectKey};
use kvtier_l2::{
    Adapter, AdapterConfig, Buffer, LoadItem, ObjectSpec, Registry, StoreItem, sample,
};
use kvtier_memory::{Arena, ArenaKind, Extent};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde_json::json;

use super::args::L2Args;
use super::record::median;

/// Alignment of objects in the arena.
const ALIGNMENT: u64 = 4096;

/// Size of the arena, which the objects share.
const ARENA_BYTES: u64 = 256 << 20;

/// Seconds per step: store, lookup, load.
type Times = [f64; 3];

/// The objects of a run, all of one size.
struct Objects {
    specs: Vec<ObjectSpec>,
    arena: Arc<Arena>,
    len: u64,
}

impl Objects {
    fn new(args: &L2Args) -> anyhow::Result<Self> {
        let len = u64::from(args.data_size_kb) << 10;
        let bytes = ARENA_BYTES.max(len.next_multiple_of(ALIGNMENT));
        let arena = Arena::create(ArenaKind::Anonymous, bytes).context("memory for the objects")?;
        const PIECE: usize = 1 << 20;
        for at in (0..arena.len()).step_by(PIECE) {
            let piece = sample::values(at, PIECE.min((arena.len() - at) as usize));
            arena.write(Extent::new(at, piece.len() as u64), 0, &piece)?;
        }
        let specs = (0..u64::from(args.num_keys))
            .map(|number| {
                let mut hash = [0; 32];
                hash[..8]
                    .copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
                let key = ObjectKey::new(ChunkHash(hash), "kvtier/bench", 0x0100_0100, 0, "")?;
                Ok(ObjectSpec {
                    key,
                    len,
                    layout: sample::LAYOUT,
                })
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            specs,
            arena: Arc::new(arena),
            len,
        })
    }

    /// The extent of an object; if there are many, some share one.
    fn extent(&self, number: usize) -> Extent {
        let slot = self.len.next_multiple_of(ALIGNMENT);
        let slots = self.arena.len() / slot;
        Extent::new(number as u64 % slots * slot, self.len)
    }

    fn buffer(&self, number: usize) -> Buffer {
        Buffer::new(Arc::clone(&self.arena), self.extent(number), Arc::new(()))
    }

    /// Checksums of the objects, to compare after the loads.
    fn checksums(&self) -> anyhow::Result<Vec<u64>> {
        let checksum = |number| Ok(self.arena.checksum64(self.extent(number))?);
        (0..self.specs.len()).map(checksum).collect()
    }
}

pub(crate) fn run(args: &L2Args) -> anyhow::Result<ExitCode> {
    let registry = kvtier_config::adapters::registry();
    let config = registry
        .parse_json(&args.l2_adapter)
        .map_err(|error| anyhow::anyhow!("--l2-adapter: {error}"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let objects = Objects::new(args)?;
    let files = config.options.find::<&str>("base_path").map(str::to_owned);
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for round in 0..=args.rounds {
        if let Some(base) = &files {
            let times = plain_files(&objects, Path::new(base), &config)
                .context("the same files without an adapter")?;
            // The first round warms up.
            raw.extend((round > 0).then_some(times));
        }
        let times = runtime.block_on(adapter(&registry, &config, &objects))?;
        ours.extend((round > 0).then_some(times));
    }
    report(args, &config, &objects, &ours, &raw)?;
    Ok(ExitCode::SUCCESS)
}

/// Stores, looks up, loads and deletes all objects.
async fn adapter(
    registry: &Registry,
    config: &AdapterConfig,
    objects: &Objects,
) -> anyhow::Result<Times> {
    let adapter: Arc<dyn Adapter> = registry.open(config)?;
    // As in a server, which has recovered long before its first store ends.
    adapter.recover(&|_| true).await?;
    let number = || objects.specs.iter().cloned().enumerate();
    let keys: Vec<_> = objects.specs.iter().map(|spec| spec.key.clone()).collect();
    // Objects of an earlier run would not be stored again.
    adapter.delete(keys.clone()).await;
    let before = objects.checksums()?;

    let stores = number().map(|(number, object)| StoreItem {
        object,
        from: objects.buffer(number),
    });
    let stores = stores.collect();
    let start = Instant::now();
    for stored in adapter.store(stores).await {
        stored.context("a store failed")?;
    }
    let store = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let found = adapter.lookup(objects.specs.clone()).await?;
    let lookup = start.elapsed().as_secs_f64();
    ensure!(
        found.iter().all(Option::is_some),
        "an object that was stored is not found"
    );

    let loads = number().map(|(number, object)| LoadItem {
        object,
        to: objects.buffer(number),
    });
    let loads = loads.collect();
    let start = Instant::now();
    for loaded in adapter.load(loads).await {
        loaded.context("a load failed")?;
    }
    let load = start.elapsed().as_secs_f64();
    if objects.checksums()? != before {
        bail!("the loaded bytes differ from the stored ones");
    }
    for deleted in adapter.delete(keys).await {
        deleted.context("a delete failed")?;
    }
    adapter.close().await;
    Ok([store, lookup, load])
}

/// The minimum of any implementation: one file per object, published by a rename, with the same number of threads.
fn plain_files(objects: &Objects, base: &Path, config: &AdapterConfig) -> anyhow::Result<Times> {
    let directory = base.join(format!(".kvtier-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let times = plain_files_in(objects, &directory, config);
    std::fs::remove_dir_all(&directory)?;
    times
}

fn plain_files_in(
    objects: &Objects,
    directory: &Path,
    config: &AdapterConfig,
) -> anyhow::Result<Times> {
    let base = rustix::fs::openat(
        CWD,
        directory,
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let aligned = objects.len.is_multiple_of(ALIGNMENT);
    let direct = match config.options.find::<bool>("use_odirect") {
        Some(true) if aligned => OFlags::DIRECT,
        _ => OFlags::empty(),
    };
    let open = |name: &str, flags: OFlags| {
        rustix::fs::openat(
            &base,
            name,
            flags | direct | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )
    };
    let threads = config.options.find::<usize>("num_workers").unwrap_or(1);
    let each = |work: &(dyn Fn(usize) -> anyhow::Result<()> + Sync)| -> anyhow::Result<f64> {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|worker| {
                    scope.spawn(move || {
                        (worker..objects.specs.len())
                            .step_by(threads)
                            .try_for_each(work)
                    })
                })
                .collect();
            workers.into_iter().try_for_each(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|_| bail!("a thread of the bench panicked"))
            })
        })?;
        Ok(start.elapsed().as_secs_f64())
    };
    let store = each(&|number| {
        let temporary = format!(".tmp-{number}");
        let file = open(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        objects
            .arena
            .write_file(objects.extent(number), &[], file.as_fd(), 0)?;
        drop(file);
        rustix::fs::renameat(&base, &temporary, &base, format!("{number}.data"))?;
        Ok(())
    })?;
    let lookup = each(&|number| {
        rustix::fs::statat(&base, format!("{number}.data"), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    })?;
    let load = each(&|number| {
        let file = open(&format!("{number}.data"), OFlags::RDONLY)?;
        let extent = objects.extent(number);
        objects
            .arena
            .read_file(extent, &mut [], file.as_fd(), 0, objects.len)?;
        Ok(())
    })?;
    Ok([store, lookup, load])
}

fn report(
    args: &L2Args,
    config: &AdapterConfig,
    objects: &Objects,
    ours: &[Times],
    raw: &[Times],
) -> anyhow::Result<()> {
    let count = objects.specs.len() as f64;
    let median_of = |all: &[Times], step: usize| {
        let times = all.iter().map(|times| times[step]);
        median(times.collect()).unwrap_or(f64::NAN) * 1e6 / count
    };
    let mut table = Table::new();
    table.set_header([
        "step",
        "us per object",
        "GB/s",
        "plain files, us",
        "of their speed",
    ]);
    let mut rows = Vec::new();
    for (number, step) in ["store", "lookup", "load"].into_iter().enumerate() {
        let us = median_of(ours, number);
        let bytes = objects.len as f64 * count;
        let rate = (step != "lookup").then(|| bytes / (us * count * 1e3));
        let plain = (!raw.is_empty()).then(|| median_of(raw, number));
        table.add_row([
            step.to_owned(),
            format!("{us:.2}"),
            rate.map_or_else(String::new, |rate| format!("{rate:.2}")),
            plain.map_or_else(String::new, |plain| format!("{plain:.2}")),
            plain.map_or_else(String::new, |plain| format!("{:.0} %", 100.0 * plain / us)),
        ]);
        rows.push(json!({ "step": step, "us_per_object": us, "gb_per_second": rate, "plain_us_per_object": plain }));
    }
    let mut out = crate::cli::out::stdout();
    writeln!(
        out,
        "{} objects of {} KiB, type {:?}, medians of {} rounds",
        objects.specs.len(),
        args.data_size_kb,
        config.kind,
        args.rounds
    )?;
    writeln!(out, "{table}")?;
    if let Some(path) = &args.json {
        // As it was given, but for its secrets.
        let adapter = serde_json::from_str(&args.l2_adapter).unwrap_or_default();
        let adapter = kvtier_l2::redact::value(&adapter).to_string();
        let report = json!({
            "adapter": adapter, "objects": objects.specs.len(), "bytes": objects.len, "rounds": args.rounds,
            "steps": rows,
        });
        std::fs::write(path, format!("{report:#}\n"))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
