//! Stored bytes that are not what was stored. Only for subjects that can do damage.

use std::sync::Arc;

use super::super::Damage;
use super::super::bed::{Bed, name};
use super::super::object;
use crate::adapter::Adapter;
use crate::error::ErrorKind;
use crate::object::ObjectSpec;

fn some(how: Damage) -> Vec<ObjectSpec> {
    let first = how as u64 * 10;
    (first..first + 3)
        .map(|number| object(number, 50_000))
        .collect()
}

/// The second of three objects does not load, the others do.
async fn is_never_ok(bed: &Bed, adapter: &Arc<dyn Adapter>, objects: &[ObjectSpec], how: Damage) {
    let loaded = bed.load(&**adapter, objects).await;
    let kinds: Vec<_> = loaded
        .into_iter()
        .map(|result| result.err().map(|error| error.kind()))
        .collect();
    let fine = matches!(
        kinds[..],
        [None, Some(ErrorKind::Corrupt | ErrorKind::NotFound), None]
    );
    assert!(fine, "{how:?} of {}: {kinds:?}", name(&objects[1]));
}

/// Damage behind the back of an adapter that knows its objects.
pub(super) async fn damaged_objects_are_never_ok(bed: Bed) {
    let adapter = bed.open().await;
    for how in Damage::ALL {
        let objects = some(how);
        bed.store(&*adapter, &objects).await;
        bed.load_all(&*adapter, &objects).await;
        if bed.subject.damage(&objects[1].key, how) {
            is_never_ok(&bed, &adapter, &objects, how).await;
        }
    }
}

/// Damage to the objects of an adapter that is opened only later.
pub(super) async fn damage_while_closed_is_never_ok(bed: Bed) {
    for how in Damage::ALL {
        let objects = some(how);
        let adapter = bed.open().await;
        bed.store(&*adapter, &objects).await;
        adapter.close().await;
        drop(adapter);
        let damaged = bed.subject.damage(&objects[1].key, how);
        let adapter = bed.open().await;
        if damaged {
            is_never_ok(&bed, &adapter, &objects, how).await;
        }
        adapter.close().await;
    }
}

/// A key is not lost for ever with its object: once a load has told, it can be stored anew.
pub(super) async fn damaged_objects_can_be_stored_again(bed: Bed) {
    let adapter = bed.open().await;
    for how in Damage::ALL {
        let objects = some(how);
        bed.store(&*adapter, &objects).await;
        if !bed.subject.damage(&objects[1].key, how) {
            continue;
        }
        is_never_ok(&bed, &adapter, &objects, how).await;
        bed.store(&*adapter, &objects).await;
        bed.load_all(&*adapter, &objects).await;
    }
}
