//! Connections between two requests, for the next process and from the one before.

use std::os::fd::OwnedFd;

use kvtier_error::{Error, Result};
use kvtier_zmtp::{Message, Resume, Session};

use super::super::client::Client;
use super::super::connection::Connection;
use super::super::pause::{ClientState, cannot};
use super::{Connections, Guest};

/// A connection between two requests, for the next process.
pub struct Suspended {
    pub id: u64,
    pub socket: OwnedFd,
    pub session: Resume,
    /// Messages that were not served, and the beginning of one.
    pub input: Vec<u8>,
    /// Bytes that its client has not got.
    pub output: Vec<u8>,
    /// If it has sent a request.
    pub client: Option<ClientState>,
}

impl Connections {
    /// All connections for the next process, whose chunks have `chunk_tokens` too, and the next one's number. They stay open.
    ///
    /// # Errors
    /// A client that is not known by numbers that the next process understands, or does not read; the system's.
    pub fn suspend(&mut self, chunk_tokens: u32) -> Result<(u64, Vec<Suspended>)> {
        let all = self.open.iter_mut().map(|(id, connection)| {
            let client = connection.client.as_ref();
            let client = client.map(|it| it.state(chunk_tokens)).transpose()?;
            let (session, partial, output) = connection
                .suspend()
                .ok_or_else(|| cannot("a client does not read its chunks"))?;
            let undecided = connection.client.as_ref();
            let undecided = undecided.and_then(|client| client.undecided.as_ref());
            let jobs = undecided.iter().flat_map(|waiting| &waiting.jobs);
            let mut input = Vec::new();
            jobs.for_each(|job| job.write_message(&mut input));
            input.extend_from_slice(&partial);
            let socket = connection.socket();
            Ok(Suspended {
                id: *id,
                socket: socket.map_err(|error| Error::io("a connection", error))?,
                session,
                input,
                output,
                client,
            })
        });
        let mut all = all.collect::<Result<Vec<_>>>()?;
        all.sort_by_key(|connection| connection.id);
        Ok((self.next_id, all))
    }

    /// Goes on with a connection of the process before, and appends the messages that it had read and not served.
    ///
    /// # Errors
    /// Its number is taken, or its bytes break the protocol or a bound; the system's.
    pub fn resume(
        &mut self,
        of: Suspended,
        client: Option<Client>,
        messages: &mut Vec<Message>,
    ) -> Result<()> {
        let now = self.clock.now();
        let failed =
            |error: &dyn std::fmt::Display| cannot(&format!("connection {}: {error}", of.id));
        if self.open.contains_key(&of.id) || self.open.len() >= self.bounds.connections {
            return Err(failed(&"it is there twice, or there are too many"));
        }
        let session = Session::resume(self.bounds.session, of.session);
        let mut connection = Connection::resume(of.socket, session, &of.output, now);
        let received = connection.receive(&of.input, messages, now);
        received.map_err(|error| failed(&error))?;
        connection.next_tick = connection.due();
        connection.client = client;
        let added = self.poller.add(&connection, of.id);
        added.map_err(|error| failed(&std::io::Error::from(error)))?;
        if connection.client.is_none() {
            self.guests.insert(Guest::silent(of.id));
        }
        self.ticks.insert((connection.next_tick, of.id));
        self.open.insert(of.id, connection);
        self.next_id = self.next_id.max(of.id.saturating_add(1));
        self.metrics.request_connections.set(self.open.len() as i64);
        self.queue_output(of.id);
        self.count(of.id);
        Ok(())
    }

    /// Numbers further connections from here on.
    pub fn number_from(&mut self, next_id: u64) {
        self.next_id = self.next_id.max(next_id);
    }

    /// Whether no request of a connection waits or runs, and no chunk of L1 waits to be written.
    pub fn are_idle(&self) -> bool {
        self.open.values().all(|connection| {
            let client = connection.client.as_ref();
            client.is_none_or(Client::is_idle) && !connection.has_chunks()
        })
    }

    /// Queues all output, also of sockets that took no more.
    pub fn queue_all(&mut self) {
        let ids: Vec<_> = self.open.keys().copied().collect();
        ids.into_iter().for_each(|id| self.queue_output(id));
    }
}
