//! Benchmark and check of copies of GPU pages; needs a GPU and no PyTorch.
//!
//! `gpu --out FILE [--driver LIBRARY] [--repeats N] [--mib N] [--dry-run]`
//!
//! Starts itself a second time as the engine, which shares its pages by IPC, and opens them as the server does. For each
//! executor, and for the choice among them (`auto`), pages of 4 KiB to 2 MiB with block ids in random order and in order
//! are stored, retrieved, and both at once: first with every byte compared, then timed. The same run measures the
//! link's own limit, plain copies between pinned memory and the GPU. Everything is a median. `--out` gets all of it as
//! JSON; stdout a table and the figures that are to be reached.
//!
//! Each row goes to stderr as it is measured.
//!
//! `--dry-run` does the same with few bytes, for a run over the fake driver; its speeds are meaningless. The exit status
//! is 0 if everything was measured and every byte was right, at any speed.

mod engine;
mod figures;
mod link;
mod pages;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvtier_device::Direction;
use kvtier_device::cuda::{CudaDevice, CudaOptions, Executor, GpuOptions, Rates, TRIED_RUNS};
use kvtier_memory::{Arena, ArenaKind};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use engine::Engine;
use figures::{figures, table};
use link::Link;
use pages::{Ids, Pages, Shape};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long L1 may take to be pinned.
const PINNING: Duration = Duration::from_secs(60);

/// What to measure.
#[derive(Debug, Clone)]
struct Settings {
    driver: Option<PathBuf>,
    /// Bytes of a page.
    pages: Vec<u64>,
    /// Bytes of a transfer, about.
    bytes: u64,
    /// Bytes of a chunk, about.
    chunk_bytes: u64,
    /// Bytes of a copy that shows what the link does.
    link_bytes: u64,
    repeats: usize,
    /// Executors that are forced one after the other, before the choice among them.
    executors: Vec<Executor>,
    dry_run: bool,
}

impl Settings {
    fn real() -> Self {
        Self {
            driver: None,
            pages: [4, 8, 16, 32, 64, 256, 2048].map(|kib| kib << 10).to_vec(),
            bytes: 256 << 20,
            chunk_bytes: 16 << 20,
            link_bytes: 256 << 20,
            repeats: 9,
            executors: Executor::ALL.to_vec(),
            dry_run: false,
        }
    }

    /// The page sizes that figures are of, and as little as can be.
    fn dry() -> Self {
        Self {
            pages: [4, 8, 64].map(|kib| kib << 10).to_vec(),
            bytes: 1 << 20,
            chunk_bytes: 128 << 10,
            link_bytes: 1 << 20,
            repeats: 3,
            dry_run: true,
            ..Self::real()
        }
    }

    fn shapes(&self) -> Vec<Shape> {
        let shape = |page: &u64| Shape::new(*page, self);
        self.pages.iter().map(shape).collect()
    }

    /// Bytes of the largest transfer.
    fn most_bytes(&self) -> u64 {
        let small = Shape::small().bytes();
        let bytes = self.shapes().into_iter().map(|shape| shape.bytes());
        bytes.fold(small, u64::max)
    }
}

/// One executor, one size of pages, one order of ids. Rates in bytes per second.
struct Measured {
    executor: String,
    page: u64,
    ids: Ids,
    store: f64,
    retrieve: f64,
    both: f64,
    /// Seconds of this process's processors for a chunk, one way.
    cpu: f64,
    json: Value,
}

impl Measured {
    /// Progress, for people.
    fn line(&self) -> String {
        format!(
            "{}, {} KiB, {} ids: store {:.2} GB/s, retrieve {:.2}, both {:.2}",
            self.executor,
            self.page >> 10,
            self.ids.name(),
            self.store / 1e9,
            self.retrieve / 1e9,
            self.both / 1e9,
        )
    }
}

/// Returns the value in the middle of an odd number of values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Seconds that all threads of this process have had processors for.
fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A device with an arena of its own, pinned, and its executor forced or chosen.
struct Rig {
    name: String,
    // Before the arena that it pins.
    device: CudaDevice,
    arena: Arc<Arena>,
}

impl Rig {
    fn new(settings: &Settings, executor: Option<Executor>) -> Result<Self> {
        let arena = Arc::new(Arena::create(
            ArenaKind::Anonymous,
            2 * settings.most_bytes(),
        )?);
        let options = CudaOptions {
            library: settings.driver.clone(),
            gpu: GpuOptions {
                executor,
                ..GpuOptions::default()
            },
        };
        Ok(Self {
            name: executor.map_or("auto", Executor::name).to_owned(),
            device: CudaDevice::find(&options, Arc::clone(&arena))?,
            arena,
        })
    }

    fn open(&self, engine: &Engine, shape: Shape, ids: Ids) -> Result<Pages> {
        let pages = Pages::open(&self.device, &self.arena, engine, shape, ids)?;
        let deadline = std::time::Instant::now() + PINNING;
        loop {
            let pinning = self.device.pinning().ok_or("nothing is pinned")?;
            if let Some(error) = pinning.error {
                return Err(format!("pinning: {error}").into());
            }
            if !pinning.is_running {
                return Ok(pages);
            }
            if std::time::Instant::now() > deadline {
                return Err(format!("pinning takes longer than {PINNING:?}").into());
            }
            std::thread::yield_now();
        }
    }

    /// Why the executor that is forced cannot be used.
    fn obstacle(&self, executor: Option<Executor>) -> Option<String> {
        let status = self.device.status();
        let profile = &status.first()?.readings.as_ref()?.profile;
        let found = |(of, why): &(Executor, String)| (Some(*of) == executor).then(|| why.clone());
        profile.obstacles.iter().find_map(found)
    }

    fn measure(
        &self,
        engine: &mut Engine,
        shape: Shape,
        ids: Ids,
        repeats: usize,
    ) -> Result<Measured> {
        let pages = self.open(engine, shape, ids)?;
        let about = |error| {
            format!(
                "{}, {} KiB, {ids:?} ids: {error}",
                self.name,
                shape.page >> 10
            )
        };
        engine.fill()?;
        pages.check().map_err(about)?;
        let (mut ways, mut both, mut cpu) = ([Vec::new(), Vec::new()], Vec::new(), Vec::new());
        for _ in 0..repeats {
            let before = processor_seconds();
            ways[0].push(pages.run(Direction::Store, 0, 0)?.as_secs_f64());
            ways[1].push(pages.run(Direction::Retrieve, 1, 1)?.as_secs_f64());
            cpu.push((processor_seconds() - before) / (2 * shape.chunks) as f64);
        }
        for _ in 0..repeats {
            let began = std::time::Instant::now();
            let ended = [
                pages.begin(Direction::Store, 0, 0)?,
                pages.begin(Direction::Retrieve, 1, 1)?,
            ];
            let [store, retrieve] = [pages.end(&ended[0])?, pages.end(&ended[1])?];
            both.push((store.max(retrieve) - began).as_secs_f64());
        }
        let bytes = shape.bytes() as f64;
        Ok(Measured {
            executor: self.name.clone(),
            page: shape.page,
            ids,
            store: bytes / median(&ways[0]),
            retrieve: bytes / median(&ways[1]),
            both: 2.0 * bytes / median(&both),
            cpu: median(&cpu),
            json: json!({
                "executor": self.name, "page_bytes": shape.page, "ids": ids.name(), "layers": shape.layers,
                "chunks": shape.chunks, "bytes": shape.bytes(), "store_seconds": ways[0], "retrieve_seconds": ways[1],
                "both_seconds": both, "processor_seconds_a_chunk": cpu,
            }),
        })
    }

    /// Seconds from the last byte of a store of one chunk to its end.
    fn delays(&self, engine: &mut Engine, settings: &Settings) -> Result<Vec<f64>> {
        let shape = Shape {
            chunks: 1,
            ..Shape::new(64 << 10, settings)
        };
        let pages = self.open(engine, shape, Ids::Random)?;
        engine.fill()?;
        let delay = |_| Ok(pages.delay_of_store()?.as_secs_f64());
        // Single transfers are cheap and vary.
        (0..10 * settings.repeats + 1).map(delay).collect()
    }

    /// Seconds from the call to the end for a transfer that is one short copy: store, retrieve.
    fn short_ones(&self, engine: &mut Engine, settings: &Settings) -> Result<[Vec<f64>; 2]> {
        let pages = self.open(engine, Shape::small(), Ids::Consecutive)?;
        engine.fill()?;
        let ways = [(Direction::Store, 0), (Direction::Retrieve, 1)];
        let mut seconds = [Vec::new(), Vec::new()];
        for _ in 0..10 * settings.repeats + 1 {
            for (way, (direction, ids)) in ways.into_iter().enumerate() {
                seconds[way].push(pages.run(direction, ids, 0)?.as_secs_f64());
            }
        }
        Ok(seconds)
    }
}

fn rates_json(rates: &Rates) -> Value {
    let ways = ["store", "retrieve"].iter().zip(rates);
    let ways = ways.map(|(way, rates)| {
        let executors = Executor::ALL.iter().zip(rates);
        let executors =
            executors.map(|(executor, rates)| (executor.name().to_owned(), json!(rates)));
        (
            (*way).to_owned(),
            executors.collect::<serde_json::Map<_, _>>().into(),
        )
    });
    json!({"runs": TRIED_RUNS, "bytes_per_second": ways.collect::<serde_json::Map<String, Value>>()})
}

/// Everything, as JSON, and what is to be shown.
fn measure(settings: &Settings) -> Result<(Value, String)> {
    let link = Link::measure(settings)?;
    let mut engine = Engine::start(2 * settings.most_bytes(), settings.driver.as_deref())?;
    let (mut measured, mut skipped, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let (mut gpu, mut delays, mut short) = (Value::Null, Vec::new(), Default::default());
    let forced = settings.executors.iter().copied().map(Some);
    for executor in forced.chain([None]) {
        let rig = Rig::new(settings, executor)?;
        // Opening takes the GPU into use, which tries the executors.
        drop(rig.open(&engine, Shape::small(), Ids::Consecutive)?);
        if let Some(why) = rig.obstacle(executor) {
            skipped.push(json!({"executor": rig.name, "why": why}));
            continue;
        }
        names.push(rig.name.clone());
        for shape in settings.shapes() {
            for ids in Ids::ALL {
                let row = rig.measure(&mut engine, shape, ids, settings.repeats)?;
                eprintln!("{}", row.line());
                measured.push(row);
            }
        }
        if executor.is_none() {
            delays = rig.delays(&mut engine, settings)?;
            short = rig.short_ones(&mut engine, settings)?;
        }
        if let Some(status) = rig.device.status().first() {
            let trial = status
                .readings
                .as_ref()
                .map(|readings| rates_json(&readings.profile.rates));
            gpu = json!({
                "name": status.name, "uuid": status.uuid, "pci": status.pci_bus_id, "numa_node": status.numa_node,
                "driver": rig.device.driver_version(), "trial": trial,
            });
        }
    }
    let overhead = [0, 1].map(|way: usize| median(&short[way]) - link.small[way]);
    // A host that is late to see the last byte sees it come late; a whole short transfer is an upper bound.
    let delay = overhead.into_iter().fold(median(&delays), f64::max);
    let figures = figures(&measured, &link, delay);
    let mut text = format!(
        "{}\nlink, plain pinned copies: store {:.2} GB/s, retrieve {:.2} GB/s, both at once {:.2} GB/s\n",
        gpu["name"],
        link.store / 1e9,
        link.retrieve / 1e9,
        link.both / 1e9,
    );
    text += &table(&measured, &names);
    for each in &skipped {
        text += &format!("\nskipped: {}: {}", each["executor"], each["why"]);
    }
    text += &format!(
        "\na transfer of 64 KiB, from the call to its end, without the copy's own time: store {:.0} us, retrieve {:.0} us\
         \nfrom the last byte of a stored chunk, as the host sees it arrive, to the end: {:.0} us\n\n",
        overhead[0] * 1e6,
        overhead[1] * 1e6,
        median(&delays) * 1e6,
    );
    for figure in &figures {
        text += &figure.line();
        text.push('\n');
    }
    if settings.dry_run {
        text += "dry run: these speeds say nothing\n";
    }
    let rows: Vec<&Value> = measured.iter().map(|each| &each.json).collect();
    let json = json!({
        "dry_run": settings.dry_run,
        "gpu": gpu,
        "link": link.json(),
        "measured": rows,
        "skipped": skipped,
        "last_byte_to_end_of_store_seconds": delays,
        "short_transfer_seconds": {"store": short[0], "retrieve": short[1]},
        "short_transfer_overhead_seconds": overhead,
        "figures": figures.iter().map(figures::Figure::json).collect::<Vec<_>>(),
    });
    Ok((json, text))
}

fn settings_and_file(args: &[String]) -> Result<(Settings, PathBuf)> {
    let mut settings = if args.iter().any(|arg| arg == "--dry-run") {
        Settings::dry()
    } else {
        Settings::real()
    };
    let mut out = None;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg}: a value is needed"));
        match arg.as_str() {
            "--dry-run" => {}
            "--out" => out = Some(PathBuf::from(value()?)),
            "--driver" => settings.driver = Some(PathBuf::from(value()?)),
            "--repeats" => settings.repeats = value()?.parse::<usize>()?.max(1),
            "--mib" => settings.bytes = value()?.parse::<u64>()?.clamp(1, 1 << 16) << 20,
            _ => {
                let all = "--out FILE, --driver LIBRARY, --repeats N, --mib N, --dry-run";
                return Err(format!("{arg:?}; allowed: {all}").into());
            }
        }
    }
    Ok((settings, out.ok_or("--out FILE is needed")?))
}

fn main() -> Result<()> {
    if let Ok(engine) = std::env::var(engine::VARIABLE) {
        return engine::run(&engine);
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (settings, out) = settings_and_file(&args)?;
    let (json, text) = measure(&settings)?;
    std::fs::write(out, serde_json::to_vec_pretty(&json)?)?;
    print!("{text}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "the other process of the test here"]
    fn engine() {
        engine::run(&std::env::var(engine::VARIABLE).unwrap()).unwrap();
    }

    #[test]
    fn dry_run_checks_every_byte_and_figure() {
        let settings = Settings {
            driver: Some(kvtier_cuda_fake::fake_driver_path().unwrap()),
            // Each activates the GPU again, with a trial of all executors.
            executors: vec![Executor::Staged],
            ..Settings::dry()
        };
        let (json, text) = measure(&settings).unwrap();
        assert_eq!(json["skipped"], json!([]));
        // One executor and the choice among all, three sizes, two orders.
        assert_eq!(json["measured"].as_array().unwrap().len(), 2 * 3 * 2);
        let figures = json["figures"].as_array().unwrap();
        assert_eq!(figures.len(), 4);
        for figure in figures {
            // What was not measured is not a number, which JSON has no word for.
            assert!(figure["value"].as_f64().is_some(), "{figure}");
        }
        assert!(text.contains("dry run"), "{text}");
    }
}
