//! The front end of the request port: one thread that owns the sockets, moves frames and never waits for a request.
//!
//! It answers the requests that take microseconds at once, and queues the others in the lanes of their client. Pools decode and serve them and put the answers into the outbox, which wakes this
//! thread.

mod allowance;
mod client;
mod connection;
mod connections;
mod dispatch;
mod hand_over;
mod interface;
mod ipc;
pub mod lanes;
mod limits;
mod names;
mod outbox;
mod output;
mod pause;
mod poll;
mod request;
mod serve;
mod socket;
#[cfg(test)]
mod tests;
mod warnings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::Receiver;
use kvtier_config::ServerConfig;
use kvtier_engine::Engine;
use kvtier_error::{Error, Result};
use kvtier_http::Health;
use lanes::Pool;
use outbox::Outbox;
use pause::Pauses;
pub use pause::{FrontHandOver, FrontState, Paused};
use request::Server;
use serve::Front;
pub use socket::RequestSocket;

/// A front end that does not serve yet.
pub struct PreparedFront {
    front: Front,
    socket: Arc<RequestSocket>,
    outbox: Outbox,
    pauses: Pauses,
}

/// The running front end.
pub struct FrontEnd {
    /// Closed with the front end, not when it stops: no other server can have the port before.
    socket: Arc<RequestSocket>,
    stop: Arc<AtomicBool>,
    outbox: Outbox,
    pauses: Pauses,
    thread: Option<JoinHandle<()>>,
}

impl PreparedFront {
    /// Prepares to serve, at most `connections` clients at once.
    ///
    /// # Errors
    /// A system out of threads or file descriptors, in one line.
    pub fn new(
        config: &ServerConfig,
        socket: RequestSocket,
        engine: Arc<Engine>,
        health: Arc<Health>,
        connections: usize,
    ) -> Result<Self> {
        let (outbox, inbox) = outbox::outbox().map_err(|error| Error::io("no eventfd", error))?;
        let server = Arc::new(Server::new(engine, health, outbox.clone()));
        let pool = |name, threads| {
            let server = Arc::clone(&server);
            Pool::start(name, threads, move |job, turn| {
                server.serve(job, Some(turn))
            })
            .map_err(|error| Error::io("no thread", error))
        };
        let pools = [
            pool("kvtier-transfer", config.transfer_workers)?,
            pool("kvtier-control", config.control_workers)?,
        ];
        let socket = Arc::new(socket);
        let bounds = serve::bounds(connections, config.max_message_bytes);
        let request_bytes = limits::request_bytes(config.max_message_bytes);
        let accepted = Arc::clone(&socket);
        let (pauses, requests) = Pauses::new();
        let front = Front::new(
            accepted,
            Arc::clone(&server),
            inbox,
            pools,
            bounds,
            request_bytes,
            requests,
        )
        .map_err(|error| Error::io("no epoll", error))?;
        Ok(Self {
            front,
            socket,
            outbox,
            pauses,
        })
    }

    /// Takes the connections of the process before, which still has them.
    ///
    /// # Errors
    /// The first part that makes no sense here.
    pub fn resume(&mut self, front: FrontHandOver) -> Result<()> {
        self.front.resume(front)
    }

    /// Starts the thread, which serves once `begun` has a message, and ends without one.
    ///
    /// # Errors
    /// A system out of threads, in one line.
    pub fn start(self, begun: Receiver<()>) -> Result<FrontEnd> {
        let Self {
            front,
            socket,
            outbox,
            pauses,
        } = self;
        let stop = Arc::clone(&front.stop);
        let thread = std::thread::Builder::new()
            .name("kvtier-front".into())
            .spawn(move || {
                if begun.recv().is_ok() {
                    front.run();
                }
            })
            .map_err(|error| Error::io("no thread", error))?;
        Ok(FrontEnd {
            socket,
            stop,
            outbox,
            pauses,
            thread: Some(thread),
        })
    }
}

impl FrontEnd {
    /// Removes the path of the socket at the end, as the process before would have.
    pub fn take_path(&self, config: &ServerConfig) {
        self.socket.take_path(config);
    }

    /// The listening socket.
    pub fn socket(&self) -> &Arc<RequestSocket> {
        &self.socket
    }

    /// Asks for pauses: its thread answers.
    pub fn pauses(&self) -> impl Fn(Instant) -> Result<Paused> + Send + use<> {
        let (pauses, outbox) = (self.pauses.clone(), self.outbox.clone());
        move |until| pauses.pause(until, || outbox.wake())
    }

    /// Where it listens, such as `tcp://127.0.0.1:5555`.
    pub fn endpoint(&self) -> &str {
        self.socket.endpoint()
    }

    /// Stops taking requests, answers those that were read, and closes the connections. The socket stays bound until the
    /// front end is dropped.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.outbox.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been noted in the health by itself.
            let _ = thread.join();
        }
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.stop();
    }
}
