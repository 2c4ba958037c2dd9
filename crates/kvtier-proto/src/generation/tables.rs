//! The tables: one row an operation, more where releases of a generation differ in its payloads.
//!
//! Numbers and payloads are those of the LMCache releases that [`Generation::releases`] names. The first
//! row of an operation is the one its newest release sends, but for the rows of 0.5.7, which stand last: kvtier's own client
//! sends those of 0.5.6. Blending and server-to-server operations stand only in the newest table, with the numbers of 0.5.5
//! and later.

use super::{BlockForm, ContextForm, Field, Generation, OperationSpec};
use crate::key::KeyForm;
use crate::operation::Operation::{self, *};
use crate::response::ResponseKind as Kind;

/// The table of a generation.
pub(super) fn table(generation: Generation) -> &'static [OperationSpec] {
    match generation {
        Generation::G1 => G1,
        Generation::G2 => G2,
        Generation::G3 => G3,
        Generation::G4 => G4,
        Generation::G5 => G5,
        Generation::G6 => G6,
    }
}

const fn row(
    number: u16,
    operation: Operation,
    payloads: &'static [Field],
    response: Kind,
) -> OperationSpec {
    OperationSpec {
        number: Some(number),
        operation,
        payloads,
        response,
    }
}

const fn named(operation: Operation, payloads: &'static [Field], response: Kind) -> OperationSpec {
    OperationSpec {
        number: None,
        operation,
        payloads,
        response,
    }
}

// Payload lists that several rows share. The suffix names the form of the key or the list.

const INSTANCE: &[Field] = &[Field::InstanceId];
const REQUEST: &[Field] = &[Field::RequestId];
const JOB: &[Field] = &[Field::JobId];
const WAIT: &[Field] = &[Field::RequestId, Field::Timeout];
const MAYBE_INSTANCE: &[Field] = &[Field::OptionalInstanceId];
const FLAT: Field = Field::BlockIds(BlockForm::Flat);
const GROUPED: Field = Field::BlockIds(BlockForm::Grouped);

const REPORT: &[Field] = &[
    Field::InstanceId,
    Field::ModelName,
    Field::AllocationRecords,
];

/// 0.4.2.
const REGISTER_BARE: &[Field] = &[
    Field::InstanceId,
    Field::Tensors,
    Field::ModelName,
    Field::WorldSize,
];
/// 0.4.3 and 0.4.4.
const REGISTER_HINTS: &[Field] = &[
    Field::InstanceId,
    Field::Tensors,
    Field::ModelName,
    Field::WorldSize,
    Field::LayoutHints,
];
/// 0.4.5 and 0.4.6.
const REGISTER_ENGINE: &[Field] = &[
    Field::InstanceId,
    Field::Tensors,
    Field::ModelName,
    Field::WorldSize,
    Field::EngineType,
    Field::LayoutHints,
];
/// From 0.4.7.
const REGISTER: &[Field] = &[
    Field::InstanceId,
    Field::Tensors,
    Field::ModelName,
    Field::WorldSize,
    Field::EngineType,
    Field::LayoutHints,
    Field::GroupInfos,
];

const CONTEXT: &[Field] = &[Field::EngineDrivenContext(ContextForm::Bare)];
const CONTEXT_SLOTS: &[Field] = &[Field::EngineDrivenContext(ContextForm::Slots)];
const CONTEXT_GROUPS: &[Field] = &[Field::EngineDrivenContext(ContextForm::Groups)];

const fn store(form: KeyForm, blocks: Field) -> [Field; 4] {
    [
        Field::Key(form),
        Field::InstanceId,
        blocks,
        Field::EventHandle,
    ]
}
const STORE_UNSALTED: &[Field] = &store(KeyForm::Unsalted, FLAT);
const STORE_FLAT: &[Field] = &store(KeyForm::Salted, FLAT);
const STORE_SALTED: &[Field] = &store(KeyForm::Salted, GROUPED);
const STORE: &[Field] = &store(KeyForm::Full, GROUPED);

const fn retrieve(form: KeyForm, blocks: Field) -> [Field; 5] {
    [
        Field::Key(form),
        Field::InstanceId,
        blocks,
        Field::EventHandle,
        Field::SkipTokens,
    ]
}
const RETRIEVE_UNSALTED: &[Field] = &retrieve(KeyForm::Unsalted, FLAT);
const RETRIEVE_FLAT: &[Field] = &retrieve(KeyForm::Salted, FLAT);
const RETRIEVE_SALTED: &[Field] = &retrieve(KeyForm::Salted, GROUPED);
const RETRIEVE: &[Field] = &retrieve(KeyForm::Full, GROUPED);

const KEY_SIZE_UNSALTED: &[Field] = &[Field::Key(KeyForm::Unsalted), Field::TpSize];
const KEY_SIZE_SALTED: &[Field] = &[Field::Key(KeyForm::Salted), Field::TpSize];
const KEY_SIZE: &[Field] = &[Field::Key(KeyForm::Full), Field::TpSize];

const KEY_INSTANCE_SALTED: &[Field] = &[Field::Key(KeyForm::Salted), Field::InstanceId];
const KEY_INSTANCE: &[Field] = &[Field::Key(KeyForm::Full), Field::InstanceId];

const COMMIT_SALTED: &[Field] = &[Field::Key(KeyForm::Salted), Field::InstanceId, Field::Data];
const COMMIT: &[Field] = &[Field::Key(KeyForm::Full), Field::InstanceId, Field::Data];

// From 0.5.7.
const STORE_PACKED: &[Field] = &store(KeyForm::Packed, GROUPED);
const RETRIEVE_PACKED: &[Field] = &retrieve(KeyForm::Packed, GROUPED);
const KEY_SIZE_PACKED: &[Field] = &[Field::Key(KeyForm::Packed), Field::TpSize];
const FREE_PACKED: &[Field] = &[
    Field::Key(KeyForm::Packed),
    Field::TpSize,
    Field::ExtraRanges,
];
const PREPARE_STORE_PACKED: &[Field] = &[
    Field::Key(KeyForm::Packed),
    Field::InstanceId,
    Field::SkippedChunks,
];
const KEY_INSTANCE_PACKED: &[Field] = &[Field::Key(KeyForm::Packed), Field::InstanceId];
const COMMIT_PACKED: &[Field] = &[Field::Key(KeyForm::Packed), Field::InstanceId, Field::Data];

/// 0.4.2. Keys without a salt; a lookup returns the job that queries name.
const G1: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER_BARE, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, Store, STORE_UNSALTED, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_UNSALTED, Kind::Transfer),
    row(5, Lookup, KEY_SIZE_UNSALTED, Kind::Int),
    row(6, QueryPrefetchStatus, JOB, Kind::OptionalInt),
    row(7, FreeLookupLocks, KEY_SIZE_UNSALTED, Kind::Nothing),
    row(8, EndSession, REQUEST, Kind::Nothing),
    row(9, Clear, &[], Kind::Nothing),
    row(10, GetChunkSize, &[], Kind::Int),
    row(11, Ping, &[], Kind::Bool),
    row(12, Noop, &[], Kind::Text),
];

/// 0.4.3 to 0.4.5. The salt came with 0.4.4, the engine type with 0.4.5.
const G2: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER_ENGINE, Kind::Nothing),
    row(1, RegisterKvCache, REGISTER_HINTS, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, Store, STORE_FLAT, Kind::Transfer),
    row(3, Store, STORE_UNSALTED, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_FLAT, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_UNSALTED, Kind::Transfer),
    row(5, Lookup, KEY_SIZE_SALTED, Kind::Nothing),
    row(5, Lookup, KEY_SIZE_UNSALTED, Kind::Int),
    row(6, QueryPrefetchStatus, REQUEST, Kind::OptionalInt),
    row(6, QueryPrefetchStatus, JOB, Kind::OptionalInt),
    row(7, QueryPrefetchLookupHits, REQUEST, Kind::OptionalInt),
    row(7, QueryPrefetchLookupHits, JOB, Kind::OptionalInt),
    row(8, FreeLookupLocks, KEY_SIZE_SALTED, Kind::Nothing),
    row(8, FreeLookupLocks, KEY_SIZE_UNSALTED, Kind::Nothing),
    row(9, EndSession, REQUEST, Kind::Nothing),
    row(10, Clear, &[], Kind::Nothing),
    row(11, GetChunkSize, &[], Kind::Int),
    row(12, Ping, &[], Kind::Bool),
    row(13, ReportBlockAllocation, REPORT, Kind::Nothing),
    row(
        13,
        ReportBlockAllocation,
        &[Field::AllocationRecords],
        Kind::Nothing,
    ),
    row(14, Noop, &[], Kind::Text),
];

/// 0.4.6. Engine-driven mode begins, pickled only: its registration returns nothing.
const G3: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER_ENGINE, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, Store, STORE_FLAT, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_FLAT, Kind::Transfer),
    row(5, Lookup, KEY_SIZE_SALTED, Kind::Nothing),
    row(6, QueryPrefetchStatus, REQUEST, Kind::OptionalInt),
    row(7, QueryPrefetchLookupHits, REQUEST, Kind::OptionalInt),
    row(8, FreeLookupLocks, KEY_SIZE_SALTED, Kind::Nothing),
    row(9, EndSession, REQUEST, Kind::Nothing),
    row(10, RegisterEngineDriven, CONTEXT, Kind::Nothing),
    row(11, PrepareStore, KEY_INSTANCE_SALTED, Kind::PrepareStore),
    row(12, CommitStore, COMMIT_SALTED, Kind::Bool),
    row(
        13,
        PrepareRetrieve,
        KEY_INSTANCE_SALTED,
        Kind::PrepareRetrieve,
    ),
    row(14, CommitRetrieve, KEY_INSTANCE_SALTED, Kind::Bool),
    row(15, Clear, &[], Kind::Nothing),
    row(16, GetChunkSize, &[], Kind::Int),
    row(17, Ping, &[], Kind::Bool),
    row(18, ReportBlockAllocation, REPORT, Kind::Nothing),
    row(19, Noop, &[], Kind::Text),
];

/// 0.4.7. Block ids and registrations have groups.
const G4: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, Store, STORE_SALTED, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_SALTED, Kind::Transfer),
    row(5, Lookup, KEY_SIZE_SALTED, Kind::Nothing),
    row(6, QueryPrefetchStatus, REQUEST, Kind::OptionalInt),
    row(7, QueryPrefetchLookupHits, REQUEST, Kind::OptionalInt),
    row(8, FreeLookupLocks, KEY_SIZE_SALTED, Kind::Nothing),
    row(9, EndSession, REQUEST, Kind::Nothing),
    row(10, RegisterEngineDriven, CONTEXT, Kind::EngineDriven),
    row(11, UnregisterEngineDriven, INSTANCE, Kind::Nothing),
    row(12, PrepareStore, KEY_INSTANCE_SALTED, Kind::PrepareStore),
    row(13, CommitStore, COMMIT_SALTED, Kind::Bool),
    row(
        14,
        PrepareRetrieve,
        KEY_INSTANCE_SALTED,
        Kind::PrepareRetrieve,
    ),
    row(15, CommitRetrieve, KEY_INSTANCE_SALTED, Kind::Bool),
    row(16, Clear, &[], Kind::Nothing),
    row(17, GetChunkSize, &[], Kind::Int),
    row(18, Ping, &[], Kind::Bool),
    row(19, ReportBlockAllocation, REPORT, Kind::Nothing),
    row(20, Noop, &[], Kind::Text),
];

/// 0.5.0 to 0.5.2. Pings name the worker.
const G5: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, Store, STORE_SALTED, Kind::Transfer),
    row(4, Retrieve, RETRIEVE_SALTED, Kind::Transfer),
    row(5, Lookup, KEY_SIZE_SALTED, Kind::Nothing),
    row(6, QueryPrefetchStatus, REQUEST, Kind::OptionalInt),
    row(7, WaitPrefetchStatus, WAIT, Kind::OptionalInt),
    row(8, QueryPrefetchLookupHits, REQUEST, Kind::OptionalInt),
    row(9, FreeLookupLocks, KEY_SIZE_SALTED, Kind::Nothing),
    row(10, EndSession, REQUEST, Kind::Nothing),
    row(11, RegisterEngineDriven, CONTEXT, Kind::EngineDriven),
    row(12, UnregisterEngineDriven, INSTANCE, Kind::Nothing),
    row(13, PrepareStore, KEY_INSTANCE_SALTED, Kind::PrepareStore),
    row(14, CommitStore, COMMIT_SALTED, Kind::Bool),
    row(
        15,
        PrepareRetrieve,
        KEY_INSTANCE_SALTED,
        Kind::PrepareRetrieve,
    ),
    row(16, CommitRetrieve, KEY_INSTANCE_SALTED, Kind::Bool),
    row(17, Clear, &[], Kind::Nothing),
    row(18, GetChunkSize, &[], Kind::Int),
    row(19, Ping, MAYBE_INSTANCE, Kind::Bool),
    row(20, ReportBlockAllocation, REPORT, Kind::Nothing),
    row(21, Noop, &[], Kind::Text),
];

/// 0.5.3 to 0.5.7. The key became full with 0.5.5; 0.5.6 describes tensors instead of pickling them, also takes names and
/// has no number 11; 0.5.7 packs the token ids of keys.
const G6: &[OperationSpec] = &[
    row(1, RegisterKvCache, REGISTER, Kind::Nothing),
    row(2, UnregisterKvCache, INSTANCE, Kind::Nothing),
    row(3, RegisterQCache, REGISTER, Kind::Nothing),
    row(4, UnregisterQCache, INSTANCE, Kind::Nothing),
    row(5, StoreQ, STORE, Kind::Transfer),
    row(6, Store, STORE, Kind::Transfer),
    row(7, Retrieve, RETRIEVE, Kind::Transfer),
    row(8, Lookup, KEY_SIZE, Kind::Nothing),
    row(9, QueryPrefetchStatus, REQUEST, Kind::OptionalInt),
    row(10, WaitPrefetchStatus, WAIT, Kind::OptionalInt),
    row(11, QueryPrefetchLookupHits, REQUEST, Kind::OptionalInt),
    row(12, FreeLookupLocks, KEY_SIZE, Kind::Nothing),
    row(13, EndSession, REQUEST, Kind::Nothing),
    row(14, RegisterEngineDriven, CONTEXT_SLOTS, Kind::EngineDriven),
    row(14, RegisterEngineDriven, CONTEXT_GROUPS, Kind::EngineDriven),
    row(15, UnregisterEngineDriven, INSTANCE, Kind::Nothing),
    row(16, PrepareStore, KEY_INSTANCE, Kind::PrepareStore),
    row(17, CommitStore, COMMIT, Kind::Bool),
    row(18, PrepareRetrieve, KEY_INSTANCE, Kind::PrepareRetrieve),
    row(19, CommitRetrieve, KEY_INSTANCE, Kind::Bool),
    row(20, Clear, &[Field::Force], Kind::Nothing),
    // Before 0.5.6 a clear had no payload and always forced.
    row(20, Clear, &[], Kind::Nothing),
    row(21, GetChunkSize, &[], Kind::Int),
    row(22, Ping, MAYBE_INSTANCE, Kind::Bool),
    row(23, ReportBlockAllocation, REPORT, Kind::Nothing),
    row(24, Noop, &[], Kind::Text),
    row(
        25,
        CbRegisterRope,
        &[
            Field::InstanceId,
            Field::Tensors,
            Field::HeadSize,
            Field::IsNeoxStyle,
            Field::GroupToCache,
            Field::GroupRot,
            Field::GroupHeadSize,
            Field::KvQuant,
        ],
        Kind::Nothing,
    ),
    row(26, CbUnregisterRope, INSTANCE, Kind::Nothing),
    row(
        27,
        CbRetrievePreComputed,
        &[
            Field::Key(KeyForm::Full),
            Field::MatchedSegments,
            GROUPED,
            Field::InstanceId,
            Field::EventHandle,
        ],
        Kind::Transfer,
    ),
    row(28, CbUnifiedLookup, KEY_SIZE, Kind::UnifiedLookup),
    row(
        29,
        P2pLookupAndLock,
        &[Field::ObjectKeys, Field::LayoutDescriptors],
        Kind::Int,
    ),
    row(30, P2pQueryLookupResults, &[Field::TaskId], Kind::Addresses),
    row(31, P2pUnlockObjects, &[Field::ObjectKeys], Kind::Nothing),
    row(32, GetExperimental, &[], Kind::Texts),
    row(
        33,
        CbProtocolHandshake,
        &[Field::ClientVersion],
        Kind::Handshake,
    ),
    // 0.5.3 and 0.5.4.
    row(40, GetExperimental, &[], Kind::Texts),
    named(
        CbReorderPlan,
        &[
            Field::Key(KeyForm::Full),
            Field::KeepPrefix,
            Field::BudgetMs,
        ],
        Kind::Ints,
    ),
    named(
        SubscribeKvEvents,
        &[
            Field::InstanceId,
            Field::ModelName,
            Field::Cursor,
            Field::MaxEvents,
        ],
        Kind::EventBatch,
    ),
    named(ServerModuleCall, &[Field::ModuleCall], Kind::ModuleCall),
    // 0.5.7.
    row(6, Store, STORE_PACKED, Kind::Transfer),
    row(7, Retrieve, RETRIEVE_PACKED, Kind::Transfer),
    row(8, Lookup, KEY_SIZE_PACKED, Kind::Nothing),
    row(12, FreeLookupLocks, FREE_PACKED, Kind::Nothing),
    row(16, PrepareStore, PREPARE_STORE_PACKED, Kind::PrepareStore),
    row(17, CommitStore, COMMIT_PACKED, Kind::Bool),
    row(
        18,
        PrepareRetrieve,
        KEY_INSTANCE_PACKED,
        Kind::PrepareRetrieve,
    ),
    row(19, CommitRetrieve, KEY_INSTANCE_PACKED, Kind::Bool),
    named(
        Find,
        &[Field::Key(KeyForm::Full), Field::Timeout],
        Kind::Bits,
    ),
    named(NegotiateChunkSize, &[Field::ChunkAlignment], Kind::Int),
    named(
        ServerModuleAffinityCall,
        &[Field::ModuleCall],
        Kind::ModuleCall,
    ),
];
