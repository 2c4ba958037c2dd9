//! The commands as their user runs them.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command as Assert;
use serde_json::Value;

const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

fn kvtier(args: &[&str]) -> Output {
    Assert::new(KVTIER)
        .args(args)
        .timeout(Duration::from_secs(300))
        .output()
        .unwrap()
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes)
        .lines()
        .map(str::to_owned)
        .collect()
}

/// The one line a command that failed has to say.
fn complaint(output: &Output, code: i32) -> String {
    let said = lines(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said:?}");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(output.stdout.is_empty());
    said[0].clone()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A server on ports of its own, stopped on drop.
struct Server {
    child: Child,
    requests: String,
    http: String,
}

impl Server {
    fn start() -> Self {
        Self::start_with(&["--shm-name", &format!("kvtier_cli_{}", std::process::id())])
    }

    fn start_with(flags: &[&str]) -> Self {
        let (port, http) = (free_port(), free_port());
        let child = Command::new(KVTIER)
            .args(["server", "--l1-size-gb", "0.05"])
            .args([
                "--port",
                &port.to_string(),
                "--http-port",
                &http.to_string(),
            ])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            requests: format!("tcp://127.0.0.1:{port}"),
            http: format!("http://127.0.0.1:{http}"),
        };
        let began = Instant::now();
        while !kvtier(&["ping", "--count", "1", "--url", &server.http])
            .status
            .success()
        {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "the server does not answer"
            );
            std::thread::yield_now();
        }
        server
    }

    fn port(&self) -> &str {
        self.requests.rsplit_once(':').unwrap().1
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM, so that the pool goes away.
        let _ = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        let _ = self.child.wait();
    }
}

#[test]
fn the_demo_is_right_and_its_figures_add_up() {
    let output = kvtier(&[
        "demo",
        "--turns",
        "2",
        "--seconds",
        "0",
        "--l1-size-gb",
        "0.0625",
        "--seed",
        "7",
        "--json",
    ]);
    assert!(output.status.success(), "{:?}", lines(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &Value| {
        value
            .as_u64()
            .unwrap_or_else(|| panic!("{value} is no number"))
    };
    assert_eq!(
        (&report["ok"], &report["interrupted"]),
        (&true.into(), &false.into())
    );
    assert_eq!(
        (number(&report["seed"]), number(&report["faults"]["count"])),
        (7, 0)
    );
    let phases = report["phases"].as_array().unwrap();
    assert_eq!(phases.len(), 2);
    for key in [
        "requests",
        "asked_tokens",
        "hit_tokens",
        "stored_bytes",
        "retrieved_bytes",
        "verified_chunks",
        "foreign_lookups",
        "foreign_loads",
    ] {
        let sum: u64 = phases.iter().map(|phase| number(&phase[key])).sum();
        assert_eq!(number(&report["total"][key]), sum, "{key}");
        assert!(
            phases.iter().all(|phase| number(&phase[key]) > 0),
            "{key} is 0"
        );
    }
    let (roomy, tight) = (&phases[0], &phases[1]);
    // Four tenants with three engines each, two turns.
    assert_eq!(number(&roomy["requests"]), 4 * 3 * 2);
    assert_eq!(number(&roomy["evicted_objects"]), 0);
    assert!(number(&tight["evicted_objects"]) > 0);
    for phase in phases {
        assert!(number(&phase["hit_tokens"]) <= number(&phase["asked_tokens"]));
        // What hit was loaded, but for the first request of those who have not shown that they pickle.
        let (chunk_bytes, verified) = (
            number(&report["chunk_bytes"]),
            number(&phase["verified_chunks"]),
        );
        assert_eq!(number(&phase["retrieved_bytes"]), verified * chunk_bytes);
        assert!(verified * number(&report["chunk_tokens"]) <= number(&phase["hit_tokens"]));
    }
    let lookups: u64 = report["latency_us"]
        .as_array()
        .unwrap()
        .iter()
        .map(|engine| number(&engine["lookup"]["count"]))
        .sum();
    assert_eq!(lookups, number(&report["total"]["requests"]));
}

#[test]
fn a_demo_with_a_directory_gets_its_prompts_back_from_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let flags = ["demo", "--turns", "2", "--seconds", "0", "--json"];
    let demo = |path| kvtier(&[&flags[..], &["--l1-size-gb", "0.0625", "--l2", path]].concat());
    // The second one finds what the first has written.
    let chunks = [(); 2].map(|()| {
        let output = demo(path);
        assert!(output.status.success(), "{:?}", lines(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let chunks = report["l2"]["verified_chunks"].as_u64().unwrap();
        let bytes = report["l2"]["retrieved_bytes"].as_u64().unwrap();
        assert_eq!(bytes, chunks * report["chunk_bytes"].as_u64().unwrap());
        chunks
    });
    // Four tenants, each at least the two whole chunks of the system prompt.
    assert!(chunks[0] >= 8 && chunks[0] == chunks[1], "{chunks:?}");
    let files = std::fs::read_dir(path).unwrap();
    let files = files.filter(|file| {
        !file
            .as_ref()
            .unwrap()
            .file_name()
            .as_encoded_bytes()
            .starts_with(b".")
    });
    assert_eq!(files.count() as u64, chunks[0]);
    let line = complaint(&demo("/dev/null"), 1);
    assert!(line.contains("base_path /dev/null"), "{line}");
}

#[test]
fn a_demo_removes_the_pool_of_one_that_was_killed() {
    let mut killed = Command::new(KVTIER)
        .args(["demo", "--l1-size-gb", "0.0625", "--turns", "1"])
        .args(["--seconds", "3600"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pool = format!("/dev/shm/lmcache_l1_pool_kvtier_demo_{}", killed.id());
    while !std::fs::exists(&pool).unwrap() {
        assert_eq!(killed.try_wait().unwrap(), None, "the demo ended");
        std::thread::yield_now();
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(std::fs::exists(&pool).unwrap());
    // One that ends at once is enough.
    kvtier(&["demo", "--turns", "60", "--l1-size-gb", "0.0625"]);
    assert!(!std::fs::exists(&pool).unwrap());
}

#[test]
fn a_demo_that_cannot_be_played_says_why() {
    let output = kvtier(&["demo", "--turns", "60", "--l1-size-gb", "0.0625"]);
    let line = complaint(&output, 1);
    assert!(
        line.contains("--turns 60") && line.contains("--l1-size-gb"),
        "{line}"
    );
}

#[test]
fn status_and_ping_of_a_server_that_is_there() {
    let server = Server::start();
    let status = kvtier(&["status", "--url", &server.http]);
    assert!(status.status.success() && status.stderr.is_empty());
    let text = lines(&status.stdout).join("\n");
    for part in [
        "healthy",
        "L1",
        "0 objects",
        "LRU",
        "256 tokens, blake3",
        "sessions  0",
        "workers   0",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let json = kvtier(&["status", "--json", "--url", &server.http]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["is_healthy"], true);
    for url in [&server.requests, &server.http] {
        for count in ["1", "3"] {
            let ping = kvtier(&["ping", "--url", url, "--count", count]);
            assert!(ping.status.success(), "{:?}", lines(&ping.stderr));
            let text = lines(&ping.stdout);
            assert!(
                text.len() == 1 && text[0].contains(url.as_str()) && text[0].contains(" us"),
                "{text:?}"
            );
        }
    }
    // By position too, and without a scheme each command means its own port.
    let (requests, http) = (
        &server.requests["tcp://".len()..],
        &server.http["http://".len()..],
    );
    for args in [
        &["status", http][..],
        &["status", &server.http],
        &["status", "--url", http],
        &["quota", "list", http],
        &["quota", "list", "--url", &server.http],
        &["quota", "set", "a", "1GiB", http],
        &["quota", "get", "a", http],
        &["quota", "delete", "--url", http, "a"],
        &["ping", requests],
        &["ping", &server.http],
        &["ping", "--url", requests],
        &["bench", requests, "--scenario=ping", "--requests=1"],
        &[
            "bench",
            "--url",
            requests,
            "--scenario=ping",
            "--requests=1",
        ],
    ] {
        let output = kvtier(args);
        assert!(
            output.status.success(),
            "{args:?}: {:?}",
            lines(&output.stderr)
        );
    }
    // Each is asked at the other's door.
    let http_of_requests = server.requests.replace("tcp://", "http://");
    let requests_of_http = server.http.replace("http://", "tcp://");
    for (command, url, hint) in [
        ("status", &http_of_requests, "is that the request port?"),
        ("ping", &http_of_requests, "is that the request port?"),
        ("ping", &requests_of_http, "is that the HTTP port?"),
    ] {
        let line = complaint(&kvtier(&[command, "--timeout", "1", "--url", url]), 1);
        assert!(line.contains(url) && line.contains(hint), "{line}");
    }
}

#[test]
fn status_shows_the_tiers_and_that_there_are_no_gpus() {
    let directory = tempfile::tempdir().unwrap();
    let adapter = format!(r#"{{"type":"fs","base_path":{:?}}}"#, directory.path());
    let no_gpus = ["--cuda-driver", "off"];
    let server =
        Server::start_with(&[&no_gpus[..], &["--shm-name", "", "--l2-adapter", &adapter]].concat());
    let status = kvtier(&["status", "--url", &server.http]);
    let text = lines(&status.stdout).join("\n");
    for part in [
        "\nL2        1 tier, 0 objects to be stored (0 B), 0 being loaded\n",
        "\n  fs-0: fs, healthy, 0 B in use, 0 objects",
        "\nGPUs      none, this server runs with --cuda-driver off\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn status_and_ping_of_a_closed_port() {
    let port = free_port();
    let (http, tcp) = (
        format!("http://127.0.0.1:{port}"),
        format!("tcp://127.0.0.1:{port}"),
    );
    for args in [
        ["status", "--url", &http],
        ["ping", "--url", &http],
        ["ping", "--url", &tcp],
    ] {
        let line = complaint(&kvtier(&args), 1);
        assert!(
            line.contains(args[0]) && line.contains(&port.to_string()),
            "{line}"
        );
    }
}

#[test]
fn a_server_that_does_not_answer_in_time_is_told_so() {
    // Connections are made, and nobody reads from them.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = format!("http://{}", listener.local_addr().unwrap());
    for args in [&["status"][..], &["ping"], &["quota", "list"]] {
        let line = complaint(&kvtier(&[args, &[&http, "--timeout", "50ms"]].concat()), 1);
        let told = format!("no answer from {http}/");
        assert!(line.contains(&told) && line.contains("--timeout"), "{line}");
    }
}

#[test]
fn addresses_that_are_none_are_usage_errors() {
    for (args, allowed) in [
        (&["status", "tcp://a:1"][..], "http://host:port"),
        (&["status", "--url", "tcp://a:1"], "http://host:port"),
        (&["quota", "list", "tcp://a:1"], "http://host:port"),
        (&["quota", "get", "a", "a:1", "--url", "a:1"], "--url"),
        (&["ping", "a"], "tcp://host:port"),
        (&["ping", "--url", "ftp://a:1"], "http://host:port"),
        (&["bench", "http://a:1"], "tcp://host:port"),
        (&["bench", "--url", "a"], "ipc://path"),
        (
            &["bench", "start", "http://a:1", "--", "x"],
            "tcp://host:port",
        ),
        (&["bench"], "URL"),
        (&["bench", "start", "--", "x"], "URL"),
        (&["ping", "a:1", "--url", "a:1"], "--url"),
        (&["ping", "--timeout", "0"], "from 1ms"),
    ] {
        let output = kvtier(args);
        let said = lines(&output.stderr).join("\n");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(allowed), "{args:?}: {said}");
    }
}

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
fn a_second_server_on_one_port_says_so_and_nothing_else() {
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
fn a_host_that_is_not_found_is_told_so() {
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
    let line = complaint(&kvtier(&[&flags[..], &host].concat()), 1);
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
    let output = kvtier(&["server", "--config", path, "--check-config"]);
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
fn check_config_warns_of_what_the_machine_does_not_have() {
    let check = |flags: &[&str]| kvtier(&[&["server", "--check-config"], flags].concat());
    let small = check(&["--l1-size-gb", "0.01"]);
    assert!(small.status.success());
    assert!(!lines(&small.stdout).join("\n").contains("warning"));
    // With a pool that was asked for by name the server would not start.
    let large = ["--l1-size-gb", "1048576", "--shm-name", "asked"];
    let line = complaint(&check(&large), 1);
    assert!(
        line.contains("--shm-name asked: /dev/shm has room for"),
        "{line}"
    );
    let output = check(&["--cuda-driver", "off", "--gpu-executor", "kernel"]);
    let text = lines(&output.stdout).join("\n");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("\nno GPUs: this server runs with --cuda-driver off\n"));
    let told = "\nwarning: --gpu-executor: without effect, no GPU is used: this server runs with";
    assert!(text.contains(told), "{text}");
}

#[test]
fn what_memory_and_gpus_do_not_allow_is_refused_by_the_check_as_by_the_start() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "no library").unwrap();
    let pool = format!("kvtier_cli_check_{}", std::process::id());
    for (flags, told) in [
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
            "L1 of 1125899906842624 bytes (--l1-size-gb): ",
        ),
    ] {
        let start = [
            "server",
            "--log-level",
            "off",
            "--l1-size-gb",
            "0.05",
            "--shm-name",
            "",
            "--port",
            "0",
            "--http-port",
            "0",
        ];
        let start = [&start[..], flags].concat();
        let check = [&start[..], &["--check-config"]].concat();
        let line = complaint(&kvtier(&check), 1);
        assert!(
            line.starts_with(&format!("kvtier server: {told}")),
            "{line}"
        );
        assert_eq!(line, complaint(&kvtier(&start), 1));
    }
}

#[test]
fn flags_of_gpus_that_have_no_effect_are_named_at_the_start() {
    // Ends once it has looked for GPUs.
    let start = [
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
    let start = [
        &start[..],
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
fn check_config_looks_at_the_tiers_and_makes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (tier, file) = (directory.path().join("a/b"), directory.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let check = |adapter: &str| {
        let flags = ["server", "--check-config", "--l1-size-gb", "0.05"];
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
        let line = complaint(&output, 1);
        let told = format!("{} is no directory", file.display());
        assert!(line.contains("base_path") && line.contains(&told), "{line}");
    }
}

#[test]
fn who_stops_reading_ends_no_command_with_a_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["server", "--help"])
        .stdout(writer)
        .output()
        .unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn help_names_every_command() {
    let output = kvtier(&["--help"]);
    let text = lines(&output.stdout).join("\n");
    for command in ["server", "bench", "demo", "status", "ping"] {
        assert!(
            output.status.success() && text.contains(&format!("\n  {command} ")),
            "{text}"
        );
    }
}

#[test]
fn a_quota_that_has_no_effect_says_so() {
    let server = Server::start_with(&["--shm-name", ""]);
    let set = kvtier(&["quota", "set", "alice", "1GiB", "--url", &server.http]);
    assert!(set.status.success());
    assert_eq!(
        lines(&set.stderr)[1..],
        [
            "kvtier quota: no tier of the server has the eviction policy IsolatedLRU; this has no effect"
        ]
    );
}

#[test]
fn quotas_are_set_told_listed_and_taken_away() {
    let server = Server::start_with(&["--shm-name", "", "--eviction-policy", "IsolatedLRU"]);
    let quota = |args: &[&str]| {
        let place = ["--url", server.http.as_str()];
        kvtier(&[&["quota"], args, &place].concat())
    };
    let told = |args: &[&str]| {
        let output = quota(args);
        assert!(output.status.success(), "{:?}", lines(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(told(&["list"]), "no tenant has a quota\n");
    let set = [
        "set",
        "a b",
        "10GiB",
        "--reserved",
        "1MiB",
        "--tier-limit",
        "l1=32MiB",
    ];
    assert_eq!(told(&set), "a b: at most 10.00 GiB\n");
    let warned = lines(&quota(&["set", "_default", "unlimited"]).stderr);
    assert_eq!(
        warned,
        ["kvtier quota: the server has no --quota-file; a restart forgets this"]
    );
    let one: Value = serde_json::from_str(&told(&["get", "a b", "--json"])).unwrap();
    assert_eq!(
        (&one["exists"], &one["limit_gb"]),
        (&true.into(), &10.0.into())
    );
    let l1 = &one["tiers"]["l1"];
    assert_eq!(
        (&l1["limit_bytes"], &l1["reserved_bytes"]),
        (&(32 << 20).into(), &(1 << 20).into())
    );
    let text = told(&["get", "a b"]);
    for part in [
        "a b: at most 10.00 GiB in each tier",
        "32.00 MiB",
        "1.00 MiB",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let text = told(&["list"]);
    for part in [
        "a b",
        "10.00 GiB",
        "0 B / 32.00 MiB",
        "_default",
        "unlimited",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let all: Value = serde_json::from_str(&told(&["list", "--all", "--json"])).unwrap();
    assert_eq!(all["users"].as_object().unwrap().len(), 2);
    let status = kvtier(&["status", &server.http]);
    let expected = "quotas    soft, of l1, 2 tenants with one, all others unlimited, kept until the server ends";
    assert!(
        lines(&status.stdout).contains(&expected.to_owned()),
        "{:?}",
        lines(&status.stdout)
    );
    // What was listed is set again.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("listed");
    let (listed, file) = (told(&["list", "--all", "--json"]), file.to_str().unwrap());
    std::fs::write(file, &listed).unwrap();
    assert_eq!(told(&["delete", "a b"]), "a b: no quota any more\n");
    assert_eq!(told(&["delete", "a b"]), "a b: there was no quota\n");
    assert_eq!(told(&["import", file]), "2 quotas set\n");
    assert_eq!(told(&["list", "--all", "--json"]), listed);
    std::fs::write(
        file,
        r#"{"users": {"a b": {"limit_gb": 1}, "c": {"limit_gb": -1}}}"#,
    )
    .unwrap();
    let refused = complaint(&quota(&["import", file]), 1);
    assert!(
        refused.contains("refuses: 400, users.c: limit_gb must be non-negative"),
        "{refused}"
    );
    assert_eq!(told(&["list", "--all", "--json"]), listed);
    let lost = complaint(&quota(&["import", "/no/such/file"]), 1);
    assert!(lost.contains("/no/such/file cannot be read"), "{lost}");
    let told = complaint(&quota(&["set", "c", "1GiB", "--reserved", "2GiB"]), 1);
    assert!(
        told.contains("refuses: 400, l1: 2147483648 reserved bytes"),
        "{told}"
    );
    for (args, part) in [
        (["set", "a@b", "1GiB"], "must not contain '@'"),
        (["set", "a", "10"], "such as 512MiB, 10GiB"),
    ] {
        let output = quota(&args);
        assert_eq!(output.status.code(), Some(2));
        let said = lines(&output.stderr).join(" ");
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_quota_file_that_cannot_be_used_is_told_before_the_start() {
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
    let told = complaint(&check(), 1);
    assert!(
        told.contains("--quota-file") && told.contains("remove it"),
        "{told}"
    );
}
