//! The front end of the request port: one thread that owns the sockets, moves frames and never waits for a request.
//!
//! It answers the requests that take microseconds at once, and queues the others in the lanes of their client. Pools decode and serve them and put the answers into the outbox, which wakes this
//! thread.

mod allowance;
mod client;
mod connection;
mod connections;
mod dispatch;
mod interface;
mod ipc;
pub mod lanes;
mod limits;
mod names;
mod outbox;
mod output;
mod poll;
mod request;
mod serve;
mod socket;
mod streams;
#[cfg(test)]
mod tests;
mod warnings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvtier_common::error::{Error, Result};
use kvtier_config::ServerConfig;
use kvtier_engine::Engine;
use kvtier_http::Health;
use lanes::LanePool;
use outbox::Outbox;
use request::RequestServer;
use serve::Front;
pub use socket::RequestSocket;

/// A front end that does not serve yet.
pub struct PreparedFront {
    front: Front,
    socket: Arc<RequestSocket>,
    outbox: Outbox,
}

/// The running front end.
pub struct FrontEnd {
    /// Closed with the front end, not when it stops: no other server can have the port before.
    socket: Arc<RequestSocket>,
    stop: Arc<AtomicBool>,
    outbox: Outbox,
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
        let server = Arc::new(RequestServer::new(engine, health, outbox.clone()));
        let pool = |name, threads| {
            let server = Arc::clone(&server);
            LanePool::start(name, threads, move |job, turn| {
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
        let front = Front::new(
            accepted,
            Arc::clone(&server),
            inbox,
            pools,
            bounds,
            request_bytes,
        )
        .map_err(|error| Error::io("no epoll", error))?;
        Ok(Self {
            front,
            socket,
            outbox,
        })
    }

    /// Starts the front end's thread.
    ///
    /// # Errors
    /// A system out of threads, in one line.
    pub fn start(self) -> Result<FrontEnd> {
        let Self {
            front,
            socket,
            outbox,
        } = self;
        let stop = Arc::clone(&front.stop);
        let thread = std::thread::Builder::new()
            .name("kvtier-front".into())
            .spawn(move || front.run())
            .map_err(|error| Error::io("no thread", error))?;
        Ok(FrontEnd {
            socket,
            stop,
            outbox,
            thread: Some(thread),
        })
    }
}

impl FrontEnd {
    /// Address of the request port, such as `tcp://127.0.0.1:5555`.
    pub fn endpoint(&self) -> &str {
        self.socket.endpoint()
    }

    /// Stops serving once no request is in flight, at the latest after an eighth of the stop's time, and closes all connections.
    /// The socket stays bound until the front end is dropped.
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
