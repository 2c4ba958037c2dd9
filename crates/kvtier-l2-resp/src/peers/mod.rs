//! Other servers as a tier: `peers`. It asks their [read-only ports](crate::ReadPort) for what L1 and nearer tiers lack.
//!
//! Each peer is a `resp` tier of its own, with breaker and deadlines. What a peer says is a hint: bytes count only with a
//! companion that is their own, so a peer that is absent, slow, damaged or of another version costs nothing but its hits.
//!
//! The mutexes guard which peers there are, which names are not resolved, and which peer has an object; no other lock is
//! acquired inside.

mod options;

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use serde_json::{Value as Json, json};
use tokio::net::lookup_host;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::address::Address;
use super::{KEYS_PER_CALL, RespAdapter, RespOptions};
use kvtier_l2::{
    Adapter, BoxFuture, Capabilities, ErrorKind, L2Error, ListPage, Listed, LoadItem, Loaded,
    ObjectSpec, Recovered, StoreItem, Stored, trailer, wrap,
};
pub use options::{OWN_PORT, PEERS, PeersOptions};

/// Peers that a lookup asks at most.
const MAX_ASKED: usize = 8;

/// Interval at which names are resolved again, and the longest time that it takes.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(5);

/// Objects whose peers are remembered, from a lookup to its loads.
const MAX_PLACES: usize = 1 << 16;

/// How long a peer counts only where no other has an object, after a load from it failed.
const DISTRUST: Duration = Duration::from_secs(60);

/// How long a peer that a request names is asked before others: the lookup may wait for its turn.
const PREFERENCE: Duration = Duration::from_secs(2);

/// A part of a lookup: the peer, the first object that it was asked about, and the lengths that it has.
type Answer = (Arc<Peer>, usize, Vec<Option<u64>>);

/// A server that is read from.
struct Peer {
    /// Name or address that the configuration gives.
    host: String,
    address: SocketAddr,
    adapter: Arc<dyn Adapter>,
    /// When it last answered, in nanoseconds of the tier; 0 is never.
    answered_at: AtomicU64,
    /// When a load from it last failed, likewise.
    failed_at: AtomicU64,
    /// When a request last named it, likewise.
    preferred_at: AtomicU64,
}

/// What the tier and the tasks that resolve names share.
struct Known {
    options: PeersOptions,
    peers: Mutex<Vec<Arc<Peer>>>,
    /// Why a name is not resolved.
    unresolved: Mutex<BTreeMap<String, String>>,
    places: Mutex<HashMap<ObjectKey, Arc<Peer>>>,
}

/// Adapter of other servers.
pub struct PeersAdapter {
    known: Arc<Known>,
    /// One task per name: a name that hangs delays no other.
    resolvers: Vec<JoinHandle<()>>,
    started: Instant,
    /// Peers that have answered in none of the last lookups get their turn.
    turn: AtomicU64,
}

impl PeersAdapter {
    /// Starts to look for the peers. To be called within a tokio runtime.
    #[must_use]
    pub fn open(options: PeersOptions) -> Self {
        let known = Arc::new(Known {
            options,
            peers: Mutex::default(),
            unresolved: Mutex::default(),
            places: Mutex::default(),
        });
        let names = known.options.peers.clone().into_iter();
        let resolve = |(host, port)| tokio::spawn(resolve(Arc::clone(&known), host, port));
        Self {
            resolvers: names.map(resolve).collect(),
            known,
            started: Instant::now(),
            turn: AtomicU64::new(0),
        }
    }

    /// The options of the tier.
    #[must_use]
    pub fn options(&self) -> &PeersOptions {
        &self.known.options
    }

    /// Peers that a lookup asks: all of them, or the one that a request named last, those that answered last, and one of the others.
    fn asked(&self) -> Vec<Arc<Peer>> {
        let mut peers = self.known.peers.lock().clone();
        if peers.len() > MAX_ASKED {
            let named = peers
                .iter()
                .filter(|peer| self.is_recent(&peer.preferred_at, PREFERENCE))
                .max_by_key(|peer| peer.preferred_at.load(Ordering::Relaxed))
                .map(|peer| peer.address);
            // Cached, since they change meanwhile.
            peers.sort_by_cached_key(|peer| {
                let answered = peer.answered_at.load(Ordering::Relaxed);
                std::cmp::Reverse((Some(peer.address) == named, answered))
            });
            let others = peers.len() - (MAX_ASKED - 1);
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) as usize % others;
            peers.swap(MAX_ASKED - 1, MAX_ASKED - 1 + turn);
            peers.truncate(MAX_ASKED);
        }
        peers
    }

    /// Time of the tier in nanoseconds; never 0.
    fn now(&self) -> u64 {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        now.max(1)
    }

    /// Whether something was at most this long ago.
    fn is_recent(&self, at: &AtomicU64, life: Duration) -> bool {
        let at = at.load(Ordering::Relaxed);
        at > 0 && Duration::from_nanos(self.now().saturating_sub(at)) < life
    }

    /// Takes the lengths that are not known yet; notes the peer with each.
    fn note(&self, objects: &[ObjectSpec], found: &mut [Option<u64>], answer: Answer) {
        let (peer, at, lengths) = answer;
        let mut places = self.known.places.lock();
        if places.len() + lengths.len() > MAX_PLACES {
            places.clear();
        }
        let asked = objects.iter().zip(found).skip(at);
        for ((object, found), length) in asked.zip(lengths) {
            if found.is_none() && length.is_some() {
                places.insert(object.key.clone(), Arc::clone(&peer));
                *found = length;
            }
        }
    }

    /// The lengths that peers have; notes the first peer with each. Ends early once all are known, or with what has arrived
    /// shortly before its deadline.
    async fn ask(&self, objects: Vec<ObjectSpec>) -> Vec<Option<u64>> {
        let until = Instant::now() + self.known.options.lookup_timeout * 9 / 10;
        let mut found = vec![None; objects.len()];
        let (told, mut answers) = mpsc::unbounded_channel::<Answer>();
        let mut doubtful = Vec::new();
        let mut calls = JoinSet::new();
        for peer in self.asked() {
            let (objects, told) = (objects.clone(), told.clone());
            calls.spawn(async move {
                for (part, at) in objects
                    .chunks(KEYS_PER_CALL)
                    .zip((0..).step_by(KEYS_PER_CALL))
                {
                    // A peer that is late is asked no further.
                    let Ok(lengths) = peer.adapter.lookup(part.to_vec()).await else {
                        return;
                    };
                    let _ = told.send((Arc::clone(&peer), at, lengths));
                }
            });
        }
        drop(told);
        while let Ok(Some(answer)) = timeout_at(until, answers.recv()).await {
            answer.0.answered_at.store(self.now(), Ordering::Relaxed);
            if self.is_recent(&answer.0.failed_at, DISTRUST) {
                doubtful.push(answer);
                continue;
            }
            self.note(&objects, &mut found, answer);
            if found.iter().all(Option::is_some) {
                break;
            }
        }
        for answer in doubtful {
            self.note(&objects, &mut found, answer);
        }
        found
    }

    /// The peer of each object, by a lookup where none has told yet.
    async fn places_of(&self, batch: &[LoadItem]) -> Vec<Option<Arc<Peer>>> {
        let known = || -> Vec<_> {
            let places = self.known.places.lock();
            let place = |item: &LoadItem| places.get(&item.object.key).cloned();
            batch.iter().map(place).collect()
        };
        let places = known();
        let unknown = batch
            .iter()
            .zip(&places)
            .filter(|(_, place)| place.is_none());
        let unknown: Vec<_> = unknown.map(|(item, _)| item.object.clone()).collect();
        if unknown.is_empty() {
            return places;
        }
        self.ask(unknown).await;
        known()
    }
}

/// Resolves a name of peers, again and again.
async fn resolve(known: Arc<Known>, host: String, port: u16) {
    loop {
        let resolved = timeout(RESOLVE_INTERVAL, lookup_host((&*host, port))).await;
        let failure = match resolved {
            Ok(Ok(addresses)) => {
                known.replace(&host, port, addresses.collect());
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("not resolved within {RESOLVE_INTERVAL:?}")),
        };
        known.log_resolved(&host, failure);
        sleep(RESOLVE_INTERVAL).await;
    }
}

impl Known {
    /// Replaces the peers of a name. An address that another name has too is one peer, and this server is none.
    fn replace(&self, host: &str, port: u16, mut addresses: Vec<SocketAddr>) {
        if self.options.own_port == Some(port) {
            addresses.retain(|address| !is_of_this_host(address.ip()));
        }
        let is_gone = |peer: &Peer| {
            peer.host == host && peer.address.port() == port && !addresses.contains(&peer.address)
        };
        let mut peers = self.peers.lock();
        let before = peers.len();
        peers.retain(|peer| !is_gone(peer));
        let has_lost = peers.len() < before;
        for address in &addresses {
            if !peers.iter().any(|peer| peer.address == *address) {
                peers.push(Peer::open(&self.options, host, *address));
            }
        }
        drop(peers);
        if has_lost {
            self.places.lock().retain(|_, peer| !is_gone(peer));
        }
    }

    /// Notes whether a name was resolved, and logs a change.
    fn log_resolved(&self, host: &str, failure: Option<String>) {
        let mut unresolved = self.unresolved.lock();
        let before = match &failure {
            Some(error) => unresolved.insert(host.to_owned(), error.clone()),
            None => unresolved.remove(host),
        };
        drop(unresolved);
        let tier = &self.options.common.tier;
        match (before, failure) {
            (None, Some(error)) => tracing::warn!(
                tier,
                host,
                error,
                "a name of peers cannot be resolved; keeping the addresses that it had"
            ),
            (Some(_), None) => tracing::info!(tier, host, "a name of peers is resolved again"),
            _ => {}
        }
    }
}

impl Peer {
    /// Starts to connect to a peer.
    fn open(from: &PeersOptions, host: &str, address: SocketAddr) -> Arc<Self> {
        let mut options = RespOptions {
            addresses: vec![Address::Tcp(address.ip().to_string(), address.port())],
            ..from.common.clone()
        };
        if let Some(tls) = &mut options.tls {
            // The certificate is for the name that was resolved.
            tls.server_name.get_or_insert_with(|| host.to_owned());
        }
        let adapter = RespAdapter::open(PEERS.name(), &options);
        Arc::new(Self {
            host: host.to_owned(),
            address,
            adapter: wrap::guard(Arc::new(adapter), &from.guards),
            answered_at: AtomicU64::new(0),
            failed_at: AtomicU64::new(0),
            preferred_at: AtomicU64::new(0),
        })
    }
}

impl Drop for PeersAdapter {
    fn drop(&mut self) {
        self.resolvers.iter().for_each(JoinHandle::abort);
    }
}

/// The answer to a call that writes.
fn read_only() -> L2Error {
    L2Error::new(ErrorKind::Unsupported, "peers are only read")
}

impl Adapter for PeersAdapter {
    fn kind(&self) -> &'static str {
        PEERS.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            shared: true,
            verifies: true,
            ..Capabilities::default()
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move { batch.iter().map(|_| Err(read_only())).collect() })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move { Ok(self.ask(batch).await) })
    }

    fn prefer(&self, host: &str) {
        let peers = self.known.peers.lock().clone();
        let is_named =
            |peer: &&Arc<Peer>| peer.host == host || host.parse() == Ok(peer.address.ip());
        let mut named = peers.iter().filter(is_named).peekable();
        if named.peek().is_none() {
            let tier = &self.known.options.common.tier;
            tracing::debug!(
                tier,
                ?host,
                "a request names a host that is no peer; ignoring it"
            );
        }
        let now = self.now();
        named.for_each(|peer| peer.preferred_at.store(now, Ordering::Relaxed));
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let places = self.places_of(&batch).await;
            let mut by_peer: Vec<(Arc<Peer>, Vec<usize>)> = Vec::new();
            for (at, place) in places.into_iter().enumerate() {
                let Some(place) = place else { continue };
                match by_peer
                    .iter_mut()
                    .find(|(peer, _)| Arc::ptr_eq(peer, &place))
                {
                    Some((_, items)) => items.push(at),
                    None => by_peer.push((place, vec![at])),
                }
            }
            let mut calls = JoinSet::new();
            for (peer, items) in by_peer {
                let own = items.iter().map(|at| batch[*at].clone()).collect();
                calls.spawn(async move {
                    let loaded = peer.adapter.load(own).await;
                    (peer, items, loaded)
                });
            }
            let absent = L2Error::new(ErrorKind::NotFound, "no peer has the object");
            let mut results: Vec<_> = batch.iter().map(|_| Err(absent.clone())).collect();
            while let Some(call) = calls.join_next().await {
                let Ok((peer, items, loaded)) = call else {
                    continue;
                };
                for (at, result) in items.into_iter().zip(loaded) {
                    if let Err(error) = &result {
                        self.known.places.lock().remove(&batch[at].object.key);
                        if is_fault_of_peer(error.kind()) {
                            peer.failed_at.store(self.now(), Ordering::Relaxed);
                        }
                    }
                    results[at] = result.map_err(as_miss);
                }
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move { keys.iter().map(|_| Err(read_only())).collect() })
    }

    fn list(&self, _: Option<String>, _: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async { Err(read_only()) })
    }

    fn recover<'a>(
        &'a self,
        _: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async { Err(read_only()) })
    }

    fn size_of(&self, len: u64) -> u64 {
        len.saturating_add(trailer::LEN as u64)
    }

    fn status(&self) -> Json {
        let peers = self.known.peers.lock().clone();
        let now = self.started.elapsed();
        let of_peer = |peer: &Arc<Peer>| {
            let mut status = peer.adapter.status();
            let answered = Duration::from_nanos(peer.answered_at.load(Ordering::Relaxed));
            let age = (!answered.is_zero()).then(|| now.saturating_sub(answered).as_secs_f64());
            status["host"] = peer.host.clone().into();
            status["answered_seconds_ago"] = age.into();
            status
        };
        let peers: Vec<_> = peers.iter().map(of_peer).collect();
        let is_up = |peer: &&Json| peer["connected"] != 0;
        let connected = peers.iter().filter(is_up).count();
        let unresolved = self.known.unresolved.lock().clone();
        // A peer that is away is no failure of this server while it has others.
        let error = || {
            let of_peer = peers.iter().find_map(|peer| peer["error"].as_str());
            let of_name = unresolved.iter().next();
            let of_name = of_name.map(|(host, error)| format!("{host}: {error}"));
            of_peer.map(str::to_owned).or(of_name)
        };
        let error = (connected == 0).then(error).flatten();
        json!({
            "is_healthy": error.is_none(),
            "type": self.kind(),
            "error": error,
            "connected_peers": connected,
            "unresolved": unresolved,
            "peers": peers,
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.resolvers.iter().for_each(JoinHandle::abort);
            let peers = std::mem::take(&mut *self.known.peers.lock());
            self.known.places.lock().clear();
            let mut closes = JoinSet::new();
            for peer in peers {
                closes.spawn(async move { peer.adapter.close().await });
            }
            closes.join_all().await;
        })
    }
}

/// Whether an address is one of this host.
fn is_of_this_host(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Whether a failed load says that its peer claims what it does not give: neither that an object was evicted, nor a limit
/// of this side.
fn is_fault_of_peer(kind: ErrorKind) -> bool {
    use ErrorKind::{Busy, Deadline, Memory, NotFound};
    !matches!(kind, NotFound | Deadline | Busy | Memory)
}

/// The failure of a peer as a miss: it says nothing of the others. Only while its call may still write is it told as it is.
fn as_miss(error: L2Error) -> L2Error {
    match error.kind() {
        ErrorKind::Deadline | ErrorKind::Corrupt => error,
        _ => L2Error::new(ErrorKind::NotFound, error.to_string()),
    }
}
