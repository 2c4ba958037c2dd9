//! Transfers under way: who is answered, and when.

use std::sync::Arc;

use kvtier_device::{DeviceError, EngineMemory, Transfer};
use kvtier_proto::response::Response;
use parking_lot::Mutex;

use super::{Answer, Engine, Responder};

/// When a transfer of a worker on a GPU is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuReply {
    /// When its bytes are in place.
    Done,
    /// When it is with the GPU, with an event that is complete when they are.
    Event,
}

impl Engine {
    /// Begins a transfer. `end` is called when it has ended, and gives its answer.
    pub(super) fn begin(
        &self,
        pages: &dyn EngineMemory,
        transfer: Transfer,
        responder: Responder,
        end: impl FnOnce(Result<u64, DeviceError>) -> Answer + Send + 'static,
    ) {
        if self.config.gpu_reply == GpuReply::Done {
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
        pages.transfer_in_steps(transfer, begun, done);
    }
}
