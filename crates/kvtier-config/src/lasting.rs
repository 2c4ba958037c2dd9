//! What a server and the one which takes over from it have in common: the meaning of each flag that neither may change.

use std::collections::BTreeMap;

use kvtier_l2::redact;
use kvtier_memory::checksum::checksum128;
use kvtier_memory::pool_name;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::given::flags_by_name;
use super::reload::is_live;
use super::resolve::default_pool;
use super::{HASH_SEED, L1Restore, ServerConfig, hash_seed};

/// Flags that may differ between a server and the one that takes over from it, besides those that a reload may change.
const FREE_IN_TAKE_OVER: &[&str] = &[
    "control-workers",
    "enable-tracing",
    "log-format",
    "max-pinned-share",
    "otlp-endpoint",
    "transfer-workers",
];

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

impl ServerConfig {
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
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
