//! Replies of RESP2, the protocol of Redis, without I/O. Bytes from a server are hostile: every length is bounded, and
//! memory grows with the bytes that have arrived.

/// Longest line: a status, an error, or a length.
const MAX_LINE: usize = 64 << 10;

/// Longest reply that is kept whole; bodies of objects are not.
pub(super) const MAX_VALUE: usize = 4 << 20;

/// Arrays inside of arrays.
const MAX_DEPTH: usize = 4;

/// The first line of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Head {
    /// `+`, a status.
    Simple(String),
    /// `-`, an error.
    Error(String),
    /// `:`, a number.
    Integer(i64),
    /// `$`, the length of the body that follows; none is nil.
    Bulk(Option<u64>),
    /// `*`, the number of replies that follow; none is nil.
    Array(Option<u64>),
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(Option<Vec<u8>>),
    Array(Vec<Value>),
}

/// What is no reply: the connection has to be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the server sent what is no reply of its protocol: {0}")]
pub(super) struct Malformed(pub &'static str);

/// The first line of `bytes` and its length; none if it is incomplete.
pub(super) fn head(bytes: &[u8]) -> Result<Option<(Head, usize)>, Malformed> {
    let window = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(end) = window.windows(2).position(|pair| pair == b"\r\n") else {
        return match bytes.first() {
            Some(b'+' | b'-' | b':' | b'$' | b'*') | None if bytes.len() < MAX_LINE => Ok(None),
            Some(b'+' | b'-' | b':' | b'$' | b'*') => Err(Malformed("a line without an end")),
            _ => Err(Malformed("an unknown type")),
        };
    };
    let Some((kind, line)) = bytes[..end].split_first() else {
        return Err(Malformed("an empty line"));
    };
    let text = || String::from_utf8_lossy(line).into_owned();
    let head = match kind {
        b'+' => Head::Simple(text()),
        b'-' => Head::Error(text()),
        b':' => Head::Integer(number(line).ok_or(Malformed("a number"))?),
        b'$' => Head::Bulk(length(line)?),
        b'*' => Head::Array(length(line)?),
        _ => return Err(Malformed("an unknown type")),
    };
    Ok(Some((head, end + 2)))
}

fn number(line: &[u8]) -> Option<i64> {
    std::str::from_utf8(line).ok()?.parse().ok()
}

/// -1 is nil.
fn length(line: &[u8]) -> Result<Option<u64>, Malformed> {
    match number(line) {
        Some(-1) => Ok(None),
        Some(length) => u64::try_from(length)
            .map(Some)
            .map_err(|_| Malformed("a negative length")),
        None => Err(Malformed("a length")),
    }
}

/// The first reply of `bytes` and its length; none if it is incomplete.
pub(super) fn value(bytes: &[u8]) -> Result<Option<(Value, usize)>, Malformed> {
    let value = nested(bytes, MAX_DEPTH)?;
    match value {
        None if bytes.len() >= MAX_VALUE => Err(Malformed("a reply that is too long")),
        value => Ok(value),
    }
}

fn nested(bytes: &[u8], depth: usize) -> Result<Option<(Value, usize)>, Malformed> {
    let Some((head, mut at)) = head(bytes)? else {
        return Ok(None);
    };
    let value = match head {
        Head::Simple(text) => Value::Simple(text),
        Head::Error(text) => Value::Error(text),
        Head::Integer(number) => Value::Integer(number),
        Head::Bulk(None) => Value::Bulk(None),
        Head::Bulk(Some(length)) => {
            let length = usize::try_from(length)
                .ok()
                .filter(|length| *length <= MAX_VALUE);
            let end = at + length.ok_or(Malformed("a reply that is too long"))?;
            let Some(rest) = bytes.get(end..end + 2) else {
                return Ok(None);
            };
            if rest != b"\r\n" {
                return Err(Malformed("a body of another length"));
            }
            let body = bytes[at..end].to_vec();
            at = end + 2;
            Value::Bulk(Some(body))
        }
        Head::Array(None) => Value::Array(Vec::new()),
        Head::Array(Some(count)) => {
            if depth == 0 {
                return Err(Malformed("arrays inside of arrays"));
            }
            let mut values = Vec::new();
            for _ in 0..count {
                let Some((value, length)) = nested(&bytes[at..], depth - 1)? else {
                    return Ok(None);
                };
                at += length;
                values.push(value);
            }
            Value::Array(values)
        }
    };
    Ok(Some((value, at)))
}

#[cfg(test)]
mod tests {
    use kvtier_core::random::SplitMix64;

    use super::*;

    const REPLIES: &[u8] = b"+OK\r\n-ERR no\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n$0\r\n\r\n*2\r\n$1\r\n0\r\n*1\r\n:1\r\n*-1\r\n";

    fn all(mut bytes: &[u8]) -> Vec<Value> {
        let mut values = Vec::new();
        while !bytes.is_empty() {
            let (value, length) = value(bytes).unwrap().unwrap();
            bytes = &bytes[length..];
            values.push(value);
        }
        values
    }

    #[test]
    fn replies_of_every_type_are_read_to_their_end() {
        let nested = vec![
            Value::Bulk(Some(b"0".to_vec())),
            Value::Array(vec![Value::Integer(1)]),
        ];
        assert_eq!(
            all(REPLIES),
            [
                Value::Simple("OK".into()),
                Value::Error("ERR no".into()),
                Value::Integer(-7),
                Value::Bulk(Some(b"a\r\n".to_vec())),
                Value::Bulk(None),
                Value::Bulk(Some(Vec::new())),
                Value::Array(nested),
                Value::Array(Vec::new()),
            ]
        );
    }

    #[test]
    fn incomplete_replies_are_waited_for_at_every_byte() {
        let mut at = 0;
        for whole in all(REPLIES) {
            let (_, length) = value(&REPLIES[at..]).unwrap().unwrap();
            for cut in 0..length {
                assert_eq!(
                    value(&REPLIES[at..at + cut]),
                    Ok(None),
                    "{whole:?} at {cut}"
                );
            }
            at += length;
        }
    }

    #[test]
    fn changed_bytes_break_nothing_and_arrive_the_same_in_any_pieces() {
        for seed in 0..20_000 {
            let mut bytes = REPLIES.to_vec();
            for change in 0..1 + SplitMix64::nth(seed, 0) % 4 {
                let random = SplitMix64::nth(seed, 1 + change);
                let at = random as usize % bytes.len();
                bytes[at] = b"0123456789+-:$*\r\nx"[(random >> 32) as usize % 18];
            }
            let mut at = 0;
            while let Ok(Some((whole, length))) = value(&bytes[at..]) {
                // Nothing is read from a part.
                for cut in 0..length {
                    let part = value(&bytes[at..at + cut]);
                    assert!(matches!(part, Ok(None)), "{whole:?} at {cut}: {part:?}");
                }
                at += length;
            }
        }
    }

    #[test]
    fn what_is_no_reply_is_refused_without_memory_for_it() {
        let deep = "*1\r\n".repeat(10);
        let long = [b"+".as_slice(), &vec![b'x'; MAX_LINE]].concat();
        for bytes in [
            b"OK\r\n".as_slice(),
            b"\r\n",
            b"$x\r\n",
            b"$-2\r\n",
            b"$99999999999999\r\n",
            b"$3\r\nabcde",
            b":1.5\r\n",
            b"*-5\r\n",
            b"%1\r\n",
            deep.as_bytes(),
            &long,
        ] {
            assert!(value(bytes).is_err(), "{:?}", &bytes[..bytes.len().min(20)]);
        }
        // Replies that were only announced.
        assert_eq!(value(b"*4000000000000000000\r\n:1\r\n"), Ok(None));
    }
}
