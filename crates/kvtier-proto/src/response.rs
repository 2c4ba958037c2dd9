//! Responses: what the server answers, typed.
//!
//! A response of "nothing" is no third frame at all ([`Response::encode`] returns none), and a client takes
//! a missing third frame as nothing whatever the operation returns (LMCache 0.5.6).

mod decode;
mod encode;

use std::borrow::Cow;

pub use crate::request::MatchedSegment;
pub use encode::InlineHit;

use crate::wire::{self, DecodeError, InField as _, record};

/// What kind of response an operation has; part of each row of a generation's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResponseKind {
    /// Always nothing.
    Nothing,
    /// An int.
    Int,
    /// An int, or nothing: not known yet.
    OptionalInt,
    /// A bool.
    Bool,
    /// A text.
    Text,
    /// An array of texts.
    Texts,
    /// An array of ints.
    Ints,
    /// A bit per object.
    Bits,
    /// Event handle and verdict of a transfer.
    Transfer,
    /// Location of the shared pool.
    EngineDriven,
    /// Targets that the worker writes to.
    PrepareStore,
    /// Sources that the worker reads from.
    PrepareRetrieve,
    /// A batch of a stream of events.
    EventBatch,
    /// A blending lookup's result, or nothing: not known yet.
    UnifiedLookup,
    /// A version and whether it fits.
    Handshake,
    /// Addresses of objects, or nothing: not known yet.
    Addresses,
    /// A plug-in's answer.
    ModuleCall,
}

impl ResponseKind {
    /// Whether an explicit nil frame may stand for nothing.
    fn may_be_nil(self) -> bool {
        matches!(
            self,
            Self::Nothing | Self::OptionalInt | Self::UnifiedLookup | Self::Addresses
        )
    }
}

/// A response.
#[derive(Debug, Clone, PartialEq)]
pub enum Response<'a> {
    /// Nothing: no third frame.
    Nothing,
    /// An int: chunk size, hit chunks, task, job.
    Int(i64),
    /// A bool.
    Bool(bool),
    /// A text.
    Text(Cow<'a, str>),
    /// Texts: names of optional features.
    Texts(Vec<Cow<'a, str>>),
    /// Ints: an order of segments.
    Ints(Vec<i64>),
    /// Whether each object of a find was found: the lowest bit of the first byte is the first one's.
    Bits(Cow<'a, [u8]>),
    /// To store and retrieve.
    Transfer(Transfer<'a>),
    /// To an engine-driven registration.
    EngineDriven(EngineDriven<'a>),
    /// To prepare_store.
    PrepareStore(PrepareStore<'a>),
    /// To prepare_retrieve.
    PrepareRetrieve(PrepareRetrieve<'a>),
    /// A batch of a stream.
    EventBatch(EventBatch<'a>),
    /// To a blending lookup.
    UnifiedLookup(UnifiedLookup<'a>),
    /// To a blending handshake.
    Handshake {
        /// The server's version.
        version: i64,
        /// Whether the client's version fits.
        compatible: bool,
    },
    /// To a query between servers.
    Addresses(Vec<ChannelAddress>),
    /// To a plug-in call.
    ModuleCall(ModuleCall<'a>),
}

/// The verdict on a store or retrieve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer<'a> {
    /// The device event that ends the transfer; empty when it is complete already.
    pub event_handle: Cow<'a, [u8]>,
    /// Whether there was no fatal error.
    pub ok: bool,
}

record! {
    /// The pool shared with a worker.
    pub struct EngineDriven<'a> {
        /// POSIX segment, without a slash in front; empty: no pool, data travels inside messages.
        pub shm_name: Cow<'a, str> = "shm_name";
        /// Bytes of the pool.
        pub pool_size: u64 = "pool_size";
    } and {
        /// The engine's block that holds no data; absent before 0.5.7.
        pub null_block_id: i64 = "null_block_id";
    }
}

record! {
    /// A chunk's place in the shared pool.
    pub struct ChunkSlot<'a> {
        /// Bytes from the pool's start.
        pub offset: u64 = "offset";
        /// Bytes.
        pub length: u64 = "length";
        /// Shape of the chunk, in values.
        pub shape: Cow<'a, [u64]> = "shape";
        /// Name of the values' type, such as `bfloat16`.
        pub dtype: Cow<'a, str> = "dtype";
    }
}

/// Slots that a worker may write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareStore<'a> {
    /// Slots to write and which chunks they are; none: send the data inside the commit. Empty: all is cached.
    pub target: Option<StoreTarget<'a>>,
}

/// The slots of a [`PrepareStore`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreTarget<'a> {
    /// One slot for each chunk that is wanted.
    pub slots: Vec<ChunkSlot<'a>>,
    /// Chunks of the request's range, counted from its start.
    pub chunk_indices: Vec<u64>,
    /// Group of each chunk; absent for workers of one group.
    pub group_ids: Option<Vec<u64>>,
}

/// Slots that a worker may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareRetrieve<'a> {
    /// Whether everything asked for is here.
    pub success: bool,
    /// The chunks in the client's [form](crate::inline::InlineForm); empty for a miss and with a shared pool.
    pub data: Cow<'a, [u8]>,
    /// One slot for each chunk of the range, in order; none without a shared pool.
    pub slots: Option<Vec<ChunkSlot<'a>>>,
    /// Group and chunk of each slot; absent for workers of one group.
    pub groups: Option<SlotGroups>,
}

/// Groups and chunks of slots, one entry per slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlotGroups {
    /// The groups.
    pub group_ids: Vec<u64>,
    /// The chunks, counted from the start of the request's range.
    pub chunk_indices: Vec<u64>,
}

impl PrepareRetrieve<'_> {
    /// The answer to a request for what is not (all) here.
    #[must_use]
    pub fn miss() -> Self {
        Self {
            success: false,
            data: Cow::Borrowed(&[]),
            slots: None,
            groups: None,
        }
    }
}

record! {
    /// A batch of a stream of events.
    pub struct EventBatch<'a> {
        /// Whether the server keeps events at all.
        pub enabled: bool = "enabled";
        /// Changes when the server restarts: its start in nanoseconds.
        pub incarnation: i64 = "incarnation";
        /// Last sequence number that was considered for this batch.
        pub next_cursor: i64 = "next_cursor";
        /// Whether events before this batch were dropped.
        pub lost: bool = "lost", default false;
        /// The events.
        pub events: Vec<EventRecord<'a>> = "events", default Vec::new();
    }
}

record! {
    /// One event.
    pub struct EventRecord<'a> {
        /// Sequence number.
        pub seq: i64 = "seq";
        /// `stored` or `removed`.
        pub kind: Cow<'a, str> = "kind";
        /// Medium, such as `CPU`.
        pub medium: Cow<'a, str> = "medium";
        /// The model.
        pub model_name: Cow<'a, str> = "model_name";
        /// Hashes of the chunks.
        pub block_hashes: Vec<Cow<'a, [u8]>> = "block_hashes";
        /// Hash of the chunk before the first one.
        pub parent_block_hash: Option<Cow<'a, [u8]>> = "parent_block_hash", default None;
        /// Tokens of the chunks; empty for removals.
        pub token_ids: Cow<'a, [u32]> = "token_ids", default Cow::default();
    }
}

record! {
    /// A blending lookup's result.
    pub struct UnifiedLookup<'a> {
        /// Tokens the prefix covers.
        pub prefix_coverage_tokens: i64 = "prefix_coverage_tokens";
        /// Segments elsewhere in the prompt.
        pub non_prefix_segments: Vec<MatchedSegment<'a>> = "non_prefix_segments", default Vec::new();
        /// Segments of the prefix.
        pub segmented_prefix_segments: Vec<MatchedSegment<'a>> = "segmented_prefix_segments", default Vec::new();
    }
}

record! {
    /// An object's place in another server's memory.
    #[derive(Copy)]
    pub struct ChannelAddress {
        /// Bytes from the start; -1 for an object that is not here.
        pub offset: i64 = "offset";
        /// Bytes.
        pub size: u64 = "size";
    }
}

record! {
    /// A plug-in's answer.
    pub struct ModuleCall<'a> {
        /// Whether the call worked.
        pub success: bool = "success";
        /// What it returned.
        pub payload: Cow<'a, [u8]> = "payload", default Cow::default();
        /// Why it failed; empty otherwise.
        pub error: Cow<'a, str> = "error", default Cow::default();
    }
}

impl<'a> Response<'a> {
    /// Decodes the third frame of a reply, as the 0.5.6 client does.
    ///
    /// A missing frame is [`Response::Nothing`] whatever `kind` says; nil is, where the kind allows it.
    pub fn decode(kind: ResponseKind, payload: Option<&'a [u8]>) -> Result<Self, DecodeError> {
        let Some(payload) = payload else {
            return Ok(Self::Nothing);
        };
        wire::whole(payload, |reader| {
            if kind.may_be_nil() && reader.nil()? {
                return Ok(Self::Nothing);
            }
            decode::read(kind, reader)
        })
        .in_field("response")
    }

    /// The third frame of the reply; none for a response of nothing.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        encode::encode(self)
    }

    /// A store's or retrieve's verdict.
    #[must_use]
    pub fn transfer(event_handle: impl Into<Cow<'a, [u8]>>, ok: bool) -> Self {
        Self::Transfer(Transfer {
            event_handle: event_handle.into(),
            ok,
        })
    }
}
