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

/// How far an incomplete reply was read, so that what has arrived is not read again with each piece that arrives.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Bytes of complete parts.
    at: usize,
    /// Replies left of each array around them.
    left: Vec<u64>,
    /// Parts read in all.
    #[cfg(test)]
    parts: usize,
}

impl Progress {
    /// The first reply of `bytes` and its length; none if it is incomplete: then the next call has the same bytes and more.
    pub(super) fn value(&mut self, bytes: &[u8]) -> Result<Option<(Value, usize)>, Malformed> {
        let is_new = self.at == 0;
        if is_new && let Some(value) = nested(bytes, MAX_DEPTH)? {
            return Ok(Some(value));
        }
        if self.is_complete(bytes)? {
            self.at = 0;
            return nested(bytes, MAX_DEPTH);
        }
        if bytes.len() >= MAX_VALUE {
            Err(Malformed("a reply that is too long"))
        } else {
            Ok(None)
        }
    }

    fn is_complete(&mut self, bytes: &[u8]) -> Result<bool, Malformed> {
        while let Some((head, used)) = head(bytes.get(self.at..).unwrap_or_default())? {
            let mut end = self.at + used;
            match head {
                Head::Bulk(Some(length)) => {
                    end = end.saturating_add(body_len(length)?).saturating_add(2);
                    if bytes.len() < end {
                        return Ok(false);
                    }
                }
                Head::Array(Some(count)) => {
                    if self.left.len() == MAX_DEPTH {
                        return Err(Malformed("arrays inside of arrays"));
                    }
                    if count > 0 {
                        self.left.push(count);
                        self.at = end;
                        continue;
                    }
                }
                _ => {}
            }
            self.at = end;
            #[cfg(test)]
            {
                self.parts += 1;
            }
            // An array ends with the last of its replies.
            loop {
                match self.left.last_mut() {
                    None => return Ok(true),
                    Some(1) => self.left.truncate(self.left.len() - 1),
                    Some(left) => {
                        *left -= 1;
                        break;
                    }
                }
            }
        }
        Ok(false)
    }
}

/// The first reply of `bytes` and its length; none if it is incomplete.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn value(bytes: &[u8]) -> Result<Option<(Value, usize)>, Malformed> {
    Progress::default().value(bytes)
}

/// The length of a body that is kept whole.
fn body_len(length: u64) -> Result<usize, Malformed> {
    let length = usize::try_from(length).ok();
    let length = length.filter(|length| *length <= MAX_VALUE);
    length.ok_or(Malformed("a reply that is too long"))
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
            let end = at + body_len(length)?;
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
    fn long_reply_in_pieces_is_read_once() {
        let count = 20_000;
        let mut bytes = format!("*{count}\r\n").into_bytes();
        for number in 0..count {
            bytes.extend_from_slice(format!("*2\r\n$3\r\nabc\r\n:{number}\r\n").as_bytes());
        }
        let mut progress = Progress::default();
        for end in (1..bytes.len()).step_by(997) {
            assert_eq!(progress.value(&bytes[..end]), Ok(None));
        }
        let (value, length) = progress.value(&bytes).unwrap().unwrap();
        assert_eq!(length, bytes.len());
        assert_eq!(progress.parts, 2 * count);
        let Value::Array(values) = value else {
            panic!("{value:?}")
        };
        let last = [
            Value::Bulk(Some(b"abc".to_vec())),
            Value::Integer(count as i64 - 1),
        ];
        assert_eq!(values.last(), Some(&Value::Array(last.to_vec())));
        assert_eq!(values.len(), count);
        // The next one is read from its start.
        assert_eq!(progress.value(b":7\r\n"), Ok(Some((Value::Integer(7), 4))));
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
                let mut progress = Progress::default();
                for cut in 0..length {
                    let parts = [
                        value(&bytes[at..at + cut]),
                        progress.value(&bytes[at..at + cut]),
                    ];
                    let is_none = |part| matches!(part, &Ok(None));
                    assert!(parts.iter().all(is_none), "{whole:?} at {cut}: {parts:?}");
                }
                let read = progress.value(&bytes[at..]);
                assert_eq!(read, Ok(Some((whole, length))));
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
