//! The stream of one viewer.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use hyper::body::Frame;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{Dashboard, Latest};
use crate::access::{Access, Tokens};

/// A viewer between two events.
pub(super) struct Viewer {
    pub(super) dashboard: Arc<Dashboard>,
    pub(super) access: Arc<Access>,
    /// The tokens by which it was admitted.
    pub(super) tokens: Option<Arc<Tokens>>,
    pub(super) ticks: watch::Receiver<Latest>,
    /// The first event.
    pub(super) history: Option<Bytes>,
    pub(super) _place: OwnedSemaphorePermit,
}

impl Viewer {
    pub(super) fn into_body(self) -> Body {
        Body::new(Events(Box::pin(self.next())))
    }

    /// The next event, and what comes after it; none at the end.
    async fn next(mut self) -> Option<(Bytes, Self)> {
        if let Some(history) = self.history.take() {
            self.dashboard.woken.notify_one();
            return Some((history, self));
        }
        loop {
            self.ticks.changed().await.ok()?;
            let latest = self.ticks.borrow_and_update().clone();
            // Other tokens may be without the viewer's. It connects again, and learns whether they are.
            if self.access.tokens() != self.tokens {
                return None;
            }
            match latest {
                Latest::Nothing => {}
                Latest::Tick(event) => return Some((event, self)),
                Latest::End => return None,
            }
        }
    }
}

type Next = Pin<Box<dyn Future<Output = Option<(Bytes, Viewer)>> + Send>>;

/// The body of the answer: nothing is made before the connection has taken what was before it.
struct Events(Next);

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.as_mut().poll(context).map(|next| {
            let (event, viewer) = next?;
            self.0 = Box::pin(viewer.next());
            Some(Ok(Frame::data(event)))
        })
    }
}
