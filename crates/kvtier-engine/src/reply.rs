//! The handle with which a request is answered.

use super::Answer;

/// Where the answer to one request goes.
pub trait ReplyTarget: Send {
    /// Sends the answer; `None` if the handle was dropped without one.
    fn send(self: Box<Self>, answer: Option<Answer>);

    /// The answer comes after the call that handles the request. Returns false if too much waits already: then the request
    /// is refused.
    fn defer(&mut self) -> bool {
        true
    }

    /// Whether what the connection has sent behind the request waits for the answer too. Without that it waits no longer
    /// than the call that handles the request.
    fn hold_turn(&mut self, _hold: bool) {}

    /// Refuses the request, for which too much waits already.
    fn refuse(self: Box<Self>) {
        self.send(None);
    }
}

impl<F: FnOnce(Option<Answer>) + Send> ReplyTarget for F {
    fn send(self: Box<Self>, answer: Option<Answer>) {
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
    pub fn answer(mut self, answer: Answer) {
        if let Some(target) = self.0.take() {
            target.send(Some(answer));
        }
    }

    /// For an answer after the call that handles the request. `None` if too much waits already; the request has been refused
    /// then.
    #[must_use]
    pub fn later(self) -> Option<Self> {
        self.defer(false)
    }

    /// As [`Reply::later`], and what the connection has sent behind the request waits for the answer.
    #[must_use]
    pub fn later_in_turn(self) -> Option<Self> {
        self.defer(true)
    }

    fn defer(mut self, hold_turn: bool) -> Option<Self> {
        let mut target = self.0.take()?;
        if !target.defer() {
            target.refuse();
            return None;
        }
        target.hold_turn(hold_turn);
        self.0 = Some(target);
        Some(self)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(target) = self.0.take() {
            target.send(None);
        }
    }
}
