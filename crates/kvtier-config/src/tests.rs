//! Defaults, refusals and the file.

use super::*;

fn refused(args: &[&str]) -> String {
    ServerConfig::from_flags(args).unwrap_err().to_string()
}

// proves: docs/compare.md#flags-of-lmcache
#[test]
fn no_flag_at_all_is_a_sensible_server() {
    let config = ServerConfig::from_flags(&[]).unwrap();
    assert_eq!(
        (config.port, config.http_port, config.chunk_size),
        (5555, 8080, 256)
    );
    assert_eq!(config.bind_address(), "tcp://127.0.0.1:5555");
    assert_eq!(config.http.host, "127.0.0.1");
    for host in ["::1", "[::1]"] {
        let config = ServerConfig::from_flags(&["--host", host]).unwrap();
        assert_eq!(config.bind_address(), "tcp://[::1]:5555");
    }
    assert_eq!(config.supported_transfer_mode, TransferMode::Auto);
    assert_eq!(config.shm_name.as_deref(), Some("kvtier_5555"));
    assert!(!config.shm_required);
    assert_eq!(config.eviction_policy, EvictionPolicyName::Lru);
    assert_eq!(
        (config.eviction_trigger_watermark, config.eviction_ratio),
        (0.8, 0.2)
    );
    assert_eq!(config.write_ttl.as_secs(), 600);
    assert_eq!(config.read_ttl.as_secs(), 300);
    assert_eq!(config.worker_reap_timeout.unwrap().as_secs(), 120);
    assert_eq!(config.instance_id, "kvtier-5555");
    let on_path = ServerConfig::from_flags(&["--shm-name", "", "--host", "ipc:///run/k"]).unwrap();
    assert_eq!(on_path.instance_id, "/run/k");
    let pool = |host| {
        ServerConfig::from_flags(&["--host", host])
            .unwrap()
            .shm_name
    };
    let (one, other) = (pool("ipc:///run/k"), pool("ipc:///run/l"));
    assert!(one.is_some() && one == pool("ipc:///run/k"));
    assert_ne!(one, other, "two servers on paths have a pool each");
    // However small /dev/shm is here.
    let config = ServerConfig::from_flags(&["--shm-name", ""]).unwrap();
    let quarter = config.memory.bytes / 4;
    assert_eq!(config.l1_bytes, quarter.next_multiple_of(2 << 20));
    assert!(config.l1_origin().starts_with("a quarter of the m"));
    let config = ServerConfig::from_flags(&["--l1-size-gb", "1"]).unwrap();
    assert_eq!(config.l1_origin(), "as asked for");
}

#[test]
fn values_that_cannot_work_are_refused_by_flag_value_and_range() {
    for (args, parts) in [
        (
            vec!["--chunk-size", "0"],
            vec!["--chunk-size", "'0'", "1..=65536"],
        ),
        (
            vec!["--eviction-trigger-watermark", "5"],
            vec!["--eviction-trigger-watermark", "5", "at most 1"],
        ),
        (
            vec!["--eviction-trigger-watermark", "nan"],
            vec!["--eviction-trigger-watermark", "nan"],
        ),
        (
            vec!["--eviction-ratio=-0.1"],
            vec!["--eviction-ratio", "-0.1", "0 to 1"],
        ),
        (
            vec!["--hash-algorithm", "nope"],
            vec!["--hash-algorithm", "nope", "blake3", "sha256_cbor"],
        ),
        (
            vec!["--eviction-policy", "FIFO"],
            vec!["--eviction-policy", "FIFO", "LRU, IsolatedLRU, ARC, noop"],
        ),
        (
            vec!["--quota-mode", "hard"],
            vec!["--quota-mode", "'hard'", "soft, strict"],
        ),
        (
            vec!["--quota-default", "10PB"],
            vec!["--quota-default", "'10PB'", "10GiB", "unlimited"],
        ),
        (
            vec!["--quota-mode", "strict"],
            vec![
                "--quota-mode strict",
                "--eviction-policy IsolatedLRU",
                "--l2-adapter",
            ],
        ),
        (
            vec!["--transport", "grpc"],
            vec!["--transport", "grpc", "zmq"],
        ),
        (
            vec!["--l1-size-gb", "-3"],
            vec!["--l1-size-gb", "-3", "above 0"],
        ),
        (vec!["--l1-size-gb", "inf"], vec!["--l1-size-gb", "inf"]),
        (
            vec!["--l1-align-bytes", "3"],
            vec!["--l1-align-bytes", "3", "power of two"],
        ),
        (
            vec!["--worker-reap-timeout-seconds", "5"],
            vec!["--worker-reap-timeout-seconds", "5", "30"],
        ),
        (
            vec!["--worker-registration-grace-seconds", "60"],
            vec!["--worker-registration-grace-seconds", "60"],
        ),
        (vec!["--shm-name", "a/b"], vec!["--shm-name", "a/b"]),
        (
            vec!["--shm-name", "x", "--l1-use-hugepages"],
            vec!["--shm-name", "--l1-use-hugepages"],
        ),
        (vec!["--log-level", "a=b=c"], vec!["--log-level", "a=b=c"]),
        (
            vec!["--log-level", "kvtier_server[load]=debug"],
            vec!["--log-level", "kvtier_server[load]=debug", "target=level"],
        ),
        (
            vec!["--log-level", "loud"],
            vec!["--log-level", "\"loud\"", "debug, trace or off"],
        ),
        (
            vec!["--log-level", "info,kvtier_server"],
            vec!["--log-level", "kvtier_server", "target=level"],
        ),
        (vec!["--no-such-flag"], vec!["--no-such-flag"]),
        (
            vec!["--l1-size", "20"],
            vec!["'--l1-size'", "'--l1-size-gb'"],
        ),
        (
            vec!["--chunk-size", "-1"],
            vec!["--chunk-size", "'-1'", "1..=65536"],
        ),
        (
            vec!["--chunk-size", "4k"],
            vec!["--chunk-size", "'4k'", "give a whole number"],
        ),
        (
            vec!["--l1-size-gb", "4GB"],
            vec!["--l1-size-gb", "'4GB'", "GiB as a number without a unit"],
        ),
        (
            vec!["--stop-timeout-seconds", "5s"],
            vec!["--stop-timeout-seconds", "'5s'", "seconds as a number"],
        ),
        (
            vec!["--eviction-ratio", "20%"],
            vec!["--eviction-ratio", "'20%'", "a share from 0 to 1"],
        ),
        // Whether there is a tier or not.
        (
            vec!["--l2-min-free-gb", "-1"],
            vec!["--l2-min-free-gb: -1", "from 0 "],
        ),
        (
            vec!["--l2-load-timeout-seconds", "-1"],
            vec!["--l2-load-timeout-seconds", "-1", "from 0.001"],
        ),
        (
            vec!["--l2-store-queue-gb", "0"],
            vec!["--l2-store-queue-gb: 0", "above 0"],
        ),
        (vec!["--l2-adapter", "{"], vec!["--l2-adapter", "not JSON"]),
        (
            vec!["--l2-adapter", r#"{"type":"floppy"}"#],
            vec!["--l2-adapter", "floppy", "fs_native"],
        ),
        (
            vec!["--l2-adapter", r#"{"type":"dax"}"#],
            vec!["--l2-adapter", "dax", "not built into kvtier", "raw_block"],
        ),
        (
            vec!["--l2-adapter", r#"{"type":"fs","base_path":"~/kv"}"#],
            vec!["--l2-adapter", "base_path", "~/kv", "written out"],
        ),
        (
            vec![
                "--l2-adapter",
                r#"{"type":"raw_block","device_path":"$HOME/kv","max_capacity_gb":1}"#,
            ],
            vec!["--l2-adapter", "device_path", "$HOME/kv", "written out"],
        ),
        (
            vec!["--byte-pages", "model"],
            vec!["--byte-pages", "model", "MODEL=DTYPE"],
        ),
        (
            vec!["--byte-pages", "m=fp8 e5m2"],
            vec!["--byte-pages", "fp8 e5m2", "MODEL=DTYPE"],
        ),
        (
            vec!["--byte-pages", "m=fp8", "--byte-pages", "m=fp8_e5m2"],
            vec!["--byte-pages: m=fp8_e5m2", "one kind per model"],
        ),
        (
            vec!["--state-dir", "~/state"],
            vec!["--state-dir: ~/state", "written out"],
        ),
        (
            vec!["--quota-file", "$HOME/quotas"],
            vec!["--quota-file: $HOME/quotas", "written out"],
        ),
        (
            vec!["--hash-salts", "~user/secret"],
            vec!["--hash-salts: ~user/secret", "written out"],
        ),
        (
            vec!["--tenant-prefix", "a@b"],
            vec!["--tenant-prefix", "must not contain '@'"],
        ),
        (
            vec!["--host", "ipc://~/socket"],
            vec!["--host", "~/socket", "written out"],
        ),
        (
            vec!["--cuda-driver", "~/libcuda.so"],
            vec!["--cuda-driver", "~/libcuda.so", "written out"],
        ),
        (
            vec![
                "--l2-adapter",
                r#"{"type":"fs","base_path":"/x","read_ahed_size":1}"#,
            ],
            vec!["--l2-adapter", "read_ahed_size", "read_ahead_size"],
        ),
    ] {
        let line = refused(&args);
        assert!(!line.contains('\n'), "{line}");
        for part in parts {
            assert!(line.contains(part), "{args:?}: {line:?} lacks {part:?}");
        }
    }
}

#[test]
fn log_filters_are_levels_and_levels_of_targets() {
    for filter in [
        "off",
        "WARN",
        "info,kvtier_server=debug",
        "info,kvtier_server::l2=trace",
    ] {
        let config = ServerConfig::from_flags(&["--log-level", filter]).unwrap();
        assert_eq!(config.log_level, filter);
    }
}

// proves: docs/compare.md#flags-of-lmcache
#[test]
fn flags_of_lmcache_without_effect_are_named_and_harmless_ones_are_not() {
    let config = ServerConfig::from_flags(&[
        "--l1-use-lazy",
        "--disable-metrics",
        "--event-bus-queue-size",
        "7",
        "--runtime-plugin-locations",
        "a",
        "b",
        "--isolated-ipc",
        "--no-gds-l1-use-direct-io",
    ])
    .unwrap();
    let mut ignored = config.ignored;
    ignored.sort();
    assert_eq!(
        ignored,
        [
            "--disable-metrics",
            "--event-bus-queue-size",
            "--no-gds-l1-use-direct-io",
            "--runtime-plugin-locations"
        ]
    );
}

#[test]
fn an_l1_that_memory_cannot_hold_is_warned_of() {
    let warnings = |gib| {
        let config = ServerConfig::from_flags(&["--l1-size-gb", gib]).unwrap();
        config.warnings().collect::<String>()
    };
    assert!(warnings("1048576").contains("--l1-size-gb: L1 of 1048576.00 GiB is more than the m"));
    assert_eq!(warnings("0.01"), "");
}

#[test]
fn flags_that_mean_nothing_without_a_gpu_are_known_when_they_are_given() {
    let given = |args: &[&str]| ServerConfig::from_flags(args).unwrap().gpu_flags;
    assert!(given(&["--cuda-driver", "auto", "--l1-numa-nodes", "0"]).is_empty());
    assert_eq!(given(&["--gpu-reply", "done"]), ["--gpu-reply"]);
    let config = with_file(
        "gpu-event-timeout-seconds = 30\n",
        &["--gpu-executor", "auto"],
    );
    assert_eq!(
        config.unwrap().gpu_flags,
        ["--gpu-event-timeout-seconds", "--gpu-executor"]
    );
}

fn with_file(text: &str, args: &[&str]) -> Result<ServerConfig> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    let mut all = vec!["--config", path];
    all.extend(args);
    ServerConfig::from_flags(&all)
}

#[test]
fn the_file_has_the_same_keys_and_the_command_line_wins() {
    let text = "chunk-size = 64\nport = 7000\nl1_size_gb = 0.5\neviction-policy = 'noop'\nseparate-object-groups = true\n\
                l1-prefault = false\n[[l2-adapter]]\ntype = 'fs'\nbase_path = '/x'\n";
    let config = with_file(text, &["--port", "7001"]).unwrap();
    assert_eq!(
        (config.chunk_size, config.port, config.l1_bytes),
        (64, 7001, GIB / 2)
    );
    assert_eq!(config.eviction_policy, EvictionPolicyName::Noop);
    assert!(config.separate_object_groups && !config.l1_prefault);
    let l2 = config.l2.unwrap();
    assert_eq!(l2.adapters.len(), 1);
    assert_eq!(l2.adapters[0].kind, "fs");
    assert_eq!(l2.adapters[0].options.get::<&str>("base_path"), "/x");
    assert_eq!(l2.store_queue_bytes, GIB / 8);
    let config = with_file(
        "separate-object-groups = true",
        &["--no-separate-object-groups"],
    )
    .unwrap();
    assert!(!config.separate_object_groups);
}

#[test]
fn a_directory_that_is_only_read_has_to_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let preflight = |path: &str, read_only: bool| {
        let path = dir.path().join(path);
        let fs = format!(r#"{{"type":"fs","base_path":{path:?},"read_only":{read_only}}}"#);
        for tier in [
            fs.clone(),
            format!(r#"{{"type":"fault_inject","inner":{fs}}}"#),
        ] {
            let config = ServerConfig::from_flags(&["--l2-adapter", &tier]).unwrap();
            config.l2.unwrap().preflight()?;
        }
        Ok::<_, kvtier_common::error::Error>(())
    };
    assert_eq!(preflight("", true), Ok(()));
    assert_eq!(preflight("absent", false), Ok(()));
    let line = preflight("absent", true).unwrap_err().to_string();
    assert!(
        line.contains("absent") && line.contains("read_only"),
        "{line}"
    );
}

#[test]
fn tiers_have_directories_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let inside = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(inside("a")).unwrap();
    std::os::unix::fs::symlink(inside("a"), inside("link")).unwrap();
    let fs = |path: &str| format!(r#"{{"type":"fs","base_path":"{path}"}}"#);
    let nested = |path: &str| format!(r#"{{"type":"fault_inject","inner":{}}}"#, fs(path));
    let tiers = |one: &str, other: &str| {
        ServerConfig::from_flags(&["--l2-adapter", one, "--l2-adapter", other])
    };
    for other in ["a", "a/", "./a", "a/b", "a/b/c", "link", "link/b"] {
        for other in [fs(&inside(other)), nested(&inside(other))] {
            for line in [
                tiers(&fs(&inside("a")), &other),
                tiers(&other, &fs(&inside("a"))),
            ] {
                let line = line.unwrap_err().to_string();
                let names = ["fs-0", "fault_inject-0"];
                assert!(names.iter().any(|name| line.contains(name)), "{line}");
                let names = ["fs-1", "fault_inject-1"];
                assert!(names.iter().any(|name| line.contains(name)), "{line}");
                assert!(line.contains(&inside("a")), "{line}");
            }
        }
    }
    for other in ["b", "ab", "b/a"] {
        tiers(&fs(&inside("a")), &fs(&inside(other))).unwrap();
    }
    // Relative paths are reported as absolute ones.
    let here = std::env::current_dir()
        .unwrap()
        .join("x/y")
        .display()
        .to_string();
    let config = tiers(&fs("x/y"), &fs(&inside("a"))).unwrap();
    assert!(config.l2.unwrap().tiers().next().unwrap().contains(&here));
    assert!(tiers(&fs("x/y"), &fs(&here)).is_err());
}

#[test]
fn a_bad_file_is_refused_by_name_and_key() {
    for (text, parts) in [
        (
            "chunk-sise = 64",
            vec!["chunk-sise", "unknown", "chunk-size"],
        ),
        ("chunk-size = 0", vec!["--chunk-size", "1..=65536"]),
        ("chunk-size = true", vec!["chunk-size", "true"]),
        ("a = 1\nb = [", vec!["line 2"]),
        (
            "separate-object-groups = 3",
            vec!["separate-object-groups", "true or false"],
        ),
        ("config = 'other'", vec!["config", "unknown"]),
        (
            "'--chunk-size' = 64",
            vec![r#"key "--chunk-size" is unknown; perhaps chunk-size"#],
        ),
        (
            "chunk-size = 64\nport = 1\nchunk_size = 64",
            vec!["\"chunk-size\"", "\"chunk_size\"", "the same"],
        ),
    ] {
        let line = with_file(text, &[]).unwrap_err().to_string();
        assert!(!line.contains('\n') && line.contains(".tmp"), "{line}");
        for part in parts {
            assert!(line.contains(part), "{text:?}: {line:?} lacks {part:?}");
        }
    }
    let tier = "[[l2-adapter]]\ntype = 'fs'\nbase_path = '/x'\nbase_pth = '/y'";
    let line = with_file(tier, &[]).unwrap_err().to_string();
    assert!(
        line.contains(r#"--l2-adapter: type "fs": key "base_pth" is unknown"#),
        "{line}"
    );
    assert!(refused(&["--config", "/no/such/file"]).contains("/no/such/file"));
    for (key, near) in [
        ("l1-size", "perhaps l1-size-gb, chunk-size; "),
        (
            "worker-timeout",
            "perhaps worker-reap-timeout-seconds, stop-timeout-seconds; ",
        ),
        ("shm", "perhaps shm-name; "),
        ("server", ""),
        ("config", ""),
    ] {
        let line = with_file(&format!("{key} = 1"), &[])
            .unwrap_err()
            .to_string();
        let told = format!("key {key:?} is unknown; {near}`kvtier server --help`");
        assert!(line.contains(&told), "{line}");
    }
}

// proves: docs/compare.md#flags-of-lmcache
#[test]
fn the_reference_page_is_true() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/flags.md");
    let page = reference_markdown();
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == page,
        "docs/flags.md is out of date; KVTIER_WRITE_DOCS=1 cargo test -p kvtier-config reference_page"
    );
}

#[test]
fn quotas_hold_where_tenants_are_kept_apart_and_are_warned_of_elsewhere() {
    const ISOLATED: &str =
        r#"{"type":"fs","base_path":"/x","eviction":{"eviction_policy":"UserLRU"}}"#;
    let config = |args: &[&str]| ServerConfig::from_flags(args).unwrap();
    let usual = config(&[]);
    let settings = QuotaSettings {
        mode: kvtier_core::quota::QuotaMode::Soft,
        default_limit: crate::Limit(None),
        file: None,
    };
    assert_eq!((&usual.quotas, usual.quota_warning()), (&settings, None));
    for flags in [["--quota-default", "0"], ["--quota-file", "q"]] {
        let warning = config(&flags).quota_warning().unwrap();
        assert!(warning.starts_with(flags[0]), "{warning}");
        assert!(
            warning.contains("no effect") && warning.contains("IsolatedLRU"),
            "{warning}"
        );
    }
    for isolated in [
        ["--eviction-policy", "isolatedlru"],
        ["--l2-adapter", ISOLATED],
    ] {
        let strict = config(&[&isolated[..], &["--quota-mode", "strict"]].concat());
        assert_eq!(strict.quotas.mode_name(), "strict");
        let warning = strict.quota_warning().unwrap();
        assert!(warning.contains("end with this process"), "{warning}");
        let kept = config(&[&isolated[..], &["--quota-file", "q"]].concat());
        assert_eq!(kept.quota_warning(), None);
    }
    let below = config(&["--l2-adapter", ISOLATED]);
    let apart: Vec<_> = below
        .places()
        .into_iter()
        .map(|place| (place.name, place.isolates))
        .collect();
    assert_eq!(apart, [("l1".into(), false), ("fs-0".into(), true)]);
}

#[test]
fn tiers_have_names_that_are_theirs_alone() {
    let directory = tempfile::tempdir().unwrap();
    let tier = |place: &str, name: &str| {
        let path = directory.path().join(place);
        let name = match name {
            "" => String::new(),
            name => format!(r#","name":"{name}""#),
        };
        format!(r#"{{"type":"fs","base_path":"{}"{name}}}"#, path.display())
    };
    let places = |tiers: &[String]| {
        let flags: Vec<_> = tiers
            .iter()
            .flat_map(|tier| ["--l2-adapter", tier])
            .collect();
        let names = ServerConfig::from_flags(&flags)?.places();
        Ok::<_, kvtier_common::error::Error>(
            names
                .iter()
                .map(|place| place.name.to_string())
                .collect::<Vec<_>>(),
        )
    };
    let tiers = [tier("a", "disk"), tier("b", "")];
    assert_eq!(
        places(&tiers),
        Ok(["l1", "disk", "fs-1"].map(str::to_owned).into())
    );
    for (name, other) in [("disk", "disk"), ("fs-1", "")] {
        let told = places(&[tier("a", name), tier("b", other)]).unwrap_err();
        let told = told.to_string();
        let both = format!("adapters 0 and 1, counted from 0, are both called {name:?}");
        assert!(told.contains(&both), "{told}");
    }
    for bad in ["l1", "all", "a b", "a/b", "é", &"x".repeat(65)] {
        let told = places(&[tier("a", bad)]).unwrap_err().to_string();
        assert!(
            told.contains("\"name\"") && told.contains("1 to 64 of a-z"),
            "{told}"
        );
    }
}

#[test]
fn tier_of_peers_has_the_password_of_the_port_unless_its_own() {
    let password = |tier: &str| {
        let flags = [
            "--peer-port",
            "0",
            "--peer-password",
            "MARK",
            "--l2-adapter",
            tier,
        ];
        let config = ServerConfig::from_flags(&flags).unwrap();
        let adapters = config.l2.unwrap().adapters;
        adapters[0].options.get::<&str>("password").to_owned()
    };
    assert_eq!(password(r#"{"type": "peers", "peers": ["a:1"]}"#), "MARK");
    let own = r#"{"type": "peers", "peers": ["a:1"], "password": "own"}"#;
    assert_eq!(password(own), "own");
    assert_eq!(password(r#"{"type": "resp", "host": "a", "port": 1}"#), "");
}

#[test]
fn free_space_above_the_capacity_is_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b");
    let warnings_of = |capacity: &str, gib: &str| {
        let adapter =
            format!(r#"{{"type":"fs","base_path":{path:?},"max_capacity_gb":{capacity}}}"#);
        let flags = ["--l2-adapter", &adapter, "--l2-min-free-gb", gib];
        let config = ServerConfig::from_flags(&flags).unwrap();
        config.warnings().collect::<String>()
    };
    let warnings = |gib| warnings_of("0", gib);
    assert!(
        warnings("1048576")
            .contains("--l2-min-free-gb: 1048576.00 GiB are to stay free where tier fs-0 is")
    );
    assert!(!warnings("0").contains("--l2-min-free-gb"));
    let above = warnings_of("1048576", "0");
    assert!(
        above.contains("--l2-adapter: tier fs-0 has a max_capacity_gb of 1048576.00"),
        "{above}"
    );
    for capacity in ["0", "0.001"] {
        assert!(!warnings_of(capacity, "0").contains("max_capacity_gb"));
    }
}
