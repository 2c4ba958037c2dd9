//! Servers that stop with a GPU that does not answer.

use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use crate::exporter::Exporter;
use crate::setup::{Bed, Worker, wait};

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What waits for it looks at it several times, and the operator reads of it once.
#[test]
fn hanging_gpu_is_logged_once() {
    tracing_subscriber::fmt().with_writer(|| Log).init();
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
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    assert_eq!(log.matches("transfers have not ended").count(), 1, "{log}");
}
