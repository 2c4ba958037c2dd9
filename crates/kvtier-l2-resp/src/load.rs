//! Lookups and loads: an object counts only with a companion that is its own, unless the options say otherwise.

use super::command::{Commands, RespReply};
use super::endpoint::Endpoint;
use super::names::KeyedItem;
use super::reply::Value;
use super::{RespAdapter, errors};
use kvtier_l2::{
    Adapter as _, ErrorKind, L2Error, LoadItem, Loaded, ObjectSpec,
    metadata::{Metadata, count},
};

/// Whether bytes without a layout are none of this object's. A companion is lost more easily than a trailer of a file: its
/// server may evict it alone. So what has none may be kvtier's own, of another layout.
fn needs_layout(adapter: &RespAdapter, object: &ObjectSpec) -> bool {
    let must_have = adapter.options.companion_sums || object.is_page_bound();
    must_have && !adapter.options.trust_missing_layout || is_required(adapter)
}

/// Whether an object needs a companion.
fn is_required(adapter: &RespAdapter) -> bool {
    adapter.options.companion_sums && adapter.options.require_checksum
}

pub(super) fn write_lookup(
    adapter: &RespAdapter,
    named: &KeyedItem<'_, ObjectSpec>,
    commands: &mut Commands,
) {
    // An absent key has the length 0 too.
    let length: &[u8] = match named.item.len {
        0 => b"EXISTS",
        _ => b"STRLEN",
    };
    commands.push(&[length, named.key.as_bytes()]);
    if adapter.options.companion_sums && !adapter.options.read_only {
        commands.push(&[b"GET", named.companion.as_bytes()]);
    }
}

/// Bytes of an object that can be loaded.
pub(super) fn read_lookup(
    adapter: &RespAdapter,
    object: &ObjectSpec,
    node: &Endpoint,
    values: &[Value],
) -> Result<Option<u64>, L2Error> {
    let wanted = i64::try_from(object.len.max(1)).unwrap_or(i64::MAX);
    match values.first() {
        Some(Value::Integer(length)) if *length == wanted => {}
        Some(Value::Integer(_)) => return Ok(None),
        Some(Value::Error(text)) if errors::code(text) == "WRONGTYPE" => return Ok(None),
        Some(Value::Error(text)) => return Err(errors::of(node, text)),
        _ => return Err(node.unexpected()),
    }
    if adapter.options.read_only {
        return Ok(Some(adapter.size_of(object.len)));
    }
    let companion = match values.get(1) {
        Some(value) => adapter.companion(object, node, value)?,
        None => Metadata::None,
    };
    let needs_layout = needs_layout(adapter, object);
    let is_loadable = adapter.counters.is_loadable(companion, needs_layout);
    Ok(is_loadable.then(|| adapter.size_of(object.len)))
}

pub(super) fn write_load(
    adapter: &RespAdapter,
    named: &KeyedItem<'_, LoadItem>,
    commands: &mut Commands,
) -> Result<(), L2Error> {
    let LoadItem { object, to } = named.item;
    adapter.check(object, to)?;
    if !adapter.options.companion_sums && needs_layout(adapter, object) {
        count(&adapter.counters.no_layout);
        return Err(adapter.error(ErrorKind::NotFound, "objects have no layout there"));
    }
    // In this order: if both are replaced in between, the bytes are not those of the companion, which is noticed.
    commands.get(named.key.as_bytes(), to.clone());
    if adapter.options.companion_sums {
        let companion = named.companion.as_bytes();
        commands.push(&[b"GET", companion]);
        if !adapter.options.read_only {
            let lives = adapter.companion_ttl();
            commands.push(&[b"EXPIRE", companion, lives.as_bytes()]);
        }
    }
    Ok(())
}

pub(super) fn read_load(
    adapter: &RespAdapter,
    item: &LoadItem,
    node: &Endpoint,
    replies: Vec<RespReply>,
) -> Result<Loaded, L2Error> {
    let mut replies = replies.into_iter();
    match replies.next() {
        Some(RespReply::Object(read)) => read?,
        Some(RespReply::Value(Value::Error(text))) => return Err(errors::of(node, &text)),
        _ => return Err(node.unexpected()),
    }
    let companion = match replies.next() {
        Some(RespReply::Value(value)) => adapter.companion(&item.object, node, &value)?,
        Some(RespReply::Object(_)) => return Err(node.unexpected()),
        None => Metadata::None,
    };
    let needs_layout = needs_layout(adapter, &item.object);
    let sum = adapter.counters.expected_sum(companion, needs_layout);
    let sum = sum.map_err(|(kind, what)| match kind {
        // Readers of peers tell it from an object that was evicted.
        ErrorKind::NotFound if adapter.options.read_only => {
            node.error(ErrorKind::Unreadable, &what)
        }
        _ => node.error(kind, &what),
    });
    let Some(sum) = sum? else {
        count(&adapter.counters.unverified);
        return Ok(Loaded { verified: false });
    };
    let found = item.to.checksum();
    let found = found.map_err(|error| adapter.error(ErrorKind::Memory, &error.to_string()))?;
    if found != sum {
        count(&adapter.counters.corrupt);
        let what = "the object is not what was stored, or was replaced meanwhile";
        return Err(node.error(ErrorKind::Corrupt, &what));
    }
    Ok(Loaded { verified: true })
}
