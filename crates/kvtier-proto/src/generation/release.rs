//! What a client of LMCache 0.5.3 to 0.5.7 is known to do, by its release.
//!
//! 0.5.3 to 0.5.7 have the same numbers, and behave alike but for what changed with 0.5.5. Each method names one such
//! change, so that a handler asks for the behaviour and not for the release.

use super::{ContextForm, Field, OperationSpec};
use crate::frames::OperationId;
use crate::key::{FULL_KEY_FIELDS, KeyForm, OWN_KEY_FIELDS};
use crate::wire::Reader;

/// First byte of a pickle of protocol 2 and later.
const PICKLE: u8 = 0x80;

/// What the requests of a connection have proved of its client's release.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Release {
    /// Nothing yet. Treated like an older one.
    #[default]
    Unproven,
    /// Up to 0.5.4.
    Before0_5_5,
    /// 0.5.5 or later.
    Since0_5_5,
}

impl Release {
    /// Whether the client survives a reply whose op frame is a text.
    ///
    /// Clients up to 0.5.4 stop receiving for good when they cannot decode a frame; 0.5.5 logs it, 0.5.6 raises the text
    /// where the request was made.
    #[must_use]
    pub fn takes_text_op(self) -> bool {
        self == Self::Since0_5_5
    }

    /// Whether the client marks the blocks of a retrieve that was answered "no" as not loaded.
    ///
    /// Clients up to 0.5.4 only log it, and the engine computes on what the blocks contain.
    #[must_use]
    pub fn notices_failed_retrieves(self) -> bool {
        self == Self::Since0_5_5
    }

    /// Whether a client on a GPU takes an answer without an event.
    ///
    /// Clients up to 0.5.4 open the event of every answer to a store or retrieve, and their worker dies of one that
    /// cannot be opened.
    #[must_use]
    pub fn takes_empty_event(self) -> bool {
        self == Self::Since0_5_5
    }

    /// Whether the `kv_layout` hint holds for pickled tensors in CPU memory; `None` if that is not known. Up to 0.5.4
    /// these are heads-first whatever the hint is.
    #[must_use]
    pub fn hints_cpu_layout(self) -> Option<bool> {
        match self {
            Self::Unproven => None,
            Self::Before0_5_5 => Some(false),
            Self::Since0_5_5 => Some(true),
        }
    }

    /// What a request of this generation proves.
    ///
    /// New with 0.5.5: get_experimental as 32 (before: 40), two fields of the key, `num_physical_slots`, two fields of
    /// each layer group. New with 0.5.6: names, a clear with a `force` flag, tensors that are described.
    pub(super) fn proved(
        spec: &OperationSpec,
        id: OperationId<'_>,
        payloads: &[&[u8]],
    ) -> Option<Self> {
        match id {
            OperationId::Name(_) | OperationId::Number(32) => return Some(Self::Since0_5_5),
            OperationId::Number(40) => return Some(Self::Before0_5_5),
            OperationId::Number(_) => {}
        }
        let mut fields = spec.payloads.iter().zip(payloads);
        fields.find_map(|(field, payload)| Self::proved_by(*field, payload))
    }

    pub(super) fn proved_by(field: Field, payload: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        // With the chunk size that only kvtier's own clients ask for, there is one more.
        let (found, new, own, old) = match field {
            Field::Force => return Some(Self::Since0_5_5),
            Field::Tensors => {
                let count = reader.array_len().ok()?;
                let (_, body) = (count > 0).then(|| reader.ext().ok())??;
                return (body.first() != Some(&PICKLE)).then_some(Self::Since0_5_5);
            }
            Field::Key(KeyForm::Full | KeyForm::Packed) => {
                (reader.map_len().ok()?, FULL_KEY_FIELDS, OWN_KEY_FIELDS, 8)
            }
            Field::EngineDrivenContext(ContextForm::Groups) => return Some(Self::Since0_5_5),
            Field::EngineDrivenContext(ContextForm::Slots) => (reader.map_len().ok()?, 9, 10, 8),
            Field::GroupInfos => {
                let count = reader.array_len().ok()?;
                ((count > 0).then(|| reader.map_len().ok())??, 6, 6, 4)
            }
            _ => return None,
        };
        match found {
            found if found == new || found == own => Some(Self::Since0_5_5),
            found if found == old => Some(Self::Before0_5_5),
            _ => None,
        }
    }
}
