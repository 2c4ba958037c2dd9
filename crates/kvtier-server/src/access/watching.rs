//! The looks at the files of tokens and certificates, for as long as the server runs.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{Access, Watched};
use crate::health::Health;

/// Interval between two checks: a revoked token is valid no longer than this and the duration of a check.
const INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of a check, after which it is reported: the file system answers late, or never.
const PATIENCE: Duration = Duration::from_secs(10);

impl Access {
    /// Looks at the files again and again. Tokens and certificates apart, as one file system may hang and the other not.
    pub(crate) async fn watch(self: &Arc<Self>, health: &Health) {
        tokio::join!(
            self.watch_one(
                "the tokens of HTTP",
                |access| access.tokens.as_ref(),
                health
            ),
            self.watch_one(
                "the certificate and key of HTTP",
                |access| access.tls.as_ref(),
                health
            ),
        );
    }

    async fn watch_one<T: Send + Sync + 'static>(
        self: &Arc<Self>,
        what: &str,
        files: fn(&Self) -> Option<&Watched<T>>,
        health: &Health,
    ) {
        while files(self).is_some() {
            tokio::time::sleep(INTERVAL).await;
            let access = Arc::clone(self);
            // Not here: a file system that does not answer must keep no request waiting.
            let look = tokio::task::spawn_blocking(move || files(&access).map(Watched::look));
            let tell = |is_late| match is_late {
                true => tracing::error!(
                    target: "audit",
                    "{what} cannot be read: no answer of the file system for {PATIENCE:?}; the former stay until it comes"
                ),
                false => tracing::info!(target: "audit", "{what}: the file system has answered"),
            };
            if awaited(look, PATIENCE, tell)
                .await
                .is_err_and(|error| error.is_panic())
            {
                health.poison("access");
            }
        }
    }
}

/// What comes of it, however long that takes; tells when it is late, and when it has come then.
async fn awaited<F: Future>(it: F, patience: Duration, tell: impl Fn(bool)) -> F::Output {
    tokio::pin!(it);
    if let Ok(done) = tokio::time::timeout(patience, &mut it).await {
        return done;
    }
    tell(true);
    let done = it.await;
    tell(false);
    done
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_is_late_is_told_once_and_waited_for() {
        let (done, wait) = oneshot::channel();
        let (done, told) = (RefCell::new(Some(done)), RefCell::new(Vec::new()));
        let tell = |is_late| {
            told.borrow_mut().push(is_late);
            // It ends only behind that.
            let _ = done.borrow_mut().take().map(|done| done.send(7));
        };
        assert_eq!(awaited(wait, Duration::from_millis(1), tell).await, Ok(7));
        assert_eq!(*told.borrow(), [true, false]);
        assert_eq!(awaited(async { 8 }, Duration::from_secs(60), tell).await, 8);
        assert_eq!(told.borrow().len(), 2);
    }
}
