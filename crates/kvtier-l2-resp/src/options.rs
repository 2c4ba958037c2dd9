//! Options of a server or cluster of Redis' protocol.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::RespAdapter;
use super::address::Address;
use kvtier_l2::net::ClientTls;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, L2Error, Registry,
    config::{Fallback, Interval, Key, Options, Shape},
    tls,
};

/// Options of a server.
#[derive(Clone, PartialEq, Eq)]
pub struct RespOptions {
    /// The tier, for log lines.
    pub tier: String,
    /// Addresses of the server: one, a primary and its replicas in any order, or some nodes of a cluster.
    pub addresses: Vec<Address>,
    /// Whether it is a cluster.
    pub cluster_mode: bool,
    /// How connections are secured, if they are.
    pub tls: Option<ClientTls>,
    /// Connections for values; one more is for everything else. A cluster has as many for each primary.
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
    /// Whether nothing is written there, not even a time to live. Lookups compare lengths alone: a server that computes its
    /// companions does so for loads only.
    pub read_only: bool,
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
            tier: "resp".to_owned(),
            addresses: vec![address],
            cluster_mode: false,
            tls: None,
            num_workers: 8,
            username: String::new(),
            password: String::new(),
            database: 0,
            key_prefix: String::new(),
            ttl_seconds: None,
            companion_sums: true,
            require_checksum: false,
            trust_missing_layout: false,
            read_only: false,
            connection_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(5),
        }
    }

    fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        // LMCache's variables, which its resp has, where the configuration has no value.
        let secret = |key: &str, variable: &str| match options.get::<&str>(key) {
            "" if config.kind != "valkey" => std::env::var(variable).unwrap_or_default(),
            given => given.to_owned(),
        };
        let seconds = |key| Duration::from_secs_f64(options.get(key));
        Self {
            tier: config.tier().to_owned(),
            addresses: addresses(options),
            cluster_mode: options.get("cluster_mode"),
            tls: options
                .get::<bool>("tls_enable")
                .then(|| tls::client(options)),
            num_workers: options.get("num_workers"),
            username: secret("username", "LMCACHE_RESP_USERNAME"),
            password: secret("password", "LMCACHE_RESP_PASSWORD"),
            database: options.get("database_id"),
            key_prefix: options.get("key_prefix"),
            ttl_seconds: options.find("ttl_seconds"),
            companion_sums: options.get("companion_sums"),
            require_checksum: config.guards.require_checksum,
            trust_missing_layout: options.get("trust_missing_layout"),
            read_only: false,
            connection_timeout: seconds("connection_timeout"),
            request_timeout: seconds("request_timeout"),
        }
    }
}

/// The addresses of a configuration, which were checked.
fn addresses(options: &Options) -> Vec<Address> {
    if let Some(path) = options.find::<&str>("unix_socket") {
        return vec![Address::Unix(PathBuf::from(path))];
    }
    if let Some(nodes) = options.find::<&str>("startup_nodes") {
        return nodes.split(',').filter_map(Address::parse).collect();
    }
    let port = u16::try_from(options.get::<u32>("port")).unwrap_or_default();
    vec![Address::Tcp(options.get("host"), port)]
}

const KEYS: &[Key] = &[
    Key::text("host", "Host of the server; or give startup_nodes or unix_socket"),
    Key::integer("port", 1, 65535, "Port of the server; needed with host"),
    Key::text(
        "startup_nodes",
        "Servers as host:port, with commas between them: some nodes of a cluster, or a server and its replicas, whose primary \
         is used",
    ),
    Key::switch(
        "cluster_mode",
        "The servers are a cluster",
    ),
    Key::path("unix_socket", "Path of the server's socket in the file system"),
    Key::integer(
        "num_workers",
        1,
        256,
        "Connections for objects, to each primary of a cluster; one more is for lookups and deletes",
    )
    .or(Fallback::Integer(8)),
    Key::of(
        "username",
        Shape::AnyText,
        "User of the server's access lists; if empty, LMCACHE_RESP_USERNAME (not with valkey)",
    )
    .or(Fallback::Text("")),
    Key::of(
        "password",
        Shape::AnyText,
        "Password; if empty, LMCACHE_RESP_PASSWORD (not with valkey), or none",
    )
    .or(Fallback::Text("")),
    Key::integer("database_id", 0, 1_000_000, "Number of the database; a cluster has only 0")
        .or(Fallback::Integer(0)),
    Key::switch("tls_enable", "Use TLS; the server needs a trusted certificate for its host"),
    tls::CA,
    tls::CERT,
    tls::KEY,
    tls::SERVER_NAME,
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
        "Seconds after which the server drops an object; unset is never",
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
        "Keep layout and checksum of each object under a key of their own (kvtier.sum@) and compare them at each load. Without it \
         only lengths are compared, and objects of CPU engines are misses",
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
    let variable = std::env::var_os("LMCACHE_RESP_PASSWORD");
    let has_variable = variable.is_some_and(|value| !value.is_empty());
    check_password(options, has_variable)?;
    check_all(options)
}

/// Checks the options of a type without LMCache's variables.
fn check_valkey(options: &Options) -> Result<(), ConfigError> {
    check_password(options, false)?;
    check_all(options)
}

fn check_password(options: &Options, has_variable: bool) -> Result<(), ConfigError> {
    let is_empty = |key| options.get::<&str>(key).is_empty();
    if is_empty("password") && !is_empty("username") && !has_variable {
        Err(options.refuse("password", "the user's password"))
    } else {
        Ok(())
    }
}

fn check_all(options: &Options) -> Result<(), ConfigError> {
    let is_given = |key: &str| options.find::<&str>(key).is_some();
    let ways = ["host", "startup_nodes", "unix_socket"];
    let mut given = ways.into_iter().filter(|way| is_given(way));
    let (first, second) = (given.next(), given.next());
    if let (None, _) | (_, Some(_)) = (first, second) {
        let allowed = "one of host and port, startup_nodes, and unix_socket";
        return Err(options.refuse(second.unwrap_or("host"), allowed));
    }
    match (is_given("host"), options.find::<u32>("port").is_some()) {
        (true, false) => return Err(options.refuse("port", "the server's port")),
        (false, true) => return Err(options.refuse("port", "it together with host only")),
        _ => {}
    }
    let nodes = options.find::<&str>("startup_nodes").unwrap_or("any:1");
    if !nodes.split(',').all(|node| Address::parse(node).is_some()) {
        let allowed = "host:port, and further ones behind commas";
        return Err(options.refuse("startup_nodes", allowed));
    }
    let is_cluster = options.get::<bool>("cluster_mode");
    if is_cluster && is_given("unix_socket") {
        return Err(options.refuse("cluster_mode", "it with host or startup_nodes only"));
    }
    tls::check(options)?;
    tls::check_enabled(options)?;
    if options.get::<&str>("key_prefix").contains(['@', '\0']) {
        return Err(options.refuse("key_prefix", "a text without @, which ends it"));
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
        (
            given("database_id") && config.options.get("cluster_mode"),
            "database_id changes nothing with cluster_mode: a cluster has one database",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = RespOptions::of(config);
    if let Some(tls) = &options.tls {
        // Told at the start; connections read the files again.
        tls.settings()?;
    }
    Ok(Arc::new(RespAdapter::open(config.kind, &options)))
}

/// LMCache's `resp`.
pub const RESP: AdapterType = AdapterType::new(
    "resp",
    "Keeps each object under a key of a Redis or Valkey server or cluster; other servers and LMCache can use it at the same \
     time",
    KEYS,
    open,
)
.check(check)
.ineffective(ineffective);

/// Another name of it.
pub const REDIS: AdapterType = RESP.named("redis", "The same as resp");

/// LMCache's `valkey`.
pub const VALKEY: AdapterType = RESP.named("valkey", "The same as resp").check(check_valkey);
