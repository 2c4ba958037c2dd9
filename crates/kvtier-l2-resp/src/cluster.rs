//! A cluster: its primaries, and which of them serves which slot. A task of its own asks for that: at the start, after a
//! redirect, and when a node is away.
//!
//! `topology` guards the primaries and their slots, `task` the task that asks for them, until it has ended; no other lock is
//! acquired inside.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::RespOptions;
use super::address::Address;
use super::command::Commands;
use super::endpoint::{Endpoint, MAX_CONNECTING};
use super::errors;
use super::pool::ConnectionPool;
use super::reply::Value;
use super::slots::{self, Range, Redirect, SLOTS, slot};
use kvtier_l2::{ErrorKind, L2Error, backoff::REFUSED_PAUSE};

/// Primaries at most. Redis' own limit of recommendation is 1000 nodes.
const MAX_PRIMARIES: usize = 1000;

/// Nodes beside those that serve slots, by redirects.
const MAX_OTHERS: usize = 16;

/// Time between two questions for the slots at least, and at most.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// Longest pause after a question that no node answered.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Time after which another node is asked for the slots too.
const NEXT_NODE: Duration = Duration::from_millis(500);

/// A cluster.
pub(super) struct Cluster {
    shared: Arc<ClusterNodes>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct ClusterNodes {
    options: Arc<RespOptions>,
    connecting: Arc<Semaphore>,
    topology: Mutex<Topology>,
    /// Number of questions for the slots.
    questions: AtomicUsize,
    /// The outcome of the last question for the slots; none before the first.
    asked: watch::Sender<Option<Result<(), L2Error>>>,
    is_wanted: Notify,
}

/// Primaries, and the slots that each one serves.
#[derive(Default)]
struct Topology {
    primaries: Vec<Arc<ConnectionPool>>,
    /// How many of them serve slots; the others are there because of redirects.
    serving: usize,
    /// Indices of them per slot, or `NONE`; empty before they are known.
    slots: Vec<u16>,
    /// There will be no more nodes.
    is_closed: bool,
}

const NONE: u16 = u16::MAX;

impl Cluster {
    /// Starts to ask for its slots. To be called within a tokio runtime.
    pub(super) fn open(options: Arc<RespOptions>) -> Self {
        let shared = Arc::new(ClusterNodes {
            options,
            connecting: Arc::new(Semaphore::new(MAX_CONNECTING)),
            topology: Mutex::new(Topology::default()),
            questions: AtomicUsize::new(0),
            asked: watch::Sender::new(None),
            is_wanted: Notify::new(),
        });
        let task = tokio::spawn(keep(Arc::clone(&shared)));
        Self {
            shared,
            task: Mutex::new(Some(task)),
        }
    }

    /// Waits until the slots were asked for once.
    pub(super) async fn until_asked(&self) {
        // Fails only without a sender, which is here.
        let _ = self
            .shared
            .asked
            .subscribe()
            .wait_for(Option::is_some)
            .await;
    }

    /// The primary of a key.
    pub(super) async fn primary_of(&self, key: &[u8]) -> Result<Arc<ConnectionPool>, L2Error> {
        self.until_asked().await;
        let slot = slot(key);
        if let Some(found) = self.shared.topology.lock().at(slot) {
            return Ok(found);
        }
        self.refresh();
        Err(self.unknown())
    }

    /// Why there is no node.
    pub(super) fn unknown(&self) -> L2Error {
        let what = "no node of the cluster serves the slot";
        let error = self.error();
        error.unwrap_or_else(|| L2Error::new(ErrorKind::Unavailable, what))
    }

    /// The node that another one sent a command to.
    ///
    /// # Errors
    /// If there are too many such nodes.
    pub(super) fn redirected(&self, redirect: &Redirect) -> Result<Arc<ConnectionPool>, L2Error> {
        let Some(node) = self.shared.node_at(&redirect.to) else {
            let what = format!(
                "sent to {}, which is none of the cluster's nodes",
                redirect.to
            );
            return Err(L2Error::new(ErrorKind::Unavailable, what));
        };
        if redirect.is_for_good {
            self.shared
                .topology
                .lock()
                .assign(redirect.slot, redirect.slot, &node);
            self.refresh();
        }
        Ok(node)
    }

    /// Asks for the slots as soon as it may.
    pub(super) fn refresh(&self) {
        self.shared.is_wanted.notify_one();
    }

    /// Returns the cluster's primaries, by address.
    pub(super) fn primaries(&self) -> Vec<Arc<ConnectionPool>> {
        let topology = self.shared.topology.lock();
        let serving: BTreeSet<_> = topology.slots.iter().copied().collect();
        let serving = serving.into_iter().map(usize::from);
        let serving = serving.filter_map(|at| topology.primaries.get(at).cloned());
        let mut serving: Vec<_> = serving.collect();
        drop(topology);
        serving.sort_by(|a, b| a.endpoint.addresses.cmp(&b.endpoint.addresses));
        serving
    }

    /// Whether the slots were never asked for.
    pub(super) fn is_new(&self) -> bool {
        self.shared.asked.borrow().is_none()
    }

    /// Why its slots are not known, or not all served.
    pub(super) fn error(&self) -> Option<L2Error> {
        if let Some(Err(error)) = &*self.shared.asked.borrow() {
            return Some(error.clone());
        }
        let topology = self.shared.topology.lock();
        let is_partial = topology.slots.contains(&NONE);
        is_partial.then(|| {
            L2Error::new(
                ErrorKind::Unavailable,
                "some slots of the cluster have no node",
            )
        })
    }

    /// Ends the connections when their calls have ended.
    pub(super) async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            // It is not running any more then.
            let _ = task.await;
        }
        let closed = L2Error::new(ErrorKind::Unavailable, "the adapter is closed");
        self.shared.asked.send_replace(Some(Err(closed)));
        let none = Topology {
            is_closed: true,
            ..Topology::default()
        };
        let topology = std::mem::replace(&mut *self.shared.topology.lock(), none);
        for pool in topology.primaries {
            pool.close().await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(task) = &*self.task.lock() {
            task.abort();
        }
    }
}

impl Topology {
    fn at(&self, slot: u16) -> Option<Arc<ConnectionPool>> {
        let at = *self.slots.get(usize::from(slot))?;
        self.primaries.get(usize::from(at)).cloned()
    }

    fn assign(&mut self, first: u16, last: u16, node: &Arc<ConnectionPool>) {
        let at = self
            .primaries
            .iter()
            .position(|pool| Arc::ptr_eq(pool, node));
        let slots = self.slots.get_mut(usize::from(first)..=usize::from(last));
        if let (Some(at), Some(slots)) = (at, slots) {
            slots.fill(u16::try_from(at).unwrap_or(NONE));
        }
    }

    fn find(&self, address: &Address) -> Option<Arc<ConnectionPool>> {
        let is_at = |pool: &&Arc<ConnectionPool>| pool.endpoint.addresses.first() == Some(address);
        self.primaries.iter().find(is_at).cloned()
    }
}

impl ClusterNodes {
    fn endpoint(&self, address: &Address) -> Endpoint {
        let connecting = Arc::clone(&self.connecting);
        Endpoint::new(vec![address.clone()], Arc::clone(&self.options), connecting)
    }

    /// The node at an address; the first call about it begins to connect. None if there are too many.
    fn node_at(&self, address: &Address) -> Option<Arc<ConnectionPool>> {
        {
            let topology = self.topology.lock();
            let is_full = topology.primaries.len() >= topology.serving + MAX_OTHERS;
            let known = topology.find(address);
            if known.is_some() || is_full || topology.is_closed {
                return known;
            }
        }
        let opened = Arc::new(ConnectionPool::open(self.endpoint(address)));
        let mut topology = self.topology.lock();
        if topology.is_closed {
            return None;
        }
        let known = topology.find(address);
        if known.is_none() {
            topology.primaries.push(Arc::clone(&opened));
        }
        Some(known.unwrap_or(opened))
    }

    /// Addresses to ask for the slots: nodes that are connected, each in turn the first, then those of the configuration,
    /// whose names may have other addresses now, then the others.
    fn candidates(&self) -> Vec<Address> {
        let nodes = self.topology.lock().primaries.clone();
        let (mut up, down): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.health().up > 0);
        let turn = self.questions.fetch_add(1, Ordering::Relaxed);
        let first = turn % up.len().max(1);
        up.rotate_left(first);
        let address = |node: &Arc<ConnectionPool>| node.endpoint.addresses.first().cloned();
        let mut addresses: Vec<_> = up.into_iter().filter_map(address).collect();
        addresses.extend(self.options.addresses.iter().cloned());
        addresses.extend(down.into_iter().filter_map(address));
        let mut seen = HashSet::new();
        addresses.retain(|address| seen.insert(address.clone()));
        addresses
    }

    /// Asks nodes for the slots until one answers, the next one whenever one fails or takes long.
    async fn refresh(self: &Arc<Self>) -> Result<(), L2Error> {
        let mut candidates = self.candidates().into_iter();
        let mut asked = JoinSet::new();
        let mut failed = L2Error::new(ErrorKind::Unavailable, "the cluster has no address");
        loop {
            if let Some(address) = candidates.next() {
                let shared = Arc::clone(self);
                asked.spawn(async move { shared.ask(&address).await });
            } else if asked.is_empty() {
                return Err(failed);
            }
            let pause = match candidates.len() {
                0 => MAX_INTERVAL,
                _ => NEXT_NODE,
            };
            match timeout(pause, asked.join_next()).await {
                Ok(Some(Ok(Ok(ranges)))) => {
                    self.apply(&ranges);
                    return Ok(());
                }
                Ok(Some(Ok(Err(error)))) => failed = error,
                _ => {}
            }
        }
    }

    async fn ask(&self, address: &Address) -> Result<Vec<Range>, L2Error> {
        let endpoint = self.endpoint(address);
        let mut question = Commands::default();
        question.push(&[b"CLUSTER", b"SLOTS"]);
        let replies = endpoint.ask_once(question).await?;
        let ranges = match replies.first() {
            Some(Value::Error(text)) => return Err(errors::of(&endpoint, text)),
            Some(reply) => slots::ranges(reply, address),
            None => None,
        };
        let ranges = ranges.ok_or_else(|| endpoint.unexpected())?;
        match ranges.is_empty() {
            false => Ok(ranges),
            // A node that has left its cluster, or never joined one.
            true => Err(endpoint.error(ErrorKind::Unavailable, &"it knows no slots")),
        }
    }

    fn apply(&self, ranges: &[Range]) {
        let mut next = Topology {
            primaries: Vec::new(),
            slots: vec![NONE; usize::from(SLOTS)],
            ..Topology::default()
        };
        for range in ranges {
            let known = next.find(&range.primary);
            let node = match known {
                Some(node) => node,
                None if next.primaries.len() >= MAX_PRIMARIES => continue,
                None => {
                    let node = self.topology.lock().find(&range.primary);
                    let node = node.unwrap_or_else(|| {
                        Arc::new(ConnectionPool::open(self.endpoint(&range.primary)))
                    });
                    next.primaries.push(Arc::clone(&node));
                    node
                }
            };
            next.assign(range.first, range.last, &node);
        }
        next.serving = next.primaries.len();
        let before = std::mem::replace(&mut *self.topology.lock(), next);
        // Connections to nodes that serve nothing any more end with their calls.
        drop(before);
    }
}

/// Keeps the slots of a cluster known.
async fn keep(shared: Arc<ClusterNodes>) {
    let mut failures = 0;
    loop {
        let asked_at = Instant::now();
        let asked = shared.refresh().await;
        let pause = match &asked {
            Ok(()) => None,
            Err(error) if error.kind() == ErrorKind::Refused => Some(REFUSED_PAUSE),
            Err(_) => Some(
                MIN_INTERVAL
                    .saturating_mul(1 << failures.min(3))
                    .min(MAX_PAUSE),
            ),
        };
        match &asked {
            Err(error) if failures == 0 => {
                tracing::warn!(tier = shared.options.tier, %error, "no node of a second tier's cluster answers; calls fail");
            }
            Ok(()) if failures > 0 => {
                tracing::info!(
                    tier = shared.options.tier,
                    "the cluster of a second tier answers again"
                );
            }
            _ => {}
        }
        failures = if asked.is_err() { failures + 1 } else { 0 };
        shared.asked.send_replace(Some(asked));
        match pause {
            Some(pause) => sleep(pause).await,
            None => {
                let wanted = timeout(MAX_INTERVAL, shared.is_wanted.notified());
                // Either is a reason to ask again.
                let _ = wanted.await;
                sleep_until(asked_at + MIN_INTERVAL).await;
            }
        }
    }
}
