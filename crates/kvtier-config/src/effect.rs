//! Flags of ours that were given and have no effect beside the others.

use clap::ArgMatches;
use clap::parser::ValueSource;

use super::command::command;

/// The flags, each with what it needs.
pub(super) fn without_effect(given: &ArgMatches) -> Vec<String> {
    let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
    let text = |id: &str| {
        let raw = given.get_raw(id).and_then(|mut values| values.next());
        raw.map_or_else(String::new, |text| text.to_string_lossy().into_owned())
    };
    let mut flags = Vec::new();
    let command = command();
    let mut need = |ids: &[&str], needed: &str| {
        let args = command.get_arguments();
        let given = args.filter(|arg| {
            let id = arg.get_id().as_str();
            ids.contains(&id) && is_given(id)
        });
        let names = given.filter_map(|arg| arg.get_long());
        flags.extend(names.map(|name| format!("--{name} (needs {needed})")));
    };
    if !is_given("l2_adapter") {
        let l2 = command
            .get_arguments()
            .filter(|arg| arg.get_help_heading() == Some("L2"));
        let l2: Vec<_> = l2.map(|arg| arg.get_id().as_str()).collect();
        need(&l2, "--l2-adapter");
    }
    if !is_given("peer_port") {
        let peers = [
            "peer_host",
            "peer_bandwidth",
            "peer_tls_cert",
            "peer_tls_key",
            "peer_tls_ca",
        ];
        need(&peers, "--peer-port");
    }
    if !text("engine_type").eq_ignore_ascii_case("blend") {
        need(&["blend_max_segments"], "--engine-type blend");
    }
    if !text("host").starts_with("ipc://") {
        need(&["ipc_mode"], "--host ipc://PATH");
    }
    if text("eviction_policy").eq_ignore_ascii_case("noop") {
        let background = [
            "eviction_trigger_watermark",
            "eviction_ratio",
            "max_pinned_share",
        ];
        need(&background, "an --eviction-policy that evicts");
    }
    if !is_given("enable_tracing") {
        need(
            &["otlp_endpoint"],
            "--enable-tracing; metrics are in /metrics and are sent nowhere",
        );
    }
    if is_given("max_gpu_workers") && is_given("max_cpu_workers") {
        need(
            &["max_workers"],
            "--max-gpu-workers or --max-cpu-workers to be left out",
        );
    }
    // Its variable has no other use either.
    if !is_given("peer_port") && given.contains_id("peer_password") {
        let mut tiers = given.get_raw("l2_adapter").into_iter().flatten();
        if !tiers.any(|tier| tier.to_string_lossy().contains("\"peers\"")) {
            let needed = "--peer-port, or an --l2-adapter of the type peers";
            flags.push(format!("--peer-password (needs {needed})"));
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use crate::ServerConfig;

    #[test]
    fn flags_without_effect_are_named_with_what_they_need() {
        let ignored = |flags: &[&str]| ServerConfig::from_flags(flags).unwrap().ignored;
        assert!(
            ignored(&[
                "--l1-size-gb",
                "1",
                "--host",
                "ipc:///run/k",
                "--ipc-mode",
                "0660"
            ])
            .is_empty()
        );
        let tier = [
            "--l2-adapter",
            r#"{"type": "fs", "base_path": "/tier"}"#,
            "--l2-store-policy",
            "skip_l1",
        ];
        assert!(ignored(&tier).is_empty());
        assert_eq!(
            ignored(&[
                "--l1-size-gb",
                "1",
                "--l2-store-policy",
                "skip_l1",
                "--l2-store-queue-gb",
                "0.1",
                "--l2-load-timeout-seconds",
                "5",
                "--l2-min-free-gb",
                "1"
            ]),
            [
                "--l2-store-policy (needs --l2-adapter)",
                "--l2-load-timeout-seconds (needs --l2-adapter)",
                "--l2-store-queue-gb (needs --l2-adapter)",
                "--l2-min-free-gb (needs --l2-adapter)",
            ]
        );
        assert_eq!(
            ignored(&["--blend-max-segments", "1000"]),
            ["--blend-max-segments (needs --engine-type blend)"]
        );
        assert_eq!(
            ignored(&["--ipc-mode", "0660"]),
            ["--ipc-mode (needs --host ipc://PATH)"]
        );
        assert_eq!(
            ignored(&["--eviction-policy", "NOOP", "--eviction-ratio", "0.5"]),
            ["--eviction-ratio (needs an --eviction-policy that evicts)"]
        );
        assert_eq!(
            ignored(&["--peer-bandwidth", "2000000"]),
            ["--peer-bandwidth (needs --peer-port)"]
        );
        let password = ["--peer-password", "secret"];
        assert_eq!(
            ignored(&password),
            ["--peer-password (needs --peer-port, or an --l2-adapter of the type peers)"]
        );
        let peers = r#"{"type": "peers", "peers": ["a:1"]}"#;
        for used in [&["--peer-port", "0"][..], &["--l2-adapter", peers]] {
            assert!(ignored(&[&password[..], used].concat()).is_empty());
        }
        assert_eq!(
            ignored(&["--otlp-endpoint", "http://collector:4317"]),
            [
                "--otlp-endpoint (needs --enable-tracing; metrics are in /metrics and are sent nowhere)"
            ]
        );
    }

    #[test]
    fn strict_flags_refuse_what_has_no_effect() {
        for flags in [
            &["--ipc-mode", "0660"][..],
            &["--coordinator-url", "http://x"],
            &["--disable-metrics"],
        ] {
            assert_eq!(ServerConfig::from_flags(flags).unwrap().ignored.len(), 1);
            let strict = [flags, &["--strict-flags"]].concat();
            let error = ServerConfig::from_flags(&strict).unwrap_err().to_string();
            assert!(
                error.starts_with("--strict-flags: without effect: ") && error.contains(flags[0]),
                "{error}"
            );
        }
        assert!(ServerConfig::from_flags(&["--strict-flags", "--isolated-ipc"]).is_ok());
    }

    #[test]
    fn a_store_queue_above_half_of_l1_is_refused() {
        let queue = |gib: &str| {
            ServerConfig::from_flags(&["--l1-size-gb", "1", "--l2-store-queue-gb", gib])
        };
        assert!(queue("0.5").is_ok());
        let error = queue("0.6").unwrap_err().to_string();
        assert!(
            error
                .contains("--l2-store-queue-gb: 0.6 is not allowed; give at most half of L1, 0.50"),
            "{error}"
        );
    }
}
