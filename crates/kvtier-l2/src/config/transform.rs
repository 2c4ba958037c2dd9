//! Configuration of transformations.

use serde_json::Value;

use super::error::{ConfigError, clip};
use super::key::{Fallback, Interval, Key, Shape, refuse_rest};
use super::options::Options;
use crate::redact;
use crate::transform::aesgcm::{AesBits, AesFrame};
use crate::transform::fp8::Fp8Format;

const fn workers() -> Key {
    Key::integer(
        "max_workers",
        1,
        1024,
        "Objects that are transformed at once",
    )
    .or(Fallback::Integer(1))
}

const fn scratch() -> Key {
    Key::number(
        "scratch_gb",
        Interval::above(0.0).up_to(1024.0),
        "Memory for transformed objects beside L1, half for stores and half for loads; calls wait for it. A larger object is transformed alone",
    )
    .unit("GiB")
    .or(Fallback::Number(0.25))
}

const fn kind() -> Key {
    Key::text("type", "Type of the transformation").required()
}

/// Keys of an earlier master key.
const EARLIER_KEYS: &[Key] = &[Key::path("path", "File with the key").required()];

/// Keys of `aesgcm`.
pub(crate) const AESGCM_KEYS: &[Key] = &[
    kind(),
    Key::of(
        "key_provider",
        Shape::OneOf(&["hkdf"]),
        "Origin of the keys: derived from a master key",
    )
    .or(Fallback::Text("hkdf")),
    Key::path(
        "master_key_path",
        "File whose bytes are the master key, at best 32 random ones; readable by the server only",
    )
    .required(),
    Key::of(
        "earlier_keys",
        Shape::Tables(EARLIER_KEYS),
        "Former master keys, for loads of earlier objects; needs the frame bound, which names its key",
    ),
    Key::integer("aes_bits", 128, 256, "Length of the derived keys: 128 or 256")
        .unit("bits")
        .or(Fallback::Integer(128)),
    Key::of(
        "frame",
        Shape::OneOf(&["lmcache", "bound"]),
        "Form of the stored bytes: LMCache's (29 bytes more), or bound to the object (25 bytes more, and 16 per 64 KiB), so that none can replace another",
    )
    .or(Fallback::Text("lmcache")),
    workers(),
    scratch(),
];

/// Keys of `compress`.
pub(crate) const COMPRESS_KEYS: &[Key] = &[
    kind(),
    Key::of(
        "element",
        Shape::OneOf(&["bfloat16"]),
        "Type of the values; objects of other types are not stored, as a rule",
    )
    .or(Fallback::Text("bfloat16")),
    workers(),
    scratch(),
];

/// Keys of `fp8`.
pub(crate) const FP8_KEYS: &[Key] = &[
    kind(),
    Key::of(
        "fp8_dtype",
        Shape::OneOf(&["float8_e4m3fn", "float8_e5m2"]),
        "Type of the stored values",
    )
    .or(Fallback::Text("float8_e4m3fn")),
    workers(),
    scratch(),
];

/// A checked transformation.
#[derive(Debug, Clone, PartialEq)]
pub struct SerdeConfig {
    pub(crate) kind: SerdeKind,
    /// Objects that are transformed at once.
    pub(crate) workers: u32,
    /// Memory for transformed objects.
    pub(crate) scratch_bytes: u64,
}

/// Type of a transformation, with its options.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SerdeKind {
    Compress,
    Fp8(Fp8Format),
    AesGcm {
        frame: AesFrame,
        bits: AesBits,
        /// Key files, the current one first.
        paths: Vec<String>,
    },
}

impl SerdeKind {
    /// Returns the name of the transformation if it takes values rather than bytes.
    fn of_values(&self) -> Option<&'static str> {
        match self {
            Self::Compress => Some("compress"),
            Self::Fp8(_) => Some("fp8"),
            Self::AesGcm { .. } => None,
        }
    }
}

impl SerdeConfig {
    /// Parses the key `serde`: an object, or a list of them in the order of a store.
    ///
    /// # Errors
    /// The first mistake in it.
    pub(crate) fn parse_all(owner: &str, value: &Value) -> Result<Vec<Self>, ConfigError> {
        let Value::Array(list) = value else {
            return Ok(vec![Self::parse(&format!("{owner}: serde"), value)?]);
        };
        let one = |(at, value)| Self::parse(&format!("{owner}: serde[{at}]"), value);
        let all: Vec<_> = list.iter().enumerate().map(one).collect::<Result<_, _>>()?;
        match all.iter().skip(1).find_map(|one| one.kind.of_values()) {
            Some(kind) => Err(ConfigError::new(format!(
                "{owner}: serde: {kind} behind another type finds no values; give one of compress and fp8 first, and once"
            ))),
            None => Ok(all),
        }
    }

    fn parse(owner: &str, value: &Value) -> Result<Self, ConfigError> {
        let shown = |value: &Value| clip(&redact::value(value).to_string());
        let Value::Object(map) = value else {
            return Err(ConfigError::new(format!(
                "{owner}: {} is not allowed; give an object with a \"type\"",
                shown(value)
            )));
        };
        let given = map.get("type").unwrap_or(&Value::Null);
        match given.as_str() {
            Some("aesgcm") => Self::aesgcm(owner, map.clone()),
            Some("compress") => Self::compress(owner, map.clone()),
            Some("fp8") => Self::fp8(owner, map.clone()),
            Some("turboquant") => Err(ConfigError::new(format!(
                "{owner}: type \"turboquant\" is not built into kvtier, as LMCache computes it on a GPU with torch's random \
                 numbers; give aesgcm, compress, fp8, or no serde"
            ))),
            _ => Err(ConfigError::new(format!(
                "{owner}: key \"type\": {} is not allowed; give aesgcm, compress or fp8",
                shown(given)
            ))),
        }
    }

    fn compress(owner: &str, mut map: serde_json::Map<String, Value>) -> Result<Self, ConfigError> {
        refuse_rest(owner, &map, COMPRESS_KEYS)?;
        let options = Options::take(owner, COMPRESS_KEYS, &mut map)?;
        Ok(Self {
            kind: SerdeKind::Compress,
            workers: options.get("max_workers"),
            scratch_bytes: options.gib("scratch_gb"),
        })
    }

    fn fp8(owner: &str, mut map: serde_json::Map<String, Value>) -> Result<Self, ConfigError> {
        refuse_rest(owner, &map, FP8_KEYS)?;
        let options = Options::take(owner, FP8_KEYS, &mut map)?;
        let format = match options.get::<&str>("fp8_dtype") {
            "float8_e5m2" => Fp8Format::E5M2,
            _ => Fp8Format::E4M3,
        };
        Ok(Self {
            kind: SerdeKind::Fp8(format),
            workers: options.get("max_workers"),
            scratch_bytes: options.gib("scratch_gb"),
        })
    }

    fn aesgcm(owner: &str, mut map: serde_json::Map<String, Value>) -> Result<Self, ConfigError> {
        refuse_rest(owner, &map, AESGCM_KEYS)?;
        let options = Options::take(owner, AESGCM_KEYS, &mut map)?;
        let bits = match options.get::<u32>("aes_bits") {
            128 => AesBits::Aes128,
            256 => AesBits::Aes256,
            _ => return Err(options.refuse("aes_bits", "128 or 256")),
        };
        let frame = match options.get::<&str>("frame") {
            "bound" => AesFrame::Bound,
            _ => AesFrame::Lmcache,
        };
        let earlier: &[Options] = options.get("earlier_keys");
        if frame == AesFrame::Lmcache && !earlier.is_empty() {
            let allowed =
                "none with the frame lmcache, which does not name its key, or \"frame\": \"bound\"";
            return Err(options.refuse("earlier_keys", allowed));
        }
        let mut paths = vec![options.get::<String>("master_key_path")];
        paths.extend(earlier.iter().map(|options| options.get::<String>("path")));
        Ok(Self {
            kind: SerdeKind::AesGcm { frame, bits, paths },
            workers: options.get("max_workers"),
            scratch_bytes: options.gib("scratch_gb"),
        })
    }
}
