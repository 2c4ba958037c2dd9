//! Hand-over: what of the tiers goes to the next process.
//!
//! | step | here |
//! | --- | --- |
//! | [`L2::pause`] | clients are served: batches and passes that run end, none begins |
//! | [`L2::busy`] | clients wait: loads end, and what still reads or writes L1 or deletes |
//! | [`L2::hand_over`] | the batches that wait, and what each tier knows but for its index |
//! | [`L2::adopt`] in the next process | builds all of it, without changing anything in a tier |
//! | [`L2::take`] there | its tasks begin, and clients are served |
//! | [`L2::indexes`] | each tier's index, which its task there waits for |

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvtier_core::cache::Cache;
use kvtier_core::{ChunkHash, Namespace};
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_l2::tier::{IndexHandOver, Tier, TierHandOver, TierState};
use kvtier_l2::{Adapter, L2Error};
use kvtier_memory::Arena;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::sync::OwnedRwLockWriteGuard;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::pending::{Hold, Objects};
use super::store::Batch;
use super::{L2, new_tiers, open, runtime};
use kvtier_config::L2Config;
use kvtier_l1::{Clock, L1Allocator};
use kvtier_metrics::Metrics;
use kvtier_tenants::Opened;

/// State of all tiers and of what waits for them. Indexes and descriptors are beside it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct L2State {
    tiers: Vec<TierState>,
    /// Oldest first.
    pub(super) stores: Vec<StoreState>,
}

/// Objects of L1 that wait to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoreState {
    namespace: Namespace,
    hashes: Vec<ChunkHash>,
    object_bytes: u64,
    /// Tiers that have all of them already.
    complete: u64,
    /// Tiers that they wait for, each with those that were deleted there.
    waiting: Vec<(usize, Vec<ChunkHash>)>,
}

impl L2State {
    /// Number of descriptors.
    pub fn descriptors(&self) -> usize {
        self.tiers.iter().map(|tier| tier.descriptors).sum()
    }
}

/// The state of all tiers, as the next process receives it.
#[derive(Default)]
pub struct TiersHandOver {
    /// Their states but for the indexes, and the stores that wait.
    pub state: L2State,
    /// Descriptors of all adapters.
    pub descriptors: Vec<OwnedFd>,
}

/// Tiers in which nothing begins until this is dropped.
pub struct PausedTiers {
    _tiers: Vec<OwnedRwLockWriteGuard<()>>,
}

/// Adapters of a process that takes over, opened beside those of the one that runs.
pub struct OpenedTiers {
    adapters: Vec<Arc<dyn Adapter>>,
    /// After the adapters.
    runtime: Runtime,
}

/// Where the index of a tier is waited for. Without one its backend is listed.
pub type IndexSender = oneshot::Sender<IndexHandOver>;

fn unavailable(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, what.into())
}

fn of_tier(name: &str, error: L2Error) -> Error {
    unavailable(format!("tier {name}")).source(error)
}

impl OpenedTiers {
    /// Opens the adapters and changes nothing in their backends.
    ///
    /// # Errors
    /// An adapter that cannot be opened, a system out of threads: one line.
    pub fn beside(config: &L2Config) -> Result<Self> {
        let runtime = runtime()?;
        let adapters = {
            let _within = runtime.enter();
            let registry = kvtier_adapters::registry();
            open(config, |adapter| registry.open_beside(adapter))?
        };
        Ok(Self { adapters, runtime })
    }
}

impl L2 {
    /// Checks that all tiers can be handed over.
    ///
    /// # Errors
    /// The first that cannot, and why.
    pub fn check_hand_over(&self) -> Result<()> {
        let check = |tier: &Arc<Tier>| {
            let checked = tier.check_hand_over();
            checked.map_err(|error| of_tier(tier.name(), error))
        };
        self.tiers.iter().try_for_each(check)
    }

    /// Lets nothing begin in the tiers that no request waits for, and waits for what has begun.
    ///
    /// # Errors
    /// A tier that still works at `until`; it goes on.
    pub fn pause(&self, until: Instant) -> Result<PausedTiers> {
        let pause = |(number, tier): (usize, &Arc<Tier>)| {
            let lock = Arc::clone(tier.work()).write_owned();
            let paused = async { timeout_at(until.into(), lock).await };
            let paused = self.handle.block_on(paused);
            paused.map_err(|_| {
                let what = match tier.is_recovering() {
                    true => "the objects that were stored before the start are still being read",
                    false if self.calls.of_tier(number).iter().any(|calls| *calls > 0) => {
                        "it does not answer a call"
                    }
                    false => "it does not answer a delete",
                };
                unavailable(format!("tier {}: {what}", tier.name()))
            })
        };
        let tiers = self.tiers.iter().enumerate().map(pause);
        Ok(PausedTiers {
            _tiers: tiers.collect::<Result<_>>()?,
        })
    }

    /// What still runs while the tiers are paused and no request begins; `None` once there is nothing.
    pub fn busy(&self) -> Option<String> {
        if self.prefetches().iter().any(|prefetches| *prefetches > 0) {
            return Some("lookups still wait for a tier".to_owned());
        }
        if self.loads.available_permits() < self.load_units {
            return Some("a tier still loads objects".to_owned());
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            let holds = self.pending.all();
            let holds = holds.iter().filter(|hold| hold.tier == number);
            let waiting = holds.filter(|hold| !hold.is_started());
            let waiting: u64 = waiting.map(|hold| hold.bytes()).sum();
            if self.stores.of_tier(number).queued_bytes > waiting {
                return Some(format!("tier {} still reads what it stores", tier.name()));
            }
            let deletes = tier.deletes_in_flight();
            if deletes > 0 {
                return Some(format!(
                    "tier {} has not answered {deletes} deletes",
                    tier.name()
                ));
            }
        }
        None
    }

    /// The state of all tiers for the next process. To be called while the tiers are paused and [nothing runs](L2::busy).
    ///
    /// # Errors
    /// What cannot be handed over.
    pub fn hand_over(&self) -> Result<TiersHandOver> {
        let mut all = TiersHandOver {
            state: L2State {
                stores: self.waiting_stores()?,
                ..L2State::default()
            },
            ..TiersHandOver::default()
        };
        for tier in &self.tiers {
            let handed = tier.hand_over();
            let handed = handed.map_err(|error| of_tier(tier.name(), error))?;
            all.state.tiers.push(handed.state);
            all.descriptors.extend(handed.descriptors);
        }
        Ok(all)
    }

    /// The index of each tier, in their order. To be called while the tiers are paused.
    pub fn indexes(&self) -> impl Iterator<Item = IndexHandOver> {
        self.tiers.iter().map(|tier| tier.index_hand_over())
    }

    /// The batches that wait, those of the same objects together.
    fn waiting_stores(&self) -> Result<Vec<StoreState>> {
        let holds = self.pending.all();
        let same = holds.chunk_by(|one, other| Arc::ptr_eq(&one.shared, &other.shared));
        let state = |holds: &[Arc<Hold>]| {
            let [first, ..] = holds else {
                return Ok(None);
            };
            let Objects {
                namespace, hashes, ..
            } = &first.shared.objects;
            let revoked: Vec<HashSet<_>> = holds.iter().map(|hold| hold.revoked()).collect();
            // Deleted in all of them, it may have left L1 too.
            let wanted = hashes
                .iter()
                .filter(|hash| !revoked.iter().all(|revoked| revoked.contains(hash)));
            let wanted: Vec<_> = wanted.copied().collect();
            if wanted.is_empty() {
                return Ok(None);
            }
            if self.cache.contains(namespace, &wanted).contains(&false) {
                return Err(unavailable(
                    "objects that were removed from L1 still wait to be stored in a tier",
                ));
            }
            let waiting = holds.iter().zip(revoked);
            Ok(Some(StoreState {
                namespace: Namespace::clone(namespace),
                object_bytes: first.bytes() / (hashes.len() as u64).max(1),
                hashes: wanted,
                complete: first.shared.complete.load(Ordering::Acquire),
                waiting: waiting
                    .map(|(hold, revoked)| (hold.tier, revoked.into_iter().collect()))
                    .collect(),
            }))
        };
        let states = same.map(state).collect::<Result<Vec<_>>>()?;
        Ok(states.into_iter().flatten().collect())
    }

    /// L2 with what a process which still runs has of it. Nothing in a tier is changed before [`L2::take`].
    ///
    /// # Errors
    /// The first part that does not fit.
    #[expect(clippy::too_many_arguments, reason = "each is a part of the server")]
    pub fn adopt(
        config: &L2Config,
        quotas: &Opened,
        opened: OpenedTiers,
        handed: TiersHandOver,
        cache: Cache<L1Allocator>,
        arena: Arc<Arena>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>> {
        let OpenedTiers { adapters, runtime } = opened;
        let tiers = new_tiers(config, quotas, adapters);
        let stores = handed.state.stores.clone();
        adopt_tiers(&tiers, handed)?;
        let (l2, queues) = Self::over(config, runtime, tiers, cache, arena, clock, metrics);
        l2.resume(queues, &stores)?;
        Ok(l2)
    }

    /// Goes on with the batches that waited in the process before, from [`L2::take`] on.
    pub(super) fn resume(
        self: &Arc<Self>,
        queues: Vec<UnboundedReceiver<Batch>>,
        stores: &[StoreState],
    ) -> Result<()> {
        stores
            .iter()
            .try_for_each(|store| self.resume_store(store))?;
        *self.handed.lock() = queues;
        Ok(())
    }

    fn resume_store(self: &Arc<Self>, state: &StoreState) -> Result<()> {
        let namespace = Arc::new(state.namespace.clone());
        let is_tier = |tier: &usize| self.tiers.get(*tier).is_some_and(|it| !it.is_read_only());
        let waiting = state.waiting.iter().map(|(tier, revoked)| {
            let tier = Some(*tier).filter(is_tier);
            let tier = tier.ok_or_else(|| Error::refused("a store waits for an unknown tier"))?;
            Ok((tier, revoked.clone()))
        });
        let waiting = waiting.collect::<Result<Vec<_>>>()?;
        let distinct: HashSet<_> = waiting.iter().map(|(tier, _)| tier).collect();
        let written = self.tiers.iter().filter(|tier| !tier.is_read_only());
        let total = state.complete.saturating_add(waiting.len() as u64);
        if distinct.len() < waiting.len() || total > written.count() as u64 {
            return Err(Error::refused(
                "a store waits twice for a tier, or for one that has its objects",
            ));
        }
        let admission = self.pending.admit();
        let leased = self.lease(&namespace, &state.hashes);
        let leased = leased.filter(|(leased, _)| leased.len() == state.hashes.len());
        let (hashes, lease) = leased
            .ok_or_else(|| Error::refused("a store waits for an object that is not in L1"))?;
        let len = state.object_bytes;
        if let Some(extent) = lease.extents().iter().find(|extent| extent.len != len) {
            return Err(Error::refused(format!(
                "a store has objects of {len} bytes; one in L1 has {}",
                extent.len
            )));
        }
        let objects = Objects {
            stored_as: namespace.without_layout(),
            namespace,
            hashes,
        };
        self.queue(admission, objects, lease, len, state.complete, waiting);
        Ok(())
    }

    /// Takes the tiers: the process before does nothing in them any more. Returns where their indexes are waited for.
    pub fn take(self: &Arc<Self>) -> Vec<IndexSender> {
        let queues = std::mem::take(&mut *self.handed.lock());
        let each = self.tiers.iter().zip(queues).enumerate();
        let take = |(number, (tier, queue)): (usize, (&Arc<Tier>, _))| {
            tier.adapter().take();
            let (sender, index) = oneshot::channel();
            let (stop, recovered) = (Arc::clone(&self.stop), Arc::clone(tier));
            self.handle
                .spawn(async move { recovered.recover_handed(index, &stop).await });
            self.serve(number, queue);
            sender
        };
        each.map(take).collect()
    }
}

/// Hands each tier its part of what the process before has, without changing anything in it.
pub(super) fn adopt_tiers(tiers: &[Arc<Tier>], handed: TiersHandOver) -> Result<()> {
    let TiersHandOver {
        state,
        mut descriptors,
    } = handed;
    if state.tiers.len() != tiers.len() || state.descriptors() != descriptors.len() {
        return Err(Error::refused(format!(
            "it has {} tiers; this server has {}",
            state.tiers.len(),
            tiers.len()
        )));
    }
    for (tier, state) in tiers.iter().zip(state.tiers) {
        let rest = descriptors.split_off(state.descriptors);
        let handed = TierHandOver {
            state,
            descriptors: std::mem::replace(&mut descriptors, rest),
        };
        let adopted = tier.adopt_state(handed);
        adopted.map_err(|error| of_tier(tier.name(), error))?;
    }
    Ok(())
}
