//! Many callers at once.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::super::context::{TestContext, keys, name};
use super::super::object;
use crate::error::ErrorKind;
use kvtier_core::random::SplitMix64;

/// Many callers store the same object at a time, then load it.
pub(super) async fn same_key_by_many_callers(context: TestContext) {
    let adapter = context.open().await;
    let context = Arc::new(context);
    let one = object(1, 300_000);
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let (context, adapter, one) = (context.clone(), adapter.clone(), one.clone());
        tasks.spawn(async move { context.store(&*adapter, &[one]).await[0].bytes() });
    }
    let bytes = tasks.join_all().await;
    assert!(bytes.iter().all(|each| *each == bytes[0]), "{bytes:?}");
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let (context, adapter, one) = (context.clone(), adapter.clone(), one.clone());
        tasks.spawn(async move { context.load_all(&*adapter, &[one]).await });
    }
    tasks.join_all().await;
    if adapter.capabilities().list {
        assert_eq!(context.list(&*adapter, 10).await.len(), 1);
    }
}

/// A load that meets a delete gives the whole object or a miss.
pub(super) async fn delete_while_loading(context: TestContext) {
    let adapter = context.open().await;
    if !adapter.capabilities().delete {
        return;
    }
    let objects: Vec<_> = (0..4).map(|number| object(number, 200_000)).collect();
    for _ in 0..30 {
        context.store(&*adapter, &objects).await;
        let (loaded, deleted) = tokio::join!(
            context.load(&*adapter, &objects),
            adapter.delete(keys(&objects)),
        );
        assert!(
            deleted.iter().all(|result| *result == Ok(true)),
            "{deleted:?}"
        );
        for (object, result) in objects.iter().zip(loaded) {
            let kind = result.err().map(|error| error.kind());
            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
            assert!(fine, "load of {}: {kind:?}", name(object));
        }
        let left = context.lookup(&*adapter, &objects).await;
        assert_eq!(left, [None; 4], "after the delete");
    }
}

/// Tasks that store, load, look up and delete the same few objects in batches, every byte compared.
pub(super) async fn many_tasks_at_once(context: TestContext) {
    let adapter = context.open().await;
    let context = Arc::new(context);
    let can_delete = adapter.capabilities().delete;
    let shared: Vec<_> = (0..24)
        .map(|number| object(number, 1 + number * 3000))
        .collect();
    let mut tasks = JoinSet::new();
    for task in 0..12_u64 {
        let (context, adapter, shared) = (context.clone(), adapter.clone(), shared.clone());
        tasks.spawn(async move {
            let own: Vec<_> = (0..6)
                .map(|at| object(1000 + task * 10 + at, 20_000))
                .collect();
            context.store(&*adapter, &own).await;
            let mut draws = 0;
            let mut below = |bound: usize| {
                draws += 1;
                SplitMix64::nth(task, draws) as usize % bound
            };
            for _ in 0..30 {
                let batch: Vec<_> = (0..1 + below(6))
                    .map(|_| shared[below(shared.len())].clone())
                    .collect();
                match below(4) {
                    0 | 1 => drop(context.store(&*adapter, &batch).await),
                    2 if can_delete => {
                        for result in adapter.delete(keys(&batch)).await {
                            result.unwrap_or_else(|error| panic!("delete: {error}"));
                        }
                    }
                    _ => {
                        context.lookup(&*adapter, &batch).await;
                        for (object, result) in
                            batch.iter().zip(context.load(&*adapter, &batch).await)
                        {
                            let kind = result.err().map(|error| error.kind());
                            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
                            assert!(fine, "load of {}: {kind:?}", name(object));
                        }
                    }
                }
                context.load_all(&*adapter, &own).await;
            }
        });
    }
    tasks.join_all().await;
    context.store(&*adapter, &shared).await;
    context.load_all(&*adapter, &shared).await;
    assert!(
        !context.memory.is_used(),
        "buffers are held although all calls were answered"
    );
}
