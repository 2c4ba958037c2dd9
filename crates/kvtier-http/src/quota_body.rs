//! The bodies of `PUT /quota/{salt}` and `PUT /quota`, read as LMCache reads it: any JSON that Python takes, any number that it can make.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::body::too_many_values;
use super::json::{self, EntriesError, JsonError};

use kvtier_common::error::{Error, Result};
use kvtier_config::{GIB, Limit, MAX_BYTES, Place, parse_size};
use kvtier_store::tenants::{Entry, MAX_TENANTS, TierEntry, only_set};

/// What a body asks for.
#[derive(Debug)]
pub(super) struct Wanted {
    pub entry: Entry,
    /// The limit as it was given.
    pub limit_gb: kvtier_observe::api::Limit,
}

/// What is answered to a body of the wrong shape.
const SHAPE: &str = "body must be {'limit_gb': <float>}";

/// Message for a wrong body of many tenants.
const SHAPE_OF_MANY: &str = "body must be {'users': {<cache salt>: {'limit_gb': <float>}}}";

/// What is answered to a body that is not JSON.
const NOT_JSON: &str = "invalid JSON body";

/// What a tenant's object may have.
const KEYS: [&str; 3] = ["limit_gb", "reserved_gb", "tiers"];

/// Bytes that what is said of one tenant may take parsed.
const PARSED: usize = 1 << 20;

/// Longest name from a client that an error repeats, characters.
const CLIP: usize = 128;

/// Bytes as the GiB of answers.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

impl Wanted {
    /// Reads a body. The errors that LMCache has too are in its words.
    pub(super) fn parse(bytes: &[u8], places: &[Place]) -> Result<Self> {
        let Value::Object(body) = read(bytes, PARSED)? else {
            return Err(Error::refused(SHAPE));
        };
        Self::of(&body, places)?.ok_or_else(|| Error::refused(SHAPE))
    }

    /// Reads the object of one tenant; `None` has no limit.
    fn of(body: &Map<String, Value>, places: &[Place]) -> Result<Option<Self>> {
        let Some(limit) = body.get("limit_gb") else {
            return Ok(None);
        };
        if let Some(key) = body.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let (key, known) = (clip(key), KEYS.join(", "));
            return Err(Error::refused(format!(
                "key '{key}' is unknown; known are {known}"
            )));
        }
        let (limit, size) = self::limit("limit_gb", limit)?;
        let reserved = reserved(body, "reserved_gb")?.unwrap_or(0);
        let tiers = match body.get("tiers") {
            None | Some(Value::Null) => BTreeMap::new(),
            Some(Value::Object(tiers)) => tiers
                .iter()
                .map(|(name, own)| Ok((name.clone(), tier(name, own, places)?)))
                .collect::<Result<_>>()?,
            Some(_) => {
                return Err(Error::refused(
                    "tiers must be an object by the names of tiers",
                ));
            }
        };
        let entry = Entry {
            limit,
            reserved,
            tiers,
        };
        let limit_gb = kvtier_observe::api::Limit::new(size);
        Ok(Some(Self { entry, limit_gb }))
    }
}

/// Reads what a listing has, or the same without what it only tells: the names of tenants, and what each may have.
pub(super) fn parse_many(bytes: &[u8], places: &[Place]) -> Result<Vec<(String, Entry)>> {
    let text = text(bytes)?;
    let mut entries = Vec::new();
    let take = |name: String, user: Value| {
        if entries.len() == MAX_TENANTS {
            return Err(Error::refused(format!(
                "users has more than {MAX_TENANTS} tenants"
            )));
        }
        let place = || format!("users.{}", clip(&name));
        let refused = |what| Error::refused(what).context(place());
        let mut one = Map::from_iter([(name.clone(), user)]);
        only_set(&mut one);
        let Some(user) = one.remove(&name) else {
            return Ok(());
        };
        let Value::Object(user) = user else {
            return Err(refused("must be {'limit_gb': <float>}"));
        };
        let wanted = Wanted::of(&user, places).map_err(|error| error.context(place()))?;
        let wanted = wanted.ok_or_else(|| refused("limit_gb is missing"))?;
        entries.push((name, wanted.entry));
        Ok(())
    };
    // That is a page's.
    let passed = ["next_page_token"];
    let read = json::parse_entries(
        quote_numbers(text).as_bytes(),
        "users",
        &passed,
        PARSED,
        take,
    );
    read.map_err(|error| match error {
        EntriesError::Json(error) => refusal(&error, PARSED),
        EntriesError::Shape => Error::refused(SHAPE_OF_MANY),
        EntriesError::Unknown(key) => {
            Error::refused(format!("key '{}' is unknown; known is users", clip(&key)))
        }
        EntriesError::Refused(error) => error,
    })?;
    Ok(entries)
}

/// A name from a client, shortened for an error.
pub(super) fn clip(name: &str) -> String {
    let shown: String = name.chars().take(CLIP).collect();
    let more = if shown.len() < name.len() { "..." } else { "" };
    format!("{}{more}", shown.escape_debug())
}

fn read(bytes: &[u8], most: usize) -> Result<Value> {
    let value = json::parse(quote_numbers(text(bytes)?).as_bytes(), most);
    value.map_err(|error| refusal(&error, most))
}

fn text(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|_| Error::refused(NOT_JSON))
}

fn refusal(error: &JsonError, most: usize) -> Error {
    match error {
        JsonError::TooLarge => Error::refused(too_many_values(most)),
        JsonError::Syntax(_) => Error::refused(NOT_JSON),
    }
}

fn tier(name: &str, own: &Value, places: &[Place]) -> Result<TierEntry> {
    if !places.iter().any(|place| &*place.name == name) {
        let names: Vec<_> = places.iter().map(|place| &*place.name).collect();
        let (name, names) = (clip(name), names.join(", "));
        return Err(Error::refused(format!(
            "tiers: there is no tier '{name}'; there are {names}"
        )));
    }
    let shape = || {
        Error::refused(format!(
            "tiers.{name} must be {{'limit_gb': <float>, 'reserved_gb': <float>}}"
        ))
    };
    let own = own.as_object().ok_or_else(shape)?;
    if own
        .keys()
        .any(|key| key != "limit_gb" && key != "reserved_gb")
    {
        return Err(shape());
    }
    let field = |key: &str| format!("tiers.{name}.{key}");
    let limit = own.get("limit_gb");
    Ok(TierEntry {
        limit: limit
            .map(|value| self::limit(&field("limit_gb"), value))
            .transpose()?
            .map(|limit| limit.0),
        reserved: reserved(own, &field("reserved_gb"))?,
    })
}

fn reserved(body: &Map<String, Value>, name: &str) -> Result<Option<u64>> {
    let value = body.get("reserved_gb").filter(|value| !value.is_null());
    value
        .map(|value| bytes_of(name, number(name, value)?))
        .transpose()
}

/// A limit, which may be "unlimited", as it is kept and in GiB.
fn limit(name: &str, value: &Value) -> Result<(Limit, Option<f64>)> {
    if value == "unlimited" {
        return Ok((Limit(None), None));
    }
    let size = number(name, value)?;
    Ok((Limit(Some(bytes_of(name, size)?)), Some(size)))
}

/// A number as Python's `float()` makes one of a JSON value.
fn number(name: &str, value: &Value) -> Result<f64> {
    let number = match value {
        // Beyond LMCache: a size with its unit.
        Value::String(text) => float(text).or_else(|| Some(gib(parse_size(text).ok()?))),
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        value => value.as_f64(),
    };
    number.ok_or_else(|| Error::refused(format!("{name} must be numeric")))
}

/// Python's `float()` of a text: spaces around it, and single underscores between digits.
fn float(text: &str) -> Option<f64> {
    let text = text.trim();
    let is_digit = |part: Option<char>| part.is_some_and(|last| last.is_ascii_digit());
    let mut parts = text.split('_').peekable();
    while let Some(part) = parts.next() {
        if let Some(next) = parts.peek()
            && !(is_digit(part.chars().last()) && is_digit(next.chars().next()))
        {
            return None;
        }
    }
    text.replace('_', "").parse().ok()
}

/// The bytes of a size in GiB, truncated.
fn bytes_of(name: &str, size: f64) -> Result<u64> {
    let most = MAX_BYTES / GIB;
    let refused = |what: &str| Err(Error::refused(format!("{name} must be {what}")));
    match size {
        size if !size.is_finite() => refused("finite"),
        size if size < 0.0 => refused("non-negative"),
        size if size > most as f64 => refused(&format!("at most {most}")),
        size => Ok((size * GIB as f64) as u64),
    }
}

/// Puts what Python's JSON takes for a number, and no other does, between quotes: NaN, infinities, and numbers that are too
/// large for a float.
fn quote_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        let len = match next {
            '"' => string_len(rest),
            next if is_word(next) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            next => next.len_utf8(),
        };
        let (token, behind) = rest.split_at(len);
        let is_infinite = || {
            let starts_like_one = |c: char| c.is_ascii_digit() || c == '-';
            token.starts_with(starts_like_one)
                && token.parse::<f64>().is_ok_and(f64::is_infinite)
                && !token.ends_with(|c: char| c.is_ascii_alphabetic())
        };
        match token {
            "NaN" | "Infinity" | "-Infinity" => out.extend(["\"", token, "\""]),
            _ if is_infinite() => out.extend(["\"", token, "\""]),
            _ => out.push_str(token),
        }
        rest = behind;
    }
    out
}

/// Bytes of the JSON string that this begins with, its quotes included.
fn string_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Vec<Place> {
        ["l1", "fs-0"]
            .map(|name| Place {
                name: name.into(),
                isolates: true,
                capacity: None,
                location: None,
            })
            .into()
    }

    fn limit(value: &str) -> std::result::Result<Option<u64>, String> {
        let body = format!(r#"{{"limit_gb": {value}}}"#);
        let wanted =
            Wanted::parse(body.as_bytes(), &places()).map_err(|error| error.to_string())?;
        Ok(wanted.entry.limit.0)
    }

    #[test]
    fn limits_are_what_python_makes_of_them() {
        for (value, bytes) in [
            ("0.5", GIB / 2),
            ("1", GIB),
            ("true", GIB),
            ("false", 0),
            ("-0.0", 0),
            ("0.01", 10_737_418),
            (r#""2.5""#, GIB / 2 * 5),
            (r#"" 2 ""#, 2 * GIB),
            (r#""1_0""#, 10 * GIB),
            (r#""1e1""#, 10 * GIB),
            (r#""512MiB""#, GIB / 2),
            (r#""10g""#, 10 * GIB),
            ("1073741824", MAX_BYTES),
        ] {
            assert_eq!(limit(value), Ok(Some(bytes)), "{value}");
        }
        assert_eq!(limit(r#""unlimited""#), Ok(None));
        for (values, error) in [
            (
                [r#""x""#, "null", "[]", r#""_1""#, r#""1__0""#, r#""""#],
                "limit_gb must be numeric",
            ),
            (
                [
                    "NaN",
                    "1e400",
                    "-Infinity",
                    r#""nan""#,
                    r#""inf""#,
                    "Infinity",
                ],
                "limit_gb must be finite",
            ),
            (
                ["-1", "-1e-300", r#""-1""#, "-1e300", "-0.1", "-2"],
                "limit_gb must be non-negative",
            ),
            (
                ["1073741825", "1e300", "1e18", r#""1e10""#, "9e99", "2e9"],
                "limit_gb must be at most 1073741824",
            ),
            (
                ["{", "nan", "1 x", "+1", "1e400x", "\"\\\""],
                "invalid JSON body",
            ),
        ] {
            for value in values {
                assert_eq!(limit(value), Err(error.into()), "{value}");
            }
        }
        let digits = "1".repeat(400);
        assert_eq!(limit(&digits), Err("limit_gb must be finite".into()));
    }

    #[test]
    fn a_body_is_an_object_with_a_limit() {
        let parse = |body: &[u8]| {
            let wanted = Wanted::parse(body, &places()).map_err(|error| error.to_string());
            wanted.map(|wanted| wanted.entry)
        };
        for body in ["[1]", "null", "3", r#""x""#, "{}", r#"{"limit_bytes": 5}"#] {
            assert_eq!(parse(body.as_bytes()), Err(SHAPE.into()), "{body}");
        }
        for body in [&b""[..], b"{", b"\xff", br#"{"limit_gb": 1} x"#] {
            assert_eq!(parse(body), Err("invalid JSON body".into()));
        }
        // A text may say what a number may not.
        let body = r#"{"limit_gb": "\"NaN, 1e400 é", "limit_gb": 2}"#;
        assert_eq!(parse(body.as_bytes()).unwrap().limit, Limit(Some(2 * GIB)));
        for key in ["tier", "reserved_gib", "exists"] {
            let body = format!(r#"{{"limit_gb": 1, "{key}": 1}}"#);
            let told = format!("key '{key}' is unknown; known are limit_gb, reserved_gb, tiers");
            assert_eq!(parse(body.as_bytes()), Err(told));
        }
    }

    #[test]
    fn many_are_read_as_listings_have_them() {
        let parse =
            |body: &str| parse_many(body.as_bytes(), &places()).map_err(|error| error.to_string());
        let listed = r#"{"next_page_token": "s61", "users": {
            "a": {"limit_gb": 1, "current_usage_gb": 0.5, "exists": true, "hit_rate": null, "tiers": {
                "l1": {"limit_bytes": 5, "limit_gb": "unlimited", "enforced": true},
                "fs-7": {"limit_bytes": 5, "usage_bytes": 3}}},
            "stranger": {"limit_gb": 0.0, "exists": false}}}"#;
        let own = TierEntry {
            limit: Some(Limit(None)),
            reserved: None,
        };
        let entry = Entry {
            limit: Limit(Some(GIB)),
            reserved: 0,
            tiers: [("l1".to_owned(), own)].into(),
        };
        assert_eq!(parse(listed), Ok(vec![("a".to_owned(), entry)]));
        assert_eq!(parse(r#"{"users": {}}"#), Ok(vec![]));
        for (body, error) in [
            ("{", "invalid JSON body"),
            ("{}", SHAPE_OF_MANY),
            (r#"{"users": []}"#, SHAPE_OF_MANY),
            (r#"{"limit_gb": 1}"#, SHAPE_OF_MANY),
            (
                r#"{"users": {}, "user": {}}"#,
                "key 'user' is unknown; known is users",
            ),
            (
                r#"{"users": {"a": 1}}"#,
                "users.a: must be {'limit_gb': <float>}",
            ),
            (
                r#"{"users": {"a\n": {}}}"#,
                "users.a\\n: limit_gb is missing",
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1}, "b": {"limit_gb": -1}}}"#,
                "users.b: limit_gb must be non-negative",
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1, "tier": {}}}}"#,
                "users.a: key 'tier' is unknown; known are limit_gb, reserved_gb, tiers",
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1, "tiers": {"fs-7": {"limit_gb": 1, "limit_bytes": 1}}}}}"#,
                "users.a: tiers: there is no tier 'fs-7'; there are l1, fs-0",
            ),
        ] {
            assert_eq!(parse(body), Err(error.into()), "{body}");
        }
        let values = "1,".repeat(1 << 17);
        let told = parse(&format!(r#"{{"users": {{"a": {{"x": [{values}1]}}}}}}"#)).unwrap_err();
        assert!(told.contains("too many values"), "{told}");
        let long = "x".repeat(5000);
        let told = parse(&format!(r#"{{"users": {{"{long}": 1}}}}"#)).unwrap_err();
        assert!(told.len() < 300, "{told}");
    }

    #[test]
    fn tiers_may_have_their_own() {
        let parse = |more: &str| {
            let body = format!(r#"{{"limit_gb": 4, {more}}}"#);
            let wanted = Wanted::parse(body.as_bytes(), &places());
            wanted
                .map(|wanted| wanted.entry)
                .map_err(|error| error.to_string())
        };
        let entry = parse(
            r#""reserved_gb": 1, "tiers": {"fs-0": {"limit_gb": "unlimited"}, "l1": {"reserved_gb": 2}}"#,
        );
        let entry = entry.unwrap();
        let grant = |tier| {
            let grant = entry.of_tier(tier);
            (grant.limit, grant.reserved)
        };
        assert_eq!(grant("fs-0"), (None, GIB));
        assert_eq!(grant("l1"), (Some(4 * GIB), 2 * GIB));
        for (more, error) in [
            (r#""reserved_gb": -1"#, "reserved_gb must be non-negative"),
            (
                r#""reserved_gb": "unlimited""#,
                "reserved_gb must be numeric",
            ),
            (
                r#""tiers": []"#,
                "tiers must be an object by the names of tiers",
            ),
            (
                r#""tiers": {"fs-1": {}}"#,
                "tiers: there is no tier 'fs-1'; there are l1, fs-0",
            ),
            (
                r#""tiers": {"l1": {"limit": 1}}"#,
                "tiers.l1 must be {'limit_gb': <float>, 'reserved_gb': <float>}",
            ),
            (
                r#""tiers": {"l1": {"limit_gb": "x"}}"#,
                "tiers.l1.limit_gb must be numeric",
            ),
            (
                r#""tiers": {"l1": {"reserved_gb": NaN}}"#,
                "tiers.l1.reserved_gb must be finite",
            ),
        ] {
            assert_eq!(parse(more), Err(error.into()), "{more}");
        }
    }
}
