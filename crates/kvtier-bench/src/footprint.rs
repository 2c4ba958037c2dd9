//! The server's memory per object, without the object's bytes.

use anyhow::Context as _;
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::{EngineDrivenSpec, EngineDrivenWorker, Prompt};

use super::args::NEEDS_PID;
use super::context::{Context, Pace};
use super::record::{Recorder, Row};
use super::report::Report;
use crate::pattern;

/// Chunks per prompt.
const CHUNKS: usize = 64;

/// A process's resident memory in bytes, by kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resident {
    /// All of it.
    pub(crate) all: u64,
    /// Private memory: all except an arena in shared memory.
    pub(crate) anonymous: u64,
    /// Shared memory: the pool of the workers.
    pub(crate) shared: u64,
}

/// Reads `/proc/PID/status` of a process.
pub(crate) fn resident(pid: u32) -> anyhow::Result<Resident> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .map(|kib| kib * 1024)
            .with_context(|| format!("{path} has no {name}"))
    };
    Ok(Resident {
        all: field("VmRSS")?,
        anonymous: field("RssAnon")?,
        shared: field("RssShmem")?,
    })
}

/// Stores many one-byte objects without writing them, and compares the server's private memory before and after.
pub(crate) fn run(context: &Context, report: &mut Report) -> anyhow::Result<()> {
    let pid = context.args.pid.context(NEEDS_PID)?;
    let scope = context.scope("memory");
    let mut spec = EngineDrivenSpec::new(context.instance(), scope.clone(), 1, 1);
    spec.dtype = Dtype::UInt8;
    spec.one_plane = true;
    spec.slots_per_chunk = Some(1);
    spec.block_tokens = super::context::block_tokens(context.chunk_tokens as u64);
    let mut worker = EngineDrivenWorker::register(context.connect()?, spec)?;
    let instance = worker.spec().instance;
    anyhow::ensure!(
        worker.transport() == kvtier_client::Transport::SharedPool,
        "the memory scenario needs the server's shared pool"
    );

    let before = resident(pid)?;
    let bar = context.bar("memory", context.args.objects);
    let mut recorder = Recorder::default();
    let mut stored = 0_u64;
    let mut pace = Pace::endless(context, None);
    while stored < context.args.objects {
        let Some(turn) = pace.next() else { break };
        // One byte per token on the wire: a million objects are 256 million tokens.
        let seed = pattern::mix(context.args.seed ^ pattern::mix(6 << 40 | turn.number));
        let tokens: Vec<u32> = (0..(CHUNKS * context.chunk_tokens) as u64)
            .map(|index| (pattern::mix(seed.wrapping_add(index)) & 0x7f) as u32)
            .collect();
        let prompt = Prompt::new(&tokens);
        let request = context.request_id();
        let range = prompt.whole_chunks(context.chunk_tokens);
        let key = scope.worker_key(0, &prompt, range, &request);
        let connection = worker.connection();
        let start = turn.start();
        let slots = connection
            .prepare_store(&key, instance)?
            .target
            .map_or(0, |target| target.slots.len());
        let committed = slots > 0 && connection.commit_store(&key, instance, b"")?;
        let latency = start.elapsed();
        connection.end_session(&request)?;
        if !committed || slots != CHUNKS {
            recorder.failure(|| {
                format!("the server took {slots} of {CHUNKS} chunks after {stored}; is it full?")
            });
            break;
        }
        recorder.success(latency, 0);
        stored += slots as u64;
        bar.set_position(stored);
    }
    bar.finish_and_clear();
    let after = resident(pid)?;
    let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
    report.add(recorder.row(
        format!("memory, stores of {CHUNKS} objects"),
        pace.measured(),
    ));
    report.add(
        Row::of_facts("memory")
            .fact("objects", stored as f64)
            .fact("before MiB", mib(before.anonymous))
            .fact("after MiB", mib(after.anonymous))
            .fact("shared MiB", mib(after.shared))
            .fact("all MiB", mib(after.all))
            .fact(
                "B an object",
                (after.anonymous as f64 - before.anonymous as f64) / (stored as f64).max(1.0),
            ),
    );
    worker.close()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_read() {
        let resident = resident(std::process::id()).unwrap();
        assert!(resident.all >= resident.anonymous + resident.shared);
        assert!(resident.anonymous > 0);
        // Larger than any process id of Linux.
        assert!(super::resident(1 << 23).is_err());
    }
}
