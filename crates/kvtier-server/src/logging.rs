//! Log lines: text for people, JSON for machines, colours on a terminal only, and there unless `NO_COLOR` is set.
//!
//! An event is one line whatever its fields hold: what clients choose, such as names of models, is escaped in every line.
//!
//! A thread of its own writes them to stderr, so that no other thread ever waits for the reader of stderr. What a slow
//! reader leaves waiting is bounded; lines beyond are lost, and the log says how many. The latest warnings and
//! errors are also kept for the dashboard.
//!
//! `WARNINGS` guards those that were asked for; no other lock is acquired inside.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, unbounded};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::FormatFields as _;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::layer::{self, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer, Registry, reload};

use crate::escape::escape;
use kvtier_common::sync::Mutex;
use kvtier_common::sync::budget::{Budget, Charge};
use kvtier_config::{LogFormat, ServerConfig};
use kvtier_l2::redact;
use kvtier_observe::api::{LogLine, unix_millis};

/// Bytes of lines that may wait: some 20,000 of them.
const WAITING: u64 = 4 << 20;

/// How long the end of the process waits for the last lines.
const FLUSH: Duration = Duration::from_secs(1);

/// Warnings and errors that are kept, and bytes of each.
const MAX_WARNINGS: usize = 50;
const MAX_WARNING_BYTES: usize = 512;

/// Warnings that were asked for, the oldest first.
static WARNINGS: Mutex<VecDeque<LogLine>> = Mutex::new(VecDeque::new());

/// Warnings since the last request: an event may come from inside any lock, so none is acquired for it.
static NEW_WARNINGS: LazyLock<(Sender<LogLine>, Receiver<LogLine>)> =
    LazyLock::new(|| bounded(MAX_WARNINGS));

/// The latest warnings and errors of the process's logger, the latest first.
pub fn latest_warnings() -> Vec<LogLine> {
    let mut warnings = WARNINGS.lock();
    warnings.extend(NEW_WARNINGS.1.try_iter());
    let superfluous = warnings.len().saturating_sub(MAX_WARNINGS);
    warnings.drain(..superfluous);
    warnings.iter().rev().cloned().collect()
}

/// Adds one; the oldest is forgotten for it.
fn keep(mut line: LogLine) {
    let (sender, receiver) = &*NEW_WARNINGS;
    while let Err(TrySendError::Full(again)) = sender.try_send(line) {
        let _ = receiver.try_recv();
        line = again;
    }
}

/// Sets the process's logger. A second call changes nothing.
///
/// # Errors
/// The system's, when it gives no thread.
pub fn init(config: &ServerConfig) -> std::io::Result<Log> {
    let filter = config.log_level.parse();
    let filter = filter.unwrap_or_else(|_| Targets::new().with_default(Level::INFO));
    let (mut lines, log) = start(std::io::stderr(), WAITING, |lost| {
        tracing::warn!(lost, "log lines were lost: stderr is read too slowly");
    })?;
    lines.colored = config.log_format == LogFormat::Text
        && std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (subscriber, set_filter) = subscriber(config.log_format, filter, lines);
    let subscriber = subscriber.with(Warnings);
    // Fails only when a logger is set already, which is what the caller wanted.
    if subscriber.try_init().is_ok() {
        let _ = SET_FILTER.set(set_filter);
    }
    Ok(log)
}

/// Replaces the filter of the process's logger, if [`init`] has set it.
type SetFilter = Box<dyn Fn(Targets) + Send + Sync>;

static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

/// Logs by this filter from here on; one that is invalid changes nothing.
pub fn set_level(level: &str) {
    if let (Some(set), Ok(filter)) = (SET_FILTER.get(), level.parse()) {
        set(filter);
    }
}

fn subscriber(
    format: LogFormat,
    filter: Targets,
    lines: Lines,
) -> (Box<dyn Subscriber + Send + Sync>, SetFilter) {
    let (filter, handle) = reload::Layer::new(filter);
    let registry = Registry::default().with(filter);
    let layer = tracing_subscriber::fmt::layer()
        // Of a line as a whole, once it is escaped.
        .with_ansi(false)
        .with_writer(Arc::new(lines));
    let subscriber: Box<dyn Subscriber + Send + Sync> = match format {
        LogFormat::Json => Box::new(registry.with(layer.json())),
        LogFormat::Text => Box::new(registry.with(layer)),
    };
    let set_filter = move |filter| drop(handle.reload(filter));
    (subscriber, Box::new(set_filter))
}

/// The log's thread. Dropping this waits, a second at most, until the lines so far are written.
#[must_use = "lines that were not written when the process ends are lost"]
pub struct Log(Sender<LogEntry>);

enum LogEntry {
    Line(
        Vec<u8>,
        #[expect(dead_code, reason = "gives its bytes back")] Charge,
    ),
    /// Hung up when everything before it has been written.
    Flush(#[expect(dead_code, reason = "hangs up")] Sender<()>),
}

/// Writer of lines, each with one write.
struct Lines {
    entries: Sender<LogEntry>,
    waiting: Arc<Budget>,
    lost: Arc<AtomicU64>,
    colored: bool,
}

/// Keeps warnings and errors, cut at [`MAX_WARNING_BYTES`].
struct Warnings;

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: layer::Context<'_, S>) {
        let metadata = event.metadata();
        if *metadata.level() > Level::WARN {
            return;
        }
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = DefaultFields::new().format_fields(Writer::new(&mut text), event);
        // Whole, as half a URL has a password without its `@`. Errors are redacted when they are made; this is for the rest.
        let mut text = redact::text(&escape(&text));
        while text.len() > MAX_WARNING_BYTES {
            text.pop();
        }
        keep(LogLine {
            at: unix_millis(),
            level: metadata.level().to_string(),
            target: metadata.target().to_owned(),
            text,
        });
    }
}

/// With the time dimmed and the level in its colour.
fn colored(line: &str) -> Option<String> {
    let (time, rest) = line.split_once(' ')?;
    let (level, rest) = rest.trim_start().split_once(' ')?;
    let color = match level {
        "ERROR" => 31,
        "WARN" => 33,
        "INFO" => 32,
        "DEBUG" => 34,
        _ => 35,
    };
    Some(format!(
        "\x1b[2m{time}\x1b[0m \x1b[{color}m{level:>5}\x1b[0m {rest}"
    ))
}

/// Starts the thread. `say_lost` receives how many lines were lost, once there is space for a line about it.
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
        colored: false,
    };
    Ok((lines, log))
}

fn write(
    entries: &Receiver<LogEntry>,
    mut out: impl Write,
    lost: &AtomicU64,
    say_lost: impl Fn(u64),
) {
    for entry in entries {
        if let LogEntry::Line(line, _) = &entry {
            // There is no other place to report a failure to.
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
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let text = escape(text.strip_suffix('\n').unwrap_or(&text));
        let colored = self.colored.then(|| colored(&text)).flatten();
        let mut line = colored.unwrap_or_else(|| text.into_owned()).into_bytes();
        line.push(b'\n');
        match self.waiting.take(line.len() as u64) {
            // Cannot fail: the thread takes entries as long as there is a sender.
            Some(charge) => drop(self.entries.send(LogEntry::Line(line, charge))),
            None => drop(self.lost.fetch_add(1, Ordering::Relaxed)),
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done, written) = bounded(0);
        let _ = self.0.send(LogEntry::Flush(done));
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

    // proves: docs/troubleshoot.md#the-log
    #[test]
    fn logging_waits_for_no_reader_and_counts_lost_lines() {
        let (reads, reader) = bounded::<()>(0);
        let (read, lines_read) = unbounded();
        let (said, say) = unbounded();
        let (lines, _log) = start(Slow { reader, read }, 100, move |lost| {
            let _ = said.send(lost);
        })
        .unwrap();
        let line = |number: u32| format!("{number:029}\n").into_bytes();
        // There is no reader, and yet this ends.
        for number in 0..10 {
            (&lines).write_all(&line(number)).unwrap();
        }
        drop(reads);
        for kept in 0..3 {
            assert_eq!(lines_read.recv().unwrap(), line(kept));
        }
        assert_eq!(say.recv().unwrap(), 7);
        // There is space again.
        let last = format!("{:099}\n", 11);
        (&lines).write_all(last.as_bytes()).unwrap();
        assert_eq!(lines_read.recv().unwrap(), last.as_bytes());
    }

    /// What is written for an event with a name that a client chose.
    fn logged(format: LogFormat, colored: bool, name: &str) -> String {
        let (reads, reader) = bounded::<()>(0);
        let (read, lines_read) = unbounded();
        let (mut lines, log) = start(Slow { reader, read }, WAITING, |_| {}).unwrap();
        lines.colored = colored;
        drop(reads);
        let (subscriber, _) = subscriber(format, Targets::new().with_default(Level::INFO), lines);
        tracing::subscriber::with_default(subscriber, || {
            let _span = tracing::info_span!("request", id = %name).entered();
            tracing::warn!(model = %name, salt = name, "refused: {name}");
        });
        drop(log);
        let written: Vec<_> = lines_read.try_iter().collect();
        String::from_utf8(written.concat()).unwrap()
    }

    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[test]
    fn names_of_clients_end_no_line_and_drive_no_terminal() {
        let name = "m\n2026-11-22T13:03:37.842231Z  INFO audit: done who=\"ops\"\r\u{1b}[2J\u{7}\u{2028}\u{9b}2J\u{7f}";
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = logged(format, false, name);
            let line = text.strip_suffix('\n').unwrap();
            assert!(
                !line.contains(|c: char| c.is_control() || c == '\u{2028}'),
                "{line}"
            );
            match format {
                LogFormat::Json => {
                    let event: serde_json::Value = serde_json::from_str(line).unwrap();
                    assert_eq!(event["fields"]["model"], name);
                    assert_eq!(event["level"], "WARN");
                }
                LogFormat::Text => {
                    let (head, _) = line.split_once(": ").unwrap();
                    assert!(head.contains(" WARN request{id=m\\n2026"), "{head}");
                }
            }
        }
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn latest_warnings_are_kept_and_bounded() {
        let (subscriber, _) = {
            let (lines, _log) = start(std::io::sink(), WAITING, |_| {}).unwrap();
            subscriber(
                LogFormat::Json,
                Targets::new().with_default(Level::INFO),
                lines,
            )
        };
        tracing::subscriber::with_default(subscriber.with(Warnings), || {
            tracing::info!("not kept");
            for number in 0..MAX_WARNINGS {
                tracing::warn!(number, "a warning");
            }
            assert_eq!(latest_warnings().len(), MAX_WARNINGS);
            let name = "m\n\u{1b}[2J";
            tracing::error!(name, "failed: {}", "ü".repeat(MAX_WARNING_BYTES));
            tracing::error!(name, "failed");
            tracing::warn!(url = "redis://me:hunter2@host/0", "lost");
            let long = "x".repeat(MAX_WARNING_BYTES - 20);
            tracing::warn!("{long} redis://me:hunter2@{long}");
        });
        let mut kept = latest_warnings();
        assert_eq!(kept.len(), MAX_WARNINGS);
        // Readers of the dashboard learn no password, not even half of one.
        assert!(kept.iter().all(|line| !line.text.contains("hunter")));
        assert_eq!(kept[1].text, "lost url=\"redis://***@host/0\"");
        kept.drain(..2);
        assert_eq!(kept[0].level, "ERROR");
        assert_eq!(kept[0].target, module_path!());
        assert_eq!(kept[0].text, "failed name=\"m\\n\\u{1b}[2J\"");
        assert!(kept[1].text.starts_with("failed: ü") && kept[1].text.len() <= MAX_WARNING_BYTES);
        assert_eq!(
            kept[2].text,
            format!("a warning number={}", MAX_WARNINGS - 1)
        );
        assert!(kept.iter().all(|line| !line.text.contains("not kept")));
    }

    #[test]
    fn colours_are_the_logs_own() {
        let line = logged(LogFormat::Text, true, "m\u{1b}[31m");
        let codes: Vec<_> = line
            .split('\u{1b}')
            .skip(1)
            .map(|code| &code[..3])
            .collect();
        assert_eq!(codes, ["[2m", "[0m", "[33", "[0m"], "{line}");
        assert!(line.contains("[33m WARN\u{1b}[0m "), "{line}");
    }
}
