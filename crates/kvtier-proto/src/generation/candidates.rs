//! Which generation does a connection speak?
//!
//! An adapter's first request, with uid 0, is get_chunk_size, whose number differs in each generation, or from 0.5.7 on
//! negotiate_chunk_size, which has a name only. So a fresh connection is decided at once. A connection that came back
//! after a restart of the server starts with whatever was due, and its uids go on; then each request narrows the set of
//! generations that could have sent it.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Field, Generation, OperationSpec, Release};
use crate::frames::{OperationId, RequestFrames};
use crate::key::{CacheKey, SkipTokens};
use crate::operation::Operation;
use crate::response::ResponseKind;
use crate::wire::DecodeError;

/// The uid frame of a client's first request.
const FIRST_UID: &[u8] = &[0];

/// What get_chunk_size, the first request of an adapter, is in releases that are older than every generation, and which
/// those are. No generation has these numbers without payloads.
const TOO_OLD: [(i64, &str); 2] = [(7, "0.3.10 to 0.3.13"), (8, "0.3.14 or 0.3.15")];

/// Largest key that is read to find a generation: a prompt of 800,000 token ids.
const MAX_KEY_BYTES: usize = 4 << 20;

/// How each of some generations reads a request.
type Readings = Vec<(Generation, &'static OperationSpec)>;

/// The generations a connection may still speak. Starts with all of them; keep one for each connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidates {
    /// One bit a generation.
    possible: u8,
    /// What was proved of the release, for the newest generation.
    release: Release,
    /// Whether this process has sent the client its chunk size.
    knows_chunk_size: bool,
    /// Hash of the last request that is a query or the end of a session, depending on the generation.
    last_query: Option<u64>,
}

/// What a request turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// The generation it is read as.
    pub generation: Generation,
    /// The row of its table.
    pub spec: &'static OperationSpec,
    /// Whether every generation still possible reads it as the same operation with the same kind of response. If not, only
    /// an answer without a payload is safe: a client up to 0.5.4 stops receiving at a payload of another type than it expects.
    pub certain: bool,
    /// Whether some generation still possible needs a payload in the answer: its worker ends without one.
    pub needs_decision: bool,
    /// Whether only one generation is possible.
    pub is_decided: bool,
    /// Whether the request may name its worker by a process id.
    pub may_have_process_ids: bool,
    /// What is known of the client's release, this request included.
    pub release: Release,
    /// [`Candidates::knows_chunk_size`] of the connection, this request included.
    pub knows_chunk_size: bool,
}

impl Resolved {
    /// Whether the client's workers register again after a restart of the server, which releases up to 0.4.4 never do;
    /// nothing if that is not known.
    #[must_use]
    pub fn registers_again(&self) -> Option<bool> {
        match self.generation {
            _ if !self.is_decided => None,
            Generation::G1 => Some(false),
            // 0.4.5 does.
            Generation::G2 => None,
            _ => Some(true),
        }
    }

    /// The releases of LMCache that the client may be of, as far as that is known.
    #[must_use]
    pub fn releases(&self) -> &'static str {
        match (self.generation, self.release) {
            _ if !self.is_decided => "unknown",
            (Generation::G6, Release::Before0_5_5) => "0.5.3 to 0.5.4",
            (Generation::G6, Release::Since0_5_5) => "0.5.5 to 0.5.7",
            (generation, _) => generation.releases(),
        }
    }
}

/// Why a request fits none of the generations still possible. It gets no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// The op frame is neither a number nor a name.
    #[error("the op frame cannot be read: {0}")]
    BadOperation(#[from] DecodeError),
    /// No generation has this number or name.
    #[error("operation {id} is unknown to clients of {releases}")]
    UnknownOperation {
        /// The number or name.
        id: String,
        /// The releases that were possible.
        releases: String,
    },
    /// The first request of a client that is older than every generation.
    #[error("get_chunk_size of clients of {releases}, which are not served")]
    TooOld {
        /// Releases of the client.
        releases: &'static str,
    },
    /// The number of payload frames fits no row.
    #[error("operation {id} of clients of {releases} does not have {found} payloads")]
    PayloadCount {
        /// The number or name.
        id: String,
        /// The releases that were possible.
        releases: String,
        /// Payload frames of the request.
        found: usize,
    },
}

impl Default for Candidates {
    fn default() -> Self {
        Self::all()
    }
}

impl Candidates {
    /// Every generation is possible.
    #[must_use]
    pub fn all() -> Self {
        Self {
            possible: (1 << Generation::ALL.len()) - 1,
            release: Release::Unproven,
            knows_chunk_size: false,
            last_query: None,
        }
    }

    /// Only this generation is possible.
    #[must_use]
    pub fn only(generation: Generation) -> Self {
        Self {
            possible: bit(generation),
            ..Self::all()
        }
    }

    /// Whether this generation is still possible.
    #[must_use]
    pub fn contains(self, generation: Generation) -> bool {
        self.possible & bit(generation) != 0
    }

    /// The generations still possible, oldest first.
    pub fn iter(self) -> impl Iterator<Item = Generation> {
        Generation::ALL
            .into_iter()
            .filter(move |generation| self.contains(*generation))
    }

    /// The generation, once only one is left.
    #[must_use]
    pub fn decided(self) -> Option<Generation> {
        let mut left = self.iter();
        let generation = left.next()?;
        left.next().is_none().then_some(generation)
    }

    /// What the requests so far have proved of the client's release. get_experimental, which a worker sends before it
    /// registers, is enough.
    #[must_use]
    pub fn release(self) -> Release {
        self.release
    }

    /// Whether the client has the chunk size from this process: it has asked here, or its connection began here, as its
    /// request 0 shows. Else it may have it from a server that was here before.
    #[must_use]
    pub fn knows_chunk_size(self) -> bool {
        self.knows_chunk_size
    }

    /// Finds the row for a request and drops the generations that cannot have sent it.
    ///
    /// Where several generations read the request differently, the choice is, in this order: the first of
    /// `preferred` (what the server spoke before it went) that is possible; the newest generation. [`Resolved::certain`]
    /// is false then, and every reading stays possible, but for what no adapter sends: another request 0 than
    /// get_chunk_size, and later on get_chunk_size, clear and noop. A request that fits nothing changes nothing.
    pub fn resolve(
        &mut self,
        request: &RequestFrames<'_>,
        preferred: &[Generation],
    ) -> Result<Resolved, Unresolved> {
        let id = OperationId::decode(request.op)?;
        if let Some(generation) = self.decided() {
            let spec = decided(generation, id, &request.payloads)?;
            return Ok(self.resolved(request, id, (generation, spec), &[]));
        }
        if let Some(releases) = too_old(request, id) {
            return Err(Unresolved::TooOld { releases });
        }
        let mut readings = self.readings(id, &request.payloads)?;
        self.drop_unsent(request, &mut readings);
        let (generation, spec) = preferred
            .iter()
            .find_map(|wanted| readings.iter().find(|(own, _)| own == wanted))
            .or(readings.last())
            .copied()
            .ok_or_else(|| self.unknown(id))?;
        self.possible = readings
            .iter()
            .fold(0, |set, (generation, _)| set | bit(*generation));
        Ok(self.resolved(request, id, (generation, spec), &readings))
    }

    fn resolved(
        &mut self,
        request: &RequestFrames<'_>,
        id: OperationId<'_>,
        (generation, spec): (Generation, &'static OperationSpec),
        readings: &[(Generation, &'static OperationSpec)],
    ) -> Resolved {
        let same = |other: &OperationSpec| {
            (other.operation, other.response) == (spec.operation, spec.response)
        };
        let certain = readings.iter().all(|(_, other)| same(other));
        // A query that is answered with nothing is repeated.
        let is_harmless = |kind| matches!(kind, ResponseKind::Nothing | ResponseKind::OptionalInt);
        let needs_decision = !certain && readings.iter().any(|(_, it)| !is_harmless(it.response));
        let proved = match self.decided() {
            _ if !self.contains(Generation::G6) => Some(Release::Before0_5_5),
            Some(_) => Release::proved(spec, id, &request.payloads),
            None => None,
        };
        self.release = proved.unwrap_or(self.release);
        let asks_chunk_size = matches!(
            spec.operation,
            Operation::GetChunkSize | Operation::NegotiateChunkSize
        );
        self.knows_chunk_size |= request.uid == FIRST_UID || (certain && asks_chunk_size);
        Resolved {
            generation,
            spec,
            certain,
            needs_decision,
            is_decided: self.decided().is_some(),
            may_have_process_ids: generation.has_process_ids()
                || spec.operation == Operation::RegisterKvCache
                    && self.iter().any(Generation::has_process_ids),
            release: self.release,
            knows_chunk_size: self.knows_chunk_size,
        }
    }

    /// Drops readings whose request no adapter sends, unless none would be left.
    ///
    /// get_chunk_size is the first request of every adapter and never repeated; no adapter sends clear or noop. So what
    /// looks like one of them on a connection that came back is the ping of another generation. The newest number of
    /// get_chunk_size is no other generation's ping, and is what other clients send again.
    fn drop_unsent(&mut self, request: &RequestFrames<'_>, readings: &mut Readings) {
        use Operation::{Clear, EndSession, GetChunkSize, Noop, QueryPrefetchStatus};
        if readings.len() > 1 && describes_tensors(request) {
            keep_any(readings, |generation, operation| {
                operation == Operation::RegisterKvCache && generation == Generation::G6
            });
        }
        if request.uid == FIRST_UID {
            keep_any(readings, |_, operation| operation == GetChunkSize);
            return;
        }
        keep_any(readings, |generation, operation| match operation {
            Clear | Noop => false,
            GetChunkSize => generation == Generation::G6,
            _ => true,
        });
        // A key names its worker, or none if it is a scheduler's.
        if readings.len() > 1
            && let Some(has_worker) = names_worker(request)
        {
            keep_any(readings, |_, operation| {
                let is_schedulers =
                    matches!(operation, Operation::Lookup | Operation::FreeLookupLocks);
                is_schedulers != has_worker
            });
        }
        let has = |wanted| readings.iter().any(|(_, spec)| spec.operation == wanted);
        if has(QueryPrefetchStatus) && has(EndSession) {
            // A session ends once; a query that was answered with nothing is repeated.
            let mut hasher = DefaultHasher::new();
            (request.op, &request.payloads).hash(&mut hasher);
            if self.last_query.replace(hasher.finish()) == Some(hasher.finish()) {
                keep_any(readings, |_, operation| operation == QueryPrefetchStatus);
            }
        }
    }

    /// How each possible generation reads the request, oldest first, at least one.
    ///
    /// Readings whose payloads look right push out those whose payloads do not.
    fn readings(self, id: OperationId<'_>, payloads: &[&[u8]]) -> Result<Readings, Unresolved> {
        let mut known = false;
        let mut by_count = Vec::new();
        let mut by_shape = Vec::new();
        for generation in self.iter() {
            let rows: Vec<_> = generation.rows(id).collect();
            known |= !rows.is_empty();
            let Some((spec, fits)) = best_row(&rows, payloads) else {
                continue;
            };
            by_count.push((generation, spec));
            if fits {
                by_shape.push((generation, spec));
            }
        }
        match (by_shape.is_empty(), by_count.is_empty(), known) {
            (false, _, _) => Ok(by_shape),
            (true, false, _) => Ok(by_count),
            (true, true, true) => Err(Unresolved::PayloadCount {
                id: id.to_string(),
                releases: self.releases(),
                found: payloads.len(),
            }),
            (true, true, false) => Err(self.unknown(id)),
        }
    }

    fn unknown(self, id: OperationId<'_>) -> Unresolved {
        Unresolved::UnknownOperation {
            id: id.to_string(),
            releases: self.releases(),
        }
    }

    fn releases(self) -> String {
        let releases: Vec<_> = self.iter().map(Generation::releases).collect();
        releases.join(", ")
    }
}

/// The releases, older than every generation, whose adapters begin with this request.
fn too_old(request: &RequestFrames<'_>, id: OperationId<'_>) -> Option<&'static str> {
    let is_first = request.uid == FIRST_UID && request.payloads.is_empty();
    let same = |(number, _): &(i64, _)| id == OperationId::Number(*number);
    let found = TOO_OLD.iter().find(|known| is_first && same(known));
    found.map(|(_, releases)| *releases)
}

fn bit(generation: Generation) -> u8 {
    1 << generation as u8
}

/// Whether the second payload is tensors that are not pickled, as 0.5.6 sends them.
fn describes_tensors(request: &RequestFrames<'_>) -> bool {
    let tensors = request.payloads.get(1);
    tensors.is_some_and(|tensors| {
        Release::proved_by(Field::Tensors, tensors) == Some(Release::Since0_5_5)
    })
}

/// Whether the key of a request names a worker; nothing for a request without a key.
fn names_worker(request: &RequestFrames<'_>) -> Option<bool> {
    let key = request.payloads.first()?;
    let key = (key.len() <= MAX_KEY_BYTES).then(|| CacheKey::decode(key, &mut SkipTokens));
    let key = key?.ok()?;
    Some(key.worker_id.is_some())
}

/// Keeps the readings that `wanted` says yes to; all of them if there is no such reading.
fn keep_any(readings: &mut Readings, wanted: impl Fn(Generation, Operation) -> bool) {
    let wanted = |reading: &(Generation, &OperationSpec)| wanted(reading.0, reading.1.operation);
    if readings.iter().any(wanted) {
        readings.retain(wanted);
    }
}

/// The row of a connection whose generation is known: no collecting, the common case.
fn decided(
    generation: Generation,
    id: OperationId<'_>,
    payloads: &[&[u8]],
) -> Result<&'static OperationSpec, Unresolved> {
    let mut rows = generation
        .rows(id)
        .filter(|row| row.payloads.len() == payloads.len());
    let Some(first) = rows.next() else {
        // Nothing fits: the slow path words the error.
        Candidates::only(generation).readings(id, payloads)?;
        return Err(Candidates::only(generation).unknown(id));
    };
    if row_fits(first, payloads) {
        return Ok(first);
    }
    Ok(rows.find(|row| row_fits(row, payloads)).unwrap_or(first))
}

/// The first row whose payloads look right, or else the first with the right number; and which it is.
fn best_row(
    rows: &[&'static OperationSpec],
    payloads: &[&[u8]],
) -> Option<(&'static OperationSpec, bool)> {
    let counted = || {
        rows.iter()
            .filter(|row| row.payloads.len() == payloads.len())
    };
    match counted().find(|row| row_fits(row, payloads)) {
        Some(row) => Some((row, true)),
        None => counted().next().map(|row| (*row, false)),
    }
}

fn row_fits(row: &OperationSpec, payloads: &[&[u8]]) -> bool {
    row.payloads
        .iter()
        .zip(payloads)
        .all(|(field, payload)| field.looks_like(payload))
}

impl std::fmt::Debug for Candidates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
