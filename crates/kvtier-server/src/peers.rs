//! The port for peers: L1, read-only, in Redis' protocol. It has threads of its own, and none if it is off.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_config::{ServerConfig, is_loopback};
use kvtier_core::ObjectKey;
use kvtier_engine::Engine;
use kvtier_l2::StoreItem;
use kvtier_l2::net::ServerTls;
use kvtier_l2_resp::{ObjectSource, PortOptions, ReadPort};
use tokio::runtime::Runtime;

/// Threads that send: as many as one fast network card keeps busy.
const THREADS: usize = 2;

/// Part of L1 that may be leased to peers.
const LEASED_PART: u64 = 8;

/// How long a send may hold up the end.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The bound port, which sends nothing before [`PeerListener::serve`].
pub(crate) struct PeerListener {
    listener: TcpListener,
    options: PortOptions,
}

impl PeerListener {
    /// Binds the port of a configuration, or another one for a check of the host; `None` without a port.
    ///
    /// # Errors
    /// One line that names the flag: what is missing, the system's error, or that other hosts could reach it without a password.
    pub(crate) fn bind(config: &ServerConfig, port: Option<u16>) -> Result<Option<Self>> {
        let Some(port) = config.peer_port.and(port) else {
            return Ok(None);
        };
        let options = options(config)?;
        let host = config.peer_host.as_str();
        let bound = (host, port).to_socket_addrs();
        let bound = bound.and_then(|addresses| TcpListener::bind(&*addresses.collect::<Vec<_>>()));
        let bound = bound.and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let (address, listener) = bound.map_err(|error| {
            Error::io(
                format!("--peer-host, --peer-port: {host}:{port} cannot be bound"),
                error,
            )
        })?;
        check_bound(&options, address.ip())?;
        Ok(Some(Self { listener, options }))
    }

    /// Serves L1 until the port is dropped, with at most `connections` at once.
    pub(crate) fn serve(mut self, engine: &Arc<Engine>, connections: u64) -> Result<PeerPort> {
        let failed = |error| Error::io("no port for peers", error);
        let address = self.listener.local_addr().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("kvtier-peers")
            .enable_all()
            .build()
            .map_err(failed)?;
        let objects = Arc::new(Resident(Arc::clone(engine)));
        self.options.max_connections = usize::try_from(connections).unwrap_or(usize::MAX);
        let port = ReadPort::new(self.options, objects).map_err(refused_tls)?;
        let listener = {
            let _within = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(failed)?
        };
        runtime.spawn(Arc::clone(&port).serve(listener));
        tracing::info!(%address, "peers may read L1");
        let runtime = Some(runtime);
        Ok(PeerPort {
            runtime,
            address,
            port,
        })
    }
}

/// The port while it is served. Dropping it ends all connections.
pub(crate) struct PeerPort {
    runtime: Option<Runtime>,
    pub(crate) address: SocketAddr,
    pub(crate) port: Arc<ReadPort>,
}

impl Drop for PeerPort {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END_TIMEOUT);
        }
    }
}

/// Warns of a password that travels in clear.
pub(crate) fn warning(config: &ServerConfig) -> Option<String> {
    config.peer_port?;
    let host = config.peer_host.as_str();
    let is_local = host == "localhost" || host.parse().is_ok_and(is_loopback);
    (!is_local && config.peer_tls_cert.is_none()).then(|| {
        format!(
            "--peer-host {host}: password and KV travel in clear, for all that see the traffic; give --peer-tls-cert and \
             --peer-tls-key, unless the network is trusted"
        )
    })
}

fn options(config: &ServerConfig) -> Result<PortOptions> {
    let tls = match (&config.peer_tls_cert, &config.peer_tls_key) {
        (Some(cert), Some(key)) => Some(ServerTls {
            cert: cert.clone(),
            key: key.clone(),
            ca: config.peer_tls_ca.clone(),
        }),
        (None, None) if config.peer_tls_ca.is_none() => None,
        _ => {
            return Err(Error::refused(
                "--peer-tls-cert, --peer-tls-key, --peer-tls-ca: give the first two together, and the third beside them only",
            ));
        }
    };
    if let Some(tls) = &tls {
        tls.settings().map_err(refused_tls)?;
    }
    Ok(PortOptions {
        password: config.peer_password.clone().unwrap_or_default(),
        tls,
        bandwidth: config.peer_bandwidth,
        max_leased: config.l1_bytes / LEASED_PART,
        ..PortOptions::default()
    })
}

/// Checks that the port may be served where the system has bound the host: only then is it known what a name means.
fn check_bound(options: &PortOptions, ip: IpAddr) -> Result<()> {
    let asks_for_certificates = options.tls.as_ref().is_some_and(|tls| tls.ca.is_some());
    if is_loopback(ip) || asks_for_certificates || !options.password.is_empty() {
        return Ok(());
    }
    Err(Error::refused(format!(
        "--peer-host: {ip} is reachable from other hosts, where every client could read the KV of every tenant; give --peer-password, \
         or --peer-tls-ca with a certificate, or keep it on loopback"
    )))
}

/// Reads the certificate of a port again; returns its name, if there is one.
///
/// # Errors
/// A certificate or key that cannot be used; the previous version stays.
pub(crate) fn reload(port: &ReadPort) -> Result<Option<&'static str>> {
    let what = "the certificate and key for peers";
    let is_there = port.reload().map_err(|error| {
        tracing::error!(target: "audit", %error, "{what}: reload failed; keeping the previous version");
        refused_tls(error).hint("the previous version stays in use")
    })?;
    if is_there {
        tracing::info!(target: "audit", "{what} read again");
    }
    Ok(is_there.then_some(what))
}

fn refused_tls(error: impl std::fmt::Display) -> Error {
    // It begins with tls_ca, tls_cert or tls_key.
    let told = error.to_string();
    let (name, what) = told.split_once(':').unwrap_or(("tls", &told));
    Error::refused(format!("--peer-{}:{what}", name.replace('_', "-")))
}

/// What L1 holds.
struct Resident(Arc<Engine>);

impl ObjectSource for Resident {
    fn hold(&self, key: &ObjectKey) -> Option<StoreItem> {
        self.0.hold(key)
    }

    fn count_sent(&self, bytes: u64) {
        self.0.metrics().peer_sent(bytes);
    }

    fn count_connection(&self, change: i64) {
        self.0.metrics().peer_connections.inc_by(change);
    }
}
