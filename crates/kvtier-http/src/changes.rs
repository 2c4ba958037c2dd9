//! Requests that change something: they wait while the server hands over, and are refused once it has.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::timeout;

/// Requests that change something. The lock is shared by those that run; it guards whether they have ended for good.
#[derive(Clone, Default)]
pub struct Changes(Arc<RwLock<bool>>);

/// Changes that wait until this is dropped.
pub struct PausedChanges(OwnedRwLockWriteGuard<bool>);

impl Changes {
    /// Held while a request runs, once none waits for it; `None` if another process serves by now.
    pub(super) async fn enter(&self) -> Option<OwnedRwLockReadGuard<bool>> {
        let guard = Arc::clone(&self.0).read_owned().await;
        (!*guard).then_some(guard)
    }

    /// Lets no further change begin, and waits for those that run; `None` if they have not ended within `patience`. To be called
    /// outside of the runtime.
    pub fn pause(&self, runtime: &Handle, patience: Duration) -> Option<PausedChanges> {
        let paused =
            runtime.block_on(async { timeout(patience, Arc::clone(&self.0).write_owned()).await });
        paused.ok().map(PausedChanges)
    }
}

impl PausedChanges {
    /// Refuses all changes from here on.
    pub fn end(mut self) {
        *self.0 = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_wait_for_a_pause_and_end_with_it() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let changes = Changes::default();
        let running = runtime.block_on(changes.enter());
        assert!(running.is_some());
        assert!(changes.pause(runtime.handle(), Duration::ZERO).is_none());
        drop(running);
        let paused = changes.pause(runtime.handle(), Duration::MAX).unwrap();
        let waiting = changes.clone();
        let waiting = runtime.spawn(async move { waiting.enter().await.is_some() });
        drop(paused);
        assert!(runtime.block_on(waiting).unwrap());
        let paused = changes.pause(runtime.handle(), Duration::MAX).unwrap();
        paused.end();
        assert!(runtime.block_on(changes.enter()).is_none());
    }
}
