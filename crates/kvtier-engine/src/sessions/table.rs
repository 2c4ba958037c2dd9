//! The table of sessions by tenant and name.
//!
//! The mutex guards it; nothing is taken inside.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::ChunkHash;
use kvtier_core::object_key::KeyScope;
use kvtier_core::prompt::Prompt;
use kvtier_proto::key::CacheKey;
use kvtier_proto::session::{self, SessionAction};

/// Sessions that are remembered, of all tenants and of one; those whose last turn is oldest go first.
pub(super) const MAX_SESSIONS: Bounds = Bounds {
    all: 16_384,
    tenant: 4096,
};

/// Chunks that all their prompts have, and those of one tenant: 32 bytes each.
pub(super) const MAX_CHUNKS: Bounds = Bounds {
    all: 1 << 20,
    tenant: 1 << 18,
};

/// Rounds of the periodic work, one per second, in which an action is repeated.
const ROUNDS: u8 = 10;

/// Actions of a round.
const PER_ROUND: usize = 1024;

/// Sessions that the actions of a round are compared with: enough for one action of each tenant.
pub(super) const COMPARISONS: usize = 8 * MAX_SESSIONS.all;

pub(super) struct Bounds {
    pub(super) all: usize,
    pub(super) tenant: usize,
}

/// The sessions that are remembered. A restart forgets them.
#[derive(Default)]
pub struct AgentSessions(pub(super) Mutex<SessionTable>);

#[derive(Default)]
pub(super) struct SessionTable {
    tenants: HashMap<Arc<str>, TenantSessions>,
    /// Tenant of each turn, oldest first.
    turns: BTreeMap<u64, Arc<str>>,
    next_turn: u64,
    chunks: usize,
}

#[derive(Default)]
struct TenantSessions {
    /// Last turn of each session.
    by_name: HashMap<Arc<str>, u64>,
    by_turn: BTreeMap<u64, AgentSession>,
    chunks: usize,
}

struct AgentSession {
    name: Arc<str>,
    prompt: SessionPrompt,
    /// What happens to the tail until the next turn.
    action: Option<SessionAction>,
    /// Rounds in which that is repeated.
    rounds: u8,
}

/// The last prompt of a session.
#[derive(Clone)]
pub struct SessionPrompt {
    /// All workers of its model.
    pub scope: KeyScope,
    /// Tokens per chunk.
    pub chunk_size: NonZeroUsize,
    pub hashes: Arc<[ChunkHash]>,
    /// First chunk of the tail.
    pub(super) tail: usize,
}

/// What a session asked for, for when its request ends.
pub struct AtEnd {
    pub(super) session: Box<str>,
    pub(super) action: SessionAction,
}

impl AgentSessions {
    /// Notes the turn of a lookup, if it names a session. Returns what is to happen when its request ends.
    pub fn begin(
        &self,
        key: &CacheKey<'_, Prompt>,
        scope: &KeyScope,
        hashes: &Arc<[ChunkHash]>,
    ) -> Option<AtEnd> {
        let name = name(key)?;
        if !hashes.is_empty() {
            let prompt = SessionPrompt {
                scope: scope.of_all_workers(),
                chunk_size: key.tokens.chunk_size,
                hashes: Arc::clone(hashes),
                tail: 0,
            };
            self.0.lock().insert(name, prompt, None);
        }
        Some(AtEnd {
            session: name.into(),
            action: session::decode_at_end(key.request_configs)?,
        })
    }

    /// Notes the first `chunks` chunks of a store, if it names a session: they extend its prompt, or replace it if they are another.
    pub fn extend(&self, key: &CacheKey<'_, Prompt>, scope: &KeyScope, chunks: usize) {
        let Some(name) = name(key) else {
            return;
        };
        let hashes = &key.tokens.hashes[..chunks];
        if self.0.lock().extension(scope, name, hashes).is_none() {
            return;
        }
        // Megabytes of a long prompt, which are copied without the lock.
        let prompt = SessionPrompt {
            scope: scope.of_all_workers(),
            chunk_size: key.tokens.chunk_size,
            hashes: hashes.into(),
            tail: 0,
        };
        let mut table = self.0.lock();
        if let Some(action) = table.extension(scope, name, hashes) {
            table.insert(name, prompt, action);
        }
    }

    /// The last prompt of a session, which is about to be loaded: no action is repeated any more.
    pub fn recall(&self, salt: &str, name: &str) -> Option<SessionPrompt> {
        let mut table = self.0.lock();
        let session = table.session(salt, name)?;
        session.action = None;
        session.rounds = 0;
        Some(session.prompt.clone())
    }

    /// Numbers of sessions, and of the chunks of their prompts.
    pub fn counts(&self) -> (usize, usize) {
        let table = self.0.lock();
        (table.turns.len(), table.chunks)
    }
}

impl SessionTable {
    fn session(&mut self, salt: &str, name: &str) -> Option<&mut AgentSession> {
        let tenant = self.tenants.get_mut(salt)?;
        tenant.by_turn.get_mut(tenant.by_name.get(name)?)
    }

    /// What goes on being done to a session whose store has these chunks; `None` if its last prompt has them all.
    fn extension(
        &mut self,
        scope: &KeyScope,
        name: &str,
        hashes: &[ChunkHash],
    ) -> Option<Option<SessionAction>> {
        let known = self.session(scope.cache_salt(), name);
        let Some(known) = known.filter(|known| is_same_scope(&known.prompt.scope, scope)) else {
            return Some(None);
        };
        match common(&known.prompt.hashes, hashes) {
            shared if shared == hashes.len() => None,
            shared if shared == known.prompt.hashes.len() => Some(known.action),
            _ => Some(None),
        }
    }

    /// Makes this the last prompt of a session, and forgets the oldest ones for it.
    fn insert(&mut self, name: &str, prompt: SessionPrompt, action: Option<SessionAction>) {
        let salt = Arc::clone(prompt.scope.cache_salt());
        let known = self.tenants.get(&salt);
        if let Some(turn) = known.and_then(|tenant| tenant.by_name.get(name)).copied() {
            self.forget(turn);
        }
        let (turn, chunks) = (self.next_turn, prompt.hashes.len());
        if chunks > MAX_CHUNKS.tenant {
            return;
        }
        self.next_turn += 1;
        self.chunks += chunks;
        self.turns.insert(turn, Arc::clone(&salt));
        let tenant = self.tenants.entry(Arc::clone(&salt)).or_default();
        tenant.chunks += chunks;
        let name: Arc<str> = name.into();
        tenant.by_name.insert(Arc::clone(&name), turn);
        let session = AgentSession {
            name,
            prompt,
            action,
            rounds: ROUNDS,
        };
        tenant.by_turn.insert(turn, session);
        while let Some(tenant) = self.tenants.get(&salt)
            && (tenant.by_turn.len() > MAX_SESSIONS.tenant || tenant.chunks > MAX_CHUNKS.tenant)
            && let Some((&oldest, _)) = tenant.by_turn.first_key_value()
        {
            self.forget(oldest);
        }
        while (self.turns.len() > MAX_SESSIONS.all || self.chunks > MAX_CHUNKS.all)
            && let Some((&oldest, _)) = self.turns.first_key_value()
        {
            self.forget(oldest);
        }
    }

    fn forget(&mut self, turn: u64) {
        let Some(salt) = self.turns.remove(&turn) else {
            return;
        };
        let Some(tenant) = self.tenants.get_mut(&salt) else {
            return;
        };
        if let Some(session) = tenant.by_turn.remove(&turn) {
            tenant.by_name.remove(&session.name);
            tenant.chunks -= session.prompt.hashes.len();
            self.chunks -= session.prompt.hashes.len();
        }
        if tenant.by_turn.is_empty() {
            self.tenants.remove(&salt);
        }
    }

    /// Begins an action on the session's last turn; returns the turn.
    pub(super) fn begin(&mut self, salt: &str, name: &str, action: SessionAction) -> Option<u64> {
        let session = self.session(salt, name)?;
        session.action = Some(action);
        session.rounds = ROUNDS;
        self.tenants.get(salt)?.by_name.get(name).copied()
    }

    /// The turns whose actions are to be done in this round: of each tenant in turn the one that was done least often.
    pub(super) fn due(&mut self) -> Vec<(Arc<str>, u64)> {
        let mut all = Vec::new();
        for (salt, tenant) in &self.tenants {
            let sessions = tenant.by_turn.iter();
            let sessions = sessions.filter(|(_, it)| it.action.is_some() && it.rounds > 0);
            let mut own: Vec<_> = sessions
                .map(|(turn, session)| (Reverse(session.rounds), *turn))
                .collect();
            own.sort_unstable();
            let own = own.into_iter().enumerate();
            all.extend(own.map(|(rank, (rounds, turn))| (rank, rounds, turn, Arc::clone(salt))));
        }
        all.sort_unstable();
        let (mut due, mut comparisons) = (Vec::new(), 0);
        for (_, _, turn, salt) in all.into_iter().take(PER_ROUND) {
            let Some(tenant) = self.tenants.get_mut(&salt) else {
                continue;
            };
            comparisons += tenant.by_turn.len();
            if comparisons > COMPARISONS {
                break;
            }
            if let Some(session) = tenant.by_turn.get_mut(&turn) {
                session.rounds -= 1;
                due.push((salt, turn));
            }
        }
        due
    }

    /// What is to be done to the prompt of a turn. Its tail begins behind the longest prefix that any other session has too.
    pub(super) fn action(&self, salt: &str, turn: u64) -> Option<(SessionPrompt, SessionAction)> {
        let tenant = self.tenants.get(salt)?;
        let session = tenant.by_turn.get(&turn)?;
        let mut prompt = session.prompt.clone();
        let others = tenant.by_turn.iter().filter(|(other, _)| **other != turn);
        let others = others.map(|(_, session)| &session.prompt);
        for other in others.filter(|other| is_same_scope(&other.scope, &prompt.scope)) {
            let other = other.hashes.get(prompt.tail..).unwrap_or_default();
            prompt.tail += common(&prompt.hashes[prompt.tail..], other);
        }
        Some((prompt, session.action?))
    }

    /// Notes that nothing is left to be repeated, unless the prompt has become another one meanwhile.
    pub(super) fn has_ended(&mut self, salt: &str, turn: u64) {
        let tenant = self.tenants.get_mut(salt);
        if let Some(session) = tenant.and_then(|tenant| tenant.by_turn.get_mut(&turn)) {
            session.rounds = 0;
        }
    }
}

/// The session that a key names. Object keys do not chain, so they are no prompt of one.
fn name<'a>(key: &CacheKey<'a, Prompt>) -> Option<&'a str> {
    let settings = key.request_configs.filter(|_| !key.tokens.is_object_keys);
    session::decode(settings)
}

fn is_same_scope(one: &KeyScope, other: &KeyScope) -> bool {
    (one.model_name(), one.world_size()) == (other.model_name(), other.world_size())
}

/// Length of the common prefix. Hashes chain, so behind a difference all differ.
fn common(one: &[ChunkHash], other: &[ChunkHash]) -> usize {
    let (mut same, mut end) = (0, one.len().min(other.len()));
    if end == 0 || one[0] != other[0] {
        return 0;
    }
    // The first `same` are equal, and none from `end` on.
    while same < end {
        let middle = same + (end - same) / 2;
        if one[middle] == other[middle] {
            same = middle + 1;
        } else {
            end = middle;
        }
    }
    same
}
