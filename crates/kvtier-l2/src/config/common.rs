//! The keys that every type takes.

use std::time::Duration;

use kvtier_core::eviction::EvictionKind;
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::key::{Fallback, Interval, Key, Shape};
use super::options::Options;
use crate::wrap::Guards;

/// A day: a longer wait is none.
const MAX_MS: i64 = 24 * 60 * 60 * 1000;

const fn timeout(name: &'static str, default: i64, help: &'static str) -> Key {
    Key::integer(name, 1, MAX_MS, help)
        .unit("ms")
        .or(Fallback::Integer(default))
}

/// The keys that every type takes.
///
/// `name` is ours, the next five and `type` are LMCache's. An adapter that wraps another one takes over those that are given only inside.
pub const COMMON: &[Key] = &[
    Key::text("type", "Which kind of adapter").required(),
    Key::text(
        "name",
        "What the tier is called in limits, metrics and listings: 1 to 64 of a-z, A-Z, 0-9, _ and -, no two the same; unset, \
         its type and its place among the adapters, as in fs-0. Limits of single tiers go by it, so give one where adapters \
         may come, go or change places",
    ),
    Key::text(
        "affinity_tag",
        "Which L1 it works with; there is one here, so another value is accepted with a warning",
    )
    .or(Fallback::Text("_default")),
    Key::switch(
        "shared",
        "Other servers store and delete there as well, so nothing is known for certain",
    ),
    Key::switch(
        "persist_enabled",
        "Keep what was stored when the server stops, where a type can do otherwise",
    )
    .or(Fallback::Switch(true)),
    Key::of(
        "serde",
        Shape::Object,
        "How objects are transformed on their way; refused, as they are kept as they are",
    ),
    Key::of(
        "eviction",
        Shape::Object,
        "When and how it is emptied ahead of need; unset, only stores make room, what was used least recently first",
    ),
    timeout(
        "lookup_timeout_ms",
        1_000,
        "Longest wait for a lookup, a page of a listing, or how much room there is",
    ),
    timeout("load_timeout_ms", 10_000, "Longest wait for a load"),
    timeout(
        "store_timeout_ms",
        60_000,
        "Longest wait for a store, a delete or the closing",
    ),
    Key::integer(
        "max_in_flight",
        1,
        65_536,
        "Calls under way at once, counted apart for lookups, loads and stores; the next ones wait in order, as long as the call may take",
    )
    .unit("calls")
    .or(Fallback::Integer(32)),
    Key::integer(
        "retries",
        0,
        16,
        "How often items that failed for a passing reason are tried again",
    )
    .or(Fallback::Integer(2)),
    timeout(
        "retry_pause_ms",
        50,
        "Pause before the first retry; it doubles for each one after, up to a second or this, and varies by half",
    ),
    Key::integer(
        "breaker_failures",
        0,
        1_000_000,
        "Calls without an answer, one after another, after which calls of that kind fail at once; 0 is never",
    )
    .unit("calls")
    .or(Fallback::Integer(5)),
    timeout(
        "breaker_pause_ms",
        1_000,
        "How long they do until one call probes again; it doubles while probes fail",
    ),
    timeout("breaker_pause_max_ms", 60_000, "Up to this"),
    Key::integer(
        "checksums",
        0,
        1_000_000_000,
        "Objects whose checksums are remembered, to compare what is loaded, for types that keep none with the objects; 38 \
         to 76 bytes each; 0 is no comparing",
    )
    .unit("objects")
    .or(Fallback::Integer(1_000_000)),
    Key::switch(
        "require_checksum",
        "Take objects whose bytes cannot be compared with a checksum for none, and let stores replace them: files of LMCache, \
         and ours cut off right behind the object; for types that keep none, what is not remembered",
    ),
];

/// The keys of `eviction`.
pub const EVICTION: &[Key] = &[
    Key::of(
        "eviction_policy",
        Shape::OneOf(&["LRU", "IsolatedLRU", "UserLRU", "ARC", "noop"]),
        "What leaves first: the least recently used; the same with an order for each cache salt, so that quotas hold (IsolatedLRU, or UserLRU as it was called); what was used once before what was used again (ARC); nothing ever",
    )
    .required(),
    Key::number(
        "trigger_watermark",
        Interval::above(0.0).up_to(1.0),
        "Part of the capacity from which on it is emptied",
    )
    .or(Fallback::Number(0.8)),
    Key::number(
        "eviction_ratio",
        Interval::above(0.0).up_to(1.0),
        "Part of the used bytes that leave then",
    )
    .or(Fallback::Number(0.2)),
];

/// When and how an adapter is emptied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionConfig {
    /// What leaves first.
    pub policy: EvictionKind,
    /// Part of the capacity from which on it is emptied, above 0, at most 1.
    pub trigger_watermark: f64,
    /// Part of the used bytes that leave then, above 0, at most 1.
    pub eviction_ratio: f64,
}

/// The checked common keys.
pub(crate) struct Common {
    pub name: Option<String>,
    pub shared: bool,
    pub persist_enabled: bool,
    pub eviction: Option<EvictionConfig>,
    pub guards: Guards,
    pub warnings: Vec<String>,
}

impl Common {
    /// Reads them from `map`, from which they are removed.
    pub(crate) fn take(owner: &str, map: &mut Map<String, Value>) -> Result<Self, ConfigError> {
        if let Some(value) = map.remove("serde").filter(|value| !value.is_null()) {
            return Err(ConfigError::value(
                owner,
                "serde",
                &value,
                "no serde: objects are not transformed yet, they are kept as the engine wrote them",
            ));
        }
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
        if name.as_deref().is_some_and(|name| !may_be_called(name)) {
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
            eviction,
            guards,
            warnings,
        })
    }
}

/// Whether a tier may have this name; some words mean tiers already.
fn may_be_called(name: &str) -> bool {
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

/// Refuses the keys of `map` that are not known.
pub(crate) fn refuse_rest<'a>(
    owner: &str,
    map: &Map<String, Value>,
    known: impl IntoIterator<Item = &'a Key>,
) -> Result<(), ConfigError> {
    let known: Vec<_> = known.into_iter().map(|key| key.name).collect();
    let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "{owner}: key {:?} is unknown; known keys are {}",
        super::clip(key),
        known.join(", ")
    )))
}
