//! Loads: the tier writes to the segment, and what is copied out of it is compared with the checksum that was stored.

use std::sync::Arc;

use super::message::{self, LoadEntry, ObjectResult, Request};
use super::metadata::{self, count};
use super::session::{ProcessConnection, RequestClass};
use super::{Group, GroupItem, ProcessTier, Results, copying, footprint};
use kvtier_l2::{ErrorKind, L2Error, LoadItem, Loaded, ObjectSpec};

/// An object that the tier says is in the segment.
struct WrittenObject {
    number: usize,
    item: LoadItem,
    at: u64,
    /// Checksum of the object, if it has one.
    sum: Option<u128>,
}

/// Loads a group of objects, which take `bytes` of the segment.
pub(super) async fn load(
    tier: Arc<ProcessTier>,
    session: Arc<ProcessConnection>,
    bytes: u64,
    group: Group<LoadItem>,
) -> Result<Results<Loaded>, L2Error> {
    let permit = session.permit(RequestClass::Data).await?;
    let slot = session.slot(bytes).await?;
    let mut at = slot.at();
    let objects: Vec<_> = group
        .iter()
        .map(|GroupItem { name, item, .. }| {
            let entry = LoadEntry {
                key: name,
                len: item.object.len,
                at,
            };
            at += footprint(item.object.len);
            entry
        })
        .collect();
    let request = Request::Load { objects: &objects };
    let answered = session.call(&request, permit, Some(slot)).await?;
    let entries: Vec<Option<ObjectResult>> = message::results("load", &answered.body, group.len())
        .map_err(|what| session.violate(what))?
        .map_err(|error| session.named(&error))?;
    let places: Vec<_> = objects.iter().map(|object| object.at).collect();
    let (mut results, mut written) = (Results::new(), Vec::new());
    for ((GroupItem { number, item, .. }, entry), at) in group.into_iter().zip(entries).zip(places)
    {
        match expected_sum(&tier, &item.object, entry) {
            Ok(sum) => written.push(WrittenObject {
                number,
                item,
                at,
                sum,
            }),
            Err(error) => {
                if error.kind() == ErrorKind::Corrupt {
                    tier.damaged.insert(&item.object.key);
                }
                results.push((number, Err(error)));
            }
        }
    }
    let Some(slot) = answered.slot.filter(|_| !written.is_empty()) else {
        return Ok(results);
    };
    let work = move || {
        let copy = |written: WrittenObject| {
            let to = &written.item.to;
            let sum = slot.memory().copy_out(written.at, to.arena(), to.extent());
            (written, sum)
        };
        let copied: Vec<_> = written.into_iter().map(copy).collect();
        // The tier may not write there any more; other requests may.
        drop(slot);
        copied
    };
    for (written, found) in copying(bytes, work).await? {
        let result = match (found, written.sum) {
            (Err(error), _) => Err(error.into()),
            (Ok(_), None) => {
                count(&tier.counters.unverified);
                Ok(Loaded { verified: false })
            }
            (Ok(found), Some(sum)) if found == sum => Ok(Loaded { verified: true }),
            (Ok(_), Some(_)) => {
                count(&tier.counters.corrupt);
                tier.damaged.insert(&written.item.object.key);
                let what = "load: the object is not what was stored";
                Err(tier.link.error(ErrorKind::Corrupt, what))
            }
        };
        results.push((written.number, result));
    }
    Ok(results)
}

/// Returns the checksum of an object that the tier says to have written.
fn expected_sum(
    tier: &ProcessTier,
    object: &ObjectSpec,
    entry: Option<ObjectResult>,
) -> Result<Option<u128>, L2Error> {
    let error = |kind, what: &str| Err(tier.link.error(kind, what));
    let Some(entry) = entry else {
        return error(ErrorKind::NotFound, "load: there is no such object");
    };
    if let Some(failure) = entry.failure("load") {
        if failure.kind() == ErrorKind::Corrupt {
            count(&tier.counters.corrupt);
        }
        return error(failure.kind(), &failure.to_string());
    }
    let Some(len) = entry.len else {
        return error(
            ErrorKind::Unavailable,
            "load: a result has neither len nor an error",
        );
    };
    if len != object.len {
        count(&tier.counters.other_layout);
        let what = format!("load: the object has {len} bytes instead of {}", object.len);
        return error(ErrorKind::NotFound, &what);
    }
    let metadata = metadata::of(entry.meta(), object);
    let sum = tier.counters.expected_sum(metadata, tier.needs_layout());
    sum.map_err(|(kind, what)| tier.link.error(kind, what))
}
