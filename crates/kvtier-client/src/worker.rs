//! A registered worker on a blocking connection: what both kinds have.

use std::ops::Range;

use kvtier_proto::request::InstanceId;

use crate::answers;
use crate::calls::Keyless;
use crate::connection::Connection;
use crate::error::ClientError;
use crate::key::{Key, Prompt, Scope};

/// Registration of one kind of worker.
pub trait WorkerSpec {
    /// Memory of a registered worker.
    type Memory;

    /// The worker's number.
    fn instance(&self) -> InstanceId;

    /// Model, world and tenant of its keys.
    fn scope(&self) -> &Scope;

    /// Rank of the worker in the world.
    fn worker_id(&self) -> u32;

    /// The request that unregisters it.
    fn unregistration(&self) -> Keyless<'static>;
}

/// A registered worker. Dropping it unregisters.
#[derive(Debug)]
pub struct Worker<S: WorkerSpec> {
    connection: Option<Connection>,
    pub(crate) spec: S,
    pub(crate) chunk_tokens: usize,
    pub(crate) memory: S::Memory,
}

impl<S: WorkerSpec> Worker<S> {
    pub(crate) fn new(
        connection: Connection,
        spec: S,
        chunk_tokens: usize,
        memory: S::Memory,
    ) -> Self {
        Self {
            connection: Some(connection),
            spec,
            chunk_tokens,
            memory,
        }
    }

    /// Tokens per chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> usize {
        self.chunk_tokens
    }

    /// Registration of the worker.
    #[must_use]
    pub fn spec(&self) -> &S {
        &self.spec
    }

    /// The connection, for other requests of the same process.
    pub fn connection(&mut self) -> &mut Connection {
        self.parts().0
    }

    /// The connection beside the other fields.
    pub(crate) fn parts(&mut self) -> (&mut Connection, &S, &S::Memory) {
        let connection = self.connection.as_mut();
        let connection = connection.expect("only close and drop take the connection");
        (connection, &self.spec, &self.memory)
    }

    /// Returns the worker's key for a range of a prompt.
    #[must_use]
    pub fn key<'a>(
        &'a self,
        prompt: &'a Prompt,
        range: Range<u64>,
        request_id: &'a str,
    ) -> Key<'a> {
        let (scope, worker_id) = (self.spec.scope(), self.spec.worker_id());
        scope.worker_key(worker_id, prompt, range, request_id)
    }

    /// Looks a prompt up with the key of a scheduler; returns the number of hit chunks.
    ///
    /// # Errors
    /// As [`Connection::lookup_hits`].
    pub fn lookup(&mut self, prompt: &Prompt, request_id: &str) -> Result<u64, ClientError> {
        let range = prompt.whole_chunks(self.chunk_tokens);
        let asked = range.end / self.chunk_tokens as u64;
        let (connection, spec, _) = self.parts();
        let key = spec.scope().scheduler_key(prompt, range, request_id);
        connection.lookup_chunks(&key, asked)
    }

    /// Unregisters, frees its memory and returns the connection.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn close(mut self) -> Result<Connection, ClientError> {
        let mut connection = self
            .connection
            .take()
            .expect("only close and drop take the connection");
        answers::nothing(&connection.call(&self.spec.unregistration())?)?;
        Ok(connection)
    }
}

impl<S: WorkerSpec> Drop for Worker<S> {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            // Not waited for: the server may be the reason for the drop.
            connection.notify(&self.spec.unregistration());
        }
    }
}
