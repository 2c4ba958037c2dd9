//! `--l2`: a server with a second tier in a directory. What was said is written there, L1 is emptied, and every prompt
//! has to come back with its bytes.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvtier_client::Prompt;
use kvtier_server::Server;

use super::conversation::Conversation;
use super::engine::{Engine, Kind};
use super::tally::Faults;
use super::workload::{Stage, TENANTS};
use crate::pattern;

/// How long the tier may take to write what was said.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What came back.
#[derive(Debug, Default)]
pub(super) struct Recall {
    pub(super) chunks: u64,
    pub(super) bytes: u64,
}

/// A tenant's engine, and the conversation it has had.
struct Talk {
    engine: Engine,
    conversation: Conversation,
    prompt: Prompt,
}

/// Says, empties L1, asks again.
pub(super) fn play(
    stage: &Stage,
    server: &Server,
    longest: usize,
    faults: &mut Faults,
) -> anyhow::Result<Recall> {
    let mut talks = TENANTS
        .iter()
        .zip(1..)
        .map(|(tenant, number)| talk(stage, tenant, number, longest))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut recall = Recall::default();
    if empty_l1(stage, server)? {
        for (number, talk) in talks.iter_mut().enumerate() {
            talk.ask_again(&format!("tier-{number}-again"), &mut recall, faults)?;
        }
    }
    talks
        .into_iter()
        .try_for_each(|talk| talk.engine.stop())
        .context("an engine could not unregister")?;
    Ok(recall)
}

/// Has a conversation and saves what of it the tier does not have from an earlier demo.
fn talk(stage: &Stage, tenant: &str, number: i64, longest: usize) -> anyhow::Result<Talk> {
    let mut engine = Engine::start(&stage.endpoint, Kind::Pages, number, tenant, longest)
        .context("an engine could not register")?;
    let seed = stage.seed.wrapping_add(number as u64);
    let mut conversation = Conversation::new(tenant, &stage.system, seed, stage.chunk_tokens);
    let mut prompt = conversation.ask();
    for _ in 1..stage.turns {
        conversation.answer();
        prompt = conversation.ask();
    }
    let request = format!("tier-{number}");
    let hit = engine.lookup(&prompt, &request)?;
    if let Some(missed @ [_, ..]) = conversation.chunks().get(hit..) {
        engine.save(&prompt, &request, hit, missed)?;
    }
    engine.connection().end_session(&request)?;
    Ok(Talk {
        engine,
        conversation,
        prompt,
    })
}

impl Talk {
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
            faults.note(format!("{request}: the tier gave {hit} chunks of {all}"));
        }
        if hit > 0 {
            match self.engine.load(&self.prompt, request, hit)? {
                None => faults.note(format!("{request}: a miss, right after a hit")),
                Some((_, bytes)) => {
                    recall.bytes += bytes.len() as u64;
                    for (number, bytes) in chunks.iter().zip(bytes.chunks_exact(bytes.len() / hit))
                    {
                        recall.chunks += 1;
                        if !pattern::matches(*number, bytes) {
                            faults.note(format!("{request}: a chunk came back with other bytes"));
                        }
                    }
                }
            }
        }
        self.engine.connection().end_session(request)?;
        Ok(())
    }
}

/// Clears L1 until nothing is in it: what the tier has not written stays. False after a signal.
fn empty_l1(stage: &Stage, server: &Server) -> anyhow::Result<bool> {
    let began = Instant::now();
    while !stage.stopped() {
        server.engine().clear(false);
        let left = server.engine().readings().objects;
        if left == 0 {
            return Ok(true);
        }
        anyhow::ensure!(
            began.elapsed() < WRITTEN_WITHIN,
            "the tier has not written {left} objects within {WRITTEN_WITHIN:?}"
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(false)
}
