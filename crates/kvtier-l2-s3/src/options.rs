//! Options of a bucket.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::S3Adapter;
use super::http::Server;
use super::sign::Credentials;
use kvtier_l2::net::host_and_port;
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, ConfigError, L2Error, Registry,
    config::{Fallback, Interval, Key, MAX_CAPACITY_GB, Options, Shape, WITHOUT_EFFECT},
    tls,
};

/// Smallest part of an upload that S3 takes.
const MIN_PART: u64 = 5 << 20;

/// Server and name of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BucketPlace {
    /// The host that answers, and its port.
    pub(super) server: Server,
    /// Header `host`.
    pub(super) authority: String,
    pub(super) bucket: String,
    /// `/bucket`, or empty if the host's name has it.
    pub(super) base: String,
}

/// Options of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Options {
    pub(super) place: BucketPlace,
    pub(super) region: String,
    /// Put before each key with an `@`, unless it is empty.
    pub(super) key_prefix: String,
    /// `None` is the usual chain.
    pub(super) credentials: Option<Credentials>,
    /// Profile of the chain.
    pub(super) profile: Option<String>,
    /// Objects of more bytes are moved in parts of these.
    pub(super) multipart_bytes: u64,
    /// Requests in flight.
    pub(super) max_connections: usize,
    /// Headers of new objects: storage class and encryption.
    pub(super) object_headers: Vec<(&'static str, String)>,
    /// Objects without a layout are loaded too.
    pub(super) trust_missing_layout: bool,
    /// Objects without a checksum are misses.
    pub(super) require_checksum: bool,
    /// Time for a connection, TLS included.
    pub(super) connection_timeout: Duration,
    /// Longest silence of a server.
    pub(super) request_timeout: Duration,
}

impl S3Options {
    pub(super) fn of(config: &AdapterConfig) -> Result<Self, ConfigError> {
        let options = &config.options;
        let text = |key| options.find::<&str>(key).map(str::to_owned);
        let seconds = |key| Duration::from_secs_f64(options.get(key));
        let headers = [
            ("x-amz-storage-class", text("storage_class")),
            (
                "x-amz-server-side-encryption",
                text("server_side_encryption"),
            ),
            (
                "x-amz-server-side-encryption-aws-kms-key-id",
                text("kms_key_id"),
            ),
        ];
        let headers = headers.into_iter();
        let credentials = text("aws_access_key_id").zip(text("aws_secret_access_key"));
        Ok(Self {
            place: place(options)?,
            region: options.get("s3_region"),
            key_prefix: options.get("key_prefix"),
            credentials: credentials.map(|(id, secret)| Credentials {
                access_key_id: id,
                secret_access_key: secret,
                session_token: text("aws_session_token"),
                expires_at: None,
            }),
            profile: text("aws_profile"),
            multipart_bytes: options.get("multipart_bytes"),
            max_connections: options.get("max_connections"),
            object_headers: headers
                .filter_map(|(name, value)| Some((name, value?)))
                .collect(),
            trust_missing_layout: options.get("trust_missing_layout"),
            require_checksum: config.guards.require_checksum,
            connection_timeout: seconds("connection_timeout"),
            request_timeout: seconds("request_timeout"),
        })
    }
}

/// Whether no bucket's name can stand before this host.
fn takes_paths_only(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok() || host == "localhost"
}

fn is_bucket(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    (3..=63).contains(&name.len())
        && name.chars().all(plain)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// The place that the keys name.
pub(super) fn place(options: &Options) -> Result<BucketPlace, ConfigError> {
    const ENDPOINT: &str = "bucket.host or bucket.host:port, or host:port with s3_bucket; no path, \
        and disable_tls instead of http://";
    let endpoint = options.get::<&str>("s3_endpoint");
    let endpoint = endpoint.strip_prefix("s3://").unwrap_or(endpoint);
    let endpoint = endpoint.strip_suffix('/').unwrap_or(endpoint);
    let is_plain = options.get("disable_tls");
    let default = if is_plain { 80 } else { 443 };
    let Some((host, port)) = host_and_port(endpoint, default) else {
        return Err(options.refuse("s3_endpoint", ENDPOINT));
    };
    let (mut server_host, mut authority) = (host.clone(), endpoint.to_owned());
    let (bucket, base) = match options.find::<&str>("s3_bucket") {
        None => {
            let bucket = host.split_once('.').map(|(bucket, _)| bucket);
            let Some(bucket) = bucket.filter(|_| !takes_paths_only(&host)) else {
                let allowed =
                    "bucket.host; for an address or a name without a bucket also s3_bucket";
                return Err(options.refuse("s3_endpoint", allowed));
            };
            (bucket.to_owned(), String::new())
        }
        Some(bucket) if !is_bucket(bucket) => {
            let allowed = "the name of a bucket: 3 to 63 of letters, digits, . - and _";
            return Err(options.refuse("s3_bucket", allowed));
        }
        Some(bucket) => {
            let is_path = match options.get::<&str>("path_style") {
                "true" => true,
                "false" => false,
                _ => takes_paths_only(&host),
            };
            if is_path {
                (bucket.to_owned(), format!("/{bucket}"))
            } else if host.parse::<IpAddr>().is_ok() {
                let allowed = "true or auto: a bucket's name cannot stand before an address";
                return Err(options.refuse("path_style", allowed));
            } else {
                server_host = format!("{bucket}.{host}");
                authority = format!("{bucket}.{endpoint}");
                (bucket.to_owned(), String::new())
            }
        }
    };
    Ok(BucketPlace {
        server: Server {
            host: server_host,
            port,
            tls: (!is_plain).then(|| tls::client(options)),
        },
        authority,
        bucket,
        base,
    })
}

const KEYS: &[Key] = &[
    Key::text(
        "s3_endpoint",
        "bucket.host or bucket.host:port, as LMCache has it, with or without s3:// before it; with s3_bucket, host or host:port",
    )
    .required(),
    Key::text("s3_region", "Region that requests are signed for").required(),
    Key::text("s3_bucket", "Name of the bucket, if s3_endpoint does not begin with it"),
    Key::of(
        "path_style",
        Shape::OneOf(&["auto", "true", "false"]),
        "Whether the bucket of s3_bucket is in the path instead of the host's name; auto: for an address and localhost",
    )
    .or(Fallback::Text("auto")),
    Key::of(
        "key_prefix",
        Shape::AnyText,
        "Put before each key, with an @ behind it; LMCache finds only keys without one",
    )
    .or(Fallback::Text("")),
    Key::switch("disable_tls", "Plain HTTP"),
    tls::CA,
    Key::text("aws_access_key_id", "Access key; without it the usual chain of credentials"),
    Key::text("aws_secret_access_key", "Its secret"),
    Key::text("aws_session_token", "Token of temporary ones"),
    Key::text("aws_profile", "Profile of the chain; if unset, AWS_PROFILE, and without that default"),
    MAX_CAPACITY_GB,
    Key::integer(
        "max_connections",
        1,
        4096,
        "Requests in flight, each on a connection of its own; fewer while the server asks for less",
    )
    .or(Fallback::Integer(64)),
    Key::integer(
        "multipart_bytes",
        MIN_PART as i64,
        5 << 30,
        "Objects of more bytes are stored and loaded in parts of these, several at a time",
    )
    .unit("bytes")
    .or(Fallback::Integer(8 << 20)),
    Key::text("storage_class", "Storage class of new objects, such as INTELLIGENT_TIERING"),
    Key::of(
        "server_side_encryption",
        Shape::OneOf(&["AES256", "aws:kms"]),
        "Encryption of new objects by the server; unset is the bucket's",
    ),
    Key::text("kms_key_id", "Key of server_side_encryption aws:kms"),
    Key::switch(
        "trust_missing_layout",
        "Load objects that have no layout in their metadata, such as those of LMCache; only if all engines of a model that \
         write there agree in type, block size and form of its pages, CPU engines also in processor and release",
    ),
    Key::number(
        "connection_timeout",
        Interval::above(0.0).up_to(3600.0),
        "Time for a connection, TLS included",
    )
    .unit("s")
    .or(Fallback::Number(5.0)),
    Key::number(
        "request_timeout",
        Interval::above(0.0).up_to(3600.0),
        "Longest silence of a server that has to answer; then the connection is closed",
    )
    .unit("s")
    .or(Fallback::Number(10.0)),
    Key::integer("s3_num_io_threads", 1, i64::MAX, WITHOUT_EFFECT)
        .or(Fallback::Integer(64)),
    Key::switch("s3_prefer_http2", "LMCache's; changes nothing, as HTTP/1.1 is used")
        .or(Fallback::Switch(true)),
    Key::switch("s3_enable_s3express", "LMCache's; only false"),
];

fn check(options: &Options) -> Result<(), ConfigError> {
    place(options)?;
    let is_given = |key: &str| options.find::<&str>(key).is_some();
    if options.get("s3_enable_s3express") {
        let allowed = "false: directory buckets of S3 Express are not supported, they sign by sessions of their own";
        return Err(options.refuse("s3_enable_s3express", allowed));
    }
    let region = options.get::<&str>("s3_region");
    if !super::client::is_region(region) {
        return Err(options.refuse("s3_region", "a region such as us-east-1"));
    }
    match (
        is_given("aws_access_key_id"),
        is_given("aws_secret_access_key"),
    ) {
        (true, false) => {
            return Err(options.refuse("aws_secret_access_key", "the secret of aws_access_key_id"));
        }
        (false, true) => {
            return Err(options.refuse("aws_access_key_id", "the key of aws_secret_access_key"));
        }
        (false, false) if is_given("aws_session_token") => {
            return Err(options.refuse("aws_access_key_id", "the key of aws_session_token"));
        }
        _ => {}
    }
    if options.get::<&str>("key_prefix").contains(['@', '\0']) {
        return Err(options.refuse("key_prefix", "a text without @, which ends it"));
    }
    let encryption = options.find::<&str>("server_side_encryption");
    if is_given("kms_key_id") && encryption != Some("aws:kms") {
        return Err(options.refuse("server_side_encryption", "aws:kms with kms_key_id"));
    }
    for key in [
        "aws_access_key_id",
        "aws_session_token",
        "storage_class",
        "kms_key_id",
    ] {
        let value = options.find::<&str>(key).unwrap_or_default();
        if !value.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(options.refuse(key, "printable ASCII without spaces"));
        }
    }
    Ok(())
}

fn ineffective(config: &AdapterConfig, given: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    let options = &config.options;
    let is_plain = options.get("disable_tls");
    let has_own_keys = options.find::<&str>("aws_access_key_id").is_some();
    let lines = [
        (
            !config.persist_enabled,
            "persist_enabled changes nothing: objects stay when the server stops",
        ),
        (
            given("checksums"),
            "checksums changes nothing: each object has a checksum in its metadata",
        ),
        (
            given("s3_num_io_threads"),
            "s3_num_io_threads changes nothing: max_connections bounds the requests in flight",
        ),
        (
            given("s3_prefer_http2") && options.get("s3_prefer_http2"),
            "s3_prefer_http2 changes nothing: HTTP/1.1 is used, with several connections",
        ),
        (
            given("path_style") && !given("s3_bucket"),
            "path_style changes nothing without s3_bucket: the bucket is in the host's name",
        ),
        (
            given("tls_ca") && is_plain,
            "tls_ca changes nothing with disable_tls",
        ),
        (
            given("aws_profile") && has_own_keys,
            "aws_profile changes nothing with aws_access_key_id",
        ),
    ];
    let ineffective = lines.into_iter().filter(|(applies, _)| *applies);
    ineffective.map(|(_, line)| line).collect()
}

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = S3Options::of(config)
        .map_err(|error| L2Error::new(kvtier_l2::ErrorKind::Refused, error.to_string()))?;
    Ok(Arc::new(S3Adapter::open(&options)))
}

/// LMCache's `s3`.
pub const S3: AdapterType = AdapterType::new(
    "s3",
    "Keeps each object under a key of one S3 bucket; other servers and LMCache can use it at the same time",
    KEYS,
    open,
)
.check(check)
.ineffective(ineffective);
