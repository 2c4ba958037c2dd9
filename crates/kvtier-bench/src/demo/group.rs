//! Engines of all tenants that serve the turns of conversations, and check every answer.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Instant;

use kvtier_client::Scope;
use kvtier_core::random::SplitMix64;

use super::Demo;
use super::conversation::Conversation;
use crate::engine::{Engine, EngineKind};
use crate::record::{Recorder, RunOutcome};

/// The tenants. One has no name: requests without a salt are of a tenant like any other.
pub(super) const TENANTS: [&str; 4] = ["blue", "green", "red", ""];

/// KV bytes per token: 512 KiB per chunk of 256 tokens.
pub(super) const TOKEN_BYTES: usize = 2048;

/// One in this number of turns under pressure is followed by a lookup of another tenant's prompt.
const FOREIGN_LOOKUP_INTERVAL: u64 = 4;

/// Chunks whose store was started, and those whose store was answered.
///
/// A hit beyond the started ones is another tenant's data, or none; while nothing is evicted, a hit short of the answered
/// ones is lost data.
#[derive(Debug, Default)]
pub(super) struct ChunkLedger {
    pub(super) started: Chunks,
    pub(super) stored: Chunks,
}

/// A set of chunks, by their seeds.
#[derive(Debug, Default)]
pub(super) struct Chunks(Mutex<HashSet<u64>>);

impl Chunks {
    fn change<R>(&self, change: impl FnOnce(&mut HashSet<u64>) -> R) -> R {
        // A panic elsewhere fails the demo anyway; a set is never half changed.
        let set = self.0.lock();
        change(&mut set.unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    fn add(&self, seeds: &[u64]) {
        self.change(|set| set.extend(seeds));
    }

    /// The longest prefix of these chunks that is in the set.
    fn prefix(&self, seeds: &[u64]) -> usize {
        self.change(|set| seeds.iter().take_while(|seed| set.contains(seed)).count())
    }

    pub(super) fn clear(&self) {
        self.change(HashSet::clear);
    }
}

/// The engine of a tenant.
pub(super) fn engine(demo: &Demo<'_>, kind: EngineKind, tenant: &str) -> anyhow::Result<Engine> {
    // Objects have the format of their engine's pages, if it has pages, so these engines share none with the others.
    let model = match kind {
        EngineKind::Pages => "kvtier/demo-pages",
        _ => "kvtier/demo",
    };
    let (scope, tokens) = (Scope::new(model).with_salt(tenant), demo.chunk_tokens());
    let bytes = (tokens * TOKEN_BYTES) as u64;
    Engine::start(&demo.context, kind, &scope, bytes, demo.max_chunks() as u64)
}

/// The engines of one kind, one per tenant, and their results.
pub(super) struct Group {
    kind: EngineKind,
    engines: Vec<Engine>,
    random: SplitMix64,
    /// Results of this phase, and of those before.
    pub(super) outcome: RunOutcome,
    pub(super) total: RunOutcome,
    /// Lookups of another tenant's prompt, and refused retrieves beyond their hits.
    pub(super) foreign: (u64, u64),
    /// Answers that were wrong in another way than the outcome tells.
    pub(super) faults: Recorder,
}

impl Group {
    pub(super) fn start(demo: &Demo<'_>, kind: EngineKind) -> anyhow::Result<Self> {
        let engines = TENANTS.iter().map(|tenant| engine(demo, kind, tenant));
        Ok(Self {
            kind,
            engines: engines.collect::<anyhow::Result<_>>()?,
            random: SplitMix64::new(demo.args.seed ^ (kind as u64) << 32),
            outcome: RunOutcome::default(),
            total: RunOutcome::default(),
            foreign: (0, 0),
            faults: Recorder::default(),
        })
    }

    pub(super) fn row_name(&self, operation: &str) -> String {
        self.engines[0].row_name(operation)
    }

    /// Plays one conversation per tenant, turn by turn, then looks each prompt up for all other tenants.
    pub(super) fn converse(&mut self, demo: &Demo<'_>) -> anyhow::Result<()> {
        let mut conversations = TENANTS.map(|_| self.conversation(demo));
        for _ in 0..demo.args.turns {
            for (tenant, conversation) in conversations.iter_mut().enumerate() {
                if demo.context.is_stopped() {
                    return Ok(());
                }
                self.serve(demo, tenant, conversation, false)?;
            }
        }
        for (owner, conversation) in conversations.iter().enumerate() {
            for tenant in (0..TENANTS.len()).filter(|tenant| *tenant != owner) {
                self.look_up_foreign(demo, tenant, conversation)?;
            }
        }
        Ok(())
    }

    /// Plays many conversations at once, more than fit, until `is_enough` or a store fails. Some continue soon, some late, as in practice.
    pub(super) fn overcommit(
        &mut self,
        demo: &Demo<'_>,
        at_once: usize,
        is_enough: impl Fn(u64) -> bool,
    ) -> anyhow::Result<()> {
        let mut conversations: Vec<_> = (0..TENANTS.len() * at_once)
            .map(|_| self.conversation(demo))
            .collect();
        while !demo.context.is_stopped()
            && self.outcome.stores.failed == 0
            && !is_enough(self.outcome.stores.bytes)
        {
            let tenant = self.random.below(TENANTS.len() as u64) as usize;
            // The smaller of two draws: the first conversations are busy, the last ones idle.
            let mut draw = || self.random.below(at_once as u64) as usize;
            let index = tenant * at_once + draw().min(draw());
            self.serve(demo, tenant, &mut conversations[index], true)?;
            if self.random.below(FOREIGN_LOOKUP_INTERVAL) == 0 {
                let other = 1 + self.random.below(TENANTS.len() as u64 - 1) as usize;
                let other = (tenant + other) % TENANTS.len();
                self.look_up_foreign(demo, other, &conversations[index])?;
            }
            if conversations[index].turn == demo.args.turns as usize {
                conversations[index] = self.conversation(demo);
            }
        }
        Ok(())
    }

    /// Unregisters all engines.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        self.engines.drain(..).try_for_each(Engine::close)
    }

    fn conversation(&mut self, demo: &Demo<'_>) -> Conversation {
        Conversation::new(demo.args.seed, self.random.next(), demo.args.turns)
    }

    /// Serves the next turn of a conversation: looks it up, retrieves and compares the hits, stores the rest.
    fn serve(
        &mut self,
        demo: &Demo<'_>,
        tenant: usize,
        conversation: &mut Conversation,
        may_evict: bool,
    ) -> anyhow::Result<()> {
        let job = conversation.job(TENANTS[tenant], conversation.turn, demo.chunk_tokens());
        let Some(job) = job else { return Ok(()) };
        conversation.turn += 1;
        let request = demo.context.request_id();
        let (ledger, engine) = (demo.ledger(self.kind), &mut self.engines[tenant]);
        let least = ledger.stored.prefix(&job.seeds);
        let hits = engine.look_up(&job, &request, Instant::now(), &mut self.outcome)?;
        let most = ledger.started.prefix(&job.seeds);
        if hits > most || (hits < least && !may_evict) {
            self.faults.failure(|| {
                format!("{request}: {hits} chunks hit, {least} to {most} of them were stored")
            });
        }
        let missed = &job.seeds[hits..];
        ledger.started.add(missed);
        engine.complete(&job, &request, hits, &mut self.outcome)?;
        ledger.stored.add(missed);
        demo.bar
            .set_position(demo.began.elapsed().as_millis() as u64);
        Ok(())
    }

    /// Looks the last prompt of a conversation up for another tenant: it may find only what that tenant has stored (the
    /// system prompt), and must not retrieve a chunk beyond it.
    fn look_up_foreign(
        &mut self,
        demo: &Demo<'_>,
        tenant: usize,
        conversation: &Conversation,
    ) -> anyhow::Result<()> {
        let (name, turn) = (TENANTS[tenant], conversation.turn - 1);
        let job = conversation.job(name, turn, demo.chunk_tokens());
        let Some(job) = job else { return Ok(()) };
        let request = demo.context.request_id();
        let engine = &mut self.engines[tenant];
        let hits = engine.lookup(&job, &request)?;
        let most = demo.ledger(self.kind).started.prefix(&job.seeds);
        self.foreign.0 += 1;
        if hits > most {
            self.faults.failure(|| {
                format!("tenant {name:?} hit {hits} chunks of another's prompt, it stored {most}")
            });
        }
        if hits < job.seeds.len() {
            match engine.retrieve(&job, &request, hits + 1, |_| ())? {
                None => self.foreign.1 += 1,
                Some(_) => self
                    .faults
                    .failure(|| format!("tenant {name:?} retrieved a chunk of another tenant")),
            }
        }
        Ok(engine.connection().end_session(&request)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_ends_at_first_chunk_that_is_not_in_set() {
        let chunks = Chunks::default();
        chunks.add(&[1, 2, 4]);
        assert_eq!(chunks.prefix(&[1, 2, 3, 4]), 2);
        chunks.clear();
        assert_eq!(chunks.prefix(&[1]), 0);
    }
}
