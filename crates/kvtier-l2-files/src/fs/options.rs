//! Options of the file system adapters.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::FsAdapter;
use super::names::Layout;
use super::naming::Naming;
use crate::io::choice::IoEngine;
use crate::io::nixl::NixlOptions;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, L2Error, Registry,
    config::{ALLOWED_PATH, Fallback, Interval, Key, Options, Shape, is_path},
};

/// Default of LMCache's `--l1-align-bytes`.
const ALIGN_BYTES: u64 = 4096;

/// Durability of stores on a loss of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fsync {
    /// None beyond what the system has written. Incomplete files are detected by their checksums.
    #[default]
    Never,
    /// The bytes of each named file.
    File,
    /// Each object whose store was answered.
    FileAndDir,
}

/// Options of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsOptions {
    /// The directory, which is created if it is missing.
    pub base_path: PathBuf,
    /// Directory of temporary files relative to `base_path`; empty is `base_path` itself.
    pub relative_tmp_dir: String,
    /// Bytes to read ahead when a file is opened.
    pub read_ahead_size: Option<u64>,
    /// Direct I/O.
    pub use_odirect: bool,
    /// Threads, at least 1; one more is for reads only.
    pub num_workers: usize,
    /// Layout of the directory.
    pub layout: Layout,
    /// Names that are written.
    pub names: Naming,
    /// Alignment of objects in memory of the LMCache servers that read files of [`Naming::Nixl`].
    pub align_bytes: u64,
    /// Durability of stores on a loss of power.
    pub fsync: Fsync,
    /// I/O engine.
    pub io_engine: IoEngine,
    /// NIXL, with [`IoEngine::Nixl`].
    pub nixl: NixlOptions,
    /// Files without a checksum are misses.
    pub require_checksum: bool,
    /// Files without a layout are loaded for page-bound objects too.
    pub trust_missing_layout: bool,
    /// Nothing is written.
    pub read_only: bool,
}

impl FsOptions {
    /// Returns the defaults for this directory.
    pub fn new(base_path: impl Into<PathBuf>) -> Self {
        Self {
            base_path: base_path.into(),
            relative_tmp_dir: String::new(),
            read_ahead_size: None,
            use_odirect: false,
            num_workers: 4,
            layout: Layout::Flat,
            names: Naming::Grouped,
            align_bytes: ALIGN_BYTES,
            fsync: Fsync::Never,
            io_engine: IoEngine::Auto,
            nixl: NixlOptions::default(),
            require_checksum: false,
            trust_missing_layout: false,
            read_only: false,
        }
    }

    /// What the bytes of an object are padded to: such readers load whole pages of their memory.
    pub(super) fn padding(&self) -> u64 {
        match self.names {
            Naming::Nixl => self.align_bytes.max(1),
            Naming::Grouped | Naming::Ungrouped => 1,
        }
    }

    pub(super) fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        Self {
            base_path: options.get::<&str>("base_path").into(),
            relative_tmp_dir: options.get("relative_tmp_dir"),
            read_ahead_size: options.find("read_ahead_size"),
            use_odirect: options.get("use_odirect"),
            num_workers: options.get("num_workers"),
            layout: match options.get("layout") {
                "sharded" => Layout::Sharded,
                _ => Layout::Flat,
            },
            names: match options.get("names") {
                "0.4" => Naming::Ungrouped,
                "nixl" => Naming::Nixl,
                _ => Naming::Grouped,
            },
            align_bytes: options.get("align_bytes"),
            fsync: match options.get("fsync") {
                "file" => Fsync::File,
                "file+dir" => Fsync::FileAndDir,
                _ => Fsync::Never,
            },
            io_engine: IoEngine::of(options.get("io_engine")),
            nixl: NixlOptions {
                library: options.find::<&str>("nixl_library").map(Into::into),
                backend: options.get("nixl_backend"),
                params: options.get::<&BTreeMap<_, _>>("nixl_params").clone(),
            },
            require_checksum: config.guards.require_checksum,
            trust_missing_layout: options.get("trust_missing_layout"),
            read_only: options.get("read_only"),
        }
    }
}

/// Key `max_capacity_gb`.
pub(super) const MAX_CAPACITY_GB: Key = Key::number(
    "max_capacity_gb",
    Interval::from(0.0),
    "Capacity for objects; 0 is bounded by the disk only",
)
.unit("GiB")
.or(Fallback::Number(0.0));

const KEYS: &[Key] = &[
    Key::path("base_path", "The directory; it is created if it is missing").required(),
    Key::of(
        "relative_tmp_dir",
        Shape::AnyText,
        "Directory of temporary files, below base_path; empty is base_path itself",
    )
    .or(Fallback::Text("")),
    Key::integer(
        "read_ahead_size",
        1,
        i64::MAX,
        "Bytes to read ahead when a file is opened; unset is the default of the system",
    )
    .unit("bytes"),
    Key::switch(
        "use_odirect",
        "Direct I/O past the page cache; files for which that is not possible use it",
    ),
    Key::integer("num_workers", 1, 1024, "Threads of the file I/O; one more is for reads only")
        .or(Fallback::Integer(4)),
    MAX_CAPACITY_GB,
    Key::of(
        "layout",
        Shape::OneOf(&["flat", "sharded"]),
        "One directory, where LMCache looks for files (flat), or 65536 below it, for tens of millions of files; both are read",
    )
    .or(Fallback::Text("flat")),
    Key::of(
        "names",
        Shape::OneOf(&["auto", "0.5", "0.4", "nixl"]),
        "Names of written files: those of LMCache 0.5 (auto), of 0.4, or of its type nixl_store_dynamic (nixl). Names of 0.4 and 0.5 are \
         both read; with nixl its own only",
    )
    .or(Fallback::Text("auto")),
    Key::integer(
        "align_bytes",
        64,
        2 << 20,
        "With names nixl: unit that lengths of files are padded to, a power of two: the --l1-align-bytes of the LMCache servers \
         that use the directory",
    )
    .unit("bytes")
    .or(Fallback::Integer(ALIGN_BYTES as i64)),
    Key::of(
        "fsync",
        Shape::OneOf(&["never", "file", "file+dir"]),
        "What a store waits for: nothing, its file, or its file and directory on the disk. Incomplete files are detected by their checksums",
    )
    .or(Fallback::Text("never")),
    Key::switch(
        "trust_missing_layout",
        "Load files without a layout, such as those of LMCache, also if pages of the model depend on block size, processor or release of \
         the engine (all of CPU engines). Only if all engines that write there agree in these",
    ),
    Key::switch(
        "read_only",
        "Only load from an existing directory: nothing is stored, deleted, quarantined or evicted",
    ),
    Key::of(
        "io_engine",
        Shape::OneOf(&["auto", "posix", "io_uring", "nixl"]),
        "How bytes are moved: by one POSIX call per thread at a time, by io_uring with several operations in flight per thread, or by NIXL, \
         one transfer per thread. auto is io_uring with use_odirect if the system allows it, else posix",
    )
    .or(Fallback::Text("auto")),
    Key::path(
        "nixl_library",
        "With io_engine nixl: libnixl_capi.so, or the site-packages directory of nixl-cu12 or nixl-cu13; unset is where it is installed",
    ),
    Key::text(
        "nixl_backend",
        "With io_engine nixl: the backend, one that keeps objects in files",
    )
    .or(Fallback::Text("POSIX")),
    Key::of(
        "nixl_params",
        Shape::Params,
        "With io_engine nixl: parameters of the backend, such as use_uring of POSIX",
    ),
];

fn check(options: &Options) -> Result<(), ConfigError> {
    let inside = options.get::<&str>("relative_tmp_dir");
    if !inside.is_empty() && !is_path(inside) {
        return Err(options.refuse("relative_tmp_dir", ALLOWED_PATH));
    }
    if !options.get::<u64>("align_bytes").is_power_of_two() {
        return Err(options.refuse("align_bytes", "a power of two"));
    }
    if options.get::<f64>("max_capacity_gb") > 0.0 && options.gib("max_capacity_gb") < 4096 {
        let allowed = "0 for no bound, or at least 0.000004 (4 KiB)";
        return Err(options.refuse("max_capacity_gb", allowed));
    }
    let is_inside = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    if Path::new(inside).components().all(is_inside) {
        Ok(())
    } else {
        Err(options.refuse("relative_tmp_dir", "a relative path without .."))
    }
}

fn ineffective(config: &AdapterConfig, given: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    let options = &config.options;
    let is_bounded = options.get::<f64>("max_capacity_gb") > 0.0;
    let by_nixl = options.get::<&str>("io_engine") == "nixl";
    let lines = [
        (
            !config.persist_enabled,
            "persist_enabled changes nothing: files stay when the server stops",
        ),
        (
            given("checksums"),
            "checksums changes nothing: each file has a checksum of its own",
        ),
        (
            !by_nixl && given("nixl_library"),
            "nixl_library changes nothing without io_engine \"nixl\"",
        ),
        (
            !by_nixl && options.get::<&str>("nixl_backend") != "POSIX",
            "the backend of NIXL changes nothing without io_engine \"nixl\": objects are moved by system calls",
        ),
        (
            !by_nixl && !options.get::<&BTreeMap<_, _>>("nixl_params").is_empty(),
            "the parameters of NIXL's backend change nothing without io_engine \"nixl\"",
        ),
        (
            given("align_bytes") && FsOptions::of(config).padding() == 1,
            "align_bytes changes nothing without names \"nixl\": no other files are padded",
        ),
        (
            is_bounded && options.get("read_only"),
            "max_capacity_gb changes nothing with read_only: nothing is stored or evicted there",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = FsOptions::of(config);
    Ok(Arc::new(FsAdapter::open(config.kind, &options)?))
}

/// LMCache's `fs`.
pub const FS: AdapterType = AdapterType::new(
    "fs",
    "Keeps each object as a file of a directory; other servers and LMCache can use it at the same time",
    KEYS,
    open,
)
.check(check)
.ineffective(ineffective);

/// LMCache's `fs_native`.
pub const FS_NATIVE: AdapterType = FS.named("fs_native", "The same as fs");
