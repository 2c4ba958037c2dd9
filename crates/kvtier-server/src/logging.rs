//! Log lines: text for people, JSON for machines, colours on a terminal only.
//!
//! A thread of its own writes them to stderr, so that no other thread ever waits for whoever reads stderr. What a slow
//! reader leaves waiting is bounded; lines beyond are lost, and the log says how many.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use tracing_subscriber::EnvFilter;

use crate::budget::{Budget, Charge};
use crate::config::{LogFormat, ServerConfig};

/// Bytes of lines that may wait: some 20,000 of them.
const WAITING: u64 = 4 << 20;

/// How long the end of the process waits for the last lines.
const FLUSH: Duration = Duration::from_secs(1);

/// Sets the process's logger. A second call changes nothing.
///
/// # Errors
/// The system's, when it gives no thread.
pub fn init(config: &ServerConfig) -> std::io::Result<Log> {
    let filter = EnvFilter::try_new(&config.log_level).unwrap_or_else(|_| EnvFilter::new("info"));
    let (lines, log) = start(std::io::stderr(), WAITING, |lost| {
        tracing::warn!(lost, "log lines were lost: stderr is read too slowly");
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Arc::new(lines));
    // Fails only when a logger is set already, which is what the caller wanted.
    let _ = match config.log_format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder
            .with_ansi(std::io::stderr().is_terminal())
            .try_init(),
    };
    Ok(log)
}

/// The log's thread. Dropping this waits, a second at most, until the lines so far are written.
#[must_use = "lines that were not written when the process ends are lost"]
pub struct Log(Sender<Entry>);

enum Entry {
    Line(
        Vec<u8>,
        #[expect(dead_code, reason = "gives its bytes back")] Charge,
    ),
    /// Hung up when everything before it has been written.
    Flush(#[expect(dead_code, reason = "hangs up")] Sender<()>),
}

/// Where lines are put, each with one write.
struct Lines {
    entries: Sender<Entry>,
    waiting: Arc<Budget>,
    lost: Arc<AtomicU64>,
}

/// Starts the thread. `say_lost` is told how many lines were lost, once there is room for saying it.
fn start(
    out: impl Write + Send + 'static,
    waiting: u64,
    say_lost: impl Fn(u64) + Send + 'static,
) -> std::io::Result<(Lines, Log)> {
    // Bounded by the bytes of its lines.
    let (entries, received) = unbounded();
    let lost = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&lost);
    std::thread::Builder::new()
        .name("kvtier-log".into())
        .spawn(move || write(&received, out, &counted, say_lost))?;
    let log = Log(entries.clone());
    let lines = Lines {
        entries,
        waiting: Budget::new(waiting),
        lost,
    };
    Ok((lines, log))
}

fn write(entries: &Receiver<Entry>, mut out: impl Write, lost: &AtomicU64, say_lost: impl Fn(u64)) {
    for entry in entries {
        if let Entry::Line(line, _) = &entry {
            // Nobody is left to be told.
            let _ = out.write_all(line);
        }
        drop(entry);
        if entries.is_empty() {
            match lost.swap(0, Ordering::Relaxed) {
                0 => {}
                lost => say_lost(lost),
            }
        }
    }
}

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        match self.waiting.take(line.len() as u64) {
            // Cannot fail: the thread takes entries as long as anybody can send some.
            Some(charge) => drop(self.entries.send(Entry::Line(line.to_vec(), charge))),
            None => drop(self.lost.fetch_add(1, Ordering::Relaxed)),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done, written) = bounded(0);
        let _ = self.0.send(Entry::Flush(done));
        // Either way it ends: written, or stderr is not read.
        let _ = written.recv_timeout(FLUSH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes one line for each message, and all once its other end is dropped.
    struct Slow {
        reader: Receiver<()>,
        read: Sender<Vec<u8>>,
    }

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            let _ = self.reader.recv();
            let _ = self.read.send(line.to_vec());
            Ok(line.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn who_logs_waits_for_no_reader_and_what_is_lost_is_counted() {
        let (reads, reader) = bounded::<()>(0);
        let (read, lines_read) = unbounded();
        let (said, say) = unbounded();
        let (lines, _log) = start(Slow { reader, read }, 100, move |lost| {
            let _ = said.send(lost);
        })
        .unwrap();
        // Nobody reads, and yet this ends.
        for number in 0..10_u8 {
            (&lines).write_all(&[number; 30]).unwrap();
        }
        drop(reads);
        for kept in 0..3 {
            assert_eq!(lines_read.recv().unwrap(), [kept; 30]);
        }
        assert_eq!(say.recv().unwrap(), 7);
        // There is room again.
        (&lines).write_all(&[11; 100]).unwrap();
        assert_eq!(lines_read.recv().unwrap(), [11; 100]);
    }
}
