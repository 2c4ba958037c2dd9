//! One connection that was greeted: its requests in flight, by id, and the frames that come and go.
//!
//! The mutex guards the requests in flight; no other lock is acquired inside. A request stays there until its answer or the
//! end of the session, also if no caller waits for it any more, and with it its part of the segment and its permit: a tier may still write
//! there. So an answer to an unknown id is always the tier's fault.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::frame::{self, HEADER, Head, Violation};
use super::message::{Request, Welcome};
use super::options::ProcessOptions;
use super::segment::{Segment, SegmentSlot};
use kvtier_l2::{ErrorKind, L2Error};

/// Longest silences for which one request may wait while others are answered: its part of the segment and its permit are of no
/// use to others meanwhile.
const MAX_SILENCES: u32 = 4;

/// What a request is about; each class has requests in flight of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestClass {
    /// Keys only: it waits for no bytes of objects.
    Keys,
    /// Bytes of objects.
    Data,
}

/// Answer to a request, and the part of the segment that it was about.
pub(super) struct Answered {
    pub(super) body: Vec<u8>,
    pub(super) slot: Option<SegmentSlot>,
}

type AnswerSender = oneshot::Sender<Result<Answered, L2Error>>;

struct InFlight {
    answer: AnswerSender,
    slot: Option<SegmentSlot>,
    /// Held until the answer.
    permit: Option<OwnedSemaphorePermit>,
    max_answer: usize,
    since: Instant,
}

struct PendingRequest {
    next: u64,
    requests: HashMap<u64, InFlight>,
    last_answer: Instant,
    ended: Option<L2Error>,
}

/// A connection in use.
pub(super) struct ProcessConnection {
    options: Arc<ProcessOptions>,
    pub(super) welcome: Welcome,
    pub(super) segment: Arc<Segment>,
    /// Bounded by the requests in flight.
    outgoing: mpsc::UnboundedSender<Vec<u8>>,
    violations: mpsc::UnboundedSender<Violation>,
    pending: Mutex<PendingRequest>,
    keys: Arc<Semaphore>,
    data: Arc<Semaphore>,
    is_pinged: AtomicBool,
    has_answered: AtomicBool,
}

/// The ends of a session's queues and its socket.
pub(super) struct Wire {
    pub(super) stream: UnixStream,
    frames: mpsc::UnboundedReceiver<Vec<u8>>,
    violations: mpsc::UnboundedReceiver<Violation>,
}

/// Why a session has ended.
#[derive(Debug)]
pub(super) enum End {
    /// The tier has closed the connection, or it broke.
    Closed(String),
    /// The tier broke the protocol.
    Violated(Violation),
    /// The tier has not answered anything for this long.
    Silent(Duration),
    /// The tier has not answered a request for this long, and answered others meanwhile.
    Unanswered(Duration),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed(how) => write!(f, "the tier closed the connection{how}"),
            Self::Violated(what) => write!(f, "the tier broke the protocol: {what}"),
            Self::Silent(time) => write!(f, "the tier answered nothing for {time:?}"),
            Self::Unanswered(time) => {
                write!(f, "the tier left a request without an answer for {time:?}")
            }
        }
    }
}

impl From<Violation> for End {
    fn from(what: Violation) -> Self {
        Self::Violated(what)
    }
}

impl From<std::io::Error> for End {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Self::Closed(String::new()),
            _ => Self::Closed(format!(": {error}")),
        }
    }
}

impl ProcessConnection {
    pub(super) fn new(
        options: Arc<ProcessOptions>,
        welcome: Welcome,
        segment: Arc<Segment>,
        stream: UnixStream,
    ) -> (Self, Wire) {
        let (outgoing, frames) = mpsc::unbounded_channel();
        let (violated, violations) = mpsc::unbounded_channel();
        // Lookups do not wait behind bytes, if the tier takes more than one request.
        let all = welcome.max_in_flight;
        let of_keys = (all / 4).max(1);
        let keys = Arc::new(Semaphore::new(of_keys));
        let data = match all {
            1 => Arc::clone(&keys),
            all => Arc::new(Semaphore::new(all - of_keys)),
        };
        let session = Self {
            options,
            welcome,
            segment,
            outgoing,
            violations: violated,
            pending: Mutex::new(PendingRequest {
                next: 1,
                requests: HashMap::new(),
                last_answer: Instant::now(),
                ended: None,
            }),
            keys,
            data,
            is_pinged: false.into(),
            has_answered: false.into(),
        };
        let wire = Wire {
            stream,
            frames,
            violations,
        };
        (session, wire)
    }

    /// Waits until another request of the class may be sent.
    pub(super) async fn permit(
        &self,
        class: RequestClass,
    ) -> Result<OwnedSemaphorePermit, L2Error> {
        let permits = match class {
            RequestClass::Keys => &self.keys,
            RequestClass::Data => &self.data,
        };
        let permit = Arc::clone(permits).acquire_owned().await;
        permit.map_err(|_| self.error())
    }

    /// Waits for a part of the segment.
    pub(super) async fn slot(&self, bytes: u64) -> Result<SegmentSlot, L2Error> {
        let slot = self.segment.allocate(bytes).await;
        slot.ok_or_else(|| self.error())
    }

    /// Sends a request and waits for its answer. If this is dropped, the request stays in flight.
    pub(super) async fn call(
        &self,
        request: &Request<'_>,
        permit: OwnedSemaphorePermit,
        slot: Option<SegmentSlot>,
    ) -> Result<Answered, L2Error> {
        let answer = self.send(request, Some(permit), slot)?;
        answer.await.unwrap_or_else(|_| Err(self.error()))
    }

    fn send(
        &self,
        request: &Request<'_>,
        permit: Option<OwnedSemaphorePermit>,
        slot: Option<SegmentSlot>,
    ) -> Result<oneshot::Receiver<Result<Answered, L2Error>>, L2Error> {
        let body = request.encode()?;
        let (answer, answered) = oneshot::channel();
        let in_flight = InFlight {
            answer,
            slot,
            permit,
            max_answer: request.max_answer(),
            since: Instant::now(),
        };
        let id = {
            let mut pending = self.pending.lock();
            if let Some(error) = pending.ended.clone() {
                drop(pending);
                return Err(error);
            }
            let id = pending.next;
            pending.next += 1;
            pending.requests.insert(id, in_flight);
            id
        };
        // Fails only at the end of the session, which answers the request.
        let _ = self.outgoing.send(frame::encode(id, &body));
        Ok(answered)
    }

    /// Asks for a sign of life, unless an earlier one is still awaited: the session ends without an answer.
    pub(super) fn ping(&self) {
        if !self.is_pinged.swap(true, Ordering::Relaxed) {
            let _ = self.send(&Request::Ping, None, None);
        }
    }

    /// Ends the session, as an answer was not of its form. Returns the error for its caller.
    pub(super) fn violate(&self, what: Violation) -> L2Error {
        let end = End::Violated(what.clone()).to_string();
        let error = self.named(&L2Error::new(ErrorKind::Unavailable, end));
        let _ = self.violations.send(what);
        error
    }

    /// Returns an error of the tier with the socket's name.
    pub(super) fn named(&self, error: &L2Error) -> L2Error {
        self.options.error(error.kind(), &error.to_string())
    }

    /// Requests in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.pending.lock().requests.len()
    }

    /// Whether anything was answered.
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    fn error(&self) -> L2Error {
        let ended = self.pending.lock().ended.clone();
        ended.unwrap_or_else(|| L2Error::new(ErrorKind::Unavailable, "the connection has ended"))
    }

    /// Answers all requests by an error; no more are taken. Returns how many there were.
    pub(super) fn end(&self, error: &L2Error) -> usize {
        let requests = {
            let mut pending = self.pending.lock();
            pending.ended.get_or_insert_with(|| error.clone());
            std::mem::take(&mut pending.requests)
        };
        self.keys.close();
        self.data.close();
        self.segment.close();
        let count = requests.len();
        for (_, request) in requests {
            // Its slot and permit are freed too; the caller may wait no longer.
            let _ = request.answer.send(Err(error.clone()));
        }
        count
    }

    /// Moves frames until the session ends, for one of the reasons, or never if the tier goes on.
    pub(super) async fn serve(&self, wire: Wire, timeout: Duration) -> End {
        let Wire {
            stream,
            frames,
            mut violations,
        } = wire;
        let (reader, writer) = stream.into_split();
        let mut reading = std::pin::pin!(self.read(reader));
        let mut writing = std::pin::pin!(write(writer, frames));
        let tick = (timeout / 8).clamp(Duration::from_millis(5), Duration::from_secs(1));
        let mut ticks = tokio::time::interval(tick);
        loop {
            tokio::select! {
                ended = &mut reading => match ended {
                    Ok(never) => match never {},
                    Err(end) => return end,
                },
                end = &mut writing => return end,
                Some(what) = violations.recv() => return End::Violated(what),
                _ = ticks.tick() => {
                    if let Some(end) = self.overdue(Instant::now(), timeout) {
                        return end;
                    }
                }
            }
        }
    }

    /// Whether a request has waited for too long.
    fn overdue(&self, now: Instant, timeout: Duration) -> Option<End> {
        let pending = self.pending.lock();
        let oldest = pending
            .requests
            .values()
            .map(|request| request.since)
            .min()?;
        let since = |then: Instant| now.saturating_duration_since(then);
        let longest = timeout.saturating_mul(MAX_SILENCES);
        if since(oldest.max(pending.last_answer)) > timeout {
            return Some(End::Silent(timeout));
        }
        (since(oldest) > longest).then_some(End::Unanswered(longest))
    }

    async fn read(&self, mut reader: OwnedReadHalf) -> Result<std::convert::Infallible, End> {
        loop {
            let mut head = [0; HEADER];
            reader.read_exact(&mut head).await?;
            let head = Head::decode(&head)?;
            let max = {
                let pending = self.pending.lock();
                pending
                    .requests
                    .get(&head.id)
                    .map(|request| request.max_answer)
            };
            let Some(max) = max else {
                let what = format!("an answer to {}, which is not in flight", head.id);
                return Err(Violation::new(what).into());
            };
            if head.len > max {
                let what = format!(
                    "an answer of {} bytes; at most {max} are expected",
                    head.len
                );
                return Err(Violation::new(what).into());
            }
            let mut body = Vec::new();
            body.try_reserve_exact(head.len).map_err(|_| {
                Violation::new(format!("no memory for an answer of {} bytes", head.len))
            })?;
            body.resize(head.len, 0);
            reader.read_exact(&mut body).await?;
            let request = {
                let mut pending = self.pending.lock();
                pending.last_answer = Instant::now();
                pending.requests.remove(&head.id)
            };
            self.has_answered.store(true, Ordering::Relaxed);
            if let Some(InFlight {
                answer,
                slot,
                permit,
                ..
            }) = request
            {
                if permit.is_none() {
                    self.is_pinged.store(false, Ordering::Relaxed);
                }
                // If its caller waits no longer, the slot is freed here.
                let _ = answer.send(Ok(Answered { body, slot }));
            }
        }
    }
}

async fn write(mut writer: OwnedWriteHalf, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) -> End {
    while let Some(frame) = frames.recv().await {
        if let Err(error) = writer.write_all(&frame).await {
            return error.into();
        }
    }
    End::Closed(": it is not used any more".to_owned())
}
