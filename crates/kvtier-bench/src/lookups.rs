//! Lookups without other load on the server.

use std::sync::Arc;
use std::time::Instant;

use kvtier_client::{Connection, Prompt, Scope};

use super::context::{Context, Pace, make_resident};
use super::record::{Latency, Recorder};
use super::report::Report;

/// Looks up prompts whose chunks are all cached; with `--beside` at two servers, in turn.
pub(crate) fn hit(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let beside = context.args.beside.as_deref();
    let beside = beside.map(|url| Context::new(context.args.at(url), Arc::clone(&context.stop)));
    let beside = beside.transpose()?;
    let mut sides = Vec::new();
    for context in [Some(context), beside.as_ref()].into_iter().flatten() {
        let scope = context.scope("lookup-hit");
        let mut worker = context.small_worker(&scope)?;
        let prompts = resident_prompts(context, &mut worker, 2000)?;
        sides.push((context, scope, worker, prompts, Recorder::default()));
    }
    let (_, wall) = context.measure("lookup hit", |turn, _| {
        // So that neither is always the first.
        sides.reverse();
        let due = beside.is_none().then(|| turn.start());
        for (context, scope, worker, prompts, recorder) in &mut sides {
            let prompt = &prompts[turn.number as usize % prompts.len()];
            let (server, start) = (worker.connection(), || due.unwrap_or_else(Instant::now));
            look_up(
                context,
                server,
                scope,
                prompt,
                start,
                recorder,
                turn.measured,
            )?;
        }
        Ok(())
    })?;
    sides.sort_by_key(|(at, ..)| at.url != context.url);
    let mut first: Option<Latency> = None;
    for ((context, _, worker, prompts, recorder), name) in
        sides.into_iter().zip(["lookup hit", "lookup hit beside"])
    {
        let mut row = recorder.row(name, wall);
        row = row.fact("tokens", prompts[0].len() as f64);
        row = row.fact("chunks", chunks(context, &prompts[0]) as f64);
        if let (Some(first), Some(second)) = (first, row.latency_us) {
            row = row.fact("p50 of the first's", second.p50 / first.p50);
            row = row.fact("p99 of the first's", second.p99 / first.p99);
        }
        first = row.latency_us;
        report.add(row);
        worker.close()?;
    }
    Ok(())
}

/// Looks up a new prompt each time.
pub(crate) fn miss(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("lookup-miss");
    // Without a registered worker of the model there is no layout, and every lookup is a miss.
    let mut worker = context.small_worker(&scope)?;
    let (recorder, wall) = context.measure("lookup miss", |turn, recorder| {
        let tokens = context.tokens(2 << 40 | turn.number, context.args.prompt_tokens as usize);
        let prompt = Prompt::new(&tokens);
        let request = context.request_id();
        let key = scope.scheduler_key(&prompt, prompt.whole_chunks(context.chunk_tokens), &request);
        let connection = worker.connection();
        let start = turn.start();
        let hits = connection.lookup_hits(&key)?;
        let latency = start.elapsed();
        connection.end_session(&request)?;
        if hits != 0 {
            recorder.mismatch(|| format!("a new prompt has {hits} chunks"));
        } else if turn.measured {
            recorder.success(latency, 0);
        }
        Ok(())
    })?;
    report.add(
        recorder
            .row("lookup miss", wall)
            .fact("tokens", f64::from(context.args.prompt_tokens)),
    );
    worker.close()?;
    Ok(())
}

/// Stores `--prompts` prompts.
pub(crate) fn resident_prompts(
    context: &Context,
    worker: &mut kvtier_client::EngineDrivenWorker,
    first: u64,
) -> anyhow::Result<Vec<Prompt>> {
    (0..u64::from(context.args.prompts))
        .map(|number| {
            let tokens = context.tokens(first + number, context.args.prompt_tokens as usize);
            make_resident(worker, context, &tokens)
        })
        .collect()
}

/// Whole chunks of a prompt.
pub(crate) fn chunks(context: &Context, prompt: &Prompt) -> u64 {
    prompt.len() as u64 / context.chunk_tokens as u64
}

/// Looks resident prompts up in turn until the end of the loop. The leases of a lookup end before the next one.
pub(crate) fn repeat(
    context: &Context,
    pace: &mut Pace<'_>,
    connection: &mut Connection,
    scope: &Scope,
    prompts: &[Prompt],
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    while let Some(turn) = pace.next() {
        let prompt = &prompts[turn.number as usize % prompts.len()];
        let start = || turn.start();
        look_up(
            context,
            connection,
            scope,
            prompt,
            start,
            recorder,
            turn.measured,
        )?;
    }
    Ok(())
}

/// Looks a resident prompt up.
fn look_up(
    context: &Context,
    connection: &mut Connection,
    scope: &Scope,
    prompt: &Prompt,
    start: impl FnOnce() -> Instant,
    recorder: &mut Recorder,
    measured: bool,
) -> anyhow::Result<()> {
    let wanted = chunks(context, prompt);
    let request = context.request_id();
    let key = scope.scheduler_key(prompt, prompt.whole_chunks(context.chunk_tokens), &request);
    let start = start();
    let hits = connection.lookup_hits(&key)?;
    let latency = start.elapsed();
    connection.free_lookup_locks(&key)?;
    connection.end_session(&request)?;
    if hits != wanted {
        recorder.failure(|| format!("{hits} chunks of {wanted} were found"));
    } else if measured {
        recorder.success(latency, 0);
    }
    Ok(())
}
