//! Keys common to all types.

use std::time::Duration;

use kvtier_core::eviction::EvictionKind;
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::key::{Fallback, Interval, Key, Shape, refuse_rest};
use super::options::Options;
use super::transform::SerdeConfig;
use crate::wrap::Guards;

/// Longest configurable timeout: a day.
const MAX_MS: i64 = 24 * 60 * 60 * 1000;

const fn timeout(name: &'static str, default: i64, help: &'static str) -> Key {
    Key::integer(name, 1, MAX_MS, help)
        .unit("ms")
        .or(Fallback::Integer(default))
}

/// Key `max_capacity_gb` of a backend without a bound of its own.
pub const MAX_CAPACITY_GB: Key = Key::number(
    "max_capacity_gb",
    Interval::from(0.0),
    "Capacity for objects; 0 is unbounded",
)
.unit("GiB")
.or(Fallback::Number(0.0));

/// Keys common to all types.
///
/// `type` and the five after `name` are LMCache's. An adapter that wraps another one inherits those that are set only
/// inside.
pub const COMMON: &[Key] = &[
    Key::text("type", "Type of the adapter").required(),
    Key::text(
        "name",
        "Unique name of the tier in limits, metrics and listings: 1 to 64 of a-z, A-Z, 0-9, _ and -; unset is type and position, as in fs-0. \
         Limits of single tiers refer to it, so set it if adapters may be added, removed or reordered",
    ),
    Key::text(
        "affinity_tag",
        "L1 that the tier belongs to; kvtier has one, so other values only cause a warning",
    )
    .or(Fallback::Text("_default")),
    Key::switch(
        "shared",
        "Other servers store and delete there too: unknown objects are looked up in the backend",
    ),
    Key::switch(
        "persist_enabled",
        "Keep stored objects when the server stops, if the type can do otherwise",
    )
    .or(Fallback::Switch(true)),
    Key::of(
        "serde",
        Shape::Object,
        "Transformation of stored bytes, or a list of them in the order of a store: see `serde` below",
    ),
    Key::of(
        "eviction",
        Shape::Object,
        "Eviction ahead of demand; unset, only stores evict, least recently used first",
    ),
    timeout(
        "lookup_timeout_ms",
        1_000,
        "Deadline of a lookup, a page of a listing, or the query of the free bytes",
    ),
    timeout("load_timeout_ms", 10_000, "Deadline of a load"),
    timeout(
        "store_timeout_ms",
        60_000,
        "Deadline of a store, a delete or the closing",
    ),
    Key::integer(
        "max_in_flight",
        1,
        65_536,
        "Calls in flight, counted separately for lookups, loads and stores; further ones wait for at most their deadline",
    )
    .unit("calls")
    .or(Fallback::Integer(32)),
    Key::integer(
        "retries",
        0,
        16,
        "Retries of items with a transient error",
    )
    .or(Fallback::Integer(2)),
    timeout(
        "retry_pause_ms",
        50,
        "Pause before the first retry; it doubles with each further one, up to a second or this, with a jitter of half",
    ),
    Key::integer(
        "breaker_failures",
        0,
        1_000_000,
        "Consecutive unanswered calls after which calls of that kind fail at once; 0 is never",
    )
    .unit("calls")
    .or(Fallback::Integer(5)),
    timeout(
        "breaker_pause_ms",
        1_000,
        "Pause before a call probes the backend again; it doubles while probes fail",
    ),
    timeout("breaker_pause_max_ms", 5_000, "Longest such pause"),
    Key::integer(
        "checksums",
        0,
        1_000_000_000,
        "Checksums kept in memory (38 to 76 bytes each) to compare loads of types that store none with the objects; 0 disables the comparison",
    )
    .unit("objects")
    .or(Fallback::Integer(1_000_000)),
    Key::switch(
        "require_checksum",
        "Objects without a checksum, such as LMCache's files, are misses that stores replace. With types that store none: objects \
         whose checksum is not in memory",
    ),
];

/// Keys of `eviction`.
pub const EVICTION: &[Key] = &[
    Key::of(
        "eviction_policy",
        Shape::OneOf(&["LRU", "IsolatedLRU", "UserLRU", "ARC", "noop"]),
        "LRU: least recently used. IsolatedLRU, formerly UserLRU: the same per cache salt, so that quotas hold. ARC: objects used once before those used \
         repeatedly. noop: none",
    )
    .required(),
    Key::number(
        "trigger_watermark",
        Interval::above(0.0).up_to(1.0),
        "Used fraction of the capacity from which it evicts",
    )
    .or(Fallback::Number(0.8)),
    Key::number(
        "eviction_ratio",
        Interval::above(0.0).up_to(1.0),
        "Fraction of the used bytes that it evicts then",
    )
    .or(Fallback::Number(0.2)),
];

/// Eviction ahead of demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionConfig {
    /// Eviction policy.
    pub policy: EvictionKind,
    /// Used fraction of the capacity from which it evicts, above 0, at most 1.
    pub trigger_watermark: f64,
    /// Fraction of the used bytes that it evicts then, above 0, at most 1.
    pub eviction_ratio: f64,
}

/// Values of the common keys.
pub(crate) struct Common {
    pub name: Option<String>,
    pub shared: bool,
    pub persist_enabled: bool,
    pub serde: Vec<SerdeConfig>,
    pub eviction: Option<EvictionConfig>,
    pub guards: Guards,
    pub warnings: Vec<String>,
}

impl Common {
    /// Removes them from `map`.
    pub(crate) fn take(owner: &str, map: &mut Map<String, Value>) -> Result<Self, ConfigError> {
        let serde = match map.remove("serde").filter(|value| !value.is_null()) {
            None => Vec::new(),
            Some(value) => SerdeConfig::parse_all(owner, &value)?,
        };
        let eviction = match map.remove("eviction").filter(|value| !value.is_null()) {
            None => None,
            Some(value) => Some(eviction(owner, value)?),
        };
        let values = Options::take(owner, COMMON, map)?;
        let millis = |key: &str| Duration::from_millis(values.get(key));
        let guards = Guards {
            lookup_timeout: millis("lookup_timeout_ms"),
            load_timeout: millis("load_timeout_ms"),
            store_timeout: millis("store_timeout_ms"),
            max_in_flight: values.get("max_in_flight"),
            retries: values.get("retries"),
            retry_pause: millis("retry_pause_ms"),
            breaker_failures: values.get("breaker_failures"),
            breaker_pause: millis("breaker_pause_ms"),
            breaker_pause_max: millis("breaker_pause_max_ms"),
            checksums: values.get("checksums"),
            require_checksum: values.get("require_checksum"),
            ..Guards::default()
        };
        if guards.breaker_pause_max < guards.breaker_pause {
            let least = format!(
                "at least breaker_pause_ms, which is {}",
                guards.breaker_pause.as_millis()
            );
            return Err(values.refuse("breaker_pause_max_ms", &least));
        }
        if guards.require_checksum && guards.checksums == 0 {
            return Err(values.refuse("checksums", "at least 1 with require_checksum"));
        }
        let name = values.find::<&str>("name").map(str::to_owned);
        if name.as_deref().is_some_and(|name| !is_valid_name(name)) {
            let allowed = "1 to 64 of a-z, A-Z, 0-9, _ and -, and not l1, l2 or all";
            return Err(values.refuse("name", allowed));
        }
        let mut warnings = Vec::new();
        let tag: &str = values.get("affinity_tag");
        if tag != "_default" {
            warnings.push(format!(
                "{owner}: affinity_tag {tag:?} changes nothing, as there is one L1"
            ));
        }
        Ok(Self {
            name,
            shared: values.get("shared"),
            persist_enabled: values.get("persist_enabled"),
            serde,
            eviction,
            guards,
            warnings,
        })
    }
}

/// Whether a tier may have this name; some are reserved.
fn is_valid_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=64).contains(&name.len())
        && name.bytes().all(plain)
        && !["l1", "l2", "all"].contains(&name)
}

fn eviction(owner: &str, value: Value) -> Result<EvictionConfig, ConfigError> {
    let owner = format!("{owner}: eviction");
    let Value::Object(mut map) = value else {
        return Err(ConfigError::new(format!(
            "{owner}: {} is not allowed; give an object with an \"eviction_policy\"",
            super::clip(&crate::redact::value(&value).to_string())
        )));
    };
    let values = Options::take(&owner, EVICTION, &mut map)?;
    refuse_rest(&owner, &map, EVICTION)?;
    Ok(EvictionConfig {
        policy: values
            .get::<&str>("eviction_policy")
            .parse()
            .unwrap_or_default(),
        trigger_watermark: values.get("trigger_watermark"),
        eviction_ratio: values.get("eviction_ratio"),
    })
}
