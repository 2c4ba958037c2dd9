//! Takes over the registrations of an earlier process: each goes the way of a new one, and its memory has to be the same.
//!
//! | client | its worker is served |
//! | --- | --- |
//! | of kvtier's own: it names its chunk size, has an id per registration, knows which requests were lost with a connection, and gives each transfer a deadline | for good |
//! | of LMCache | until its first ping, and no longer than it has certainly abandoned no transfer and registered nowhere else |
//!
//! A client of LMCache waits for ever for what it had sent to the earlier process, unless a ping is refused. It may also have
//! noticed the loss, abandoned requests that still wait in its socket, and given their pages to others: those requests
//! arrive here, and must not be served. Nor must one that has registered with another server meanwhile: it has one id for all, and
//! writes where that server's pool has free slots.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, Result};
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Registration, Request};

use super::super::context::Context;
use super::super::devices::Devices;
use super::super::instances::{Instance, Mode, Provisional};
use super::Workers;
use super::kept::{KeptMemory, KeptWorker, LeftOut};
use super::registration::{Newcomer, engine_driven, log_registered, pool};

/// How long a start waits for the drivers of GPUs.
const TIMEOUT: Duration = Duration::from_secs(10);

/// After this silence a worker that copies by itself counts as dead if no worker is to be removed for its silence: it has no memory
/// that shows whether its process lives.
const SILENCE: Duration = Duration::from_secs(120);

/// Why a registration is left out.
type Obstacle = (LeftOut, Error);

fn refused(error: Error) -> Obstacle {
    (LeftOut::Refused, error)
}

/// Restores the workers of an earlier process.
pub(super) fn restore(workers: &Arc<Workers>) {
    let (context, registrations) = (&*workers.context, &workers.kept);
    let deadline = Instant::now() + TIMEOUT;
    let mut pending = BTreeSet::new();
    let (done, ended) = mpsc::channel();
    for kept in registrations.read(context.now()) {
        let id = kept.id;
        match begin(context, &kept) {
            Ok(Restoring::Ready(instance)) => end(workers, id, Ok(instance)),
            Ok(Restoring::OnGpu(newcomer, provisional)) => {
                pending.insert(id);
                let (own, done) = (Arc::clone(workers), done.clone());
                workers.driver_threads.run(move || {
                    let opened = reopen(&own.context, newcomer, provisional, &kept.memory);
                    end(&own, id, opened);
                    // The start waits no longer if there is no receiver.
                    let _ = done.send(id);
                });
            }
            Err(obstacle) => end(workers, id, Err(obstacle)),
        }
    }
    drop(done);
    while !pending.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        match ended.recv_timeout(left) {
            Ok(id) => pending.remove(&id),
            Err(_) => break,
        };
    }
    let late: Vec<InstanceId> = pending.into_iter().collect();
    let outcome = registrations.end_restoring(&context.instances, &late);
    if outcome.restored > 0 || !outcome.left_out.is_empty() {
        let left_out = outcome.left_out.iter();
        let left_out = left_out.map(|(reason, count)| format!("{count} {reason}"));
        tracing::info!(
            workers = outcome.restored,
            left_out = left_out.collect::<Vec<_>>().join(", "),
            "restored registrations"
        );
    }
}

fn begin(context: &Context, kept: &KeptWorker) -> Result<Restoring, Obstacle> {
    let request = kept.request.decode();
    let request = request.map_err(|error| (LeftOut::Damaged, error))?;
    if request.instance() != Some(kept.id) {
        let error = Error::refused("it is of another worker than its name says");
        return Err((LeftOut::Damaged, error));
    }
    match &request {
        Request::RegisterKvCache(registration) => restore_pages(context, kept, registration),
        Request::RegisterEngineDriven(registration) => {
            restore_engine_driven(context, kept, registration)
        }
        _ => Err(refused(Error::refused("it is no registration"))),
    }
}

fn restore_pages(
    context: &Context,
    kept: &KeptWorker,
    registration: &Registration<'_>,
) -> Result<Restoring, Obstacle> {
    let provisional = provisional(kept, registration.hints.chunk_tokens)?;
    let newcomer = Newcomer::check(context, kept.request.caller(), registration);
    let newcomer = newcomer.map_err(refused)?;
    let newcomer = newcomer.ok_or_else(|| refused(Error::refused("it is registered")))?;
    if !newcomer.is_lasting() {
        let error = Error::refused("its memory cannot be opened again");
        return Err((LeftOut::Memory, error));
    }
    if Devices::is_on_gpu(&newcomer.layout) {
        return Ok(Restoring::OnGpu(newcomer, provisional));
    }
    reopen(context, newcomer, provisional, &kept.memory).map(Restoring::Ready)
}

/// Opens the memory of a registration, which has to be what it was.
fn reopen(
    context: &Context,
    newcomer: Newcomer,
    provisional: Option<Provisional>,
    memory: &KeptMemory,
) -> Result<Instance, Obstacle> {
    let mut instance = newcomer
        .open(context)
        .map_err(|error| (LeftOut::Memory, error))?;
    let pages = instance.pages();
    let identity = pages.map(|pages| pages.identity()).unwrap_or_default();
    if identity != memory.pages || pages.is_some_and(|pages| pages.has_ended()) {
        // The memory of another process, or of none: nothing is owed for it.
        pages.iter().for_each(|pages| pages.leave());
        let error = Error::refused("its memory is other memory by now, or its process has ended");
        return Err((LeftOut::Memory, error));
    }
    instance.provisional = provisional;
    Ok(instance)
}

fn restore_engine_driven(
    context: &Context,
    kept: &KeptWorker,
    registration: &EngineDrivenContext<'_>,
) -> Result<Restoring, Obstacle> {
    let provisional = provisional(kept, registration.chunk_tokens)?;
    let limit = context.config().worker_reap_timeout;
    let limit = limit.unwrap_or(SILENCE);
    if kept.silent_for > limit {
        let error = format!("it was silent for more than {limit:?}");
        return Err((LeftOut::Silent, Error::refused(error)));
    }
    let mut registration = registration.clone();
    registration.takes_pool = !kept.memory.pool.is_empty();
    let checked = engine_driven(context, kept.request.caller(), &registration);
    let (mut instance, may_map) = checked.map_err(refused)?;
    if kept.pickles {
        if let Mode::EngineDriven { pickles, .. } = &instance.mode {
            pickles.store(true, Ordering::Relaxed);
        }
    } else if pool(&context.l1.arena, may_map) != kept.memory.pool {
        let error = Error::refused("its pool is not this server's");
        return Err((LeftOut::Pool, error));
    }
    instance.provisional = provisional;
    Ok(Restoring::Ready(instance))
}

fn end(workers: &Workers, id: InstanceId, restored: Result<Instance, Obstacle>) {
    let instances = &workers.context.instances;
    let inserted = restored.and_then(|instance| {
        instance.expect_pings();
        match workers.kept.insert_restored(instances, instance) {
            Ok(Some(instance)) => log_registered(&instance),
            Ok(None) => tracing::info!(instance = id.0, "a registration was restored too late"),
            Err(error) => return Err(refused(error)),
        }
        Ok(())
    });
    if let Err((reason, error)) = inserted {
        workers.kept.leave_out(instances, id, reason, &error);
    }
}

/// How long a worker is served that names this chunk size; `None` for good.
fn provisional(
    kept: &KeptWorker,
    chunk_tokens: Option<u32>,
) -> Result<Option<Provisional>, Obstacle> {
    // A client of LMCache has not named the chunk size that was negotiated for it.
    let named = chunk_tokens.filter(|_| !kept.request.caller().negotiates_chunk_size);
    match (named, kept.patient_until) {
        (Some(_), _) => Ok(None),
        (None, Some(until)) => Ok(Some(Provisional { until })),
        (None, None) => {
            let error = Error::refused(
                "its client may have abandoned transfers by now, or registered with another server",
            );
            Err((LeftOut::Silent, error))
        }
    }
}

/// A registration of an earlier process that is checked.
enum Restoring {
    Ready(Instance),
    /// Worker on a GPU, whose driver may take long.
    OnGpu(Newcomer, Option<Provisional>),
}
