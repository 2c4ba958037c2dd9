//! What nodes hold: pages of a scan of all keys, and their memory.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use kvtier_core::object_key::{KeyShape, ObjectKey};

use super::command::Commands;
use super::names::{is_companion, unprefixed};
use super::pool::ConnectionPool;
use super::reply::Value;
use super::{RespAdapter, RespOptions, errors};
use kvtier_l2::{
    Adapter as _, BoxFuture, ErrorKind, L2Error, ListPage, Listed, Recovered, recover_pages,
};

/// Keys of one page at most.
const MAX_LIST_PAGE: usize = 2000;

/// Keys of one page of a recovery.
const RECOVERY_PAGE: usize = 1000;

/// Keys that are asked about in one round trip.
const KEYS_PER_PART: usize = 512;

/// A page of a scan from a position on: objects with their lengths and idle times, the number of keys of others, and the
/// next position. That is the cursor of a node and its address, as in `17@10.0.0.1:6379`; nodes come by address.
pub(super) async fn page(
    adapter: &RespAdapter,
    position: Option<&str>,
    limit: usize,
) -> Result<(ListPage, u64), L2Error> {
    let nodes = adapter.nodes.primaries().await?;
    let (at, cursor) = match position {
        None => (0, "0"),
        Some(position) => start(adapter, &nodes, position)?,
    };
    let node = &nodes[at];
    let (objects, next, foreign) = NodeScan { adapter, node }.page(cursor, limit).await?;
    let next = match (&*next, nodes.get(at + 1)) {
        ("0", None) => None,
        ("0", Some(next)) => Some(format!("0@{}", next.endpoint.name())),
        (cursor, _) => Some(format!("{cursor}@{}", node.endpoint.name())),
    };
    Ok((ListPage { objects, next }, foreign))
}

/// The node of a position, and the cursor there.
fn start<'a>(
    adapter: &RespAdapter,
    nodes: &[Arc<ConnectionPool>],
    position: &'a str,
) -> Result<(usize, &'a str), L2Error> {
    let is_cursor = |text: &str| text.parse::<u64>().is_ok();
    let Some((cursor, address)) = position.split_once('@').filter(|it| is_cursor(it.0)) else {
        let what = format!("{position:?} is no position of a listing; give one that it returned");
        return Err(adapter.error(ErrorKind::Refused, &what));
    };
    match nodes
        .iter()
        .position(|node| node.endpoint.name() == address)
    {
        Some(at) => Ok((at, cursor)),
        None => {
            let what = format!("{position:?}: that node has left; begin the listing again");
            Err(adapter.error(ErrorKind::Refused, &what))
        }
    }
}

/// Scan of the keys of one node.
pub(super) struct NodeScan<'a> {
    pub(super) adapter: &'a RespAdapter,
    pub(super) node: &'a ConnectionPool,
}

impl NodeScan<'_> {
    /// A page from a cursor on.
    async fn page(
        &self,
        cursor: &str,
        limit: usize,
    ) -> Result<(Vec<Listed>, String, u64), L2Error> {
        let (node, options) = (self.node, &self.adapter.options);
        let mut commands = Commands::default();
        let count = limit.clamp(1, MAX_LIST_PAGE).to_string();
        let pattern = match &*options.key_prefix {
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
        let mut values = node.values(commands).await?;
        let (next, keys) = match values.pop() {
            Some(Value::Error(text)) => return Err(errors::of(&node.endpoint, &text)),
            Some(Value::Array(page)) => match <[Value; 2]>::try_from(page) {
                Ok([Value::Bulk(Some(next)), Value::Array(keys)]) => (next, keys),
                _ => return Err(node.endpoint.unexpected()),
            },
            _ => return Err(node.endpoint.unexpected()),
        };
        let (mut known, mut foreign, mut seen) = (Vec::new(), 0, HashSet::new());
        for key in keys {
            let Value::Bulk(Some(key)) = key else {
                return Err(node.endpoint.unexpected());
            };
            match parse(&options.key_prefix, &key) {
                Some(object) if seen.insert(object.clone()) => known.push((object, key)),
                Some(_) => {}
                None => {
                    let name = unprefixed(&options.key_prefix, &key);
                    foreign += u64::from(!name.is_some_and(is_companion));
                }
            }
        }
        let mut objects = Vec::with_capacity(known.len());
        let now = SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap_or_default()
            .as_secs();
        for part in known.chunks(KEYS_PER_PART) {
            let mut commands = Commands::default();
            for (_, key) in part {
                // In this order: the other one is a use.
                commands.push(&[b"OBJECT", b"IDLETIME", key]);
                commands.push(&[b"STRLEN", key]);
            }
            let values = node.values(commands).await?;
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
                    bytes: self.adapter.size_of(length.unsigned_abs()),
                    used_at: now.saturating_sub(idle),
                });
            }
        }
        let next = String::from_utf8(next).map_err(|_| node.endpoint.unexpected())?;
        Ok((objects, next, foreign))
    }

    /// Passes all objects of a node to `found`, until that returns false. An object may come twice, as the server makes its table
    /// larger or a slot moves.
    pub(super) async fn recover(
        &self,
        found: &(dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> Result<Recovered, L2Error> {
        let page = |cursor: Option<String>| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let cursor = cursor.as_deref().unwrap_or("0");
                let (objects, next, foreign) = self.page(cursor, RECOVERY_PAGE).await?;
                let next = (next != "0").then_some(next);
                Ok((ListPage { objects, next }, foreign))
            })
        };
        let circles = || {
            let what = "the server goes round in circles in a scan of its keys";
            let endpoint = &self.node.endpoint;
            endpoint.error(ErrorKind::Unavailable, &what)
        };
        recover_pages(page, found, circles).await
    }
}

/// Free bytes of one node by its reply to `INFO memory`, if it has a bound.
pub(super) fn free_bytes_of(options: &RespOptions, values: &[Value]) -> Option<u64> {
    let Some(Value::Bulk(Some(text))) = values.first() else {
        // It may not be allowed.
        return None;
    };
    let text = String::from_utf8_lossy(text);
    let field = |name: &str| {
        let value = |line: &'_ str| {
            Some(
                line.strip_prefix(name)?
                    .strip_prefix(':')?
                    .trim()
                    .to_owned(),
            )
        };
        text.lines().find_map(value)
    };
    let number = |name| field(name)?.parse::<u64>().ok();
    // A server that evicts makes space by itself, when something is stored.
    let evicts = match field("maxmemory_policy").as_deref() {
        None | Some("noeviction") => false,
        Some(policy) => policy.starts_with("allkeys") || options.ttl_seconds.is_some(),
    };
    match (number("maxmemory"), number("used_memory")) {
        (Some(most @ 1..), Some(used)) if !evicts => Some(most.saturating_sub(used)),
        _ => None,
    }
}

/// The object of a key; none if it is of something else.
fn parse(prefix: &str, key: &[u8]) -> Option<ObjectKey> {
    let name = unprefixed(prefix, key)?;
    if is_companion(name) {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    ObjectKey::parse_name(name, Some(KeyShape::Grouped)).ok()
}

/// `text` as a pattern that only `text` matches.
fn escaped(text: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '\\' | '^');
    let escape = |c: char| special(c).then_some('\\').into_iter().chain([c]);
    text.chars().flat_map(escape).collect()
}
