//! Stores: objects are copied into the segment, and their checksums made of what was copied.

use std::sync::Arc;

use super::message::{self, ObjectResult, Request, StoreEntry};
use super::session::{ProcessConnection, RequestClass};
use super::{Group, GroupItem, ProcessTier, Results, copying, footprint, metadata};
use kvtier_l2::{ErrorKind, L2Error, StoreItem, Stored};

/// An object in the segment.
struct CopiedObject {
    number: usize,
    name: String,
    item: StoreItem,
    at: u64,
    sum: u128,
}

/// Stores a group of objects, which take `bytes` of the segment.
pub(super) async fn store(
    tier: Arc<ProcessTier>,
    session: Arc<ProcessConnection>,
    bytes: u64,
    group: Group<StoreItem>,
) -> Result<Results<Stored>, L2Error> {
    let permit = session.permit(RequestClass::Data).await?;
    let slot = session.slot(bytes).await?;
    let work = move || {
        let (mut copied, mut results) = (Vec::with_capacity(group.len()), Results::new());
        let mut at = slot.at();
        for GroupItem { number, name, item } in group {
            let (from, len) = (&item.from, item.object.len);
            match slot.memory().copy_in(at, from.arena(), from.extent()) {
                Ok(sum) => copied.push(CopiedObject {
                    number,
                    name,
                    at,
                    sum,
                    item,
                }),
                Err(error) => results.push((number, Err(error.into()))),
            }
            at += footprint(len);
        }
        (slot, copied, results)
    };
    let (slot, copied, mut results) = copying(bytes, work).await?;
    if copied.is_empty() {
        return Ok(results);
    }
    let objects: Vec<_> = copied
        .iter()
        .map(|copied| StoreEntry {
            key: &copied.name,
            len: copied.item.object.len,
            at: copied.at,
            meta: metadata::encode(&copied.item.object, copied.sum),
            replace: tier.damaged.contains(&copied.item.object.key),
        })
        .collect();
    let request = Request::Store { objects: &objects };
    let answered = session.call(&request, permit, Some(slot)).await?;
    let entries: Vec<ObjectResult> = message::results("store", &answered.body, copied.len())
        .map_err(|what| session.violate(what))?
        .map_err(|error| session.named(&error))?;
    for (copied, entry) in copied.iter().zip(entries) {
        let key = &copied.item.object.key;
        let bytes = copied
            .item
            .object
            .len
            .saturating_add(session.welcome.overhead_bytes);
        let result = match (entry.failure("store"), entry.new) {
            (Some(error), _) => Err(tier.link.error(error.kind(), &error.to_string())),
            (None, Some(true)) => Ok(Stored::Written(bytes)),
            (None, Some(false)) => Ok(Stored::AlreadyThere(bytes)),
            (None, None) => {
                let what = "store: a result has neither new nor an error";
                Err(tier.link.error(ErrorKind::Unavailable, what))
            }
        };
        if result.is_ok() {
            tier.damaged.remove(key);
        }
        results.push((copied.number, result));
    }
    Ok(results)
}
