//! One typed call for each operation that a server of LMCache 0.5.6 serves without optional features. Each returns at
//! once; deadlines are [`Client::timeout`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_proto::key::{CacheKey, EncodedTokens, TokenWriter};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{
    AllocationRecord, BlockAllocation, EngineDrivenContext, InstanceId, JobRef, Registration,
    Request, Retrieve, Seconds, Store,
};
use kvtier_proto::response::{EngineDriven, PrepareRetrieve, PrepareStore};

use super::future::{Promise, channel};
use super::{Client, Future, NO_INSTANCE};
use crate::answers;
use crate::connection::Reply;
use crate::error::ClientError;

/// A request without a key.
type Keyless<'a> = Request<'a, EncodedTokens<'a>>;

/// How long the server is left to wait for a lookup's result before it is asked again.
const LONGEST_QUESTION: Duration = Duration::from_secs(1);

impl Client {
    fn ask<T: TokenWriter, R: Send + 'static>(
        &self,
        request: &Request<'_, T>,
        read: fn(&Reply) -> Result<R, ClientError>,
    ) -> Future<R> {
        self.submit(request, self.timeout(), read)
    }

    /// A heartbeat of this client's worker, or scheduler.
    pub(super) fn beat(&self, patience: Duration) -> Result<bool, ClientError> {
        let number = self.shared.instance.load(Ordering::Relaxed);
        let instance = (number != NO_INSTANCE).then_some(InstanceId(number));
        self.submit(&Keyless::Ping { instance }, patience, answers::truth)
            .join()
    }

    /// Tokens in a chunk.
    pub fn get_chunk_size(&self) -> Future<usize> {
        self.ask(&Keyless::GetChunkSize, answers::chunk_size)
    }

    /// Names of the optional features that are on.
    pub fn get_experimental(&self) -> Future<Vec<String>> {
        self.ask(&Keyless::GetExperimental, answers::texts)
    }

    /// The server's `OK`.
    pub fn noop(&self) -> Future<String> {
        self.ask(&Keyless::Noop, answers::text)
    }

    /// Is the server alive? For a worker, false means that it must register (again).
    pub fn ping(&self, instance: Option<InstanceId>) -> Future<bool> {
        self.ask(&Keyless::Ping { instance }, answers::truth)
    }

    /// Drops what is cached in memory: what nobody holds, or with `force` all of it.
    pub fn clear(&self, force: bool) -> Future<()> {
        self.ask(&Keyless::Clear { force }, answers::nothing)
    }

    /// Tells which blocks requests got.
    pub fn report_block_allocation(
        &self,
        instance: InstanceId,
        model_name: &str,
        records: Vec<AllocationRecord<'_>>,
    ) -> Future<()> {
        let request = Keyless::ReportBlockAllocation(BlockAllocation {
            instance: Some(instance),
            model_name: Some(model_name),
            records,
        });
        self.ask(&request, answers::nothing)
    }

    /// Starts a lookup; [`Client::lookup_hits`] also asks for its result.
    pub fn lookup<T: TokenWriter + Clone>(&self, key: &CacheKey<'_, T>) -> Future<()> {
        self.ask(&lookup_request(key), answers::nothing)
    }

    /// The result of a request's lookup in chunks; none while it is not known. Known once only: then it is 0.
    pub fn query_prefetch_status(&self, request_id: &str) -> Future<Option<u64>> {
        let request = Keyless::QueryPrefetchStatus {
            job: JobRef::Request(request_id),
        };
        self.ask(&request, answers::optional_count)
    }

    /// As [`Client::query_prefetch_status`], with the server waiting up to `patience` for the result.
    pub fn wait_prefetch_status(
        &self,
        request_id: &str,
        patience: Duration,
    ) -> Future<Option<u64>> {
        self.submit(
            &wait_request(request_id, patience),
            self.timeout() + patience,
            answers::optional_count,
        )
    }

    /// Looks up and asks until the result is known: chunks of the longest cached prefix, which are leased until they
    /// are retrieved or freed. A lookup that is given up at its deadline has its session ended, so that it holds nothing.
    ///
    /// A server that claims more than was asked for has failed it.
    pub fn lookup_hits<T: TokenWriter + Clone>(&self, key: &CacheKey<'_, T>) -> Future<u64> {
        self.lookup_hits_within(key, self.timeout())
    }

    /// As [`Client::lookup_hits`], with a deadline of its own.
    pub fn lookup_hits_within<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        timeout: Duration,
    ) -> Future<u64> {
        let (promise, future) = channel(Operation::Lookup);
        let question = Question {
            client: Self::internal(Arc::clone(&self.shared)),
            request_id: key.request_id.to_owned(),
            deadline: Instant::now() + timeout,
            timeout,
            asked: key.end / self.chunk_tokens().unwrap_or(1),
            promise,
        };
        self.submit_then(&lookup_request(key), timeout, move |ack| {
            match ack.and_then(|reply| answers::nothing(&reply)) {
                Ok(()) => question.ask(),
                Err(error) => question.give_up(error),
            }
        });
        future
    }

    /// Ends the leases that the lookup of the key's request has on the key's range.
    pub fn free_lookup_locks<T: TokenWriter + Clone>(&self, key: &CacheKey<'_, T>) -> Future<()> {
        let request = Request::FreeLookupLocks {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
        };
        self.ask(&request, answers::nothing)
    }

    /// Tells that a request ended.
    pub fn end_session(&self, request_id: &str) -> Future<()> {
        self.ask(&Keyless::EndSession { request_id }, answers::nothing)
    }

    /// Registers a worker whose pages the server copies. A server that cannot use the tensors may stay silent.
    pub fn register_kv_cache(&self, registration: Registration<'_>) -> Future<()> {
        self.ask(&Keyless::RegisterKvCache(registration), answers::nothing)
    }

    /// Takes that worker's pages away again.
    pub fn unregister_kv_cache(&self, instance: InstanceId) -> Future<()> {
        self.ask(&Keyless::UnregisterKvCache { instance }, answers::nothing)
    }

    /// Has the server copy blocks into the cache, behind the device event `event`; one list of block ids for each
    /// group. False means a fatal error; true does not mean that every chunk was new, or had room. With it comes the
    /// event behind which the copy is complete; empty when it is.
    pub fn store<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        block_ids: Vec<Vec<i64>>,
        event: &[u8],
    ) -> Future<(bool, Vec<u8>)> {
        self.ask(
            &Request::Store(Store {
                key: key.clone(),
                instance,
                block_ids,
                event_handle: event,
            }),
            answers::transfer,
        )
    }

    /// Has the server copy cached chunks into blocks, behind the device event `event`, but for the blocks of the first
    /// `skip_first_n_tokens` of the range. The chunks must have been looked up. True only when all of them were copied,
    /// or will be when the returned event is reached.
    pub fn retrieve<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        block_ids: Vec<Vec<i64>>,
        skip_first_n_tokens: u64,
        event: &[u8],
    ) -> Future<(bool, Vec<u8>)> {
        self.ask(
            &Request::Retrieve(Retrieve {
                key: key.clone(),
                instance,
                block_ids,
                event_handle: event,
                skip_first_n_tokens: i64::try_from(skip_first_n_tokens).unwrap_or(i64::MAX),
            }),
            answers::transfer,
        )
    }

    /// Registers a worker that copies by itself; gives where the shared pool is. A server that does not serve such
    /// workers may stay silent.
    pub fn register_engine_driven(
        &self,
        context: EngineDrivenContext<'_>,
    ) -> Future<EngineDriven<'static>> {
        self.ask(&Keyless::RegisterEngineDriven(context), answers::pool)
    }

    /// That worker goes away.
    pub fn unregister_engine_driven(&self, instance: InstanceId) -> Future<()> {
        self.ask(
            &Keyless::UnregisterEngineDriven { instance },
            answers::nothing,
        )
    }

    /// Where may the worker write the chunks of the key's range?
    pub fn prepare_store<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Future<PrepareStore<'static>> {
        let request = Request::PrepareStore {
            key: key.clone(),
            instance,
        };
        self.ask(&request, answers::prepare_store)
    }

    /// The worker wrote its slots (`data` is empty), or sends the chunks along, pickled.
    pub fn commit_store<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        data: &[u8],
    ) -> Future<bool> {
        let request = Request::CommitStore {
            key: key.clone(),
            instance,
            data,
        };
        self.ask(&request, answers::truth)
    }

    /// Where can the worker read the chunks of the key's range? They must have been looked up.
    pub fn prepare_retrieve<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Future<PrepareRetrieve<'static>> {
        let request = Request::PrepareRetrieve {
            key: key.clone(),
            instance,
        };
        self.ask(&request, answers::prepare_retrieve)
    }

    /// The worker read them.
    pub fn commit_retrieve<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Future<bool> {
        let request = Request::CommitRetrieve {
            key: key.clone(),
            instance,
        };
        self.ask(&request, answers::truth)
    }
}

fn lookup_request<'a, T: TokenWriter + Clone>(key: &CacheKey<'a, T>) -> Request<'a, T> {
    Request::Lookup {
        key: key.clone(),
        tp_size: i64::from(key.world_size),
    }
}

fn wait_request(request_id: &str, patience: Duration) -> Keyless<'_> {
    Keyless::WaitPrefetchStatus {
        job: JobRef::Request(request_id),
        timeout: Seconds::Fraction(patience.as_secs_f64()),
    }
}

/// A lookup whose result is being asked for.
struct Question {
    client: Client,
    request_id: String,
    deadline: Instant,
    timeout: Duration,
    /// Chunks; tokens where the chunk size is unknown.
    asked: u64,
    promise: Promise<u64>,
}

impl Question {
    fn ask(self) {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let error = ClientError::Timeout {
                operation: Operation::Lookup,
                endpoint: self.client.endpoint().to_owned(),
                waited: self.timeout,
            };
            return self.give_up(error);
        }
        // The server answers before our own deadline, which is for a server that does not.
        let patience = LONGEST_QUESTION.min(left.mul_f64(0.9));
        let client = self.client.clone();
        let request_id = self.request_id.clone();
        client.submit_then(
            &wait_request(&request_id, patience),
            left,
            move |reply| match reply.and_then(|reply| answers::found(&reply, self.asked)) {
                Ok(Some(chunks)) => self.promise.keep(Ok(chunks)),
                Ok(None) => self.ask(),
                Err(error) => self.give_up(error),
            },
        );
    }

    fn give_up(self, error: ClientError) {
        // Not for a connection that is gone, nor a client that is closed: their sessions end by themselves.
        if matches!(
            error,
            ClientError::Timeout { .. }
                | ClientError::Degraded { .. }
                | ClientError::Unexpected { .. }
        ) {
            self.client.end_session(&self.request_id).forget();
        }
        self.promise.keep(Err(error));
    }
}
