//! The bodies of `PUT /quota/{salt}` and `PUT /quota`.

use std::collections::BTreeMap;
use std::fmt;

use kvtier_l2::config::json::Bounded;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::body::{not_allowed, shorten, text_of};

use kvtier_common::error::{Error, Result};
use kvtier_config::{GIB, Limit, MAX_BYTES, TierPlace};
use kvtier_store::tenants::{MAX_TENANTS, TenantEntry, TierEntry, only_set};

/// What a body asks for.
#[derive(Debug)]
pub(super) struct Wanted {
    pub entry: TenantEntry,
    /// The limit as it was given.
    pub limit_gb: kvtier_observe::api::Limit,
}

/// What a tenant's object may have.
const KEYS: [&str; 3] = ["limit_gb", "reserved_gb", "tiers"];

/// What a limit may be.
const LIMITS: &str = "GiB from 0 to 1073741824, a size such as \"512MiB\", or \"unlimited\"";

/// Bytes that what is said of one tenant may take parsed.
const PARSED: usize = 1 << 20;

/// Bytes as the GiB of answers.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

/// A name from a client, shortened for an error.
pub(super) fn clip(name: &str) -> String {
    shorten(&name.escape_debug().to_string())
}

impl Wanted {
    /// Reads a body.
    pub(super) fn parse(bytes: &[u8], places: &[TierPlace]) -> Result<Self> {
        let mut reader = serde_json::Deserializer::from_slice(bytes);
        let body = Bounded::new(PARSED).deserialize(&mut reader);
        let body = body.and_then(|body| reader.end().map(|()| body));
        Self::of(
            "",
            &body.map_err(|error| Error::refused(text_of(&error)))?,
            places,
        )
    }

    /// Reads the object of one tenant; `place` is before the names of its fields.
    fn of(place: &str, body: &Value, places: &[TierPlace]) -> Result<Self> {
        let body = object(place.trim_end_matches('.'), body, &KEYS)?;
        let limit = format!("{place}limit_gb");
        let wanted = body
            .get("limit_gb")
            .ok_or_else(|| Error::refused(format!("{limit} is missing; allowed: {LIMITS}")))?;
        let size = self::limit(&limit, wanted)?;
        let entry = TenantEntry {
            limit: limit_of(size),
            reserved: reserved(place, body)?.unwrap_or(0),
            tiers: tiers(place, body, places)?,
        };
        let limit_gb = kvtier_observe::api::Limit::new(size);
        Ok(Self { entry, limit_gb })
    }
}

/// Values of single tiers.
fn tiers(
    place: &str,
    body: &Map<String, Value>,
    places: &[TierPlace],
) -> Result<BTreeMap<String, TierEntry>> {
    let Some(tiers) = body.get("tiers").filter(|tiers| !tiers.is_null()) else {
        return Ok(BTreeMap::new());
    };
    let place = format!("{place}tiers");
    let names: Vec<_> = places.iter().map(|place| &*place.name).collect();
    let entry = |(name, own): (&String, &Value)| {
        let place = format!("{place}.{name}");
        let own = object(&place, own, &KEYS[..2])?;
        let place = format!("{place}.");
        let limit = own.get("limit_gb");
        let limit = limit.map(|limit| self::limit(&format!("{place}limit_gb"), limit));
        let entry = TierEntry {
            limit: limit.transpose()?.map(limit_of),
            reserved: reserved(&place, own)?,
        };
        Ok((name.clone(), entry))
    };
    let tiers = object(&place, tiers, &names)?;
    tiers.iter().map(entry).collect()
}

/// The object at `place`, which has no other keys than `keys`.
fn object<'a>(place: &str, value: &'a Value, keys: &[&str]) -> Result<&'a Map<String, Value>> {
    let wrong = |what: &str| {
        let place = if place.is_empty() { "body" } else { place };
        let allowed = format!("an object with {}", keys.join(", "));
        Error::refused(not_allowed(place, what, &allowed))
    };
    let object = value.as_object().ok_or_else(|| wrong(&value.to_string()))?;
    match object.keys().find(|key| !keys.contains(&key.as_str())) {
        None => Ok(object),
        Some(key) => Err(wrong(&format!("key {key:?}"))),
    }
}

/// A limit in GiB; `None` is unlimited.
fn limit(place: &str, value: &Value) -> Result<Option<f64>> {
    let size = match value {
        Value::String(text) => match text.parse() {
            Ok(Limit(None)) => return Ok(None),
            Ok(Limit(Some(bytes))) => Some(gib(bytes)),
            Err(_) => None,
        },
        // LMCache takes `true` for 1.
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        value => value.as_f64(),
    };
    let most = (MAX_BYTES / GIB) as f64;
    let size = size.filter(|size| (0.0..=most).contains(size));
    let refused = || Error::refused(not_allowed(place, &value.to_string(), LIMITS));
    size.map(Some).ok_or_else(refused)
}

fn limit_of(size: Option<f64>) -> Limit {
    Limit(size.map(|size| (size * GIB as f64) as u64))
}

/// The bytes of the field `reserved_gb`.
fn reserved(place: &str, body: &Map<String, Value>) -> Result<Option<u64>> {
    let Some(value) = body.get("reserved_gb").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let place = format!("{place}reserved_gb");
    let Limit(Some(bytes)) = limit_of(limit(&place, value)?) else {
        let allowed = "GiB as for limit_gb, without unlimited";
        return Err(Error::refused(not_allowed(&place, "unlimited", allowed)));
    };
    Ok(Some(bytes))
}

/// Reads what a listing has, or the same without what it only tells: the names of tenants, and what each may have.
pub(super) fn parse_many(bytes: &[u8], places: &[TierPlace]) -> Result<Vec<(String, TenantEntry)>> {
    let mut entries = Vec::new();
    let body = Listing {
        places,
        entries: &mut entries,
    };
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let read = reader.deserialize_map(body);
    let read = read.and_then(|()| reader.end());
    read.map_err(|error| Error::refused(text_of(&error)))?;
    Ok(entries)
}

/// Reads a body with `users`.
struct Listing<'a> {
    places: &'a [TierPlace],
    entries: &'a mut Vec<(String, TenantEntry)>,
}

impl<'de> Visitor<'de> for Listing<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with users")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut users = Some(Users(self));
        while let Some(name) = members.next_key::<String>()? {
            match (&*name, users.take()) {
                ("users", Some(users)) => members.next_value_seed(users)?,
                // A page has it.
                ("next_page_token", rest) => {
                    members.next_value::<IgnoredAny>()?;
                    users = rest;
                }
                _ => {
                    let name = clip(&name);
                    let text = format!("key '{name}'; allowed: users, once");
                    return Err(A::Error::custom(text));
                }
            }
        }
        match users {
            None => Ok(()),
            Some(_) => Err(A::Error::missing_field("users")),
        }
    }
}

/// Reads the tenants one by one, so that the values of one alone are in memory.
struct Users<'a>(Listing<'a>);

impl<'de> DeserializeSeed<'de> for Users<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Users<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object by the names of tenants")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut users: A) -> Result<(), A::Error> {
        let Listing { places, entries } = self.0;
        while let Some(name) = users.next_key::<String>()? {
            if entries.len() == MAX_TENANTS {
                let text = format!("users has more than {MAX_TENANTS} tenants");
                return Err(A::Error::custom(text));
            }
            let user = users.next_value_seed(&Bounded::new(PARSED))?;
            let mut one = Map::from_iter([(name.clone(), user)]);
            only_set(&mut one);
            let Some(user) = one.remove(&name) else {
                continue;
            };
            let place = format!("users.{}.", clip(&name));
            let wanted = Wanted::of(&place, &user, places).map_err(A::Error::custom)?;
            entries.push((name, wanted.entry));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Vec<TierPlace> {
        ["l1", "fs-0"]
            .map(|name| TierPlace {
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
    fn limits_are_gib_or_sizes() {
        for (value, bytes) in [
            ("0.5", GIB / 2),
            ("1", GIB),
            ("true", GIB),
            ("-0.0", 0),
            ("0.01", 10_737_418),
            (r#""2.5""#, GIB / 2 * 5),
            (r#""512MiB""#, GIB / 2),
            (r#""10g""#, 10 * GIB),
            ("1073741824", MAX_BYTES),
        ] {
            assert_eq!(limit(value), Ok(Some(bytes)), "{value}");
        }
        assert_eq!(limit(r#""unlimited""#), Ok(None));
        for value in [
            r#""x""#,
            "null",
            "[]",
            r#""""#,
            r#""nan""#,
            r#""inf""#,
            "-1",
            r#""-1""#,
            "-1e300",
            "1073741825",
            "1e300",
        ] {
            let told = limit(value).unwrap_err();
            let allowed = format!("; allowed: {LIMITS}");
            assert!(
                told.starts_with("limit_gb: ") && told.ends_with(&allowed),
                "{value}: {told}"
            );
        }
        for value in ["{", "nan", "NaN", "1 x", "+1", "1e400", "\"\\\""] {
            let told = limit(value).unwrap_err();
            assert!(told.starts_with("the body is not JSON: "), "{told}");
        }
    }

    #[test]
    fn a_body_is_an_object_with_a_limit() {
        let parse = |body: &[u8]| {
            let wanted = Wanted::parse(body, &places()).map_err(|error| error.to_string());
            wanted.map(|wanted| wanted.entry)
        };
        for body in ["[1]", "null", "3", r#""x""#] {
            let told =
                format!("body: {body}; allowed: an object with limit_gb, reserved_gb, tiers");
            assert_eq!(parse(body.as_bytes()), Err(told));
        }
        let told = format!("limit_gb is missing; allowed: {LIMITS}");
        assert_eq!(parse(b"{}"), Err(told));
        for body in [&b""[..], b"{", b"\xff", br#"{"limit_gb": 1} x"#] {
            let told = parse(body).unwrap_err();
            assert!(told.starts_with("the body is not JSON: "), "{told}");
        }
        let told = parse(br#"{"limit_gb": 1, "limit_gb": 2}"#).unwrap_err();
        assert!(told.contains(r#"key "limit_gb" is given twice"#), "{told}");
        for key in ["tier", "reserved_gib", "exists"] {
            let body = format!(r#"{{"limit_gb": 1, "{key}": 1}}"#);
            let told = format!(
                r#"body: key "{key}"; allowed: an object with limit_gb, reserved_gb, tiers"#
            );
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
        let entry = TenantEntry {
            limit: Limit(Some(GIB)),
            reserved: 0,
            tiers: [("l1".to_owned(), own)].into(),
        };
        assert_eq!(parse(listed), Ok(vec![("a".to_owned(), entry)]));
        assert_eq!(parse(r#"{"users": {}}"#), Ok(vec![]));
        for (body, error) in [
            ("{", "EOF"),
            ("{}", "missing field `users`"),
            (r#"{"users": []}"#, "an object by the names of tenants"),
            (r#"{"limit_gb": 1}"#, "key 'limit_gb'; allowed: users"),
            (r#"{"users": {}, "users": {}}"#, "allowed: users, once"),
            (r#"{"users": {"a": 1}}"#, "users.a: 1; allowed: an object"),
            (
                r#"{"users": {"a\n": {}}}"#,
                "users.a\\n.limit_gb is missing",
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1}, "b": {"limit_gb": -1}}}"#,
                "users.b.limit_gb: -1; allowed: GiB",
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1, "tier": {}}}}"#,
                r#"users.a: key "tier"; allowed: an object with limit_gb, reserved_gb, tiers"#,
            ),
            (
                r#"{"users": {"a": {"limit_gb": 1, "tiers": {"fs-7": {"limit_gb": 1, "limit_bytes": 1}}}}}"#,
                r#"users.a.tiers: key "fs-7"; allowed: an object with l1, fs-0"#,
            ),
        ] {
            let told = parse(body).unwrap_err();
            assert!(told.contains(error), "{body}: {told}");
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
            (
                r#""reserved_gb": -1"#,
                "reserved_gb: -1; allowed: GiB from 0",
            ),
            (
                r#""reserved_gb": "unlimited""#,
                "reserved_gb: unlimited; allowed: GiB",
            ),
            (
                r#""tiers": []"#,
                "tiers: []; allowed: an object with l1, fs-0",
            ),
            (
                r#""tiers": {"fs-1": {}}"#,
                r#"tiers: key "fs-1"; allowed: an object with l1, fs-0"#,
            ),
            (
                r#""tiers": {"l1": {"limit": 1}}"#,
                r#"tiers.l1: key "limit"; allowed: an object with limit_gb, reserved_gb"#,
            ),
            (
                r#""tiers": {"l1": {"limit_gb": "x"}}"#,
                r#"tiers.l1.limit_gb: "x"; allowed: GiB from 0"#,
            ),
        ] {
            let told = parse(more).unwrap_err();
            assert!(told.starts_with(error), "{more}: {told}");
        }
    }
}
