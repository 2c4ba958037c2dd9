//! The handle with which a request is answered.

use super::EngineAnswer;

/// Destination of the answer to one request.
pub trait ReplyTarget: Send {
    /// Sends the answer. `None` is the operation's failure answer: the handle was dropped, or could not be deferred.
    fn send(self: Box<Self>, answer: Option<EngineAnswer>);

    /// The answer comes after the call that handles the request. Returns false if too much waits already.
    fn defer(&mut self) -> bool {
        true
    }

    /// What the connection has sent behind the request waits no longer than the call that handles the request.
    fn release_turn(&mut self) {}
}

impl<F: FnOnce(Option<EngineAnswer>) + Send> ReplyTarget for F {
    fn send(self: Box<Self>, answer: Option<EngineAnswer>) {
        self(answer);
    }
}

/// One-shot reply handle, usable from any thread. Dropping it without an answer sends the operation's failure answer.
pub struct Reply(Option<Box<dyn ReplyTarget>>);

impl Reply {
    /// Answers go to `target`.
    pub fn new(target: impl ReplyTarget + 'static) -> Self {
        Self(Some(Box::new(target)))
    }

    /// Sends the answer.
    pub fn answer(mut self, answer: EngineAnswer) {
        if let Some(target) = self.0.take() {
            target.send(Some(answer));
        }
    }

    /// Defers the answer beyond the call that handles the request. Returns false if too much waits already: then the request is
    /// refused when the handle is dropped, which comes after everything that the client may use again.
    #[must_use]
    pub fn later(&mut self) -> bool {
        let is_deferred = self.later_in_turn();
        if let Some(target) = self.0.as_mut().filter(|_| is_deferred) {
            target.release_turn();
        }
        is_deferred
    }

    /// Defers like [`Reply::later`], but what the connection has sent behind the request waits for the answer.
    #[must_use]
    pub fn later_in_turn(&mut self) -> bool {
        self.0.as_mut().is_some_and(|target| target.defer())
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(target) = self.0.take() {
            target.send(None);
        }
    }
}
