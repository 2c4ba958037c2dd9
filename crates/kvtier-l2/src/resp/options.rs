//! Options of a server of Redis' protocol.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::RespAdapter;
use super::endpoint::Address;
use crate::adapter::Adapter;
use crate::config::{AdapterConfig, ConfigError, Fallback, Interval, Key, Options, Shape};
use crate::error::L2Error;
use crate::registry::{AdapterType, Registry};

/// Options of a server.
#[derive(Clone, PartialEq, Eq)]
pub struct RespOptions {
    /// Where it listens.
    pub address: Address,
    /// Connections for values; one more is for everything else.
    pub num_workers: usize,
    /// User of its access lists; empty is the default user.
    pub username: String,
    /// Empty is none.
    pub password: String,
    /// Number of the database.
    pub database: u32,
    /// Put before each key with an `@`, unless it is empty.
    pub key_prefix: String,
    /// After how many seconds the server forgets an object.
    pub ttl_seconds: Option<u64>,
    /// Whether layout and checksum of each object are kept beside it.
    pub companion_sums: bool,
    /// Objects without a checksum are misses.
    pub require_checksum: bool,
    /// Objects without a layout are loaded for page-bound objects too.
    pub trust_missing_layout: bool,
    /// Time for a connection, greeting included.
    pub connection_timeout: Duration,
    /// Longest silence of a server that has to answer.
    pub request_timeout: Duration,
}

impl RespOptions {
    /// Returns the defaults for this server.
    #[must_use]
    pub fn new(address: Address) -> Self {
        Self {
            address,
            num_workers: 8,
            username: String::new(),
            password: String::new(),
            database: 0,
            key_prefix: String::new(),
            ttl_seconds: None,
            companion_sums: true,
            require_checksum: false,
            trust_missing_layout: false,
            connection_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(5),
        }
    }

    fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        // LMCache's variables, where the configuration has no value.
        let secret = |key: &str, variable: &str| match options.get::<&str>(key) {
            "" => std::env::var(variable).unwrap_or_default(),
            given => given.to_owned(),
        };
        let seconds = |key| Duration::from_secs_f64(options.get(key));
        Self {
            address: match options.find::<&str>("unix_socket") {
                Some(path) => Address::Unix(PathBuf::from(path)),
                None => Address::Tcp(
                    options.get("host"),
                    u16::try_from(options.get::<u32>("port")).unwrap_or_default(),
                ),
            },
            num_workers: options.get("num_workers"),
            username: secret("username", "LMCACHE_RESP_USERNAME"),
            password: secret("password", "LMCACHE_RESP_PASSWORD"),
            database: options.get("db"),
            key_prefix: options.get("key_prefix"),
            ttl_seconds: options.find("ttl_seconds"),
            companion_sums: options.get("companion_sums"),
            require_checksum: config.guards.require_checksum,
            trust_missing_layout: options.get("trust_missing_layout"),
            connection_timeout: seconds("connection_timeout"),
            request_timeout: seconds("request_timeout"),
        }
    }
}

const KEYS: &[Key] = &[
    Key::text("host", "Host of the server; needed without unix_socket"),
    Key::integer("port", 1, 65535, "Port of the server; needed without unix_socket"),
    Key::text("unix_socket", "Path of the server's socket, instead of host and port"),
    Key::integer(
        "num_workers",
        1,
        256,
        "Connections for objects, with several commands in flight on each; one more is for lookups and deletes",
    )
    .or(Fallback::Integer(8)),
    Key::of(
        "username",
        Shape::AnyText,
        "User of the server's access lists; if empty, LMCACHE_RESP_USERNAME",
    )
    .or(Fallback::Text("")),
    Key::of(
        "password",
        Shape::AnyText,
        "Password; if empty, LMCACHE_RESP_PASSWORD, and without that none",
    )
    .or(Fallback::Text("")),
    Key::integer("db", 0, 1_000_000, "Number of the database").or(Fallback::Integer(0)),
    Key::of(
        "key_prefix",
        Shape::AnyText,
        "Put before each key, with an @ behind it; LMCache's resp finds only keys without one",
    )
    .or(Fallback::Text("")),
    Key::integer(
        "ttl_seconds",
        1,
        1 << 40,
        "After how long the server forgets an object; unset is never",
    )
    .unit("s"),
    Key::number(
        "max_capacity_gb",
        Interval::from(0.0),
        "Capacity for objects; 0 is bounded by the server only",
    )
    .unit("GiB")
    .or(Fallback::Number(0.0)),
    Key::switch(
        "companion_sums",
        "Keep layout and checksum of each object beside it under a key of their own, kvtier.sum@ before the object's, and \
         compare them at each load; without it another layout is noticed only by another length, and objects of CPU engines \
         are misses",
    )
    .or(Fallback::Switch(true)),
    Key::switch(
        "trust_missing_layout",
        "Load objects that have no layout beside them, such as those of LMCache; only if all engines of a model that write \
         there agree in type, block size and form of its pages, CPU engines also in processor and release",
    ),
    Key::number(
        "connection_timeout",
        Interval::above(0.0).up_to(3600.0),
        "Time for a connection, greeting included",
    )
    .unit("s")
    .or(Fallback::Number(10.0)),
    Key::number(
        "request_timeout",
        Interval::above(0.0).up_to(3600.0),
        "Longest silence of a server that has to answer; then the connection is closed",
    )
    .unit("s")
    .or(Fallback::Number(5.0)),
];

fn check(options: &Options) -> Result<(), ConfigError> {
    let is_given = |key: &str| options.find::<&str>(key).is_some();
    let has_port = options.find::<u32>("port").is_some();
    match (is_given("unix_socket"), is_given("host"), has_port) {
        (true, false, false) | (false, true, true) => {}
        (true, ..) => {
            let allowed = "either unix_socket or host and port";
            return Err(options.refuse("unix_socket", allowed));
        }
        (false, false, _) => {
            return Err(options.refuse("host", "the server's host, or unix_socket"));
        }
        (false, true, false) => return Err(options.refuse("port", "the server's port")),
    }
    if options.get::<&str>("key_prefix").contains(['@', '\0']) {
        return Err(options.refuse("key_prefix", "a text without @, which ends it"));
    }
    if options.get::<&str>("password").is_empty() && !options.get::<&str>("username").is_empty() {
        let has_variable = std::env::var_os("LMCACHE_RESP_PASSWORD").is_some();
        if !has_variable {
            return Err(options.refuse("password", "the user's password"));
        }
    }
    Ok(())
}

fn ineffective(config: &AdapterConfig, given: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    let lines = [
        (
            !config.persist_enabled,
            "persist_enabled changes nothing: objects stay when the server stops",
        ),
        (
            given("checksums") && config.options.get("companion_sums"),
            "checksums changes nothing with companion_sums: each object has a checksum beside it",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(
    kind: &'static str,
    config: &AdapterConfig,
    _: &Registry,
) -> Result<Arc<dyn Adapter>, L2Error> {
    Ok(Arc::new(RespAdapter::open(kind, &RespOptions::of(config))))
}

/// LMCache's `resp`.
pub(crate) const RESP: AdapterType = AdapterType::new(
    "resp",
    "Keeps each object under a key of one Redis or Valkey server; other servers and LMCache can use it at the same time",
    KEYS,
    |config, registry| open("resp", config, registry),
)
.check(check)
.ineffective(ineffective);

/// Another name of it.
pub(crate) const REDIS: AdapterType =
    AdapterType::new("redis", "The same as resp", KEYS, |config, registry| {
        open("redis", config, registry)
    })
    .check(check)
    .ineffective(ineffective);
