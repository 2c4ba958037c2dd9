//! Hand-over: what of the engine's state lives between two requests, for the next process of the server.
//!
//! The objects themselves are in L1's ledger and the registrations in their files; here is what refers to them. It is
//! collected while no request is served and nothing else changes the tables, and believed only as far as it fits what the
//! ledger and the files say.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use kvtier_config::ServerConfig;
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_metrics::Metrics;
use serde::{Deserialize, Serialize};

use super::Engine;
use super::instances::WorkerState;
use super::lookups::{LookupsState, SeenState};
use super::transfers::{Grant, MemoryState, TransferState};

/// How long the process before may take to release L1, after it has announced that or ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

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
}

fn cannot(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, what.into())
}

impl Engine {
    /// Checks that a process with this configuration could hand over to the next one, whatever its requests are.
    ///
    /// # Errors
    /// Why it never can.
    pub fn check_hand_over(&self) -> Result<()> {
        if self.context.l2.is_some() {
            return Err(cannot(
                "the server has second tiers (--l2-adapter), which are not handed over",
            ));
        }
        if let Err(reason) = &self.context.state {
            return Err(cannot(format!("there is no state directory: {reason}")));
        }
        self.context.l1.check_complete()?;
        for instance in self.context.instances.all() {
            let id = instance.id;
            if instance.is_on_gpu() {
                return Err(cannot(format!(
                    "worker {id} has its KV cache on a GPU, whose memory is not handed over"
                )));
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

    /// The state for the next process. No request may be served meanwhile, and no housekeeping done.
    ///
    /// # Errors
    /// As [`Engine::check_hand_over`]; or something is still waited for.
    pub fn state(&self) -> Result<EngineState> {
        self.check_hand_over()?;
        let now = self.context.now();
        let workers = self.context.instances.in_order();
        Ok(EngineState {
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
            Err(reason) => Err(cannot(reason.clone())),
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
        state: &EngineState,
    ) -> Result<Self> {
        let (context, quotas) = Self::open(config, metrics, Some(lock))?;
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
                    Grant::Store(memory, charges.next().ok_or_else(absent)?)
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
        Ok(())
    }

    /// Takes what was [adopted](Engine::adopt): the process before has released it, or has ended.
    ///
    /// # Errors
    /// It has not: it still has L1. Nothing was taken, and nothing is written.
    pub fn take(&self) -> Result<()> {
        self.context.l1.take(RELEASE_TIMEOUT)?;
        self.workers.take();
        if let Ok(state) = &self.context.state
            && let Err(error) = state.claim()
        {
            tracing::warn!(%error, "the state directory names the process before");
        }
        Ok(())
    }
}
