//! Explanations as runs of chunks, and in words.

use kvtier_core::cache::{Loss, LossCause};
use kvtier_observe::api::{ChunkRun, ExplainedRow, Explanation};

use super::super::super::instances::Unserved;
use super::resolve::NO_WORKER;
use super::{ChunkState, ExplainedPlace, Missing, Other, Subject, ago};

/// The rows of an answer; workers with equal runs share one.
pub(super) fn rows(
    subject: &Subject,
    places: &[ExplainedPlace<'_>],
    found: &[Vec<ChunkState>],
) -> Vec<ExplainedRow> {
    let mut rows: Vec<ExplainedRow> = Vec::new();
    let chunk_size = subject.chunk_size.get();
    for (row, states) in subject.rows.iter().zip(found) {
        let namespace = &row.namespace;
        let worker = u32::try_from(namespace.kv_rank() >> 16 & 0xff).unwrap_or_default();
        let explained = ExplainedRow {
            object_group_id: namespace.object_group_id(),
            layout_fingerprint: format!("{:016x}", namespace.layout()),
            workers: Vec::new(),
            window: row.window,
            runs: runs(places, states, chunk_size),
        };
        let is_same = |other: &ExplainedRow| {
            let runs = other.runs.iter().zip(&explained.runs);
            other.object_group_id == explained.object_group_id
                && other.layout_fingerprint == explained.layout_fingerprint
                && other.runs.len() == explained.runs.len()
                && runs
                    .clone()
                    .all(|(one, other)| one.chunks == other.chunks && is_alike(one, other))
        };
        match rows.iter_mut().find(|other| is_same(other)) {
            Some(same) => same.workers.push(worker),
            None => rows.push(ExplainedRow {
                workers: vec![worker],
                ..explained
            }),
        }
    }
    rows
}

fn runs(places: &[ExplainedPlace<'_>], states: &[ChunkState], chunk_size: usize) -> Vec<ChunkRun> {
    let mut runs: Vec<ChunkRun> = Vec::new();
    for (chunk, state) in states.iter().enumerate() {
        let tokens = chunk_size as u64;
        let run = ChunkRun {
            first_chunk: chunk as u64,
            chunks: 1,
            first_token: chunk as u64 * tokens,
            tokens,
            ..described(places, state)
        };
        match runs.last_mut() {
            Some(last) if is_alike(last, &run) => {
                last.chunks += 1;
                last.tokens += tokens;
            }
            _ => runs.push(run),
        }
    }
    runs
}

/// Whether two runs have the same state, whenever it began.
fn is_alike(one: &ChunkRun, other: &ChunkRun) -> bool {
    let state = |run: &ChunkRun| {
        let ChunkRun {
            state,
            tier,
            reason,
            cause,
            stored_as,
            ..
        } = run.clone();
        (state, tier, reason, cause, stored_as)
    };
    state(one) == state(other)
}

/// What became of a chunk that a lookup missed, in words.
pub(super) fn text(places: &[ExplainedPlace<'_>], state: &ChunkState) -> String {
    match state {
        ChunkState::L1 | ChunkState::Tier(_) => {
            format!("not there yet, {} by now", described(places, state).text)
        }
        ChunkState::Missing(_) => described(places, state).text,
    }
}

fn described(places: &[ExplainedPlace<'_>], state: &ChunkState) -> ChunkRun {
    let missing = |reason: &str, text: String| ChunkRun {
        state: "missing".into(),
        reason: Some(reason.into()),
        text,
        ..ChunkRun::default()
    };
    let stored_as = |reason, value: String, text| ChunkRun {
        stored_as: Some(value),
        ..missing(reason, text)
    };
    match state {
        ChunkState::L1 => ChunkRun {
            state: "l1".into(),
            text: "in L1".into(),
            ..ChunkRun::default()
        },
        ChunkState::Tier(number) => {
            let name = places[number + 1].name();
            ChunkRun {
                state: "tier".into(),
                tier: Some(name.into()),
                text: format!("in {name}"),
                ..ChunkRun::default()
            }
        }
        ChunkState::Missing(Missing::Lost(place, loss)) => lost(&places[*place], loss),
        ChunkState::Missing(Missing::Layout(layout)) => {
            let layout = format!("{layout:016x}");
            let text = format!("stored in another layout, {layout}: by workers whose pages differ");
            stored_as("other_layout", layout, text)
        }
        ChunkState::Missing(Missing::Other(Other::ChunkSize(size))) => {
            let text = format!("stored in chunks of {size} tokens");
            stored_as("other_chunk_size", size.to_string(), text)
        }
        ChunkState::Missing(Missing::Other(Other::Model(name))) => {
            let text = format!("stored under another model name, {name}");
            stored_as("other_model", name.to_string(), text)
        }
        ChunkState::Missing(Missing::Other(Other::WorldSize(size))) => {
            let text = format!("stored by an engine of {size} workers");
            stored_as("other_world_size", size.to_string(), text)
        }
        ChunkState::Missing(Missing::Other(Other::Salt(salt))) => {
            let text = match &**salt {
                "" => "stored without a cache salt".to_owned(),
                salt => format!("stored under another cache salt, {salt}"),
            };
            stored_as("other_salt", salt.to_string(), text)
        }
        ChunkState::Missing(Missing::NotAsked) => {
            let text = "not in L1; a tier that may have it was not asked, or did not answer";
            missing("not_asked", text.into())
        }
        ChunkState::Missing(Missing::NeverSeen) => {
            let text = "never stored, as far back as the server remembers";
            missing("never_seen", text.into())
        }
    }
}

/// `reason` and `cause` of a loss, as answers and metrics name them.
pub(super) fn reason(cause: LossCause) -> (&'static str, Option<&'static str>) {
    match cause {
        LossCause::Space => ("evicted", Some("space")),
        LossCause::Watermark => ("evicted", Some("watermark")),
        LossCause::Quota => ("evicted", Some("quota")),
        LossCause::Removed => ("removed", None),
        LossCause::RefusedSpace => ("store_refused", Some("space")),
        LossCause::RefusedQuota => ("store_refused", Some("quota")),
        LossCause::RefusedStaging => ("store_refused", Some("staging")),
    }
}

fn lost(place: &ExplainedPlace<'_>, loss: &Loss) -> ChunkRun {
    let (name, policy, ago) = (place.name(), place.policy(), ago(loss.ago));
    let shown = match place {
        ExplainedPlace::L1(..) => "L1",
        ExplainedPlace::Tier(_) => name,
    };
    let (reason, cause) = reason(loss.cause);
    let text = match loss.cause {
        LossCause::Space => {
            format!("evicted from {shown} {ago} to make space (policy {policy})")
        }
        LossCause::Watermark => {
            format!("evicted from {shown} {ago} ahead of demand (policy {policy})")
        }
        LossCause::Quota => {
            format!("evicted from {shown} {ago}, since the tenant was over quota")
        }
        LossCause::Removed => {
            let why = match place {
                ExplainedPlace::L1(..) => "on request",
                ExplainedPlace::Tier(_) => "on request, or since it was lost or damaged there",
            };
            format!("removed from {shown} {ago} {why}")
        }
        LossCause::RefusedSpace => {
            format!(
                "not stored in {shown} {ago}: no space was free, and nothing but earlier chunks of its prompt could be evicted"
            )
        }
        LossCause::RefusedQuota => {
            format!("not stored in {shown} {ago} because of the tenant's limit")
        }
        LossCause::RefusedStaging => {
            format!("not stored in {shown} {ago}: too many bytes were being written")
        }
    };
    ChunkRun {
        state: "missing".into(),
        tier: Some(name.into()),
        reason: Some(reason.into()),
        cause: cause.map(str::to_owned),
        seconds_ago: Some(loss.ago.as_secs()),
        text,
        ..ChunkRun::default()
    }
}

/// What a lookup would find, and why not more; `has_left` as in [`Subject`].
pub(super) fn summary(explanation: &Explanation, has_left: bool) -> String {
    let Explanation {
        tokens,
        chunks,
        chunk_size,
        hit_tokens,
        hit_tokens_l1,
        world_size,
        ..
    } = explanation;
    if *chunks == 0 {
        return format!("{tokens} tokens are less than a chunk of {chunk_size}; nothing is cached");
    }
    if let Some(refused) = &explanation.refused {
        let why = match refused.as_str() {
            NO_WORKER => {
                let left = if has_left {
                    "; those that stored its objects in L1 have left, and the next ones find these"
                } else {
                    ""
                };
                format!(
                    "no worker of model {} is registered with world size {world_size} and chunks of {chunk_size} tokens{left}",
                    explanation.model_name
                )
            }
            refused if refused == Unserved::Windowed.name() => {
                "its workers keep only windows of some layers (--windowed-clients)".to_owned()
            }
            other => other.to_owned(),
        };
        return format!("a lookup finds nothing, whatever is stored: {why}");
    }
    let from_tiers = hit_tokens - hit_tokens_l1;
    let mut text = format!(
        "a lookup finds {hit_tokens} of {tokens} tokens: {hit_tokens_l1} in L1, {from_tiers} in tiers"
    );
    let next = hit_tokens / chunk_size;
    let mut runs = explanation.rows.iter().flat_map(|row| &row.runs);
    let first_miss = runs.find(|run| {
        let chunks = run.first_chunk..run.first_chunk + run.chunks;
        run.state == "missing" && chunks.contains(&next)
    });
    if let Some(run) = first_miss {
        text += &format!(
            "; from chunk {next} (token {hit_tokens}) on it misses: {}",
            run.text
        );
    } else if hit_tokens < tokens {
        text += "; the rest is less than a chunk";
    }
    for (name, error) in &explanation.failed_tiers {
        text += &format!("; {name} could not be asked: {error}");
    }
    text
}
