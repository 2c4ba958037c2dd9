//! Replay of a recorded trace, with tokens derived from its block ids, and small objects.
//!
//! Each request is looked up, its hits are retrieved and compared, the rest is stored, and its session ends, like the
//! requests of an engine without a prefix cache.

use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;

use super::args::NEEDS_TRACE;
use super::context::{Context, joined};
use super::engine::{Engine, EngineKind, PromptJob};
use super::record::{Row, RunOutcome};
use super::report::Report;
use crate::pattern;

/// Tokens per id of the trace (Mooncake traces, FAST'25).
const TOKENS_PER_ID: usize = 512;

/// Longest valid prompt, in tokens.
const MAX_PROMPT: usize = 4 << 20;

/// One line of a trace. Its output length is ignored.
#[derive(Debug, Deserialize)]
struct Line {
    /// Milliseconds since the start of the trace.
    timestamp: u64,
    /// Tokens of the prompt.
    input_length: usize,
    /// One id per 512 tokens of the prompt; equal ids mean equal prefixes up to there.
    hash_ids: Vec<u64>,
}

pub(crate) fn run(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let path = context.args.trace.as_ref().context(NEEDS_TRACE)?;
    let lines = read(path, context.args.limit)?;
    let scope = context.scope("replay");
    let bar = context.bar("replay", lines.len() as u64);
    let queue = Mutex::new(lines.iter());
    let engines = (0..context.args.clients)
        .map(|_| {
            Engine::start(
                context,
                EngineKind::of(context),
                &scope,
                context.args.small_chunk_bytes,
                0,
            )
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let started = Instant::now();
    let outcomes: Vec<_> = std::thread::scope(|threads| {
        let clients: Vec<_> = engines
            .into_iter()
            .map(|mut engine| {
                let (queue, bar) = (&queue, &bar);
                threads.spawn(move || {
                    let mut outcome = RunOutcome::default();
                    while !context.is_stopped() {
                        let next = queue.lock().map_or(None, |mut lines| lines.next());
                        let Some(line) = next else { break };
                        let due = due(context, started, line);
                        if let Some(early) =
                            due.and_then(|due| due.checked_duration_since(Instant::now()))
                        {
                            std::thread::sleep(early);
                        }
                        replay(context, &mut engine, line, due, &mut outcome)?;
                        bar.inc(1);
                    }
                    engine.close()?;
                    Ok::<_, anyhow::Error>(outcome)
                })
            })
            .collect();
        clients
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect()
    });
    let wall = started.elapsed();
    bar.finish_and_clear();
    let mut all = RunOutcome::default();
    for outcome in outcomes {
        all.add(joined(outcome)?);
    }
    all.report(report, wall, |name| format!("replay {name}"));
    report.add(
        Row::of_facts("replay")
            .fact("requests", lines.len() as f64)
            .fact("seconds", wall.as_secs_f64())
            .fact("hit rate", all.hit_rate()),
    );
    Ok(())
}

/// When a request is due, if the trace's own times are used.
fn due(context: &Context, started: Instant, line: &Line) -> Option<Instant> {
    let speed = context.args.speed?;
    let offset = Duration::try_from_secs_f64(line.timestamp as f64 / 1000.0 / speed).ok()?;
    started.checked_add(offset)
}

fn replay(
    context: &Context,
    engine: &mut Engine,
    line: &Line,
    due: Option<Instant>,
    outcome: &mut RunOutcome,
) -> anyhow::Result<()> {
    let tokens = tokens(context.args.seed, line);
    let job = PromptJob::new("", &tokens, context.chunk_tokens);
    let request = context.request_id();
    let start = due.unwrap_or_else(Instant::now);
    let hits = engine.look_up(&job, &request, start, outcome)?;
    engine.complete(&job, &request, hits, outcome)
}

/// The prompt of a line: the same id gives the same tokens.
fn tokens(seed: u64, line: &Line) -> Vec<u32> {
    let mut tokens: Vec<u32> = line
        .hash_ids
        .iter()
        .flat_map(|id| pattern::tokens(pattern::mix(seed ^ pattern::mix(*id)), TOKENS_PER_ID))
        .collect();
    tokens.truncate(line.input_length);
    tokens
}

fn read(path: &std::path::Path, limit: u64) -> anyhow::Result<Vec<Line>> {
    let file = std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut lines = Vec::new();
    for (number, text) in BufReader::new(file).lines().enumerate() {
        if lines.len() as u64 == limit {
            break;
        }
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        if text.trim().is_empty() {
            continue;
        }
        let place = || format!("{}, line {}", path.display(), number + 1);
        let line: Line = serde_json::from_str(&text).with_context(place)?;
        anyhow::ensure!(
            line.hash_ids.len() <= MAX_PROMPT / TOKENS_PER_ID,
            "{}: hash_ids has {} ids, at most {} are allowed",
            place(),
            line.hash_ids.len(),
            MAX_PROMPT / TOKENS_PER_ID
        );
        lines.push(line);
    }
    anyhow::ensure!(!lines.is_empty(), "{} has no requests", path.display());
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn equal_ids_give_equal_prefixes() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(
            file,
            r#"{{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}}"#
        )
        .unwrap();
        writeln!(
            file,
            r#"{{"timestamp": 3, "input_length": 1024, "output_length": 5, "hash_ids": [0, 2]}}"#
        )
        .unwrap();
        let lines = read(file.path(), 10).unwrap();
        assert_eq!(lines.len(), 2);
        let (first, second) = (tokens(1, &lines[0]), tokens(1, &lines[1]));
        assert_eq!((first.len(), second.len()), (700, 1024));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..], second[512..700]);
        assert_eq!(read(file.path(), 1).unwrap().len(), 1);
    }

    #[test]
    fn invalid_line_is_named() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "{{}}").unwrap();
        let error = format!("{:#}", read(file.path(), 10).unwrap_err());
        assert!(
            error.contains("line 1") && error.contains("timestamp"),
            "{error}"
        );
    }
}
