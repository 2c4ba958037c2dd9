//! Which generation does a connection speak?
//!
//! An adapter's first request is always get_chunk_size, whose number differs in each generation, so a
//! fresh connection is decided at once. A connection that came back after a restart of the server starts
//! with whatever was due; then each request narrows the set of generations that could have sent it.

use super::{Field, Generation, OperationSpec};
use crate::frames::{OperationId, RequestFrames};
use crate::key::{FULL_KEY_FIELDS, KeyForm};
use crate::operation::Operation;
use crate::wire::{DecodeError, Reader};

/// The generations a connection may still speak. Starts with all of them; keep one for each connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidates {
    /// One bit a generation.
    possible: u8,
    /// Whether a request proved a release whose clients survive a text as op frame.
    takes_text_op: bool,
}

/// What a request turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// The generation it is read as.
    pub generation: Generation,
    /// The row of its table.
    pub spec: &'static OperationSpec,
    /// Whether every generation still possible reads it as the same operation.
    pub certain: bool,
    /// [`Candidates::takes_text_op`] of the connection, this request included.
    pub takes_text_op: bool,
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
            takes_text_op: false,
        }
    }

    /// Only this generation is possible.
    #[must_use]
    pub fn only(generation: Generation) -> Self {
        Self {
            possible: bit(generation),
            takes_text_op: false,
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

    /// Whether the client survives a reply whose op frame is a text instead of the request's.
    ///
    /// Clients before 0.5.5 stop receiving for good when they cannot decode an op frame; 0.5.5 logs it,
    /// 0.5.6 raises the text where the request was made. True once a request proved 0.5.5 or later:
    /// get_experimental, which a worker sends before it registers, is enough.
    #[must_use]
    pub fn takes_text_op(self) -> bool {
        self.takes_text_op
    }

    /// Finds the row for a request and drops the generations that cannot have sent it.
    ///
    /// Where several generations read the request differently, the choice is, in this order: the first of
    /// `preferred` (what the server spoke before it went) that is possible; the reading as get_chunk_size,
    /// because a wrong answer to that is the worst; the newest generation. [`Resolved::certain`] is false
    /// then, and every reading stays possible, except that request 0 of a client can only be its
    /// get_chunk_size. A request that fits nothing changes nothing.
    pub fn resolve(
        &mut self,
        request: &RequestFrames<'_>,
        preferred: &[Generation],
    ) -> Result<Resolved, Unresolved> {
        let id = OperationId::decode(request.op)?;
        if let Some(generation) = self.decided() {
            let spec = decided(generation, id, &request.payloads)?;
            self.takes_text_op |= proves_text_op(spec, id, &request.payloads);
            return Ok(Resolved {
                generation,
                spec,
                certain: true,
                takes_text_op: self.takes_text_op,
            });
        }
        let mut readings = self.readings(id, &request.payloads)?;
        let is_chunk_size =
            |reading: &(Generation, &OperationSpec)| reading.1.operation == Operation::GetChunkSize;
        // Clients number their requests from 0 and start with get_chunk_size.
        if request.uid == [0] && readings.iter().any(is_chunk_size) {
            readings.retain(is_chunk_size);
        }
        let (generation, spec) = preferred
            .iter()
            .find_map(|wanted| readings.iter().find(|(own, _)| own == wanted))
            .or_else(|| readings.iter().find(|reading| is_chunk_size(reading)))
            .or(readings.last())
            .copied()
            .ok_or_else(|| self.unknown(id))?;
        self.possible = readings
            .iter()
            .fold(0, |set, (generation, _)| set | bit(*generation));
        if self.decided().is_some() {
            self.takes_text_op |= proves_text_op(spec, id, &request.payloads);
        }
        Ok(Resolved {
            generation,
            spec,
            certain: readings
                .iter()
                .all(|(_, other)| other.operation == spec.operation),
            takes_text_op: self.takes_text_op,
        })
    }

    /// How each possible generation reads the request, oldest first, at least one.
    ///
    /// Readings whose payloads look right push out those whose payloads do not.
    fn readings(
        self,
        id: OperationId<'_>,
        payloads: &[&[u8]],
    ) -> Result<Vec<(Generation, &'static OperationSpec)>, Unresolved> {
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

fn bit(generation: Generation) -> u8 {
    1 << generation as u8
}

/// Whether a request can only come from 0.5.5 or later: what came with those is a
/// name for an op, get_experimental as 32, a clear that says whether to force, and the full key.
fn proves_text_op(spec: &OperationSpec, id: OperationId<'_>, payloads: &[&[u8]]) -> bool {
    if matches!(id, OperationId::Name(_) | OperationId::Number(32)) {
        return true;
    }
    let fields = spec.payloads.iter().zip(payloads);
    fields.into_iter().any(|(field, payload)| match field {
        Field::Force => true,
        Field::Key(KeyForm::Full) => Reader::new(payload).map_len() == Ok(FULL_KEY_FIELDS),
        _ => false,
    })
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
