//! Listings: pages of a scan of all keys.

use std::collections::HashSet;
use std::time::SystemTime;

use kvtier_core::object_key::{KeyShape, ObjectKey};

use super::command::Commands;
use super::reply::Value;
use super::{COMPANION, KEYS_PER_CALL, RespAdapter, errors};
use crate::adapter::{Adapter as _, ListPage, Listed};
use crate::error::L2Error;

/// Keys of one page at most.
const MAX_LIST_PAGE: usize = 2000;

impl RespAdapter {
    /// A page of a scan: objects with their lengths and idle times, the keys of others, and the next cursor.
    pub(super) async fn page(
        &self,
        cursor: &str,
        limit: usize,
    ) -> Result<(ListPage, u64), L2Error> {
        let mut commands = Commands::default();
        let count = limit.clamp(1, MAX_LIST_PAGE).to_string();
        let pattern = match &*self.options.key_prefix {
            "" => "*@*@*@*".to_owned(),
            prefix => format!("{}@*@*@*@*", escaped(prefix)),
        };
        let arguments: [&[u8]; 6] = [
            b"SCAN",
            cursor.as_bytes(),
            b"MATCH",
            pattern.as_bytes(),
            b"COUNT",
            count.as_bytes(),
        ];
        commands.push(&arguments);
        let mut values = self.values(commands).await?;
        let (next, keys) = match values.pop() {
            Some(Value::Error(text)) => return Err(errors::of(&self.endpoint, &text)),
            Some(Value::Array(page)) => match <[Value; 2]>::try_from(page) {
                Ok([Value::Bulk(Some(next)), Value::Array(keys)]) => (next, keys),
                _ => return Err(self.unexpected()),
            },
            _ => return Err(self.unexpected()),
        };
        let (mut known, mut foreign, mut seen) = (Vec::new(), 0, HashSet::new());
        for key in keys {
            let Value::Bulk(Some(key)) = key else {
                return Err(self.unexpected());
            };
            match self.parse(&key) {
                Some(object) if seen.insert(object.clone()) => known.push((object, key)),
                Some(_) => {}
                None => foreign += u64::from(!self.is_companion(&key)),
            }
        }
        let mut objects = Vec::with_capacity(known.len());
        let now = SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap_or_default()
            .as_secs();
        for part in known.chunks(KEYS_PER_CALL) {
            let mut commands = Commands::default();
            for (_, key) in part {
                // In this order: the other one is a use.
                commands.push(&[b"OBJECT", b"IDLETIME", key]);
                commands.push(&[b"STRLEN", key]);
            }
            let values = self.values(commands).await?;
            for ((key, _), values) in part.iter().zip(values.chunks_exact(2)) {
                // Deleted meanwhile, or of another type.
                let &Value::Integer(length @ 1..) = &values[1] else {
                    continue;
                };
                // Servers that evict by frequency know no idle times.
                let idle = match values[0] {
                    Value::Integer(idle) => u64::try_from(idle).unwrap_or(0),
                    _ => 0,
                };
                objects.push(Listed {
                    key: key.clone(),
                    bytes: self.size_of(length.unsigned_abs()),
                    used_at: now.saturating_sub(idle),
                });
            }
        }
        let next = String::from_utf8(next).map_err(|_| self.unexpected())?;
        let next = (next != "0").then_some(next);
        Ok((ListPage { objects, next }, foreign))
    }

    /// A key without the prefix; none if it has another one.
    fn unprefixed<'a>(&self, key: &'a [u8]) -> Option<&'a [u8]> {
        match self.options.key_prefix.as_bytes() {
            b"" => Some(key),
            prefix => key.strip_prefix(prefix)?.strip_prefix(b"@"),
        }
    }

    fn is_companion(&self, key: &[u8]) -> bool {
        let name = self.unprefixed(key);
        name.is_some_and(|name| name.starts_with(COMPANION.as_bytes()))
    }

    /// The object of a key; none if it is of something else.
    fn parse(&self, key: &[u8]) -> Option<ObjectKey> {
        if self.is_companion(key) {
            return None;
        }
        let name = std::str::from_utf8(self.unprefixed(key)?).ok()?;
        ObjectKey::parse_name(name, Some(KeyShape::Grouped)).ok()
    }
}

/// `text` as a pattern that only `text` matches.
fn escaped(text: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '\\' | '^');
    let escape = |c: char| special(c).then_some('\\').into_iter().chain([c]);
    text.chars().flat_map(escape).collect()
}
