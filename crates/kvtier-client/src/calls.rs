//! Typed calls: one for each operation that a server of LMCache 0.5.6 serves without optional features.
//!
//! [`typed_calls!`] is the table: each row is a request and the function that reads its reply, and becomes a method of
//! [`Connection`], which blocks until the reply, and one of [`Client`], which returns a future at once.

use std::time::Duration;

use kvtier_proto::key::{CacheKey, EncodedTokens, TokenWriter};
use kvtier_proto::request::{
    AllocationRecord, BlockAllocation, EngineDrivenContext, InstanceId, JobRef, Registration,
    Request, Retrieve, Seconds, Store,
};
use kvtier_proto::response::{EngineDriven, PrepareRetrieve, PrepareStore};

use crate::answers;
use crate::client::{Client, Future};
use crate::connection::Connection;
use crate::error::ClientError;

/// What a CPU worker sends as its device event, which is complete by definition (LMCache 0.5.6).
const CPU_EVENT: &[u8] = b"stub_ipc_handle";

/// A request without a key.
pub type Keyless<'a> = Request<'a, EncodedTokens<'a>>;

/// Defines each call as a method of [`Connection`] and as one of [`Client`].
macro_rules! typed_calls {
    ($(
        $(#[$doc:meta])*
        fn $name:ident $(<$tokens:ident>)? ($($argument:ident: $type:ty),*) -> $result:ty {
            $request:expr => $read:path
        }
    )*) => {
        /// Calls that wait for the reply. Errors are those of [`Connection::call`].
        #[expect(clippy::missing_errors_doc, reason = "the same for all, above")]
        impl Connection {
            $(
                $(#[$doc])*
                pub fn $name $(<$tokens: TokenWriter + Clone>)? (
                    &mut self, $($argument: $type),*
                ) -> Result<$result, ClientError> {
                    $read(&self.call(&$request)?)
                }
            )*
        }

        /// Calls that return at once. The deadline of each is [`Client::timeout`].
        impl Client {
            $(
                $(#[$doc])*
                pub fn $name $(<$tokens: TokenWriter + Clone>)? (
                    &self, $($argument: $type),*
                ) -> Future<$result> {
                    self.ask(&$request, $read)
                }
            )*
        }
    };
}

typed_calls! {
    /// Tokens per chunk.
    fn get_chunk_size() -> usize {
        Keyless::GetChunkSize => answers::chunk_size
    }

    /// Names of the optional features that are on.
    fn get_experimental() -> Vec<String> {
        Keyless::GetExperimental => answers::texts
    }

    /// The server's `OK`.
    fn noop() -> String {
        Keyless::Noop => answers::text
    }

    /// Whether the server is alive. For a worker, false means that it must register (again).
    fn ping(instance: Option<InstanceId>) -> bool {
        Keyless::Ping { instance } => answers::truth
    }

    /// Drops what is cached in memory: what is not leased, or with `force` all of it.
    fn clear(force: bool) -> () {
        Keyless::Clear { force } => answers::nothing
    }

    /// Reports which blocks the engine allocated to requests.
    fn report_block_allocation(
        instance: InstanceId, model_name: &str, records: Vec<AllocationRecord<'_>>
    ) -> () {
        Keyless::ReportBlockAllocation(BlockAllocation {
            instance: Some(instance),
            model_name: Some(model_name),
            records,
        }) => answers::nothing
    }

    /// Starts a lookup. `query_prefetch_status` returns its result; `lookup_hits` does both.
    fn lookup<T>(key: &CacheKey<'_, T>) -> () {
        Request::Lookup {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
        } => answers::nothing
    }

    /// The result of a request's lookup in chunks; none while it is unknown. It is returned once; later calls return 0.
    fn query_prefetch_status(request_id: &str) -> Option<u64> {
        Keyless::QueryPrefetchStatus {
            job: JobRef::Request(request_id),
        } => answers::optional_count
    }

    /// Calls `query_prefetch_status`, but the server waits up to `wait` for the result. A [`Connection`]'s timeout must
    /// be longer than that; a [`Client`] adds it to its own.
    fn wait_prefetch_status(request_id: &str, wait: Duration) -> Option<u64> {
        wait_request(request_id, wait) => answers::optional_count
    }

    /// Ends the leases of the lookup of the key's request on the key's range.
    fn free_lookup_locks<T>(key: &CacheKey<'_, T>) -> () {
        Request::FreeLookupLocks {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
            extra_ranges: Vec::new(),
        } => answers::nothing
    }

    /// Ends a request's session.
    fn end_session(request_id: &str) -> () {
        Keyless::EndSession { request_id } => answers::nothing
    }

    /// Registers a worker whose pages the server copies. A server that cannot use the tensors may send no reply.
    fn register_kv_cache(registration: Registration<'_>) -> () {
        Keyless::RegisterKvCache(registration) => answers::nothing
    }

    /// Unregisters such a worker.
    fn unregister_kv_cache(instance: InstanceId) -> () {
        Keyless::UnregisterKvCache { instance } => answers::nothing
    }

    /// Copies a worker's blocks into the cache; one list of block ids per group. False means a fatal error; true does
    /// not mean that every chunk was new, or that there was space for it.
    fn store<T>(key: &CacheKey<'_, T>, instance: InstanceId, block_ids: &[Vec<i64>]) -> bool {
        Request::Store(Store {
            key: key.clone(),
            instance,
            block_ids: block_ids.to_vec(),
            event_handle: CPU_EVENT,
        }) => answers::transferred
    }

    /// Copies cached chunks into a worker's blocks, except the blocks of the first `skip_first_n_tokens` of the range.
    /// The chunks must have been looked up. True only if all of them were copied.
    fn retrieve<T>(
        key: &CacheKey<'_, T>, instance: InstanceId, block_ids: &[Vec<i64>], skip_first_n_tokens: u64
    ) -> bool {
        Request::Retrieve(Retrieve {
            key: key.clone(),
            instance,
            block_ids: block_ids.to_vec(),
            event_handle: CPU_EVENT,
            skip_first_n_tokens: i64::try_from(skip_first_n_tokens).unwrap_or(i64::MAX),
        }) => answers::transferred
    }

    /// Registers a worker that copies by itself; returns where the shared pool is. A server that does not serve such
    /// workers may send no reply.
    fn register_engine_driven(context: EngineDrivenContext<'_>) -> EngineDriven<'static> {
        Keyless::RegisterEngineDriven(context) => answers::pool
    }

    /// Unregisters such a worker.
    fn unregister_engine_driven(instance: InstanceId) -> () {
        Keyless::UnregisterEngineDriven { instance } => answers::nothing
    }

    /// Reserves slots of the pool for the chunks of the key's range.
    fn prepare_store<T>(key: &CacheKey<'_, T>, instance: InstanceId) -> PrepareStore<'static> {
        Request::PrepareStore {
            key: key.clone(),
            instance,
            skipped_chunks: Vec::new(),
        } => answers::prepare_store
    }

    /// Commits a prepared store: its slots are written (`data` is empty), or `data` has the chunks, pickled.
    fn commit_store<T>(key: &CacheKey<'_, T>, instance: InstanceId, data: &[u8]) -> bool {
        Request::CommitStore { key: key.clone(), instance, data } => answers::truth
    }

    /// Leases the chunks of the key's range, which must have been looked up; returns their slots, or a copy of the
    /// pickled chunks.
    fn prepare_retrieve<T>(key: &CacheKey<'_, T>, instance: InstanceId) -> PrepareRetrieve<'static> {
        Request::PrepareRetrieve { key: key.clone(), instance } => answers::prepare_retrieve
    }

    /// Ends those leases: the worker has read the chunks.
    fn commit_retrieve<T>(key: &CacheKey<'_, T>, instance: InstanceId) -> bool {
        Request::CommitRetrieve { key: key.clone(), instance } => answers::truth
    }
}

pub(crate) fn wait_request(request_id: &str, wait: Duration) -> Keyless<'_> {
    Keyless::WaitPrefetchStatus {
        job: JobRef::Request(request_id),
        timeout: Seconds::Fraction(wait.as_secs_f64()),
    }
}

/// How long the server may hold its reply to a request back.
pub(crate) fn server_wait<T>(request: &Request<'_, T>) -> Duration {
    match request {
        Request::WaitPrefetchStatus { timeout, .. } => {
            Duration::try_from_secs_f64(timeout.as_f64()).unwrap_or_default()
        }
        _ => Duration::ZERO,
    }
}
