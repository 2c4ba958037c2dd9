//! Servers that stop with a GPU that does not answer.

use std::time::Duration;

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;
use crate::log::Log;

/// The stop polls the GPU several times and logs once that it hangs.
#[test]
fn hanging_gpu_is_logged_once() {
    let log = Log::listen();
    let bed = Bed::with(|gpu| gpu.leave_timeout = Duration::from_millis(50));
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/stopping");
    let registered = worker.send_registration();
    worker.done(registered);
    // The trial may have chosen copies or the kernel.
    bed.fake_driver.script("clear; hold d2h; hold kernel");
    let _stored = worker.send_store(1, b"");
    bed.called("cuEventRecord", 1);
    wait(|| bed.stores_in_flight() == 1);
    bed.ends_with_a_hang();
    let log = log.text();
    assert_eq!(log.matches("transfers have not ended").count(), 1, "{log}");
}
