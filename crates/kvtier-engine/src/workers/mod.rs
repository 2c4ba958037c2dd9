//! Workers come and go: registrations, pings, unregistrations, and workers that ended or fell silent.
//!
//! | state | guarded by |
//! | --- | --- |
//! | the table of instances, [`super::context`]'s; changed only here | its lock; nothing is taken inside |
//! | [`DriverThreads`]: work that waits for a GPU's driver | its mutex; nothing is taken inside |
//! | [`KeptRegistrations`]: files from which the next process restores workers | its mutex; the table is locked inside |
//!
//! An instance that leaves is removed from the table first, so that no transfer begins for it. Then its last copies end, its
//! prepared transfers are abandoned, and the lookups that no worker can read any more are released.

mod driver_threads;
mod kept;
mod registration;
mod restore;
mod rope;
mod tensors;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Registration, RopeRegistration};
use kvtier_proto::response::{EngineDriven, Response};

use super::context::Context;
use super::devices::Devices;
use super::instances::{Instance, Mode};
use super::lookups::Lookups;
use super::transfers::Transfers;
use super::{Caller, EngineAnswer, Reply};
pub use driver_threads::DriverThreads;
pub use kept::RestoredWorkers;
use kept::{KeptRegistrations, KeptRequest};
use registration::{
    ENGINE_DRIVEN, Newcomer, PAGES, engine_driven_layout, is_same, kept_memory, log_registered,
    refused,
};
use rope::NewRope;

/// The service of workers.
pub struct Workers {
    context: Arc<Context>,
    transfers: Arc<Transfers>,
    lookups: Arc<Lookups>,
    pub driver_threads: DriverThreads,
    kept: KeptRegistrations,
}

impl Workers {
    pub fn new(context: &Arc<Context>, transfers: &Arc<Transfers>, lookups: &Arc<Lookups>) -> Self {
        Self {
            context: Arc::clone(context),
            transfers: Arc::clone(transfers),
            lookups: Arc::clone(lookups),
            driver_threads: DriverThreads::default(),
            kept: KeptRegistrations::new(context),
        }
    }

    /// Registers a worker whose pages the server copies.
    pub fn register_pages(
        self: &Arc<Self>,
        caller: Caller,
        registration: &Registration<'_>,
        reply: Reply,
    ) {
        let (newcomer, request) = match Newcomer::check(&self.context, caller, registration) {
            Ok(Some(newcomer)) => {
                let request = KeptRequest::of_pages(caller, registration);
                let request = request.filter(|_| newcomer.is_lasting());
                (newcomer, request)
            }
            Ok(None) => return reply.answer(EngineAnswer::nothing()),
            Err(error) => {
                let (id, model_name) = (registration.instance, registration.model_name);
                return reply.answer(refused(PAGES, id, model_name, &error));
            }
        };
        let on_gpu =
            self.context.instances.is_on_gpu(newcomer.id) || Devices::is_on_gpu(&newcomer.layout);
        self.answer_with(on_gpu, reply, move |workers| {
            let (id, model_name) = (newcomer.id, newcomer.model_name.clone());
            let instance = newcomer.open(&workers.context);
            match instance.and_then(|instance| workers.admit(instance, request)) {
                Ok(()) => EngineAnswer::nothing(),
                Err(error) => refused(PAGES, id, &model_name, &error),
            }
        });
    }

    /// Registers how the keys of a worker's pages are rotated.
    pub fn register_rope(self: &Arc<Self>, registration: &RopeRegistration<'_>, reply: Reply) {
        let refused = |id: InstanceId, error: &Error| {
            tracing::warn!(instance = id.0, %error, "cb_register_rope refused");
            EngineAnswer::error(error.to_string(), "bad_rope")
        };
        let rope = match NewRope::read(registration) {
            Ok(rope) => rope,
            Err(error) => return reply.answer(refused(registration.instance, &error)),
        };
        let on_gpu = rope.is_on_gpu() || self.context.instances.is_on_gpu(rope.id);
        self.answer_with(on_gpu, reply, move |workers| {
            match rope.open(&workers.context) {
                Ok((instance, opened)) => {
                    instance.set_rope(Some(opened));
                    EngineAnswer::nothing()
                }
                Err(error) => refused(rope.id, &error),
            }
        });
    }

    /// Registers a worker that copies by itself.
    pub fn register_engine_driven(
        &self,
        caller: Caller,
        context: &EngineDrivenContext<'_>,
    ) -> EngineAnswer {
        match self.try_register_engine_driven(caller, context) {
            Ok(pool) => EngineAnswer::from(Response::EngineDriven(pool)),
            Err(error) => refused(ENGINE_DRIVEN, context.instance, context.model_name, &error),
        }
    }

    fn try_register_engine_driven(
        &self,
        caller: Caller,
        context: &EngineDrivenContext<'_>,
    ) -> Result<EngineDriven<'static>> {
        let (instance, may_map) = registration::engine_driven(&self.context, caller, context)?;
        let request = KeptRequest::of_engine_driven(caller, context);
        let known = self.context.instances.get(context.instance);
        let same = known.filter(|known| {
            known.provisional.is_none()
                && known.model_name == instance.model_name
                && known.world_size == instance.world_size
                && engine_driven_layout(known) == engine_driven_layout(&instance)
        });
        match same {
            Some(instance) => {
                instance.seen(self.context.now());
                if let Mode::EngineDriven { pickles, .. } = &instance.mode {
                    // It may be able to map the pool now.
                    pickles.store(!may_map, Ordering::Relaxed);
                }
                let memory = kept_memory(&self.context.l1.arena, &instance);
                let kept = request.map(|request| (request, memory));
                self.kept.replace(instance.id, kept);
            }
            None => self.admit(instance, request)?,
        }
        let arena = &self.context.l1.arena;
        let pool = arena.shm_name().filter(|_| may_map);
        let shm_name = pool.map_or("", |name| name.trim_start_matches('/'));
        let null_block_id = self.context.config().null_block_id;
        Ok(EngineDriven {
            shm_name: shm_name.to_owned().into(),
            pool_size: pool.map_or(0, |_| arena.len()),
            null_block_id: context.groups.as_ref().map(|_| null_block_id),
        })
    }

    fn admit(&self, instance: Instance, request: Option<KeptRequest>) -> Result<()> {
        let (id, on_gpu) = (instance.id, instance.is_on_gpu());
        let kept = request.map(|request| (request, kept_memory(&self.context.l1.arena, &instance)));
        let instances = &self.context.instances;
        let is_restored = instances
            .get(id)
            .is_some_and(|known| known.provisional.is_some() && is_same(&known, &instance));
        let earlier = self.kept.insert(instances, instance, kept)?;
        if let Some(instance) = instances.get(id) {
            log_registered(&instance);
        }
        if let Some(earlier) = earlier {
            // Registered by its client now: the same memory was opened again, for the same use of it.
            if is_restored
                && earlier.provisional.is_some()
                && let Some(pages) = earlier.pages()
            {
                pages.leave();
            }
            // Another process, or the same one with other memory. The earlier one may still be copying by itself.
            if let Err(error) = instances.drain(earlier.id) {
                tracing::error!("{error}");
            }
            let transfers = self.transfers.abandon(id);
            tracing::info!(
                instance = id.0,
                transfers,
                "a new registration replaced the one under this instance id"
            );
            if on_gpu {
                // This is a driver thread already, and the worker may need the memory as soon as it is answered.
                drop(earlier);
            } else {
                self.release(vec![earlier]);
            }
        }
        Ok(())
    }

    /// A ping; schedulers and probes have no instance.
    pub fn ping(&self, caller: Caller, instance: Option<InstanceId>) -> EngineAnswer {
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
            return EngineAnswer::from(Response::Bool(false)).because("refused_retrieve");
        }
        let Some(id) = instance else {
            self.lookups.scheduler_pinged(caller.connection);
            return EngineAnswer::from(Response::Bool(true));
        };
        self.end_provisional(id);
        let is_known = instances.ping(id, now);
        if !is_known {
            tracing::info!(
                instance = id.0,
                "ping of an unknown worker refused; its client registers again"
            );
        }
        EngineAnswer::from(Response::Bool(is_known))
    }

    /// Ends a registration of an earlier process whose client has to register again: what that had sent to the earlier process is
    /// never answered, and only a ping that is refused makes it wait no longer.
    fn end_provisional(&self, id: InstanceId) {
        let Some(instance) = self.context.instances.take_provisional(id) else {
            return;
        };
        tracing::info!(
            instance = id.0,
            "first ping of a restored worker; its client registers again"
        );
        self.end([instance].into());
    }

    /// Ends what provisional workers have in flight, which are in no table any more.
    fn end(&self, instances: Vec<Arc<Instance>>) {
        self.kept.forget(&self.context.instances, &instances);
        for instance in &instances {
            // The client drops them by the same "no".
            instance.drop_stores();
            instance.stop();
            self.transfers.abandon(instance.id);
            self.release_unreadable(instance);
        }
        self.release(instances);
    }

    /// Unregisters a worker. Its prepared transfers are abandoned, and their memory is freed once its copies must have ended. The
    /// answer is that we copy none of its pages and never will, whichever connection has asked for it, also if another
    /// has unregistered it before or it had fallen silent; or that this is not certain.
    pub fn unregister(self: &Arc<Self>, operation: Operation, id: InstanceId, reply: Reply) {
        let on_gpu = self.context.instances.is_on_gpu(id);
        self.answer_with(on_gpu, reply, move |workers| workers.remove(operation, id));
    }

    fn remove(&self, operation: Operation, id: InstanceId) -> EngineAnswer {
        // In this order: no transfer begins for an instance that was removed.
        let instance = self.kept.remove(&self.context.instances, id);
        let drained = self.context.instances.drain(id);
        let transfers = self.transfers.abandon(id);
        if let Some(instance) = instance {
            self.release_unreadable(&instance);
            tracing::info!(transfers, "Unregistered instance {id}");
        }
        match drained {
            Ok(()) => EngineAnswer::nothing(),
            Err(error) => {
                tracing::error!("{}: {error}", operation.name());
                // A client that takes no text has timed out long before.
                EngineAnswer::error(error.to_string(), "still_copying")
            }
        }
    }

    /// Answers a request about a worker with the outcome of `work`, which runs on a driver thread if it needs the driver of a GPU.
    /// Requests that its connection sent behind it wait for that.
    fn answer_with(
        self: &Arc<Self>,
        on_gpu: bool,
        mut reply: Reply,
        work: impl FnOnce(&Self) -> EngineAnswer + Send + 'static,
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
        let all = instances.all();
        self.kept.record(&all, now);
        let overdue = all.iter().filter(|it| it.patience(now).is_err());
        let overdue = overdue.filter_map(|it| instances.take_provisional(it.id));
        self.end(overdue.collect());
        self.release(all);
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
        self.kept.forget(&self.context.instances, &instances);
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
            self.release_unreadable(instance);
        }
        self.release(instances);
    }

    /// Restores the workers of an earlier process.
    pub fn restore(self: &Arc<Self>) {
        restore::restore(self);
    }

    /// What came of the registrations of an earlier process.
    pub fn restored(&self) -> RestoredWorkers {
        self.kept.outcome()
    }

    /// Leaves the workers whose registrations are kept to the next process. To be called after the last request.
    pub fn close(&self) {
        for instance in self.context.instances.all() {
            if self.kept.has(instance.id)
                && let Some(pages) = instance.pages()
            {
                pages.leave();
            }
        }
        self.kept.close();
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

#[cfg(test)]
mod tests {
    use super::super::instances::Provisional;
    use super::super::testing::{CALLER, TestPages, engine};
    use super::*;

    const ID: InstanceId = InstanceId(7);

    /// A "no" lets the client use its pages for other requests.
    #[test]
    fn first_ping_is_refused_once_nothing_is_copied() {
        let engine = engine(&[]);
        let pages = Arc::new(TestPages::new(16));
        let mut instance = pages.instance(ID.0, engine.context.now());
        instance.provisional = Some(Provisional {
            until: Duration::MAX,
        });
        let instances = &engine.context.instances;
        instances.insert(instance).unwrap();
        let copying = instances.get(ID).unwrap().copying().unwrap();
        let ping = || engine.workers.ping(CALLER, Some(ID));
        let answer = |is_known| EngineAnswer::from(Response::Bool(is_known));
        assert_eq!(ping(), answer(true));
        // Nothing further begins, and its stores are dropped.
        assert!(instances.get(ID).is_none() && copying.is_dropped());
        assert_eq!(ping(), answer(true));
        drop(copying);
        assert_eq!([ping(), ping()], [answer(false), answer(true)]);
    }

    #[test]
    fn pings_beside_a_copy_of_an_earlier_registration_are_noted() {
        let engine = engine(&[]);
        let pages = Arc::new(TestPages::new(16));
        let instances = &engine.context.instances;
        let register = || instances.insert(pages.instance(ID.0, engine.context.now()));
        register().unwrap();
        let _hangs = instances.get(ID).unwrap().copying().unwrap();
        register().unwrap();
        engine.clock().skip(Duration::from_secs(1));
        let answer = engine.workers.ping(CALLER, Some(ID));
        assert_eq!(answer, EngineAnswer::from(Response::Bool(true)));
        assert!(instances.get(ID).unwrap().pings().is_some());
    }
}
