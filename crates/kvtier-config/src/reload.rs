//! What a reload may change: the file of `--config` is read again, beside the same command line.

use std::collections::BTreeSet;

use kvtier_common::error::{Error, Result};
use serde_json::Value;

use super::given::{ADAPTER, CAPACITY, by_key, flags_by_name};
use super::{L2Config, Parsed, ServerConfig};

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
pub(super) fn is_live(flag: &str) -> bool {
    let tier_and_key = flag.strip_prefix(ADAPTER).map(str::trim_start);
    let key = tier_and_key.and_then(|it| it.split_once(' '));
    LIVE.contains(&flag) || key.is_some_and(|(_, key)| LIVE_KEYS.contains(&key))
}

/// Does [`ServerConfig::read_again`].
pub(super) fn read_again(running: &ServerConfig) -> Result<(ServerConfig, Vec<Change>)> {
    if !running.given.has_file {
        return Ok((running.clone(), Vec::new()));
    }
    let parsed = ServerConfig::parse(running.given.arguments.iter().cloned())?;
    let Parsed::Run { config, .. } = parsed else {
        return Err(Error::refused("--config: is no configuration"));
    };
    let changes = changes(running, &config);
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
    Ok((with_live_values(running, *config), changes))
}

/// Returns the running configuration with the live values of `newer`. Values derived from the machine stay: a default of L1's size
/// would be another one now.
fn with_live_values(running: &ServerConfig, newer: ServerConfig) -> ServerConfig {
    let mut config = running.clone();
    config.args.eviction_ratio = newer.eviction_ratio;
    config.args.eviction_trigger_watermark = newer.eviction_trigger_watermark;
    config.args.log_level.clone_from(&newer.log_level);
    config.args.tenants.tenant_metrics = newer.tenants.tenant_metrics;
    config.quotas.default_limit = newer.quotas.default_limit;
    config.args.read_ttl = newer.read_ttl;
    config.args.registration_grace = newer.registration_grace;
    config.args.session_ttl = newer.session_ttl;
    config.args.stop_timeout = newer.stop_timeout;
    config.worker_reap_timeout = newer.worker_reap_timeout;
    config.shown = newer.shown;
    config.given = newer.given;
    config.l2 = running
        .l2
        .clone()
        .zip(newer.l2)
        .map(|(own, newer)| L2Config {
            drain_timeout: newer.drain_timeout,
            load_timeout: newer.load_timeout,
            lookup_timeout: newer.lookup_timeout,
            adapters: newer.adapters,
            ..own
        });
    config
}

fn changes(running: &ServerConfig, newer: &ServerConfig) -> Vec<Change> {
    let values = |config: &ServerConfig| by_key(config, config.given.values.clone());
    let shown = |config: &ServerConfig| by_key(config, flags_by_name(&config.shown));
    let (own, newer_values) = (values(running), values(newer));
    let (mut before, mut after) = (shown(running), shown(newer));
    let flags: BTreeSet<_> = own.keys().chain(newer_values.keys()).collect();
    let is_other = |flag: &&String| own.get(*flag) != newer_values.get(*flag);
    let change = |flag: &String| Change {
        flag: flag.clone(),
        from: before.remove(flag).unwrap_or_default(),
        to: after.remove(flag).unwrap_or_default(),
    };
    flags.into_iter().filter(is_other).map(change).collect()
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
        let l2 = after.l2.clone().unwrap();
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
