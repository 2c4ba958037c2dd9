//! Reasons to refuse memory to an object.

/// Why an object gets no memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// None is free, and no eviction would free enough.
    Memory,
    /// The tenant's limit.
    Quota,
    /// The limit of uncommitted bytes.
    Staging,
}
