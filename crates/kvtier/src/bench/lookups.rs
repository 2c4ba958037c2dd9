//! Lookups, alone on the server.

use kvtier_client::{Connection, Prompt, Scope};

use super::context::{Context, Pace, make_resident};
use super::record::Recorder;
use super::report::Report;

/// Prompts whose chunks are all there.
pub(crate) fn hit(context: &Context, report: &mut Report) -> anyhow::Result<()> {
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

/// A new prompt each time.
pub(crate) fn miss(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("lookup-miss");
    // Without a registered worker of the model every lookup is a miss, for want of a layout.
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
            recorder.mismatch(|| format!("a prompt never seen before has {hits} chunks"));
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

/// As many prompts as asked for, stored.
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

/// Looks resident prompts up in turn until the loop is over. What a lookup pins is freed before the next one.
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
        let wanted = chunks(context, prompt);
        let request = context.request_id();
        let key = scope.scheduler_key(prompt, prompt.whole_chunks(context.chunk_tokens), &request);
        let start = turn.start();
        let hits = connection.lookup_hits(&key)?;
        let latency = start.elapsed();
        connection.free_lookup_locks(&key)?;
        connection.end_session(&request)?;
        if hits != wanted {
            recorder.failure(|| format!("{hits} chunks of {wanted} were found"));
        } else if turn.measured {
            recorder.success(latency, 0);
        }
    }
    Ok(())
}
