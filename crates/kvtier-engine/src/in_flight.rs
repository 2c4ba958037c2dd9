//! Transfers in flight: when their requests are answered.

use std::sync::Arc;

use kvtier_config::GpuReply;
use kvtier_device::{DeviceError, EngineMemory, Transfer};
use kvtier_proto::response::Response;
use kvtier_sync::Mutex;

use super::{Answer, Engine, Reply};

/// A transfer whose bytes are being copied: what its end needs.
pub(super) trait InFlight: Send {
    /// Ends it: the bytes are in place, or never will be.
    fn finish(self: Box<Self>, engine: &Engine, moved: Result<u64, DeviceError>) -> Answer;
}

impl Engine {
    /// Starts a transfer, which answers its request: at its end, or with `--gpu-reply event` when the device has it.
    pub(super) fn start_transfer(
        self: &Arc<Self>,
        pages: &dyn EngineMemory,
        transfer: Transfer,
        in_flight: Box<dyn InFlight>,
        reply: Reply,
    ) {
        let Some(reply) = reply.later() else { return };
        let engine = Arc::clone(self);
        // With a deadline the client asks whether the transfer has ended, which only its end tells.
        if self.config.gpu_reply == GpuReply::Done || transfer.deadline.is_some() {
            let done = move |moved| reply.answer(in_flight.finish(&engine, moved));
            return pages.transfer(transfer, Box::new(done));
        }
        // The first of the two takes it.
        let reply = Arc::new(Mutex::new(Some(reply)));
        let early = Arc::clone(&reply);
        let begun = move |event: &[u8]| {
            let reply = early.lock().take();
            if let Some(reply) = reply {
                reply.answer(Answer::from(Response::transfer(event, true)));
            }
        };
        let done = move |moved| {
            let answer = in_flight.finish(&engine, moved);
            let reply = reply.lock().take();
            match reply {
                Some(reply) => reply.answer(answer),
                // Its end has been logged. A store that failed is not readable; the pages of a retrieve are wrong, and
                // all that the worker has is the event.
                None if answer.refused.is_some() => {
                    tracing::error!("a transfer failed after it was answered (--gpu-reply event)");
                }
                None => {}
            }
        };
        pages.transfer_with_event(transfer, Box::new(begun), Box::new(done));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use kvtier_proto::request::InstanceId;

    use super::super::testing::{TestPages, engine};
    use super::*;

    /// The answers to a store without chunks, in order. One is expected.
    fn answers(reply: &str, fails: bool, deadline: Option<Instant>) -> Vec<Option<Answer>> {
        let engine = Arc::new(engine(&["--gpu-reply", reply]));
        let pages = TestPages {
            fails,
            ..TestPages::new(16)
        };
        let pages = pages.register(&engine, 7);
        let instance = engine.instances.get(InstanceId(7)).unwrap();
        let (planned, in_flight) = engine.plan_empty_store(&instance);
        let transfer = Transfer {
            deadline,
            ..planned
        };
        let (answers, receiver) = mpsc::channel();
        let reply = Reply::new(move |answer| answers.send(answer).unwrap());
        engine.start_transfer(&*pages, transfer, Box::new(in_flight), reply);
        receiver.iter().collect()
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
        // The answer was sent before the failure.
        assert_eq!(answers("event", true, None), [Some(ok(b"event"))]);
    }
}
