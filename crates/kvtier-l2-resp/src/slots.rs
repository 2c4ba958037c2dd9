//! Slots of a cluster: which key is in which slot, and which node serves it. Without I/O.
//!
//! Source: the Redis cluster specification, "Key distribution model" and "Hash tags".

use super::address::Address;
use super::reply::Value;

/// Slots of a cluster.
pub(super) const SLOTS: u16 = 16384;

/// CRC-16/XMODEM of one byte after another: polynomial 0x1021, from 0.
const CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The part of a key between its first `{` and the next `}`, unless that is empty: keys with the same part have one slot.
pub(super) fn tag(key: &[u8]) -> Option<&[u8]> {
    let from = key.iter().position(|byte| *byte == b'{')? + 1;
    let length = key[from..].iter().position(|byte| *byte == b'}')?;
    (length > 0).then(|| &key[from..from + length])
}

/// The slot of a key.
pub(super) fn slot(key: &[u8]) -> u16 {
    let hashed = tag(key).unwrap_or(key);
    let step = |crc: u16, byte: &u8| (crc << 8) ^ CRC[usize::from((crc >> 8) as u8 ^ byte)];
    hashed.iter().fold(0, step) % SLOTS
}

/// Slots that one primary serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) primary: Address,
}

/// Reads the reply to CLUSTER SLOTS of the node at `asked`; `None` if it is none. A node without a host has that of `asked`.
pub(super) fn ranges(reply: &Value, asked: &Address) -> Option<Vec<Range>> {
    let Value::Array(ranges) = reply else {
        return None;
    };
    let range = |value: &Value| {
        let Value::Array(fields) = value else {
            return None;
        };
        let [
            Value::Integer(first),
            Value::Integer(last),
            Value::Array(primary),
            ..,
        ] = &fields[..]
        else {
            return None;
        };
        let [host, Value::Integer(port), facts @ ..] = &primary[..] else {
            return None;
        };
        let host = match host {
            Value::Bulk(host) => std::str::from_utf8(host.as_deref().unwrap_or_default()).ok()?,
            _ => return None,
        };
        // A node that was not told its name.
        let host = match host {
            "?" => ip(facts)?,
            host => host,
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let port = u16::try_from(*port).ok()?;
        (first <= last && last < SLOTS).then_some(Range {
            first,
            last,
            primary: beside(host, port, asked)?,
        })
    };
    ranges.iter().map(range).collect()
}

/// The address of a node, which is among what is known of it behind its identity.
fn ip(facts: &[Value]) -> Option<&str> {
    let Some(Value::Array(facts)) = facts.get(1) else {
        return None;
    };
    let is_ip = |pair: &&[Value]| matches!(&pair[0], Value::Bulk(Some(name)) if name == b"ip");
    match facts.chunks_exact(2).find(is_ip)? {
        [_, Value::Bulk(Some(ip))] => std::str::from_utf8(ip).ok(),
        _ => None,
    }
}

/// Node to which another node sent a command: MOVED for good, or ASK for this time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Redirect {
    pub(super) slot: u16,
    pub(super) to: Address,
    pub(super) is_for_good: bool,
}

impl Redirect {
    /// Reads an error of the node at `asked`; `None` if it is another one.
    pub(super) fn read(error: &str, asked: &Address) -> Option<Self> {
        let mut words = error.split(' ');
        let is_for_good = match words.next()? {
            "MOVED" => true,
            "ASK" => false,
            _ => return None,
        };
        let slot = words.next()?.parse().ok().filter(|slot| *slot < SLOTS)?;
        let (host, port) = words.next()?.rsplit_once(':')?;
        Some(Self {
            slot,
            to: beside(host, port.parse().ok()?, asked)?,
            is_for_good,
        })
    }
}

/// A node; without a host it is on that of `asked`.
fn beside(host: &str, port: u16, asked: &Address) -> Option<Address> {
    match (host, asked) {
        ("", Address::Tcp(host, _)) => Address::of(host, port),
        _ => Address::of(host, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Address {
        Address::parse(text).unwrap()
    }

    #[test]
    fn slots_are_those_of_redis() {
        // Of the specification, and of CLUSTER KEYSLOT of redis-server 7.0.15.
        for (key, expected) in [
            ("123456789", 0x31C3),
            ("", 0),
            ("foo", 12182),
            ("{user1000}.following", slot(b"user1000")),
            ("{user1000}.followers", slot(b"user1000")),
            ("foo{{bar}}zap", slot(b"{bar")),
            ("foo{bar}{zap}", slot(b"bar")),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
        // An empty tag is none.
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
        assert_eq!(tag(b"foo{}{bar}"), None);
    }

    #[test]
    fn ranges_of_a_reply() {
        let node = |host: Option<&str>, port| {
            let host = Value::Bulk(host.map(|host| host.as_bytes().to_vec()));
            let id = Value::Bulk(Some(b"id".to_vec()));
            Value::Array(vec![host, Value::Integer(port), id])
        };
        let range = |first, last, node| {
            Value::Array(vec![Value::Integer(first), Value::Integer(last), node])
        };
        let asked = at("10.0.0.9:1");
        let reply = Value::Array(vec![
            range(0, 100, node(Some("10.0.0.1"), 7000)),
            range(101, 16383, node(None, 7001)),
        ]);
        let found = ranges(&reply, &asked).unwrap();
        assert_eq!(found[0].primary, at("10.0.0.1:7000"));
        assert_eq!(
            (found[1].last, &found[1].primary),
            (16383, &at("10.0.0.9:7001"))
        );
        let text = |text: &str| Value::Bulk(Some(text.as_bytes().to_vec()));
        let facts = Value::Array(vec![text("ip"), text("10.0.0.3")]);
        let nameless = vec![text("?"), Value::Integer(7002), text("id"), facts];
        let reply = Value::Array(vec![range(0, 5, Value::Array(nameless))]);
        let found = ranges(&reply, &asked).unwrap();
        assert_eq!(found[0].primary, at("10.0.0.3:7002"));
        for wrong in [
            range(0, 5, node(Some("?"), 1)),
            range(0, 5, node(Some("a\n\u{1b}b"), 1)),
            range(0, 5, node(Some("a"), 0)),
            range(5, 4, node(Some("a"), 1)),
            range(0, 16384, node(Some("a"), 1)),
            range(-1, 5, node(Some("a"), 1)),
            range(0, 5, node(Some("a"), 65536)),
            Value::Integer(1),
        ] {
            assert_eq!(
                ranges(&Value::Array(vec![wrong.clone()]), &asked),
                None,
                "{wrong:?}"
            );
        }
        assert_eq!(ranges(&Value::Error("ERR".into()), &asked), None);
    }

    #[test]
    fn redirects_are_read() {
        let asked = at("10.0.0.9:1");
        let moved = Redirect::read("MOVED 3999 127.0.0.1:6381", &asked).unwrap();
        assert_eq!((moved.slot, moved.is_for_good), (3999, true));
        assert_eq!(moved.to, at("127.0.0.1:6381"));
        let asks = Redirect::read("ASK 1 ::1:6381", &asked).unwrap();
        assert_eq!((asks.to, asks.is_for_good), (at("[::1]:6381"), false));
        let here = Redirect::read("MOVED 1 :6381", &asked).unwrap();
        assert_eq!(here.to, at("10.0.0.9:6381"));
        for other in [
            "OOM",
            "MOVED",
            "MOVED 16384 a:1",
            "MOVED 1 a",
            "ASK x a:1",
            "",
        ] {
            assert_eq!(Redirect::read(other, &asked), None, "{other}");
        }
    }
}
