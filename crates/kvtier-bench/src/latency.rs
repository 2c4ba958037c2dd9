//! Round trips without copies: ping, and the bookkeeping of transfers.

use anyhow::Context as _;
use kvtier_client::Prompt;
use kvtier_client::Transport;

use super::context::{Context, make_resident};
use super::report::Report;

/// Runs pings, the smallest requests.
pub(crate) fn ping(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let mut connection = context.connect()?;
    // The connection itself is not measured.
    connection.get_chunk_size()?;
    let (recorder, wall) = context.measure("ping", |turn, recorder| {
        let start = turn.start();
        let alive = connection.ping(None)?;
        let latency = start.elapsed();
        if !alive {
            recorder.failure(|| "the ping was answered with false".to_owned());
        } else if turn.measured {
            recorder.success(latency, 0);
        }
        Ok(())
    })?;
    report.add(recorder.row("ping", wall));
    Ok(())
}

/// Runs prepare_retrieve and commit_retrieve of a whole prompt, after its lookup.
pub(crate) fn retrieve_bookkeeping(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("retrieve-bookkeeping");
    let mut worker = context.small_worker(&scope)?;
    let tokens = context.tokens(1000, context.args.prompt_tokens as usize);
    let prompt = make_resident(&mut worker, context, &tokens)?;
    let range = prompt.whole_chunks(context.chunk_tokens);
    let chunks = range.end / context.chunk_tokens as u64;
    let shared = worker.transport() == Transport::SharedPool;
    let instance = worker.spec().instance;

    let (recorder, wall) = context.measure("retrieve bookkeeping", |turn, recorder| {
        let request = context.request_id();
        worker.lookup(&prompt, &request)?;
        let key = scope.worker_key(0, &prompt, range.clone(), &request);
        let connection = worker.connection();
        let start = turn.start();
        let answer = connection.prepare_retrieve(&key, instance)?;
        connection.commit_retrieve(&key, instance)?;
        let latency = start.elapsed();
        connection.end_session(&request)?;
        let came = answer.slots.as_ref().map_or(0, Vec::len) as u64;
        let good = answer.success
            && (if shared {
                came == chunks
            } else {
                !answer.data.is_empty()
            });
        if !good {
            recorder.failure(|| format!("{came} of {chunks} chunks came"));
        } else if turn.measured {
            recorder.success(latency, 0);
        }
        Ok(())
    })?;
    let name = format!("retrieve bookkeeping{}", way(shared));
    report.add(recorder.row(name, wall).fact("chunks", chunks as f64));
    worker.close()?;
    Ok(())
}

/// Runs prepare_store and commit_store of one new chunk.
pub(crate) fn store_bookkeeping(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let scope = context.scope("store-bookkeeping");
    let mut worker = context.small_worker(&scope)?;
    let shared = worker.transport() == Transport::SharedPool;
    let instance = worker.spec().instance;
    let size = worker.chunk_bytes();

    let (recorder, wall) = context.measure("store bookkeeping", |turn, recorder| {
        let prompt = Prompt::new(&context.tokens(1 << 40 | turn.number, context.chunk_tokens));
        let request = context.request_id();
        if !shared {
            let start = turn.start();
            let range = prompt.whole_chunks(context.chunk_tokens);
            worker.store(&prompt, range, &request, |_| vec![0; size])?;
            if turn.measured {
                recorder.success(start.elapsed(), 0);
            }
            return Ok(());
        }
        let key = scope.worker_key(0, &prompt, 0..context.chunk_tokens as u64, &request);
        let connection = worker.connection();
        let start = turn.start();
        let slots = connection
            .prepare_store(&key, instance)?
            .target
            .map_or(0, |target| target.slots.len());
        let committed = slots == 1 && connection.commit_store(&key, instance, b"")?;
        let latency = start.elapsed();
        connection.end_session(&request)?;
        if !committed {
            recorder
                .failure(|| format!("{slots} slots came for one new chunk; is the server full?"));
        } else if turn.measured {
            recorder.success(latency, 0);
        }
        Ok(())
    })?;
    let name = format!("store bookkeeping{}", way(shared));
    report.add(recorder.row(name, wall));
    worker.close().context("unregistering")?;
    Ok(())
}

/// What a row's name says of the way of chunks.
fn way(shared: bool) -> &'static str {
    if shared { "" } else { " (pickled)" }
}
