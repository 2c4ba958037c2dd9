//! `kvtier quota`.

use serde_json::Value;

use super::{Server, complaint, kvtier, lines};

#[test]
fn quota_without_effect_is_reported() {
    let server = Server::start_with(&["--shm-name", ""]);
    let args = ["quota", "set", "alice", "1", "--url", &server.http];
    let set = kvtier(&args);
    assert_eq!(set.status.code(), Some(3));
    assert_eq!(lines(&set.stdout), ["alice: at most 1.00 GiB"]);
    let allowed = kvtier(&[&args[..], &["--allow-ineffective"]].concat());
    assert!(allowed.status.success());
    assert_eq!(
        lines(&set.stderr)[1..],
        [
            "kvtier quota: no tier of the server has the eviction policy IsolatedLRU; this has no effect until the server has --eviction-policy IsolatedLRU"
        ]
    );
}

// proves: docs/compare.md#command-line
#[test]
fn quotas_are_set_shown_listed_and_removed() {
    let server = Server::start_with(&["--shm-name", "", "--eviction-policy", "IsolatedLRU"]);
    let quota = |args: &[&str]| {
        let place = ["--url", server.http.as_str()];
        kvtier(&[&["quota"], args, &place].concat())
    };
    let stdout = |args: &[&str]| {
        let output = quota(args);
        assert!(output.status.success(), "{:?}", lines(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(stdout(&["list"]), "no tenant has a quota\n");
    let set = [
        "set",
        "a b",
        "10GiB",
        "--reserved",
        "1MiB",
        "--tier-limit",
        "l1=32MiB",
    ];
    assert_eq!(stdout(&set), "a b: at most 10.00 GiB, 1.00 MiB reserved\n");
    let warned = lines(&quota(&["set", "_default", "unlimited"]).stderr);
    assert_eq!(
        warned,
        [
            "kvtier quota: the server has neither --state-dir nor --quota-file; a restart forgets this"
        ]
    );
    let one: Value = serde_json::from_str(&stdout(&["get", "a b", "--json"])).unwrap();
    assert_eq!(
        (&one["exists"], &one["limit_gb"]),
        (&true.into(), &10.0.into())
    );
    let l1 = &one["tiers"]["l1"];
    assert_eq!(
        (&l1["limit_bytes"], &l1["reserved_bytes"]),
        (&(32 << 20).into(), &(1 << 20).into())
    );
    let text = stdout(&["get", "a b"]);
    for part in [
        "a b: at most 10.00 GiB in each tier",
        "32.00 MiB",
        "1.00 MiB",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let text = stdout(&["list"]);
    for part in [
        "a b",
        "10.00 GiB",
        "0 B / 32.00 MiB, 1.00 MiB reserved",
        "_default",
        "unlimited",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let all: Value = serde_json::from_str(&stdout(&["list", "--all", "--json"])).unwrap();
    assert_eq!(all["users"].as_object().unwrap().len(), 2);
    let status = kvtier(&["status", &server.http]);
    let expected = "quotas    soft, of l1, 2 tenants have one, all others unlimited, kept until the server ends";
    assert!(
        lines(&status.stdout).contains(&expected.to_owned()),
        "{:?}",
        lines(&status.stdout)
    );
    // The listed quotas are set again.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("listed");
    let (listed, file) = (stdout(&["list", "--all", "--json"]), file.to_str().unwrap());
    std::fs::write(file, &listed).unwrap();
    assert_eq!(stdout(&["delete", "a b"]), "a b: quota removed\n");
    assert_eq!(stdout(&["delete", "a b"]), "a b: there was no quota\n");
    assert_eq!(stdout(&["import", file]), "2 quotas set\n");
    assert_eq!(stdout(&["list", "--all", "--json"]), listed);
    std::fs::write(
        file,
        r#"{"users": {"a b": {"limit_gb": 1}, "c": {"limit_gb": -1}}}"#,
    )
    .unwrap();
    let refused = complaint(&quota(&["import", file]), 1);
    assert!(
        refused.contains("refuses: 400, users.c.limit_gb: -1; allowed: GiB from 0"),
        "{refused}"
    );
    assert_eq!(stdout(&["list", "--all", "--json"]), listed);
    let lost = complaint(&quota(&["import", "/no/such/file"]), 1);
    assert!(lost.contains("/no/such/file cannot be read"), "{lost}");
    let message = complaint(&quota(&["set", "c", "1GiB", "--reserved", "2GiB"]), 1);
    assert!(
        message.contains("refuses: 400, l1: 2GiB reserved is more than the limit of 1GiB"),
        "{message}"
    );
    for (args, part) in [
        (["set", "a@b", "1GiB"], "must not contain '@'"),
        (["set", "a", "10PB"], "such as 512MiB, 10GiB"),
        (["set", "http://h:1", "a"], "the server last or with --url"),
    ] {
        let output = quota(&args);
        assert_eq!(output.status.code(), Some(2));
        let said = lines(&output.stderr).join(" ");
        assert!(said.contains(part), "{said}");
    }
}
