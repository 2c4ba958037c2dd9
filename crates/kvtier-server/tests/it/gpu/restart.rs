//! Workers on a GPU that the next process of the server takes over.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;
use crate::support::CHUNK;

fn left_out(bed: &Bed) -> (u64, BTreeMap<String, u64>) {
    let state = bed.engine().admin().status(true).state;
    (state.restored_workers, state.left_out_workers)
}

/// The handle is opened again, and the counter of PyTorch's stays until the worker has left for good.
// proves: docs/operate.md#workers-after-a-restart
#[test]
fn worker_is_served_by_the_next_process_while_its_engine_lives() {
    let base = tempfile::tempdir().unwrap();
    let state = ["--state-dir", base.path().to_str().unwrap()];
    let flags = [&state[..], &["--instance-id", "gpu"]].concat();
    let bed = Bed::with_flags(&flags, |_| {});
    let mut engine = Exporter::start();
    let file = engine.counters();
    let mut options = std::fs::File::options();
    let path = format!("/dev/shm{}", file.0);
    let counters = options.read(true).write(true).open(path).unwrap();
    let count = || {
        let mut bytes = [0; 8];
        counters.read_exact_at(&mut bytes, 64).unwrap();
        i64::from_ne_bytes(bytes)
    };
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/restart");
    worker.counter = Some((file.0.clone().into(), 0));
    worker.scope.chunk_tokens = Some(CHUNK as u32);
    let registered = worker.send_registration();
    worker.done(registered);

    let bed = bed.restart(&flags);
    assert_eq!(left_out(&bed), (1, BTreeMap::new()));
    assert_eq!((bed.open_allocations(), count()), (Some(1), 1));
    worker.connection = bed.connect();
    let stored = worker.send_store(1, b"");
    assert!(worker.has_stored(stored));
    let status = bed.engine().admin().status(true);
    assert_eq!(status.devices.instances_of_known_processes, [1]);
    let unregistered = worker.send_unregistration();
    worker.done(unregistered);
    assert_eq!((bed.open_allocations(), count()), (Some(0), 0));

    // Its process ends while there is no server.
    counters.write_all_at(&1_i64.to_ne_bytes(), 64).unwrap();
    let registered = worker.send_registration();
    worker.done(registered);
    engine.kill();
    let bed = bed.restart(&flags);
    let memory = BTreeMap::from([("memory".to_owned(), 1)]);
    assert_eq!(left_out(&bed), (0, memory));
    assert_eq!(bed.readings().instances, 0);
    bed.pass(Duration::ZERO);
    wait(|| bed.open_allocations().is_none_or(|open| open == 0));
    bed.ends_clean();
}
