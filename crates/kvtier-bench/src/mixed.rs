//! Lookups of long prompts by several schedulers while a worker stores.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use kvtier_client::{EngineDrivenWorker, Prompt};

use super::context::{Context, Pace, joined};
use super::lookups;
use super::record::Recorder;
use super::report::Report;
use crate::pattern;

/// Runs the clients and the writer. All start together; the writer stops after the last client.
pub(crate) fn run(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("mixed");
    let mut worker = context.small_worker(&scope)?;
    let prompts = lookups::resident_prompts(context, &mut worker, 4000)?;
    let clients = context.args.clients;
    let bar = context.bar("mixed", context.bar_total() * request_share(context));
    let over = AtomicBool::new(false);
    let start = std::sync::Barrier::new(clients as usize + 1);

    let (lookups, writer) = std::thread::scope(|threads| {
        let readers: Vec<_> = (0..clients)
            .map(|client| {
                let (start, bar, scope, prompts) = (&start, &bar, &scope, &prompts);
                threads.spawn(move || {
                    let connection = context.connect();
                    start.wait();
                    let mut connection = connection?;
                    connection.get_chunk_size()?;
                    let mut recorder = Recorder::default();
                    let part = f64::from(client) / f64::from(clients);
                    let mut pace = context.pace(bar).shifted(part);
                    lookups::repeat(
                        context,
                        &mut pace,
                        &mut connection,
                        scope,
                        prompts,
                        &mut recorder,
                    )?;
                    Ok::<_, anyhow::Error>((recorder, pace.measured()))
                })
            })
            .collect();
        let writer = threads.spawn(|| {
            start.wait();
            write(context, &mut worker, &over)
        });
        let readers: Vec<_> = readers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        over.store(true, Ordering::Relaxed);
        (readers, writer.join())
    });
    bar.finish_and_clear();

    let mut all = Recorder::default();
    let mut wall = Duration::ZERO;
    for outcome in lookups {
        let (recorder, measured) = joined(outcome).context("a client that looks up")?;
        all.add(recorder);
        wall = wall.max(measured);
    }
    let row = all.row(format!("mixed lookup, {clients} clients"), wall);
    report.add(row.fact("tokens", prompts[0].len() as f64));
    if let Some((recorder, measured)) = joined(writer).context("the writer")? {
        report.add(recorder.row("mixed writer", measured));
    }
    worker.close()?;
    Ok(())
}

/// Number of clients that count their own requests.
fn request_share(context: &Context) -> u64 {
    match context.args.requests {
        Some(_) => u64::from(context.args.clients),
        None => 1,
    }
}

/// Stores one new chunk after another, at the writer's own times, until the readers have finished.
fn write(
    context: &Context,
    worker: &mut EngineDrivenWorker,
    over: &AtomicBool,
) -> anyhow::Result<Option<(Recorder, Duration)>> {
    if context.args.writer_rate == 0.0 {
        return Ok(None);
    }
    let size = worker.chunk_bytes();
    let mut recorder = Recorder::default();
    let mut pace = Pace::endless(context, Some(context.args.writer_rate));
    while !over.load(Ordering::Relaxed) {
        let Some(turn) = pace.next() else {
            break;
        };
        let tokens = context.tokens(5 << 40 | turn.number, context.chunk_tokens);
        let prompt = Prompt::new(&tokens);
        let bytes = pattern::chunk(
            pattern::chunk_seeds("", &tokens, context.chunk_tokens)[0],
            size,
        );
        let request = context.request_id();
        let range = prompt.whole_chunks(context.chunk_tokens);
        let start = turn.start();
        let stored = worker.store(&prompt, range, &request, |_| &bytes)?;
        let latency = start.elapsed();
        worker.connection().end_session(&request)?;
        match stored.chunks.len() {
            1 => recorder.success(latency, 0),
            _ => recorder.failure(|| "a new chunk was not taken; is the server full?".to_owned()),
        }
    }
    Ok(Some((recorder, pace.measured())))
}
