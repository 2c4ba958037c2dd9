//! Values of flags: names with a meaning, and texts that are parsed.

use std::str::FromStr as _;
use std::time::Duration;

use clap::ValueEnum;
use kvtier_common::error::{Error, Result};
use kvtier_core::eviction::EvictionKind;
use tracing_subscriber::filter::{LevelFilter, Targets};

/// Most seconds of a flag: a year.
const YEAR: f64 = 31_536_000.0;

/// Transfer modes that workers may register for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum TransferMode {
    /// The server copies (STORE, RETRIEVE).
    LmcacheDriven,
    /// The worker copies (PREPARE and COMMIT).
    EngineDriven,
    /// The server or the worker copies; each worker chooses.
    Auto,
}

impl TransferMode {
    /// Whether a worker may register memory that the server copies.
    pub fn allows_lmcache_driven(self) -> bool {
        self != TransferMode::EngineDriven
    }

    /// Whether a worker may register to copy by itself.
    pub fn allows_engine_driven(self) -> bool {
        self != TransferMode::LmcacheDriven
    }
}

/// Eviction policies of L1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EvictionPolicyName {
    /// Least recently used first; within one prompt the last chunk first.
    #[value(name = "LRU")]
    Lru,
    /// An order for each cache salt, so that quotas hold; the least recently used of all first.
    #[value(name = "IsolatedLRU", alias = "UserLRU")]
    IsolatedLru,
    /// Objects used once and objects used again are kept apart, balanced by what is missed.
    #[value(name = "ARC")]
    Arc,
    /// Nothing is ever evicted; a full cache refuses stores.
    #[value(name = "noop")]
    Noop,
}

impl EvictionPolicyName {
    /// The policy.
    pub fn kind(self) -> EvictionKind {
        match self {
            EvictionPolicyName::Lru => EvictionKind::Lru,
            EvictionPolicyName::IsolatedLru => EvictionKind::IsolatedLru,
            EvictionPolicyName::Arc => EvictionKind::Arc,
            EvictionPolicyName::Noop => EvictionKind::Noop,
        }
    }
}

/// Whether workers with sliding windows or recurrent states have a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WindowedClients {
    /// Workers register, and nothing of them is stored or served.
    Refuse,
    /// Workers are served like others.
    Allow,
}

/// Shape of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line an event, coloured on a terminal only.
    Text,
    /// One JSON object an event.
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Transport {
    Zmq,
}

/// What prompts may have from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineType {
    /// Prefixes alone.
    Default,
    /// Segments of other prompts too.
    Blend,
}

/// Whether L1 outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum L1Restore {
    /// On where there is a state directory and memory that outlives the process, else off.
    Auto,
    /// The next server of the instance goes on with it, but after Ctrl-C.
    On,
    /// L1 ends with the process.
    Off,
}

/// What becomes of an object of L1 once every tier has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum StorePolicy {
    /// The object stays until it is evicted.
    Default,
    /// The object leaves L1.
    SkipL1,
}

/// What becomes of an object that was loaded into L1, once its request has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefetchPolicy {
    /// The object leaves L1, as LMCache's policy of this name has it.
    Default,
    /// The object stays until it is evicted.
    Retain,
}

/// What a limit means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum QuotaModeName {
    Soft,
    Strict,
}

/// An octal mode of a socket that its owner can use.
pub(super) fn parse_mode(text: &str) -> Result<u32> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    u32::from_str_radix(digits, 8)
        .ok()
        .filter(|mode| mode & !0o777 == 0 && mode & 0o600 == 0o600)
        .ok_or_else(|| {
            Error::refused(
                "give an octal mode from 0600 to 0777 with which the owner reads and writes",
            )
        })
}

/// A number of GiB, as flags have sizes.
///
/// # Errors
/// A refusal of the form "give ...".
pub fn parse_gib(text: &str) -> Result<f64> {
    number(
        text,
        "give GiB as a number without a unit, such as 4 or 0.5",
    )
}

/// Parser of seconds from `min` to a year.
pub(super) fn seconds(min: f64) -> impl Fn(&str) -> Result<Duration> + Clone + Send + Sync {
    move |text| {
        let allowed = || {
            Error::refused(format!(
                "give seconds as a number without a unit, from {min} to {YEAR} (a year)"
            ))
        };
        let given = number(text, "").ok().filter(|it| (min..=YEAR).contains(it));
        given.map(Duration::from_secs_f64).ok_or_else(allowed)
    }
}

/// Seconds of silence, or 0 for never.
pub(super) fn parse_reap_timeout(text: &str) -> Result<Duration> {
    let given = seconds(0.0)(text).ok();
    let given = given.filter(|it| it.is_zero() || *it >= Duration::from_secs(30));
    given.ok_or_else(|| Error::refused("give 0 (never) or seconds from 30 to 31536000 (a year)"))
}

/// A power of two.
pub(super) fn parse_alignment(text: &str) -> Result<u64> {
    let given = text.parse().ok();
    let given = given.filter(|it: &u64| it.is_power_of_two() && (64..=2 << 20).contains(it));
    given.ok_or_else(|| Error::refused("give a power of two from 64 to 2097152"))
}

/// A model, and the kind of its untyped bytes.
pub(super) fn parse_byte_pages(text: &str) -> Result<(String, String)> {
    let is_kind = |kind: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        (1..=64).contains(&kind.len()) && kind.bytes().all(allowed)
    };
    match text.rsplit_once('=') {
        Some((model, kind)) if !model.is_empty() && !model.contains(',') && is_kind(kind) => {
            Ok((model.to_owned(), kind.to_owned()))
        }
        _ => Err(Error::refused(
            "give MODEL=DTYPE: the model's name as engines send it, and 1 to 64 letters, digits and _, such as fp8_e5m2; repeat the flag for each model",
        )),
    }
}

/// A share.
pub(super) fn parse_share(text: &str) -> Result<f64> {
    let allowed = "give a share from 0 to 1, such as 0.8";
    let share = number(text, allowed)?;
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err(Error::refused(allowed))
    }
}

/// A share of what may be in use.
pub(super) fn parse_watermark(text: &str) -> Result<f64> {
    let share = parse_share(text).ok().filter(|share| *share > 0.0);
    share.ok_or_else(|| Error::refused("give a share above 0 and at most 1"))
}

fn number(text: &str, allowed: &str) -> Result<f64> {
    text.parse().map_err(|_| Error::refused(allowed))
}

/// Whether this filters log lines as it says. A bare word that is no level would be a target, which silences all others, and a span
/// or a field none that there is.
pub(super) fn is_log_filter(text: &str) -> bool {
    let is_clear = |part: &str| match part.split_once('=') {
        Some((target, _)) => !target.contains('['),
        None => LevelFilter::from_str(part).is_ok(),
    };
    text.split(',').all(is_clear) && Targets::from_str(text).is_ok()
}
