//! Checks of the files of tokens and certificates, for as long as the server runs.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{Access, Watched};
use crate::health::Health;

/// Interval between two checks: a revoked token is valid no longer than this and the duration of a check.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time after which a check is reported: the file system answers late, or never.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Access {
    /// Checks the files again and again. Tokens and certificates apart, as one file system may hang and the other not.
    pub async fn watch(&self, health: &Health) {
        let (tokens, tls) = (self.tokens.clone(), self.tls.clone());
        tokio::join!(watch(tokens, health), watch(tls, health));
    }
}

async fn watch<T: Send + Sync + 'static>(files: Option<Arc<Watched<T>>>, health: &Health) {
    while let Some(files) = files.clone() {
        let what = files.what();
        tokio::time::sleep(INTERVAL).await;
        // Not here: a file system that does not answer must keep no request waiting.
        let check = tokio::task::spawn_blocking(move || files.check());
        let report = |is_late| {
            if is_late {
                tracing::error!(
                    target: "audit",
                    "{what} cannot be read: no answer of the file system for {TIMEOUT:?}; the former stay until it comes"
                )
            } else {
                tracing::info!(target: "audit", "{what}: the file system has answered")
            }
        };
        if awaited(check, TIMEOUT, report)
            .await
            .is_err_and(|error| error.is_panic())
        {
            health.poison("access");
        }
    }
}

/// Waits for a future, however long that takes; reports when it is late, and when it is done after that.
async fn awaited<F: Future>(it: F, timeout: Duration, report: impl Fn(bool)) -> F::Output {
    tokio::pin!(it);
    if let Ok(done) = tokio::time::timeout(timeout, &mut it).await {
        return done;
    }
    report(true);
    let done = it.await;
    report(false);
    done
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn late_future_is_reported_once_and_awaited() {
        let (done, wait) = oneshot::channel();
        let (done, reported) = (RefCell::new(Some(done)), RefCell::new(Vec::new()));
        let report = |is_late| {
            reported.borrow_mut().push(is_late);
            // It ends only behind that.
            let _ = done.borrow_mut().take().map(|done| done.send(7));
        };
        assert_eq!(awaited(wait, Duration::from_millis(1), report).await, Ok(7));
        assert_eq!(*reported.borrow(), [true, false]);
        assert_eq!(
            awaited(async { 8 }, Duration::from_secs(60), report).await,
            8
        );
        assert_eq!(reported.borrow().len(), 2);
    }
}
