//! `--l2`: a server with a second tier in a directory. Conversations are written there, L1 is emptied, and every prompt
//! has to be retrieved with its bytes.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvtier_client::Prompt;
use kvtier_server::Server;

use super::conversation::Conversation;
use super::engine::{Engine, Kind};
use super::tally::Faults;
use super::workload::{Setup, TENANTS};
use crate::pattern;

/// Time for the tier to write the conversations.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between two checks for that.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What was retrieved from the tier.
#[derive(Debug, Default)]
pub(super) struct Recall {
    pub(super) chunks: u64,
    pub(super) bytes: u64,
}

/// A tenant's engine, and its conversation.
struct Played {
    engine: Engine,
    conversation: Conversation,
    prompt: Prompt,
}

/// Plays conversations, empties L1, asks again.
pub(super) fn play(
    setup: &Setup,
    server: &Server,
    max_chunks: usize,
    faults: &mut Faults,
) -> anyhow::Result<Recall> {
    let mut played = TENANTS
        .iter()
        .zip(1..)
        .map(|(tenant, number)| converse(setup, tenant, number, max_chunks))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut recall = Recall::default();
    if empty_l1(setup, server)? {
        for (number, one) in played.iter_mut().enumerate() {
            one.ask_again(&format!("tier-{number}-again"), &mut recall, faults)?;
        }
    }
    played
        .into_iter()
        .try_for_each(|one| one.engine.stop())
        .context("an engine could not unregister")?;
    Ok(recall)
}

/// Plays a conversation and stores the part that the tier does not have from an earlier demo.
fn converse(setup: &Setup, tenant: &str, number: i64, max_chunks: usize) -> anyhow::Result<Played> {
    let mut engine = Engine::start(&setup.endpoint, Kind::Pages, number, tenant, max_chunks)
        .context("an engine could not register")?;
    let seed = setup.seed.wrapping_add(number as u64);
    let mut conversation = Conversation::new(tenant, &setup.system, seed, setup.chunk_tokens);
    let mut prompt = conversation.ask();
    for _ in 1..setup.turns {
        conversation.answer();
        prompt = conversation.ask();
    }
    let request = format!("tier-{number}");
    let hit = engine.lookup(&prompt, &request)?;
    if let Some(missed @ [_, ..]) = conversation.chunks().get(hit..) {
        engine.store(&prompt, &request, hit, missed)?;
    }
    engine.connection().end_session(&request)?;
    Ok(Played {
        engine,
        conversation,
        prompt,
    })
}

impl Played {
    fn ask_again(
        &mut self,
        request: &str,
        recall: &mut Recall,
        faults: &mut Faults,
    ) -> anyhow::Result<()> {
        let chunks = self.conversation.chunks();
        let hit = self.engine.lookup(&self.prompt, request)?;
        if hit != chunks.len() {
            let all = chunks.len();
            faults.push(format!(
                "{request}: the tier returned {hit} chunks of {all}"
            ));
        }
        if hit > 0 {
            match self.engine.retrieve(&self.prompt, request, hit)? {
                None => faults.push(format!("{request}: a miss, right after a hit")),
                Some((_, bytes)) => {
                    recall.bytes += bytes.len() as u64;
                    let seeds = &chunks[..hit.min(chunks.len())];
                    recall.chunks += seeds.len() as u64;
                    for _ in 0..pattern::mismatches(seeds, bytes) {
                        faults.push(format!("{request}: a chunk was retrieved with wrong bytes"));
                    }
                }
            }
        }
        self.engine.connection().end_session(request)?;
        Ok(())
    }
}

/// Clears L1 until it is empty: objects that the tier has not written stay. False after a signal.
fn empty_l1(setup: &Setup, server: &Server) -> anyhow::Result<bool> {
    let began = Instant::now();
    while !setup.is_stopped() {
        server.engine().clear(false);
        let left = server.engine().readings().objects;
        if left == 0 {
            return Ok(true);
        }
        anyhow::ensure!(
            began.elapsed() < WRITE_TIMEOUT,
            "the tier has not written {left} objects within {WRITE_TIMEOUT:?}"
        );
        std::thread::sleep(CHECK_INTERVAL);
    }
    Ok(false)
}
