//! Stores: an object and its companion in one transaction.

use super::command::Commands;
use super::endpoint::Endpoint;
use super::names::KeyedItem;
use super::reply::Value;
use super::{MAX_VALUE, RespAdapter};
use kvtier_l2::{
    Adapter as _, ErrorKind, L2Error, StoreItem, Stored, metadata::Metadata, trailer::Trailer,
};

pub(super) fn write(
    adapter: &RespAdapter,
    named: &KeyedItem<'_, StoreItem>,
    commands: &mut Commands,
) -> Result<(), L2Error> {
    let StoreItem { object, from } = named.item;
    adapter.check(object, from)?;
    if object.len > MAX_VALUE {
        let what = "values have at most 512 MiB; store smaller chunks";
        return Err(adapter.error(ErrorKind::Refused, what));
    }
    let ttl = adapter.options.ttl_seconds;
    let key = named.key.as_bytes();
    if !adapter.options.companion_sums {
        commands.push(&[b"STRLEN", key]);
        commands.set(key, from.clone(), ttl);
        return Ok(());
    }
    let sum = from.checksum();
    let sum = sum.map_err(|error| adapter.error(ErrorKind::Memory, &error.to_string()))?;
    let trailer = Trailer::new(object, sum);
    let lives = adapter.companion_ttl();
    // A slot on its way to another node takes no transactions. Two stores at once may leave the companion of one beside
    // the object of the other then: no hit until the next store.
    let is_transaction = !commands.asking;
    if is_transaction {
        commands.push(&[b"MULTI"]);
    }
    let companion = named.companion.as_bytes();
    commands.push(&[b"STRLEN", key]);
    commands.push(&[b"GET", companion]);
    commands.push(&[
        b"SET",
        companion,
        &trailer.encode(),
        b"EX",
        lives.as_bytes(),
    ]);
    commands.set(key, from.clone(), ttl);
    if is_transaction {
        commands.push(&[b"EXEC"]);
    }
    Ok(())
}

/// The result of a store: all of its commands were executed, or none. An object is always replaced, so that a damaged
/// one is not kept.
pub(super) fn read(
    adapter: &RespAdapter,
    named: &KeyedItem<'_, StoreItem>,
    node: &Endpoint,
    mut values: Vec<Value>,
) -> Result<Stored, L2Error> {
    let object = &named.item.object;
    node.refuse_errors(&values)?;
    if let Some(Value::Array(executed)) = values.last_mut() {
        values = std::mem::take(executed);
        // Each command of a transaction has a result of its own.
        node.refuse_errors(&values)?;
    }
    let is_ok = |value: &Value| matches!(value, Value::Simple(text) if text == "OK");
    let (length, companion) = match &values[..] {
        [length, companion, first, second] if is_ok(first) && is_ok(second) => {
            (length, Some(companion))
        }
        [length, set] if is_ok(set) => (length, None),
        _ => return Err(node.unexpected()),
    };
    let was_there = matches!(length, Value::Integer(before) if u64::try_from(*before) == Ok(object.len))
        && match companion {
            Some(companion) => matches!(
                adapter.companion(object, node, companion)?,
                Metadata::Of(_) | Metadata::None
            ),
            None => true,
        };
    let bytes = adapter.size_of(object.len);
    Ok(if was_there {
        Stored::AlreadyThere(bytes)
    } else {
        Stored::Written(bytes)
    })
}
