//! What a reload may change: the file of `--config` is read again, beside the same command line.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;

use kvtier_error::{Error, Result};
use kvtier_l2::redact;
use kvtier_memory::checksum::checksum128;
use kvtier_memory::pool_name;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::resolve::default_pool;
use super::{HASH_SEED, L1Restore, L2Config, Parsed, ServerConfig, hash_seed};

/// Flags that a running server can change. Anything else needs a restart, among it `--l1-write-ttl-seconds`: memory that
/// was granted for longer must not be freed earlier.
pub(super) const LIVE: &[&str] = &[
    "eviction-ratio",
    "eviction-trigger-watermark",
    "l1-read-ttl-seconds",
    "l2-drain-timeout-seconds",
    "l2-load-timeout-seconds",
    "l2-lookup-timeout-seconds",
    "log-level",
    "quota-default",
    "session-ttl-seconds",
    "stop-timeout-seconds",
    "tenant-metrics",
    "worker-reap-timeout-seconds",
    "worker-registration-grace-seconds",
];

/// Keys of an `--l2-adapter` that a running server can change; of a capacity not whether there is one.
pub(super) const LIVE_KEYS: &[&str] = &[
    "eviction.eviction_ratio",
    "eviction.trigger_watermark",
    CAPACITY,
];

const ADAPTER: &str = "l2-adapter";
const CAPACITY: &str = "max_capacity_gb";

/// Flags that may differ between a server and the one that takes over from it, besides [`LIVE`] ones.
const FREE_IN_TAKE_OVER: &[&str] = &[
    "control-workers",
    "enable-tracing",
    "log-format",
    "otlp-endpoint",
    "transfer-workers",
];

/// Floats below this are exact integers if they have no fraction.
const EXACT: f64 = (1_u64 << 53) as f64;

/// Values by flag, without the dashes in front.
type Values = BTreeMap<String, Value>;

/// The command line, and the value of each flag, secrets included.
#[derive(Clone, Default)]
pub struct Given {
    arguments: Vec<OsString>,
    has_file: bool,
    values: Values,
    /// The same without any flag.
    defaults: Values,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Given").finish_non_exhaustive()
    }
}

impl Given {
    /// `values` and `defaults` by section and name, as [`super::show::values`] has them.
    pub(super) fn new(
        arguments: Vec<OsString>,
        has_file: bool,
        values: &Value,
        defaults: &Value,
    ) -> Self {
        Self {
            arguments,
            has_file,
            values: with_whole_numbers(flags_by_name(values)),
            defaults: with_whole_numbers(flags_by_name(defaults)),
        }
    }
}

/// A value that a server and the one which takes over from it have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LastingValue {
    /// Its checksum, secrets among it.
    sum: String,
    /// For people: secrets are hidden.
    shown: String,
    /// Whether it is not its flag's default: a server that does not know the flag has another value then.
    #[serde(default)]
    is_given: bool,
}

/// Such values by flag, and the seed of hashes, which is no flag, if the algorithm has one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastingValues(BTreeMap<String, LastingValue>);

impl LastingValues {
    /// The flags that have another value in the other server, each with both.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let differs = |flag: &str, own: &LastingValue| match other.0.get(flag) {
            None => Some("unknown".to_owned()),
            Some(other) if other.sum == own.sum => None,
            Some(other) if other.shown == own.shown => Some(format!("another {}", own.shown)),
            Some(other) => Some(other.shown.clone()),
        };
        let flags = self.0.iter().filter_map(|(flag, own)| {
            let other = differs(flag, own)?;
            let own = &own.shown;
            Some(format!(
                "{flag} is {own} in the running server and {other} in the other one"
            ))
        });
        let is_unknown = |(flag, other): &(&String, &LastingValue)| {
            other.is_given && !self.0.contains_key(flag.as_str())
        };
        let unknown = other.0.iter().filter(is_unknown).map(|(flag, other)| {
            let other = &other.shown;
            format!("{flag} is unknown in the running server and {other} in the other one")
        });
        flags.chain(unknown).collect()
    }
}

/// A flag, or a key of an adapter, with another value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Without the dashes in front; of an adapter with tier and key, such as `l2-adapter fs-0 max_capacity_gb`.
    pub flag: String,
    /// Value before; null without one. Secrets are hidden in both.
    pub from: Value,
    /// Value afterwards.
    pub to: Value,
}

impl Change {
    /// Whether a running server can make it.
    fn is_live(&self) -> bool {
        let is_presence = self.from.is_null() || self.to.is_null();
        is_live(&self.flag) && !(is_presence && self.flag.ends_with(CAPACITY))
    }
}

/// Whether a running server can change this flag or key of an adapter.
fn is_live(flag: &str) -> bool {
    let tier_and_key = flag.strip_prefix(ADAPTER).map(str::trim_start);
    let key = tier_and_key.and_then(|it| it.split_once(' '));
    LIVE.contains(&flag) || key.is_some_and(|(_, key)| LIVE_KEYS.contains(&key))
}

impl ServerConfig {
    /// Reads the file of `--config` again, and returns the configuration with it and what it changes.
    ///
    /// # Errors
    /// As [`ServerConfig::parse`], or there is no such file, or it changes flags that need a restart: these are named.
    pub fn read_again(&self) -> Result<(Self, Vec<Change>)> {
        if !self.given.has_file {
            return Ok((self.clone(), Vec::new()));
        }
        let parsed = Self::parse(self.given.arguments.iter().cloned())?;
        let Parsed::Run { config, .. } = parsed else {
            return Err(Error::refused("--config: is no configuration"));
        };
        let changes = self.changes(&config);
        let fixed = changes.iter().filter(|change| !change.is_live());
        let fixed: Vec<_> = fixed.map(|change| change.flag.as_str()).collect();
        if !fixed.is_empty() {
            return Err(Error::refused(format!(
                "{} can be changed only by a restart; allowed: {}; of an {ADAPTER}: {} (not from or to 0)",
                fixed.join(", "),
                LIVE.join(", "),
                LIVE_KEYS.join(", ")
            ))
            .hint("no flag was changed"));
        }
        Ok((self.with_live_values(*config), changes))
    }

    /// What a server and the one which takes over from it have in common.
    pub fn lasting_values(&self) -> LastingValues {
        let is_free = |flag: &str| is_live(flag) || FREE_IN_TAKE_OVER.contains(&flag);
        let mut shown = self.by_key(flags_by_name(&self.shown));
        let flags = self.by_key(self.given.values.clone()).into_iter();
        let flags = flags
            .filter(|(flag, _)| !is_free(flag))
            .map(|(flag, value)| {
                let shown = match shown.remove(&flag) {
                    None | Some(Value::Null) => "its default".to_owned(),
                    Some(shown) => shown.to_string(),
                };
                let is_given = self.given.defaults.get(&flag) != Some(&value);
                (
                    format!("--{flag}"),
                    self.meaning(&flag, &value),
                    shown,
                    is_given,
                )
            });
        let seed = self.hash_algorithm.is_seeded().then(hash_seed);
        let hidden = || redact::HIDDEN.to_owned();
        let seed = seed.map(|seed| (HASH_SEED.to_owned(), seed, hidden(), true));
        let values = flags.chain(seed).map(|(flag, value, shown, is_given)| {
            let sum = format!("{:032x}", checksum128(value.as_bytes()));
            let value = LastingValue {
                sum,
                shown,
                is_given,
            };
            (flag, value)
        });
        LastingValues(values.collect())
    }

    /// A value as two servers compare it: one text for what has one meaning.
    fn meaning(&self, flag: &str, value: &Value) -> String {
        match flag {
            // Where both servers run, auto has kept L1 as on does.
            "l1-restore" => (self.l1_restore != L1Restore::Off).to_string(),
            "shm-name" => match value.as_str().map(pool_name) {
                Some(given) if given != pool_name(&default_pool(&self.host, self.port)) => given,
                _ => String::new(),
            },
            "state-dir" => match &self.state.base {
                Ok(base) => base
                    .canonicalize()
                    .unwrap_or_else(|_| base.clone())
                    .display()
                    .to_string(),
                Err(_) => String::new(),
            },
            _ => value.to_string(),
        }
    }

    /// This configuration with the live values of another. What is derived from the machine stays: a default of L1's size
    /// would be another one now.
    fn with_live_values(&self, newer: Self) -> Self {
        let mut quotas = self.quotas.clone();
        quotas.default_limit = newer.quotas.default_limit;
        let mut tenants = self.tenants.clone();
        tenants.tenant_metrics = newer.tenants.tenant_metrics;
        let l2 = self.l2.clone().zip(newer.l2).map(|(own, newer)| L2Config {
            drain_timeout: newer.drain_timeout,
            load_timeout: newer.load_timeout,
            lookup_timeout: newer.lookup_timeout,
            adapters: newer.adapters,
            ..own
        });
        Self {
            eviction_ratio: newer.eviction_ratio,
            eviction_trigger_watermark: newer.eviction_trigger_watermark,
            read_ttl: newer.read_ttl,
            l2,
            log_level: newer.log_level,
            quotas,
            session_ttl: newer.session_ttl,
            stop_timeout: newer.stop_timeout,
            tenants,
            worker_reap_timeout: newer.worker_reap_timeout,
            registration_grace: newer.registration_grace,
            shown: newer.shown,
            given: newer.given,
            ..self.clone()
        }
    }

    fn changes(&self, newer: &Self) -> Vec<Change> {
        let values = |config: &Self| config.by_key(config.given.values.clone());
        let shown = |config: &Self| config.by_key(flags_by_name(&config.shown));
        let (own, newer_values) = (values(self), values(newer));
        let (mut before, mut after) = (shown(self), shown(newer));
        let flags: BTreeSet<_> = own.keys().chain(newer_values.keys()).collect();
        let is_other = |flag: &&String| own.get(*flag) != newer_values.get(*flag);
        let change = |flag: &String| Change {
            flag: flag.clone(),
            from: before.remove(flag).unwrap_or_default(),
            to: after.remove(flag).unwrap_or_default(),
        };
        flags.into_iter().filter(is_other).map(change).collect()
    }

    /// These flags, of the adapters the names of their tiers, and each key as a flag of its own: `l2-adapter fs-0 type`.
    /// Without a `max_capacity_gb` that bounds nothing.
    fn by_key(&self, mut flags: Values) -> Values {
        let Some(Value::Array(given)) = flags.remove(ADAPTER) else {
            return flags;
        };
        let adapters = self.l2.iter().flat_map(|l2| &l2.adapters);
        let mut tiers = Vec::new();
        for (adapter, given) in adapters.zip(given) {
            let name = adapter.tier();
            add_keys(&mut flags, &format!("{ADAPTER} {name} "), given);
            if adapter.capacity_bytes().is_none() {
                flags.remove(&format!("{ADAPTER} {name} {CAPACITY}"));
            }
            tiers.push(name);
        }
        flags.insert(ADAPTER.into(), tiers.into());
        flags
    }
}

/// Values as they are compared: 1.0 is 1.
fn with_whole_numbers(values: Values) -> Values {
    let pairs = values.into_iter();
    pairs.map(|(name, value)| (name, whole(value))).collect()
}

fn whole(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Exact, and read from text with a point in it.
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < EXACT => {
                Value::from(float as i64)
            }
            _ => Value::Number(number),
        },
        Value::Array(values) => values.into_iter().map(whole).collect(),
        Value::Object(values) => values
            .into_iter()
            .map(|(name, value)| (name, whole(value)))
            .collect(),
        other => other,
    }
}

/// Adds the keys of an object, those of objects inside with a dot between.
fn add_keys(flags: &mut Values, prefix: &str, object: Value) {
    let Value::Object(keys) = object else { return };
    for (key, value) in keys {
        match value {
            Value::Null => {}
            Value::Object(_) => add_keys(flags, &format!("{prefix}{key}."), value),
            value => drop(flags.insert(format!("{prefix}{key}"), value)),
        }
    }
}

/// The flags of all sections of a configuration as `GET /config` has it.
pub fn flags_by_name(sections: &Value) -> BTreeMap<String, Value> {
    let sections = sections.as_object().into_iter();
    let sections = sections.flat_map(|all| all.values());
    let flags = sections.filter_map(Value::as_object).flatten();
    flags
        .map(|(name, value)| (name.replace('_', "-"), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server_command;
    use serde_json::json;
    use std::time::Duration;

    fn config(file: &std::path::Path, more: &[&str]) -> ServerConfig {
        let file = file.to_str().unwrap();
        ServerConfig::from_flags(&[&["--config", file], more].concat()).unwrap()
    }

    #[test]
    fn every_live_flag_exists() {
        let command = server_command();
        let flags: Vec<_> = command
            .get_arguments()
            .filter_map(|arg| arg.get_long())
            .collect();
        for live in LIVE {
            assert!(flags.contains(live), "{live}");
        }
    }

    #[test]
    fn lasting_values_differ_by_flag_without_secrets() {
        let values = |flags: &[&str]| {
            let config = ServerConfig::from_flags(&[&["--l1-size-gb", "1"], flags].concat());
            config.unwrap().lasting_values()
        };
        let adapter = |secret: &str| {
            format!(r#"{{"type":"resp","host":"localhost","port":6379,"password":"{secret}"}}"#)
        };
        let (one, two) = (adapter("MARK1"), adapter("MARK2"));
        let own = values(&["--l2-adapter", &one, "--chunk-size", "16"]);
        let other = ["--l2-adapter", &two, "--port", "7", "--log-level", "debug"];
        let found = own.differences(&values(&other));
        let [chunk_size, l2_adapter, port] = found.as_slice() else {
            panic!("{found:?}");
        };
        let told = |flag: &str, own: &str, other: &str| {
            format!("{flag} is {own} in the running server and {other} in the other one")
        };
        assert_eq!(*chunk_size, told("--chunk-size", "16", "256"));
        let hidden = r#""***""#;
        let another = format!("another {hidden}");
        assert_eq!(
            *l2_adapter,
            told("--l2-adapter resp-0 password", hidden, &another)
        );
        assert_eq!(*port, told("--port", "5555", "7"));
        assert_eq!(own.differences(&own.clone()), Vec::<String>::new());
        let unknown = own.differences(&LastingValues::default());
        assert!(unknown.contains(&told("--chunk-size", "16", "unknown")));
        // One meaning has many texts.
        let folder = tempfile::tempdir().unwrap();
        let direct = folder.path().to_str().unwrap();
        let around = format!(
            "{direct}/../{}/",
            folder.path().file_name().unwrap().display()
        );
        let one = values(&["--l1-restore", "on", "--state-dir", direct]);
        let pool = "lmcache_l1_pool_kvtier_5555";
        let other = [
            "--l1-restore",
            "auto",
            "--state-dir",
            &around,
            "--shm-name",
            pool,
        ];
        assert_eq!(one.differences(&values(&other)), Vec::<String>::new());
        for other in [
            ["--l1-restore", "off"],
            ["--state-dir", "/elsewhere"],
            ["--shm-name", "other"],
        ] {
            let other = values(&[&["--state-dir", direct], &other[..]].concat());
            assert_eq!(one.differences(&other).len(), 1, "{other:?}");
        }
        // What a later release alone knows matters only if it is given there.
        let unknown = LastingValues::default().differences(&values(&["--chunk-size", "16"]));
        let given = ["--chunk-size", "--l1-size-gb"];
        let shown = ["16", "1"];
        let told = std::iter::zip(given, shown).map(|(flag, other)| told(flag, "unknown", other));
        assert_eq!(unknown, told.collect::<Vec<_>>());
    }

    #[test]
    fn whole_numbers_have_one_form() {
        let read = json!({"a": 1.0, "b": [-2.0, 2.5, 1e300], "c": u64::MAX, "d": "1.0"});
        let form = json!({"a": 1, "b": [-2, 2.5, 1e300], "c": u64::MAX, "d": "1.0"});
        assert_eq!(whole(read), form);
        assert_eq!(whole(form.clone()), form);
    }

    #[test]
    fn changed_values_are_taken_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        std::fs::write(&file, "eviction-ratio = 0.1\nl1-size-gb = 1\n").unwrap();
        let before = config(&file, &["--log-level", "warn"]);
        let text = "eviction-ratio = 0.3\nl1-size-gb = 1\nlog-level = \"debug\"\n";
        std::fs::write(&file, text).unwrap();
        let (after, changes) = before.read_again().unwrap();
        // The command line still wins.
        assert_eq!(after.log_level, "warn");
        assert_eq!(after.eviction_ratio, 0.3);
        let change = Change {
            flag: "eviction-ratio".into(),
            from: json!(0.1),
            to: json!(0.3),
        };
        assert_eq!(changes, [change]);
        assert_eq!(after.read_again().unwrap().1, []);
    }

    #[test]
    fn every_live_value_is_taken_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        let fixed = format!(
            "l1-size-gb = 1\nl2-adapter = [{{type = \"fs\", base_path = {:?}}}]\n",
            folder.path()
        );
        std::fs::write(&file, &fixed).unwrap();
        let mut before = config(&file, &[]);
        // As if the machine had given this at the start.
        before.l1_bytes = 3 << 30;
        let values = LIVE.iter().map(|flag| match *flag {
            "eviction-ratio" | "eviction-trigger-watermark" => format!("{flag} = 0.55\n"),
            "log-level" => format!("{flag} = \"error\"\n"),
            "quota-default" => format!("{flag} = \"5MiB\"\n"),
            "worker-registration-grace-seconds" => format!("{flag} = 5000\n"),
            _ => format!("{flag} = 55\n"),
        });
        std::fs::write(&file, fixed + &values.collect::<String>()).unwrap();
        let (after, changes) = before.read_again().unwrap();
        let changed: Vec<_> = changes.iter().map(|change| change.flag.as_str()).collect();
        assert_eq!(changed, LIVE);
        assert_eq!(after.l1_bytes, 3 << 30);
        let seconds = Duration::from_secs;
        let l2 = after.l2.unwrap();
        assert_eq!(
            (after.eviction_ratio, after.eviction_trigger_watermark),
            (0.55, 0.55)
        );
        assert_eq!(
            [
                l2.drain_timeout,
                l2.load_timeout,
                l2.lookup_timeout,
                after.read_ttl,
                after.session_ttl,
                after.stop_timeout
            ],
            [seconds(55); 6]
        );
        assert_eq!(
            (after.log_level.as_str(), after.tenants.tenant_metrics),
            ("error", 55)
        );
        assert_eq!(after.quotas.default_limit.0, Some(5 << 20));
        assert_eq!(after.worker_reap_timeout, Some(seconds(55)));
        assert_eq!(after.registration_grace, seconds(5000));
    }

    /// A file with this adapter, beside one with a secret.
    fn with_adapter(file: &std::path::Path, adapter: &str) {
        let text = format!(
            r#"
            l1-size-gb = 1
            [[l2-adapter]]
            type = "s3"
            s3_endpoint = "bucket.example"
            s3_region = "eu"
            aws_access_key_id = "MARK"
            aws_secret_access_key = "MARK"
            max_capacity_gb = 7
            [[l2-adapter]]
            {adapter}
            "#
        );
        std::fs::write(file, text).unwrap();
    }

    const FS: &str = "type = \"fs\"\nbase_path = \"/tier\"\n";

    #[test]
    fn limits_of_tiers_change_and_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        let eviction = "eviction = {eviction_policy = \"LRU\"";
        with_adapter(&file, &format!("{FS}max_capacity_gb = 1\n{eviction}}}"));
        let before = config(&file, &[]);
        with_adapter(&file, &format!("{FS}max_capacity_gb = 1.0\n{eviction}}}"));
        assert_eq!(before.read_again().unwrap().1, []);
        let text = format!(
            "{FS}max_capacity_gb = 2.5\n{eviction}, eviction_ratio = 0.4, trigger_watermark = 0.7}}"
        );
        with_adapter(&file, &text);
        let (after, changes) = before.read_again().unwrap();
        let change = |key: &str, from: Value, to: f64| Change {
            flag: format!("l2-adapter fs-1 {key}"),
            from,
            to: json!(to),
        };
        let expected = [
            change("eviction.eviction_ratio", Value::Null, 0.4),
            change("eviction.trigger_watermark", Value::Null, 0.7),
            change("max_capacity_gb", json!(1), 2.5),
        ];
        assert_eq!(changes, expected);
        let adapter = &after.l2.as_ref().unwrap().adapters[1];
        assert_eq!(adapter.capacity_bytes(), Some(5 << 29));
        let eviction = adapter.eviction.unwrap();
        assert_eq!(
            (eviction.trigger_watermark, eviction.eviction_ratio),
            (0.7, 0.4)
        );
        assert_eq!(after.read_again().unwrap().1, []);
        // The server that takes over has what the file has.
        let values = config(&file, &[]).lasting_values();
        for running in [before, after] {
            let differences = running.lasting_values().differences(&values);
            assert_eq!(differences, Vec::<String>::new());
        }
    }

    #[test]
    fn other_keys_of_tiers_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        let bounded = format!("{FS}max_capacity_gb = 1\n");
        for (before, after, named) in [
            (FS, &*bounded, "l2-adapter fs-1 max_capacity_gb"),
            (&bounded, FS, "l2-adapter fs-1 max_capacity_gb"),
            (
                &bounded,
                &format!("{FS}max_capacity_gb = 0"),
                "l2-adapter fs-1 max_capacity_gb",
            ),
            (
                &bounded,
                &format!("{FS}max_capacity_gb = 2\nuse_odirect = true"),
                "l2-adapter fs-1 use_odirect",
            ),
            (
                &format!("{bounded}eviction = {{eviction_policy = \"LRU\"}}"),
                &format!("{bounded}eviction = {{eviction_policy = \"ARC\"}}"),
                "l2-adapter fs-1 eviction.eviction_policy",
            ),
            (
                &bounded,
                &format!("{bounded}eviction = {{eviction_policy = \"LRU\"}}"),
                "l2-adapter fs-1 eviction.eviction_policy",
            ),
            (
                &bounded,
                &format!("{bounded}[[l2-adapter]]\ntype = \"fs\"\nbase_path = \"/other\""),
                "l2-adapter, l2-adapter fs-2 base_path, l2-adapter fs-2 type",
            ),
        ] {
            with_adapter(&file, before);
            let running = config(&file, &[]);
            with_adapter(&file, after);
            let error = running.read_again().unwrap_err().to_string();
            let expected = format!("{named} can be changed only by a restart; ");
            assert!(error.starts_with(&expected), "{error}");
            assert!(!error.contains("MARK"), "{error}");
        }
    }

    #[test]
    fn order_of_tiers_needs_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        let tier = |name: &str| {
            format!("[[l2-adapter]]\ntype = \"fs\"\nname = \"{name}\"\nbase_path = \"/{name}\"\n")
        };
        let (one, two) = (tier("one"), tier("two"));
        std::fs::write(&file, format!("l1-size-gb = 1\n{one}{two}")).unwrap();
        let before = config(&file, &[]);
        std::fs::write(&file, format!("l1-size-gb = 1\n{two}{one}")).unwrap();
        let error = before.read_again().unwrap_err().to_string();
        assert!(
            error.starts_with("l2-adapter can be changed only by a restart"),
            "{error}"
        );
    }

    #[test]
    fn flags_that_need_a_restart_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvtier.toml");
        let adapter = |secret: &str| {
            format!(
                "l1-size-gb = 1\n[[l2-adapter]]\ntype = \"resp\"\nhost = \"localhost\"\nport = 6379\npassword = \"{secret}\"\n"
            )
        };
        std::fs::write(&file, adapter("MARK1")).unwrap();
        let before = config(&file, &[]);
        assert!(!format!("{before:?}").contains("MARK"), "a secret is shown");
        let text = format!(
            "eviction-ratio = 0.3\nchunk-size = 512\n{}",
            adapter("MARK2")
        );
        std::fs::write(&file, text).unwrap();
        let error = before.read_again().unwrap_err().to_string();
        assert!(
            error.starts_with(
                "chunk-size, l2-adapter resp-0 password can be changed only by a restart"
            ),
            "{error}"
        );
        assert!(!error.contains("MARK"), "{error}");
        std::fs::write(&file, "eviction-ratio = 3\n").unwrap();
        let error = before.read_again().unwrap_err().to_string();
        assert!(error.contains("eviction-ratio"), "{error}");
    }
}
