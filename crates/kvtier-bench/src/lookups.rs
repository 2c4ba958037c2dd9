//! Lookups without other load on the server.

use std::time::Instant;

use kvtier_client::{Connection, Prompt, Scope};

use super::context::{Context, Pace, make_resident};
use super::record::Recorder;
use super::report::Report;

/// Looks up prompts whose chunks are all cached.
pub(crate) fn hit(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    if let Some(url) = &context.args.beside {
        return hit_beside(context, &Context::new(context.args.at(url))?, report);
    }
    let scope = context.scope("lookup-hit");
    let mut worker = context.small_worker(&scope)?;
    let prompts = resident_prompts(context, &mut worker, 2000)?;
    let chunks = chunks(context, &prompts[0]);

    let bar = context.bar("lookup hit", context.bar_total());
    let mut recorder = Recorder::new();
    let mut pace = context.pace(&bar);
    repeat(
        context,
        &mut pace,
        worker.connection(),
        &scope,
        &prompts,
        &mut recorder,
    )?;
    let wall = pace.measured();
    bar.finish_and_clear();
    report.add(
        recorder
            .row("lookup hit", wall)
            .fact("tokens", prompts[0].len() as f64)
            .fact("chunks", chunks as f64),
    );
    worker.close()?;
    Ok(())
}

/// Runs the same lookups at two servers, in turn.
fn hit_beside(context: &Context, other: &Context, report: &mut Report) -> anyhow::Result<()> {
    let mut sides = Vec::new();
    for context in [context, other] {
        let scope = context.scope("lookup-hit");
        let mut worker = context.small_worker(&scope)?;
        let prompts = resident_prompts(context, &mut worker, 2000)?;
        sides.push((context, scope, worker, prompts, Recorder::new()));
    }
    let bar = context.bar("lookup hit", context.bar_total());
    let mut pace = context.pace(&bar);
    while let Some(turn) = pace.next() {
        // So that neither is always the first.
        sides.swap(0, 1);
        for (context, scope, worker, prompts, recorder) in &mut sides {
            let prompt = &prompts[turn.number as usize % prompts.len()];
            let (server, measured) = (worker.connection(), turn.measured);
            look_up(
                context,
                server,
                scope,
                prompt,
                Instant::now,
                recorder,
                measured,
            )?;
        }
    }
    let wall = pace.measured();
    bar.finish_and_clear();
    sides.sort_by_key(|(at, ..)| at.url == other.url);
    let mut rows = Vec::new();
    for (context, _, worker, prompts, recorder) in sides {
        let name = ["lookup hit", "lookup hit beside"][rows.len()];
        let row = recorder.row(name, wall);
        rows.push(row.fact("chunks", chunks(context, &prompts[0]) as f64));
        worker.close()?;
    }
    if let (Some(first), Some(second)) = (rows[0].latency_us, rows[1].latency_us) {
        let last = rows.remove(1);
        rows.push(
            last.fact("p50 of the first's", second.p50 / first.p50)
                .fact("p99 of the first's", second.p99 / first.p99),
        );
    }
    rows.into_iter().for_each(|row| report.add(row));
    Ok(())
}

/// Looks up a new prompt each time.
pub(crate) fn miss(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("lookup-miss");
    // Without a registered worker of the model there is no layout, and every lookup is a miss.
    let mut worker = context.small_worker(&scope)?;
    let bar = context.bar("lookup miss", context.bar_total());
    let mut recorder = Recorder::new();
    let mut pace = context.pace(&bar);
    while let Some(turn) = pace.next() {
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
    }
    let wall = pace.measured();
    bar.finish_and_clear();
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
