//! LMCache's types that keep objects by NIXL, as directories of [`FsAdapter`](super::FsAdapter).
//!
//! | type | names | exchanged with LMCache |
//! | --- | --- | --- |
//! | `nixl_store_dynamic` | [`Naming::Nixl`](super::Naming) | yes |
//! | `nixl_native` | those of `fs` | yes |
//! | `nixl_store` | those of `fs` | no: its files are slots, and only the memory of its server knows what is in which |

use std::collections::BTreeMap;

use serde_json::Value;

use super::options::{FS, MAX_CAPACITY_GB};
use kvtier_l2::{
    AdapterType, ConfigError,
    config::{ALLOWED_PATH, GIB, Key, Options, Shape, is_path},
    registry::{Translated, Translation},
};

/// Backends of NIXL that keep objects in files.
const FILE_BACKENDS: &[&str] = &["GDS", "GDS_MT", "HF3FS", "IBM_SCALE", "POSIX"];

/// Backends that keep them in buckets.
const BUCKET_BACKENDS: &[&str] = &["OBJ", "AZURE_BLOB"];

/// Default of `file_size`: LMCache's alignment of memory.
const FILE_SIZE: u64 = 4096;

const BACKEND: Key = Key::text(
    "backend",
    "Backend of NIXL, one that keeps objects in files: GDS, GDS_MT, HF3FS, IBM_SCALE or POSIX",
)
.required();

const DYNAMIC_KEYS: &[Key] = &[
    BACKEND,
    Key::of(
        "backend_params",
        Shape::Params,
        "file_path (the directory), use_direct_io, shard_dirs (files in directories by the hash of their chunk) and \
         max_capacity_gb; other parameters are passed to the backend",
    )
    .required(),
];

const STORE_KEYS: &[Key] = &[
    BACKEND,
    Key::of(
        "backend_params",
        Shape::Params,
        "file_path (the directory), use_direct_io and file_size; other parameters are passed to the backend",
    )
    .required(),
    Key::integer(
        "pool_size",
        1,
        1 << 40,
        "Files of file_size bytes (4096 if unset) whose sum is the capacity",
    )
    .required(),
];

const NATIVE_KEYS: &[Key] = &[
    BACKEND,
    Key::of(
        "backend_params",
        Shape::Params,
        "file_path (the directory), use_direct_io and shard_dirs; other parameters are passed to the backend",
    )
    .required(),
    MAX_CAPACITY_GB,
];

/// LMCache's `nixl_store_dynamic`.
pub const NIXL_STORE_DYNAMIC: AdapterType = FS
    .named(
        "nixl_store_dynamic",
        "A directory that LMCache's type of this name reads and writes too",
    )
    .translating(Translation {
        keys: DYNAMIC_KEYS,
        hidden: &[
            "base_path",
            "use_odirect",
            "layout",
            "names",
            "max_capacity_gb",
            "nixl_backend",
            "nixl_params",
        ],
        translate: |options| {
            let mut params = Params::of(options)?;
            params.set("names", "nixl");
            params.directory()?;
            params.layout()?;
            params.capacity()?;
            Ok(params.end())
        },
    });

/// LMCache's `nixl_native`.
pub const NIXL_NATIVE: AdapterType = FS
    .named(
        "nixl_native",
        "LMCache's type of this name; the files are those of fs",
    )
    .translating(Translation {
        keys: NATIVE_KEYS,
        hidden: &[
            "base_path",
            "use_odirect",
            "layout",
            "names",
            "align_bytes",
            "max_capacity_gb",
            "nixl_backend",
            "nixl_params",
        ],
        translate: |options| {
            let mut params = Params::of(options)?;
            params.set("max_capacity_gb", options.get::<f64>("max_capacity_gb"));
            params.directory()?;
            params.layout()?;
            Ok(params.end())
        },
    });

/// LMCache's `nixl_store`.
pub const NIXL_STORE: AdapterType = FS
    .named(
        "nixl_store",
        "LMCache's type of this name, whose files kvtier cannot read; here they are those of fs",
    )
    .translating(Translation {
        keys: STORE_KEYS,
        hidden: &[
            "base_path",
            "use_odirect",
            "names",
            "align_bytes",
            "max_capacity_gb",
            "nixl_backend",
            "nixl_params",
        ],
        translate: |options| {
            let mut params = Params::of(options)?;
            params.directory()?;
            params.pool()?;
            params.warn(
                "objects are kept as files of fs and are not exchanged with LMCache: its files are numbered slots, \
                 and only its server's memory has which object is in which",
            );
            Ok(params.end())
        },
    });

/// Parameters that are being translated.
struct Params<'a> {
    options: &'a Options,
    /// Parameters that nothing has read yet.
    left: BTreeMap<&'a str, &'a str>,
    translated: Translated,
}

impl<'a> Params<'a> {
    fn of(options: &'a Options) -> Result<Self, ConfigError> {
        let backend = options.get::<&str>("backend");
        if BUCKET_BACKENDS.contains(&backend) {
            let allowed = "a backend of files such as POSIX, or use type \"s3\" for a bucket";
            return Err(options.refuse("backend", allowed));
        }
        if !FILE_BACKENDS.contains(&backend) {
            let allowed = kvtier_l2::config::one_of(FILE_BACKENDS);
            return Err(options.refuse("backend", &allowed));
        }
        let params: &BTreeMap<String, String> = options.get("backend_params");
        let left = params.iter().map(|(name, value)| (&**name, &**value));
        Ok(Self {
            options,
            left: left.collect(),
            translated: Translated::default(),
        })
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.translated.values.insert(key.into(), value.into());
    }

    fn warn(&mut self, line: impl Into<String>) {
        self.translated.warnings.push(line.into());
    }

    /// Reads one of the parameters, `None` if it is unset. `allowed` follows the word "give".
    fn take<T>(
        &mut self,
        name: &str,
        allowed: &str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.left.remove(name) else {
            return Ok(None);
        };
        let refused = || {
            let allowed = format!("{allowed} as its {name:?}");
            self.options.refuse("backend_params", &allowed)
        };
        read(value).map(Some).ok_or_else(refused)
    }

    fn take_switch(&mut self, name: &str) -> Result<bool, ConfigError> {
        // As LMCache reads it, which takes everything else as false.
        let read = |value: &str| match value.to_lowercase().as_str() {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        };
        Ok(self.take(name, "true or false", read)?.unwrap_or_default())
    }

    fn directory(&mut self) -> Result<(), ConfigError> {
        let path = self.take("file_path", "a path", |path| {
            (!path.is_empty()).then_some(path)
        })?;
        let refused = |allowed: &str| {
            let allowed = format!("{allowed} as its \"file_path\"");
            Err(self.options.refuse("backend_params", &allowed))
        };
        match path {
            None => return refused("a directory"),
            Some(path) if !is_path(path) => return refused(ALLOWED_PATH),
            Some(path) => self.set("base_path", path),
        }
        let is_direct = self.take_switch("use_direct_io")?;
        self.set("use_odirect", is_direct);
        Ok(())
    }

    fn layout(&mut self) -> Result<(), ConfigError> {
        let layout = if self.take_switch("shard_dirs")? {
            "sharded"
        } else {
            "flat"
        };
        self.set("layout", layout);
        Ok(())
    }

    fn capacity(&mut self) -> Result<(), ConfigError> {
        let read = |value: &str| value.parse().ok().filter(|gib| *gib >= 0.000_004);
        let gib: Option<f64> = self.take("max_capacity_gb", "a number from 0.000004 on", read)?;
        if let Some(gib) = gib.filter(|gib| gib.is_finite()) {
            self.set("max_capacity_gb", gib);
        }
        Ok(())
    }

    /// Capacity of a pool of files.
    #[expect(
        clippy::cast_precision_loss,
        reason = "sizes that matter are far below 2^53"
    )]
    fn pool(&mut self) -> Result<(), ConfigError> {
        let read = |value: &str| value.parse().ok().filter(|bytes| *bytes >= FILE_SIZE);
        let allowed = "a whole number from 4096 on";
        let size = self.take("file_size", allowed, read)?.unwrap_or(FILE_SIZE);
        let bytes = size.saturating_mul(self.options.get("pool_size"));
        self.set("max_capacity_gb", bytes as f64 / GIB as f64);
        Ok(())
    }

    fn end(mut self) -> Translated {
        let left = std::mem::take(&mut self.left);
        let left: BTreeMap<_, _> = left.into_iter().collect();
        self.set("nixl_params", serde_json::json!(left));
        self.set("nixl_backend", self.options.get::<&str>("backend"));
        self.translated
    }
}
