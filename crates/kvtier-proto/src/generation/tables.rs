//! The tables: one row an operation, more where releases of a generation differ in its payloads.
//!
//! Numbers and payloads are those of the LMCache releases that [`Generation::releases`] names. The first
//! row of an operation is the one its newest release sends, but for the rows of 0.5.7, which stand last: kvtier's own client
//! sends those of 0.5.6. Blending and server-to-server operations stand only in the newest table, with the numbers of 0.5.5
//! and later.

use super::Field::{self, *};
use super::{BlockForm, ContextForm, Generation, OperationSpec};
use crate::key::KeyForm;
use crate::operation::Operation;
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

/// Rows of a table, as `number operation(payloads) -> response`; what has a name and no number has `_` in its place.
macro_rules! rows {
    ($($number:tt $operation:ident($payloads:expr) -> $response:ident;)*) => {
        &[$(OperationSpec {
            number: rows!(@ $number),
            operation: Operation::$operation,
            payloads: $payloads,
            response: Kind::$response,
        }),*]
    };
    (@ _) => { None };
    (@ $number:literal) => { Some($number) };
}

// Payload lists that several rows share. The suffix names the form of the key or the list.

const INSTANCE: &[Field] = &[InstanceId];
const REQUEST: &[Field] = &[RequestId];
const JOB: &[Field] = &[JobId];
const WAIT: &[Field] = &[RequestId, Timeout];
const MAYBE_INSTANCE: &[Field] = &[OptionalInstanceId];
const FLAT: Field = BlockIds(BlockForm::Flat);
const GROUPED: Field = BlockIds(BlockForm::Grouped);

const REPORT: &[Field] = &[InstanceId, ModelName, AllocationRecords];

/// 0.4.2.
const REGISTER_BARE: &[Field] = &[InstanceId, Tensors, ModelName, WorldSize];
/// 0.4.3 and 0.4.4.
const REGISTER_HINTS: &[Field] = &[InstanceId, Tensors, ModelName, WorldSize, LayoutHints];
/// 0.4.5 and 0.4.6.
const REGISTER_ENGINE: &[Field] = &[
    InstanceId,
    Tensors,
    ModelName,
    WorldSize,
    EngineType,
    LayoutHints,
];
/// From 0.4.7.
const REGISTER: &[Field] = &[
    InstanceId,
    Tensors,
    ModelName,
    WorldSize,
    EngineType,
    LayoutHints,
    GroupInfos,
];

const CONTEXT: &[Field] = &[EngineDrivenContext(ContextForm::Bare)];
const CONTEXT_SLOTS: &[Field] = &[EngineDrivenContext(ContextForm::Slots)];
const CONTEXT_GROUPS: &[Field] = &[EngineDrivenContext(ContextForm::Groups)];

const fn store(form: KeyForm, blocks: Field) -> [Field; 4] {
    [Key(form), InstanceId, blocks, EventHandle]
}
const STORE_UNSALTED: &[Field] = &store(KeyForm::Unsalted, FLAT);
const STORE_FLAT: &[Field] = &store(KeyForm::Salted, FLAT);
const STORE_SALTED: &[Field] = &store(KeyForm::Salted, GROUPED);
const STORE: &[Field] = &store(KeyForm::Full, GROUPED);

const fn retrieve(form: KeyForm, blocks: Field) -> [Field; 5] {
    [Key(form), InstanceId, blocks, EventHandle, SkipTokens]
}
const RETRIEVE_UNSALTED: &[Field] = &retrieve(KeyForm::Unsalted, FLAT);
const RETRIEVE_FLAT: &[Field] = &retrieve(KeyForm::Salted, FLAT);
const RETRIEVE_SALTED: &[Field] = &retrieve(KeyForm::Salted, GROUPED);
const RETRIEVE: &[Field] = &retrieve(KeyForm::Full, GROUPED);

const KEY_SIZE_UNSALTED: &[Field] = &[Key(KeyForm::Unsalted), TpSize];
const KEY_SIZE_SALTED: &[Field] = &[Key(KeyForm::Salted), TpSize];
const KEY_SIZE: &[Field] = &[Key(KeyForm::Full), TpSize];

const KEY_INSTANCE_SALTED: &[Field] = &[Key(KeyForm::Salted), InstanceId];
const KEY_INSTANCE: &[Field] = &[Key(KeyForm::Full), InstanceId];

const COMMIT_SALTED: &[Field] = &[Key(KeyForm::Salted), InstanceId, Data];
const COMMIT: &[Field] = &[Key(KeyForm::Full), InstanceId, Data];

// From 0.5.7.
const STORE_PACKED: &[Field] = &store(KeyForm::Packed, GROUPED);
const RETRIEVE_PACKED: &[Field] = &retrieve(KeyForm::Packed, GROUPED);
const KEY_SIZE_PACKED: &[Field] = &[Key(KeyForm::Packed), TpSize];
const FREE_PACKED: &[Field] = &[Key(KeyForm::Packed), TpSize, ExtraRanges];
const PREPARE_STORE_PACKED: &[Field] = &[Key(KeyForm::Packed), InstanceId, SkippedChunks];
const KEY_INSTANCE_PACKED: &[Field] = &[Key(KeyForm::Packed), InstanceId];
const COMMIT_PACKED: &[Field] = &[Key(KeyForm::Packed), InstanceId, Data];

/// 0.4.2. Keys without a salt; a lookup returns the job that queries name.
const G1: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER_BARE) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 Store(STORE_UNSALTED) -> Transfer;
    4 Retrieve(RETRIEVE_UNSALTED) -> Transfer;
    5 Lookup(KEY_SIZE_UNSALTED) -> Int;
    6 QueryPrefetchStatus(JOB) -> OptionalInt;
    7 FreeLookupLocks(KEY_SIZE_UNSALTED) -> Nothing;
    8 EndSession(REQUEST) -> Nothing;
    9 Clear(&[]) -> Nothing;
    10 GetChunkSize(&[]) -> Int;
    11 Ping(&[]) -> Bool;
    12 Noop(&[]) -> Text;
};

/// 0.4.3 to 0.4.5. The salt came with 0.4.4, the engine type with 0.4.5.
const G2: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER_ENGINE) -> Nothing;
    1 RegisterKvCache(REGISTER_HINTS) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 Store(STORE_FLAT) -> Transfer;
    3 Store(STORE_UNSALTED) -> Transfer;
    4 Retrieve(RETRIEVE_FLAT) -> Transfer;
    4 Retrieve(RETRIEVE_UNSALTED) -> Transfer;
    5 Lookup(KEY_SIZE_SALTED) -> Nothing;
    5 Lookup(KEY_SIZE_UNSALTED) -> Int;
    6 QueryPrefetchStatus(REQUEST) -> OptionalInt;
    6 QueryPrefetchStatus(JOB) -> OptionalInt;
    7 QueryPrefetchLookupHits(REQUEST) -> OptionalInt;
    7 QueryPrefetchLookupHits(JOB) -> OptionalInt;
    8 FreeLookupLocks(KEY_SIZE_SALTED) -> Nothing;
    8 FreeLookupLocks(KEY_SIZE_UNSALTED) -> Nothing;
    9 EndSession(REQUEST) -> Nothing;
    10 Clear(&[]) -> Nothing;
    11 GetChunkSize(&[]) -> Int;
    12 Ping(&[]) -> Bool;
    13 ReportBlockAllocation(REPORT) -> Nothing;
    13 ReportBlockAllocation(&[AllocationRecords]) -> Nothing;
    14 Noop(&[]) -> Text;
};

/// 0.4.6. Engine-driven mode begins, pickled only: its registration returns nothing.
const G3: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER_ENGINE) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 Store(STORE_FLAT) -> Transfer;
    4 Retrieve(RETRIEVE_FLAT) -> Transfer;
    5 Lookup(KEY_SIZE_SALTED) -> Nothing;
    6 QueryPrefetchStatus(REQUEST) -> OptionalInt;
    7 QueryPrefetchLookupHits(REQUEST) -> OptionalInt;
    8 FreeLookupLocks(KEY_SIZE_SALTED) -> Nothing;
    9 EndSession(REQUEST) -> Nothing;
    10 RegisterEngineDriven(CONTEXT) -> Nothing;
    11 PrepareStore(KEY_INSTANCE_SALTED) -> PrepareStore;
    12 CommitStore(COMMIT_SALTED) -> Bool;
    13 PrepareRetrieve(KEY_INSTANCE_SALTED) -> PrepareRetrieve;
    14 CommitRetrieve(KEY_INSTANCE_SALTED) -> Bool;
    15 Clear(&[]) -> Nothing;
    16 GetChunkSize(&[]) -> Int;
    17 Ping(&[]) -> Bool;
    18 ReportBlockAllocation(REPORT) -> Nothing;
    19 Noop(&[]) -> Text;
};

/// 0.4.7. Block ids and registrations have groups.
const G4: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 Store(STORE_SALTED) -> Transfer;
    4 Retrieve(RETRIEVE_SALTED) -> Transfer;
    5 Lookup(KEY_SIZE_SALTED) -> Nothing;
    6 QueryPrefetchStatus(REQUEST) -> OptionalInt;
    7 QueryPrefetchLookupHits(REQUEST) -> OptionalInt;
    8 FreeLookupLocks(KEY_SIZE_SALTED) -> Nothing;
    9 EndSession(REQUEST) -> Nothing;
    10 RegisterEngineDriven(CONTEXT) -> EngineDriven;
    11 UnregisterEngineDriven(INSTANCE) -> Nothing;
    12 PrepareStore(KEY_INSTANCE_SALTED) -> PrepareStore;
    13 CommitStore(COMMIT_SALTED) -> Bool;
    14 PrepareRetrieve(KEY_INSTANCE_SALTED) -> PrepareRetrieve;
    15 CommitRetrieve(KEY_INSTANCE_SALTED) -> Bool;
    16 Clear(&[]) -> Nothing;
    17 GetChunkSize(&[]) -> Int;
    18 Ping(&[]) -> Bool;
    19 ReportBlockAllocation(REPORT) -> Nothing;
    20 Noop(&[]) -> Text;
};

/// 0.5.0 to 0.5.2. Pings name the worker.
const G5: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 Store(STORE_SALTED) -> Transfer;
    4 Retrieve(RETRIEVE_SALTED) -> Transfer;
    5 Lookup(KEY_SIZE_SALTED) -> Nothing;
    6 QueryPrefetchStatus(REQUEST) -> OptionalInt;
    7 WaitPrefetchStatus(WAIT) -> OptionalInt;
    8 QueryPrefetchLookupHits(REQUEST) -> OptionalInt;
    9 FreeLookupLocks(KEY_SIZE_SALTED) -> Nothing;
    10 EndSession(REQUEST) -> Nothing;
    11 RegisterEngineDriven(CONTEXT) -> EngineDriven;
    12 UnregisterEngineDriven(INSTANCE) -> Nothing;
    13 PrepareStore(KEY_INSTANCE_SALTED) -> PrepareStore;
    14 CommitStore(COMMIT_SALTED) -> Bool;
    15 PrepareRetrieve(KEY_INSTANCE_SALTED) -> PrepareRetrieve;
    16 CommitRetrieve(KEY_INSTANCE_SALTED) -> Bool;
    17 Clear(&[]) -> Nothing;
    18 GetChunkSize(&[]) -> Int;
    19 Ping(MAYBE_INSTANCE) -> Bool;
    20 ReportBlockAllocation(REPORT) -> Nothing;
    21 Noop(&[]) -> Text;
};

/// 0.5.3 to 0.5.7. The key became full with 0.5.5; 0.5.6 describes tensors instead of pickling them, also takes names and
/// has no number 11; 0.5.7 packs the token ids of keys.
const G6: &[OperationSpec] = rows! {
    1 RegisterKvCache(REGISTER) -> Nothing;
    2 UnregisterKvCache(INSTANCE) -> Nothing;
    3 RegisterQCache(REGISTER) -> Nothing;
    4 UnregisterQCache(INSTANCE) -> Nothing;
    5 StoreQ(STORE) -> Transfer;
    6 Store(STORE) -> Transfer;
    7 Retrieve(RETRIEVE) -> Transfer;
    8 Lookup(KEY_SIZE) -> Nothing;
    9 QueryPrefetchStatus(REQUEST) -> OptionalInt;
    10 WaitPrefetchStatus(WAIT) -> OptionalInt;
    11 QueryPrefetchLookupHits(REQUEST) -> OptionalInt;
    12 FreeLookupLocks(KEY_SIZE) -> Nothing;
    13 EndSession(REQUEST) -> Nothing;
    14 RegisterEngineDriven(CONTEXT_SLOTS) -> EngineDriven;
    14 RegisterEngineDriven(CONTEXT_GROUPS) -> EngineDriven;
    15 UnregisterEngineDriven(INSTANCE) -> Nothing;
    16 PrepareStore(KEY_INSTANCE) -> PrepareStore;
    17 CommitStore(COMMIT) -> Bool;
    18 PrepareRetrieve(KEY_INSTANCE) -> PrepareRetrieve;
    19 CommitRetrieve(KEY_INSTANCE) -> Bool;
    20 Clear(&[Force]) -> Nothing;
    // Before 0.5.6 a clear had no payload and always forced.
    20 Clear(&[]) -> Nothing;
    21 GetChunkSize(&[]) -> Int;
    22 Ping(MAYBE_INSTANCE) -> Bool;
    23 ReportBlockAllocation(REPORT) -> Nothing;
    24 Noop(&[]) -> Text;
    25 CbRegisterRope(&[InstanceId, Tensors, HeadSize, IsNeoxStyle, GroupToCache, GroupRot, GroupHeadSize, KvQuant]) -> Nothing;
    26 CbUnregisterRope(INSTANCE) -> Nothing;
    27 CbRetrievePreComputed(&[Key(KeyForm::Full), MatchedSegments, GROUPED, InstanceId, EventHandle]) -> Transfer;
    28 CbUnifiedLookup(KEY_SIZE) -> UnifiedLookup;
    29 P2pLookupAndLock(&[ObjectKeys, LayoutDescriptors]) -> Int;
    30 P2pQueryLookupResults(&[TaskId]) -> Addresses;
    31 P2pUnlockObjects(&[ObjectKeys]) -> Nothing;
    32 GetExperimental(&[]) -> Texts;
    33 CbProtocolHandshake(&[ClientVersion]) -> Handshake;
    // 0.5.3 and 0.5.4.
    40 GetExperimental(&[]) -> Texts;
    _ CbReorderPlan(&[Key(KeyForm::Full), KeepPrefix, BudgetMs]) -> Ints;
    _ SubscribeKvEvents(&[InstanceId, ModelName, Cursor, MaxEvents]) -> EventBatch;
    _ ServerModuleCall(&[ModuleCall]) -> ModuleCall;
    // 0.5.7.
    6 Store(STORE_PACKED) -> Transfer;
    7 Retrieve(RETRIEVE_PACKED) -> Transfer;
    8 Lookup(KEY_SIZE_PACKED) -> Nothing;
    12 FreeLookupLocks(FREE_PACKED) -> Nothing;
    16 PrepareStore(PREPARE_STORE_PACKED) -> PrepareStore;
    17 CommitStore(COMMIT_PACKED) -> Bool;
    18 PrepareRetrieve(KEY_INSTANCE_PACKED) -> PrepareRetrieve;
    19 CommitRetrieve(KEY_INSTANCE_PACKED) -> Bool;
    _ Find(&[Key(KeyForm::Full), Timeout]) -> Bits;
    _ NegotiateChunkSize(&[ChunkAlignment]) -> Int;
    _ ServerModuleAffinityCall(&[ModuleCall]) -> ModuleCall;
};
