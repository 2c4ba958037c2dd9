//! Client generations: which number means what, and which payloads belong to it.
//!
//! Between LMCache 0.4.2 and 0.5.7 the framing stayed, while operations were renumbered five times and
//! payloads changed more often. Each numbering is one [`Generation`], each generation one table of
//! [`OperationSpec`] rows; where releases of one generation differ in payloads the table has one row for
//! each form. [`Candidates`] finds out which generation a connection speaks.

mod candidates;
mod field;
mod release;
mod tables;

pub use candidates::{Candidates, Resolved, Unresolved};
pub use field::{BlockForm, ContextForm, Field};
pub use release::Release;

use crate::frames::OperationId;
use crate::operation::Operation;
use crate::response::ResponseKind;

/// A numbering of the operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Generation {
    /// 0.4.2.
    G1,
    /// 0.4.3 to 0.4.5.
    G2,
    /// 0.4.6.
    G3,
    /// 0.4.7.
    G4,
    /// 0.5.0 to 0.5.2.
    G5,
    /// 0.5.3 to 0.5.7.
    G6,
}

/// The releases of LMCache whose clients are served, first to last.
#[must_use]
pub fn served_releases() -> String {
    let first = Generation::G1.releases().split(' ').next();
    let last = Generation::ALL[Generation::ALL.len() - 1].releases();
    let last = last.split(' ').next_back();
    format!(
        "{} to {}",
        first.unwrap_or_default(),
        last.unwrap_or_default()
    )
}

/// One row of a generation's table.
#[derive(Debug, PartialEq, Eq)]
pub struct OperationSpec {
    /// The number; none for operations that are called by name only.
    pub number: Option<u16>,
    /// What it means.
    pub operation: Operation,
    /// Payloads of the request, one frame each.
    pub payloads: &'static [Field],
    /// Response of the operation.
    pub response: ResponseKind,
}

impl Generation {
    /// Every generation, oldest first.
    pub const ALL: [Self; 6] = [Self::G1, Self::G2, Self::G3, Self::G4, Self::G5, Self::G6];

    /// The releases of LMCache that speak it.
    #[must_use]
    pub fn releases(self) -> &'static str {
        match self {
            Self::G1 => "0.4.2",
            Self::G2 => "0.4.3 to 0.4.5",
            Self::G3 => "0.4.6",
            Self::G4 => "0.4.7",
            Self::G5 => "0.5.0 to 0.5.2",
            Self::G6 => "0.5.3 to 0.5.7",
        }
    }

    /// Whether workers are named by their process ids, which processes of other containers have too. From 0.5.0 on they
    /// are named by 63 random bits, but for those of SGLang up to 0.5.2.
    #[must_use]
    pub fn has_process_ids(self) -> bool {
        self < Self::G6
    }

    /// The table: what this generation can ask.
    #[must_use]
    pub fn specs(self) -> &'static [OperationSpec] {
        tables::table(self)
    }

    /// The rows for an op frame: several where releases differ in payloads, none for an unknown operation.
    ///
    /// Names belong to the newest generation alone; older servers know only numbers.
    pub fn rows(self, id: OperationId<'_>) -> impl Iterator<Item = &'static OperationSpec> {
        self.specs().iter().filter(move |spec| match id {
            OperationId::Number(number) => spec.number.is_some_and(|own| i64::from(own) == number),
            OperationId::Name(name) => self == Self::G6 && spec.operation.name() == name,
        })
    }

    /// The row that a client of this generation's newest release uses for an operation; kvtier's own and one of 0.5.6 for
    /// the newest generation.
    #[must_use]
    pub fn spec(self, operation: Operation) -> Option<&'static OperationSpec> {
        self.specs().iter().find(|spec| spec.operation == operation)
    }
}

impl OperationSpec {
    /// The op frame a client of 0.5.6 or later sends: the number, or the name where there is none.
    #[must_use]
    pub fn id(&self) -> OperationId<'static> {
        match self.number {
            Some(number) => OperationId::Number(i64::from(number)),
            None => OperationId::Name(self.operation.name()),
        }
    }
}
