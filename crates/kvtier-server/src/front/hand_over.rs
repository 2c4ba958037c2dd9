//! Hand-over of the connections: the front end pauses between two requests, and the next process goes on.
//!
//! Nothing is read or accepted during the pause: what clients send meanwhile stays with the system. Requests that were read are
//! answered first, and what cannot be written is handed over as bytes.

use std::time::{Duration, Instant};

use kvtier_error::Result;
use kvtier_zmtp::{Message, Resume};

use super::connections::Suspended;
use super::pause::{ConnectionState, FrontHandOver, PauseRequest, cannot};
use super::serve::Front;

/// Between two looks at what is still in flight. Also the time after which a socket that was full is written again.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

impl Front {
    /// Pauses if that was asked for. Returns whether the connections are the next process's.
    pub(super) fn serve_pause(&mut self) -> bool {
        let Ok(PauseRequest {
            until,
            paused,
            outcome,
        }) = self.pauses.try_recv()
        else {
            return false;
        };
        let drained = self.drain(until).and_then(|()| self.suspend());
        if paused.send(drained).is_err() {
            return false;
        }
        // Fails when the pause was dropped: then nothing was handed over.
        outcome.recv().is_ok()
    }

    /// Answers what was read, without reading more.
    fn drain(&mut self, until: Instant) -> Result<()> {
        loop {
            // Asked before the answers are sent: what it has answered by then is among them.
            let is_answered = !self.server.has_unanswered();
            self.send_replies();
            if is_answered && self.connections.are_idle() && self.server.engine.is_idle() {
                return Ok(());
            }
            if self.is_stopping() {
                return Err(cannot("the server is stopping"));
            }
            if Instant::now() >= until {
                return Err(cannot(match is_answered {
                    false => "a request in flight was not answered in time",
                    true => "a transfer did not end in time, or a client does not read its chunks",
                }));
            }
            std::thread::sleep(LOOK_INTERVAL);
            self.connections.queue_all();
        }
    }

    fn suspend(&mut self) -> Result<FrontHandOver> {
        let chunk_tokens = self.server.engine.config().chunk_size;
        let (next_connection, connections) = self.connections.suspend(chunk_tokens)?;
        let mut front = FrontHandOver::default();
        front.state.next_connection = next_connection;
        for connection in connections {
            let Suspended {
                id,
                socket,
                session,
                input,
                output,
                client,
            } = connection;
            front.state.connections.push(ConnectionState {
                id,
                is_greeted: session.is_greeted,
                is_ready: session.is_ready,
                knows_ping: session.knows_ping,
                ttl: session
                    .ttl
                    .map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
                input: input.len(),
                output: output.len(),
                client,
            });
            front.sockets.push(socket);
            front.bytes.extend_from_slice(&input);
            front.bytes.extend_from_slice(&output);
        }
        Ok(front)
    }

    /// Goes on with the connections of the process before; the messages that it had read are served first.
    ///
    /// # Errors
    /// The first part that makes no sense here.
    pub(super) fn resume(&mut self, front: FrontHandOver) -> Result<()> {
        let FrontHandOver {
            state,
            sockets,
            bytes,
        } = front;
        if sockets.len() != state.count() {
            return Err(cannot("there are more or fewer connections than sockets"));
        }
        let mut rest = bytes.as_slice();
        let mut take = |len: usize| {
            let (bytes, behind) = rest.split_at_checked(len)?;
            rest = behind;
            Some(bytes.to_vec())
        };
        for (connection, socket) in state.connections.into_iter().zip(sockets) {
            let missing = || cannot("bytes of a connection are missing");
            let input = take(connection.input).ok_or_else(missing)?;
            let output = take(connection.output).ok_or_else(missing)?;
            let client = connection.client.as_ref().map(|state| {
                let mut client = self.budgets.client(connection.id);
                let is_known = client.resume(state);
                is_known
                    .then_some(client)
                    .ok_or_else(|| cannot("a client speaks a generation that is unknown here"))
            });
            let client = client.transpose()?;
            let suspended = Suspended {
                id: connection.id,
                socket,
                session: Resume {
                    is_greeted: connection.is_greeted,
                    is_ready: connection.is_ready,
                    knows_ping: connection.knows_ping,
                    ttl: connection.ttl.map(Duration::from_millis),
                },
                input,
                output,
                client: None,
            };
            let mut messages: Vec<Message> = Vec::new();
            self.connections.resume(suspended, client, &mut messages)?;
            let id = connection.id;
            self.resumed
                .extend(messages.into_iter().map(|message| (id, message)));
        }
        self.connections.number_from(state.next_connection);
        Ok(())
    }
}
