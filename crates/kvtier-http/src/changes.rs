//! Requests that change something: they wait while the server hands over, and are refused once it has.
//!
//! The mutex guards the part of one request in them; no other lock is acquired inside.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
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

/// A request that changes something: it is one of them until the last clone is dropped, but not while its body is received.
#[derive(Clone)]
pub(super) struct Change {
    changes: Changes,
    running: Arc<Mutex<Option<OwnedRwLockReadGuard<bool>>>>,
}

impl Change {
    /// Waits for the body of a request: it may never come, and must not delay a hand-over.
    ///
    /// # Errors
    /// That of `body`; 503 if another process serves by now.
    pub(super) async fn wait_outside<T>(
        of: Option<Self>,
        body: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let Some(Self { changes, running }) = of else {
            return body.await;
        };
        drop(running.lock().take());
        let body = body.await?;
        let again = changes.enter().await?;
        *running.lock() = Some(again);
        Ok(body)
    }

    /// The change that a request is.
    pub(super) fn of(request: &Request) -> Option<Self> {
        request.extensions().get().cloned()
    }
}

impl Changes {
    /// Begins a change, for the request's extensions. It waits for the end of a pause.
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
    use tokio::sync::oneshot;

    #[test]
    fn changes_wait_for_a_pause_and_end_with_it() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let changes = Changes::default();
        let running = runtime.block_on(changes.begin()).unwrap();
        assert!(changes.pause(runtime.handle(), Duration::ZERO).is_none());
        // While a body does not come, and not behind it.
        let (body, received) = oneshot::channel();
        let of = Some(running.clone());
        let receiving = runtime.spawn(Change::wait_outside(of, async move {
            received
                .await
                .map_err(|_| detail(StatusCode::BAD_REQUEST, ""))
        }));
        let paused = changes.pause(runtime.handle(), Duration::MAX).unwrap();
        body.send(7).unwrap();
        drop(paused);
        assert_eq!(runtime.block_on(receiving).unwrap().unwrap(), 7);
        assert!(changes.pause(runtime.handle(), Duration::ZERO).is_none());
        drop(running);
        let paused = changes.pause(runtime.handle(), Duration::MAX).unwrap();
        let waiting = changes.clone();
        let waiting = runtime.spawn(async move { waiting.begin().await.is_ok() });
        drop(paused);
        assert!(runtime.block_on(waiting).unwrap());
        let paused = changes.pause(runtime.handle(), Duration::MAX).unwrap();
        paused.end();
        assert!(runtime.block_on(changes.begin()).is_err());
    }
}
