//! One request: decode, handle, reply.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use kvtier_proto::chunk;
use kvtier_proto::generation::{OperationSpec, Release, Resolved};
use kvtier_proto::key::TokenReader;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{JobRef, Request, UnknownField};
use kvtier_proto::response::{Response, ResponseKind};
use kvtier_proto::wire::DecodeError;

use super::client::Peer;
use super::lanes::Turn;
use super::limits::{JOB_BYTES, SMALL_REPLY, answers_much};
use super::names::first_number;
use super::outbox::{Outbox, Outgoing};
use super::warnings;
use kvtier_common::sync::budget::Charge;
use kvtier_engine::{Caller, Engine, EngineAnswer, Payload, Reply, ReplyTarget};
use kvtier_http::Health;

/// A request whose frames are still undecoded.
pub struct RequestJob {
    /// The client that asks, and for which operation.
    pub sender: RequestSender,
    /// The payload frames; token ids and pickled data stay in them while the request is handled.
    pub payloads: Vec<Vec<u8>>,
}

/// What the answer to a request needs of it.
pub struct RequestSender {
    /// The client.
    pub peer: Arc<Peer>,
    /// The request's uid frame.
    pub uid: Vec<u8>,
    /// The request's operation frame.
    pub op: Vec<u8>,
    /// Bytes of the payload frames.
    pub bytes: u64,
    /// Bytes of the request in the budget of its connection, if it, or its answer, has to wait.
    pub charge: Option<Charge>,
    /// The row of the table that the request is read by.
    pub resolved: Resolved,
    /// The number that answers it, if it is a lookup of a release whose results are asked for by number.
    pub lookup_number: Option<i64>,
    /// When its message was taken from the socket.
    pub received: Instant,
}

/// What serves requests.
pub struct RequestServer {
    /// The cache.
    pub engine: Arc<Engine>,
    /// Health, in which panics are noted.
    pub health: Arc<Health>,
    /// Outbox of answers.
    pub outbox: Outbox,
    /// The first number of a lookup.
    pub first_number: i64,
    /// Shared by every request whose answer is to come.
    unanswered: Arc<()>,
}

impl RequestJob {
    /// The message it came as.
    pub fn into_frames(self) -> Vec<Vec<u8>> {
        [self.sender.uid, self.sender.op]
            .into_iter()
            .chain(self.payloads)
            .collect()
    }
}

impl RequestSender {
    /// The operation's table row.
    pub fn spec(&self) -> &'static OperationSpec {
        self.resolved.spec
    }

    fn caller(&self) -> Caller {
        Caller {
            connection: self.peer.id,
            release: self.resolved.release,
            releases: self.resolved.releases(),
            knows_chunk_size: self.resolved.knows_chunk_size,
            negotiates_chunk_size: self.peer.chunk_tokens.get().is_some(),
            registers_again: self.resolved.registers_again(),
            names_workers: !self.resolved.may_have_process_ids,
        }
    }

    /// Takes memory for a request that waits, once. Returns false if the connection, or all of them together,
    /// would exceed their limit.
    pub fn take_memory(&mut self) -> bool {
        if self.charge.is_none() {
            self.charge = self.peer.requests.take(self.bytes + JOB_BYTES);
        }
        self.charge.is_some()
    }

    fn refusal(&self, reason: &'static str) -> EngineAnswer {
        EngineAnswer::refusal(self.spec().operation, self.spec().response, reason)
    }
}

/// What a request means beside its payloads.
struct RequestContext {
    resolved: Resolved,
    caller: Caller,
    peer: Arc<Peer>,
    lookup_number: Option<i64>,
    may_answer_much: bool,
}

impl RequestContext {
    /// Whether the request is a transfer or registration of a worker whose connection has ended and was its only name.
    fn is_of_lost_worker(&self) -> bool {
        let is_transfer = matches!(
            self.resolved.spec.operation,
            Operation::Store | Operation::Retrieve | Operation::PrepareRetrieve
        ) || registers(self.resolved.spec.operation);
        is_transfer && self.resolved.may_have_process_ids && self.peer.is_closed()
    }

    /// Keeps the number of a lookup; returns the request id of the lookup that a request asks about by number.
    fn name_lookup<T>(&self, request: &Request<'_, T>) -> Option<Arc<str>> {
        let lookups = &self.peer.lookups;
        match request {
            Request::Lookup { key, .. } => {
                let (number, request_id) = (self.lookup_number?, key.request_id);
                let charge = self.peer.requests.take(request_id.len() as u64 + JOB_BYTES);
                lookups.insert(number, request_id, charge?);
            }
            Request::EndSession { request_id } => lookups.forget(request_id),
            Request::QueryPrefetchStatus {
                job: JobRef::Job(number),
            }
            | Request::QueryPrefetchLookupHits {
                job: JobRef::Job(number),
            } => return lookups.get(*number),
            _ => {}
        }
        None
    }
}

/// A request that has no answer yet.
struct Unanswered {
    server: Arc<RequestServer>,
    sender: RequestSender,
    /// The turn of its lane, if what its connection has sent behind it waits for the answer.
    turn: Option<Turn<RequestJob>>,
    /// Why it is refused if there is no answer.
    refused: &'static str,
    _counted: Arc<()>,
}

impl ReplyTarget for Unanswered {
    fn send(self: Box<Self>, answer: Option<EngineAnswer>) {
        let Self {
            server,
            sender,
            refused,
            ..
        } = *self;
        let answer = answer.unwrap_or_else(|| {
            if std::thread::panicking() {
                server.panicked(&sender)
            } else {
                sender.refusal(refused)
            }
        });
        server.send(sender, answer);
    }

    fn defer(&mut self) -> bool {
        let is_deferred = self.sender.take_memory();
        if !is_deferred {
            self.refused = "queue_full";
        }
        is_deferred
    }

    fn release_turn(&mut self) {
        self.turn = None;
    }
}

impl RequestServer {
    /// Not serving anything yet.
    pub fn new(engine: Arc<Engine>, health: Arc<Health>, outbox: Outbox) -> Self {
        Self {
            engine,
            health,
            outbox,
            first_number: first_number(),
            unanswered: Arc::default(),
        }
    }

    /// Whether there are requests whose answer is to come.
    pub fn has_unanswered(&self) -> bool {
        let is_counted = Arc::strong_count(&self.unanswered) > 1;
        // What was answered before is in the outbox: the count is read without order.
        fence(Ordering::Acquire);
        is_counted
    }

    /// Serves a request, whose answer goes through the outbox: whatever happens, there is one. The lane goes on when this
    /// returns, or with the answer if nothing may pass it.
    pub fn serve(self: &Arc<Self>, job: RequestJob, turn: Option<Turn<RequestJob>>) {
        let RequestJob { sender, payloads } = job;
        let context = RequestContext {
            resolved: sender.resolved,
            caller: sender.caller(),
            lookup_number: sender.lookup_number,
            may_answer_much: !sender.peer.replies.is_full(),
            peer: Arc::clone(&sender.peer),
        };
        let reply = self.reply(sender, turn.clone());
        // What is caught has been printed, and the reply that was dropped says so.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            self.handle(&context, &payloads, reply);
        }));
        drop(turn);
    }

    /// The handle that answers a request.
    pub(super) fn reply(
        self: &Arc<Self>,
        sender: RequestSender,
        turn: Option<Turn<RequestJob>>,
    ) -> Reply {
        Reply::new(Unanswered {
            server: Arc::clone(self),
            sender,
            turn,
            // At the end of the server, when what it waits for ends too.
            refused: "given_up",
            _counted: Arc::clone(&self.unanswered),
        })
    }

    /// Notes a panic, which has been printed. Returns the answer to the request that met it.
    fn panicked(&self, sender: &RequestSender) -> EngineAnswer {
        // State under a lock may be half changed, so the health says it for good.
        self.health.poison(sender.spec().operation.name());
        self.engine.metrics().handler_panics.inc();
        sender.refusal("panic")
    }

    /// Answers with the operation's "no", without serving.
    pub fn refuse(&self, sender: RequestSender, reason: &'static str) {
        let answer = sender.refusal(reason);
        self.send(sender, answer);
    }

    fn handle(&self, context: &RequestContext, payloads: &[Vec<u8>], reply: Reply) {
        let spec = context.resolved.spec;
        let refusal = |reason| EngineAnswer::refusal(spec.operation, spec.response, reason);
        // The readings of generations differ, and so may the answers they take: but for those without a payload.
        if !context.resolved.certain && spec.response != ResponseKind::Nothing {
            return reply.answer(EngineAnswer::nothing().because("uncertain_generation"));
        }
        if answers_much(spec.operation) && !context.may_answer_much {
            return reply.answer(refusal("replies_unread"));
        }
        let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        let mut prompts = self.engine.prompt_reader();
        if self.engine.announces(spec.operation) {
            prompts.keep_tokens();
        }
        let chunk_tokens = context.peer.chunk_tokens.get().copied();
        if let Some(tokens) = chunk_tokens {
            prompts.set_chunk_tokens(tokens);
        }
        let decoded = Request::decode_noting_unknown(spec, &payloads, &mut prompts);
        let unknown = decoded.as_ref().ok().and_then(|(_, unknown)| *unknown);
        let is_unserved = unknown.is_some_and(|field| self.warn_of_field(context, field));
        match decoded {
            Ok(_) if is_unserved => reply.answer(refusal("unserved_release")),
            // The worker is unknown on its next connection, and its pages may belong to other requests by now.
            Ok(_) if context.is_of_lost_worker() => {
                reply.answer(refusal("connection_lost"));
            }
            Ok((Request::NegotiateChunkSize { alignment }, _)) => {
                reply.answer(self.negotiate(context, alignment));
            }
            Ok((Request::GetChunkSize, _)) => {
                reply.answer(chunk_size_answer(self.chunk_tokens(context)));
            }
            Ok((mut request, _)) => {
                match &mut request {
                    Request::RegisterKvCache(registration) => {
                        let named = &mut registration.hints.chunk_tokens;
                        *named = named.or(chunk_tokens);
                    }
                    Request::RegisterEngineDriven(registration) => {
                        let named = &mut registration.chunk_tokens;
                        *named = named.or(chunk_tokens);
                    }
                    _ => {}
                }
                if !self.name_worker(context, &mut request) {
                    return reply.answer(refusal("too_many_workers"));
                }
                let asked_about = context.name_lookup(&request);
                if let (Some(job), Some(request_id)) = (request.job_mut(), &asked_about) {
                    *job = JobRef::Request(request_id);
                }
                self.engine.handle(context.caller, &request, reply);
            }
            Err(error) => {
                let text = warnings::undecodable(spec, &error);
                let connection = context.caller.connection;
                self.engine.warn_of_client(connection, &text);
                let (operation, kind) = (spec.operation, spec.response);
                reply.answer(EngineAnswer::refusal_with(
                    operation,
                    kind,
                    "undecodable",
                    &error,
                ));
            }
        }
    }

    /// Warns of a client by a field that no served release sends. Returns whether the request is not served for it.
    fn warn_of_field(&self, context: &RequestContext, field: UnknownField<'_>) -> bool {
        let resolved = &context.resolved;
        if !resolved.certain {
            return false;
        }
        let is_of_0_4_1 = warnings::is_of_0_4_1(resolved.generation, field);
        let text = if is_of_0_4_1 {
            warnings::client_of_0_4_1()
        } else {
            warnings::unknown_field(resolved.spec, field)
        };
        self.engine.warn_of_client(context.caller.connection, &text);
        is_of_0_4_1 && resolved.spec.operation == Operation::Lookup
    }

    /// Tokens per chunk for a client that does not name them.
    fn chunk_tokens(&self, context: &RequestContext) -> u32 {
        let bound = context.peer.chunk_tokens.get().copied();
        bound.unwrap_or_else(|| self.engine.config().chunk_size)
    }

    /// Agrees on the chunk size of a connection. Later requests are counted in it, so it stays: another alignment has to
    /// divide it.
    fn negotiate(&self, context: &RequestContext, alignment: i64) -> EngineAnswer {
        let bound = &context.peer.chunk_tokens;
        let minimum = self.chunk_tokens(context);
        match chunk::aligned(minimum, alignment) {
            Ok(tokens) if *bound.get_or_init(|| tokens) == tokens => {
                self.engine.announce_chunk_size(tokens);
                chunk_size_answer(tokens)
            }
            refused => {
                let error = match refused {
                    Ok(_) => DecodeError::at(
                        "required_chunk_alignment",
                        format!(
                            "{alignment}; allowed: a divisor of {minimum}, the connection's chunk size"
                        ),
                    ),
                    Err(error) => error,
                };
                let spec = context.resolved.spec;
                EngineAnswer::refusal_with(spec.operation, spec.response, "chunk_alignment", &error)
            }
        }
    }

    /// Replaces a worker's name by its id if it is one that only its connection understands, and completes pings without one.
    /// Returns false if the connection has too many.
    fn name_worker<T>(&self, context: &RequestContext, request: &mut Request<'_, T>) -> bool {
        let RequestContext { resolved, peer, .. } = context;
        if !resolved.may_have_process_ids {
            return true;
        }
        let workers = &peer.workers;
        if let Request::Ping { instance } = request {
            let named = match instance {
                Some(name) => workers.id(*name),
                None if !resolved.spec.payloads.is_empty() => None,
                None => workers.last(),
            };
            *instance = match named {
                Some(id) if self.engine.is_registered(id) => Some(id),
                // Refused, the client would take its blocks for free while the server still writes some.
                _ if self.engine.has_lost_retrieves() => None,
                Some(_) if workers.is_registering() => None,
                Some(id) => Some(id),
                None if resolved.knows_chunk_size || !resolved.spec.payloads.is_empty() => None,
                None => workers.unknown(),
            };
            return true;
        }
        let operation = request.operation();
        if request.job_mut().is_some()
            || matches!(
                operation,
                Operation::Lookup | Operation::FreeLookupLocks | Operation::EndSession
            )
        {
            workers.note_scheduler();
        }
        if registers(operation) {
            workers.begin_registration();
        }
        let Some(instance) = request.instance_mut() else {
            return true;
        };
        let name = *instance;
        let Some(id) = workers.id(name) else {
            return false;
        };
        *instance = id;
        if matches!(
            operation,
            Operation::UnregisterKvCache | Operation::UnregisterEngineDriven
        ) {
            workers.forget(name);
        }
        true
    }

    fn send(&self, sender: RequestSender, answer: EngineAnswer) {
        if registers(sender.spec().operation) {
            sender.peer.workers.end_registration();
            if sender.peer.is_closed() {
                // It was registered after its connection had ended.
                sender.peer.lose_workers();
            }
        }
        let to_send = match answer.refused {
            Some(_) => self.report(sender, answer),
            None => Some((sender, answer)),
        };
        if let Some((sender, answer)) = to_send {
            self.outbox.send(self.message(sender, answer));
        }
    }

    /// Returns a "no" to send, unless the client would not notice or not survive it: then its next ping says so.
    fn report(
        &self,
        sender: RequestSender,
        answer: EngineAnswer,
    ) -> Option<(RequestSender, EngineAnswer)> {
        let caller = sender.caller();
        if caller.release != Release::Before0_5_5 {
            return Some((sender, answer));
        }
        let held = match sender.spec().operation {
            // One that generations read differently may be a retrieve's.
            Operation::PrepareStore if sender.resolved.certain => return Some((sender, answer)),
            Operation::PrepareRetrieve | Operation::PrepareStore => {
                // What is held needs no memory of the request, and keeps neither its connection nor the server.
                let outbox = self.outbox.clone();
                let message = self.message(sender, answer);
                Some(Reply::new(move |_| outbox.send(message)))
            }
            Operation::Store if !lacks_event(&answer) => return Some((sender, answer)),
            Operation::Store | Operation::Retrieve => {
                let reason = answer.refused.unwrap_or_default();
                self.engine
                    .metrics()
                    .refused(sender.spec().operation.name(), reason);
                None
            }
            _ => return Some((sender, answer)),
        };
        self.engine.refuse_by_ping(caller, held);
        None
    }

    /// The message of an answer.
    pub(super) fn message(&self, sender: RequestSender, answer: EngineAnswer) -> Outgoing {
        let operation = sender.spec().operation.name();
        let metrics = self.engine.metrics();
        if let Some(reason) = answer.refused {
            metrics.refused(operation, reason);
        }
        metrics.answered(operation, sender.received.elapsed());
        let takes_text = sender.resolved.release.takes_text_op();
        // Whatever became of a lookup is the answer to the next question; a release that expects nothing gets nothing.
        let payload = match (sender.lookup_number, sender.spec().response) {
            (Some(number), _) => Response::Int(number).encode().map(Payload::from),
            (None, ResponseKind::Nothing) => None,
            (None, _) => answer.payload,
        };
        let RequestSender { peer, uid, op, .. } = sender;
        let (op, payload) = match answer.error.filter(|_| takes_text) {
            Some(text) => (error_frame(&text), None),
            None => (op, payload),
        };
        outgoing(&peer, uid, op, payload)
    }
}

/// A message to a client, charged to its connection if it is large or has chunks.
pub(super) fn outgoing(
    peer: &Peer,
    uid: Vec<u8>,
    op: Vec<u8>,
    payload: Option<Payload>,
) -> Outgoing {
    let is_large = |payload: &&Payload| {
        let text = payload.without_chunks();
        text.is_none_or(|text| text.len() > SMALL_REPLY)
    };
    let large = payload.as_ref().filter(is_large);
    let charge = large.map(|payload| peer.replies.take_anyway(payload.byte_len() as u64));
    Outgoing {
        connection: peer.id,
        uid,
        op,
        payload,
        charge,
    }
}

fn registers(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::RegisterKvCache | Operation::RegisterEngineDriven
    )
}

fn chunk_size_answer(tokens: u32) -> EngineAnswer {
    EngineAnswer::from(Response::Int(tokens.into()))
}

/// Whether it is the "no" of a transfer without an event, which clients up to 0.5.4 on a GPU do not survive.
fn lacks_event(answer: &EngineAnswer) -> bool {
    let payload = answer.payload.as_ref().and_then(Payload::without_chunks);
    payload == Response::transfer(&[][..], false).encode().as_deref()
}

/// An error text as an operation frame. Texts repeat what clients sent, so they are cut.
pub fn error_frame(text: &str) -> Vec<u8> {
    const SHOWN: usize = 500;
    let end = text.char_indices().nth(SHOWN).map(|(end, _)| end);
    let mut frame = Vec::new();
    kvtier_proto::wire::write_str(&mut frame, &text[..end.unwrap_or(text.len())]);
    frame
}
