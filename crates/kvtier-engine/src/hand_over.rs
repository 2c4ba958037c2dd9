//! Hand-over: what of the engine's state lives between two requests, for the next process of the server.
//!
//! The objects themselves are in L1's ledger and the registrations in their files; here is what refers to them. It is
//! collected while no request is served and nothing else changes the tables, and believed only as far as it fits what the
//! ledger and the files say.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_config::{GpuReply, ServerConfig};
use kvtier_device::{KvLayout, MemorySpec};
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_metrics::Metrics;
use kvtier_tiers::{IndexHandOver, IndexSender, L2State, PausedTiers, TiersHandOver};
use serde::{Deserialize, Serialize};

use super::admin::JobState;
use super::instances::WorkerState;
use super::lookups::{LookupsState, SeenState};
use super::transfers::{Grant, MemoryState, Skipped, TransferState};
use super::{Engine, Opened, Predecessor};

/// How long the process before may take to release L1, after it has announced that or ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two looks at what still runs.
const DRAIN_INTERVAL: Duration = Duration::from_millis(1);

/// State of an engine between two requests. Times are milliseconds before or after the hand-over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineState {
    workers: Vec<WorkerState>,
    lookups: LookupsState,
    /// Connections of schedulers, and the time since their last pings.
    scheduler_pings: Vec<(u64, u64)>,
    chunk_sizes: Vec<SeenState>,
    transfers: Vec<TransferState>,
    tiers: L2State,
    prefetch_jobs: Vec<JobState>,
}

/// The state of an engine, as the next process receives it.
#[derive(Default)]
pub struct EngineHandOver {
    /// What is known of it.
    pub state: EngineState,
    /// Those of the tiers.
    pub descriptors: Vec<OwnedFd>,
}

impl EngineState {
    /// Number of descriptors.
    pub fn descriptors(&self) -> usize {
        self.tiers.descriptors()
    }
}

fn cannot(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, what.into())
}

/// Checks that another process can serve a worker whose pages are on a GPU.
fn check_gpu_worker(layout: &KvLayout, reply: GpuReply) -> Result<()> {
    let gpu = match layout.memories().first() {
        Some(MemorySpec::Cuda(storage)) => &storage.device_uuid,
        _ => "unknown",
    };
    if !layout.memories().iter().all(MemorySpec::is_lasting) {
        return Err(cannot(format!(
            "its memory on GPU {gpu} cannot be opened by another process: an expandable segment is shared by file descriptors"
        )));
    }
    match reply {
        GpuReply::Done => Ok(()),
        // They end with this process, and what a client reads of one then is undefined.
        GpuReply::Event => Err(cannot(format!(
            "with --gpu-reply event it may wait for events on GPU {gpu} that end with this process"
        ))),
    }
}

impl Engine {
    /// Checks that a process with this configuration could hand over to the next one, whatever its requests are.
    ///
    /// # Errors
    /// Why it never can.
    pub fn check_hand_over(&self) -> Result<()> {
        if let Some(l2) = &self.context.l2 {
            l2.check_hand_over()?;
        }
        if let Err(reason) = &self.context.state {
            return Err(cannot(format!("there is no state directory: {reason}")));
        }
        self.context.l1.check_complete()?;
        for instance in self.context.instances.all() {
            let id = instance.id;
            if let Some(pages) = instance.pages()
                && instance.is_on_gpu()
            {
                check_gpu_worker(pages.layout(), self.context.config().gpu_reply)
                    .map_err(|error| error.context(format!("worker {id}")))?;
            }
            if !self.workers.is_kept(id) {
                return Err(cannot(format!(
                    "the registration of worker {id} is not kept: its client is older than LMCache 0.5.5, or there is no space"
                )));
            }
        }
        if !self.transfers.refused_retrieves.is_empty() {
            return Err(cannot(
                "a client of LMCache before 0.5.5 has to notice that its retrieve was refused",
            ));
        }
        Ok(())
    }

    /// Whether nothing is copied: with `--gpu-reply event` a transfer outlasts its answer.
    pub fn is_idle(&self) -> bool {
        !self.context.instances.are_copying()
    }

    /// Lets nothing begin in the tiers that no request waits for; `None` without tiers. Requests may be served meanwhile.
    ///
    /// # Errors
    /// A tier that still works at `until`; it goes on.
    pub fn pause_tiers(&self, until: Instant) -> Result<Option<PausedTiers>> {
        let l2 = self.context.l2.as_ref();
        l2.map(|l2| l2.pause(until)).transpose()
    }

    /// Waits until nothing runs between L1 and the paused tiers. No request may be served meanwhile.
    ///
    /// # Errors
    /// What still runs at `until`.
    pub fn drain_tiers(&self, until: Instant) -> Result<()> {
        let Some(l2) = &self.context.l2 else {
            return Ok(());
        };
        let busy = || {
            if self.admin.prefetch_jobs.pending() > 0 {
                return Some("a prefetch over HTTP still runs".to_owned());
            }
            let waits = self.lookups.held.are_waiting();
            let waits = waits.then(|| "lookups still wait for a tier".to_owned());
            l2.busy().or(waits)
        };
        while let Some(what) = busy() {
            if Instant::now() >= until {
                return Err(cannot(what));
            }
            std::thread::sleep(DRAIN_INTERVAL);
        }
        Ok(())
    }

    /// The state for the next process. No request may be served meanwhile, no housekeeping done, and the tiers are drained.
    ///
    /// # Errors
    /// As [`Engine::check_hand_over`]; or something is still waited for.
    pub fn hand_over(&self) -> Result<EngineHandOver> {
        self.check_hand_over()?;
        let l2 = self.context.l2.as_ref();
        let l2 = l2.map(|l2| l2.hand_over()).transpose()?;
        let TiersHandOver { state, descriptors } = l2.unwrap_or_default();
        Ok(EngineHandOver {
            state: self.state(state)?,
            descriptors,
        })
    }

    /// The indexes of the tiers, in their order, for the next process, which has taken everything else. The tiers are paused for good.
    pub fn tier_indexes(&self) -> impl Iterator<Item = IndexHandOver> {
        self.context.l2.iter().flat_map(|l2| l2.indexes())
    }

    fn state(&self, tiers: L2State) -> Result<EngineState> {
        let now = self.context.now();
        let workers = self.context.instances.in_order();
        Ok(EngineState {
            tiers,
            prefetch_jobs: self.admin.prefetch_jobs.state(now),
            workers: workers.iter().map(|worker| worker.state(now)).collect(),
            lookups: self.lookups.held.state(now)?,
            scheduler_pings: self.lookups.scheduler_ages(now),
            chunk_sizes: self.lookups.chunk_sizes.state(),
            transfers: self.transfers.prepared.state(now),
        })
    }

    /// Listens at a socket in the state directory; `None` without one.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self, name: &str) -> Result<Option<UnixListener>> {
        let state = self.context.state.as_ref().ok();
        state.map(|state| state.listen(name)).transpose()
    }

    /// The lock of the state directory, for the next process.
    ///
    /// # Errors
    /// There is no state directory; the system's.
    pub fn state_lock(&self) -> Result<OwnedFd> {
        match &self.context.state {
            Ok(state) => state.lock(),
            Err(reason) => Err(cannot(reason.to_string())),
        }
    }

    /// Releases everything to the next process: this one changes nothing any more.
    pub fn release(&self) {
        self.workers.close();
        self.context.l1.close();
    }

    /// An engine that goes on with what a process which still runs has. That process may go on until [`Engine::take`]: nothing of
    /// it is changed before.
    ///
    /// # Errors
    /// What of it cannot be taken over.
    pub fn adopt(
        config: Arc<ServerConfig>,
        metrics: Arc<Metrics>,
        lock: OwnedFd,
        opened: Opened,
        handed: EngineHandOver,
    ) -> Result<Self> {
        let EngineHandOver {
            mut state,
            descriptors,
        } = handed;
        let tiers = TiersHandOver {
            state: std::mem::take(&mut state.tiers),
            descriptors,
        };
        let predecessor = Predecessor {
            lock,
            opened,
            tiers,
        };
        let (context, quotas) = Self::open(config, metrics, Some(predecessor))?;
        let engine = Self::over(context, quotas);
        engine.workers.take_over(&state.workers)?;
        let now = engine.context.now();
        let lookups = &engine.lookups;
        lookups
            .held
            .resume(&state.lookups, &engine.context.l1.cache, now)?;
        lookups.resume_schedulers(&state.scheduler_pings, now);
        lookups.chunk_sizes.resume(&state.chunk_sizes);
        engine.resume_transfers(&state.transfers, now)?;
        let jobs = &engine.admin.prefetch_jobs;
        jobs.resume(&state.prefetch_jobs, now);
        Ok(engine)
    }

    fn resume_transfers(&self, transfers: &[TransferState], now: Duration) -> Result<()> {
        let heritage = &self.context.l1.heritage;
        let mut claimed = HashSet::new();
        for state in transfers {
            let absent = || {
                cannot(format!(
                    "transfer of request {:?}: L1 has not recorded its memory",
                    state.request_id
                ))
            };
            let mut charges = state
                .charges
                .iter()
                .map(|it| self.transfers.staging.resume(it));
            let grant = match &state.memory {
                MemoryState::Store(places) => {
                    let memory = heritage.claim_store(places).ok_or_else(absent)?;
                    Grant::Store(
                        memory,
                        charges.next().ok_or_else(absent)?,
                        Skipped::default(),
                    )
                }
                MemoryState::Retrieve(leases) => {
                    let leases = leases.iter().map(|slots| {
                        claimed.extend(slots.iter().copied());
                        // What was removed meanwhile stays withheld.
                        heritage.claim_retrieve(slots)
                    });
                    let leases = leases.collect::<Option<Vec<_>>>().ok_or_else(absent)?;
                    Grant::Retrieve(leases, charges.collect())
                }
            };
            self.transfers.prepared.resume(state, grant, now)?;
        }
        heritage.release_claimed(&claimed);
        self.transfers.inherit();
        Ok(())
    }

    /// Takes what was [adopted](Engine::adopt): the process before has released it, or has ended. Returns where the
    /// [indexes of its tiers](Engine::tier_indexes) are waited for.
    ///
    /// # Errors
    /// It has not: it still has L1. Nothing was taken, and nothing is written.
    pub fn take(&self) -> Result<Vec<IndexSender>> {
        self.context.l1.take(RELEASE_TIMEOUT)?;
        self.workers.take();
        if let Some(unused) = self.context.devices.end_beside() {
            self.workers.driver_threads.run(move || drop(unused));
        }
        let indexes = self.context.l2.as_ref().map(|l2| l2.take());
        if let Ok(state) = &self.context.state
            && let Err(error) = state.claim()
        {
            tracing::warn!(%error, "the state directory names the process before");
        }
        Ok(indexes.unwrap_or_default())
    }
}
