//! The work of engines: they serve the turns of their tenants' conversations and check every answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvtier_client::{ClientError, Scope};

use super::conversation::Conversation;
use super::engine::{Engine, Kind, MODEL};
use super::ledger::Ledger;
use super::tally::{Counts, Faults, KindLatencies};
use crate::pattern::{self, Random};

/// The tenants. One has no name: requests without a salt are of a tenant like any other.
pub(super) const TENANTS: [&str; 4] = ["blue", "green", "red", ""];

/// A tenant that never stores anything.
const STRANGER: &str = "stranger";

/// One in this number of turns is followed by a lookup of another tenant's prompt.
const FOREIGN_LOOKUP_INTERVAL: u64 = 4;

/// State shared by all engines.
pub(super) struct Setup {
    pub(super) endpoint: String,
    pub(super) seed: u64,
    pub(super) turns: u32,
    pub(super) chunk_tokens: usize,
    pub(super) system: Vec<u32>,
    /// One of the engines that copy by themselves, and one of the others, which share nothing with them.
    pub(super) ledgers: [Ledger; 2],
    /// Set by a signal.
    pub(super) stop: std::sync::Arc<AtomicBool>,
    /// For the display.
    pub(super) progress: Progress,
}

/// Counts that the display reads while engines run.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) requests: AtomicU64,
    pub(super) asked_tokens: AtomicU64,
    pub(super) hit_tokens: AtomicU64,
    pub(super) stored_bytes: AtomicU64,
    pub(super) faults: AtomicU64,
}

impl Setup {
    fn ledger(&self, kind: Kind) -> &Ledger {
        &self.ledgers[usize::from(kind == Kind::Pages)]
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The engines of one kind, one per tenant, and their results.
pub(super) struct EngineGroup {
    engines: Vec<Engine>,
    random: Random,
    /// Distinguishes the request ids and conversations of this group.
    number: u64,
    next: u64,
    pub(super) counts: Counts,
    pub(super) latencies: KindLatencies,
    pub(super) faults: Faults,
}

/// Whether the cache may have evicted chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Eviction {
    /// No: a hit must be complete.
    Impossible,
    /// Any chunk may have been evicted.
    Possible,
}

impl EngineGroup {
    /// Starts the engines.
    pub(super) fn start(
        setup: &Setup,
        kind: Kind,
        number: u64,
        max_chunks: usize,
    ) -> Result<Self, ClientError> {
        let engines = TENANTS
            .iter()
            .zip(0..)
            .map(|(tenant, index)| {
                let instance = number as i64 * TENANTS.len() as i64 + index + 1;
                Engine::start(&setup.endpoint, kind, instance, tenant, max_chunks)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let kind = engines.first().map_or(kind, Engine::kind);
        Ok(Self {
            engines,
            random: Random::new(setup.seed.wrapping_add(number)),
            number,
            next: 0,
            counts: Counts::default(),
            latencies: KindLatencies::new(kind),
            faults: Faults::default(),
        })
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.engines
            .first()
            .map_or(0, |engine| engine.chunk_bytes() as u64)
    }

    /// Plays one conversation per tenant, turn by turn, then looks each prompt up for all other tenants.
    pub(super) fn converse(&mut self, setup: &Setup) -> Result<(), ClientError> {
        let mut conversations: Vec<_> = (0..TENANTS.len())
            .map(|tenant| self.conversation(setup, tenant))
            .collect();
        for _ in 0..setup.turns {
            for (tenant, conversation) in conversations.iter_mut().enumerate() {
                if setup.is_stopped() {
                    return Ok(());
                }
                self.turn(setup, tenant, conversation, Eviction::Impossible)?;
            }
        }
        for (owner, conversation) in conversations.iter().enumerate() {
            for tenant in (0..TENANTS.len()).filter(|tenant| *tenant != owner) {
                self.look_up_foreign(setup, tenant, conversation)?;
            }
            self.look_up_as_stranger(setup, conversation)?;
        }
        Ok(())
    }

    /// Plays many conversations at once, more than fit, until `is_enough`. Some continue soon, some late, as in practice.
    pub(super) fn overcommit(
        &mut self,
        setup: &Setup,
        at_once: usize,
        is_enough: impl Fn(u64) -> bool,
    ) -> Result<(), ClientError> {
        let mut conversations: Vec<Vec<_>> = (0..TENANTS.len())
            .map(|tenant| {
                (0..at_once)
                    .map(|_| self.conversation(setup, tenant))
                    .collect()
            })
            .collect();
        let before = self.counts.stored_bytes;
        while !setup.is_stopped() && !is_enough(self.counts.stored_bytes - before) {
            let tenant = self.random.below(TENANTS.len() as u64) as usize;
            // The smaller of two draws: the first conversations are busy, the last ones idle.
            let limit = at_once as u64;
            let index = self.random.below(limit).min(self.random.below(limit)) as usize;
            let mut conversation = conversations[tenant][index].clone();
            self.turn(setup, tenant, &mut conversation, Eviction::Possible)?;
            if self.random.below(FOREIGN_LOOKUP_INTERVAL) == 0 {
                let other = (tenant + 1 + self.random.below(TENANTS.len() as u64 - 1) as usize)
                    % TENANTS.len();
                self.look_up_foreign(setup, other, &conversation)?;
            }
            if conversation.turns >= setup.turns {
                conversation = self.conversation(setup, tenant);
            }
            conversations[tenant][index] = conversation;
        }
        Ok(())
    }

    /// Unregisters all engines.
    pub(super) fn stop(&mut self) -> Result<(), ClientError> {
        self.engines.drain(..).try_for_each(Engine::stop)
    }

    fn conversation(&mut self, setup: &Setup, tenant: usize) -> Conversation {
        self.next += 1;
        let seed = pattern::mix(setup.seed) ^ (self.number << 48 | self.next);
        Conversation::new(TENANTS[tenant], &setup.system, seed, setup.chunk_tokens)
    }

    fn request(&mut self) -> String {
        self.next += 1;
        format!("demo-{}-{}", self.number, self.next)
    }

    /// Serves one request: looks it up, retrieves and compares the hits, stores the rest.
    fn turn(
        &mut self,
        setup: &Setup,
        tenant: usize,
        conversation: &mut Conversation,
        eviction: Eviction,
    ) -> Result<(), ClientError> {
        let prompt = conversation.ask();
        let request = self.request();
        let chunks = conversation.chunks();
        let engine = &mut self.engines[tenant];

        let ledger = setup.ledger(self.latencies.kind);
        let least = ledger.least(chunks);
        let began = Instant::now();
        let hit = engine.lookup(&prompt, &request)?;
        self.latencies.lookup.record(began.elapsed());
        let most = ledger.most(chunks);
        if hit > most {
            self.faults.push(format!(
                "{request}: {hit} chunks hit, only {most} were ever stored"
            ));
        }
        if eviction == Eviction::Impossible && hit < least {
            self.faults.push(format!(
                "{request}: {hit} chunks hit, {least} were stored and nothing was evicted"
            ));
        }
        let hit = hit.min(chunks.len());
        if hit > 0 {
            let must_succeed = engine.can_retrieve();
            match engine.retrieve(&prompt, &request, hit)? {
                None if !must_succeed => {}
                None => self.faults.push(format!(
                    "{request}: {hit} chunks hit and could not be retrieved"
                )),
                Some((took, bytes)) => {
                    self.latencies.retrieve.record(took);
                    self.counts.retrieved_bytes += bytes.len() as u64;
                    self.counts.verified_chunks += hit as u64;
                    for _ in 0..pattern::mismatches(&chunks[..hit], bytes) {
                        self.faults
                            .push(format!("{request}: a chunk was retrieved with wrong bytes"));
                    }
                }
            }
        }
        let missed = &chunks[hit..];
        let mut sent = 0;
        if !missed.is_empty() {
            ledger.start(missed);
            let (took, bytes) = engine.store(&prompt, &request, hit, missed)?;
            ledger.stored(missed);
            self.latencies.store.record(took);
            sent = bytes;
        }
        engine.connection().end_session(&request)?;

        let (asked, hit) = (chunks.len() * setup.chunk_tokens, hit * setup.chunk_tokens);
        self.counts.requests += 1;
        self.counts.asked_tokens += asked as u64;
        self.counts.hit_tokens += hit as u64;
        self.counts.stored_bytes += sent;
        let progress = &setup.progress;
        for (counter, amount) in [
            (&progress.requests, 1),
            (&progress.asked_tokens, asked as u64),
            (&progress.hit_tokens, hit as u64),
            (&progress.stored_bytes, sent),
        ] {
            counter.fetch_add(amount, Ordering::Relaxed);
        }
        progress
            .faults
            .fetch_max(self.faults.count, Ordering::Relaxed);
        conversation.answer();
        Ok(())
    }

    /// Looks a prompt up for another tenant: it may find only what that tenant has stored (the system prompt), and must
    /// not retrieve a chunk beyond it.
    fn look_up_foreign(
        &mut self,
        setup: &Setup,
        tenant: usize,
        conversation: &Conversation,
    ) -> Result<(), ClientError> {
        let (prompt, own) = conversation.as_seen_by(TENANTS[tenant], setup.chunk_tokens);
        let request = self.request();
        let engine = &mut self.engines[tenant];
        let hit = engine.lookup(&prompt, &request)?;
        let most = setup.ledger(self.latencies.kind).most(own.as_slice());
        self.counts.foreign_lookups += 1;
        if hit > most {
            self.faults.push(format!(
                "{request}: tenant {:?} hit {hit} chunks of another tenant's prompt, it has stored {most}",
                TENANTS[tenant]
            ));
        }
        if hit < own.as_slice().len() {
            self.counts.foreign_loads += 1;
            if engine.retrieve(&prompt, &request, hit + 1)?.is_some() {
                self.faults.push(format!(
                    "{request}: tenant {:?} retrieved a chunk of another tenant",
                    TENANTS[tenant]
                ));
            }
        }
        engine.connection().end_session(&request)
    }

    /// Looks a prompt up for a tenant that has stored nothing, so nothing may hit.
    fn look_up_as_stranger(
        &mut self,
        setup: &Setup,
        conversation: &Conversation,
    ) -> Result<(), ClientError> {
        let request = self.request();
        let scope = Scope::new(MODEL).with_salt(STRANGER);
        let (prompt, _) = conversation.as_seen_by(STRANGER, setup.chunk_tokens);
        let key = scope.scheduler_key(&prompt, 0..prompt.len() as u64, &request);
        let connection = self.engines[0].connection();
        let hit = connection.lookup_hits(&key)?;
        connection.end_session(&request)?;
        self.counts.foreign_lookups += 1;
        if hit > 0 {
            self.faults.push(format!(
                "{request}: a tenant that has stored nothing hit {hit} chunks"
            ));
        }
        Ok(())
    }
}
