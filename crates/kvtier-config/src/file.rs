//! Reading the command line and the TOML file behind `--config` through one parser.

use std::collections::HashMap;
use std::ffi::OsString;
use std::num::ParseIntError;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches as _};

use kvtier_common::error::{Error, Result};
use kvtier_l2::redact;

use super::command::{check_paths, command};
use super::flags::ServerArgs;
use super::given::Given;
use super::resolve::resolve;
use super::{Parsed, RunMode, ServerConfig, effect, gpu, peer, show};

/// Keys that are named for one that is unknown.
const SUGGESTIONS: usize = 3;

/// What a command line has and no file: how the process runs.
const ONLY_ARGUMENTS: &[&str] = &["config", "check-config", "help", "version"];

/// How much they look like it at least, of 1.
const LIKENESS: f64 = 0.7;

/// The first line of a clap error, which names the flag, the value and what is allowed.
fn one_line(error: &clap::Error) -> Error {
    let text = error.to_string();
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first).trim();
    // Of a whole number it says nothing but that a character is wrong.
    let source = std::error::Error::source(error);
    let first = match source.and_then(|source| source.downcast_ref::<ParseIntError>()) {
        Some(source) => first.replace(&source.to_string(), "give a whole number"),
        None => first.to_owned(),
    };
    let hint = lines
        .map(str::trim)
        .find(|line| line.starts_with("[possible values"))
        .unwrap_or_default();
    let tip = text
        .lines()
        .map(str::trim)
        .find_map(|line| line.strip_prefix("tip: "))
        .map_or_else(String::new, |tip| format!("; {tip}"));
    Error::refused(format!("{first} {hint}").trim().to_string() + &tip)
}

fn matches(args: &[OsString]) -> Result<ArgMatches, clap::Error> {
    command().try_get_matches_from(
        std::iter::once(OsString::from("kvtier server")).chain(args.iter().cloned()),
    )
}

pub(super) fn parse_with_file(args: Vec<OsString>) -> Result<Parsed> {
    let given = match matches(&args) {
        Ok(given) => given,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            return Ok(Parsed::Print(error.to_string()));
        }
        Err(error) => return Err(one_line(&error)),
    };
    let mut has_file = false;
    let merged = match given.get_one::<std::path::PathBuf>("config") {
        None => given,
        Some(path) => {
            has_file = true;
            let mut all = flags_of_file(path, &given)?;
            all.extend(args.iter().cloned());
            matches(&all).map_err(|error| one_line(&error).context(path.display().to_string()))?
        }
    };
    check_paths(&command(), &merged)?;
    let ignored = [peer::ignored(&merged), effect::without_effect(&merged)].concat();
    let values = show::values(&merged);
    let given = Given::new(args, has_file, &values);
    let args = ServerArgs::from_arg_matches(&merged).map_err(|error| one_line(&error))?;
    if args.strict_flags && !ignored.is_empty() {
        let flags = ignored.join(", ");
        return Err(Error::refused(format!(
            "--strict-flags: without effect: {flags}"
        )));
    }
    let mode = if args.check_config {
        RunMode::Check
    } else {
        RunMode::Start
    };
    Ok(Parsed::Run {
        config: Box::new(ServerConfig {
            shown: redact::value(&values),
            given,
            gpu_flags: gpu::given(&merged),
            ..resolve(args, ignored)?
        }),
        mode,
    })
}

/// The file's keys as flags, without those that the command line gives itself.
fn flags_of_file(path: &Path, given: &ArgMatches) -> Result<Vec<OsString>> {
    flags_in_file(path, given).map_err(|error| error.context(path.display().to_string()))
}

fn flags_in_file(path: &Path, given: &ArgMatches) -> Result<Vec<OsString>> {
    let text = std::fs::read_to_string(path).map_err(|error| Error::io("cannot be read", error))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(0, |span| {
            text[..span.start.min(text.len())].lines().count().max(1)
        });
        Error::refused(format!(
            "line {line}: {}",
            error.message().lines().next().unwrap_or_default()
        ))
    })?;
    let command = command();
    let mut flags = Vec::new();
    let mut seen = HashMap::new();
    for (key, value) in &table {
        let name = key.replace('_', "-");
        if let Some(other) = seen.insert(name.clone(), key) {
            return Err(Error::refused(format!(
                "keys {other:?} and {key:?} are the same; give one of them"
            )));
        }
        let known = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(&name) && !ONLY_ARGUMENTS.contains(&name.as_str()));
        let negated = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(&format!("no-{name}")));
        let Some(arg) = known.or(negated) else {
            let near = match nearest(&command, name.trim_start_matches('-')).join(", ") {
                near if near.is_empty() => near,
                near => format!("perhaps {near}; "),
            };
            return Err(Error::refused(format!(
                "key {key:?} is unknown; {near}`kvtier server --help` lists all"
            )));
        };
        let on_command_line = |id: &str| {
            given.try_contains_id(id).unwrap_or(false)
                && given.value_source(id) == Some(clap::parser::ValueSource::CommandLine)
        };
        let twin = format!("no_{}", arg.get_id().as_str().replace('-', "_"));
        if on_command_line(arg.get_id().as_str()) || on_command_line(&twin) {
            continue;
        }
        match value {
            toml::Value::Boolean(on) if !arg.get_action().takes_values() => {
                match (*on, known.is_some(), negated.is_some()) {
                    (true, true, _) => flags.push(format!("--{name}").into()),
                    (false, _, true) => flags.push(format!("--no-{name}").into()),
                    _ => {}
                }
            }
            toml::Value::Array(values) => {
                for value in values {
                    flags.push(format!("--{name}").into());
                    flags.push(flag_value(value).map_err(|kind| {
                        Error::refused(format!("key {key:?}: {kind} is not allowed"))
                    })?);
                }
            }
            value if arg.get_action().takes_values() => {
                flags.push(format!("--{name}").into());
                flags.push(flag_value(value).map_err(|kind| {
                    Error::refused(format!("key {key:?}: {kind} is not allowed"))
                })?);
            }
            value => {
                return Err(Error::refused(format!(
                    "key {key:?}: {value} is not allowed; give true or false"
                )));
            }
        }
    }
    Ok(flags)
}

/// The keys that look most like `name`, if any does.
fn nearest<'a>(command: &'a Command, name: &str) -> Vec<&'a str> {
    let mut names: Vec<_> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long())
        .filter(|name| !ONLY_ARGUMENTS.contains(name))
        .collect();
    let likeness = |other: &&str| strsim::jaro_winkler(other, name);
    names.retain(|name| likeness(name) > LIKENESS);
    names.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
    names.truncate(SUGGESTIONS);
    names
}

/// One TOML value as the text a flag takes. A table becomes JSON, so that adapters can be written as TOML tables.
fn flag_value(value: &toml::Value) -> Result<OsString, &'static str> {
    match value {
        toml::Value::String(text) => Ok(text.into()),
        toml::Value::Integer(number) => Ok(number.to_string().into()),
        toml::Value::Float(number) => Ok(number.to_string().into()),
        toml::Value::Table(_) => serde_json::to_string(value)
            .map(Into::into)
            .map_err(|_| "this table"),
        toml::Value::Boolean(_) => Err("true or false"),
        toml::Value::Datetime(_) => Err("a date"),
        toml::Value::Array(_) => Err("a list inside a list"),
    }
}
