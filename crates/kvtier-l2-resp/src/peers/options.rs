//! Options of the type `peers`.

use std::sync::Arc;
use std::time::Duration;

use super::super::RespOptions;
use super::super::address::Address;
use super::PeersAdapter;
use kvtier_l2::wrap::Guards;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, L2Error, Registry,
    config::{Fallback, Key, Options, Shape},
    tls,
};

/// Time for a connection to a peer, greeting included.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest silence of a peer within an object: then its connection is closed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// The variable with the password of peers, for tools that have no --peer-password.
const PASSWORD_VARIABLE: &str = "KVTIER_PEER_PASSWORD";

/// The key with this server's port for peers, which its configuration sets.
pub const OWN_PORT: &str = "own_port";

/// Options of the tier.
#[derive(Clone)]
pub struct PeersOptions {
    /// Hosts and ports; each address of a name is a peer.
    pub peers: Vec<(String, u16)>,
    /// The port for peers of this server: addresses of this host with it are no peers.
    pub own_port: Option<u16>,
    /// Options of the connection to each peer, whose address is filled in later.
    pub common: RespOptions,
    /// Deadlines and breaker of each peer. A lookup is answered within its deadline, or not at all.
    pub guards: Guards,
    /// Deadline of a lookup of the tier, which asks a peer once for each 128 objects.
    pub lookup_timeout: Duration,
}

impl PeersOptions {
    /// Returns the options of the tier with these peers, and a time for the answer to a lookup.
    #[must_use]
    pub fn new(peers: Vec<(String, u16)>, first_byte: Duration) -> Self {
        Self::guarded(peers, first_byte, Guards::default())
    }

    fn guarded(peers: Vec<(String, u16)>, first_byte: Duration, guards: Guards) -> Self {
        let nowhere = Address::Tcp(String::new(), 0);
        Self {
            peers,
            own_port: None,
            common: RespOptions {
                tier: "peers".to_owned(),
                num_workers: 4,
                require_checksum: true,
                read_only: true,
                connection_timeout: CONNECTION_TIMEOUT,
                request_timeout: REQUEST_TIMEOUT,
                ..RespOptions::new(nowhere)
            },
            lookup_timeout: first_byte.max(guards.lookup_timeout),
            guards: Guards {
                lookup_timeout: first_byte,
                retries: 0,
                ..guards
            },
        }
    }

    fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        let first_byte = Duration::from_millis(options.get("first_byte_ms"));
        let peers = hosts(options).flatten().collect();
        let mut made = Self::guarded(peers, first_byte, config.guards);
        let password = match options.get::<&str>("password") {
            "" => std::env::var(PASSWORD_VARIABLE).unwrap_or_default(),
            given => given.to_owned(),
        };
        made.own_port = options
            .find(OWN_PORT)
            .and_then(|it: u32| it.try_into().ok());
        made.common = RespOptions {
            tier: config.tier().to_owned(),
            tls: options
                .get::<bool>("tls_enable")
                .then(|| tls::client(options)),
            num_workers: options.get("num_workers"),
            username: options.get("username"),
            password,
            ..made.common
        };
        made
    }
}

/// Hosts and ports of a configuration; none for what is neither.
fn hosts(options: &Options) -> impl Iterator<Item = Option<(String, u16)>> {
    let peers: &[String] = options.get("peers");
    peers.iter().map(|text| match Address::parse(text) {
        Some(Address::Tcp(host, port)) => Some((host, port)),
        _ => None,
    })
}

const KEYS: &[Key] = &[
    Key::of(
        "peers",
        Shape::Texts,
        "Ports of other servers (--peer-port) as host:port; a name is resolved every 5 s, and each of its addresses is a peer",
    )
    .required(),
    Key::integer(
        "first_byte_ms",
        1,
        60_000,
        "Time in which a peer answers a lookup of 128 objects, or counts as without them",
    )
    .unit("ms")
    .or(Fallback::Integer(10)),
    Key::integer(
        "num_workers",
        1,
        64,
        "Connections for objects to each peer; one more is for lookups",
    )
    .or(Fallback::Integer(4)),
    Key::of("username", Shape::AnyText, "User, where it is not default").or(Fallback::Text("")),
    Key::of(
        "password",
        Shape::AnyText,
        "Password of the peers; if empty, that of --peer-password or KVTIER_PEER_PASSWORD",
    )
    .or(Fallback::Text("")),
    Key::switch(
        "tls_enable",
        "Use TLS; each peer needs a trusted certificate for the name by which it is given",
    ),
    tls::CA,
    tls::CERT,
    tls::KEY,
    tls::SERVER_NAME,
];

fn check(options: &Options) -> Result<(), ConfigError> {
    let is_known = hosts(options).all(|host| host.is_some());
    if !is_known || hosts(options).next().is_none() {
        return Err(options.refuse("peers", "a list of host:port"));
    }
    tls::check(options)?;
    tls::check_enabled(options)
}

fn check_guards(options: &Options, guards: &Guards) -> Result<(), ConfigError> {
    let most = guards.lookup_timeout.as_millis();
    if u128::from(options.get::<u64>("first_byte_ms")) > most {
        let allowed = format!("at most \"lookup_timeout_ms\", which is {most}");
        return Err(options.refuse("first_byte_ms", &allowed));
    }
    Ok(())
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = PeersOptions::of(config);
    if let Some(tls) = &options.common.tls {
        // Told at the start; connections read the files again.
        tls.settings()?;
    }
    Ok(Arc::new(PeersAdapter::open(options)))
}

/// Other servers of kvtier.
pub const PEERS: AdapterType = AdapterType::new(
    "peers",
    "Reads what other servers hold in L1, from their ports for peers; nothing is stored there",
    KEYS,
    open,
)
.check(check)
.guarding_parts(check_guards);
