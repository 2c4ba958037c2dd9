//! `kvtier server`: what it refuses, and what `--check-config` says.

use std::path::Path;

use super::{Server, complaint, free_port, kvtier, kvtier_with, lines};

/// A start that disturbs no other server.
const START: [&str; 9] = [
    "server",
    "--l1-size-gb",
    "0.05",
    "--shm-name",
    "",
    "--port",
    "0",
    "--http-port",
    "0",
];

#[test]
fn bad_server_flags_are_refused_in_one_line() {
    for (args, named) in [
        (["--chunk-size", "0"], "--chunk-size"),
        (
            ["--eviction-trigger-watermark", "5"],
            "--eviction-trigger-watermark",
        ),
        (["--hash-algorithm", "builtin"], "--hash-algorithm"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--no-such-flag", "1"], "--no-such-flag"),
    ] {
        let output = kvtier(&[&["server"], &args[..]].concat());
        let line = complaint(&output, 2);
        assert!(line.contains(named), "{line}");
    }
}

#[test]
fn second_server_on_one_port_logs_only_that() {
    let first = Server::start_with(&[]);
    let (port, http) = (first.port(), first.http.rsplit_once(':').unwrap().1);
    let (other, another) = (free_port().to_string(), free_port().to_string());
    let pool = format!("kvtier_{port}");
    assert!(std::fs::exists(format!("/dev/shm/lmcache_l1_pool_{pool}")).unwrap());
    for (ports, named) in [
        ([port, http], "--port"),
        ([port, &other], "--port"),
        ([&another, http], "--http-port"),
    ] {
        let args = ["server", "--l1-size-gb", "0.05", "--port", ports[0]];
        let line = complaint(
            &kvtier(&[&args[..], &["--http-port", ports[1]]].concat()),
            1,
        );
        assert!(
            line.contains(named) && line.contains("cannot be bound"),
            "{line}"
        );
    }
}

#[test]
fn unknown_host_is_reported() {
    let flags = [
        "server",
        "--port",
        "0",
        "--http-port",
        "0",
        "--shm-name",
        "",
    ];
    let host = ["--l1-size-gb", "0.05", "--host", "nosuchhost.invalid"];
    let line = complaint(&kvtier(&[&flags[..], &host].concat()), 2);
    assert!(
        line.contains("--host: \"nosuchhost.invalid\" is not found"),
        "{line}"
    );
}

#[test]
fn check_config_checks_and_stops() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    std::fs::write(path, "chunk-size = 64\nl1-size-gb = 0.5\n").unwrap();
    let ports = ["--port", "0", "--http-port", "0"];
    let output = kvtier(&[&["server", "--config", path, "--check-config"], &ports[..]].concat());
    let text = lines(&output.stdout).join("\n");
    assert!(
        output.status.success() && text.contains("64 tokens") && text.contains("0.50 GiB"),
        "{text}"
    );
    std::fs::write(path, "chunk-size = 0\n").unwrap();
    let line = complaint(&kvtier(&["server", "--config", path, "--check-config"]), 2);
    assert!(line.contains(path) && line.contains("chunk-size"), "{line}");
}

#[test]
fn empty_variables_are_not_set() {
    let directory = tempfile::tempdir().unwrap();
    let check = [&START[..], &["--check-config"]].concat();
    let empty = [("KVTIER_STATE_DIR", ""), ("KVTIER_LOG_LEVEL", "")];
    let default = ("XDG_STATE_HOME", directory.path().to_str().unwrap());
    for (variables, flags) in [
        (&[empty[0], empty[1], default][..], &[][..]),
        (&empty[..], &["--state-dir", default.1][..]),
    ] {
        let output = kvtier_with(variables, &[&check[..], flags].concat());
        let told = lines(&output.stderr);
        assert!(output.status.success(), "{flags:?}: {told:?}");
    }
    let variables = [("KVTIER_STATE_DIR", "$HOME/state")];
    let line = complaint(&kvtier_with(&variables, &check), 2);
    assert!(
        line.contains("KVTIER_STATE_DIR: --state-dir: $HOME/state is not allowed"),
        "{line}"
    );
}

#[test]
fn check_config_warns_of_missing_hardware() {
    let ports = ["--port", "0", "--http-port", "0"];
    let check =
        |flags: &[&str]| kvtier(&[&["server", "--check-config"], &ports[..], flags].concat());
    let small = check(&["--l1-size-gb", "0.01"]);
    assert!(small.status.success());
    assert!(!lines(&small.stdout).join("\n").contains("warning"));
    // With a pool that was asked for by name the server would not start.
    let large = ["--l1-size-gb", "1048576", "--shm-name", "asked"];
    let line = complaint(&check(&large), 1);
    assert!(line.contains("--shm-name asked: /dev/shm has "), "{line}");
    let output = check(&["--cuda-driver", "off", "--gpu-executor", "kernel"]);
    let text = lines(&output.stdout).join("\n");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("\nno GPUs: this server runs with --cuda-driver off\n"));
    let expected =
        "\nwarning: --gpu-executor: without effect, no GPU is used: this server runs with";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn check_and_start_refuse_impossible_memory_and_gpus() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "no library").unwrap();
    let pool = format!("kvtier_cli_check_{}", std::process::id());
    for (flags, expected) in [
        (
            &["--cuda-driver", "/nowhere/libcuda.so.1"][..],
            "--cuda-driver: the CUDA driver library /nowhere/libcuda.so.1 cannot be loaded",
        ),
        (
            &["--cuda-driver", file.path().to_str().unwrap()],
            "--cuda-driver: the CUDA driver library ",
        ),
        (&["--l1-numa-nodes", "1023"], "--l1-numa-nodes: "),
        (
            &["--l1-numa-nodes", "0,4096", "--shm-name", &pool],
            "--l1-numa-nodes: NUMA node 4096",
        ),
        (
            &["--l1-size-gb", "1048576"],
            "L1 of 1048576.00 GiB (--l1-size-gb) is more than the m",
        ),
    ] {
        let start = [&START[..], &["--log-level", "off"], flags].concat();
        let check = [&start[..], &["--check-config"]].concat();
        let line = complaint(&kvtier(&check), 1);
        assert!(
            line.starts_with(&format!("kvtier server: {expected}")),
            "{line}"
        );
        assert_eq!(line, complaint(&kvtier(&start), 1));
    }
}

#[test]
fn check_and_start_refuse_what_another_server_has() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("state");
    let pool = format!("kvtier_cli_taken_{}", std::process::id());
    let own = ["--state-dir", base.to_str().unwrap(), "--instance-id"];
    let taken = [&own[..], &["taken", "--shm-name", &pool]].concat();
    let check = |flags: &[&str]| kvtier(&[&START[..], flags, &["--check-config"]].concat());
    let text = |flags: &[&str]| lines(&check(flags).stdout).join("\n");
    let folder = base.join("taken");
    let first = text(&taken);
    let new = format!("\nstate directory: {}, new\n", folder.display());
    assert!(first.contains(&new), "{first}");
    assert!(!base.exists());

    let server = Server::start_with(&taken);
    let other = [&own[..], &["other", "--shm-name", &pool]].concat();
    for (flags, named) in [
        (&[&own[..], &["taken"]].concat(), "--state-dir: "),
        (&other, "--shm-name "),
        (
            &[&other[..], &["--l1-restore", "off"]].concat(),
            "--shm-name ",
        ),
    ] {
        let line = complaint(&check(flags), 1);
        assert!(
            line.starts_with(&format!("kvtier server: {named}")),
            "{line}"
        );
        let start = [&START[..], &["--log-level", "off"], flags].concat();
        assert_eq!(line, complaint(&kvtier(&start), 1));
    }
    drop(server);
    let again = text(&taken);
    let known = format!("\nstate directory: {}, used again\n", folder.display());
    assert!(again.contains(&known), "{again}");

    std::fs::set_permissions(&base, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let unused = text(&[&own[..], &["taken"]].concat());
    for line in ["\nL1 ends with the process", "\nwarning"] {
        let line = format!("{line}: --state-dir cannot be used: ");
        assert!(unused.contains(&line), "{unused}");
    }
    for end in ["", ".ledger"] {
        let _ = std::fs::remove_file(format!("/dev/shm/lmcache_l1_pool_{pool}{end}"));
    }
}

#[test]
fn ineffective_gpu_flags_are_named_at_start() {
    // Ends once it has looked for GPUs.
    let start = [
        &START[..],
        &["--cuda-driver", "off", "--l1-numa-nodes", "4096"],
    ]
    .concat();
    let log = |flags: &[&str]| {
        let output = kvtier(&[&start[..], flags].concat());
        assert!(!output.status.success());
        lines(&output.stderr)
    };
    let given = log(&["--gpu-reply", "done", "--gpu-executor", "plain"]);
    let lines: Vec<_> = given
        .iter()
        .filter(|line| line.contains("without effect"))
        .collect();
    assert!(
        lines.len() == 1
            && lines[0].contains("WARN")
            && lines[0].contains(
                "--gpu-executor, --gpu-reply: without effect, no GPU is used: this server runs with"
            ),
        "{given:?}"
    );
    let none = log(&[]);
    assert!(
        !none.iter().any(|line| line.contains("without effect")),
        "{none:?}"
    );
}

#[test]
fn check_config_checks_tiers_and_creates_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (tier, file) = (directory.path().join("a/b"), directory.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let check = |adapter: &str| {
        let flags = [
            "server",
            "--check-config",
            "--l1-size-gb",
            "0.05",
            "--port",
            "0",
            "--http-port",
            "0",
        ];
        kvtier(&[&flags[..], &["--l2-adapter", adapter]].concat())
    };
    let output = check(&format!(
        r#"{{"type":"fs","base_path":{tier:?},"max_capacity_gb":2,"affinity_tag":"x"}}"#
    ));
    let text = lines(&output.stdout).join("\n");
    assert!(output.status.success(), "{text}");
    for part in [
        format!("\nL2 tier fs-0: fs in {}, at most 2.00 GiB", tier.display()),
        "\nwarning: --l2-adapter: type \"fs\": affinity_tag".to_owned(),
    ] {
        assert!(text.contains(&part), "{part:?} is not in {text}");
    }
    assert!(!directory.path().join("a").exists());
    for path in [&file, &file.join("below")] {
        let output = check(&format!(r#"{{"type":"fs_native","base_path":{path:?}}}"#));
        let line = complaint(&output, 2);
        let expected = format!("{} is no directory", file.display());
        assert!(
            line.contains("base_path") && line.contains(&expected),
            "{line}"
        );
    }
}

#[test]
fn check_config_tries_out_the_tiers() {
    let directory = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let check = |adapter: &str| {
        let flags = ["server", "--check-config", "--l1-size-gb", "0.05"];
        let ports = ["--port", "0", "--http-port", "0", "--l2-adapter", adapter];
        kvtier(&[&flags[..], &ports].concat())
    };
    let base = directory.path();
    let output = check(&format!(r#"{{"type":"fs","base_path":{base:?}}}"#));
    let text = lines(&output.stdout).join("\n");
    let expected = "\nL2 tier fs-0: stored, found, loaded and deleted an object in ";
    assert!(output.status.success() && text.contains(expected), "{text}");
    let files = std::fs::read_dir(base).unwrap().flatten();
    assert!(files.into_iter().all(|entry| entry.path().is_dir()));
    // What a check would leave behind is not tried.
    let (absent, full) = (base.join("absent"), base.join("full"));
    std::fs::write(&full, vec![7; 60 << 20]).unwrap();
    let device = |path: &Path, force| {
        format!(
            r#"{{"type":"raw_block","device_path":{path:?},"max_capacity_gb":0.05,"force":{force}}}"#
        )
    };
    for (adapter, reason) in [
        (
            device(&full, true),
            "\"force\" overwrites what the device holds",
        ),
        (
            device(&absent, false),
            "it does not exist; a start creates it",
        ),
        (
            format!(r#"{{"type":"fs","base_path":{absent:?}}}"#),
            "it does not exist; a start creates it",
        ),
    ] {
        let output = check(&adapter);
        let text = lines(&output.stdout).join("\n");
        let is_named = text.contains("-0: not tried: ") && text.contains(reason);
        assert!(output.status.success() && is_named, "{text}");
        assert!(!absent.exists());
    }
    assert!(std::fs::read(&full).unwrap().iter().all(|byte| *byte == 7));
    // Nothing listens there.
    let output = check(&format!(
        r#"{{"type":"resp","host":"127.0.0.1","port":{port},"name":"cache"}}"#
    ));
    let line = complaint(&output, 1);
    for part in [
        "L2 tier cache: store: ",
        &format!("127.0.0.1:{port}"),
        "refused",
    ] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn unusable_quota_file_is_refused_before_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("quotas");
    let check = || {
        let file = file.to_str().unwrap();
        let flags = [
            "--l1-size-gb",
            "0.05",
            "--shm-name",
            "",
            "--quota-file",
            file,
            "--port",
            "0",
            "--http-port",
            "0",
        ];
        kvtier(&[&["server", "--check-config"][..], &flags].concat())
    };
    let good = check();
    assert!(good.status.success());
    let said = lines(&good.stdout);
    let warning = |line: &String| line.starts_with("warning: --quota-file: quotas have no effect");
    assert!(said.iter().any(warning), "{said:?}");
    assert!(!file.exists(), "a check makes nothing");
    std::fs::write(&file, "{}").unwrap();
    let message = complaint(&check(), 2);
    assert!(
        message.contains("--quota-file") && message.contains("remove it"),
        "{message}"
    );
}

#[test]
fn check_config_binds_the_ports() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().port().to_string();
    // Later ones win.
    let check = |flags: &[&str]| kvtier(&[&START[..], flags, &["--check-config"]].concat());
    for flag in ["--port", "--http-port", "--prometheus-port", "--peer-port"] {
        let line = complaint(&check(&[flag, &taken]), 1);
        assert!(
            line.contains(flag) && line.contains(&taken) && line.contains("cannot be bound"),
            "{line}"
        );
    }
    drop(listener);
    let free = check(&["--port", &taken]);
    let said = lines(&free.stdout);
    assert!(
        free.status.success() && said[0].starts_with("configuration OK: "),
        "{said:?}"
    );
    assert_eq!(said[1], format!("ports bound and released: {taken}"));
    let peers = r#"{"type":"peers","peers":["127.0.0.1:1"]}"#;
    let both = check(&[
        "--port",
        &taken,
        "--peer-port",
        &free_port().to_string(),
        "--l2-adapter",
        peers,
    ]);
    let said = lines(&both.stdout);
    assert!(both.status.success(), "{said:?}");
    let bound = said[1].strip_prefix("ports bound and released: ").unwrap();
    assert_eq!(bound.split(", ").count(), 2, "{bound}");
    let told = "L2 tier peers-0: no peer is connected yet: 127.0.0.1:1: ";
    assert!(said.iter().any(|line| line.starts_with(told)), "{said:?}");
}
