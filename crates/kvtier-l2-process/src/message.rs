//! Bodies of frames: requests are written, answers are read. No I/O; everything in an answer is hostile.

use serde::de::{DeserializeOwned, DeserializeSeed as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::frame::{MAX_BODY, Violation};
use super::results::ResultsReader;
use kvtier_l2::{ErrorKind, L2Error};

/// Version that is spoken.
const VERSION: u32 = 1;

/// Most objects per request or page.
pub(super) const MAX_BATCH: usize = 1024;

/// Longest metadata of an object, and longest name of a tier, in characters.
const MAX_META: usize = 256;
const MAX_NAME: usize = 64;

/// Longest part of a tier's message that is repeated, in characters.
const MAX_MESSAGE: usize = 200;

/// Longest position of a listing, in bytes.
pub(super) const MAX_CURSOR: usize = 8 << 10;

/// Bytes that an answer may have beside its results, and per result.
const ANSWER_BASE: usize = 4 << 10;
const ANSWER_EACH: usize = 4 << 10;

/// Largest [`Welcome::overhead_bytes`].
const MAX_OVERHEAD: u64 = 1 << 20;

/// A request.
#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Request<'a> {
    Hello {
        versions: [u32; 1],
        client: &'a str,
        instance: &'a str,
        segment_bytes: u64,
        max_frame_bytes: usize,
        options: &'a Map<String, Value>,
    },
    Store {
        objects: &'a [StoreEntry<'a>],
    },
    Lookup {
        keys: &'a [&'a str],
    },
    Load {
        objects: &'a [LoadEntry<'a>],
    },
    Delete {
        keys: &'a [&'a str],
    },
    List {
        cursor: Option<&'a str>,
        limit: usize,
    },
    FreeBytes,
    Ping,
}

/// An object to be stored, in the segment from `at` on.
#[derive(Debug, Serialize)]
pub(super) struct StoreEntry<'a> {
    pub(super) key: &'a str,
    pub(super) len: u64,
    pub(super) at: u64,
    pub(super) meta: String,
    pub(super) replace: bool,
}

/// An object to be loaded to `at` of the segment.
#[derive(Debug, Serialize)]
pub(super) struct LoadEntry<'a> {
    pub(super) key: &'a str,
    pub(super) len: u64,
    pub(super) at: u64,
}

impl<'a> Request<'a> {
    pub(super) fn hello(
        client: &'a str,
        instance: &'a str,
        segment_bytes: u64,
        options: &'a Map<String, Value>,
    ) -> Self {
        Self::Hello {
            versions: [VERSION],
            client,
            instance,
            segment_bytes,
            max_frame_bytes: MAX_BODY,
            options,
        }
    }

    /// Returns the request's body.
    ///
    /// # Errors
    /// If it is too long for a frame.
    pub(super) fn encode(&self) -> Result<Vec<u8>, L2Error> {
        let refused = |what: String| L2Error::new(ErrorKind::Refused, what);
        let body = serde_json::to_vec(self)
            .map_err(|error| refused(format!("a request cannot be written: {error}")))?;
        match body.len() {
            0..=MAX_BODY => Ok(body),
            len => Err(refused(format!("a request of {len} bytes is too long"))),
        }
    }

    /// Longest answer to it.
    pub(super) fn max_answer(&self) -> usize {
        let count = match self {
            Self::List { .. } => return MAX_BODY,
            Self::Store { objects } => objects.len(),
            Self::Load { objects } => objects.len(),
            Self::Lookup { keys } | Self::Delete { keys } => keys.len(),
            Self::Hello { .. } | Self::FreeBytes | Self::Ping => 0,
        };
        (ANSWER_BASE + count * ANSWER_EACH).min(MAX_BODY)
    }
}

/// Optional features of a tier.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Features {
    pub(super) delete: bool,
    pub(super) list: bool,
    pub(super) shared: bool,
    pub(super) metadata: bool,
    pub(super) free_bytes: bool,
}

/// Answer to the hello.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
struct RawWelcome {
    version: Option<u32>,
    tier: Option<String>,
    overhead_bytes: Option<u64>,
    max_object_bytes: Option<u64>,
    max_key_bytes: Option<u64>,
    max_in_flight: Option<u64>,
    max_batch: Option<u64>,
    error: Option<String>,
    message: Option<String>,
}

/// What a tier says of itself, checked.
#[derive(Debug, Clone)]
pub(super) struct Welcome {
    pub(super) tier: String,
    pub(super) features: Features,
    pub(super) overhead_bytes: u64,
    pub(super) max_object_bytes: u64,
    pub(super) max_key_bytes: u64,
    pub(super) max_in_flight: usize,
    pub(super) max_batch: usize,
}

impl Welcome {
    /// Reads the answer to the hello: the tier's error, or what it says of itself.
    pub(super) fn decode(body: &[u8]) -> Result<Result<Self, L2Error>, Violation> {
        #[derive(Deserialize)]
        struct PartialWelcome {
            capabilities: Option<Features>,
        }
        let raw: RawWelcome = parse(body)?;
        if let Some(kind) = raw.error {
            let error = failure("hello", &kind, raw.message.as_deref());
            // Another version will not be spoken a moment later either.
            let kind = match error.kind() {
                ErrorKind::Unsupported => ErrorKind::Refused,
                kind => kind,
            };
            return Ok(Err(L2Error::new(kind, error.to_string())));
        }
        let part: PartialWelcome = parse(body)?;
        if raw.version != Some(VERSION) {
            let what = format!("hello: version {:?} instead of {VERSION}", raw.version);
            return Err(Violation::new(what));
        }
        let bounded = |name, value: Option<u64>, default: u64, max: u64| match value {
            None => Ok(default),
            Some(value) if (1..=max).contains(&value) => Ok(value),
            Some(value) => {
                let what = format!("hello: {name} is {value}; it is from 1 to {max}");
                Err(Violation::new(what))
            }
        };
        let overhead_bytes = raw.overhead_bytes.unwrap_or(0);
        if overhead_bytes > MAX_OVERHEAD {
            let what = format!("hello: overhead_bytes is {overhead_bytes}; at most {MAX_OVERHEAD}");
            return Err(Violation::new(what));
        }
        let small = |value: u64| usize::try_from(value).unwrap_or(1);
        Ok(Ok(Self {
            tier: line(raw.tier.as_deref().unwrap_or("unnamed"), MAX_NAME),
            features: part.capabilities.unwrap_or_default(),
            overhead_bytes,
            max_object_bytes: bounded(
                "max_object_bytes",
                raw.max_object_bytes,
                u64::MAX,
                u64::MAX,
            )?,
            max_key_bytes: bounded("max_key_bytes", raw.max_key_bytes, u64::MAX, u64::MAX)?,
            max_in_flight: small(bounded("max_in_flight", raw.max_in_flight, 8, 1024)?),
            max_batch: small(bounded("max_batch", raw.max_batch, 512, MAX_BATCH as u64)?),
        }))
    }
}

/// Result of one object of a store, a lookup or a load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct ObjectResult {
    pub(super) new: Option<bool>,
    pub(super) len: Option<u64>,
    pub(super) meta: Option<String>,
    error: Option<String>,
    message: Option<String>,
}

impl ObjectResult {
    /// Returns the error that it is.
    pub(super) fn failure(&self, what: &str) -> Option<L2Error> {
        let kind = self.error.as_deref()?;
        Some(failure(what, kind, self.message.as_deref()))
    }

    /// Returns the entry's metadata, `None` if it cannot be what kvtier wrote.
    pub(super) fn meta(&self) -> Option<&str> {
        self.meta.as_deref().filter(|meta| meta.len() <= MAX_META)
    }
}

/// Result of one delete.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum Deleted {
    Was(bool),
    Failed(ObjectResult),
}

/// One object of a page.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct PageEntry {
    pub(super) key: String,
    pub(super) len: u64,
    #[serde(default)]
    pub(super) used_at: Option<u64>,
}

/// Page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) objects: Vec<PageEntry>,
    pub(super) next: Option<String>,
}

/// What every answer may be instead.
#[derive(Deserialize)]
struct Refusal {
    error: Option<String>,
    message: Option<String>,
}

/// Reads an answer without fields: its error, or nothing.
pub(super) fn nothing(what: &str, body: &[u8]) -> Result<Result<(), L2Error>, Violation> {
    let refusal: Refusal = parse(body)?;
    Ok(match refusal.error {
        Some(kind) => Err(failure(what, &kind, refusal.message.as_deref())),
        None => Ok(()),
    })
}

/// Reads an answer with `count` results.
pub(super) fn results<T: DeserializeOwned>(
    what: &str,
    body: &[u8],
    count: usize,
) -> Result<Result<Vec<T>, L2Error>, Violation> {
    if let Err(error) = nothing(what, body)? {
        return Ok(Err(error));
    }
    // What follows the object was refused above.
    let mut reader = serde_json::Deserializer::from_slice(body);
    let results = ResultsReader::new(count).deserialize(&mut reader);
    let results = results.map_err(|error| malformed(&error))?;
    if results.len() != count {
        let what = format!("{what}: {} results instead of {count}", results.len());
        return Err(Violation::new(what));
    }
    Ok(Ok(results))
}

fn malformed(error: &serde_json::Error) -> Violation {
    Violation::new(format!("a body is not of its form: {error}"))
}

/// Reads a page of a listing.
pub(super) fn page(body: &[u8]) -> Result<Result<Page, L2Error>, Violation> {
    #[derive(Deserialize)]
    struct Raw {
        objects: Option<Vec<PageEntry>>,
        next: Option<String>,
    }
    if let Err(error) = nothing("list", body)? {
        return Ok(Err(error));
    }
    let raw: Raw = parse(body)?;
    let objects = raw.objects.unwrap_or_default();
    if objects.len() > MAX_BATCH {
        let what = format!("list: {} objects; at most {MAX_BATCH}", objects.len());
        return Err(Violation::new(what));
    }
    if raw
        .next
        .as_ref()
        .is_some_and(|next| next.len() > MAX_CURSOR)
    {
        return Err(Violation::new("list: next is too long"));
    }
    Ok(Ok(Page {
        objects,
        next: raw.next,
    }))
}

/// Reads the free bytes.
pub(super) fn free_bytes(body: &[u8]) -> Result<Result<Option<u64>, L2Error>, Violation> {
    #[derive(Deserialize)]
    struct Raw {
        free_bytes: Option<u64>,
    }
    if let Err(error) = nothing("free_bytes", body)? {
        return Ok(Err(error));
    }
    let raw: Raw = parse(body)?;
    Ok(Ok(raw.free_bytes))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Violation> {
    // A sequence would be taken for an object's fields too.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(Violation::new("a body is not a JSON object"));
    }
    serde_json::from_slice(body).map_err(|error| malformed(&error))
}

/// Returns the error of a tier.
fn failure(what: &str, kind: &str, message: Option<&str>) -> L2Error {
    const KINDS: [ErrorKind; 9] = [
        ErrorKind::NotFound,
        ErrorKind::Corrupt,
        ErrorKind::Full,
        ErrorKind::OverQuota,
        ErrorKind::Busy,
        ErrorKind::Unavailable,
        ErrorKind::Refused,
        ErrorKind::Unreadable,
        ErrorKind::Unsupported,
    ];
    let known = KINDS.into_iter().find(|known| known.name() == kind);
    let text = match message {
        None | Some("") => line(kind, MAX_NAME),
        Some(message) => line(message, MAX_MESSAGE),
    };
    let kind = known.unwrap_or(ErrorKind::Unavailable);
    L2Error::new(kind, format!("{what}: {text}"))
}

/// Returns the beginning of a foreign text, as one line.
pub(super) fn line(text: &str, max: usize) -> String {
    let one = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(max).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_documented() {
        let object = StoreEntry {
            key: "m@1",
            len: 3,
            at: 4096,
            meta: "ab".into(),
            replace: false,
        };
        let body = |request: Request<'_>| String::from_utf8(request.encode().unwrap()).unwrap();
        let store = Request::Store { objects: &[object] };
        assert_eq!(
            body(store),
            r#"{"op":"store","objects":[{"key":"m@1","len":3,"at":4096,"meta":"ab","replace":false}]}"#
        );
        let list = Request::List {
            cursor: None,
            limit: 7,
        };
        assert_eq!(body(list), r#"{"op":"list","cursor":null,"limit":7}"#);
        assert_eq!(body(Request::FreeBytes), r#"{"op":"free_bytes"}"#);
        let hello = Request::hello("kvtier/1", "i", 10, &Map::new()).encode();
        let hello: Value = serde_json::from_slice(&hello.unwrap()).unwrap();
        assert_eq!(
            (&hello["op"], &hello["versions"]),
            (&"hello".into(), &[1].as_slice().into())
        );
    }

    #[test]
    fn requests_too_long_for_a_frame_are_refused() {
        let key = "k".repeat(MAX_BODY);
        let keys = [&*key];
        let error = Request::Lookup { keys: &keys }.encode().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
    }

    #[test]
    fn results_must_be_as_many_as_asked() {
        let two = br#"{"results":[{"len":1,"meta":"x","other":[]},null]}"#;
        let read: Vec<Option<ObjectResult>> = results("lookup", two, 2).unwrap().unwrap();
        assert_eq!(read[0].as_ref().unwrap().len, Some(1));
        assert_eq!(read[1], None);
        for count in [0, 1, 3] {
            assert!(results::<Option<ObjectResult>>("lookup", two, count).is_err());
        }
        for body in [
            &b""[..],
            b"[]",
            b"null",
            b"{",
            b"{}",
            br#"{"results":[{"len":-1}, null]}"#,
            br#"{"results":[{"len":1.5}, null]}"#,
            br#"{"results":[{"len":99999999999999999999}, null]}"#,
            br#"{"results":{}}"#,
            b"{\"results\":[\xff]}",
        ] {
            assert!(results::<Option<ObjectResult>>("lookup", body, 2).is_err());
        }
    }

    #[test]
    fn errors_of_tiers_are_one_line_of_a_known_kind() {
        for (kind, expected) in [
            ("not_found", ErrorKind::NotFound),
            ("full", ErrorKind::Full),
            ("deadline", ErrorKind::Unavailable),
            ("memory", ErrorKind::Unavailable),
            ("anything", ErrorKind::Unavailable),
        ] {
            let body = format!(r#"{{"error":"{kind}","message":"a\nb password=MARK"}}"#);
            let error = results::<ObjectResult>("load", body.as_bytes(), 9)
                .unwrap()
                .unwrap_err();
            assert_eq!(error.kind(), expected, "{kind}");
            assert_eq!(error.to_string(), "load: a b password=***");
        }
        let long = format!(r#"{{"error":"busy","message":"{}"}}"#, "x".repeat(3000));
        let error = nothing("ping", long.as_bytes()).unwrap().unwrap_err();
        assert!(error.to_string().len() < 300);
    }

    #[test]
    fn welcomes_have_defaults_and_bounds() {
        let least = Welcome::decode(br#"{"version":1,"future":{"a":1}}"#)
            .unwrap()
            .unwrap();
        assert_eq!((least.max_in_flight, least.max_batch), (8, 512));
        assert!(!least.features.delete && !least.features.metadata);
        for bad in [
            r#"{}"#,
            r#"{"version":2}"#,
            r#"{"version":1,"max_batch":0}"#,
            r#"{"version":1,"max_batch":1025}"#,
            r#"{"version":1,"max_in_flight":0}"#,
            r#"{"version":1,"max_in_flight":1000000}"#,
            r#"{"version":1,"max_object_bytes":0}"#,
            r#"{"version":1,"overhead_bytes":18446744073709551615}"#,
            r#"{"version":1,"capabilities":{"delete":1}}"#,
        ] {
            assert!(Welcome::decode(bad.as_bytes()).is_err(), "{bad}");
        }
        let refused = br#"{"error":"unsupported","message":"version 7 only"}"#;
        let error = Welcome::decode(refused).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
    }

    #[test]
    fn pages_are_bounded() {
        let entry = r#"{"key":"","len":0}"#;
        let of = |count: usize| {
            let objects = vec![entry; count].join(",");
            page(format!(r#"{{"objects":[{objects}]}}"#).as_bytes())
        };
        assert_eq!(of(MAX_BATCH).unwrap().unwrap().objects.len(), MAX_BATCH);
        assert!(of(MAX_BATCH + 1).is_err());
        let next = format!(
            r#"{{"objects":[],"next":"{}"}}"#,
            "x".repeat(MAX_CURSOR + 1)
        );
        assert!(page(next.as_bytes()).is_err());
    }
}
