//! The flags of `kvtier server` and their defaults.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use kvtier_core::hashing::HashAlgorithm;

use super::values::{
    EngineType, EvictionPolicyName, L1Restore, LogFormat, PrefetchPolicy, QuotaModeName,
    StorePolicy, TransferMode, Transport, WindowedClients, parse_alignment, parse_byte_pages,
    parse_gib, parse_mode, parse_reap_timeout, parse_share, parse_watermark, seconds,
};
use super::{TenantSettings, gpu::GpuSettings};
use crate::limit::Limit;

/// Flags of `kvtier server`. Names, meanings and defaults are those of LMCache 0.5.6's `lmcache server` where it has
/// them; where a default differs the help says so.
#[derive(Clone, Parser)]
#[command(
    name = "kvtier server",
    version,
    about = "Serve a KV cache to LMCache clients",
    args_override_self = true,
    next_line_help = true
)]
pub struct ServerArgs {
    /// TOML file with the same keys as these flags, without the leading dashes; the command line wins
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub(super) config: Option<PathBuf>,
    /// Check the configuration and what it needs (ports, memory, /dev/shm, NUMA nodes, the CUDA driver, the tiers),
    /// report, and stop. Each tier stores, loads and deletes one object, unless its directory or device does not exist
    /// yet, or has "force". Nothing is left behind, but an empty device is formatted
    #[arg(long, help_heading = "Configuration")]
    pub(super) check_config: bool,
    /// Refuse flags without effect, which otherwise cause a warning
    #[arg(long, help_heading = "Configuration")]
    pub(super) strict_flags: bool,

    /// Identity of this server in logs and metrics [default: kvtier-<port>, or the path of an ipc:// host]
    #[arg(long, help_heading = "Request server")]
    pub(super) instance_id: Option<String>,
    /// Directory of what outlives the process, such as quotas, in a folder per instance id [default: $STATE_DIRECTORY
    /// of systemd, else /var/lib/kvtier for root, else $XDG_STATE_HOME/kvtier or ~/.local/state/kvtier; with --port 0
    /// and no instance id, or with none, nothing is kept]
    #[arg(
        long,
        env = "KVTIER_STATE_DIR",
        hide_env = true,
        value_name = "DIR",
        help_heading = "Request server"
    )]
    pub(super) state_dir: Option<PathBuf>,
    /// Transport of the request protocol
    #[arg(
        long,
        value_enum,
        default_value = "zmq",
        help_heading = "Request server"
    )]
    pub(super) transport: Transport,
    /// Address of the request socket: localhost, an IP address, a network interface, or ipc:// and a path (LMCache's
    /// clients append a colon and their port, as in ipc:///run/kvtier.sock:5555)
    #[arg(long, default_value = "localhost", help_heading = "Request server")]
    pub host: String,
    /// Mode of a request socket that is a path, octal; users with write permission may connect
    #[arg(long, default_value = "0600", value_parser = parse_mode, value_name = "MODE", help_heading = "Request server")]
    pub ipc_mode: u32,
    /// Port of the request socket; 0 lets the system choose one
    #[arg(long, default_value_t = 5555, help_heading = "Request server")]
    pub port: u16,
    /// Tokens of one chunk, 1 to 65536; a multiple of the engine's block size
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Request server")]
    pub chunk_size: u32,
    /// Stores and removals that are kept for routers (docs/vllm.md), 0 to 1048576; with 0 none are, and clients announce their own
    /// stores only
    #[arg(long, default_value_t = 32768, value_parser = clap::value_parser!(u32).range(0..=1 << 20), help_heading = "Request server")]
    pub kv_event_log_size: u32,
    /// Block id that an engine uses for absent KV data
    #[arg(long, default_value_t = 0, help_heading = "Request server")]
    pub null_block_id: i64,
    /// Worker threads of each pool, 1 to 256 [default: the number of cores, at most 4; LMCache: 1]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Request server")]
    pub(super) max_workers: Option<u16>,
    /// Threads that copy (store and retrieve), 1 to 256 [default: --max-workers]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Request server")]
    pub(super) max_gpu_workers: Option<u16>,
    /// Threads for lookups and other requests, 1 to 256 [default: --max-workers]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Request server")]
    pub(super) max_cpu_workers: Option<u16>,
    /// Algorithm of chunk hashes: blake3, sha256_cbor, or sha256_cbor_64bit (the same as sha256_cbor)
    #[arg(long, default_value = "blake3", help_heading = "Request server")]
    pub hash_algorithm: HashAlgorithm,
    /// What prompts have from the cache: their prefix; with blend also chunks of other prompts (docs/blend.md)
    #[arg(
        long,
        value_enum,
        default_value = "default",
        help_heading = "Request server"
    )]
    pub engine_type: EngineType,
    /// Chunks that can be found elsewhere than in a prefix, with --engine-type blend, 1 to 67108864; each takes 64 bytes, and
    /// the oldest is forgotten first
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=1 << 26), help_heading = "Request server")]
    pub blend_max_segments: u32,
    /// Transfer modes that workers may use (LMCache's default is lmcache_driven, which leaves CPU workers without an
    /// answer)
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        help_heading = "Request server"
    )]
    pub supported_transfer_mode: TransferMode,
    /// POSIX shared memory segment of L1, for engine-driven workers; "" switches it off [default:
    /// lmcache_l1_pool_kvtier_<port> if /dev/shm is large enough, with an ipc:// host a hash of its path for the port;
    /// LMCache: off]
    #[arg(long, help_heading = "Request server")]
    pub(super) shm_name: Option<String>,
    /// One object group for all layers, even if their sliding windows differ (LMCache's default). A chunk is then
    /// stored only if the engine has data for every layer, so hybrid models have fewer hits
    #[arg(
        long,
        overrides_with = "separate_object_groups",
        help_heading = "Request server"
    )]
    pub(super) no_separate_object_groups: bool,
    #[arg(long, hide = true)]
    separate_object_groups: bool,
    /// LMCache's workers that register layers with sliding windows or recurrent states: refuse gives them no cache,
    /// allow serves them although a hit may be wrong (docs/vllm.md)
    #[arg(
        long,
        value_enum,
        default_value = "refuse",
        help_heading = "Request server"
    )]
    pub windowed_clients: WindowedClients,
    /// The --kv-cache-dtype of all engines of a model whose pages are untyped bytes (fp8, int8, 4 bits), which
    /// LMCache's clients do not send; objects of other dtypes are then not loaded (docs/identity.md). May be given
    /// several times
    #[arg(long, value_name = "MODEL=DTYPE", value_parser = parse_byte_pages, help_heading = "Request server")]
    pub(super) byte_pages: Vec<(String, String)>,
    /// Seconds without a ping after which a worker is considered dead; 0 (never) or at least 30
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = parse_reap_timeout, help_heading = "Request server")]
    pub(super) worker_reap_timeout_seconds: Duration,
    /// Seconds after which a worker that has never pinged is considered dead; at least the reap timeout
    #[arg(long = "worker-registration-grace-seconds", value_name = "SECONDS", default_value = "3600", value_parser = seconds(1.0), help_heading = "Request server")]
    pub registration_grace: Duration,
    /// Seconds that a stop may take in addition to --l2-drain-timeout-seconds; then the process ends in any case
    #[arg(long = "stop-timeout-seconds", value_name = "SECONDS", default_value = "20", value_parser = seconds(1.0), help_heading = "Request server")]
    pub stop_timeout: Duration,
    /// Maximum lifetime of a request session in seconds
    #[arg(long = "session-ttl-seconds", value_name = "SECONDS", default_value = "600", value_parser = seconds(1.0), help_heading = "Request server")]
    pub session_ttl: Duration,
    /// Microseconds that the thread of the request port polls before it sleeps; 0 spares the processor and adds a
    /// wake-up to each request, 1000000 keeps a core busy
    #[arg(
        long,
        default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(0..=1_000_000),
        help_heading = "Request server"
    )]
    pub(super) busy_poll_us: u32,
    /// Largest message a client may send, GiB; frames above 4 GiB are never accepted
    #[arg(
        long,
        value_name = "GB",
        default_value_t = 1.0,
        value_parser = parse_gib,
        help_heading = "Request server"
    )]
    pub(super) max_message_gb: f64,

    /// Size of L1 in GiB [default: a quarter of the memory of the machine or its cgroup; as a pool in /dev/shm at most
    /// 45 % of /dev/shm]
    #[arg(long, value_name = "GB", value_parser = parse_gib, help_heading = "L1")]
    pub(super) l1_size_gb: Option<f64>,
    /// LMCache's form of --l1-size-gb: {"type": "DRAM", "size_gb": 20}; other fields are refused with the name of their
    /// flag
    #[arg(long, value_name = "JSON", help_heading = "L1")]
    pub(super) l1_manager: Vec<String>,
    /// Alignment of objects in L1, bytes; a power of two from 64 to 2097152
    #[arg(long, default_value_t = 4096, value_parser = parse_alignment, help_heading = "L1")]
    pub l1_align_bytes: u64,
    /// Take L1 from the pool of 2 MiB hugepages; not with --shm-name. If L1 is kept (--l1-restore), it is a file in the
    /// first writable hugetlbfs
    #[arg(long, overrides_with = "no_l1_use_hugepages", help_heading = "L1")]
    pub l1_use_hugepages: bool,
    #[arg(long, hide = true)]
    no_l1_use_hugepages: bool,
    /// Do not touch L1's pages in the background after start
    #[arg(long, overrides_with = "l1_prefault", help_heading = "L1")]
    pub(super) no_l1_prefault: bool,
    #[arg(long, hide = true)]
    l1_prefault: bool,
    /// Whether L1 is kept for the next server of the instance, in /dev/shm or with --l1-use-hugepages in a hugetlbfs;
    /// needs --state-dir. auto keeps it where possible, on warns where not, off removes it
    #[arg(long, value_enum, default_value = "auto", help_heading = "L1")]
    pub l1_restore: L1Restore,
    /// Seconds after which an uncommitted reservation expires
    #[arg(long = "l1-write-ttl-seconds", value_name = "SECONDS", default_value = "600", value_parser = seconds(1.0), help_heading = "L1")]
    pub write_ttl: Duration,
    /// Seconds after which unused leases of a lookup expire
    #[arg(long = "l1-read-ttl-seconds", value_name = "SECONDS", default_value = "300", value_parser = seconds(1.0), help_heading = "L1")]
    pub read_ttl: Duration,
    /// Eviction policy of L1
    #[arg(
        long,
        value_enum,
        default_value = "LRU",
        ignore_case = true,
        help_heading = "L1"
    )]
    pub eviction_policy: EvictionPolicyName,
    /// Share of L1 in use at which the background pass evicts, above 0 up to 1
    #[arg(long, default_value_t = 0.8, value_parser = parse_watermark, help_heading = "L1")]
    pub eviction_trigger_watermark: f64,
    /// Share of the bytes in use that the background pass evicts, 0 to 1
    #[arg(long, default_value_t = 0.2, value_parser = parse_share, help_heading = "L1")]
    pub eviction_ratio: f64,
    /// Share of L1, and of a tenant's quota, that objects pinned by their requests (kvtier.keep_seconds) may take, 0
    /// (no pins) to 1
    #[arg(long, default_value_t = 0.1, value_parser = parse_share, help_heading = "L1")]
    pub max_pinned_share: f64,

    /// A second tier, as JSON with a "type" (docs/l2.md); may be given several times, the first one is asked first
    #[arg(long, value_name = "JSON", help_heading = "L2")]
    pub(super) l2_adapter: Vec<String>,
    /// default: objects stay in L1 once every tier has them; skip_l1: they are removed
    #[arg(long, value_enum, default_value = "default", help_heading = "L2")]
    pub(super) l2_store_policy: StorePolicy,
    /// retain: loaded objects stay in L1 until they are evicted; default (LMCache's default): they are removed at the
    /// end of their request, so a hot prefix is read from L2 every time
    #[arg(long, value_enum, default_value = "retain", help_heading = "L2")]
    pub(super) l2_prefetch_policy: PrefetchPolicy,
    /// Lookups that may ask the tiers at the same time, 1 to 4096; the others wait
    #[arg(
        long,
        default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=4096),
        help_heading = "L2"
    )]
    pub(super) l2_prefetch_max_in_flight: u16,
    /// Seconds that a lookup asks the tiers, queueing included; its answer is what is known by then
    #[arg(long = "l2-lookup-timeout-seconds", value_name = "SECONDS", default_value = "2", value_parser = seconds(0.001), help_heading = "L2")]
    pub(super) l2_lookup_timeout: Duration,
    /// Seconds that a lookup waits for loads; its answer is what is in L1 by then
    #[arg(long = "l2-load-timeout-seconds", value_name = "SECONDS", default_value = "15", value_parser = seconds(0.001), help_heading = "L2")]
    pub(super) l2_load_timeout: Duration,
    /// GiB of L1 that may wait to be stored in a tier, at most half of L1; further objects are not stored there
    /// [default: a quarter of L1, shared by all tiers]
    #[arg(long, value_parser = parse_gib, help_heading = "L2")]
    pub(super) l2_store_queue_gb: Option<f64>,
    /// Seconds that a stop waits for objects that are not stored in the tiers yet
    #[arg(long = "l2-drain-timeout-seconds", value_name = "SECONDS", default_value = "10", value_parser = seconds(0.0), help_heading = "L2")]
    pub(super) l2_drain_timeout: Duration,
    /// GiB of a tier's disk that stay free, 0 or more
    #[arg(long, default_value_t = 1.0, value_parser = parse_gib, help_heading = "L2")]
    pub(super) l2_min_free_gb: f64,

    /// soft (LMCache's): stores are accepted, and eviction brings the tenant below its watermark; strict: a store
    /// beyond the limit is refused
    #[arg(long, value_enum, default_value = "soft", help_heading = "Tenants")]
    pub(super) quota_mode: QuotaModeName,
    /// Limit per tier of tenants without a quota: unlimited, 0 (quotas are an allow-list) or a size such as 10GiB
    /// (LMCache: always 0, and objects of such tenants are evicted within a second)
    #[arg(
        long,
        value_name = "LIMIT",
        default_value = "unlimited",
        help_heading = "Tenants"
    )]
    pub(super) quota_default: Limit,
    /// File of the quotas set over HTTP; created if missing [default: in the folder of --state-dir; LMCache keeps none]
    #[arg(long, value_name = "FILE", help_heading = "Tenants")]
    pub(super) quota_file: Option<PathBuf>,
    /// How tenants are named, and how much is reported per tenant.
    #[command(flatten)]
    pub tenants: TenantSettings,

    /// How GPUs are found and used.
    #[command(flatten)]
    pub gpu: GpuSettings,

    /// Host of the HTTP API; beyond loopback it needs tokens
    #[arg(long, default_value = "127.0.0.1", help_heading = "HTTP")]
    pub(super) http_host: String,
    /// Port of the HTTP API; 0 lets the system choose one
    #[arg(long, default_value_t = 8080, help_heading = "HTTP")]
    pub http_port: u16,
    /// Additional port that serves only /metrics [default: none; /metrics is on the HTTP port]
    #[arg(long, help_heading = "HTTP")]
    pub prometheus_port: Option<u16>,
    /// File of bearer tokens, one per line: ROLE NAME TOKEN, with the role read or admin; a reload reads it again.
    /// KVTIER_HTTP_TOKENS may have such lines too, separated by ; (docs/http.md)
    #[arg(long, value_name = "FILE", help_heading = "HTTP")]
    pub(super) http_token_file: Option<PathBuf>,
    /// Certificate chain for TLS on the HTTP ports, PEM, the server's own first; a reload reads it again
    #[arg(long, value_name = "FILE", help_heading = "HTTP")]
    pub(super) http_tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM, not encrypted; a reload reads it again
    #[arg(long, value_name = "FILE", help_heading = "HTTP")]
    pub(super) http_tls_key: Option<PathBuf>,

    /// Host of the port for peers; beyond loopback it needs a password or certificates of clients
    #[arg(long, default_value = "127.0.0.1", help_heading = "Peers")]
    pub peer_host: String,
    /// Port from which other servers, and any client of Redis' protocol, read L1; 0 lets the system choose one
    /// (docs/l2.md) [default: none]
    #[arg(long, help_heading = "Peers")]
    pub peer_port: Option<u16>,
    /// Bytes that the port for peers sends per second, at least 1048576 [default: unbounded]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1 << 20..), help_heading = "Peers")]
    pub peer_bandwidth: Option<u64>,
    /// Password of the port for peers, for the user default, and of tiers peers without one of their own. Other users of
    /// this host see it here, but not in KVTIER_PEER_PASSWORD
    #[arg(
        long,
        env = "KVTIER_PEER_PASSWORD",
        hide_env_values = true,
        value_name = "PASSWORD",
        help_heading = "Peers"
    )]
    pub peer_password: Option<String>,
    /// Certificate chain for TLS on the port for peers, PEM, the server's own first; a reload reads it again
    #[arg(long, value_name = "FILE", help_heading = "Peers")]
    pub peer_tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM, not encrypted
    #[arg(long, value_name = "FILE", help_heading = "Peers")]
    pub peer_tls_key: Option<PathBuf>,
    /// Authorities that sign certificates of peers, PEM; a peer without one is refused
    #[arg(long, value_name = "FILE", help_heading = "Peers")]
    pub peer_tls_ca: Option<PathBuf>,

    /// Send traces of requests to an OpenTelemetry collector; needs --otlp-endpoint (docs/metrics.md)
    #[arg(long, help_heading = "Traces")]
    pub enable_tracing: bool,
    /// Collector of OTLP over gRPC: http://HOST:4317, or https:// for TLS with the system's authorities.
    /// OTEL_EXPORTER_OTLP_HEADERS has its headers, such as a token. Metrics stay in /metrics (LMCache sends them here)
    #[arg(long, value_name = "URL", help_heading = "Traces")]
    pub otlp_endpoint: Option<String>,

    /// Log filter: error, warn, info, debug, trace, off, or per target as in info,kvtier=debug
    #[arg(
        long,
        env = "KVTIER_LOG_LEVEL",
        default_value = "info",
        help_heading = "Logs"
    )]
    pub log_level: String,
    /// Format of log lines
    #[arg(long, value_enum, default_value = "text", help_heading = "Logs")]
    pub log_format: LogFormat,
}

impl fmt::Debug for ServerArgs {
    /// Without values: some are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerArgs").finish_non_exhaustive()
    }
}
