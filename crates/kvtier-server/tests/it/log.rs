//! The log of this process, down to INFO.

use std::sync::{Mutex, OnceLock};

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Sink;

impl std::io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LINES.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What is logged from a moment on, by all tests of the process.
pub struct Log {
    start: usize,
}

impl Log {
    pub fn listen() -> Self {
        static ONCE: OnceLock<()> = OnceLock::new();
        ONCE.get_or_init(|| {
            let log = tracing_subscriber::fmt().with_ansi(false);
            log.with_writer(|| Sink).init();
        });
        let start = LINES.lock().unwrap().len();
        Self { start }
    }

    pub fn text(&self) -> String {
        String::from_utf8(LINES.lock().unwrap()[self.start..].to_vec()).unwrap()
    }
}
