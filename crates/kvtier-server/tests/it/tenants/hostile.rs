//! Salts that are chosen to break something: each is refused or a tenant like any other.

use kvtier_client::{InstanceId, Scope};

use super::bed::{files, lookup, read, server, store};
use crate::l2::settle;
use crate::log::Log;
use crate::support::{prompt, range};

/// Salts that LMCache refuses, and why this server does.
fn refused() -> Vec<(String, &'static str)> {
    let mut salts = Vec::new();
    for bad in ['@', '/', '\\', '\0'] {
        for salt in [
            format!("{bad}"),
            format!("a{bad}"),
            format!("{bad}b"),
            format!("a{bad}b"),
        ] {
            salts.push((salt, "a cache salt must not contain"));
        }
    }
    for salt in ["../../etc/passwd", "a@0@ff", "..\\..", "ü/ü"] {
        salts.push((salt.into(), "a cache salt must not contain"));
    }
    for salt in [
        "x".repeat(129),
        "x".repeat(4096),
        "é".repeat(129),
        "😀".repeat(1024),
    ] {
        salts.push((salt, "a cache salt has at most 128 characters"));
    }
    salts
}

/// Salts that LMCache takes, odd as they are.
fn taken() -> Vec<String> {
    let mut salts: Vec<String> = [
        "..",
        ".",
        "...",
        "_default",
        "other",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u{1}",
        "\u{7f}",
        "\u{202e}",
        "\u{feff}",
        "null",
        "-SEP-",
        ".data",
        "x.data",
        "%2F",
        "%00",
        "#",
        "~",
        "~12345678",
        "*",
        "?",
        "$(id)",
        "a b",
        "a\u{301}",
        "á",
        "ﬀ",
        "ff",
        "A",
        "a",
        "0",
        "00",
        "h1-0123456789abcdef0123456789abcdef",
        "{\"a\":1}",
        "\"",
        "'",
        "<b>",
        ":",
        "|",
    ]
    .map(String::from)
    .into();
    // A hash, as it stands before a salt in a name.
    salts.push("ab".repeat(32));
    // As long as can be, in characters and in bytes.
    salts.push("x".repeat(128));
    salts.push("😀".repeat(128));
    salts
}

#[test]
fn invalid_tenant_names_are_refused_everywhere() {
    let log = Log::listen();
    let directory = tempfile::tempdir().unwrap();
    let server = server(directory.path(), &[]);
    let scope = Scope::new("hostile/refused");
    let mut worker = server.engine_driven(1, &scope);
    let mut pages = server.lmcache_driven(2, &Scope::new("hostile/pages"));
    let (prompt, chunks) = (prompt(1, 2), range(0..2));
    store(&mut worker, "", &prompt, 1);
    settle(&server);
    let before = server.readings();
    for (salt, _) in refused() {
        assert_eq!(lookup(&mut worker, &salt, &prompt, "r"), 0, "{salt:?}");
        let scope = Scope::new("hostile/refused").with_salt(&salt);
        let key = scope.worker_key(0, &prompt, chunks.clone(), "r");
        let (id, connection) = (InstanceId(1), worker.connection());
        connection.free_lookup_locks(&key).unwrap();
        let granted = connection.prepare_store(&key, id).unwrap().target.unwrap();
        assert!(granted.slots.is_empty() && granted.chunk_indices.is_empty());
        assert!(!connection.commit_store(&key, id, b"").unwrap());
        assert!(!connection.prepare_retrieve(&key, id).unwrap().success);
        connection.commit_retrieve(&key, id).unwrap();
        connection.end_session("r").unwrap();
        let scope = Scope::new("hostile/pages").with_salt(&salt);
        let key = scope.worker_key(0, &prompt, chunks.clone(), "r");
        let (id, connection) = (InstanceId(2), pages.connection());
        let blocks = [(0..8).collect()];
        assert!(!connection.store(&key, id, &blocks).unwrap());
        assert!(!connection.retrieve(&key, id, &blocks, 0).unwrap());
    }
    let after = server.readings();
    assert_eq!(after.objects, before.objects);
    assert_eq!(
        (after.leased_objects, after.staged_bytes, after.sessions),
        (0, 0, 0)
    );
    assert_eq!(files(directory.path()).len(), 2);
    // The log says what was wrong, once a second.
    assert!(
        log.text().contains("a cache salt must not contain"),
        "{}",
        log.text()
    );
    // A client without a salt still has its objects.
    assert_eq!(read(&mut worker, "", &prompt, 1, "r"), 2);
    server.assert_sound();
}

#[test]
fn refusals_name_allowed_values() {
    for (salt, why) in refused() {
        let error = kvtier_client::proto::key::check_salt(&salt).unwrap_err();
        assert!(error.to_string().contains(why), "{salt:?}: {error}");
    }
}

#[test]
fn odd_salts_are_separate_in_every_tier() {
    let directory = tempfile::tempdir().unwrap();
    let model = "m/".repeat(40);
    let (prompt, salts) = (prompt(1, 2), taken());
    {
        let server = server(directory.path(), &[]);
        let mut worker = server.engine_driven(1, &Scope::new(&model));
        // No tenant finds what the others before it have stored.
        for (seed, salt) in salts.iter().enumerate() {
            assert_eq!(lookup(&mut worker, salt, &prompt, "r"), 0, "{salt:?}");
            store(&mut worker, salt, &prompt, seed as u64);
        }
        for (seed, salt) in salts.iter().enumerate() {
            assert_eq!(
                read(&mut worker, salt, &prompt, seed as u64, "r"),
                2,
                "{salt:?}"
            );
        }
        settle(&server);
        server.assert_sound();
    }
    assert_eq!(files(directory.path()).len(), 2 * salts.len());
    // From their names and files alone.
    let server = server(directory.path(), &[]);
    let mut worker = server.engine_driven(1, &Scope::new(&model));
    for (seed, salt) in salts.iter().enumerate() {
        assert_eq!(
            read(&mut worker, salt, &prompt, seed as u64, "r"),
            2,
            "{salt:?}"
        );
    }
    assert_eq!(lookup(&mut worker, "", &prompt, "r"), 0);
    server.assert_sound();
}
