//! A whole server: both ports first, then the engine, then what serves requests, then background work.
//!
//! The ports come first because they tell servers apart: a second one on the same port ends there, before it asks for the
//! pool that has the port in its name. For the same reason the request port is released last: a server that can bind it
//! can also create the pool. Inherited sockets tell no servers apart: the service manager is assumed to run one server on
//! them at a time, as systemd does for a unit, and the next one only after that has ended.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvtier_common::error::{Error, Result};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::descriptors::Descriptors;
use crate::front::{FrontEnd, PreparedFront, RequestSocket};
use crate::inherited::Inherited;
use crate::logging;
use crate::peers::{self, PeerListener, PeerPort};
use crate::preflight;
use crate::reload::Reloader;
use kvtier_config::ServerConfig;
use kvtier_engine::Engine;
use kvtier_http::Health;
use kvtier_http::{self as http, Access, Api, Dashboard};
use kvtier_observe::metrics::Metrics;

/// Threads of the HTTP runtime; a scrape or a health probe is all they serve.
const HTTP_THREADS: usize = 1;

/// How long open HTTP connections may hold up a shutdown.
const HTTP_GRACE: Duration = Duration::from_secs(2);

/// How long the last lines of a log may take.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Time between two rounds of housekeeping from which on the process itself was stopped.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// A running server. Dropping it stops it.
///
/// ```
/// use kvtier_client::Connection;
/// use kvtier_server::{Server, ServerConfig};
///
/// let flags = "--port 0 --http-port 0 --l1-size-gb 0.0078125 --chunk-size 64 --shm-name=";
/// let flags: Vec<&str> = flags.split(' ').collect();
/// let server = Server::start(ServerConfig::from_flags(&flags)?)?;
/// let mut connection = Connection::connect(server.endpoint())?;
/// assert_eq!(connection.get_chunk_size()?, 64);
/// server.stop();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Server {
    engine: Arc<Engine>,
    /// After the engine: dropping it closes the request port.
    front: FrontEnd,
    peers: Option<PeerPort>,
    health: Arc<Health>,
    access: Arc<Access>,
    reloader: Arc<Reloader>,
    /// Runtime of HTTP, and what is disconnected when the requests in flight are answered.
    http: Option<(Runtime, Receiver<()>)>,
    http_address: SocketAddr,
    stop_http: watch::Sender<bool>,
    stop_background: Arc<AtomicBool>,
    background: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts everything; returns when requests are served.
    ///
    /// # Errors
    /// If a port is taken, memory is unavailable, or the system is out of threads.
    pub fn start(config: ServerConfig) -> Result<Self> {
        Self::start_on(config, Inherited::default())
    }

    /// Starts everything, on inherited sockets where their addresses are those of the configuration.
    ///
    /// # Errors
    /// As [`Server::start`], or if a socket is at an address that no flag names.
    pub fn start_on(config: ServerConfig, mut inherited: Inherited) -> Result<Self> {
        kvtier_memory::return_large_blocks();
        let config = Arc::new(config);
        preflight::check(&config, &inherited)?;
        let access = Arc::new(Access::open(&config.http)?);
        let of_peers = peers::warning(&config);
        for warning in config.warnings().chain(access.warnings()).chain(of_peers) {
            tracing::warn!("{warning}");
        }
        let descriptors = Descriptors::raise()?;
        let socket = RequestSocket::bind(&config, &mut inherited)?;
        let peers = PeerListener::bind(&config, config.peer_port)?;
        let health = Arc::new(Health::default());
        let api = Arc::new(Api {
            engine: OnceLock::new(),
            reload: OnceLock::new(),
            health: Arc::clone(&health),
            access: Arc::clone(&access),
            bodies: Arc::default(),
            dashboard: Arc::new(Dashboard::new(logging::latest_warnings)),
        });
        let (stop_http, _) = watch::channel(false);
        let http = Http::bind(&config, &api, &mut inherited)?;
        inherited.check_used_up()?;
        let http_address = http.address;
        // A probe is answered from here on.
        let http = http.serve(&api, &stop_http);

        let metrics = Arc::new(Metrics::naming(config.tenants.names()));
        metrics.has_descriptors(descriptors.limit, descriptors.connections);
        tracing::info!(
            limit = descriptors.limit,
            request_connections = descriptors.connections,
            "divided the file descriptors that the system allows: some for the request port, the others for files and HTTP"
        );
        let engine = Arc::new(Engine::new(Arc::clone(&config), metrics)?);
        let connections = usize::try_from(descriptors.connections).unwrap_or(usize::MAX);
        let front = PreparedFront::new(
            &config,
            socket,
            Arc::clone(&engine),
            Arc::clone(&health),
            connections,
        )?;
        // Before a client could ask for a worker that is not known yet.
        engine.restore_workers();
        // What was restored is left to the next server.
        let front = front.start().inspect_err(|_| engine.close())?;
        // The routes find the engine from here on; a second engine cannot be set, and there is none.
        let _ = api.engine.set(Arc::clone(&engine));
        let reloader = Arc::new(Reloader::new(&engine, &access));
        let by_http = Arc::clone(&reloader);
        let _ = api.reload.set(Arc::new(move || by_http.reload()));
        let mut server = Self {
            engine,
            front,
            peers: None,
            health,
            access,
            reloader,
            http_address,
            http: Some(http),
            stop_http,
            stop_background: Arc::default(),
            background: Vec::new(),
        };
        server.start_background(config.l1_prefault)?;
        server.peers = peers
            .map(|port| port.serve(&server.engine, descriptors.peer_connections))
            .transpose()?;
        if let Some(peers) = &server.peers {
            // Set once.
            let _ = server.reloader.peers.set(Arc::clone(&peers.port));
        }
        server.health.set_ready();
        Ok(server)
    }

    fn start_background(&mut self, prefaults: bool) -> Result<()> {
        let (engine, health, stop) = (&self.engine, &self.health, &self.stop_background);
        self.background
            .push(spawn_housekeeping(engine, health, stop)?);
        if prefaults {
            self.background.push(spawn_prefault(engine, health, stop)?);
        }
        Ok(())
    }

    /// Address of the request port, such as `tcp://127.0.0.1:5555`.
    pub fn endpoint(&self) -> &str {
        self.front.endpoint()
    }

    /// Address of the HTTP API.
    pub fn http_address(&self) -> SocketAddr {
        self.http_address
    }

    /// Address of the port for peers, if it has one.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.peers.as_ref().map(|port| port.address)
    }

    /// Access to HTTP.
    pub fn access(&self) -> &Arc<Access> {
        &self.access
    }

    /// Reads again what may change.
    pub fn reloader(&self) -> &Arc<Reloader> {
        &self.reloader
    }

    /// The engine, for programs that run a server in their own process.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Whether it serves, and if not, why.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// How long [`Server::stop`] may take.
    pub fn stop_limit(&self) -> Duration {
        let config = self.engine.config();
        let drain = config.l2.as_ref().map(|l2| l2.drain_timeout);
        config.stop_timeout + drain.unwrap_or_default()
    }

    /// Answers the requests in flight and stops.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.health.set_stopping();
        self.front.stop();
        // Its leases end with it.
        self.peers = None;
        self.stop_background.store(true, Ordering::Release);
        for thread in self.background.drain(..) {
            thread.thread().unpark();
            // A panic of it has been noted in the health.
            let _ = thread.join();
        }
        self.end_http();
        self.engine.close();
        // Last, since a collector may be silent: L1 is kept by then.
        self.engine.end_traces();
        // The front end goes with the fields, and only then the request port.
    }
}

impl Server {
    fn end_http(&mut self) {
        // Errors when no HTTP task listens any more.
        let _ = self.stop_http.send(true);
        if let Some((runtime, answered)) = self.http.take() {
            // The stop has its own limit.
            let until = Instant::now() + HTTP_GRACE.min(self.engine.config().stop_timeout / 4);
            // Disconnected when all are. The end of a runtime drops its tasks, whatever they are at.
            let _ = answered.recv_deadline(until);
            runtime.shutdown_timeout(until.saturating_duration_since(Instant::now()));
        }
    }
}

/// Ends this process whatever its threads do, with a little time for the last lines of the log: their reader may be stuck too.
pub fn end_process(code: i32) -> ! {
    std::thread::sleep(LAST_WORDS);
    kvtier_memory::exit_at_once(code)
}

/// Bound ports of HTTP, served from [`Http::serve`] on.
struct Http {
    runtime: Runtime,
    address: SocketAddr,
    listener: tokio::net::TcpListener,
    metrics: Option<tokio::net::TcpListener>,
}

impl Http {
    fn bind(config: &ServerConfig, api: &Arc<Api>, inherited: &mut Inherited) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(HTTP_THREADS)
            .thread_name("kvtier-http")
            .enable_all()
            .build()
            .map_err(|error| Error::io("no HTTP runtime", error))?;
        let mut bind = |flag: &str, port: u16| {
            // A host that cannot be resolved is an error of binding it.
            let addresses = (api.access.host(), port).to_socket_addrs();
            let bound = inherited.take_first(addresses.into_iter().flatten());
            runtime.block_on(http::bind(&api.access, flag, port, bound))
        };
        let (listener, address) = bind("http-port", config.http_port)?;
        let metrics = config
            .prometheus_port
            .map(|port| bind("prometheus-port", port))
            .transpose()?;
        Ok(Self {
            address,
            listener,
            metrics: metrics.map(|(listener, _)| listener),
            runtime,
        })
    }

    /// Serves in tasks of the runtime, until `stop`. What is returned beside it is disconnected when the requests in flight are
    /// answered.
    fn serve(self, api: &Arc<Api>, stop: &watch::Sender<bool>) -> (Runtime, Receiver<()>) {
        let (answering, answered) = crossbeam_channel::bounded::<()>(0);
        let stopped = || {
            let mut stop = stop.subscribe();
            async move {
                // Also ends when the sender was dropped.
                let _ = stop.wait_for(|stop| *stop).await;
            }
        };
        let serve = http::serve(self.listener, Arc::clone(api), stopped());
        self.runtime.spawn(held(answering.clone(), serve));
        if let Some(listener) = self.metrics {
            let serve = http::serve_metrics(listener, Arc::clone(api), stopped());
            self.runtime.spawn(held(answering, serve));
        }
        (self.runtime, answered)
    }
}

/// Runs a task, and drops what it holds when it ends.
async fn held<T>(holds: T, task: impl Future<Output = ()>) {
    task.await;
    drop(holds);
}

/// Runs a background task; a panic poisons it in the health instead of passing unnoticed.
fn spawn_background(
    name: &'static str,
    health: &Arc<Health>,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let health = Arc::clone(health);
    std::thread::Builder::new()
        .name(format!("kvtier-{name}"))
        .spawn(move || {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
                health.poison(name);
            }
        })
        .map_err(|error| Error::io("no thread", error))
}

fn spawn_housekeeping(
    engine: &Arc<Engine>,
    health: &Arc<Health>,
    stop: &Arc<AtomicBool>,
) -> Result<JoinHandle<()>> {
    let (engine, stop) = (Arc::clone(engine), Arc::clone(stop));
    let state = Arc::clone(health);
    spawn_background("housekeeping", health, move || {
        let mut clock = Clock::start(MAX_PAUSE);
        while !stop.load(Ordering::Acquire) {
            if clock.advance() {
                engine.forgive_silence();
            }
            engine.housekeep();
            if engine.lost_memory() {
                state.poison("L1 memory (pages were lost)");
            }
            if let Some(error) = engine.broken_gpu() {
                state.poison(&format!("GPU ({error})"));
            }
            state.count_round();
            std::thread::park_timeout(kvtier_engine::HOUSEKEEPING_INTERVAL);
        }
    })
}

fn spawn_prefault(
    engine: &Arc<Engine>,
    health: &Arc<Health>,
    stop: &Arc<AtomicBool>,
) -> Result<JoinHandle<()>> {
    let (engine, stop) = (Arc::clone(engine), Arc::clone(stop));
    spawn_background("prefault", health, move || engine.prefault(&stop))
}
