//! What the engines of one kind do: they serve the turns of their tenants' conversations and check every answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvtier_client::{ClientError, Scope};

use super::conversation::Conversation;
use super::engine::{Engine, Kind, MODEL};
use super::ledger::Ledger;
use super::numbers::Random;
use super::tally::{Counts, Faults, KindLatencies, record};
use crate::pattern;

/// The tenants. One has no name: requests without a salt are a tenant like any other.
pub(super) const TENANTS: [&str; 4] = ["blue", "green", "red", ""];

/// A tenant that never stores anything.
const STRANGER: &str = "stranger";

/// One turn in so many is followed by a look at another tenant's prompt.
const LOOK_ABROAD: u64 = 4;

/// What all engines share.
pub(super) struct Stage {
    pub(super) endpoint: String,
    pub(super) seed: u64,
    pub(super) turns: u32,
    pub(super) chunk_tokens: usize,
    pub(super) system: Vec<u32>,
    /// Of the engines that copy by themselves, and of those whose pages the server copies: these share nothing.
    pub(super) ledgers: [Ledger; 2],
    /// Set by a signal.
    pub(super) stop: std::sync::Arc<AtomicBool>,
    /// For the progress display.
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

impl Stage {
    fn ledger(&self, kind: Kind) -> &Ledger {
        &self.ledgers[usize::from(kind == Kind::Pages)]
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The engines of one kind, one for each tenant, and what they have seen.
pub(super) struct Party {
    engines: Vec<Engine>,
    random: Random,
    /// Makes request ids and conversations of this party its own.
    number: u64,
    next: u64,
    pub(super) counts: Counts,
    pub(super) latencies: KindLatencies,
    pub(super) faults: Faults,
}

/// Whether the cache must still have everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// Nothing can have been evicted: a hit must be complete.
    Enough,
    /// Anything may have been.
    Scarce,
}

impl Party {
    /// Starts the engines.
    pub(super) fn start(
        stage: &Stage,
        kind: Kind,
        number: u64,
        longest: usize,
    ) -> Result<Self, ClientError> {
        let engines = TENANTS
            .iter()
            .zip(0..)
            .map(|(tenant, index)| {
                let instance = number as i64 * TENANTS.len() as i64 + index + 1;
                Engine::start(&stage.endpoint, kind, instance, tenant, longest)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let kind = engines.first().map_or(kind, Engine::kind);
        Ok(Self {
            engines,
            random: Random::new(stage.seed.wrapping_add(number)),
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

    /// One conversation a tenant, turn by turn, then everybody's prompts in the hands of others.
    pub(super) fn converse(&mut self, stage: &Stage) -> Result<(), ClientError> {
        let mut conversations: Vec<_> = (0..TENANTS.len())
            .map(|tenant| self.conversation(stage, tenant))
            .collect();
        for _ in 0..stage.turns {
            for (tenant, conversation) in conversations.iter_mut().enumerate() {
                if stage.stopped() {
                    return Ok(());
                }
                self.turn(stage, tenant, conversation, Room::Enough)?;
            }
        }
        for (owner, conversation) in conversations.iter().enumerate() {
            for tenant in (0..TENANTS.len()).filter(|tenant| *tenant != owner) {
                self.look_abroad(stage, tenant, conversation)?;
            }
            self.stranger(stage, conversation)?;
        }
        Ok(())
    }

    /// Many conversations at once, more than fit, until `enough` says so. Some go on soon, some late, as in life.
    pub(super) fn crowd(
        &mut self,
        stage: &Stage,
        at_once: usize,
        enough: impl Fn(u64) -> bool,
    ) -> Result<(), ClientError> {
        let mut conversations: Vec<Vec<_>> = (0..TENANTS.len())
            .map(|tenant| {
                (0..at_once)
                    .map(|_| self.conversation(stage, tenant))
                    .collect()
            })
            .collect();
        let before = self.counts.stored_bytes;
        while !stage.stopped() && !enough(self.counts.stored_bytes - before) {
            let tenant = self.random.below(TENANTS.len() as u64) as usize;
            // The smaller of two draws: the first conversations are busy, the last ones rest.
            let limit = at_once as u64;
            let index = self.random.below(limit).min(self.random.below(limit)) as usize;
            let mut conversation = conversations[tenant][index].clone();
            self.turn(stage, tenant, &mut conversation, Room::Scarce)?;
            if self.random.below(LOOK_ABROAD) == 0 {
                let other = (tenant + 1 + self.random.below(TENANTS.len() as u64 - 1) as usize)
                    % TENANTS.len();
                self.look_abroad(stage, other, &conversation)?;
            }
            if conversation.turns >= stage.turns {
                conversation = self.conversation(stage, tenant);
            }
            conversations[tenant][index] = conversation;
        }
        Ok(())
    }

    /// Unregisters all engines.
    pub(super) fn stop(&mut self) -> Result<(), ClientError> {
        self.engines.drain(..).try_for_each(Engine::stop)
    }

    fn conversation(&mut self, stage: &Stage, tenant: usize) -> Conversation {
        self.next += 1;
        let seed = pattern::mix(stage.seed) ^ (self.number << 48 | self.next);
        Conversation::new(TENANTS[tenant], &stage.system, seed, stage.chunk_tokens)
    }

    fn request(&mut self) -> String {
        self.next += 1;
        format!("demo-{}-{}", self.number, self.next)
    }

    /// One request: look up, load what hit, compare it, save the rest.
    fn turn(
        &mut self,
        stage: &Stage,
        tenant: usize,
        conversation: &mut Conversation,
        room: Room,
    ) -> Result<(), ClientError> {
        let prompt = conversation.ask();
        let request = self.request();
        let chunks = conversation.chunks();
        let engine = &mut self.engines[tenant];

        let ledger = stage.ledger(self.latencies.kind);
        let least = ledger.least(chunks);
        let began = Instant::now();
        let hit = engine.lookup(&prompt, &request)?;
        record(&mut self.latencies.lookup, began.elapsed());
        let most = ledger.most(chunks);
        if hit > most {
            self.faults.note(format!(
                "{request}: {hit} chunks hit, only {most} were ever stored"
            ));
        }
        if room == Room::Enough && hit < least {
            self.faults.note(format!(
                "{request}: {hit} chunks hit, {least} were stored and nothing was evicted"
            ));
        }
        let hit = hit.min(chunks.len());
        if hit > 0 {
            let must_load = engine.can_load();
            match engine.load(&prompt, &request, hit)? {
                None if !must_load => {}
                None => self.faults.note(format!(
                    "{request}: {hit} chunks hit and could not be loaded"
                )),
                Some((took, bytes)) => {
                    record(&mut self.latencies.retrieve, took);
                    self.counts.retrieved_bytes += bytes.len() as u64;
                    for (number, bytes) in chunks.iter().zip(bytes.chunks_exact(bytes.len() / hit))
                    {
                        self.counts.verified_chunks += 1;
                        if !pattern::matches(*number, bytes) {
                            self.faults
                                .note(format!("{request}: a chunk came back with other bytes"));
                        }
                    }
                }
            }
        }
        let missed = &chunks[hit..];
        let mut sent = 0;
        if !missed.is_empty() {
            ledger.begin(missed);
            let (took, bytes) = engine.save(&prompt, &request, hit, missed)?;
            ledger.stored(missed);
            record(&mut self.latencies.store, took);
            sent = bytes;
        }
        engine.connection().end_session(&request)?;

        let (asked, hit) = (chunks.len() * stage.chunk_tokens, hit * stage.chunk_tokens);
        self.counts.requests += 1;
        self.counts.asked_tokens += asked as u64;
        self.counts.hit_tokens += hit as u64;
        self.counts.stored_bytes += sent;
        let progress = &stage.progress;
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

    /// A tenant asks for the prompt of another: it may find what it has stored itself (the system prompt), no more, and
    /// cannot load one chunk beyond it.
    fn look_abroad(
        &mut self,
        stage: &Stage,
        tenant: usize,
        conversation: &Conversation,
    ) -> Result<(), ClientError> {
        let (prompt, own) = conversation.as_seen_by(TENANTS[tenant], stage.chunk_tokens);
        let request = self.request();
        let engine = &mut self.engines[tenant];
        let hit = engine.lookup(&prompt, &request)?;
        let most = stage.ledger(self.latencies.kind).most(own.as_slice());
        self.counts.foreign_lookups += 1;
        if hit > most {
            self.faults.note(format!(
                "{request}: tenant {:?} hit {hit} chunks of another tenant's prompt, it has stored {most}",
                TENANTS[tenant]
            ));
        }
        if hit < own.as_slice().len() {
            self.counts.foreign_loads += 1;
            if engine.load(&prompt, &request, hit + 1)?.is_some() {
                self.faults.note(format!(
                    "{request}: tenant {:?} loaded a chunk that only another tenant has",
                    TENANTS[tenant]
                ));
            }
        }
        engine.connection().end_session(&request)
    }

    /// Somebody who has stored nothing hits nothing.
    fn stranger(&mut self, stage: &Stage, conversation: &Conversation) -> Result<(), ClientError> {
        let request = self.request();
        let scope = Scope::new(MODEL).with_salt(STRANGER);
        let (prompt, _) = conversation.as_seen_by(STRANGER, stage.chunk_tokens);
        let key = scope.scheduler_key(&prompt, 0..prompt.len() as u64, &request);
        let connection = self.engines[0].connection();
        let hit = connection.lookup_hits(&key)?;
        connection.end_session(&request)?;
        self.counts.foreign_lookups += 1;
        if hit > 0 {
            self.faults
                .note(format!("{request}: a stranger hit {hit} chunks"));
        }
        Ok(())
    }
}
