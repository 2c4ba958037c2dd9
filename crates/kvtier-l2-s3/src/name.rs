//! Names of objects: keys in the bucket, and how they are quoted in a path and in a query.

use kvtier_core::object_key::{KeyShape, ObjectKey};

/// Longest key of S3, in bytes of UTF-8.
pub(super) const MAX_KEY: usize = 1024;

/// Characters that Python's `quote` keeps, beside letters and digits. LMCache quotes keys by it.
const KEPT_IN_PATH: &[u8] = b"_.-~/";

/// Characters that a query keeps, beside letters and digits.
const KEPT_IN_QUERY: &[u8] = b"_.-~";

/// Returns the key of an object in the bucket: the peer's name, behind the prefix and an `@` if there is one.
pub(super) fn of(prefix: &str, key: &ObjectKey) -> String {
    let name = key.text().name(KeyShape::Grouped);
    match prefix {
        "" => name,
        prefix => format!("{prefix}@{name}"),
    }
}

/// Returns the object of a key in the bucket, `None` if the key is of something else.
pub(super) fn parse(prefix: &str, key: &str) -> Option<ObjectKey> {
    let name = match prefix {
        "" => key,
        prefix => key.strip_prefix(prefix)?.strip_prefix('@')?,
    };
    let object = ObjectKey::parse_name(name, Some(KeyShape::Grouped)).ok()?;
    // Another spelling of the same object is not where the object is looked for.
    (object.text().name(KeyShape::Grouped) == name).then_some(object)
}

/// Quotes a key for a path, without the `/` before it.
pub(super) fn quoted(key: &str) -> String {
    escaped(key, KEPT_IN_PATH)
}

/// Quotes a name or a value for a query.
pub(super) fn quoted_in_query(text: &str) -> String {
    escaped(text, KEPT_IN_QUERY)
}

fn escaped(text: &str, kept: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = String::with_capacity(text.len() + 32);
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || kept.contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push(char::from(DIGITS[usize::from(byte >> 4)]));
            out.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
    out
}

/// Reads a key of a listing with `encoding-type=url` back, in which a space is a `+`. `None` if it is not quoted rightly.
pub(super) fn unquoted(text: &str) -> Option<String> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let (high, low) = (digit(bytes.next()?)?, digit(bytes.next()?)?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_l2::conformance::object_with;

    #[test]
    fn keys_are_quoted_as_by_the_peer() {
        for (key, expected) in [
            ("org/Tiny model@01000100", "org/Tiny%20model%4001000100"),
            ("/models/x@1", "/models/x%401"),
            ("a+ü~_.-", "a%2B%C3%BC~_.-"),
            ("line\nend\"%", "line%0Aend%22%25"),
        ] {
            assert_eq!(quoted(key), expected);
            assert_eq!(unquoted(expected).as_deref(), Some(key));
        }
        assert_eq!(quoted_in_query("a/b@c d"), "a%2Fb%40c%20d");
        assert_eq!(unquoted("a+b"), Some("a b".into()));
        for bad in ["%", "%4", "%4g", "%FF"] {
            assert_eq!(unquoted(bad), None, "{bad}");
        }
    }

    #[test]
    fn names_read_back_under_their_prefix_only() {
        for (model, salt) in [("org/Tiny model", "a+ü"), ("/models/x", ""), ("..", "..")] {
            let key = object_with(1, 10, model, salt).key;
            for prefix in ["", "kv", "kv/part"] {
                let name = of(prefix, &key);
                assert_eq!(parse(prefix, &name), Some(key.clone()), "{name}");
                assert_eq!(parse("other", &name), None, "{name}");
                assert_eq!(parse(prefix, &name.to_uppercase()), None, "{name}");
            }
        }
        assert_eq!(parse("", "a/file"), None);
    }
}
