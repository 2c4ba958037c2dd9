//! A cluster: its primaries, and which of them serves which slot. A task of its own asks for that: at the start, after a
//! redirect, and when a node is away.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvtier_sync::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::RespOptions;
use super::address::Address;
use super::command::Commands;
use super::endpoint::Endpoint;
use super::errors;
use super::pool::Pool;
use super::reply::Value;
use super::slots::{self, Range, Redirect, SLOTS, slot};
use crate::RateLimited;
use crate::error::{ErrorKind, L2Error};

/// Primaries at most. Redis' own limit of recommendation is 1000 nodes.
const MAX_PRIMARIES: usize = 1000;

/// Time between two questions for the slots at least, and at most.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// A cluster.
pub(super) struct Cluster {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    options: Arc<RespOptions>,
    topology: Mutex<Topology>,
    /// The outcome of the last question for the slots; none before the first.
    asked: watch::Sender<Option<Result<(), L2Error>>>,
    is_wanted: Notify,
}

/// Which primary serves which slot.
#[derive(Default)]
struct Topology {
    primaries: Vec<Arc<Pool>>,
    /// Indices of them per slot, or `NONE`; empty before they are known.
    slots: Vec<u16>,
}

const NONE: u16 = u16::MAX;

impl Cluster {
    /// Starts to ask for its slots. To be called within a tokio runtime.
    pub(super) fn open(options: Arc<RespOptions>) -> Self {
        let shared = Arc::new(Shared {
            options,
            topology: Mutex::new(Topology::default()),
            asked: watch::Sender::new(None),
            is_wanted: Notify::new(),
        });
        let task = tokio::spawn(keep(Arc::clone(&shared)));
        Self { shared, task }
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
    pub(super) async fn primary_of(&self, key: &[u8]) -> Result<Arc<Pool>, L2Error> {
        self.until_asked().await;
        let slot = slot(key);
        if let Some(found) = self.shared.topology.lock().at(slot) {
            return Ok(found);
        }
        self.refresh();
        let what = format!("no node of the cluster serves slot {slot}");
        let error = self.error();
        Err(error.unwrap_or_else(|| L2Error::new(ErrorKind::Unavailable, what)))
    }

    /// The node that another one sent a command to.
    pub(super) fn redirected(&self, redirect: &Redirect) -> Arc<Pool> {
        let node = self.shared.node_at(&redirect.to);
        if redirect.is_for_good {
            self.shared
                .topology
                .lock()
                .assign(redirect.slot, redirect.slot, &node);
            self.refresh();
        }
        node
    }

    /// Asks for the slots as soon as it may.
    pub(super) fn refresh(&self) {
        self.shared.is_wanted.notify_one();
    }

    /// Its primaries, by address.
    pub(super) fn primaries(&self) -> Vec<Arc<Pool>> {
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
        self.task.abort();
        let topology = std::mem::take(&mut *self.shared.topology.lock());
        for pool in topology.primaries {
            pool.close().await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Topology {
    fn at(&self, slot: u16) -> Option<Arc<Pool>> {
        let at = *self.slots.get(usize::from(slot))?;
        self.primaries.get(usize::from(at)).cloned()
    }

    fn assign(&mut self, first: u16, last: u16, node: &Arc<Pool>) {
        let at = self
            .primaries
            .iter()
            .position(|pool| Arc::ptr_eq(pool, node));
        let slots = self.slots.get_mut(usize::from(first)..=usize::from(last));
        if let (Some(at), Some(slots)) = (at, slots) {
            slots.fill(u16::try_from(at).unwrap_or(NONE));
        }
    }

    fn find(&self, address: &Address) -> Option<Arc<Pool>> {
        let is_at = |pool: &&Arc<Pool>| pool.endpoint.addresses.first() == Some(address);
        self.primaries.iter().find(is_at).cloned()
    }
}

impl Shared {
    fn endpoint(&self, address: &Address) -> Endpoint {
        Endpoint {
            addresses: vec![address.clone()],
            options: Arc::clone(&self.options),
        }
    }

    /// The node at an address; the first call about it begins to connect.
    fn node_at(&self, address: &Address) -> Arc<Pool> {
        let known = self.topology.lock().find(address);
        if let Some(pool) = known {
            return pool;
        }
        let opened = Arc::new(Pool::open(self.endpoint(address)));
        let mut topology = self.topology.lock();
        match topology.find(address) {
            Some(pool) => pool,
            None => {
                if topology.primaries.len() < MAX_PRIMARIES {
                    topology.primaries.push(Arc::clone(&opened));
                }
                opened
            }
        }
    }

    /// Asks nodes for the slots until one answers: those that are connected first.
    async fn refresh(&self) -> Result<(), L2Error> {
        let mut nodes = self.topology.lock().primaries.clone();
        nodes.sort_by_key(|node| node.health().up == 0);
        let known = nodes
            .iter()
            .filter_map(|node| node.endpoint.addresses.first());
        let mut addresses: Vec<_> = known.chain(&self.options.addresses).cloned().collect();
        let mut seen = HashSet::new();
        addresses.retain(|address| seen.insert(address.clone()));
        let mut failed = L2Error::new(ErrorKind::Unavailable, "the cluster has no address");
        for address in &addresses {
            match self.ask(address).await {
                Ok(ranges) => {
                    self.apply(&ranges);
                    return Ok(());
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
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
        };
        for range in ranges {
            let known = next.find(&range.primary);
            let node = match known {
                Some(node) => node,
                None if next.primaries.len() >= MAX_PRIMARIES => continue,
                None => {
                    let node = self.topology.lock().find(&range.primary);
                    let node =
                        node.unwrap_or_else(|| Arc::new(Pool::open(self.endpoint(&range.primary))));
                    next.primaries.push(Arc::clone(&node));
                    node
                }
            };
            next.assign(range.first, range.last, &node);
        }
        let before = std::mem::replace(&mut *self.topology.lock(), next);
        // Connections to nodes that serve nothing any more end with their calls.
        drop(before);
    }
}

/// Keeps the slots of a cluster known.
async fn keep(shared: Arc<Shared>) {
    let mut has_failed = false;
    loop {
        let asked_at = Instant::now();
        let asked = shared.refresh().await;
        if let Err(error) = &asked {
            static LOG_LIMIT: RateLimited = RateLimited::per_second();
            if !has_failed && let Some(left_out) = LOG_LIMIT.permit(std::time::Instant::now()) {
                tracing::warn!(%error, left_out, "no node of a second tier's cluster answers; calls fail");
            }
        } else if has_failed {
            tracing::info!("the cluster of a second tier answers again");
        }
        has_failed = asked.is_err();
        shared.asked.send_replace(Some(asked));
        if !has_failed {
            tokio::select! {
                () = shared.is_wanted.notified() => {}
                () = sleep(MAX_INTERVAL) => {}
            }
        }
        sleep_until(asked_at + MIN_INTERVAL).await;
    }
}
