//! Transfers under way: who is answered, and when.

use std::sync::Arc;

use kvtier_device::{DeviceError, EngineMemory, Transfer};
use kvtier_proto::response::Response;
use parking_lot::Mutex;

use super::{Answer, Engine, Handled, Responder};

/// When a transfer of a worker on a GPU is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuReply {
    /// When its bytes are in place.
    Done,
    /// When it is with the GPU, with an event that is complete when they are.
    Event,
}

/// Why a transfer is answered with "no", in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// Its worker has as much under way as it may have.
    #[error("{0}")]
    Busy(String),
    /// Staged bytes are at their limit.
    #[error("staged and not committed bytes are at the limit")]
    Staging,
    /// It is a retrieve.
    #[error("no lookup of its request has found these chunks, or they are gone")]
    NotHeld,
    /// It cannot be done, or could not.
    #[error("{0}")]
    Failed(String),
}

impl From<String> for Refusal {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

impl Refusal {
    /// For the metrics, given what is said of those that failed.
    pub fn reason(&self, failed: &'static str) -> &'static str {
        match self {
            Self::Busy(_) => "lane_full",
            Self::Staging => "staging_full",
            Self::NotHeld => "not_held",
            Self::Failed(_) => failed,
        }
    }
}

impl Engine {
    /// A transfer that begins when its request is out of the way. `end` is called when it has ended, and gives its answer.
    pub(super) fn begin_later(
        self: &Arc<Self>,
        pages: Arc<dyn EngineMemory>,
        transfer: Transfer,
        end: impl FnOnce(&Self, Result<u64, DeviceError>) -> Answer + Send + 'static,
    ) -> Handled {
        let engine = Arc::clone(self);
        Handled::Later(Box::new(move |responder| {
            let ends = Arc::clone(&engine);
            engine.begin(&*pages, transfer, responder, move |moved| end(&ends, moved));
        }))
    }

    fn begin(
        &self,
        pages: &dyn EngineMemory,
        transfer: Transfer,
        responder: Responder,
        end: impl FnOnce(Result<u64, DeviceError>) -> Answer + Send + 'static,
    ) {
        // Who says when it gives up wants to know the end: behind that, an answer would be no promise.
        if self.config.gpu_reply == GpuReply::Done || transfer.deadline.is_some() {
            let done = Box::new(move |moved| responder.answer(end(moved)));
            return pages.transfer(transfer, done);
        }
        // Whoever comes first takes it.
        let responder = Arc::new(Mutex::new(Some(responder)));
        let early = Arc::clone(&responder);
        let begun = Box::new(move |event: &[u8]| {
            let responder = early.lock().take();
            if let Some(responder) = responder {
                responder.answer(Answer::from(Response::transfer(event, true)));
            }
        });
        let done = Box::new(move |moved| {
            let answer = end(moved);
            let responder = responder.lock().take();
            match responder {
                Some(responder) => responder.answer(answer),
                // Its end has been logged. A store that failed is not readable; the pages of a retrieve are wrong, and
                // all that the worker has is the event.
                None if answer.refused.is_some() => {
                    tracing::error!("a transfer failed after it was answered (--gpu-reply event)");
                }
                None => {}
            }
        });
        pages.transfer_with_event(transfer, begun, done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use kvtier_device::{BlockTable, Direction};

    use super::super::testing::{TestPages, engine};
    use super::*;

    /// The answers to a transfer, in order, of which there is to be one.
    fn answers(reply: &str, fails: bool, deadline: Option<Instant>) -> Vec<Option<Answer>> {
        let engine = engine(&["--gpu-reply", reply]);
        let pages = TestPages {
            fails,
            ..TestPages::new(16)
        };
        let transfer = Transfer {
            arena: Arc::clone(&engine.l1.arena),
            blocks: BlockTable::check(pages.layout(), &[[0i64; 0]], 0).unwrap(),
            chunks: Vec::new(),
            direction: Direction::Store,
            deadline,
            event: Vec::new(),
        };
        let (say, hear) = mpsc::channel();
        let responder = Responder::new(move |answer| say.send(answer).unwrap());
        engine.begin(&pages, transfer, responder, |moved| match moved {
            Ok(_) => Answer::from(Response::transfer(&[][..], true)),
            Err(_) => Answer::from(Response::transfer(&[][..], false)).because("store_failed"),
        });
        hear.iter().collect()
    }

    #[test]
    fn a_transfer_has_one_answer_whenever_it_is_given() {
        let ok = |event: &[u8]| Answer::from(Response::transfer(event, true));
        let failed = Answer::from(Response::transfer(&[][..], false)).because("store_failed");
        assert_eq!(answers("done", false, None), [Some(ok(b""))]);
        assert_eq!(answers("done", true, None), [Some(failed.clone())]);
        assert_eq!(answers("event", false, None), [Some(ok(b"event"))]);
        assert_eq!(
            answers("event", true, Some(Instant::now())),
            [Some(failed.clone())]
        );
        // Too late to be told.
        assert_eq!(answers("event", true, None), [Some(ok(b"event"))]);
    }
}
