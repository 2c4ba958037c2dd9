//! From records to spans: one trace per session, whose root spans the whole session.
//!
//! | a session | and then |
//! | --- | --- |
//! | begins with its first record | its spans get its trace and its root's id at once |
//! | has ended, and no lookup of it waits for a tier | its root is finished [`LINGER`] after its last record: a store may end after its session |
//! | has had no record for its limit | its root is finished |
//! | is finished | it is known for [`MEMORY`], so that a late span finds its trace |
//!
//! Pure: time is an argument.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::record::{
    LookupResult, RecordedWork, TierSpan, TierWork, TraceRecord, TracedSession, Transfer,
    TransferKind,
};
use super::span::{Ids, Span, SpanId, TraceId, Value};

/// How long a session that has ended waits for stores that are still in flight.
const LINGER: Duration = Duration::from_secs(1);

/// How long a session is known after that.
const MEMORY: Duration = Duration::from_secs(30);

/// Sessions known at most; the oldest is finished early.
const MAX_SESSIONS: usize = 16_384;

/// Sessions, and the spans that are made of their records.
pub struct Sessions {
    open: HashMap<Arc<TracedSession>, Trace>,
    /// Sessions and their serials, oldest first; those that are forgotten are still in it for a while.
    ages: VecDeque<(Arc<TracedSession>, u64)>,
    next_serial: u64,
    ids: Ids,
    /// How long a session may have no record.
    ttl: Duration,
    /// Transfers so far.
    transfers: u64,
}

/// The trace of a session.
struct Trace {
    serial: u64,
    id: TraceId,
    root: SpanId,
    /// The root's parent, in the engine.
    parent: Option<SpanId>,
    /// Whether its spans are sent: the engine's side decides for both.
    is_sampled: bool,
    /// First begin and last end of its spans, nanoseconds since 1970.
    start: u64,
    end: u64,
    /// Result of the session's last lookup.
    outcome: LookupResult,
    /// When its last record came.
    active: Instant,
    /// When its session has ended, nanoseconds since 1970.
    ended: Option<u64>,
    /// Lookups of the session that wait for a tier.
    waiting: HashSet<SpanId>,
    finished: Option<Instant>,
}

impl Sessions {
    pub fn new(ttl: Duration) -> Self {
        Self {
            open: HashMap::new(),
            ages: VecDeque::new(),
            next_serial: 0,
            ids: Ids::new(),
            ttl,
            transfers: 0,
        }
    }

    /// Makes the spans of a record.
    pub fn add(&mut self, record: TraceRecord, now: Instant, spans: &mut Vec<Span>) {
        let TraceRecord {
            session,
            took,
            ended,
            work,
        } = record;
        let end = nanos(ended);
        let start = end.saturating_sub(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        // What begins after the end of a finished session is another one with its id.
        let is_known = |trace: &Trace| trace.finished.is_none() || start <= trace.end;
        if !self.open.get(&session).is_some_and(is_known) {
            if matches!(work, RecordedWork::End) {
                // Nothing was recorded of it.
                return;
            }
            self.open(&session, start, now, spans);
        }
        let Some(trace) = self.open.get_mut(&session) else {
            return;
        };
        (trace.start, trace.end) = (trace.start.min(start), trace.end.max(end));
        trace.active = now;
        let (id, parent, name, attributes, failure) = match work {
            RecordedWork::End => {
                trace.ended = Some(end);
                return;
            }
            RecordedWork::Wait(id) => {
                trace.waiting.insert(id);
                trace.go_on(start);
                return;
            }
            RecordedWork::Lookup(id, outcome) => {
                trace.outcome = outcome;
                trace.waiting.remove(&id);
                trace.go_on(start);
                let attributes = lookup_attributes(&session, &outcome);
                (id, trace.root, "mp.lookup_prefetch", attributes, None)
            }
            RecordedWork::TierCall(lookup, call) => {
                let failure = call.succeeded.is_none().then_some("no_answer");
                let attributes = tier_attributes(&session, &call);
                let name = match call.work {
                    TierWork::Lookup => "l2.lookup",
                    TierWork::Load => "l2.load",
                };
                (self.ids.span(), lookup, name, attributes, failure)
            }
            RecordedWork::Transfer(transfer) => {
                let number = self.transfers;
                self.transfers += 1;
                let name = match transfer.kind {
                    TransferKind::Store => "mp.store",
                    TransferKind::Retrieve => "mp.retrieve",
                };
                let attributes = transfer_attributes(&session, &transfer, number);
                (
                    self.ids.span(),
                    trace.root,
                    name,
                    attributes,
                    transfer.failure,
                )
            }
        };
        if trace.is_sampled {
            spans.push(Span {
                trace: trace.id,
                id,
                parent: Some(parent),
                is_parent_remote: false,
                name,
                start,
                end,
                attributes,
                failure,
            });
        }
    }

    fn open(
        &mut self,
        session: &Arc<TracedSession>,
        start: u64,
        now: Instant,
        spans: &mut Vec<Span>,
    ) {
        while self.open.len() >= MAX_SESSIONS {
            let Some((oldest, serial)) = self.ages.pop_front() else {
                break;
            };
            if self.open.get(&oldest).is_some_and(|it| it.serial == serial)
                && let Some(mut trace) = self.open.remove(&oldest)
            {
                spans.extend(trace.finish(&oldest, now));
            }
        }
        let parent = session.parent;
        let trace = Trace {
            serial: self.next_serial,
            id: parent.map_or_else(|| self.ids.trace(), |parent| parent.trace),
            root: self.ids.span(),
            parent: parent.map(|parent| parent.span),
            is_sampled: parent.is_none_or(|parent| parent.is_sampled),
            start,
            end: start,
            outcome: LookupResult::default(),
            active: now,
            ended: None,
            waiting: HashSet::new(),
            finished: None,
        };
        self.ages.push_back((Arc::clone(session), trace.serial));
        self.next_serial += 1;
        self.open.insert(Arc::clone(session), trace);
    }

    /// Finishes the sessions that have ended, and forgets those that ended long ago.
    pub fn sweep(&mut self, now: Instant, spans: &mut Vec<Span>) {
        let ttl = self.ttl;
        self.open.retain(|session, trace| {
            let is_over = trace.ended.is_some() && trace.waiting.is_empty();
            let limit = if is_over { LINGER } else { ttl };
            if now.saturating_duration_since(trace.active) >= limit {
                spans.extend(trace.finish(session, now));
            }
            let is_remembered = |finished| now.saturating_duration_since(finished) < MEMORY;
            trace.finished.is_none_or(is_remembered)
        });
        let open = &self.open;
        self.ages
            .retain(|(session, serial)| open.get(session).is_some_and(|it| it.serial == *serial));
    }

    /// Finishes all sessions.
    pub fn finish(&mut self, now: Instant, spans: &mut Vec<Span>) {
        for (session, trace) in &mut self.open {
            spans.extend(trace.finish(session, now));
        }
    }
}

impl Trace {
    /// Notes a lookup that has begun at `start`: a request that was preempted goes on.
    fn go_on(&mut self, start: u64) {
        self.ended.take_if(|ended| start > *ended);
    }

    /// The root, once.
    fn finish(&mut self, session: &TracedSession, now: Instant) -> Option<Span> {
        if self.finished.is_some() {
            return None;
        }
        self.finished = Some(now);
        if !self.is_sampled {
            return None;
        }
        Some(Span {
            trace: self.id,
            id: self.root,
            parent: self.parent,
            is_parent_remote: self.parent.is_some(),
            name: "request",
            start: self.start,
            end: self.end,
            attributes: root_attributes(session, &self.outcome),
            failure: None,
        })
    }
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Attributes of a list.
type Attributes = Vec<(&'static str, Value)>;

fn root_attributes(session: &TracedSession, outcome: &LookupResult) -> Attributes {
    let LookupResult {
        requested_tokens,
        l1_hit_tokens,
        l2_hit_tokens,
        l1_hit_keys,
        l2_hit_keys,
        early_exit_reason,
        ..
    } = *outcome;
    let hit_tokens = l1_hit_tokens + l2_hit_tokens;
    let rate = |tokens: u64| tokens as f64 / requested_tokens.max(1) as f64;
    vec![
        ("session_id", (&*session.request_id).into()),
        ("hit_tokens", hit_tokens.into()),
        ("requested_tokens", requested_tokens.into()),
        ("hit_rate", rate(hit_tokens).into()),
        ("l1_hit_tokens", l1_hit_tokens.into()),
        ("l2_hit_tokens", l2_hit_tokens.into()),
        ("l1_hit_rate", rate(l1_hit_tokens).into()),
        ("l2_hit_rate", rate(l2_hit_tokens).into()),
        ("l1_hit_keys", l1_hit_keys.into()),
        ("l2_hit_keys", l2_hit_keys.into()),
        ("early_exit_reason", early_exit_reason.into()),
    ]
}

fn lookup_attributes(session: &TracedSession, outcome: &LookupResult) -> Attributes {
    let hit_tokens = outcome.l1_hit_tokens + outcome.l2_hit_tokens;
    let text = Value::as_text::<u64>;
    vec![
        ("session_id", (&*session.request_id).into()),
        ("found_count", text(outcome.found_chunks)),
        ("requested_tokens", text(outcome.requested_tokens)),
        ("hit_tokens", text(hit_tokens)),
        ("l1_hit_tokens", text(outcome.l1_hit_tokens)),
        ("l2_hit_tokens", text(outcome.l2_hit_tokens)),
        ("l1_hit_keys", text(outcome.l1_hit_keys)),
        ("l2_hit_keys", text(outcome.l2_hit_keys)),
        ("early_exit_reason", outcome.early_exit_reason.into()),
        ("model_name", (&session.model_name).into()),
        ("cache_salt", (&session.cache_salt).into()),
    ]
}

fn tier_attributes(session: &TracedSession, call: &TierSpan) -> Attributes {
    vec![
        ("session_id", (&*session.request_id).into()),
        ("l2_name", (&call.tier).into()),
        ("objects", call.objects.into()),
        ("succeeded_objects", call.succeeded.unwrap_or(0).into()),
        ("total_bytes", call.bytes.into()),
        ("model_name", (&session.model_name).into()),
        ("cache_salt", (&session.cache_salt).into()),
    ]
}

fn transfer_attributes(session: &TracedSession, transfer: &Transfer, number: u64) -> Attributes {
    let count = match transfer.kind {
        TransferKind::Store => "stored_count",
        TransferKind::Retrieve => "retrieved_count",
    };
    let key = format!("{}#{number}", session.request_id);
    let mut attributes = vec![
        ("session_id", (&*session.request_id).into()),
        ("device", transfer.device.into()),
        ("model_name", (&session.model_name).into()),
        ("transfer_key", Value::Text(key.into())),
        (count, Value::as_text(transfer.chunks)),
        ("engine_id", Value::as_text(transfer.engine_id)),
        ("total_bytes", Value::as_text(transfer.bytes)),
        ("num_tokens", Value::as_text(transfer.tokens)),
    ];
    // LMCache's store has none.
    if transfer.kind == TransferKind::Retrieve {
        attributes.push(("cache_salt", (&session.cache_salt).into()));
    }
    attributes
}

#[cfg(test)]
mod tests;
