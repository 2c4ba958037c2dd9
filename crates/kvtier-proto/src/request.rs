//! Requests: what a client asks, typed.
//!
//! [`Request::decode`] reads the payload frames by a row of a generation's table, [`Request::encode`]
//! writes them; what differs between generations (flat block ids, keys without a salt, registrations
//! without groups, pings without a payload) is in the row, not in the types.

mod decode;
mod encode;
mod types;

pub use decode::UnknownField;
pub use encode::EncodeError;
pub use types::{
    AllocationRecord, EngineDrivenContext, EngineGroupInfo, EngineType, GroupLayout, HELD_BLOCKS,
    HELD_BLOCKS_FEATURE, InstanceId, JobRef, KvLayoutName, KvListLayout, LayoutDescriptor,
    LayoutHints, MatchedSegment, ObjectKeyParts, Seconds,
};
pub use types::{MAX_GROUPS, MAX_TENSORS};

use crate::descriptor::TensorDescriptor;
use crate::generation::OperationSpec;
use crate::key::{CacheKey, TokenReader, TokenWriter};
use crate::operation::{Operation, operations};
use crate::wire::DecodeError;

/// Sent by a worker in place of a store's data to abort the slots that a PREPARE_STORE granted it, or may have: no
/// pickle looks like this. A server that does not know it refuses it as bad data.
pub const ABORT_STORE: &[u8] = b"kvtier.abort";

/// A request. `T` is what the caller's [`crate::key::TokenReader`] made of token ids.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    missing_docs,
    reason = "fields carry their wire names; see the operations' documentation"
)]
///
/// ```
/// use kvtier_proto::generation::Generation;
/// use kvtier_proto::key::VecTokens;
/// use kvtier_proto::operation::Operation;
/// use kvtier_proto::request::{InstanceId, Request};
///
/// let ping: Request<'_, Vec<u32>> = Request::Ping { instance: Some(InstanceId(7)) };
/// let spec = Generation::G6.spec(Operation::Ping).ok_or("not served")?;
/// let frames = ping.encode(spec)?;
/// assert_eq!(frames, [[7]]);
/// let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
/// assert_eq!(Request::decode(spec, &frames, &mut VecTokens)?, ping);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub enum Request<'a, T> {
    RegisterKvCache(Registration<'a>),
    UnregisterKvCache {
        instance: InstanceId,
    },
    RegisterQCache(Registration<'a>),
    UnregisterQCache {
        instance: InstanceId,
    },
    StoreQ(Store<'a, T>),
    Store(Store<'a, T>),
    Retrieve(Retrieve<'a, T>),
    Lookup {
        key: CacheKey<'a, T>,
        tp_size: i64,
    },
    QueryPrefetchStatus {
        job: JobRef<'a>,
    },
    QueryPrefetchLookupHits {
        job: JobRef<'a>,
    },
    WaitPrefetchStatus {
        job: JobRef<'a>,
        timeout: Seconds,
    },
    FreeLookupLocks {
        key: CacheKey<'a, T>,
        tp_size: i64,
        /// What earlier lookups of the request have found and not released, as ranges of tokens; none before 0.5.7.
        extra_ranges: Vec<(u64, u64)>,
    },
    EndSession {
        request_id: &'a str,
    },
    RegisterEngineDriven(EngineDrivenContext<'a>),
    UnregisterEngineDriven {
        instance: InstanceId,
    },
    PrepareStore {
        key: CacheKey<'a, T>,
        instance: InstanceId,
        /// Per group, the chunks of the range that the worker will not write; none before 0.5.7.
        skipped_chunks: Vec<Vec<i64>>,
    },
    CommitStore {
        key: CacheKey<'a, T>,
        instance: InstanceId,
        data: &'a [u8],
    },
    PrepareRetrieve {
        key: CacheKey<'a, T>,
        instance: InstanceId,
    },
    CommitRetrieve {
        key: CacheKey<'a, T>,
        instance: InstanceId,
    },
    Clear {
        force: bool,
    },
    GetChunkSize,
    NegotiateChunkSize {
        alignment: i64,
    },
    Ping {
        instance: Option<InstanceId>,
    },
    ReportBlockAllocation(BlockAllocation<'a>),
    Noop,
    GetExperimental,
    /// The objects that are in L1, or come from the tiers within the timeout.
    Find {
        key: CacheKey<'a, T>,
        timeout: Seconds,
    },
    CbRegisterRope(RopeRegistration<'a>),
    CbUnregisterRope {
        instance: InstanceId,
    },
    CbRetrievePreComputed(RetrieveMatched<'a, T>),
    CbUnifiedLookup {
        key: CacheKey<'a, T>,
        tp_size: i64,
    },
    CbReorderPlan {
        key: CacheKey<'a, T>,
        keep_prefix: i64,
        budget_ms: i64,
    },
    CbProtocolHandshake {
        client_version: i64,
    },
    P2pLookupAndLock {
        keys: Vec<ObjectKeyParts<'a>>,
        layouts: Vec<(i64, LayoutDescriptor<'a>)>,
    },
    P2pQueryLookupResults {
        task_id: i64,
    },
    P2pUnlockObjects {
        keys: Vec<ObjectKeyParts<'a>>,
    },
    SubscribeKvEvents(Subscription<'a>),
    ServerModuleCall {
        method: &'a str,
        payload: &'a [u8],
    },
    ServerModuleAffinityCall {
        method: &'a str,
        payload: &'a [u8],
    },
}

/// A worker that shows where its KV pages are.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration<'a> {
    /// The worker.
    pub instance: InstanceId,
    /// One tensor for each layer.
    pub tensors: Vec<TensorDescriptor>,
    /// Model name, as the client decorated it.
    pub model_name: &'a str,
    /// Workers that share the model's KV.
    pub world_size: u32,
    /// The engine; vLLM for releases that do not say.
    pub engine: EngineType,
    /// What the engine knows about the tensors' layout; empty for releases that do not say.
    pub hints: LayoutHints,
    /// Groups of layers with block ids of their own; empty means one group of all tensors.
    pub groups: Vec<EngineGroupInfo>,
}

/// Copy blocks of a worker into the cache.
#[derive(Debug, Clone, PartialEq)]
pub struct Store<'a, T> {
    /// What the blocks hold.
    pub key: CacheKey<'a, T>,
    /// The worker.
    pub instance: InstanceId,
    /// Block ids of each group, in the order of the registration's groups.
    pub block_ids: Vec<Vec<i64>>,
    /// The device event behind which the blocks are complete; see the LMCache 0.5.6 event handles.
    pub event_handle: &'a [u8],
}

/// Copy cached chunks into blocks of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Retrieve<'a, T> {
    /// What to read.
    pub key: CacheKey<'a, T>,
    /// The worker.
    pub instance: InstanceId,
    /// Block ids of each group, in the order of the registration's groups.
    pub block_ids: Vec<Vec<i64>>,
    /// The device event behind which the blocks may be written.
    pub event_handle: &'a [u8],
    /// Tokens at the front of the range whose blocks must not be written.
    pub skip_first_n_tokens: i64,
}

/// Blending: copy matched segments into blocks of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct RetrieveMatched<'a, T> {
    /// The prompt.
    pub key: CacheKey<'a, T>,
    /// Segments of other prompts, and where they go.
    pub matches: Vec<MatchedSegment<'a>>,
    /// Block ids of each group.
    pub block_ids: Vec<Vec<i64>>,
    /// The worker.
    pub instance: InstanceId,
    /// The device event behind which the blocks may be written.
    pub event_handle: &'a [u8],
}

/// Blending: rotary tables of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeRegistration<'a> {
    /// The worker.
    pub instance: InstanceId,
    /// Cosine and sine tables.
    pub caches: Vec<TensorDescriptor>,
    /// Head size.
    pub head_size: i64,
    /// Whether halves are rotated (NeoX) instead of pairs.
    pub is_neox_style: bool,
    /// Table of each group.
    pub group_to_cache: Vec<i64>,
    /// Rotated range of each group.
    pub group_rot: Vec<Vec<i64>>,
    /// Head size of each group.
    pub group_head_size: Vec<i64>,
    /// Name of the KV quantisation, empty for none.
    pub kv_quant: &'a str,
}

/// Telemetry of a scheduler: which blocks its requests got.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockAllocation<'a> {
    /// The scheduler; absent in 0.4.3.
    pub instance: Option<InstanceId>,
    /// The model; absent in 0.4.3.
    pub model_name: Option<&'a str>,
    /// One record for each request.
    pub records: Vec<AllocationRecord<'a>>,
}

/// Open a stream of what was stored and removed.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscription<'a> {
    /// The subscribing worker.
    pub instance: InstanceId,
    /// Only events of this model.
    pub model_name: &'a str,
    /// Last sequence number that it has seen; 0 for the start.
    pub cursor: i64,
    /// Most events in one batch.
    pub max_events: i64,
}

impl Subscription<'_> {
    /// Cursor of kvtier's clients: behind all events, as no log gets there, and with events of medium [`STORAGE`](Self::STORAGE).
    /// Servers without these take it for any other cursor behind all events.
    pub const PRESENT_WITH_TIERS: i64 = i64::MAX - 1;

    /// Medium of a chunk that L1 has.
    pub const CPU: &'static str = "CPU";

    /// Medium of a chunk that a tier has: stored when L1 has lost it, removed when the last tier has. The events have no tokens.
    pub const STORAGE: &'static str = "STORAGE";
}

impl<'a, T> Request<'a, T> {
    /// Decodes the payload frames of a request by its row.
    ///
    /// Fails for a wrong number of frames and for frames that are not what the row says; the error names
    /// the payload and the field in it.
    pub fn decode<R: TokenReader<Output = T>>(
        spec: &OperationSpec,
        payloads: &[&'a [u8]],
        tokens: &mut R,
    ) -> Result<Self, DecodeError> {
        decode::decode(spec, payloads, tokens).map(|(request, _)| request)
    }

    /// Like [`Request::decode`]; also returns the first field of a map that no served release sends. It was skipped.
    pub fn decode_noting_unknown<R: TokenReader<Output = T>>(
        spec: &OperationSpec,
        payloads: &[&'a [u8]],
        tokens: &mut R,
    ) -> Result<(Self, Option<UnknownField<'a>>), DecodeError> {
        decode::decode(spec, payloads, tokens)
    }

    /// The key, if requests of this operation have one.
    #[must_use]
    pub fn key(&self) -> Option<&CacheKey<'a, T>> {
        match self {
            Self::Store(store) | Self::StoreQ(store) => Some(&store.key),
            Self::Retrieve(retrieve) => Some(&retrieve.key),
            Self::CbRetrievePreComputed(retrieve) => Some(&retrieve.key),
            Self::Lookup { key, .. }
            | Self::Find { key, .. }
            | Self::FreeLookupLocks { key, .. }
            | Self::PrepareStore { key, .. }
            | Self::CommitStore { key, .. }
            | Self::PrepareRetrieve { key, .. }
            | Self::CommitRetrieve { key, .. }
            | Self::CbUnifiedLookup { key, .. }
            | Self::CbReorderPlan { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The worker that the request names as its sender.
    #[must_use]
    pub fn instance(&self) -> Option<InstanceId> {
        match self {
            Self::Store(store) | Self::StoreQ(store) => Some(store.instance),
            Self::Retrieve(retrieve) => Some(retrieve.instance),
            Self::CbRetrievePreComputed(retrieve) => Some(retrieve.instance),
            Self::RegisterKvCache(registration) | Self::RegisterQCache(registration) => {
                Some(registration.instance)
            }
            Self::RegisterEngineDriven(context) => Some(context.instance),
            Self::CbRegisterRope(rope) => Some(rope.instance),
            Self::SubscribeKvEvents(subscription) => Some(subscription.instance),
            Self::ReportBlockAllocation(report) => report.instance,
            Self::Ping { instance } => *instance,
            Self::UnregisterKvCache { instance }
            | Self::UnregisterQCache { instance }
            | Self::UnregisterEngineDriven { instance }
            | Self::CbUnregisterRope { instance }
            | Self::PrepareStore { instance, .. }
            | Self::CommitStore { instance, .. }
            | Self::PrepareRetrieve { instance, .. }
            | Self::CommitRetrieve { instance, .. } => Some(*instance),
            _ => None,
        }
    }

    /// The worker that this is a request of, in the operations of every generation.
    pub fn instance_mut(&mut self) -> Option<&mut InstanceId> {
        match self {
            Self::RegisterKvCache(registration) => Some(&mut registration.instance),
            Self::RegisterEngineDriven(context) => Some(&mut context.instance),
            Self::Store(store) => Some(&mut store.instance),
            Self::Retrieve(retrieve) => Some(&mut retrieve.instance),
            Self::UnregisterKvCache { instance }
            | Self::UnregisterEngineDriven { instance }
            | Self::PrepareStore { instance, .. }
            | Self::CommitStore { instance, .. }
            | Self::PrepareRetrieve { instance, .. }
            | Self::CommitRetrieve { instance, .. } => Some(instance),
            Self::Ping { instance } => instance.as_mut(),
            _ => None,
        }
    }

    /// The lookup that this asks about.
    pub fn job_mut(&mut self) -> Option<&mut JobRef<'a>> {
        match self {
            Self::QueryPrefetchStatus { job }
            | Self::QueryPrefetchLookupHits { job }
            | Self::WaitPrefetchStatus { job, .. } => Some(job),
            _ => None,
        }
    }
}

impl<T> Request<'_, T> {
    /// The operation this is a request of.
    #[must_use]
    pub fn operation(&self) -> Operation {
        macro_rules! same_name {
            ($($(#[$doc:meta])* $operation:ident = $name:literal,)*) => {
                match self {
                    $(Self::$operation { .. } => Operation::$operation,)*
                }
            };
        }
        operations!(same_name)
    }
}

impl<T: TokenWriter> Request<'_, T> {
    /// Encodes the payload frames of this request by a row of its operation.
    ///
    /// A value for which the row has no field is dropped if it only adds detail (layout hints, the worker
    /// behind a ping), and an error if the request would mean something else without it. The row must be
    /// one of this request's operation.
    pub fn encode(&self, spec: &OperationSpec) -> Result<Vec<Vec<u8>>, EncodeError> {
        encode::encode(self, spec)
    }
}
