//! Servers that stop with a GPU that does not answer.

use std::time::Duration;

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;
use crate::log::Log;

/// Stops a server while its GPU holds a store, which writes L1.
fn end_with_a_store(bed: Bed) {
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/stopping");
    let registered = worker.send_registration();
    worker.done(registered);
    bed.pinned();
    // The trial may have chosen copies or the kernel.
    bed.fake_driver.script("clear; hold d2h; hold kernel");
    let _stored = worker.send_store(1, b"");
    bed.called("cuEventRecord", 1);
    wait(|| bed.stores_in_flight() == 1);
    bed.ends_with_a_hang();
}

/// The stop polls the GPU several times and logs once that it hangs.
#[test]
fn hanging_gpu_is_logged_once() {
    let log = Log::listen();
    let bed = Bed::with(|gpu| gpu.leave_timeout = Duration::from_millis(50));
    end_with_a_store(bed);
    let log = log.text();
    assert_eq!(log.matches("transfers have not ended").count(), 1, "{log}");
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn l1_is_not_left_to_next_server_while_gpu_hangs() {
    let log = Log::listen();
    let base = tempfile::tempdir().unwrap();
    let state = ["--state-dir", base.path().to_str().unwrap()];
    let flags = [&state[..], &["--instance-id", "gpu", "--l1-restore", "on"]].concat();
    let bed = Bed::with_flags(&flags, |gpu| gpu.leave_timeout = Duration::from_millis(50));
    let pool = bed.engine().config().shm_name.clone().unwrap();
    let pool = format!("/dev/shm/lmcache_l1_pool_{pool}");
    assert!(std::fs::exists(&pool).unwrap());
    end_with_a_store(bed);
    assert!(!std::fs::exists(&pool).unwrap());
    let _ = std::fs::remove_file(format!("{pool}.ledger"));
    let log = log.text();
    assert!(log.contains("the next server starts empty"), "{log}");
}
