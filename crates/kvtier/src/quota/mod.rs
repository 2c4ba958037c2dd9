//! `kvtier quota`: what tenants may have on a server.

mod report;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use kvtier_core::object_key::check_cache_salt;
use kvtier_server::config::{GIB, Limit, parse_size};
use kvtier_server::quota::only_set;
use serde_json::{Map, Value, json};

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client, refusal};

/// Exit code of a change that was made and has no effect.
const NO_EFFECT: u8 = 3;

/// Tenants asked for at once.
const PAGE: usize = 1000;

/// Arguments of `kvtier quota`.
#[derive(Debug, Args)]
pub struct QuotaArgs {
    #[command(subcommand)]
    command: QuotaCommand,
}

/// Where to ask, and how to tell.
#[derive(Debug, Args)]
struct Asking {
    #[command(flatten)]
    server: HttpArgs,
    /// Print what the server says as it is, JSON
    #[arg(long)]
    json: bool,
    /// How long to wait for an answer, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "10", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Debug, Subcommand)]
enum QuotaCommand {
    /// Set a tenant's quota, in place of the one before.
    Set {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        /// Most it may have in each tier: unlimited, or a size such as 10GiB; a number alone is GiB
        limit: Limit,
        /// What others cannot evict of it in each tier, such as 1GiB
        #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
        reserved: u64,
        /// Another limit, or another reserved share, in one tier: l1=1GiB, fs-0=unlimited; may be given several times
        #[arg(long, value_name = "TIER=LIMIT", value_parser = of_tier::<Limit>)]
        tier_limit: Vec<(String, Limit)>,
        /// Another reserved share in one tier: l1=1GiB; may be given several times
        #[arg(long, value_name = "TIER=SIZE", value_parser = of_tier_reserved)]
        tier_reserved: Vec<(String, u64)>,
        /// Exit with 0 in place of 3 where no tier of the server limits tenants
        #[arg(long)]
        allow_ineffective: bool,
        #[command(flatten)]
        asking: Asking,
    },
    /// Show what a tenant uses, and its limits.
    Get {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        #[command(flatten)]
        asking: Asking,
    },
    /// Remove a tenant's quota, so that --quota-default of the server holds.
    Delete {
        /// The tenant's cache salt; _default for requests without
        #[arg(value_parser = salt)]
        salt: String,
        #[command(flatten)]
        asking: Asking,
    },
    /// Set the quotas of many tenants, all of them or none. Tenants that are not named keep theirs.
    Import {
        /// JSON as `kvtier quota list --json` prints it; - is the standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Exit with 0 in place of 3 where no tier of the server limits tenants
        #[arg(long)]
        allow_ineffective: bool,
        #[command(flatten)]
        asking: Asking,
    },
    /// List the tenants that have a quota.
    List {
        /// Also those that have objects and no quota
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        asking: Asking,
    },
}

/// A salt that a tenant can have, as a part of a path.
fn salt(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("give _default for requests without a salt".into());
    }
    if text.contains("://") {
        return Err(
            "that is an address; the tenant comes first, the server last or as --url".into(),
        );
    }
    // The tenant whose salt is really _default.
    if text != "@_default" {
        check_cache_salt(text).map_err(|error| error.to_string())?;
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    let encode = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    Ok(text.bytes().map(encode).collect())
}

fn split(text: &str) -> Result<(String, &str), String> {
    let parts = text.split_once('=').filter(|(tier, _)| !tier.is_empty());
    let (tier, size) = parts.ok_or("give the name of a tier, = and a size, as in l1=1GiB")?;
    Ok((tier.to_owned(), size))
}

fn of_tier<T: std::str::FromStr<Err = String>>(text: &str) -> Result<(String, T), String> {
    let (tier, value) = split(text)?;
    Ok((tier, value.parse()?))
}

fn of_tier_reserved(text: &str) -> Result<(String, u64), String> {
    let (tier, size) = split(text)?;
    Ok((tier, parse_size(size)?))
}

fn gib(bytes: u64) -> Value {
    json!(bytes as f64 / GIB as f64)
}

fn limit_gb(limit: Limit) -> Value {
    limit.0.map_or_else(|| json!("unlimited"), gib)
}

/// Does what is asked for. Exit code 1, with one line on stderr, when the server refuses or is not there; 3 for a change
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
            asking,
        } => {
            let body = body(*limit, *reserved, tier_limit, tier_reserved);
            asking
                .ask("PUT", &format!("/quota/{salt}"), Some(body))
                .map(|told| changed(asking, &told, report::change, *allow_ineffective))
        }
        QuotaCommand::Get { salt, asking } => asking
            .ask("GET", &format!("/quota/{salt}"), None)
            .map(|told| asking.print(&told, report::tenant)),
        QuotaCommand::Delete { salt, asking } => asking
            .ask("DELETE", &format!("/quota/{salt}"), None)
            .map(|told| changed(asking, &told, report::change, true)),
        QuotaCommand::Import {
            file,
            allow_ineffective,
            asking,
        } => import(asking, file, *allow_ineffective),
        QuotaCommand::List { all, asking } => list(asking, *all),
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
) -> Value {
    let mut tiers: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (tier, limit) in limits {
        let own = tiers.entry(tier).or_default();
        own.insert("limit_gb".into(), limit_gb(*limit));
    }
    for (tier, share) in shares {
        let own = tiers.entry(tier).or_default();
        own.insert("reserved_gb".into(), gib(*share));
    }
    json!({ "limit_gb": limit_gb(limit), "reserved_gb": gib(reserved), "tiers": tiers })
}

fn import(asking: &Asking, file: &Path, allow_ineffective: bool) -> anyhow::Result<ExitCode> {
    let text = match file.as_os_str() == "-" {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(file),
    };
    let text = text.with_context(|| format!("{} cannot be read", file.display()))?;
    let mut body: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))?;
    // What is only told takes most of a listing.
    if let Some(users) = body.get_mut("users").and_then(Value::as_object_mut) {
        only_set(users);
    }
    let told = asking.ask("PUT", "/quota", Some(body))?;
    Ok(changed(asking, &told, report::import, allow_ineffective))
}

fn changed(
    asking: &Asking,
    told: &Value,
    report: fn(&Value) -> String,
    allow_ineffective: bool,
) -> ExitCode {
    if told["persisted"] == json!(false) {
        out::complain(
            "quota",
            "the server has no --quota-file; a restart forgets this",
        );
    }
    let has_effect = told["enforced"] != json!(false);
    if !has_effect {
        let text = "no tier of the server has the eviction policy IsolatedLRU; this has no effect";
        out::complain("quota", text);
    }
    let printed = asking.print(told, report);
    match has_effect || allow_ineffective {
        true => printed,
        false => ExitCode::from(NO_EFFECT),
    }
}

fn list(asking: &Asking, all: bool) -> anyhow::Result<ExitCode> {
    let (mut users, mut token) = (Map::new(), String::new());
    loop {
        let path = format!("/quota?page_size={PAGE}&all={all}{token}");
        let mut page = asking.ask("GET", &path, None)?;
        let Value::Object(some) = page["users"].take() else {
            anyhow::bail!("{} lists no tenants; is it kvtier?", asking.server.url());
        };
        users.extend(some);
        match page["next_page_token"].as_str() {
            Some(next) => token = format!("&page_token={next}"),
            None => break,
        }
    }
    Ok(asking.print(&json!({ "users": users }), report::list))
}

impl Asking {
    /// The answer to a request that was granted.
    fn ask(&self, method: &str, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        let body = body.map(|body| body.to_string());
        let (status, text) = Client::new(self.server.url(), &self.access, self.timeout)?
            .request(method, path, body)?;
        if status != 200 {
            anyhow::bail!("{} refuses: {}", self.server.url(), refusal(status, &text));
        }
        let told: Option<Value> = serde_json::from_str(&text).ok();
        told.filter(Value::is_object)
            .with_context(|| format!("{} answers with no JSON object", self.server.url()))
    }

    fn print(&self, told: &Value, report: fn(&Value) -> String) -> ExitCode {
        let mut out = out::stdout();
        let printed = match self.json {
            true => writeln!(out, "{}", out::json(told)),
            false => writeln!(out, "{}", report(&out::shown(told))),
        };
        match printed {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                out::complain("quota", format!("stdout: {error}"));
                ExitCode::FAILURE
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_become_a_part_of_a_path() {
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
    fn tiers_have_their_own() {
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
        assert_eq!(body(Limit(Some(10 * GIB)), 0, &limits, &shares), expected);
        for text in ["", "l1", "=1GiB", "l1=", "l1=x"] {
            assert!(of_tier::<Limit>(text).is_err(), "{text}");
        }
    }
}
