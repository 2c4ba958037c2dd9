//! One typed call for each operation that a server of LMCache 0.5.6 serves without optional features.

use std::time::{Duration, Instant};

use kvtier_proto::key::{CacheKey, EncodedTokens, TokenWriter};
use kvtier_proto::request::{
    AllocationRecord, BlockAllocation, EngineDrivenContext, InstanceId, JobRef, Registration,
    Request, Retrieve, Seconds, Store,
};
use kvtier_proto::response::{EngineDriven, PrepareRetrieve, PrepareStore};

use crate::answers;
use crate::connection::Connection;
use crate::error::ClientError;

/// What a CPU worker sends as its device event, which is complete by definition (LMCache 0.5.6).
pub(crate) const CPU_EVENT: &[u8] = b"stub_ipc_handle";

/// First pause between two questions for the result of a lookup, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// A request without a key.
type Keyless<'a> = Request<'a, EncodedTokens<'a>>;

impl Connection {
    /// Tokens in a chunk.
    ///
    /// # Errors
    /// As [`Connection::call`]; so for all calls here.
    pub fn get_chunk_size(&mut self) -> Result<usize, ClientError> {
        answers::chunk_size(&self.call(&Keyless::GetChunkSize)?)
    }

    /// Names of the optional features that are on.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn get_experimental(&mut self) -> Result<Vec<String>, ClientError> {
        answers::texts(&self.call(&Keyless::GetExperimental)?)
    }

    /// The server's `OK`.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn noop(&mut self) -> Result<String, ClientError> {
        answers::text(&self.call(&Keyless::Noop)?)
    }

    /// Is the server alive? For a worker, false means that it must register (again).
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn ping(&mut self, instance: Option<InstanceId>) -> Result<bool, ClientError> {
        answers::truth(&self.call(&Keyless::Ping { instance })?)
    }

    /// Drops what is cached in memory: what nobody holds, or with `force` all of it.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn clear(&mut self, force: bool) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::Clear { force })?)
    }

    /// Tells which blocks requests got.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn report_block_allocation(
        &mut self,
        instance: InstanceId,
        model_name: &str,
        records: Vec<AllocationRecord<'_>>,
    ) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::ReportBlockAllocation(BlockAllocation {
            instance: Some(instance),
            model_name: Some(model_name),
            records,
        }))?)
    }

    /// Starts a lookup. The result is asked for with [`Connection::query_prefetch_status`] under the key's request;
    /// [`Connection::lookup_hits`] does both.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn lookup<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
    ) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Request::Lookup {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
        })?)
    }

    /// The result of a request's lookup in chunks; none while it is not known. Known once only: then it is 0.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn query_prefetch_status(&mut self, request_id: &str) -> Result<Option<u64>, ClientError> {
        answers::optional_count(&self.call(&Keyless::QueryPrefetchStatus {
            job: JobRef::Request(request_id),
        })?)
    }

    /// As [`Connection::query_prefetch_status`], with the server waiting up to `patience` for the result, which must
    /// be shorter than [`Connection::timeout`].
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn wait_prefetch_status(
        &mut self,
        request_id: &str,
        patience: Duration,
    ) -> Result<Option<u64>, ClientError> {
        answers::optional_count(&self.call(&Keyless::WaitPrefetchStatus {
            job: JobRef::Request(request_id),
            timeout: Seconds::Fraction(patience.as_secs_f64()),
        })?)
    }

    /// Looks up and asks until the result is known: chunks of the longest cached prefix, which are leased until they
    /// are retrieved or freed.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Timeout`] also when the result stays unknown that long.
    pub fn lookup_hits<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
    ) -> Result<u64, ClientError> {
        self.lookup_chunks(key, key.end)
    }

    /// As [`Connection::lookup_hits`], for a lookup of at most `asked` chunks: a server that claims more has failed it.
    pub(crate) fn lookup_chunks<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        asked: u64,
    ) -> Result<u64, ClientError> {
        self.lookup(key)?;
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let reply = self.call(&Keyless::QueryPrefetchStatus {
                job: JobRef::Request(key.request_id),
            })?;
            if let Some(chunks) = answers::found(&reply, asked)? {
                return Ok(chunks);
            }
            if started.elapsed() >= self.timeout() {
                return Err(ClientError::Timeout {
                    operation: kvtier_proto::operation::Operation::QueryPrefetchStatus,
                    endpoint: self.endpoint().to_owned(),
                    waited: started.elapsed(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Ends the leases that the lookup of the key's request has on the key's range.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn free_lookup_locks<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
    ) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Request::FreeLookupLocks {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
        })?)
    }

    /// Tells that a request ended.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn end_session(&mut self, request_id: &str) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::EndSession { request_id })?)
    }

    /// Registers a worker whose pages the server copies.
    ///
    /// # Errors
    /// As [`Connection::call`]. A server that cannot use the tensors may stay silent: [`ClientError::Timeout`].
    pub fn register_kv_cache(&mut self, registration: Registration<'_>) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::RegisterKvCache(registration))?)
    }

    /// Takes that worker's pages away again.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn unregister_kv_cache(&mut self, instance: InstanceId) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::UnregisterKvCache { instance })?)
    }

    /// Has the server copy blocks into the cache; one list of block ids for each group. False means a fatal error;
    /// true does not mean that every chunk was new, or had room.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn store<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        block_ids: &[Vec<i64>],
    ) -> Result<bool, ClientError> {
        Ok(answers::transfer(&self.call(&Request::Store(Store {
            key: key.clone(),
            instance,
            block_ids: block_ids.to_vec(),
            event_handle: CPU_EVENT,
        }))?)?
        .0)
    }

    /// Has the server copy cached chunks into blocks, but for the blocks of the first `skip_first_n_tokens` of the
    /// range. The chunks must have been looked up. True only when all of them were copied.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn retrieve<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        block_ids: &[Vec<i64>],
        skip_first_n_tokens: u64,
    ) -> Result<bool, ClientError> {
        Ok(answers::transfer(&self.call(&Request::Retrieve(Retrieve {
            key: key.clone(),
            instance,
            block_ids: block_ids.to_vec(),
            event_handle: CPU_EVENT,
            skip_first_n_tokens: i64::try_from(skip_first_n_tokens).unwrap_or(i64::MAX),
        }))?)?
        .0)
    }

    /// Registers a worker that copies by itself; returns where the shared pool is.
    ///
    /// # Errors
    /// As [`Connection::call`]. A server that does not serve such workers may stay silent: [`ClientError::Timeout`].
    pub fn register_engine_driven(
        &mut self,
        context: EngineDrivenContext<'_>,
    ) -> Result<EngineDriven<'static>, ClientError> {
        answers::pool(&self.call(&Keyless::RegisterEngineDriven(context))?)
    }

    /// That worker goes away.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn unregister_engine_driven(&mut self, instance: InstanceId) -> Result<(), ClientError> {
        answers::nothing(&self.call(&Keyless::UnregisterEngineDriven { instance })?)
    }

    /// Where may the worker write the chunks of the key's range?
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn prepare_store<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Result<PrepareStore<'static>, ClientError> {
        answers::prepare_store(&self.call(&Request::PrepareStore {
            key: key.clone(),
            instance,
        })?)
    }

    /// The worker wrote its slots (`data` is empty), or sends the chunks along, pickled.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn commit_store<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
        data: &[u8],
    ) -> Result<bool, ClientError> {
        answers::truth(&self.call(&Request::CommitStore {
            key: key.clone(),
            instance,
            data,
        })?)
    }

    /// Where can the worker read the chunks of the key's range? They must have been looked up. Copies pickled data;
    /// [`Connection::call`] does not.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn prepare_retrieve<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Result<PrepareRetrieve<'static>, ClientError> {
        answers::prepare_retrieve(&self.call(&Request::PrepareRetrieve {
            key: key.clone(),
            instance,
        })?)
    }

    /// The worker read them.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn commit_retrieve<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        instance: InstanceId,
    ) -> Result<bool, ClientError> {
        answers::truth(&self.call(&Request::CommitRetrieve {
            key: key.clone(),
            instance,
        })?)
    }
}
