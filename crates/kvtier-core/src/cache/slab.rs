//! Slots.

/// A slot at one point of its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRef {
    pub(super) slot: u32,
    pub(super) generation: u32,
}
