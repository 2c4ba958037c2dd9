//! Many callers at once.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::super::bed::{Bed, keys, name};
use super::super::object;
use crate::error::ErrorKind;
use crate::wrap::random;

/// The same object stored, then loaded, by many at a time.
pub(super) async fn same_key_by_many_callers(bed: Bed) {
    let adapter = bed.open().await;
    let bed = Arc::new(bed);
    let one = object(1, 300_000);
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let (bed, adapter, one) = (bed.clone(), adapter.clone(), one.clone());
        tasks.spawn(async move { bed.store(&*adapter, &[one]).await[0].bytes() });
    }
    let bytes = tasks.join_all().await;
    assert!(bytes.iter().all(|each| *each == bytes[0]), "{bytes:?}");
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let (bed, adapter, one) = (bed.clone(), adapter.clone(), one.clone());
        tasks.spawn(async move { bed.load_all(&*adapter, &[one]).await });
    }
    tasks.join_all().await;
    if adapter.capabilities().list {
        assert_eq!(bed.list(&*adapter, 10).await.len(), 1);
    }
}

/// A load that meets a delete gives the whole object or a miss.
pub(super) async fn delete_while_loading(bed: Bed) {
    let adapter = bed.open().await;
    if !adapter.capabilities().delete {
        return;
    }
    let objects: Vec<_> = (0..4).map(|number| object(number, 200_000)).collect();
    for _ in 0..30 {
        bed.store(&*adapter, &objects).await;
        let (loaded, deleted) = tokio::join!(
            bed.load(&*adapter, &objects),
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
        let left = bed.lookup(&*adapter, &objects).await;
        assert_eq!(left, [None; 4], "after the delete");
    }
}

/// Tasks that store, load, look up and delete the same few objects in batches, every byte compared.
pub(super) async fn many_tasks_at_once(bed: Bed) {
    let adapter = bed.open().await;
    let bed = Arc::new(bed);
    let can_delete = adapter.capabilities().delete;
    let shared: Vec<_> = (0..24)
        .map(|number| object(number, 1 + number * 3000))
        .collect();
    let mut tasks = JoinSet::new();
    for task in 0..12_u64 {
        let (bed, adapter, shared) = (bed.clone(), adapter.clone(), shared.clone());
        tasks.spawn(async move {
            let own: Vec<_> = (0..6)
                .map(|at| object(1000 + task * 10 + at, 20_000))
                .collect();
            bed.store(&*adapter, &own).await;
            let mut draws = 0;
            let mut below = |bound: usize| {
                draws += 1;
                random(task, draws) as usize % bound
            };
            for _ in 0..30 {
                let batch: Vec<_> = (0..1 + below(6))
                    .map(|_| shared[below(shared.len())].clone())
                    .collect();
                match below(4) {
                    0 | 1 => drop(bed.store(&*adapter, &batch).await),
                    2 if can_delete => {
                        for result in adapter.delete(keys(&batch)).await {
                            result.unwrap_or_else(|error| panic!("delete: {error}"));
                        }
                    }
                    _ => {
                        bed.lookup(&*adapter, &batch).await;
                        for (object, result) in batch.iter().zip(bed.load(&*adapter, &batch).await)
                        {
                            let kind = result.err().map(|error| error.kind());
                            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
                            assert!(fine, "load of {}: {kind:?}", name(object));
                        }
                    }
                }
                bed.load_all(&*adapter, &own).await;
            }
        });
    }
    tasks.join_all().await;
    bed.store(&*adapter, &shared).await;
    bed.load_all(&*adapter, &shared).await;
    assert!(
        !bed.memory.is_used(),
        "buffers are held although all calls were answered"
    );
}
