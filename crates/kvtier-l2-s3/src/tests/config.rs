//! Options: what is accepted, and what a refusal says.

use serde_json::{Value as Json, json};

use kvtier_l2::{AdapterConfig, Registry};

use crate::S3;
use crate::options::place;

pub(super) fn parse(keys: Json) -> Result<AdapterConfig, String> {
    let mut all = json!({"type": "s3", "s3_endpoint": "kv.s3.example", "s3_region": "eu-west-1"});
    for (key, value) in keys.as_object().unwrap() {
        all[key] = value.clone();
    }
    Registry::of(&[S3])
        .parse(&all)
        .map_err(|error| error.to_string())
}

fn place_of(keys: Json) -> (String, u16, String, String, String, bool) {
    let place = place(&parse(keys).unwrap().options).unwrap();
    let server = place.server;
    (
        server.host,
        server.port,
        place.authority,
        place.bucket,
        place.base,
        server.tls.is_some(),
    )
}

#[test]
fn places_of_the_peer_and_of_path_style() {
    let text = str::to_owned;
    let peers = |port, authority: &str, tls| {
        (
            text("kv.s3.example"),
            port,
            text(authority),
            text("kv"),
            text(""),
            tls,
        )
    };
    assert_eq!(place_of(json!({})), peers(443, "kv.s3.example", true));
    let keys = json!({"s3_endpoint": "s3://kv.s3.example:9000", "disable_tls": true});
    assert_eq!(place_of(keys), peers(9000, "kv.s3.example:9000", false));
    let keys = json!({"s3_endpoint": "s3.example", "s3_bucket": "kvb"});
    let (host, _, authority, bucket, base, _) = place_of(keys);
    assert_eq!((&*host, &*authority), ("kvb.s3.example", "kvb.s3.example"));
    assert_eq!((&*bucket, &*base), ("kvb", ""));
    for (endpoint, host) in [
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:80", "::1"),
        ("localhost:80", "localhost"),
    ] {
        let keys = json!({"s3_endpoint": endpoint, "s3_bucket": "kvb", "disable_tls": true});
        let expected = (
            text(host),
            80,
            text(endpoint),
            text("kvb"),
            text("/kvb"),
            false,
        );
        assert_eq!(place_of(keys), expected);
    }
    let keys = json!({"s3_endpoint": "minio", "s3_bucket": "kvb", "path_style": "true"});
    assert_eq!(
        place_of(keys),
        (
            text("minio"),
            443,
            text("minio"),
            text("kvb"),
            text("/kvb"),
            true
        )
    );
}

#[test]
fn refusals_name_key_value_and_what_is_allowed() {
    for (keys, parts) in [
        (
            json!({"s3_endpoint": "127.0.0.1:80"}),
            ["s3_endpoint", "127.0.0.1:80", "s3_bucket"],
        ),
        (
            json!({"s3_endpoint": "bucket"}),
            ["s3_endpoint", "bucket", "s3_bucket"],
        ),
        (
            json!({"s3_endpoint": "http://a.b"}),
            ["s3_endpoint", "http://a.b", "disable_tls"],
        ),
        (
            json!({"s3_endpoint": "a.b:0"}),
            ["s3_endpoint", "a.b:0", "bucket.host"],
        ),
        (
            json!({"s3_endpoint": "a.b/c"}),
            ["s3_endpoint", "a.b/c", "no path"],
        ),
        (
            json!({"s3_endpoint": "a.b\r\nx: y"}),
            ["s3_endpoint", "a.b", "bucket.host"],
        ),
        (json!({"s3_bucket": "a/b"}), ["s3_bucket", "a/b", "3 to 63"]),
        (
            json!({"s3_endpoint": "10.0.0.1", "s3_bucket": "abc", "path_style": "false"}),
            ["path_style", "false", "auto"],
        ),
        (
            json!({"path_style": "maybe"}),
            ["path_style", "maybe", "auto, true or false"],
        ),
        (
            json!({"s3_region": "a b"}),
            ["s3_region", "a b", "us-east-1"],
        ),
        (
            json!({"s3_enable_s3express": true}),
            ["s3_enable_s3express", "true", "not supported"],
        ),
        (
            json!({"aws_access_key_id": "a"}),
            ["aws_secret_access_key", "***", "the secret"],
        ),
        (
            json!({"aws_secret_access_key": "sEcReT"}),
            ["aws_access_key_id", "***", "the key"],
        ),
        (
            json!({"aws_session_token": "t"}),
            ["aws_access_key_id", "***", "aws_session_token"],
        ),
        (
            json!({"key_prefix": "a@b"}),
            ["key_prefix", "a@b", "without @"],
        ),
        (
            json!({"kms_key_id": "k"}),
            ["server_side_encryption", "null", "aws:kms"],
        ),
        (
            json!({"server_side_encryption": "x"}),
            ["server_side_encryption", "x", "AES256 or aws:kms"],
        ),
        (
            json!({"storage_class": "a b"}),
            ["storage_class", "a b", "printable"],
        ),
        (
            json!({"multipart_bytes": 1000}),
            ["multipart_bytes", "1000", "5242880"],
        ),
        (
            json!({"max_connections": 0}),
            ["max_connections", "0", "1 to 4096"],
        ),
        (
            json!({"connection_timeout": 0}),
            ["connection_timeout", "0", "above 0"],
        ),
    ] {
        let refused = parse(keys.clone()).expect_err(&keys.to_string());
        assert!(
            parts.iter().all(|part| refused.contains(part)),
            "{refused}: {parts:?}"
        );
        assert!(!refused.contains("sEcReT"), "{refused}");
    }
}

#[test]
fn keys_without_effect_are_warned_about() {
    assert_eq!(parse(json!({})).unwrap().warnings, Vec::<String>::new());
    for (keys, part) in [
        (
            json!({"s3_num_io_threads": 8}),
            "s3_num_io_threads changes nothing",
        ),
        (
            json!({"s3_prefer_http2": true}),
            "s3_prefer_http2 changes nothing",
        ),
        (
            json!({"persist_enabled": false}),
            "persist_enabled changes nothing",
        ),
        (json!({"path_style": "true"}), "path_style changes nothing"),
        (
            json!({"tls_ca": "/ca.pem", "disable_tls": true}),
            "tls_ca changes nothing",
        ),
        (json!({"checksums": 5}), "checksums changes nothing"),
    ] {
        let warnings = parse(keys).unwrap().warnings;
        assert!(
            warnings.iter().any(|line| line.contains(part)),
            "{warnings:?}: {part}"
        );
    }
    assert_eq!(
        parse(json!({"s3_prefer_http2": false})).unwrap().warnings,
        Vec::<String>::new()
    );
}

#[test]
fn secrets_are_shown_nowhere() {
    let keys = json!({"aws_access_key_id": "AKID1", "aws_secret_access_key": "sEcReT", "aws_session_token": "ToKeN"});
    let config = parse(keys).unwrap();
    let shown = format!("{config:?}");
    assert!(
        !["AKID1", "sEcReT", "ToKeN"]
            .iter()
            .any(|part| shown.contains(part)),
        "{shown}"
    );
}
