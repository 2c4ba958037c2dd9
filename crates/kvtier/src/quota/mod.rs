//! `kvtier quota`: quotas of a server's tenants.

mod report;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use kvtier_common::error::{Error, Result};
use kvtier_core::object_key::check_cache_salt;
use kvtier_observe::api::{NewQuota, NewTierQuota, QuotaChange};
use kvtier_server::config::{GIB, Limit, parse_size};
use kvtier_server::quota::only_set;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client, typed};

/// Exit code of a change that succeeded without effect.
const NO_EFFECT: u8 = 3;

/// Tenants per request.
const PAGE_SIZE: usize = 1000;

/// Arguments of `kvtier quota`.
#[derive(Debug, Args)]
pub struct QuotaArgs {
    #[command(subcommand)]
    command: QuotaCommand,
}

/// Arguments for the server, and the form of the output.
#[derive(Debug, Args)]
struct ServerArgs {
    #[command(flatten)]
    address: HttpArgs,
    /// Print the server's answer unchanged, as JSON
    #[arg(long)]
    json: bool,
    /// Timeout of each request, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "10", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Debug, Subcommand)]
enum QuotaCommand {
    /// Set a tenant's quota; it replaces an earlier one.
    Set {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        /// Limit in each tier: unlimited, or a size such as 10GiB; a number without a unit is GiB
        limit: Limit,
        /// Share of each tier that other tenants cannot evict, such as 1GiB
        #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
        reserved: u64,
        /// Limit in one tier: l1=1GiB, fs-0=unlimited; may be repeated
        #[arg(long, value_name = "TIER=LIMIT", value_parser = of_tier::<Limit>)]
        tier_limit: Vec<(String, Limit)>,
        /// Reserved share in one tier: l1=1GiB; may be repeated
        #[arg(long, value_name = "TIER=SIZE", value_parser = of_tier_reserved)]
        tier_reserved: Vec<(String, u64)>,
        /// Exit with 0 instead of 3 if no tier of the server enforces quotas
        #[arg(long)]
        allow_ineffective: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Show a tenant's usage and limits.
    Get {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Remove a tenant's quota, so that --quota-default of the server applies.
    Delete {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Set the quotas of many tenants, all of them or none. Other tenants keep theirs.
    Import {
        /// JSON as printed by `kvtier quota list --json`; - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Exit with 0 instead of 3 if no tier of the server enforces quotas
        #[arg(long)]
        allow_ineffective: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// List the tenants that have a quota.
    List {
        /// List tenants with objects but without a quota too
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Checks a tenant's name; returns it as a part of a path.
fn salt(text: &str) -> Result<String> {
    if text.is_empty() {
        return Err(Error::refused("give _default for requests without a salt"));
    }
    if text.contains("://") {
        let what = "that is an address; give the tenant first, the server last or with --url";
        return Err(Error::refused(what));
    }
    check_cache_salt(text.strip_prefix('@').unwrap_or(text)).map_err(Error::refused)?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    let encode = |byte: u8| {
        if plain(byte) {
            char::from(byte).to_string()
        } else {
            format!("%{byte:02X}")
        }
    };
    Ok(text.bytes().map(encode).collect())
}

fn split(text: &str) -> Result<(String, &str)> {
    let parts = text.split_once('=').filter(|(tier, _)| !tier.is_empty());
    let (tier, size) = parts
        .ok_or_else(|| Error::refused("give the name of a tier, = and a size, as in l1=1GiB"))?;
    Ok((tier.to_owned(), size))
}

fn of_tier<T: std::str::FromStr<Err = Error>>(text: &str) -> Result<(String, T)> {
    let (tier, value) = split(text)?;
    Ok((tier, value.parse()?))
}

fn of_tier_reserved(text: &str) -> Result<(String, u64)> {
    let (tier, size) = split(text)?;
    Ok((tier, parse_size(size)?))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

fn limit_gb(limit: Limit) -> kvtier_observe::api::Limit {
    kvtier_observe::api::Limit::new(limit.0.map(gib))
}

/// Runs the command. Exit code 1, with one line on stderr, if the server refuses or does not answer; 3 for a change
/// without effect.
pub fn run(args: &QuotaArgs) -> anyhow::Result<ExitCode> {
    let outcome = match &args.command {
        QuotaCommand::Set {
            salt,
            limit,
            reserved,
            tier_limit,
            tier_reserved,
            allow_ineffective,
            server,
        } => {
            let body = body(*limit, *reserved, tier_limit, tier_reserved);
            let report = |change: &QuotaChange| report::set(change, *reserved);
            server
                .ask("PUT", &format!("/quota/{salt}"), Some(&json!(body)))
                .and_then(|answer| changed(server, &answer, report, *allow_ineffective))
        }
        QuotaCommand::Get { salt, server } => server
            .ask("GET", &format!("/quota/{salt}"), None)
            .and_then(|answer| server.print(&answer, report::tenant)),
        QuotaCommand::Delete { salt, server } => server
            .ask("DELETE", &format!("/quota/{salt}"), None)
            .and_then(|answer| changed(server, &answer, report::change, true)),
        QuotaCommand::Import {
            file,
            allow_ineffective,
            server,
        } => import(server, file, *allow_ineffective),
        QuotaCommand::List { all, server } => list(server, *all),
    };
    match outcome {
        Ok(code) => Ok(code),
        Err(error) => {
            out::complain("quota", format!("{error:#}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn body(
    limit: Limit,
    reserved: u64,
    limits: &[(String, Limit)],
    shares: &[(String, u64)],
) -> NewQuota {
    let mut tiers: BTreeMap<String, NewTierQuota> = BTreeMap::new();
    for (tier, limit) in limits {
        tiers.entry(tier.clone()).or_default().limit_gb = Some(limit_gb(*limit));
    }
    for (tier, share) in shares {
        tiers.entry(tier.clone()).or_default().reserved_gb = Some(gib(*share));
    }
    NewQuota {
        limit_gb: limit_gb(limit),
        reserved_gb: gib(reserved),
        tiers,
    }
}

fn import(server: &ServerArgs, file: &Path, allow_ineffective: bool) -> anyhow::Result<ExitCode> {
    let text = if file.as_os_str() == "-" {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(file)
    };
    let text = text.with_context(|| format!("{} cannot be read", file.display()))?;
    let mut body: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", file.display()))?;
    // Most of a listing is read-only.
    if let Some(users) = body.get_mut("users").and_then(Value::as_object_mut) {
        only_set(users);
    }
    let answer = server.ask("PUT", "/quota", Some(&body))?;
    changed(server, &answer, report::import, allow_ineffective)
}

fn changed(
    server: &ServerArgs,
    answer: &Value,
    report: impl FnOnce(&QuotaChange) -> String,
    allow_ineffective: bool,
) -> anyhow::Result<ExitCode> {
    let change: QuotaChange = typed(server.address.url(), answer)?;
    if change.persisted == Some(false) {
        out::complain(
            "quota",
            "the server has neither --state-dir nor --quota-file; a restart forgets this",
        );
    }
    let has_effect = change.enforced != Some(false);
    if !has_effect {
        out::complain(
            "quota",
            "no tier of the server has the eviction policy IsolatedLRU; this has no effect until the server has --eviction-policy IsolatedLRU",
        );
    }
    let printed = server.print(answer, report)?;
    Ok(if has_effect || allow_ineffective {
        printed
    } else {
        ExitCode::from(NO_EFFECT)
    })
}

fn list(server: &ServerArgs, all: bool) -> anyhow::Result<ExitCode> {
    let (mut users, mut token) = (Map::new(), String::new());
    loop {
        let path = format!("/quota?page_size={PAGE_SIZE}&all={all}{token}");
        let mut page = server.ask("GET", &path, None)?;
        let Value::Object(some) = page["users"].take() else {
            anyhow::bail!(
                "{} lists no tenants; is it a kvtier server?",
                server.address.url()
            );
        };
        users.extend(some);
        match page["next_page_token"].as_str() {
            Some(next) => token = format!("&page_token={next}"),
            None => break,
        }
    }
    server.print(&json!({ "users": users }), report::list)
}

impl ServerArgs {
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let client = Client::new(self.address.url(), &self.access, self.timeout)?;
        client.json(method, path, body)
    }

    fn print<T: DeserializeOwned>(
        &self,
        answer: &Value,
        report: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<ExitCode> {
        let text = if self.json {
            out::json(answer)
        } else {
            report(&typed(self.address.url(), answer)?)
        };
        writeln!(out::stdout(), "{text}").context("stdout")?;
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_are_encoded_in_paths() {
        for (text, path) in [
            ("alice", "alice"),
            ("_default", "_default"),
            ("..", "%2E%2E"),
            ("a b?#%", "a%20b%3F%23%25"),
            ("é", "%C3%A9"),
            ("@_default", "%40_default"),
        ] {
            assert_eq!(salt(text).as_deref(), Ok(path));
        }
        for text in ["", "a/b", "a@b", "a\\b", &"x".repeat(129)] {
            assert!(salt(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tiers_have_limits_of_their_own() {
        let limits = [
            of_tier("l1=512MiB").unwrap(),
            of_tier("fs-0=unlimited").unwrap(),
        ];
        let shares = [of_tier_reserved("l1=256MiB").unwrap()];
        let expected = json!({
            "limit_gb": 10.0,
            "reserved_gb": 0.0,
            "tiers": { "l1": { "limit_gb": 0.5, "reserved_gb": 0.25 }, "fs-0": { "limit_gb": "unlimited" } },
        });
        let body = body(Limit(Some(10 * GIB)), 0, &limits, &shares);
        assert_eq!(json!(body), expected);
        for text in ["", "l1", "=1GiB", "l1=", "l1=x"] {
            assert!(of_tier::<Limit>(text).is_err(), "{text}");
        }
    }
}
