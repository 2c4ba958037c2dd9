//! A key has the bytes of its own object only.

use super::super::context::{TestContext, keys, name};
use super::super::{content, object, object_with};
use crate::object::ObjectSpec;

/// A key twice in one batch has the effect of once.
pub(super) async fn same_key_twice_in_one_batch(context: TestContext) {
    let adapter = context.open().await;
    let twice = [object(1, 9000), object(2, 9000), object(1, 9000)];
    let stored = context.store(&*adapter, &twice).await;
    assert_eq!(stored[0].bytes(), stored[2].bytes());
    context.load_all(&*adapter, &twice).await;
    let found = context.lookup(&*adapter, &twice).await;
    assert_eq!(found[0], found[2]);
    if adapter.capabilities().list {
        assert_eq!(context.list(&*adapter, 10).await.len(), 2);
    }
    if adapter.capabilities().delete {
        let deleted = adapter.delete(keys(&twice)).await;
        let removed = deleted.iter().filter(|result| **result == Ok(true)).count();
        assert_eq!(removed, 2, "{deleted:?}");
    }
}

/// An object stored with one layout is not loaded with another one until it is stored again.
async fn never_ok(context: &TestContext, forms: &[ObjectSpec]) {
    let adapter = context.open().await;
    for (at, form) in forms.iter().enumerate() {
        context.store(&*adapter, std::slice::from_ref(form)).await;
        context
            .load_all(&*adapter, std::slice::from_ref(form))
            .await;
        for other in forms.iter().enumerate().filter(|(other, _)| *other != at) {
            // That what is Ok has the bytes of its own form is seen to where it is loaded. Had it any, they would have
            // to be those of an earlier store, which was replaced.
            let loaded = context.load(&*adapter, std::slice::from_ref(other.1)).await;
            assert!(
                loaded[0].is_err(),
                "{} is Ok as {}",
                name(form),
                name(other.1)
            );
        }
        context.store(&*adapter, std::slice::from_ref(form)).await;
        context
            .load_all(&*adapter, std::slice::from_ref(form))
            .await;
    }
    if adapter.capabilities().list {
        let listed = context.list(&*adapter, 10).await;
        assert_eq!(listed.len(), 1, "{listed:?}");
    }
}

/// Neither the beginning of a longer object nor a shorter one with something behind it.
pub(super) async fn other_lengths_are_never_ok(context: TestContext) {
    never_ok(
        &context,
        &[8192, 4096, 8191, 8193, 1].map(|len| object(1, len)),
    )
    .await;
}

/// An object of equal length and another shape is another object.
pub(super) async fn other_layouts_are_never_ok(context: TestContext) {
    never_ok(
        &context,
        &[1, 2, 0, u64::MAX].map(|layout| ObjectSpec {
            layout,
            ..object(1, 8192)
        }),
    )
    .await;
}

/// One chunk of two tenants, two models, two ranks and two groups makes different objects.
pub(super) async fn tenants_and_models_are_apart(context: TestContext) {
    let adapter = context.open().await;
    let like = |salt, model| object_with(1, 4096, model, salt);
    let mut objects = vec![
        like("a", "m"),
        like("b", "m"),
        like("", "m"),
        like("a", "n"),
        like("", "org/m"),
    ];
    let (hash, rank) = (objects[0].key.chunk_hash(), objects[0].key.kv_rank());
    for (rank, group) in [(rank + 1, 0), (rank, 1), (rank, 16)] {
        let key = kvtier_core::ObjectKey::new(hash, "m", rank, group, "a");
        objects.push(ObjectSpec {
            key: key.expect("a valid key"),
            ..objects[0].clone()
        });
    }
    for object in &objects {
        let found = context
            .lookup(&*adapter, std::slice::from_ref(object))
            .await;
        assert_eq!(
            found,
            [None],
            "{} is there before it was stored",
            name(object)
        );
        context.store(&*adapter, std::slice::from_ref(object)).await;
    }
    context.load_all(&*adapter, &objects).await;
    if adapter.capabilities().delete {
        let deleted = adapter.delete(keys(&objects[..1])).await;
        assert_eq!(deleted, [Ok(true)]);
        context.load_all(&*adapter, &objects[1..]).await;
    }
}

/// Hostile keys: each works like any other one, or is refused alone.
pub(super) async fn odd_keys_are_kept_or_refused(context: TestContext) {
    let adapter = context.open().await;
    let long = "m".repeat(400);
    let wide = "ü".repeat(128);
    let odd = [
        ("../../outside", ""),
        ("/absolute", ""),
        ("..", ".."),
        (".", "."),
        ("", ""),
        ("a b\tc", "d e"),
        ("line\nend", "line\r\nend"),
        ("percent%2F%00", "%"),
        ("quote\"'`$(x)", "*?[a]"),
        ("ends.data", ".tmp"),
        ("Case", "Case"),
        ("case", "case"),
        ("模型/模型", "盐"),
        (long.as_str(), "x"),
        ("m", wide.as_str()),
        (long.as_str(), wide.as_str()),
    ];
    let mut objects: Vec<_> = odd
        .map(|(model, salt)| object_with(7, 5000, model, salt))
        .into();
    let mut kept = Vec::new();
    let stored = adapter.store(context.store_items(&objects)).await;
    assert_eq!(stored.len(), objects.len());
    for (object, result) in objects.iter().zip(stored) {
        if result.is_ok() {
            kept.push(object.clone());
        }
    }
    context.load_all(&*adapter, &kept).await;
    if adapter.capabilities().list {
        let listed = context.list(&*adapter, 5).await;
        let expected: std::collections::BTreeSet<_> = keys(&kept).into_iter().collect();
        let listed: std::collections::BTreeSet<_> = listed.into_keys().collect();
        assert_eq!(listed, expected, "the listing");
    }
    // Names that other programs would use for two keys: never the other one's bytes.
    for (one, other) in [("a/b", "a-SEP-b"), ("a--b", "a/b"), ("a%2Fb", "a/b")] {
        let pair = [
            object_with(8, 5000, one, ""),
            object_with(8, 5000, other, ""),
        ];
        assert_ne!(content(&pair[0]), content(&pair[1]));
        for object in pair {
            let _ = adapter.store(vec![context.store_item(&object)]).await;
            objects.push(object);
        }
    }
    context.load(&*adapter, &objects).await;
    context.load_all(&*adapter, &kept).await;
}
