//! Requests that change something: they wait while the server hands over, and are refused once it has.
//!
//! The mutex guards the share of one request in the lock that a pause takes; no other lock is acquired inside.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use kvtier_sync::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};

use super::{ApiError, detail};

/// Requests that change something. The lock is shared by those that run; it guards whether they have ended for good.
#[derive(Clone, Default)]
pub struct Changes(Arc<tokio::sync::RwLock<bool>>);

/// Changes that wait until this is dropped.
pub struct PausedChanges(OwnedRwLockWriteGuard<bool>);

tokio::task_local! {
    /// The change that the request of this task is.
    static CURRENT: Change;
}

/// A request that changes something: it is one of them until the last clone is dropped, but not while its body is received. Work
/// on other threads has a clone of its own, since the task ends with the client's connection.
#[derive(Clone)]
pub(super) struct Change {
    changes: Changes,
    running: Arc<Mutex<Option<OwnedRwLockReadGuard<bool>>>>,
}

impl Change {
    /// Runs a request that is this change.
    pub(super) async fn run<T>(self, request: impl Future<Output = T>) -> T {
        CURRENT.scope(self, request).await
    }

    /// The change that the request of this task is, if it is one.
    pub(super) fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Waits for the body of a request: it may never come, and must not delay a hand-over.
    ///
    /// # Errors
    /// That of `body`; 503 if another process serves by now.
    pub(super) async fn wait_outside<T>(
        body: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let Some(Self { changes, running }) = Self::current() else {
            return body.await;
        };
        drop(running.lock().take());
        let body = body.await?;
        let again = changes.enter().await?;
        *running.lock() = Some(again);
        Ok(body)
    }
}

impl Changes {
    /// Begins a change. It waits for the end of a pause.
    ///
    /// # Errors
    /// 503 if another process serves by now.
    pub(super) async fn begin(&self) -> Result<Change, ApiError> {
        Ok(Change {
            running: Arc::new(Mutex::new(Some(self.enter().await?))),
            changes: self.clone(),
        })
    }

    async fn enter(&self) -> Result<OwnedRwLockReadGuard<bool>, ApiError> {
        let guard = Arc::clone(&self.0).read_owned().await;
        match *guard {
            false => Ok(guard),
            true => Err(detail(
                StatusCode::SERVICE_UNAVAILABLE,
                "another process of the server has taken over; ask again",
            )),
        }
    }

    /// Lets no further change begin, and waits for those that run; `None` if they have not ended within `timeout`. To be called
    /// outside of the runtime.
    pub fn pause(&self, runtime: &Handle, timeout: Duration) -> Option<PausedChanges> {
        let paused =
            async { tokio::time::timeout(timeout, Arc::clone(&self.0).write_owned()).await };
        runtime.block_on(paused).ok().map(PausedChanges)
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
    use crate::{run_blocking, run_change};
    use tokio::sync::oneshot;

    /// Without changes a pause is immediate.
    const PAUSE_TIMEOUT: Duration = Duration::from_secs(60);

    fn runtime() -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    }

    /// Disconnects the client of a request whose work waits, and returns whether pauses wait for that.
    fn is_waited_for<T>(work: impl FnOnce(oneshot::Sender<()>, oneshot::Receiver<()>) -> T) -> bool
    where
        T: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let (runtime, changes) = (runtime(), Changes::default());
        let running = runtime.block_on(changes.begin()).unwrap();
        let ((begin, begun), (end, ended)) = (oneshot::channel(), oneshot::channel());
        let request = runtime.spawn(running.run(work(begin, ended)));
        runtime.block_on(begun).unwrap();
        request.abort();
        assert!(runtime.block_on(request).unwrap_err().is_cancelled());
        let is_refused = changes.pause(runtime.handle(), Duration::ZERO).is_none();
        // Fails if the work has been dropped.
        let is_running = end.send(()).is_ok();
        assert!(changes.pause(runtime.handle(), PAUSE_TIMEOUT).is_some());
        is_refused && is_running
    }

    #[test]
    fn work_of_a_disconnected_client_delays_a_pause() {
        assert!(is_waited_for(|begin, end| run_blocking(move || {
            begin.send(()).unwrap();
            end.blocking_recv().unwrap();
        })));
        assert!(is_waited_for(|begin, end| run_change(async move {
            begin.send(()).unwrap();
            end.await.unwrap();
        })));
    }

    #[test]
    fn changes_wait_for_a_pause_and_end_with_it() {
        let runtime = runtime();
        let changes = Changes::default();
        let running = runtime.block_on(changes.begin()).unwrap();
        assert!(changes.pause(runtime.handle(), Duration::ZERO).is_none());
        // While a body does not come, and not after it.
        let (body, received) = oneshot::channel();
        let body_end = async move {
            let body = received.await;
            body.map_err(|_| detail(StatusCode::BAD_REQUEST, ""))
        };
        let receiving = running.clone().run(Change::wait_outside(body_end));
        let receiving = runtime.spawn(receiving);
        let paused = changes.pause(runtime.handle(), PAUSE_TIMEOUT).unwrap();
        body.send(7).unwrap();
        drop(paused);
        assert_eq!(runtime.block_on(receiving).unwrap().unwrap(), 7);
        assert!(changes.pause(runtime.handle(), Duration::ZERO).is_none());
        drop(running);
        let paused = changes.pause(runtime.handle(), PAUSE_TIMEOUT).unwrap();
        let waiting = changes.clone();
        let waiting = runtime.spawn(async move { waiting.begin().await.is_ok() });
        drop(paused);
        assert!(runtime.block_on(waiting).unwrap());
        let paused = changes.pause(runtime.handle(), PAUSE_TIMEOUT).unwrap();
        paused.end();
        assert!(runtime.block_on(changes.begin()).is_err());
    }
}
