//! Sessions of agents: what the last prompt of each needs, and what happens to it between two turns.
//!
//! A request that names a session replaces the session's prompt. Hashes of chunks chain, so what two sessions of a scope share is a
//! common prefix: the rest of a prompt, its *tail*, is the session's own, and only that is released or demoted. What is leased or
//! pinned stays: the last turn's chunks are while tiers store them, so an action is repeated for some seconds.

pub mod table;
#[cfg(test)]
mod tests;

use kvtier_proto::session::SessionAction;
use kvtier_store::tiers::Located;

use super::context::Context;
use table::{AtEnd, SessionPrompt};

/// Result of an action on a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionResult {
    /// Chunks of the session's prompt.
    pub chunks: usize,
    /// Chunks that no other session needs.
    pub own_chunks: usize,
    /// Objects of those that are evicted first from now on, or that have left L1.
    pub objects: usize,
}

/// Does this to the tail of a session's prompt, now and until its next turn; `None` if the session is unknown.
pub fn act(
    context: &Context,
    salt: &str,
    name: &str,
    action: SessionAction,
) -> Option<SessionResult> {
    let mut table = context.sessions.0.lock();
    let turn = table.begin(salt, name, action)?;
    let (prompt, action) = table.action(salt, turn)?;
    drop(table);
    context.metrics.session_action(action.name());
    Some(apply(context, &prompt, action).0)
}

/// [`act`] for a request that has ended, in the next round: a session of many takes long.
pub fn end(context: &Context, salt: &str, at_end: &AtEnd) {
    let AtEnd { session, action } = at_end;
    let turn = context.sessions.0.lock().begin(salt, session, *action);
    if turn.is_some() {
        context.metrics.session_action(action.name());
    }
}

/// Does what is to be done after the end of a request, or again since objects were leased or not in a tier yet.
pub fn repeat(context: &Context) {
    let due = context.sessions.0.lock().due();
    for (salt, turn) in due {
        let next = context.sessions.0.lock().action(&salt, turn);
        if let Some((prompt, action)) = next
            && apply(context, &prompt, action).1
        {
            context.sessions.0.lock().has_ended(&salt, turn);
        }
    }
}

/// Does this to the tail of a prompt. Returns also whether nothing of it is left to do.
fn apply(
    context: &Context,
    prompt: &SessionPrompt,
    action: SessionAction,
) -> (SessionResult, bool) {
    let cache = &context.l1.cache;
    let tail = &prompt.hashes[prompt.tail..];
    let rows = context.rows(&prompt.scope, prompt.chunk_size);
    let l2 = context.l2.as_ref();
    let l2 = l2.filter(|_| action == SessionAction::Demote);
    let (mut unloaded, mut is_everywhere) = (0, true);
    if let Some(l2) = l2 {
        let missing = vec![vec![false; tail.len()]; rows.len()];
        let places = Located::indexed(l2, &rows, tail, &missing).tiers;
        for (row, places) in rows.iter().zip(places) {
            is_everywhere &= places.iter().all(Option::is_some);
            let stored = tail.iter().zip(places).rev();
            let stored: Vec<_> = stored
                .filter_map(|(hash, place)| place.map(|_| *hash))
                .collect();
            unloaded += cache.unload(&row.namespace, &stored).objects;
        }
    }
    let namespaces = rows.iter().map(|row| &row.namespace);
    let (first, held) = cache.evict_first(context.now(), namespaces, tail);
    let objects = if l2.is_some() { unloaded } else { first };
    let metrics = &context.metrics;
    metrics.session_objects(action.name(), objects as u64);
    let result = SessionResult {
        chunks: prompt.hashes.len(),
        own_chunks: tail.len(),
        objects,
    };
    (result, held == 0 && is_everywhere)
}
