//! Options of a device.

use std::path::PathBuf;
use std::sync::Arc;

use super::RawBlockAdapter;
use super::format::{BLOCK, Geometry};
use crate::io::choice::IoEngine;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, L2Error, Registry,
    config::{Fallback, GIB, Interval, Key, Options, Shape, WITHOUT_EFFECT},
};

/// Part of the capacity that there is beyond it: objects of different lengths leave gaps.
const SLACK: u64 = 20;

/// Default of `slot_bytes`.
const SLOT_BYTES: u64 = 1 << 20;

/// Options of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct RawOptions {
    /// The device or file.
    pub device_path: PathBuf,
    /// Bytes for objects.
    pub capacity_bytes: u64,
    /// Capacity in GiB as it was configured.
    pub max_capacity_gb: f64,
    /// Capacity per record.
    pub slot_bytes: u64,
    /// Past the page cache.
    pub use_odirect: bool,
    /// Threads, at least 1; one more is for reads only.
    pub num_workers: usize,
    /// I/O engine.
    pub io_engine: IoEngine,
    /// Whether a store is answered only when it survives a loss of power.
    pub fsync: bool,
    /// Whether a device that holds something else is formatted.
    pub force: bool,
}

impl RawOptions {
    /// Returns the defaults for a device and a capacity.
    pub fn new(device_path: impl Into<PathBuf>, capacity_bytes: u64) -> Self {
        Self {
            device_path: device_path.into(),
            capacity_bytes,
            #[expect(clippy::cast_precision_loss, reason = "for messages")]
            max_capacity_gb: capacity_bytes as f64 / GIB as f64,
            slot_bytes: SLOT_BYTES,
            use_odirect: true,
            num_workers: 4,
            io_engine: IoEngine::Auto,
            fsync: false,
            force: false,
        }
    }

    fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        Self {
            device_path: options.get::<&str>("device_path").into(),
            capacity_bytes: options.gib("max_capacity_gb"),
            max_capacity_gb: options.get("max_capacity_gb"),
            slot_bytes: options.get("slot_bytes"),
            use_odirect: options.get("use_odirect"),
            num_workers: options.get("num_workers"),
            io_engine: IoEngine::of(options.get("io_engine")),
            fsync: options.get("fsync"),
            force: options.get("force"),
        }
    }

    /// The geometry that these options ask for.
    pub(super) fn geometry(&self) -> Geometry {
        let capacity = self.capacity_bytes.next_multiple_of(BLOCK);
        let slack = (capacity / SLACK).next_multiple_of(BLOCK);
        Geometry {
            records: capacity.div_ceil(self.slot_bytes).max(1),
            data_bytes: capacity + slack,
        }
    }

    /// The largest `max_capacity_gb` that a device of `bytes` bytes has space for.
    #[expect(clippy::cast_precision_loss, reason = "for a message")]
    pub(super) fn largest_capacity(&self, bytes: u64) -> f64 {
        let (mut low, mut high) = (0, bytes);
        while low + BLOCK < high {
            let middle = low + (high - low) / 2;
            let smaller = Self {
                capacity_bytes: middle,
                ..self.clone()
            };
            if smaller.geometry().bytes() <= bytes {
                low = middle
            } else {
                high = middle
            }
        }
        // Rounded down to what is printed.
        (low as f64 / GIB as f64 * 1e3).floor() / 1e3
    }
}

const KEYS: &[Key] = &[
    Key::path(
        "device_path",
        "A partition or another block device, or a file, which is created if it is missing",
    )
    .required(),
    Key::number(
        "max_capacity_gb",
        Interval::above(0.0),
        "Capacity for objects; the device has to have a twentieth more, and 4 KiB per slot_bytes of it",
    )
    .unit("GiB")
    .required(),
    Key::integer(
        "slot_bytes",
        BLOCK as i64,
        1 << 40,
        "Length of the smaller objects: the table has one record, so space for one object, per slot_bytes of the capacity",
    )
    .unit("bytes")
    .or(Fallback::Integer(SLOT_BYTES as i64)),
    Key::switch("use_odirect", "Direct I/O past the page cache").or(Fallback::Switch(true)),
    Key::integer("num_workers", 1, 1024, "Threads of the I/O; one more is for reads only")
        .or(Fallback::Integer(4)),
    Key::of(
        "io_engine",
        Shape::OneOf(&["auto", "posix", "io_uring"]),
        "How bytes are moved: by one POSIX call per thread at a time, or by io_uring with several operations in flight per \
         thread. auto is io_uring with use_odirect if the system allows it, else posix",
    )
    .or(Fallback::Text("auto")),
    Key::switch(
        "fsync",
        "Answer a store only when it survives a loss of power; without it, incomplete objects are detected by their checksums",
    ),
    Key::switch(
        "force",
        "Format a device that holds something else or was formatted with another capacity, and lose what is there. Remove the key afterwards",
    ),
    Key::integer("block_align", 1, i64::MAX, WITHOUT_EFFECT),
    Key::integer("capacity_bytes", 0, i64::MAX, WITHOUT_EFFECT),
    Key::switch("enable_zero_copy", WITHOUT_EFFECT),
    Key::integer("header_bytes", 1, i64::MAX, WITHOUT_EFFECT),
    Key::integer("iouring_queue_depth", 1, i64::MAX, WITHOUT_EFFECT),
    Key::switch("load_checkpoint_on_init", WITHOUT_EFFECT),
    Key::number("meta_checkpoint_interval_sec", Interval::from(0.0), WITHOUT_EFFECT),
    Key::switch("meta_enable_periodic", WITHOUT_EFFECT),
    Key::number("meta_idle_quiet_ms", Interval::from(0.0), WITHOUT_EFFECT),
    Key::text("meta_magic", WITHOUT_EFFECT),
    Key::integer("meta_total_bytes", 1, i64::MAX, WITHOUT_EFFECT),
    Key::switch("meta_verify_on_load", WITHOUT_EFFECT),
    Key::integer("meta_version", 0, i64::MAX, WITHOUT_EFFECT),
    Key::integer("num_load_workers", 1, i64::MAX, WITHOUT_EFFECT),
    Key::integer("num_lookup_workers", 1, i64::MAX, WITHOUT_EFFECT),
    Key::integer("num_store_workers", 1, i64::MAX, WITHOUT_EFFECT),
];

fn check(options: &Options) -> Result<(), ConfigError> {
    let capacity = options.gib("max_capacity_gb");
    if !(BLOCK..=1 << 60).contains(&capacity) {
        let allowed = "a number from 0.000004 (4 KiB) to 1073741824 (1 EiB)";
        return Err(options.refuse("max_capacity_gb", allowed));
    }
    Ok(())
}

fn ineffective(config: &AdapterConfig, given: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    let is_peers = |key: &&Key| key.help == WITHOUT_EFFECT;
    let lines = [
        (
            KEYS.iter().filter(is_peers).any(|key| given(key.name)),
            "keys of LMCache's format and threads change nothing: the format is kvtier's own",
        ),
        (
            given("checksums"),
            "checksums changes nothing: each object has a checksum of its own",
        ),
        (
            !config.persist_enabled,
            "persist_enabled changes nothing: objects stay when the server stops",
        ),
        (
            config.options.get("force"),
            "force is set: a device that holds something else is overwritten at each start",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    Ok(Arc::new(RawBlockAdapter::open(&RawOptions::of(config))?))
}

/// LMCache's name, and a format of kvtier's own.
pub const RAW_BLOCK: AdapterType = AdapterType::new(
    "raw_block",
    "Keeps objects on a block device or in one large file, without a file system",
    KEYS,
    open,
)
.check(check)
.ineffective(ineffective);
