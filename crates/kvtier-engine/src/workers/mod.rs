//! Workers come and go: registrations, pings, unregistrations, and workers that ended or fell silent.
//!
//! | state | guarded by |
//! | --- | --- |
//! | the table of instances, [`super::context`]'s; changed only here | its lock; nothing is taken inside |
//! | [`DriverThreads`]: work that waits for a GPU's driver | its mutex; nothing is taken inside |
//!
//! An instance that leaves is removed from the table first, so that no transfer begins for it. Then its last copies end, its
//! prepared transfers are abandoned, and the lookups that no worker can read any more are released.

mod driver_threads;
mod registration;
mod tensors;

use std::sync::Arc;
use std::time::Duration;

use kvtier_proto::operation::Operation;
use kvtier_proto::request::InstanceId;
use kvtier_proto::response::Response;

use super::context::Context;
use super::instances::Instance;
use super::lookups::Lookups;
use super::transfers::Transfers;
use super::{Answer, Caller, Reply};
use driver_threads::DriverThreads;

/// The service of workers.
pub struct Workers {
    context: Arc<Context>,
    transfers: Arc<Transfers>,
    lookups: Arc<Lookups>,
    pub driver_threads: DriverThreads,
}

impl Workers {
    pub fn new(context: &Arc<Context>, transfers: &Arc<Transfers>, lookups: &Arc<Lookups>) -> Self {
        Self {
            context: Arc::clone(context),
            transfers: Arc::clone(transfers),
            lookups: Arc::clone(lookups),
            driver_threads: DriverThreads::default(),
        }
    }

    /// A ping; schedulers and probes have no instance.
    pub fn ping(&self, caller: Caller, instance: Option<InstanceId>) -> Answer {
        let now = self.context.now();
        let instances = &self.context.instances;
        let known = instance.and_then(|id| instances.get(id));
        let refused = &self.transfers.refused_retrieves;
        // Asked before the lock of the refusals is taken, and only for a ping that may be refused: it looks at all workers.
        let is_lost = refused.is_refusing(caller.connection) && instances.has_lost_retrieves();
        let is_copying = || is_lost || known.as_ref().is_some_and(|worker| worker.is_retrieving());
        if refused.refuses_ping(caller.connection, is_copying, now) {
            if let Some(worker) = &known {
                worker.seen(now);
                worker.drop_stores();
            }
            return Answer::from(Response::Bool(false)).because("refused_retrieve");
        }
        let Some(id) = instance else {
            self.lookups.scheduler_pinged(caller.connection);
            return Answer::from(Response::Bool(true));
        };
        let is_known = instances.ping(id, now);
        if !is_known {
            tracing::info!(
                instance = id.0,
                "ping of an unknown worker refused; its client registers again"
            );
        }
        Answer::from(Response::Bool(is_known))
    }

    /// Unregisters a worker. Its prepared transfers are abandoned, and their memory is freed once its copies must have ended. The
    /// answer is that we copy none of its pages and never will, whichever connection has asked for it, also if another
    /// has unregistered it before or it had fallen silent; or that this is not certain.
    pub fn unregister(self: &Arc<Self>, operation: Operation, id: InstanceId, reply: Reply) {
        let on_gpu = self.context.instances.is_on_gpu(id);
        self.answer_with(on_gpu, reply, move |workers| workers.remove(operation, id));
    }

    fn remove(&self, operation: Operation, id: InstanceId) -> Answer {
        // In this order: no transfer begins for an instance that was removed.
        let instance = self.context.instances.remove(id);
        let drained = self.context.instances.drain(id);
        let transfers = self.transfers.abandon(id);
        if let Some(instance) = instance {
            self.release_unreadable(&instance);
            tracing::info!(transfers, "Unregistered instance {id}");
        }
        match drained {
            Ok(()) => Answer::nothing(),
            Err(error) => {
                tracing::error!("{}: {error}", operation.name());
                // A client that takes no text has timed out long before.
                Answer::error(error.to_string(), "still_copying")
            }
        }
    }

    /// Answers a request about a worker with the outcome of `work`, which runs on a driver thread if it needs the driver of a GPU.
    /// Requests that its connection sent behind it wait for that.
    fn answer_with(
        self: &Arc<Self>,
        on_gpu: bool,
        mut reply: Reply,
        work: impl FnOnce(&Self) -> Answer + Send + 'static,
    ) {
        if !on_gpu {
            return reply.answer(work(self));
        }
        if reply.later_in_turn() {
            let workers = Arc::clone(self);
            let run = move || reply.answer(work(&workers));
            self.driver_threads.run(run);
        }
    }

    /// Removes the workers whose process has ended, those that fell silent, and what is left of those that are drained.
    pub fn expire(&self, now: Duration) {
        let instances = &self.context.instances;
        let config = self.context.config();
        self.abandon(
            instances.take_ended(),
            "a worker's process has ended, or its connection",
        );
        if let Some(timeout) = config.worker_reap_timeout {
            let silent = instances.take_silent(now, timeout, config.registration_grace);
            self.abandon(silent, "a worker fell silent and is considered dead");
        }
        self.release(instances.take_drained());
    }

    fn abandon(&self, instances: Vec<Arc<Instance>>, why: &str) {
        for instance in &instances {
            instance.stop();
            let transfers = self.transfers.abandon(instance.id);
            self.context.metrics.reaped_instances.inc();
            tracing::warn!(
                instance = instance.id.0,
                model = ?instance.model_name,
                transfers,
                "{why}"
            );
            let orphans = instance.pages().map(|pages| pages.remove_orphans());
            for removed in orphans.unwrap_or_default() {
                match removed {
                    Ok(name) => tracing::info!(name, "removed the shared memory of a dead worker"),
                    Err(error) => {
                        tracing::debug!(%error, "the shared memory of a dead worker stays")
                    }
                }
            }
            self.release_unreadable(instance);
        }
        self.release(instances);
    }

    /// Drops instances. The last owner of an instance releases its pages, and may have to wait for a driver.
    pub fn release(&self, instances: Vec<Arc<Instance>>) {
        let is_last = |instance: &Arc<Instance>| Arc::strong_count(instance) == 1;
        let is_slow = |instance: &Arc<Instance>| is_last(instance) && instance.is_on_gpu();
        if instances.iter().any(is_slow) {
            self.driver_threads.run(move || drop(instances));
        }
    }

    /// Releases the lookups of a model if the removed worker was the last that could read what they found.
    fn release_unreadable(&self, removed: &Instance) {
        let (model, world_size) = (&removed.model_name, removed.world_size);
        if !self.context.instances.serves(model, world_size) {
            self.lookups.held.remove_where(|lookup| {
                lookup.scope.model_name() == model && lookup.scope.world_size() == world_size
            });
        }
    }
}
