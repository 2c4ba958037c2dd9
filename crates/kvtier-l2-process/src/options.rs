//! Options of a tier in a process of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::ProcessAdapter;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, ErrorKind, L2Error, Registry,
    config::{Fallback, Interval, Key, MAX_CAPACITY_GB, Options, Shape},
    redact::Literals,
};

/// Longest path of a unix socket, in bytes.
const MAX_SOCKET_PATH: usize = 107;

/// Longest `options`, in bytes of JSON: they fit the hello.
const MAX_OPTIONS: usize = 1 << 20;

/// Options of a tier in a process of its own.
#[derive(Clone)]
pub struct ProcessOptions {
    /// The tier, for log lines.
    pub tier: Arc<str>,
    /// Path of the unix socket.
    pub socket_path: PathBuf,
    /// Program and arguments that are started and kept running; empty if others start it.
    pub command: Vec<String>,
    /// Passed to the tier.
    pub options: Map<String, Value>,
    /// Secrets that the tier knows, which are shown in none of its texts.
    pub secrets: Literals,
    /// Bytes of the shared memory of a connection.
    pub shared_memory_bytes: u64,
    /// Objects without metadata are loaded too.
    pub trust_missing_layout: bool,
    /// Objects without a checksum are misses.
    pub require_checksum: bool,
    /// Longest silence of a tier that has to answer.
    pub request_timeout: Duration,
}

impl ProcessOptions {
    /// Returns the options of a configuration.
    #[must_use]
    pub fn of(config: &AdapterConfig) -> Self {
        let options = &config.options;
        let command: &[String] = options.get("command");
        let passed = options.find::<&Map<String, Value>>("options");
        let passed = passed.cloned().unwrap_or_default();
        let secrets = Literals::of(&json!([passed, command]));
        Self {
            tier: config.tier().into(),
            socket_path: options.get::<&str>("socket_path").into(),
            secrets: if command.is_empty() {
                secrets
            } else {
                secrets.with_environment()
            },
            command: command.to_vec(),
            options: passed,
            shared_memory_bytes: options.get::<u64>("shared_memory_mb") << 20,
            trust_missing_layout: options.get("trust_missing_layout"),
            require_checksum: config.guards.require_checksum,
            request_timeout: Duration::from_secs_f64(options.get("request_timeout")),
        }
    }

    /// Returns an error with the socket's name. The text may be the tier's.
    pub(super) fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        let path = self.socket_path.display();
        L2Error::new(kind, format!("{path}: {}", self.secrets.hide(what)))
    }
}

const KEYS: &[Key] = &[
    Key::path("socket_path", "Path of the unix socket that the tier listens on").required(),
    Key::of(
        "command",
        Shape::Texts,
        "Program and arguments of the tier, which kvtier starts, restarts and ends; empty: others start it",
    ),
    Key::of(
        "options",
        Shape::Object,
        "Passed to the tier unchanged",
    ),
    MAX_CAPACITY_GB,
    Key::integer(
        "shared_memory_mb",
        1,
        1 << 20,
        "Shared memory for bytes of objects in flight; larger objects are not stored",
    )
    .unit("MiB")
    .or(Fallback::Integer(256)),
    Key::switch(
        "trust_missing_layout",
        "Load objects without metadata, such as those of other programs, and use a tier that keeps none; only if all engines of \
         a model that write there agree in type, block size and form of its pages, CPU engines also in processor and release",
    ),
    Key::number(
        "request_timeout",
        Interval::above(0.0).up_to(3600.0),
        "Longest silence of a tier that has to answer; then the connection is closed, and a command started again",
    )
    .unit("s")
    .or(Fallback::Number(30.0)),
];

fn check(options: &Options) -> Result<(), ConfigError> {
    let path = options.get::<&str>("socket_path");
    if !path.starts_with('/') || path.len() > MAX_SOCKET_PATH {
        let allowed = format!("an absolute path of at most {MAX_SOCKET_PATH} bytes");
        return Err(options.refuse("socket_path", &allowed));
    }
    let command = options.get::<&[String]>("command");
    if command.iter().any(|word| word.contains('\0')) {
        return Err(options.refuse("command", "a list of texts without NUL"));
    }
    let passed = options.find::<&Map<String, Value>>("options");
    let len = passed.and_then(|passed| serde_json::to_vec(passed).ok());
    if len.is_some_and(|text| text.len() > MAX_OPTIONS) {
        let allowed = format!("an object of at most {MAX_OPTIONS} bytes");
        return Err(options.refuse("options", &allowed));
    }
    Ok(())
}

fn ineffective(config: &AdapterConfig, given: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    let is_trusting: bool = config.options.get("trust_missing_layout");
    let lines = [
        (
            !config.persist_enabled,
            "persist_enabled changes nothing: the tier decides what it keeps",
        ),
        (
            given("checksums") && !is_trusting,
            "checksums changes nothing: each object has a checksum in its metadata",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    Ok(Arc::new(ProcessAdapter::open(&ProcessOptions::of(config))))
}

/// A tier that speaks `docs/tier-protocol.md`.
pub const PROCESS: AdapterType = AdapterType::new(
    "process",
    "Keeps objects in a program of your own, in any language, by a unix socket and shared memory",
    KEYS,
    open,
)
.check(check)
.ineffective(ineffective);
