//! `kvtier explain`: why a lookup of a prompt misses.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use kvtier_observe::api::{ChunkRun, ExplainRequest, ExplainedLookup, ExplainedRow, Explanation};
use serde_json::{Value, json};

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client, typed};

/// Arguments of `kvtier explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    #[command(flatten)]
    server: HttpArgs,
    /// Token ids of the prompt: a JSON list or numbers between blanks or commas, or the answer of vLLM's /tokenize; - for standard input
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// The model: the full name of its workers, or what is before its #
    #[arg(long, value_name = "NAME")]
    model: String,
    /// The tenant's cache salt [default: none]
    #[arg(long, value_name = "SALT")]
    cache_salt: Option<String>,
    /// Tokens per chunk of the engine [default: that of the model's workers]
    #[arg(long, value_name = "TOKENS")]
    chunk_size: Option<u64>,
    /// Workers of the engine that share the model's KV [default: those of the model's engines]
    #[arg(long, value_name = "WORKERS")]
    world_size: Option<u32>,
    /// Print the server's answer unchanged, as JSON
    #[arg(long)]
    json: bool,
    /// Timeout, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "30", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

/// Prints the explanation. Exit code 1, with one line on stderr, if the server refuses or does not answer.
pub fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let request = ExplainRequest {
        model_name: args.model.clone(),
        world_size: args.world_size,
        token_ids: read_tokens(&args.tokens)?,
        cache_salt: args.cache_salt.clone(),
        chunk_size: args.chunk_size,
    };
    let client = Client::new(args.server.url(), &args.access, args.timeout)?;
    let answer = client.json("POST", "/cache/explain", Some(&json!(request)))?;
    let shown = if args.json {
        out::json(&answer) + "\n"
    } else {
        report(&typed(args.server.url(), &answer)?)
    };
    write!(out::stdout(), "{shown}").context("stdout")?;
    Ok(ExitCode::SUCCESS)
}

fn read_tokens(path: &Path) -> anyhow::Result<Vec<u32>> {
    let (name, text) = if path.as_os_str() == "-" {
        (
            "standard input".into(),
            std::io::read_to_string(std::io::stdin()),
        )
    } else {
        (path.display().to_string(), std::fs::read_to_string(path))
    };
    let text = text.with_context(|| format!("--tokens: {name} cannot be read"))?;
    parse_tokens(&text).with_context(|| format!("--tokens: {name}"))
}

/// Token ids as a JSON list, as `tokens` of a JSON object, or as numbers between blanks or commas.
fn parse_tokens(text: &str) -> anyhow::Result<Vec<u32>> {
    let allowed = "allowed: token ids from 0 to 4294967295";
    let tokens: Vec<u32> = match serde_json::from_str(text) {
        Ok(Value::Object(mut fields)) => {
            let tokens = fields
                .remove("tokens")
                .context("the object has no field tokens")?;
            serde_json::from_value(tokens).context(format!("tokens: {allowed}"))?
        }
        Ok(list @ Value::Array(_)) => serde_json::from_value(list).context(allowed)?,
        _ => {
            let words = text.split(|c: char| c.is_whitespace() || c == ',');
            let words = words.filter(|word| !word.is_empty());
            let parse = |word: &str| {
                let clipped: String = word.chars().take(20).collect();
                word.parse()
                    .with_context(|| format!("{clipped:?} is not a token id; {allowed}"))
            };
            words.map(parse).collect::<Result<_, _>>()?
        }
    };
    ensure!(!tokens.is_empty(), "there are no token ids; {allowed}");
    Ok(tokens)
}

fn report(explanation: &Explanation) -> String {
    let mut out = format!("{}\n", explanation.summary);
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<10}{text}");
    };
    let Explanation {
        model_name,
        world_size,
        chunk_size,
        tokens,
        chunks,
        ..
    } = explanation;
    line(
        "model",
        format!("{model_name}, world size {world_size}, chunks of {chunk_size} tokens"),
    );
    let rest = tokens.saturating_sub(chunks * chunk_size);
    if rest > 0 {
        line(
            "",
            format!("the last {rest} of {tokens} tokens are no whole chunk, and not looked for"),
        );
    }
    let others = explanation.model_names.iter();
    let others: Vec<_> = others.filter(|name| *name != model_name).collect();
    for name in others {
        line("", format!("there is also {name}"));
    }
    for row in &explanation.rows {
        line("", String::new());
        line("ranks", row_name(row));
        for run in &row.runs {
            line("", run_line(run, *chunks));
        }
    }
    let remembered = explanation.remembered_seconds.iter();
    for (place, seconds) in remembered {
        if let Some(seconds) = seconds {
            line(
                "memory",
                format!("evictions from {place} are remembered for the last {seconds} s"),
            );
        }
    }
    if !explanation.recent_lookups.is_empty() {
        line("", String::new());
        line(
            "lookups",
            "of this tenant and model, the latest first".to_owned(),
        );
        for lookup in &explanation.recent_lookups {
            line("", lookup_line(lookup));
        }
    }
    // Lines without a name have no trailing blanks.
    let lines: Vec<_> = out.lines().map(str::trim_end).collect();
    lines.join("\n") + "\n"
}

fn row_name(row: &ExplainedRow) -> String {
    let workers: Vec<_> = row.workers.iter().map(ToString::to_string).collect();
    let window = row.window.map_or_else(String::new, |window| {
        format!(", only the last {window} chunks")
    });
    let layout = match row.layout_fingerprint.trim_start_matches('0') {
        "" => "unknown",
        _ => &row.layout_fingerprint,
    };
    format!(
        "{}; object group {}, layout {layout}{window}",
        workers.join(", "),
        row.object_group_id
    )
}

fn run_line(run: &ChunkRun, chunks: u64) -> String {
    let width = chunks.saturating_sub(1).to_string().len();
    let (first, last) = (run.first_chunk, run.first_chunk + run.chunks.max(1) - 1);
    let end = run.first_token + run.tokens.max(1) - 1;
    format!(
        "chunks {first:>width$} to {last:>width$} (tokens {} to {end}): {}",
        run.first_token, run.text
    )
}

fn lookup_line(lookup: &ExplainedLookup) -> String {
    let start = if lookup.same_start {
        "this prompt's first chunk"
    } else {
        "another first chunk"
    };
    let outcome = match &lookup.refused {
        Some(refused) => format!("looked for nothing: {refused}"),
        None => format!("found {} of {} tokens", lookup.hit_tokens, lookup.tokens),
    };
    format!(
        "{} s ago: {outcome}; {start}; {}",
        lookup.seconds_ago, lookup.model_name
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_in_each_form() {
        for text in [
            "[1, 2, 4294967295]",
            "1 2\n4294967295\n",
            "1,2,4294967295",
            r#"{"count": 3, "tokens": [1, 2, 4294967295]}"#,
        ] {
            assert_eq!(parse_tokens(text).unwrap(), [1, 2, u32::MAX], "{text}");
        }
        assert_eq!(parse_tokens("7").unwrap(), [7]);
    }

    #[test]
    fn wrong_tokens_are_named() {
        for (text, error) in [
            ("", "there are no token ids"),
            ("[]", "there are no token ids"),
            ("{}", "no field tokens"),
            ("[1, -1]", "from 0 to 4294967295"),
            ("[1.5]", "from 0 to 4294967295"),
            (r#"{"tokens": "x"}"#, "tokens: allowed"),
            ("1 two 3", "\"two\" is not a token id"),
            ("4294967296", "\"4294967296\" is not a token id"),
        ] {
            let found = format!("{:#}", parse_tokens(text).unwrap_err());
            assert!(found.contains(error), "{text}: {found}");
        }
    }
}
