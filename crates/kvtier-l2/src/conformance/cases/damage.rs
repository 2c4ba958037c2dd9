//! Damaged objects. Only for subjects that can damage them.

use std::sync::Arc;

use super::super::Damage;
use super::super::context::{TestContext, name};
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
async fn is_never_ok(
    context: &TestContext,
    adapter: &Arc<dyn Adapter>,
    objects: &[ObjectSpec],
    how: Damage,
) {
    let loaded = context.load(&**adapter, objects).await;
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

/// Damage while the adapter is open.
pub(super) async fn damaged_objects_are_never_ok(context: TestContext) {
    let adapter = context.open().await;
    for how in Damage::ALL {
        let objects = some(how);
        context.store(&*adapter, &objects).await;
        context.load_all(&*adapter, &objects).await;
        if context.subject.damage(&objects[1].key, how) {
            is_never_ok(&context, &adapter, &objects, how).await;
        }
    }
}

/// Damage to the objects of an adapter that is opened only later.
pub(super) async fn damage_while_closed_is_never_ok(context: TestContext) {
    for how in Damage::ALL {
        let objects = some(how);
        let adapter = context.open().await;
        context.store(&*adapter, &objects).await;
        adapter.close().await;
        drop(adapter);
        let damaged = context.subject.damage(&objects[1].key, how);
        let adapter = context.open().await;
        if damaged {
            is_never_ok(&context, &adapter, &objects, how).await;
        }
        adapter.close().await;
    }
}

/// After a load has detected the damage, the object can be stored again.
pub(super) async fn damaged_objects_can_be_stored_again(context: TestContext) {
    let adapter = context.open().await;
    for how in Damage::ALL {
        let objects = some(how);
        context.store(&*adapter, &objects).await;
        if !context.subject.damage(&objects[1].key, how) {
            continue;
        }
        is_never_ok(&context, &adapter, &objects, how).await;
        context.store(&*adapter, &objects).await;
        context.load_all(&*adapter, &objects).await;
    }
}
