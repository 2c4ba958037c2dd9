//! The pages under `docs/` against the program they are about.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvtier_core::cache::{KeyOutcome, Page, SaltUsage, Stats};
use kvtier_device::Direction;
use kvtier_device::cuda::{Executor, GpuReadings, Moved, Profile};
use kvtier_server::metrics::TenantSource;
use kvtier_server::metrics::{
    GpuFigures, GuardReadings, Metrics, PrefetchPhase, Readings, SerdeReadings, SpanLoss, TierCall,
    TierReadings,
};

pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

pub(crate) fn page(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every page for users and developers.
fn pages() -> Vec<String> {
    let mut pages = vec![
        "README.md".to_owned(),
        "ARCHITECTURE.md".into(),
        "CONTRIBUTING.md".into(),
        "CHANGELOG.md".into(),
    ];
    pages.extend(book().iter().map(|name| format!("docs/{name}")));
    pages
}

/// The files of the book, without its pictures.
pub(crate) fn book() -> Vec<String> {
    let folder = std::fs::read_dir(root().join("docs")).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".md")).collect()
}

/// Metrics in which every counter has counted something: a family appears with its first series.
fn all_counted() -> Metrics {
    let metrics = Metrics::new();
    let model: Arc<str> = "m".into();
    metrics.lookup(&model, "s", 1, 1, 1);
    metrics.early_exit(&model, "s", "empty_chunk_hashes");
    metrics.missed("evicted", "space", "l1", 1);
    metrics.admitted("s", 1);
    let refused = [
        KeyOutcome::NoMemory,
        KeyOutcome::OverQuota,
        KeyOutcome::OverStaging,
    ];
    metrics.reserved("l1_store", "m", "s", &refused);
    metrics.not_found("l1_retrieve", "m", 1);
    metrics.prefetched("m", "s", 1, 1);
    metrics.loaded("m", "s", 0, 1);
    for finished in [false, true] {
        metrics.store("cpu", finished);
        metrics.retrieve("cpu", finished);
    }
    metrics.answered("ping", Duration::from_micros(1));
    metrics.refused("store", "bad_key");
    metrics.session_action("release");
    metrics.session_objects("release", 1);
    metrics.spans_lost(SpanLoss::Rejected, 1);
    metrics.span(
        "request",
        Duration::from_micros(1),
        SystemTime::UNIX_EPOCH,
        String::new(),
    );
    let (tier, took) = (Arc::from("fs-0"), Duration::from_micros(1));
    metrics.l2.asked("s", 1);
    for call in TierCall::ALL {
        metrics.l2.began(call, "s", 1);
        metrics.l2.ended(call, &tier, "s", 1, 1, took);
        metrics.l2.took(call, &tier, took);
    }
    metrics.l2.evicted("s", 1);
    metrics.l2.not_loaded("m", "l1_oom", 1);
    metrics.l2.lookup_timed_out(PrefetchPhase::Queue);
    drop(metrics.tenants.read(1, &[&NoTenants]));
    metrics
}

/// A tier without tenants, which still has series for all of them together.
struct NoTenants;

impl TenantSource for NoTenants {
    fn name(&self) -> &str {
        "l1"
    }

    fn tenants(&self, _: u32, _: usize) -> Page<SaltUsage> {
        Page {
            entries: Vec::new(),
            next: None,
        }
    }

    fn stats_with(&self, _: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        (Stats::default(), Vec::new())
    }
}

/// Readings of a server with a tier that has failed in some way.
fn readings() -> Readings {
    let tier = TierReadings {
        name: "fs-0".into(),
        store_failures: vec![("full", 1)],
        load_failures: vec![("corrupt", 1)],
        guards: vec![GuardReadings::default()],
        serdes: vec![SerdeReadings::default()],
        ..TierReadings::default()
    };
    let moved = Moved {
        pieces: 1,
        ..Moved::default()
    };
    let gpu = GpuFigures {
        gpu: "0".into(),
        healthy: true,
        readings: Some(GpuReadings {
            moved: vec![(Direction::Store, Executor::Kernel, moved)],
            runs: Default::default(),
            in_flight: [0; 2],
            event_timeouts: 0,
            profile: Profile::default(),
            broken: None,
            open_allocations: 0,
        }),
    };
    Readings {
        tiers: vec![tier],
        gpus: vec![gpu],
        ..Readings::default()
    }
}

/// Names of series, without a histogram's endings, and their labels.
fn series(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let name = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| {
                name.strip_suffix(end)
                    .filter(|name| name.ends_with("_seconds") || name.ends_with("_per_second"))
            })
            .unwrap_or(name);
        let labels = line
            .split_once('{')
            .map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
        let labels = labels
            .split("\",")
            .filter_map(|label| label.split_once('='))
            .map(|(name, _)| name.to_owned());
        found
            .entry(name.to_owned())
            .or_default()
            .extend(labels.filter(|label| label != "le"));
    }
    found
}

#[test]
fn metrics_page_has_every_series() {
    let text = all_counted().encode(&readings());
    let page = page("docs/metrics.md");
    let rows: BTreeMap<_, _> = page
        .lines()
        .filter(|line| line.starts_with("| `lmcache_mp_") || line.starts_with("| `kvtier_"))
        .map(|line| {
            let cells: Vec<_> = line["| `".len()..].split(" | ").collect();
            let name = cells[0].trim_end_matches('`').to_owned();
            (name, (cells[1], cells[2]))
        })
        .collect();
    let series = series(&text);
    for (name, labels) in &series {
        let (kind, documented) = rows
            .get(name)
            .unwrap_or_else(|| panic!("{name} is not in docs/metrics.md"));
        let documented: BTreeSet<_> = documented
            .split(", ")
            .filter_map(|label| label.strip_prefix('`')?.strip_suffix('`'))
            .map(str::to_owned)
            .collect();
        assert_eq!(&documented, labels, "labels of {name}");
        let family = name.strip_suffix("_total").unwrap_or(name);
        assert!(
            text.contains(&format!("# TYPE {family} {kind}\n")),
            "{name} is no {kind}"
        );
    }
    let unknown: Vec<_> = rows
        .keys()
        .filter(|name| !series.contains_key(*name))
        .collect();
    assert!(
        unknown.is_empty(),
        "docs/metrics.md has what does not exist: {unknown:?}"
    );
    // A family that the list above forgets to count would not be missed; its registration is.
    let folder = root().join("crates/kvtier-observe/src/metrics");
    let is_name = |text: &str| {
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let mut registered = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let source = std::fs::read_to_string(file.unwrap().path()).unwrap();
        // A row of `metrics!`, one of `figures!`, a registration by hand.
        let marks = [
            " = lmcache.",
            " = own.",
            "\n        l2_",
            ".add(\"",
            ".add(\n",
        ];
        for row in marks
            .into_iter()
            .flat_map(|mark| source.split(mark).skip(1))
        {
            let row = row.trim_start().trim_start_matches('"');
            let Some((name, _)) = row
                .split_once([',', ':', '"'])
                .filter(|(name, _)| is_name(name))
            else {
                continue;
            };
            assert!(
                page.contains(&format!("_{name}")),
                "{name} is registered and not in docs/metrics.md"
            );
            registered += 1;
        }
    }
    assert!(registered > 130, "{registered} registrations were found");
}

// proves: docs/compare.md#http
#[test]
fn the_http_page_has_every_route() {
    let page = page("docs/http.md");
    let mut headings = BTreeSet::new();
    for (path, item) in kvtier_server::http::openapi().paths.paths {
        for (method, operation) in [
            ("GET", item.get),
            ("POST", item.post),
            ("PUT", item.put),
            ("DELETE", item.delete),
        ] {
            if operation.is_some() {
                headings.insert(format!("## `{method} {path}`"));
            }
        }
    }
    let documented = page.lines().filter(|line| line.starts_with("## "));
    let documented: BTreeSet<_> = documented.map(str::to_owned).collect();
    assert_eq!(documented, headings);
}

#[test]
fn pages_name_no_tests() {
    let mut named = Vec::new();
    for name in pages() {
        for span in code_spans(&page(&name)) {
            let is_test = span
                .split_once("::")
                .is_some_and(|(path, _)| path.contains('/'));
            if is_test {
                named.push(format!("{name} names {span}"));
            }
        }
    }
    assert!(named.is_empty(), "a test says what it proves: {named:#?}");
}

#[test]
fn the_book_has_every_page_once() {
    let contents = page("docs/SUMMARY.md");
    let linked = contents.split("](").skip(1);
    let mut linked: Vec<_> = linked.map(|link| link.split(')').next().unwrap()).collect();
    linked.retain(|target| !target.is_empty());
    linked.sort_unstable();
    let mut there = book();
    there.retain(|name| name != "SUMMARY.md");
    there.sort_unstable();
    assert_eq!(there, linked);
    assert!(page("book.toml").contains("\nsrc = \"docs\"\n"));
}

#[test]
fn links_between_pages_lead_somewhere() {
    for name in pages() {
        let folder = Path::new(&name).parent().unwrap().to_owned();
        for link in page(&name).split("](").skip(1) {
            let target = link.split([')', '#']).next().unwrap();
            if target.is_empty() || target.starts_with("http") {
                continue;
            }
            assert!(
                root().join(&folder).join(target).exists(),
                "{name} links to {target}, which is not there"
            );
        }
    }
}

/// Texts of a page in code spans, outside of blocks.
fn code_spans(page: &str) -> Vec<String> {
    let outside = page.split("\n```").step_by(2);
    outside
        .flat_map(|text| text.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// Flags and metrics are known from their generated or checked pages.
#[test]
fn pages_of_operation_name_what_exists() {
    let (flags, metrics) = (page("docs/flags.md"), page("docs/metrics.md"));
    // Flags of Docker.
    let foreign = ["--gpus", "--ipc", "--pid", "--health-cmd"];
    let mut checked = 0;
    for name in ["docs/operate.md", "docs/migrate.md", "docs/troubleshoot.md"] {
        for span in code_spans(&page(name)) {
            let word = span.split(' ').next().unwrap();
            if word.starts_with("--") && !foreign.contains(&word) {
                assert!(
                    flags.contains(&format!("`{word}`")),
                    "{name}: no flag {word}"
                );
                checked += 1;
            } else if word.starts_with("kvtier_") {
                assert!(
                    metrics.contains(&format!("`{word}`")),
                    "{name}: no metric {word}"
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 40, "{checked} names were checked");
}

// proves: docs/migrate.md#flags
#[test]
fn defaults_of_the_migration_page_are_true() {
    let (migrate, flags) = (page("docs/migrate.md"), page("docs/flags.md"));
    let rows: Vec<_> = migrate
        .lines()
        .filter_map(|line| line.strip_prefix("| `--"))
        .map(|row| row.split(" | ").collect::<Vec<_>>())
        .collect();
    assert!(rows.len() > 10, "{rows:?}");
    for row in rows {
        let defined = flags
            .lines()
            .find_map(|line| line.strip_prefix(&format!("| `--{} | ", row[0])))
            .unwrap_or_else(|| panic!("no flag --{}", row[0]));
        let defined = defined.split(" | ").next().unwrap().trim();
        // In words where the default is not a value.
        match row[2]
            .strip_prefix('`')
            .and_then(|cell| cell.strip_suffix('`'))
        {
            Some(default) => assert_eq!(default, defined, "default of --{}", row[0]),
            None => assert_eq!(
                "",
                defined.trim_end_matches('|').trim(),
                "default of --{}",
                row[0]
            ),
        }
    }
}

// proves: docs/migrate.md#metrics
#[test]
fn metrics_and_routes_that_migration_misses_do_not_exist() {
    let (migrate, metrics) = (page("docs/migrate.md"), page("docs/metrics.md"));
    let table = migrate.split_once("| LMCache's metric |").unwrap().1;
    let missing = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let missing: Vec<_> = missing
        .flat_map(|row| code_spans(row.split(" | ").next().unwrap()))
        .collect();
    assert!(missing.len() > 8, "{missing:?}");
    for name in missing {
        assert!(!metrics.contains(&format!("`{name}`")), "{name} is served");
    }
    let paths = kvtier_server::http::openapi().paths.paths;
    let routes = migrate
        .lines()
        .filter(|line| line.ends_with("| not there |"));
    let routes: Vec<_> = routes.flat_map(code_spans).collect();
    assert!(routes.len() > 6, "{routes:?}");
    for route in routes {
        assert!(
            !paths.keys().any(|path| path.starts_with(&route)),
            "{route} is served"
        );
    }
}
