//! Bodies of requests: bytes, or a part of an object in L1, which is copied piece by piece as it is sent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Bytes, Frame, SizeHint};

use kvtier_l2::{Buffer, L2Error};

/// Bytes of an object per frame of a request.
const FRAME: u64 = 256 << 10;

/// Body of a request. It owns what it reads from.
#[derive(Debug, Clone, Default)]
pub(super) enum Content {
    #[default]
    None,
    Bytes(Bytes),
    /// Bytes of an object in L1 from an offset on.
    Object(Buffer, u64, u64),
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Object(_, _, len) => *len,
        }
    }
}

/// A [`Content`] on its way; `sent` counts its bytes.
pub(super) struct Outgoing {
    content: Content,
    sent: Arc<AtomicU64>,
}

impl Outgoing {
    pub(super) fn new(content: Content, sent: &Arc<AtomicU64>) -> Self {
        Self {
            content,
            sent: Arc::clone(sent),
        }
    }
}

impl hyper::body::Body for Outgoing {
    type Data = Bytes;
    type Error = L2Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, L2Error>>> {
        let bytes = match &mut self.content {
            Content::None => return Poll::Ready(None),
            Content::Bytes(bytes) if bytes.is_empty() => return Poll::Ready(None),
            Content::Bytes(bytes) => std::mem::take(bytes),
            Content::Object(_, _, 0) => return Poll::Ready(None),
            Content::Object(buffer, at, left) => {
                let len = FRAME.min(*left);
                let mut part = Vec::with_capacity(usize::try_from(len).unwrap_or_default());
                if let Err(error) = buffer.read_into(*at, len, &mut part) {
                    return Poll::Ready(Some(Err(error.into())));
                }
                *at += len;
                *left -= len;
                Bytes::from(part)
            }
        };
        self.sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.content.len() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.content.len())
    }
}
