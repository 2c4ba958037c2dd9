//! Configuration: one set of definitions for the command line and the TOML file.
//!
//! It parses and checks values; it opens no file but the one of `--config`, binds no port and finds no device. Whether
//! a server could start with a configuration here and now is for the server's preflight checks.
//!
//! Every key of the file is a flag without its dashes, so a file is read by turning it into flags that stand before
//! those of the command line. One parser, one set of names, ranges and error texts; the command line wins.

#![forbid(unsafe_code)]

pub mod adapters;
mod checks;
mod command;
mod docs;
mod effect;
mod file;
mod flags;
mod given;
mod gpu;
mod http;
mod l1_manager;
mod l2;
mod limit;
mod memory;
mod peer;
mod quota;
mod reload;
mod request;
mod resolve;
mod show;
mod state;
mod tenants;
mod tracing;
mod values;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

pub use command::server_command;
pub use docs::reference_markdown;
pub use flags::ServerArgs;
pub use given::{Given, flags_by_name};
pub use gpu::{GpuReply, GpuSettings, NumaNodes};
pub use http::{HttpConfig, TOKENS_VARIABLE, is_loopback};
pub use l2::L2Config;
pub use limit::{Limit, MAX_BYTES, parse_size};
pub use memory::{HostMemory, L1Origin};
pub use quota::{QuotaSettings, TierPlace};
pub use reload::Change;
pub use state::StateSettings;
pub use tenants::{TenantSettings, secret_file_warning};
pub use tracing::{OtlpEndpoint, Pairs, TracingConfig};
pub use values::{
    EngineType, EvictionPolicyName, L1Restore, LogFormat, PrefetchPolicy, StorePolicy,
    TransferMode, WindowedClients, parse_gib,
};

use kvtier_common::error::{Error, Result};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::hashing::DEFAULT_SEED;
use kvtier_core::quota::QuotaMode;
use kvtier_device::cuda::CudaOptions;
use kvtier_l2::redact;
use kvtier_memory::Space;

use l2::{is_read_only, location};
use request::IPC;

/// Bytes of one "GB" of the flags. LMCache's sizes are GiB under that name.
pub const GIB: u64 = 1 << 30;

/// Bytes in GiB, for people.
pub fn in_gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

/// The variable with the seed of hashes.
pub(crate) const HASH_SEED: &str = "PYTHONHASHSEED";

/// Seed of sha256_cbor's first hash. Where PYTHONHASHSEED is not set, the one of vLLM 0.32 and LMCache 0.5.6.
pub fn hash_seed() -> String {
    std::env::var(HASH_SEED).unwrap_or_else(|_| DEFAULT_SEED.into())
}

/// Advice on the setting that isolates tenants.
const ISOLATION_ADVICE: &str = "set --eviction-policy IsolatedLRU, or \"eviction\": {\"eviction_policy\": \"IsolatedLRU\"} in an --l2-adapter";

/// What to do with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunMode {
    /// Start a server.
    Start,
    /// `--check-config`: report and stop.
    Check,
}

/// What a command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// Run (or only check) this configuration.
    Run {
        /// The checked configuration.
        config: Box<ServerConfig>,
        /// What to do with it.
        mode: RunMode,
    },
    /// `--help` or `--version`: text to print, then stop.
    Print(String),
}

/// A checked configuration: the flags, and what follows from them and from the machine. Every value is in its range.
///
/// ```
/// use kvtier_config::ServerConfig;
///
/// let config = ServerConfig::from_flags(&["--l1-size-gb", "1", "--port", "6000"])?;
/// assert_eq!(config.l1_bytes, 1 << 30);
/// assert_eq!(config.bind_address(), "tcp://127.0.0.1:6000");
///
/// let error = ServerConfig::from_flags(&["--l1-size-gb", "-1"]).unwrap_err();
/// assert!(error.to_string().contains("--l1-size-gb"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The flags. A value that needs no more than its parser is read from here.
    pub args: ServerArgs,
    /// Identity of this server in logs and metrics.
    pub instance_id: String,
    /// Threads for copies and the store/retrieve class.
    pub transfer_workers: usize,
    /// Threads for lookups and everything else that is not a copy.
    pub control_workers: usize,
    /// POSIX shm segment that holds the L1 arena; `None` keeps it in anonymous memory.
    pub shm_name: Option<String>,
    /// Whether `shm_name` was asked for by name rather than chosen by us.
    pub shm_required: bool,
    /// One object group per sliding-window size.
    pub separate_object_groups: bool,
    /// Kind of the untyped bytes in the pages of a model.
    pub byte_pages: BTreeMap<String, String>,
    /// Silence after which a worker that has pinged is considered dead; `None` = never.
    pub worker_reap_timeout: Option<Duration>,
    /// How long the thread of the request port looks for more work before it sleeps.
    pub busy_poll: Duration,
    /// Bytes of L1.
    pub l1_bytes: u64,
    /// Origin of `l1_bytes`.
    pub l1_origin: L1Origin,
    /// What this process may use of the machine's memory.
    pub memory: HostMemory,
    /// Touch all of L1 in the background after start.
    pub l1_prefault: bool,
    /// The tiers below L1; `None` without any.
    pub l2: Option<L2Config>,
    /// Location of what outlives the process.
    pub state: StateSettings,
    /// What tenants may have.
    pub quotas: QuotaSettings,
    /// How GPUs are found and used; `None` when they are not.
    pub cuda: Option<CudaOptions>,
    /// Flags that were given and mean nothing without a GPU.
    pub gpu_flags: Vec<String>,
    /// Address of the HTTP API, and where the secrets are that guard it.
    pub http: HttpConfig,
    /// Largest message a client may send, bytes.
    pub max_message_bytes: u64,
    /// Collector of traces; `None` without any.
    pub tracing: Option<TracingConfig>,
    /// Flags that were given and have no effect: LMCache's that are only known, and ours with what they need.
    pub ignored: Vec<String>,
    /// All flags as given, by section, for `GET /config`; without secrets.
    pub shown: serde_json::Value,
    /// What was given, for [`ServerConfig::read_again`].
    pub given: Given,
}

impl Deref for ServerConfig {
    type Target = ServerArgs;

    fn deref(&self) -> &ServerArgs {
        &self.args
    }
}

impl ServerConfig {
    /// Parses the arguments that follow `kvtier server`.
    ///
    /// # Errors
    /// One line naming the flag (or the file's key), the value and what is allowed.
    pub fn parse<I>(args: I) -> Result<Parsed>
    where
        I: IntoIterator<Item = OsString>,
    {
        let parsed = file::parse_with_file(args.into_iter().collect());
        // Whatever was refused may have been, or held, a secret.
        parsed.map_err(|error| error.map_text(redact::text))
    }

    /// The configuration of `kvtier server` with these flags, for tests and embedding. Without `--state-dir` it keeps no
    /// state.
    ///
    /// # Errors
    /// As [`ServerConfig::parse`]; asking for help is an error here.
    pub fn from_flags(args: &[&str]) -> Result<Self> {
        let all = ["--state-dir", "none"].iter().chain(args);
        match Self::parse(all.map(OsString::from))? {
            Parsed::Run { config, .. } => Ok(*config),
            Parsed::Print(_) => Err(Error::refused("help is not a configuration")),
        }
    }

    /// Origin of L1's size, for people.
    pub fn l1_origin(&self) -> String {
        match self.l1_origin {
            L1Origin::Given => "as asked for".to_owned(),
            L1Origin::Memory => format!("a quarter of {}", self.memory),
            L1Origin::Shm => "45 % of /dev/shm, so that a restart finds free space".to_owned(),
        }
    }

    /// Warnings for the operator, except those of the tiers and of the access to HTTP.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let warnings = [
            self.memory_warning(),
            self.quota_warning(),
            self.exposure_warning(),
            self.tenants.warning(),
        ];
        let warnings = warnings.into_iter().flatten();
        warnings.chain(self.free_space_warnings())
    }

    /// A warning per tier whose file system has less than it is to leave free, or may take.
    fn free_space_warnings(&self) -> impl Iterator<Item = String> {
        let l2 = self.l2.iter();
        l2.flat_map(|l2| {
            l2.file_systems().filter_map(|(adapter, size)| {
                let (name, free, gib) = (adapter.tier(), l2.min_free_bytes, in_gib(size));
                if free >= size {
                    return Some(format!(
                        "--l2-min-free-gb: {:.2} GiB are to stay free where tier {name} is, and the file system has {gib:.2} \
                         GiB in all; nothing will be stored there",
                        in_gib(free)
                    ));
                }
                let capacity = adapter.capacity_bytes().filter(|capacity| *capacity > size - free)?;
                Some(format!(
                    "--l2-adapter: tier {name} has a max_capacity_gb of {:.2}, and its file system {gib:.2} GiB in all, with \
                     {:.2} to stay free; it evicts when the file system is full",
                    in_gib(capacity),
                    in_gib(free)
                ))
            })
        })
    }

    /// What a chunk hash depends on besides the tokens: the algorithm, and its seed if that is not the default.
    pub fn hashing(&self) -> String {
        let (algorithm, seed) = (self.hash_algorithm, hash_seed());
        if algorithm.is_seeded() && seed != DEFAULT_SEED {
            format!("{algorithm}\0{seed}")
        } else {
            algorithm.to_string()
        }
    }

    /// What is wrong with an L1 that the machine cannot keep in memory.
    pub fn memory_warning(&self) -> Option<String> {
        let is_larger = self.l1_bytes > self.memory.bytes && self.memory.limit.is_none();
        is_larger.then(|| {
            format!(
                "--l1-size-gb: L1 of {:.2} GiB is more than {}, {:.2} GiB; as it fills, the system will swap or kill \
                 the server",
                in_gib(self.l1_bytes),
                self.memory,
                in_gib(self.memory.bytes)
            )
        })
    }

    /// Refuses an L1 above the memory limit of this process's cgroup. An earlier server has left `kept` bytes of it. Hugepages
    /// have a limit of their own.
    ///
    /// # Errors
    /// Both numbers, and what is allowed.
    pub fn check_memory(&self, kept: u64) -> Result<()> {
        if self.l1_use_hugepages {
            Ok(())
        } else {
            self.memory.check_l1(self.l1_bytes, kept)
        }
    }

    /// Reads the file of `--config` again, and returns the configuration with it and what it changes.
    ///
    /// # Errors
    /// As [`ServerConfig::parse`], or there is no such file, or it changes flags that need a restart: these are named.
    pub fn read_again(&self) -> Result<(Self, Vec<Change>)> {
        reload::read_again(self)
    }

    /// The path of the request socket, where it is one.
    pub fn ipc_path(&self) -> Option<&Path> {
        self.host.strip_prefix(IPC).map(Path::new)
    }

    /// The address of the request socket, for messages. `localhost` is IPv4 loopback, as it is for every client of this
    /// protocol; any other name is one of an interface.
    pub fn bind_address(&self) -> String {
        let host = match self.host.as_str() {
            ipc if ipc.starts_with(IPC) => return ipc.to_owned(),
            "localhost" => "127.0.0.1".into(),
            address if address.contains(':') && !address.starts_with('[') => format!("[{address}]"),
            host => host.to_string(),
        };
        match self.port {
            0 => format!("tcp://{host}:*"),
            port => format!("tcp://{host}:{port}"),
        }
    }

    /// The kind of the untyped bytes in a model's pages, if it was given.
    pub fn byte_kind(&self, model: &str) -> Option<&str> {
        self.byte_pages.get(model).map(String::as_str)
    }

    /// What it means that others than this host's reach the request socket, if they do.
    pub fn exposure_warning(&self) -> Option<String> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let is_local = match host.parse::<IpAddr>() {
            Ok(ip) => is_loopback(ip),
            Err(_) => self.ipc_path().is_some() || ["localhost", "lo"].contains(&host),
        };
        (!is_local).then(|| {
            format!(
                "--host {}: the request port is reachable from other hosts and the protocol knows no authentication: any \
                 client that reaches it reads, replaces and removes the cached data of every tenant; let only engines reach it, or give \
                 --host ipc://PATH for those on this host",
                self.host
            )
        })
    }

    /// The tiers, L1 first.
    pub fn places(&self) -> Vec<TierPlace> {
        let isolates = |kind: EvictionKind| kind.build().isolates();
        let l1 = TierPlace {
            name: "l1".into(),
            isolates: isolates(self.eviction_policy.kind()),
            capacity: Some(self.l1_bytes),
            location: None,
        };
        let adapters = self.l2.iter().flat_map(|l2| &l2.adapters);
        let below = adapters.map(|adapter| TierPlace {
            name: adapter.tier().into(),
            // Nothing leaves what is only read.
            isolates: !is_read_only(adapter)
                && adapter
                    .eviction
                    .is_some_and(|eviction| isolates(eviction.policy)),
            capacity: adapter.capacity_bytes(),
            location: Some(location(adapter)),
        });
        std::iter::once(l1).chain(below).collect()
    }

    fn isolates(&self) -> bool {
        self.places().iter().any(|place| place.isolates)
    }

    /// Refuses strict limits that no tier would enforce.
    fn check_quotas(self) -> Result<Self> {
        if self.quotas.mode == QuotaMode::Strict && !self.isolates() {
            Err(Error::refused(format!(
                "--quota-mode strict: no tier keeps tenants apart; {ISOLATION_ADVICE}"
            )))
        } else {
            Ok(self)
        }
    }

    /// What does not do what it looks like.
    pub fn quota_warning(&self) -> Option<String> {
        let quotas = &self.quotas;
        if self.isolates() {
            match (&quotas.file, &self.state.base) {
                (None, Err(why)) => Some(format!(
                    "quotas that are set over HTTP end with this process: {why}, and no --quota-file"
                )),
                _ => None,
            }
        } else {
            let limits = quotas.default_limit.0.map(|_| "--quota-default");
            let file = quotas.file.as_ref().map(|_| "--quota-file");
            Some(format!(
                "{}: quotas have no effect, since no tier keeps tenants apart; {ISOLATION_ADVICE}",
                limits.or(file)?
            ))
        }
    }

    /// Why the pool that is wanted cannot be in /dev/shm, if it does not fit there, or in place of an old one of its name.
    pub fn shm_shortage(&self) -> Option<String> {
        let shm = Space::of_pool(self.shm_name.as_ref()?)?;
        (shm.free < self.l1_bytes).then(|| self.describe_shortage(shm.free))
    }

    /// What to do about a /dev/shm that has only `available` bytes for the pool. A segment larger than its file system can
    /// be created, but a process that touches the part that does not fit is killed.
    pub fn describe_shortage(&self, available: u64) -> String {
        format!(
            "/dev/shm has {:.2} GiB free, L1 needs {:.2} GiB; enlarge it, lower --l1-size-gb, or give --shm-name \"\" to do \
             without the pool (an earlier server's pool takes its space until each worker that maps it has registered \
             again or ended; after that, a restart gets the pool)",
            in_gib(available),
            in_gib(self.l1_bytes)
        )
    }
}

#[cfg(test)]
mod tests;
