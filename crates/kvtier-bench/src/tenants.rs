//! Stores of many tenants in random order; sometimes a tenant retrieves what it stored last.

use std::collections::HashMap;

use kvtier_client::Prompt;

use super::context::Context;
use super::record::Recorder;
use super::report::Report;
use crate::pattern;

/// One prompt is retrieved per this number of stores.
const RETRIEVE_INTERVAL: u64 = 16;

/// Runs with prompts of one chunk. Stores that a quota refuses and chunks that were evicted are counted, not failures;
/// wrong bytes are failures.
pub(crate) fn run(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let tenants = u64::from(context.args.tenants);
    let mut worker = context.small_worker(&context.scope("tenants"))?;
    let size = worker.chunk_bytes();
    let mut retrieves = Recorder::default();
    let (mut refused, mut misses) = (0_u64, 0_u64);
    let mut last: HashMap<u64, u64> = HashMap::new();
    let (stores, wall) = context.measure("tenants", |turn, stores| {
        // The names are the same in each run, so that quotas can be set for them.
        let tenant = pattern::mix(context.args.seed ^ turn.number) % tenants;
        worker.set_salt(format!("tenant-{tenant}"));
        let prompt_of = |number: u64| {
            let tokens = context.tokens(6 << 40 | number, context.chunk_tokens);
            let seed = pattern::chunk_seeds("", &tokens, context.chunk_tokens)[0] ^ tenant;
            (Prompt::new(&tokens), seed)
        };
        let (prompt, seed) = prompt_of(turn.number);
        let bytes = pattern::chunk(seed, size);
        let request = context.request_id();
        let range = prompt.whole_chunks(context.chunk_tokens);
        let start = turn.start();
        let stored = worker.store(&prompt, range, &request, |_| &bytes)?;
        let latency = start.elapsed();
        worker.connection().end_session(&request)?;
        if stored.chunks.is_empty() {
            refused += u64::from(turn.measured);
        } else {
            if turn.measured {
                stores.success(latency, stored.bytes);
            }
            last.insert(tenant, turn.number);
        }
        let Some(&number) = last
            .get(&tenant)
            .filter(|_| turn.number.is_multiple_of(RETRIEVE_INTERVAL))
        else {
            return Ok(());
        };
        let (prompt, seed) = prompt_of(number);
        let request = context.request_id();
        let range = prompt.whole_chunks(context.chunk_tokens);
        let start = std::time::Instant::now();
        let hits = worker.lookup(&prompt, &request)?;
        let got = match hits {
            0 => None,
            _ => worker.retrieve(&prompt, range, &request, |_, bytes| {
                if !pattern::matches(seed, bytes) {
                    retrieves.mismatch(|| format!("a chunk of tenant-{tenant}"));
                }
            })?,
        };
        let latency = start.elapsed();
        worker.connection().end_session(&request)?;
        match got {
            None => misses += u64::from(turn.measured),
            Some(got) if turn.measured => retrieves.success(latency, got.bytes),
            Some(_) => {}
        }
        Ok(())
    })?;
    let store = stores.row(format!("store, {tenants} tenants"), wall);
    report.add(store.fact("refused", refused as f64));
    let retrieve = retrieves.row(format!("lookup and retrieve, {tenants} tenants"), wall);
    report.add(retrieve.fact("misses", misses as f64));
    worker.close()?;
    Ok(())
}
