//! Flags of LMCache 0.5.6's `lmcache server` that have no effect here yet.
//!
//! They are known, so that a command line written for LMCache starts: one warning names those that were given. What is
//! in neither list is refused.

use clap::{Arg, ArgAction};

/// How many values a flag takes.
#[derive(Clone, Copy)]
enum Values {
    /// None.
    Switch,
    /// None, and there is a `--no-` twin.
    OnOff,
    /// One.
    One,
    /// One, and the flag may be repeated.
    Repeated,
    /// Any number after one flag.
    Many,
}

use Values::{Many, OnOff, One, Repeated, Switch};

const FLAGS: &[(&str, Values)] = &[
    ("grpc-server-workers", One),
    ("isolated-ipc", OnOff),
    ("runtime-plugin-locations", Many),
    ("runtime-plugin-config", One),
    ("script-allowed-imports", Many),
    ("run-script-api-enabled", OnOff),
    ("enable-segmented-prefix", Switch),
    ("enable-dedup-content", Switch),
    ("enable-blend-reorder", Switch),
    ("enable", Many),
    ("server-module", Repeated),
    ("p2p-advertise-url", One),
    ("p2p-listen-url", One),
    ("p2p-lookup-timeout", One),
    ("p2p-load-timeout", One),
    ("p2p-transfer-engine", One),
    ("l1-use-lazy", OnOff),
    ("l1-init-size-gb", One),
    ("l1-devdax-path", One),
    ("gds-l1-path", One),
    ("gds-l1-use-direct-io", OnOff),
    ("gds-l1-backend", One),
    ("periodic-notifier-interval-ms", One),
    ("disable-observability", Switch),
    ("disable-metrics", Switch),
    ("disable-grpc-metrics", Switch),
    ("disable-logging", Switch),
    ("event-bus-queue-size", One),
    ("metrics-sample-rate", One),
    ("lookup-hash-log-dir", One),
    ("lookup-hash-log-rotation-interval", One),
    ("lookup-hash-log-rotation-max-size", One),
    ("lookup-hash-log-max-files", One),
    ("enable-gc-monitor", Switch),
    ("gc-monitor-min-pause-ms", One),
    ("gc-monitor-top-objects", One),
    ("enable-extra-logging", Switch),
    ("extra-logging-interval", One),
    ("trace-level", One),
    ("trace-output", One),
    ("coordinator-url", One),
    ("coordinator-advertise-ip", One),
    ("coordinator-heartbeat-interval", One),
    ("coordinator-event-reporting", Switch),
    ("coordinator-event-flush-interval", One),
    ("coordinator-event-transport", One),
    ("coordinator-kafka-bootstrap-servers", One),
    ("coordinator-kafka-topic", One),
    ("coordinator-kafka-delivery-timeout", One),
    ("coordinator-blend-timeout", One),
    ("coordinator-blend-match-concurrency", One),
    ("format", One),
    ("output", One),
    ("quiet", Switch),
];

/// Flags whose only meaning here is already the normal behaviour: accepted without a warning.
pub(super) const HARMLESS: &[&str] = &[
    // What engines send says which it is.
    "isolated-ipc",
    "no-isolated-ipc",
    "l1-use-lazy",
    "no-l1-use-lazy",
    "l1-init-size-gb",
    "format",
    "quiet",
    "disable-grpc-metrics",
];

/// The hidden clap arguments.
pub(super) fn args() -> Vec<Arg> {
    let mut args = Vec::new();
    for &(name, values) in FLAGS {
        let arg = Arg::new(name).long(name).hide(true);
        let arg = if name == "quiet" { arg.short('q') } else { arg };
        args.push(match values {
            Switch | OnOff => arg.action(ArgAction::SetTrue),
            One => arg.num_args(1).allow_hyphen_values(true),
            Repeated => arg.num_args(1).action(ArgAction::Append),
            Many => arg.num_args(0..).action(ArgAction::Append),
        });
        if matches!(values, OnOff) {
            let no = format!("no-{name}");
            args.push(
                Arg::new(no.clone())
                    .long(no)
                    .hide(true)
                    .action(ArgAction::SetTrue),
            );
        }
    }
    args
}

/// Names of the flags of this list that were given and change nothing.
pub(super) fn ignored(matches: &clap::ArgMatches) -> Vec<String> {
    args()
        .iter()
        .map(|arg| arg.get_id().as_str())
        .filter(|id| !HARMLESS.contains(id))
        .filter(|id| matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine))
        .map(|id| format!("--{id}"))
        .collect()
}
